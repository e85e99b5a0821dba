"""What trace and estimate say: each rung of a ladder, in processes beside the climb."""

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from memplan.ladder.points import find_device, points
from memplan.spec import DeviceSpec, Ladder, RunSpec
from memplan.spec.device import card


def runs_of(ladder: Ladder) -> list[RunSpec]:
    """The runs that a climb of `ladder` on this machine asks for."""
    device, simulated = find_device(ladder.device, ladder.gpu)
    return [point.run for point in points(ladder, device, simulated=simulated) if isinstance(point.run, RunSpec)]


def said_of(run: RunSpec, device: DeviceSpec) -> dict[str, Any]:
    """Peaks of `run` on `device`: allocated and reserved of the first and of later steps, and the estimate's."""
    from memplan.backends.simulated import simulate
    from memplan.estimate import estimate, uncovered

    there = dataclasses.replace(run, device=device)
    said: dict[str, Any] = {"run_id": run.run_id}
    try:
        if not uncovered(there):
            said["estimated_bytes"] = estimate(there).peak_allocated_bytes
        steps = simulate(there).steps
    except Exception as error:
        return said | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    for name, report in (("first_step", steps.first_step), ("measured", steps.steady)):
        said[name] = report.peak_allocated_bytes, report.peak_reserved_bytes
    return said | {"attention": steps.steady.attention}


class Witnesses:
    """Answers that are worked out while something else runs."""

    def __init__(self, runs: list[RunSpec], card_name: str | None, workers: int) -> None:
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
        self._asked: list[Future[dict[str, Any]]] = [
            self._pool.submit(said_of, run, run.device if card_name is None else card(card_name)) for run in runs
        ]

    def answers(self, timeout_s: float) -> dict[str, dict[str, Any]]:
        """By run, what is known after at most `timeout_s`; the rest is given up."""
        deadline = time.monotonic() + timeout_s
        told = {}
        for answer in self._finished(deadline):
            told[answer["run_id"]] = answer
        self._pool.shutdown(wait=False, cancel_futures=True)
        return told

    def _finished(self, deadline: float) -> Iterator[dict[str, Any]]:
        for asked in self._asked:
            try:
                yield asked.result(timeout=max(deadline - time.monotonic(), 0.01))
            except Exception as error:  # a worker that died, or no time left: the row goes without
                print(f"a witness gave no answer: {type(error).__name__} {error}", flush=True)
