"""What a module holds, as found by building it: the sizes from which formulas say what its training keeps."""

from dataclasses import dataclass

Size = tuple[tuple[int, ...], str]
"""Shape and dtype of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A parameter or a buffer."""

    name: str
    """Path in its module."""
    shape: tuple[int, ...]
    """Elements along each dimension."""
    dtype: str
    """Without `torch.`."""
    trains: bool = False
    """Whether it asks for gradients."""
    idle: bool = False
    """Whether none ever comes: optimizers leave such parameters alone."""
    matrix: bool = False
    """Whether it is one of the matrices of the blocks that Muon takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """Everything that a module holds, tied tensors once."""

    parameters: tuple[HeldTensor, ...]
    """In the module's own order, adapters included."""
    buffers: tuple[HeldTensor, ...]
    """Those that are no parameters."""
    vocab: int
    """Tokens that it knows."""
    embedding: int
    """Parameters of its table of tokens."""
    max_seq: int | None
    """Tokens of the longest sample that it takes, where its configuration says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSizes:
    """What an optimizer keeps for some parameters, and what its step makes for a moment."""

    shared: tuple[Size, ...]
    """For all of them together."""
    each: tuple[tuple[Size, ...], ...]
    """For each of them."""
    passing: tuple[tuple[int, ...], ...]
    """Bytes of what the step of each makes, all there at once, and drops."""
