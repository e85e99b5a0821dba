"""`estimate` for a module of the user's own: states by formula, activations by trace.

Every step whose memory is claimed was traced: the largest batch and the next one, the longest sample and the next.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from memplan.backends.environment import installed_version
from memplan.errors import MemplanError
from memplan.estimate.probing import Probe, largest_fitting
from memplan.estimate.states import States, optimizer_sizes, states
from memplan.estimate.traced import peak_lines, traced_estimate
from memplan.record import Estimate, Fit, FormulaLine
from memplan.record.fit import SEQ_STEP
from memplan.record.module import ModuleFacts
from memplan.record.trace import TracedRun
from memplan.spec.run import RunSpec

MOST_TRACED = 256
"""Configurations of a sweep: each is traced, which takes about a second for a model of forty blocks."""


def estimate_module(run: RunSpec, gate_bytes: int | None) -> tuple[Estimate, Fit]:
    """What formulas and trace say about `run`, and whether it fits under the gate, or else into the card."""
    module, known = module_states(run)
    from memplan.backends.simulated import kept_by

    found = traced(run)
    kept = [kept_by(run, samples, module.vocab) for samples in (1, 2)]
    answer = traced_estimate(run, module, known, found, kept)
    return answer, Room(run, gate_bytes).fit(found, module)


def explain_module(run: RunSpec) -> tuple[tuple[FormulaLine, ...], dict[str, int]]:
    """The lines of the peak of `run`, states by formula, and the sizes that it was traced at."""
    _, known = module_states(run)
    return peak_lines(known, traced(run)), {"B": run.step.micro_batch, "S": run.step.seq}


def check_sweep(runs: Iterable[RunSpec], number: int) -> None:
    """MemplanError for what neither formulas nor the trace tell of `runs`, or for more configurations than are traced
    in a sitting."""
    for run in runs:
        check(run)
    if number > MOST_TRACED:
        raise MemplanError(
            f"{number} configurations of a model of your own would each be traced.",
            f"Sweep {MOST_TRACED} or fewer, such as --sweep batch=1,2,4,8.",
        )


def module_states(run: RunSpec) -> tuple[ModuleFacts, States]:
    """What the module of `run` holds, and what training it keeps."""
    check(run)
    from memplan.backends.own_module import module_facts

    module = module_facts(run)
    return module, states(run, module)


def check(run: RunSpec) -> None:
    """MemplanError for what neither formulas nor the trace tell of a module of a user's."""
    if run.step.lora_base:
        raise MemplanError(
            f"A base in {run.step.lora_base} runs kernels that a trace cannot, and no formula knows where a module of "
            "your own uses them.",
            f"Type --lora {run.step.lora.partition('@')[0]}.",
        )
    if installed_version("torch") is None:
        raise MemplanError("A model of your own is traced, and torch is not installed.", "Type: pip install torch")


def traced(run: RunSpec) -> TracedRun:
    """The trace of `run`, an optimizer whose kernels cannot be traced stood in for by the formulas' sizes."""
    from memplan.backends.simulated import simulate
    from memplan.backends.stand_in import needs_stand_in

    sizes_of = functools.partial(optimizer_sizes, run) if needs_stand_in(run) else None
    return simulate(run, sizes_of=sizes_of)


def changed(run: RunSpec, **changes: Any) -> RunSpec:
    """`run` with other values in its step."""
    return dataclasses.replace(run, step=dataclasses.replace(run.step, **changes))


class Room:
    """The gate, or else what the card has, against steps of several sizes."""

    def __init__(self, run: RunSpec, gate_bytes: int | None) -> None:
        self.run = run
        self.gate_bytes = gate_bytes
        limit_bytes = run.device.usable_bytes if gate_bytes is None else gate_bytes
        self.limit_bytes: int = 0 if limit_bytes is None else limit_bytes
        self.limits = limit_bytes is not None

    def fit(self, traced: TracedRun, module: ModuleFacts) -> Fit:
        """Whether the run, traced as `traced`, stays within, and how much larger it could be."""
        if not self.limits:
            return Fit(gate_bytes=None, limit_bytes=None, fits=None, max_batch=None, max_batch_unchunked=None)
        probe, chunks = self.probe(traced), self.run.step.chunks
        found = self.max_batch(chunks, self.run.step.micro_batch, probe)
        unchunked = found if chunks == 1 else self.max_batch(1, max(found[0] // chunks, 1))
        longest = self.max_seq(probe, module)
        sizes = {"max_batch": found, "max_batch_unchunked": unchunked, "max_seq": longest}
        return Fit(
            gate_bytes=self.gate_bytes,
            limit_bytes=self.limit_bytes,
            fits=probe.fits,
            max_batch=found[0],
            max_batch_unchunked=unchunked[0],
            max_seq=longest[0],
            model_ends=tuple(name for name, (_, ends) in sizes.items() if ends),
        )

    def probe(self, found: TracedRun) -> Probe:
        """Whether a traced run finds room, the first step included: under the gate by what it allocates, on the card
        by whether its allocator finds it, fragments included."""
        needed_bytes = found.steps.needed_bytes
        fits = needed_bytes <= self.limit_bytes if self.gate_bytes is not None else found.steps.out_of_memory is None
        return Probe(fits=fits, num_bytes=needed_bytes)

    def peak_with(self, **changes: Any) -> tuple[int, bool | None] | MemplanError:
        """The traced peak of the run with another size, and whether it finds room where anything limits it; or what the
        module raises."""
        try:
            found = traced(changed(self.run, **changes))
        except MemplanError as error:
            return error
        return found.steps.needed_bytes, self.probe(found).fits if self.limits else None

    def probe_with(self, **changes: Any) -> Probe:
        """The same of the run with another size; one of which the module raises does not fit."""
        run = changed(self.run, **changes)
        try:
            return self.probe(traced(run))
        except MemplanError:
            return Probe(fits=False, num_bytes=None)

    def max_batch(self, chunks: int, near: int, probe: Probe | None = None) -> tuple[int, bool]:
        """The largest batch in so many chunks that finds room, 0 when none does, and whether the module takes no larger
        one; `probe` is known of `near` samples a chunk."""
        micro, ends = largest_fitting(
            lambda micro: self.probe_with(batch=micro * chunks, chunks=chunks),
            self.limit_bytes,
            near=near,
            known={} if probe is None else {near: probe},
        )
        return chunks * micro, ends

    def max_seq(self, probe: Probe, module: ModuleFacts) -> tuple[int | None, bool]:
        """The longest sample, a multiple of 64 tokens and no longer than the module says that it takes, that finds room
        at the run's batch, 0 when none does and None where the module takes no such length; and whether the module
        takes none longer."""
        seq, most = self.run.step.seq, None if module.max_seq is None else module.max_seq // SEQ_STEP
        near = max(seq // SEQ_STEP, 1) if most is None else max(min(seq // SEQ_STEP, most), 1)
        found, ends = largest_fitting(
            lambda count: self.probe_with(seq=count * SEQ_STEP),
            self.limit_bytes,
            near=near,
            known={near: probe} if near * SEQ_STEP == seq else {},
            most=most,
        )
        return found * SEQ_STEP if found or not probe.fits else None, ends
