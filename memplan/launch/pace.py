"""Tells a worker that hangs from one that is slow."""

import time
from collections.abc import Callable
from typing import Any

STALL_S = 120.0
"""Seconds without a word that are never taken for a hang."""
STALL_TIMES = 20.0
"""How many times the slowest step may pass without a word."""
FAREWELL_S = 30.0
"""Seconds in which a worker must be gone after its last word."""


class Pace:
    """The time that a worker takes, all in all and between two steps."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._began = self._heard = clock()
        self._stepped: float | None = None
        self._slowest: float | None = None
        self._ended = False

    def hear(self, event: dict[str, Any]) -> None:
        """Takes note of an event that has just come."""
        self._heard = self._clock()
        match event.get("event"):
            case "step":
                if self._stepped is not None:
                    self._slowest = max(self._slowest or 0.0, self._heard - self._stepped)
                self._stepped = self._heard
            case "end":
                self._ended = True

    def late(self, reached: str) -> str | None:
        """Why the worker, which is in `reached`, need not be waited for any longer, or None."""
        now = self._clock()
        silent_s = now - self._heard
        if self._ended:
            return f"not gone {silent_s:.0f} s after its last word" if silent_s > FAREWELL_S else None
        if now - self._began > self._timeout_s:
            return f"not done after {self._timeout_s:g} s, in {reached}; --timeout gives it longer"
        if self._slowest is not None and silent_s > max(STALL_S, STALL_TIMES * self._slowest):
            return f"no step for {silent_s:.0f} s, in {reached}; the slowest before took {self._slowest:.1f} s"
        return None
