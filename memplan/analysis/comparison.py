"""What two results say about each other: one finding a rung and metric, and the exit code of all together."""

from dataclasses import dataclass, field
from typing import Any

from memplan.record import RungResult

LABELS = (
    "broke",
    "worse",
    "missing",
    "incomparable",
    "ambiguous",
    "insufficient",
    "fixed",
    "better",
    "new",
    "moved",
    "same",
)
"""How a finding can end, the worst first. `moved` is no verdict: a part while its whole holds, or bytes that do not
count."""
JUDGED = ("broke", "worse", "ambiguous", "fixed", "better", "same")
"""Labels that need both sides: a rung with one of them was compared."""
UNITS = ("bytes", "ns", "samples/s", "")
"""Units of a finding's numbers; the last is a status, which is a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One metric of one rung, before and after."""

    rung: str
    """Name with its checkpoint mode: `B12c6@full`."""
    name: str
    """The rung and whatever tells it from the others: model, loss, precision where those differ."""
    model: str
    """Model name."""
    run_id: str
    """Identity of the run: that of the new side, where there is one."""
    source: str
    """`measured`, `simulated` or `estimated`."""
    metric: str
    """`status`, `peak_allocated_bytes`, `peak_reserved_bytes`, `peak_used_bytes`, `between_steps_bytes`, `step_ns`,
    `samples_per_s`, `estimated_bytes`, `traced_bytes`; `phase:NAME` and `category:NAME` are details of the peak."""
    label: str
    """One of `LABELS`."""
    counts: bool = True
    """Whether it is a verdict of its own. What does not count explains another finding, or says the same once more."""
    base: int | float | str | None = None
    """Before: the largest over the repeats, of times the median over processes; None where there is none."""
    new: int | float | str | None = None
    """After."""
    unit: str = ""
    """One of `UNITS`."""
    change: float | None = None
    """New over base, less 1: above zero is more bytes, more time, or more samples a second."""
    interval: tuple[float, float] | None = None
    """Where the change lies, of times only."""
    num_base: int = 0
    """Processes behind `base`."""
    num_new: int = 0
    """Processes behind `new`."""
    why: str = ""
    """What to know about it, in one line without a full stop."""

    @property
    def delta(self) -> int | float | None:
        """New less base, where both are numbers."""
        if isinstance(self.base, int | float) and isinstance(self.new, int | float):
            return self.new - self.base
        return None

    @property
    def rank(self) -> tuple[int, int, float]:
        """Sorts the worst first: what counts, by its label, the largest change of those."""
        return not self.counts, LABELS.index(self.label), -abs(self.change or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two results side by side."""

    findings: tuple[Finding, ...]
    """The worst first."""
    base_name: str
    """What was called base: a folder, a file, a baseline."""
    new_name: str
    """What is held against it."""
    base_rows: tuple[RungResult, ...]
    """All rows of the base."""
    new_rows: tuple[RungResult, ...]
    """All rows that are held against them."""
    different: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Keys of the environments that differ, before and after, compared in spite of it or not."""
    warnings: tuple[str, ...] = ()
    """What to know before believing it, a sentence each."""
    commands: tuple[str, ...] = ()
    """What to type where the answer is ambiguous or too few processes were timed."""
    allow_missing: bool = False
    """Whether a rung that is gone is no failure."""
    strict: bool = False
    """Whether ambiguity and a stale baseline are failures."""
    nothing: str | None = None
    """Why there is nothing to judge, one sentence; None where there is something."""

    @property
    def counted(self) -> tuple[Finding, ...]:
        """Findings that are verdicts of their own."""
        return tuple(finding for finding in self.findings if finding.counts)

    def of(self, *labels: str) -> tuple[Finding, ...]:
        """Counted findings with one of these labels."""
        return tuple(finding for finding in self.counted if finding.label in labels)

    @property
    def num_compared(self) -> int:
        """Rungs of which something was judged."""
        return len({(finding.run_id, finding.source) for finding in self.of(*JUDGED)})

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Names of the base's rungs that nothing was held against: gone with their peak, or not comparable at all."""
        judged = {finding.name for finding in self.of(*JUDGED)}
        lost = [found for found in self.of("missing", "incomparable", "insufficient") if found.num_base]
        return tuple(dict.fromkeys(one.name for one in lost if one.label == "missing" or one.name not in judged))

    @property
    def is_stale(self) -> bool:
        """Whether something improved beyond its tolerance, so that the base would let half of it be lost again."""
        return bool(self.of("better", "fixed"))

    @property
    def exit_code(self) -> int:
        """0 nothing is worse; 1 something is worse, broke or is not covered any more (with `strict`: is ambiguous, or
        the base is stale); 3 one side measured nothing; 4 nothing of the two was comparable."""
        if self.nothing is not None or not self.counted:
            return 3
        if not self.num_compared:
            return 4
        if self.of("broke", "worse") or (self.uncovered and not self.allow_missing):
            return 1
        return int(self.strict and (self.is_stale or bool(self.of("ambiguous"))))
