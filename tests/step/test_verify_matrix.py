"""Every mode on every kind of model is the plain step, with dropout and without, in one chunk and in several; what is
recomputed is its original to the last bit; and what a comparison holds fixed is said."""

import dataclasses
import itertools
import json

import pytest
import torch
from samples import run_of

from memplan.models.cache import KVCache
from memplan.record import Mutation, ParityReport, RecomputeDifference, TensorDifference
from memplan.report.parity_table import parity_lines, parity_table
from memplan.report.render import render
from memplan.spec import RunSpec
from memplan.step.builder import TrainStep, build_step
from memplan.step.parity import compare, compare_steps, plain

CPU = torch.device("cpu")
MODELS = ("tiny", "tiny-moe", "tiny-molmo2", "tiny-gemma", "tiny-hybrid")
MODES = ("none", "full", "every:2", "first:1", "selective", "selective:mm+sdpa", "submodule", "offload")
FAST = (("full", 0.0, 1), ("selective", 0.1, 3), ("submodule", 0.1, 3))
"""Those of the ways that are tried each time."""
WAYS = [
    pytest.param(
        ckpt,
        dropout,
        chunks,
        id=f"{ckpt} dropout {dropout} c{chunks}",
        marks=[] if (ckpt, dropout, chunks) in FAST else pytest.mark.slow,
    )
    for ckpt, dropout, chunks in itertools.product(MODES, (0.0, 0.1), (1, 3))
]


def asked(model: str, **step: object) -> RunSpec:
    """Three samples of 24 tokens."""
    if model == "tiny-hybrid":
        pytest.importorskip("transformers")
    images = {"images": 1} if model == "tiny-molmo2" else {}
    return run_of(model, **({"batch": 3, "seq": 24} | images | step))


def assert_same(report: ParityReport) -> None:
    assert report.same, "\n".join(parity_lines(report))


