"""The climb with a stand-in for the process: what becomes a row, what is kept, what is tried again."""

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from climbing import Processes, go, ladder_of, went_well

from memplan.errors import MemplanError
from memplan.ladder.points import assumed, find_device, points
from memplan.ladder.runner import check
from memplan.launch.process import Outcome, run_worker
from memplan.record import Note, read_rows
from memplan.spec import Ladder
from memplan.spec.device import CPU, DeviceSpec, card
from memplan.units import GIB, MIB


def test_a_row_says_everything(tmp_path: Path) -> None:
    climbed = go(tmp_path, Processes(B4c2=went_well(200 * MIB)), ckpt="none,full", rungs="B4c2,B2c1@full")
    assert [row.rung for row in climbed.rows] == ["B2c1@full", "B4c2@none", "B4c2@full"]
    assert [row.verdict for row in climbed.rows] == ["pass", "fail", "fail"]
    assert [row.status for row in climbed.rows] == ["ok", "over_gate", "over_gate"]
    row = climbed.rows[0]
    assert row.estimated_bytes == 20 * MIB
    assert row.samples_per_s == 2.0
    assert row.environment["device"] == "cpu"
    assert row.step["seq"] == 64
    assert climbed.exit_code == 0
    assert read_rows(tmp_path / "ladder.jsonl") == climbed.rows
    assert not list(tmp_path.glob("*.log"))


def test_the_command_of_a_row_names_everything_that_was_decided() -> None:
    point = points(ladder_of(loss="chunked:2", clip=1.5), CPU)[0]
    assert point.command == (
        "memplan ladder B4c2@none --model tiny --seq 64 --loss chunked:2 --precision fp32 --optimizer adamw "
        "--attention sdpa --norm eager --clip 1.5 --device cpu --gate 100MiB --gate-on allocated --warmup 1 --steps 3 "
        "--timeout 1800"
    )


@pytest.mark.parametrize("status", ["error", "timeout", "killed"])
def test_the_climb_goes_on_after_a_failure_and_keeps_its_log(tmp_path: Path, status: str) -> None:
    failed = Outcome(status=status, error="it broke", events=went_well(10 * MIB).events[:2])
    climbed = go(tmp_path, Processes(B4c2=failed))
    assert [row.status for row in climbed.rows] == ["ok", status]
    assert climbed.rows[1].peak_allocated_bytes == 10 * MIB
    assert climbed.rows[1].verdict == "inconclusive"
    [log] = tmp_path.glob("*.log")
    assert f"(log: {log.name})" in str(climbed.rows[1].error)


def test_f45_rows_are_on_disk_before_the_next_rung_starts(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        go(tmp_path, Processes(B4c2=RuntimeError("a bug")))
    assert [row.rung for row in read_rows(tmp_path / "ladder.jsonl")] == ["B2c1@none"]


def test_f19_no_two_rungs_share_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rung leaves in an allocator's cache cannot reach the next one, whatever their order."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    run = functools.partial(run_worker, module="rung_worker")
    climbed = go(tmp_path, run, rungs="B3c1,B2c1", repeat=2)
    assert len({row.environment["pid"] for row in climbed.rows} | {os.getpid()}) == 5
    assert {row.rung: row.peak_allocated_bytes for row in climbed.rows} == {
        "B2c1@none": 20 * MIB,
        "B3c1@none": 30 * MIB,
    }


def test_ctrl_c_returns_what_is_done(tmp_path: Path) -> None:
    climbed = go(tmp_path, Processes(B4c2=KeyboardInterrupt()))
    assert [row.rung for row in climbed.rows] == ["B2c1@none"]
    assert climbed.interrupted
    assert climbed.exit_code == 130


def test_resume_keeps_what_is_final_and_tries_the_rest_again(tmp_path: Path) -> None:
    oom = Outcome(status="oom", error="no memory", events=())
    killed = Outcome(status="killed", error="SIGKILL", events=())
    rungs = "B4c2,B3c1,B2c1,B1c1"
    go(tmp_path, Processes(B4c2=went_well(200 * MIB), B3c1=oom, B2c1=killed), rungs=rungs)
    again = Processes()
    climbed = go(tmp_path, again, resume=True, rungs=rungs)
    assert again.started == ["B2c1"]
    assert [row.status for row in climbed.rows] == ["ok", "ok", "oom", "over_gate"]
    assert len((tmp_path / "ladder.jsonl").read_text().splitlines()) == 5


def test_resume_holds_kept_rows_against_the_gate_of_now(tmp_path: Path) -> None:
    go(tmp_path, Processes(B4c2=went_well(200 * MIB)))
    climbed = go(tmp_path, Processes(B4c2=AssertionError()), resume=True, gate="1GiB")
    assert [row.verdict for row in climbed.rows] == ["pass", "pass"]
    assert read_rows(tmp_path / "ladder.jsonl") == climbed.rows


def test_a_changed_question_is_not_answered_by_an_old_row(tmp_path: Path) -> None:
    go(tmp_path, Processes())
    again = Processes()
    go(tmp_path, again, resume=True, seq=32)
    assert again.started == ["B2c1", "B4c2"]


def test_a_rung_larger_than_the_machine_is_not_started(tmp_path: Path) -> None:
    processes = Processes()
    climbed = go(tmp_path, processes, available=30 * MIB)
    assert processes.started == ["B2c1"]
    assert climbed.rows[1].status == "skipped:no_room"
    assert climbed.rows[1].error == "not started: 40.00 MiB estimated, 30.00 MiB available here"
    assert climbed.rows[1].peak_allocated_bytes is None


FAR_OVER = went_well(GIB)
OOM = Outcome(status="oom", error="x", events=())
BROKEN = Outcome(status="error", error="x", events=())


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ({}, 0),
        ({"B4c2": FAR_OVER}, 0),
        ({"B4c2": FAR_OVER, "B2c1": FAR_OVER}, 1),
        ({"B4c2": OOM, "B2c1": FAR_OVER}, 1),
        ({"B4c2": OOM, "B2c1": BROKEN}, 1),
        ({"B4c2": BROKEN, "B2c1": BROKEN}, 3),
    ],
)
def test_exit_codes(tmp_path: Path, outcomes: dict[str, Any], code: int) -> None:
    assert go(tmp_path, Processes(**outcomes)).exit_code == code


