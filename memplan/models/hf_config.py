"""Hugging Face configurations as models: a `config.json`, a folder that has one, or `org/name` of the local hub cache.
No torch, no transformers, no network."""

import json
import re
from pathlib import Path
from typing import Any

from memplan.errors import MemplanError, near_names
from memplan.models.hf_cache import NAME, cached_config, cached_names, hub_folder
from memplan.models.hf_letters import decoder_letters, plain_letters, text_part, tower_letters
from memplan.spec.hf_facts import UncoveredError, complete
from memplan.spec.hf_families import FAMILIES
from memplan.spec.hf_family import Facts
from memplan.spec.model import ModelSpec

USUAL_SEQ = 4096
"""Tokens a sample, or as many as the model has positions for."""
USUAL_PRECISION = "bf16-mixed"
"""How checkpoints are usually trained further, whatever dtype they are stored in."""
LARGEST_FILE = 16 * 1024**2
OTHER_FILES = ("adapter_config.json", "model_index.json", "params.json", "tokenizer_config.json")
"""Files that folders without a configuration of a model may have instead."""
ENCODER_DECODER = {"num_decoder_layers", "decoder_layers", "decoder"}
"""Keys of models that read one sequence and write another."""
OTHER_KINDS = (
    (("peft_type",), "an adapter's configuration", "Name the base model and type --lora 16."),
    (("_class_name", "_diffusers_version"), "a configuration of diffusers", "memplan knows models of transformers."),
    (("weight_map",), "an index of weights", "The model's config.json lies beside it."),
    (("image_processor_type", "feature_extractor_type", "processor_class"), "a processor's configuration",
     "The model's config.json lies beside it."),
    (("tokenizer_class", "added_tokens_decoder", "tokenizer_file"), "a tokenizer's configuration",
     "The model's config.json lies beside it."),
    (("dim", "n_layers"), "the params.json of Meta's or Mistral's own code", "Take transformers' config.json."),
    (("eos_token_id", "do_sample", "max_new_tokens"), "a configuration of generation",
     "The model's config.json lies beside it."),
)  # fmt: skip
"""Keys that give away files of other kinds, what they are, and what to do; the first that fits counts."""
OF_MODELS = frozenset(("architectures", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "text_config"))
"""Keys of a model's configuration whose type went missing, which others of it may share with tokenizers."""


def hf_spec(path_or_name: str, *, impl: str | None = None) -> ModelSpec:
    """The model of a configuration, built by transformers. What the families know nothing of is refused, unless
    `impl` is `hf`: then it is a model of the family `other`, which only a trace knows."""
    path, name = find_config(path_or_name)
    facts = read_config(path)
    try:
        completed = complete(facts, path.name)
    except UncoveredError as error:
        if impl != "hf":
            raise MemplanError(
                error.message,
                f"Type memplan trace --model {path_or_name} --impl hf, which builds what transformers has.",
            ) from None
        return _other(facts, name, str(path), error.message)
    notes = list(completed.notes)
    config = trained(completed.config, notes)
    return spec_of(config, name=name, source=f"{path}, built by transformers", notes=tuple(notes))


def spec_of(config: Facts, *, name: str, source: str, notes: tuple[str, ...] = (), **usual: Any) -> ModelSpec:
    """The model of a completed configuration that trains; `usual` overrides its usual set-up."""
    decoder = decoder_letters(config)
    vision, connector, images = tower_letters(config)
    length = decoder.max_positions - (config["model_type"] == "vit")
    setup: dict[str, Any] = {"seq": min(length, USUAL_SEQ), "precision": USUAL_PRECISION, "images": images}
    return ModelSpec(
        name=name,
        family=config["model_type"].removesuffix("_text"),
        decoder=decoder,
        vision=vision,
        connector=connector,
        impl="hf",
        config=canonical(config),
        source=source,
        notes=notes,
        **setup | usual,
    )


