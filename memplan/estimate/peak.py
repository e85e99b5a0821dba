"""A run's answer sheet from its ledger."""

from typing import Any

from memplan.estimate.bands import fits, process_of, reserved_band
from memplan.estimate.blocks import place
from memplan.estimate.reading import alive_at, peak_bytes, phase_peaks, settle
from memplan.estimate.step import write_forward, write_step
from memplan.estimate.tape import Tape
from memplan.record.memory import Estimate, MemoryBreakdown
from memplan.spec.run import RunSpec

STATIC = ("params", "buffers", "optimizer", "comm", "other")
"""Categories that are alive between two steps: buckets of communication stay, gradients do not."""
TOKEN_TABLES = ("embedding", "embed_tokens", "wte", "word_embeddings", "token_embedding")
"""What the models call their table of tokens: memplan's own, transformers' decoders, GPT-2, BERT, SigLIP."""


def estimate(run: RunSpec) -> Estimate:
    """What the formulas say about `run`; MemplanError where they know nothing of a part of it."""
    tape = write_step(run)
    asked_bytes, reserved_bytes = peak_bytes(tape), place(tape)
    settle(tape, run.model.decoder.vocab)
    phases = phase_peaks(tape)
    allocated_bytes = max(phase.breakdown.total_bytes for phase in phases)
    reserved = reserved_band(allocated_bytes, run.device, reserved_bytes)
    kept = [kept_by(run, samples) for samples in (1, 2)]
    per_sample, logits = (kept[1][i] - kept[0][i] for i in (0, 1))
    return Estimate(
        run=run,
        params_total=sum(p.numel * p.copies for p in tape.parameters),
        params_trainable=sum(p.numel * p.copies for p in tape.parameters if p.requires_grad),
        params_embedding=sum(p.numel * p.copies for p in tape.parameters if is_table(p.name)),
        static=static(tape),
        phases=phases,
        per_sample_bytes=per_sample,
        per_chunk_bytes=kept[0][0] - per_sample,
        logits_per_sample_bytes=logits,
        reserved=reserved,
        process=process_of(reserved, run.device, world=run.step.world),
        host_bytes=tape.peak_host_bytes + tape.offloaded_bytes,
        managed_bytes=tape.managed_bytes,
        unsplit_bytes=allocated_bytes - asked_bytes,
    )


def finds_room(run: RunSpec, allocated_bytes: int, limit_bytes: int) -> bool | None:
    """Whether `run`, whose peak is `allocated_bytes`, fits into a card that has `limit_bytes`; None where fragments may
    keep it out."""
    found = fits(allocated_bytes, limit_bytes, gate=False)
    if not found:
        return found
    return fits(allocated_bytes, limit_bytes, gate=False, likely_bytes=place(write_step(run)))


def peak_of(run: RunSpec) -> Any:
    """Allocated bytes at the peak of `run`, blocks as large as what was asked for; an array of them where its sizes are
    arrays."""
    return peak_bytes(write_step(run))


def is_table(name: str) -> bool:
    """Whether a parameter is a table of token embeddings."""
    return name.rpartition(".")[0] in TOKEN_TABLES


def static(tape: Tape) -> MemoryBreakdown:
    """Bytes alive between two steps, gradients released."""
    sums = dict.fromkeys(STATIC, 0)
    for index in alive_at(tape, len(tape.events) - 1):
        alloc = tape.allocs[index]
        if alloc.category in sums:
            sums[alloc.category] += alloc.num_bytes
    return MemoryBreakdown(**sums)


def kept_by(run: RunSpec, samples: int) -> tuple[int, int]:
    """Bytes that a forward over `samples` keeps for backward: head and loss apart, and theirs."""
    tape, loss = write_forward(run, samples)
    start = tape.marks[0][0]
    made = {event for event in tape.events[start:] if event >= 0}
    alive = [tape.allocs[index] for index in alive_at(tape, len(tape.events) - 1) & made]
    del loss
    vocab = run.model.decoder.vocab
    logits = sum(a.num_bytes for a in alive if a.phase == "loss" and len(a.shape) > 1 and a.shape[-1] == vocab)
    return sum(a.num_bytes for a in alive) - logits, logits
