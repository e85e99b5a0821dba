"""The answer: what a witness says about a run. Frozen dataclasses; every number says whose it is.

Each name comes from its module when it is first asked for: an estimate needs few of them, and is to be there at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memplan.record.fit import SEQ_STEP, Check, Fit
    from memplan.record.formula import FormulaLine
    from memplan.record.memory import CATEGORIES, PHASES, Band, Estimate, MemoryBreakdown, PhasePeak
    from memplan.record.outcome import FINAL, STATUSES, WHOLE, Failure, RungResult, WindowPeak
    from memplan.record.parity import Mutation, ParityReport, RecomputeDifference, TensorDifference
    from memplan.record.progress import Note, Planned
    from memplan.record.store import Results, append_row, read_all, read_results, read_rows
    from memplan.record.trace import (
        LiveTensor,
        OutOfMemory,
        PhaseTotals,
        SyncPoint,
        Timeline,
        TracedRun,
        TracedSteps,
        TraceReport,
    )

__all__ = [
    "CATEGORIES",
    "FINAL",
    "PHASES",
    "SEQ_STEP",
    "STATUSES",
    "WHOLE",
    "Band",
    "Check",
    "Estimate",
    "Failure",
    "Fit",
    "FormulaLine",
    "LiveTensor",
    "MemoryBreakdown",
    "Mutation",
    "Note",
    "OutOfMemory",
    "ParityReport",
    "PhasePeak",
    "PhaseTotals",
    "Planned",
    "RecomputeDifference",
    "Results",
    "RungResult",
    "SyncPoint",
    "TensorDifference",
    "Timeline",
    "TraceReport",
    "TracedRun",
    "TracedSteps",
    "WindowPeak",
    "append_row",
    "read_all",
    "read_results",
    "read_rows",
]
HOMES = {
    "fit": (
        "SEQ_STEP",
        "Check",
        "Fit",
    ),
    "formula": ("FormulaLine",),
    "memory": (
        "CATEGORIES",
        "PHASES",
        "Band",
        "Estimate",
        "MemoryBreakdown",
        "PhasePeak",
    ),
    "outcome": (
        "FINAL",
        "STATUSES",
        "WHOLE",
        "Failure",
        "RungResult",
        "WindowPeak",
    ),
    "parity": (
        "Mutation",
        "ParityReport",
        "RecomputeDifference",
        "TensorDifference",
    ),
    "progress": (
        "Note",
        "Planned",
    ),
    "store": (
        "Results",
        "append_row",
        "read_all",
        "read_results",
        "read_rows",
    ),
    "trace": (
        "LiveTensor",
        "OutOfMemory",
        "PhaseTotals",
        "SyncPoint",
        "Timeline",
        "TracedRun",
        "TracedSteps",
        "TraceReport",
    ),
}
"""Modules with the names that they have."""


def __getattr__(name: str) -> Any:
    home = next((module for module, names in HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
