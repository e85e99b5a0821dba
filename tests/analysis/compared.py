"""Rows to compare, and findings among those of a comparison."""

from typing import Any

from samples import row_of

from memplan.analysis.comparison import Comparison, Finding
from memplan.record import RungResult
from memplan.units import MIB

PARTS = {"params": 40 * MIB, "activations": 50 * MIB, "temps": 10 * MIB}
H100 = {"device": "cuda", "gpu": "NVIDIA H100 80GB HBM3", "gpu_memory_bytes": 85899345920, "torch": "2.13.0+cu130",
        "driver": "580.1", "cuda": "13.0", "commit": "abc1234", "power_limit_w": 700.0}  # fmt: skip


EMPTY = row_of(peak_allocated_bytes=None, step_ns=())
"""Came to its end, as it says, and has no number."""


def one(found: Comparison, metric: str = "peak_allocated_bytes", name: str | None = None) -> Finding:
    """The finding of a metric, of one rung where there are several."""
    (finding,) = (one for one in found.findings if one.metric == metric and name in (None, one.name))
    return finding


def repeated(times_s: list[float], **values: Any) -> list[RungResult]:
    """A process for each median time."""
    return [row_of(repeat=number, step_ns=(int(time * 10**9),) * 5, **values) for number, time in enumerate(times_s, 1)]


def on(row: RungResult, **facts: Any) -> RungResult:
    """`row` in the environment of an H100, with some facts changed."""
    return RungResult.from_dict(row.to_dict() | {"environment": H100 | facts})
