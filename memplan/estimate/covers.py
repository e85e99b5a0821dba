"""What the formulas speak of, and what only the trace knows."""

import dataclasses

from memplan.spec.model import DecoderSpec
from memplan.spec.run import RunSpec

DECODER_FIELDS = (
    "num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn", "vocab", "extra_vocab", "max_positions",
    "norm", "norm_bias", "norm_eps", "positions", "rope_theta", "rope_scaling", "rope_fp32", "mlp", "qkv_bias",
    "out_bias", "mlp_bias", "qk_norm", "tied", "projections", "mask",
)  # fmt: skip
"""Fields of a decoder that the formulas know, whatever they say; any other must say what it says by default."""
VALUES = {
    "workload": ("lm", "vlm"),
    "ckpt": ("none", "full", "every", "first"),
    "loss": ("full", "chunked", "chunked-ckpt"),
    "compile": ("off",),
    "parallel": ("single",),
    "optimizer": ("adamw", "adamw-foreach", "adamw-loop", "sgd"),
    "precision": ("fp32", "bf16", "bf16-mixed"),
    "update": ("step",),
    "rows": ("full",),
}
"""Values of the step's levers that the formulas know."""


def uncovered(run: RunSpec) -> str:
    """What of `run` the formulas know nothing of, in words; empty when they know all of it."""
    step, model = run.step, run.model
    if model.impl != "memplan":
        return f"models of {'transformers' if model.impl == 'hf' else 'your own'}"
    for field in dataclasses.fields(DecoderSpec):
        value = getattr(model.decoder, field.name)
        if field.name not in DECODER_FIELDS and value != field.default:
            return f"decoders with {field.name} {value}"
    if model.decoder.mlp not in ("swiglu", "gelu", "gelu-tanh"):
        return f"decoders with mlp {model.decoder.mlp}"
    asked = {
        "workload": step.workload,
        "ckpt": step.checkpointing.kind,
        "loss": step.loss_kind,
        "compile": step.compile,
        "parallel": step.sharding.kind,
        "optimizer": step.optimizer,
        "precision": step.precision,
        "update": step.update,
        "rows": step.rows,
    }
    for name, value in asked.items():
        if value not in VALUES[name]:
            return f"{name} {value}"
    for name in ("dropout", "lora"):
        if getattr(step, name):
            return name
    return ""
