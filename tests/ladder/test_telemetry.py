"""What NVML saw, beside what a rung says of itself."""

from typing import Any

from memplan.ladder.telemetry import watched_over
from memplan.record import WindowPeak


def told(*names: str) -> dict[str, Any]:
    return {"windows": {name: WindowPeak(allocated_bytes=10, used_bytes=50) for name in names}}


def test_each_window_gets_what_was_seen_while_it_was_open() -> None:
    seen = {"windows": {"build": {"own_bytes": 1}, "measured": {"own_bytes": 2}, "timed": {"own_bytes": 3}}}
    on_card = watched_over(told("init", "phases", "measured"), seen)
    assert {name: peak.own_bytes for name, peak in on_card["windows"].items()} == {
        "init": 1,
        "phases": 2,
        "measured": 3,
    }
    on_cpu = watched_over(told("init", "measured"), seen)
    assert {name: peak.own_bytes for name, peak in on_cpu["windows"].items()} == {"init": 1, "measured": 2}
    assert on_card["peak_used_bytes"] == 50


def test_f28_nothing_is_told_from_a_device_that_others_use() -> None:
    """The device's total less what was there before would be theirs as well."""
    seen = {"windows": {"measured": {"own_bytes": 20, "others_bytes": 30}}}
    found = watched_over(told("measured"), seen)
    assert found["windows"]["measured"].used_bytes == 20 == found["peak_used_bytes"]
    unknown = watched_over(told("measured"), {"windows": {"measured": {"own_bytes": None, "others_bytes": 30}}})
    assert unknown["windows"]["measured"].used_bytes is None is unknown["peak_used_bytes"]


def test_what_was_not_read_is_left_out() -> None:
    timed = {"sm_clock_mhz": {"median": 1980}, "throttled": [], "power_w": None}
    assert watched_over(told("measured"), {"timed": timed})["telemetry"] == {"sm_clock_mhz": {"median": 1980}}
    assert watched_over(told("measured"), {})["telemetry"] == {}
    others = [{"pid": 7, "name": "python", "bytes": 30}]
    assert watched_over(told("measured"), {"timed": timed, "others": others})["telemetry"]["others"] == others
