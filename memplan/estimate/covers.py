"""What of a run the formulas know nothing of."""

import json

from memplan.estimate.families import FAMILIES
from memplan.spec.run import RunSpec

UNKNOWN = {
    "compile": ("on",),
}
"""Values of the step's levers that only the trace knows."""


def uncovered(run: RunSpec) -> str:
    """What of `run` the formulas know nothing of, in words; empty when they know all of it."""
    step, model = run.step, run.model
    if model.impl == "user":
        return "models of your own"
    if model.impl == "hf" and json.loads(model.config).get("model_type") not in FAMILIES:
        return f"transformers' models of the type {model.family}"
    for name, values in UNKNOWN.items():
        if getattr(step, name) in values:
            return f"{name} {getattr(step, name)}"
    return ""
