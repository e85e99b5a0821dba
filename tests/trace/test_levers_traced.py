"""Every lever priced by the trace: to the byte what the CPU's allocator says, and on a card what stays off it."""

import dataclasses
from typing import Any

import pytest
from samples import asked, measured_peak

from memplan.backends.simulated import simulate
from memplan.spec import RunSpec
from memplan.spec.device import card

LEVERS: dict[str, tuple[str, dict[str, Any]]] = {
    "first:2": ("B4c2@first:2", {}),
    "submodule": ("B4c2@submodule", {}),
    "offload": ("B4c2@offload", {}),
    "lora": ("B4c2", {"lora": "8"}),
    "lora and checkpointing": ("B4c2@full", {"lora": "8:q+v", "dropout": 0.1}),
    "dropout": ("B4c2", {"dropout": 0.1}),
    "prefix and suffix": ("B4c2", {"workload": "prefix-suffix", "suffix": 16}),
    "prefix and suffix, checkpointed": ("B4c2@full", {"workload": "prefix-suffix", "suffix": 16}),
}

RNG_STATE_BYTES = 5056
"""State of torch's CPU generator, which a checkpointed block keeps to draw the same numbers again. A trace has no such
state; on a card it is the host's. Source: CPUGeneratorImplState, aten/src/ATen/CPUGeneratorImpl.cpp, torch 2.13."""


def run_of(lever: str, model: str = "tiny", **step: Any) -> RunSpec:
    rung, levers = LEVERS[lever]
    return asked(model, rung, **({"seq": 64, "precision": "fp32"} | levers | step))


BY_DEFAULT = ("offload", "lora and checkpointing", "prefix and suffix, checkpointed")


@pytest.mark.parametrize(
    "lever", [pytest.param(lever, marks=() if lever in BY_DEFAULT else pytest.mark.slow) for lever in LEVERS]
)
def test_the_trace_is_what_the_cpu_measures(lever: str) -> None:
    run = run_of(lever)
    untold = 4 * RNG_STATE_BYTES if run.step.dropout and run.step.ckpt == "full" else 0
    assert simulate(run).steps.steady.peak_allocated_bytes + untold == measured_peak(run)


def on_card(run: RunSpec) -> RunSpec:
    return dataclasses.replace(run, device=card("h100-80g"))


def test_what_waits_on_the_host_is_not_on_the_card() -> None:
    """Eight blocks: the card holds two of them in backward, the host all; both in the trace's answer."""
    plain, offload = (
        simulate(on_card(asked("smollm2-135m", f"B2c1@{ckpt}", seq=512, precision="bf16", loss="chunked-ckpt:8")))
        for ckpt in ("none", "offload")
    )
    kept = plain.steps.steady.breakdown.activations
    assert plain.steps.steady.host_bytes == 0
    assert offload.steps.steady.host_bytes > 0.8 * kept
    assert offload.steps.needed_bytes < plain.steps.needed_bytes - 0.5 * kept
    assert offload.to_dict()["host_bytes"] == offload.steps.steady.host_bytes


@pytest.mark.parametrize("ckpt", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_equal_blocks_are_told_from_a_few_with_a_cache_too(ckpt: str) -> None:
    run = on_card(asked("smollm2-135m", f"B2c1@{ckpt}", seq=128, precision="bf16", workload="prefix-suffix", suffix=16))
    few, whole = simulate(run), simulate(run, grow_blocks=False)
    assert few.grown
    assert few.steps.steady == whole.steps.steady
