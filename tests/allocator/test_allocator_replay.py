"""Recorded histories replayed: by hand, by the model itself, and by CUDA where files are at hand.

What is here and what is not: this repository holds no recording made by CUDA. `test_recordings_of_cuda` replays every
snapshot in the folder that MEMPLAN_SNAPSHOTS names, pickles as `torch.cuda.memory._dump_snapshot` writes them or the
same as JSON, and is skipped without it. So were replayed, in November 2026, 23 recordings of the years 2024 to 2026
from public repositories on GitHub (Wedsonlin/assignment2-systems: results, kkaitlyn111/cs336-a2-systems: memory_files,
silmont2000/assignment2-systems and cranberrii/ftcourse: top level): forward passes and training steps, 233,229 events,
3,813 segments given back in between, most beginning in the middle of a run. Each ended with the recorded segments and
blocks, every allocation at its recorded address. None of them has expandable segments, a second stream, rounding to
divisions, max_split_size or garbage collection: for those there are only the rules, read in the source.
"""

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
from allocations import WHOLE_SIZES, Step, recorded, workloads
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.allocator.replay import replay_snapshot
from memplan.errors import MemplanError
from memplan.units import MIB

FOLDER = Path(os.environ["MEMPLAN_SNAPSHOTS"]) if "MEMPLAN_SNAPSHOTS" in os.environ else None
BASE = 0x7F0000000000


class PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, tuples, numbers and texts; refuses everything that names a class or a function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a snapshot")


def read_snapshot(path: Path) -> Mapping[str, Any]:
    """The snapshot in `path`, JSON or a pickle without any object."""
    with path.open("rb") as file:
        snapshot: Mapping[str, Any] = json.load(file) if path.suffix == ".json" else PlainUnpickler(file).load()
    return snapshot


def event(action: str, address: int, num_bytes: int, stream: int = 0) -> dict[str, Any]:
    """One event of a device's trace."""
    return {"action": action, "addr": address, "size": num_bytes, "stream": stream}


