"""Peaks of a window in which little happens, or nothing."""

import torch

import memplan
from memplan.units import MIB


def test_what_is_alive_at_the_reset_counts() -> None:
    """As `torch.cuda.reset_peak_memory_stats` has it: the peak begins at what is allocated now."""
    with memplan.tracing() as t:
        large = torch.empty(100 * MIB, dtype=torch.uint8)
        t.reset_peak()
        assert t.peak_allocated_bytes == 100 * MIB
        del large
        small = torch.empty(MIB, dtype=torch.uint8)
        report = t.report()
        del small
    assert report.peak_allocated_bytes == report.phases[report.phase].allocated_bytes == 100 * MIB
    assert report.op == ""
    assert [alive.total_bytes for alive in report.alive] == [100 * MIB]


def test_a_trace_of_nothing_has_no_peak() -> None:
    with memplan.tracing() as t:
        pass
    assert (t.peak_allocated_bytes, t.peak_reserved_bytes, t.alive_at_peak()) == (0, 0, ())
