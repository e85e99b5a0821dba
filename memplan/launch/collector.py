"""Python's cyclic collector, counted and kept away: it frees whenever it runs, and takes time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self


class Collections:
    """Counts the runs inside that `collect` did not ask for."""

    _asked = False

    def __init__(self) -> None:
        self.number = 0
        """Runs so far."""

    def __enter__(self) -> Self:
        gc.callbacks.append(self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.callbacks.remove(self._hear)

    def _hear(self, phase: str, info: dict[str, Any]) -> None:
        self.number += phase == "start" and not Collections._asked


def collect() -> None:
    """Has the collector run once, uncounted."""
    Collections._asked = True
    try:
        gc.collect()
    finally:
        Collections._asked = False


@contextmanager
def without_collector() -> Iterator[None]:
    """The collector runs by itself no more, and when it is called it looks at nothing that was there before."""
    enabled = gc.isenabled()
    collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
