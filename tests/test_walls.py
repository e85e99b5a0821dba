"""Who may import whom, and who never loads torch. Each check is shown a breach that it must see."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "memplan"
BASE = {"units", "dtypes", "errors", ""}  # "" is memplan itself: its version
ALLOWED = {
    "": {"trace", "backends"},  # `memplan.tracing` and `memplan.PeakWindow`, imported when they are first asked for
    "errors": set(),
    "units": {"errors"},
    "dtypes": {"errors"},
    "spec": BASE,
    "record": BASE | {"spec"},
    "models": BASE | {"spec"},
    "estimate": BASE | {"spec", "record", "allocator"},
    "allocator": BASE,
    "trace": BASE | {"spec", "record", "allocator"},
    "step": BASE | {"spec", "record", "models"},
    "backends": BASE | {"spec", "record", "models", "step", "trace"},
    "launch": BASE | {"spec", "record", "models", "step", "backends"},
    "ladder": BASE | {"spec", "record", "models", "backends", "launch"},
    "analysis": BASE | {"spec", "record"},
    "report": BASE | {"spec", "record", "analysis"},
    "api_ladder": BASE | {"spec", "record", "models", "backends", "launch", "ladder", "estimate", "analysis"},
    "api": BASE
    | {"spec", "record", "models", "step", "trace", "backends", "ladder", "estimate", "analysis", "api_module"},
    "api_module": BASE | {"spec", "record", "backends", "estimate"},
    "api_sweep": BASE | {"spec", "estimate", "api", "api_module"},
    "api_reports": BASE | {"record", "analysis"},
    "cli": BASE | {"cli_io", "cli_options", "cli_typer", "cli_ask", "cli_ladder", "cli_reports"},
    "cli_typer": BASE | {"cli_options"},
    "cli_ask": BASE | {"spec", "record", "api", "report", "cli_options", "cli_io", "cli_once", "cli_sweep"},
    "cli_sweep": BASE | {"spec", "api_sweep", "report", "cli_options", "cli_io", "cli_once"},
    "cli_once": BASE | {"spec"},
    "cli_io": BASE | {"spec", "cli_options", "cli_once"},
    "cli_ladder": BASE | {"spec", "record", "api_ladder", "analysis", "report", "cli_io", "cli_options"},
    "cli_reports": BASE | {"record", "api_reports", "analysis", "report", "cli_io", "cli_options"},
    "cli_options": BASE,
    "__main__": {"cli"},
    "pytest_plugin": BASE | {"spec", "trace", "backends", "analysis"},
}
"""Part of the package to the parts that it may import."""
TORCH_FREE = (
    "memplan.units",
    "memplan.dtypes",
    "memplan.errors",
    "memplan.spec",
    "memplan.record",
    "memplan.allocator",
    "memplan.estimate",
    "memplan.models.registry",
    "memplan.backends.base",
    "memplan.backends.environment",
    "memplan.launch.process",
    "memplan.launch.settle",
    "memplan.launch.watch",
    "memplan.ladder.runner",
    "memplan.ladder.points",
    "memplan.analysis",
    "memplan.report.page",
    "memplan.report.html",
    "memplan.report.summary",
    "memplan.report.junit",
    "memplan.report.lists",
    "memplan.report.estimate_page",
    "memplan.report.timeline_plot",
    "memplan.report.trace_page",
    "memplan.api",
    "memplan.api_ladder",
    "memplan.api_module",
    "memplan.api_reports",
    "memplan.api_sweep",
    "memplan.report.compare_table",
    "memplan.report.history_page",
    "memplan.cli",
    "memplan.pytest_plugin.fixture",
)


def part_of(module: str) -> str:
    """`memplan.spec.run` -> `spec`; `memplan` -> ``."""
    return module.split(".")[1] if "." in module else ""


def imports(source: str) -> set[str]:
    """Modules of memplan that `source` imports, anywhere in it; names pulled out of `memplan` itself are modules."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who imports whom"
            if node.module == "memplan":
                found |= {f"memplan.{alias.name}" for alias in node.names if not alias.name.startswith("__")}
            elif node.module is not None:
                found.add(node.module)
    return {name for name in found if name == "memplan" or name.startswith("memplan.")}


def breaches(package: Path) -> list[str]:
    """`part -> part (file)` for each import that the table does not allow."""
    found = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package).with_suffix("")
        part = "" if relative.name == "__init__" and len(relative.parts) == 1 else relative.parts[0]
        allowed = ALLOWED.get(part)
        assert allowed is not None, f"{relative}: a part that the table of walls does not know"
        for module in sorted(imports(path.read_text(encoding="utf-8"))):
            if part_of(module) not in allowed | {part}:
                found.append(f"{part} -> {part_of(module)} ({relative})")
    return found


def loads_torch(*modules: str) -> bool:
    """Whether a fresh interpreter has torch loaded after importing `modules`."""
    code = (
        "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"


def test_the_walls_stand() -> None:
    assert breaches(PACKAGE) == []


@pytest.mark.parametrize(
    ("path", "source", "breach"),
    [
        ("spec/run.py", "from memplan.record import Estimate", "spec -> record (spec/run)"),
        ("estimate/peak.py", "import memplan.step.builder", "estimate -> step (estimate/peak)"),
        ("report/page.py", "def f():\n    from memplan import api", "report -> api (report/page)"),
        ("ladder/runner.py", "if True:\n    import memplan.estimate as e", "ladder -> estimate (ladder/runner)"),
    ],
)
def test_a_planted_breach_is_seen(tmp_path: Path, path: str, source: str, breach: str) -> None:
    (tmp_path / path).parent.mkdir()
    (tmp_path / path).write_text(source)
    assert breaches(tmp_path) == [breach]


def test_a_part_without_a_rule_is_seen(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text("")
    with pytest.raises(AssertionError, match="does not know"):
        breaches(tmp_path)


def test_every_module_starts_without_torch() -> None:
    if loads_torch(*TORCH_FREE):
        guilty = [module for module in TORCH_FREE if loads_torch(module)]
        pytest.fail(f"torch is loaded by {guilty}")


def test_a_module_that_loads_torch_is_seen() -> None:
    pytest.importorskip("torch")
    assert loads_torch("memplan.units", "memplan.step.builder")


MOST_LINES = 300


def test_files_stay_readable() -> None:
    long = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {name: lines for name, lines in long.items() if lines > MOST_LINES} == {}


def test_no_room_is_called_by_nothing() -> None:
    banned = {"utils", "common", "core", "helpers"}
    assert [path for path in PACKAGE.rglob("*") if path.stem in banned] == []
