"""Tensors from outside of a recomputed region, and who writes them in place before the recomputation.

A recomputation reads what is there by then. Where the forward of the region, or anything between it and the
recomputation, has written in place what the region reads, it goes on with other values; and what the region itself
writes outside of itself, it writes twice.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from memplan.record.parity import Mutation
from memplan.step.results import makes_view

MAX_MARKS = 1 << 28
"""Elements of a storage up to which two strided parts of it are held against one another one by one."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Which elements of a storage a tensor covers."""

    start: int
    """First element."""
    shape: tuple[int, ...]
    """Sizes."""
    strides: tuple[int, ...]
    """Steps, in elements."""
    itemsize: int
    """Bytes of an element."""

    @staticmethod
    def of(tensor: Tensor) -> "Extent":
        """The extent of `tensor`."""
        return Extent(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.element_size())

    @property
    def stop(self) -> int:
        """One past the last element."""
        if 0 in self.shape:
            return self.start
        return self.start + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))

    def overlaps(self, other: "Extent") -> bool:
        """Whether an element is in both."""
        if self.itemsize != other.itemsize:
            return True
        low, high = max(self.start, other.start), min(self.stop, other.stop)
        if low >= high or max(self.stop, other.stop) > MAX_MARKS:
            return low < high
        marks = np.zeros(max(self.stop, other.stop), dtype=bool)
        self.part(marks)[...] = True
        return bool(self.part(marks).any() and other.part(marks).any())

    def part(self, marks: Any) -> Any:
        """The marks, one for each element of the storage, that this extent covers."""
        steps = tuple(step * marks.itemsize for step in self.strides)
        return np.lib.stride_tricks.as_strided(marks[self.start :], self.shape, steps)


@dataclass(frozen=True, slots=True)
class Read:
    """One reading of a tensor from outside."""

    extent: Extent
    """The elements."""
    where: str
    """Op and module."""
    text: str
    """The tensor in words."""
    tensor: "weakref.ref[Tensor]"
    """The tensor, as long as somebody holds it."""
    version: int
    """Its version when it was read."""


@dataclass(frozen=True, slots=True)
class Write:
    """One write to a tensor from outside."""

    where: str
    """Op and module."""
    text: str
    """The tensor in words."""
    inside: bool
    """Whether the region did it."""
    reader: str
    """Who reads it, where it is known by then."""


class Outside:
    """What one call of a region has to do with tensors that were made outside of it."""

    def __init__(self, names: dict[int, str]) -> None:
        self.names = names
        """Parameters and buffers, by storage."""
        self._storages: dict[int, StorageWeakRef] = {}  # while they are held here no other storage gets their number
        self._made: set[int] = set()
        self._reads: dict[int, dict[Extent, Read]] = {}
        self._writes: dict[int, Write] = {}

    def see(self, func: Any, args: Any, kwargs: Any, out: Any, where: str) -> None:
        """An op of the region has run: what it read, and what it made."""
        writes = {id(tensor) for tensor in written(func, args, kwargs)}
        given = set()
        for tensor in tensors((args, kwargs)):
            key = self._key(tensor)
            given.add(key)
            if key not in self._made and id(tensor) not in writes and not makes_view(func):
                read = Read(Extent.of(tensor), where, self.text(tensor), weakref.ref(tensor), version_of(tensor))
                self._reads.setdefault(key, {}).setdefault(read.extent, read)
        self._made |= {key for tensor in tensors(out) if (key := self._key(tensor)) not in given}

    def write(self, tensor: Tensor, where: str, *, inside: bool) -> None:
        """`tensor` is written in place, by the region itself or after it."""
        key = self._key(tensor)
        if key in self._made or key in self._writes:
            return
        extent = Extent.of(tensor)
        reader = next((read.where for read in self._reads.get(key, {}).values() if read.extent.overlaps(extent)), "")
        if inside or reader:
            self._writes[key] = Write(where, self.text(tensor), inside, reader)

    def mutations(self, region: str) -> Iterator[Mutation]:
        """What has been written by now where `region` would read or write it again."""
        for key, write in self._writes.items():
            later = [read.where for read in self._reads.get(key, {}).values()]
            reader = write.reader or (later[0] if later else "")
            yield Mutation(region=region, tensor=write.text, reader=reader, writer=write.where, inside=write.inside)
        for key, reads in self._reads.items():
            for read in reads.values():
                tensor = read.tensor()
                if key not in self._writes and tensor is not None and version_of(tensor) != read.version:
                    writer = "an op that was not seen"
                    yield Mutation(region=region, tensor=read.text, reader=read.where, writer=writer, inside=False)
                    break

    def text(self, tensor: Tensor) -> str:
        """`tensor` in words: its name where it is a parameter or a buffer, shape and dtype."""
        name = self.names.get(tensor.untyped_storage()._cdata, "a tensor")
        return f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"

    def _key(self, tensor: Tensor) -> int:
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch gives it no types
        self._storages.setdefault(storage.cdata, storage)
        return int(storage.cdata)


def tensors(values: Any) -> list[Tensor]:
    """The tensors with a storage in nested `values`."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and has_storage(leaf)]


def has_storage(tensor: Tensor) -> bool:
    """Whether `tensor` has a storage of its own, as sparse ones have not."""
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True


def version_of(tensor: Tensor) -> int:
    """How often `tensor` was written in place; 0 where nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that a call of the op `func` writes in place, by its schema."""
    places = places_written(func)
    found = [args[index] for index, _ in places if index < len(args)]
    found += [kwargs[name] for _, name in places if name in kwargs]
    return tensors(found)


@cache
def places_written(func: Any) -> tuple[tuple[int, str], ...]:
    """Number and name of each argument that `func` writes in place."""
    schema = getattr(func, "_schema", None)
    arguments = [] if schema is None else schema.arguments
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
