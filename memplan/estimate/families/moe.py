"""Mixtral and Qwen3's layers of experts as transformers 5.24 has them, on the decoder of Llama's kin."""

from typing import Any

from memplan.estimate.families.hf_decoder import DecoderLayer
from memplan.estimate.families.hf_experts import Experts, SparseBlock, TopKRouter
from memplan.estimate.families.hf_masks import Filling, causal_mask
from memplan.estimate.families.llama import Mistral, Qwen3
from memplan.estimate.modules import Module
from memplan.estimate.tape import Tape, Tensor


def sparse_block(tape: Tape, config: dict[str, Any], *, num: int, ffn: int, normed: bool, lowered: bool) -> Module:
    """A router that takes the largest chances, and `num` experts of `ffn`."""
    width, k = config["hidden_size"], config["num_experts_per_tok"]
    gate = TopKRouter(tape, num, width, k, normed=normed, lowered=lowered)
    experts = Experts(tape, num, width, ffn, config.get("hidden_act", "silu"))
    return SparseBlock(tape, gate, experts, jitters=bool(config.get("router_jitter_noise")))


class Mixtral(Mistral):
    """Experts in every layer, whose shares stay in fp32."""

    def make_mlp(self, *, bias: bool = False) -> Module:
        config = self.config
        num, ffn = config["num_local_experts"], config["intermediate_size"]
        return sparse_block(self.tape, config, num=num, ffn=ffn, normed=True, lowered=False)


class Qwen3Moe(Qwen3):
    """Experts in every `decoder_sparse_step`-th layer but those that `mlp_only_layers` names."""

    def make_layer(self, index: int) -> Module:
        layer = DecoderLayer(self.tape, self.layer_type(index))
        layer.self_attn = self.make_attention(index)
        layer.mlp = self.make_sparse() if self.is_sparse(index) else self.make_mlp()
        layer.make_norms(self.config["hidden_size"])
        return layer

    def make_sparse(self) -> Module:
        """Router and experts."""
        config = self.config
        num, ffn = config["num_experts"], config["moe_intermediate_size"]
        normed = bool(config.get("norm_topk_prob", False))
        return sparse_block(self.tape, config, num=num, ffn=ffn, normed=normed, lowered=True)

    def is_sparse(self, index: int) -> bool:
        """Whether layer `index` has experts."""
        config = self.config
        dense = index in (config.get("mlp_only_layers") or ())
        return not dense and config["num_experts"] > 0 and (index + 1) % config.get("decoder_sparse_step", 1) == 0

    def layer_kind(self, index: int) -> Any:
        return self.is_sparse(index)

    def layer_type(self, index: int) -> str:
        return "full_attention"

    def masks(self, x: Tensor, filling: Filling) -> dict[str, Tensor | None]:
        window = self.config.get("sliding_window") if self.config.get("use_sliding_window") else None
        return {"full_attention": causal_mask(x, self.kind, filling, window)}
