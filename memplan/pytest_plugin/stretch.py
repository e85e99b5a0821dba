"""A stretch of a test under a witness: the device's allocator, or a trace on fake tensors."""

import gc
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from memplan.errors import MemplanError
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.backends.peak_window import PeakWindow
    from memplan.trace.tracing import Tracing

CARD = "h100-80g"
"""Card whose rules a trace follows where none is named."""


class Stretch:
    """What is between entry and exit, measured on `device` (CUDA where there is a GPU, else the CPU), or traced: with
    `trace=True` under the rules of an H100, with `trace="a100-80g"` under that card's, with `trace="cpu"` the CPU's."""

    def __init__(self, *, trace: bool | str = False, device: Any = None) -> None:
        if trace and device is not None:
            raise MemplanError(
                f"A trace needs no device, and {device!r} was given.", f'Type trace="{CARD}" to name a card.'
            )
        self.witness = "traced" if trace else "measured"
        """`measured` or `traced`."""
        self.device = ""
        """What is measured or imagined, once it has begun."""
        self.torch = ""
        """Version of torch, its first two numbers."""
        self.allocated_bytes = 0
        """Largest allocated bytes, those left out that were alive before; there after the end."""
        self.before_bytes = 0
        """Bytes alive at the entry, where the device knows them: the CPU does not."""
        self.phases: dict[str, int] = {}
        """The same for each phase."""
        self.result: Any = None
        """What the function returned, where one was measured."""
        self._asked = CARD if trace is True else trace or device  # False or None where nobody said
        self._window: PeakWindow | Tracing | None = None
        self._start_bytes = 0

    def __str__(self) -> str:
        if self._window is not None or not self.torch:
            return "a peak that is not over yet"
        how = "traced for" if self.witness == "traced" else "measured on"
        return f"{format_bytes(self.allocated_bytes)} {how} {self.device}, torch {self.torch}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def __enter__(self) -> Self:
        import torch

        self.torch = ".".join(torch.__version__.split(".")[:2])
        self._window = self._traced() if self.witness == "traced" else self._measured()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        window = self._opened()
        window.__exit__(kind, error, trace)
        self._window = None
        if kind is None:
            self._read(window)

    def mark(self, phase: str) -> None:
        """Says that `phase` begins now."""
        self._opened().mark(phase)

    def reset(self) -> None:
        """Forgets the peaks so far: what was before, a first step, is left out."""
        from memplan.backends.peak_window import PeakWindow

        window = self._opened()
        if isinstance(window, PeakWindow):
            window.close()
            window.open()
        else:
            window.reset_peak()

    def _opened(self) -> Any:
        if self._window is None:
            raise MemplanError("This peak is not being taken.", 'Type: with memory_peak("name") as peak:')
        return self._window

    def _measured(self) -> "PeakWindow":
        import torch

        from memplan.backends.peak_window import PeakWindow

        device = self._asked if self._asked not in (None, False) else "cuda" if torch.cuda.device_count() else "cpu"
        on_cpu = str(device).startswith("cpu")
        gc.collect()  # what earlier tests left in cycles would go at a moment of its own
        cuda: Any = torch.cuda
        if not on_cpu and cuda.is_initialized():
            getattr(torch._C, "_cuda_clearCublasWorkspaces", bool)()  # or only the first test would pay for them
        window = PeakWindow(device).open()
        self._start_bytes = window.live_bytes
        self.before_bytes = 0 if on_cpu else self._start_bytes
        self.device = "cpu" if on_cpu else cuda.get_device_name(torch.device(device))
        return window

    def _traced(self) -> "Tracing":
        from memplan.trace.tracing import tracing

        tracing_ = tracing(None if self._asked == "cpu" else str(self._asked))
        self.device = str(self._asked)
        return tracing_.__enter__()

    def _read(self, window: Any) -> None:
        if self.witness == "traced":
            report = window.report()
            peak_bytes, phases = report.peak_allocated_bytes, report.phases
            by_phase = {phase: totals.allocated_bytes for phase, totals in phases.items()}
        else:
            peak_bytes, by_phase = window.allocated_bytes, window.phase_peaks
        self.allocated_bytes = max(0, peak_bytes - self._start_bytes)
        self.phases = {phase: max(0, num_bytes - self._start_bytes) for phase, num_bytes in by_phase.items()}
