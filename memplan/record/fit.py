"""An estimate held against a limit, and one thing that was looked at on this machine."""

from dataclasses import dataclass

SEQ_STEP = 64
"""Tokens in which a longest sample is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether a run fits, and how much larger it could be."""

    gate_bytes: int | None
    """The gate that was asked for."""
    limit_bytes: int | None
    """The gate, or else what the card has beside CUDA's own context; None when nothing limits."""
    fits: bool | None
    """Whether the peak stays at or under the limit; None where nothing limits, and where an estimate stays under what a
    card has by less than fragments usually take, or than they take by the model of the allocator."""
    max_batch: int | None
    """Largest batch under the limit at the given number of chunks, 0 when none fits."""
    max_batch_unchunked: int | None
    """Largest batch under the limit in one chunk."""
    max_seq: int | None = None
    """Longest sample under the limit at the given batch, in steps of `SEQ_STEP` tokens; 0 when none fits, None where
    nobody looked."""
    may_not_fit: tuple[str, ...] = ()
    """Which of these sizes stay under what a card has by less than fragments usually take."""
    model_ends: tuple[str, ...] = ()
    """Which of these sizes end where the model takes no larger one, whatever the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that memplan needs or that changes its numbers."""

    name: str
    """What was looked at."""
    status: str
    """`ok`, `missing` or `note`."""
    found: str
    """What is there."""
    advice: str = ""
    """What to type when something should be done."""
