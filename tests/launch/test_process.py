"""Real processes that crash, hang, are killed or run out of memory: each is told apart, and none is left."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from samples import run_of

from memplan.launch.process import Outcome, judge_end, last_line, run_worker

HERE = Path(__file__).parent


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs one of the misbehaving workers, with a temporary folder that must be empty afterwards."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def go(deed: str, timeout_s: float = 60, **options: Any) -> Outcome:
        job = {"deed": deed, "pids": str(tmp_path / "pids")}
        try:
            return run_worker(job, timeout_s=timeout_s, log=tmp_path / "log", module="workers", **options)
        finally:
            assert not list(scratch.iterdir())

    return go


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(pids: Path, within_s: float = 5) -> bool:
    """Whether all processes in the file end within some seconds: a killed orphan is reaped a moment later."""
    deadline = time.monotonic() + within_s
    numbers = [int(text) for text in pids.read_text().split()]
    while any(alive(pid) for pid in numbers) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(alive(pid) for pid in numbers)


def test_a_worker_that_finishes(launch: Any) -> None:
    heard: list[dict[str, Any]] = []
    outcome = launch("finish", on_event=heard.append)
    assert (outcome.status, outcome.error) == ("ok", None)
    assert [event["event"] for event in outcome.events] == ["phase", "window", "end"]
    assert tuple(heard) == outcome.events


def test_a_crash_is_an_error_with_its_last_words_whatever_bytes_came_before(launch: Any) -> None:
    outcome = launch("crash")
    assert outcome.status == "error"
    assert outcome.error == "ended with exit code 1 and no result: ValueError: the step is wrong"
    assert outcome.events[-1]["event"] == "window"


def test_sigkill_is_named_and_so_is_its_usual_sender(launch: Any) -> None:
    outcome = launch("kill")
    assert outcome.status == "killed"
    assert "SIGKILL (9)" in outcome.error
    assert "out-of-memory killer" in outcome.error
    assert outcome.events[-1]["event"] == "window"


def test_another_signal_is_named_without_blame(launch: Any) -> None:
    outcome = launch("abort")
    assert outcome.status == "killed"
    assert outcome.error == "ended by SIGABRT (6)"


def test_half_a_line_is_left_out(launch: Any) -> None:
    outcome = launch("half a line")
    assert outcome.status == "killed"
    assert [event["event"] for event in outcome.events] == ["phase", "window"]


def test_a_worker_that_ends_without_a_word_is_an_error(launch: Any) -> None:
    outcome = launch("vanish")
    assert outcome.status == "error"
    assert outcome.error == "ended with exit code 0 and no result"


def test_a_hang_is_ended_with_its_grandchild(launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.launch.process.GRACE_S", 0.3)
    started = time.monotonic()
    outcome = launch("hang", timeout_s=2)
    assert time.monotonic() - started < 20
    assert outcome.status == "timeout"
    assert outcome.error == "not done after 2 s, in warmup; --timeout gives it longer"
    assert outcome.events[1]["event"] == "window"
    assert gone(tmp_path / "pids")


def test_a_child_that_outlives_its_worker_is_ended(launch: Any, tmp_path: Path) -> None:
    assert launch("leave a child").status == "ok"
    assert gone(tmp_path / "pids")


def test_an_interrupt_ends_the_worker_too(launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.launch.process.GRACE_S", 0.3)

    def stop(event: dict[str, Any]) -> None:
        if event.get("phase") == "warmup":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch("hang", on_event=stop)
    assert gone(tmp_path / "pids")


def test_the_parent_sleeps(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent's own processor time is a small part of the time it waits."""
    monkeypatch.setattr("memplan.launch.process.GRACE_S", 0.3)
    before = time.process_time()
    launch("hang", timeout_s=2)
    assert time.process_time() - before < 0.5


def test_the_real_worker_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    """A parent that is killed closes its pipes, and that is all a worker can hear of it."""
    pytest.importorskip("torch")
    job, events = tmp_path / "job.json", tmp_path / "events.jsonl"
    job.write_text(json.dumps({"run": run_of().to_dict(), "warmup": 100_000, "steps": 1}))
    command = [sys.executable, "-m", "memplan.launch.worker", str(job), str(events)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert worker.stdin is not None
    try:
        while not (events.exists() and "warmup" in events.read_text()):
            assert worker.poll() is None
            time.sleep(0.05)
        worker.stdin.close()
        assert worker.wait(timeout=10) == 1
    finally:
        worker.kill()
        worker.wait()


def test_the_real_worker_measures(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job = {"run": run_of(batch=2, seq=16).to_dict(), "warmup": 0, "steps": 2}
    outcome = run_worker(job, timeout_s=120, log=tmp_path / "log")
    assert (outcome.status, outcome.error) == ("ok", None)
    windows = [event["name"] for event in outcome.events if event["event"] == "window"]
    assert windows == ["init", "first_step", "measured"]
    assert len([event for event in outcome.events if event["event"] == "loss"]) == 4
    assert all(event["ns"] > 0 for event in outcome.events if event["event"] == "step")


def test_the_real_worker_out_of_memory_is_oom_and_says_where(tmp_path: Path) -> None:
    """A batch of 2**40 samples asks for more than any machine has; the allocator refuses at once."""
    pytest.importorskip("torch")
    job = {"run": run_of(batch=1 << 40, seq=64).to_dict(), "warmup": 0, "steps": 1}
    outcome = run_worker(job, timeout_s=120, log=tmp_path / "log")
    assert outcome.status == "oom"
    assert "in build (init)" in outcome.error
    assert "allocated until then" in outcome.error


def test_a_job_that_is_no_job_is_an_error_row(tmp_path: Path) -> None:
    outcome = run_worker({"run": {}}, timeout_s=60, log=tmp_path / "log")
    assert outcome.status == "error"
    assert outcome.error == "KeyError: 'model' [in the start]"


def test_blame_needs_evidence() -> None:
    assert judge_end(-9, [], None, host_kills=0)[1] == "ended by SIGKILL (9): usually the host's out-of-memory killer"
    assert judge_end(-9, [], None, host_kills=1)[1] == "ended by SIGKILL (9): the host's out-of-memory killer did it"
    assert judge_end(-1000, [], None, host_kills=0)[0] == "killed"


def test_last_line_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) is None
    log.write_bytes(b"x" * 100_000 + b"\nthe end \xff\n\n")
    assert last_line(log) == "the end \ufffd"


def test_no_thread_is_left(launch: Any) -> None:
    before = threading.active_count()
    launch("finish")
    assert threading.active_count() == before
