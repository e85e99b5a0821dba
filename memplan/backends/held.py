"""What a step holds between its ops, counted storage by storage: parameters, buffers, gradients, optimizer state."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from memplan.backends.subject import Subject
from memplan.trace.storages import is_shell


def held_bytes(subject: Subject, device: torch.device, rounded: Callable[[int], int]) -> dict[str, int]:
    """Bytes on `device` of `params`, `buffers`, `optimizer` and `grads`, each storage once, as the allocator counts
    them."""
    seen: set[int] = set()
    return {
        name: sum(rounded(storage.nbytes()) for storage in fresh(tensors, device, seen))
        for name, tensors in (
            ("params", subject.named_parameters().values()),
            ("buffers", subject.named_buffers().values()),
            ("optimizer", (tensor for _, _, tensor in subject.states())),
            ("grads", (grad for _, grad in subject.gradients())),
        )
    }


def fresh(tensors: Iterable[Tensor], device: torch.device, seen: set[int]) -> Iterator[torch.UntypedStorage]:
    """Storages of `tensors` on `device` that are not `seen` yet, and are then."""
    for tensor in tensors:
        for storage in storages(tensor):
            if storage.device.type == device.type and storage.nbytes() and storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages behind `tensor`, those of all parts of a shell; none of a tensor that has no memory."""
    if is_shell(type(tensor)):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from storages(getattr(tensor, name))
        return
    try:
        yield tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and functorch's tensors
        return
