"""Measures a step: what it takes to build, its first step, its warm-up, its steady state, and its times.

Building, `first_step`, `warmup` and `measured` are windows one after another. Timed steps have nothing watching: no
marks, no profiler, no event written while the clock runs. Where counters cost nothing, `measured` is the window around
them, and the peaks of phases come from a marked step before; elsewhere `measured` is that marked step, and the kernel
tells whether the timed ones took more.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from memplan.backends.base import Backend, Window
from memplan.backends.failure import NotTraining
from memplan.backends.held import held_bytes
from memplan.backends.look import Look
from memplan.backends.subject import Subject
from memplan.launch.breakdown import Held, Marked, at_largest_peak, between_steps, leaking, waiting
from memplan.launch.collector import Collections, collect, without_collector
from memplan.launch.events import Events
from memplan.launch.resident import ResidentWatch
from memplan.launch.training import Training

MOST_EXTRA = 10
"""Steps that warm-up may have beyond those asked for, until it is steady."""
EXTRA_TIME_S = 20.0
"""Seconds after which no further one begins."""
SETTLED_FRAC = 0.1
"""Largest difference of the last two steps' times that counts as steady."""
BETWEEN = ""
"""Mark behind a window's last step, whose bytes are of no phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to run."""

    warmup: int
    """Least steps between the first and the measured ones."""
    steps: int
    """Least timed steps."""
    min_time_s: float = 0.0
    """Least seconds of timed steps."""


@dataclass(slots=True)
class Span:
    """A window that is open, and what its event will say beside its peaks."""

    window: Window
    num_steps: int = 0
    steady: bool | None = None
    grads: list[int] = field(default_factory=list)


def measure(backend: Backend, build: Callable[[], Subject], plan: Plan, events: Events) -> tuple[str, str | None]:
    """Measures the step that `build` makes, and says how it ended: `ok`, or `thrash` and why."""
    return Measuring(backend, plan, events).run(build)


