"""What of a loss a benchmark runs, in torch and over the ledger alike."""

from collections.abc import Callable, Sequence
from typing import Any


def turns(
    kind: str, loss: Callable[[], Any], backward: Callable[[Any], object], leaves: Sequence[Any]
) -> Callable[[], Any]:
    """The loss alone (`fw`), loss and gradients (`fw-bw`), or by turns the loss and its gradients (`bw`), so that a
    second call runs backward only. Gradients are cleared."""
    made: list[Any] = []

    def run_backward(value: Any) -> None:
        backward(value)
        for leaf in leaves:
            leaf.grad = None

    def by_turns() -> None:
        if made:
            run_backward(made.pop())
        else:
            made.append(loss())

    return {"fw": loss, "fw-bw": lambda: run_backward(loss()), "bw": by_turns}[kind]
