"""What each CUDA attention kernel demands of a call: one function a check of torch. No torch.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (`can_use_*_attention`) and sdp_utils_cpp.h, torch 2.13,
for dense tensors on NVIDIA cards. A check whose name differs from torch's carries torch's in its docstring.
Checked: tests/trace/test_sdpa.py.
"""

from collections.abc import Callable

from memplan.trace.cuda_rules.generation import Generation
from memplan.trace.cuda_rules.sdpa_call import AttentionShape, Backend, Flags

Rule = Callable[[AttentionShape, Generation, Flags], str | None]
"""Why the kernel cannot run the call; None where this check has nothing against it."""

_HALF = ("bfloat16", "float16")
_NEWEST = (12, 1)


def _enabled(backend: Backend) -> Rule:
    def check_runtime_disabled(query: AttentionShape, generation: Generation, flags: Flags) -> str | None:
        return None if getattr(flags, backend) else "it is switched off by sdpa_kernel or a global flag"

    return check_runtime_disabled


def _tensor_shapes(query: AttentionShape, generation: Generation, flags: Flags) -> str | None:
    dims = {len(t.shape) for t in (query.query, query.key, query.value)}
    return None if dims == {4} else "query, key and value must have 4 dimensions"


def _no_mask(query: AttentionShape, generation: Generation, flags: Flags) -> str | None:
    return None if query.mask is None else "it takes no attn_mask"


def _flash_head_size(query: AttentionShape, generation: Generation, flags: Flags) -> str | None:
    sizes = {t.shape[-1] for t in (query.query, query.key, query.value)}
    if len(sizes) == 1 and max(sizes) <= 256:
        return None
    return f"query, key and value need one head size of at most 256, not {_heads(query)}"


def _hardware(oldest: tuple[int, int]) -> Rule:
    def check_hardware_support(query: AttentionShape, generation: Generation, flags: Flags) -> str | None:
        if oldest <= generation.capability <= _NEWEST:
            return None
        return f"it is not built for {generation.sm}"

    return check_hardware_support


def _flash_backward_head_size(query: AttentionShape, generation: Generation, flags: Flags) -> str | None:
    """check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120"""
    small = (8, 6) <= generation.capability <= (8, 9) or (12, 0) <= generation.capability <= (12, 1)
    head = query.query.shape[-1]
    if not query.requires_grad or not small or head <= 192 or (head > 224 and query.dropout == 0):
        return None
    return f"its backward cannot do a head size of {head} on {generation.sm}"


def _flash_causal_square(query: AttentionShape, generation: Generation, flags: Flags) -> str | None:
    if not query.is_causal or query.query.shape[-2] == query.key.shape[-2]:
        return None
    return "is_causal needs as many keys as queries"


def _dtype(*allowed: str) -> Rule:
    def check_tensor_dtype(query: AttentionShape, generation: Generation, flags: Flags) -> str | None:
        if query.dtype in allowed:
            return None
        return f"it runs in {', '.join(allowed)}, not in {query.dtype}"

    return check_tensor_dtype


def _low_precision(query: AttentionShape, generation: Generation, flags: Flags) -> str | None:
    allowed = _HALF if generation.major >= 8 else ("float16",)
    return _dtype(*allowed)(query, generation, flags)


def _efficient_dtype(query: AttentionShape, generation: Generation, flags: Flags) -> str | None:
    allowed = ("float16", "float32", "bfloat16") if generation.major >= 8 else ("float16", "float32")
    return _dtype(*allowed)(query, generation, flags)


def _batch_and_heads(*, gqa: bool, same_key_value_heads: bool) -> Rule:
    def check_batch_size_and_num_heads_dense(query: AttentionShape, generation: Generation, flags: Flags) -> str | None:
        q, k, v = query.query.shape, query.key.shape, query.value.shape
        if not q[0] == k[0] == v[0]:
            return "query, key and value must have the same batch size"
        if gqa and query.enable_gqa:
            if same_key_value_heads and k[1] != v[1]:
                return "key and value must have the same number of heads"
            divides = q[1] % k[1] == 0 and (same_key_value_heads or q[1] % v[1] == 0)
            return None if divides else "the heads of key and value must divide those of query"
        if q[1] == k[1] == v[1]:
            return None
        if query.enable_gqa:
            return "it has no grouped heads (enable_gqa): repeat key and value instead"
        return "query, key and value must have the same number of heads"

    return check_batch_size_and_num_heads_dense


def _nonzero_lengths(query: AttentionShape, generation: Generation, flags: Flags) -> str | None:
    empty = query.query.shape[-2] == 0 or query.key.shape[-2] == 0
    return "a sequence length is 0" if empty else None


