"""The answer: what a witness says about a run. Frozen dataclasses; every number says whose it is."""

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
