"""Qwen3.5 with its image encoder, as transformers 5.24 builds it, in steps over text: the encoder's parameters wait for
gradients that never come.

Known limits: steps with images are not told.
"""

from typing import Any

from memplan.estimate.families import config_of
from memplan.estimate.families.qwen3_5 import Qwen3_5
from memplan.estimate.modules import LayerNorm, Linear, Module
from memplan.estimate.tape import Parameter, Tape
from memplan.spec.run import RunSpec

Facts = dict[str, Any]
"""Keys of a configuration."""


class Block(Module):
    """Parameters of a block: norms, attention, feed-forward."""

    def __init__(self, tape: Tape, config: Facts) -> None:
        super().__init__(tape, "blocks")
        width, ffn = config["hidden_size"], config["intermediate_size"]
        self.norm1, self.norm2 = LayerNorm(tape, "norm1", width), LayerNorm(tape, "norm2", width)
        self.qkv = Linear(tape, "qkv", width, 3 * width, bias=True)
        self.proj = Linear(tape, "proj", width, width, bias=True)
        self.linear_fc1 = Linear(tape, "linear_fc1", width, ffn, bias=True)
        self.linear_fc2 = Linear(tape, "linear_fc2", ffn, width, bias=True)


class Encoder(Module):
    """Parameters of the encoder, those of equal blocks once."""

    def __init__(self, tape: Tape, config: Facts) -> None:
        super().__init__(tape, "visual")
        width, size = config["hidden_size"], config["patch_size"]
        merged = width * config["spatial_merge_size"] ** 2
        tape.component = "vision"
        self.pos_embed = self.own("pos_embed.weight", config["num_position_embeddings"], width)
        tape.component, tape.copies = "vision blocks", config["depth"]
        self.block = Block(tape, config)
        tape.component, tape.copies = "vision", 1
        window = config["in_channels"], config["temporal_patch_size"], size, size
        self.patch = self.own("patch_embed.proj.weight", width, *window), self.own("patch_embed.proj.bias", width)
        self.merger = LayerNorm(tape, "merger.norm", width)
        self.fc1 = self.own("merger.linear_fc1.weight", merged, merged), self.own("merger.linear_fc1.bias", merged)
        out = config["out_hidden_size"]
        self.fc2 = self.own("merger.linear_fc2.weight", out, merged), self.own("merger.linear_fc2.bias", out)
        angles = width // config["num_heads"] // 4
        self.buffers = [tape.new("buffer", (angles,), "float32", category="buffers") for _ in range(2)]

    def own(self, name: str, *shape: int) -> Parameter:
        """A parameter that no adapter stands beside."""
        made: Parameter = self.tape.setup.parameter(self.tape, name, shape)
        return made


class Qwen3_5WithImages(Qwen3_5):
    """The decoder, behind an encoder that sees nothing."""

    def __init__(self, tape: Tape, run: RunSpec) -> None:
        config = config_of(run)
        start = len(tape.parameters)
        self.visual = Encoder(tape, config["vision_config"])
        for parameter in tape.parameters[start:]:
            parameter.idle = True
        super().__init__(tape, run, config["text_config"])
        tape.blocks.append(self.visual.block)
