"""What a step comes to: its loss, gradients, buffers and caches, from a state that is left as it was."""

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from memplan.models.cache import KVCache
from memplan.models.trainable import Trainable
from memplan.step.builder import TrainStep, build_step

DRAWS = 0
"""Seed of what a step draws while it runs: both steps of a comparison drop the same elements."""


def outcome(step: TrainStep) -> dict[str, Tensor]:
    """Loss, gradients without the loss scale, buffers and layers of caches by name, after one accumulation from no
    gradients and from the same random numbers; buffers are put back."""
    step.model.zero_grad(set_to_none=True)
    torch.manual_seed(DRAWS)
    with eager_draws(step), buffers_kept(step.model), caches_heard(step.model) as caches:
        loss = step.accumulate()
        buffers = {f"buffer {name}": buffer.clone() for name, buffer in step.model.named_buffers()}
    scale = step.update.loss_scale
    grads = {
        name: param.grad if scale == 1 else param.grad.float() / scale
        for name, param in step.model.named_parameters()
        if param.grad is not None
    }
    return {"loss": loss} | grads | buffers | {name: torch.cat(parts) for name, parts in caches.items()}


def is_state(name: str) -> bool:
    """Whether a tensor of `outcome` is what the step leaves in the model or a cache, where a NaN may stand."""
    return name.startswith(("buffer ", "cache "))


def eager_draws(step: TrainStep) -> AbstractContextManager[Any]:
    """Where `step` compiles and drops, what is compiled inside draws random numbers as eager code does, by torch's own
    switch for comparisons."""
    if step.run.step.compile == "off" or step.run.step.dropout == 0:
        return nullcontext()
    from torch._inductor import config

    return config.patch(fallback_random=True)


@contextmanager
def buffers_kept(model: Trainable) -> Iterator[None]:
    """Whatever happens inside, the buffers are the same behind it."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in before:
                    buffer.copy_(before[name])


@contextmanager
def caches_heard(model: Trainable) -> Iterator[dict[str, list[Tensor]]]:
    """Keys and values of each layer of the caches that the model fills inside, a chunk at a time."""
    heard: dict[str, list[Tensor]] = {}

    def hear(cache: KVCache) -> None:
        for index, layer in cache.layers.items():
            for kind, pieces in (("keys", layer.keys), ("values", layer.values)):
                heard.setdefault(f"cache {index} {kind}", []).append(torch.cat(pieces, dim=2).detach())

    model.on_cache = hear
    try:
        yield heard
    finally:
        model.on_cache = None


def twin(step: TrainStep, **levers: Any) -> TrainStep:
    """A step like `step` but for its `levers`, from weights and a batch of the same values."""
    run = dataclasses.replace(step.run, step=dataclasses.replace(step.run.step, **levers))
    other = build_step(run, step.batch.tokens.device)
    other.model.load_state_dict(step.model.state_dict())
    other.batch, other.num_targets = step.batch, step.num_targets
    return other
