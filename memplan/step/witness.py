"""Who looks on while regions run and run again: each recomputed result beside its original, and writes in between.

In forward every op's results are kept, whatever that costs; in the recomputation each op is compared with the one that
stood in its place. The first difference is named. A tensor from outside of a region that is written in place, inside it
or before it runs again, is named with who reads and who writes it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from memplan.record.parity import Mutation, RecomputeDifference
from memplan.step.region import Contexts, Region

SILENT = {torch.ops.prim.device.default, torch.ops.aten.detach.default}
"""Ops that make nothing; the checkpoint machinery calls the second when it pleases."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One op of a region's forward."""

    op: str
    module: str
    results: tuple[Tensor, ...]
    versions: tuple[int, ...]


@dataclass(slots=True)
class Call:
    """One call of a region: what its forward did, and how far its recomputation came."""

    region: str
    ops: list[Seen] = field(default_factory=list)
    made: dict[int, Any] = field(default_factory=dict)
    """Storages made inside, by address, held so that no address is given out twice."""
    again: dict[int, Any] = field(default_factory=dict)
    """Those made by the recomputation."""
    position: int = 0


class Witness:
    """Looks on at `regions` of a model while it is entered; what it found stays."""

    def __init__(self, model: nn.Module, regions: list[Region]) -> None:
        self.num_compared = 0
        """Results compared with their originals."""
        self.first: RecomputeDifference | None = None
        """The first that differs."""
        self.mutations: dict[tuple[str, str], Mutation] = {}
        """By region and tensor."""
        self._regions = regions
        self._paths = {id(module): path for path, module in model.named_modules()}
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors}
        self._running: list[str] = []
        self._writers: dict[int, str] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Witness":
        module = nn.modules.module
        for hook in (
            module.register_module_forward_pre_hook(lambda one, _: self._enter_module(one)),
            module.register_module_forward_hook(lambda *_: self._leave_module(), always_call=True),
        ):
            self._stack.callback(hook.remove)
        self._stack.enter_context(Listener(self._note_writes))
        for region in self._regions:
            region.watch = self._watch
        return self

    def __exit__(self, *error: Any) -> None:
        for region in self._regions:
            region.watch = None
        self._stack.__exit__(*error)

    def _enter_module(self, module: nn.Module) -> None:
        self._running.append(self._paths.get(id(module), type(module).__name__))

    def _leave_module(self) -> None:
        if self._running:
            self._running.pop()

    def _watch(self, region: Region) -> Contexts:
        call = Call(region.name)
        return (
            self._inside(lambda *seen: self._note(call, *seen)),
            self._inside(lambda *seen: self._compare(call, *seen)),
        )

    @contextmanager
    def _inside(self, hear: "Hear") -> Iterator[None]:
        """`hear` is told of each op; the stack of modules is left as it was, however the region ends."""
        before = list(self._running)
        try:
            with Listener(hear):
                yield
        finally:
            self._running = before

    @property
    def _here(self) -> str:
        return self._running[-1] if self._running else ""

    def _note(self, call: Call, func: Any, args: list[Any], out: list[Tensor]) -> None:
        for tensor in written(func, args):
            self._writes(call, call.made, func, tensor)
        with _disable_current_modes():
            results = tuple(kept(tensor) for tensor in out)
        versions = tuple(version(tensor) for tensor in args if isinstance(tensor, Tensor))
        call.ops.append(Seen(str(func), self._here, results, versions))
        hold(call.made, func, args, out)

    def _compare(self, call: Call, func: Any, args: list[Any], out: list[Tensor]) -> None:
        position, call.position = call.position, call.position + 1
        for tensor in written(func, args):
            self._writes(call, call.again, func, tensor)
        seen = call.ops[position] if position < len(call.ops) else None
        if seen is not None and seen.op == str(func):
            self._reads(call, seen, func, args)
        hold(call.again, func, args, out)
        self.num_compared += len(out)
        if self.first is None:
            with _disable_current_modes():
                self.first = difference(call.region, position, seen, str(func), self._here, out)

    def _writes(self, call: Call, made: dict[int, Any], func: Any, tensor: Tensor) -> None:
        if tensor.untyped_storage()._cdata not in made:
            name = self._name(tensor)
            mutation = Mutation(region=call.region, tensor=name, reader="", writer=self._said(func))
            self.mutations.setdefault((call.region, name), mutation)

    def _reads(self, call: Call, seen: Seen, func: Any, args: list[Any]) -> None:
        tensors = [tensor for tensor in args if isinstance(tensor, Tensor)]
        for tensor, before in zip(tensors, seen.versions, strict=False):
            address = tensor.untyped_storage()._cdata
            if address in call.again or version(tensor) == before:
                continue
            writer = self._writers.get(address, "an op that was not seen")
            name = self._name(tensor)
            mutation = Mutation(region=call.region, tensor=name, reader=self._said(func), writer=writer)
            self.mutations.setdefault((call.region, name), mutation)

    def _note_writes(self, func: Any, args: list[Any], out: list[Tensor]) -> None:
        for tensor in written(func, args):
            self._writers[tensor.untyped_storage()._cdata] = self._said(func)

    def _said(self, func: Any) -> str:
        return f"{func} of {self._here}" if self._here else str(func)

    def _name(self, tensor: Tensor) -> str:
        described = f"a tensor {list(tensor.shape)} {str(tensor.dtype)[6:]}"
        return self._names.get(tensor.untyped_storage()._cdata, described)


