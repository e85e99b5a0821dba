"""What memplan says when it cannot go on: one clear sentence, and what to type instead."""

from collections.abc import Iterable


class MemplanError(Exception):
    """A failure that a user can act on; the command line prints it without a traceback."""

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class NothingMeasuredError(MemplanError):
    """There is no row to judge."""

    exit_code = 3


class NotComparableError(MemplanError):
    """Two results come from different machines or configurations."""

    exit_code = 4


NOTHING_TRAINS = ("No parameter trains, so that the optimizer has nothing to step on.", "Freeze fewer of them.")
"""The sentence for a model that is frozen from end to end."""
NOTHING_LEADS = (
    "No parameter that trains has a part in the loss, so that there are no gradients.", "Freeze fewer of them.",
)  # fmt: skip
"""The sentence for one of which only what the step does not run is left to train."""


def near_names(name: str, known: Iterable[str]) -> str:
    """A hint that lists the known names closest to `name`, or all of them when none is close."""
    import difflib

    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return "Did you mean " + " or ".join(close) + "?"
    return "Known: " + ", ".join(names) + "."
