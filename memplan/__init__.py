"""memplan: what fits on the card, by estimate, by trace and by real steps."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memplan.trace.tracing import Tracing, tracing

__version__ = "0.1.0"
__all__ = ["Tracing", "__version__", "tracing"]


def __getattr__(name: str) -> Any:
    """`tracing` and `Tracing`, which import torch when they are first asked for."""
    if name in ("Tracing", "tracing"):
        from memplan.trace import tracing as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
