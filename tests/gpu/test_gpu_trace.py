"""Steps of small models on a real card: what the trace says of them, which attention runs, what waits on the host."""

import gc
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
WITHIN = 0.02


def run_of(ckpt: str, *, model: str = "tiny-wide", precision: str = "bf16", **step: Any) -> Any:
    """A small run on the card that is here, as far as its rules are known."""
    from gpu_cards import card_here

    from memplan.models.registry import model_spec
    from memplan.spec import RunSpec, StepSpec

    fields = {"batch": 4, "seq": 512, "ckpt": ckpt, "precision": precision} | step
    return RunSpec(model=model_spec(model), step=StepSpec(**fields), device=card_here())


def measured(run: Any) -> tuple[int, int, list[float]]:
    """Peaks of a first and a second step of `run`, and their losses, workspaces of a fresh process included."""
    import torch

    import memplan
    from memplan.step.builder import build_step

    gc.collect()
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    clear()
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_allocated()
    step = build_step(run, torch.device("cuda"))
    peaks, losses = [], []
    for _ in range(2):
        with memplan.PeakWindow() as window:
            losses.append(step(window.mark))
        peaks.append(window.allocated_bytes - before_bytes)
    return peaks[0], peaks[1], losses


def holds(ckpt: str, **more: Any) -> None:
    """Asserts that the trace of a small step is within 2 % of its measurement, first and later steps alike."""
    from memplan.backends.simulated import simulate

    run = run_of(ckpt, **more)
    traced = simulate(run).steps
    first, later, losses = measured(run)
    told = {
        "first": (traced.first_step.peak_allocated_bytes, first),
        "later": (traced.steady.peak_allocated_bytes, later),
    }
    assert losses[1] < losses[0], losses
    for name, (said, seen) in told.items():
        assert abs(said / seen - 1) <= WITHIN, f"{name} step: traced {said}, measured {seen}, {said / seen - 1:+.2%}"


def test_the_trace_of_a_plain_step_holds() -> None:
    holds("none")


def test_the_trace_of_a_checkpointed_step_holds() -> None:
    holds("full", chunks=2)


def test_the_trace_of_a_selective_step_holds() -> None:
    holds("selective", precision="bf16-mixed")


def test_the_trace_of_every_second_block_and_a_chunked_loss_holds() -> None:
    holds("every:2", loss="chunked:4", precision="fp32")


def test_the_recomputation_takes_the_kernel_of_forward() -> None:
    """Forward under `sdpa_kernel(MATH)`, backward outside of it, where torch alone would take another kernel."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from memplan.models.factory import build_model
    from memplan.models.registry import model_spec
    from memplan.step.region import Region

    with torch.device("cuda"):
        model = build_model(model_spec("tiny"))
        hidden = torch.randn(2, 64, 128, requires_grad=True)
        rope = model.decoder.rope_tables(hidden)
    block = model.decoder.blocks[0]
    region = Region("decoder.blocks.0", block.forward)
    with sdpa_kernel([SDPBackend.MATH]), torch.autocast("cuda", torch.bfloat16):
        out = region(hidden, rope, None)
    out.float().sum().backward()
    assert bool(torch.isfinite(hidden.grad).all())


def test_checkpointing_and_offloading_change_no_number() -> None:
    losses = {ckpt: measured(run_of(ckpt))[2] for ckpt in ("none", "full", "offload")}
    assert losses["full"] == losses["none"]
    assert losses["offload"] == losses["none"]


def test_offloading_moves_memory_to_the_host_on_a_stream_of_its_own() -> None:
    import torch

    from memplan.step.builder import build_step

    plain = measured(run_of("none", seq=1024))[1]
    moved = measured(run_of("offload", seq=1024))[1]
    assert moved < plain
    step = build_step(run_of("offload", seq=1024), torch.device("cuda"))
    step()
    assert step.offload is not None
    assert step.offload.peak_host_bytes > 0
    assert step.offload._stream is not None
    assert step.offload._stream != torch.cuda.default_stream()
