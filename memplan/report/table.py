"""The neutral table: what each column is, and values; how it looks is the renderer's business."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

MISSING = "-"
"""Text of a value that is not there. It is never 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column."""

    key: str
    """Name in csv and json; its ending says the unit (`_bytes`, `_ns`, `_frac`)."""
    header: str
    """Name for people."""
    unit: str = ""
    """Unit that all its texts share, put under or behind the header; empty when each text carries its own."""
    align: Literal["left", "right"] = "right"
    """Numbers right, words left."""
    text: Callable[[Any], str] = str
    """Value to text; never asked for None."""
    hide_constant: bool = False
    """Leave the column out when all rows say the same, and say it once below."""
    gist: Callable[[Any], Any] | None = None
    """What of a value `hide_constant` compares, over the rows that have one, and what it says; all of it otherwise."""
    hide_empty: bool = False
    """Leave the column out when no row says anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns, one tuple of values a row in the same order, and what stands around them."""

    columns: tuple[Column, ...]
    """What the values are."""
    rows: tuple[tuple[Any, ...], ...]
    """The values; None where there is none."""
    title: str = ""
    """Above it."""
    footer: tuple[str, ...] = ()
    """Lines below it."""

    def folded(self) -> "Table":
        """This table without the columns that never vary or are empty; what they say becomes the first line below.
        Folding it again changes nothing, nor does it hide columns of a part of its rows."""
        constant = [
            index
            for index, column in enumerate(self.columns)
            if (column.hide_constant and len(self._gists(index)) <= 1)
            or (column.hide_empty and all(missing(row[index]) for row in self.rows))
        ]
        told = [
            f"{self.columns[index].header} {self.columns[index].text(gist)}"
            for index in constant
            for gist in self._gists(index)[:1]
            if not missing(gist)
        ]
        kept = [index for index in range(len(self.columns)) if index not in constant]
        return Table(
            columns=tuple(
                dataclasses.replace(self.columns[index], hide_constant=False, hide_empty=False) for index in kept
            ),
            rows=tuple(tuple(row[index] for index in kept) for row in self.rows),
            title=self.title,
            footer=(((", ".join(told)),) if told else ()) + self.footer,
        )

    def _gists(self, index: int) -> list[Any]:
        """What the rows say in a column, each different thing once."""
        gist, values = self.columns[index].gist, [row[index] for row in self.rows]
        return list(dict.fromkeys([gist(value) for value in values if not missing(value)] if gist else values))

    def between(self, before: Mapping[str, Any], behind: Mapping[str, Any]) -> "Table":
        """This table with columns of the same value in every row, by their keys, before and behind its own."""

        def columns(facts: Mapping[str, Any]) -> tuple[Column, ...]:
            return tuple(Column(key=key, header=key) for key in facts)

        return dataclasses.replace(
            self,
            columns=(*columns(before), *self.columns, *columns(behind)),
            rows=tuple((*before.values(), *row, *behind.values()) for row in self.rows),
        )

    def only(self, keys: Collection[str]) -> "Table":
        """This table without the columns whose keys are not among `keys`, and without what stands around it."""
        kept = [index for index, column in enumerate(self.columns) if column.key in keys]
        return Table(
            columns=tuple(self.columns[index] for index in kept),
            rows=tuple(tuple(row[index] for index in kept) for row in self.rows),
        )

    def led_by(self, keys: Sequence[str]) -> "Table":
        """This table with the columns of `keys`, as far as it has them, before the others."""
        order = {key: place for place, key in enumerate(keys)}
        places = sorted(range(len(self.columns)), key=lambda index: order.get(self.columns[index].key, len(order)))
        return dataclasses.replace(
            self,
            columns=tuple(self.columns[index] for index in places),
            rows=tuple(tuple(row[index] for index in places) for row in self.rows),
        )

    def cell(self, row: Sequence[Any], index: int) -> str:
        """Text of one value."""
        value = row[index]
        return MISSING if missing(value) else self.columns[index].text(value)

    def headers(self) -> list[str]:
        """Header of each column, its unit behind it."""
        return [column.header + (f" [{column.unit}]" if column.unit else "") for column in self.columns]

    def texts(self) -> list[list[str]]:
        """Texts of all rows."""
        return [[self.cell(row, index) for index in range(len(self.columns))] for row in self.rows]

    def records(self) -> list[dict[str, Any]]:
        """Rows as dicts of raw values by key; None where there is none."""
        keys = [column.key for column in self.columns]
        values = [[None if missing(value) else value for value in row] for row in self.rows]
        return [dict(zip(keys, row, strict=True)) for row in values]


def missing(value: Any) -> bool:
    """Whether there is no value: None, or a number that is none."""
    return value is None or value != value
