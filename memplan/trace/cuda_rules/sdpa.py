"""Which attention kernel CUDA would choose, by torch's own order and conditions. No torch.

Source: `select_sdp_backend`, `priority_order` and `check_prefer_cudnn_attention` in
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, torch 2.13.
Checked: tests/trace/test_sdpa.py.
"""

from memplan.errors import MemplanError
from memplan.trace.cuda_rules.generation import Generation
from memplan.trace.cuda_rules.sdpa_call import AttentionShape, Backend, Choice, Flags, Mask, TensorShape
from memplan.trace.cuda_rules.sdpa_rules import RULES

__all__ = [
    "CUDNN_FIRST",
    "FUSED_FIRST",
    "AttentionShape",
    "Backend",
    "Choice",
    "Flags",
    "Mask",
    "TensorShape",
    "choose",
    "default_priority",
    "why_not",
]

FUSED_FIRST: tuple[Backend, ...] = ("flash", "efficient", "math", "cudnn")
"""The order in which torch tries the kernels (`Context::sdp_priority_order`)."""
CUDNN_FIRST: tuple[Backend, ...] = ("cudnn", "flash", "efficient", "math")
"""The order where `check_prefer_cudnn_attention` holds."""


def choose(query: AttentionShape, generation: Generation, flags: Flags | None = None) -> Choice:
    """The kernel that CUDA takes for the call `query`; MemplanError when no kernel can run it."""
    flags = flags or Flags()
    reasons: list[tuple[Backend, str]] = []
    for backend in flags.priority or default_priority(generation):
        reason = why_not(backend, query, generation, flags)
        if reason is None:
            return Choice(backend=backend, reasons=tuple(reasons))
        reasons.append((backend, reason))
    told = "; ".join(f"{backend}: {reason}" for backend, reason in reasons)
    raise MemplanError(f"No attention kernel can run this call ({told}).", "Allow another with sdpa_kernel.")


def default_priority(generation: Generation) -> tuple[Backend, ...]:
    """The order in which torch tries the kernels on this card (`check_prefer_cudnn_attention`)."""
    prefers = generation.cudnn_version > 91500 and generation.major in (9, 10)
    return CUDNN_FIRST if prefers else FUSED_FIRST


def why_not(backend: Backend, query: AttentionShape, generation: Generation, flags: Flags) -> str | None:
    """Why `backend` cannot run the call, None when it can."""
    for rule in RULES[backend]:
        reason = rule(query, generation, flags)
        if reason is not None:
            return reason
    return None
