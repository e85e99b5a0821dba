"""Selective checkpointing: same numbers as without, and just what the policy says runs again.

Letters: `B` batch, `S` sequence, `H` hidden, `F` feed-forward.
"""

import builtins
import dataclasses
import importlib
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from samples import run_of
from saved import Saved
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memplan.errors import MemplanError
from memplan.step import selective
from memplan.step.builder import TrainStep, build_step
from memplan.step.parity import outcome
from memplan.step.region import Contexts, Region
from memplan.step.selective import Policy, selective_contexts

CPU = torch.device("cpu")
aten = torch.ops.aten


class Ops(TorchDispatchMode):
    """Counts the ops that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[selective.op_name(func)] += 1
        return func(*args, **kwargs or {})


def step_of(model: str, ckpt: str, **step: Any) -> TrainStep:
    images = {"images": 1} if model == "tiny-molmo2" else {}
    return build_step(run_of(model, ckpt=ckpt, **{"batch": 3, "seq": 32} | images | step), CPU)


def numbers_of(step: TrainStep) -> dict[str, Tensor]:
    """Loss and gradients, random numbers drawn alike each time."""
    torch.manual_seed(1)
    return outcome(step)


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def backward_calls(ckpt: str, model: str = "tiny") -> Counter[str]:
    """Ops that the backward of one step runs."""
    step = step_of(model, ckpt)
    loss = step.chunk_loss(step.batch, lambda phase: None)
    with Ops() as ops:
        loss.backward()
    return ops.calls


# The numbers


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("model", ["tiny", "tiny-wide", "tiny-gpt2", "tiny-molmo2", "tiny-moe"])
def test_loss_and_gradients_are_those_of_the_plain_step_to_the_bit(model: str, chunks: int, dropout: float) -> None:
    expected = numbers_of(step_of(model, "none", chunks=chunks, dropout=dropout))
    for ckpt in ("selective", "selective:mm+sdpa"):
        assert differing(numbers_of(step_of(model, ckpt, chunks=chunks, dropout=dropout)), expected) == []


def test_so_they_are_under_autocast_and_with_eager_attention() -> None:
    for levers in ({"precision": "bf16-mixed"}, {"precision": "bf16"}, {"attention": "eager"}):
        expected = numbers_of(step_of("tiny", "none", **levers))
        assert differing(numbers_of(step_of("tiny", "selective", **levers)), expected) == []


def test_dropout_that_is_not_drawn_alike_is_seen() -> None:
    step = step_of("tiny", "selective", dropout=0.1)
    for region in step.regions:
        region.preserve_rng = False
    assert differing(numbers_of(step), numbers_of(step_of("tiny", "none", dropout=0.1))) != []


# What runs again

# A block of tiny has 7 products: q, k, v, out, gate, up, down. Of their gradients there are two each. Backward needs
# no result of the last one, so full runs 6 of them again, and the standing policy those in even places: k, out, up.


def test_full_runs_all_products_again_selective_every_second_one_and_no_attention() -> None:
    plain, full, every_second, none_of_them = (
        backward_calls(ckpt) for ckpt in ("none", "full", "selective", "selective:mm+sdpa")
    )
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert plain["mm"] == 4 * 7 * 2 + 2
    assert [calls["mm"] - plain["mm"] for calls in (full, every_second, none_of_them)] == [4 * 6, 4 * 3, 0]
    assert [calls[attention] for calls in (full, every_second, none_of_them)] == [4, 0, 0]
    assert every_second["silu"] == none_of_them["silu"] == full["silu"] == 4


def test_products_of_experts_alternate_with_the_others() -> None:
    # q, k, v, out, router, gate_up, down: the standing policy runs k, out and gate_up again.
    plain, every_second = backward_calls("none", "tiny-moe"), backward_calls("selective", "tiny-moe")
    assert every_second["grouped_mm"] - plain["grouped_mm"] == 3
    assert every_second["mm"] - plain["mm"] == 3 * 2


def test_a_custom_policy_runs_the_rest_again() -> None:
    plain, custom = backward_calls("none"), backward_calls("selective:silu")
    assert custom["silu"] == 0
    assert custom["mm"] - plain["mm"] == 4 * 6


# What is kept


def kept_of(ckpt: str) -> int:
    """Bytes alive after a forward that were not before: what autograd saved, and what the policy keeps beside."""
    step = step_of("tiny", ckpt, batch=2, seq=64)
    kept: dict[int, int] = {}
    for region in step.regions:
        contexts = region.contexts
        region.contexts = None if contexts is None else noting(contexts, kept)
    known = chain(step.model.parameters(), step.model.buffers(), (step.batch.tokens, step.batch.labels))
    with Saved(known) as saved:
        step.model(step.batch)
    return saved.num_bytes() + sum(kept.values())


def noting(contexts: Callable[[], Contexts], kept: dict[int, int]) -> Callable[[], Contexts]:
    """`contexts`, with what each policy keeps added to `kept`."""

    def make() -> Contexts:
        forward, again = contexts()
        plain = forward.policy_fn  # type: ignore[attr-defined]

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            choice: CheckpointPolicy = plain(ctx, op, *args, **kwargs)
            if choice == CheckpointPolicy.MUST_SAVE:
                out = op(*args, **kwargs)  # as large as the kept one
                for result in out if isinstance(out, tuple) else (out,):
                    if isinstance(result, Tensor):
                        kept[len(kept)] = result.nbytes
            return choice

        forward.policy_fn = policy  # type: ignore[attr-defined]
        return forward, again

    return make


def test_selective_keeps_more_than_full_and_less_than_none() -> None:
    unit = 2 * 64 * 128 * 4  # one B*S*H tensor
    none, every_second, products, full = (kept_of(c) for c in ("none", "selective", "selective:mm+sdpa", "full"))
    assert full < every_second < products < none
    # Kept beside the inputs: q 1, v 0.5, gate 2.75, down 1, and attention's output 1 with a number a head and token.
    numbers = 2 * 4 * 64 * 4
    assert every_second - full == 4 * (6.25 * unit + numbers)
    # All products: k 0.5, out 1 and up 2.75 more.
    assert products - every_second == 4 * 4.25 * unit


# The policy


def roles(policy: Policy, *ops: Any) -> list[str]:
    return [policy.role(op) for op in ops]


def test_the_standing_policy_knows_products_attention_and_the_rest() -> None:
    policy = Policy()
    products = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
    assert roles(policy, *products) == ["ALTERNATE"] * 4
    attention = (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._flash_attention_forward.default,
        aten._efficient_attention_forward.default,
        torch.ops.higher_order.flex_attention,
    )
    assert roles(policy, *attention) == ["SAVE"] * len(attention)
    assert roles(policy, aten.convolution.default) == ["SAVE"]
    assert roles(policy, aten.mul.Tensor, aten.silu.default, aten.view.default) == ["RECOMPUTE"] * 3


def test_collectives_are_saved_and_waiting_for_them_is_not() -> None:
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    importlib.import_module("torch.distributed._functional_collectives")  # registers the ops
    ops = torch.ops._c10d_functional
    saved = (ops.all_gather_into_tensor, ops.reduce_scatter_tensor, ops.all_reduce, ops.all_to_all_single)
    assert roles(Policy(), *(op.default for op in saved)) == ["SAVE"] * 4
    assert roles(Policy(), ops.wait_tensor.default, ops.all_reduce_.default) == ["RECOMPUTE"] * 2


def test_what_draws_random_numbers_is_never_saved() -> None:
    q = torch.empty(1, 1, 1, 8)
    flash = aten._scaled_dot_product_flash_attention.default
    assert Policy().role(flash, (q, q, q, 0.0)) == "SAVE"
    assert Policy().role(flash, (q, q, q, 0.1)) == "RECOMPUTE"
    assert Policy(("sdpa",)).role(flash, (q, q, q), {"dropout_p": 0.1}) == "RECOMPUTE"
    assert Policy(("native_dropout",)).role(aten.native_dropout.default, (q, 0.1, True)) == "RECOMPUTE"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("sdap", "Did you mean sdpa?"),
        ("mmm", "Did you mean"),
        ("view", "no result of its own"),
        ("mul_", "no result of its own"),
        ("softmax", "Try _softmax"),
        ("native_dropout", "draws random numbers"),
    ],
)
def test_a_name_that_cannot_be_kept_is_refused(name: str, told: str) -> None:
    with pytest.raises(MemplanError, match=told):
        selective_contexts((name,))


def test_the_step_refuses_it_too() -> None:
    with pytest.raises(MemplanError, match="Unknown op 'sdap'"):
        step_of("tiny", "selective:mm+sdap")


def test_words_stand_for_several_ops() -> None:
    for word in ("sdpa", "matmul", "linear", "mm", "silu", "_softmax"):
        selective_contexts((word,))
    assert roles(Policy(("linear",)), aten.mm.default, aten.addmm.default, aten.bmm.default) == [
        "SAVE",
        "SAVE",
        "RECOMPUTE",
    ]
    assert roles(Policy(("matmul",)), aten.mm.default, aten.bmm.default) == ["SAVE"] * 2


def test_torchs_partitioner_seeds_the_list() -> None:
    selective.dear_names.cache_clear()
    assert {"mm", "_scaled_mm", "_flash_attention_forward", "convolution"} <= selective.dear_names()


def test_without_torchs_partitioner_the_policy_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = numbers_of(step_of("tiny", "selective")), backward_calls("selective")
    original = builtins.__import__

    def refusing(name: str, *args: Any) -> Any:
        if name == "torch._functorch.partitioners":
            raise ImportError(name)
        return original(name, *args)

    selective.dear_names.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refusing)
    try:
        assert selective.dear_names() == selective.DEAR
        assert roles(Policy(), aten.mm.default, aten.convolution.default) == ["ALTERNATE", "SAVE"]
        assert roles(Policy(), aten._flash_attention_forward.default) == ["SAVE"]
        monkeypatch.undo()
        assert backward_calls("selective") == seeded[1]
        assert differing(numbers_of(step_of("tiny", "selective")), seeded[0]) == []
    finally:
        selective.dear_names.cache_clear()


# Writing in place


class Writer(nn.Module):
    """Products of which the first, which is kept, is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        raised = self.first(x).add_(1.0)
        return self.third((self.second(raised) * raised).sin())


