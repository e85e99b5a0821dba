"""Configurations that are refused in one sentence, and keys that are passed over because they change nothing."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from hf_configs import SMALL
from hub_configs import HUB, LLAMA, refusal, written

from memplan.errors import MemplanError
from memplan.models.hf_config import hf_spec
from memplan.models.registry import model_spec
from memplan.spec.hf_families import FAMILIES
from memplan.spec.hf_names import FOREIGN, HARMLESS, NOTHING
from memplan.spec.hf_rope import ROPE_KEYS

BAD: dict[str, tuple[Any, str]] = {
    "no JSON": ('{"model_type": ', r"is not JSON: .* in line 1"),
    "a list": ([1], r'is JSON, but no object. A config.json looks like {"model_type": ...}'),
    "no text": ("\udcff", "not text in UTF-8"),
    "deep": ("[" * 100_000, "nested too deeply|not JSON"),
    "of diffusers": ({"_class_name": "UNet2DConditionModel"}, "configuration of diffusers"),
    "a tokenizer's": ({"tokenizer_class": "LlamaTokenizer"}, "a tokenizer's"),
    "of generation": ({"do_sample": True, "eos_token_id": 2}, "configuration of generation"),
    "an adapter's": ({"peft_type": "LORA", "r": 8}, r"an adapter's .* --lora"),
    "a processor's": ({"image_processor_type": "X"}, "a processor's"),
    "of no type": ({"hidden_size": 8}, "no model_type"),
    "of a lost type": ({k: v for k, v in LLAMA.items() if k != "model_type"}, 'Write "model_type": "llama"'),
    "of a type in numbers": (LLAMA | {"model_type": 5}, "model_type in .* is 5, not text"),
    "of an unknown type": (LLAMA | {"model_type": "mamba9"}, r"'mamba9', only bert, .*--impl hf"),
    "without width": ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, r"hidden_size. .* take 4096"),
    "without three sizes": (
        {k: v for k, v in LLAMA.items() if k not in ("vocab_size", "intermediate_size", "num_hidden_layers")},
        "not say vocab_size, intermediate_size, num_hidden_layers. transformers would take 32000, 11008, 32",
    ),
    "of text": (LLAMA | {"hidden_size": "4096"}, "hidden_size in config.json is '4096', not a whole number"),
    "of a fraction": (LLAMA | {"num_hidden_layers": 2.5}, "2.5, not a whole number"),
    "of nothing": (LLAMA | {"vocab_size": 0}, "vocab_size in config.json is 0"),
    "of too many layers": (LLAMA | {"num_hidden_layers": 10**9}, "from 1 to 10,000"),
    "of true": (LLAMA | {"num_hidden_layers": True}, "True, not a whole number"),
    "of one as truth": (LLAMA | {"tie_word_embeddings": 1}, "neither true nor false"),
    "of no activation": (LLAMA | {"hidden_act": "swoosh"}, "'swoosh', an activation"),
    "of certain dropout": (LLAMA | {"attention_dropout": 1.0}, "probability"),
    "of no number": (LLAMA | {"rms_norm_eps": float("nan")}, "rms_norm_eps in config.json is nan"),
    "with a new size": (LLAMA | {"ngram_size": 3}, r"ngram_size in config.json is 3.*--impl hf"),
    "with new experts": (LLAMA | {"num_memory_experts": 4}, "num_memory_experts"),
    "with another norm": (LLAMA | {"use_qk_norm": True}, "use_qk_norm"),
    "undivided": (LLAMA | {"hidden_size": 4100}, "hidden_size 4100 does not divide into 32 heads"),
    "of odd groups": (LLAMA | {"num_key_value_heads": 5}, "num_attention_heads 32 is no multiple"),
    "of odd heads": (LLAMA | {"head_dim": 65}, "they turn in pairs"),
    "partly rotated": (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "of bad rope": (LLAMA | {"rope_scaling": 8}, "rope_scaling in config.json is 8, not an object"),
    "of strange rope": (LLAMA | {"rope_scaling": {"type": "lama3"}}, "the type 'lama3'. Did you mean llama3"),
    "of a rope's half": (LLAMA | {"rope_scaling": {"type": "yarn"}}, "of the type yarn, has no factor"),
    "of a long rope": (
        HUB["phi3"] | {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "short_factor of rope_scaling in config.json has not 48 numbers",
    ),
    "of routed losses": (HUB["qwen3_moe"] | {"output_router_logits": True}, "output_router_logits .* False only"),
    "of slow experts": (HUB["qwen3_moe"] | {"experts_implementation": "eager"}, "experts by 'grouped_mm' only"),
    "of hidden experts": (HUB["qwen3_moe"] | {"_experts_implementation": "batched_mm"}, "'batched_mm'"),
    "of bad theta": (LLAMA | {"rope_theta": "big"}, "rope_theta"),
    "of short types": (HUB["qwen2"] | {"layer_types": ["full_attention"]}, "names 1 layers of 28"),
    "of other types": (HUB["qwen2"] | {"layer_types": ["mamba"] * 28}, "'mamba', which is not known"),
    "decoding BERT": (HUB["bert"] | {"is_decoder": True}, "is_decoder in config.json is True"),
    "sparse": (HUB["deepseek_v3"] | {"moe_layer_freq": 2}, "moe_layer_freq in config.json is 2"),
    "of few experts": (HUB["qwen3_moe"] | {"num_experts_per_tok": 200}, "200, of 128 experts"),
    "of uneven groups": (HUB["deepseek_v3"] | {"n_group": 7}, "n_routed_experts 256 is no multiple"),
    "of a bad part": (HUB["gemma3"] | {"text_config": 3}, "text_config in config.json is 3, not an object"),
    "of a bare part": (HUB["gemma3"] | {"text_config": {}}, "text_config.hidden_size"),
    "of odd images": (HUB["gemma3"] | {"mm_tokens_per_image": 250}, "mm_tokens_per_image 250"),
    "of large patches": (SMALL["vit"] | {"patch_size": 99}, "patch_size 99 is larger than the image"),
    "of one name": (LLAMA | {"architectures": "LlamaForCausalLM"}, "not a list of names"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_configuration_that_is_refused(what: str, tmp_path: Path) -> None:
    config, words = BAD[what]
    path = tmp_path / "config.json"
    text = config if isinstance(config, str) else json.dumps(config)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(MemplanError, match=words):
        model_spec(str(path))
    assert "\n" not in refusal(model_spec, str(path))


def test_keys_of_other_libraries_are_passed_over_and_said(tmp_path: Path) -> None:
    smollm2 = LLAMA | {"is_llama_config": True, "rope_interleaved": False}
    one_million = HUB["qwen2"] | {"dual_chunk_attention_config": {"chunk_size": 262144}, "output_attentions": True}
    for index, config in enumerate((smollm2, one_million)):
        (note,) = (n for n in hf_spec(written(tmp_path / str(index), config)).notes if n.startswith("not read"))
        assert all(key in note for key in config.keys() - LLAMA.keys() - HUB["qwen2"].keys())


BESIDES = {"head_dim", "num_attention_heads", "initializer_factor", "get_text_config", "get", "json", *ROPE_KEYS}
"""What else the code says behind `config.`: by methods, of towers whose heads are named otherwise."""


def test_the_families_know_every_key_that_transformers_reads() -> None:
    """And none of those that are passed over as another library's."""
    folder = Path(transformers.__file__).parent / "models"
    kinds = {re.sub("_text$|_vision_model$", "", kind) for kind, family in FAMILIES.items() if family.trains}
    for kind in kinds:
        text = "".join((folder / kind / f"{what}_{kind}.py").read_text() for what in ("configuration", "modeling"))
        read = {*re.findall(r"config\.(\w+)", text), *re.findall(r'getattr\([\w.]*config, "(\w+)"', text)}
        parts = [family for name, family in FAMILIES.items() if name.startswith(kind)]
        known = {key for part in parts for key in (*part.keys, *part.only, *part.aliases, *part.parts)}
        assert {key for key in read - known if key not in NOTHING and not HARMLESS.search(key)} <= BESIDES, kind
        assert not FOREIGN & {*re.findall(r"\w+", text)}, kind


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert "There is no file" in refusal(model_spec, str(tmp_path / "none.json"))
    assert "There is no file" in refusal(model_spec, "../nowhere/at-all")
    assert "has no config.json" in refusal(model_spec, str(tmp_path))
    written(tmp_path, {"peft_type": "LORA"}, "adapter_config.json")
    assert "an adapter's" in refusal(model_spec, str(tmp_path))
    (tmp_path / "weights.json").write_bytes(b" " * (17 * 1024**2))
    assert "too large" in refusal(model_spec, str(tmp_path / "weights.json"))
