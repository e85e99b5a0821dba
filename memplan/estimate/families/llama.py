"""Llama and its kin as transformers 5.24 has them: mistral, qwen2, qwen3, smollm3, olmo2, phi3."""

from memplan.estimate.families.hf_decoder import Attention, Decoder, DecoderLayer, Mlp
from memplan.estimate.modules import Module


class Llama(Decoder):
    """Pre-norm decoder with biases where the config says so."""

    def make_layer(self, index: int) -> Module:
        config, tape = self.config, self.tape
        layer = DecoderLayer(tape, self.layer_type(index))
        bias = bool(config.get("attention_bias", False))
        layer.self_attn = Attention(tape, config, self.kind, bias=bias, out_bias=bias)
        layer.mlp = Mlp(
            tape, config["hidden_size"], config["intermediate_size"], config.get("hidden_act", "silu"),
            bias=bool(config.get("mlp_bias", False)),
        )  # fmt: skip
        layer.make_norms(config["hidden_size"])
        return layer
