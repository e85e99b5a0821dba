"""Code of a user's, named as `pkg.mod:name`."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memplan.errors import MemplanError, near_names

EXAMPLE = "Type the module and a function in it, like pkg.mod:make."


def load_entry(entry: str) -> Callable[..., Any]:
    """The callable that `entry` names, its module looked for from the current folder too.

    MemplanError when the text is of another form, the module cannot be found, or has no such name.
    """
    module_name, colon, name = entry.partition(":")
    if not colon or not module_name or not name.isidentifier():
        raise MemplanError(f"{entry!r} names no function.", EXAMPLE)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not module_name.startswith(error.name):
            raise not_imported(module_name, error) from error  # it is there; something that it imports is not
        raise MemplanError(f"There is no module {module_name!r} here.", EXAMPLE) from None
    except Exception as error:
        raise not_imported(module_name, error) from error
    found = getattr(module, name, None)
    if not callable(found):
        names = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        raise MemplanError(f"{module_name} has no function {name!r}.", near_names(name, names))
    return found


def not_imported(module_name: str, error: Exception) -> MemplanError:
    """The sentence for a module that raises when it is imported."""
    first_line = (str(error).splitlines() or [""])[0].rstrip(".")
    return MemplanError(
        f"Importing {module_name!r} raised {type(error).__name__}: {first_line}.",
        f"Try: python -c 'import {module_name}'",
    )
