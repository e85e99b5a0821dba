"""What is typed in two places must be the same: neither is dropped without a word."""

from collections.abc import Iterable, Mapping
from typing import Any

from memplan.errors import MemplanError
from memplan.spec import Ladder, Rung

Named = dict[str, tuple[str, tuple[Any, ...]]]
"""Levers that one place names, each as typed and with its values."""


def check_rungs(ladder: Ladder, given: Mapping[str, Any]) -> None:
    """MemplanError where a rung of `ladder` and one of the options `given`, which were typed, name a lever otherwise.
    Over what a file says for all of its rungs a rung has the last word."""
    for rung in ladder.rungs:
        refuse_two(by_rung(rung, ladder.loss), by_options(ladder, given))


def by_rung(rung: Rung, losses: Iterable[str]) -> Named:
    """What `rung` names; its chunks of head and loss are a part of what `losses` say, where those are of that kind."""
    named: Named = {}
    if rung.ckpt is not None:
        named["ckpt"] = f"the rung {rung}", (rung.ckpt,)
    if rung.seq is not None:
        named["seq"] = f"the rung {rung}", (rung.seq,)
    if rung.loss_chunks is not None and not all(is_in_chunks(loss, rung.loss_chunks) for loss in losses):
        named["loss"] = f"the rung {rung}", (rung.loss_chunks,)
    return named


def is_in_chunks(loss: str, number: int) -> bool:
    """Whether a kind of loss is one in `number` chunks, or in as many as a rung says."""
    kind, _, count = loss.partition(":")
    return kind in ("chunked", "chunked-ckpt") and count in ("", str(number))


def by_options(ladder: Ladder, given: Mapping[str, Any]) -> Named:
    """What the options `given`, of which `ladder` was made, name."""
    values: dict[str, Any] = {name: getattr(ladder, name, given[name]) for name in given}
    return {
        name: (f"--{name} {given[name]}", value if isinstance(value, tuple) else (value,))
        for name, value in values.items()
    }


def by_sweep(axes: Mapping[str, tuple[Any, ...]], typed: Iterable[str]) -> Named:
    """What the axes of a sweep name, `typed` as they are."""
    texts = {text.partition("=")[0]: f"--sweep {text}" for text in typed}
    return {name: (texts[name], values) for name, values in axes.items()}


def refuse_two(one: Named, other: Named) -> None:
    """MemplanError for a lever that both name, with other values."""
    for name in sorted(one.keys() & other.keys()):
        (first, values), (second, others) = one[name], other[name]
        if values != others:
            raise MemplanError(
                f"{first[:1].upper()}{first[1:]} and {second} name {name} twice, and not the same.", "Leave one out."
            )


def by_size(rung: str | None, batch: int | None, chunks: int | None) -> Named:
    """What `--rung`, or `--batch` and `--chunks`, name of a step's size."""
    named: Named = {}
    if rung is not None:
        size = rung.partition("@")[0]
        named["batch"] = f"--rung {rung}", ()
        if "c" in size:
            named["chunks"] = f"--rung {rung}", ()
    for name, number in (("batch", batch), ("chunks", chunks)):
        if number is not None:
            named[name] = f"--{name} {number}", (number,)
    return named