@pytest.mark.parametrize("shape", [(4, 8), (2, 4, 8)])
def test_a_kept_result_that_is_written_to_is_an_error_and_no_other_number(shape: tuple[int, ...]) -> None:
    region = Region("writer", Writer().forward, contexts=selective_contexts())
    with pytest.raises(
        MemplanError, match=r"aten.add_.Tensor writes to a result of aten.mm.default that selective keeps"
    ):
        region(torch.ones(shape, requires_grad=True))


def test_torch_alone_does_not_see_the_write_behind_a_product_of_three_dimensions() -> None:
    # If this fails, torch has learnt to see it, and the policy need not look any more.
    policy = [aten.mm.default]
    region = Region("writer", Writer().forward, contexts=lambda: create_selective_checkpoint_contexts(policy))
    grads = []
    for function in (region, region.function):
        x = torch.ones(2, 4, 8, requires_grad=True)
        grads.append(torch.autograd.grad(function(x).sum(), x)[0])
    assert not torch.equal(*grads)


def test_a_write_to_what_is_not_kept_is_fine() -> None:
    writer = Writer()
    region = Region("writer", writer.forward, contexts=selective_contexts(("sin",)))
    grads = []
    for function in (region, writer.forward):
        x = torch.ones(2, 4, 8, requires_grad=True)
        grads.append(torch.autograd.grad(function(x).sum(), x)[0])
    assert torch.equal(*grads)


