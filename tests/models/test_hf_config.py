"""Hugging Face configurations taken in: what they mean, what is filled in and said, and one sentence for each that
cannot be."""

import copy
import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hf_configs import SMALL
from hub_configs import HUB, LETTERS, LLAMA, refusal, written

from memplan.ladder.points import assumed, points
from memplan.models.hf_config import hf_spec
from memplan.models.registry import model_spec, names
from memplan.spec import Ladder, ModelSpec, RunSpec, StepSpec
from memplan.spec.device import CPU
from memplan.spec.hf_facts import complete, supported
from memplan.spec.hf_families import FAMILIES

EVERY = {f"small-{name}": config for name, config in SMALL.items()} | {f"hub-{name}": HUB[name] for name in HUB}


def letters(spec: ModelSpec) -> tuple[int, ...]:
    d = spec.decoder
    sizes = (d.num_layers, d.hidden, d.num_heads, d.num_kv_heads, d.head_dim, d.ffn, d.vocab, d.max_positions)
    return (*sizes, d.window, spec.seq)


@pytest.mark.parametrize("name", HUB)
def test_a_downloaded_configuration_means_its_model(name: str, tmp_path: Path) -> None:
    spec = hf_spec(written(tmp_path / "model", HUB[name]))
    assert letters(spec) == LETTERS[name]
    assert (spec.name, spec.family, spec.impl, spec.precision) == ("model", name, "hf", "bf16-mixed")
    assert spec.config == json.dumps(json.loads(spec.config), sort_keys=True, separators=(",", ":"))
    run = RunSpec(model=spec, step=StepSpec(batch=1, seq=spec.seq), device=CPU)
    assert RunSpec.from_dict(json.loads(json.dumps(run.to_dict()))) == run
    assert dataclasses.replace(run, model=dataclasses.replace(spec, notes=())).run_id == run.run_id


def test_facts_beyond_sizes(tmp_path: Path) -> None:
    found = {name: hf_spec(written(tmp_path / name, HUB[name])) for name in HUB}
    scaling = found["llama"].decoder.rope_scaling
    assert scaling is not None
    assert (scaling.factor, scaling.original_max_positions) == (8.0, 8192)
    assert found["qwen2"].decoder.qkv_bias
    assert not found["qwen2"].decoder.out_bias
    assert found["phi3"].decoder.projections == "fused"
    assert (found["gpt2"].decoder.norm, found["gpt2"].decoder.positions) == ("layer", "learned")
    assert found["gpt_neox"].decoder.positions == "rope"
    moe = found["qwen3_moe"].decoder
    assert (moe.experts, moe.experts_per_token, moe.expert_ffn) == (128, 8, 768)
    gemma = found["gemma3"]
    assert (gemma.decoder.full_every, gemma.images, gemma.image_tokens(2)) == (6, 1, 512)
    molmo, built_in = found["molmo2"], model_spec("molmo2-4b-hf")
    assert (molmo.vision, molmo.connector) == (built_in.vision, built_in.connector)
    assert json.loads(molmo.config)["vision_config"]["num_hidden_layers"] == 25


def test_what_is_filled_in_is_said(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "vocab_size")}
    spec = hf_spec(written(tmp_path, config | {"favourite": 3}))
    assert (spec.decoder.num_kv_heads, spec.decoder.vocab) == (32, 32000)
    assert spec.notes[0] == "not in config.json, so as transformers has it: vocab_size 32000, num_key_value_heads 32"
    assert spec.notes[1] == "not read of config.json, since they change no shape: favourite"
    assert hf_spec(written(tmp_path / "whole", LLAMA)).notes == ()
    deepseek = " ".join(hf_spec(written(tmp_path / "deepseek", HUB["deepseek_v3"])).notes)
    assert "unquantised" in deepseek
    assert "several tokens" in deepseek
    headless = HUB["bert"] | {"architectures": ["BertModel"]}
    assert "trained as BertForMaskedLM, not as BertModel" in hf_spec(written(tmp_path / "bert", headless)).notes


