"""The answer: what a witness says about a run. Frozen dataclasses; every number says whose it is."""

from memplan.record.fit import Check, Fit
from memplan.record.memory import CATEGORIES, PHASES, Estimate, MemoryBreakdown, PhasePeak
from memplan.record.outcome import ParityReport, RungResult, TensorDifference, WindowPeak
from memplan.record.store import append_row, read_rows

__all__ = [
    "CATEGORIES",
    "PHASES",
    "Check",
    "Estimate",
    "Fit",
    "MemoryBreakdown",
    "ParityReport",
    "PhasePeak",
    "RungResult",
    "TensorDifference",
    "WindowPeak",
    "append_row",
    "read_rows",
]
