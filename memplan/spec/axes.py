"""Axes of a sweep as a person types them: `batch=1:64`, `seq=1024:8192:1024`, `ckpt=none,full,selective`."""

from typing import Any

from memplan.errors import MemplanError, near_names

NUMBERS = ("batch", "chunks", "seq", "images", "suffix", "world")
FRACTIONS = ("dropout", "clip")
NAMES = (
    "ckpt", "loss", "optimizer", "update", "precision", "attention", "norm", "rows", "lora", "parallel", "workload",
)  # fmt: skip
MOST = 1_000_000
"""Values of one axis."""


def parse_axis(text: str) -> tuple[str, tuple[Any, ...]]:
    """The field of the step that `text` names, and its values; MemplanError when it is none or has none."""
    name, equals, rest = text.partition("=")
    if not equals or not rest:
        raise MemplanError(f"The sweep {text!r} has no values.", "Type --sweep batch=1:64 or --sweep ckpt=none,full.")
    if name in NUMBERS:
        return name, numbers(name, rest)
    if name in FRACTIONS:
        try:
            return name, tuple(float(value) for value in rest.split(","))
        except ValueError:
            raise MemplanError(f"The sweep {text!r} needs numbers.", f"Type --sweep {name}=0,0.1.") from None
    if name in NAMES:
        return name, tuple(rest.split(","))
    raise MemplanError(f"{name!r} cannot be swept.", near_names(name, (*NUMBERS, *FRACTIONS, *NAMES)))


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
        values += range(first, last + 1, step)
    return tuple(dict.fromkeys(values))
