"""What makes up a measured peak, told by what can be counted at the marks of a step."""

from collections.abc import Mapping
from dataclasses import dataclass

from memplan.backends.base import Reading
from memplan.units import KIB, format_bytes

SAME_FRAC = 0.99
"""Share of the largest peak from which a marked window's peak counts as the same moment."""
LEAK_BYTES = KIB
"""What has to stay behind each step to be called a leak."""
WAITING_FRAC = 0.01
"""Share of the peak that has to wait for Python's collector to be spoken of."""

Held = dict[str, int]
"""Bytes of `params`, `buffers`, `optimizer` and `grads`, as `memplan.backends.held` counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """A window with what was held at its start, at its marks and at its end."""

    reading: Reading
    """What the allocator said."""
    before: Held
    """Held at its start."""
    after: Held
    """Held at its end."""
    grads: tuple[int, ...] = ()
    """Bytes of gradients at each mark; empty where nobody marked."""
    num_steps: int = 0
    """Steps in it."""


def at_largest_peak(windows: Mapping[str, Marked]) -> dict[str, int]:
    """The largest peak of all windows by category, told by the one with marks where two are about as large."""
    peaks = {name: window.reading.peak.allocated_bytes for name, window in windows.items()}
    peak_bytes = max(peaks.values())
    near = [name for name, size in peaks.items() if size >= SAME_FRAC * peak_bytes]
    largest = max(near, key=lambda name: (bool(windows[name].grads), peaks[name]))
    return at_peak(windows[largest], peak_bytes)


def at_peak(window: Marked, peak_bytes: int) -> dict[str, int]:
    """`peak_bytes` by category, as it is at the window's allocated peak; they add up to it.

    Exact are parameters, buffers and optimizer state; gradients as they were at the mark before; `activations` is what
    forward left behind up to there, in `forward` itself what it leaves in the end. `other` was alive at the window's
    start beside the model, and `temps` is the rest.
    """
    segments, largest = window.reading.segments, window.reading.peak.allocated_bytes
    index = next((i for i, segment in enumerate(segments) if segment.peak_bytes == largest), 0)
    phase = segments[index].phase if segments else ""
    held = window.after if phase in ("optimizer", "init") else window.before
    found = {name: held[name] for name in ("params", "buffers", "optimizer")}
    start_bytes = segments[0].start_bytes if segments else 0
    known = sum(window.before.values())
    found["other"] = max(start_bytes - known, 0)
    found["grads"] = window.grads[index - 1] if 0 < index <= len(window.grads) else window.before["grads"]
    found["activations"] = kept_by_forward(window, index)
    found["temps"] = peak_bytes - sum(found.values())
    for name in ("activations", "other", "grads", "optimizer", "buffers", "params"):  # none was there as a whole
        if found["temps"] < 0:
            taken = min(-found["temps"], found[name])
            found[name] -= taken
            found["temps"] += taken
    return found


def kept_by_forward(window: Marked, index: int) -> int:
    """Bytes that the forward of the chunk of segment `index` has left for backward."""
    segments = window.reading.segments
    phase = segments[index].phase if segments else ""
    if phase not in ("forward", "loss", "backward"):
        return 0
    start = next(i for i in range(index, -1, -1) if segments[i].phase in ("forward", ""))
    end = index + 1 if phase == "forward" else index
    if end >= len(segments):
        return 0
    return max(segments[end].start_bytes - segments[start].start_bytes, 0)


def between_steps(live_bytes: int, held: Held, *, other_bytes: int) -> dict[str, int]:
    """Bytes alive between two steps by category; they add up to `live_bytes`. `other_bytes` is what was there before
    the first step, and what libraries keep; what else there is the step before has left."""
    found = dict(held)
    rest = live_bytes - sum(found.values())
    found["other"] = max(min(other_bytes, rest), 0)
    left = max(rest - found["other"], 0)
    found["activations" if left >= LEAK_BYTES else "other"] = left if left >= LEAK_BYTES else found["other"] + left
    return {name: size for name, size in found.items() if size}


def leaking(windows: Mapping[str, Marked]) -> str | None:
    """A sentence where every step leaves something behind; `windows` stand in the order of their steps."""
    names = list(windows)
    first = "warmup" if "warmup" in names else "first_step"
    later = [windows[name] for name in names[names.index(first) + 1 :]]
    num_steps = sum(window.num_steps for window in later)
    grown = later[-1].reading.live_bytes - windows[first].reading.live_bytes
    if grown < LEAK_BYTES * num_steps:
        return None
    return f"{format_bytes(grown // num_steps)} more stay alive after each step"


def waiting(reading: Reading) -> str | None:
    """A sentence where a good part of the memory waits for Python's cyclic collector."""
    dead_bytes = reading.segments[-1].start_bytes - reading.live_bytes if reading.segments else 0
    if dead_bytes <= WAITING_FRAC * reading.peak.allocated_bytes or dead_bytes < KIB:
        return None
    return (
        f"{format_bytes(dead_bytes)} of a step hang in cycles of references until Python's collector runs, whenever "
        "that is: peaks will vary"
    )
