"""The Trainer's callback: by events as the Trainer sends them, on a stand-in for CUDA, and in a real Trainer."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

import memplan
from memplan.backends import meters, peak_window
from memplan.backends.meters import Meter, Stretch
from memplan.units import GIB

PeakWindowCallback = memplan.PeakWindowCallback
ARGS = SimpleNamespace(device=None, world_size=1, process_index=0, torch_compile=False)


class ScriptedMeter(Meter):
    """A device whose allocator says what the test wrote down."""

    name = "cuda:0"

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.retries = 0

    def _read(self) -> Stretch:
        most, self.most = self.most, 0
        peaks = {"allocated_bytes": most, "reserved_bytes": 2 * most}
        return Stretch(peaks=peaks, counters={"num_alloc_retries": self.retries})

    def _go_on(self, *, watched: bool) -> None:
        self.most = 0


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> ScriptedMeter:
    scripted = ScriptedMeter()
    monkeypatch.setattr(peak_window, "meter_of", lambda device: scripted)
    return scripted


class Loop:
    """Events in the Trainer's order."""

    def __init__(self, callback: Any, meter: ScriptedMeter, args: Any = ARGS) -> None:
        self.callback, self.meter, self.args = callback, meter, args
        self.state = SimpleNamespace(global_step=0, log_history=[])
        callback.on_train_begin(args, self.state, None, model=None)

    def step(self, *sizes: int, retries: int = 0) -> None:
        """A step with the given peaks of forward, optimizer."""
        self.callback.on_step_begin(self.args, self.state, None)
        self.meter.most = sizes[0]
        self.meter.retries += retries
        self.callback.on_pre_optimizer_step(self.args, self.state, None)
        self.meter.most = sizes[1]
        self.callback.on_optimizer_step(self.args, self.state, None)
        self.state.global_step += 1
        self.callback.on_step_end(self.args, self.state, None)

    def log(self, **logs: float) -> dict[str, Any]:
        """What the trackers behind the callback see."""
        told = {"loss": 1.0} | logs
        self.state.log_history.append({**told, "step": self.state.global_step})
        self.callback.on_log(self.args, self.state, None, logs=told)
        return told


def test_a_logging_tells_the_largest_of_the_steps_since_the_last_one(meter: ScriptedMeter) -> None:
    loop = Loop(PeakWindowCallback(), meter)
    loop.step(3 * GIB, GIB)
    loop.step(2 * GIB, 4 * GIB)
    first = loop.log()
    loop.step(GIB, GIB)
    second = loop.log()
    assert first["peak_allocated_gib"] == 4.0
    assert first["peak_reserved_gib"] == 8.0
    assert (first["peak_forward_gib"], first["peak_optimizer_gib"]) == (3.0, 4.0)
    assert second["peak_allocated_gib"] == 1.0
    assert loop.state.log_history[0]["peak_allocated_gib"] == 4.0


def test_a_small_models_peaks_are_logged_too(meter: ScriptedMeter) -> None:
    loop = Loop(PeakWindowCallback(), meter)
    loop.step(GIB // 8192, GIB // 4096)
    logged = loop.log()
    assert logged["peak_forward_gib"] == pytest.approx(1 / 8192, rel=0.01)
    assert logged["peak_allocated_gib"] == logged["peak_optimizer_gib"] == pytest.approx(1 / 4096, rel=0.01)


def test_what_is_needed_between_steps_is_no_steps_peak(meter: ScriptedMeter) -> None:
    loop = Loop(PeakWindowCallback(), meter)
    loop.step(GIB, GIB)
    meter.most = 9 * GIB  # an evaluation
    loop.step(GIB, GIB)
    assert loop.log()["peak_allocated_gib"] == 1.0
    assert loop.callback.window.lifetime_allocated_bytes == 9 * GIB


def test_f12_retries_are_warned_of_where_they_happen_and_never_again(meter: ScriptedMeter) -> None:
    meter.retries = 40  # of before the training
    loop = Loop(PeakWindowCallback(), meter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.step(GIB, GIB)
        assert loop.log()["num_alloc_retries"] == 0
    loop.step(GIB, GIB, retries=2)
    loop.step(GIB, GIB)
    with pytest.warns(UserWarning, match="1 of 2 steps found no room .* 2 times"):
        assert loop.log()["num_alloc_retries"] == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.step(GIB, GIB)
        loop.log()
        loop.callback.on_train_end(ARGS, loop.state, None)


def test_retries_after_the_last_logging_are_warned_of_at_the_end(meter: ScriptedMeter) -> None:
    loop = Loop(PeakWindowCallback(), meter)
    loop.step(GIB, GIB, retries=1)
    with pytest.warns(UserWarning, match="1 of 1 steps"):
        loop.callback.on_train_end(ARGS, loop.state, None)


def test_logs_of_an_evaluation_are_left_alone(meter: ScriptedMeter) -> None:
    loop = Loop(PeakWindowCallback(), meter)
    loop.step(GIB, GIB)
    told = {"eval_loss": 2.0}
    loop.callback.on_log(ARGS, loop.state, None, logs=told)
    assert told == {"eval_loss": 2.0}
    assert loop.log()["peak_allocated_gib"] == 1.0


def test_a_step_that_an_error_ended_is_closed_by_the_next(meter: ScriptedMeter) -> None:
    loop = Loop(PeakWindowCallback(), meter)
    loop.callback.on_step_begin(ARGS, loop.state, None)
    loop.step(GIB, GIB)
    assert loop.log()["peak_allocated_gib"] == 1.0


def test_f49_each_process_writes_a_file_of_its_own(meter: ScriptedMeter, tmp_path: Path) -> None:
    for rank in range(2):
        args = SimpleNamespace(**vars(ARGS) | {"world_size": 2, "process_index": rank})
        loop = Loop(PeakWindowCallback(tmp_path / "memory.jsonl"), meter, args)
        loop.step((rank + 1) * GIB, GIB)
    lines = [json.loads((tmp_path / f"memory.rank{rank}.jsonl").read_text()) for rank in range(2)]
    assert [line["allocated_bytes"] for line in lines] == [GIB, 2 * GIB]


def test_without_transformers_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import memplan\n"
        "try: memplan.PeakWindowCallback\n"
        "except memplan.errors.MemplanError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "transformers is not installed. Type: pip install 'memplan[hf]'"


def tiny_trainer(folder: Path, callback: Any, **options: Any) -> Any:
    """A real Trainer of a Llama with 2 blocks, on the CPU."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    tokens = torch.arange(32) % 256
    data = [{"input_ids": tokens, "labels": tokens}] * 16
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=2,
        logging_steps=2,
        max_steps=4,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    return Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data, callbacks=[callback])


def test_in_a_real_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.setattr(meters, "_METERS", {})
    callback = PeakWindowCallback(tmp_path / "memory.jsonl")
    trainer = tiny_trainer(tmp_path, callback, gradient_accumulation_steps=2)
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert set(lines[0]["phase_peaks"]) == {"forward", "backward", "optimizer"}
    assert lines[2]["allocated_bytes"] == lines[3]["allocated_bytes"] > 0  # steps alike need alike
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 4]
    assert all("peak_allocated_gib" in entry and "peak_backward_gib" in entry for entry in logged)
    assert not callback.window.is_open
    assert not trainer.model._forward_hooks and not trainer.model._forward_pre_hooks
