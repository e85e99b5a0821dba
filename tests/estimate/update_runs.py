"""Runs of `tiny` on a card, and the peaks of their phases by ledger and by trace."""

import dataclasses
from typing import Any

from samples import run_of

from memplan.backends.simulated import simulate
from memplan.estimate.reading import largest
from memplan.estimate.step import write_step
from memplan.spec import RunSpec
from memplan.spec.device import card

PHASES = ("forward", "loss", "backward", "optimizer")


def on_card(**step: Any) -> RunSpec:
    """A small run on an H100."""
    return dataclasses.replace(run_of(**{"seq": 32} | step), device=card("h100-80g"))


def peaks_by_ledger(run: RunSpec) -> dict[str, int]:
    """Largest bytes of each phase, what is recomputed counted to backward."""
    found = {phase: bytes_ for phase, (_, bytes_) in largest(write_step(run)).items()}
    return joined(found)


def peaks_by_trace(run: RunSpec) -> dict[str, int]:
    """The same by the real step on fake tensors."""
    return joined({phase: totals.allocated_bytes for phase, totals in simulate(run).steps.steady.phases.items()})


def joined(found: dict[str, int]) -> dict[str, int]:
    """Peaks of the phases that both tell of."""
    found["backward"] = max(found["backward"], found.pop("recompute", 0))
    return {phase: found[phase] for phase in PHASES if phase in found}
