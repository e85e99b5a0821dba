"""Functions of Python files that are no modules of a package."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memplan.errors import MemplanError


def load(script: Path, function: str) -> Callable[..., Any]:
    """A function of a Python file, which is run to find it, its neighbours there to be imported; MemplanError when the
    file or the function is not there."""
    name = f"memplan_script_{script.stem}"
    spec = importlib.util.spec_from_file_location(name, script)
    if spec is None or spec.loader is None or not script.is_file():
        raise MemplanError(f"There is no Python file {script}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    sys.path.insert(0, str(script.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(script.parent))
    found = getattr(module, function, None)
    if not callable(found):
        raise MemplanError(f"{script} defines no function {function!r}.")
    return found  # type: ignore[no-any-return]
