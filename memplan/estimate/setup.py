"""How a step's parameters are made: their dtype, which of them train, which linears get adapters."""

from dataclasses import dataclass, field

from memplan.errors import MemplanError, near_names
from memplan.estimate.tape import Parameter, Shape, Tape
from memplan.spec.run import RunSpec
from memplan.spec.step import StepSpec

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Names of dtypes by those of `StepSpec.stored` and `StepSpec.computed`."""


def autocast_dtype(step: StepSpec) -> str | None:
    """What products run in where forward is under autocast."""
    return DTYPES[step.computed] if step.autocasts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a module asks when it makes its parameters."""

    dtype: str
    """Of parameters."""
    frozen: tuple[str, ...]
    """Components that do not train."""
    rank: int
    """Of adapters, 0 without."""
    adapted: tuple[str, ...]
    """Names of the linears that get adapters; empty for all those of the blocks."""
    lora_base: str
    """What the linears of the blocks are kept in, empty where they stay as they are."""
    computed: str
    """Dtype of products."""
    dropout: float
    """Probability of dropping an element."""
    last_blocks: int = 1
    """Blocks at the end of a row of equal ones that are told one by one: where a block's backward meets what the one
    behind it left, the last one is unlike the others."""
    tied: bool = False
    """Whether the head reads the embedding's table of words, which is part of both then."""
    linears: set[str] = field(default_factory=set)
    """Names of the linears of the blocks that were made."""

    @staticmethod
    def of(run: RunSpec) -> "Setup":
        """The set-up of `run`."""
        return Setup(
            dtype=DTYPES[run.step.stored],
            frozen=run.model.frozen,
            tied=run.model.decoder.tied,
            rank=run.step.lora_rank,
            adapted=run.step.lora_names,
            lora_base=run.step.lora_base,
            computed=DTYPES[run.step.computed],
            dropout=run.step.dropout,
            last_blocks=2 if run.step.checkpointing.kind == "offload" or run.step.sharding.kind == "fsdp2" else 1,
        )

    def adapter_rank(self, name: str, component: str) -> int:
        """Rank of the adapter beside the linear `name`, 0 without."""
        if in_block(component):
            self.linears.add(name)
        wanted = self.rank and in_block(component) and (not self.adapted or name in self.adapted)
        return self.rank if wanted else 0

    def check_adapters(self) -> None:
        """MemplanError where the linears made since have not the names that adapters were asked for, or are none."""
        if self.rank and not self.linears:
            raise MemplanError("The blocks have no linear beside which an adapter could stand.", "Leave --lora out.")
        for name in self.adapted:
            if name not in self.linears:
                raise MemplanError(f"No linear of the blocks is called {name!r}.", near_names(name, self.linears))

    def base_dtype(self, component: str) -> str:
        """What a linear computes in whose matrix is kept in 4 bits; empty where it is not."""
        return self.computed if self.lora_base and in_block(component) else ""

    def parameter(
        self,
        tape: Tape,
        name: str,
        shape: Shape,
        *,
        adapter: bool = False,
        always: bool = False,
        words: bool = False,
        dtype: str = "",
    ) -> Parameter:
        """A parameter of the component that is being built; `always` trains even where that is frozen, and `words` is
        the table that a tied head reads."""
        own = {tape.component.partition(" ")[0]} | ({"head"} if words and self.tied else set())
        trains = adapter if self.rank else always or not own & {*self.frozen}
        return tape.parameter(name, shape, dtype or self.dtype, trains=trains)


def in_block(component: str) -> bool:
    """Whether a parameter of `component` is of a block: the decoder's, or `vision blocks`, those of a tower that stand
    in a list of blocks of their own."""
    return component.endswith("blocks")
