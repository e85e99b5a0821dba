"""Attention on fake CPU tensors as CUDA runs it: the chosen kernel's op, its saved tensors, its temporaries.

The chooser replaces the composite kernel of `aten::scaled_dot_product_attention` itself, so every way to call it is
met: `F.scaled_dot_product_attention`, a name imported earlier, the aten op, under `no_grad` or `inference_mode`, and
the recompute of a checkpoint during backward, where no function mode of the forward is active any more.

Source: `scaled_dot_product_attention` and `_scaled_dot_product_attention_math` in
aten/src/ATen/native/transformers/attention.cpp, torch 2.13.
Checked: tests/trace/test_attention.py.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memplan.errors import MemplanError
from memplan.trace.cuda_rules.generation import Generation
from memplan.trace.cuda_rules.override import overridden
from memplan.trace.cuda_rules.sdpa import FUSED_FIRST, choose
from memplan.trace.cuda_rules.sdpa_call import AttentionShape, Backend, Choice, Flags, Mask, TensorShape

aten = torch.ops.aten

_NUMBERS: dict[int, Backend] = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # at::SDPBackend
_CUDNN_LOWEST = -65504.0


@dataclass(slots=True)
class AttentionLog:
    """The attention calls of a trace and the kernel that each was given."""

    calls: Counter[tuple[AttentionShape, Choice]] = field(default_factory=Counter)
    """How often each call was met with each choice."""

    def backends(self) -> dict[Backend, int]:
        """Number of calls by kernel, recomputed ones included."""
        counts: Counter[Backend] = Counter()
        for (_, choice), count in self.calls.items():
            counts[choice.backend] += count
        return dict(counts)


@contextmanager
def cuda_sdpa(generation: Generation) -> Iterator[AttentionLog]:
    """Gives attention on fake tensors the kernels of `generation` while it is open; yields the log of choices."""
    log = AttentionLog()

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        _validate(query, key, value, attn_mask)
        if not is_fake(query):
            return _on_cpu(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        call = describe(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        choice = choose(call, generation, current_flags())
        log.calls[call, choice] += 1
        return run(choice.backend, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    with overridden("CompositeImplicitAutograd", {"scaled_dot_product_attention": scaled_dot_product_attention}):
        yield log


def describe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    enable_gqa: bool,
) -> AttentionShape:
    """The call as the chooser reads it."""
    mask = None
    if attn_mask is not None:
        kind: Literal["bool", "additive"] = "bool" if attn_mask.dtype == torch.bool else "additive"
        mask = Mask(tensor=_shape(attn_mask), kind=kind, requires_grad=attn_mask.requires_grad)
    return AttentionShape(
        query=_shape(query),
        key=_shape(key),
        value=_shape(value),
        dtype=str(query.dtype).removeprefix("torch."),
        mask=mask,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        dropout=dropout,
        requires_grad=_needs_grad(query, key, value),
    )


def current_flags() -> Flags:
    """The global switches as they stand now.

    torch keeps one order for all devices. Until somebody sets it, it is the one of a build without CUDA, and the card's
    own order takes its place.
    """
    order = tuple(_NUMBERS[number] for number in torch._C._get_sdp_priority_order() if number in _NUMBERS)
    backends: Any = torch.backends.cuda
    deterministic = torch.are_deterministic_algorithms_enabled()
    return Flags(
        flash=backends.flash_sdp_enabled(),
        efficient=backends.mem_efficient_sdp_enabled(),
        cudnn=backends.cudnn_sdp_enabled(),
        math=backends.math_sdp_enabled(),
        priority=None if order == FUSED_FIRST else order,
        deterministic=deterministic and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def run(
    backend: Backend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The output [B, A, S, D] of the chosen kernel, with the tensors it saves."""
    out: Tensor
    if backend == "flash":
        size = query.size(-1)
        scale = size**-0.5 if scale is None else scale
        padded = [F.pad(t, (0, -t.size(-1) % 8)) if t.size(-1) % 8 else t for t in (query, key, value)]
        out = aten._scaled_dot_product_flash_attention(*padded, dropout, is_causal, False, scale=scale)[0]
        return out if out.size(-1) == size else out[..., :size]
    needs_grad = _needs_grad(query, key, value)
    if backend == "efficient":
        bias = _additive(attn_mask, query.dtype, float("-inf"))
        if bias is not None:
            bias = _aligned(bias).expand(query.size(0), query.size(1), query.size(2), key.size(2))
        out = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_grad, dropout, is_causal, scale=scale
        )[0]
        return out
    if backend == "cudnn":
        bias = _additive(attn_mask, query.dtype, _CUDNN_LOWEST)
        out = aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, needs_grad, dropout, is_causal, False, scale=scale
        )[0]
        return out
    bias = _additive(attn_mask, query.dtype, float("-inf"))
    return math_attention(query, key, value, bias, dropout, is_causal, scale, enable_gqa)


