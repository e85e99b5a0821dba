"""The options that verbs share: one spelling, one help text, wherever they are taken."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer


def _option(kind: Any, name: str, text: str) -> Any:
    return Annotated[kind | None, typer.Option(f"--{name}", help=text)]


STEP: dict[str, Any] = {
    "model": _option(
        str,
        "model",
        "Model; path of a config.json or of its folder; org/name in the hub cache; or pkg.mod:make for one of yours. "
        "A ladder takes several with commas.",
    ),
    "impl": _option(str, "impl", "Whose modules train: reference (memplan's own), hf (transformers')."),
    "seq": _option(int, "seq", "Tokens a sample; the model's usual length otherwise."),
    "images": _option(int, "images", "Image crops a sample."),
    "rows": _option(str, "rows", "full, padded:0.25 (share of padding), packed:4 (documents in each row)."),
    "workload": _option(str, "workload", "lm, vlm, prefix-suffix, distill."),
    "suffix": _option(int, "suffix", "Tokens of the suffix that reads the prefix's cache."),
    "ckpt": _option(
        str, "ckpt", "none, full, every:K, first:N, selective, selective:mm+sdpa, submodule, offload; several cross."
    ),
    "blocks": _option(str, "blocks", "Path of the model's list of blocks, where its structure does not tell."),
    "loss": _option(str, "loss", "full, held, valid-rows, chunked:N, chunked-ckpt:N, fused."),
    "precision": _option(
        str, "precision", "fp32, bf16, fp16; -mixed: autocast over fp32; -masters: the optimizer keeps fp32 copies."
    ),
    "optimizer": _option(
        str,
        "optimizer",
        "adamw, adamw-foreach, adamw-loop, adamw-8bit, adamw-8bit-paged, adamw-8bit-torchao, adamw-4bit-torchao, sgd, "
        "sgd-momentum, adafactor, muon.",
    ),
    "update": _option(str, "update", "step, or backward: each parameter as soon as its gradient is there."),
    "attention": _option(str, "attention", "sdpa, eager."),
    "norm": _option(str, "norm", "eager, fused."),
    "clip": _option(float, "clip", "Largest total gradient norm."),
    "dropout": _option(float, "dropout", "Probability of dropping an element behind each layer."),
    "lora": _option(str, "lora", "Adapters on a frozen model: 16, or 16:q+v for linears by name; @nf4 for QLoRA."),
    "freeze": _option(
        str, "freeze", "Components that do not train: embedding, blocks, vision, connector, head, or none; + between."
    ),
    "parallel": _option(
        str,
        "parallel",
        "Over several devices, a batch for each: ddp, ddp:view, zero1, zero2, fsdp2, fsdp2:OPTIONS with + between: "
        "keep, keep-last, noprefetch, offload, param-bf16, reduce-fp32, reduce-bf16.",
    ),
    "world": _option(int, "world", "Devices; batch and memory are those of one of them."),
    "compile": _option(str, "compile", "Blocks by torch.compile: off, on; several cross."),
}
"""What a step is made of."""
RUNG: dict[str, Any] = {
    "rung": _option(str, "rung", "A rung like B12c6@full."),
    "batch": _option(int, "batch", "Samples a step, instead of --rung."),
    "chunks": _option(int, "chunks", "Backward passes a step."),
}
"""One rung, for verbs that take no ladder."""


def options(*groups: dict[str, Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a verb the options of `groups` before its own; it takes them as keywords."""
    shared = {name: kind for group in groups for name, kind in group.items()}

    def give(verb: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(verb)
        def taken(**values: Any) -> Any:
            return verb(**values)

        own = [one for one in inspect.signature(verb).parameters.values() if one.kind is not one.VAR_KEYWORD]
        arguments = [one for one in own if "ArgumentInfo" in str(one.annotation)]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in shared.items()
        ]
        rest = [one for one in own if one not in arguments]
        every = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*arguments, *added, *rest)]
        taken.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        taken.__annotations__ = {one.name: one.annotation for one in every}
        del taken.__wrapped__  # whose signature typer would read instead
        return taken

    return give
