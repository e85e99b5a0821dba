"""The script for a real card, as far as it goes without one: its parts quickly, the whole of it with -m slow."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_runner
import pytest
import validate_gpu
from gpu_cards import card_of
from gpu_findings import Finding, of_rungs, summary, table_of, worst_first, write

from memplan.errors import MemplanError
from memplan.estimate import estimate
from memplan.ladder.points import points
from memplan.record import RungResult, WindowPeak
from memplan.report.render import render
from memplan.spec import Ladder
from memplan.spec.device import card
from memplan.units import GIB, MIB

HERE = Path(__file__).parent


def finding(measured: int | None = 100, **more: Any) -> Finding:
    return Finding(**{"kind": "kernel", "name": "linear", "measured_bytes": measured} | more)


def test_an_error_above_two_percent_fails_whichever_witness_made_it() -> None:
    assert not finding(traced_bytes=101, estimated_bytes=99).fails
    assert finding(traced_bytes=103).fails
    assert finding(traced_bytes=100, estimated_bytes=97).fails
    assert finding(None, status="error:RuntimeError").fails
    assert not finding(traced_bytes=150, judged=False).fails
    assert not finding(None, status="oom").fails


def test_the_worst_stand_first_and_what_is_not_judged_last() -> None:
    good, bad, shown = finding(traced_bytes=101), finding(traced_bytes=130), finding(traced_bytes=300, judged=False)
    assert worst_first([shown, good, bad]) == [bad, good, shown]


def row(**more: Any) -> RungResult:
    windows = {
        "first_step": WindowPeak(allocated_bytes=90, reserved_bytes=120),
        "measured": WindowPeak(allocated_bytes=100, reserved_bytes=120),
    }
    values: dict[str, Any] = {"rung": "B2c1@full", "run_id": "r", "status": "ok", "source": "measured", "model": "tiny"}
    values |= {"step": {"ckpt": "full"}, "peak_allocated_bytes": 100, "windows": windows, "attention": {"flash": 2}}
    return RungResult(**values | more)


SAID = {"first_step": (90, 110), "measured": (99, 130), "estimated_bytes": 101, "attention": {"cudnn": 2}}


def test_each_window_of_a_rung_is_held_against_its_own_trace_and_another_kernel_is_named() -> None:
    first, later = of_rungs([row()], {"r": SAID})
    assert (first.traced_error_frac, first.estimated_bytes) == (0.0, None)
    assert later.traced_error_frac == pytest.approx(-0.01)
    assert later.estimated_error_frac == pytest.approx(0.01)
    assert (later.reserved_bytes, later.traced_reserved_bytes) == (120, 130)
    assert later.note == "attention: {'flash': 2}, traced {'cudnn': 2}"


def test_a_rung_without_room_is_shown_and_an_error_counts() -> None:
    (oom,) = of_rungs([row(status="oom", windows={}, peak_allocated_bytes=None, error="out of memory")], {})
    (error,) = of_rungs([row(status="error", windows={}, peak_allocated_bytes=None, error="KeyError")], {})
    assert not oom.fails
    assert error.fails


def test_a_rung_that_no_witness_speaks_of_stays_in_the_table(tmp_path: Path) -> None:
    found = [*of_rungs([row()], {}), finding(traced_bytes=101)]
    table = table_of(found, title="here", footer=summary(found))
    write(found, tmp_path, table)
    assert "tiny B2c1@full, later steps" in (tmp_path / "table.md").read_text()
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line["traced_error_frac"] for line in lines] == [None, None, pytest.approx(0.01)]
    assert "kernels: 1 of 1 within 2%" in render(table, "table")


def test_a_gpu_of_which_nothing_is_known_asks_for_a_card() -> None:
    with pytest.raises(MemplanError, match="No rules are known") as caught:
        card_of("Tesla V100-SXM2-16GB")
    assert "--card" in caught.value.hint


def test_the_ladder_has_rungs_of_every_model_that_an_h200_has_room_for() -> None:
    question = Ladder.from_toml(validate_gpu.LADDER)
    runs = [point.run for point in points(question, card("h200"))]
    assert len(runs) == 24
    assert {run.model.name for run in runs} == {"llama-3.2-1b", "smollm2-1.7b", "qwen3-4b", "molmo2-4b"}
    needed = [estimate(run).peak_allocated_bytes for run in runs]
    assert max(needed) < 100 * GIB
    assert sum(num_bytes < 23 * GIB for num_bytes in needed) >= 6  # what a card of 24 GB can say something about


def test_what_takes_too_long_is_ended_with_its_children_and_its_words_are_kept(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print('child', child.pid, flush=True); time.sleep(60)"
    )
    began = time.monotonic()
    assert validate_gpu.run_within([sys.executable, "-c", code], 0.5, tmp_path / "log") is None
    assert time.monotonic() - began < 40  # it would have slept for 60
    pid = int((tmp_path / "log").read_text().split()[1])
    for _ in range(50):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]:
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"process {pid} is still there")


def test_what_ends_by_itself_gives_its_exit_code(tmp_path: Path) -> None:
    assert validate_gpu.run_within([sys.executable, "-c", "raise SystemExit(3)"], 20, tmp_path / "log") == 3


def test_the_time_is_shared_out_and_the_report_keeps_its_own() -> None:
    budget = validate_gpu.Budget(time.monotonic() + 100)
    assert 84 < budget.left(keep=15) < 85.1
    assert budget.left(30, keep=15) == 30
    assert validate_gpu.Budget(time.monotonic() - 5).left(30) == 0


def test_without_a_gpu_it_says_how_to_rehearse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validate_gpu, "gpu", lambda: None)
    assert validate_gpu.main([]) == 2
    assert ".ci/gpu --dry-run" in capsys.readouterr().out


@dataclasses.dataclass
class NoWitness:
    """Stands for the processes that trace."""

    runs: Any
    card: Any
    workers: int

    def answers(self, timeout_s: float) -> dict[str, Any]:
        return {run.run_id: SAID for run in self.runs}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The script with parts that are there at once: a kernel that holds, tests that pass, one rung."""
    run_id = validate_gpu.runs_of(Ladder.from_toml(validate_gpu.LADDER, validate_gpu.REHEARSED))[0].run_id
    monkeypatch.setattr(validate_gpu, "Witnesses", NoWitness)
    monkeypatch.setattr(validate_gpu, "kernels", lambda *_: [finding(traced_bytes=100)])
    monkeypatch.setattr(validate_gpu, "tests", lambda *_: (True, "gpu tests: 5 passed"))
    monkeypatch.setattr(validate_gpu, "ladder", lambda *_: [row(run_id=run_id)])
    return monkeypatch


