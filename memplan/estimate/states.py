"""What a step keeps for the parameters of a module that is known by its sizes alone: no formula tells its forward.

Letters of a formula are the numbers themselves: `4 * 1024*4096`. Checked: tests/estimate/test_states.py, against the
trace of the same step.
"""

import re
from dataclasses import dataclass

from memplan.dtypes import ELEMENT_BYTES
from memplan.estimate import low_bit
from memplan.estimate.optimizers import OPTIMIZERS, TorchAO
from memplan.estimate.step import new_tape
from memplan.estimate.tape import Alloc, Tape
from memplan.estimate.update import make_update, trainable
from memplan.record.formula import FormulaLine
from memplan.record.memory import MemoryBreakdown
from memplan.record.module import HeldTensor, ModuleFacts, OptimizerSizes, Size
from memplan.spec.run import RunSpec

FORMULAS = ("params", "buffers", "optimizer")
"""Categories that formulas say whole; what a rank sends and what surrounds the model are the trace's."""
BLOCK_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Parameters, buffers and optimizer state of a step, and its gradients."""

    held: MemoryBreakdown
    """Bytes between two steps, of the categories `FORMULAS`."""
    lines: tuple[FormulaLine, ...]
    """The same tensors and the gradients of one backward, the largest first."""
    managed_bytes: int
    """Paged optimizer state in unified memory."""


def states(run: RunSpec, module: ModuleFacts) -> States:
    """What a step of `run` keeps for `module`."""
    tape = new_tape(run)
    for one in module.parameters:
        note_parameter(tape, one)
    for one in module.buffers:
        tape.part = part_of(one.name)
        tape.kept.append(tape.allocate("buffer", one.shape, one.dtype, category="buffers"))
    tape.part = ""
    make_update(tape, run.step, tape.sharding.prepare(trainable(tape)))
    alive = {index for index in tape.events if index >= 0} - {~index for index in tape.events if index < 0}
    kept = [tape.allocs[index] for index in sorted(alive) if tape.allocs[index].category in FORMULAS]
    sums = dict.fromkeys(FORMULAS, 0)
    for alloc in kept:
        sums[alloc.category] += alloc.num_bytes
    lines = formula_lines(kept + gradients(tape))
    return States(held=MemoryBreakdown(**sums), lines=lines, managed_bytes=tape.managed_bytes)


def note_parameter(tape: Tape, one: HeldTensor) -> None:
    """Puts `one` on the ledger."""
    tape.part = part_of(one.name)
    tape.component = "blocks" if one.matrix else ""
    parameter = tape.parameter(one.name, one.shape, one.dtype, trains=one.trains)
    parameter.idle = one.idle


def gradients(tape: Tape) -> list[Alloc]:
    """Those that one backward leaves, in the parameters' dtypes."""
    first = len(tape.allocs)
    for one in trainable(tape):
        if not one.idle:
            tape.part = part_of(one.name)
            tape.allocate("gradient", one.shape, one.dtype, category="grads")
    return tape.allocs[first:]


def formula_lines(allocs: list[Alloc]) -> tuple[FormulaLine, ...]:
    """`allocs` by module, op and formula, the largest first."""
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for alloc in allocs:
        formula = f"{ELEMENT_BYTES[alloc.dtype]} * {'*'.join(map(str, alloc.shape)) or 1}"
        group = groups.setdefault((alloc.category, alloc.part, alloc.op, formula), [0, 0])
        group[0] += 1
        group[1] += alloc.num_bytes
    lines = [
        FormulaLine(category=category, part=part, op=op, count=count, formula=formula, num_bytes=num_bytes)
        for (category, part, op, formula), (count, num_bytes) in groups.items()
    ]
    return tuple(sorted(lines, key=lambda line: (-line.num_bytes, line.part, line.op)))


def part_of(name: str) -> str:
    """The module of a tensor, the numbers of its blocks left out."""
    return BLOCK_NUMBER.sub("*", name.rpartition(".")[0])


def optimizer_sizes(run: RunSpec, sizes: list[Size]) -> OptimizerSizes:
    """What the optimizer of `run` keeps for parameters of `sizes`, all of which train, on the device of `run`."""
    tape = new_tape(run)
    parameters = [tape.parameter("", shape, dtype, trains=True) for shape, dtype in sizes]
    optimizer = OPTIMIZERS[run.step.optimizer](tape, parameters)
    each = [[storage.index for storage in one.state] for one in parameters]
    known = {index for indices in each for index in indices}
    bits = optimizer.bits if isinstance(optimizer, TorchAO) else 0
    return OptimizerSizes(
        shared=tuple(
            (alloc.shape, alloc.dtype)
            for index, alloc in enumerate(tape.allocs)
            if alloc.category == "optimizer" and index not in known
        ),
        each=tuple(tuple((tape.allocs[i].shape, tape.allocs[i].dtype) for i in indices) for indices in each),
        passing=tuple(low_bit.torchao_temps(one, bits) if bits else () for one in parameters),
    )
