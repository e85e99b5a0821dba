"""Witness 1: closed formulas over integers, without torch, in milliseconds.

Known limits
    One device. Attention is a fused kernel; where CUDA would take the math path (fp32 with grouped heads, say), the
    trace knows and the formulas do not. Temporaries inside kernels (attention accumulators, matrix-product workspaces
    and the CPU's packing buffers for bf16 products) are left out. `uncovered` says for a run what of it the formulas
    know nothing of: selective, submodule and offload checkpointing, valid-rows and fused losses, prefix-suffix and
    distill workloads, dropout, LoRA, compiled blocks, and decoders beyond the dense ones.
"""

from memplan.estimate.covers import uncovered
from memplan.estimate.peak import estimate

__all__ = ["estimate", "uncovered"]
