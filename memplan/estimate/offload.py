"""Tensors kept for backward that wait on the host, over the ledger.

Source: memplan.step.offload, whose twin this is. What blocks keep on the device is that of two; the host's bytes are a
figure of the tape.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any

from memplan.dtypes import ELEMENT_BYTES
from memplan.estimate.tape import Holder, HostBytes, Shape, Tape, Tensor

MIN_BYTES = 1 << 16
"""Smaller tensors stay where they are. Source: memplan.step.offload."""


class Kept:
    """One tensor that waits on the host until nobody who saved it needs it, or `copies` equal ones."""

    def __init__(self, tape: Tape, shape: Shape, dtype: str, copies: int = 1) -> None:
        self.shape = shape
        self.dtype = dtype
        self.copies = copies
        num_bytes = host_size(math.prod(shape) * ELEMENT_BYTES[dtype], pinned=tape.rules == "cuda")
        self.bytes = HostBytes(tape, num_bytes * copies)
        # On the CPU either memory is the host's.
        self.copy = tape.allocate("host", shape, dtype, copies=copies) if tape.rules == "cpu" else None
        self.fetched: Tensor | None = None
        """It again, back on the device; None before."""

    def fetch(self, tape: Tape) -> Tensor:
        """It, on the device."""
        if self.fetched is None:
            storage = tape.allocate("fetch", self.shape, self.dtype, category="activations", copies=self.copies)
            self.fetched = Tensor(storage, self.shape, self.dtype)
        return self.fetched


class Waiting(Holder):
    """A node's hold on a kept tensor, in call `number` of a block."""

    __slots__ = ("kept", "offload")

    def __init__(self, offload: "Offload", number: int, kept: Kept) -> None:
        super().__init__(None, number)
        self.offload = offload
        self.kept = kept

    def unpack(self, tape: Tape) -> Tensor:
        """The tensor; with it comes all that its block kept, and what the block before it kept is sent for."""
        out = self.kept.fetch(tape)
        calls = self.offload.calls
        del calls[self.number + 1 :]
        for call in calls[max(self.number - 1, 0) :]:
            for waiting in call:
                other = waiting()
                if other is not None:
                    other.fetch(tape)
        return out


class Offload:
    """The host's side of a step."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.calls: list[list[weakref.ref[Kept]]] = []
        """What each call of a block keeps, in forward's order."""
        self.known: dict[Any, weakref.ref[Kept]] = {}

    def around(self, block: Any) -> Callable[..., Any]:
        """`block`'s forward, which keeps its tensors on the host, parameters apart."""
        plain, tape = block.forward, self.tape

        def run(*args: Any) -> Any:
            if not tape.grad_enabled:
                return plain(*args)
            if not tape.host_bytes:
                self.calls, self.known = [], {}
            storages = {parameter.storage.index for parameter in block.parameters()}
            self.calls.append([])
            tape.frame = Call(self, len(self.calls) - 1, storages)
            try:
                return plain(*args)
            finally:
                tape.frame = None

        return run


class Call:
    """One call of a block: where its nodes put what they save."""

    def __init__(self, offload: Offload, number: int, storages: set[int]) -> None:
        self.offload = offload
        self.number = number
        self.storages = storages

    def pack(self, tensor: Tensor) -> Any:
        """What a node holds of `tensor`; several that save one share it."""
        if tensor.numel * tensor.width < MIN_BYTES or tensor.storage.index in self.storages:
            return tensor.alias()
        key = (tensor.storage.index, tensor.shape, tensor.place)
        known = self.offload.known
        kept = known[key]() if key in known else None
        if kept is None:
            kept = Kept(tensor.tape, tensor.shape, tensor.dtype)
            known[key] = weakref.ref(kept)
            self.offload.calls[self.number].append(known[key])
        return Waiting(self.offload, self.number, kept)

    @property
    def kept(self) -> list[weakref.ref[Kept]]:
        """What it keeps so far."""
        return self.offload.calls[self.number]

    def repeat(self, start: int, copies: int) -> list[Kept]:
        """`copies` more of each that it has kept since the number `start` and that still waits."""
        waiting = [one for one in (reference() for reference in self.kept[start:]) if one is not None]
        more = [Kept(self.offload.tape, one.shape, one.dtype, copies) for one in waiting]
        self.kept.extend(weakref.ref(one) for one in more)
        return more


def host_size(num_bytes: int, *, pinned: bool) -> int:
    """Bytes that the host pays for a tensor: pinned blocks are powers of two.

    Source: CachingHostAllocatorImpl::allocate, aten/src/ATen/core/CachingHostAllocator.h, torch 2.13.
    """
    return 1 << (num_bytes - 1).bit_length() if pinned and num_bytes else num_bytes
