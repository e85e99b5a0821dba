"""What optimizers keep between steps, and what their step makes and drops.

Source: torch/optim/adamw.py, adam.py (`_multi_tensor_adam`, `_single_tensor_adam`), sgd.py, torch 2.13.
"""

from memplan.estimate.tape import Parameter, Storage, Tape


def trainable(tape: Tape) -> list[Parameter]:
    """The parameters that the optimizer updates."""
    return [parameter for parameter in tape.parameters if parameter.requires_grad]


def keep(tape: Tape, parameter: Parameter, name: str, shape: tuple[int, ...], dtype: str) -> None:
    """State of a parameter and of those that it speaks for."""
    parameter.state.append(tape.allocate(name, shape, dtype, category="optimizer", copies=parameter.copies))


def make_states(tape: Tape, optimizer: str, parameters: list[Parameter]) -> None:
    """Allocates what `optimizer` keeps for `parameters` from its first step on."""
    for parameter in parameters:
        if optimizer.startswith("adamw"):
            keep(tape, parameter, "exp_avg", parameter.shape, parameter.dtype)
            keep(tape, parameter, "exp_avg_sq", parameter.shape, parameter.dtype)
            if tape.rules == "cpu" or optimizer == "adamw":
                keep(tape, parameter, "step", (), "float32")


def step(tape: Tape, optimizer: str, parameters: list[Parameter]) -> None:
    """What the optimizer's step makes and drops: fused nothing, foreach a copy of all, the loop two of the largest."""
    with_grads = [parameter for parameter in parameters if parameter.grad is not None]
    if optimizer == "adamw-foreach":
        held: list[Storage] = []
        for parameter in with_grads:
            held.append(tape.allocate("_foreach_sqrt", parameter.shape, parameter.dtype, copies=parameter.copies))
        held.clear()
    elif optimizer == "adamw-loop":
        for parameter in with_grads:
            root = tape.new("sqrt", parameter.shape, parameter.dtype)
            quotient = tape.new("div", parameter.shape, parameter.dtype)
            del root, quotient


def release(parameters: list[Parameter]) -> None:
    """Lets all gradients go."""
    for parameter in parameters:
        parameter.grad = parameter.others = None
