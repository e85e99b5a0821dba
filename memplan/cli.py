"""The command line: finds the verb, runs it, and ends with its exit code."""

import gc
import importlib
import os
import sys
from typing import NoReturn

from memplan.cli_io import say
from memplan.cli_options import Verb, plain_values
from memplan.errors import MemplanError

MODULES = {
    "memplan.cli_ladder": ("ladder",),
    "memplan.cli_ask": ("estimate", "trace", "explain", "models", "doctor", "verify", "calibrate"),
    "memplan.cli_reports": ("report", "compare", "history", "baseline"),
}
"""Modules with the first words of their verbs, as the help lists them."""


def verbs(first: str | None = None) -> dict[str, Verb]:
    """The verbs by what is typed for them: those that begin with the word `first`, or all where none does. Only their
    modules are loaded, which takes time."""
    chosen = [name for name, words in MODULES.items() if first in words] or list(MODULES)
    found = {words: verb for name in chosen for words, verb in importlib.import_module(name).VERBS.items()}
    return {words: verb for words, verb in found.items() if words.partition(" ")[0] == first} or found


def main() -> NoReturn:
    """The console entry: runs a verb and ends with its exit code."""
    open_streams()
    at_once = sys.argv[1:2] == ["estimate"]
    if at_once:
        gc.disable()  # it ends sooner than a collection would pay
    try:
        run(sys.argv[1:])
    except MemplanError as error:
        say([f"memplan: {error}"])
        sys.exit(error.exit_code)
    except OSError as error:  # a full disk, a folder that was taken away
        where = f"{error.filename}: " if error.filename else ""
        say([f"memplan: {where}{error.strerror or error}."])
        sys.exit(MemplanError.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if at_once:
            gc.freeze()  # nor does the interpreter look for garbage at its end
    sys.exit(0)


def run(words: list[str]) -> None:
    """Runs the verb that `words` begin with. `estimate` is to answer at once: where its options are plain, no parser is
    loaded to read them."""
    found = verbs(words[0] if words else None)
    if words[:1] == ["estimate"] and (values := plain_values(found["estimate"], words[1:])) is not None:
        found["estimate"].run(**values)
        return
    from memplan.cli_typer import call

    call(found, words)


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
