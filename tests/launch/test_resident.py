"""Resident memory while steps are timed: what the kernel tells, and when it is a warning."""

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import Heard, Small

from memplan.backends.base import Reading, Segment
from memplan.backends.cpu import CpuBackend
from memplan.launch.measure import Plan, measure
from memplan.launch.resident import CLEAR_REFS, TOLERATED_BYTES, Resident, ResidentWatch
from memplan.record import WindowPeak
from memplan.units import GIB, KIB, MIB

needs_linux = pytest.mark.skipif(not CLEAR_REFS.exists(), reason="only Linux tells")
NUM_WATCHED = 2
"""First step and marked step: all later ones are timed."""


def reading_of(peak_bytes: int, start_bytes: int = 0) -> Reading:
    """A window that began with `start_bytes`."""
    segment = Segment(phase="", start_bytes=start_bytes, peak_bytes=peak_bytes)
    return Reading(peak=WindowPeak(allocated_bytes=peak_bytes), live_bytes=start_bytes, segments=(segment,))


def told(folder: Path, before: tuple[int, int], behind: tuple[int, int], watched: Reading) -> str | None:
    """What is said of resident bytes and their largest, before and behind."""
    status = folder / "status"
    watch = ResidentWatch(status, folder / "clear_refs")

    def write(now: int, largest: int) -> None:
        status.write_text(f"Name:\tworker\nVmHWM:\t{largest // KIB} kB\nVmRSS:\t{now // KIB} kB\n")

    write(*before)
    with watch:
        write(*behind)
    assert (folder / "clear_refs").read_text() == "5"
    return watch.beyond(watched)


def test_what_the_watched_step_took_too_is_no_news(tmp_path: Path) -> None:
    watched = reading_of(300 * MIB, 100 * MIB)
    most = 200 * MIB + 30 * MIB
    assert told(tmp_path, (GIB, GIB), (GIB, GIB + most), watched) is None
    more = told(tmp_path, (GIB, GIB), (GIB, GIB + most + MIB), watched)
    assert more is not None and more.startswith("timed steps took up to 31.00 MiB more resident memory")
    small = reading_of(MIB)
    assert told(tmp_path, (GIB, GIB), (GIB, GIB + MIB + TOLERATED_BYTES), small) is None
    assert told(tmp_path, (GIB, GIB), (GIB, GIB + 2 * MIB + TOLERATED_BYTES), small) is not None


def test_what_stays_is_growth(tmp_path: Path) -> None:
    grown = told(tmp_path, (GIB, GIB), (GIB + 64 * MIB, GIB + 64 * MIB), reading_of(MIB))
    assert grown is not None and grown.startswith("memory grows while steps are timed: 64.00 MiB")


def test_where_the_kernel_tells_nothing_nothing_is_said(tmp_path: Path) -> None:
    watch = ResidentWatch(tmp_path / "missing", tmp_path / "clear_refs")
    with watch:
        pass
    assert watch.beyond(reading_of(0)) is None
    locked = ResidentWatch(clear_refs=tmp_path / "nowhere" / "clear_refs")
    with locked:
        pass
    assert locked.before is None and locked.beyond(reading_of(0)) is None
    (tmp_path / "odd").write_text("VmRSS:\nVmHWM:\tmuch kB\n")
    assert Resident.read(tmp_path / "odd") is None


class Late(Small):
    """Behind the watched steps, each takes 64 MiB, in the manner of `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.num_taken = 0

    def loss(self) -> torch.Tensor:
        self.num_taken += 1
        late = self.num_taken > NUM_WATCHED
        if self.how == "thread":
            thread = threading.Thread(target=self.take)
            thread.start()
            thread.join()
        elif self.how == "leak" and late:
            self.left.append(self.take())
        elif self.how == "always" or (self.how == "spike" and late):
            self.take()
        return super().loss()

    def take(self) -> torch.Tensor:
        return torch.ones(64 * MIB // 4)


@needs_linux
@pytest.mark.parametrize(
    ("how", "begin"),
    [
        ("spike", "timed steps took up to 6"),
        ("thread", "timed steps took up to 6"),
        ("leak", "memory grows while steps are timed: 1"),
        ("always", None),
        ("never", None),
    ],
)
def test_timed_steps_that_take_more_than_the_watched_one_are_told(how: str, begin: str | None) -> None:
    gc.collect()
    gc.freeze()
    heard: Any = Heard()
    assert measure(CpuBackend(), lambda: Late(how).subject(), Plan(warmup=0, steps=2), heard) == ("ok", None)
    warnings = heard.row()["warnings"]
    assert [text[: len(begin or "")] for text in warnings] == ([] if begin is None else [begin])
