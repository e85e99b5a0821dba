"""Tensors kept for backward, moved to the host's memory while they wait.

In forward each tensor that a block keeps is copied to pinned host memory on a stream of its own, while computing goes
on. In backward the tensors of a block come back while the block behind it is at work. Both memories are counted: the
device holds the tensors of two blocks, the host those of all.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

MIN_BYTES = 1 << 16
"""Smaller tensors stay where they are: a copy would cost more than the room it frees."""


class Kept:
    """One tensor that waits on the host, until nobody who saved it needs it any more."""

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self.host = host
        """Its values."""
        self.device = device
        """Where it came from."""
        self.fetched: Tensor | None = None
        """It again, back on the device; None before."""


class Offload:
    """The host's side of a step: what its blocks keep."""

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        """Whether the host's memory is pinned, and counted as its allocator rounds it."""
        self.host_bytes = 0
        """Bytes that wait on the host now."""
        self.peak_host_bytes = 0
        """Most that waited at once since `reset`."""
        self.on_host: Callable[[Tensor], None] | None = None
        """Who hears that a tensor lives on the host: a trace, to which all memory looks alike."""
        self._calls: list[list[weakref.ref[Kept]]] = []  # what each call of a block keeps, in forward order
        self._known: dict[Any, tuple[weakref.ref[Any], weakref.ref[Kept]]] = {}
        self._stream: Any = None

    def put_on(self, block: nn.Module) -> None:
        """Makes `block` keep its tensors on the host, parameters apart: those of the call, which FSDP2 has gathered."""
        plain: Callable[..., Any] = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            if not self.host_bytes:
                self._calls, self._known = [], {}
            kept: list[weakref.ref[Kept]] = []
            self._calls.append(kept)
            number = len(self._calls) - 1
            storages = {parameter.untyped_storage()._cdata for parameter in block.parameters()}

            def pack(tensor: Tensor) -> Tensor | Kept:
                stays = tensor.nbytes < MIN_BYTES or tensor.untyped_storage()._cdata in storages
                return tensor if stays else self._keep(tensor, kept)

            def unpack(packed: Tensor | Kept) -> Tensor:
                return packed if isinstance(packed, Tensor) else self._give(packed, number)

            with saved_tensors_hooks(pack, unpack):
                return plain(*args, **kwargs)

        block.forward = forward

    def reset(self) -> None:
        """The peak begins anew at what waits now."""
        self.peak_host_bytes = self.host_bytes

    def _keep(self, tensor: Tensor, kept: list[weakref.ref[Kept]]) -> Kept:
        """`tensor` on the host; several ops that save one tensor share one copy."""
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version)
        alive, known = self._known.get(key, (None, None))
        if alive is not None and known is not None and alive() is storage and (found := known()) is not None:
            return found
        # With the same strides, on which compiled code relies; gaps between the elements are left out.
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        if self.on_host is not None:
            self.on_host(host)
        with self._beside(tensor):
            host.copy_(tensor, non_blocking=True)
        waiting = Kept(host, tensor.device)
        self._count(host_size(host.nbytes, pinned=self.pinned))
        weakref.finalize(waiting, self._count, -host_size(host.nbytes, pinned=self.pinned))
        kept.append(weakref.ref(waiting))
        self._known[key] = (weakref.ref(storage), weakref.ref(waiting))
        return waiting

    def _give(self, kept: Kept, number: int) -> Tensor:
        """`kept` on its device again, with all that its block kept; what the block before it kept is sent for."""
        self._fetch(kept)
        del self._calls[number + 1 :]
        for call in self._calls[max(number - 1, 0) :]:
            for waiting in call:
                if (other := waiting()) is not None:
                    self._fetch(other)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        assert kept.fetched is not None
        return kept.fetched

    def _fetch(self, kept: Kept) -> None:
        if kept.fetched is None:
            kept.fetched = torch.empty_like(kept.host, device=kept.device)
            with self._beside(kept.fetched):
                kept.fetched.copy_(kept.host, non_blocking=True)

    def _beside(self, tensor: Tensor) -> AbstractContextManager[Any]:
        """Copies inside run on a stream of their own, behind what the device has been told so far."""
        if not tensor.is_cuda:
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        tensor.record_stream(self._stream)
        return torch.cuda.stream(self._stream)

    def _count(self, num_bytes: int) -> None:
        self.host_bytes += num_bytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)


def host_size(num_bytes: int, *, pinned: bool) -> int:
    """Bytes that the host pays for a tensor: pinned blocks are powers of two.

    Source: CachingHostAllocatorImpl::allocate, aten/src/ATen/core/CachingHostAllocator.h, torch 2.13.
    """
    return 1 << (num_bytes - 1).bit_length() if pinned and num_bytes else num_bytes
