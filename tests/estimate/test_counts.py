"""Parameters and optimizer state, against the modules themselves and against torch's optimizers."""

from collections import Counter

import pytest
import torch
from samples import asked

from memplan.estimate import estimate, uncovered
from memplan.estimate.step import write_step
from memplan.models.factory import build_model
from memplan.models.registry import model_spec, names, published_counts
from memplan.spec import DeviceSpec, RunSpec
from memplan.step.builder import build_step

OWN = [name for name in names() if model_spec(name).impl == "memplan"]
"""Models of memplan's own modules; transformers' have tests beside their families."""


def usual(name: str, **step: object) -> RunSpec:
    """One sample of a model in its usual workload."""
    model = model_spec(name)
    workload = model.usual_workload(model.images)
    return asked(name, "B1c1", workload=workload, attention=model.usual_attention, **step)


@pytest.mark.parametrize("name", names())
def test_counts_of_every_built_in_model_equal_the_published_ones(name: str) -> None:
    run, published = usual(name), published_counts(name)
    assert uncovered(run) == ""
    answer = estimate(run)
    assert answer.params_total == published["total"]
    assert answer.params_trainable == published["trainable"]


@pytest.mark.parametrize("name", OWN)
def test_every_tensor_is_counted_with_its_own_size(name: str) -> None:
    with torch.device("meta"):
        module = build_model(model_spec(name))
    expected = Counter((parameter.numel(), parameter.requires_grad) for parameter in module.parameters())
    found: Counter[tuple[int, bool]] = Counter()
    for parameter in write_step(usual(name)).parameters:
        found[parameter.numel, parameter.requires_grad] += parameter.copies
    assert found == expected


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-foreach", "adamw-loop", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2", "tiny-molmo2"])
def test_static_memory_is_what_torch_holds(name: str, precision: str, optimizer: str) -> None:
    run = asked(name, "B1c1", seq=32, precision=precision, optimizer=optimizer)
    step = build_step(run, torch.device("cpu"))
    step()
    static = estimate(run).static
    assert static.params == sum(parameter.nbytes for parameter in step.model.parameters())
    assert static.buffers == sum(buffer.nbytes for buffer in step.model.buffers())
    held = (value for state in step.optimizer.state.values() for value in state.values())
    assert static.optimizer == sum(value.nbytes for value in held if isinstance(value, torch.Tensor))


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
    optimizer = next(phase for phase in estimate(run).phases if phase.phase == "optimizer")
    assert optimizer.breakdown.grads == sum(storages.values())


def test_adam_counters_take_a_block_each_on_cuda_when_fused_only() -> None:
    card = DeviceSpec(name="card", rules="cuda")
    fused, loop = (asked("tiny", "B1c1", optimizer=name, device=card) for name in ("adamw", "adamw-loop"))
    tensors = sum(parameter.copies for parameter in write_step(fused).parameters)
    assert estimate(fused).static.optimizer - estimate(loop).static.optimizer == 512 * tensors
