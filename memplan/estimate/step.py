"""One training step over the ledger: forward, loss and backward by chunks, clipping, optimizer.

A step of more than two chunks is told by two: every later one is as the second, whose gradients are there already.
"""

import dataclasses
from typing import Any

from memplan.errors import NOTHING_LEADS, NOTHING_TRAINS, MemplanError
from memplan.estimate import families
from memplan.estimate.batch import Batch, Sizes, chunk_of, make_batch
from memplan.estimate.losses import summed_loss
from memplan.estimate.model import LanguageModel
from memplan.estimate.molmo2 import Molmo2
from memplan.estimate.ops import scale
from memplan.estimate.setup import Setup, autocast_dtype
from memplan.estimate.sharding_fsdp import make_sharding
from memplan.estimate.tape import Storage, Tape, Tensor
from memplan.estimate.update import AnyUpdate, make_update, trainable
from memplan.spec.device import DeviceSpec, kin_of
from memplan.spec.run import RunSpec
from memplan.units import MIB

GENERATIONS = {
    "a100": (8, 0), "h100": (9, 0), "h200": (9, 0), "b200": (10, 0), "l40s": (8, 9), "rtx-4090": (8, 9),
    "rtx-5090": (12, 0), "rtx-pro-6000": (12, 0),
}  # fmt: skip
"""Compute capability by the beginning of a card's name. Source: CUDA C++ Programming Guide, compute capabilities."""
MULTIPROCESSORS = {
    "a100": 108, "h100": 132, "h200": 132, "b200": 148, "l40s": 142, "rtx-4090": 128, "rtx-5090": 170,
    "rtx-pro-6000": 188,
}  # fmt: skip
"""By the beginning of a card's name. Source: the architecture papers and the cards' data sheets."""
WORKSPACE_BYTES = {8: 8_519_680, 9: 32 * MIB, 10: 32 * MIB, 12: 32 * MIB}
"""cuBLAS's workspace for each thread, by the capability's first number. Source: `parseChosenWorkspaceSize`,
aten/src/ATen/cuda/CublasHandlePool.cpp, torch 2.13."""


def tape_of(device: DeviceSpec) -> Tape:
    """An empty ledger under the rules of `device`."""
    kin = kin_of(device.name) or "h100-80g"
    card = next(start for start in GENERATIONS if kin.startswith(start))
    generation = GENERATIONS[card]
    workspace_bytes = WORKSPACE_BYTES[generation[0]] if device.rules == "cuda" else 0
    return Tape(
        device.rules,
        generation=generation,
        multiprocessors=MULTIPROCESSORS[card],
        workspace_bytes=workspace_bytes,
    )


def new_tape(run: RunSpec) -> Tape:
    """An empty ledger for a step of `run`."""
    tape = tape_of(run.device)
    tape.setup = Setup.of(run)
    tape.sharding = make_sharding(tape, run.step)
    return tape


def build(tape: Tape, run: RunSpec) -> Any:
    """The model of `run` over `tape`."""
    own = LanguageModel if run.model.vision is None else Molmo2
    model = families.make(tape, run) if run.model.impl == "hf" else own(tape, run)
    tape.setup.check_adapters()
    if not trainable(tape):
        raise MemplanError(*NOTHING_TRAINS)
    if all(parameter.idle for parameter in trainable(tape)):
        raise MemplanError(*NOTHING_LEADS)
    return model


def write_step(run: RunSpec, sizes: Sizes | None = None) -> Tape:
    """The ledger of one steady step of `run`, its optimizer's state there from the start; of many batches and lengths
    at once where `sizes` says so."""
    sizes = Sizes.of(run) if sizes is None else sizes
    tape, step = new_tape(run), run.step
    model = build(tape, run)
    tape.part = ""
    batch = make_batch(tape, run, sizes)
    tape.kept += [model, batch]
    update = make_update(tape, step, tape.sharding.prepare(trainable(tape)))
    for thread in ("forward", "backward"):  # taken in the first step already
        tape.stay(f"cublas workspace of the {thread} thread", tape.workspace_bytes)
    mean = accumulate(tape, run, model, batch, sizes, update)
    if step.update == "step":
        tape.mark("optimizer")
        update()
        tape.sharding.finish_step()
    tape.mark("end")
    del mean
    return tape


def accumulate(tape: Tape, run: RunSpec, model: Any, batch: Batch, sizes: Sizes, update: AnyUpdate) -> Storage:
    """The loss of the whole batch, its gradients made, chunk by chunk."""
    losses: list[Any] = []
    chunks = sizes.batch // sizes.micro_batch
    for index in range(min(run.step.chunks, 2)):
        if index:  # those of the chunks between the first and the last
            losses.append(tape.allocate("div", (), "float32", copies=chunks - 2))
        start = len(tape.events)
        tape.sharding.begin_chunk(last=index + 1 == run.step.chunks or index == 1)
        losses.append(run_chunk(tape, run, model, chunk_of(batch, sizes.micro_batch), update))
        if index and run.step.chunks > 2:
            tape.again = start, len(tape.events)
    row = tape.allocate("stack", (chunks,), "float32")
    mean = tape.allocate("sum", (), "float32")
    del row
    losses.clear()
    return mean


def run_chunk(tape: Tape, run: RunSpec, model: Any, batch: Batch, update: AnyUpdate) -> Tensor:
    """Forward, loss and backward of one chunk; its loss."""
    loss = scale(chunk_loss(tape, run, model, batch), "div")
    tape.mark("backward")
    scaled = update.scaled(loss)
    tape.backward(scaled)
    tape.sharding.finish_backward()
    tape.held.clear()
    del scaled
    return loss.alias()


def chunk_loss(tape: Tape, run: RunSpec, model: Any, batch: Batch) -> Tensor:
    """Forward and loss of one chunk, before it is scaled."""
    step = run.step
    tape.mark("forward")
    tape.autocast = autocast_dtype(step)
    tape.sharding.enter()
    hidden = [tape.sharding.leave(model.forward(batch))]
    tape.mark("loss")
    loss = summed_loss(tape, hidden, model.head, batch, kind=step.loss_kind, parts=step.loss_chunks)
    tape.leave_autocast()
    return loss


def write_forward(run: RunSpec, samples: int) -> tuple[Tape, Tensor]:
    """The ledger of forward and loss over `samples` in one chunk, and the loss that holds what they keep."""
    step = dataclasses.replace(run.step, batch=samples, chunks=1)
    run = dataclasses.replace(run, step=step)
    tape = new_tape(run)
    model = build(tape, run)
    tape.part = ""
    batch = make_batch(tape, run, Sizes.of(run))
    tape.sharding.prepare(trainable(tape))
    tape.stay("cublas workspace of the forward thread", tape.workspace_bytes)
    return tape, chunk_loss(tape, run, model, chunk_of(batch, samples))
