"""Selective checkpointing: the same numbers, products counted right, and memory between none and full."""

from collections import Counter
from typing import Any

import pytest
import torch
from samples import asked
from shared_counter import shared_counter_contexts
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.backends.simulated import simulate
from memplan.errors import MemplanError
from memplan.step.builder import TrainStep, build_step
from memplan.step.region import Region
from memplan.step.selective import compute_intensive, packets, selective_contexts

CPU = torch.device("cpu")
aten = torch.ops.aten


def built(ckpt: str, model: str = "tiny", rung: str = "B3c1", **step: Any) -> TrainStep:
    images = 1 if model == "tiny-molmo2" else 0
    return build_step(
        asked(model, f"{rung}@{ckpt}", **({"seq": 24, "images": images, "precision": "fp32"} | step)), CPU
    )


def outcome(step: TrainStep) -> dict[str, Tensor]:
    torch.manual_seed(7)
    loss = step.accumulate()
    grads = {name: param.grad for name, param in step.model.named_parameters() if param.grad is not None}
    return {"loss": loss} | grads


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("rung", ["B3c1", "B3c3"])
@pytest.mark.parametrize("ckpt", ["selective", "selective:mm+sdpa"])
@pytest.mark.parametrize("model", ["tiny", "tiny-wide", "tiny-gpt2", "tiny-molmo2"])
def test_the_step_is_bitwise_the_plain_one(model: str, ckpt: str, rung: str, dropout: float) -> None:
    expected, found = (outcome(built(mode, model, rung, dropout=dropout)) for mode in ("none", ckpt))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


# What runs again


class Block(nn.Module):
    """`num` products of one width with a tanh behind each."""

    def __init__(self, num: int, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(width, width) / 3 for _ in range(num)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


class Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the ops that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def grads(block: Block, call: Any) -> list[Tensor]:
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    call(x).square().sum().backward()
    found = [weight.grad for weight in block.weights]
    assert all(grad is not None for grad in found)
    block.zero_grad()
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize(("num", "again"), [(2, 1), (3, 1), (4, 2), (5, 2)])
def test_every_second_product_runs_again(num: int, again: int) -> None:
    """Of products 0, 1, 2, ... the odd ones; the last one's result is needed by the tanh behind it."""
    block = Block(num)
    region = Region("block", block.forward, contexts=selective_contexts())
    x = torch.randn(4, 8, requires_grad=True)
    out = region(x)
    with Ops() as ops:
        out.sum().backward()
    backward = 2 * num  # two products for each, x's gradient included
    assert ops.counts["mm"] - backward == again


def test_a_shared_counter_corrupts_gradients_when_products_are_odd_in_number() -> None:
    """The uncured code: with three products the recomputation takes for kept what forward did not keep."""
    for num, right in ((2, True), (3, False)):
        block = Block(num)
        expected = grads(block, block.forward)
        found = grads(block, Region("block", block.forward, contexts=shared_counter_contexts))
        cured = grads(block, Region("block", block.forward, contexts=selective_contexts()))
        assert all(map(torch.equal, cured, expected))
        assert all(map(torch.equal, found, expected)) == right


# Memory


def test_memory_lies_between_none_and_full() -> None:
    none, selective, full = (
        simulate(
            asked("tiny-wide", f"B8c1@{ckpt}", seq=128, precision="fp32", loss="chunked-ckpt:8")
        ).steps.needed_bytes
        for ckpt in ("none", "selective", "full")
    )
    assert full < selective < none


def test_a_policy_of_ones_own_keeps_what_it_names() -> None:
    kept = [
        simulate(
            asked("tiny", f"B8c1@selective:{ops}", seq=128, precision="fp32", loss="chunked-ckpt:8")
        ).steps.needed_bytes
        for ops in ("sdpa", "sdpa+mm")
    ]
    assert kept[0] < kept[1]


# The set of ops


def test_attention_and_dear_ops_are_in_the_set_with_torchs_list_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch = compute_intensive()
    monkeypatch.setattr("torch._functorch.partitioners.get_default_op_list", None)
    monkeypatch.delattr("torch._functorch.partitioners.get_default_op_list")
    without = compute_intensive()
    assert aten.convolution in with_torch & without
    assert len(with_torch) > len(without)
    assert len(packets(("mm", "no_such_op"))) == 1


def test_an_unknown_op_is_refused_with_the_nearest() -> None:
    with pytest.raises(MemplanError, match=r"torch has no op 'nm'.*mm"):
        built("selective:nm")
