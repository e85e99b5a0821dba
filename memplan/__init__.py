"""memplan: what fits on the card, by estimate, by trace and by real steps."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memplan.backends.peak_window import PeakWindow
    from memplan.backends.trainer_callback import PeakWindowCallback
    from memplan.trace.tracing import Tracing, tracing

__version__ = "0.1.0"
__all__ = ["PeakWindow", "PeakWindowCallback", "Tracing", "__version__", "tracing"]


def __getattr__(name: str) -> Any:
    """The names of the library, whose modules are loaded when they are first asked for: traces import torch, windows
    when they open, the callback transformers."""
    if name in ("Tracing", "tracing"):
        from memplan.trace import tracing as module

        return getattr(module, name)
    if name == "PeakWindow":
        from memplan.backends.peak_window import PeakWindow

        return PeakWindow
    if name == "PeakWindowCallback":
        from memplan.backends.trainer_callback import PeakWindowCallback

        return PeakWindowCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
