"""Real processes that crash, hang, are killed or run out of memory: each is told apart, and none is left."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from samples import run_of

from memplan.launch import tree
from memplan.launch.listening import EventReader, Log, unnamed_file
from memplan.launch.pace import Pace
from memplan.launch.process import judge_end, run_worker

HERE = Path(__file__).parent
PARENT = ("process", "tree", "listening", "pace", "host", "watch", "settle")
"""Modules of the parent's half."""
CANNOT = {
    "F49": "A rung is one process: no launcher of several ranks exists, so none can wait for another that ran out of"
    " memory. Sharded steps are measured with every rank but the first imagined (memplan/step/sharding.py)."
}
"""Failure modes that cannot exist here, and why."""


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


def reader_of(*events: dict[str, Any]) -> EventReader:
    """A reader that has read `events`."""
    reader = EventReader(0)
    reader.events += events
    return reader


def test_a_worker_that_finishes(launch: Any) -> None:
    heard: list[dict[str, Any]] = []
    outcome = launch("finish", on_event=heard.append)
    assert (outcome.status, outcome.error, outcome.failure, outcome.poisoned) == ("ok", None, None, False)
    assert [event["event"] for event in outcome.events] == ["phase", "window", "end"]
    assert tuple(heard) == outcome.events
    assert outcome.telemetry == {}


def test_a_crash_is_an_error_with_its_last_words(launch: Any) -> None:
    outcome = launch("crash")
    assert outcome.status == "error"
    assert outcome.error == "ended with exit code 1 and no result: ValueError: the step is wrong"
    assert outcome.events[-1]["event"] == "window"
    assert outcome.failure == {"window": "first_step", "text": "ValueError: the step is wrong"}


def test_another_signal_is_named_without_blame(launch: Any) -> None:
    outcome = launch("abort")
    assert outcome.status == "killed"
    assert outcome.error == "ended by SIGABRT (6)"


def test_a_worker_that_ends_without_a_word_is_an_error(launch: Any) -> None:
    outcome = launch("vanish")
    assert outcome.status == "error"
    assert outcome.error == "ended with exit code 0 and no result"


def test_what_a_worker_says_of_its_failure_is_handed_on(launch: Any) -> None:
    outcome = launch("say how it failed")
    assert (outcome.status, outcome.error) == ("error:kernel_limit", "index")
    assert outcome.failure == {"window": "first_step", "requested_bytes": 5}
    assert outcome.poisoned


def test_a_status_that_does_not_exist_is_an_error(launch: Any) -> None:
    outcome = launch("say nonsense")
    assert outcome.status == "error"
    assert outcome.error == "ended with a status that does not exist, 'splendid': so it was"


def test_f46_bytes_that_are_no_text_cost_no_event(launch: Any, tmp_path: Path) -> None:
    assert launch("crash").error.endswith("ValueError: the step is wrong")
    assert b"not \xff UTF-8" in (tmp_path / "log").read_bytes()
    outcome = launch("garbage between lines")
    assert outcome.status == "ok"
    assert [event["event"] for event in outcome.events] == ["phase", "window", "loss", "end"]


def test_f46_half_a_line_is_left_out(launch: Any) -> None:
    outcome = launch("half a line")
    assert outcome.status == "killed"
    assert [event["event"] for event in outcome.events] == ["phase", "window"]


def test_half_a_line_waits_for_its_other_half() -> None:
    with unnamed_file() as file:
        reader = EventReader(file.fileno())
        file.write(b'{"event": "lo')
        file.flush()
        assert reader.read() == []
        file.write(b'ss"}\n{"event": "end"}\n')
        file.flush()
        assert [event["event"] for event in reader.read()] == ["loss", "end"]
        assert reader.read() == []


def test_f26_a_hang_is_ended_with_its_grandchild(launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "GRACE_S", 0.1)
    started = time.monotonic()
    outcome = launch("hang", timeout_s=0.5)
    assert time.monotonic() - started < 20
    assert outcome.status == "timeout"
    assert outcome.error == "not done after 0.5 s, in warmup; --timeout gives it longer"
    assert outcome.events[1]["event"] == "window"
    assert outcome.failure["window"] == "warmup"
    assert gone(tmp_path / "pids")


