"""What a step does with its gradients over the ledger: scaling undone, clipping, the optimizer's step, their release.

Source: memplan.step.update, whose twin this is; torch/amp/grad_scaler.py and torch/nn/utils/clip_grad.py, torch 2.13.
"""

from collections.abc import Iterable
from itertools import groupby

from memplan.dtypes import ELEMENT_BYTES
from memplan.estimate import ops
from memplan.estimate.optimizers import OPTIMIZERS
from memplan.estimate.tape import Parameter, Row, Storage, Tape, Tensor
from memplan.spec.step import StepSpec


def trainable(tape: Tape) -> list[Parameter]:
    """The parameters that the optimizer updates."""
    return [parameter for parameter in tape.parameters if parameter.requires_grad]


class Update:
    """The optimizer over `params`, with the fp32 copies and the loss scale that `step` asks for."""

    def __init__(self, tape: Tape, step: StepSpec, params: list[Parameter]) -> None:
        self.tape = tape
        self.clip = step.clip is not None
        self.masters = Masters(tape, params) if step.has_masters else None
        self.params = [one for one in (params if self.masters is None else self.masters.copies) if not one.idle]
        start = len(tape.allocs)
        self.optimizer = OPTIMIZERS[step.optimizer](tape, self.params)
        self.states = range(start, len(tape.allocs))
        self.scaler = LossScaler(tape) if step.scales_loss else None

    def scaled(self, loss: Tensor) -> Tensor:
        """`loss` as backward should see it."""
        return loss if self.scaler is None else ops.scale(loss)

    def __call__(self) -> None:
        """One step from the gradients that are there."""
        if self.masters is not None:
            self.masters.take_gradients()
        held: list[Storage] = []
        if self.clip:
            if self.scaler is not None:
                held = self.scaler.unscale()
            clip(self.tape, self.params)
        if self.scaler is not None:
            held += self.scaler.before_step(fused=self.optimizer.takes_scale, unscaled=self.clip)
        self.tape.made_late |= dict.fromkeys(self.states, len(self.tape.events))
        self.optimizer.step()
        held.clear()
        self.release()

    def release(self) -> None:
        """Lets all gradients go."""
        for parameter in self.params:
            parameter.grad = parameter.others = None


class UpdateInBackward:
    """An `Update` for each parameter, which is taken as soon as its gradient is there, while backward goes on."""

    def __init__(self, tape: Tape, step: StepSpec, params: list[Parameter]) -> None:
        updates = {parameter: Update(tape, step, [parameter]) for parameter in params}
        tape.keeps_grads = False
        tape.on_grad = lambda parameter: updates[parameter]()

    def scaled(self, loss: Tensor) -> Tensor:
        """`loss` as backward should see it."""
        return loss

    def __call__(self) -> None:
        """Nothing is left to do behind backward."""


AnyUpdate = Update | UpdateInBackward


def make_update(tape: Tape, step: StepSpec, params: list[Parameter]) -> AnyUpdate:
    """The update that `step` asks for over `params`, with its states."""
    update = (UpdateInBackward if step.update == "backward" else Update)(tape, step, params)
    tape.kept.append(update)
    return update


class Masters:
    """An fp32 copy of each parameter, which the optimizer steps on; one that is in fp32 is its own."""

    def __init__(self, tape: Tape, params: list[Parameter]) -> None:
        self.tape = tape
        self.params = params
        self.copies = [self.copy_of(parameter) for parameter in params]

    def copy_of(self, parameter: Parameter) -> Parameter:
        """The copy of a parameter and of those that it speaks for."""
        shape, copies, storage = parameter.shape, parameter.copies, parameter.storage
        if parameter.dtype != "float32":
            storage = self.tape.allocate("master", shape, "float32", category="optimizer", copies=copies)
        copy = Parameter(storage, shape, "float32", name=parameter.name, component=parameter.component, copies=copies)
        copy.idle = parameter.idle
        return copy

    def take_gradients(self) -> None:
        """Casts each gradient to fp32 and lets the one in low precision go behind it.

        Those of the blocks that one speaks for change places all at once: the moments in which both are there are
        lower than that of the last block.
        """
        pairs = zip(self.params, self.copies, strict=True)
        for copies, some in groupby(pairs, key=lambda pair: pair[0].copies):
            start = len(self.tape.events)
            self.take(some)
            if copies > 1 and not self.tape.open_rows:  # else it is part of a backward that is told so often
                self.tape.rows.append(Row(copies, start, len(self.tape.events)))

    def take(self, pairs: Iterable[tuple[Parameter, Parameter]]) -> None:
        """The same of some of them."""
        for parameter, copy in pairs:
            if parameter.dtype == "float32":
                copy.grad, copy.others = parameter.grad, parameter.others
                parameter.grad = parameter.others = None
            if parameter.others is not None:
                parameter.others = None
                copy.others = self.tape.allocate(
                    "to", copy.shape, "float32", category="grads", copies=copy.copies - 1, rest=True
                )
            if parameter.grad is not None:
                copy.grad = self.tape.new("to", copy.shape, "float32", category="grads")
                parameter.grad = None


class LossScaler:
    """torch's GradScaler: a scale and a counter, and single numbers for the moment."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.held = [tape.allocate("scale", (), kind, category="other") for kind in ("float32", "int32")]

    def number(self) -> Storage:
        """One fp32 number."""
        return self.tape.allocate("scale", (), "float32")

    def unscale(self) -> list[Storage]:
        """Divides all gradients in place by the scale's inverse, made in fp64; see `check`."""
        double = self.tape.allocate("to", (), "float64")
        inverse = self.tape.allocate("reciprocal", (), "float64")
        del double
        low = self.number()
        del inverse
        held = self.check()
        del low
        return held

    def check(self) -> list[Storage]:
        """What stays until the step is over: a copy of whether a gradient overflowed, made beside one of the factor."""
        found = self.number()
        copies = [self.number(), self.number()]
        del found
        return copies[1:]

    def before_step(self, *, fused: bool, unscaled: bool) -> list[Storage]:
        """What the step holds: a fused kernel is told whether to do anything, and the scale where it is not undone."""
        if not fused:
            return [] if unscaled else self.unscale()
        if unscaled:
            return [self.number()]
        one = self.number()
        held = self.check()
        del one
        return [*held, self.number(), self.number()]


def clip(tape: Tape, params: list[Parameter]) -> None:
    """The norm of all gradients, by way of one for each and a row of them; then each is multiplied in place."""
    counts = [(one.dtype, 1 if one.others is None else one.copies) for one in params if one.grad is not None]
    if not counts:
        return
    norms = [tape.allocate("linalg_vector_norm", (), dtype, copies=count) for dtype, count in counts]
    dtype = counts[0][0] if len({dtype for dtype, _ in counts}) == 1 else "float32"
    row = tape.allocate("stack", (sum(count for _, count in counts),), dtype)
    total = tape.allocate("linalg_vector_norm", (), dtype)
    del row
    norms.clear()
    tape.hidden("clamp", *[ELEMENT_BYTES[dtype]] * 2)
    del total
