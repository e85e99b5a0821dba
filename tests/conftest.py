"""For all tests. One thread each: on a busy machine two threads that wait for one another take seconds for an op."""

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("memplan", deadline=None)  # a busy machine is no failure
settings.load_profile("memplan")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run, with the reason, and `slow` tests unless `-m` speaks of them."""
    num_gpus = count_gpus() if any(item.get_closest_marker(name) for item in items for name in GPUS_NEEDED) else 0
    for item in items:
        for name, needed in GPUS_NEEDED.items():
            if item.get_closest_marker(name) and num_gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {num_gpus}"))
        if item.get_closest_marker("slow") and "slow" not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))


GPUS_NEEDED = {"gpu": 1, "multigpu": 2}
"""CUDA devices that a marked test needs."""


@pytest.fixture(scope="session", autouse=True)
def nobody_is_left() -> Iterator[None]:
    """Behind the last test no worker of a ladder is there that one of them started, and no zombie of it either."""
    os.environ["MEMPLAN_TESTS"] = mark = f"{os.getpid()}-{time.time_ns()}"  # children inherit it, wherever they go
    yield
    deadline = time.monotonic() + 10
    while (left := workers(f"MEMPLAN_TESTS={mark}")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    """The collector of garbage runs, which an estimate turns off, as its process ends with it."""
    yield
    gc.enable()
    gc.unfreeze()


def workers(mark: str) -> list[str]:
    """Command lines of processes with `mark` in their environment that a ladder has started; zombies of this process
    are named by their number. Empty where there is no /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            _, _, state = (folder / "stat").read_text().rpartition(")")
            if state.split()[0] == "Z" and state.split()[1] == str(os.getpid()):
                found.append(f"zombie {folder.name}")
            marks = (folder / "environ").read_bytes().split(b"\0")
            if mark.encode() in marks and any(one.startswith(b"MEMPLAN_WORKER=") for one in marks):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


def count_gpus() -> int:
    """CUDA devices that torch finds; torch is imported only when a collected test asks for one."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
