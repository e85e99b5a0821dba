"""Checkpointed blocks run twice and keep their input only; without gradients they run once, as if nothing were there.

Letters: `B` batch, `S` sequence, `H` hidden, `F` feed-forward, `L` layers.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain

import pytest
import torch
from samples import run_of
from saved import Saved
from torch import Tensor

from memplan.models.decoder import Block
from memplan.step import region as region_module
from memplan.step.builder import TrainStep, build_step

CPU = torch.device("cpu")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[Block]:
    """How often each block's plain forward is called in steps that are built from now on."""
    counted: Counter[Block] = Counter()
    original = Block.forward

    def forward(self: Block, *args: Tensor | None) -> Tensor:
        counted[self] += 1
        return original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Block, "forward", forward)
    return counted


def step_of(ckpt: str, **step: object) -> TrainStep:
    """A tiny step of 4 blocks."""
    return build_step(run_of("tiny", batch=2, seq=64, ckpt=ckpt, **step), CPU)


def calls_by_block(step: TrainStep, calls: Counter[Block]) -> list[int]:
    return [calls[block] for block in step.model.decoder.blocks]


@pytest.mark.parametrize(
    ("ckpt", "chunks", "expected"),
    [
        ("none", 1, [1, 1, 1, 1]),
        ("full", 1, [2, 2, 2, 2]),
        ("every:1", 1, [2, 2, 2, 2]),
        ("every:2", 1, [2, 1, 2, 1]),
        ("every:3", 1, [2, 1, 1, 2]),
        ("every:4", 1, [2, 1, 1, 1]),
        ("every:9", 1, [2, 1, 1, 1]),
        ("none", 2, [2, 2, 2, 2]),
        ("full", 2, [4, 4, 4, 4]),
        ("every:2", 2, [4, 2, 4, 2]),
    ],
)
def test_a_step_runs_every_checkpointed_block_twice_a_chunk(
    calls: Counter[Block], ckpt: str, chunks: int, expected: list[int]
) -> None:
    step = step_of(ckpt, chunks=chunks)
    step()
    assert calls_by_block(step, calls) == expected
    step()
    assert calls_by_block(step, calls) == [2 * number for number in expected]


def test_the_second_run_happens_in_backward(calls: Counter[Block]) -> None:
    step = step_of("full")
    heard: dict[str, int] = {}
    step(lambda phase: heard.update({phase: calls.total()}))
    assert heard == {"forward": 0, "loss": 4, "backward": 4, "optimizer": 8}


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each time torch's checkpoint is entered."""
    times: list[str] = []
    original = region_module.checkpoint

    def spied(*args: object, **options: object) -> object:
        times.append("checkpoint")
        return original(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(region_module, "checkpoint", spied)
    return times


@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_without_gradients_every_block_runs_once_and_torchs_checkpoint_is_never_entered(
    calls: Counter[Block],
    entered: list[str],
    without_grad: Callable[[], AbstractContextManager[None]],
    training: bool,
) -> None:
    step = step_of("full")
    step.model.train(training)
    with without_grad():
        step.model(step.batch)
    assert calls_by_block(step, calls) == [1, 1, 1, 1]
    assert entered == []


@pytest.mark.parametrize(("ckpt", "times"), [("none", 0), ("full", 4), ("every:2", 2)])
def test_with_gradients_torchs_checkpoint_is_entered_once_a_block(entered: list[str], ckpt: str, times: int) -> None:
    step_of(ckpt)()
    assert len(entered) == times


def test_the_plain_path_gives_the_same_numbers() -> None:
    step, plain = step_of("full"), step_of("none")
    with torch.no_grad():
        hidden = step.model(step.batch)
    assert not hidden.requires_grad
    assert torch.equal(hidden, plain.model(plain.batch))
    assert torch.equal(hidden, step.model(step.batch))


def test_vision_towers_are_left_alone(entered: list[str]) -> None:
    build_step(run_of("tiny-molmo2", batch=1, seq=32, images=1, ckpt="full"), CPU)()
    assert len(entered) == 3


# What is kept

# One block of tiny, in tensors of B*S*H elements; F = 2.75 H and half as many key/value heads as query heads.
#   attention  norm: input 1, normed 1, weighted 1; q 1, k and v 0.5 each; attended 1           6
#   mlp        norm: residual 1, normed 1, weighted 1; gate, silu, up, product 2.75 each       14
# In bf16 a norm keeps the fp32 copy of its input, 2 of bf16, in the input's stead: 1 more for each of the two norms.
BLOCK = {"fp32": 20, "bf16": 22}
# The final norm: input 1 and normed 1; in bf16 the input's fp32 copy 2 and normed 1. The head keeps what comes out.
FINAL_NORM = {"fp32": 2, "bf16": 3}


def hidden_tensors_kept(step: TrainStep, precision: str) -> float:
    """Bytes that the model's forward leaves for backward, in tensors of B*S*H elements; what is smaller than half of
    one (a number a token or a head, rotation tables) is left out."""
    unit = 2 * 64 * 128 * (4 if precision == "fp32" else 2)
    known = chain(step.model.parameters(), step.model.buffers(), (step.batch.tokens, step.batch.labels))
    with Saved(known) as saved:
        step.model(step.batch)
    return saved.num_bytes(at_least=unit // 2) / unit


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpointed_block_keeps_one_hidden_tensor_and_a_plain_one_keeps_all(precision: str) -> None:
    block, behind = BLOCK[precision], FINAL_NORM[precision]
    expected = {
        "none": 4 * block + behind,
        "full": 4 + behind,
        "every:2": 2 + 2 * block + behind,
        "every:3": 2 + 2 * block + behind,
        "every:4": 1 + 3 * block + behind,
    }
    found = {ckpt: hidden_tensors_kept(step_of(ckpt, precision=precision), precision) for ckpt in expected}
    assert found == expected


def test_nothing_is_kept_without_gradients() -> None:
    step = step_of("full")
    with torch.no_grad():
        assert hidden_tensors_kept(step, "fp32") == 0
