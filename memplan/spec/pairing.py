"""What a model can be asked for, whoever answers: what an image classifier, transformers' modules and a user's own
have no way to do, said before anything runs."""

from memplan.errors import MemplanError
from memplan.spec.model import CLASSIFIERS, EAGER, ModelSpec
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
    if model.impl == "hf" and model.family in EAGER and step.attention != "eager":
        raise MemplanError(f"transformers has no kernel that does the attention of {name}.", "Type --attention eager.")
    if model.impl == "user":
        if step.suffix or step.workload == "distill":
            raise MemplanError(
                f"{name} makes logits of tokens, no more: no cache, no head for a teacher.", "Type --workload lm."
            )
        for option, value, usual in (("attention", step.attention, "sdpa"), ("norm", step.norm, "eager")):
            if value != usual:
                raise MemplanError(f"{name} decides on its {option} by itself.", f"Leave --{option} out.")


def check_counts(model: ModelSpec, step: StepSpec) -> None:
    """MemplanError where `step` counts more blocks, rows or ranks than there are: of a question, not of the smaller
    runs by which it is answered."""
    mode, hidden = step.checkpointing, model.decoder.hidden
    blocks = model.decoder.num_layers + (0 if model.vision is None else model.vision.num_layers)
    if blocks and (mode.count or 0) > blocks:
        raise MemplanError(
            f"{model.name} has {blocks} blocks, fewer than ckpt {step.ckpt!r} counts.",
            f"Type {mode.kind}:2, or full for every block.",
        )
    rows = step.micro_batch * (step.suffix or step.seq)
    if step.workload != "classify" and step.loss_chunks > rows:
        raise MemplanError(
            f"A chunk of the batch has {rows:,} rows, fewer than the parts of loss {step.loss!r}.",
            f"Type {step.loss_kind}:8.",
        )
    if hidden and step.lora_rank > hidden:
        raise MemplanError(
            f"Adapters of rank {step.lora_rank} are larger than what they stand beside: {model.name} is {hidden} wide.",
            "Type --lora 16.",
        )
