"""The largest tensors that are alive when a step fails, by module and op.

Nothing is recorded while steps run. Everything is read at the moment of the failure, while its traceback still holds
the frames: parameters, gradients and optimizer state by name, Python's tensors as its collector knows them, and what
autograd keeps, which only the graph behind them tells. A gradient on its way through backward belongs to torch's engine
alone and is not seen.
"""

import dataclasses
import gc
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.backends.held import storages
from memplan.backends.subject import Subject
from memplan.record.trace import LiveTensor

MOST = 10
"""Kinds of tensors that are told."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""A block's number in a path."""
VIEWS = frozenset(
    (
        *("alias", "as_strided", "chunk", "detach", "diagonal", "expand", "flatten", "movedim", "narrow", "permute"),
        *("reshape", "reshape_alias", "select", "slice", "split", "split_with_sizes", "squeeze", "swapaxes", "t"),
        *("transpose", "unbind", "unfold", "unsafe_chunk", "unsafe_split", "unsafe_view", "unsqueeze", "view"),
        "view_as",
    )
)
"""Ops whose result lies in their input's memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A tensor with what it is."""

    tensor: Tensor
    category: str
    module: str
    op: str


class NothingRuns(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """No op runs inside but looking at a tensor: what autograd would recompute or fetch stays where it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            raise NotNow
        return func(*args, **(kwargs or {}))


class NotNow(RuntimeError):
    """An op that would have run."""


def largest(subject: Subject, device: torch.device, *, most: int = MOST) -> tuple[LiveTensor, ...]:
    """The `most` largest kinds of tensors alive on `device`, equal ones counted together, each storage once."""
    seen: set[int] = set()
    counts: Counter[LiveTensor] = Counter()
    for found in alive(subject):
        for storage in storages(found.tensor):
            if storage.device.type != device.type or not storage.nbytes() or storage._cdata in seen:
                continue
            seen.add(storage._cdata)
            kind = LiveTensor(
                num_bytes=storage.nbytes(),
                category=found.category,
                module=NUMBER.sub("*", found.module),
                op=found.op,
                shape=tuple(found.tensor.shape),
                dtype=str(found.tensor.dtype).removeprefix("torch."),
            )
            counts[kind] += 1
    together = [dataclasses.replace(kind, count=count) for kind, count in counts.items()]
    return tuple(sorted(together, key=lambda kind: -kind.total_bytes)[:most])


def alive(subject: Subject) -> Iterator[Found]:
    """Everything that can be named, the surest first, so that a storage bears the first name that it is met under."""
    params = subject.named_parameters()
    for name, param in params.items():
        yield Found(param, "params", module_of(name), "parameter")
    for name, buffer in subject.named_buffers().items():
        yield Found(buffer, "buffers", module_of(name), "buffer")
    for name, grad in subject.gradients():
        yield Found(grad, "grads", module_of(name), "gradient")
    for name, key, state in subject.states():
        yield Found(state, "optimizer", module_of(name), key)
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    graph = Graph((tensor.grad_fn for tensor in tensors if not tensor.is_leaf), params)
    yield from graph.saved()
    for tensor in tensors:
        if tensor.is_leaf:
            yield Found(tensor, "other", "", "")
        else:
            yield graph.made(tensor, tensor.grad_fn)


class Graph:
    """The autograd graph below some nodes, each node with the module of the nearest parameter that went into it."""

    def __init__(self, roots: Iterable[Any], params: dict[str, Tensor]) -> None:
        names = {id(param): name for name, param in params.items()}
        above: dict[Any, list[Any]] = {}
        waiting = deque(dict.fromkeys(node for node in roots if node is not None))
        self._nodes = dict.fromkeys(waiting)
        while waiting:
            node = waiting.popleft()
            for below, _ in node.next_functions:
                if below is None:
                    continue
                above.setdefault(below, []).append(node)
                if below not in self._nodes:
                    self._nodes[below] = None
                    waiting.append(below)
        self._modules: dict[Any, str] = {}
        near = deque(node for node in self._nodes if id(getattr(node, "variable", None)) in names)
        for node in near:
            self._modules[node] = module_of(names[id(node.variable)])
        while near:
            node = near.popleft()
            for over in above.get(node, ()):
                if over not in self._modules:
                    self._modules[over] = self._modules[node]
                    near.append(over)

    def saved(self) -> Iterator[Found]:
        """What the nodes keep for backward. Nodes that gave it back already, and what would have to be made again to be
        looked at, are passed over."""
        with NothingRuns():  # type: ignore[no-untyped-call]
            for node in self._nodes:
                for tensor in saved_by(node):
                    yield self.made(tensor, node)

    def made(self, tensor: Tensor, node: Any) -> Found:
        """`tensor`, kept or made by `node`, under the op that made it: through views the one behind them."""
        maker = tensor.grad_fn if tensor.grad_fn is not None else node
        while op_of(maker) in VIEWS and maker.next_functions and maker.next_functions[0][0] is not None:
            below = maker.next_functions[0][0]
            if hasattr(below, "variable"):
                break
            maker = below
        return Found(tensor, "activations", self._modules.get(maker, self._modules.get(node, "")), op_of(maker))


def saved_by(node: Any) -> Iterator[Tensor]:
    """Tensors that `node` keeps for backward."""
    names = [name for name in dir(node) if name.startswith("_saved_")]
    for name in [*names, "saved_tensors"]:
        with suppress(RuntimeError, AttributeError):  # given back, or packed away
            value = getattr(node, name)
            for tensor in value if isinstance(value, tuple | list) else (value,):
                if isinstance(tensor, Tensor):
                    yield tensor


def op_of(node: Any) -> str:
    """The op whose backward `node` is: `mm` of MmBackward0, and the class of a custom Function."""
    name = re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])
    if not re.search(r"Backward\d+$", node.name()):
        return name or node.name()
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def module_of(name: str) -> str:
    """Path of the module whose parameter is called `name`."""
    return name.rpartition(".")[0]
