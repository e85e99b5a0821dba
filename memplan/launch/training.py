"""Is anything trained? What the first step's gradients and parameters say, read without disturbing a peak."""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memplan.backends.failure import NotTraining
from memplan.backends.subject import Subject

PIECE = 1 << 12
"""Elements of a parameter that are looked at in one place."""
STRETCH = 1 << 22
"""Elements of a gradient whose norm is taken at once, so that a cast of them stays small."""
Mark = Callable[[str], None]


class Training:
    """Watches a subject's first step, and says whether it trains."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.grad_norm: float | None = None
        """Total norm of the gradients of the first step; None where nobody showed them."""
        self._before: list[int] = []
        self._squares: dict[int, float] = {}

    def start(self) -> None:
        """Takes down what the parameters are. NotTraining where no token has a label."""
        if self.subject.num_targets == 0:
            raise NotTraining("no token of the batch has a label: there is nothing to train on")
        self._before = fingerprints(self.subject.trained())

    @contextmanager
    def watching(self, mark: Mark) -> Iterator[Mark]:
        """A mark for the first step, which reads the gradients when `optimizer` begins: before clipping. Where no such
        phase begins they are read by each optimizer just before it steps."""
        seen: list[bool] = []

        def heard(phase: str) -> None:
            mark(phase)
            if phase == "optimizer" and not seen:
                seen.append(True)
                self._read(self.subject.trained(), self.subject.loss_scale())

        def stepping(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not seen:
                self._read((param for group in optimizer.param_groups for param in group["params"]), 1.0)

        hook = register_optimizer_step_pre_hook(stepping)
        try:
            yield heard
        finally:
            hook.remove()
        self.grad_norm = math.sqrt(sum(self._squares.values())) if self._squares else None

    def _read(self, params: Iterable[Tensor], scale: float) -> None:
        for param in params:
            if param.grad is not None:
                self._squares[id(param)] = squared_norm(param.grad) / scale**2

    def check_gradients(self) -> None:
        """NotTraining where the norm is zero or not finite; a scaled step with such gradients is left out instead."""
        norm = self.grad_norm
        if norm is None or (self.subject.scaled and not math.isfinite(norm)):
            return
        if norm == 0 or not math.isfinite(norm):
            what = "zero: nothing that trains has a part in the loss" if norm == 0 else f"{norm}"
            raise NotTraining(f"the gradient norm of the first step is {what}")

    def changed(self) -> bool:
        """Whether any parameter is another than at the start; True where there is none to look at."""
        return not self._before or fingerprints(self.subject.trained()) != self._before

    def check_parameters(self) -> None:
        """NotTraining where none is."""
        if not self.changed():
            raise NotTraining(
                "no parameter has changed: nothing steps on them, the learning rate is zero, or each update is lost in "
                "rounding"
            )


def squared_norm(tensor: Tensor) -> float:
    """Square of the norm of `tensor` in fp32, of a stretch at a time."""
    flat = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
    if flat.is_sparse:
        flat = flat.coalesce().values()
    pieces = flat.view(-1).split(STRETCH) if flat.is_contiguous() else (flat,)
    norms = [float(torch.linalg.vector_norm(piece, dtype=torch.float32)) for piece in pieces]
    return sum(norm**2 for norm in norms)


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """A checksum of each tensor's ends and middle, whole where it is small; tensors without memory of their own are
    left out. The pieces are copied to the host as they are, so that the device allocates nothing."""
    found = []
    for tensor in tensors:
        try:
            flat = tensor.detach().view(-1)
            places = {0, max(flat.numel() // 2 - PIECE // 2, 0), max(flat.numel() - PIECE, 0)}
            pieces = [flat[place : place + PIECE].cpu().view(torch.uint8).numpy() for place in sorted(places)]
        except (RuntimeError, TypeError, NotImplementedError):  # shells, and what is not contiguous
            continue
        found.append(zlib.crc32(b"".join(piece.tobytes() for piece in pieces)))
    return found