def _last_stride(*, ignore_singleton: bool) -> Rule:
    def check_last_dim_stride_equals_1_dense(query: AttentionShape, generation: Generation, flags: Flags) -> str | None:
        ones = all(t.strides[-1] == 1 for t in (query.query, query.key, query.value))
        ones = ones or (ignore_singleton and query.query.shape[-1] == 1)
        if ones and (query.mask is None or query.mask.tensor.strides[-1] == 1):
            return None
        return "the last dimension of query, key, value and mask must be dense (stride 1)"

    return check_last_dim_stride_equals_1_dense


def _efficient_head_size(query: AttentionShape, generation: Generation, flags: Flags) -> str | None:
    """check_head_dim_size_mem_efficient, minimum_gemm_alignment"""
    half = query.dtype in _HALF
    alignment = 4 if generation.major >= 8 else 1
    if generation.major >= 8 or (generation.major == 7 and half):
        alignment = max(alignment, 128 // (16 if half else 32))
    q, k, v = (t.shape[-1] for t in (query.query, query.key, query.value))
    if q == k and q > 0 and v > 0 and q % alignment == 0 and v % alignment == 0:
        return None
    return f"head sizes must be multiples of {alignment}, not {_heads(query)}"


def _cudnn_deterministic(query: AttentionShape, generation: Generation, flags: Flags) -> str | None:
    return "it is not deterministic" if flags.deterministic else None


def _cudnn_mask(query: AttentionShape, generation: Generation, flags: Flags) -> str | None:
    """check_attn_mask_shape"""
    if query.mask is None:
        return None
    if query.mask.requires_grad:
        return "it gives the mask no gradient"
    mask = query.mask.tensor.shape
    full = (query.query.shape[0], query.query.shape[1], query.query.shape[2], query.key.shape[2])
    if len(mask) in (2, 4) and all(size in (1, of) for size, of in zip(reversed(mask), reversed(full), strict=False)):
        return None
    return f"a mask of shape {list(mask)} does not fit {list(full)}"


def _cudnn_dropout(query: AttentionShape, generation: Generation, flags: Flags) -> str | None:
    if query.dropout > 0 and 91100 < generation.cudnn_version < 91400:
        return "cuDNN 9.11 to 9.13 has no dropout in attention"
    return None if (query.dropout * 16).is_integer() else "dropout must be a multiple of 1/16"


def _cudnn_shapes(query: AttentionShape, generation: Generation, flags: Flags) -> str | None:
    """check_cudnn_tensor_shapes"""
    q, k, v = query.query.shape, query.key.shape, query.value.shape
    limit = 128
    if generation.capability == (9, 0) and generation.cudnn_version >= 91000:
        limit = 256
    if generation.major == 10 and generation.cudnn_version >= 91100 and (q[3], v[3]) == (192, 128):
        limit = 192
    if q[3] > limit or v[3] > limit:
        return f"the head size must be at most {limit} on {generation.sm}, not {_heads(query)}"
    if q[3] % 8 or v[3] % 8:
        return f"head sizes must be multiples of 8, not {_heads(query)}"
    if k[2] == 1:
        return "it does not attend to a single key"
    if query.dropout != 0 and q[2] == 1:
        return "it has no dropout for a single query"
    return None


def _heads(query: AttentionShape) -> str:
    sizes = sorted({t.shape[-1] for t in (query.query, query.key, query.value)})
    return " and ".join(map(str, sizes))


RULES: dict[Backend, tuple[Rule, ...]] = {
    "flash": (
        _enabled("flash"),
        _tensor_shapes,
        _no_mask,
        _flash_head_size,
        _hardware((8, 0)),
        _flash_backward_head_size,
        _flash_causal_square,
        _low_precision,
        _batch_and_heads(gqa=True, same_key_value_heads=True),
        _nonzero_lengths,
        _last_stride(ignore_singleton=True),
    ),
    "efficient": (
        _enabled("efficient"),
        _hardware((5, 0)),
        _tensor_shapes,
        _efficient_head_size,
        _nonzero_lengths,
        _last_stride(ignore_singleton=False),
        _batch_and_heads(gqa=False, same_key_value_heads=True),
        _efficient_dtype,
    ),
    "cudnn": (
        _enabled("cudnn"),
        _tensor_shapes,
        _cudnn_deterministic,
        _low_precision,
        _cudnn_mask,
        _hardware((8, 0)),
        _cudnn_dropout,
        _nonzero_lengths,
        _last_stride(ignore_singleton=True),
        _batch_and_heads(gqa=True, same_key_value_heads=False),
        _cudnn_shapes,
    ),
    "math": (_enabled("math"),),
}
"""The checks of each kernel, in torch's order."""
