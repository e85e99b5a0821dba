"""A ledger of tensors' sizes: what is alive at each moment of a step, by autograd's own rules of who keeps what.

Modules written over it (`modules`, `reference`, `families`) say which ops they run; `ops` and `kernels` say of each op
what it makes, what it saves and what its backward makes. Python's reference counts end a tensor where they would end
torch's. Sizes may be whole numbers or numpy arrays of them, one entry a configuration.

Source: the op's entries in torch's derivatives.yaml and autograd engine (engine.cpp, input_buffer.cpp,
accumulate_grad.h), torch 2.13, read and written down anew. Checked: tests/estimate/test_tape.py and the agreement of
whole steps with the trace, tests/estimate/test_agreement.py.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from memplan.dtypes import ELEMENT_BYTES
from memplan.estimate.engine import run_backward
from memplan.estimate.tensors import Alloc, Backward, Holder, Node, Parameter, Shape, Storage, Tensor

__all__ = ["Alloc", "Holder", "HostBytes", "Node", "Parameter", "Row", "Shape", "Storage", "Tape", "Tensor"]

CUDA_BLOCK_BYTES = 512
"""The allocator rounds each request up to this. Source: kMinBlockSize, c10/cuda/CUDACachingAllocator.cpp."""


class Tape:
    """The ledger of one step."""

    def __init__(
        self, rules: str, *, generation: tuple[int, int] = (9, 0), multiprocessors: int = 132, workspace_bytes: int = 0
    ) -> None:
        self.rules = rules
        """`cuda` or `cpu`: whose rounding, kernels and autocast lists hold."""
        self.block_bytes = 1 if rules == "cpu" else CUDA_BLOCK_BYTES
        """What the device's allocator rounds each request up to."""
        self.generation = generation
        """Compute capability of the card."""
        self.multiprocessors = multiprocessors
        """Of the card."""
        self.workspace_bytes = workspace_bytes
        """What cuBLAS takes for each thread that runs products."""
        self.allocs: list[Alloc] = []
        self.events: list[int] = []
        """Index of an allocation where it begins, its complement where it ends."""
        self.marks: list[tuple[int, str]] = []
        """Where each phase begins."""
        self.phase = "init"
        self.part = ""
        self.parameters: list[Parameter] = []
        self.copies = 1
        """Blocks that a parameter made now speaks for."""
        self.component = "blocks"
        """What a parameter made now belongs to."""
        self.grad_enabled = True
        self.autocast: str | None = None
        """Low-precision dtype where autocast is on."""
        self.casts: dict[Parameter, Tensor] = {}
        """Autocast's copies of weights."""
        self.cast_others: list[Storage] = []
        """The same copies in blocks that others speak for."""
        self.setup: Any = None
        """How the step makes parameters."""
        self.sharding: Any = None
        """This rank's share of the model; None where there is one rank."""
        self.blocks: list[Any] = []
        """The modules that a step means by its blocks."""
        self.frame: Any = None
        """The checkpointed region that runs now, if one does."""
        self.policy: Any = None
        """What a selective region keeps."""
        self.on_grad: Callable[[Parameter], None] | None = None
        """Who hears that a gradient is complete."""
        self.keeps_grads = True
        """Whether a gradient outlives the moment in which it is complete."""
        self.managed_bytes = 0
        """In unified memory, which is no allocator's."""
        self.host_bytes = 0
        """What waits on the host now."""
        self.peak_host_bytes = 0
        """Most that waited there at once."""
        self.offloaded_bytes = 0
        """What stays there from step to step."""
        self.rows: list[Row] = []
        """The calls of units that stand for several, and their backwards."""
        self.again = 0, 0
        """Events of a chunk that stands for several."""
        self.rest_of: dict[int, int] = {}
        """Of what a unit keeps for backward, the allocation of the other blocks that it speaks for."""
        self.open_rows: list[tuple[int, Row]] = []
        """A backward that is going on, with the number of the last node before those of its unit."""
        self.thread = "forward"
        self.once: dict[str, int] = {}
        """What is allocated once and for good, by name."""
        self.made_late: dict[int, int] = {}
        """Event before which the first step makes an allocation that later ones find there."""
        self.held: list[Tensor] = []
        """Logits that whoever called the model still has."""
        self.kept: list[Any] = []
        """What stays for as long as the ledger is written."""
        self.seq = 0
        """Number of the last node."""

    def leave_autocast(self) -> None:
        """Ends autocast, and with it the copies that nobody saved."""
        self.autocast = None
        self.casts.clear()
        self.cast_others.clear()

    def mark(self, phase: str) -> None:
        """Says that `phase` begins now."""
        self.phase = phase
        self.marks.append((len(self.events), phase))

    def allocate(
        self, op: str, shape: Shape, dtype: str, *, category: str = "", copies: int = 1, rest: bool = False
    ) -> Storage:
        """Memory for `copies` tensors of `shape`, see `Alloc`."""
        num_bytes = math.prod(shape) * ELEMENT_BYTES[dtype]
        if self.block_bytes > 1:
            num_bytes = -(-num_bytes // self.block_bytes) * self.block_bytes
        num_bytes *= copies
        index = len(self.allocs)
        self.allocs.append(Alloc(num_bytes, op, self.part, self.phase, shape, dtype, category, copies, rest=rest))
        self.events.append(index)
        return Storage(self, index)

    def end(self, index: int) -> None:
        """Notes that a storage is gone."""
        self.allocs[index].died = self.phase
        self.events.append(~index)

    def new(self, op: str, shape: Shape, dtype: str, *, category: str = "") -> Tensor:
        """A tensor of its own that no policy is asked about."""
        return Tensor(self.allocate(op, shape, dtype, category=category), shape, dtype)

    def make(self, op: str, *outputs: tuple[Shape, str]) -> Any:
        """What `op` makes: a tensor, or a list of several; a selective region may keep them, or have kept them."""
        if self.policy is not None:
            made = self.policy.outputs(self, op, outputs)
        else:
            made = [Tensor(self.allocate(op, shape, dtype), shape, dtype) for shape, dtype in outputs]
        return made[0] if len(made) == 1 else made

    def hidden(self, op: str, *sizes: int) -> None:
        """Bytes that an op takes inside itself, all at once, until it returns."""
        held = [self.allocate(op, (size,), "uint8") for size in sizes]
        held.clear()

    def stay(self, name: str, num_bytes: int) -> None:
        """Bytes that the first op which needs them takes for good."""
        if not num_bytes:
            return
        if name in self.once:
            self.made_late.setdefault(self.once[name], len(self.events))
            return
        storage = self.allocate(name, (num_bytes,), "uint8", category="other")
        self.once[name] = storage.index
        self.kept.append(storage)

    def parameter(self, name: str, shape: Shape, dtype: str, *, trains: bool) -> Parameter:
        """A parameter of the module that is being built."""
        if self.sharding is None:
            storage = self.allocate("parameter", shape, dtype, category="params", copies=self.copies)
        else:
            storage, dtype = self.sharding.parameter(shape, dtype, self.copies)
        parameter = Parameter(storage, shape, dtype, name=name, component=self.component, copies=self.copies)
        parameter.requires_grad = trains
        self.parameters.append(parameter)
        return parameter

    def record(
        self, name: str, inputs: Iterable[Tensor | None], backward: Backward, saves: Any = (), info: Any = None
    ) -> Node | None:
        """The node of an op on `inputs` that saves `saves`; None where nothing asks for gradients."""
        if not self.grad_enabled:
            return None
        edges = [
            None if t is None or not t.requires_grad else ((t, 0) if t.node is None else (t.node, t.slot))
            for t in inputs
        ]
        if not any(edges):
            return None
        self.seq += 1
        node = Node(name, self.seq, edges, [], backward, info, self.part)
        for tensor in saves:
            node.saved.append(None if tensor is None else self.pack(tensor))
        return node

    def link(self, node: Node | None, *outputs: Tensor, saved: Sequence[Tensor] = ()) -> Any:
        """`outputs` as those of `node`, which saves some of them too."""
        if node is not None:
            for slot, out in enumerate(outputs):
                out.node, out.slot, out.requires_grad = node, slot, True
                node.dtypes.append(out.dtype)
            node.saved += [self.pack(tensor) for tensor in saved]
        return outputs[0] if len(outputs) == 1 else outputs

    def close_row(self) -> None:
        """Says that the backward of a unit that stands for several is over."""
        _, row = self.open_rows.pop()
        row.end = len(self.events)
        self.rows.append(row)

    def pack(self, tensor: Tensor) -> Any:
        """What a node holds of a tensor that it saves."""
        return tensor.alias() if self.frame is None else self.frame.pack(tensor)

    def backward(self, root: Tensor, seed: Tensor | None = None, *, retain: bool = False) -> None:
        """Runs backward from a scalar, or from a tensor whose gradient is `seed`; `retain` keeps what was saved."""
        run_backward(self, root, seed, retain=retain)


@dataclass(slots=True)
class Row:
    """Events of a unit of blocks that stands for `copies`: of its call, or of its backward."""

    copies: int
    start: int
    end: int = -1
    """Behind its last event."""
    call: "Row | None" = None
    """The call whose backward it is."""


class HostBytes:
    """Memory of the host that ends with its last reference."""

    def __init__(self, tape: Tape, num_bytes: int) -> None:
        self.tape = tape
        self.num_bytes = num_bytes
        tape.host_bytes += num_bytes
        tape.peak_host_bytes = max(tape.peak_host_bytes, tape.host_bytes)

    def __del__(self) -> None:
        self.tape.host_bytes -= self.num_bytes
