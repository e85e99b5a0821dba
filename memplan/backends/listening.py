"""A step that a recorder listens to: whose tensors are what, and what of it waits on the host."""

import torch
from torch import Tensor

from memplan.spec.run import RunSpec
from memplan.step.builder import TrainStep, build_step
from memplan.step.offload import host_size
from memplan.trace.storages import inside
from memplan.trace.tracing import Tracing


def listened(run: RunSpec, tracing: Tracing) -> TrainStep:
    """The step of `run`, its parameters claimed; what it keeps on the host is none of the card's."""
    step = build_step(run, torch.device("cpu"))
    if step.sharding.kept and run.device.rules == "cuda":
        tracing.recorder.optimizer_on_host = True
        step.sharding.on_host = tracing.recorder.leave_out
        for tensor in (*step.sharding.kept, *(copy for _, copy in step.update.copies())):
            tracing.recorder.move_out(tensor)
    tracing.recorder.claim_model(step.model)
    names = {id(param): name.rpartition(".")[0] for name, param in step.model.named_parameters()}
    for param, copy in step.update.copies():
        tracing.recorder.claim(copy, "optimizer", names.get(id(param), ""))
    if step.offload is not None and run.device.rules == "cuda":
        step.offload.on_host = tracing.recorder.leave_out
    return step


def on_host(step: TrainStep) -> int:
    """Most bytes that a step keeps on the host: what checkpointing moves there, and what FSDP2 offloads, of which
    parameters and gradients are pinned."""
    moved = 0 if step.offload is None else step.offload.peak_host_bytes
    kept = step.sharding.kept
    pinned = sum(host_size(inside(param).nbytes, pinned=True) * (1 + param.requires_grad) for param in kept)
    states = [tensor for state in step.optimizer.state.values() for tensor in state.values()] if kept else []
    copies = [copy for _, copy in step.update.copies()] if kept else []
    return moved + pinned + sum(inside(tensor).nbytes for tensor in (*states, *copies) if isinstance(tensor, Tensor))