def math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The composite kernel, half precision raised to fp32 and the bias added in place, as on a real CUDA tensor.

    torch's own would add out of place here, because a fake tensor is a subclass. So it does under selective
    checkpointing, whose dispatch modes count as a subclass (`areAnyTensorSubclassLike` in
    aten/src/ATen/TensorSubclassLikeUtils.h).
    """
    dtype = query.dtype
    if dtype in (torch.bfloat16, torch.float16) and not torch._C._get_math_sdp_allow_fp16_bf16_reduction():
        query, key, value = query.float(), key.float(), value.float()
    held = query, key, value  # which torch's own has names for to its end
    positive = query.size(-1) ** -0.5 if scale is None else abs(scale)
    factor = positive**0.5
    query = aten.mul.Scalar(query, -factor if scale is not None and scale < 0 else factor)
    if is_causal:
        if bias is not None:
            raise MemplanError("Attention cannot be causal by flag and by mask at once.", "Pass only one of them.")
        bias = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        bias = _additive(bias, query.dtype, float("-inf"))
    if enable_gqa and key.size(-3) != query.size(-3):
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
    if enable_gqa and value.size(-3) != query.size(-3):
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = torch.matmul(query, aten.mul.Scalar(key.transpose(-2, -1), factor))
    if bias is not None:
        scores = scores.add(bias) if under_policy() else scores.add_(bias)
    scores = aten._safe_softmax(scores, -1)
    if dropout > 0:
        scores = F.dropout(scores, dropout, True)
    second_output = scores.to(dtype)  # torch makes it before the product and drops it behind
    out = torch.matmul(scores, value).to(dtype)
    del second_output, held
    return out


def under_policy() -> bool:
    """Whether a mode of torch's selective checkpointing looks on."""
    return any(type(mode).__module__ == "torch.utils.checkpoint" for mode in _get_current_dispatch_mode_stack())


def _additive(mask: Tensor | None, dtype: torch.dtype, lowest: float) -> Tensor | None:
    """convert_boolean_attn_mask_"""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(lowest, dtype=dtype, device=mask.device))


def _aligned(bias: Tensor) -> Tensor:
    """preprocess_mask: rows padded to a multiple of 8 elements where the layout is not aligned already."""
    steps = bias.stride()
    if steps[-1] == 1 and all(step % 8 == 0 for step in steps[:-1]):
        return bias
    size = bias.size(-1)
    return F.pad(bias, (0, 8 - size % 8))[..., :size]


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _shape(tensor: Tensor) -> TensorShape:
    return TensorShape(shape=tuple(tensor.shape), strides=tuple(tensor.stride()))


def _validate(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """validate_sdpa_input"""
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got "
            f"{query.dtype}, {key.dtype} and {value.dtype} instead."
        )
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
            f"attn_mask.dtype: {mask.dtype} and query.dtype: {query.dtype} instead."
        )


def _on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """A real CPU tensor keeps the kernel that torch chooses for the CPU."""
    number = torch._fused_sdp_choice(query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa)
    bias = _additive(mask, query.dtype, float("-inf"))
    rest: dict[str, Any]
    if _NUMBERS[number] == "flash":
        op, rest = aten._scaled_dot_product_flash_attention_for_cpu, {"attn_mask": bias}
    else:
        op, rest = aten._scaled_dot_product_attention_math, {"attn_mask": bias, "enable_gqa": enable_gqa}
    out: Tensor = op(query, key, value, dropout_p=dropout, is_causal=is_causal, scale=scale, **rest)[0]
    return out
