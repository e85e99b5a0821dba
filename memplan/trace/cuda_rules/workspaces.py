"""The scratch memory that cuBLAS holds from its first call on. No torch.

torch takes one workspace from its caching allocator for every pair of a cuBLAS handle and a stream and never gives it
back. Handles belong to threads: the thread that runs the forward pass has one, autograd's thread for the device has
another, so a training step holds two. cuBLASLt (a linear layer with bias, among others) reuses the same blocks.

Source: aten/src/ATen/cuda/CublasHandlePool.cpp (`parseChosenWorkspaceSize`, `parseCUDABlasLtWorkspaceSize`,
`getCUDABlasLtWorkspace`) and CUDAContextLight.h (`WorkspaceMapWithMutex`, keyed by handle and stream), torch 2.13.
Checked: tests/trace/test_workspaces.py; published: with two workspaces of 8.125 MiB each the traced peak of SwiGLU
equals the measured one on an A100 (row LK of the published figures, short by 16.25 MiB without them).

Known limits: what cuBLAS and cuDNN take from the driver for themselves is part of the context, not of the allocator.
"""

import os
import re
from collections.abc import Mapping

from memplan.trace.cuda_rules.generation import Generation
from memplan.units import KIB, MIB

USES_CUBLAS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_addmm_activation", "linear", "matmul")
"""aten ops whose first call in a thread takes the workspace."""

DEFAULT_BYTES = 4096 * KIB * 2 + 16 * KIB * 8
"""8,519,680: the configuration `:4096:2:16:8`."""
LARGE_BYTES = 32 * MIB
"""What newer cards are given."""
LT_BYTES = MIB
"""cuBLASLt's own block where the two are not unified."""

_LARGE_ON_HOPPER = (9,)
_LARGE_SINCE_2_12 = (9, 10, 11, 12)
_PAIR = re.compile(r":([0-9]+):([0-9]+)")


def cublas_workspace_bytes(
    generation: Generation,
    *,
    torch_version: tuple[int, int] = (2, 13),
    environ: Mapping[str, str] | None = None,
) -> int:
    """Bytes of one cuBLAS workspace: 8.125 MiB, on Hopper 32 MiB, on Blackwell 32 MiB from torch 2.12 on.

    `CUBLAS_WORKSPACE_CONFIG` in `environ` (the process's own when None) overrules both: the sum of size x count in KiB.

    Source: `parseChosenWorkspaceSize`; pytorch#175344 (February 2026) for Blackwell.
    """
    config = (os.environ if environ is None else environ).get("CUBLAS_WORKSPACE_CONFIG", "")
    pairs = _PAIR.findall(config)
    if pairs:
        return sum(int(size) * KIB * int(count) for size, count in pairs)
    large = _LARGE_SINCE_2_12 if torch_version >= (2, 12) else _LARGE_ON_HOPPER
    return LARGE_BYTES if generation.major in large else DEFAULT_BYTES


def cublaslt_workspace_bytes(
    *,
    torch_version: tuple[int, int] = (2, 13),
    environ: Mapping[str, str] | None = None,
) -> int:
    """Bytes that cuBLASLt takes beside the cuBLAS workspace: none where they are unified, else 1 MiB.

    Unified by default from torch 2.11 on (`TORCH_CUBLASLT_UNIFIED_WORKSPACE=0` separates them), on demand from 2.7 on;
    `CUBLASLT_WORKSPACE_SIZE` (KiB) sets the separate size.

    Source: `unified_cublas_and_lt_workspaces`; pytorch#151163 (opt-in, April 2025), #168175 (default, January 2026).
    """
    environ = os.environ if environ is None else environ
    asked = environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    unified = asked == "1" if asked is not None else torch_version >= (2, 11)
    if unified and torch_version >= (2, 7):
        return 0
    return int(environ["CUBLASLT_WORKSPACE_SIZE"]) * KIB if "CUBLASLT_WORKSPACE_SIZE" in environ else LT_BYTES