class Measuring:
    """One rung at work."""

    def __init__(self, backend: Backend, plan: Plan, events: Events) -> None:
        self.backend = backend
        self.plan = plan
        self.events = events
        self.subject = Subject(take=lambda mark: None)
        self.training = Training(self.subject)
        self.num_taken = 0
        self.windows: dict[str, Marked] = {}

    def run(self, build: Callable[[], Subject]) -> tuple[str, str | None]:
        """Everything, in its order."""
        self.build(build)
        self.first_step()
        self.warm_up()
        if self.backend.counts_while_timing:
            self.marked("phases")
            with self.window("measured") as span:
                self.time(span)
        else:
            self.marked("measured")
            with ResidentWatch() as resident:
                self.time(None)
            self.events.warn(resident.beyond(self.windows["measured"].reading))
        self.training.check_parameters()
        self.say_breakdown()
        self.look()
        retries = self.windows["measured"].reading.peak.num_alloc_retries
        if retries:
            return "thrash", (
                f"{retries} requests in the measured steps failed at first and went through after cached memory was "
                "given back: the step fits, and is slowed down at every turn"
            )
        return "ok", None

    def build(self, build: Callable[[], Subject]) -> None:
        """Builds the subject in the window `init`."""
        self.events.begin("build")
        with self.window("init") as span:
            span.window.mark("init")
            self.subject = build()
            self.training = Training(self.subject)
        if self.subject.note:
            self.events.write("environment", note=self.subject.note)
        self.training.start()
        if not self.subject.trained():
            self.events.warn("no parameters that train were found, so nobody knows whether it trains")

    def first_step(self) -> None:
        """The first step, with marks; NotTraining where its gradients or its parameters say so."""
        self.events.begin("first_step")
        with self.window("first_step") as span, self.training.watching(self.marks(span)) as mark:
            self.take(mark)
            span.num_steps = 1
        self.events.write("training", grad_norm=finite(self.training.grad_norm), num_targets=self.subject.num_targets)
        self.training.check_gradients()
        if not self.subject.patient:
            self.training.check_parameters()

    def warm_up(self) -> None:
        """Steps until they ask the driver for nothing and take equal times, or until patience ends."""
        if not self.plan.warmup:
            return
        self.events.begin("warmup")
        times_ns: list[int] = []
        with self.window("warmup") as span:
            spent_ns = 0
            while len(times_ns) < self.plan.warmup + MOST_EXTRA:
                allocs = self.backend.num_device_allocs()
                times_ns.append(self.clocked())
                span.num_steps = len(times_ns)
                span.steady = self.backend.num_device_allocs() == allocs and settled(times_ns)
                if len(times_ns) > self.plan.warmup:
                    spent_ns += times_ns[-1]
                if len(times_ns) >= self.plan.warmup and (span.steady or spent_ns > EXTRA_TIME_S * 10**9):
                    break

    def marked(self, name: str) -> None:
        """One step with its phases marked, in the window `name`."""
        self.events.begin("measured")
        with self.window(name) as span:
            self.take(self.marks(span))
            span.num_steps = 1

    def time(self, span: Span | None) -> None:
        """Times at least `plan.steps` steps and `plan.min_time_s` seconds of them, in `span` where there is one."""
        self.events.begin("timed")
        times_ns: list[int] = []
        with without_collector():
            allocs = self.backend.num_device_allocs()
            while len(times_ns) < self.plan.steps or sum(times_ns) < self.plan.min_time_s * 10**9:
                times_ns.append(self.clocked())
                self.events.write("step", ns=times_ns[-1])
                collect()  # what this step left: everything older is frozen
            if span is not None:
                span.num_steps = len(times_ns)
                quiet = self.backend.num_device_allocs() == allocs
                span.steady = quiet and settled(times_ns) if len(times_ns) > 1 else quiet

    def take(self, mark: Callable[[str], None]) -> None:
        """Takes one step outside of any clock."""
        self.hear(self.subject.take(mark))

    def clocked(self) -> int:
        """Takes one step, and returns its time; its loss is read and written down when the clock has stopped."""
        take = self.subject.bare or self.subject.take
        loss, elapsed_ns = self.backend.clock(lambda: take(self.remember))
        self.hear(loss)
        return elapsed_ns

    def remember(self, phase: str) -> None:
        """Where a step is, for the case that it fails. That is all that a timed step tells."""
        self.events.step_phase = phase

    def hear(self, loss: Any) -> None:
        """Takes down a step's loss; NotTraining where it is not finite."""
        self.num_taken += 1
        if loss is None:
            if self.num_taken == 1:
                self.events.warn("the step returns no loss, so nobody looked whether it is finite")
            return
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        if not math.isfinite(value):
            raise NotTraining(f"the loss of step {self.num_taken} is {value}")
        self.events.write("loss", loss=value)

    def marks(self, span: Span) -> Callable[[str], None]:
        """The mark of `span`'s window, which also counts the gradients that are there."""

        def mark(phase: str) -> None:
            span.window.mark(phase)
            span.grads.append(self.held()["grads"])

        return mark

    def held(self) -> Held:
        """What is held now."""
        return held_bytes(self.subject, self.backend.device, self.backend.rounded)

    @contextmanager
    def window(self, name: str) -> Iterator[Span]:
        """A window that says its event at its end, or notes how far it came when it failed. What Python's collector
        finds is freed in it, so that the next one begins without."""
        span, collections = Span(self.backend.window()), Collections()
        before = self.held()
        try:
            with span.window:
                with collections:
                    yield span
                span.window.mark(BETWEEN)
                collect()
        except BaseException:
            self.events.losing(span.window)
            raise
        self.events.reached(span.window)
        reading = span.window.reading
        assert reading is not None
        self.windows[name] = Marked(
            reading=reading, before=before, after=self.held(), grads=tuple(span.grads), num_steps=span.num_steps
        )
        peak = replace(reading.peak, num_steps=span.num_steps, num_collections=collections.number, steady=span.steady)
        self.events.write("window", name=name, peak=asdict(peak), phase_peaks=reading.phase_peaks)
        if (offload := self.subject.offload) is not None and name != "init":
            self.events.write("host", window=name, bytes=offload.peak_host_bytes)
            offload.reset()

    def say_breakdown(self) -> None:
        """What makes up the largest peak, and what is alive between two steps."""
        init, last = self.windows["init"], self.windows["measured"]
        other_bytes = init.reading.live_bytes - sum(init.after.values()) + self.backend.workspace_bytes()
        self.events.write(
            "breakdown",
            at_peak=at_largest_peak(self.windows),
            between_steps=between_steps(last.reading.live_bytes, last.after, other_bytes=other_bytes),
        )
        self.events.warn(leaking(self.windows))
        self.events.warn(waiting(last.reading))

    def look(self) -> None:
        """One more step, to count its FLOPs and to see which attention ran; nothing that happens in it is a failure of
        the rung. A compiled step does not show what it runs."""
        if self.subject.compiled:
            return
        self.events.begin("look")
        seen = Look()
        try:
            with seen:
                (self.subject.bare or self.subject.take)(lambda phase: None)
        except Exception as error:
            self.events.warn(f"FLOPs and attention kernels are not known: looking failed with {type(error).__name__}")
            return
        self.events.write(
            "look",
            attention=dict(seen.attention),
            model_flops=seen.model_flops if seen.complete else None,
            hardware_flops=seen.hardware_flops if seen.complete else None,
        )
        calls = seen.attention["math"]
        if calls and self.subject.attention in (None, "sdpa"):
            self.events.warn(
                f"torch's attention fell back to its math kernel in {calls} of {seen.attention.total()} calls: it "
                "keeps the scores of every pair of tokens"
            )


def settled(times_ns: list[int]) -> bool:
    """Whether the last two steps took about the same time."""
    if len(times_ns) < 2:
        return False
    last, before = times_ns[-1], times_ns[-2]
    return abs(last - before) <= SETTLED_FRAC * max(last, before)


def finite(value: float | None) -> float | None:
    """`value` where JSON has a number for it."""
    return value if value is not None and math.isfinite(value) else None
