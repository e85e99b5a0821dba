"""A user's module: found by its name, trained as it is, checkpointed by blocks, and refused in words."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memplan.api import verify
from memplan.backends.simulated import simulate
from memplan.errors import MemplanError
from memplan.models.registry import model_spec
from memplan.spec import DeviceSpec, Ladder, Rung, RunSpec, StepSpec
from memplan.step.builder import build_step

CODE = """
from types import SimpleNamespace

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.0)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    def __init__(self, form="tensor"):
        super().__init__()
        self.tokens, self.head, self.form = nn.Embedding(97, 16), nn.Linear(16, 97), form
        self.stack = nn.ModuleList(Layer() for _ in range(3))
        self.small = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in (*self.stack, *self.small):
            x = layer(x)
        logits = self.head(x)
        if self.form == "object":
            return SimpleNamespace(logits=logits)
        return {"tensor": logits, "last": logits[:, -1], "narrow": logits[..., :5], "pair": (logits, x)}[self.form]


def make():
    return Net()


def make_object():
    return Net("object")


def make_last():
    return Net("last")


def make_narrow():
    return Net("narrow")


def make_pair():
    return Net("pair")


def no_module():
    return 3


def no_vocabulary():
    return nn.Linear(4, 4)


def sized():
    net = nn.Sequential(nn.Linear(4, 4))
    net.config = SimpleNamespace(vocab_size=11)
    return net
"""


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the user's code, stood in."""
    (tmp_path / "mymodule.py").write_text(CODE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "mymodule", raising=False)


def run_on(name: str = "make", **step: Any) -> RunSpec:
    step = {"batch": 4, "seq": 16} | step
    device = DeviceSpec(name="cpu", rules="cpu")
    return RunSpec(model=model_spec(f"mymodule:{name}"), step=StepSpec(**step), device=device)


def question(**values: Any) -> Ladder:
    values = {"rungs": (Rung.parse("B4c2@full"),), "model": ("mymodule:make",), "seq": 16, "device": "cpu"} | values
    return Ladder(name="a test", **values)


@pytest.mark.parametrize("name", ["make", "make_object"])
def test_its_tokens_are_drawn_from_its_vocabulary(name: str) -> None:
    step = build_step(run_on(name, batch=64), torch.device("cpu"))
    assert step.model.vocab == 97
    assert int(step.batch.tokens.max()) == 96
    assert step.model(step.batch).shape == (64, 16, 97)
    assert abs(step().real - torch.log(torch.tensor(97.0))) < 0.5


@pytest.mark.parametrize("ckpt", ["full", "every:2", "submodule"])
def test_its_blocks_are_found_and_the_step_stays_the_same(ckpt: str) -> None:
    reports = list(verify(question(rungs=tuple(Rung.parse(f"B4{chunks}@{ckpt}") for chunks in ("c1", "c2")))))
    assert [report.same for report in reports] == [True] * len(reports)
    step = build_step(run_on(ckpt="full"), torch.device("cpu"))
    assert list(step.blocks) == [f"module.stack.{index}" for index in range(3)]


@pytest.mark.parametrize("path", ["small", "module.small"])
def test_its_blocks_may_be_named_from_its_own_root(path: str) -> None:
    step = build_step(run_on(ckpt="full", blocks=path), torch.device("cpu"))
    assert list(step.blocks) == ["module.small.0", "module.small.1"]
    assert all(report.same for report in verify(question(blocks=path)))
    with pytest.raises(MemplanError, match=r"no module 'nothing'\. Its blocks are at stack\."):
        build_step(run_on(ckpt="full", blocks="nothing"), torch.device("cpu"))


def test_it_is_traced() -> None:
    answer = simulate(run_on(ckpt="full"))
    assert answer.params_total == sum(
        parameter.numel() for parameter in build_step(run_on(), torch.device("cpu")).model.parameters()
    )


def test_dropout_is_set_in_its_layers() -> None:
    model = build_step(run_on(dropout=0.5), torch.device("cpu")).model
    assert [layer.drop.p for layer in model.module.stack] == [0.5] * 3


def test_its_sequence_must_be_given() -> None:
    with pytest.raises(MemplanError, match="no usual length of a sequence"):
        list(verify(question(seq=None)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_module", "made a int, not a torch.nn.Module"),
        ("no_vocabulary", "neither an nn.Embedding nor"),
        ("make_last", r"returned float32 \[4, 97\] for tokens \[4, 16\].*\[4, 16, 97\]"),
        ("make_narrow", r"returned float32 \[4, 16, 5\]"),
        ("make_pair", "returned a tuple for tokens"),
        ("nothing", "has no function 'nothing'"),
    ],
)
def test_what_it_must_not_be_is_said(name: str, text: str) -> None:
    with pytest.raises(MemplanError, match=text):
        build_step(run_on(name), torch.device("cpu")).accumulate()


@pytest.mark.parametrize(
    ("levers", "text"),
    [
        ({"attention": "eager"}, "Leave --attention out"),
        ({"norm": "fused"}, "Leave --norm out"),
        ({"workload": "prefix-suffix", "suffix": 4}, "no cache"),
    ],
)
def test_levers_that_it_has_not_are_refused(levers: dict[str, Any], text: str) -> None:
    with pytest.raises(MemplanError, match=text):
        build_step(run_on(**levers), torch.device("cpu")).accumulate()


def test_a_vocabulary_may_stand_in_its_config() -> None:
    assert build_step(run_on("sized"), torch.device("cpu")).model.vocab == 11
    with pytest.raises(MemplanError, match=r"no nn\.Dropout"):
        build_step(run_on("sized", dropout=0.1), torch.device("cpu"))