class Masked(nn.Module):
    """Attention under a mask by the math path, which adds the mask to its scores in place where nobody looks on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = self.linear(x)[:, None]
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)


@pytest.mark.parametrize("ops", [(), ("bmm",), ("matmul",)])
def test_the_math_path_under_a_mask_gives_the_same_numbers(ops: tuple[str, ...]) -> None:
    module, x, mask = Masked(), torch.randn(2, 4, 8), torch.randn(4, 4)
    grads = []
    with sdpa_kernel(SDPBackend.MATH):
        for function in (module.forward, Region("masked", module.forward, contexts=selective_contexts(ops))):
            module.zero_grad()
            function(x, mask).square().sum().backward()
            grads.append([parameter.grad for parameter in module.parameters()])
    assert all(torch.equal(found, plain) for found, plain in zip(*grads, strict=True))


# The counter


class AskedAgain(TorchDispatchMode):
    """One half of selective checkpointing as torch 2.9 does it: the policy is asked again in the recomputation, and
    what it calls kept is taken from the front of the op's queue. Torch 2.13 asks in forward alone; ours serves both."""

    def __init__(self, policy: Callable[..., CheckpointPolicy], store: dict[Any, list[Tensor]], again: bool) -> None:
        super().__init__()
        self.policy, self.store, self.again = policy, store, again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return func(*args, **kwargs or {})
        asked = dataclasses.make_dataclass("Asked", ["is_recompute"])(self.again)
        kept = self.policy(asked, func, *args, **kwargs or {}) == CheckpointPolicy.MUST_SAVE
        if kept and self.again:
            return self.store[func].pop(0)
        out = func(*args, **kwargs or {})
        if kept:
            self.store.setdefault(func, []).append(out.detach())
        return out


