"""`memplan estimate` answers at once, without the parser that explains it."""

import os
import subprocess
import sys

LIMIT_S = 0.55
"""Some 0.4 s were seen on a quiet machine, a third of them for the libraries under the command line to load."""
REFERENCE_S = 0.12
"""The reference's time on the quiet machine for which the limit was set."""
COMMAND = [sys.executable, "-m", "memplan", "estimate", "--model", "molmo2-4b"]
REFERENCE = [sys.executable, "-c", "kept = {}\nfor turn in range(1_000_000): kept[turn & 1023] = (turn, kept)"]
"""Plain work of the interpreter: where it takes longer, the machine is a slower or a busier one."""
SLOW_TO_LOAD = ("torch", "pandas", "matplotlib", "rich", "numpy")


def test_estimate_is_quick() -> None:
    answer, reference = (
        min(times) for times in zip(*((work(COMMAND), work(REFERENCE)) for _ in range(4)), strict=True)
    )
    assert answer < LIMIT_S * max(1, reference / REFERENCE_S)


def work(command: list[str]) -> float:
    """The processor time of `command` in seconds: a busy machine makes the clock's anything."""
    before = os.times()
    subprocess.run(command, capture_output=True, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_estimate_loads_nothing_slow() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *COMMAND[1:]], capture_output=True, text=True, check=True
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "memplan.estimate" in loaded  # the list is one that shows what was loaded
    assert not loaded & set(SLOW_TO_LOAD)
