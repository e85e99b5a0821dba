"""How one training step is made: batch, chunks, levers, optimizer, precision.

Letters: `B` batch, `S` sequence, `C` chunks.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from memplan.errors import MemplanError, near_names

Optimizer = Literal["adamw", "adamw-foreach", "adamw-loop", "sgd"]
Precision = Literal["fp32", "bf16", "bf16-mixed"]
Attention = Literal["sdpa", "eager"]
NormKind = Literal["eager", "fused"]
Parallel = Literal["single"]

OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
PRECISIONS: tuple[str, ...] = get_args(Precision)
ATTENTIONS: tuple[str, ...] = get_args(Attention)
NORMS: tuple[str, ...] = get_args(NormKind)
PARALLELS: tuple[str, ...] = get_args(Parallel)
CKPT_FORMS = ("none", "full", "every:K")
LOSS_FORMS = ("full", "chunked:N", "chunked-ckpt:N")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """One optimizer step over `batch` samples, its backward done in `chunks` equal parts."""

    batch: int
    """B, samples a step."""
    chunks: int = 1
    """C, backward passes a step; B must be a multiple."""
    seq: int
    """S, tokens a sample."""
    images: int = 0
    """Crops a sample through the vision tower."""
    ckpt: str = "none"
    """Activation checkpointing of decoder blocks: `none`, `full`, or `every:K` (blocks 0, K, 2K, ... recompute)."""
    loss: str = "full"
    """Head and cross-entropy: `full`, `chunked:N` (N parts of the rows, one graph) or `chunked-ckpt:N` (each part
    recomputed in backward)."""
    optimizer: str = "adamw"
    """`adamw` (fused), `adamw-foreach`, `adamw-loop` or `sgd` (no momentum)."""
    precision: str = "fp32"
    """`fp32`, `bf16` (parameters, gradients and states in bf16) or `bf16-mixed` (autocast over fp32 masters)."""
    attention: str = "sdpa"
    """torch's scaled_dot_product_attention, or `eager` matmul-softmax-matmul."""
    norm: str = "eager"
    """RMSNorm by elementwise ops in fp32, or `fused` (torch's own)."""
    clip: float | None = None
    """Largest total gradient norm, or None for no clipping."""
    parallel: str = "single"
    """How the step is spread over devices."""
    world: int = 1
    """W, devices."""

    def __post_init__(self) -> None:
        for name in ("batch", "chunks", "seq", "world"):
            if getattr(self, name) < 1:
                raise MemplanError(f"{name} is {getattr(self, name)}; it must be 1 or more.", f"Type --{name} 1.")
        if self.images < 0:
            raise MemplanError(f"images is {self.images}; it must be 0 or more.")
        if self.batch % self.chunks:
            raise MemplanError(
                f"{self.batch} samples do not divide into {self.chunks} chunks;",
                f"try {divisible_rungs(self.batch, self.chunks)}.",
            )
        if self.world != 1:
            raise MemplanError(
                f"world is {self.world}, but one device is all that can be planned.", "Leave --world out."
            )
        if self.clip is not None and not self.clip > 0:
            raise MemplanError(f"clip is {self.clip}; a gradient norm is above zero.", "Type --clip 1.0.")
        parse_counted("ckpt", self.ckpt, CKPT_FORMS)
        parse_counted("loss", self.loss, LOSS_FORMS)
        for name, known in (
            ("optimizer", OPTIMIZERS),
            ("precision", PRECISIONS),
            ("attention", ATTENTIONS),
            ("norm", NORMS),
            ("parallel", PARALLELS),
        ):
            if getattr(self, name) not in known:
                raise MemplanError(f"Unknown {name} {getattr(self, name)!r}.", near_names(getattr(self, name), known))

    @property
    def micro_batch(self) -> int:
        """Samples of one backward pass, B / C."""
        return self.batch // self.chunks

    @property
    def ckpt_every(self) -> int | None:
        """K when every K-th block recomputes (`full` is 1), None without checkpointing."""
        kind, count = parse_counted("ckpt", self.ckpt, CKPT_FORMS)
        return {"none": None, "full": 1, "every": count}[kind]

    @property
    def loss_kind(self) -> str:
        """`full`, `chunked` or `chunked-ckpt`."""
        return parse_counted("loss", self.loss, LOSS_FORMS)[0]

    @property
    def loss_chunks(self) -> int:
        """Parts in which the head and the loss of one backward pass are made; 1 for `full`."""
        return parse_counted("loss", self.loss, LOSS_FORMS)[1] or 1


def parse_counted(option: str, text: str, forms: tuple[str, ...]) -> tuple[str, int | None]:
    """Kind and count of `every:2` among `forms` such as `("none", "every:K")`; MemplanError when it is none of them."""
    kind, colon, count = text.partition(":")
    for form in forms:
        name, wants_count, letter = form.partition(":")
        if kind != name:
            continue
        if not wants_count and not colon:
            return kind, None
        if wants_count and count.isascii() and count.isdigit() and int(count) >= 1:
            return kind, int(count)
        if wants_count:
            raise MemplanError(f"{option} {text!r} needs a whole number {letter} of 1 or more.", f"Type {kind}:2.")
        raise MemplanError(f"{option} {kind!r} takes no number.", f"Type {kind}.")
    raise MemplanError(f"Unknown {option} {text!r}.", "Known: " + ", ".join(forms) + ".")


def divisible_rungs(batch: int, chunks: int) -> str:
    """Text that names the rungs next to `batch` that do divide: `B8c2 or B6c2`."""
    above = (batch // chunks + 1) * chunks
    below = above - chunks
    return f"B{above}c{chunks}" + (f" or B{below}c{chunks}" if below else "")
