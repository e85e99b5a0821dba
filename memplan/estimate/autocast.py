"""What autocast hands on to ops: casts in the order in which its wrapper makes them.

Source: aten/src/ATen/autocast_mode.h and .cpp, torch 2.13.
"""

from memplan.estimate.tape import Parameter, Tensor
from memplan.estimate.views import FLOATS, to

LOW = ("bfloat16", "float16")
FP32_ON_CUDA = frozenset(
    ("pow", "rsqrt", "softmax", "log_softmax", "layer_norm", "rms_norm", "sum", "exp", "log", "softplus", "cumsum",
     "nll_loss", "norm", "kl_div", "cosh", "prod")
)  # fmt: skip
"""Ops that autocast runs in fp32. Source: AT_FORALL_FP32."""
FP32_ON_CPU = frozenset(("nll_loss", "cross_entropy", "kl_div", "prod", "mse_loss"))
"""The same of the CPU's."""


def for_autocast(name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The inputs of `name` as autocast hands them on, the last made first, as in `operands`."""
    return tuple([to(tensor, autocast_dtype(name, tensor)) for tensor in reversed(tensors)][::-1])


def autocast_dtype(name: str, x: Tensor) -> str:
    """What `name` reads `x` in: fp32 where autocast has it so."""
    fp32 = FP32_ON_CUDA if x.tape.rules == "cuda" else FP32_ON_CPU
    return "float32" if x.tape.autocast is not None and name in fp32 and x.dtype in LOW else x.dtype


def operands(*tensors: Tensor) -> tuple[Tensor, ...]:
    """A product's operands as autocast hands them on, the last made first: the order in which its wrapper, as GCC
    compiles it, evaluates a call's arguments (seen in traces and on the CPU), and backward's order the other way."""
    return tuple([lowered(tensor) for tensor in reversed(tensors)][::-1])


def lowered(x: Tensor) -> Tensor:
    """`x` in autocast's dtype; a parameter's copy is made once until autocast is left."""
    tape = x.tape
    if tape.autocast is None or x.dtype == tape.autocast or x.dtype not in FLOATS:
        return x
    if not isinstance(x, Parameter) or not x.requires_grad:
        return to(x, tape.autocast)
    if x not in tape.casts:
        tape.casts[x] = to(x, tape.autocast)
    return tape.casts[x]
