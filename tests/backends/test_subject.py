"""What can be found out about a step of somebody else's."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from memplan.backends.subject import Subject, found_objects, guessed, hears_marks, named_models


def test_phases_of_a_step_that_says_none_are_guessed() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    marks: list[str] = []

    def step() -> float:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return 1.5

    plain = torch.autograd.backward
    assert guessed(step, marks.append) == 1.5
    assert marks == ["forward", "backward", "", "backward", "", "optimizer", ""]
    assert torch.autograd.backward is plain
    step()
    assert len(marks) == 7, "nothing listens any more"


def test_a_step_that_fails_leaves_nothing_patched() -> None:
    plain = torch.autograd.backward
    with pytest.raises(ZeroDivisionError):
        guessed(lambda: 1 // 0, lambda phase: None)
    assert torch.autograd.backward is plain


def test_a_step_that_has_a_mark_is_given_it() -> None:
    class Step:
        def __call__(self, mark: Any) -> None: ...

    assert hears_marks(lambda mark: None) and hears_marks(Step())
    assert not hears_marks(lambda: None) and not hears_marks(print)


def test_outermost_modules_and_optimizers_are_found_and_named() -> None:
    gc.collect()
    gc.freeze()  # what other tests left
    try:
        first, second, empty = nn.Sequential(nn.Linear(2, 2)), nn.Linear(3, 3), nn.ReLU()
        optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters(), nn.Parameter(torch.ones(5))])
        models, optimizers = found_objects()
    finally:
        gc.unfreeze()
    assert optimizers == [optimizer]
    assert {id(model) for model in models} == {id(first), id(second)} and empty not in models
    subject = Subject(take=lambda mark: None, models=named_models([first, second]), optimizers=optimizers)
    assert list(subject.named_parameters()) == [
        "Sequential1.0.weight",
        "Sequential1.0.bias",
        "Linear2.weight",
        "Linear2.bias",
        "parameter 4",
    ]
    assert list(Subject(take=lambda mark: None, models=named_models([second])).named_parameters()) == ["weight", "bias"]


def test_states_bear_the_names_of_their_parameters_and_copies_too() -> None:
    model = nn.Linear(2, 2, bias=False).bfloat16()
    copy = model.weight.detach().float().requires_grad_()
    optimizer = torch.optim.AdamW([copy])
    copy.grad = torch.ones_like(copy)
    optimizer.step()
    subject = Subject(take=lambda mark: None, models={"": model}, optimizers=[optimizer], copies=[(model.weight, copy)])
    assert list(subject.named_parameters()) == ["weight"]
    found = {(name, key) for name, key, _ in subject.states()}
    assert found == {("weight", key) for key in ("copy", "step", "exp_avg", "exp_avg_sq")}
    assert [name for name, _ in subject.gradients()] == ["weight"]
