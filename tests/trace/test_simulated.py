"""The trace against the other witnesses, and what it says of a card that is too small."""

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from samples import asked, measured_peak
from torch import nn
from torch.cuda._memory_viz import trace as trace_text
from torch.cuda._memory_viz import trace_plot

import memplan
from memplan.api import traced_fit
from memplan.backends.simulated import kept_per_sample, simulate
from memplan.cli import main
from memplan.errors import MemplanError
from memplan.estimate import estimate
from memplan.launch.events import Events
from memplan.launch.imagine import imagine
from memplan.record.trace import TracedSteps
from memplan.report.trace_page import trace_json, trace_page
from memplan.spec.device import card
from memplan.step.builder import build_step
from memplan.trace.replay import timeline
from memplan.units import GIB, KIB, MIB

HIDDEN = 200 * KIB
"""Bytes inside CPU ops that no tensor shows: the attention kernel's buffers. Five per thousand of the smallest peak."""


@pytest.mark.parametrize("loss", ["full", pytest.param("chunked:4", marks=pytest.mark.slow), "chunked-ckpt:4"])
@pytest.mark.parametrize("rung", ["B4c1", "B4c2@full", "B4c1@every:2"])
@pytest.mark.parametrize("name", ["tiny", pytest.param("tiny-wide", marks=pytest.mark.slow)])
def test_traced_equals_measured_on_the_cpu(name: str, rung: str, loss: str) -> None:
    run = asked(name, rung, seq=64, loss=loss)
    traced = simulate(run).steps.steady.peak_allocated_bytes
    assert abs(traced - measured_peak(run)) <= 64, "scalars of a loss"


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-molmo2"])
def test_other_families_are_traced_to_the_kilobyte(name: str) -> None:
    run = asked(name, "B2c1@full")
    assert abs(simulate(run).steps.steady.peak_allocated_bytes - measured_peak(run)) <= KIB


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
def test_traced_equals_estimated_by_category(precision: str) -> None:
    """On the CPU's rules every category of the peak, not just their sum."""
    run = asked("tiny-wide", "B4c1", precision=precision)
    traced, estimated = simulate(run).steps.steady, estimate(run)
    assert traced.phase == estimated.peak.phase
    for name, size in estimated.peak.breakdown.to_dict().items():
        assert abs(traced.breakdown.to_dict()[name] - size) <= KIB, name


@pytest.mark.parametrize(
    ("model", "rung", "changes"),
    [
        ("tiny", "B4c1", {}),
        ("tiny-wide", "B4c2@full", {"precision": "bf16-mixed"}),
        ("tiny-wide", "B4c1", {"loss": "chunked-ckpt:2"}),
        ("qwen3-4b", "B4c1@every:2", {"precision": "bf16"}),
    ],
)
def test_a_sample_keeps_the_same_in_both_witnesses(model: str, rung: str, changes: dict[str, object]) -> None:
    run = asked(model, rung, **changes)
    estimated = estimate(run)
    kept = kept_per_sample(run, run.model.decoder.vocab)
    assert kept == (estimated.per_sample_bytes, estimated.logits_per_sample_bytes)


def test_the_categories_add_up_to_the_peak_of_a_card() -> None:
    report = simulate(asked("tiny", "B4c2@full", device=card("h100-80g"), precision="bf16-mixed")).steps.steady
    assert report.breakdown.total_bytes == report.peak_allocated_bytes <= report.peak_reserved_bytes
    assert max(totals.allocated_bytes for totals in report.phases.values()) == report.peak_allocated_bytes
    assert sum(tensor.total_bytes for tensor in report.alive) <= report.peak_allocated_bytes


def test_full_size_models_are_traced_near_their_estimate() -> None:
    """Within a hundredth: what a card rounds, keeps unsplit and takes for its workspaces, which formulas leave out."""
    run = asked("qwen3-4b", "B4c1@full", device=card("h100-80g"), seq=1100, precision="bf16")
    traced = simulate(run)
    assert traced.grown
    assert traced.steps.steady.peak_allocated_bytes > 30 * GIB
    assert estimate(run).peak_allocated_bytes / traced.steps.steady.peak_allocated_bytes == pytest.approx(1, abs=0.01)


