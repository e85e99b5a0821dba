"""Faults that people made with checkpointing, planted in the variant: each is found, and named."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from samples import run_of
from shared_counter import shared_counter_contexts
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memplan.models.batch import Batch
from memplan.record import ParityReport
from memplan.report.parity_table import parity_lines
from memplan.spec import RunSpec
from memplan.step import region as region_module
from memplan.step.builder import Mark, TrainStep, build_step
from memplan.step.parity import compare_steps, plain
from memplan.step.region import Contexts, Region

CPU = torch.device("cpu")
Plant = Callable[[TrainStep], None]


def nothing(step: TrainStep) -> None:
    """Plants nothing."""


def report_on(plant: Plant, *, in_both: Plant = nothing, **step: object) -> ParityReport:
    """The plain step of 2 samples of 25 tokens through the 4 blocks of `tiny` against a variant in which each block is
    checkpointed and `plant` broke something; `in_both` belongs to the model."""
    run: RunSpec = run_of("tiny", **({"batch": 2, "seq": 25, "ckpt": "full"} | step))
    reference, variant = build_step(plain(run), CPU), build_step(run, CPU)
    for each in (reference, variant):
        in_both(each)
    plant(variant)
    return compare_steps(reference, variant)


def lines(report: ParityReport) -> str:
    """What a person reads below the table."""
    return "\n".join(parity_lines(report))


# A counter of products that forward and recomputation share


class Products(nn.Module):
    """`num` products of one width, in the place of a feed-forward layer."""

    def __init__(self, num: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(128, 128, generator=generator) / 12 for _ in range(num)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


class Nothing(nn.Module):
    """An attention layer that adds nothing."""

    def forward(self, x: Tensor, rope: object, mask: object, past: object = None) -> Tensor | tuple[Tensor, ...]:
        out = torch.zeros_like(x)
        keys = x.new_zeros(x.size(0), 2, x.size(1), 32)
        return out if past is None else (out, keys, keys)


def only_products(num: int) -> Plant:
    """Makes each block one of `num` products."""

    def plant(step: TrainStep) -> None:
        for block in step.model.decoder.blocks:
            block.attn, block.mlp = Nothing(), Products(num)

    return plant


def share_counter(step: TrainStep) -> None:
    for region in step.regions:
        region.contexts = shared_counter_contexts


def test_a_counter_that_both_runs_share_is_found_at_the_second_of_three_products() -> None:
    """Forward keeps products 0 and 2. The recomputation counts on, and takes what was kept of product 0 for product 1.
    No shape gives it away: the gradients are wrong without a word."""
    report = report_on(share_counter, in_both=only_products(3))
    named = report.recomputed
    assert report.differences
    assert report.faults == ()
    assert named is not None
    assert (named.region, named.module, named.op) == ("decoder.blocks.0", "decoder.blocks.0.mlp", "aten.mm")
    assert named.max_abs is not None
    assert report_on(share_counter, in_both=only_products(2)).same


def test_a_shared_counter_is_named_where_a_shape_gives_it_away() -> None:
    """The seven products of `tiny` differ in width: torch stops, and what it says does not help."""
    report = report_on(share_counter)
    assert report.recomputed is not None
    assert (report.recomputed.module, report.recomputed.op) == ("decoder.blocks.3.attn.k", "aten.mm")
    assert report.recomputed.shape != report.recomputed.shape_again
    assert report.faults
    assert "Traceback" not in lines(report)


def policy_with_a_shared_counter() -> Contexts:
    """Contexts of torch's own, whose policy counts the products of both runs with one counter."""
    count = itertools.count()

    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        keeps = op is torch.ops.aten.mm.default and next(count) % 2 == 0
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def test_torchs_own_contexts_keep_what_forward_kept_or_the_fault_is_found() -> None:
    """torch from 2.13 on asks a policy in forward alone, and older ones in the recomputation again."""

    def plant(step: TrainStep) -> None:
        for region in step.regions:
            region.contexts = policy_with_a_shared_counter

    report = report_on(plant, in_both=only_products(3))
    asks_again = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
    assert report.same != asks_again
    assert (report.recomputed is not None) == asks_again


# Random numbers


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_random_numbers_that_are_not_drawn_again_alike_are_found_at_the_first_draw(dropout: float) -> None:
    def forget(step: TrainStep) -> None:
        for region in step.regions:
            region.preserve_rng = False

    report = report_on(forget, dropout=dropout)
    assert report.same == (dropout == 0)
    if dropout:
        assert report.recomputed is not None
        assert report.recomputed.region == report.recomputed.module == "decoder.blocks.0"
        assert "aten.bernoulli_" in lines(report)
        assert "loss" not in [difference.name for difference in report.differences]


# A cache that grows inside of the region


