"""Which rows of two results answer the same question."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memplan.analysis.surroundings import Different, machine_differences, told
from memplan.record import FINAL, WHOLE, RungResult
from memplan.spec.run import NEW_LEVERS

Key = tuple[str, str]
"""Run and source: rows that share it are repeats of each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One rung on both sides, or on one of them."""

    name: str
    """The rung and whatever tells it from the others."""
    base: tuple[RungResult, ...] = ()
    """Its repeats before; empty when it is new."""
    new: tuple[RungResult, ...] = ()
    """Its repeats now; empty when it is missing."""
    drift: str = ""
    """How the question itself differs, in words; empty where it is the same."""
    machine: Different = field(default_factory=dict)
    """Keys of the device that gave the same question two identities."""

    @property
    def shown(self) -> RungResult:
        """The row that speaks for the pair."""
        return (self.new or self.base)[0]


def pairs(base: Sequence[RungResult], new: Sequence[RungResult]) -> tuple[Pair, ...]:
    """Every rung of `base` and `new`, first by its run; then a rung of the same name and step on another device; then
    one of the same name whose step is the nearest, which is no longer the same question."""
    before, after = repeats(base), repeats(new)
    names = rung_names((*base, *new))
    twins = {key: key for key in after if key in before}
    for found in (_same_step, _nearest):
        taken = set(twins.values())
        free: dict[tuple[str, ...], dict[Key, RungResult]] = {}
        for key, rows in before.items():
            if key not in taken:
                free.setdefault(_words(rows[0]), {})[key] = rows[0]
        for key, rows in after.items():
            alike = free.get(_words(rows[0]), {})
            if key not in twins and (twin := found(rows[0], alike)) is not None:
                twins[key] = twin
                del alike[twin]
    matched = []
    for key, rows in after.items():
        others = before[twins[key]] if key in twins else ()
        drift, machine = "", {}
        if others and twins[key] != key:
            machine = machine_differences(others, rows)
            drift = step_drift(others[0], rows[0]) or ("" if machine else model_drift(others[0], rows[0]))
        elif others:
            drift = contradiction(others[0], rows[0])
        matched.append(Pair(name=names[key], base=others, new=rows, drift=drift, machine=machine))
    gone = before.keys() - set(twins.values())
    return (*matched, *(Pair(name=names[key], base=before[key]) for key in before if key in gone))


def repeats(rows: Iterable[RungResult]) -> dict[Key, tuple[RungResult, ...]]:
    """Rows by run and source, in the order of their repeats."""
    found: dict[Key, list[RungResult]] = {}
    for row in rows:
        found.setdefault((row.run_id, row.source), []).append(row)
    return {key: tuple(sorted(group, key=lambda row: row.repeat)) for key, group in found.items()}


def rung_names(rows: Sequence[RungResult]) -> dict[Key, str]:
    """A name for each run: its rung, and model, source and fields of the step where those of `rows` differ."""
    first = {key: group[0] for key, group in repeats(rows).items()}
    models = {row.model for row in first.values()}
    names = {}
    called: dict[tuple[str, str], list[RungResult]] = {}
    for row in first.values():
        called.setdefault((row.model, row.rung), []).append(row)
    for key, row in first.items():
        alike = called[row.model, row.rung]
        words = [row.model] if len(models) > 1 else []
        words.append(row.rung)
        varying = dict.fromkeys(name for other in alike for name in step_differences(row, other))
        words += [f"{name} {row.step.get(name)}" for name in varying]
        names[key] = " ".join(words + ([f"({row.source})"] if len({other.source for other in alike}) > 1 else []))
    return names


def step_differences(base: RungResult, new: RungResult) -> dict[str, tuple[Any, Any]]:
    """Fields of the step that differ; one that an older row does not have yet is at what it was before it was a
    choice."""
    found = {}
    for name in dict.fromkeys((*base.step, *new.step)):
        before, after = (_field(row, name) for row in (base, new))
        if before != after:
            found[name] = (base.step.get(name), new.step.get(name))
    return found


def step_drift(base: RungResult, new: RungResult) -> str:
    """How the steps differ, in words; empty where they do not."""
    return told(step_differences(base, new))


def contradiction(base: RungResult, new: RungResult) -> str:
    """What differs, in words, between two rows that say they are the same run; empty where nothing does."""
    named = {name: (getattr(base, name), getattr(new, name)) for name in ("model", "rung")}
    named = {name: values for name, values in named.items() if values[0] != values[1]}
    both = base.step.keys() & new.step.keys()
    return told(named | {name: at for name, at in step_differences(base, new).items() if name in both})


def model_drift(base: RungResult, new: RungResult) -> str:
    """What to say where the same words ask two questions on the same device."""
    return f"the model's own facts differ: they make run {base.run_id} before, {new.run_id} now"


def is_final(rows: Iterable[RungResult]) -> bool:
    """Whether one of `rows` says something about its rung."""
    return any(row.kind in FINAL and not is_empty(row) for row in rows)


def is_empty(row: RungResult) -> bool:
    """Whether `row` came to its end and tells neither bytes nor times: nothing can be held against it."""
    return row.kind in WHOLE and row.peak_allocated_bytes is None and not row.step_ns


def _field(row: RungResult, name: str) -> Any:
    plain = NEW_LEVERS.get(name, ())
    value = row.step.get(name, plain[0] if plain else None)
    return plain[0] if value in plain else value


def _words(row: RungResult) -> tuple[str, ...]:
    """What rows have to share before one may stand for the other."""
    return row.model, row.rung, row.source


def _same_step(row: RungResult, others: dict[Key, RungResult]) -> Key | None:
    return next((key for key, other in others.items() if not step_differences(other, row)), None)


def _nearest(row: RungResult, others: dict[Key, RungResult]) -> Key | None:
    return min(others, key=lambda key: len(step_differences(others[key], row)), default=None)