def test_the_first_step_is_told_apart_from_later_ones() -> None:
    """Its forward and backward run before the optimizer has made its two moments."""
    run = asked("tiny-wide", "B2c1", seq=16)
    steps = simulate(run).steps
    moments = 2 * sum(4 * parameter.numel() for parameter in build_step(run, torch.device("cpu")).model.parameters())
    first, steady = (report.phases["backward"].allocated_bytes for report in (steps.first_step, steps.steady))
    assert steady - first == pytest.approx(moments, rel=0.001)
    assert steps.first_step.phases["optimizer"].allocated_bytes == steps.steady.phases["optimizer"].allocated_bytes


@pytest.mark.parametrize("name", ["qwen3-4b", "molmo2-4b-hf", "gpt2", "tiny-molmo2"])
def test_parameters_are_counted_from_a_few_blocks(name: str) -> None:
    run = asked(name, "B1c1", seq=16, images=0, precision="bf16")
    traced, estimated = simulate(run), estimate(run)
    assert (traced.params_total, traced.params_trainable) == (estimated.params_total, estimated.params_trainable)


def test_batch_and_length_do_not_change_the_story() -> None:
    small, large = (
        simulate(asked("tiny", rung, device=card("h100-80g"), seq=seq)) for rung, seq in (("B1c1", 16), ("B64c1", 1024))
    )
    assert small.steps.steady.syncs == large.steps.steady.syncs
    assert len(small.steps.timeline.phases) == len(large.steps.timeline.phases)


def test_a_card_that_is_too_small_says_where_and_how_much() -> None:
    run = asked("qwen3-4b", "B4c1", device=card("rtx-4090"), seq=1100, precision="bf16")
    traced = simulate(run)
    lacking = traced.steps.out_of_memory
    assert lacking is not None
    assert lacking.reserved_bytes <= (run.device.usable_bytes or 0) < traced.steps.needed_bytes
    assert lacking.op.startswith("aten.")


def test_the_context_is_taken_from_the_card(tmp_path: Path) -> None:
    """The same card with and without a context that leaves a MiB less than the step allocates."""
    run = asked("tiny", "B4c2@full", device=card("h100-80g"))
    free = simulate(run).steps
    capacity_bytes = max(report.peak_reserved_bytes for report in (free.first_step, free.steady))
    for context_bytes in (0, capacity_bytes - free.needed_bytes + MIB):
        device = dataclasses.replace(card("h100-80g"), capacity_bytes=capacity_bytes, context_bytes=context_bytes)
        traced = simulate(dataclasses.replace(run, device=device))
        fit = traced_fit(traced.steps, None)
        page = trace_page(traced.steps, fit, heading=[""])
        assert fit.limit_bytes == device.usable_bytes == capacity_bytes - context_bytes
        assert fit.fits is (context_bytes == 0) is (traced.steps.out_of_memory is None)
        assert trace_json(traced, fit)["context_bytes"] == context_bytes
        assert ("CUDA's own context takes" in page) is (context_bytes > 0)
        with (tmp_path / "events").open("w", encoding="utf-8") as file:
            end = imagine(traced.run, Events(file))
        assert end["status"] == ("oom" if context_bytes else "ok")
        assert end["error"] is None or end["error"].endswith("beside it")


