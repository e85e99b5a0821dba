"""The verbs as functions. Everything heavy is imported by the verb that needs it."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memplan.errors import MemplanError
from memplan.record import Estimate, Fit
from memplan.record.fit import SEQ_STEP
from memplan.spec import DeviceSpec, Ladder, ModelSpec, RunSpec
from memplan.spec.device import CPU, card

if TYPE_CHECKING:
    from memplan.analysis import Agreement
    from memplan.analysis.published import PublishedPair
    from memplan.record import Check, FormulaLine, ParityReport, RungResult, TracedRun, TracedSteps
    from memplan.record.explain import BlockPolicy
    from memplan.record.trace import TraceReport
    from memplan.spec.published import Published

PUBLISHED = Path("ladders/published")
"""Where published figures are, below the current folder."""
DEFAULT_CARD = "h100-80g"
"""The card that is assumed where none is named, as in `memplan.ladder.points`."""


def estimate(question: Ladder, device: DeviceSpec) -> tuple[Estimate, Fit]:
    """What the formulas say about the one rung of `question` on `device`, and whether it fits under the gate, or else
    into the card."""
    from memplan.estimate import estimate as estimated
    from memplan.estimate.bands import fits
    from memplan.estimate.blocks import place, place_few
    from memplan.estimate.peak import finds_room
    from memplan.estimate.search import max_batch, max_seq, with_size

    run = one_run(question, device, verb="estimate")
    if run.model.impl == "user":
        from memplan.api_module import estimate_module

        return estimate_module(run, question.gate_bytes)
    answer = estimated(run)
    limit_bytes = limit_of(question, device)
    if limit_bytes is None:
        nothing = Fit(gate_bytes=None, limit_bytes=None, fits=None, max_batch=None, max_batch_unchunked=None)
        return answer, nothing
    told: dict[RunSpec, int] = {}
    placing = place_few if question.gate_bytes is None else place  # a card leaves more than that open
    largest = max_batch(run, limit_bytes, answer, told, placing=placing)
    longest, one_chunk = max_seq(run, limit_bytes, answer, told, placing=placing), with_size(run, chunks=1)
    if run.step.chunks > 1:
        unchunked = max_batch(one_chunk, limit_bytes, told=told, placing=placing)
    else:
        unchunked = largest
    found = Fit(
        gate_bytes=question.gate_bytes,
        limit_bytes=limit_bytes,
        fits=fits(
            answer.peak_allocated_bytes,
            limit_bytes,
            gate=question.gate_bytes is not None,
            likely_bytes=answer.reserved.likely_bytes,
        ),
        max_batch=largest,
        max_batch_unchunked=unchunked,
        max_seq=longest,
        model_ends=("max_seq",) if longest and run.model.decoder.max_positions < longest + SEQ_STEP else (),
    )
    if question.gate_bytes is not None:
        return answer, found
    rooms = {one.step: found.fits if one == run else finds_room(one, peak, limit_bytes) for one, peak in told.items()}
    steps = {
        "max_batch": {"batch": found.max_batch},
        "max_batch_unchunked": {"batch": found.max_batch_unchunked, "chunks": 1},
        "max_seq": {"seq": found.max_seq},
    }
    uncertain = (
        name for name, size in steps.items() if all(size.values()) and rooms[with_size(run, **size).step] is None
    )
    return answer, dataclasses.replace(found, may_not_fit=tuple(uncertain))


def explain_estimate(question: Ladder, device: DeviceSpec) -> tuple[tuple["FormulaLine", ...], dict[str, int]]:
    """The formula of each line of the peak of the one rung of `question`, and what its letters stand for."""
    from memplan.estimate.explain import explain as lines_of

    run = one_run(question, device, verb="estimate")
    if run.model.impl == "user":
        from memplan.api_module import explain_module

        return explain_module(run)
    return lines_of(run)


def one_run(question: Ladder, device: DeviceSpec, *, verb: str) -> RunSpec:
    """The run of the one rung of `question`; MemplanError when it has several."""
    from memplan.ladder.points import points

    found = points(question, device)
    if len(found) > 1:
        raise MemplanError(
            f"{verb} answers for one rung at a time, of one model in one way.", "Type memplan ladder for several."
        )
    run = found[0].run
    assert isinstance(run, RunSpec)
    return run


def limit_of(question: Ladder, device: DeviceSpec) -> int | None:
    """Bytes that the peak is held against: the gate, or else what the card has; None when nothing limits."""
    return question.gate_bytes if question.gate_bytes is not None else device.usable_bytes


def trace(question: Ladder, device: DeviceSpec) -> tuple["TracedRun", Fit, tuple[int, int]]:
    """What the trace says about the one rung of `question` on `device`, whether it fits under the gate, or else into
    the card, and the bytes that one more sample of a chunk keeps for backward: head and loss apart, and theirs."""
    run = one_run(question, device, verb="trace")
    from memplan.backends.simulated import kept_per_sample, simulate

    answer, vocab = simulate(run), run.model.decoder.vocab
    if run.model.impl == "user":
        from memplan.backends.own_module import module_facts

        vocab = module_facts(run).vocab
    return answer, traced_fit(answer.steps, question.gate_bytes), kept_per_sample(run, vocab)


def explain(question: Ladder, device: DeviceSpec) -> "BlockPolicy":
    """What the checkpoint mode of the one rung of `question` does with each op of a block."""
    from memplan.ladder.points import points

    found = points(question, device)
    if len(found) > 1:
        raise MemplanError("explain answers for one rung and mode at a time.", "Type one --ckpt.")
    from memplan.backends.explain import explain as explained

    run = found[0].run
    assert isinstance(run, RunSpec)
    return explained(run)


def trace_entry(entry: str, device: DeviceSpec, gate_bytes: int | None) -> tuple["TracedSteps", Fit]:
    """What the trace says about the step that `entry`, `pkg.mod:make_step`, builds, on `device`."""
    from memplan.backends.simulated import simulate_entry
    from memplan.models.user_factory import load_entry

    answer = simulate_entry(load_entry(entry), device)
    return answer, traced_fit(answer, gate_bytes)


def traced_fit(steps: "TracedSteps", gate_bytes: int | None) -> Fit:
    """Whether traced steps stay under the gate, or else find room on their card, fragments included."""
    limit_bytes = gate_bytes if gate_bytes is not None else steps.device.usable_bytes
    fits = None
    if limit_bytes is not None:
        fits = steps.out_of_memory is None if gate_bytes is None else steps.needed_bytes <= limit_bytes
    return Fit(gate_bytes=gate_bytes, limit_bytes=limit_bytes, fits=fits, max_batch=None, max_batch_unchunked=None)


def estimated_device(device: str | None, gpu: str | None) -> DeviceSpec:
    """The device that an estimate is made for: a card by name, or the CPU."""
    if device == "cpu":
        if gpu is not None:
            raise MemplanError(f"--device cpu and --gpu {gpu} ask for two devices.", "Leave one out.")
        return CPU
    if device not in (None, "cuda"):
        raise MemplanError(
            f"An estimate is made for a card or the CPU, not for {device!r}.", "Type --gpu NAME or --device cpu."
        )
    return card(gpu or DEFAULT_CARD)


def models() -> tuple[tuple[ModelSpec, dict[str, Any]], ...]:
    """Each built-in model with its published counts: `total`, `trainable` and `embedding`."""
    from memplan.models.registry import model_spec, names, published_counts

    return tuple((model_spec(name), published_counts(name)) for name in names())


def doctor() -> tuple["Check", ...]:
    """What this machine has and lacks; works without torch."""
    from memplan.backends.doctor import checks

    return checks()


def verify(variants: Ladder) -> Iterator["ParityReport"]:
    """The plain step against each rung of `variants`, one report at a time."""
    from memplan.backends.environment import installed_version
    from memplan.ladder.points import find_device, points

    device, simulated = find_device(variants.device)
    if simulated:
        raise MemplanError("verify compares real numbers, which a simulated card has not.", "Type --device cpu.")
    found = points(variants, device)
    if installed_version("torch") is None:
        raise MemplanError("torch is not installed.", "Type: pip install torch")
    import torch

    from memplan.step.parity import compare

    for run in (point.run for point in found):
        assert isinstance(run, RunSpec)
        yield compare(run, torch.device(run.device.rules))


def calibrate(folders: Sequence[Path]) -> tuple[tuple["RungResult", ...], "Agreement"]:
    """All rows of some ladders' folders, and how well estimate and measurement agree over them."""
    from memplan.analysis import agreement
    from memplan.record import read_all

    rows = read_all(folders).rows
    return rows, agreement(rows)


