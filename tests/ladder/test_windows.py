"""From events to numbers."""

from memplan.ladder.windows import device_facts, fold
from memplan.record import RungResult, WindowPeak

PEAKS = ({"allocated_bytes": 70, "reserved_bytes": 90}, {"allocated_bytes": 60, "reserved_bytes": 95})
COMMON = {"rung": "B4c2@none", "run_id": "a" * 12, "status": "ok", "source": "measured", "model": "tiny", "step": {}}
EVENTS = [
    {"event": "phase", "phase": "first_step"},
    {"event": "loss", "loss": 2.5},
    {"event": "window", "name": "first_step", "peak": PEAKS[0], "phase_peaks": {"forward": 70, "backward": 50}},
    {"event": "window", "name": "measured", "peak": PEAKS[1], "phase_peaks": {"forward": 40, "backward": 60}},
    {"event": "environment", "device": "cpu", "num_threads": 2, "cudnn": None},
    {"event": "step", "ns": 5},
    {"event": "end", "status": "ok", "error": None},
]


def test_peaks_are_the_largest_over_windows_and_phases() -> None:
    found = fold(EVENTS)
    assert found["windows"]["measured"] == WindowPeak(allocated_bytes=60, reserved_bytes=95)
    assert (found["peak_allocated_bytes"], found["peak_reserved_bytes"]) == (70, 95)
    assert found["phase_peaks"] == {"forward": 70, "backward": 60}
    assert (found["loss"], found["step_ns"]) == ((2.5,), (5,))


def test_a_worker_that_died_keeps_what_it_had_finished() -> None:
    found = fold(EVENTS[:3])
    assert found["peak_allocated_bytes"] == 70
    assert list(found["windows"]) == ["first_step"]
    assert fold(EVENTS[:2])["peak_allocated_bytes"] is None


def test_device_facts_have_no_holes() -> None:
    assert device_facts(EVENTS) == {"device": "cpu", "num_threads": 2}


def test_what_was_looked_at_comes_along_and_what_was_not_is_left_to_the_row() -> None:
    looked = [
        {"event": "training", "grad_norm": 1.5, "num_targets": 252},
        {"event": "look", "attention": {"flash": 8}, "model_flops": 6, "hardware_flops": 8},
        {"event": "breakdown", "at_peak": {"params": 3, "temps": 4}, "between_steps": {"params": 3}},
        {"event": "parity", "same": True, "rung": "B4c2@full", "says": "the same"},
        {"event": "warning", "text": "mind this"},
        {"event": "warning", "text": "and that"},
        {"event": "warning", "text": "mind this"},
    ]
    row = RungResult(**COMMON, **fold([*EVENTS, *looked]))
    assert (row.grad_norm, row.num_targets) == (1.5, 252)
    assert (row.attention, row.model_flops, row.hardware_flops) == ({"flash": 8}, 6, 8)
    assert (row.breakdown, row.between_steps) == ({"params": 3, "temps": 4}, {"params": 3})
    assert row.parity == {"same": True, "rung": "B4c2@full", "says": "the same"}
    assert row.warnings == ("mind this", "and that")
    bare = RungResult(**COMMON, **fold(EVENTS))
    assert (bare.grad_norm, bare.attention, bare.breakdown, bare.warnings) == (None, {}, {}, ())


def test_what_is_used_of_the_device_is_the_largest_of_any_window() -> None:
    windows = [
        {"event": "window", "name": name, "peak": {"allocated_bytes": 1, "used_bytes": used}, "phase_peaks": {}}
        for name, used in (("init", None), ("first_step", 120), ("measured", 110))
    ]
    assert fold(windows)["peak_used_bytes"] == 120
    assert fold(EVENTS)["peak_used_bytes"] is None
