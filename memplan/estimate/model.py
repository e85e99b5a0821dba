"""memplan's language model over the ledger: embedding, blocks, final norm, head.

Letters: `B` batch, `S` sequence, `H` hidden, `D` head size, `V` vocabulary.
"""

from typing import Any

from memplan.errors import MemplanError, near_names
from memplan.estimate import ops, views
from memplan.estimate.attention import causal_mask
from memplan.estimate.batch import Batch
from memplan.estimate.cache import KVCache
from memplan.estimate.checkpoint import put_on
from memplan.estimate.losses import Head
from memplan.estimate.modules import Embedding, Module
from memplan.estimate.ops import add
from memplan.estimate.products import embedding
from memplan.estimate.reference import Block, make_norm
from memplan.estimate.stack import Stack
from memplan.estimate.tape import Tape, Tensor
from memplan.estimate.views import to
from memplan.spec.run import RunSpec


def first_treated(run: RunSpec, path: str) -> int | None:
    """Number of the first block of the list `path` among all those that the step's checkpointing counts; None where it
    treats none of that list. MemplanError where it names a list that there is not."""
    sizes = {"decoder.blocks": run.model.decoder.num_layers}
    if run.model.vision is not None:
        sizes["vision.blocks"] = run.model.vision.num_layers
    count, found = 0, None
    for name in dict.fromkeys(run.step.blocks.split("+") if run.step.blocks else ["decoder.blocks"]):
        if name not in sizes:
            raise MemplanError(f"{run.model.name} has no list of blocks {name!r}.", near_names(name, sizes))
        found = count if name == path else found
        count += sizes[name]
    return found


class Decoder:
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
        mode, first = step.checkpointing, first_treated(run, "decoder.blocks")

        def kind(index: int) -> Any:
            shared = step.suffix or spec.kv_source(index) is not None or spec.leaves_kv(index)
            treated = first is not None and mode.treats(first + index)
            return (index if shared else -1), spec.slides(index), treated

        def make(index: int) -> Module:
            return Block(tape, spec, attention=step.attention, norm=step.norm, index=index, store=self.store)

        self.stack = Stack(tape, [kind(index) for index in range(spec.num_layers)], make, counted=first is not None)
        if first is not None:
            numbered = [(first + index, block) for index, block in self.stack.blocks]
            put_on(tape, numbered, mode, shares_kv=spec.kv_shared > 0)
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

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states [B, S, H] of tokens [B, S]."""
        hidden: Tensor = self.embedding(tokens)
        if self.spec.scale_embedding:
            hidden = ops.scale(hidden)
        if self.positions is not None:
            places = self.tape.make("arange", ((tokens.shape[1],), "int64"))
            hidden = add(hidden, embedding(self.positions, places))
        return hidden

    def trunk(self, held: list[Tensor], mask: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Final normed hidden states from the embedded ones in `held`, which is emptied."""
        embedded = held.pop()  # which torch's frame holds until the norm is done
        hidden: Tensor = self.norm(self.encode([embedded], mask, cache))
        return hidden

    def encode(self, held: list[Tensor], mask: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Hidden states behind the last block of those in `held`, which is emptied."""
        spec, (samples, size, _), dtype = self.spec, held[0].shape, held[0].dtype
        start = 0 if cache is None else cache.num_tokens
        rope = self.rope_tables(size, dtype) if spec.positions == "rope" else None
        if mask is None:
            mask = self.causal_mask(samples, size, start)
        sliding = self.causal_mask(samples, size, start, spec.window) if spec.window else None
        numbers = {id(block): index for index, block in self.stack.blocks}

        def call(block: Module, x: Tensor) -> Tensor:
            number = numbers[id(block)]
            seen = sliding if spec.slides(number) else mask
            if cache is None:
                out: Tensor = block(x, rope, seen)
                return out
            out, keys, values = block(x, rope, seen, cache.layer(number))
            cache.append(number, keys, values)
            return out

        out = self.stack.run(held, call)
        self.store.clear()
        return out

    def rope_tables(self, size: Any, dtype: str) -> tuple[Tensor, Tensor]:
        """Cosines and sines [S, D]."""
        tape, spec = self.tape, self.spec
        places = tape.make("arange", ((size,), "float32"))
        angles = tape.make("mul", ((size, spec.head_dim // 2), "float32"))
        angles = tape.make("cat", ((size, spec.head_dim), "float32"))
        dtype = "float32" if spec.rope_fp32 else dtype
        cos = to(tape.make("cos", (angles.shape, "float32")), dtype)
        sin = to(tape.make("sin", (angles.shape, "float32")), dtype)
        del places
        return cos, sin

    def causal_mask(self, samples: Any, size: Any, start: Any, window: int = 0) -> Tensor | None:
        """The additive mask that dense masks, eager attention, a cache of `start` tokens and a window of fewer tokens
        need."""
        spec, seen = self.spec, start + size
        cut = window > 0 and views.reaches(seen, window + 1)
        behind = not views.is_zero(start) and not views.is_one(size)
        if spec.mask == "causal" and self.run.step.attention == "sdpa" and not behind and not cut:
            return None
        rows = samples if spec.mask == "dense" else 1
        mask = causal_mask(self.tape, rows, size, seen)
        if cut:
            below = causal_mask(self.tape, rows, size, seen)
            del below
        return mask

    def segment_mask(self, segments: Tensor) -> Tensor:
        """The additive mask [B, 1, S, S] under which documents do not see one another."""
        samples, size = segments.shape
        seen = self.tape.make("eq", ((samples, size, size), "bool"))
        mask = causal_mask(self.tape, samples, size, size)
        del seen
        return mask

    def read_cache(self, cache: KVCache, suffix: Tensor) -> Tensor:
        """Final normed hidden states of the tokens behind those of a live cache."""
        return self.trunk([self.embed(suffix)], None, cache)


class LanguageModel:
    """memplan's text model of a run."""

    def __init__(self, tape: Tape, run: RunSpec) -> None:
        self.decoder = Decoder(tape, run)

    @property
    def head(self) -> Head:
        """What makes logits of the hidden states."""
        return self.decoder.head

    def forward(self, batch: Batch) -> Tensor:
        """Final normed hidden states [B, S, H] of the tokens that may carry a loss."""
        decoder = self.decoder
        if "suffix" not in batch:
            mask = decoder.segment_mask(batch["segments"]) if "segments" in batch else None
            return decoder.trunk([decoder.embed(batch["tokens"])], mask)
        cache = KVCache()
        decoder.encode([decoder.embed(batch["tokens"])], None, cache)
        return decoder.read_cache(cache, batch["suffix"])
