"""A step that is to be measured, whoever wrote it, and what is known of what it trains."""

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from memplan.errors import MemplanError
from memplan.models.user_factory import load_entry
from memplan.spec.entry import EntryRun
from memplan.spec.run import RunSpec
from memplan.step.builder import Mark, build_step
from memplan.step.update import UpdateInBackward

Take = Callable[[Mark], Any]


@dataclass(kw_only=True)
class Subject:
    """A step, and what it trains, as far as that is known."""

    take: Take
    """Takes one whole optimizer step, says its phases, and returns the loss, a number or a tensor, or None."""
    bare: Take | None = None
    """The same for steps that are timed, where saying the phases costs something; None: nothing."""
    models: dict[str, nn.Module] = field(default_factory=dict)
    """Modules that train, by what stands before the names of their parameters."""
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    """Who updates them."""
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Parameters with the copies that are stepped on."""
    num_targets: int | None = None
    """Tokens with a label; None where nobody knows."""
    attention: str | None = None
    """Attention that was asked for; None where nobody knows."""
    compiled: bool = False
    """Whether parts of it are compiled."""
    scaled: bool = False
    """Whether its loss is scaled, so that steps may be left out."""
    patient: bool = False
    """Whether a first step that changes nothing is no failure yet, since a later one may: where a scaled loss leaves a
    step out, and where a learning rate that is the user's begins at zero."""
    loss_scale: Callable[[], float] = lambda: 1.0
    """What gradients are multiplied by when a phase `optimizer` begins."""
    offload: Any = None
    """What it keeps on the host, as `memplan.step.offload.Offload`."""
    note: str = ""
    """What it does instead of what was asked for."""

    def named_parameters(self) -> dict[str, Tensor]:
        """Every parameter once, by name; those that only an optimizer knows by number."""
        named: dict[str, Tensor] = {}
        seen: set[int] = set()
        for prefix, model in self.models.items():
            for name, own in model.named_parameters():
                if id(own) not in seen:
                    seen.add(id(own))
                    named[prefix + name] = own
        copies = {id(copy) for _, copy in self.copies}
        for index, param in enumerate(self._stepped()):
            if id(param) not in seen | copies:
                seen.add(id(param))
                named[f"parameter {index}"] = param
        return named

    def named_buffers(self) -> dict[str, Tensor]:
        """Every buffer, by name."""
        return {prefix + name: one for prefix, model in self.models.items() for name, one in model.named_buffers()}

    def _stepped(self) -> Iterator[Tensor]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def trained(self) -> list[Tensor]:
        """What should change with a step."""
        return [
            *(param for param in self.named_parameters().values() if param.requires_grad),
            *(copy for _, copy in self.copies),
        ]

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Gradients that are there now, by their parameter's name."""
        named = self.named_parameters()
        names = {id(param): name for name, param in named.items()}
        names |= {id(copy): names.get(id(param), "") for param, copy in self.copies}
        for param in [*named.values(), *(copy for _, copy in self.copies)]:
            if param.is_leaf and param.grad is not None:
                yield names.get(id(param), ""), param.grad

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Optimizer state and copies that are stepped on: the parameter's name, what it is, and the tensor."""
        names = {id(param): name for name, param in self.named_parameters().items()}
        names |= {id(copy): names.get(id(param), "") for param, copy in self.copies}
        for _, copy in self.copies:
            yield names[id(copy)], "copy", copy
        for optimizer in self.optimizers:
            for param, state in optimizer.state.items():
                for key, value in state.items() if isinstance(state, dict) else ():
                    for tensor in tree_leaves(value):
                        if isinstance(tensor, Tensor):
                            yield names.get(id(param), ""), str(key), tensor


def subject_of_run(run: RunSpec, device: torch.device, seed: int) -> Subject:
    """memplan's own step of `run`."""
    step = build_step(run, device, seed)
    update = step.update
    inner = list(update.updates.values()) if isinstance(update, UpdateInBackward) else [update]
    return Subject(
        take=step,
        models={"": step.model},
        optimizers=[one.optimizer for one in inner],
        copies=update.copies(),
        num_targets=step.num_targets,
        attention=run.step.attention,
        compiled=run.step.compile == "on",
        scaled=run.step.scales_loss,
        patient=run.step.scales_loss,
        loss_scale=lambda: update.loss_scale,
        offload=step.offload,
        note=step.note,
    )


def subject_of_entry(run: EntryRun, seed: int) -> Subject:
    """The step that the user's own code makes. What it trains is found among the objects that are there when it is
    made: modules with parameters that nobody else holds, and optimizers."""
    torch.manual_seed(seed)
    step = load_entry(run.entry)(**run.arguments())
    if not callable(step):
        raise MemplanError(
            f"make_step returned {type(step).__name__}, which cannot be called.", "Let it return the step."
        )
    gc.collect()
    models, optimizers = found_objects()
    hears = hears_marks(step)
    return Subject(
        take=(lambda mark: step(mark=mark)) if hears else (lambda mark: guessed(step, mark)),
        bare=None if hears else (lambda mark: step()),
        models=named_models(models),
        optimizers=optimizers,
        patient=True,
    )


def hears_marks(step: Callable[..., Any]) -> bool:
    """Whether `step` has a parameter called `mark`."""
    try:
        return "mark" in inspect.signature(step).parameters
    except (TypeError, ValueError):
        return False


def guessed(step: Callable[[], Any], mark: Mark) -> Any:
    """What `step` returns; its phases are marked where it calls backward and where an optimizer steps. Between them
    there is none."""
    plain = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        mark("backward")
        plain(*args, **kwargs)
        mark("")

    hooks = (
        register_optimizer_step_pre_hook(lambda *of: mark("optimizer")),
        register_optimizer_step_post_hook(lambda *of: mark("")),
    )
    torch.autograd.backward = backward
    try:
        mark("forward")
        return step()
    finally:
        torch.autograd.backward = plain
        for hook in hooks:
            hook.remove()


def found_objects() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Outermost modules with parameters, and optimizers, among all objects of this process."""
    modules: list[nn.Module] = []
    optimizers: list[torch.optim.Optimizer] = []
    for one in gc.get_objects():
        if issubclass(type(one), nn.Module):  # of the type alone: some objects answer isinstance by importing things
            modules.append(one)
        elif issubclass(type(one), torch.optim.Optimizer):
            optimizers.append(one)
    inside = {id(child) for module in modules for child in module.modules() if child is not module}
    outermost = [one for one in modules if id(one) not in inside and any(True for _ in one.parameters())]
    return outermost, optimizers


def found_subject() -> Subject:
    """What trains among all objects, where nobody has said it yet: while a model is built."""
    models, optimizers = found_objects()
    return Subject(take=lambda mark: None, models=named_models(models), optimizers=optimizers)


def named_models(models: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """`models` by what stands before their parameters' names: nothing where there is one, else class and number."""
    found = list(models)
    if len(found) == 1:
        return {"": found[0]}
    return {f"{type(model).__name__}{index}.": model for index, model in enumerate(found, 1)}
