"""Values of small whole numbers and masks, computed for real beside fake tensors.

A model that picks rows by a mask makes tensors whose size depends on values. Where these come from the inputs alone
(token ids, image grids, indices of patches) they are known: a mode beside the recorder runs every op on whole numbers
twice, once on fake tensors and once on real ones, and gives the sizes.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from memplan.trace.plain_mode import PlainMode
from memplan.trace.reads import READS
from memplan.trace.recorder import Recorder

aten = torch.ops.aten
BY_INDEX = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
"""Ops whose second argument lists indices; masks among them become the numbers of what they mark, as in
aten/src/ATen/native/TensorAdvancedIndexingUtils.h and IndexingUtils.h `expandTensors`, torch 2.13."""
LARGEST = 1 << 24
"""Elements beyond which nothing is computed twice."""


class KnownValues(PlainMode):  # type: ignore[no-untyped-call]
    """Gives sizes and values to ops that ask for those of known tensors. Entered inside of `recorder`."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._twins: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            value, twin = func(*args, **kwargs), self._twins.get(args[0])
            with _disable_current_modes():
                return value if twin is None else twin.item()
        if func is aten.masked_select.default and self._is_known(args[1]):
            values, _ = torch.broadcast_tensors(*args)  # type: ignore[no-untyped-call]
            return aten.index.Tensor(values, self._numbers(args[1], values.shape))
        if func in BY_INDEX:
            args = (args[0], [place for index in args[1] for place in self._places(index)], *args[2:])
        out = func(*args, **kwargs)
        self._follow(func, args, kwargs, out)
        return out

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Runs `func` on the twins of its arguments, where they are known, for those of its results."""
        results = [out] if isinstance(out, Tensor) else out if isinstance(out, list | tuple) else []
        if not any(isinstance(one, Tensor) and is_whole(one) for one in results):
            return
        given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        if not all(self._is_known(one) for one in given):
            if func._schema.is_mutable:
                self._forget(results)
            return
        with _disable_current_modes():
            made = func(*tree_map(self._twin, args), **tree_map(self._twin, kwargs))
        for one, twin in zip(results, [made] if isinstance(out, Tensor) else made, strict=True):
            if isinstance(one, Tensor) and is_whole(one):
                self._twins[one] = twin

    def _is_known(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) or tensor in self._twins

    def _twin(self, one: Any) -> Any:
        return self._twins[one] if isinstance(one, FakeTensor) else one

    def _forget(self, tensors: Any) -> None:
        """Leaves out all that shares memory with tensors into which something unknown was written."""
        storages = {self._twins[one].untyped_storage()._cdata for one in tensors if one in self._twins}
        for one in list(self._twins):
            if self._twins[one].untyped_storage()._cdata in storages:
                del self._twins[one]

    def _places(self, index: Tensor | None) -> list[Tensor | None]:
        """`index` itself, or the numbers that a known mask marks, a tensor a dimension."""
        if index is None or index.dtype is not torch.bool or not self._is_known(index):
            return [index]
        return [*self._numbers(index, index.shape)]

    def _numbers(self, mask: Tensor, shape: torch.Size) -> list[Tensor]:
        """Where the known `mask`, expanded to `shape`, is true, in the memory that `nonzero` takes for it: a tensor a
        dimension."""
        with _disable_current_modes():
            count = int(self._twin(mask).expand(shape).sum())
        numbers = torch.empty(len(shape), count, dtype=torch.int64, device=mask.device)
        if count:
            self._recorder.trace.allocs[-1].op = str(aten.nonzero.default)
        return list(numbers.unbind(0))


def is_whole(tensor: Tensor) -> bool:
    """Whether `tensor` is of whole numbers or of a mask, and small."""
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex) and tensor.numel() <= LARGEST
