"""How one training step is made: batch, chunks, levers, optimizer, precision.

Letters: `B` batch, `S` sequence, `C` chunks.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from memplan.errors import MemplanError, near_names
from memplan.spec.checkpointing import Checkpointing
from memplan.spec.parallel import Parallel
from memplan.spec.rows import Rows

Optimizer = Literal[
    "adamw",
    "adamw-foreach",
    "adamw-loop",
    "adamw-8bit",
    "adamw-8bit-paged",
    "adamw-8bit-torchao",
    "adamw-4bit-torchao",
    "sgd",
    "sgd-momentum",
    "adafactor",
    "muon",
]
Precision = Literal["fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed", "bf16-masters", "fp16-masters"]
Update = Literal["step", "backward"]
Attention = Literal["sdpa", "eager"]
NormKind = Literal["eager", "fused"]
Workload = Literal["lm", "vlm", "classify", "prefix-suffix", "distill"]
Compile = Literal["off", "on"]

OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
PRECISIONS: tuple[str, ...] = get_args(Precision)
UPDATES: tuple[str, ...] = get_args(Update)
ATTENTIONS: tuple[str, ...] = get_args(Attention)
NORMS: tuple[str, ...] = get_args(NormKind)
WORKLOADS: tuple[str, ...] = get_args(Workload)
COMPILES: tuple[str, ...] = get_args(Compile)
LOSS_FORMS = ("full", "held", "valid-rows", "chunked:N", "chunked-ckpt:N", "fused")
LORA_BASES = ("nf4",)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """One optimizer step over `batch` samples, its backward done in `chunks` equal parts."""

    batch: int
    """B, samples a step."""
    chunks: int = 1
    """C, backward passes a step; B must be a multiple."""
    seq: int
    """S, tokens a sample; those of its prefix in `prefix-suffix`."""
    workload: str = "lm"
    """`lm` next tokens, `vlm` with images, `classify` (a sample is one image, and makes one row), `prefix-suffix` (the
    prefix is encoded once into a live KV cache, the suffix reads it and carries the loss), `distill` (cross-entropy and
    a KL term towards a teacher's logits through one head)."""
    suffix: int = 0
    """Tokens of the suffix in `prefix-suffix`, 0 elsewhere."""
    images: int = 0
    """Crops a sample through the vision tower."""
    rows: str = "full"
    """What fills the rows of S tokens, as `Rows` reads it: `full`, `padded:FRACTION`, `packed:N` documents."""
    ckpt: str = "none"
    """Activation checkpointing of blocks, as `Checkpointing` reads it: `none`, `full`, `every:K`, `first:N`,
    `selective`, `selective:OPS`, `submodule`, `offload`."""
    blocks: str = ""
    """Paths of the block lists that `ckpt` and `compile` treat, with `+` between them; empty: found by structure."""
    loss: str = "full"
    """Head and loss: `full` (from fp32 logits), `held` (from logits in their own dtype, which whoever called the model
    holds until backward is over), `valid-rows` (rows that make a loss are picked before the head), `chunked:N` (N parts
    of the rows, one graph), `chunked-ckpt:N` (each part recomputed in backward) or `fused` (gradients made in
    forward)."""
    optimizer: str = "adamw"
    """`adamw` (fused), `adamw-foreach`, `adamw-loop`; `adamw-8bit` and `adamw-8bit-paged` (bitsandbytes),
    `adamw-8bit-torchao` and `adamw-4bit-torchao`; `sgd` (no momentum), `sgd-momentum`; `adafactor`; `muon` (matrices of
    the blocks, fused AdamW for everything else)."""
    precision: str = "fp32"
    """`fp32`; `bf16`, `fp16` (parameters, gradients and states in it); `bf16-mixed`, `fp16-mixed` (autocast over fp32
    parameters); `bf16-masters`, `fp16-masters` (parameters and gradients in it, the optimizer's own copies and states
    in fp32). With fp16 the loss is scaled."""
    update: str = "step"
    """When the optimizer takes its step: `step`, once all gradients are there, or `backward`, parameter by parameter as
    soon as a gradient is there, which is then freed."""
    attention: str = "sdpa"
    """torch's scaled_dot_product_attention, or `eager` matmul-softmax-matmul."""
    norm: str = "eager"
    """RMSNorm by elementwise ops in fp32, or `fused` (torch's own)."""
    clip: float | None = None
    """Largest total gradient norm, or None for no clipping."""
    dropout: float = 0.0
    """Probability with which an element is dropped behind attention and feed-forward layers."""
    lora: str = ""
    """Adapters on a frozen model: `16` (rank, on every linear of the blocks) or `16:q+v` (on those named); with `@nf4`
    behind, the linears of the blocks are kept in 4 bits (QLoRA). Empty: the model itself trains."""
    compile: str = "off"
    """`on` compiles each block by torch.compile."""
    parallel: str = "single"
    """How the step is spread over devices, as `Parallel` reads it: `single`, `ddp`, `ddp:view`, `zero1`, `zero2`,
    `fsdp2`, `fsdp2:keep+reduce-fp32`. `batch` is what each device takes."""
    world: int = 1
    """W, devices."""

    def __post_init__(self) -> None:
        for name in ("batch", "chunks", "seq", "world"):
            if getattr(self, name) < 1:
                raise MemplanError(f"{name} is {getattr(self, name)}; it must be 1 or more.", f"Type --{name} 1.")
        for name in ("images", "suffix"):
            if getattr(self, name) < 0:
                raise MemplanError(f"{name} is {getattr(self, name)}; it must be 0 or more.")
        if not 0 <= self.dropout < 1:
            raise MemplanError(f"dropout is {self.dropout}; it must be 0 or more and below 1.", "Type --dropout 0.1.")
        if (self.suffix > 0) != (self.workload == "prefix-suffix"):
            raise MemplanError(
                f"A suffix of {self.suffix} tokens does not go with the workload {self.workload}.",
                "Type --workload prefix-suffix --suffix 60 together.",
            )
        if self.images and self.workload in ("lm", "classify"):
            raise MemplanError(
                f"The workload {self.workload} has no images beside text.", "Type --workload vlm, or --images 0."
            )
        if not self.images and self.workload == "vlm":
            raise MemplanError("The workload vlm needs images.", "Type --images 4, or --workload lm.")
        if self.batch % self.chunks:
            raise MemplanError(
                f"{self.batch} samples do not divide into {self.chunks} chunks;",
                f"try {divisible_rungs(self.batch, self.chunks)}.",
            )
        if self.clip is not None and not self.clip > 0:
            raise MemplanError(f"clip is {self.clip}; a gradient norm is above zero.", "Type --clip 1.0.")
        Checkpointing.parse(self.ckpt)
        self.sharding.check(self.world, self.optimizer)
        self.filling.check(self.seq, self.workload)
        self.lora_rank, self.lora_base  # noqa: B018  # raise where the text is no rank or base
        parse_counted("loss", self.loss, LOSS_FORMS)
        for name, known in (
            ("optimizer", OPTIMIZERS),
            ("precision", PRECISIONS),
            ("update", UPDATES),
            ("attention", ATTENTIONS),
            ("norm", NORMS),
            ("workload", WORKLOADS),
            ("compile", COMPILES),
        ):
            if getattr(self, name) not in known:
                raise MemplanError(f"Unknown {name} {getattr(self, name)!r}.", near_names(getattr(self, name), known))
        if self.suffix and self.autocasts and self.checkpointing.kind == "selective":
            raise MemplanError(
                f"Under {self.precision} a prefix leaves the suffix casts that a selective recomputation lacks.",
                "Type --ckpt full, or --precision bf16.",
            )
        if self.loss == "held" and self.workload == "distill":
            raise MemplanError("Held logits are compared with labels, not with a teacher.", "Type --loss full.")
        if self.update == "backward":
            self._check_update_in_backward()

    def _check_update_in_backward(self) -> None:
        """MemplanError for what needs all gradients at once."""
        if self.clip is not None:
            raise MemplanError(
                "Clipping needs the norm of all gradients, of which an update in backward frees each at once.",
                "Leave --clip out, or type --update step.",
            )
        if self.chunks > 1:
            raise MemplanError(
                f"An update in backward keeps no gradient to which {self.chunks} chunks could add.",
                "Type --chunks 1, or --update step.",
            )
        if self.parallel != "single":
            raise MemplanError(
                f"An update in backward reads each gradient before {self.parallel} has added up those of all devices.",
                "Type --parallel single, or --update step.",
            )
        if self.scales_loss:
            raise MemplanError(
                f"With {self.precision} a step is left out where any gradient overflows, which an update in backward"
                " learns too late.",
                "Type --precision bf16, or --update step.",
            )

    @property
    def micro_batch(self) -> int:
        """Samples of one backward pass, B / C."""
        return self.batch // self.chunks

    @property
    def filling(self) -> Rows:
        """What `rows` says."""
        return Rows.parse(self.rows)

    @property
    def checkpointing(self) -> Checkpointing:
        """What `ckpt` says."""
        return Checkpointing.parse(self.ckpt)

    @property
    def stored(self) -> str:
        """Of parameters and gradients: `fp32`, `bf16` or `fp16`."""
        return "fp32" if self.autocasts else self.computed

    @property
    def computed(self) -> str:
        """Of matrix products: `fp32`, `bf16` or `fp16`."""
        return self.precision.partition("-")[0]

    @property
    def autocasts(self) -> bool:
        """Whether forward runs under autocast."""
        return self.precision.endswith("-mixed")

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer has fp32 copies of the parameters."""
        return self.precision.endswith("-masters")

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled for backward, so that small gradients are not lost in fp16."""
        return self.computed == "fp16"

    @property
    def lora_base(self) -> str:
        """What the frozen linears of the blocks are kept in: `nf4`, or empty where they stay as they are; MemplanError
        for anything else."""
        _, at, base = self.lora.partition("@")
        if at and base not in LORA_BASES:
            raise MemplanError(f"Unknown base {base!r} of lora {self.lora!r}.", near_names(base, LORA_BASES))
        return base

    @property
    def sharding(self) -> Parallel:
        """What `parallel` says."""
        return Parallel.parse(self.parallel)

    @property
    def lora_rank(self) -> int:
        """Rank of the adapters, 0 without them; MemplanError when `lora` is no rank."""
        rank = self.lora.partition("@")[0].partition(":")[0]
        if self.lora and not (rank.isascii() and rank.isdigit() and int(rank) >= 1):
            raise MemplanError(f"lora {self.lora!r} has no rank.", "Type --lora 16, or --lora 16:q+v.")
        return int(rank or 0)

    @property
    def lora_names(self) -> tuple[str, ...]:
        """Names of the linears that get adapters; empty for all those of the blocks."""
        names = self.lora.partition("@")[0].partition(":")[2]
        return tuple(names.split("+")) if names else ()

    @property
    def loss_kind(self) -> str:
        """`full`, `valid-rows`, `chunked`, `chunked-ckpt` or `fused`."""
        return parse_counted("loss", self.loss, LOSS_FORMS)[0]

    @property
    def loss_chunks(self) -> int:
        """Parts in which the head and the loss of one backward pass are made; 1 where all are made at once."""
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
