"""The largest moment of a test, and what it says when it is held against a gate and against an earlier one."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from memplan.units import format_bytes, format_percent

SHOWN_CHARS = 300
"""Characters of a test or a name that a message shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """A peak of a test."""

    test: str
    """The test's id."""
    name: str
    """Which of the test's peaks: `call` is the whole test."""
    witness: str
    """Who says so: `measured` or `traced`."""
    device: str
    """What was measured, or what the trace imagined: `cpu`, `NVIDIA H100 80GB HBM3`, `h100-80g`."""
    torch: str
    """Version of torch, its first two numbers."""
    num_bytes: int
    """Largest allocated bytes on top of those that were alive before: the same whatever ran before the test."""
    before_bytes: int = 0
    """Bytes alive before, where the device knows them; the CPU does not."""
    phases: Mapping[str, int] = field(default_factory=dict)
    """The same peak for each phase that was marked or guessed."""

    @property
    def source(self) -> str:
        """What has to be alike for two peaks to be compared: `measured cpu torch-2.13`."""
        return f"{self.witness} {self.device} torch-{self.torch}"

    @property
    def spoken(self) -> str:
        """The same in words."""
        return f"{self.witness} {'for' if self.witness == 'traced' else 'on'} {self.device}, torch {self.torch}"

    @property
    def whole_bytes(self) -> int:
        """Everything allocated at the peak, as far as is known."""
        return self.num_bytes + self.before_bytes

    @property
    def title(self) -> str:
        """Its test and name, safe to print."""
        return f"{shown(self.test)} ({shown(self.name)})"

    def __str__(self) -> str:
        return f"{self.title}: {format_bytes(self.num_bytes)} {self.spoken}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, which processes can send each other."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The peak that `to_dict` wrote."""
        return cls(**values)


def shown(text: str) -> str:
    """`text` in one line of at most `SHOWN_CHARS`, what does not show itself as its escape."""
    kept = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
    return kept if kept.isprintable() else kept.encode("unicode_escape").decode("ascii")


def over_gate(peak: Peak, gate_bytes: int) -> str | None:
    """A sentence where `peak` is above `gate_bytes`."""
    if peak.whole_bytes <= gate_bytes:
        return None
    before = f" ({format_bytes(peak.before_bytes)} of it alive before)" if peak.before_bytes else ""
    return (
        f"{peak.title}: the peak of {format_bytes(peak.whole_bytes)}{before} is over the gate of "
        f"{format_bytes(gate_bytes)} by {format_bytes(peak.whole_bytes - gate_bytes)}; {peak.spoken}."
    )


def against(peak: Peak, base_bytes: int, base_phases: Mapping[str, int]) -> tuple[str, str]:
    """`better`, `same` or `worse`, and the sentence that says so, empty where it is the same."""
    from memplan.analysis.memory_findings import TOLERANCE_BYTES, TOLERANCE_FRAC, grown, judge_bytes

    label = judge_bytes(base_bytes, peak.num_bytes, (TOLERANCE_FRAC, TOLERANCE_BYTES))
    if label == "same":
        return label, ""
    move = format_bytes(abs(peak.num_bytes - base_bytes))
    share = f" ({format_percent(peak.num_bytes / base_bytes - 1)})" if base_bytes else ""
    where = grown(dict(base_phases), dict(peak.phases))
    told = (
        f"{peak.title}: the peak of {format_bytes(peak.num_bytes)} is {move}{share} "
        f"{'above' if label == 'worse' else 'below'} the baseline's {format_bytes(base_bytes)}"
        f"{f': {where}' if where else ''}; {peak.spoken}."
    )
    return label, told
