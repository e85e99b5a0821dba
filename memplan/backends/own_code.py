"""Code of a user's inside a trace: what it raises, told in one sentence."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from memplan.errors import MemplanError
from memplan.trace.frames import raised_at


@contextmanager
def errors_told(who: str) -> Iterator[None]:
    """A place in which whatever `who` raises is a MemplanError that says where."""
    torch_says = logging.getLogger(
        "torch._subclasses.fake_tensor"
    )  # a traceback for each op that refuses its arguments
    silent, torch_says.disabled = torch_says.disabled, True
    try:
        yield
    except MemplanError:
        raise
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0].rstrip(".")
        raise MemplanError(
            f"{who} raised {type(error).__name__} at {raised_at(error)}: {first_line}.", advice_on(error)
        ) from error
    finally:
        torch_says.disabled = silent


def advice_on(error: Exception) -> str:
    """What to type instead, where the reason is plain."""
    if "cuda" in str(error).lower():
        return 'Leave .cuda() and device="cuda" out: inside a trace every tensor stands for one on the card.'
    return "It runs on fake CPU tensors; try it on real ones with a small model first."
