"""Looks on while regions run and run again: is every tensor that is made again the one that was made before?"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.record.parity import Mutation, RecomputeDifference
from memplan.step.mutation import Outside, written
from memplan.step.region import Contexts, Region
from memplan.step.results import Result, largest_difference, op_name, results, same_bits

aten = torch.ops.aten
UNCOUNTED = {aten.detach.default, aten._to_copy.default}
"""Ops whose number may differ between the two runs: checkpointing detaches what it saves, and autocast casts a weight
once for all regions in forward, and once more in each recomputation. What is made of their results is compared."""


@dataclass(slots=True)
class Original:
    """One op of a region's forward."""

    op: str
    module: str
    results: list[Result]


class Running:
    """The module that runs now, by its path in `model`."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): path for path, module in model.named_modules()}
        self._stack: list[str] = []

    @property
    def path(self) -> str:
        """Path of the innermost module, or empty outside of all."""
        return self._stack[-1] if self._stack else ""

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Hears of every module that begins and ends."""
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._begin).remove)
            stack.callback(register_module_forward_hook(self._end, always_call=True).remove)
            yield

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """`path` runs, whoever begins and never ends inside of it."""
        depth = len(self._stack)
        self._stack.append(path)
        try:
            yield
        finally:
            del self._stack[depth:]

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(id(module), type(module).__name__))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()


class Witness:
    """Looks on at one step of `model`: `with Witness(model) as witness`, each region's `watch` being the witness.

    Of every op of a region it keeps what it made, more than plain training would keep, until the recomputation has made
    it again. Fake tensors have no values: of them ops, shapes and dtypes are compared.
    """

    def __init__(self, model: nn.Module) -> None:
        self.running = Running(model)
        """The module that runs."""
        named = [*model.named_parameters(), *model.named_buffers()]
        self.names = {tensor.untyped_storage()._cdata: name for name, tensor in reversed(named)}
        """Parameters and buffers, by storage."""
        self.num_compared = 0
        """Results of ops that were made again, and compared."""
        self.pending: list[Call] = []
        """Calls that have not been recomputed yet."""
        self._num_calls = 0
        self._differences: dict[int, RecomputeDifference] = {}
        self._mutations: dict[Mutation, None] = {}
        self._stack = ExitStack()

    @property
    def first(self) -> RecomputeDifference | None:
        """The first difference of the first call, in the order of forward, that has one."""
        return self._differences[min(self._differences)] if self._differences else None

    @property
    def mutations(self) -> tuple[Mutation, ...]:
        """What was written in place before a recomputation that reads or writes it."""
        return tuple(self._mutations)

    def __enter__(self) -> Self:
        self._stack.enter_context(self.running.heard())
        self._stack.enter_context(Writes(self))
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        self._stack.__exit__(kind, *error)
        for call in self.pending if kind is not None else ():
            self.report(call)
        self.pending.clear()

    def __call__(self, region: Region) -> Contexts:
        """Contexts for one call of `region` and its recomputation."""
        self._num_calls += 1
        call = Call(self, region.name, self._num_calls)
        return call.forward(), call.again()

    def report(self, call: "Call") -> None:
        """Takes down what was written before the recomputation of `call`."""
        self._mutations |= dict.fromkeys(call.outside.mutations(call.region))

    def differs(self, call: "Call", difference: RecomputeDifference) -> None:
        """Takes down the first difference of `call`."""
        self._differences.setdefault(call.number, difference)


class Call:
    """One call of a region: what its ops made, and what they make again."""

    def __init__(self, witness: Witness, region: str, number: int) -> None:
        self.witness = witness
        self.region = region
        self.number = number
        self.outside = Outside(witness.names)
        self.runs = False
        """Whether its forward runs now."""
        self._originals: list[Original] = []
        self._position = 0
        self._done = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The forward is recorded."""
        self.witness.pending.append(self)
        self.runs = True
        with self.witness.running.inside(self.region), Recording(self):
            yield
        self.runs = False

    @contextmanager
    def again(self) -> Iterator[None]:
        """The recomputation is compared with it."""
        if self in self.witness.pending:
            self.witness.pending.remove(self)
            self.witness.report(self)
        try:
            with self.witness.running.inside(self.region), Comparing(self):
                yield
        finally:
            self._done = True
            self._originals.clear()

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An op of forward has run."""
        module = self.witness.running.path
        self.outside.see(func, args, kwargs, out, f"{op_name(func)} in {module}")
        if func not in UNCOUNTED and (made := results(func, out)):
            self._originals.append(Original(op_name(func), module, made))

    def compare(self, func: Any, out: Any) -> None:
        """An op of the recomputation has run; after the first difference, and where it makes no tensor, it is left
        alone."""
        if self._done or func in UNCOUNTED:
            return
        op, made = op_name(func), results(func, out, copies=False)
        if not made:
            return
        ended = self._position >= len(self._originals)
        original = Original("", self.witness.running.path, []) if ended else self._originals[self._position]
        if op != original.op or len(made) != len(original.results):
            self._differ(original, op, made[:1], original.results[:1], None)
            return
        for before, after in zip(original.results, made, strict=True):
            self.witness.num_compared += 1
            if (before.shape, before.dtype) != (after.shape, after.dtype):
                self._differ(original, op, [after], [before], None)
                return
            if before.values is not None and after.values is not None and not same_bits(before.values, after.values):
                self._differ(original, op, [after], [before], largest_difference(before.values, after.values))
                return
        original.results.clear()
        self._position += 1

    def _differ(
        self, original: Original, op: str, after: list[Result], before: list[Result], max_abs: float | None
    ) -> None:
        nothing = Result((), "", None)
        was, now = (before or [nothing])[0], (after or [nothing])[0]
        self._done = True
        self.witness.differs(
            self,
            RecomputeDifference(
                region=self.region,
                module=original.module,
                position=self._position,
                op=original.op,
                op_again=op,
                shape=was.shape,
                shape_again=now.shape,
                dtype=was.dtype,
                dtype_again=now.dtype,
                max_abs=max_abs,
            ),
        )


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hears the ops of a region's forward."""

    supports_higher_order_operators = True

    def __init__(self, call: Call) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        with torch._C._DisableTorchDispatch():
            self.call.record(func, args, kwargs or {}, out)
        return out


class Comparing(Recording):  # type: ignore[no-untyped-call]
    """Hears the ops of its recomputation. It stands innermost, so that what a selective policy hands out passes it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        with torch._C._DisableTorchDispatch():
            self.call.compare(func, out)
        return out


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hears the ops that write in place, in regions and between them."""

    supports_higher_order_operators = True

    def __init__(self, witness: Witness) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.witness = witness

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written(func, args, kwargs or {}):
            where = f"{op_name(func)} in {self.witness.running.path or 'the step'}"
            for call in self.witness.pending:
                call.outside.write(tensor, where, inside=call.runs)
        return func(*args, **(kwargs or {}))
