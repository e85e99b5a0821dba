"""CUDA's autocast on CPU tensors, under `torch.autocast("cpu")` and `torch.autocast("cuda")` alike.

Small kernels take the `AutocastCPU` key for every op on which CUDA's lists differ from the CPU's; they cast and call on
below that key, so nothing inside an op is cast again. Dispatch state and not a mode carries them, so a checkpoint's
recompute, which enters autocast anew, meets the same casts.

Source: aten/src/ATen/autocast_mode.h and autocast_mode.cpp (`cached_cast`, `promote_type`, `set_opt_dtype`), torch
2.13.
Checked: tests/trace/test_autocast.py.

Known limits: the lists hold for real CPU tensors too while the context is open. A parameter that both an op of the
CPU's lower-precision list and one of CUDA's alone read (linear and einsum, say) is cast once for each. `GradScaler` is
not concerned.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch import library as torch_library
from torch.amp import autocast_mode
from torch.utils.weak import WeakTensorKeyDictionary

from memplan.trace.cuda_rules.autocast_lists import (
    FP32,
    FP32_APPENDED,
    FP32_BY_DTYPE,
    LOWER_PRECISION,
    PROMOTE,
    cuda_ops,
)
from memplan.trace.cuda_rules.override import overridden

Kernel = Callable[..., Any]

_KEY = "AutocastCPU"
_CUDA_DEFAULT = torch.float16  # what torch.autocast("cuda") takes without a dtype


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Gives autocast on CPU tensors CUDA's op lists while it is open; the CPU's own are back at exit."""
    cache = WeakTensorKeyDictionary()
    with overridden(_KEY, kernels(cache)), _cuda_means_cpu(), _cleared_with_torch(cache):
        yield
    cache.clear()


def kernels(cache: WeakTensorKeyDictionary | None = None) -> dict[str, Kernel]:
    """The kernels to register for each aten op where CUDA differs from the CPU's registrations."""
    cache = WeakTensorKeyDictionary() if cache is None else cache
    ours = _registered(_KEY)
    made: dict[str, Kernel] = dict.fromkeys(ours - cuda_ops(), torch_library.fallthrough_kernel)
    made |= {name: _lower_precision(name, cache) for name in LOWER_PRECISION if name not in ours}
    made |= {name: _fp32(name) for name in FP32 if name not in ours}
    made |= {name: _fp32_by_dtype(name) for name in FP32_BY_DTYPE}
    made |= {name: _fp32_appended(name) for name in FP32_APPENDED}
    made |= {name: _promote(name) for name in PROMOTE}
    made["binary_cross_entropy"] = _banned_loss
    return made


def _registered(key: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _overload(name: str) -> Kernel:
    packet, _, overload = name.partition(".")
    op: Kernel = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return op


def _below() -> Any:
    """autocast_mode.h: `ExcludeDispatchKeyGuard no_autocast`"""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _lower_precision(name: str, cache: WeakTensorKeyDictionary) -> Kernel:
    op = _overload(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        with _below():
            return op(*_cast(args, dtype, cache), **_cast(kwargs, dtype, cache))

    return kernel


def _fp32(name: str) -> Kernel:
    op = _overload(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below():
            return op(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))

    return kernel


def _fp32_by_dtype(name: str) -> Kernel:
    op = _overload(name)
    names = [argument.name for argument in op._schema.arguments]  # type: ignore[attr-defined]
    place = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else kwargs.get("dtype")
        if given is None and _eligible(args[0] if args else kwargs[names[0]]):
            args = args[:place]
            kwargs = {**kwargs, "dtype": torch.float32}
        with _below():
            return op(*args, **kwargs)

    return kernel


def _fp32_appended(name: str) -> Kernel:
    with_dtype = _overload("norm.ScalarOpt_dtype" if name == "norm.Scalar" else "norm.ScalarOpt_dim_dtype")
    defaults: tuple[Any, ...] = (None, 2) if name == "norm.Scalar" else (None, None, None, False)

    def kernel(*args: Any, keepdim: bool | None = None, **kwargs: Any) -> Any:
        full = [*args, *defaults[len(args) :]]
        if keepdim is not None:
            full[3] = keepdim
        dtype = torch.float32 if _eligible(full[0]) else full[0].dtype
        with _below():
            return with_dtype(*full, dtype=dtype)

    return kernel


def _promote(name: str) -> Kernel:
    op = _overload(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        lower = torch.get_autocast_dtype("cpu")
        seen = {t.dtype for t in _tensors((args, kwargs)) if _eligible(t)}
        if not seen <= {lower, torch.float32}:
            raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
        widest = torch.float32 if torch.float32 in seen else lower
        with _below():
            return op(*_cast(args, widest), **_cast(kwargs, widest))

    return kernel


def _banned_loss(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("binary_cross_entropy is unsafe to autocast; torch on CUDA asks for the loss with logits.")


def _eligible(value: Any) -> bool:
    """is_eligible"""
    is_cpu = isinstance(value, Tensor) and value.device.type == "cpu"
    return is_cpu and value.is_floating_point() and value.dtype != torch.float64


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _cast(value: Any, dtype: torch.dtype, cache: WeakTensorKeyDictionary | None = None) -> Any:
    """cached_cast, through lists and tuples; without `cache` nothing is kept (only casts to lower precision are)."""
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(part, dtype, cache) for part in value)
    if isinstance(value, dict):
        return {name: _cast(part, dtype, cache) for name, part in value.items()}
    if not _eligible(value) or value.dtype == dtype:
        return value
    kept = value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
    if cache is None or not kept or not torch.is_autocast_cache_enabled():
        return value.to(dtype)
    if value not in cache:
        cache[value] = value.to(dtype)
    return cache[value]


@contextmanager
def _cleared_with_torch(cache: WeakTensorKeyDictionary) -> Iterator[None]:
    """Empties `cache` whenever torch empties its own: when the outermost autocast ends."""
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        cache.clear()
        clear()

    with patch.object(torch, "clear_autocast_cache", clear_both):
        yield


@contextmanager
def _cuda_means_cpu() -> Iterator[None]:
    """Makes `torch.autocast("cuda")` and the questions about it speak of the CPU's, which has CUDA's lists here."""
    init = autocast_mode.autocast.__init__
    enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    def autocast_init(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", _CUDA_DEFAULT if dtype is None else dtype
        init(self, device_type, dtype, *args, **kwargs)

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return enabled("cpu" if device_type == "cuda" else device_type)

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        return dtype_of("cpu" if device_type == "cuda" else device_type)

    with (
        patch.object(autocast_mode.autocast, "__init__", autocast_init),
        patch.object(torch, "is_autocast_enabled", is_autocast_enabled),
        patch.object(torch, "get_autocast_dtype", get_autocast_dtype),
    ):
        yield
