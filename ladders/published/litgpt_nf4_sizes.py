"""The frozen linear of litgpt_nf4.py over the estimate's ledger."""

from typing import Any

from litgpt_shapes import NESTED_BLOCK, NF4_BLOCK

from memplan.estimate.modules import Module
from memplan.estimate.products import workspace
from memplan.estimate.tape import Node, Tape, Tensor
from memplan.estimate.views import to


class Nf4Linear(Module):
    """A frozen linear in nf4; `nested` quantises its scales too."""

    def __init__(self, tape: Tape, name: str, width: int, out: int, *, bias: bool, nested: bool) -> None:
        super().__init__(tape, name)
        self.shape = out, width
        self.nested = nested
        self.blocks = out * width // NF4_BLOCK
        sizes = [((out * width // 2, 1), "uint8"), ((16,), "float32")]
        sizes.append(((self.blocks,), "uint8" if nested else "float32"))
        if nested:
            sizes += [((), "float32"), ((-(-self.blocks // NESTED_BLOCK),), "float32")]
        self.state = [tape.allocate("quantize_4bit", shape, dtype, category="params") for shape, dtype in sizes]
        self.bias = tape.setup.parameter(tape, f"{name}.bias", (out,)) if bias else None

    def matrix(self) -> Tensor:
        """The matrix [O, I] in fp16."""
        scales = self.tape.new("dequantize_blockwise", (self.blocks,), "float32") if self.nested else None
        made = self.tape.new("dequantize_4bit", self.shape, "float16")
        del scales
        return made

    def forward(self, x: Tensor) -> Tensor:
        tape = x.tape

        def backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
            matrix = to(self.matrix(), grads[0].dtype)
            workspace(grads[0])
            of_x = tape.new("mm", node.info.shape, grads[0].dtype)
            del matrix
            return [of_x]

        node = tape.record("MatMul4Bit", (x,), backward, info=x.alias() if x.requires_grad else None)
        matrix = to(self.matrix(), x.dtype)
        workspace(x)
        out = tape.new("linear", (*x.shape[:-1], matrix.shape[0]), x.dtype)
        del matrix
        return tape.link(node, out)
