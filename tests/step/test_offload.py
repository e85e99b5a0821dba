"""Offload: the same numbers, the device holds two blocks' tensors, the host the rest, and every byte is counted."""

import gc
from typing import Any

import pytest
import torch
from samples import asked
from torch import Tensor

from memplan.step.builder import TrainStep, build_step
from memplan.step.offload import Offload, host_size

CPU = torch.device("cpu")


def built(ckpt: str, model: str = "tiny", rung: str = "B4c1", **step: object) -> TrainStep:
    return build_step(asked(model, f"{rung}@{ckpt}", **({"seq": 64, "images": 0, "precision": "fp32"} | step)), CPU)


def outcome(step: TrainStep) -> dict[str, Tensor]:
    loss = step.accumulate()
    grads = {name: param.grad for name, param in step.model.named_parameters() if param.grad is not None}
    return {"loss": loss} | grads


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("rung", ["B4c1", "B6c3"])
@pytest.mark.parametrize("model", ["tiny", "tiny-wide", "tiny-gpt2"])
def test_the_step_is_bitwise_the_plain_one(model: str, rung: str, dropout: float) -> None:
    plain, variant = (built(ckpt, model, rung, dropout=dropout) for ckpt in ("none", "offload"))
    torch.manual_seed(1)
    expected = outcome(plain)
    torch.manual_seed(1)
    found = outcome(variant)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert variant.offload is not None
    assert variant.offload.peak_host_bytes > 0
    assert variant.offload.host_bytes == 0


def linears(num: int, width: int) -> list[torch.nn.Module]:
    return [torch.nn.Sequential(torch.nn.Linear(width, width, bias=False), torch.nn.Tanh()) for _ in range(num)]


def test_small_integers_say_what_waits_where() -> None:
    """A block of product and tanh keeps its input and its output, one unit each; the next block's input is the output
    before it, kept once. Four blocks keep 1 + 4 units."""
    blocks = linears(4, 64)
    offload = Offload(pinned=False)
    for block in blocks:
        offload.put_on(block)
    x = torch.randn(512, 64, requires_grad=True)
    unit = x.nbytes
    waiting = []
    for block in blocks:
        x = block(x)
        waiting.append(divmod(offload.host_bytes, unit))
    assert waiting == [(2, 0), (3, 0), (4, 0), (5, 0)]
    x.sum().backward()
    gc.collect()
    assert divmod(offload.peak_host_bytes, unit) == (5, 0)
    assert offload.host_bytes == 0
    offload.reset()
    assert offload.peak_host_bytes == 0


def test_without_gradients_nothing_waits() -> None:
    step = built("offload")
    with torch.no_grad():
        step.model(step.batch)
    assert step.offload is not None
    assert step.offload.peak_host_bytes == 0


def test_a_tensor_that_is_written_between_two_saves_is_kept_twice() -> None:
    class Writes(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            held = x * 2
            first = held.exp() * 1
            squared = held.detach()
            other = x.sin() * squared
            squared.add_(1)
            return first + other + x.cos() * squared

    block, plain = Writes(), Writes()
    Offload(pinned=False).put_on(block)
    x, y = (torch.linspace(0, 1, 1 << 16).requires_grad_() for _ in range(2))
    block(x).sum().backward()
    expected = 2 * (2 * y).exp() + y.cos() * 2 * y - y.sin() * (2 * y + 1)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain(y).sum().backward()  # autograd's own tensors are not copies


def test_pinned_memory_comes_in_powers_of_two() -> None:
    assert [host_size(size, pinned=True) for size in (0, 1, 65_536, 65_537)] == [0, 1, 65_536, 131_072]
    assert host_size(65_537, pinned=False) == 65_537


def test_a_tensor_comes_back_with_its_strides() -> None:
    """Compiled code asserts them."""
    strides: list[tuple[int, ...]] = []

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            strides.append(ctx.saved_tensors[0].stride())
            return grads[0]

    class Block(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Reads.apply(x.transpose(0, 1))  # type: ignore[no-untyped-call]
            return out

    block = Block()
    offload = Offload(pinned=False)
    offload.put_on(block)
    out = block(torch.randn(128, 256, requires_grad=True))
    assert offload.host_bytes > 0
    out.sum().backward()
    assert strides == [(1, 256)]
