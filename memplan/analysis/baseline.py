"""Results to hold later ones against: plain files that git shows well, in a folder for each kind of machine."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memplan.analysis.comparison import Comparison
from memplan.analysis.matching import is_final, repeats
from memplan.analysis.speed_findings import timed
from memplan.analysis.stats import LEAST, LEAST_EFFECT_FRAC, spread
from memplan.analysis.surroundings import PREDICTED, SIMULATED_KEYS, SPEED_KEYS, memory_differences, plain_facts, told
from memplan.errors import MemplanError, NotComparableError, NothingMeasuredError, near_names
from memplan.record import RungResult, read_results
from memplan.units import format_percent

REFRESHED = ".refreshed.jsonl"
"""Ending of a file that a comparison offers in place of its base."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """One file of the store."""

    name: str
    """What it was saved as."""
    machine: str
    """Its machine's folder, as `machine_slug` names it."""
    path: Path
    """The file."""
    rows: tuple[RungResult, ...]
    """Its rows."""
    warnings: tuple[str, ...] = ()
    """What was left out of it."""


def machine_slug(rows: Sequence[RungResult]) -> str:
    """A readable name for the kind of machine that `rows` come from, and six letters over everything that matters
    there: `nvidia-h100-80gb-hbm3_torch-2.13.0_1f9a3c`. MemplanError when they come from several."""
    kinds = {slug_of(row): row for row in rows}
    if len(kinds) > 1:
        raise MemplanError(
            f"The rows come from {len(kinds)} kinds of machine: {', '.join(sorted(kinds))}.",
            "Climb the ladder on one of them, into a folder of its own.",
        )
    if not kinds:
        raise NothingMeasuredError("There is no row.")
    return next(iter(kinds))


def slug_of(row: RungResult) -> str:
    """The same for one row."""
    facts, simulated = row.environment, row.source in PREDICTED
    keys = SIMULATED_KEYS if simulated else SPEED_KEYS
    plain = plain_facts(facts, keys, minor=simulated)
    text = json.dumps(plain, sort_keys=True, default=str)
    if simulated:
        name = f"{row.source}-{facts.get('device', 'card')}"
    else:
        name = str(facts.get("gpu") or f"cpu-{facts.get('cpu', 'unknown')}")
    if row.source == "estimated":  # formulas have no torch
        return f"{_plain(name)}_{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    words = [_plain(name), f"torch-{_plain(str(plain.get('torch', 'unknown')))}"]
    return "_".join([*words, hashlib.sha256(text.encode()).hexdigest()[:6]])


def save(name: str, rows: Sequence[RungResult], store: Path, *, replace: bool = False) -> tuple[Baseline, list[str]]:
    """The file that `rows` were written to, and what to know about them, a sentence each.

    MemplanError when the name is no file's name, when there is such a baseline already and `replace` is off, or when
    nothing was measured.
    """
    if not _NAME.fullmatch(name) or name.endswith((".jsonl", ".refreshed")):
        raise MemplanError(f"{name!r} cannot name a baseline.", "Type letters, digits, dots and dashes: main.")
    if not is_final(rows):
        raise NothingMeasuredError(f"Nothing was measured: none of the {len(rows)} rows says anything about its rung.")
    machine = machine_slug(rows)
    path = store / machine / f"{name}.jsonl"
    if path.exists() and not replace:
        raise MemplanError(f"There is a baseline {name} of {machine} already.", "Type --replace, or another name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, rows)
    return Baseline(name=name, machine=machine, path=path, rows=tuple(rows)), doubts(rows)


def write(path: Path, rows: Sequence[RungResult]) -> None:
    """Writes `rows` so that a change of one shows as one line: sorted, a row a line, keys in a fixed order."""
    ordered = sorted(rows, key=lambda row: (row.model, row.source, row.rung, row.run_id, row.repeat))
    text = "".join(json.dumps(row.to_dict(), sort_keys=True) + "\n" for row in ordered)
    path.write_text(text, encoding="utf-8")


def doubts(rows: Sequence[RungResult]) -> list[str]:
    """What makes `rows` a weak base for times, a sentence each."""
    sides = {group[0].rung: [row.median_step_ns or 0 for row in timed(group)] for group in repeats(rows).values()}
    sides = {rung: times for rung, times in sides.items() if times}
    few = [rung for rung, times in sides.items() if len(times) < LEAST]
    wide = {rung: share for rung, times in sides.items() if (share := spread(times) or 0.0) > 2 * LEAST_EFFECT_FRAC}
    lines = []
    if few:
        lines.append(
            f"Times of {_some(few)} come from fewer than {LEAST} processes, and cannot be judged: type --repeat 5."
        )
    if wide:
        worst = max(wide, key=lambda rung: wide[rung])
        width = format_percent(wide[worst], 0).lstrip("+")
        lines.append(
            f"Times of {_some(list(wide))} spread by up to {width} ({worst}) between processes, which hides changes of "
            "that size: measure on a quieter machine, or with more --repeat."
        )
    return lines


def baselines(store: Path) -> tuple[Baseline, ...]:
    """All baselines in `store`, by machine and name."""
    found = []
    for path in sorted(store.glob("*/*.jsonl")):
        if path.name.endswith(REFRESHED):
            continue
        results = read_results(path)
        found.append(Baseline(name=path.stem, machine=path.parent.name, path=path, rows=results.rows,
                              warnings=results.warnings))  # fmt: skip
    return tuple(found)


def find(name: str, rows: Sequence[RungResult], store: Path, *, across: bool = False) -> Baseline:
    """The baseline `name` of the machine that `rows` come from; else one whose bytes can be compared with theirs; with
    `across` else the only one.

    MemplanError when no baseline is called so, NotComparableError when those that are come from other machines; both
    say what there is and how to record one.
    """
    known = baselines(store)
    called = [baseline for baseline in known if baseline.name == name]
    how = f"To record one, type: memplan baseline save {name} DIR"
    if not called:
        others = sorted({baseline.name for baseline in known})
        near = near_names(name, others) if others else f"{store} has none."
        raise MemplanError(f"There is no file, folder or baseline {name}.", f"{near} {how}")
    kinds = {slug_of(row) for row in rows}
    fit = [baseline for baseline in called if baseline.machine in kinds]
    fit = fit or [baseline for baseline in called if not memory_differences(baseline.rows, rows)]
    fit = fit or (called if across and len(called) == 1 else [])
    if not fit:
        listed = "; ".join(f"{one.machine} ({told(memory_differences(one.rows, rows))})" for one in called)
        raise NotComparableError(
            f"No baseline {name} is of {' or '.join(sorted(kinds))}: there is {listed}.", f"{how} there."
        )
    return fit[0]


def refreshed(found: Comparison) -> tuple[RungResult, ...]:
    """Rows for a base that is up to date: what is as good as before or better as it is now, and what is worse, gone or
    was not compared as it was."""
    kept_out = {one.name for one in found.of("broke", "worse", "missing", "incomparable")}
    base, new = repeats(found.base_rows), repeats(found.new_rows)
    names = {(one.run_id, one.source): one.name for one in found.findings}
    fresh = {key: rows for key, rows in new.items() if names.get(key) not in kept_out}
    replaced = {(rows[0].model, rows[0].rung, rows[0].source, str(rows[0].step)) for rows in fresh.values()}
    old = [
        rows
        for key, rows in base.items()
        if key not in fresh and (rows[0].model, rows[0].rung, rows[0].source, str(rows[0].step)) not in replaced
    ]
    return tuple(row for rows in (*old, *fresh.values()) for row in rows)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:60] or "unknown"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