def test_f26_steps_that_stop_coming_are_a_hang(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.launch.pace.STALL_S", 0.5)
    monkeypatch.setattr("memplan.launch.pace.STALL_TIMES", 2.0)
    started = time.monotonic()
    outcome = launch("hang between steps")
    assert time.monotonic() - started < 20
    assert outcome.status == "timeout"
    assert outcome.error.startswith("no step for 1 s, in timed; the slowest before took 0.")
    assert len(outcome.events) == 7


def test_f26_slow_steps_are_no_hang(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.launch.pace.STALL_S", 0.1)
    assert launch("step slowly").status == "ok"


def test_f26_the_rule_for_stalls() -> None:
    now = [0.0]
    pace = Pace(1_000_000, clock=lambda: now[0])
    pace.hear({"event": "step"})
    now[0] += 500
    assert pace.late("timed") is None, "one step tells no pace"
    pace.hear({"event": "step"})
    now[0] += 20 * 500
    assert pace.late("timed") is None
    now[0] += 1
    assert pace.late("timed") == "no step for 10001 s, in timed; the slowest before took 500.0 s"
    pace.hear({"event": "look"})
    assert pace.late("look") is None, "any word counts"
    quick = Pace(1_000_000, clock=lambda: now[0])
    for _ in range(2):
        quick.hear({"event": "step"})
        now[0] += 1
    now[0] += 118
    assert quick.late("timed") is None, "two minutes are no hang, however quick the steps"
    now[0] += 2
    assert quick.late("timed") == "no step for 121 s, in timed; the slowest before took 1.0 s"


def test_f26_what_hangs_at_its_exit_has_still_said_its_result(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.launch.pace.FAREWELL_S", 0.2)
    started = time.monotonic()
    outcome = launch("hang after the end")
    assert time.monotonic() - started < 20, "not its whole time"
    assert (outcome.status, outcome.error) == ("ok", None)


def test_f26_a_worker_that_the_kernel_holds_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held:
        pid = 2**22 + 1  # above the largest number that Linux gives

        def poll(self) -> None:
            return None

        def wait(self, timeout: float | None = None) -> int:
            assert timeout is not None, "waits for ever"
            raise subprocess.TimeoutExpired("worker", timeout)

    held = tree.Tree()
    held.root(Held())  # type: ignore[arg-type]
    assert not held.end()


def test_f27_a_child_that_outlives_its_worker_is_ended(launch: Any, tmp_path: Path) -> None:
    assert launch("leave a child").status == "ok"
    assert gone(tmp_path / "pids")


def test_f27_a_child_that_left_the_group_is_ended(launch: Any, tmp_path: Path) -> None:
    assert launch("leave a child elsewhere").status == "ok"
    assert gone(tmp_path / "pids")


def test_f27_children_of_children_are_ended(launch: Any) -> None:
    """The fixture sees that none is left."""
    assert launch("leave children that have children").status == "ok"


def test_an_interrupt_ends_the_worker_too(launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "GRACE_S", 0.1)

    def stop(event: dict[str, Any]) -> None:
        if event.get("phase") == "warmup":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch("hang", on_event=stop)
    assert gone(tmp_path / "pids")


def test_a_second_interrupt_does_not_save_the_worker(
    launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(group: int, number: int) -> None:
        if number == signal.SIGTERM:
            raise KeyboardInterrupt
        os.killpg(group, number)

    monkeypatch.setattr(tree, "_signal_group", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch("hang", timeout_s=0.5)
    assert gone(tmp_path / "pids")


def test_the_parent_sleeps(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent's own processor time is a small part of the time it waits."""
    monkeypatch.setattr(tree, "GRACE_S", 0.1)
    before = time.process_time()
    launch("hang", timeout_s=1)
    assert time.process_time() - before < 0.3


def test_a_worker_that_cannot_stop_talking_is_ended_in_time(
    launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memplan.launch.listening.MOST_LOG_BYTES", 100_000)
    started = time.monotonic()
    assert launch("talk without end", timeout_s=0.5).status == "timeout"
    assert time.monotonic() - started < 20
    assert (tmp_path / "log").stat().st_size == 100_000


def test_what_a_worker_prints_is_in_its_log(launch: Any, tmp_path: Path) -> None:
    assert launch("talk much").status == "ok"
    lines = (tmp_path / "log").read_text().splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(2_000))


def test_a_full_disk_costs_the_log_and_not_the_row(launch: Any) -> None:
    """/dev/full refuses every byte as a full disk does."""
    assert launch("talk much", log=Path("/dev/full")).status == "ok"
    outcome = launch("crash", log=Path("/dev/full"))
    assert outcome.error == "ended with exit code 1 and no result: ValueError: the step is wrong"


def test_a_disk_without_room_for_the_log_file_costs_no_row_either(launch: Any, tmp_path: Path) -> None:
    assert launch("talk much", log=tmp_path / "no such folder" / "log").status == "ok"


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has files in memory")
def test_a_full_temporary_folder_does_not_matter(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc")  # where nobody can make a file
    assert launch("finish").status == "ok"


def test_files_without_a_name_serve_where_memory_has_none(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert launch("finish").status == "ok"


def test_a_killed_parent_leaves_no_worker_and_no_file(tmp_path: Path, scratch: Path) -> None:
    code = (
        "import sys, pathlib, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from memplan.launch.process import run_worker\n"
        "run_worker({'deed': 'hang', 'pids': sys.argv[2]}, timeout_s=60, log=pathlib.Path(sys.argv[3]), module='ends')"
    )
    (tmp_path / "ends.py").write_text(
        "from memplan.launch.worker import end_with_parent\nend_with_parent()\nimport workers\nworkers.main()"
    )
    pids = tmp_path / "pids"
    paths = os.pathsep.join([str(tmp_path), str(HERE), os.environ.get("PYTHONPATH", "")])
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(scratch), str(pids), str(tmp_path / "log")],
        env=os.environ | {"PYTHONPATH": paths},
    )
    try:
        while not (pids.exists() and pids.read_text()):
            assert parent.poll() is None
            time.sleep(0.02)
    finally:
        parent.kill()
        parent.wait()
    assert gone(pids)


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


def test_who_is_to_blame() -> None:
    assert judge_end(-1000, reader_of(), None, None, None)[0] == "killed"
    assert judge_end(-6, reader_of(), "too late", None, None)[:2] == ("timeout", "too late")
    end = {"event": "end", "status": "ok", "error": None}
    assert judge_end(-9, reader_of(end), "too late", None, "a kill")[:2] == ("ok", None)


def test_last_line_of_a_log(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    assert log.last_line is None
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb") as pipe, os.fdopen(theirs, "wb") as worker:
        log.listen(pipe)
        worker.write(b"x" * 20_000 + b"\nthe end \xff\n\n")
        worker.flush()
        assert log.wait(0.05)
    log.close()
    assert log.last_line == "the end \ufffd"


def test_what_the_profiler_prints_explains_nothing(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb") as pipe, os.fdopen(theirs, "wb") as worker:
        log.listen(pipe)
        worker.write(b"the reason\nUSDT:2026-01-02 03:04:05 7:7 SyncActivityProfilerHandler.cpp:59] profiler_stop\n")
        worker.flush()
        assert log.wait(0.05)
    log.close()
    assert log.last_line == "the reason"


def test_f48_the_parent_never_loads_torch_nor_forks() -> None:
    """CUDA does not survive a fork, and a parent that touches it holds memory on the GPU all the climb long."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import memplan.ladder.runner, memplan.launch.settle, memplan.launch.watch\n"
        "memplan.launch.watch.open_watch()\n"
        "print('torch' in sys.modules and sys.modules['torch'] is None, 'multiprocessing' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
    package = HERE.parents[1] / "memplan" / "launch"
    for name in PARENT:
        nodes = list(ast.walk(ast.parse((package / f"{name}.py").read_text())))
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        assert not {"torch", "multiprocessing"} & {module.partition(".")[0] for module in imported}, name
        called = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        assert not {"fork", "forkpty", "preexec_fn"} & called, name


def test_f48_a_worker_starts_as_a_fresh_interpreter(launch: Any) -> None:
    shown = next(event for event in launch("show its start").events if event["event"] == "warning")
    assert shown["group"] and not shown["torch"]


def test_f49_is_explained() -> None:
    assert CANNOT.keys() == {"F49"}
