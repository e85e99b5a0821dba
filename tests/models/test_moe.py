"""The layer of experts: each token through its own experts, with static shapes and the same bits every time."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from samples import measured_peak, run_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from memplan.backends.simulated import simulate
from memplan.models.moe import MoE, grouped_linear, grouped_mm
from memplan.models.registry import model_spec
from memplan.step.builder import build_step
from memplan.step.parity import compare

SPEC = model_spec("tiny-moe").decoder
ENDS = torch.tensor([4, 4, 10, 24], dtype=torch.int32)
"""24 rows for four experts, none for the second."""


def layer() -> MoE:
    torch.manual_seed(0)
    made = MoE(SPEC)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made


def by_hand(moe: MoE, x: Tensor) -> Tensor:
    """What `moe` makes of `x`, one token and one expert at a time."""
    out = []
    for row in x.flatten(0, 1):
        shares, chosen = F.softmax(moe.router(row), dim=-1).topk(SPEC.experts_per_token)
        total = torch.zeros_like(row)
        for share, expert in zip(shares / shares.sum(), chosen.tolist(), strict=True):
            gate, up = F.linear(row, moe.gate_up[expert]).chunk(2)
            total = total + share * F.linear(F.silu(gate) * up, moe.down[expert])
        out.append(total)
    return torch.stack(out).view_as(x)


def outcome(work: Callable[[Tensor], Tensor], moe: MoE, x: Tensor) -> list[Tensor]:
    """The layer's output and the gradients of its inputs and parameters."""
    leaf = x.clone().requires_grad_()
    moe.zero_grad()
    out = work(leaf)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return [out.detach(), leaf.grad, *(parameter.grad for parameter in moe.parameters())]


def test_each_token_goes_through_its_own_experts() -> None:
    moe, x = layer(), torch.randn(2, 9, SPEC.hidden)
    found = outcome(moe, moe, x)
    expected = outcome(lambda leaf: by_hand(moe, leaf), moe, x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_second_run_gives_the_same_bits() -> None:
    moe, x = layer(), torch.randn(4, 64, SPEC.hidden)
    one, other = outcome(moe, moe, x), outcome(moe, moe, x)
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grouped_product_is_one_product_an_expert(dtype: torch.dtype) -> None:
    rows, weight = torch.randn(24, 32, dtype=dtype), torch.randn(4, 48, 32, dtype=dtype)
    rows.requires_grad_()
    weight.requires_grad_()
    groups = (slice(0, 4), slice(4, 4), slice(4, 10), slice(10, 24))
    grad = torch.randn(24, 48, dtype=dtype)
    made = []
    for one in (
        grouped_linear(rows, weight, ENDS),
        torch.cat([F.linear(rows[group], weight[expert]) for expert, group in enumerate(groups)]),
    ):
        made.append([one, *torch.autograd.grad(one, (rows, weight), grad)])
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other)


def test_the_fallback_equals_torchs_own_in_bf16() -> None:
    rows, weight = torch.randn(24, 32, dtype=torch.bfloat16), torch.randn(4, 48, 32, dtype=torch.bfloat16)
    torch.testing.assert_close(grouped_mm(rows, weight, ENDS), grouped_linear(rows, weight, ENDS))


@pytest.mark.parametrize("width", [32, 36])  # rows of 72 bytes start where torch's own kernel cannot read them
def test_shapes_do_not_depend_on_what_is_picked(width: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with FakeTensorMode():
            rows, weight = torch.randn(24, width, dtype=dtype), torch.randn(4, 48, width, dtype=dtype)
            ends = torch.zeros(4, dtype=torch.int32)
            out = grouped_linear(rows.requires_grad_(), weight.requires_grad_(), ends)
            out.backward(torch.empty_like(out))
        assert out.shape == (24, 48)
        assert (rows.grad.shape, weight.grad.shape) == (rows.shape, weight.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_counted_as_operations(dtype: torch.dtype) -> None:
    rows, weight = torch.randn(24, 32, dtype=dtype), torch.randn(4, 48, 32, dtype=dtype)
    with FlopCounterMode(display=False) as counter:
        out = grouped_linear(rows.requires_grad_(), weight.requires_grad_(), ENDS)
        out.backward(torch.ones_like(out))
    assert counter.get_total_flops() == 3 * 2 * 24 * 32 * 48


def test_autocast_reaches_the_experts() -> None:
    moe, x = layer(), torch.randn(1, 8, SPEC.hidden)
    with torch.autocast("cpu", torch.bfloat16):
        out = moe(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), moe(x), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    "levers",
    [
        {"ckpt": "full"},
        {"ckpt": "submodule"},
        {"chunks": 2},
        {"ckpt": "full", "precision": "bf16-mixed"},
        {"ckpt": "full", "norm": "fused"},
    ],
)
def test_levers_leave_the_step_as_it_is(levers: dict[str, object]) -> None:
    report = compare(run_of("tiny-moe", **levers), torch.device("cpu"))
    assert report.same, report.differences
    assert report.num_tensors > 36


def test_experts_are_compiled_whole() -> None:
    moe, x = layer(), torch.randn(1, 8, SPEC.hidden)
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    expected = outcome(moe, moe, x)
    for one, other in zip(outcome(compiled, moe, x), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_growing_few_blocks_is_tracing_all() -> None:
    run = run_of("tiny-moe", precision="bf16")
    grown, whole = simulate(run), simulate(run, grow_blocks=False)
    assert grown.params_total == sum(p.numel() for p in build_step(run, torch.device("cpu")).model.parameters())
    assert grown.steps == whole.steps


@pytest.mark.parametrize("ckpt", ["none", "full"])
def test_the_traced_peak_is_the_measured_one(ckpt: str) -> None:
    run = run_of("tiny-moe", ckpt=ckpt)
    assert simulate(run).steps.steady.peak_allocated_bytes == measured_peak(run)
