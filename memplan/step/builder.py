"""The training step: forward, loss and backward by chunks, clipping, optimizer."""

from collections.abc import Callable

import torch
from torch import Tensor

from memplan.errors import NOTHING_LEADS, NOTHING_TRAINS, MemplanError
from memplan.models.batch import IGNORED, Batch, synthetic_batch
from memplan.models.blocks import find_blocks
from memplan.models.factory import build_model
from memplan.models.trainable import Trainable
from memplan.spec.run import RunSpec
from memplan.step.checkpoint import checkpoint_blocks
from memplan.step.compiled import compile_blocks
from memplan.step.fused_loss import fused_implementation
from memplan.step.lora import add_adapters
from memplan.step.losses import rows_loss, summed_loss
from memplan.step.offload import Offload
from memplan.step.precision import DTYPES, autocast
from memplan.step.region import Region
from memplan.step.sharding import make_sharding
from memplan.step.update import Update, UpdateInBackward, matrices, trained

Mark = Callable[[str], None]


def no_mark(phase: str) -> None:
    """Hears the phases and does nothing."""


class TrainStep:
    """A model, its batch and its optimizer; a call is one whole optimizer step."""

    def __init__(self, run: RunSpec, model: Trainable, batch: Batch) -> None:
        self.run = run
        self.model = model
        self.batch = batch
        self.num_targets = int((batch.labels != IGNORED).sum())
        step = run.step
        wraps = step.ckpt != "none" or step.compile != "off"
        self.blocks = find_blocks(model, step.blocks) if wraps or step.blocks else {}
        self.regions, note = checkpoint_blocks(
            self.blocks,
            step.checkpointing,
            dropout=step.dropout > 0,
            shares_kv=model.shares_kv,
        )
        self.note = "; ".join(filter(None, (model.note, note)))
        if step.loss_kind == "fused":
            whose = fused_implementation(batch.labels.device, distill=batch.teacher is not None)
            self.note = "; ".join(filter(None, (self.note, f"the fused loss is {whose}'s code")))
        if step.compile == "on":
            compile_blocks(self.blocks, self.regions)
        self.offload: Offload | None = None
        if step.checkpointing.kind == "offload":
            self.offload = Offload(pinned=run.device.rules == "cuda")
            for block in self.blocks.values():
                self.offload.put_on(block)
        self.loss_region = Region("loss", rows_loss)
        self.held: list[Tensor] = []
        """Logits that the caller holds while a chunk is at work."""
        if not trained(model):
            raise MemplanError(*NOTHING_TRAINS)
        self.sharding = make_sharding(step, model)
        make = UpdateInBackward if step.update == "backward" else Update
        self.update = make(step, self.sharding.params, matrices(model, step))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over all parameters, of a step that has one."""
        assert isinstance(self.update, Update)
        return self.update.optimizer

    def __call__(self, mark: Mark = no_mark) -> float:
        """Runs one step and returns its loss; `mark` hears each phase begin. Gradients are released at the end.

        There is no phase `optimizer` where the update is part of backward.
        """
        if isinstance(self.update, UpdateInBackward):
            with self.update.listening():
                return self.accumulate(mark).item()
        loss = self.accumulate(mark)
        mark("optimizer")
        self.update()
        self.sharding.finish()
        return loss.item()

    def accumulate(self, mark: Mark = no_mark) -> Tensor:
        """The batch's mean loss, fp32 scalar, with its gradients, times the loss scale, added up over the chunks.

        Every chunk's loss is its sum over the whole batch's number of targets, so that the gradients of C chunks add up
        to those of one backward over the batch.
        """
        losses = []
        for index in range(self.run.step.chunks):
            with self.sharding.chunk(last=index == self.run.step.chunks - 1):
                mark("forward")
                loss = self.chunk_loss(self.batch.chunk(index, self.run.step.chunks), mark)
                if not loss.requires_grad:
                    raise MemplanError(*NOTHING_LEADS)
                mark("backward")
                self.update.scaled(loss).backward()  # type: ignore[no-untyped-call]  # torch gives it no types
            losses.append(loss.detach())
            self.held.clear()
            del loss
        return torch.stack(losses).sum()

    def chunk_loss(self, part: Batch, mark: Mark) -> Tensor:
        """Loss of one chunk, scaled for the whole batch, with its graph."""
        step = self.run.step
        with autocast(step, part.labels.device):
            hidden = self.sharding.module(part)
            mark("loss")
            total = summed_loss(
                hidden,
                self.model.head,
                part,
                kind=step.loss_kind,
                chunks=step.loss_chunks,
                region=self.loss_region,
                held=self.held,
            )
        return total / self.num_targets


def build_step(run: RunSpec, device: torch.device, seed: int = 0) -> TrainStep:
    """The step that `run` describes, on `device`, from random weights and synthetic tokens drawn by `seed`."""
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[run.step.stored])
    try:
        with device:
            model = build_model(run.model, attention=run.step.attention, norm=run.step.norm, dropout=run.step.dropout)
            if run.step.lora:
                add_adapters(model, run.step)
    finally:
        torch.set_default_dtype(default)
    model.train()
    return TrainStep(run, model, synthetic_batch(run, device, seed, vocab=model.vocab))
