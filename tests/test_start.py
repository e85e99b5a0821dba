"""`memplan estimate` answers at once, without the parser that explains it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 0.25
"""From typing the command to its end."""
REFERENCE_S = 0.12
"""The reference's time on the quiet machine for which the limit was set."""
MOST_TRIES = 12
COMMAND = [sys.executable, "-m", "memplan", "estimate", "--model", "molmo2-4b"]
REFERENCE = [sys.executable, "-c", "kept = {}\nfor turn in range(1_000_000): kept[turn & 1023] = (turn, kept)"]
"""Plain work of the interpreter: where it takes longer, the machine is a slower or a busier one."""
SLOW_TO_LOAD = ("torch", "pandas", "matplotlib", "rich", "numpy", "typer", "importlib.metadata")


@pytest.fixture
def compiled(tmp_path: Path) -> dict[str, str]:
    """An environment in which Python keeps what it compiled, as an installed package is kept."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    kept["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    subprocess.run(COMMAND, capture_output=True, check=True, env=kept)
    return kept


def test_estimate_is_quick(compiled: dict[str, str]) -> None:
    """The least of several times: what runs beside it slows the command more than the reference."""
    answer = reference = float("inf")
    for _ in range(MOST_TRIES):
        answer, reference = min(answer, work(COMMAND, compiled)), min(reference, work(REFERENCE, compiled))
        if answer < LIMIT_S * max(1, reference / REFERENCE_S):
            return
    assert answer < LIMIT_S * max(1, reference / REFERENCE_S)


def work(command: list[str], environment: dict[str, str]) -> float:
    """The processor time of `command` in seconds: a busy machine makes the clock's anything."""
    before = os.times()
    subprocess.run(command, capture_output=True, check=True, env=environment)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_estimate_loads_nothing_slow() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *COMMAND[1:]], capture_output=True, text=True, check=True
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "memplan.estimate" in loaded  # the list is one that shows what was loaded
    assert not loaded & set(SLOW_TO_LOAD)
