"""What a step does with its gradients: scaling undone, clipping, the optimizer's step, and all of them released."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from memplan.models.blocks import find_blocks
from memplan.models.trainable import Trainable
from memplan.spec.step import StepSpec
from memplan.step.masters import Masters
from memplan.step.optimizers import make_optimizer
from memplan.step.precision import LossScaler


class Update:
    """The optimizer over `params`, all of which train, with the fp32 copies and the loss scale that `step` asks for.

    A scaled step is left out where a gradient is not finite, as torch's scaler does. Gradients are released at the end.
    """

    def __init__(self, step: StepSpec, params: Sequence[nn.Parameter], matrices: Sequence[nn.Parameter] = ()) -> None:
        self.clip = step.clip
        self.masters = Masters(params) if step.has_masters else None
        held: Sequence[Tensor] = params if self.masters is None else self.masters.copies
        chosen = {id(matrix) for matrix in matrices}
        taken = [one for param, one in zip(params, held, strict=True) if id(param) in chosen]
        self.params = held
        self.optimizer = make_optimizer(step.optimizer, held, taken)
        self.scaler = LossScaler(params[0].device) if step.scales_loss else None

    def scaled(self, loss: Tensor) -> Tensor:
        """`loss` as backward should see it."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    @property
    def loss_scale(self) -> float:
        """What gradients are multiplied by until the step."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter that has an fp32 copy, with it."""
        return [] if self.masters is None else list(zip(self.masters.params, self.masters.copies, strict=True))

    def __call__(self) -> None:
        """One step from the gradients that are there."""
        if self.masters is not None:
            self.masters.take_gradients()
        if self.clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.params, self.clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.masters is not None:
            self.masters.write_back()
        self.optimizer.zero_grad(set_to_none=True)


class UpdateInBackward:
    """An `Update` for each parameter, which is taken as soon as its gradient is there, while backward goes on.

    Source: torch.Tensor.register_post_accumulate_grad_hook, torch 2.13; it runs once a backward, when all parts of a
    shared parameter's gradient have been added up.
    """

    def __init__(self, step: StepSpec, params: Sequence[nn.Parameter], matrices: Sequence[nn.Parameter] = ()) -> None:
        self.updates = {param: Update(step, [param], matrices) for param in params}

    def scaled(self, loss: Tensor) -> Tensor:
        """`loss` as backward should see it."""
        return loss

    loss_scale = 1.0

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter that has an fp32 copy, with it."""
        return [pair for update in self.updates.values() for pair in update.copies()]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Every backward inside updates."""
        hooks = [
            param.register_post_accumulate_grad_hook(lambda one: self.updates[one]())  # type: ignore[no-untyped-call]
            for param in self.updates
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of `model` that train."""
    return [param for param in model.parameters() if param.requires_grad]


def matrices(model: Trainable, step: StepSpec) -> list[nn.Parameter]:
    """What Muon takes: the parameters of the blocks that train and have two dimensions; nothing for others."""
    if step.optimizer != "muon":
        return []
    return [param for block in find_blocks(model, step.blocks).values() for param in trained(block) if param.dim() == 2]
