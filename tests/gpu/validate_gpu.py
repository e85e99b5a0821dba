"""Trace and estimate against a real card in at most 8 minutes: python tests/gpu/validate_gpu.py [--dry-run] [--out DIR]

Kernels of the trace's tables, every gpu test, and the ladder ladders/validate_gpu.toml, each in processes of its own
with a time limit; whatever was measured until then is written. Exit code: 0 when every judged error is at most 2 % and
every test passed, 1 otherwise, 2 without a GPU. `--dry-run` goes the same way on the CPU with tiny models and judges
their rungs; kernels are then measured on the CPU, whose libraries pack what no rule of CUDA knows, and only shown.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_cards import card_of
from gpu_findings import Finding, of_rungs, summary, table_of, worst_first, write
from gpu_witnesses import Witnesses, runs_of

from memplan.backends.environment import gpu, installed_version
from memplan.errors import MemplanError
from memplan.record import read_rows
from memplan.spec import Ladder

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LADDER = ROOT / "ladders" / "validate_gpu.toml"
REHEARSED: dict[str, Any] = {
    "device": "cpu",
    "model": ["tiny"],
    "seq": 64,
    "precision": "fp32",
    "ckpt": ["none", "full"],
}
"""What a dry run changes in the ladder."""
MINUTES = 8.0
KERNELS_S, TESTS_S, REPORT_S = 100.0, 170.0, 15.0
"""Most seconds of kernels and of tests, and seconds kept for the report."""
SCALE = 1 / 64
"""Scale of the kernels in a dry run."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The time there is."""

    deadline: float

    def left(self, most: float = 1e9, *, keep: float = 0.0) -> float:
        """Seconds for a part: at most `most`, and `keep` are left for what follows."""
        return max(min(most, self.deadline - time.monotonic() - keep), 0.0)


def say(text: str) -> None:
    print(text, flush=True)


def run_within(command: list[str], seconds: float, log: Path) -> int | None:
    """Exit code of `command`, whose group is interrupted after `seconds` and ended a little later; None then. Its
    output goes to `log`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]), "PYTHONUNBUFFERED": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            env=environment, cwd=ROOT,
        )  # fmt: skip
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            for number, patience in ((signal.SIGINT, 10.0), (signal.SIGKILL, 5.0)):
                try:
                    os.killpg(process.pid, number)
                    process.wait(timeout=patience)
                    break
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue
            return None


def kernels(folder: Path, card: str | None, seconds: float) -> list[Finding]:
    """The kernels' findings, as far as there was time."""
    path = folder / "kernels.jsonl"
    path.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "validate_kernels.py"), str(path), card or "cpu", str(1.0 if card else SCALE)]
    code = run_within(command, seconds, folder / "kernels.log")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [Finding(**json.loads(line)) for line in lines]
    if code != 0:
        said = f"the time was up after {seconds:.0f} s" if code is None else f"ended with exit code {code}"
        found.append(Finding(kind="kernel", name="kernels", status="error", note=f"{said}; see kernels.log"))
    return found


def tests(folder: Path, seconds: float) -> tuple[bool, str]:
    """Whether every gpu test passed, and a line about it."""
    files = sorted(str(path) for path in HERE.glob("test_gpu_*.py"))
    marked = [str(ROOT / "tests" / "step" / "test_attention_pin.py")]
    whole = all(importlib.util.find_spec(name) for name in ("pytest", "hypothesis"))
    if whole:
        options = ["-m", "gpu", "-q", "-rfEs", "-p", "no:cacheprovider", "-o", "addopts=", "--tb=short"]
        command = [sys.executable, "-m", "pytest", *options, *files, *marked]
    else:
        command = [sys.executable, str(HERE / "gpu_runner.py"), *files]
    log = folder / "tests.log"
    code = run_within(command, seconds, log)
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    how = "" if whole else " (pytest or hypothesis is missing: run by gpu_runner.py)"
    last = lines[-1] if lines else "no output"
    ended = f"the time was up after {seconds:.0f} s; " if code is None else ""
    return code == 0 and bool(lines), f"gpu tests{how}: {ended}{last}"


def ladder(folder: Path, changes: dict[str, Any], budget: Budget) -> list[Any]:
    """The rows of the climb, as far as there was time."""
    options: list[str] = []
    for key, value in changes.items():
        options += [f"--{key}", ",".join(value) if isinstance(value, list) else str(value)]
    out = folder / "ladder"
    command = [sys.executable, "-m", "memplan", "ladder", str(LADDER), *options, "--out", str(out), "-o", "jsonl"]
    code = run_within(command, budget.left(keep=REPORT_S), folder / "ladder.log")
    if code is None:
        say("ladder: the time was up; what was climbed until then counts")
    elif code not in (0, 1):
        say(f"ladder: ended with exit code {code}; see ladder.log")
    rows = out / "ladder.jsonl"
    return list(read_rows(rows)) if rows.exists() else []


def main(arguments: list[str]) -> int:
    """Exit code, as the first lines of this file say."""
    parser = argparse.ArgumentParser(prog=".ci/gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="go the same way on the CPU")
    parser.add_argument("--out", type=Path, help="folder of the report; reports/validate_gpu_<date> by default")
    parser.add_argument("--card", help="card whose rules hold, where its name does not tell")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="minutes at most")
    asked = parser.parse_args(arguments)
    budget = Budget(time.monotonic() + asked.minutes * 60)
    facts = None if asked.dry_run else gpu()
    if facts is None and not asked.dry_run:
        say("There is no CUDA device here. Type .ci/gpu --dry-run to rehearse on the CPU.")
        return 2
    try:
        card = None if facts is None else asked.card or card_of(str(facts["gpu"]))
        changes = REHEARSED if facts is None else {}
        runs = runs_of(Ladder.from_toml(LADDER, changes))
    except MemplanError as error:
        say(str(error))
        return 2
    day = datetime.now(UTC).strftime("%Y%m%d")
    folder = (asked.out or ROOT / "reports" / f"validate_gpu_{day}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    where = (
        "a rehearsal on the CPU" if facts is None else f"{facts['gpu']}, driver {facts.get('driver')}, rules of {card}"
    )
    title = f"{where}, torch {installed_version('torch')}, transformers {installed_version('transformers')}"
    say(title)
    witnesses = Witnesses(runs, card, workers=max(min((os.cpu_count() or 2) // 3, 4), 1))
    findings: list[Finding] = []
    passed, told = False, "gpu tests: not run"
    try:
        findings += kernels(folder, card, budget.left(KERNELS_S, keep=REPORT_S))
        say(f"kernels: {len(findings)}, {budget.left():.0f} s left")
        passed, told = tests(folder, budget.left(TESTS_S, keep=REPORT_S))
        say(f"{told}, {budget.left():.0f} s left")
        rows = ladder(folder, changes, budget)
        findings += of_rungs(rows, witnesses.answers(budget.left(keep=REPORT_S / 3) + 1))
        say(f"rungs: {len(rows)} of {len(runs)}, {budget.left():.0f} s left")
    finally:
        findings = worst_first(findings)
        lines = [*summary(findings), told]
        table = table_of(findings, title=title, footer=lines)
        write(findings, folder, table)
    from memplan.report.render import render

    say(render(table, "table"))
    say(f"results: {folder}")
    compared = any(one.measured_bytes is not None and one.kind == "rung" for one in findings)
    return 0 if passed and compared and not any(one.fails for one in findings) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
