"""What happened to memory while a step ran: allocations and frees in order, and the steps in between.

An event is an index into `Trace.allocs`: `+i` (as `i`) is allocated, `~i` is freed. The integers are all that a
replay needs; everything that explains an allocation stands once, in its `Alloc`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Hidden = Callable[[Any, Any, Any], Iterable[tuple[str, int, bool]]]
"""Op, its arguments and its result -> name, bytes and whether they stay, for each thing that it takes inside itself."""


class Frame(NamedTuple):
    """A line of the Python stack."""

    filename: str
    line: int
    name: str


@dataclass(slots=True)
class Alloc:
    """One storage, from the op that made it to its end. The category is settled by `settle`."""

    num_bytes: int
    """Bytes asked for."""
    op: str
    """The op that made it: `aten.mm.default`; `hidden:...` for memory that no tensor shows."""
    phase: str
    """Phase in which it was made."""
    module: str
    """Path of the module whose forward made it, or whose forward's backward did; empty outside of modules."""
    shape: tuple[int, ...]
    """Shape of the first tensor on it."""
    dtype: str
    """Dtype of that tensor, without `torch.`."""
    category: str = "temps"
    """One of `record.CATEGORIES`."""
    died: str = ""
    """Phase in which it ended; empty while it lives."""
    frames: tuple[Frame, ...] = ()
    """Python stack at its making, innermost first; empty unless asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A place in the story."""

    at: int
    """Index into `Trace.events` before which it stands."""
    phase: str
    """The phase that begins here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """A place where the host waits for the device to read a value."""

    op: str
    """The op that reads: `aten._local_scalar_dense.default`."""
    phase: str
    """Phase in which it happened."""
    where: str
    """File and line of the code that asked."""
    assumed: str
    """The value that the trace went on with."""


@dataclass(slots=True, kw_only=True)
class Trace:
    """The story of one step, or of several."""

    allocs: list[Alloc] = field(default_factory=list)
    """Every storage in the order of its making."""
    events: list[int] = field(default_factory=list)
    """`i` where `allocs[i]` is made, `~i` where it ends."""
    places: list[str] = field(default_factory=list)
    """For each event the module that the op at work belonged to."""
    marks: list[Mark] = field(default_factory=list)
    """Phases in the order in which they begin."""
    syncs: list[Sync] = field(default_factory=list)
    """Reads of values by the host."""


def settle(trace: Trace) -> None:
    """Settles the category of every allocation that nobody claimed, from where it was made and where it ended.

    Made in forward, loss or recomputation and alive when that is over: an activation. Made by the optimizer, which may
    step in backward, and kept: optimizer state. Made before the first step and kept: other, such as the batch.
    Everything else is a temporary.
    """
    for alloc in trace.allocs:
        if alloc.category != "temps" or alloc.op.startswith("hidden:"):
            continue
        if alloc.phase in ("forward", "loss", "recompute") and alloc.died not in ("forward", "loss", alloc.phase):
            alloc.category = "activations"
        elif alloc.phase in ("optimizer", "backward") and not alloc.died:
            alloc.category = "optimizer"
        elif alloc.phase == "init" and not alloc.died:
            alloc.category = "other"


def note_hidden(trace: Trace, found: Iterable[tuple[str, int, bool]], phase: str, place: str) -> None:
    """Notes what an op takes inside itself, by name, bytes and whether it stays: workspaces that stay, and temporaries
    that are gone when it ends."""
    passing = []
    for name, num_bytes, stays in found:
        index = len(trace.allocs)
        alloc = Alloc(num_bytes, f"hidden:{name}", phase, "" if stays else place, (), "uint8")
        trace.allocs.append(alloc)
        trace.events.append(index)
        trace.places.append(place)
        if stays:
            alloc.category = "other"
        else:
            alloc.died = phase
            passing.append(index)
    trace.events += [~index for index in passing]
    trace.places += [place] * len(passing)


def order_frees(trace: Trace) -> None:
    """Puts frees between two ops into the order in which their storages were made.

    Nothing is allocated between them, so no peak changes; caches that are cleared at once (autocast's) free in the
    order of a hash table, which no two runs share.
    """
    stops = {mark.at for mark in trace.marks}
    events, at = trace.events, 0
    while at < len(events):
        end = at
        while end < len(events) and events[end] < 0 and (end == at or end not in stops):
            end += 1
        events[at:end] = sorted(events[at:end], reverse=True)
        at = max(end, at + 1)
