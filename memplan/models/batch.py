"""What a model is fed with in one step, and random data of the right shapes.

Letters: `B` batch, `S` sequence, `V` vocabulary, `T` image tokens of a sample, `p` patches pooled into one of them.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from memplan.spec.model import ModelSpec
from memplan.spec.run import RunSpec

IGNORED = -100
"""Label of a token that makes no loss, torch's default `ignore_index`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The inputs of one step; the image fields are there together or not at all."""

    tokens: Tensor
    """Input ids, int64 [B, S]; those of the prefix where there is a suffix."""
    labels: Tensor
    """Next tokens, int64 [B, S], `IGNORED` where the next token is an image placeholder; of the suffix where there is
    one, [B, T]."""
    suffix: Tensor | None = None
    """Input ids of the tokens behind a prefix, int64 [B, T]."""
    valid: Tensor | None = None
    """Positions in the sample of the labels that are not ignored, int64 [B, n], where the loss asks for them."""
    teacher: Tensor | None = None
    """Final normed hidden states of a teacher whose logits the student's head makes, [B, S, H]."""
    pixels: Tensor | None = None
    """Flattened patches, fp32 [B, crops, patches, patch_dim]."""
    pooled_idx: Tensor | None = None
    """Patches of each image token, int64 [B, T, p], counted over all crops of the sample; -1 pads."""
    image_index: Tensor | None = None
    """Position in the sequence of each image token, int64 [B, T]."""
    image_mask: Tensor | None = None
    """True at the image placeholders, bool [B, S]."""

    def chunk(self, index: int, num: int) -> "Batch":
        """The `index`-th of `num` equal slices along the batch, as views."""
        size = self.tokens.size(0) // num

        def cut(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.narrow(0, index * size, size)

        return Batch(
            tokens=self.tokens.narrow(0, index * size, size),
            labels=self.labels.narrow(0, index * size, size),
            suffix=cut(self.suffix),
            valid=cut(self.valid),
            teacher=cut(self.teacher),
            pixels=cut(self.pixels),
            pooled_idx=cut(self.pooled_idx),
            image_index=cut(self.image_index),
            image_mask=cut(self.image_mask),
        )


def synthetic_batch(run: RunSpec, device: torch.device | str, seed: int, *, vocab: int | None = None) -> Batch:
    """Random tokens and pixels for `run` on `device`, the same for a seed on every device; image tokens stand at the
    front of each sample. `vocab` is the model's, where its spec does not say."""
    spec, batch, seq, behind = run.model.decoder, run.step.batch, run.step.seq, run.step.suffix
    generator = torch.Generator(device="cpu").manual_seed(seed)
    drawn = torch.randint(vocab or spec.vocab, (batch, seq + behind + 1), generator=generator, device="cpu")
    num_tokens = run.model.image_tokens(run.step.images)
    suffix = drawn[:, seq:-1].contiguous().to(device) if behind else None
    first = max(num_tokens - 1, 0) if not behind else 0  # of the labels that are not ignored
    valid = teacher = None
    if run.step.loss == "valid-rows":
        valid = torch.arange(first, behind or seq, device="cpu").repeat(batch, 1).to(device)
    if run.step.workload == "distill":
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[run.step.computed]
        teacher = torch.randn(batch, seq, spec.hidden, generator=generator, device="cpu").to(device, dtype)
    if num_tokens == 0:
        labels = drawn[:, seq + 1 :] if behind else drawn[:, 1:]
        return Batch(
            tokens=drawn[:, :seq].contiguous().to(device),
            labels=labels.contiguous().to(device),
            suffix=suffix,
            valid=valid,
            teacher=teacher,
        )
    vision = run.model.vision
    assert vision is not None
    drawn[:, :num_tokens] = placeholder(run.model)
    labels = drawn[:, 1:].clone()
    labels[:, : num_tokens - 1] = IGNORED
    labels = labels[:, seq:] if behind else labels
    mask = torch.zeros(batch, seq, dtype=torch.bool, device="cpu")
    mask[:, :num_tokens] = True
    shape = (batch, run.step.images, vision.num_patches, vision.patch_dim)
    pixels = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu").mul_(2).sub_(1)
    return Batch(
        tokens=drawn[:, :seq].contiguous().to(device),
        labels=labels.contiguous().to(device),
        suffix=suffix,
        valid=valid,
        teacher=teacher,
        pixels=pixels.to(device),
        pooled_idx=pooling(run.model, run.step.images).repeat(batch, 1, 1).to(device),
        image_index=torch.arange(num_tokens, device="cpu").repeat(batch, 1).to(device),
        image_mask=mask.to(device),
    )


def placeholder(model: ModelSpec) -> int:
    """Id of the image placeholder: Molmo2's third extra token, or the last token of a model without as many."""
    spec = model.decoder
    return min(spec.vocab + 2, spec.vocab + spec.extra_vocab - 1)


def pooling(model: ModelSpec, images: int) -> Tensor:
    """Patches of each image token, int64 [T, p], row by row over every crop; -1 where a square leaves the crop."""
    assert model.vision is not None
    assert model.connector is not None
    side, pool = math.isqrt(model.vision.num_patches), math.isqrt(model.connector.pool)
    blocks = math.ceil(side / pool)
    grid = torch.full((blocks * pool, blocks * pool), -1, dtype=torch.int64, device="cpu")
    grid[:side, :side] = torch.arange(side * side, device="cpu").view(side, side)
    crop = grid.view(blocks, pool, blocks, pool).transpose(1, 2).reshape(blocks * blocks, pool * pool)
    offsets = torch.arange(images, device="cpu")[:, None, None] * model.vision.num_patches
    return torch.where(crop >= 0, crop + offsets, -1).flatten(0, 1)
