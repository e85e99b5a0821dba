"""Dispatch modes whose handlers are called as they are."""

from torch.utils._python_dispatch import TorchDispatchMode


class PlainMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that is not guarded against being compiled, which costs more at each op than what it does; nothing is
    compiled in a trace."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
