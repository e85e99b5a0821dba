"""What verbs take: options and arguments as plain facts, and the groups of options that verbs share: one spelling, one
help text, wherever they are taken."""

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple, get_args


class Option(NamedTuple):
    """An option of a verb: `Annotated[str | None, Option("--gpu", help="Card.")]`."""

    flags: tuple[str, ...]
    """As typed: `-o`, `--output`; of a switch with two ways `--parity/--no-parity`."""
    help: str
    shows_default: bool = True


class Argument(NamedTuple):
    """A word of a verb without a name in front of it."""

    help: str
    metavar: str
    """What the help calls it."""


def option(*flags: str, help: str, shows_default: bool = True) -> Option:
    """The option that is typed as one of `flags`."""
    return Option(flags, help, shows_default)


class Verb(NamedTuple):
    """A verb, as the command line runs it."""

    run: Callable[..., None]
    """Takes its own options, and those of `groups` as further keywords."""
    groups: tuple[dict[str, Any], ...] = ()
    """Options that it shares with other verbs."""

    def takes(self) -> list[inspect.Parameter]:
        """What can be typed: arguments, then the options of the groups, then the verb's own."""
        own = [one for one in inspect.signature(self.run).parameters.values() if one.kind is not one.VAR_KEYWORD]
        arguments = [one for one in own if isinstance(get_args(one.annotation)[1], Argument)]
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for group in self.groups
            for name, kind in group.items()
        ]
        rest = [one for one in own if one not in arguments]
        return [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*arguments, *shared, *rest)]


def _option(kind: Any, name: str, text: str) -> Any:
    return Annotated[kind | None, Option((f"--{name}",), text)]


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


PLAIN: dict[type, tuple[str, Callable[[str], Any]]] = {
    str: (r"(?!-).*", str),
    int: (r"[0-9]+", int),
    float: (r"[0-9]+(\.[0-9]+)?", float),
}
"""Kinds of values: what the plain ones look like, and what makes them."""


def plain_values(verb: Verb, words: Iterable[str]) -> dict[str, Any] | None:
    """What `verb` is to be called with where `words` are options with plain values and nothing else; None where it
    takes a whole parser to tell what they mean, or what is wrong with them."""
    values: dict[str, Any] = {name: None for group in verb.groups for name in group}
    options: dict[str, tuple[str, Any]] = {}
    for one in verb.takes():
        kind, said = get_args(one.annotation)
        if isinstance(said, Argument):
            return None
        options |= dict.fromkeys(said.flags, (one.name, (get_args(kind) or (kind,))[0]))
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if flag not in options:
            return None
        name, kind = options[flag]
        if kind is bool and not equals:
            values[name] = True
            continue
        one_of_many = get_args(kind)  # of list[str]
        looks, read = PLAIN.get(one_of_many[0] if one_of_many else kind, ("(?!)", str))
        value = value if equals else next(rest, "-")
        if not re.fullmatch(looks, value, re.DOTALL):
            return None
        values[name] = [*(values.get(name) or ()), read(value)] if one_of_many else read(value)
    return values
