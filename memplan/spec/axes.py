"""Axes of a sweep as a person types them: `batch=1:64`, `seq=1024:8192:1024`, `ckpt=none,full,selective`."""

from collections.abc import Callable, Iterable
from typing import Any

from memplan.errors import MemplanError, near_names
from memplan.spec.parallel import Parallel
from memplan.spec.rows import Rows
from memplan.spec.step import WORKLOADS, StepSpec

COUNTS = ("batch", "chunks", "seq", "world")
"""Whole numbers of 1 or more."""
NUMBERS = (*COUNTS, "images", "suffix")
FRACTIONS = ("dropout", "clip")
WITHOUT = {"clip": None, "lora": ""}
"""Levers that a step may be without, `clip=none,1.0`, with what stands there then."""
ALONE = ("ckpt", "loss", "optimizer", "update", "precision", "attention", "norm", "lora")
"""Levers of which every value goes with the plain step."""
NAMES = (*ALONE, "rows", "parallel", "workload", "model", "impl", "freeze", "gpu")
MOST = 1_000_000
"""Values of one axis."""


def parse_axes(texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """The values of each lever that `texts` name; MemplanError when one is named twice."""
    axes: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        name, values = parse_axis(text)
        if name in axes:
            raise MemplanError("The sweep names a lever twice.", "Type its values in one: --sweep batch=1:8,16,32.")
        axes[name] = values
    return axes


def parse_axis(text: str) -> tuple[str, tuple[Any, ...]]:
    """The field of the step that `text` names, and its values; MemplanError when it is none or has none."""
    name, equals, rest = text.partition("=")
    if not equals or not rest:
        raise MemplanError(f"The sweep {text!r} has no values.", "Type --sweep batch=1:64 or --sweep ckpt=none,full.")
    if name in NUMBERS:
        return name, numbers(name, rest)
    if name in FRACTIONS:
        try:
            fractions = tuple(plain(name, value, float) for value in rest.split(","))
        except ValueError:
            example = "none,1.0" if name in WITHOUT else "0,0.1"
            raise MemplanError(f"The sweep {text!r} needs numbers.", f"Type --sweep {name}={example}.") from None
        for fraction in fractions:
            check_value(name, fraction)
        return name, tuple(dict.fromkeys(fractions))
    if name in NAMES:
        values = tuple(dict.fromkeys(plain(name, value, str.strip) for value in rest.split(",")))
        for value in values:
            check_value(name, value)
        return name, values
    raise MemplanError(f"{name!r} cannot be swept.", near_names(name, (*NUMBERS, *FRACTIONS, *NAMES)))


def plain(name: str, text: str, read: Callable[[str], Any]) -> Any:
    """The value that `text` says, `none` of a lever that a step may be without."""
    if not text.strip():
        raise MemplanError(f"The sweep of {name} has an empty value.", f"Type --sweep {name}=A,B.")
    return WITHOUT[name] if name in WITHOUT and text.strip() == "none" else read(text)


def check_value(name: str, value: Any) -> None:
    """MemplanError unless the lever `name` may have `value` in some step; models and cards are looked up later."""
    if name in WITHOUT and value == WITHOUT[name]:
        return
    if name == "rows":
        Rows.parse(value)
    elif name == "parallel":
        Parallel.parse(value)
    elif name == "workload" and value not in WORKLOADS:
        raise MemplanError(f"Unknown workload {value!r}.", near_names(value, WORKLOADS))
    elif name in (*ALONE, *FRACTIONS):
        StepSpec(batch=1, seq=1, **{name: value})


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers of a list of values and of ranges `first:last` or `first:last:step`, the last one included."""
    values: list[int] = []
    for part in text.split(","):
        pieces = part.split(":")
        if len(pieces) > 3 or not all(piece.isascii() and piece.isdigit() for piece in pieces):
            raise MemplanError(f"{part!r} is no whole number and no range.", f"Type --sweep {name}=1:64 or 1:64:8.")
        first, last, step = (*map(int, pieces), *((int(pieces[0]),) if len(pieces) == 1 else ()), 1)[:3]
        if step < 1 or last < first or (last - first) // step >= MOST:
            raise MemplanError(f"{part!r} is an empty range, or too long.", f"Type --sweep {name}=1:64.")
        if name in COUNTS and first < 1:
            raise MemplanError(f"{name} is {first}; it must be 1 or more.", f"Type --sweep {name}=1:64.")
        values += range(first, last + 1, step)
    return tuple(dict.fromkeys(values))
