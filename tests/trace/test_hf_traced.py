"""transformers' own modules under the trace: every family in every mode, as large as they are, and as measured."""

import itertools
import json
import time
from contextlib import nullcontext

import pytest
import torch
from growth_checks import check_growth
from models.hf_configs import SMALL, small_run
from samples import measured_peak

from memplan.backends.simulated import simulate, trace_steps
from memplan.errors import MemplanError
from memplan.models.registry import model_spec
from memplan.spec import ModelSpec, RunSpec, StepSpec
from memplan.spec.device import CPU, card

transformers = pytest.importorskip("transformers")

H100 = card("h100-80g")
CKPTS = ("none", "full", "every:2", "selective")
LOSSES = ("full", "chunked:2", "chunked-ckpt:2")
PRECISIONS = ("fp32", "bf16", "bf16-mixed")
COMBINATIONS = [*itertools.product(CKPTS, LOSSES, PRECISIONS)]
REFUSED = {("gpt_oss", "selective"): "writes to a result of aten._grouped_mm"}
"""What transformers' code does not allow: gpt-oss adds its experts' biases in place to products that would be kept."""
ONE_EACH = {family: COMBINATIONS[7 * number % len(COMBINATIONS)] for number, family in enumerate(SMALL)}
"""Another combination for each family: 7 has no divisor in common with their number."""
TOWERS = ("gemma3", "molmo2")


def parameters_of(spec: ModelSpec) -> int:
    """Parameters of transformers' module on the meta device."""
    config = transformers.AutoConfig.for_model(**json.loads(spec.config))
    with torch.device("meta"):
        module = getattr(transformers, config.architectures[0])._from_config(config)
    return sum(parameter.numel() for parameter in module.parameters())


def check_story(family: str, ckpt: str, loss: str, precision: str) -> None:
    """A step of `family` is traced, its parameters are all there, and blocks of each list run again if asked to."""
    layers = 0 if family == "qwen3_5_text" else 2  # of which the first three are of one kind
    run = small_run(family, device=H100, layers=layers, ckpt=ckpt, loss=loss, precision=precision)
    story = trace_steps(run)
    trace = story.trace
    assert sum(size for _, size, _ in story.params) == parameters_of(run.model)
    assert len(story.block_paths) == 1 + (family in TOWERS)
    second = [trace.allocs[event] for event in trace.events[trace.marks[story.num_marks].at :] if event >= 0]
    assert {alloc.phase for alloc in second} >= {"forward", "loss", "backward"}
    again = {alloc.module for alloc in second if alloc.phase == "recompute"}
    for path in story.block_paths:
        assert any(module.startswith(path) for module in again) == (ckpt != "none")


@pytest.mark.parametrize("family", SMALL)
def test_every_family_is_traced(family: str) -> None:
    check_story(family, *ONE_EACH[family])


@pytest.mark.slow
@pytest.mark.parametrize("family", SMALL)
def test_every_family_is_traced_in_every_mode(family: str) -> None:
    failed = []
    for combination in COMBINATIONS:
        reason = REFUSED.get((family, combination[0]))
        try:
            with nullcontext() if reason is None else pytest.raises(MemplanError, match=reason):
                check_story(family, *combination)
        except Exception as error:
            failed.append(f"{family} {' '.join(combination)}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


def test_blocks_behind_an_unlike_one_are_grown() -> None:
    check_growth(small_run("deepseek_v3", device=H100, layers=6, ckpt="full", precision="bf16"))


DEPTHS = {
    "gemma2": 11,
    "gemma3": 17,
    "gemma3_text": 17,
    "gpt_oss": 11,
    "qwen3_5_text": 22,
}
"""Blocks that repeat five times, with a rest where there can be one."""


WHOLE = (("deepseek_v2", "every:2"), ("deepseek_v3", "every:2"))
"""What is not shown to repeat, and is traced whole: units of two behind a checkpointed block of another kind."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "ckpt"), [pair for pair in itertools.product(SMALL, CKPTS) if pair not in REFUSED])
def test_every_family_is_grown(family: str, ckpt: str) -> None:
    layers = DEPTHS.get(family, 7) * (2 if ckpt == "every:2" and DEPTHS.get(family, 7) % 2 else 1)
    run = small_run(family, device=H100, layers=layers, tower=14 if family in TOWERS else 0, ckpt=ckpt, batch=4,
                    chunks=2, precision="bf16-mixed")  # fmt: skip
    if (family, ckpt) in WHOLE:
        assert not simulate(run).grown
        return
    check_growth(run, lists=1 + (family in TOWERS))


FULL_SIZE = (
    "qwen3-4b", "llama-3.1-8b", "gemma-2-2b", "qwen3-30b-a3b", "moonlight-16b-a3b", "qwen3.5-0.8b", "molmo2-4b",
    "molmo2-4b-hf", "gemma-3-4b", "gpt-oss-20b", "mixtral-8x7b", "olmo-2-7b", "phi-3-mini", "pythia-1b", "bert-base",
    "vit-base", "siglip2-so400m",
)  # fmt: skip


def full_size(name: str, impl: str | None = None) -> RunSpec:
    """The usual step of a full-size model."""
    spec = model_spec(name, impl=impl)
    workload = spec.usual_workload(spec.images)
    step = StepSpec(
        batch=1, seq=spec.seq, images=spec.images, workload=workload, ckpt="full", attention=spec.usual_attention,
        precision="bf16",
    )  # fmt: skip
    return RunSpec(model=spec, step=step, device=H100)


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_size_takes_seconds(name: str) -> None:
    run = full_size(name, "reference" if name == "molmo2-4b" else "hf")
    start = time.process_time()
    answer = simulate(run)
    assert answer.grown
    assert time.process_time() - start < (40 if name == "qwen3.5-0.8b" else 10)
    assert answer.params_total == parameters_of(run.model) if run.model.impl == "hf" else 4_461_913_040


@pytest.mark.slow
@pytest.mark.parametrize("family", SMALL)
def test_what_is_traced_for_the_cpu_is_what_is_measured(family: str) -> None:
    for ckpt, precision, chunks in (("none", "fp32", 1), ("full", "bf16-mixed", 1), ("selective", "bf16", 2)):
        if (family, ckpt) in REFUSED:
            continue
        run = small_run(family, device=CPU, batch=4, chunks=chunks, ckpt=ckpt, precision=precision)
        traced, measured = simulate(run).steps.steady.peak_allocated_bytes, measured_peak(run)
        assert traced == pytest.approx(measured, rel=0.015 if "bf16" in precision else 0.001)
