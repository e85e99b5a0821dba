"""Whose code asked: the Python stack without torch's own frames and the tracing's."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from memplan.errors import MemplanError
from memplan.trace.events import Frame

TORCH_FOLDER = torch.__file__.rsplit("/", 1)[0]
OPTIM_FOLDER = f"{TORCH_FOLDER}/optim"
PACKAGE_FOLDER = __file__.rsplit("/", 3)[0]
TRACE_FOLDER = __file__.rsplit("/", 1)[0]
FROM_PYTHON = torch.ops.aten.lift_fresh.default
"""What `torch.tensor(number)` ends with; optimizers make step counters so, `device="cpu"`, unless they are fused.
Source: torch/optim/adam.py `_init_group`, torch 2.13."""


def untraceable(func: Any) -> MemplanError:
    """The sentence for an op whose result's shape depends on values."""
    return MemplanError(
        f"{caller()} calls {func}, whose result's shape depends on the values in its tensors, so the step cannot be"
        " traced without running it.",
        "Give it a fixed shape (a mask instead of a selection, a padded size), or measure with memplan ladder.",
    )


def stack(limit: int = 24) -> tuple[Frame, ...]:
    """The Python stack of the code that called the op, innermost first, without torch's and the tracing's frames."""
    frames: list[Frame] = []
    frame: Any = sys._getframe(2)
    while frame is not None and len(frames) < limit:
        code = frame.f_code
        if not is_inside(code.co_filename):
            frames.append(Frame(code.co_filename, frame.f_lineno, code.co_qualname))
        frame = frame.f_back
    return tuple(frames)


def caller() -> str:
    """File and line of the innermost code outside of torch and of the tracing."""
    found = stack(1)
    return f"{shortened(found[0].filename)}:{found[0].line}" if found else "the autograd engine"


def raised_at(error: BaseException) -> str:
    """File and line of the innermost code outside of torch and of the tracing that `error` went through."""
    found, trace = "", error.__traceback__
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if not is_inside(filename):
            found = f"{shortened(filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def shortened(filename: str) -> str:
    """`filename` from the current folder, or from the folder that memplan lies in, where it is below one of them."""
    for folder in (str(Path.cwd()), PACKAGE_FOLDER):
        if filename.startswith(folder + os.sep):
            return filename[len(folder) + 1 :]
    return filename


def in_optimizer() -> bool:
    """Whether the op was called by an optimizer of torch's."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(OPTIM_FOLDER):
            return True
        frame = frame.f_back
    return False


def is_inside(filename: str) -> bool:
    """Whether a file belongs to torch or to the tracing itself."""
    return filename.startswith((TORCH_FOLDER, TRACE_FOLDER, "<"))
