"""Is what is checkpointed still the plain step? Asked once for each mode, before its first rung, in a process of its
own; the answers stay in the folder."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memplan.ladder.points import Point
from memplan.launch.process import Outcome
from memplan.spec import RunSpec

PARITY_FILE = "parity.jsonl"
"""Answers, one JSON object a line, by the run that was compared."""
COPIES = 3
"""Sets of weights and gradients that a comparison holds: of the plain step, of the variant, and of the plain step once
more in fp32 where it computes in fewer bits."""


def is_compared(point: Point) -> bool:
    """Whether there is something to hold against the plain step: checkpointing, of a step that is really run and that
    can be built again without it."""
    run = point.run
    return (
        not point.simulated and isinstance(run, RunSpec) and run.step.ckpt != "none" and not run.step.sharding.sharded
    )


def compared_run(point: Point, limit_bytes: int | None, estimated: Callable[[RunSpec], int | None]) -> RunSpec | None:
    """The run at which `point`'s mode is compared with the plain step: its own with the largest batch that both find
    room for under `limit_bytes`; None where one chunk's smallest batch finds none."""
    run = point.run
    assert isinstance(run, RunSpec)
    batch = run.step.batch
    while batch:
        smaller = dataclasses.replace(run, step=dataclasses.replace(run.step, batch=batch))
        if limit_bytes is None or needed_bytes(smaller, estimated) <= limit_bytes:
            return smaller
        batch = batch // 2 // run.step.chunks * run.step.chunks
    return None


def needed_bytes(run: RunSpec, estimated: Callable[[RunSpec], int | None]) -> int:
    """About what a comparison at `run` needs: the plain step's own peak, and `COPIES` of fp32 weights and gradients."""
    plain = dataclasses.replace(run.step, ckpt="none", loss="full", compile="off", chunks=1)
    copies = dataclasses.replace(plain, optimizer="sgd", precision="fp32", batch=1, seq=run.step.seq)
    peak_bytes = estimated(dataclasses.replace(run, step=plain)) or 0
    return peak_bytes + COPIES * (estimated(dataclasses.replace(run, step=copies)) or 0)


class Comparisons:
    """The answers of a climb, each asked for once and kept in the folder."""

    def __init__(self, folder: Path, ask: Callable[[RunSpec, str], Outcome]) -> None:
        self._path = folder / PARITY_FILE
        self._ask = ask
        self._known = {item["run_id"]: item for item in _read(self._path)}

    def of(self, run: RunSpec, rung: str) -> dict[str, Any]:
        """`same` (None where it could not be told), `rung` and `says` for `run`, which is compared when nobody has."""
        if run.run_id not in self._known:
            outcome = self._ask(run, rung)
            said = next((event for event in outcome.events if event.get("event") == "parity"), None)
            if said is None:
                return {"same": None, "rung": rung, "says": f"not compared: {outcome.error or outcome.status}"}
            answer = {"run_id": run.run_id, "rung": rung, "same": bool(said["same"]), "says": str(said["says"])}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(answer) + "\n")
            self._known[run.run_id] = answer
        return {key: self._known[run.run_id][key] for key in ("same", "rung", "says")}


def _read(path: Path) -> list[dict[str, Any]]:
    """The answers in a file; a torn line is left out."""
    found = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ()
    for line in lines:
        try:
            item = json.loads(line)
        except ValueError:
            continue
        if isinstance(item, dict) and {"run_id", "same", "rung", "says"} <= item.keys():
            found.append(item)
    return found
