"""How a step is spread over devices, as a person types it: `ddp:view`, `zero2`, `fsdp2:keep+reduce-fp32`.

Letters: `W` world size.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from memplan.errors import MemplanError, near_names

KINDS = ("single", "ddp", "zero1", "zero2", "fsdp2")
OPTIONS = {
    "ddp": ("view",),
    "fsdp2": ("keep", "keep-last", "noprefetch", "offload", "param-bf16", "reduce-bf16", "reduce-fp32"),
}
"""Options by kind, behind a colon and with `+` between them."""
WHOLE = {"zero2": ("adafactor", "muon"), "fsdp2": ("adafactor", "adamw-8bit", "adamw-8bit-paged")}
"""Optimizers that cannot step on the pieces of a kind: flat ones have no rows and columns, and neither torch's
Adafactor nor bitsandbytes knows of DTensor. Source: torch/optim/_adafactor.py, torch 2.13; bitsandbytes 0.48."""
MIXED = (
    "FSDP2 takes the parameters of a block, and those outside blocks, in one dtype each, and here some are in float32 "
    "whatever the precision.",
    "Type --precision bf16-mixed, or --parallel zero1.",
)
"""The sentence for trainable parameters of several dtypes in one group of FSDP2. Source: `_init_mp_dtypes`,
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, torch 2.13."""
FORMS = ("single", "ddp", "ddp:view", "zero1", "zero2", "fsdp2", "fsdp2:OPTIONS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """What each of W devices holds of a model that all of them train, every one on a batch of its own."""

    kind: str = "single"
    """`single` one device; `ddp` everything on every device, gradients averaged in buckets beside them; `zero1` the
    optimizer's state split, whole gradients averaged in place after each chunk; `zero2` gradients split as well, a
    bucket at a time; `fsdp2` parameters, gradients and state split, a block's parameters gathered while it runs."""
    view: bool = False
    """Whether DDP's gradients are views into its buckets, so that there is one copy of them."""
    keep: bool = False
    """Whether FSDP2 keeps a block's gathered parameters from forward to backward."""
    keep_last: bool = False
    """Whether it keeps those of the last block, which backward needs first: TorchTitan's and NeMo AutoModel's habit."""
    prefetch: bool = True
    """Whether FSDP2 gathers the next block of backward while one is at work."""
    offload: bool = False
    """Whether FSDP2's parameters, gradients and optimizer state wait on the host, where the optimizer runs."""
    param_dtype: str = ""
    """Dtype in which FSDP2 gathers parameters and computes; empty: their own."""
    reduce_dtype: str = ""
    """Dtype in which FSDP2 adds up gradients; empty: their own."""

    @staticmethod
    def parse(text: str) -> "Parallel":
        """What `text` names; MemplanError when it is none."""
        kind, colon, rest = text.partition(":")
        if kind not in KINDS:
            raise MemplanError(f"Unknown parallel {kind!r}.", near_names(kind, KINDS))
        known = OPTIONS.get(kind, ())
        if colon and not known:
            raise MemplanError(f"parallel {kind!r} takes no options.", f"Type {kind}.")
        options = rest.split("+") if colon else []
        for index, option in enumerate(options):
            if option not in known:
                raise MemplanError(f"parallel {kind!r} has no option {option!r}.", "Known: " + ", ".join(known) + ".")
            if option in options[:index]:
                raise MemplanError(f"parallel {text!r} names {option} twice.", "Leave one out.")
        if {"keep", "keep-last"} <= set(options):
            raise MemplanError(f"parallel {text!r} keeps the last block twice.", "Leave keep-last out.")
        reduce = [option.removeprefix("reduce-") for option in options if option.startswith("reduce-")]
        if len(reduce) > 1:
            raise MemplanError(f"parallel {text!r} adds up gradients in two dtypes.", "Leave one out.")
        return Parallel(
            kind=kind,
            view="view" in options,
            keep="keep" in options,
            keep_last="keep-last" in options,
            prefetch="noprefetch" not in options,
            offload="offload" in options,
            param_dtype="bf16" if "param-bf16" in options else "",
            reduce_dtype=reduce[0] if reduce else "",
        )

    @property
    def sharded(self) -> bool:
        """Whether there is more than one device."""
        return self.kind != "single"

    def check(self, world: int, optimizer: str) -> None:
        """MemplanError unless `world` devices can do this with `optimizer`."""
        if optimizer in WHOLE.get(self.kind, ()):
            raise MemplanError(
                f"{optimizer} needs whole tensors, of which {self.kind} gives each device a piece.",
                "Type --parallel zero1, or --optimizer adamw.",
            )
        if self.sharded and world < 2:
            raise MemplanError(f"parallel {self.kind} needs 2 devices or more, not {world}.", "Type --world 8.")
        if not self.sharded and world != 1:
            raise MemplanError(
                f"world is {world}, but parallel single is one device.", "Type --parallel fsdp2, or leave --world out."
            )

    def check_rows(self, world: int, matrices: Iterable[tuple[int, ...]]) -> None:
        """MemplanError where Muon would step on one of `matrices`, shapes, of fewer rows than FSDP2 has devices, which
        torch's DTensor does not split and then cannot update in place (seen with torch 2.13)."""
        least = min((shape[0] for shape in matrices), default=world)
        if self.kind == "fsdp2" and least < world:
            smaller = f"--world {least}, " if least > 1 else ""
            raise MemplanError(
                f"torch's Muon cannot step on a matrix of {least:,} rows that FSDP2 splits over {world:,} devices.",
                f"Type {smaller}--parallel zero1, or --optimizer adamw.",
            )
