"""SIGKILL without a word: the host's out-of-memory killer is blamed only where it left a trace."""

from pathlib import Path
from typing import Any

import pytest

from memplan.backends import cgroups
from memplan.launch import host
from memplan.launch.host import Kills


def counting(monkeypatch: pytest.MonkeyPatch, *counts: tuple[int | None, int | None]) -> None:
    """Lets the counts of kills be these, one after another: our group's, the machine's."""
    answers = iter(counts)
    monkeypatch.setattr(Kills, "now", lambda: Kills(**dict(zip(("group", "machine"), next(answers), strict=True))))


def test_f08_sigkill_is_killed_and_nobody_is_blamed_without_evidence(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting(monkeypatch, (3, 5), (3, 5))
    outcome = launch("kill")
    assert outcome.status == "killed"
    assert outcome.error == "ended by SIGKILL (9); nothing shows that the host's out-of-memory killer did it"
    assert outcome.events[-1]["event"] == "window", "what was measured before stays"


def test_f08_a_kill_in_our_control_group_is_host_oom(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch, (3, 5), (4, 6))
    outcome = launch("kill")
    assert outcome.status == "host_oom"
    assert outcome.error == "ended by SIGKILL (9): the host's out-of-memory killer struck its control group"


def test_f08_a_limit_that_fires_while_the_machine_has_room_is_host_oom(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting(monkeypatch, (0, 5), (1, 5))
    assert launch("kill").status == "host_oom"


def test_f08_where_no_group_counts_the_machine_does(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch, (None, 5), (None, 6))
    assert launch("kill").status == "host_oom"


def test_f08_a_kill_elsewhere_on_the_machine_proves_nothing(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch, (0, 5), (0, 6))
    assert launch("kill").status == "killed"


def test_f08_a_shell_that_passes_the_signal_on_is_understood(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch, (0, 0), (1, 1), (0, 0), (0, 0))
    assert launch("be the shell of a killed one").status == "host_oom"
    assert launch("be the shell of a killed one").status == "killed"


def test_f08_other_signals_are_not_memory(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch, (0, 0), (1, 1))
    assert launch("abort").status == "killed"


def test_f08_what_the_worker_said_itself_counts_first(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch, (0, 0), (1, 1))
    assert launch("finish").status == "ok"


def test_f08_the_worker_goes_before_its_parent(launch: Any) -> None:
    shown = next(event for event in launch("show its start").events if event["event"] == "warning")
    assert shown["text"] == "1000"
    assert Path("/proc/self/oom_score_adj").read_text().strip() != "1000"


def test_f08_offering_a_process_that_is_gone_does_no_harm() -> None:
    host.offer(2**22 + 1)


def group(folder: Path, **files: str) -> None:
    """A control group's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_version_two_of_control_groups(tmp_path: Path) -> None:
    (tmp_path / "ours").write_text("0::/slurm/job_7\n")
    root = tmp_path / "root"
    events = "low 0\nmax 12\noom 2\noom_kill 2\noom_group_kill 0\n"
    stat = "anon 5\nactive_file 30\ninactive_file 70\n"
    group(root / "slurm/job_7", memory__events=events, memory__max="max\n")
    group(root / "slurm", memory__max="1000\n", memory__current="800\n", memory__stat=stat)
    assert cgroups.num_kills(tmp_path / "ours", root) == 2
    assert cgroups.limit_bytes(tmp_path / "ours", root) == 1000, "a limit above ours holds for us"
    assert cgroups.room_bytes(tmp_path / "ours", root) == 300, "file cache gives way"


def test_version_one_of_control_groups(tmp_path: Path) -> None:
    (tmp_path / "ours").write_text("9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n")
    root = tmp_path / "root"
    control = "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"
    stat = "active_file 1\ninactive_file 1\ntotal_active_file 30\ntotal_inactive_file 70\n"
    group(root / "memory/docker/abc", memory__oom_control=control, memory__limit_in_bytes="2000\n")
    group(root / "memory/docker/abc", memory__usage_in_bytes="1500\n", memory__stat=stat)
    group(root / "memory", memory__oom_control=control.replace("4", "9"), memory__limit_in_bytes=f"{2**63 - 4096}\n")
    assert cgroups.num_kills(tmp_path / "ours", root) == 4
    assert cgroups.limit_bytes(tmp_path / "ours", root) == 2000
    assert cgroups.room_bytes(tmp_path / "ours", root) == 600


def test_a_container_that_sees_the_path_of_its_host(tmp_path: Path) -> None:
    (tmp_path / "ours").write_text("4:memory:/docker/abc\n")
    group(tmp_path / "root/memory", memory__oom_control="oom_kill 1\n", memory__limit_in_bytes="500\n")
    assert cgroups.num_kills(tmp_path / "ours", tmp_path / "root") == 1
    assert cgroups.limit_bytes(tmp_path / "ours", tmp_path / "root") == 500


def test_where_there_are_no_control_groups_nothing_is_known(tmp_path: Path) -> None:
    assert cgroups.num_kills(tmp_path / "ours", tmp_path) is None
    assert cgroups.limit_bytes(tmp_path / "ours", tmp_path) is None
    assert cgroups.room_bytes(tmp_path / "ours", tmp_path) is None


def test_the_machines_own_count(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 3\noom_kill_other 9\n")
    assert host._machine_kills(tmp_path / "vmstat") == 3
    assert host._machine_kills(tmp_path / "nothing") is None
