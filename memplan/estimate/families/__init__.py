"""transformers' models over the ledger, one module a kin: built from a config, module for module as transformers 5.24
has them."""

import json
from functools import lru_cache
from importlib import import_module
from typing import Any

from memplan.errors import MemplanError
from memplan.estimate.tape import Tape
from memplan.spec.hf_facts import complete
from memplan.spec.run import RunSpec

FAMILIES: dict[str, str] = {
    "llama": "llama:Llama",
    "mistral": "llama:Mistral",
    "qwen2": "llama:Qwen2",
    "qwen3": "llama:Qwen3",
    "smollm3": "llama:SmolLM3",
    "olmo2": "llama:Olmo2",
    "phi3": "llama:Phi3",
    "mixtral": "moe:Mixtral",
    "qwen3_moe": "moe:Qwen3Moe",
    "deepseek_v2": "deepseek:DeepseekV2",
    "deepseek_v3": "deepseek:DeepseekV3",
    "gpt_oss": "gpt_oss:GptOss",
    "qwen3_5": "qwen3_5_vision:Qwen3_5WithImages",
    "qwen3_5_text": "qwen3_5:Qwen3_5",
    "molmo2": "molmo2:Molmo2",
    "bert": "bert:Bert",
    "vit": "encoders:Vit",
    "siglip": "siglip:Siglip",
    "siglip_vision_model": "siglip:Siglip",
    "gpt2": "gpt:Gpt2",
    "gpt_neox": "gpt:GptNeoX",
    "gemma2": "gemma:Gemma2",
    "gemma3_text": "gemma:Gemma3",
    "gemma3": "gemma_vision:Gemma3Vision",
}
"""`model_type` of a config -> module of this package and its class."""
RECURRENT = frozenset(("qwen3_5", "qwen3_5_text"))
"""Types whose steps have as many parts as the length asks for, so that each length is told alone."""


def config_of(run: RunSpec) -> dict[str, Any]:
    """The configuration of `run`'s model, every key of its family in it; lettered where formulas are printed."""
    facts: dict[str, Any] | None = getattr(run.model.config, "facts", None)
    return completed(run.model.config) if facts is None else facts


@lru_cache(maxsize=64)
def completed(config: str) -> dict[str, Any]:
    """A configuration's JSON with every key of its family."""
    return complete(json.loads(config)).config


def make(tape: Tape, run: RunSpec) -> Any:
    """The model of `run`'s config; MemplanError for a family without one."""
    kind = config_of(run).get("model_type", "")
    if kind not in FAMILIES:
        raise MemplanError(
            f"estimate has no formulas for models of the type {kind!r}.",
            "Type memplan trace, which runs the real step; known: " + ", ".join(sorted(FAMILIES)) + ".",
        )
    module, _, name = FAMILIES[kind].partition(":")
    return getattr(import_module(f"memplan.estimate.families.{module}"), name)(tape, run)
