"""LitGPT's LoRA over several GPUs: a rank's iteration under FSDP, over the estimate's ledger. Letters as in litgpt.py,
`W` ranks.

Written from the same commit (finetune/lora.py), lightning 2.1.0 (fabric/strategies/fsdp.py, fabric/plugins/precision/
fsdp.py) and torch 2.1.0 (distributed/fsdp/flat_param.py, _runtime_utils.py, _exec_order_utils.py). What matters there:

- each block, checkpointed, is one flat parameter, and what is left, embedding, last norm and head, is the root's; the
  root stays whole from its forward to the end of backward, a block for its forward and its backward, during which the
  block before it is whole already;
- a flat parameter trains as soon as one of its parts does: frozen matrices too get gradients, which are put one behind
  another when the last of them is there;
- gradients of 128 samples are added up before the ranks speak of them: until then each rank has those of whole blocks,
  in bf16 twice the parameters that it holds with two ranks, and four times with four;
- buffers are cast, so that the tables of the rotation are bf16.

A later iteration finds these gradients and so needs more than the first, which alone is known to hold the longest
sample. The same step under torch's own FSDP on the CPU: tests/estimate/test_published_ranks.py.
"""

import math
from collections.abc import Callable
from typing import Any

from litgpt_shapes import SHAPES, Shape
from litgpt_sizes import Gpt, Recipe, mean_loss

from memplan.estimate.checkpoint import region
from memplan.estimate.tape import Node, Parameter, Storage, Tape, Tensor
from memplan.estimate.views import to


class Flat:
    """The flat parameter of a block, or of the root."""

    def __init__(self, tape: Tape, parts: list[Parameter]) -> None:
        self.tape = tape
        self.parts = parts
        self.whole: Storage | None = None
        shape = (sum(part.numel for part in parts),)
        self.parameter = Parameter(parts[0].storage, shape, parts[0].dtype, name="flat", component="", copies=1)
        self.parameter.requires_grad = True

    def gather(self) -> None:
        """Makes it whole, where it is not."""
        if self.whole is None:
            self.whole = self.tape.allocate("all_gather", self.parameter.shape, self.parameter.dtype, category="comm")

    def cut(self) -> None:
        """Makes its parts views, through which their gradients come to it."""
        tape = self.tape

        def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
            pairs = zip(self.parts, grads, strict=True)
            zeros = [tape.new("zeros", part.shape, part.dtype) for part, grad in pairs if grad is None]
            whole = tape.new("cat", self.parameter.shape, self.parameter.dtype)
            zeros.clear()
            return [whole]

        node = tape.record("split", (self.parameter,), backward)
        tape.link(node, *self.parts)


class Ranks:
    """One of W ranks that each hold a W-th of every parameter."""

    def __init__(self, tape: Tape, world: int) -> None:
        self.tape = tape
        self.world = world

    def parameter(self, shape: tuple[int, ...], dtype: str, copies: int) -> tuple[Storage, str]:
        """This rank's part of a parameter."""
        rows = (-(-math.prod(shape) // self.world),)
        return self.tape.allocate("shard", rows, dtype, category="params", copies=copies), dtype

    def wrap(self, gpt: Gpt) -> None:
        """Makes flat parameters of the blocks, which are checkpointed, and of the rest."""
        self.blocks = [Flat(self.tape, block.parameters()) for block in gpt.blocks]
        inside = {part for flat in self.blocks for part in flat.parts}
        self.root = Flat(self.tape, [part for part in self.tape.parameters if part not in inside])
        for number, block in enumerate(gpt.blocks):
            block.around = self.around(number, region(self.tape, block.forward, None))
        self.tape.on_grad = self.reduced

    def around(self, number: int, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A block's call, before which it is made whole; in backward the block before it is too."""
        flat = self.blocks[number]

        def run(*args: Any) -> Tensor:
            flat.gather()
            flat.cut()
            out = call(*args)
            flat.whole = None
            return self.told(out, number)

        return run

    def told(self, x: Tensor, number: int) -> Tensor:
        """`x` behind a node that makes block `number` and the one before whole when backward comes to it."""

        def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
            for flat in self.blocks[max(number - 1, 0) : number + 1][::-1]:
                flat.gather()
            return list(grads)

        node = self.tape.record("pre_backward", (x,), backward)
        return x if node is None else self.tape.link(node, x.alias())

    def reduced(self, parameter: Parameter) -> None:
        """A flat parameter's gradient is complete."""
        next(flat for flat in self.blocks if flat.parameter is parameter).whole = None


def rank_step(tape: Tape, shape: Shape, *, batch: int, seq: int, world: int) -> Callable[[], object]:
    """An iteration of LoRA that accumulates gradients; what the one before returned lives until it has its own."""
    ranks = tape.sharding = Ranks(tape, world)
    gpt = Gpt(tape, shape, seq, Recipe("lora", ""))
    for part in tape.parameters:
        part.requires_grad = False
    gpt.cos, gpt.sin = (tape.new("buffer", table.shape, tape.setup.dtype) for table in (gpt.cos, gpt.sin))
    ranks.wrap(gpt)
    tokens, labels = (tape.new("batch", (batch, seq), "int64") for _ in range(2))
    held: list[Any] = []

    def step() -> None:
        ranks.root.gather()
        logits = [to(ranks.told(part, len(ranks.blocks)), "float32") for part in gpt(tokens)]
        loss = mean_loss(logits, labels)
        held[:] = logits, loss
        tape.backward(loss)
        ranks.root.whole = None

    return step


def finetune(tape: Tape, *, model: str, batch: int, seq: int, world: int) -> Callable[[], object]:
    """The same of a model of the table."""
    return rank_step(tape, SHAPES[model], batch=batch, seq=seq, world=world)