def test_all_well_is_exit_code_0(parts: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert validate_gpu.main(["--dry-run", "--out", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("kernels", lambda *_: [finding(traced_bytes=103)]),
        ("tests", lambda *_: (False, "gpu tests: 1 failed")),
        ("ladder", lambda *_: []),
    ],
)
def test_an_error_a_failed_test_and_nothing_measured_are_exit_code_1(
    parts: pytest.MonkeyPatch, tmp_path: Path, part: str, value: Any
) -> None:
    parts.setattr(validate_gpu, part, value)
    assert validate_gpu.main(["--dry-run", "--out", str(tmp_path)]) == 1
    assert (tmp_path / "table.csv").exists()


def test_what_was_measured_is_written_even_when_the_rest_breaks(parts: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object) -> None:
        raise OSError("no space left on device")

    parts.setattr(validate_gpu, "ladder", broken)
    with pytest.raises(OSError, match="no space"):
        validate_gpu.main(["--dry-run", "--out", str(tmp_path)])
    assert "linear" in (tmp_path / "table.md").read_text()


GPU_TESTS = """
import pytest
pytestmark = pytest.mark.gpu

def test_that_passes():
    pass

@pytest.mark.slow
def test_that_fails():
    assert 1 == 2, "not so"
"""


def test_tests_run_where_pytest_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "test_gpu_here.py").write_text(GPU_TESTS)
    code = (
        "import sys; sys.modules['pytest'] = None; import gpu_runner, pathlib;"
        f"print('failed:', gpu_runner.run_file(pathlib.Path({str(tmp_path / 'test_gpu_here.py')!r})))"
    )
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "passed test_gpu_here.py::test_that_passes" in done.stdout
    assert "FAILED test_gpu_here.py::test_that_fails" in done.stdout
    assert "not so" in done.stdout
    assert done.stdout.strip().endswith("failed: 1")


def test_every_gpu_test_can_be_run_without_pytest() -> None:
    """They take no fixtures, and from pytest only marks."""
    import ast

    files = sorted(HERE.glob("test_gpu_*.py"))
    assert len(files) == 3
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        assert tests
        assert all(not node.args.args for node in tests), path.name
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_pytest(node.value)}
        assert used == {"mark"}, path.name
    assert callable(gpu_runner.stand_in().mark.gpu(lambda: None))


def _is_pytest(node: Any) -> bool:
    return getattr(node, "id", None) == "pytest"


@pytest.mark.parametrize("name", ["h200", "rtx-4090"])
def test_every_kernel_can_be_traced_on_every_generation(name: str) -> None:
    pytest.importorskip("torch")
    from gpu_kernels import KERNELS, traced_bytes

    told = {one.name: traced_bytes(one, name) for one in KERNELS}
    assert len(told) == len(KERNELS) == 29
    assert all(2 * MIB < num_bytes < 20 * GIB for num_bytes in told.values())


def test_a_kernel_is_measured_and_its_error_is_a_row() -> None:
    pytest.importorskip("torch")
    from gpu_kernels import KERNELS, Kernel
    from validate_kernels import finding as found

    dropout = next(one for one in KERNELS if one.name == "dropout")
    seen = found(dropout, None, 1 / 64)
    assert seen["measured_bytes"] == seen["traced_bytes"] != 0

    def broken(scale: float) -> None:
        raise RuntimeError("no such kernel")

    failed = found(Kernel(name="x", rule="y", run=broken), None, 1.0)
    assert (failed["status"], failed["note"]) == ("error:RuntimeError", "no such kernel")


@pytest.mark.slow
def test_the_rehearsal_goes_through_everything(tmp_path: Path) -> None:
    script = HERE.parents[1] / ".ci" / "gpu"
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(
        [script, "--dry-run", "--out", tmp_path], capture_output=True, text=True, env=environment, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rungs: 8 of 8 within 2%" in done.stdout
    assert "gpu tests" in done.stdout
    kernels = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert sum(line["kind"] == "kernel" for line in kernels) >= 15
