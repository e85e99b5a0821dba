"""What optimizers keep between steps, and what their step makes and drops.

A parameter that speaks for equal ones of other blocks is stepped on once: where tensors come and go one by one, its own
moment is that of every copy. The locals of torch's loops live on into the next parameter's turn.

Source: torch/optim/adamw.py, adam.py, sgd.py, _adafactor.py, _muon.py (the `_single_tensor` functions and
`_multi_tensor_adam`), torch 2.13.
"""

from memplan.estimate import low_bit
from memplan.estimate.setup import in_block
from memplan.estimate.tape import Parameter, Shape, Storage, Tape, Tensor

NEWTON_SCHULZ_STEPS = 5
"""Of Muon. Source: DEFAULT_NS_STEPS, torch/optim/_muon.py, torch 2.13."""


class Optimizer:
    """An optimizer over `params`; this one, plain SGD, keeps nothing and makes nothing."""

    takes_scale = False
    """Whether its kernel undoes the loss scale itself."""

    def __init__(self, tape: Tape, params: list[Parameter]) -> None:
        self.tape = tape
        self.params = params
        for parameter in params:
            self.keep(parameter)

    def keep(self, parameter: Parameter) -> None:
        """Allocates what stays from the first step on."""

    def state(self, parameter: Parameter, name: str, shape: Shape, dtype: str) -> None:
        """One tensor of it, with those of the copies."""
        storage = self.tape.allocate(name, shape, dtype, category="optimizer", copies=parameter.copies)
        parameter.state.append(storage)

    def count_steps(self, parameter: Parameter) -> None:
        """A counter of steps on the host, which is the device of CPU runs alone."""
        if self.tape.rules == "cpu":
            self.state(parameter, "step", (), "float32")

    def step(self) -> None:
        """Makes and drops what one step does."""


class Momentum(Optimizer):
    """SGD with momentum: a buffer like the gradient."""

    def keep(self, parameter: Parameter) -> None:
        self.state(parameter, "momentum_buffer", parameter.shape, parameter.dtype)


class ForeachAdamW(Optimizer):
    """AdamW over lists of tensors: two moments in the parameter's dtype; its step makes all roots at once."""

    def keep(self, parameter: Parameter) -> None:
        self.state(parameter, "exp_avg", parameter.shape, parameter.dtype)
        self.state(parameter, "exp_avg_sq", parameter.shape, parameter.dtype)
        self.count_steps(parameter)

    def step(self) -> None:
        held: list[Storage] = []
        for one in self.params:
            copies = 1 if one.others is None else one.copies
            held.append(self.tape.allocate("_foreach_sqrt", one.shape, one.dtype, copies=copies))
        held.clear()


class FusedAdamW(ForeachAdamW):
    """AdamW in one kernel, which makes nothing and wants the counter on the device."""

    takes_scale = True

    def count_steps(self, parameter: Parameter) -> None:
        self.state(parameter, "step", (), "float32")

    def step(self) -> None:
        pass


class LoopAdamW(ForeachAdamW):
    """AdamW one tensor after another: a root and its quotient, the divisor."""

    def step(self) -> None:
        tape, at = self.tape, dict[str, Tensor]()
        for one in self.params:
            root = tape.new("sqrt", one.shape, one.dtype)
            at["denom"] = tape.new("div", one.shape, one.dtype)
            del root


class Adafactor(Optimizer):
    """Means of squares by row and by column, of a vector whole; its step makes an estimate of each tensor's squares."""

    def keep(self, parameter: Parameter) -> None:
        self.count_steps(parameter)
        if len(parameter.shape) > 1:
            for name, shape in zip(("row_var", "col_var"), factors(parameter.shape), strict=True):
                self.state(parameter, name, shape, parameter.dtype)
        else:
            self.state(parameter, "variance", parameter.shape, parameter.dtype)

    def step(self) -> None:
        tape, at = self.tape, dict[str, Tensor]()
        for one in self.params:
            dtype = one.dtype
            tape.hidden("linalg_vector_norm", one.width)
            if len(one.shape) > 1:
                for name, shape in zip(("row_mean", "col_mean"), factors(one.shape), strict=True):
                    at[name] = tape.new("linalg_vector_norm", shape, dtype)
                at["var_estimate"] = tape.new("matmul", one.shape, dtype)
                mean = tape.new("mean", (*one.shape[:-2], 1, 1), dtype)
                del mean
            else:
                at["grad_squared"] = tape.new("mul", one.shape, dtype)
                at["var_estimate"] = tape.new("clone", one.shape, dtype)
            at["update"] = at["var_estimate"]
            tape.hidden("linalg_vector_norm", one.width)


