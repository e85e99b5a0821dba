"""Precisions, dropout, chunks and offloading over the ledger, equal to the trace."""

import itertools
from typing import Any

import pytest
from samples import run_of
from update_runs import on_card, peaks_by_ledger, peaks_by_trace

from memplan.backends.simulated import simulate
from memplan.estimate.reading import peak_bytes
from memplan.estimate.step import write_step
from memplan.spec.step import PRECISIONS

STEPS: dict[str, dict[str, Any]] = {
    "scaled and clipped": {"precision": "fp16", "clip": 1.0, "optimizer": "adamw-foreach", "lora": "8:q+v"},
    "scaled under autocast, dropped out": {"precision": "fp16-mixed", "dropout": 0.1, "ckpt": "full"},
    "fp16 scores": {"precision": "fp16", "attention": "eager", "ckpt": "full", "loss": "fused", "batch": 4, "seq": 256},
    "logits held under autocast": {"precision": "bf16-mixed", "loss": "held", "ckpt": "full"},
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_equals_the_trace_in_every_phase(name: str) -> None:
    run = on_card(**STEPS[name])
    assert peaks_by_ledger(run) == peaks_by_trace(run)


def test_what_waits_on_the_host_equals_the_trace_on_either_side() -> None:
    run = on_card(precision="bf16", ckpt="offload", batch=8, seq=64)
    tape, traced = write_step(run), simulate(run).steps.steady
    assert peak_bytes(tape) == traced.peak_allocated_bytes
    assert tape.peak_host_bytes == traced.host_bytes > 0
    assert tape.host_bytes == 0


def test_many_chunks_keep_their_losses_and_nothing_else() -> None:
    two, eight = (write_step(run_of(batch=chunks, chunks=chunks)) for chunks in (2, 8))
    samples = 2 * 8 * 64 * 6
    assert peak_bytes(eight) - peak_bytes(two) == 4 * 6 + samples


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "ckpt", "more"),
    list(
        itertools.product(
            PRECISIONS,
            ["none", "full", "every:2", "selective", "offload"],
            [{}, {"dropout": 0.1}, {"chunks": 4, "clip": 1.0}, {"attention": "eager"}, {"lora": "8:q+down"}],
        )
    ),
)
def test_every_precision_equals_the_trace_on_either_device(precision: str, ckpt: str, more: dict[str, Any]) -> None:
    """Of four blocks, told by three, it may be one between that has most fetched: off by what two adapters differ."""
    off = 5e-4 if ckpt == "offload" and "lora" in more else 0
    for run in (run_of(precision=precision, ckpt=ckpt, **more), on_card(precision=precision, ckpt=ckpt, **more)):
        assert peaks_by_ledger(run) == pytest.approx(peaks_by_trace(run), rel=off, abs=0)
