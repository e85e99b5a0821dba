"""Witnesses against each other: what the records say together."""

from memplan.analysis.agreement import Agreement, Pair, agreement

__all__ = ["Agreement", "Pair", "agreement"]