def test_null_is_no_missing_key(tmp_path: Path) -> None:
    for key, without, null in (("sliding_window", 4096, None), ("num_key_value_heads", 8, 32), ("head_dim", 128, 128)):
        bare = {name: value for name, value in HUB["mistral"].items() if name != key}
        assert complete(bare).config[key] == without
        assert complete(bare | {key: None}).config[key] == null


UNLIKE = {"pad_token_id", "bos_token_id", "eos_token_id", "num_mtp_layers", "num_nextn_predict_layers", "type"}
UNLIKE |= {"sliding_window_pattern", "full_attention_interval", "model_type", "boi_token_index", "eoi_token_index"}
UNLIKE |= {"id2label", "label2id", "use_cache", "dtype", "architectures", "transformers_version"}
"""Keys of tokens, files and habits, and those out of which others were made."""
DERIVED = {"head_dim", "n_inner", "num_key_value_heads"}
"""Keys that classes may leave to their modules to fill in."""


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted path, those of `UNLIKE` left out."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key not in UNLIKE:
            found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What transformers' configuration says and what is made of ours, where they differ; null may be derived."""
    found = {key: (theirs.get(key), value) for key, value in flat(ours).items() if flat(theirs).get(key) != value}
    return {key: pair for key, pair in found.items() if not (pair[0] is None and key.rpartition(".")[2] in DERIVED)}


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if not FAMILIES[kind].parts])
def test_defaults_are_those_of_transformers(kind: str) -> None:
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.molmo2 import configuration_molmo2 as molmo2

    parts = {"molmo2_vision": "Molmo2VisionConfig", "molmo2_adapter": "Molmo2AdapterConfig"}
    theirs: Any = getattr(molmo2, parts[kind]) if kind in parts else CONFIG_MAPPING[kind]
    family = FAMILIES[kind]
    chosen = {"num_experts_per_tok": 6} if kind == "deepseek_v2" else {}  # which has no default
    said = {key: family.keys[key] for key in (family.width, family.depth) if key in family.keys} | chosen
    ours = complete(said | {"model_type": kind}).config
    assert differences(theirs(**chosen).to_dict(), theirs(**ours).to_dict()) == {}
    assert {key for key in family.keys if not hasattr(theirs(), key)} <= DERIVED | UNLIKE


