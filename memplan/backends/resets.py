"""Resets of a device's peaks that nobody loses a peak by: who watches hears the counters before they begin anew.

`torch.cuda.reset_peak_memory_stats` forgets for everybody in the process: the ladder's windows, and those that measured
code opens by itself.
"""

from collections.abc import Callable
from typing import Any

Hear = Callable[[Any, int, dict[str, int]], None]
_HEARING: list[Hear] = []
"""Who watches a device of this process, and must hear of its peaks before a reset forgets them."""


def listen_to_resets(hear: Hear) -> None:
    """Lets `hear` be called before each reset with `torch.cuda`, the device's number and its statistics."""
    _HEARING.append(hear)


def stop_listening(hear: Hear) -> None:
    """The end of `listen_to_resets`."""
    if hear in _HEARING:
        _HEARING.remove(hear)


def forget_peaks(cuda: Any, index: int, *, but: Hear) -> None:
    """Lets the device's peaks begin anew at what is alive, when all who watch it have heard them; `but`, who asks, has
    read them already."""
    others = [hear for hear in _HEARING if hear != but]
    if others:
        stats = dict(cuda.memory_stats(index))
        for hear in others:
            hear(cuda, index, stats)
    cuda.reset_peak_memory_stats(index)
