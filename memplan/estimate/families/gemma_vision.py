"""Gemma 3 with its image encoder as transformers 5.24 has it: image tokens are written over placeholders.

Locals live as long as those of models/gemma3/modeling_gemma3.py. Letters: `B` batch, `S` sequence, `N` images of a
chunk, `T` tokens of an image, `H` hidden.
"""

import math
from typing import Any

from memplan.estimate import views
from memplan.estimate.autocast import operands
from memplan.estimate.families import config_of
from memplan.estimate.families.gemma import Gemma3, GemmaNorm
from memplan.estimate.families.molmo2_vision import first_blocks
from memplan.estimate.families.siglip import SiglipTower
from memplan.estimate.losses import Head
from memplan.estimate.modules import Module
from memplan.estimate.picking import masked_scatter
from memplan.estimate.products import avg_pool2d, bmm, mm
from memplan.estimate.tape import Tape, Tensor
from memplan.estimate.views import clone, expand, flatten, to, transpose, unsqueeze, view
from memplan.spec.run import RunSpec

TOWER = "vision_tower.encoder"
"""Path of the tower's layers in the model."""


class TextModel(Gemma3):
    """The decoder, whose layers are counted beside those of the tower."""

    def first_block(self) -> int | None:
        return first_blocks(self.run, TOWER)["language_model"]


class Projector(Module):
    """Rows of patches [N, P, W] averaged in squares, normed, and led to the decoder's width [N, T, H]."""

    def __init__(self, tape: Tape, config: dict[str, Any]) -> None:
        super().__init__(tape, "multi_modal_projector")
        vision, width = config["vision_config"], config["text_config"]["hidden_size"]
        self.side = vision["image_size"] // vision["patch_size"]
        self.kernel = self.side // math.isqrt(config["mm_tokens_per_image"])
        name = "mm_input_projection_weight"
        self.mm_input_projection_weight = tape.setup.parameter(tape, name, (vision["hidden_size"], width))
        self.mm_soft_emb_norm = GemmaNorm(tape, "mm_soft_emb_norm", vision["hidden_size"])

    def forward(self, rows: Tensor) -> Tensor:
        images = view(transpose(rows, 1, 2), rows.shape[0], rows.shape[2], self.side, self.side)
        images = clone(images)
        pooled = avg_pool2d(images, self.kernel)
        pooled = transpose(flatten(pooled, 2), 1, 2)
        normed = self.mm_soft_emb_norm(pooled)
        return to(self.projected(normed), rows.dtype)

    def projected(self, x: Tensor) -> Tensor:
        """Rows by the matrix: together, in a copy, where that trains, else image by image."""
        x, weight = operands(x, self.mm_input_projection_weight)
        N, T = x.shape[:2]
        if not weight.requires_grad and not views.is_one(N):
            return bmm(x, expand(unsqueeze(weight, 0), N, *weight.shape))
        rows = flatten(x if views.is_one(N) else clone(x), 0, 1)
        return view(mm(rows, weight), N, T, weight.shape[1])


class Gemma3Vision:
    """The model of a run; without images its tower and its projector wait for gradients that never come."""

    def __init__(self, tape: Tape, run: RunSpec) -> None:
        self.tape, self.kind = tape, run.step.attention
        config = config_of(run)
        self.text = TextModel(tape, run, config["text_config"])
        tape.component = "vision"
        first = first_blocks(run, TOWER)[TOWER]
        assert first is not None
        self.vision_tower = SiglipTower(tape, config["vision_config"], run, first=first)
        tape.component = "connector"
        self.multi_modal_projector = Projector(tape, config)
        for parameter in () if run.step.images else tape.parameters:
            parameter.idle = parameter.component in ("vision", "vision blocks", "connector")

    @property
    def head(self) -> Head:
        """What makes logits of the hidden states."""
        return self.text.head

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Final normed hidden states [B, S, H]; the tower's rows, what is projected of them and the places of images
        stay until then."""
        embeds: Tensor = self.text.embed_tokens(batch["tokens"])
        rows = images = places = None
        if "pixels" in batch:
            rows = self.vision_tower.forward(flatten(batch["pixels"], 0, 1))
            projected: Tensor = self.multi_modal_projector(rows)
            images = to(projected, embeds.dtype)
            places = unsqueeze(self.tape.make("eq", (embeds.shape[:2], "bool")), -1)
            embeds = masked_scatter(embeds, places, images)
        groups: Tensor = self.tape.make("where", (batch["tokens"].shape, "int64"))
        full, sliding = self.mask(groups, embeds.dtype), self.mask(groups, embeds.dtype)
        out = self.text.decode(embeds, {"full_attention": full, "sliding_attention": sliding})
        del rows, images, places, groups
        return out

    def mask(self, groups: Tensor, dtype: str) -> Tensor:
        """A mask [B, 1, S, S] under which the tokens of an image see one another, as bools or additive."""
        tape, (samples, size) = self.tape, groups.shape
        shape = samples, 1, size, size
        same = tape.make("eq", (shape, "bool"))
        inside = tape.make("bitwise_and", (shape, "bool"))
        del same
        mask: Tensor = tape.make("bitwise_or", (shape, "bool"))
        del inside
        return mask if self.kind == "sdpa" else tape.make("where", (mask.shape, dtype))