Hear = Callable[[Any, list[Any], list[Tensor]], None]


class Listener(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells `hear` of each op that has run: the op, its arguments one by one, its results."""

    def __init__(self, hear: Hear) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hear = hear

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in SILENT:
            results = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
            self._hear(func, tree_leaves((args, kwargs or {})), results)
        return out


def written(func: Any, args: list[Any]) -> list[Tensor]:
    """Tensors that an op writes in place: the first ones of its arguments, as its schema says."""
    if not func._schema.is_mutable:
        return []
    marks = [argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments]
    return [value for value, mark in zip(args, marks, strict=False) if mark and isinstance(value, Tensor)]


def hold(made: dict[int, Any], func: Any, args: list[Any], out: list[Tensor]) -> None:
    """Notes the storages of results as made here, unless they are an argument's, as views are."""
    given = {tensor.untyped_storage()._cdata for tensor in args if isinstance(tensor, Tensor)}
    for tensor in out:
        storage = tensor.untyped_storage()
        if storage._cdata not in given:
            made[storage._cdata] = storage


def version(tensor: Tensor) -> int:
    """How often `tensor` was written in place; 0 where nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


def kept(tensor: Tensor) -> Tensor:
    """The values of `tensor` as they are now; a fake one's metadata."""
    detached = tensor.detach()
    return detached if is_fake(tensor) else detached.clone()


def is_fake(tensor: Tensor) -> bool:
    """Whether `tensor` has no values."""
    return type(tensor).__name__ == "FakeTensor" or tensor.device.type == "meta"


def difference(
    region: str, position: int, seen: Seen | None, op: str, module: str, out: list[Tensor]
) -> RecomputeDifference | None:
    """How the results `out` of `op` differ from those of the op that was seen in its place; None where they do not."""

    def found(was: Tensor | None, now: Tensor | None, max_abs: float | None = None) -> RecomputeDifference:
        return RecomputeDifference(
            region=region,
            module=module,
            position=position,
            op="" if seen is None else seen.op,
            op_again=op,
            shape=() if was is None else tuple(was.shape),
            shape_again=() if now is None else tuple(now.shape),
            dtype="" if was is None else str(was.dtype)[6:],
            dtype_again="" if now is None else str(now.dtype)[6:],
            max_abs=max_abs,
        )

    if seen is None or seen.op != op or len(seen.results) != len(out):
        was = seen.results[0] if seen is not None and seen.results else None
        return found(was, out[0] if out else None)
    for was, now in zip(seen.results, out, strict=True):
        if was.shape != now.shape or was.dtype != now.dtype:
            return found(was, now)
        if not is_fake(now) and not same_bits(was, now):
            return found(was, now, float((was.double() - now.double()).abs().max()))
    return None


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same values, NaN where the other has NaN."""
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