@pytest.mark.parametrize(("ckpt", "dropout", "chunks"), WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_every_mode_is_the_plain_step_on_every_model(model: str, ckpt: str, dropout: float, chunks: int) -> None:
    report = compare(asked(model, ckpt=ckpt, dropout=dropout, chunks=chunks), CPU)
    assert_same(report)
    recomputes = ckpt not in ("none", "offload")
    if ckpt == "full" and model == "tiny":
        assert (report.num_entered, report.num_runs) == (4 * chunks, 8 * chunks)
    assert (report.num_recomputed > 0) == recomputes == (report.num_runs == 2 * report.num_entered > 0)
    bitwise = chunks == 1 or dropout > 0
    assert (report.tolerance == 0) == bitwise


@pytest.mark.slow
@pytest.mark.parametrize(("dropout", "chunks"), itertools.product((0.0, 0.1), (1, 3)))
@pytest.mark.parametrize("ckpt", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_compiled_blocks_are_the_plain_step(model: str, ckpt: str, dropout: float, chunks: int) -> None:
    report = compare(asked(model, ckpt=ckpt, dropout=dropout, chunks=chunks, compile="on"), CPU)
    assert_same(report)
    assert "compiled code" in report.why
    assert ("draws as eager code" in report.why) == (dropout > 0)
    if ckpt not in ("none", "offload"):
        assert report.num_recomputed > 0
        assert "eager step" in report.note


@pytest.mark.parametrize("ckpt", ["full", "selective"])
@pytest.mark.parametrize("workload", ["prefix-suffix", "distill"])
def test_other_workloads_are_compared_with_their_caches(workload: str, ckpt: str) -> None:
    suffix = 8 if workload == "prefix-suffix" else 0
    report = compare(asked("tiny", ckpt=ckpt, workload=workload, suffix=suffix, dropout=0.1), CPU)
    assert_same(report)
    caches = 4 * 2 if suffix else 0
    assert report.num_tensors == compare(asked("tiny", ckpt=ckpt), CPU).num_tensors + caches


@pytest.mark.parametrize("loss", ["valid-rows", "chunked-ckpt:3", "fused"])
def test_other_losses_are_compared_with_the_whole_one(loss: str) -> None:
    report = compare(asked("tiny", ckpt="full", loss=loss), CPU)
    assert_same(report)
    assert report.why == f"another order of fp32 sums by the loss {loss.partition(':')[0]}"


def test_a_cache_that_was_appended_twice_is_named() -> None:
    run = asked("tiny", ckpt="full", workload="prefix-suffix", suffix=8)
    variant = build_step(run, CPU)
    trunk = variant.model.decoder.trunk

    def trunk_and_append(hidden: torch.Tensor, cache: KVCache) -> torch.Tensor:
        out = trunk(hidden, cache=cache)
        cache.append(2, cache.layers[2].keys[-1], cache.layers[2].values[-1])
        return out

    variant.model.decoder.trunk = trunk_and_append  # type: ignore[method-assign, assignment]
    report = compare_steps(build_step(plain(run), CPU), variant)
    assert {difference.name for difference in report.differences} == {"cache 2 keys", "cache 2 values"}
    assert report.differences[0].shape == (3, 2, 32, 32)
    assert variant.model.on_cache is None


def test_chunks_stay_as_they_are_where_each_draws_a_mask_of_its_own() -> None:
    run = asked("tiny", ckpt="full", chunks=3, loss="chunked-ckpt:2", compile="on")
    dropped = dataclasses.replace(run, step=dataclasses.replace(run.step, dropout=0.1))
    assert (plain(run).step.chunks, plain(dropped).step.chunks) == (1, 3)
    for each in (run, dropped):
        assert (plain(each).step.ckpt, plain(each).step.loss, plain(each).step.compile) == ("none", "full", "off")
    eager = dataclasses.replace(dropped, step=dataclasses.replace(dropped.step, compile="off"))
    assert compare(eager, CPU).why.endswith("3 chunks in both, for the same dropout")


def test_a_comparison_leaves_buffers_and_mode_as_they_were() -> None:
    def count(step: TrainStep) -> None:
        step.model.register_buffer("steps", torch.zeros(()))
        forward = step.model.forward

        def counted(batch: object) -> torch.Tensor:
            step.model.steps.add_(1)
            return forward(batch)

        step.model.forward = counted

    run = asked("tiny", ckpt="full", chunks=3)
    reference, variant = build_step(plain(run), CPU), build_step(run, CPU)
    count(reference)
    count(variant)
    report = compare_steps(reference, variant)
    assert [difference.name for difference in report.differences] == ["buffer steps"]
    assert variant.model.steps == reference.model.steps == 0
    assert variant.model.training


# The table


def test_the_table_says_what_was_recomputed_and_the_footer_names_cause_before_consequence() -> None:
    differs = RecomputeDifference(
        region="blocks.1",
        module="blocks.1.attn",
        position=7,
        op="aten.mm",
        op_again="aten.mm",
        shape=(2, 3),
        shape_again=(2, 3),
        dtype="float32",
        dtype_again="float32",
        max_abs=0.5,
    )
    written = Mutation(region="blocks.1", tensor="state [3] float32", reader="", writer="aten.add_", inside=True)
    report = ParityReport(
        variant="B4c1@full full",
        tolerance=0.0,
        why="same order of sums: bitwise",
        num_tensors=40,
        differences=(TensorDifference(name="w", max_abs=1.0, max_rel=0.25, shape=(2, 3)),),
        num_recomputed=1234,
        recomputed=differs,
        mutations=(written,),
        faults=("torch stops: of necessity",),
        num_entered=4,
        num_runs=8,
        note="as a note",
    )
    assert not report.same
    text = render(parity_table([report]), "table", rich=False)
    expected = [
        "blocks.1: aten.add_ writes state [3] float32, and would again; move the write out of the region",
        "blocks.1: op 7 of its recomputation, in blocks.1.attn, aten.mm [2, 3] is off by 0.5",
        "torch stops: of necessity",
        "w [2, 3] is off by 1, 0.25 of its largest value",
        "as a note",
    ]
    assert [line.removeprefix("B4c1@full full: ") for line in text.splitlines()[-5:]] == expected
    assert "1,234" in text
    (row,) = [json.loads(line) for line in render(parity_table([report]), "jsonl", rich=False).splitlines()]
    assert (row["num_recomputed"], row["num_runs"], row["verdict"]) == (1234, 8, "differs")


@pytest.mark.parametrize("field", ["differences", "recomputed", "mutations", "faults"])
def test_any_one_finding_is_enough_to_differ(field: str) -> None:
    same = ParityReport(variant="v", tolerance=0.0, why="", num_tensors=1, differences=())
    assert same.same
    assert not dataclasses.replace(same, **{field: ("something",)}).same