def snapshot_by_hand() -> dict[str, Any]:
    """Four requests and three frees, each step worked out from the rules.

    0, 1: 3 MiB need a segment of 20 MiB, the lowest part is taken, 17 MiB are left.
    2: 5 MiB fit the rest: at 3 MiB. 3, 4: the first is freed: holes of 3 and 12 MiB.
    5: 2.5 MiB take the hole of 3, whose rest of 0.5 MiB is too small to be split off.
    6: the second is freed while a stream still uses it. 7, 8: 700 bytes are a small block of 1024.
    9: the second is free: 5 + 12 MiB grow together.
    """
    second, small = BASE + 3 * MIB, BASE + 64 * MIB
    return {
        "device_traces": [
            [
                event("segment_alloc", BASE, 20 * MIB),
                event("alloc", BASE, 3 * MIB),
                event("alloc", second, 5 * MIB),
                event("free_requested", BASE, 3 * MIB),
                event("free_completed", BASE, 3 * MIB),
                event("alloc", BASE, 5 * MIB // 2),
                event("free_requested", second, 5 * MIB),
                event("segment_alloc", small, 2 * MIB),
                event("alloc", small, 700),
                event("free_completed", second, 5 * MIB),
            ]
        ],
        "segments": [
            {
                "device": 0,
                "address": BASE,
                "total_size": 20 * MIB,
                "stream": 0,
                "segment_type": "large",
                "blocks": [
                    {"size": 3 * MIB, "requested_size": 5 * MIB // 2, "state": "active_allocated"},
                    {"size": 17 * MIB, "requested_size": 5 * MIB, "state": "inactive"},
                ],
            },
            {
                "device": 0,
                "address": small,
                "total_size": 2 * MIB,
                "stream": 0,
                "segment_type": "small",
                "blocks": [
                    {"size": 1024, "requested_size": 700, "state": "active_allocated"},
                    {"size": 2 * MIB - 1024, "requested_size": 0, "state": "inactive"},
                ],
            },
        ],
    }


@pytest.mark.parametrize("dropped", range(11))
def test_a_history_by_hand(dropped: int) -> None:
    """From its start, and from every later moment: what was there before is found by going backwards."""
    snapshot = snapshot_by_hand()
    del snapshot["device_traces"][0][:dropped]
    assert replay_snapshot(snapshot) == ()


@pytest.mark.parametrize(
    ("at", "change", "modelled"),
    [
        (2, {"addr": BASE + 4 * MIB}, "at 0x7f0000300000"),
        (8, {"size": 2 * MIB}, "taken: "),
        (7, {"size": 4 * MIB}, "taken: 2097152 bytes at 0x7f0004000000"),
    ],
)
def test_a_difference_is_seen(at: int, change: dict[str, int], modelled: str) -> None:
    """An allocation elsewhere, a segment that is not needed, a segment of another size."""
    snapshot = snapshot_by_hand()
    snapshot["device_traces"][0][at].update(change)
    if at == 2:  # it lives on at the other place
        for index in (6, 9):
            snapshot["device_traces"][0][index].update(change)
    (difference,) = replay_snapshot(snapshot)
    assert difference.at == max(at, 2) if at != 7 else 8
    assert difference.modelled.startswith(modelled)


def test_another_end_is_seen() -> None:
    snapshot = snapshot_by_hand()
    blocks = snapshot["segments"][0]["blocks"]
    blocks[1:] = [{"size": 7 * MIB, "state": "inactive"}, {"size": 10 * MIB, "state": "inactive"}]
    (difference,) = replay_snapshot(snapshot)
    assert difference.at == 10


def test_what_cannot_be_replayed_says_so() -> None:
    snapshot = snapshot_by_hand()
    snapshot["segments"][0]["segment_pool_id"] = (0, 1)
    with pytest.raises(MemplanError, match="private pools"):
        replay_snapshot(snapshot)
    snapshot = snapshot_by_hand()
    del snapshot["device_traces"][0][2]
    with pytest.raises(MemplanError, match="does not lead to the snapshot's segments"):
        replay_snapshot(snapshot)
    snapshot = recorded([("malloc", 30 * MIB, 0)], "expandable_segments:True")
    del snapshot["device_traces"][0][0]
    with pytest.raises(MemplanError, match="inside expandable segments"):
        replay_snapshot(snapshot)


@given(steps=workloads(), text=st.sampled_from(("", "expandable_segments:True", "roundup_power2_divisions:4")))
@settings(max_examples=200, deadline=None)
def test_its_own_history(steps: list[Step], text: str) -> None:
    """Streams, waiting frees and emptied caches included: what the model wrote it reads back to the same end."""
    assert replay_snapshot(recorded(steps, text)) == ()


@given(steps=workloads(WHOLE_SIZES), dropped=st.integers(0, 200))
@settings(max_examples=200, deadline=None)
def test_its_own_history_from_the_middle(steps: list[Step], dropped: int) -> None:
    """Beginning at any event, for requests that leave no rest which later events would have to tell."""
    snapshot = recorded(steps)
    del snapshot["device_traces"][0][:dropped]
    assert replay_snapshot(snapshot) == ()


def test_a_wrong_rule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splitting large blocks down to 512 bytes, or small segments of 4 MiB: the history by hand shows both."""
    assert replay_snapshot(snapshot_by_hand()) == ()
    monkeypatch.setattr("memplan.allocator.blocks.SMALL_BYTES", 511)
    (difference,) = replay_snapshot(snapshot_by_hand())
    assert "num_bytes=2621440, requested_bytes=2621440" in difference.modelled
    monkeypatch.undo()
    monkeypatch.setattr("memplan.allocator.config.SMALL_SEGMENT_BYTES", 4 * MIB)
    (difference,) = replay_snapshot(snapshot_by_hand())
    assert difference.recorded == "taken: 2097152 bytes at 0x7f0004000000"


@pytest.mark.skipif(FOLDER is None, reason="MEMPLAN_SNAPSHOTS names no folder")
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.[pj]*")) if FOLDER else [], ids=lambda path: path.stem)
def test_recordings_of_cuda(path: Path) -> None:
    snapshot = read_snapshot(path)
    for device, events in enumerate(snapshot["device_traces"]):
        if events:
            assert replay_snapshot(snapshot, device) == ()


def test_a_pickle_with_an_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": Path("here")}))
    with pytest.raises(pickle.UnpicklingError, match="no place in a snapshot"):
        read_snapshot(path)
