"""Parameters and optimizer state, against the modules themselves and against torch's optimizers."""

from collections import Counter

import pytest
import torch
from samples import asked

from memplan.estimate import states, uncovered
from memplan.models.factory import build_model
from memplan.models.registry import model_spec, names, published_counts
from memplan.spec import DeviceSpec
from memplan.step.builder import build_step

COVERED = [name for name in names() if not uncovered(asked(name, "B1c1"))]
"""Models that the formulas speak of."""


def test_the_formulas_speak_of_dense_models_and_say_so_of_the_others() -> None:
    others = {name: uncovered(asked(name, "B1c1")) for name in names() if name not in COVERED}
    assert set(others) == {name for name in names() if model_spec(name).impl == "hf"} | {"tiny-gemma", "tiny-moe"}
    assert others["tiny-hybrid"] == others["qwen3.5-0.8b"] == "models of transformers"
    assert others["tiny-moe"].startswith("decoders with")


@pytest.mark.parametrize("name", COVERED)
def test_counts_equal_the_published_ones(name: str) -> None:
    spec, published = model_spec(name), published_counts(name)
    assert states.count_total(spec) == published["total"]
    assert states.count_trainable(spec) == published["trainable"]
    assert states.count_embedding(spec) == published["embedding"]


@pytest.mark.parametrize("name", COVERED)
def test_every_tensor_is_counted_with_its_own_size(name: str) -> None:
    spec = model_spec(name)
    with torch.device("meta"):
        module = build_model(spec)
    expected = Counter((parameter.numel(), parameter.requires_grad) for parameter in module.parameters())
    found: Counter[tuple[int, bool]] = Counter()
    for group in states.param_groups(spec):
        found[group.numel, group.trainable] += group.count
    assert found == expected


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-foreach", "adamw-loop", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2", "tiny-molmo2"])
def test_static_memory_is_what_torch_holds(name: str, precision: str, optimizer: str) -> None:
    run = asked(name, "B1c1", seq=32, precision=precision, optimizer=optimizer)
    step = build_step(run, torch.device("cpu"))
    step()
    assert states.param_bytes(run) == sum(parameter.nbytes for parameter in step.model.parameters())
    assert states.buffer_bytes(run) == sum(buffer.nbytes for buffer in step.model.buffers())
    held = (value for state in step.optimizer.state.values() for value in state.values())
    assert states.optimizer_bytes(run) == sum(value.nbytes for value in held if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("name", ["tiny", "tiny-wide", "tiny-molmo2"])
def test_gradients_are_what_torch_holds(name: str) -> None:
    """Unique storages: the extra rows' gradient of Molmo2 keeps the whole table's alive."""
    run = asked(name, "B1c1", seq=64)
    step = build_step(run, torch.device("cpu"))
    step.accumulate()
    storages = {
        parameter.grad.untyped_storage().data_ptr(): parameter.grad.untyped_storage().nbytes()
        for parameter in step.model.parameters()
        if parameter.grad is not None
    }
    assert states.grad_bytes(run) == sum(storages.values())


def test_cuda_rounds_every_tensor_to_512_bytes() -> None:
    assert [states.rounded(size, "cuda") for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert states.rounded(513, "cpu") == 513


def test_adam_counters_take_a_block_each_on_cuda_when_fused_only() -> None:
    card = DeviceSpec(name="card", rules="cuda")
    fused, loop = (asked("tiny", "B1c1", optimizer=name, device=card) for name in ("adamw", "adamw-loop"))
    tensors = sum(group.count for group in states.param_groups(fused.model))
    assert states.optimizer_bytes(fused) - states.optimizer_bytes(loop) == 512 * tensors
