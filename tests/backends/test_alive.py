"""Who is alive when a step fails: real steps that fail in forward and in backward."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import run_of
from torch import nn

from memplan.backends.alive import largest
from memplan.backends.subject import Subject, named_models, subject_of_run
from memplan.record import LiveTensor

CPU = torch.device("cpu")


class Stop(Exception):
    """The step fails here."""


def told(subject: Subject, work: Callable[[], Any], most: int = 1000) -> tuple[LiveTensor, ...]:
    """What is told in the handler of `Stop`, as a worker does it."""
    gc.freeze()  # what other tests left
    try:
        work()
    except Stop:
        return largest(subject, CPU, most=most)
    finally:
        gc.unfreeze()
    raise AssertionError("the step did not fail")


def stop(*args: Any) -> None:
    raise Stop


def failing(phase: str) -> Callable[[str], None]:
    return lambda begun: stop() if begun == phase else None


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows * 1.0)
        return rows.square()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise Stop


@pytest.mark.parametrize("ckpt", ["none", "full"])
def test_in_forward_parameters_states_and_activations_are_named(ckpt: str) -> None:
    gc.collect()
    subject = subject_of_run(run_of(ckpt=ckpt), CPU, 0)
    subject.take(lambda phase: None)
    found = told(subject, lambda: subject.take(failing("backward")))
    by_name = {(kind.category, kind.module, kind.op): kind for kind in found}
    gate = by_name["params", "decoder.blocks.*.mlp.gate", "parameter"]
    assert (gate.count, gate.num_bytes, gate.shape, gate.dtype) == (4, 352 * 128 * 4, (352, 128), "float32")
    assert by_name["optimizer", "decoder.blocks.*.mlp.gate", "exp_avg"].count == 4
    mm = ("activations", "decoder.blocks.*.mlp.gate", "mm")
    assert (mm in by_name) is (ckpt == "none")
    if ckpt == "none":
        assert (by_name[mm].count, by_name[mm].shape) == (4, (4, 64, 352))
    else:
        ops = {kind.op for kind in found if kind.category == "activations"}
        assert "add" in ops and not ops & {"silu", "scaled_dot_product_flash_attention_for_cpu"}, "what enters blocks"
    sizes = [kind.total_bytes for kind in found]
    assert sizes == sorted(sizes, reverse=True)
    assert told(subject, lambda: subject.take(failing("backward")), most=3) == found[:3]


def test_in_backward_what_was_given_back_is_passed_over() -> None:
    gc.collect()
    front, back = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    model = nn.Sequential(front, back)
    subject = Subject(take=lambda mark: None, models=named_models([model]))

    def work() -> None:
        hidden = torch.tanh(front(torch.randn(256, 64)))
        hidden.register_hook(stop)
        torch.exp(back(hidden)).sum().backward()

    found = told(subject, work)
    by_name = {(kind.category, kind.module, kind.op): kind for kind in found}
    assert ("activations", "0", "tanh") in by_name, "its backward has not run"
    assert ("activations", "1", "exp") not in by_name, "its backward has, and the frame holds nothing of it"


def test_what_a_custom_function_keeps_is_named_by_its_class() -> None:
    gc.collect()
    model = nn.Linear(32, 32, bias=False)
    subject = Subject(take=lambda mark: None, models=named_models([model]))
    found = told(subject, lambda: Square.apply(model(torch.randn(128, 32))).sum().backward())
    assert ("activations", "Square") in {(kind.category, kind.op) for kind in found}


def test_telling_recomputes_nothing_and_allocates_nothing() -> None:
    """What a checkpointed block packed away stays packed: unpacking it would run the block, with no room for it."""
    gc.collect()
    subject = subject_of_run(run_of(ckpt="full"), CPU, 0)
    regions = subject.take.regions  # type: ignore[attr-defined]
    told(subject, lambda: subject.take(failing("backward")))
    ran = [0]

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran[0] += func not in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
            return func(*args, **(kwargs or {}))

    try:
        subject.take(failing("backward"))
    except Stop:
        with Counting():
            found = largest(subject, CPU)
    assert found and ran == [0]
    assert regions and len(found) == 10


def test_a_storage_is_told_once_under_its_surest_name() -> None:
    gc.collect()
    model = nn.Linear(512, 512, bias=False)
    subject = Subject(take=lambda mark: None, models=named_models([model]))

    def work() -> None:
        views = [model.weight[:10], model.weight.detach(), model.weight.t()]
        stop(views)

    found = told(subject, work)
    assert [kind for kind in found if kind.num_bytes == 512 * 512 * 4] == [
        LiveTensor(
            num_bytes=512 * 512 * 4,
            count=1,
            category="params",
            module="",
            op="parameter",
            shape=(512, 512),
            dtype="float32",
        )
    ]
