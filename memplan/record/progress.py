"""What a climb is about to do, and what it says while it does it."""

from dataclasses import dataclass
from typing import Literal

from memplan.record.outcome import RungResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """An attempt that has not been made."""

    rung: str
    """Name with its checkpoint mode."""
    model: str
    """Model name."""
    repeat: int
    """Which repeat, from 1."""
    estimated_bytes: int | None
    """What the formulas say; None where there are none."""
    fate: str
    """What would become of it if it needed just that, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What goes on, for whoever watches."""

    number: int
    """Which attempt of the climb, from 1."""
    total: int
    """How many there are at most."""
    rung: str
    """Its name, with the repeat where there are several."""
    text: str
    """What it does, or how it ended."""
    kind: Literal["phase", "step", "end"]
    """A phase begins, a timed step is done, or the rung has ended."""
    left_s: float | None = None
    """About how many seconds the rest of the climb takes; None before the first rung has ended."""
    row: RungResult | None = None
    """The row, of a rung that has ended."""
