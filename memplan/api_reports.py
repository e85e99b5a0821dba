"""The verbs over results that are there already, as functions. None of them needs torch or a GPU."""

from collections.abc import Sequence
from pathlib import Path

from memplan.analysis.baseline import REFRESHED, Baseline, baselines, find, refreshed, save, write
from memplan.analysis.compare import Tolerance
from memplan.analysis.compare import compare as compared
from memplan.analysis.comparison import Comparison
from memplan.analysis.history import Climbed, Moment, began
from memplan.analysis.history import history as trends
from memplan.errors import MemplanError, NothingMeasuredError
from memplan.record import Results, read_all, read_results
from memplan.record.store import ROWS_FILE, rows_file

BASELINES = Path("reports/baselines")
"""Where baselines are, below the current folder."""


def compare(
    base: str,
    new: str,
    *,
    store: Path = BASELINES,
    tolerance: Tolerance | None = None,
    across: bool = False,
    allow_missing: bool = False,
    strict: bool = False,
) -> tuple[Comparison, Path | None]:
    """`new` held against `base`, each a folder, a file or the name of a baseline, and the file that was written beside
    a stale base; None where it is not stale or its folder cannot be written."""
    after, after_file = _results(new, None, store, across=across)
    before, before_file = _results(base, after, store, across=across)
    if before_file.resolve() == after_file.resolve():
        raise MemplanError(f"{base} and {new} are the same file.", "Type two results, the earlier one first.")
    found = compared(
        before.rows,
        after.rows,
        base_name=base,
        new_name=new,
        tolerance=tolerance,
        across=across,
        allow_missing=allow_missing,
        strict=strict,
        warnings=(*before.warnings, *after.warnings),
    )
    if not found.is_stale:
        return found, None
    path = before_file.with_name(before_file.name.removesuffix(".jsonl") + REFRESHED)
    try:
        write(path, refreshed(found))
    except OSError:
        return found, None
    return found, path


def save_baseline(
    name: str, folder: Path, *, store: Path = BASELINES, replace: bool = False
) -> tuple[Baseline, list[str]]:
    """The baseline that the rows of `folder` became, and what to know about it, a sentence each."""
    results = read_results(folder)
    baseline, doubts = save(name, results.rows, store, replace=replace)
    return baseline, [*results.warnings, *doubts]


def list_baselines(store: Path = BASELINES) -> tuple[Baseline, ...]:
    """All baselines of `store`."""
    return baselines(store)


def show_baseline(name: str, machine: str | None = None, *, store: Path = BASELINES) -> tuple[Baseline, ...]:
    """The baselines called `name`, of the machines whose folder begins with `machine`."""
    called = [one for one in baselines(store) if one.name == name]
    found = tuple(one for one in called if one.machine.startswith(machine or ""))
    if found:
        return found
    if called:
        raise MemplanError(
            f"No baseline {name} is of {machine}.", "Machines: " + ", ".join(one.machine for one in called) + "."
        )
    find(name, (), store)  # says which there are
    raise AssertionError("a baseline that was not listed")


def history(folders: Sequence[Path], tolerance: Tolerance | None = None) -> tuple[tuple[Moment, ...], tuple[str, ...]]:
    """The trend of each rung over `folders`, and what was left out, a sentence each. A folder without rows stands for
    the folders in it that have some."""
    files: dict[Path, Path] = {}
    for folder in folders:
        below = sorted(folder.glob(f"*/{ROWS_FILE}")) if folder.is_dir() and not (folder / ROWS_FILE).exists() else []
        for file in below or [rows_file(folder)]:
            files.setdefault(file.resolve(), file)
    climbed: list[Climbed] = []
    warnings: list[str] = []
    for file in files.values():
        results = read_all([file])
        warnings += results.warnings
        climbed.append(Climbed(path=file, rows=results.rows))
    undated = [str(one.path) for one in climbed if began(one.rows) is None and one.rows]
    if undated and len(climbed) > 1:
        warnings.append(f"Nobody knows when these began, so they stand where they were given: {', '.join(undated)}.")
    moments = trends(climbed, tolerance)
    if not moments:
        raise NothingMeasuredError(f"No row was found in {', '.join(str(folder) for folder in folders)}.")
    return moments, tuple(warnings)


def _results(name: str, other: Results | None, store: Path, *, across: bool) -> tuple[Results, Path]:
    """Rows of a folder or file, or else of the baseline of that name that fits the rows of `other`, and their file."""
    path = Path(name)
    if path.exists() or path.suffix == ".jsonl" or "/" in name:
        return read_results(path), rows_file(path)
    known = [one for one in baselines(store) if one.name == name]
    if other is None and len(known) > 1:
        raise MemplanError(
            f"Baselines {name} are of {len(known)} machines.",
            f"Type one's file: {' or '.join(str(one.path) for one in known)}.",
        )
    rows = other.rows if other is not None else known[0].rows if known else ()
    baseline = find(name, rows, store, across=across)
    return Results(rows=baseline.rows, warnings=baseline.warnings), baseline.path
