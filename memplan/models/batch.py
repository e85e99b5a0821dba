"""What a model is fed with in one step, and random data of the right shapes.

Letters: `B` batch, `S` sequence, `V` vocabulary, `T` image tokens of a sample, `p` patches pooled into one of them.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memplan.spec.model import ModelSpec
from memplan.spec.run import RunSpec

IGNORED = -100
"""Label of a token that makes no loss, torch's default `ignore_index`."""
PLACEHOLDERS = ("image_patch_id", "image_token_index", "image_token_id")
"""Names that configurations of transformers have for the id of an image placeholder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The inputs of one step; the image fields are there together or not at all."""

    tokens: Tensor
    """Input ids, int64 [B, S]; those of the prefix where there is a suffix, the labels again where a sample is one
    image."""
    labels: Tensor
    """Next tokens, int64 [B, S], `IGNORED` where the next token is an image placeholder; of the suffix where there is
    one, [B, T]; the class of each image, [B, 1]."""
    suffix: Tensor | None = None
    """Input ids of the tokens behind a prefix, int64 [B, T]."""
    valid: Tensor | None = None
    """Positions in the sample of the labels that are not ignored, int64 [B, n], where the loss asks for them."""
    segments: Tensor | None = None
    """Number of the document that a token is of, int64 [B, S], from 1, and 0 for padding, where rows are not full and
    the model is memplan's own."""
    attention_mask: Tensor | None = None
    """1 at tokens and 0 at padding, int64 [B, S], where transformers' models are fed with padded rows."""
    position_ids: Tensor | None = None
    """Place of a token in its document, int64 [B, S], where they are fed with packed ones."""
    teacher: Tensor | None = None
    """Final normed hidden states of a teacher whose logits the student's head makes, [B, S, H]."""
    pixels: Tensor | None = None
    """Flattened patches, fp32 [B, crops, patches, patch_dim]; whole images where the model cuts them itself,
    [B, crops, channels, height, width], or [B, channels, height, width] where a sample is one image."""
    pooled_idx: Tensor | None = None
    """Patches of each image token, int64 [B, T, p], counted over all crops of the sample, or of the chunk for
    transformers' models; -1 pads."""
    image_index: Tensor | None = None
    """Position in the sequence of each image token, int64 [B, T]."""
    image_mask: Tensor | None = None
    """True at the image placeholders, bool [B, S]."""
    token_types: Tensor | None = None
    """1 at the image placeholders, int64 [B, S], where transformers' models ask for it."""
    grids: Tensor | None = None
    """Rows and columns of image tokens of each crop, and those of its enlargement, int64 [B, crops, 4]."""

    def chunk(self, index: int, num: int) -> "Batch":
        """The `index`-th of `num` equal slices along the batch, as views."""
        size = self.labels.size(0) // num
        tensors = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        cut: dict[str, Any] = {n: t if t is None else t.narrow(0, index * size, size) for n, t in tensors.items()}
        return Batch(**cut)


def synthetic_batch(run: RunSpec, device: torch.device | str, seed: int, *, vocab: int | None = None) -> Batch:
    """Random tokens and pixels for `run` on `device`, the same for a seed on every device; image tokens stand at the
    front of each sample. `vocab` is the model's, where its spec does not say."""
    if run.step.workload == "classify":
        return labelled_images(run, device, seed)
    spec, batch, seq, behind = run.model.decoder, run.step.batch, run.step.seq, run.step.suffix
    generator = torch.Generator(device="cpu").manual_seed(seed)
    drawn = torch.randint(vocab or spec.vocab, (batch, seq + behind + 1), generator=generator, device="cpu")
    num_tokens = run.model.image_tokens(run.step.images)
    suffix = own(drawn[:, seq:-1], device) if behind else None
    first = max(num_tokens - 1, 0) if not behind else 0  # of the labels that are not ignored
    valid = teacher = None
    if run.step.loss == "valid-rows":
        valid = torch.arange(first, behind or seq, device="cpu").repeat(batch, 1).to(device)
    if run.step.workload == "distill":
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[run.step.computed]
        teacher = torch.randn(batch, seq, spec.hidden, generator=generator, device="cpu").to(device, dtype)
    if num_tokens:
        drawn.masked_fill_(drawn == placeholder(run.model), 0)  # drawn by chance
        drawn[:, :num_tokens] = placeholder(run.model)
    labels = drawn[:, 1:]
    if num_tokens:
        labels = labels.clone()
        labels[:, : num_tokens - 1] = IGNORED
    rows: dict[str, Tensor] = {}
    if run.step.rows != "full":
        filling, kept, labels = run.step.filling, labels, torch.full_like(labels, IGNORED)
        targets = torch.tensor(filling.targets(seq), device="cpu")
        labels[:, targets] = kept[:, targets]
        rows = {name: torch.tensor(row, device="cpu").repeat(batch, 1) for name, row in row_fields(run).items()}
        valid = None if valid is None else targets.repeat(batch, 1).to(device)
    images = image_fields(run, num_tokens, generator)
    return Batch(
        tokens=own(drawn[:, :seq], device),
        labels=own(labels[:, seq:] if behind else labels, device),
        suffix=suffix,
        valid=valid,
        teacher=teacher,
        **{name: tensor.to(device) for name, tensor in (rows | images).items()},
    )


