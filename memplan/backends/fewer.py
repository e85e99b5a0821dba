"""A run with just the blocks that show how they repeat, and the whole run's story from theirs."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from memplan.models.layers import block_kinds, with_blocks
from memplan.spec.run import RunSpec
from memplan.trace.events import Trace
from memplan.trace.growth import Stack, grow, repetition

OWN_PATHS = ("decoder.blocks", "vision.blocks")
"""Paths of the lists of blocks in the models of `memplan.models`, of which the first alone is checkpointed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fewer:
    """A run whose lists of blocks are shorter than those of the run that was asked for."""

    run: RunSpec
    """What is traced."""
    stacks: tuple[Stack, ...] = ()
    """The lists that are shorter; empty where the whole run is traced. Paths of transformers' modules are numbers of
    the module's `block_paths`, which only the module knows."""

    def named(self, paths: tuple[str, ...]) -> "Fewer":
        """This with the paths of the module's lists."""
        if self.run.model.impl == "memplan":
            paths = OWN_PATHS
        return dataclasses.replace(
            self, stacks=tuple(dataclasses.replace(stack, path=paths[int(stack.path)]) for stack in self.stacks)
        )

    def grown(self, trace: Trace) -> Trace | None:
        """The whole run's story, or None where it is not shown that blocks repeat."""
        found: Trace | None = trace
        for stack in self.stacks:
            found = None if found is None else grow(found, stack)
        return found

    def counted(self, sizes: Iterable[tuple[str, int]]) -> int:
        """Parameters of the whole run's model, from those of the traced one by name; those of the first inner unit
        stand for what is left out."""
        total = 0
        for name, size in sizes:
            times = 1
            for stack in self.stacks:
                block = stack.block(name)
                if block is not None and stack.unit(block) == stack.inner.start:
                    times += stack.added
            total += size * times
        return total


def fewer_blocks(run: RunSpec) -> Fewer:
    """`run` with just the blocks that show how they repeat; itself when it has no more.

    Every block is traced where one block does not tell of the others: clipping stacks the norms of all tensors in one,
    whose size depends on their number; gradients are put into buckets; the host's share is asked for.
    """
    step = run.step
    if step.clip is not None or step.sharding.sharded or step.checkpointing.kind == "offload" or step.blocks:
        return Fewer(run=run)
    lists = block_kinds(run.model)
    treated = marks(run, [len(kinds) for kinds in lists])
    stacks, kept = [], []
    for number, (kinds, marked) in enumerate(zip(lists, treated, strict=True)):
        first, period, spare = repetition(list(zip(kinds, marked, strict=True)))
        begin, end = first + 2 * period, first + (2 + spare) * period
        kept.append([index for index in range(len(kinds)) if not begin <= index < end])
        if spare:
            traced = len(kept[-1])
            stacks.append(Stack(path=str(number), first=first, period=period, traced=traced, wanted=len(kinds)))
    if not stacks or marks(run, [len(one) for one in kept]) != [
        [marked[index] for index in one] for one, marked in zip(kept, treated, strict=True)
    ]:
        return Fewer(run=run)
    return Fewer(run=dataclasses.replace(run, model=with_blocks(run.model, kept)), stacks=tuple(stacks))


def marks(run: RunSpec, counts: list[int]) -> list[list[bool]]:
    """Whether each block of lists of these lengths is checkpointed; they are counted through."""
    mode, before = run.step.checkpointing, 0
    found = []
    for number, count in enumerate(counts):
        through = number == 0 or run.model.impl == "hf"
        found.append([through and mode.treats(before + index) for index in range(count)])
        before += count
    return found
