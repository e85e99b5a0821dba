"""From events to numbers."""

from memplan.ladder.windows import device_facts, fold
from memplan.record import WindowPeak

PEAKS = ({"allocated_bytes": 70, "reserved_bytes": 90}, {"allocated_bytes": 60, "reserved_bytes": 95})
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
