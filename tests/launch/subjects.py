"""Steps to measure, and ears for what a worker says of them."""

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # makes inductor's folder, which is no test's
from fake_cuda import FakeCuda
from torch import nn

from memplan.backends.subject import Mark, Subject
from memplan.ladder.windows import fold
from memplan.launch.events import Events


class Heard(Events):
    """Events that stay in a list."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.said: list[dict[str, Any]] = []

    def write(self, event: str, **values: Any) -> None:
        self.said.append({"event": event} | values)

    def of(self, event: str) -> list[dict[str, Any]]:
        """What was said under one name."""
        return [said for said in self.said if said["event"] == event]

    def row(self) -> dict[str, Any]:
        """The fields of a row."""
        return fold(self.said)


class Steps:
    """A step on the stand-in: `each` says what happens in it by its number, from 1; it takes 100 ms where nobody turns
    the clock."""

    def __init__(self, cuda: FakeCuda, each: Callable[[int], Any] = lambda number: None) -> None:
        self.cuda = cuda
        self.each = each
        self.num_taken = 0

    def __call__(self, mark: Mark) -> Any:
        self.num_taken += 1
        self.cuda.now_ms += 100
        mark("forward")
        self.cuda.free(self.cuda.allocate(4096))
        loss = self.each(self.num_taken)
        mark("optimizer")
        return 1.0 if loss is None else loss

    def subject(self) -> Subject:
        """The step as something to measure."""
        return Subject(take=self)


class Small:
    """A real step on the CPU: a linear layer and SGD."""

    def __init__(self, width: int = 64, *, lr: float = 0.1) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(width, width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.batch = torch.randn(8, width)
        self.left: list[Any] = []

    def __call__(self, mark: Mark) -> torch.Tensor:
        mark("forward")
        loss = self.loss()
        mark("backward")
        loss.backward()
        mark("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def loss(self) -> torch.Tensor:
        """What is made small."""
        return self.model(self.batch).square().mean()

    def subject(self, **more: Any) -> Subject:
        """The step as something to measure."""
        return Subject(take=self, models={"": self.model}, optimizers=[self.optimizer], **more)


def job(**more: Any) -> dict[str, Any]:
    """A worker's job on a small run."""
    from samples import run_of

    return {"run": run_of().to_dict(), "warmup": 1, "steps": 2} | more
