"""Two real ladders on the CPU: a closure that keeps one activation of each block alive is caught, and named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

STEP = """
import os

import torch
from torch import nn

KEPT = []


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        hidden = torch.relu(self.up(x))
        if os.environ.get("LEAK"):
            KEPT.append(lambda: hidden)
        return x + self.down(hidden)


def make_step(batch, **_):
    model = nn.Sequential(*[Block() for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(batch, 512, 256)

    def step():
        KEPT[:-4] = []
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step
"""


def memplan(*words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    paths = {"PYTHONPATH": os.pathsep.join((root, str(folder))), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "memplan", *words], cwd=folder, env=os.environ | paths | variables,
                          capture_output=True, text=True, timeout=200)  # fmt: skip


def test_a_planted_leak_of_one_activation_a_block_is_caught_and_named(tmp_path: Path) -> None:
    (tmp_path / "leaky.py").write_text(STEP)
    for name, variables in (("base", {}), ("again", {}), ("new", {"LEAK": "1"})):
        done = memplan("ladder", "B4c1", "--entry", "leaky:make_step", "--device", "cpu", "--steps", "1", "--no-parity",
                       "--out", name, folder=tmp_path, **variables)  # fmt: skip
        assert done.returncode == 0, done.stderr
    same = memplan("compare", "base", "again", folder=tmp_path)
    assert same.returncode == 0, same.stdout
    found = memplan("compare", "base", "new", "-o", "json", folder=tmp_path)
    assert found.returncode == 1, found.stdout
    answer = json.loads(found.stdout)
    assert answer["verdict"].startswith("1 of 1 rung needs more memory: B4c1@none +")
    assert answer["verdict"].endswith("activations left from the step before).")
    left = next(one for one in answer["findings"] if one["metric"] == "between_steps_bytes")
    hidden_bytes = 4 * 512 * 1024 * 4
    assert left["label"] == "worse"
    assert left["new"] - left["base"] >= 4 * hidden_bytes, "the hidden activation of four blocks"