def estimated_published(row: "Published") -> int | None:
    """What the formulas say about the step of a published figure; None where nobody wrote it for them."""
    from memplan.backends.loading import load
    from memplan.estimate.script import peak_of_script

    if row.sizes is not None:
        build = load(*row.sizes)
        return peak_of_script(
            build, row.arguments, row.device, steady=row.window == "steady", above_start=row.above_start
        )
    return None if row.question is None else estimate(row.question, row.device)[0].peak_allocated_bytes


def traced_published(row: "Published") -> "TraceReport":
    """What the trace says about the step of a published figure: of the one written for torch, or else of its
    question."""
    if row.step is not None:
        from memplan.backends.scripted import trace_published

        return trace_published(row)
    assert row.question is not None
    from memplan.backends.simulated import simulate

    steps = simulate(one_run(row.question, row.device, verb="trace")).steps
    return steps.steady if row.window == "steady" else steps.first_step


def published(folders: Sequence[Path], *, say: Callable[[str], None]) -> "tuple[PublishedPair, ...]":
    """Published figures of some folders against trace and estimate, the worst first; `say` hears each row's name."""
    from memplan.analysis.published import PublishedPair, peak_of, worst_first
    from memplan.backends.environment import installed_version
    from memplan.spec.published import read_published

    rows = [row for folder in folders or [PUBLISHED] for row in read_published(folder)]
    if any(row.traceable for row in rows) and installed_version("torch") is None:
        raise MemplanError("torch is not installed.", "Type: pip install torch")
    pairs = []
    for row in rows:
        say(row.name)
        traced = peak_of(traced_published(row), row) if row.traceable else None
        pairs.append(PublishedPair(row=row, traced_bytes=traced, estimated_bytes=estimated_published(row)))
    return worst_first(pairs)
