"""The answer sheet of a module that no formula knows: its states by formula, everything else from a trace of its step.

Peaks are the trace's, of the larger of its two steps. Between two steps parameters, buffers and optimizer state are the
formulas'; the batch, workspaces, what a rank sends, what the module keeps besides and what the allocator does not split
are the rest of what the trace found. Where the two witnesses count states differently, a note says so.
"""

from collections.abc import Iterable, Sequence

from memplan.dtypes import ELEMENT_BYTES
from memplan.estimate.bands import process_of
from memplan.estimate.states import FORMULAS, States
from memplan.estimate.tape import CUDA_BLOCK_BYTES
from memplan.record.formula import FormulaLine
from memplan.record.memory import PHASES, Band, Estimate, MemoryBreakdown, PhasePeak
from memplan.record.module import ModuleFacts
from memplan.record.trace import LiveTensor, PhaseTotals, TracedRun, TraceReport
from memplan.spec.device import DeviceSpec
from memplan.spec.run import RunSpec
from memplan.units import format_bytes

REPLAYED = "traced: its allocations replayed through the device's allocator"


def traced_estimate(
    run: RunSpec, module: ModuleFacts, known: States, found: TracedRun, kept: Sequence[tuple[int, int]]
) -> Estimate:
    """The answer sheet of `run`: states `known`, a trace `found`, and what forwards over one and over two samples
    keep, head and loss apart and theirs."""
    larger, steady = larger_step(found), found.steps.steady
    per_sample, logits = (kept[1][part] - kept[0][part] for part in (0, 1))
    reserved_bytes = larger.peak_reserved_bytes
    reserved = Band(low_bytes=reserved_bytes, high_bytes=reserved_bytes, likely_bytes=reserved_bytes, reason=REPLAYED)
    return Estimate(
        run=run,
        params_total=found.params_total,
        params_trainable=found.params_trainable,
        params_embedding=module.embedding,
        static=between_steps(known, steady, run.device),
        phases=tuple(phase_peak(name, larger.phases[name]) for name in PHASES if name in larger.phases),
        per_sample_bytes=per_sample,
        per_chunk_bytes=kept[0][0] - per_sample,
        logits_per_sample_bytes=logits,
        reserved=reserved,
        process=process_of(reserved, run.device, world=run.step.world),
        host_bytes=steady.host_bytes,
        managed_bytes=known.managed_bytes,
        traced=True,
        notes=tuple(notes(known, found)),
    )


def larger_step(found: TracedRun) -> TraceReport:
    """The step that needs more, a later one where both need the same."""
    return max(found.steps.steady, found.steps.first_step, key=lambda step: step.peak_allocated_bytes)


def phase_peak(name: str, totals: PhaseTotals) -> PhasePeak:
    """The largest moment of a phase, in the words of an estimate."""
    op, module = name_of(totals.op), path_of(totals.module)
    moment = f"{op} of {module}" if module else op
    return PhasePeak(phase=name, moment=moment or "its beginning", breakdown=totals.breakdown)


def name_of(op: str) -> str:
    """The name of an op as the ledger spells it: `log_softmax` for `aten._log_softmax.default`."""
    return op.removeprefix("hidden:").removeprefix("aten.").partition(".")[0].removeprefix("_")


def path_of(module: str) -> str:
    """The path that the owner of a module knows."""
    return module.partition(".")[2] if module.partition(".")[0] == "module" else module


def between_steps(known: States, steady: TraceReport, device: DeviceSpec) -> MemoryBreakdown:
    """Bytes between two steps: as many together as the trace holds, states by formula."""
    comm = sum_of(steady.between, "comm", device)
    other = steady.static_bytes - known.held.total_bytes - comm
    return MemoryBreakdown(**known.held.to_dict() | {"comm": comm, "other": max(other, 0)})


def notes(known: States, found: TracedRun) -> Iterable[str]:
    """What was traced instead of what was asked for, which step needs most where it is the first, and where the trace
    counts states differently."""
    if found.note:
        yield found.note
    if larger_step(found) is not found.steps.steady:
        yield "the first step, told here, needs more than every later one"
    for name in FORMULAS:
        traced, by_formula = sum_of(found.steps.steady.between, name, found.run.device), known.held.to_dict()[name]
        if traced != by_formula:
            yield f"{name} between two steps: {format_bytes(by_formula)} by formula, {format_bytes(traced)} traced"


def sum_of(tensors: Iterable[LiveTensor], category: str, device: DeviceSpec) -> int:
    """Bytes of a category, each tensor rounded up as the device's allocator rounds."""
    return sum(rounded(one.num_bytes, device) * one.count for one in tensors if one.category == category)


def rounded(num_bytes: int, device: DeviceSpec) -> int:
    """Bytes that the allocator takes for a request."""
    unit = 1 if device.rules == "cpu" else CUDA_BLOCK_BYTES
    return -(-num_bytes // unit) * unit


def peak_lines(known: States, found: TracedRun) -> tuple[FormulaLine, ...]:
    """What is alive at the peak, the largest first: by formula the categories of which the formulas hold all that the
    trace does, which are the states and the gradients where all of them are there; else as traced."""
    step, device = larger_step(found), found.run.device
    told = {line.category for line in known.lines}
    for name in [*told]:
        by_formula = sum(line.num_bytes for line in known.lines if line.category == name)
        if by_formula != sum_of(step.alive, name, device):
            told.remove(name)
    lines = [line for line in known.lines if line.category in told]
    lines += [traced_line(one, device) for one in step.alive if one.category not in told]
    unsplit = step.peak_allocated_bytes - sum(line.num_bytes for line in lines)
    if unsplit:
        lines.append(
            FormulaLine(
                category="other", part="", op="blocks larger than asked for", count=1, formula="traced",
                num_bytes=unsplit,
            )
        )  # fmt: skip
    return tuple(sorted(lines, key=lambda line: (-line.num_bytes, line.part, line.op)))


def traced_line(one: LiveTensor, device: DeviceSpec) -> FormulaLine:
    """Equal tensors that the trace found."""
    shape = "x".join(map(str, one.shape)) or one.num_bytes // ELEMENT_BYTES[one.dtype]
    return FormulaLine(
        category=one.category,
        part=path_of(one.module),
        op=name_of(one.op),
        count=one.count,
        formula=f"traced: {shape} of {one.dtype}",
        num_bytes=rounded(one.num_bytes, device) * one.count,
    )
