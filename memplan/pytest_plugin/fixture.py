"""`memory_peak`: takes peaks inside of a test."""

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from memplan.errors import MemplanError
from memplan.pytest_plugin.ledger import ItemPeaks, gate_bytes, one_sentence
from memplan.pytest_plugin.stretch import Stretch


class MemoryPeak:
    """`with memory_peak("step") as peak: ...`, or `memory_peak(step)` for a function without arguments."""

    def __init__(self, peaks: ItemPeaks) -> None:
        self._peaks = peaks

    def __call__(
        self,
        what: str | Callable[[], Any] = "peak",
        *,
        name: str | None = None,
        trace: bool | str = False,
        device: Any = None,
        gate: str | int | None = None,
    ) -> "JudgedStretch":
        """The stretch to enter, or the one in which the function `what` ran.

        `trace` and `device` are as in `Stretch`; `gate` is a size that this peak may not exceed.
        """
        with one_sentence():
            if not isinstance(what, str) and not callable(what):
                raise MemplanError(
                    f"memory_peak takes a name or a function, not {what!r}.",
                    'Type memory_peak("step") or memory_peak(step).',
                )
            called: str = name or (what if isinstance(what, str) else str(getattr(what, "__name__", "peak")))
            self._peaks.check_name(called)
            gates = [] if gate is None else [gate_bytes(gate)]
            stretch = JudgedStretch(self._peaks, called, gates, trace=trace, device=device)
        if not isinstance(what, str):
            with stretch:
                stretch.result = what()
        return stretch


class JudgedStretch(Stretch):
    """A stretch that is held against its gates and its baseline when it ends well."""

    def __init__(
        self, peaks: ItemPeaks, name: str, gates: Iterable[int] = (), *, trace: bool | str, device: Any
    ) -> None:
        super().__init__(trace=trace, device=device)
        self.name = name
        self._peaks = peaks
        self._gates = gates

    def __enter__(self) -> Self:
        with one_sentence():
            return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with one_sentence():
            super().__exit__(kind, error, trace)
            if kind is None:
                self._peaks.take(self, self.name, self._gates)
