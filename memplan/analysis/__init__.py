"""Witnesses against each other: what the records say together."""

from memplan.analysis.agreement import Agreement, Pair, agreement
from memplan.analysis.levers import Pulled, findings, pulled

__all__ = ["Agreement", "Pair", "Pulled", "agreement", "findings", "pulled"]
