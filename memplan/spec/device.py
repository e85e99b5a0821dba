"""Where the step runs: whose rules hold and how much memory there is."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A card, or the host's own memory."""

    name: str
    """Name on the command line: `h100-80g`, `cpu`."""
    rules: Literal["cuda", "cpu"]
    """Whose allocator, kernels and autocast lists hold."""
    capacity_bytes: int | None = None
    """Bytes that the allocator can reach at most; None where unknown."""
    source: str = ""
    """Where `capacity_bytes` comes from."""