def own(columns: Tensor, device: torch.device | str) -> Tensor:
    """`columns` of what was drawn, on `device` in memory of their own, as a data loader hands them over: those of one
    sample lie dense, so that nothing else would copy them on the CPU."""
    return columns.clone(memory_format=torch.contiguous_format).to(device)


def row_fields(run: RunSpec) -> dict[str, list[int]]:
    """The field of a batch that says how its rows are filled, and a row of it."""
    rows, seq = run.step.filling, run.step.seq
    if run.model.impl != "hf":
        return {"segments": rows.segments(seq)}
    if rows.kind == "packed":
        return {"position_ids": rows.positions(seq)}
    return {"attention_mask": [int(number > 0) for number in rows.segments(seq)]}


def image_fields(run: RunSpec, num_tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
    """The fields of a batch that speak of images, of which each sample has `num_tokens` tokens."""
    if run.model.impl == "hf":
        return hf_image_fields(run, num_tokens, generator)
    if not num_tokens:
        return {}
    vision, batch, seq = run.model.vision, run.step.batch, run.step.seq
    assert vision is not None
    mask = torch.zeros(batch, seq, dtype=torch.bool, device="cpu")
    mask[:, :num_tokens] = True
    return {
        "pixels": random_pixels((batch, run.step.images, vision.num_patches, vision.patch_dim), generator),
        "pooled_idx": pooling(run.model, run.step.images).repeat(batch, 1, 1),
        "image_index": torch.arange(num_tokens, device="cpu").repeat(batch, 1),
        "image_mask": mask,
    }


def hf_image_fields(run: RunSpec, num_tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
    """What transformers' processors make beside the tokens for a model that reads images, whether there are any or
    not: Molmo2's cut them and say which patches of a whole forward are pooled, Gemma 3's leave them whole."""
    vision, batch, crops = run.model.vision, run.step.batch, run.step.images
    if vision is None:
        return {}
    types = torch.zeros(batch, run.step.seq, dtype=torch.int64, device="cpu")
    types[:, :num_tokens] = 1
    if not crops:
        return {"token_types": types}
    facts = json.loads(run.model.config)
    if facts["model_type"] != "molmo2":
        shape = (batch, crops, *image_shape(facts))
        return {"token_types": types, "pixels": random_pixels(shape, generator)}
    side = math.isqrt(num_tokens // crops)
    pooled = pooling(run.model, crops).repeat(batch, 1, 1)
    before = torch.arange(batch, device="cpu")[:, None, None] % run.step.micro_batch * crops * vision.num_patches
    return {
        "token_types": types,
        "pixels": random_pixels((batch, crops, vision.num_patches, vision.patch_dim), generator),
        "pooled_idx": torch.where(pooled >= 0, pooled + before, -1),
        "grids": torch.tensor([side, side, 0, 0], device="cpu").repeat(batch, crops, 1),
    }


def labelled_images(run: RunSpec, device: torch.device | str, seed: int) -> Batch:
    """A whole image a sample, and its class."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    shape = (run.step.batch, *image_shape(json.loads(run.model.config)))
    labels = torch.randint(run.model.decoder.vocab, (run.step.batch, 1), generator=generator, device="cpu").to(device)
    return Batch(tokens=labels, labels=labels, pixels=random_pixels(shape, generator).to(device))


def image_shape(facts: dict[str, Any]) -> tuple[int, int, int]:
    """Channels, height and width of the images that a configuration of transformers asks for."""
    vision = facts.get("vision_config", facts)
    size = vision["image_size"]
    height, width = size if isinstance(size, list) else (size, size)
    return vision["num_channels"], height, width


def random_pixels(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers from -1 to 1, fp32."""
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu").mul_(2).sub_(1)


def placeholder(model: ModelSpec) -> int:
    """Id of the image placeholder: the configuration's of transformers' models, else Molmo2's third extra token, or the
    last token of a model without as many."""
    if model.impl == "hf":
        facts = json.loads(model.config)
        return int(next(facts[key] for key in PLACEHOLDERS if key in facts))
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
