"""Witness 1: closed formulas over integers, without torch, in milliseconds.

Known limits
    One device. Temporaries inside kernels (attention accumulators, matrix-product workspaces and the CPU's packing
    buffers for bf16 products) are left out.
"""

from memplan.estimate.peak import estimate

__all__ = ["estimate"]
