"""Fake tensors whose ops are answered from memory.

What a fake op gives follows from the op and from sizes, strides, offsets and dtypes of its arguments. torch remembers
that too, under keys whose making takes longer than all that a recorder does; the ones here are made of the same facts.
Whatever is not plain goes torch's own way: values that matter, sizes that depend on them, several results, odd layouts.
Source: `FakeTensorMode._cached_dispatch_impl` and `_validate_cache_key`, torch/_subclasses/fake_tensor.py, torch 2.13.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_flatten

from memplan.trace.plain_mode import PlainMode

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments that are their own keys."""
NOT_REMEMBERED = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
    torch.Tag.nondeterministic_seeded,
}
"""Tags of ops whose results need more than their arguments' sizes, or that draw."""


class Answer(NamedTuple):
    """What an op gives."""

    source: int | None
    """Number of the argument that it gives back, or whose memory its result has; None for new memory."""
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    same: bool
    """Whether it gives the argument itself."""


class Odd(Exception):
    """An argument that no key is made of."""


class QuickFakeMode(PlainMode, FakeTensorMode):
    """A `FakeTensorMode` that answers what it was asked before."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self._answers: dict[Any, Answer | None] = {}
        self._plain_ops: dict[Any, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, types, args, kwargs)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = self._plain_ops.get(func)
        if plain is None:
            plain = self._plain_ops[func] = is_plain(func)
        if not plain:
            return super().dispatch(func, types, args, kwargs or {})
        try:
            key = (func, torch.is_inference_mode_enabled(), torch.get_default_dtype(), *self._facts(args))
            if kwargs:
                key = (*key, *kwargs, *self._named_facts(kwargs.values()))
            answer = self._answers.get(key)
        except (Odd, TypeError):
            return super().dispatch(func, types, args, kwargs or {})
        if answer is not None:
            return self._made(answer, args)
        out = super().dispatch(func, types, args, kwargs or {})
        if key not in self._answers:
            self._answers[key] = answer_of(out, args)
        return out

    def _facts(self, args: Any) -> list[Any]:
        """What a key is made of; `Odd` where it cannot be made."""
        facts: list[Any] = []
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor:
                if arg.constant is not None or arg.fake_mode is not self or arg.layout is not torch.strided:
                    raise Odd
                if arg.dtype.is_complex:  # may be conjugated without a word
                    raise Odd
                facts += (arg.shape, arg.stride(), arg.storage_offset(), arg.dtype, arg.fake_device)
            elif kind in PLAIN:
                facts += (kind, arg)
            elif kind is list or kind is tuple or kind is torch.Size:
                facts += ("[", *self._facts(arg), "]")
            else:
                raise Odd
        return facts

    def _named_facts(self, values: Any) -> list[Any]:
        """What a key has of arguments by name, none of which is a tensor: it may be the one that is written to."""
        if any(isinstance(value, Tensor) for value in values):
            raise Odd
        return self._facts(values)

    def _made(self, answer: Answer, args: Any) -> Any:
        """The result that `answer` tells of."""
        if answer.same:
            return args[answer.source]
        with in_kernel_invocation_manager(self):
            if answer.source is None:
                empty = torch.empty_strided(answer.shape, answer.stride, dtype=answer.dtype, device="meta")
            else:
                empty = torch.empty(0, dtype=answer.dtype, device="meta")
                storage = args[answer.source].untyped_storage()
                empty.set_(storage, answer.offset, answer.shape, answer.stride)
        return FakeTensor(self, empty, answer.device)


def is_plain(func: Any) -> bool:
    """Whether results of `func` follow from its arguments' sizes: torch's own ops that give one tensor."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or NOT_REMEMBERED & set(func.tags):
        return False
    returns = func._schema.returns
    if func._schema.name.endswith(("resize_", "set_", "lift_fresh")):
        return False
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


def answer_of(out: Any, args: Any) -> Answer | None:
    """What `out` says of the op that made it of `args`, or None where more is to it."""
    if type(out) is not FakeTensor or out.constant is not None or out.layout is not torch.strided:
        return None
    if out.dtype.is_complex or out.requires_grad:
        return None
    facts: tuple[Any, Any, Any, Any, Any] = (out.shape, out.stride(), out.storage_offset(), out.dtype, out.fake_device)
    storage = out.untyped_storage()
    for number, arg in enumerate(args):
        if isinstance(arg, FakeTensor) and arg.untyped_storage()._cdata == storage._cdata:
            return Answer(number, *facts, same=arg is out)
    inner = [one for one in tree_flatten(args)[0] if isinstance(one, FakeTensor)]
    whole = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta").untyped_storage()
    if any(one.untyped_storage()._cdata == storage._cdata for one in inner) or whole.nbytes() != storage.nbytes():
        return None
    return None if out.storage_offset() else Answer(None, *facts, same=False)
