"""A stack of blocks of which few are run: the first and the last of each row of equal ones (the last two where a block
meets what the one behind it left), and one between them that speaks for the rest.

What a row of n equal blocks keeps grows by the same bytes with each, and so do the gradients that backward leaves:
every moment's total is linear in the number of the block, and largest at an end. The one between stands for n - 2: its
tensors that outlive it are counted so often.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from memplan.estimate.engine import BY_ATTRIBUTE
from memplan.estimate.modules import Module
from memplan.estimate.tape import Alloc, HostBytes, Node, Row, Storage, Tape, Tensor

LONGEST_PERIOD = 8
FEWEST = 4
"""Equal units from which on a row is told by three."""


def plan(kinds: Sequence[Any], last: int = 1) -> list[tuple[list[int], int]]:
    """Numbers of the blocks that run, unit by unit, each with how many equal units it stands for; the `last` units of a
    row for themselves."""
    units: list[tuple[list[int], int]] = []
    at, size = 0, len(kinds)
    while at < size:
        best, period = 0, 1
        for length in range(1, min(LONGEST_PERIOD, size - at) + 1):
            first = kinds[at : at + length]
            repeats = 1
            while kinds[at + repeats * length : at + (repeats + 1) * length] == first:
                repeats += 1
            if repeats >= FEWEST and repeats * length > best:
                best, period = repeats * length, length
        if not best:
            units.append(([at], 1))
            at += 1
            continue
        row = [list(range(start, start + period)) for start in range(at, at + best, period)]
        units += [(row[0], 1), (row[1], len(row) - 1 - last), *[(unit, 1) for unit in row[-last:]]]
        at += best
    return units


class Stack:
    """Blocks 0 .. n-1 of `kinds`, equal where their kinds are; `counted`: whether a step means them by its blocks."""

    def __init__(
        self, tape: Tape, kinds: Sequence[Any], make: Callable[[int], Module], *, counted: bool = True
    ) -> None:
        self.tape = tape
        self.units: list[tuple[list[Module], int]] = []
        self.blocks: list[tuple[int, Module]] = []
        """The blocks that run, with their numbers."""
        outer = tape.copies
        for numbers, copies in plan(kinds, tape.setup.last_blocks):
            tape.copies = outer * copies
            modules = [make(number) for number in numbers]
            self.blocks += zip(numbers, modules, strict=True)
            tape.blocks += modules if counted else ()
            self.units.append((modules, copies))
        tape.copies = outer

    def run(self, held: list[Tensor], call: Callable[[Module, Tensor], Tensor]) -> Tensor:
        """What is in `held`, which is emptied, through all blocks, each run by `call`."""
        tape, x = self.tape, held.pop()
        for modules, copies in self.units:
            start, before, on_host = len(tape.allocs), weakref.ref(x.storage), tape.host_bytes
            row, first = Row(copies, len(tape.events)), tape.seq
            for module in modules:
                x = call(module, x) if tape.sharding is None else tape.sharding.around(module, call, x)
            if copies > 1:
                gone, row.end = before() is None, len(tape.events)
                tape.rows.append(row)
                x = self.repeat(x, modules, row, first, start, gone=gone)
                if x.node is not None:
                    x.node.saved.append(HostBytes(tape, (tape.host_bytes - on_host) * (copies - 1)))
        return x

    def repeat(self, x: Tensor, modules: list[Module], row: Row, first: int, start: int, *, gone: bool) -> Tensor:
        """`x` behind a node that holds what the other copies keep of allocations from `start` on; the nodes of the unit
        come behind number `first`. `gone`: whether a unit's output outlives it not."""
        tape = self.tape
        node = tape.record("repeat", (x,), repeat_backward, info=(tape, modules, row, first))
        own = x.storage.index if gone else -1
        casts = {cast.storage.index: cast.storage for cast in tape.casts.values()}
        for index in range(start, len(tape.allocs)):
            alloc = tape.allocs[index]
            kept = not alloc.category or alloc.op == "unsharded"  # what FSDP2 keeps whole from forward to backward
            if alloc.died or index == own or not kept:
                continue
            other = more(tape, alloc, row.copies - 1)
            tape.rest_of[index] = other.index
            if index in casts:
                tape.cast_others.append(other)
            if node is not None and (index not in casts or sys.getrefcount(casts[index]) > BY_ATTRIBUTE + 1):
                node.saved.append(other)
        del casts
        if node is None:
            return x
        out = x.alias()
        out.dense = x.dense
        return tape.link(node, out)


def more(tape: Tape, alloc: Alloc, copies: int) -> Storage:
    """`copies` more of `alloc`."""
    index = len(tape.allocs)
    tape.allocs.append(
        Alloc(
            alloc.num_bytes * copies,
            alloc.op,
            alloc.part,
            alloc.phase,
            alloc.shape,
            alloc.dtype,
            alloc.category,
            alloc.copies * copies,
            rest=True,
        )
    )
    tape.events.append(index)
    return Storage(tape, index)


def repeat_backward(node: Node, saved: list[Any], grads: list[Any]) -> list[Any]:
    """Ends what the other copies kept and makes their gradients, where those are not there yet."""
    tape, modules, row, first = node.info
    node.saved = []
    saved.clear()
    if tape.keeps_grads:
        tape.sharding.repeat(modules)
    tape.open_rows.append((first, Row(row.copies, len(tape.events), call=row)))
    return list(grads)
