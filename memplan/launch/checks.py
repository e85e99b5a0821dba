"""Two short jobs: is the device well, and is a checkpointed step still the plain one?"""

import os
from typing import Any

import torch

from memplan.backends.base import Backend
from memplan.errors import MemplanError
from memplan.record import ParityReport
from memplan.spec import DeviceSpec, RunSpec

SIDE = 64
"""Rows and columns of the product that a device in good health gets right."""


def check_health(backend: Backend) -> None:
    """Multiplies two small matrices on the device; MemplanError where the product is wrong."""
    ones = torch.ones(SIDE, SIDE, device=backend.device)
    total = float((ones @ ones).sum())
    if total != SIDE**3:
        raise MemplanError(f"The device computes wrong: the sum of a product of ones is {total:g}, not {SIDE**3}.")


def make_deterministic(device: DeviceSpec) -> None:
    """Has CUDA's kernels add in one order wherever they can, before anything runs: atomic sums differ from run to run,
    and a comparison of bits would show them."""
    if device.rules == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


def check_parity(run: RunSpec, backend: Backend, seed: int) -> dict[str, Any]:
    """`run` against its plain step: whether they are the `same`, the `rung` at which, and what there is to say."""
    from memplan.step.parity import compare

    report = compare(run, backend.device, seed)
    return {"same": report.same, "rung": report.variant, "says": sentence(report)}


def sentence(report: ParityReport) -> str:
    """The verdict in one sentence, the cause before its consequences."""
    if report.same:
        how = "bit by bit" if report.tolerance == 0 else f"within {report.tolerance:g} of their largest values"
        again = f", and {report.num_recomputed} recomputed results theirs" if report.num_recomputed else ""
        return f"{report.num_tensors} tensors equal the plain step's {how}{again}"
    reasons = [*map(str, report.mutations), *([str(report.recomputed)] if report.recomputed else []), *report.faults]
    reasons += [f"{worst.name} is off by {worst.max_rel:.3g} of its largest value" for worst in report.differences]
    more = f"; {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return f"not the plain step: {reasons[0]}{more}"
