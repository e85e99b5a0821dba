"""The device between two rungs: whose it is, whether the last rung has let go of it, whether it still works."""

from collections.abc import Callable, Sequence

from memplan.record import RungResult
from memplan.units import format_bytes

MOST_SICK = 2
"""Failed health checks after which a climb ends."""
SUSPICIOUS = ("error", "killed", "host_oom", "timeout", "oom_suspect")
"""Statuses after which the device is tried with a small product before the next rung."""


class Guard:
    """Watches over one GPU. A climb on the CPU or on a card that is not there has none."""

    def __init__(
        self,
        *,
        used_bytes: Callable[[], int | None],
        foreign: Callable[[], Sequence[str]],
        settled: Callable[[int], bool],
        sick: Callable[[], str | None],
        allow_shared: bool = False,
    ) -> None:
        self._used_bytes, self._foreign, self._settled, self._sick = used_bytes, foreign, settled, sick
        self._allow_shared = allow_shared
        self._before: int | None = None
        self._num_sick = 0

    def before(self) -> str:
        """Why the next rung is not started, in words, or empty: others have come to the device."""
        others = [] if self._allow_shared else list(self._foreign())
        self._before = self._used_bytes()
        return (
            f"other processes use the device ({', '.join(others)}); --allow-shared climbs all the same"
            if others
            else ""
        )

    def after(self, row: RungResult) -> str:
        """Why the climb ends behind `row`, in words, or empty."""
        if row.kind in ("skipped", "dirty_device"):
            return ""
        if self._before is not None and not self._settled(self._before):
            now = self._used_bytes()
            held = (
                f"{format_bytes(now - self._before)} more than before are in use"
                if now is not None
                else "it is not free"
            )
            return f"{row.rung} is gone, but its memory is not: {held} on the device"
        if row.kind in SUSPICIOUS:
            wrong = self._sick()
            self._num_sick = self._num_sick + 1 if wrong else 0
            if self._num_sick >= MOST_SICK:
                return f"the device fails a small product {self._num_sick} times in a row: {wrong}"
        return ""
