"""One attention call, and the answer which kernel takes it. No torch.

Letters: `B` batch, `S` sequence, `A` query heads, `K` key/value heads, `D` head size.
"""

from dataclasses import dataclass
from typing import Literal

Backend = Literal["flash", "efficient", "cudnn", "math"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """Sizes and steps of one tensor."""

    shape: tuple[int, ...]
    """Sizes, outermost first."""
    strides: tuple[int, ...]
    """Steps in elements, one for each size."""

    @classmethod
    def dense(cls, *shape: int) -> "TensorShape":
        """`shape` laid out without gaps, the last dimension fastest."""
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        return cls(shape=shape, strides=tuple(reversed(strides)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """The mask of a call."""

    tensor: TensorShape
    """Its sizes and steps."""
    kind: Literal["bool", "additive"]
    """True for the positions that take part, or numbers added to the scores."""
    requires_grad: bool = False
    """Whether the mask itself is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One call of `scaled_dot_product_attention`, as far as the choice depends on it."""

    query: TensorShape
    """[B, A, S, D]."""
    key: TensorShape
    """[B, K, S, D]."""
    value: TensorShape
    """[B, K, S, D]."""
    dtype: str
    """Of query, key and value, after autocast: `bfloat16`, `float16`, `float32`."""
    mask: Mask | None = None
    """None without a mask."""
    is_causal: bool = False
    """The flag of that name."""
    enable_gqa: bool = False
    """Whether keys and values may have fewer heads."""
    dropout: float = 0.0
    """Probability, 0..1."""
    requires_grad: bool = False
    """Whether a gradient will be asked of query, key or value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The global switches that `sdpa_kernel` and `torch.backends.cuda.enable_*_sdp` set."""

    flash: bool = True
    """Flash attention allowed."""
    efficient: bool = True
    """Memory-efficient attention allowed."""
    cudnn: bool = True
    """cuDNN attention allowed."""
    math: bool = True
    """The composite of matmul and softmax allowed."""
    priority: tuple[Backend, ...] | None = None
    """Order asked for by `sdpa_kernel(..., set_priority=True)`; None for the card's own."""
    deterministic: bool = False
    """`torch.use_deterministic_algorithms(True)`, not as a warning only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The kernel chosen, and why those tried before it were not."""

    backend: Backend
    """The kernel that runs."""
    reasons: tuple[tuple[Backend, str], ...]
    """(kernel, why it cannot run) of every other kernel that was asked, in the order tried."""

    def why_not(self, backend: Backend) -> str | None:
        """Why `backend` was passed over; None when it was chosen or stands behind the chosen one."""
        return dict(self.reasons).get(backend)
