"""A user's module as a trace sees it: what it holds, which of its parameters get gradients, what a forward keeps."""

import dataclasses
from typing import Any

from torch import Tensor, nn

from memplan.backends.listening import listened
from memplan.backends.own_code import errors_told
from memplan.models.trainable import Trainable
from memplan.record.module import HeldTensor, ModuleFacts
from memplan.spec.run import RunSpec
from memplan.step.update import matrices
from memplan.trace.tracing import Tracing

ALONE: dict[str, Any] = {
    "batch": 1, "chunks": 1, "ckpt": "none", "update": "step", "parallel": "single", "world": 1, "compile": "off",
}  # fmt: skip
"""Levers of the simplest step of a module, in which it holds what it always holds."""


def module_facts(run: RunSpec) -> ModuleFacts:
    """What the module of `run` holds, adapters included, before it is split over devices."""
    optimizer = "muon" if run.step.optimizer == "muon" else "sgd"
    alone = dataclasses.replace(run, step=dataclasses.replace(run.step, **ALONE, optimizer=optimizer))
    tracing = Tracing(run.device, frames=False, guess_phases=False)
    with errors_told(run.model.name), tracing:
        step = listened(alone, tracing)
        reached: set[int] = set()
        for one in step.model.parameters():
            if one.requires_grad:
                listen: Any = one.register_post_accumulate_grad_hook
                listen(lambda parameter: reached.add(id(parameter)))
        model = step.model
        parameters, buffers = list(model.named_parameters()), list(model.named_buffers())  # before it makes more
        step.accumulate()
        taken = {id(one) for one in matrices(model, alone.step)}
        assert model.vocab is not None
        return ModuleFacts(
            parameters=tuple(
                held(
                    model,
                    name,
                    one,
                    trains=one.requires_grad,
                    idle=one.requires_grad and id(one) not in reached,
                    matrix=id(one) in taken,
                )
                for name, one in parameters
            ),
            buffers=tuple(held(model, name, one) for name, one in buffers),
            vocab=model.vocab,
            embedding=next((one.weight.numel() for one in model.modules() if isinstance(one, nn.Embedding)), 0),
            max_seq=longest(model),
        )


def held(model: Trainable, name: str, tensor: Tensor, **facts: bool) -> HeldTensor:
    """What `tensor` of `model` is, by the name that its owner knows."""
    return HeldTensor(
        name=name.removeprefix(f"{model.inner}."),
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        **facts,
    )


def longest(model: Trainable) -> int | None:
    """Tokens of the longest sample that the module's configuration speaks of, by transformers' name."""
    config = getattr(model.get_submodule(model.inner), "config", None)
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) else None
