"""What a model can be asked for, whoever answers: what an image classifier, transformers' modules and a user's own
have no way to do, said before anything runs."""

from memplan.errors import MemplanError
from memplan.spec.model import CLASSIFIERS, ModelSpec
from memplan.spec.step import StepSpec


def check_pair(model: ModelSpec, step: StepSpec) -> None:
    """MemplanError for the first thing in `step` that `model` cannot do."""
    name = model.name
    if model.family in CLASSIFIERS and step.workload != "classify":
        raise MemplanError(
            f"{name} makes a class of each image: the workload {step.workload} has none.", "Leave --workload out."
        )
    if step.workload == "classify":
        if model.family not in CLASSIFIERS:
            raise MemplanError(f"{name} reads tokens, and makes no class of an image.", "Type --workload lm.")
        if step.loss == "valid-rows":
            raise MemplanError(f"Each row of {name} is an image, and makes a loss.", "Type --loss full.")
    if model.impl == "hf" and step.suffix:
        raise MemplanError(
            "The workload prefix-suffix needs a cache that is connected with its graph, which transformers' models "
            "do not have.",
            "Take one of memplan's own: --model qwen3-0.6b.",
        )
    if model.impl == "hf" and step.norm != "eager":
        raise MemplanError(f"{name} has transformers' own norms.", "Leave --norm out.")
    if model.impl == "user":
        if step.suffix or step.workload == "distill":
            raise MemplanError(
                f"{name} makes logits of tokens, no more: no cache, no head for a teacher.", "Type --workload lm."
            )
        for option, value, usual in (("attention", step.attention, "sdpa"), ("norm", step.norm, "eager")):
            if value != usual:
                raise MemplanError(f"{name} decides on its {option} by itself.", f"Leave --{option} out.")