def canonical(config: Facts) -> str:
    """`config` as JSON that is the same for equal facts."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"))


def trained(config: Facts, notes: list[str]) -> Facts:
    """`config` with the one architecture that trains, its other name or its missing head put into `notes`."""
    kind = config["model_type"]
    if kind == "siglip_vision_model":
        whole = {"model_type": "siglip", "vision_config": config, "num_labels": config["num_labels"]}
        config = complete(whole).config | {"architectures": config["architectures"]}
        kind = "siglip"
    named, (usual, *_) = config["architectures"], FAMILIES[kind].trains
    if named != [usual]:
        if named:
            notes.append(f"trained as {usual}, not as {', '.join(map(str, named))}")
        config = config | {"architectures": [usual]}
    return config


def find_config(path_or_name: str) -> tuple[Path, str]:
    """The file that `path_or_name` means and a name for its model; MemplanError where there is none."""
    path = Path(path_or_name).expanduser()
    if path.is_dir():
        for file in ("config.json", *OTHER_FILES):
            if (path / file).is_file():
                return path / file, _name(path / file)
        raise MemplanError(f"{path_or_name} has no config.json.", "Name the file itself.")
    if path.is_file():
        return path, _name(path)
    if not NAME.fullmatch(path_or_name) or path.suffix == ".json" or path_or_name.startswith("."):
        raise MemplanError(f"There is no file {path_or_name}.", "Type the path of a config.json or of its folder.")
    cached = cached_config(path_or_name)
    if cached is None:
        known = cached_names()
        near = f"{near_names(path_or_name, known)} " if known else ""
        raise MemplanError(
            f"There is no folder {path_or_name}, and no model of that name in the hub cache {hub_folder()}.",
            f"{near}Type hf download {path_or_name} config.json, or --model path/to/config.json.",
        )
    return cached, path_or_name


def read_config(path: Path) -> Facts:
    """The object in `path`; MemplanError when it is no JSON, or no configuration of a model."""
    if path.stat().st_size > LARGEST_FILE:
        raise MemplanError(f"{path} is too large for a configuration.", "Type the path of a config.json.")
    try:
        facts = json.loads(path.read_bytes())
    except UnicodeDecodeError:
        raise MemplanError(f"{path} is not JSON: it is not text in UTF-8.") from None
    except json.JSONDecodeError as error:
        raise MemplanError(f"{path} is not JSON: {error.msg} in line {error.lineno}.") from None
    except RecursionError:
        raise MemplanError(f"{path} is nested too deeply for a configuration.") from None
    if not isinstance(facts, dict):
        raise MemplanError(f"{path} is JSON, but no object.", 'A config.json looks like {"model_type": ...}.')
    if "peft_type" in facts:
        raise MemplanError(f"{path} is an adapter's configuration, not a model's.", OTHER_KINDS[0][2])
    named = facts.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(item, str) for item in named)):
        raise MemplanError(f"{path}: architectures is {named!r}, not a list of names.")
    if not isinstance(facts.get("model_type"), str) or not facts["model_type"]:
        raise untyped(path, facts)
    return facts


def untyped(path: Path, facts: Facts) -> MemplanError:
    """The sentence for an object that says no type of a model: what else it is, or which type its class has."""
    if "_class_name" in facts or not facts.keys() & OF_MODELS:
        for keys, kind, advice in OTHER_KINDS:
            if facts.keys() & set(keys):
                return MemplanError(f"{path} is {kind}, not a model's.", advice)
    said = facts.get("model_type")
    reason = f"{path} has no model_type." if said in (None, "") else f"model_type in {path} is {said!r}, not text."
    classes = set(facts.get("architectures") or ())
    kinds = [kind for kind, family in FAMILIES.items() if classes & set(family.trains)]
    advice = f'Write "model_type": "{kinds[0]}" into it.' if kinds else "It says which family a model is of."
    return MemplanError(reason, advice)


def _other(facts: Facts, name: str, path: str, reason: str) -> ModelSpec:
    """The model of a configuration that no family covers, which transformers may know all the same."""
    if facts.get("is_encoder_decoder") or facts.keys() & ENCODER_DECODER:
        raise MemplanError(
            f"{path} is of an encoder with a decoder, of which memplan makes no step.",
            "Bring it as a module of yours: --model pkg.mod:make.",
        )
    if not facts.get("architectures"):
        raise MemplanError(f"{path} names no architectures, so that transformers builds nothing.", "Write one down.")
    config = {key: value for key, value in facts.items() if key != "quantization_config"}
    config["architectures"] = facts["architectures"][:1]
    decoder = plain_letters(config)
    if not decoder.vocab:
        raise MemplanError(f"{path} says no vocab_size, without which there are no tokens to train on.")
    text = text_part(config).get("model_type", facts["model_type"])
    return ModelSpec(
        name=name,
        family="other",
        decoder=decoder,
        seq=min(decoder.max_positions or USUAL_SEQ, USUAL_SEQ),
        precision=USUAL_PRECISION,
        impl="hf",
        config=canonical(config),
        source=f"{path}, a {text} built by transformers",
        notes=(f"only a trace knows this model: {reason}",),
    )


def _name(path: Path) -> str:
    """What to call the model of `path`: its name in the hub cache, its folder, or the file itself where it has a name
    of its own."""
    cached = re.search(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\]", str(path.absolute()))
    if cached:
        return f"{cached[1]}/{cached[2]}"
    return path.absolute().parent.name if path.name in ("config.json", *OTHER_FILES) else path.stem
