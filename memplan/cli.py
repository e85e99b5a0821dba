"""The command line: finds the verb, runs it, and ends with its exit code."""

import gc
import importlib
import os
import sys
from typing import NoReturn

import typer

from memplan.cli_io import say
from memplan.errors import MemplanError

VERBS = {
    "memplan.cli_ladder": ("ladder",),
    "memplan.cli_ask": ("estimate", "trace", "explain", "models", "doctor", "verify", "calibrate"),
    "memplan.cli_reports": ("report", "compare", "history", "baseline"),
}
"""Modules with the verbs that they add, as the help lists them."""


def application(only: str | None = None) -> typer.Typer:
    """The command line of every verb, or of one alone: the others cost time to build, and `estimate` is to answer at
    once."""
    app = typer.Typer(
        name="memplan",
        help="What fits on the card: estimate, trace and measure the memory of a training step.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        no_args_is_help=True,
        callback=lambda: None,  # or else a single verb would be no verb
    )
    for module, verbs in VERBS.items():
        if only is None or only in verbs:
            importlib.import_module(module).add_verbs(app, only)
    return app


def main() -> NoReturn:
    """The console entry: runs a verb and ends with its exit code."""
    open_streams()
    verb = next((word for word in sys.argv[1:2] if any(word in verbs for verbs in VERBS.values())), None)
    if verb == "estimate":
        gc.disable()  # it ends sooner than a collection would pay
    try:
        application(verb)()
    except MemplanError as error:
        say([f"memplan: {error}"])
        sys.exit(error.exit_code)
    except OSError as error:  # a full disk, a folder that was taken away
        where = f"{error.filename}: " if error.filename else ""
        say([f"memplan: {where}{error.strerror or error}."])
        sys.exit(MemplanError.exit_code)
    sys.exit(0)


def open_streams() -> None:
    """Where one of the three standard streams was closed, something is there in its place: files that are opened later
    must not take its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  # as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115


if __name__ == "__main__":
    main()