def test_without_a_gate_an_ok_rung_is_enough(tmp_path: Path) -> None:
    climbed = go(tmp_path, Processes(), gate=None, rungs="B2c1")
    assert climbed.exit_code == 0
    assert climbed.rows[0].verdict == "inconclusive"


def test_the_job_can_be_written_down(tmp_path: Path) -> None:
    seen: list[str] = []

    def run(job: dict[str, Any], **options: Any) -> Outcome:
        seen.append(json.dumps(job))
        return went_well(1)

    go(tmp_path, run, warmup=2, steps=5)
    assert (json.loads(seen[0])["warmup"], json.loads(seen[0])["steps"]) == (2, 5)


def test_watchers_hear_phases_steps_and_the_end(tmp_path: Path) -> None:
    notes: list[Note] = []
    go(tmp_path, Processes(), say=notes.append, rungs="B2c1")
    assert [(note.text, note.kind) for note in notes] == [
        ("first_step", "phase"),
        ("timed 1/3", "step"),
        ("ok, peak 50.00 MiB", "end"),
    ]
    assert (notes[0].number, notes[0].total, notes[0].rung) == (1, 1, "B2c1@none")


def test_what_a_rung_leaves_open_comes_from_the_ladder_then_from_the_model() -> None:
    ladder = ladder_of(rungs="B4c2l16s32@every:2,B2c1", loss="full,chunked-ckpt:4")
    steps = [point.run.step for point in points(ladder, CPU)]
    assert [step.loss for step in steps] == ["chunked:16", "full", "chunked-ckpt:16", "chunked-ckpt:4"]
    assert [step.seq for step in steps] == [32, 64, 32, 64]
    assert steps[0].ckpt == "every:2"
    assert steps[0].precision == "fp32"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, ["on cpu; assumed for tiny: fp32"]),
        ({"precision": "bf16"}, ["on cpu"]),
        (
            {"precision": "bf16", "model": "tiny-molmo2", "rungs": "B2s32,B4"},
            ["on cpu; assumed for tiny-molmo2: 2 images"],
        ),
    ],
)
def test_what_was_assumed_is_said(data: dict[str, Any], said: list[str]) -> None:
    ladder = ladder_of(**data)
    assert assumed(ladder, points(ladder, CPU)) == said


def test_a_length_that_only_some_rungs_name_is_assumed_for_the_others() -> None:
    ladder = Ladder.from_dict({"rungs": "B2s32,B4", "model": "tiny", "precision": "fp32"}, name="x", origin="options")
    assert assumed(ladder, points(ladder, CPU)) == ["on cpu; assumed for tiny: seq 128"]
    ladder = Ladder.from_dict({"rungs": "B2s32", "model": "tiny", "precision": "fp32"}, name="x", origin="options")
    assert assumed(ladder, points(ladder, CPU)) == ["on cpu"]


def test_the_whole_ladder_is_checked_before_the_first_rung() -> None:
    with pytest.raises(MemplanError, match=r"Unknown model 'tinny'\. Did you mean tiny"):
        points(ladder_of(model="tiny,tinny"), CPU)
    ladder = ladder_of(rungs="B2c1,B2c1@none")
    with pytest.raises(MemplanError, match="same run"):
        check(ladder, points(ladder, CPU))
    ladder = ladder_of(gate_on="reserved")
    with pytest.raises(MemplanError, match="--gate-on allocated"):
        check(ladder, points(ladder, CPU))
    check(ladder, points(ladder, DeviceSpec(name="h100", rules="cuda")))


def test_without_a_gpu_cuda_says_what_to_type_and_auto_imagines_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.ladder.points.gpu", lambda: None)
    with pytest.raises(MemplanError, match=r"simulated .* --device cpu"):
        find_device("cuda")
    assert find_device("cpu") == (CPU, False)
    assert find_device("auto") == (card("h100-80g"), True)
    assert find_device("simulated", "rtx-4090") == (card("rtx-4090"), True)


def test_a_card_by_name_is_imagined_not_run_on() -> None:
    for name in ("cpu", "cuda"):
        with pytest.raises(MemplanError, match="Type --device simulated"):
            find_device(name, "h100-80g")
    with pytest.raises(MemplanError, match="Did you mean h100-80g"):
        find_device("simulated", "h100-80")


def test_a_gpu_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.ladder.points.gpu", lambda: {"gpu": "NVIDIA H100 80GB HBM3", "gpu_memory_bytes": 80})
    device, simulated = find_device("auto")
    assert not simulated
    assert (device.name, device.rules, device.capacity_bytes) == ("nvidia-h100-80gb-hbm3", "cuda", 80)
