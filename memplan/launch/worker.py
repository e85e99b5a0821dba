"""The child's half: reads its job, does it, and writes down at once what it finds.

    python -m memplan.launch.worker JOB.json EVENTS.jsonl

The job is `{"kind": "measure", "parity" or "health", "run": RunSpec or "entry": EntryRun, "simulated": bool, "warmup":
int, "steps": int, "min_time_s": float, "seed": int, "cap_bytes": int or null, "snapshot": path or null}`; what is left
out is the first, or none. The events, one JSON object a line: `phase` (what begins), `loss`, `window` (peaks, phase
peaks), `host` (what a window kept there), `step` (time), `training`, `look`, `breakdown`, `warning`, `environment`,
`parity`, `end` (status, error, failure, poisoned).

After a failure nothing more runs in this process: what a failed step leaves behind is known to nobody.
"""

import json
import os
import signal
import sys
import threading
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memplan.backends.base import Backend
from memplan.backends.failure import (
    MOST_TEXT,
    explain,
    free_bytes,
    is_poisoning,
    requested_bytes,
    shortened,
    status_of,
    text_of,
)
from memplan.backends.subject import Subject
from memplan.launch.events import Events
from memplan.launch.imagine import imagine
from memplan.launch.measure import Measuring, Plan
from memplan.record import Failure, LiveTensor
from memplan.spec import DeviceSpec, RunSpec
from memplan.spec.entry import EntryRun


def main(arguments: list[str]) -> int:
    """Exit code of the worker: 0 when its last event could be written, whatever that event says."""
    job_path, events_path = arguments
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    end_with_parent()
    with Path(events_path).open("a", encoding="utf-8") as file:
        events = Events(file)
        work = Work(job, events)
        try:
            events.write("end", **work.done())
        except BaseException as error:
            traceback.print_exc()
            events.write("end", **work.failed(error))
    return 0


class Work:
    """One job."""

    def __init__(self, job: dict[str, Any], events: Events) -> None:
        self.job = job
        self.events = events
        self.backend: Backend | None = None
        self.measuring: Measuring | None = None

    def done(self) -> dict[str, Any]:
        """Does the job; the values of its `end`."""
        kind = self.job.get("kind", "measure")
        run = EntryRun.from_dict(self.job["entry"]) if "entry" in self.job else RunSpec.from_dict(self.job["run"])
        if kind == "measure" and self.job.get("simulated"):
            return imagine(run, self.events)
        if kind == "parity":
            from memplan.launch.checks import make_deterministic

            make_deterministic(run.device)
        self.backend = open_backend(run.device)
        if (cap_bytes := self.job.get("cap_bytes")) is not None:
            self.backend.cap(cap_bytes)
        self.events.warn(self.backend.listen(history=self.job.get("snapshot") is not None))
        if kind == "health":
            from memplan.launch.checks import check_health

            self.events.begin("health")
            check_health(self.backend)
        elif kind == "parity":
            from memplan.launch.checks import check_parity

            assert isinstance(run, RunSpec), "a step of the user's own has no plain twin"
            self.events.begin("parity")
            self.events.write("parity", **check_parity(run, self.backend, self.job.get("seed", 0)))
        else:
            return self.measured(run, self.backend)
        return {"status": "ok", "error": None}

    def measured(self, run: RunSpec | EntryRun, backend: Backend) -> dict[str, Any]:
        """Measures the run's step."""
        from memplan.launch.surroundings import surroundings, warnings

        self.events.write("environment", **backend.describe() | surroundings(run))
        for text in warnings(run.device):
            self.events.warn(text)
        plan = Plan(warmup=self.job["warmup"], steps=self.job["steps"], min_time_s=self.job.get("min_time_s", 0.0))
        self.measuring = Measuring(backend, plan, self.events)
        status, error = self.measuring.run(lambda: subject_of(run, backend, self.job.get("seed", 0)))
        return {"status": status, "error": error}

    def failed(self, error: BaseException) -> dict[str, Any]:
        """The values of `end` after `error`, as far as they can still be told."""
        room = self.backend.room() if self.backend is not None else None
        on_cuda = self.backend is not None and self.backend.device.type == "cuda"
        status = status_of(error, on_cuda=on_cuda, room=room)
        refusal = self.backend.refusal() if self.backend is not None and status == "oom" else None
        snapshot = self.job.get("snapshot")
        if snapshot is not None and not (status == "oom" and self.backend is not None and self.backend.dump(snapshot)):
            snapshot = None
        failure = Failure(
            window=self.events.phase,
            phase=self.events.step_phase,
            requested_bytes=requested_bytes(error) if refusal is None else refusal.requested_bytes,
            allocated_bytes=self.events.allocated_bytes,
            reserved_bytes=self.events.reserved_bytes,
            free_bytes=free_bytes(error) if refusal is None else refusal.free_bytes,
            cap_bytes=self.job.get("cap_bytes"),
            alive=self.alive() if status in ("oom", "oom_suspect", "host_oom") else (),
            snapshot=None if snapshot is None else Path(snapshot).name,
            text=shortened(text_of(error), MOST_TEXT) or None,
        )
        return {
            "status": status,
            "error": explain(error) + self.events.where(),
            "failure": asdict(failure),
            "poisoned": is_poisoning(error),
        }

    def alive(self) -> tuple[LiveTensor, ...]:
        """The largest tensors that are there; none where even that fails."""
        if self.measuring is None or self.backend is None:
            return ()
        try:
            from memplan.backends.alive import largest
            from memplan.backends.subject import found_subject

            subject = self.measuring.subject
            return largest(subject if subject.models else found_subject(), self.backend.device)
        except Exception:  # a failure is told with what is known
            traceback.print_exc()
            return ()


def subject_of(run: RunSpec | EntryRun, backend: Backend, seed: int) -> Subject:
    """The step of `run`, built."""
    from memplan.backends.subject import subject_of_entry, subject_of_run

    return subject_of_entry(run, seed) if isinstance(run, EntryRun) else subject_of_run(run, backend.device, seed)


def open_backend(device: DeviceSpec) -> Backend:
    """The backend for a device."""
    if device.rules == "cpu":
        from memplan.backends.cpu import CpuBackend

        return CpuBackend()
    from memplan.backends.cuda import CudaBackend

    return CudaBackend()


def end_with_parent() -> None:
    """Ends this process, and the group that it leads, as soon as the parent is gone: when the pipe that it holds to our
    standard input closes."""

    def wait() -> None:
        while os.read(0, 1 << 12):  # not through sys.stdin, whose lock would be held when Python ends
            pass
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
