"""The child's half: builds the step, measures its windows, times its steps, and writes each result down at once.

    python -m memplan.launch.worker JOB.json EVENTS.jsonl

The job is `{"run": RunSpec, "warmup": int, "steps": int, "seed": int}`. The events, one JSON object a line:
`phase` (what begins), `loss`, `window` (peaks, phase peaks), `host` (what a window kept there), `step` (time),
`environment`, `end` (status, error).
"""

import gc
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from memplan.backends.base import Backend, Window
from memplan.spec import RunSpec
from memplan.units import format_bytes

NUM_MEASURED = 1
"""Steps in the `measured` window. Peak bytes of equal steps are equal, so one is enough."""
Step = Callable[[Callable[[str], None]], float]


def main(arguments: list[str]) -> int:
    """Exit code of the worker: 0 when its last event could be written, whatever that event says."""
    job_path, events_path = arguments
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    end_with_parent()
    with Path(events_path).open("a", encoding="utf-8") as file:
        events = Events(file)
        backend: Backend | None = None
        try:
            run = RunSpec.from_dict(job["run"])
            if job.get("simulated"):
                events.write("end", **imagine(run, events))
                return 0
            backend = open_backend(run)
            from memplan.step.builder import build_step

            measure(
                backend,
                lambda: build_step(run, backend.device, job.get("seed", 0)),
                warmup=job["warmup"],
                steps=job["steps"],
                events=events,
            )
        except BaseException as error:
            out_of_memory = isinstance(error, MemoryError) or (backend is not None and backend.is_out_of_memory(error))
            status = "oom" if out_of_memory else "error"
            import traceback

            traceback.print_exc()
            events.write("end", status=status, error=explain(error) + events.where())
            return 0
        events.write("end", status="ok", error=None)
    return 0


class Events:
    """Writes one JSON line an event, and waits until the disk has it: what was said survives a kill."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._phase = "the start"
        self._lost: str = ""

    def write(self, event: str, **values: Any) -> None:
        """Adds an event."""
        self._file.write(json.dumps({"event": event} | values) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def begin(self, phase: str) -> None:
        """Says what begins now: `build`, a window's name, or `timed`."""
        self._phase, self._lost = phase, ""
        self.write("phase", phase=phase)

    def losing(self, window: Window) -> None:
        """Remembers how far a window came that will not be finished; its peak is a lower bound, so it is no result."""
        if window.reading is not None:
            last = next(reversed(window.reading.phase_peaks), None)
            during = f" ({last})" if last else ""
            self._lost = f"{during}, {format_bytes(window.reading.peak.allocated_bytes)} allocated until then"

    def where(self) -> str:
        """Where the work stands, to be added to an error."""
        return f" [in {self._phase}{self._lost}]"


def imagine(run: RunSpec, events: Events) -> dict[str, Any]:
    """Traces the step on its imagined card and writes its windows; the status and error that end the rung.

    A step that the card has no room for is `oom`, and its windows say what it would have needed.
    """
    events.begin("trace")
    from memplan.backends.simulated import simulate

    answer = simulate(run)
    traced = answer.steps
    for name, report in (("first_step", traced.first_step), ("measured", traced.steady)):
        peak = {
            "allocated_bytes": report.peak_allocated_bytes,
            "active_bytes": report.peak_active_bytes,
            "reserved_bytes": report.peak_reserved_bytes,
        }
        phases = {phase: totals.allocated_bytes for phase, totals in report.phases.items()}
        events.write("window", name=name, peak=peak, phase_peaks=phases)
        if report.host_bytes:
            events.write("host", window=name, bytes=report.host_bytes)
    events.write("environment", device=run.device.name, witness="trace", note=answer.note or None)
    lacking = traced.out_of_memory
    if lacking is None:
        return {"status": "ok", "error": None}
    error = (
        f"needs {format_bytes(traced.needed_bytes)} allocated; {run.device.name} runs out in {lacking.phase}, when"
        f" {lacking.op}{f' of {lacking.module}' if lacking.module else ''} asks for"
        f" {format_bytes(lacking.requested_bytes)} with {format_bytes(lacking.allocated_bytes)} allocated"
    )
    if run.device.context_bytes:
        error += f"; CUDA's own context takes {format_bytes(run.device.context_bytes)} beside it"
    return {"status": "oom", "error": error}


def measure(backend: Backend, build: Callable[[], Step], *, warmup: int, steps: int, events: Events) -> None:
    """Measures the windows of the step that `build` makes, then times it.

    Building, `first_step`, `warmup` and `measured` are windows one after another; timed steps follow, with nothing
    watching. No allocation happens between two windows.
    """
    numbers = iter(range(1, 2 + warmup + NUM_MEASURED + steps))

    def take(step: Step, mark: Callable[[str], None]) -> None:
        loss, number = step(mark), next(numbers)
        if not math.isfinite(loss):
            raise ArithmeticError(f"the loss of step {number} is {loss}")
        events.write("loss", loss=loss)

    events.begin("build")
    with reported(backend.window(), "init", events) as window:
        window.mark("init")
        step = build()
        gc.collect()
    for name, num_steps in (("first_step", 1), ("warmup", warmup), ("measured", NUM_MEASURED)):
        if not num_steps:
            continue
        events.begin(name)
        with reported(backend.window(), name, events) as window:
            for _ in range(num_steps):
                take(step, window.mark)
        if (offload := getattr(step, "offload", None)) is not None:
            events.write("host", window=name, bytes=offload.peak_host_bytes)
            offload.reset()
    events.write("environment", **backend.describe() | {"note": getattr(step, "note", "") or None})
    events.begin("timed")
    for _ in range(steps):
        _, elapsed_ns = backend.clock(lambda: take(step, lambda phase: None))
        events.write("step", ns=elapsed_ns)


@contextmanager
def reported(window: Window, name: str, events: Events) -> Iterator[Window]:
    """Enters `window`, and at its end writes its event, or notes how far it came when it failed."""
    try:
        with window:
            yield window
    except BaseException:
        events.losing(window)
        raise
    if window.reading is not None:
        events.write("window", name=name, **asdict(window.reading))


def open_backend(run: RunSpec) -> Backend:
    """The backend for the run's device."""
    if run.device.rules == "cpu":
        from memplan.backends.cpu import CpuBackend

        return CpuBackend()
    from memplan.backends.cuda import CudaBackend

    return CudaBackend()


def explain(error: BaseException) -> str:
    """`error` in one line: its type unless the text speaks for itself, and its first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def end_with_parent() -> None:
    """Ends this process and its group as soon as the parent is gone: when the pipe that it holds to our standard input
    closes."""

    def wait() -> None:
        while os.read(0, 4096):  # the bare pipe: an interpreter that ends may not find a buffer locked
            pass
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
