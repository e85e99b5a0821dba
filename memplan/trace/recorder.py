"""The recorder: a dispatch mode that notes each new storage, weakly, and the moment it dies.

It works on fake tensors and on real CPU tensors alike. A storage is new when no earlier op made it, so views and
in-place ops make no event; an in-place resize ends the storage's old size and begins the new one.
"""

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memplan.trace.accumulation import SUM, adds_in_place, in_place
from memplan.trace.collectives import buffers
from memplan.trace.events import Alloc, Hidden, Mark, Sync, Trace, note_hidden, order_frees
from memplan.trace.frames import FROM_PYTHON, caller, in_optimizer, stack, untraceable
from memplan.trace.module_paths import ModulePaths
from memplan.trace.plain_mode import PlainMode
from memplan.trace.reads import FOLLOWED, READS, Alarms
from memplan.trace.storages import OnResize, inside, is_shell

SILENT = {torch.ops.prim.device.default}
"""Ops that make no tensor; most dispatches on a fake tensor are one of them."""
RECOMPUTING = "recompute"
STEPPING = ("optimizer", "backward")  # phases in which an optimizer may take its step
IN_ORDER = ("forward", "loss")
"""Phases whose ops outside of modules belong to the model as a whole."""


class Recorder(PlainMode):  # type: ignore[no-untyped-call]
    """Notes what the ops inside it allocate and free.

    `frames` keeps the Python stack of each allocation. `logits_width` is the size of the last dimension by which
    logits are known. `hidden` gives the bytes that an op takes inside itself for a moment, and those that it takes for
    good. With `guess_phases` nobody calls `mark`: backward is where autograd runs, the optimizer where one steps,
    forward everything else, and a model is claimed when it is first called.
    """

    def __init__(
        self,
        *,
        frames: bool = False,
        logits_width: int | None = None,
        hidden: Hidden | None = None,
        guess_phases: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates neither of these
        self.trace = Trace()
        self.phase = "init"
        self.hidden = hidden
        self.host_outputs: Mapping[str, tuple[int, ...]] = {}  # outputs that the device's kernels leave on the host
        self.optimizer_on_host = False  # whether the host steps
        self.counters_on_host = False  # whether tensors that an optimizer makes from numbers are the host's
        self._guesses = guess_phases
        self._in_optimizer = False
        self._claimed: set[int] = set()
        self._frames = frames
        self._logits_width = logits_width
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}  # storage -> index of its Alloc
        self._elsewhere: dict[int, weakref.ref[Any]] = {}  # storages that are not the device's
        self._paths = ModulePaths()
        self._alarms = Alarms()
        self._hooks: list[Any] = []
        self._place = ""  # module of the last op
        self._sum: tuple[int, int | None] = (0, None)  # event of a sum of gradients, and its first addend

    def __enter__(self) -> "Recorder":
        self._hooks = [
            nn.modules.module.register_module_forward_pre_hook(self._enter_module),
            nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True),
            OnResize(self._resized),
        ]
        if self._guesses:
            self._hooks += [
                register_optimizer_step_pre_hook(lambda *_: setattr(self, "_in_optimizer", True)),
                register_optimizer_step_post_hook(lambda *_: setattr(self, "_in_optimizer", False)),
            ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        while self._hooks:
            self._hooks.pop().remove()
        self._known = {}  # what dies from now on is no part of the story
        order_frees(self.trace)

    def mark(self, phase: str) -> None:
        """Says that `phase` begins now."""
        self.phase = phase
        self.trace.marks.append(Mark(at=len(self.trace.events), phase=phase))

    def claim(self, tensor: Tensor, category: str, module: str = "") -> None:
        """Says what the storage of `tensor` is for and whose it is; one made before the recorder is noted now."""
        tensor = inside(tensor)
        storage = tensor.untyped_storage()
        index = self._index_of(storage)
        if storage._cdata in self._elsewhere:
            return
        if index is None:
            index = self._add(storage, tensor, "before", self.phase, module)
        alloc = self.trace.allocs[index]
        alloc.category = category
        alloc.module = alloc.module or module

    def leave_out(self, tensor: Tensor) -> None:
        """Takes back the storage of `tensor`, which was made by the last op: it is not on the device."""
        key, trace = tensor.untyped_storage()._cdata, self.trace
        index, storage = self._known.pop(key)
        assert index == trace.events[-1] == len(trace.allocs) - 1
        del trace.events[-1], trace.places[-1], trace.allocs[-1]
        self._leave_out(storage())

    def move_out(self, tensor: Tensor) -> None:
        """Ends the storage of `tensor` here: it moves to where it is no more the device's."""
        storage = inside(tensor).untyped_storage()
        if (index := self._index_of(storage)) is not None:
            self._end(storage._cdata, index)
            self._leave_out(storage)

    def _leave_out(self, storage: Any) -> None:
        key = storage._cdata
        self._elsewhere[key] = weakref.ref(storage, lambda _: self._elsewhere.pop(key, None))

    def claim_model(self, model: nn.Module) -> None:
        """Claims parameters and buffers, and each gradient as soon as it is there."""
        self._paths.name(model)
        for name, parameter in model.named_parameters():
            self.claim(parameter, "params", name.rpartition(".")[0])
            if parameter.requires_grad:
                listen: Any = parameter.register_post_accumulate_grad_hook
                listen(lambda one: None if one.grad is None else self.claim(one.grad, "grads"))
        for name, buffer in model.named_buffers():
            self.claim(buffer, "buffers", name.rpartition(".")[0])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in SILENT:
            return args[0].fake_device if type(args[0]) is FakeTensor else func(*args, **(kwargs or {}))
        if any(map(is_shell, types)):
            return NotImplemented  # a shell around tensors, whose own ops come by here too
        if self._guesses:
            self._guess_phase()
        try:
            out = in_place(func, args, self.trace)(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func not in READS:
                raise untraceable(func) from None
            value = self._alarms.read(func, args[0])
            self._note_read(func, value)
            return value
        except DynamicOutputShapeException:
            raise untraceable(func) from None
        if func in READS:
            self._note_read(func, out)
        elif func in FOLLOWED:
            self._alarms.follow(func, args, out)
        phase, place = self._here()
        if isinstance(out, Tensor):
            self._see(out, func, phase, place, args[0] if args else None)
            if func is SUM and adds_in_place(args[0]):
                self._sum = (len(self.trace.events) - 1, self._index_of(args[0].untyped_storage()))
        elif isinstance(out, tuple | list):
            sources = args[0] if args and isinstance(args[0], list | tuple) and len(args[0]) == len(out) else args
            for number in self.host_outputs.get(func._schema.name, ()):
                self._leave_out(out[number].untyped_storage())
            for number, item in enumerate(out):
                if isinstance(item, Tensor):
                    self._see(item, func, phase, place, sources[number] if number < len(sources) else None)
        elif place is None:
            self._place = self._place_of(args[0] if args else None)
        if func._schema.is_mutable and args and isinstance(args[0], Tensor):
            self._resized(args[0].untyped_storage(), op=str(func), shape=tuple(args[0].shape))
        for tensor, category in buffers(func, args, kwargs):
            index = self._index_of(tensor.untyped_storage())
            if index is not None and self.trace.allocs[index].category == "temps":
                self.trace.allocs[index].category = category
        if self.hidden is not None:
            note_hidden(self.trace, self.hidden(func, args, out), phase, self._place)
        return out

    def _guess_phase(self) -> None:
        phase = "forward"
        if torch._C._current_autograd_node() is not None:
            phase = "backward"
        elif self._in_optimizer:
            phase = "optimizer"
        elif self.phase == "init" and self._paths.running is None:
            return
        if phase != self.phase:
            self.mark(phase)

    def _see(self, tensor: Tensor, func: Any, phase: str, place: str | None, source: Any) -> None:
        """Notes the storage of `tensor` if it is new; an op outside of modules is where its `source` was made."""
        self._place = self._place_of(source) if place is None else place
        storage = tensor.untyped_storage()
        if self._index_of(storage) is None and storage.nbytes() and storage._cdata not in self._elsewhere:
            counter = self.counters_on_host and func is FROM_PYTHON and phase in STEPPING and in_optimizer()
            if counter or (self.optimizer_on_host and phase == "optimizer"):
                self._leave_out(storage)
            else:
                self._add(storage, tensor, str(func), phase, self._place)

    def _place_of(self, source: Any) -> str:
        """The module whose tensor `source` is; without a tensor, where the last op was."""
        if isinstance(source, list | tuple) and source:
            source = source[0]
        if not isinstance(source, Tensor):
            return self._place
        index = self._index_of(source.untyped_storage())
        return self._place if index is None else self.trace.allocs[index].module

    def _resized(self, storage: Any, **facts: Any) -> None:
        """Notes the new size of a storage, if it is new; one without bytes is remembered until it has some again."""
        key, index, trace = storage._cdata, self._index_of(storage), self.trace
        if index is None or (old := trace.allocs[index]).num_bytes * (not old.died) == storage.nbytes():
            return
        if not old.died:
            self._end(key, index)
            self._known[key] = (index, weakref.ref(storage, lambda _: self._known.pop(key, None)))
        if storage.nbytes():
            facts |= {"num_bytes": storage.nbytes(), "phase": self._here()[0], "died": ""}
            self._take(storage, dataclasses.replace(old, **facts), self._place)

    def _index_of(self, storage: Any) -> int | None:
        known = self._known.get(storage._cdata)
        return None if known is None else known[0]

    def _add(self, storage: Any, tensor: Tensor, op: str, phase: str, module: str) -> int:
        shape = tuple(tensor.shape)
        alloc = Alloc(storage.nbytes(), op, phase, module, shape, str(tensor.dtype)[6:])
        if self._frames:
            alloc.frames = stack()
        if self._logits_width is not None and shape[-1:] == (self._logits_width,) and len(shape) > 1:
            alloc.category = "logits" if phase in ("loss", "backward", RECOMPUTING) else "temps"
        return self._take(storage, alloc, module)

    def _take(self, storage: Any, alloc: Alloc, place: str) -> int:
        """Notes that `storage` begins as `alloc`; its number."""
        key, index = storage._cdata, len(self.trace.allocs)
        self.trace.allocs.append(alloc)
        self.trace.events.append(index)
        self.trace.places.append(place)
        self._known[key] = (index, weakref.ref(storage, lambda _: self._end(key, index)))
        return index

    def _end(self, key: int, index: int) -> None:
        known = self._known.get(key)
        if known is not None and known[0] == index:
            del self._known[key]
            if self._sum[1] == index and self._take_over(index):
                return
            self.trace.allocs[index].died = RECOMPUTING if self._recomputes else self.phase
            self.trace.events.append(~index)
            self.trace.places.append(self._place)

    @property
    def _recomputes(self) -> bool:
        return self.phase == "backward" and self._paths.running is not None

    def _take_over(self, index: int) -> bool:
        """Gives the storage of a sum to the addend that ended right behind it, as if it had been added to in place."""
        at, trace = self._sum[0], self.trace
        self._sum = (0, None)
        made = trace.events[at]
        if made != len(trace.allocs) - 1:
            return False
        key, storage = next((k, ref()) for k, (i, ref) in reversed(self._known.items()) if i == made)
        del trace.events[at], trace.places[at], trace.allocs[made]
        self._known[key] = (index, weakref.ref(storage, lambda _: self._end(key, index)))
        return True

    def _note_read(self, func: Any, value: Any) -> None:
        if self.phase in STEPPING and in_optimizer():
            return  # step counters, which CUDA's optimizers keep on the host
        self.trace.syncs.append(Sync(op=str(func), phase=self.phase, where=caller(), assumed=repr(value)))

    def _here(self) -> tuple[str, str | None]:
        """Phase and module of the op that runs now; in backward, the module whose forward made the node. None where
        only the op's arguments can tell: optimizers and the accumulation of gradients."""
        if self._paths.running is not None:
            return RECOMPUTING if self._recomputes else self.phase, self._paths.running
        node: Any = torch._C._current_autograd_node()  # None outside of backward
        if node is None:
            return self.phase, "" if self.phase in IN_ORDER else None
        return self.phase, self._paths.of_node(node)

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        if self._guesses and self._paths.running is None and id(module) not in self._claimed:
            self._claimed.update(id(inner) for inner in module.modules())
            self.claim_model(module)
        self._paths.enter(module, forward=self.phase != "backward")

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._paths.leave(forward=self.phase != "backward")
