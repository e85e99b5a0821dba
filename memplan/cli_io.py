"""What verbs share: reading what was typed, and where words and numbers go."""

import contextlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from memplan.cli_once import check_rungs
from memplan.cli_options import RUNG, STEP, option
from memplan.errors import MemplanError
from memplan.spec import Ladder, parse_rungs
from memplan.units import MIB, decimal_note

DEFAULT_MODEL = "molmo2-4b"
Gate = Annotated[str | None, option("--gate", help="What the peak is held against: 71GiB.")]
Output = Annotated[str, option("-o", "--output", help="table, json, jsonl, md, csv, html.")]


def ladder_of(rungs: str, given: dict[str, Any]) -> Ladder:
    """The ladder of a file, or of rungs, with the options that were given."""
    if rungs.endswith(".toml") or "/" in rungs:
        ladder = Ladder.from_toml(Path(rungs), given)
        check_rungs(ladder, given)
        return ladder
    if "entry" in given:
        values = {"model": given["entry"]} | given | {"rungs": rungs}
        if beside := sorted(given.keys() & STEP.keys() - {"ckpt", "seq"}):
            names = ", ".join(f"--{name}" for name in beside)
            raise MemplanError("--entry brings its own model and step.", f"Leave {names} out.")
    else:
        values = {"model": DEFAULT_MODEL} | given | {"rungs": rungs}
    device = values.get("device", "auto")
    ladder = Ladder.from_dict(values, name=f"{plain_name(values['model'])}_{device}", origin="options")
    check_rungs(ladder, given)
    return ladder


def rung_and_given(step: dict[str, Any], **others: Any) -> tuple[str | None, dict[str, Any]]:
    """The rung that `--rung` or `--batch` and `--chunks` name, or None, and the other options that were typed."""
    rung, batch, chunks = (step.pop(name) for name in RUNG)
    if rung is not None:
        for one in parse_rungs(rung):
            for name, value, said in (("batch", batch, one.batch), ("chunks", chunks, one.chunks)):
                if value not in (None, said):
                    raise MemplanError(
                        f"The rung {one} and --{name} {value} name {name} twice, and not the same.", "Leave one out."
                    )
    elif batch is not None or chunks is not None:
        rung = f"B{1 if batch is None else batch}c{1 if chunks is None else chunks}"
    return rung, typed(**step, **others)


def one_rung(rung: str | None, given: dict[str, Any], *, name: str, **usual: Any) -> Ladder:
    """The ladder of one rung, B1c1 when none was named, with the options that were `given`, and what is `usual` where
    they are not."""
    values = {"model": DEFAULT_MODEL} | usual | given | {"rungs": rung or "B1c1"}
    ladder = Ladder.from_dict(values, name=name, origin="options")
    check_rungs(ladder, given)
    return ladder


def plain_name(models: str) -> str:
    """Names of models as a folder's name; of a path its last part that says something, of a function no colon."""
    paths = [Path(name.strip().replace(":", ".")) for name in models.split(",")]
    return "+".join((path.parent if path.name == "config.json" else path).name or "model" for path in paths)


def typed(**options: Any) -> dict[str, Any]:
    """The options that were typed; a size in decimal units is pointed out, and one without a unit that no step fits."""
    found = {name: value for name, value in options.items() if value is not None}
    gate = str(found.get("gate", ""))
    if gate.isdecimal() and 0 < int(gate) < MIB:
        raise MemplanError(f"--gate {gate} is {gate} bytes.", f"Type {gate}GiB.")
    if note := decimal_note(found.get("gate", "")):
        say([note])
    return found


def show(text: str) -> None:
    """Writes `text` to standard output. A reader that went away, as `| head` does, changes no exit code."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left over goes nowhere


def show_json(values: list[dict[str, Any]], *, lines: bool, single: bool = False) -> None:
    """Writes `values` as JSON: a line each, or one document, which is the first of them when there is just one."""
    if lines:
        for value in values:
            show(json.dumps(value))
    else:
        show(json.dumps(values[0] if single else values, indent=2))


def say(lines: Iterable[str]) -> None:
    """Writes lines to standard error; where nobody can hear them, the work goes on."""
    with contextlib.suppress(OSError):
        for line in lines:
            print(line, file=sys.stderr, flush=True)