class Shared(Policy):
    """THE BUG: forward and recomputation count on in one counter."""

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        one_counter = dataclasses.make_dataclass("Asked", ["is_recompute"])(False)
        return super().__call__(one_counter, op, *args, **kwargs)


class Products(nn.Module):
    """A block with `number` matrix products, each followed by an op that saves its input."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(8, 8) / 3 for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x @ weight).sin()
        return x


def gradients(block: Products, policy: Callable[[], Policy] | None) -> list[Tensor]:
    """Those of the block's weights, checkpointed under a policy that is asked twice, or plain."""
    torch.manual_seed(2)
    x = torch.randn(4, 8, requires_grad=True)

    def contexts() -> Contexts:
        assert policy is not None
        asked, store = policy(), {}  # type: ignore[var-annotated]
        return AskedAgain(asked, store, False), AskedAgain(asked, store, True)

    out = block(x) if policy is None else checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return list(torch.autograd.grad(out.sum(), list(block.parameters())))


def wrong(number: int, policy: Callable[[], Policy]) -> list[int]:
    """Which weights of a block with `number` products get another gradient than without checkpointing."""
    block = Products(number)
    pairs = zip(gradients(block, policy), gradients(block, None), strict=True)
    return [index for index, (found, plain) in enumerate(pairs) if not torch.equal(found, plain)]


def test_one_counter_for_forward_and_recomputation_corrupts_gradients_and_raises_nothing() -> None:
    assert wrong(4, Shared) == []
    assert wrong(5, Shared) != []
    assert wrong(3, Shared) != []


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_separate_counters_do_not(number: int) -> None:
    assert wrong(number, Policy) == []


def test_every_call_of_a_region_begins_to_count_anew() -> None:
    make = selective_contexts()
    region = Region("products", Products(3).forward, contexts=make)
    x = torch.ones(4, 8)
    with Ops() as ops:
        for _ in range(2):
            region(x).sum().backward()
    # Each call: 3 products in forward, the second one again in backward, and 3 + 2 for the gradients.
    assert ops.calls["mm"] == 2 * (3 + 1 + 5)
