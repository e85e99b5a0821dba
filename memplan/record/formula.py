"""One line of an estimate with its formula."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaLine:
    """Equal tensors that are alive at the peak."""

    category: str
    """One of `CATEGORIES`."""
    part: str
    """Module that made them, the number of its block left out."""
    op: str
    """Op that made them."""
    count: int
    """How many there are."""
    formula: str
    """Bytes of one in the letters of `spec.model`, before the allocator rounds them: `4 * B*S*H`."""
    num_bytes: int
    """Bytes of all together, rounded."""
