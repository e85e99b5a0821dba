"""Adapters: nothing else trains, the first step is the plain one, and each adapter's activations are counted."""

from typing import Any

import pytest
import torch
from models.hf_configs import small_run
from samples import asked, run_of
from torch import nn

from memplan.backends.simulated import simulate
from memplan.errors import MemplanError
from memplan.estimate import estimate
from memplan.estimate.step import build, new_tape
from memplan.spec import DeviceSpec
from memplan.spec.device import CPU as DEVICE
from memplan.spec.device import card
from memplan.step import optimizer_low_bit
from memplan.step.builder import TrainStep, build_step
from memplan.step.lora import LoraLinear

CPU, H100 = torch.device("cpu"), card("h100-80g")


def built(lora: str, model: str = "tiny", **step: Any) -> TrainStep:
    return build_step(asked(model, "B2c1", **({"seq": 16, "precision": "fp32", "images": 0} | step), lora=lora), CPU)


def test_only_adapters_train_and_their_number_is_known() -> None:
    """tiny: four blocks; q 128 -> 128, v 128 -> 64: rank 8 adds 8 * (128 + 128) and 8 * (128 + 64) a block."""
    model = built("8:q+v").model
    trains = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.rpartition(".")[2] for name in trains} == {"down", "up"}
    assert sum(trains.values()) == 4 * 8 * (128 + 128 + 128 + 64)


def test_without_names_every_linear_of_the_blocks_gets_one() -> None:
    model = built("4").model
    adapters = [path for path, module in model.named_modules() if isinstance(module, LoraLinear)]
    assert len(adapters) == 4 * 7
    assert all(".blocks." in path for path in adapters)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
def test_the_first_loss_is_the_plain_one_and_training_lowers_it(precision: str) -> None:
    step, plain = built("8", precision=precision), built("", precision=precision)
    step.model.load_state_dict(
        {name: value for name, value in step.model.state_dict().items() if name.endswith((".down", ".up"))}
        | {
            name: plain.model.state_dict()[name.replace(".base.", ".")]
            for name in step.model.state_dict()
            if not name.endswith((".down", ".up"))
        }
    )
    for group in step.optimizer.param_groups:
        group["lr"] = 1e-2
    losses = [step() for _ in range(5)]
    assert losses[0] == plain()
    assert losses[-1] < losses[0] - 0.02


def test_an_adapter_beside_a_linear_by_hand() -> None:
    base = nn.Linear(6, 4)
    adapter = LoraLinear(base, 2, 0.0)
    nn.init.normal_(adapter.up)
    x = torch.randn(3, 6)
    expected = base(x) + 2 * x @ adapter.down.T @ adapter.up.T
    torch.testing.assert_close(adapter(x), expected)


def test_a_name_that_no_linear_has_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(MemplanError, match="No linear of the blocks is called 'query'"):
        built("8:query")
    for text in ("x", "0", ":q", "@nf4", "x@nf4"):
        with pytest.raises(MemplanError, match="has no rank"):
            built(text)


def test_a_base_in_4_bits_is_read_and_refused_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    step = run_of(lora="8:q+v@nf4").step
    assert (step.lora_rank, step.lora_names, step.lora_base) == (8, ("q", "v"), "nf4")
    assert run_of(lora="8:q+v").step.lora_base == ""
    with pytest.raises(MemplanError, match="Unknown base 'nf5'"):
        run_of(lora="8@nf5")
    monkeypatch.setattr(optimizer_low_bit, "find_spec", lambda library: None)
    with pytest.raises(MemplanError, match="A base in nf4 needs bitsandbytes, which is not installed"):
        built("8@nf4")
    monkeypatch.setattr(optimizer_low_bit, "find_spec", lambda library: object())
    with pytest.raises(MemplanError, match="which a trace cannot"):
        simulate(run_of(lora="8@nf4"))


def test_every_linear_of_the_blocks_is_in_4_bits_with_adapters_beside_some() -> None:
    pytest.importorskip("bitsandbytes")
    step = built("8:q@nf4")
    for name, module in step.model.named_modules():
        if isinstance(module, nn.Linear) and "blocks" in name:
            assert type(module).__name__ == "Linear4bit"
            assert module.weight.numel() == module.in_features * module.out_features // 2
    losses = [step() for _ in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("lora", "count"), [("8", 3 * 8 * (640 + 320 + 2 * 512)), ("4:c_attn", 3 * 4 * 640), ("8:c_proj", 3 * 8 * 832)]
)
def test_transformers_gpt2_has_as_many_parameters_in_adapters_as_peft_makes(lora: str, count: int) -> None:
    """Three blocks of c_attn 160 -> 480, c_proj 160 -> 160, c_fc 160 -> 352, c_proj 352 -> 160; peft 0.21.2 counts
    47,616 with `all-linear` and rank 8, and 7,680 for c_attn and rank 4."""
    pytest.importorskip("transformers")
    run = small_run("gpt2", lora=lora)
    model = build_step(run, CPU).model
    trains = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.rpartition(".")[2] for name in trains} == {"down", "up"}
    tape = new_tape(run)
    build(tape, run)
    told = sum(parameter.numel * parameter.copies for parameter in tape.parameters if parameter.requires_grad)
    assert sum(trains.values()) == told == count


def test_an_adapter_beside_a_conv1d_by_hand() -> None:
    base = pytest.importorskip("transformers.pytorch_utils").Conv1D(4, 6)
    adapter = LoraLinear(base, 2, 0.0)
    nn.init.normal_(adapter.up)
    x = torch.randn(2, 3, 6)
    expected = x @ base.weight + base.bias + 2 * x @ adapter.down.T @ adapter.up.T
    torch.testing.assert_close(adapter(x), expected)


@pytest.mark.parametrize(
    ("ckpt", "device"),
    [
        ("none", DEVICE),
        pytest.param("selective", DEVICE, marks=pytest.mark.slow),
        pytest.param("full", H100, marks=pytest.mark.slow),
    ],
)
def test_adapters_of_gpt2_are_estimated_and_traced_to_the_byte(ckpt: str, device: DeviceSpec) -> None:
    pytest.importorskip("transformers")
    run = small_run("gpt2", layers=2, lora="8:c_attn+c_fc", ckpt=ckpt, precision="bf16", device=device)
    assert estimate(run).peak_allocated_bytes == simulate(run).steps.steady.peak_allocated_bytes
