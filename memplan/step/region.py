"""A part of the step that keeps its inputs only and runs again in backward."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from memplan.step.attention import attention_pin

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""What holds while a region runs in forward, and what holds while it runs again."""
Watch = Callable[["Region"], Contexts]


class Region:
    """A function that is checkpointed: non-reentrant, and only under grad, so that evaluation, generation and no-grad
    encodes take the plain path.

    The attention kernels that are allowed when it runs are allowed again when it is recomputed, which happens in
    backward, outside of whatever `sdpa_kernel` the caller had entered.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        preserve_rng: bool = False,
        contexts: Callable[[], Contexts] | None = None,
    ) -> None:
        self.name = name
        """Path of the module, or what it is."""
        self.function = function
        """What runs: twice in a step with a backward."""
        self.preserve_rng = preserve_rng
        """Whether random numbers drawn inside are drawn again alike."""
        self.contexts = contexts
        """Contexts of a policy, such as that of selective checkpointing, made anew for each call; None for none."""
        self.watch: Watch | None = None
        """Who looks on, made anew for each call; nobody unless `verify` does."""
        self.compiled: Callable[..., Any] | None = None
        """The function, checkpointed under its policy and compiled with it, where nobody looks on; None elsewhere."""
        self.num_checkpointed = 0
        """Calls that entered checkpointing so far."""
        self.num_calls = 0
        """Runs of the function so far: one a plain call, two a checkpointed one that came to its backward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.engages():
            return self.run(*args, **kwargs)
        self.num_checkpointed += 1
        if self.compiled is not None:
            return self.compiled(*args, **kwargs)
        return checkpoint(
            self.run,
            *args,
            use_reentrant=False,
            preserve_rng_state=self.preserve_rng,
            context_fn=self.entered,
            **kwargs,
        )

    def engages(self) -> bool:
        """Whether a call now would be checkpointed."""
        return torch.is_grad_enabled()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function, and counts that."""
        self.num_calls += 1
        return self.function(*args, **kwargs)

    def entered(self) -> Contexts:
        """Contexts of one call: the attention pin, the policy, and who looks on, innermost last."""
        pairs = [attention_pin()]
        if self.contexts is not None:
            pairs.append(self.contexts())
        if self.watch is not None:
            pairs.append(self.watch(self))
        return together([pair[0] for pair in pairs]), together([pair[1] for pair in pairs])


@contextmanager
def together(contexts: list[AbstractContextManager[Any]]) -> Any:
    """All of `contexts`, entered in order."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
