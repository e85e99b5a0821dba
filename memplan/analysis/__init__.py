"""Witnesses against each other: what the records say together."""

from memplan.analysis.agreement import Agreement, Pair, agreement
from memplan.analysis.levers import Pulled, findings, pulled
from memplan.analysis.recommend import Recommendation, brackets, recommend

__all__ = ["Agreement", "Pair", "Pulled", "Recommendation", "agreement", "brackets", "findings", "pulled", "recommend"]
