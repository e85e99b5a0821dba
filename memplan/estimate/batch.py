"""What a step is fed with over the ledger, as `memplan.models.batch` makes it.

Letters: `B` batch, `S` sequence, `T` image tokens of a sample, `p` patches pooled into one of them.
"""

import dataclasses
from typing import Any

from memplan.estimate.families import config_of
from memplan.estimate.setup import DTYPES
from memplan.estimate.tape import Shape, Tape, Tensor
from memplan.estimate.views import narrow
from memplan.spec.run import RunSpec

Batch = dict[str, Tensor]
"""Tensors by the names of `memplan.models.batch.Batch`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How many samples of how many tokens: whole numbers, or arrays of them for many configurations at once."""

    batch: Any
    """Samples of a step."""
    micro_batch: Any
    """Samples of a chunk."""
    seq: Any
    """Tokens of a sample."""

    @staticmethod
    def of(run: RunSpec) -> "Sizes":
        """Those of `run`."""
        return Sizes(batch=run.step.batch, micro_batch=run.step.micro_batch, seq=run.step.seq)


def make_batch(tape: Tape, run: RunSpec, sizes: Sizes) -> Batch:
    """The batch of the whole step, alive throughout."""
    if run.step.workload == "classify":
        fields = labelled_images(run, sizes)
    else:
        fields = text_fields(run, sizes) | image_fields(run, sizes)
    return {name: tape.new(name, shape, dtype, category="other") for name, (shape, dtype) in fields.items()}


def text_fields(run: RunSpec, sizes: Sizes) -> dict[str, tuple[Shape, str]]:
    """Shapes and dtypes of the fields that speak of tokens."""
    step, batch, seq = run.step, sizes.batch, sizes.seq
    fields: dict[str, tuple[Shape, str]] = {"tokens": ((batch, seq), "int64")}
    fields["labels"] = (batch, step.suffix or seq), "int64"
    if step.suffix:
        fields["suffix"] = (batch, step.suffix), "int64"
    if step.loss == "valid-rows":
        fields["valid"] = (batch, num_targets(run, seq)), "int64"
    if step.workload == "distill":
        fields["teacher"] = (batch, seq, run.model.decoder.hidden), DTYPES[step.computed]
    if step.rows != "full":
        fields[row_field(run)] = (batch, seq), "int64"
    return fields


def row_field(run: RunSpec) -> str:
    """Name of the field that says how rows are filled."""
    if run.model.impl != "hf":
        return "segments"
    return "position_ids" if run.step.filling.kind == "packed" else "attention_mask"


def image_fields(run: RunSpec, sizes: Sizes) -> dict[str, tuple[Shape, str]]:
    """The same of the fields that speak of images."""
    vision, connector, images = run.model.vision, run.model.connector, run.step.images
    if run.model.impl == "hf":
        return hf_image_fields(run, sizes)
    if vision is None or connector is None or not images:
        return {}
    num_tokens = run.model.image_tokens(images)
    return {
        "pixels": ((sizes.batch, images, vision.num_patches, vision.patch_dim), "float32"),
        "pooled_idx": ((sizes.batch, num_tokens, connector.pool), "int64"),
        "image_index": ((sizes.batch, num_tokens), "int64"),
        "image_mask": ((sizes.batch, sizes.seq), "bool"),
    }


def hf_image_fields(run: RunSpec, sizes: Sizes) -> dict[str, tuple[Shape, str]]:
    """The same of transformers' models, which ask for the kind of each token even where there are no images."""
    vision, connector, images = run.model.vision, run.model.connector, run.step.images
    if vision is None or connector is None:
        return {}
    fields: dict[str, tuple[Shape, str]] = {"token_types": ((sizes.batch, sizes.seq), "int64")}
    if not images:
        return fields
    config = config_of(run)
    if config["model_type"] != "molmo2":  # images as they are
        part = config["vision_config"]
        shape = sizes.batch, images, part["num_channels"], part["image_size"], part["image_size"]
        return fields | {"pixels": (shape, "float32")}
    return fields | {
        "pixels": ((sizes.batch, images, vision.num_patches, vision.patch_dim), "float32"),
        "pooled_idx": ((sizes.batch, run.model.image_tokens(images), connector.pool), "int64"),
        "grids": ((sizes.batch, images, 4), "int64"),
    }


def labelled_images(run: RunSpec, sizes: Sizes) -> dict[str, tuple[Shape, str]]:
    """The same of whole images with a class each."""
    config = config_of(run)
    vision = config.get("vision_config", config)
    size = vision["image_size"]
    sides = size if isinstance(size, list) else (size, size)
    return {
        "labels": ((sizes.batch, 1), "int64"),
        "pixels": ((sizes.batch, vision["num_channels"], *sides), "float32"),
    }


def num_targets(run: RunSpec, seq: Any) -> Any:
    """Positions of a sample that make a loss."""
    step = run.step
    if step.suffix:
        return step.suffix
    if step.rows == "full":
        return seq - max(run.model.image_tokens(step.images) - 1, 0)
    if isinstance(seq, int):
        return len(step.filling.targets(seq))
    import numpy as np

    return np.array([len(step.filling.targets(int(size))) for size in seq])


def chunk_of(batch: Batch, size: int) -> Batch:
    """Views of `size` samples."""
    return {name: narrow(tensor, 0, size) for name, tensor in batch.items()}
