"""The unit of the activation formulas: a part of a block, what it keeps and what it needs for a moment."""

from dataclasses import dataclass

from memplan.spec.run import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Bytes of one element, by role, and whose rules hold."""

    compute: int
    """w: inputs and outputs of matrix products and attention: 4 in fp32, 2 otherwise."""
    residual: int
    """r: the residual stream: 4 in fp32 and under autocast, 2 in bf16."""
    param: int
    """p: parameters and gradients: 4 in fp32 and under autocast, 2 in bf16."""
    normed: int
    """Outputs of norms: as the residual, or 4 where autocast runs the norm in fp32."""
    rules: str
    """`cuda` or `cpu`."""

    @staticmethod
    def of(run: RunSpec) -> "Widths":
        """The decoder's widths in a run's precision."""
        compute, residual = {"fp32": (4, 4), "bf16": (2, 2), "bf16-mixed": (2, 4)}[run.step.precision]
        return Widths(compute=compute, residual=residual, param=residual, normed=residual, rules=run.device.rules)

    @staticmethod
    def of_tower(run: RunSpec) -> "Widths":
        """The vision tower's widths: its residual stream starts from a product, so autocast makes it bf16.

        CUDA's autocast runs layer_norm in fp32, the CPU's in its input's dtype.
        Source: aten/src/ATen/autocast_mode.h, torch 2.13.
        """
        decoder = Widths.of(run)
        normed = 4 if decoder.mixed and decoder.rules == "cuda" else decoder.compute
        return Widths(
            compute=decoder.compute,
            residual=decoder.compute,
            param=decoder.param,
            normed=normed,
            rules=decoder.rules,
        )

    @property
    def mixed(self) -> bool:
        """Whether autocast makes low-precision copies of fp32 weights."""
        return self.compute != self.param

    @property
    def copied(self) -> bool:
        """Whether every product makes a low-precision copy of a norm's output."""
        return self.compute != self.normed


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One step inside a block. All sizes are bytes of one backward pass's rows."""

    name: str
    """What it is: `attn_norm`, `sdpa`, `down`."""
    saved: int
    """Kept from its forward to the end of its backward. A tensor that two parts keep is counted by the first."""
    casts: int = 0
    """Low-precision copies of weights kept for backward, whatever the number of rows."""
    forward: int = 0
    """Most alive during its forward beyond what the parts before it keep, its own saved tensors included."""
    unkept: int = 0
    """Most alive during its forward when no part keeps anything, the stage's input not counted."""
    backward: int = 0
    """Most alive during its backward beyond what it and the parts before it keep and the residual's gradient:
    gradients that come in and go out, those of its parameters included, and temporaries."""
    grads: int = 0
    """Gradients of its parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A run of parts that autograd undoes in reverse, such as one decoder block."""

    name: str
    """What it is: `block`, `vision block`, `connector`."""
    parts: tuple[Part, ...]
    """In forward order."""
    carried: int
    """Gradient of the stage's output, alive through the whole of its backward (the residual path)."""
    held: int
    """Alive through forward without being saved: the input in a dtype that no op keeps."""
    output: int
    """Made at the end of forward: the residual sum and the last product beside it."""
    entry: int
    """What checkpointing keeps instead of the parts: the stage's input."""
    entry_saved: bool
    """Whether the input is also what the first part keeps, so that it is there once."""

    @property
    def saved(self) -> int:
        """Kept for backward without checkpointing, weight copies not counted."""
        return sum(part.saved for part in self.parts)

    @property
    def casts(self) -> int:
        """Low-precision copies of weights."""
        return sum(part.casts for part in self.parts)

    @property
    def grads(self) -> int:
        """Gradients of the stage's parameters."""
        return sum(part.grads for part in self.parts)

    @property
    def forward(self) -> int:
        """Most alive in a forward whose tensors are kept, beyond what was alive before."""
        kept, peak = 0, 0
        for part in self.parts:
            peak = max(peak, kept + part.forward)
            kept += part.saved + part.casts
        return self.held + max(peak, kept + self.output)

    @property
    def unkept_forward(self) -> int:
        """Most alive in a forward whose tensors are not kept, beyond what was alive before, the input included."""
        return self.entry + max(part.unkept for part in self.parts)

    def backward(self, *, accumulated: bool) -> tuple[int, int, int]:
        """Saved bytes left, gradients made and temporaries at the largest moment of backward.

        `accumulated`: every gradient exists already (a second chunk), so that a new one is a temporary until added.
        """
        kept, done = self.saved + self.casts, 0
        best = (kept, 0, self.carried)
        for part in reversed(self.parts):
            moment = (kept, done, self.carried + part.backward)
            best = max(best, moment, key=sum)
            kept -= part.saved + part.casts
            done += 0 if accumulated else part.grads
        return best
