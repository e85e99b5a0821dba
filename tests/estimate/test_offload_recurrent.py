"""Loops of recurrent layers whose tensors wait on the host: every round of them, told one by one or by a few."""

import pytest
from family_runs import config_run
from models.hf_configs import SMALL

from memplan.estimate import estimate
from memplan.estimate.step import write_step


@pytest.mark.parametrize(
    ("seq", "device"),
    [(128, "h100-80g"), *(pytest.param(640, name, marks=pytest.mark.slow) for name in ("h100-80g", "cpu"))],
)
def test_what_rounds_keep_waits_on_the_host(seq: int, device: str) -> None:
    pytest.importorskip("transformers")
    from memplan.backends.simulated import simulate

    run = config_run(SMALL["qwen3_5_text"], device, seq=seq, batch=2, ckpt="offload")
    traced = simulate(run).steps.steady
    assert estimate(run).peak_allocated_bytes == pytest.approx(traced.peak_allocated_bytes, rel=0.002)
    assert write_step(run).peak_host_bytes == traced.host_bytes > 0
