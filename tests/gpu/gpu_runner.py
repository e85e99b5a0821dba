"""Runs test files where pytest is not installed: python tests/gpu/gpu_runner.py FILE ...

Each file runs in a process of its own, each of its functions `test_*` without arguments; a line a test, and exit code 1
when one failed.
"""

import importlib.util
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any


class Marks:
    """`pytest.mark`: whatever is asked for changes nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *values, **options: values[0] if len(values) == 1 and callable(values[0]) else lambda of: of


def stand_in() -> ModuleType:
    """What the files take from pytest."""
    module = ModuleType("pytest")
    module.mark = Marks()  # type: ignore[attr-defined]
    return module


def run_file(path: Path) -> int:
    """Number of failed tests of a file, or 1 when it cannot be loaded."""
    if importlib.util.find_spec("pytest") is None:
        sys.modules["pytest"] = stand_in()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    failed = 0
    spec.loader.exec_module(module)
    for name, test in list(vars(module).items()):
        if not (name.startswith("test_") and callable(test)):
            continue
        began = time.monotonic()
        try:
            test()
            said = "passed"
        except Exception:
            failed += 1
            said = "FAILED"
            traceback.print_exc(file=sys.stdout)
        print(f"{said} {path.name}::{name} ({time.monotonic() - began:.1f} s)", flush=True)
    return failed


def main(arguments: list[str]) -> int:
    """Exit code: 1 when a test failed or a file could not be loaded."""
    if arguments and arguments[0] == "--one":
        return min(run_file(Path(arguments[1])), 1)
    codes = [subprocess.call([sys.executable, __file__, "--one", path]) for path in arguments]
    return min(sum(map(abs, codes)), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
