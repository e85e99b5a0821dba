"""What to type so that times can be told apart."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from memplan.analysis.matching import Pair
from memplan.record import RungResult
from memplan.record.store import ROWS_FILE

FIRST, SECOND = 5, 7
"""Processes a side to ask for: enough for ranks to reach 1 %, then enough for a step of noise more."""


def more_repeats(pairs: Sequence[Pair], base_name: str, new_name: str) -> tuple[str, ...]:
    """Commands that time just the rungs of `pairs` more often, into the folders where their rows are. Each comes once,
    with the sides that it is for behind, and the base's commit where it is known."""
    commands: dict[str, list[str]] = {}
    for name, is_base in ((base_name, True), (new_name, False)):
        groups: dict[tuple[tuple[str, ...], int, str], list[str]] = {}
        for pair in pairs:
            row = (pair.base if is_base else pair.new)[0]
            if (typed := _typed(row)) is not None:
                rung, options = typed
                commit = str(row.environment.get("commit", "")) if is_base else ""
                groups.setdefault((options, wanted(pair), commit), []).append(rung)
        for (options, number, commit), rungs in groups.items():
            words = ["memplan", "ladder", ",".join(rungs), *options, "--repeat", str(number), *_out(name), "--resume"]
            side = ("base" if is_base else "new") + (f", on commit {commit}" if commit else "")
            commands.setdefault(shlex.join(words), []).append(side)
    return tuple(f"{command}  # {' and '.join(sides)}" for command, sides in commands.items())


def _out(name: str) -> list[str]:
    """The option for the folder of results that `name` is, or whose file it is; empty where it is neither."""
    path = Path(name)
    folder = path.parent if path.name == ROWS_FILE else path
    return ["--out", str(folder)] if folder.is_dir() else []


def wanted(pair: Pair) -> int:
    """How many processes a side to ask for."""
    least = min(len(pair.base), len(pair.new))
    return FIRST if least < 3 else max(SECOND, 2 * least)


def apart(pairs: Sequence[Pair]) -> tuple[str, ...]:
    """A warning where times moved and all of one side were taken before all of the other."""
    for pair in pairs:
        before, after = ([row.started_at for row in rows if row.started_at] for rows in (pair.base, pair.new))
        if before and after and (max(before) < min(after) or max(after) < min(before)):
            return (
                "The two sides were timed one after the other: a machine that drifted in between looks like a change. "
                "Climb them by turns to tell.",
            )
    return ()


def _typed(row: RungResult) -> tuple[str, tuple[str, ...]] | None:
    """Rung and options of the row's own command, its repeats left out; None where it has none."""
    words = shlex.split(row.command)
    if len(words) < 3 or words[:2] != ["memplan", "ladder"]:
        return None
    options = words[3:]
    if "--repeat" in options:
        place = options.index("--repeat")
        options = options[:place] + options[place + 2 :]
    return words[2], tuple(options)
