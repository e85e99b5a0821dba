"""One rank of a step over several devices: estimated as traced, and what the ways of sharding save."""

from collections.abc import Callable

import pytest
from samples import asked

from memplan.backends.simulated import simulate
from memplan.errors import MemplanError
from memplan.estimate import estimate
from memplan.spec import RunSpec
from memplan.spec.device import card

H100 = card("h100-80g")


def sharded(parallel: str, world: int, rung: str = "B1c1", *, seq: int = 16, **step: object) -> RunSpec:
    values = {"precision": "bf16"} | step
    return asked("tiny", rung, device=H100, seq=seq, parallel=parallel, world=world, **values)


@pytest.mark.parametrize(
    ("parallel", "world", "rung", "step"),
    [
        ("fsdp2", 4, "B1c1", {}),
        pytest.param("fsdp2:keep", 4, "B1c1", {}, marks=pytest.mark.slow),
        pytest.param("fsdp2:keep-last+noprefetch", 3, "B1c1", {}, marks=pytest.mark.slow),
        pytest.param("fsdp2:param-bf16+reduce-fp32", 4, "B2c2@full", {"precision": "fp32"}, marks=pytest.mark.slow),
        pytest.param("fsdp2:reduce-fp32", 4, "B1c1@selective", {}, marks=pytest.mark.slow),
        ("ddp", 2, "B1c1", {}),
        ("ddp:view", 2, "B2c2", {}),
        ("zero1", 2, "B2c2", {"precision": "bf16-masters"}),
        ("zero2", 3, "B2c2", {"precision": "bf16-masters"}),
        ("fsdp2", 4, "B1c1@offload", {"seq": 256}),
        pytest.param("fsdp2", 8, "B1c1", {"optimizer": "muon", "lora": "8"}, marks=pytest.mark.slow),
    ],
)
def test_a_rank_is_estimated_as_it_is_traced(parallel: str, world: int, rung: str, step: dict[str, object]) -> None:
    run = sharded(parallel, world, rung, **step)
    assert estimate(run).peak_allocated_bytes == simulate(run).steps.steady.peak_allocated_bytes


@pytest.mark.parametrize("witness", [estimate, simulate])
def test_muon_is_not_given_a_matrix_of_fewer_rows_than_devices(witness: Callable[[RunSpec], object]) -> None:
    """torch refuses it in the step, with a sentence about placements; an adapter of rank 8 has 8 rows."""
    with pytest.raises(MemplanError, match=r"a matrix of 8 rows that FSDP2 splits over 16 devices. Type --world 8,"):
        witness(sharded("fsdp2", 16, optimizer="muon", lora="8"))


def test_what_fsdp2_offloads_waits_on_the_host_as_traced() -> None:
    run = sharded("fsdp2:offload", 4, "B1c1@offload", seq=256, precision="fp16-masters")
    estimated, traced = estimate(run), simulate(run).steps.steady
    assert estimated.host_bytes == traced.host_bytes
    assert estimated.peak_allocated_bytes == traced.peak_allocated_bytes


@pytest.mark.parametrize("parallel", ["fsdp2:noprefetch", "fsdp2:param-bf16"])
def test_a_tower_stays_whole_with_the_root_and_blocks_get_masks_in_their_dtype(parallel: str) -> None:
    values = {"precision": "fp32", "images": 1, "parallel": parallel, "world": 8}
    run = asked("tiny-molmo2", "B2c1@full", device=H100, seq=128, **values)
    assert estimate(run).peak_allocated_bytes == simulate(run).steps.steady.peak_allocated_bytes


@pytest.mark.slow
def test_buckets_are_dealt_over_all_blocks() -> None:
    """Of Qwen3-0.6B, whose blocks take 31 MB each: buckets begin and end inside them."""
    run = asked("qwen3-0.6b", "B1c1@full", device=H100, seq=64, parallel="zero2", world=2, precision="bf16")
    assert estimate(run).peak_allocated_bytes == pytest.approx(
        simulate(run).steps.steady.peak_allocated_bytes, rel=1e-3
    )


def test_plain_ddp_holds_a_duplicate_of_the_gradients_that_views_and_zero1_do_not() -> None:
    """Experiment A's 14.6 GiB: the reducer's buckets beside the gradients."""
    grads = max(phase.breakdown.grads for phase in estimate(sharded("ddp", 4)).phases)
    plain, view, zero1 = (estimate(sharded(kind, 4)) for kind in ("ddp", "ddp:view", "zero1"))
    duplicate = [max(phase.breakdown.comm for phase in answer.phases) for answer in (plain, view, zero1)]
    assert duplicate[0] == duplicate[1] and duplicate[2] == 0
    assert 0 <= duplicate[0] - 2 * plain.params_trainable < 2 * 512, "two buckets, each rounded up once"
    assert max(phase.breakdown.grads for phase in view.phases) < grads


@pytest.mark.parametrize("world", [2, 4, 8])
def test_fsdp2_keeps_a_wth_of_everything_between_steps(world: int) -> None:
    whole, rank = estimate(sharded("ddp", 2)).static, estimate(sharded("fsdp2", world)).static
    counters = 512 * 37  # a step counter for each tensor stays whole
    assert rank.params == pytest.approx(whole.params / world, rel=0.02)
    assert rank.optimizer - counters == pytest.approx((whole.optimizer - counters) / world, rel=0.03)


def test_keeping_blocks_whole_needs_more() -> None:
    assert estimate(sharded("fsdp2:keep", 8)).peak_allocated_bytes > estimate(sharded("fsdp2", 8)).peak_allocated_bytes
