"""For all tests. One thread each: on a busy machine two threads that wait for one another take seconds for an op."""

import os

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


def count_gpus() -> int:
    """CUDA devices that torch finds; torch is imported only when a collected test asks for one."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