def test_user_code_is_traced_without_memory() -> None:
    """A linear layer of 64 GiB, its gradient, and the peak's reset between two steps."""
    with memplan.tracing(gpu="a100-80g") as t:
        layer = nn.Linear(131_072, 131_072, bias=False)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(2):
            t.reset_peak()
            layer(torch.randn(4, 131_072)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    report = t.report()
    weight = 4 * 131_072**2
    assert weight == 64 * GIB
    assert 2 * weight <= t.peak_allocated_bytes < 2 * weight + 100 * MIB
    assert t.peak_reserved_bytes >= t.peak_allocated_bytes
    assert report.phase in ("backward", "optimizer")
    assert [(tensor.category, tensor.num_bytes) for tensor in t.alive_at_peak()[:2]] == [
        ("params", weight),
        ("grads", weight),
    ] or {tensor.category for tensor in t.alive_at_peak()[:2]} == {"params", "grads"}
    assert report.out_of_memory is not None


def test_reads_of_values_are_counted_with_file_and_line() -> None:
    with memplan.tracing(gpu=None) as t:
        x = torch.ones(3)
        assert x.sum().item() == 1.0
        if x.sum() > 0:
            x = x + 1
    assert all("test_simulated.py:" in sync.where for sync in t.report().syncs)
    assert sum(sync.count for sync in t.report().syncs) == 2


def test_a_shape_that_depends_on_values_names_the_line() -> None:
    with memplan.tracing(gpu=None), pytest.raises(MemplanError, match=r"test_simulated\.py:\d+ calls aten\.nonzero"):
        torch.nonzero(torch.ones(3))


def test_an_error_in_user_code_is_its_own() -> None:
    with memplan.tracing(gpu=None), pytest.raises(ZeroDivisionError):
        _ = 1 / 0


def test_views_and_in_place_ops_allocate_nothing_and_resizes_do() -> None:
    with memplan.tracing(gpu=None) as t:
        x = torch.zeros(256)
        before = len(t.trace.allocs)
        x.view(16, 16).t().mul_(2).add_(1)
        x[3:5].zero_()
        assert len(t.trace.allocs) == before
        x.resize_(512)
        assert [alloc.num_bytes for alloc in t.trace.allocs] == [1024, 2048]
        del x
    assert t.trace.events == [0, ~0, 1, ~1]


def test_real_tensors_are_recorded_as_fake_ones_are() -> None:
    from memplan.trace.recorder import Recorder

    def work() -> None:
        x = torch.ones(64, 64, requires_grad=True)
        (x @ x).relu().sum().backward()

    with Recorder() as real:
        work()
    with memplan.tracing(gpu=None, frames=False) as t:
        work()
    assert [alloc.num_bytes for alloc in real.trace.allocs] == [alloc.num_bytes for alloc in t.trace.allocs]
    assert real.trace.events == t.trace.events


def test_a_snapshot_holds_segments_blocks_and_the_history_with_frames(tmp_path: Path) -> None:
    with memplan.tracing(gpu="h100-80g") as t:
        kept = torch.zeros(1024, 1024)
        (kept + 1).sum()
    t.save_snapshot(tmp_path / "step.pickle")
    snapshot = pickle.loads((tmp_path / "step.pickle").read_bytes())
    assert {"segments", "device_traces"} <= snapshot.keys()
    history = snapshot["device_traces"][0]
    assert history[0]["action"] == "alloc" and history[0]["size"] == 4 * MIB
    assert any(frame["filename"] == __file__ for frame in history[0]["frames"])
    active = [block for segment in snapshot["segments"] for block in segment["blocks"] if block["state"] != "inactive"]
    assert sum(block["requested_size"] for block in active) == 4 * MIB
    for segment in snapshot["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    # torch's own reader of snapshots, and the page that it makes of one.
    assert "seg_0[0:4.0MiB]" in trace_text(snapshot)
    assert "viz" in trace_plot(snapshot)
    with pytest.raises(MemplanError, match="cannot be written"):
        t.save_snapshot(tmp_path / "no" / "step.pickle")


def test_the_verb_answers_in_json_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "step.png"
    words = ["trace", "--model", "tiny", "--rung", "B4c2@full", "--gate", "1GiB", "-o", "json", "--plot", str(picture)]
    done = subprocess.run([sys.executable, "-m", "memplan", *words], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["source"] == "traced" and answer["fits"] is True
    assert sum(answer["breakdown"].values()) == answer["peak"]["allocated_bytes"]
    assert answer["alive_at_peak"] and answer["phases"].keys() >= {"forward", "loss", "backward", "optimizer"}
    assert picture.stat().st_size > 10_000


STEPS = """
import torch
from torch import nn

def make_step():
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 512, dtype=torch.bfloat16)
    def step():
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step

def raises():
    def step():
        raise KeyError("my own")
    return step

def selects():
    x = torch.randn(10)
    return lambda: x[x > 0]

def number():
    return 3

def on_cuda():
    return nn.Linear(2, 2).cuda
"""


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    (tmp_path / "my_steps.py").write_text(STEPS)
    return tmp_path


def traced_entry(folder: Path, entry: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memplan", "trace", "--entry", entry, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def test_a_step_of_ones_own_is_traced_from_the_shell(steps: Path) -> None:
    done = traced_entry(steps, "my_steps:make_step", "--gpu", "rtx-4090", "-o", "json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    weights = 2 * (2 * 512 * 2048 + 2048 + 512)  # bf16
    assert answer["breakdown"]["params"] == pytest.approx(weights, rel=0.001)
    assert answer["breakdown"]["optimizer"] == pytest.approx(2 * weights, rel=0.01)
    assert list(answer["phases"]) == ["forward", "backward", "optimizer"]
    assert answer["fits"] is True


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("my_steps:raises", "The step raised KeyError at my_steps.py:17: 'my own'."),
        ("my_steps:selects", "my_steps.py:22 calls aten.index.Tensor, whose result's shape depends on the values"),
        (
            "my_steps:on_cuda",
            'Leave .cuda() and device="cuda" out: inside a trace every tensor stands for one on the card.',
        ),
        ("my_steps:number", "make_step returned int, which cannot be called."),
        ("my_steps:make_stepp", "my_steps has no function 'make_stepp'. Did you mean make_step"),
        ("my_step:make_step", "There is no module 'my_step' here."),
        ("my_steps", "'my_steps' names no function. Type the module and a function in it, like pkg.mod:make."),
    ],
)
def test_what_is_wrong_with_a_step_is_one_sentence(
    steps: Path, entry: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(steps)
    monkeypatch.syspath_prepend(str(steps))
    monkeypatch.delitem(sys.modules, "my_steps", raising=False)
    monkeypatch.setattr(sys, "argv", ["memplan", "trace", "--entry", entry])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told


def test_converted_modules_keep_their_ties() -> None:
    with memplan.tracing(gpu=None):
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        both = nn.ModuleList([first, second]).to(torch.bfloat16)
        assert first.weight.dtype is torch.bfloat16
        assert first.weight is second.weight
        assert len(list(both.parameters())) == 3


@pytest.mark.slow
def test_a_full_size_trace_takes_little_host_memory() -> None:
    """Molmo2-4B in six chunks, tower traced block by block, in a process of its own: under 1.5 GiB."""
    code = (
        "import resource, sys; sys.path.insert(0, 'tests'); from samples import asked, measured_peak;"
        "from memplan.backends.simulated import kept_per_sample, simulate; from memplan.spec.device import card;"
        "simulate(asked('molmo2-4b', 'B12c6', device=card('h100-80g')));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1.5 * GIB


def test_a_card_that_makes_the_allocator_give_its_cache_back_is_said() -> None:
    """Two tensors one after the other that share no segment: together more than the card has."""
    card_60 = dataclasses.replace(card("h100-80g"), capacity_bytes=60 * MIB, context_bytes=0)
    with memplan.tracing(device=card_60, frames=False) as t:
        for num_mib in (30, 50):
            kept = torch.empty(num_mib * MIB, dtype=torch.uint8)
            del kept
    report = t.report()
    assert (report.peak_reserved_bytes, report.num_alloc_retries, report.out_of_memory) == (80 * MIB, 1, None)
    steps = TracedSteps(device=card_60, first_step=report, steady=report, timeline=timeline(t.replayed()))
    page = trace_page(steps, traced_fit(steps, None), heading=[""])
    assert "h100-80g has 60.00 MiB: the allocator gives back all it keeps once a step, which is slow" in page
    assert steps.to_dict()["num_alloc_retries"] == 1
