"""A place in which tensors are fake and CUDA's rules hold: `with tracing(gpu="a100-80g") as t: ...`."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from memplan.allocator.caching import CachingAllocator
from memplan.record.trace import LiveTensor, TraceReport
from memplan.spec.device import CPU, DeviceSpec, card
from memplan.trace.conversion import replaced_parameters
from memplan.trace.events import Trace, settle
from memplan.trace.grouped_mm import grouped_products
from memplan.trace.quick_fake import QuickFakeMode
from memplan.trace.recorder import Recorder
from memplan.trace.replay import HostMemory, Memory, Replay, replay, report
from memplan.trace.snapshot import save_snapshot


class Tracing:
    """A trace while it is made. Tensors made inside are fake, so that a model of any size takes no memory; ops take
    microseconds, whatever the batch and the length.

    Phases are guessed: backward is where autograd runs, the optimizer where one steps, everything else is forward.
    `mark` names them instead.
    """

    def __init__(
        self, device: DeviceSpec, *, frames: bool = True, logits_width: int | None = None, guess_phases: bool = True
    ) -> None:
        self.device = device
        self._log: Any = None
        self._stack = ExitStack()
        self._recorder = Recorder(frames=frames, logits_width=logits_width, guess_phases=guess_phases)
        self._start = 0
        self._sync_start = 0
        self._found: Replay | None = None
        self._num_replayed = 0

    def __enter__(self) -> Self:
        self._stack.enter_context(QuickFakeMode(allow_non_fake_inputs=True))
        self._stack.enter_context(replaced_parameters())
        self._stack.enter_context(grouped_products())
        if self.device.rules == "cuda":
            from memplan.trace.cuda_rules.generation import generation
            from memplan.trace.cuda_rules.hidden import HOST_OUTPUTS, Workspaces
            from memplan.trace.cuda_rules.rules import cuda_rules

            kind = generation(self.device.name)
            self._recorder.hidden = Workspaces(kind)
            self._recorder.counters_on_host = True
            self._recorder.host_outputs = {f"aten::{name}": places for name, places in HOST_OUTPUTS.items()}
            self._log = self._stack.enter_context(cuda_rules(kind))
        self._stack.enter_context(self._recorder)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @property
    def recorder(self) -> Recorder:
        """What listens to the ops."""
        return self._recorder

    @property
    def trace(self) -> Trace:
        """The story so far."""
        return self._recorder.trace

    @property
    def attention(self) -> dict[str, int]:
        """Attention kernels chosen so far, with the number of calls."""
        return {} if self._log is None else dict(self._log.backends())

    def mark(self, phase: str) -> None:
        """Says that `phase` begins now; guesses, where they are made, go on from there."""
        self._recorder.mark(phase)

    def reset_peak(self) -> None:
        """Peaks begin anew at what is alive now, as `torch.cuda.reset_peak_memory_stats` does."""
        self._recorder.mark("forward" if self._recorder.phase != "init" else "init")
        self._start = len(self.trace.events)
        self._sync_start = len(self.trace.syncs)
        self._found = None

    def replayed(self) -> Replay:
        """The story so far, played through the device's allocator without limit."""
        if self._found is None or len(self._found.trace.events) != self._num_replayed:
            settle(self.trace)
            self._num_replayed = len(self.trace.events)
            self._found = replay(self.trace, new_memory(self.device), start=self._start)
        return self._found

    @property
    def peak_allocated_bytes(self) -> int:
        """Largest allocated bytes since `reset_peak`."""
        return self.replayed().peaks.allocated_bytes

    @property
    def peak_active_bytes(self) -> int:
        """Largest active bytes since `reset_peak`."""
        return self.replayed().peaks.active_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Largest reserved bytes since `reset_peak`."""
        return self.replayed().peaks.reserved_bytes

    def alive_at_peak(self) -> tuple[LiveTensor, ...]:
        """What is alive at the allocated peak, the largest first."""
        return self.report().alive

    def report(self) -> TraceReport:
        """The answer sheet, with where the card's memory ends."""
        limited = None
        if self.device.usable_bytes is not None and self.peak_reserved_bytes > self.device.usable_bytes:
            limited = replay(self.trace, new_memory(self.device, limited=True), start=self._start)
        return report(
            self.replayed(), limited=limited, syncs=self.trace.syncs[self._sync_start :], attention=self.attention
        )

    def save_snapshot(self, path: str | Path) -> None:
        """Writes what PyTorch's memory_viz page opens: segments, blocks, and the history with Python stacks."""
        save_snapshot(Path(path), self.trace, CachingAllocator())


def tracing(gpu: str | None = "h100-80g", *, device: DeviceSpec | None = None, frames: bool = True) -> Tracing:
    """A trace under the rules of the card `gpu`, or of `device`; with `gpu=None` under the CPU's."""
    if device is None:
        device = CPU if gpu is None else card(gpu)
    return Tracing(device, frames=frames)


def new_memory(device: DeviceSpec, *, limited: bool = False) -> Memory:
    """The allocator of `device`, empty; `limited` by what the context leaves of it."""
    if device.rules == "cpu":
        return HostMemory()
    return CachingAllocator(capacity_bytes=device.usable_bytes if limited else None)
