"""Optimizers, precisions and updates in the trace: what the CPU measures, and the optimizer's share by hand.

All on `tiny` with one block: a table of 1024 x 128 that is the head too, seven matrices, three vectors.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch
from samples import asked, measured_peak

from memplan.backends.simulated import simulate
from memplan.record.trace import TraceReport
from memplan.spec import RunSpec
from memplan.spec.device import CPU, card
from memplan.step.builder import build_step

H100 = card("h100-80g")
TOTAL = 315_776
"""Parameters."""
IN_BLOCK = 184_320
"""Those of the block's matrices."""
NUM = 11
"""Tensors, each of which has a counter of its own in AdamW."""
SET_UPS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd-momentum": ("B1c1", {"optimizer": "sgd-momentum"}),
    "adafactor": ("B1c1", {"optimizer": "adafactor"}),
    "muon": ("B1c1", {"optimizer": "muon"}),
    "fp16": ("B1c1", {"precision": "fp16"}),
    "fp16-mixed": ("B2c2", {"precision": "fp16-mixed", "clip": 1.0}),
    "bf16-masters": ("B1c1", {"precision": "bf16-masters"}),
    "fp16-masters": ("B2c2@full", {"precision": "fp16-masters", "clip": 1.0}),
    "in backward": ("B1c1", {"update": "backward"}),
    "in backward, with copies": ("B1c1@full", {"update": "backward", "precision": "bf16-masters"}),
}


def run_of(rung: str = "B1c1", **levers: Any) -> RunSpec:
    """One sample of 8 tokens, so that the optimizer's own temporaries count."""
    run = asked("tiny", rung, **({"seq": 8, "precision": "fp32"} | levers))
    decoder = dataclasses.replace(run.model.decoder, num_layers=1)
    return dataclasses.replace(run, model=dataclasses.replace(run.model, decoder=decoder))


def traced(**levers: Any) -> TraceReport:
    return simulate(run_of(**levers)).steps.steady


@pytest.mark.parametrize("name", SET_UPS)
def test_the_trace_is_what_the_cpu_measures(name: str) -> None:
    rung, levers = SET_UPS[name]
    run = run_of(rung, **levers)
    assert simulate(run).steps.steady.peak_allocated_bytes == measured_peak(run)


def test_what_each_optimizer_keeps_is_known_by_hand() -> None:
    shapes = [tuple(param.shape) for param in build_step(run_of(), torch.device("cpu")).model.parameters()]
    assert (len(shapes), sum(math.prod(shape) for shape in shapes)) == (NUM, TOTAL)
    kept = {
        "sgd": 0,
        "sgd-momentum": 4 * TOTAL,
        "adamw": 8 * TOTAL + 4 * NUM,
        "adafactor": 4 * sum(sum(shape) for shape in shapes) + 4 * NUM,
        "muon": 4 * IN_BLOCK + 8 * (TOTAL - IN_BLOCK) + 4 * 4,
    }
    assert {optimizer: traced(optimizer=optimizer).breakdown.optimizer for optimizer in kept} == kept


@pytest.mark.parametrize(("precision", "scaler"), [("bf16-masters", 0), ("fp16-masters", 8)])
def test_masters_are_three_copies_in_fp32(precision: str, scaler: int) -> None:
    """The scaler adds its scale and how long it has held."""
    assert traced(precision=precision).breakdown.optimizer == 12 * TOTAL + 4 * NUM + scaler
    assert traced(precision=precision, optimizer="sgd").breakdown.optimizer == 4 * TOTAL + scaler


def test_all_fp32_gradients_are_there_at_once_beside_one_in_low_precision() -> None:
    """The largest cast is that of the last matrix, behind which only the final norm's gradient waits; and the loss."""
    report = traced(precision="bf16-masters")
    assert report.phase == "optimizer"
    assert report.breakdown.grads == 2 * (128 * 352 + 128)
    assert report.breakdown.temps == 4 * (TOTAL - 128) + 4
    early = traced(precision="bf16-masters", update="backward")
    assert "optimizer" not in early.phases
    assert early.breakdown.grads <= 2 * 1024 * 128


def test_a_card_keeps_no_counter_of_a_loop_wherever_it_steps() -> None:
    """CUDA's loops count on the host, in the optimizer's phase and in backward; the fused one on the card."""
    for update in ("step", "backward"):
        assert traced(device=H100, optimizer="adamw-loop", update=update).breakdown.optimizer == 8 * TOTAL
        assert traced(device=H100, update=update).breakdown.optimizer == 8 * TOTAL + 512 * NUM
        assert traced(device=CPU, optimizer="adamw-loop", update=update).breakdown.optimizer == 8 * TOTAL + 4 * NUM


def test_a_scaled_step_waits_for_its_check() -> None:
    """Fused AdamW reads the check on the device; every other optimizer asks the host first. The loss is read too."""
    for optimizer, num_waits in (("adamw", 1), ("adamw-foreach", 2)):
        assert len(traced(device=H100, precision="fp16-mixed", optimizer=optimizer).syncs) == num_waits


def test_autocast_to_fp16_is_autocast_to_bf16_with_a_scaler_on_a_card() -> None:
    """The same lists and casts, of as many bytes; the scaler's numbers take a block of 512 bytes each."""
    low, lower = (traced(device=H100, seq=64, precision=f"{kind}-mixed").phases for kind in ("bf16", "fp16"))
    assert low["forward"].allocated_bytes + 2 * 512 == lower["forward"].allocated_bytes
    assert 2 * 512 <= lower["backward"].allocated_bytes - low["backward"].allocated_bytes <= 8 * 512


@pytest.mark.slow
@pytest.mark.parametrize("levers", [{"optimizer": "adafactor"}, {"update": "backward"}])
def test_few_blocks_tell_of_all(levers: dict[str, str]) -> None:
    run = asked("smollm2-135m", "B1c1@full", device=H100, seq=64, precision="bf16", **levers)
    few, whole = simulate(run), simulate(run, grow_blocks=False)
    assert few.grown
    assert few.steps.steady.phases == whole.steps.steady.phases