def grow_a_cache(step: TrainStep) -> None:
    """Block 1 appends its keys to a list that lives as long as a forward, and reads the newest of them."""
    model, attention = step.model, step.model.decoder.blocks[1].attn
    cache: list[Tensor] = []
    forward, project = model.forward, attention.project

    def project_and_append(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = project(x)
        cache.append(k)
        return q, torch.cat(cache, dim=1)[:, -x.size(1) :], v

    def forward_from_empty(batch: Batch) -> Tensor:
        cache.clear()
        return forward(batch)

    model.forward, attention.project = forward_from_empty, project_and_append


def test_a_cache_appended_inside_the_region_is_named_by_the_op_that_sees_it_grown() -> None:
    report = report_on(nothing, in_both=grow_a_cache)
    named = report.recomputed
    assert named is not None
    assert (named.module, named.op) == ("decoder.blocks.1.attn", "aten.cat")
    assert (named.shape, named.shape_again) == ((2, 25, 2, 32), (2, 50, 2, 32))


def test_a_cache_written_in_place_inside_the_region_is_named_with_the_rule() -> None:
    """The same with a buffer: its first free row is a number in a tensor, which the region moves on."""

    def append_in_place(step: TrainStep) -> None:
        attention = step.model.decoder.blocks[1].attn
        attention.register_buffer("cached", torch.zeros(2, 80, 2, 32))
        attention.register_buffer("filled", torch.zeros((), dtype=torch.int64))
        project = attention.project

        def project_and_append(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = project(x)
            with torch.no_grad():
                rows = attention.filled + torch.arange(x.size(1))
                attention.cached.index_copy_(1, rows % 80, k.detach())
                attention.filled.add_(x.size(1))
            return q, k, v

        attention.project = project_and_append

    report = report_on(nothing, in_both=append_in_place)
    found = {mutation.tensor.split()[0].rpartition(".")[2]: mutation for mutation in report.mutations}
    assert found.keys() == {"cached", "filled"}
    assert all(mutation.inside for mutation in found.values())
    assert found["cached"].writer == "aten.index_copy_ in decoder.blocks.1.attn"
    assert "move the write out of the region" in str(found["cached"])
    assert "buffer decoder.blocks.1.attn.cached" in [difference.name for difference in report.differences]


# A state that is updated in place


def keep_a_state(step: TrainStep) -> None:
    """Block 1 mixes a running mean into its output, which it has moved on in place."""
    layer = step.model.decoder.blocks[1].mlp
    layer.register_buffer("state", torch.zeros(128))
    forward = layer.forward

    def forward_with_state(x: Tensor) -> Tensor:
        with torch.no_grad():
            layer.state.mul_(0.5).add_(x.mean((0, 1)))
        return forward(x) + layer.state * x

    layer.forward = forward_with_state


def test_a_state_updated_in_place_and_read_after_is_named_with_reader_writer_and_rule() -> None:
    report = report_on(nothing, in_both=keep_a_state)
    (mutation,) = report.mutations
    assert mutation.tensor == "decoder.blocks.1.mlp.state [128] float32"
    assert mutation.writer == "aten.mul_.Tensor in decoder.blocks.1.mlp"
    assert mutation.reader == "aten.mul.Tensor in decoder.blocks.1.mlp"
    assert "keep the value from before the write" in lines(report)
    assert report.recomputed is not None
    assert report.recomputed.op == "aten.mul_.Tensor"
    assert "buffer decoder.blocks.1.mlp.state" in [difference.name for difference in report.differences]


# The kernel of attention


def pin_math(step: TrainStep) -> None:
    """The model's forward allows one kernel, which is not the one that torch would choose; backward is outside."""
    forward = step.model.forward

    def pinned(batch: Batch) -> Tensor:
        with sdpa_kernel([SDPBackend.MATH]):
            return forward(batch)

    step.model.forward = pinned


def test_a_recomputation_outside_of_the_callers_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert report_on(nothing, in_both=pin_math).same
    monkeypatch.setattr(region_module, "attention_pin", lambda: (nullcontext(), nullcontext()))
    report = report_on(nothing, in_both=pin_math)
    assert report.recomputed is not None
    assert report.recomputed.module.endswith(".attn")
    assert report.recomputed.op_again == "aten._scaled_dot_product_flash_attention_for_cpu"
    assert "torch stops: " in lines(report)


# A chunk's weight


def test_a_chunk_whose_loss_is_scaled_wrongly_is_named_in_the_gradients() -> None:
    def double_the_second(step: TrainStep) -> None:
        original, index = step.chunk_loss, itertools.count()

        def chunk_loss(part: Batch, mark: Mark) -> Tensor:
            return original(part, mark) * (2 if next(index) % 2 else 1)

        step.chunk_loss = chunk_loss  # type: ignore[method-assign]

    report = report_on(double_the_second, chunks=2)
    names = {difference.name for difference in report.differences}
    assert {"loss", "decoder.embedding.weight", "decoder.blocks.3.mlp.down.weight"} <= names
    assert report.recomputed is None
    assert "of its largest value" in lines(report)


# Who enters


def test_a_region_that_engages_without_gradients_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Region, "engages", lambda self: True)
    report = report_on(nothing)
    assert not report.differences
    assert [fault.split()[0] for fault in report.faults] == ["training", "evaluation", "generation"]


def test_a_region_that_never_engages_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Region, "engages", lambda self: False)
    report = report_on(nothing)
    assert not report.differences
    assert not report.same
    assert "never engaged: 4 regions" in lines(report)
