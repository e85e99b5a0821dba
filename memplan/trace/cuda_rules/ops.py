"""Composite ops that take another road on CUDA: fused RMS norm, fused dropout, softmax of fp16 into fp32, statistics.

A composite op asks where its input lives and then calls other ops. A fake CPU tensor would get the CPU's, with other
saved tensors and other temporaries. Each replacement below names the branch that it takes for CUDA.
Checked: tests/trace/test_cuda_ops.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._decomp.decompositions import _fused_rms_norm as composite_rms_norm
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, is_fake
from torch.optim import optimizer
from torch.utils import _foreach_utils

from memplan.trace.cuda_rules.override import overridden

aten = torch.ops.aten


@contextmanager
def cuda_ops() -> Iterator[None]:
    """Gives composite ops on fake CPU tensors CUDA's branch, and optimizers CUDA's defaults, while it is open."""
    replaced: dict[str, Callable[..., Any]] = {
        "rms_norm": rms_norm,
        "dropout": dropout,
        "softmax.int": softmax,
        "log_softmax.int": log_softmax,
    }
    with overridden("CompositeImplicitAutograd", replaced), _layer_norm_statistics(), _foreach_by_default():
        yield


def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """`rms_norm` by the fused op, which saves the input and one fp32 number a row.

    Source: aten/src/ATen/native/layer_norm.cpp `rms_norm_symint`: fused unless the dtypes of input and weight differ or
    the input is complex; torch 2.13.
    """
    out: Tensor
    if not is_fake(x) or x.is_complex() or (weight is not None and weight.dtype != x.dtype):
        return composite_rms_norm(x, shape, weight, eps)[0]
    out = _FusedRMSNorm.apply(x, weight, list(shape), eps)  # type: ignore[no-untyped-call]
    return out


class _FusedRMSNorm(torch.autograd.Function):
    """`_fused_rms_norm` with the derivative that torch registers for CUDA only (derivatives.yaml)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, shape: list[int], eps: float | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, rstd = aten._fused_rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.shape = shape
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[1] and weight is not None]
        dx, dweight = aten._fused_rms_norm_backward(grad, x, ctx.shape, rstd, weight, mask)
        return dx, dweight, None, None


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """`dropout` by the fused op, whose mask is bool; the CPU multiplies by noise in the dtype of the input.

    Source: aten/src/ATen/native/Dropout.cpp `dropout`, `is_fused_kernel_acceptable`, torch 2.13.
    """
    if p == 0 or not train or x.numel() == 0:
        return x
    if p == 1:
        return x.mul(torch.zeros((), dtype=x.dtype, device=x.device))
    out: Tensor
    if is_fake(x):
        out = aten.native_dropout(x, p, train)[0]
        return out
    return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """`softmax`, which reads fp16 and writes fp32 in one kernel where it is asked to.

    Source: aten/src/ATen/native/SoftMax.cpp `softmax`, `log_softmax`: `input.is_cuda() && Half && dtype == Float`.
    """
    return _softmax(aten._softmax, x, dim, dtype)


def log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """`log_softmax`, with the same rule as `softmax`."""
    return _softmax(aten._log_softmax, x, dim, dtype)


def _softmax(op: Any, x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    fused = is_fake(x) and x.dtype == torch.float16 and dtype == torch.float32
    out: Tensor = op(x if fused or dtype is None else x.to(dtype), dim, fused)
    return out


@contextmanager
def _layer_norm_statistics() -> Iterator[None]:
    """Mean and inverse deviation of `native_layer_norm` in fp32 for half precision, as CUDA keeps them.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu `layer_norm_cuda`: `acc_type` of the input, torch 2.13.
    """
    op = aten.native_layer_norm.default
    on_cpu = fake_impls.op_implementations_dict[op]

    def on_cuda(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
        out, mean, rstd = on_cpu(mode, func, *args, **kwargs)
        if mean.dtype in (torch.bfloat16, torch.float16):
            mean, rstd = torch.empty_like(mean, dtype=torch.float32), torch.empty_like(rstd, dtype=torch.float32)
        return out, mean, rstd

    FakeTensorMode.cache_clear()
    with patch.dict(fake_impls.op_implementations_dict, {op: on_cuda}):
        yield
    FakeTensorMode.cache_clear()


@contextmanager
def _foreach_by_default() -> Iterator[None]:
    """Optimizers and gradient clipping take their foreach form where the caller left it open, as they do on CUDA.

    Source: torch/optim/optimizer.py `_default_to_fused_or_foreach` and torch/utils/_foreach_utils.py, which look for
    CUDA and for plain tensors; torch 2.13.
    """
    devices = _foreach_utils._get_foreach_kernels_supported_devices

    def with_cpu() -> list[str]:
        return [*devices(), "cpu"]

    with (
        patch.object(_foreach_utils, "_get_foreach_kernels_supported_devices", with_cpu),
        patch.object(optimizer, "_get_foreach_kernels_supported_devices", with_cpu),
        patch.object(_foreach_utils, "_foreach_supported_types", [torch.Tensor, FakeTensor]),
        patch.object(optimizer, "_foreach_supported_types", [torch.Tensor, torch.nn.Parameter, FakeTensor]),
    ):
        yield