@pytest.mark.parametrize("name", EVERY)
def test_transformers_makes_the_same_of_what_is_completed(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    said, completed = copy.deepcopy(EVERY[name]), complete(EVERY[name]).config
    theirs = transformers.AutoConfig.for_model(**said)
    ours = transformers.AutoConfig.for_model(**completed)
    assert differences(theirs.to_dict(), ours.to_dict()) == {}
    assert theirs.num_labels == ours.num_labels


SCALES = ("intermediate_size", "vocab_size", "num_hidden_layers", "moe_intermediate_size", "kv_lora_rank", "n_inner",
          "n_layer", "type_vocab_size", "additional_vocab_size")  # fmt: skip


def perturbed(config: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """`config` with other sizes that go together, in its parts too."""
    changed = copy.deepcopy(config)
    for key, value in changed.items():
        if isinstance(value, dict) and key.endswith("_config") and key != "adapter_config":
            changed[key] = perturbed(value, draw)
        elif key in SCALES and not (key == "num_hidden_layers" and "head_dim" in config and "image_size" in config):
            changed[key] = value + draw.randint(1, 40)
    changed.pop("layer_types", None)
    for width in ("hidden_size", "n_embd"):
        if width in changed and "text_hidden_size" not in changed and "image_size" not in changed:
            times = draw.randint(2, 4)
            changed[width] *= times
            if changed.get("model_type") == "gpt_neox":
                changed["head_dim"] *= times
    if "adapter_config" in changed:
        changed["adapter_config"]["text_hidden_size"] = changed["text_config"]["hidden_size"]
    return changed


@pytest.mark.parametrize("name", SMALL)
def test_ten_other_models_of_a_family(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    draw = random.Random(name)
    seen = set()
    for index in range(10):
        spec = hf_spec(written(tmp_path / str(index), perturbed(SMALL[name], draw)))
        theirs = transformers.AutoConfig.for_model(**json.loads(spec.config))
        theirs = theirs.vision_config if name.startswith("siglip") else theirs.get_text_config()
        assert (theirs.num_hidden_layers, theirs.hidden_size) == (spec.decoder.num_layers, spec.decoder.hidden)
        assert theirs.num_attention_heads == spec.decoder.num_heads
        seen.add(spec.config)
    assert len(seen) == 10


def test_only_a_trace_takes_what_no_formula_knows(tmp_path: Path) -> None:
    path = written(tmp_path, LLAMA | {"ngram_size": 3, "quantization_config": {"bits": 4}})
    spec = model_spec(path, "hf")
    assert (spec.family, spec.impl, spec.decoder.vocab) == ("other", "hf", 128256)
    assert json.loads(spec.config)["ngram_size"] == 3
    assert "quantization_config" not in spec.config
    assert "only a trace knows this model: ngram_size" in spec.notes[0]
    assert "--impl hf" in refusal(model_spec, path, "reference")
    granite = model_spec(written(tmp_path / "granite", LLAMA | {"model_type": "granite"}), "hf")
    assert granite.decoder.num_kv_heads == 8
    whisper = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "decoder_layers": 4}
    assert "encoder with a decoder" in refusal(model_spec, written(tmp_path / "w", whisper), "hf")
    nameless = {"model_type": "granite", "vocab_size": 8}
    assert "no architectures" in refusal(model_spec, written(tmp_path / "n", nameless), "hf")
    assert "not a whole number" in refusal(model_spec, written(tmp_path / "b", LLAMA | {"vocab_size": "x"}), "hf")


def test_a_model_of_the_hub_cache_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--some.Model"
    written(folder / "snapshots" / "aaa", LLAMA)
    written(folder / "snapshots" / "bbb", LLAMA | {"num_hidden_layers": 7})
    os.utime(folder / "snapshots" / "bbb" / "config.json", (1, 1))
    assert model_spec("org/some.Model").decoder.num_layers == 32  # the newest
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("bbb")
    spec = model_spec("org/some.Model")
    assert (spec.name, spec.decoder.num_layers) == ("org/some.Model", 7)
    assert hf_spec(str(folder / "snapshots" / "aaa")).name == "org/some.Model"
    (folder / "refs" / "main").write_text("../../../elsewhere")
    assert model_spec("org/some.Model").decoder.num_layers == 32
    missing = refusal(model_spec, "org/someModel")
    assert "Did you mean org/some.Model?" in missing
    assert "hf download org/someModel" in missing


def test_the_hub_cache_is_where_the_hub_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable, below in (
        ("HOME", "home/.cache/huggingface/hub"), ("XDG_CACHE_HOME", "xdg/huggingface/hub"), ("HF_HOME", "hf/hub"),
        ("HF_HUB_CACHE", "hub"),
    ):  # fmt: skip
        monkeypatch.setenv(variable, str(tmp_path / below.partition("/")[0]))
        written(tmp_path / below / "models--org--x" / "snapshots" / "abc", LLAMA | {"vocab_size": len(below)})
        assert model_spec("org/x").decoder.vocab == len(below)


@pytest.mark.parametrize("name", [name for name in names() if model_spec(name).impl == "memplan"])
def test_a_model_of_memplans_own_goes_to_transformers_and_back(name: str, tmp_path: Path) -> None:
    own = model_spec(name, "reference")
    assert own == model_spec(name)
    if own.family in ("nanogpt", "gemma") or own.decoder.rope_fp32:
        assert "transformers" in refusal(model_spec, name, "hf")
        return
    theirs = model_spec(name, "hf")
    assert theirs.impl == "hf"
    back = model_spec(written(tmp_path, json.loads(theirs.config)), "reference")
    assert (back.impl, back.config, back.decoder) == ("memplan", "", own.decoder)
    assert (back.vision, back.connector) == (own.vision, own.connector)


def test_what_memplans_own_modules_cannot_be(tmp_path: Path) -> None:
    reasons = {"gpt_neox": "no gpt_neox", "gemma3": "no gemma3", "deepseek_v3": "no deepseek_v3", "bert": "no bert"}
    for name, reason in reasons.items():
        assert reason in refusal(model_spec, written(tmp_path / name, HUB[name]), "reference")
    others = [
        (LLAMA | {"hidden_act": "gelu"}, "'gelu'"),
        (LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        (HUB["qwen3_moe"] | {"norm_topk_prob": False}, "norm_topk_prob is False"),
        (HUB["qwen2"] | {"use_sliding_window": True, "max_window_layers": 5}, "no period"),
        (SMALL["gemma2"], "attn_logit_softcapping"),
    ]
    for index, (config, reason) in enumerate(others):
        assert reason in refusal(model_spec, written(tmp_path / str(index), config), "reference")
    assert "no qwen3_5_text" in refusal(model_spec, "tiny-hybrid", "reference")
    assert "Unknown impl" in refusal(model_spec, "tiny", "memplan")
    assert "Leave --impl out" in refusal(model_spec, "pkg.mod:make", "hf")


def test_each_family_has_a_small_configuration_here() -> None:
    known = {complete(config).config["model_type"] for config in SMALL.values()}
    assert set(supported()) - known <= {"smollm3", "qwen3_5"}
    smollm3 = LLAMA | {"model_type": "smollm3", "rope_scaling": None, "no_rope_layer_interval": 4}
    assert complete(smollm3).config["no_rope_layers"] == [1, 1, 1, 0] * 8
    parts = {"text_config": SMALL["qwen3_5_text"], "vision_config": {"depth": 2, "hidden_size": 64}}
    assert complete({"model_type": "qwen3_5"} | parts).config["text_config"]["layer_types"][3] == "full_attention"


def test_the_command_line_takes_them_and_loads_no_torch(tmp_path: Path) -> None:
    path = written(tmp_path / "mine", SMALL["llama"])
    code = (
        "import sys; from memplan.cli import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    words = ["estimate", "--model", path, "--impl", "reference", "--seq", "64", "--device", "cpu"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "False False")
    assert done.stdout.startswith("mine (1,104,480 parameters")
    bad = written(tmp_path / "bad", LLAMA | {"ngram_size": 3})
    done = subprocess.run(
        [sys.executable, "-c", code, "trace", "--model", bad], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (2, "False False")
    assert done.stderr.startswith("memplan: ngram_size in config.json is 3")


def test_where_transformers_has_no_kernel_attention_is_eager(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name, config in EVERY.items():
        spec = hf_spec(written(tmp_path / name, config))
        (architecture,) = json.loads(spec.config)["architectures"]
        kernels = getattr(transformers, architecture)._supports_sdpa
        assert spec.usual_attention == ("sdpa" if kernels else "eager"), name


def test_a_rung_takes_what_is_usual_of_its_model(tmp_path: Path) -> None:
    path = written(tmp_path / "vit", SMALL["vit"])
    ladder = Ladder.from_dict({"model": path, "impl": "hf", "rungs": "B2c1"}, name="x", origin="options")
    (point,) = points(ladder, CPU)
    assert (point.run.step.workload, point.run.step.seq, point.model) == ("classify", 25, path)
    assert f"--model {path} --impl hf" in point.command
    assert assumed(ladder, [point])[0].endswith(f"assumed for {path}: bf16-mixed, seq 25")
    assert "25 patches" in refusal(points, dataclasses.replace(ladder, seq=64), CPU)
    path = written(tmp_path / "gemma2", SMALL["gemma2"])
    (point,) = points(Ladder.from_dict({"model": path, "rungs": "B2c1"}, name="x", origin="options"), CPU)
    assert (point.run.step.workload, point.run.step.attention) == ("lm", "eager")
