"""memplan's language model over the ledger: embedding, blocks, final norm, head.

Letters: `B` batch, `S` sequence, `H` hidden, `D` head size, `V` vocabulary.
"""

from collections.abc import Callable
from typing import Any

from memplan.estimate import ops
from memplan.estimate.attention import causal_mask
from memplan.estimate.checkpoint import put_on
from memplan.estimate.losses import Head
from memplan.estimate.modules import Embedding, Module
from memplan.estimate.ops import add, to
from memplan.estimate.products import embedding
from memplan.estimate.reference import Block, make_norm
from memplan.estimate.stack import Stack
from memplan.estimate.tape import Tape, Tensor
from memplan.spec.run import RunSpec


class LanguageModel:
    """memplan's decoder of a run."""

    def __init__(self, tape: Tape, run: RunSpec) -> None:
        self.tape = tape
        self.run = run
        spec, step = run.model.decoder, run.step
        self.spec = spec
        setup = tape.setup
        tape.component = "embedding"
        self.embedding = Embedding(tape, "embedding", spec.vocab, spec.hidden, extra=spec.extra_vocab)
        self.positions = None
        if spec.positions == "learned":
            self.positions = setup.parameter(tape, "positions", (spec.max_positions, spec.hidden))
        tape.component = "blocks"
        self.store: dict[int, Any] = {}
        mode = step.checkpointing

        def kind(index: int) -> Any:
            shared = spec.kv_source(index) is not None or spec.leaves_kv(index)
            return (index if shared else -1), spec.slides(index), mode.treats(index)

        def make(index: int) -> Module:
            return Block(
                tape, spec, attention=step.attention, norm=step.norm, index=index, store=self.store
            )

        self.stack = Stack(tape, [kind(index) for index in range(spec.num_layers)], make)
        put_on(tape, self.stack.blocks, mode, shares_kv=spec.kv_shared > 0)
        self.norm = make_norm(tape, "norm", spec, step.norm)
        tape.component = "head"
        self.head_weight: Tensor = self.embedding.weight
        if not spec.tied:
            self.head_weight = setup.parameter(tape, "head.weight", (spec.vocab, spec.hidden))
        if spec.positions == "rope":
            self.inv_freq = tape.new("buffer", (spec.head_dim // 2,), "float32", category="buffers")

    @property
    def head(self) -> Head:
        """What makes logits of the hidden states."""
        return Head(weight=self.head_weight, softcap=self.spec.head_softcap is not None)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Final normed hidden states [B, S, H]."""
        hidden = [self.embed(batch["tokens"])]
        return self.trunk(hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states [B, S, H] of tokens [B, S]."""
        hidden: Tensor = self.embedding(tokens)
        if self.spec.scale_embedding:
            hidden = ops.scale(hidden)
        if self.positions is not None:
            places = self.tape.make("arange", ((tokens.shape[1],), "int64"))
            hidden = add(hidden, embedding(self.positions, places))
        return hidden

    def trunk(self, held: list[Tensor], mask: Tensor | None = None) -> Tensor:
        """Final normed hidden states from the embedded ones in `held`, which is emptied."""
        embedded = held.pop()  # which torch's frame holds until the norm is done
        hidden: Tensor = self.norm(self.encode(embedded, mask))
        return hidden

    def encode(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Hidden states behind the last block."""
        spec = self.spec
        rope = self.rope_tables(hidden) if spec.positions == "rope" else None
        if mask is None:
            mask = self.causal_mask(hidden)
        sliding = self.causal_mask(hidden, spec.window) if spec.window else None
        number = {id(block): index for index, block in self.stack.blocks}

        def call(block: Module, x: Tensor) -> Tensor:
            out: Tensor = block(x, rope, sliding if spec.slides(number[id(block)]) else mask)
            return out

        held = [hidden]
        del hidden
        out = self.stack.run(held, call)
        self.store.clear()
        return out

    def rope_tables(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [S, D]."""
        tape, spec = self.tape, self.spec
        size = hidden.shape[1]
        places = tape.make("arange", ((size,), "float32"))
        angles = tape.make("mul", ((size, spec.head_dim // 2), "float32"))
        angles = tape.make("cat", ((size, spec.head_dim), "float32"))
        dtype = "float32" if spec.rope_fp32 else hidden.dtype
        cos = to(tape.make("cos", (angles.shape, "float32")), dtype)
        sin = to(tape.make("sin", (angles.shape, "float32")), dtype)
        del places
        return cos, sin

    def causal_mask(self, hidden: Tensor, window: int = 0) -> Tensor | None:
        """The additive mask that dense masks, eager attention and a window of fewer tokens need."""
        spec, size = self.spec, hidden.shape[1]
        cut = 0 < window < size
        if spec.mask == "causal" and self.run.step.attention == "sdpa" and not cut:
            return None
        rows = hidden.shape[0] if spec.mask == "dense" else 1
        mask = causal_mask(self.tape, rows, size, size)
        if cut:
            below = causal_mask(self.tape, rows, size, size)
            del below
        return mask


Build = Callable[[Tape, RunSpec], Any]