def factors(shape: Shape) -> tuple[Shape, Shape]:
    """Shapes of the means over columns and over rows."""
    return (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])


class Muon(Optimizer):
    """A momentum for each matrix of the blocks, made orthogonal in bf16 by Newton and Schulz; the rest is AdamW's."""

    def __init__(self, tape: Tape, params: list[Parameter]) -> None:
        super().__init__(tape, [one for one in params if is_matrix(one)])
        self.rest = FusedAdamW(tape, [one for one in params if not is_matrix(one)])

    def keep(self, parameter: Parameter) -> None:
        self.state(parameter, "momentum_buffer", parameter.shape, parameter.dtype)

    def step(self) -> None:
        tape, at = self.tape, dict[str, Tensor]()
        for one in self.params:
            at["update"] = tape.new("lerp", one.shape, one.dtype)
            at["update"] = orthogonalised(tape, at["update"])
        at.clear()
        self.rest.step()


def is_matrix(parameter: Parameter) -> bool:
    """Whether Muon takes a parameter."""
    return in_block(parameter.component) and len(parameter.shape) == 2


def orthogonalised(tape: Tape, matrix: Tensor) -> Tensor:
    """What Muon makes of an averaged gradient: a bf16 matrix X, from which X X' and its square are made in turn."""
    low, at = "bfloat16", dict[str, Tensor]()
    at["ortho"] = matrix if matrix.dtype == low else tape.new("to", matrix.shape, low)
    tape.hidden("linalg_vector_norm", 2, 2)
    size = min(matrix.shape)
    for _ in range(NEWTON_SCHULZ_STEPS):
        at["gram"] = tape.new("mm", (size, size), low)
        at["gram_update"] = tape.new("addmm", (size, size), low)
        at["ortho"] = tape.new("addmm", matrix.shape, low)
    return at["ortho"]


class BitsAndBytes(Optimizer):
    """bitsandbytes' AdamW in 8 bits; its kernels make nothing."""

    paged = False

    def __init__(self, tape: Tape, params: list[Parameter]) -> None:
        super().__init__(tape, params)
        self.maps = low_bit.shared_maps(tape) if any(low_bit.is_large(one) for one in params) else []

    def keep(self, parameter: Parameter) -> None:
        for name, shape, dtype in low_bit.bitsandbytes_state(parameter):
            if self.paged and low_bit.is_paged(parameter, name):
                self.tape.managed_bytes += low_bit.size_of(shape, dtype) * parameter.copies
            else:
                self.state(parameter, name, shape, dtype)


class PagedBitsAndBytes(BitsAndBytes):
    """The same with the codes of tensors of 100,000 elements in unified memory, which is no allocator's."""

    paged = True


class TorchAO(Optimizer):
    """torchao's AdamW, whose compiled step makes what `low_bit.torchao_temps` says."""

    bits = 8

    def __init__(self, tape: Tape, params: list[Parameter]) -> None:
        super().__init__(tape, params)
        self.rate = tape.allocate("lr", (), "float32", category="optimizer") if tape.rules == "cpu" else None

    def keep(self, parameter: Parameter) -> None:
        self.count_steps(parameter)
        for name, shape, dtype in low_bit.torchao_state(parameter, self.bits):
            self.state(parameter, name, shape, dtype)

    def step(self) -> None:
        for one in self.params:
            self.tape.hidden("single_param_adam", *low_bit.torchao_temps(one, self.bits))


class TorchAO4(TorchAO):
    """The same in 4 bits."""

    bits = 4


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": FusedAdamW,
    "adamw-foreach": ForeachAdamW,
    "adamw-loop": LoopAdamW,
    "adamw-8bit": BitsAndBytes,
    "adamw-8bit-paged": PagedBitsAndBytes,
    "adamw-8bit-torchao": TorchAO,
    "adamw-4bit-torchao": TorchAO4,
    "sgd": Optimizer,
    "sgd-momentum": Momentum,
    "adafactor": Adafactor,
    "muon": Muon,
}
"""By the names of `StepSpec.optimizer`."""
