"""Tensors without values: shape, dtype, and a storage that ends with its last reference."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from memplan.dtypes import ELEMENT_BYTES

if TYPE_CHECKING:
    from memplan.estimate.tape import Tape

Shape = tuple[int, ...]
Grads = Sequence["Tensor | None"]
Backward = Callable[["Node", list[Any], list[Any]], Grads]
"""(node, saved tensors, gradients of its outputs) -> gradients of its inputs."""


class Alloc:
    """One storage, from the op that made it to its end."""

    __slots__ = ("category", "copies", "died", "dtype", "num_bytes", "op", "part", "phase", "rest", "shape")

    def __init__(
        self,
        num_bytes: int,
        op: str,
        part: str,
        phase: str,
        shape: Shape,
        dtype: str,
        category: str = "",
        copies: int = 1,
        *,
        rest: bool = False,
    ) -> None:
        self.num_bytes = num_bytes
        """Bytes as the allocator counts them, of all its copies."""
        self.op = op
        self.part = part
        """Path of the module, the number of a block left out."""
        self.phase = phase
        self.shape = shape
        self.dtype = dtype
        self.category = category
        """Empty until settled."""
        self.died = ""
        """Phase in which it ended, empty while it lives."""
        self.copies = copies
        """Equal storages that it stands for."""
        self.rest = rest
        """Whether these are of the blocks that one speaks for, which has one of its own."""


class Storage:
    """Memory that ends with its last reference."""

    __slots__ = ("__weakref__", "index", "tape")

    def __init__(self, tape: "Tape", index: int) -> None:
        self.tape = tape
        self.index = index

    def __del__(self) -> None:
        self.tape.end(self.index)


class Tensor:
    """Shape and dtype over a storage; views share one."""

    __slots__ = (
        "__weakref__",
        "dense",
        "dtype",
        "is_view",
        "node",
        "place",
        "requires_grad",
        "shape",
        "slot",
        "storage",
    )

    def __init__(self, storage: Storage, shape: Shape, dtype: str, *, dense: bool = True) -> None:
        self.storage = storage
        self.shape = shape
        self.dtype = dtype
        self.dense = dense
        """Whether it has its elements to itself; an expanded tensor has not."""
        self.is_view = False
        """Whether it holds on to the tensor that it is a view of."""
        self.place: tuple[Any, ...] = ()
        """Which part of its storage it is, and how turned, where that is not told by its shape."""
        self.node: Node | None = None
        self.slot = 0
        self.requires_grad = False

    @property
    def tape(self) -> "Tape":
        """Where it is noted."""
        return self.storage.tape

    @property
    def numel(self) -> Any:
        """Elements."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return ELEMENT_BYTES[self.dtype]

    def alias(self, shape: Shape | None = None, *, dense: bool | None = None) -> "Tensor":
        """The same memory under `shape`, without history."""
        other = Tensor(self.storage, self.shape if shape is None else shape, self.dtype)
        other.dense = self.dense if dense is None else dense
        other.is_view = shape is not None or self.is_view
        other.place = self.place
        return other


class Parameter(Tensor):
    """A leaf that may train; `copies` equal ones in the blocks that it speaks for."""

    __slots__ = ("component", "copies", "grad", "idle", "name", "others", "state")

    def __init__(self, storage: Storage, shape: Shape, dtype: str, *, name: str, component: str, copies: int) -> None:
        super().__init__(storage, shape, dtype)
        self.name = name
        self.component = component
        self.copies = copies
        self.grad: Tensor | None = None
        self.others: Storage | None = None
        """Gradients of the other copies."""
        self.state: list[Storage] = []
        """What an optimizer keeps for it."""
        self.idle = False
        """Whether no gradient ever comes, though it trains: optimizers leave such parameters alone."""


class Node:
    """What backward does for one op."""

    __slots__ = ("backward", "dtypes", "edges", "info", "name", "part", "saved", "seq")

    def __init__(
        self, name: str, seq: int, edges: list[Any], saved: list[Any], backward: Backward, info: Any, part: str
    ) -> None:
        self.name = name
        self.seq = seq
        self.edges = edges
        self.saved = saved
        self.backward = backward
        self.info = info
        self.part = part
        self.dtypes: list[str] = []
        """Of its outputs, which their gradients take."""

    def __lt__(self, other: "Node") -> bool:
        return self.seq > other.seq


class Holder:
    """The place of a tensor that a checkpointed region makes again."""

    __slots__ = ("__weakref__", "frame", "number")

    def __init__(self, frame: Any, number: int) -> None:
        self.frame = frame
        self.number = number

    def unpack(self, tape: "Tape") -> Tensor:
        """The tensor, made again if it is not there."""
        tensor: Tensor = self.frame.unpack(tape, self.number)
        return tensor
