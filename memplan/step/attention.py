"""The attention kernels that may run: captured in forward, allowed again in the recomputation.

torch's `sdpa_kernel` is global state of the moment. Backward runs outside of it, so that a recomputed block would
choose among all kernels, save other tensors than forward did, and fail, or go on with other numbers.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_SWITCHES = {
    "FLASH_ATTENTION": "_get_flash_sdp_enabled",
    "EFFICIENT_ATTENTION": "_get_mem_efficient_sdp_enabled",
    "MATH": "_get_math_sdp_enabled",
    "CUDNN_ATTENTION": "_get_cudnn_sdp_enabled",
    "OVERRIDEABLE": "_get_overrideable_sdp_enabled",
}
"""torch's kernels, with the function that says whether each may run. Source: torch/nn/attention/__init__.py, 2.13."""


def allowed_backends() -> list[SDPBackend]:
    """Kernels that `scaled_dot_product_attention` may choose from now, in the order of preference that holds now."""
    order: list[int] = torch._C._get_sdp_priority_order()
    allowed = [
        getattr(SDPBackend, name)
        for name, switch in _SWITCHES.items()
        if hasattr(SDPBackend, name) and hasattr(torch._C, switch) and getattr(torch._C, switch)()
    ]
    return sorted(allowed, key=lambda backend: order.index(int(backend)))


def attention_pin() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for the forward of a checkpointed region and its recomputation: the second allows what is allowed now,
    in the same order of preference."""
    return nullcontext(), pinned(allowed_backends())


@contextmanager
def pinned(backends: list[SDPBackend]) -> Iterator[None]:
    """Only `backends` may run, preferred in their order.

    torch's context gives back which kernels may run, but of the order only the part of those: with some of them shut
    out beforehand, what stands first inside would stand first for ever after. Source: `_sdpa_kernel`, torch 2.13.
    """
    order: list[int] = torch._C._get_sdp_priority_order()
    try:
        with sdpa_kernel(backends, set_priority=True):
            yield
    finally:
        torch._C._set_sdp_priority_order(order)
