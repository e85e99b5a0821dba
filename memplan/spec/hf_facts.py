"""A configuration of a known family, completed: every key that decides shapes, ops or numbers under the name that
transformers gives it, with what transformers takes where nothing is said. A key that might change shapes and that no
family knows is refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass

from memplan.errors import MemplanError
from memplan.spec.hf_checks import check_heads, check_value
from memplan.spec.hf_families import FAMILIES
from memplan.spec.hf_family import Facts, Family
from memplan.spec.hf_names import (
    EXPERTS,
    EXPERTS_CODE,
    FOREIGN,
    GENERATION,
    HARMLESS,
    MULTI_TOKEN,
    NOTHING,
    NULLABLE,
    QUIET,
    RETURNED,
    SHAPE_NAMES,
)
from memplan.spec.hf_rope import ROPE_KEYS, rope_parameters


class UncoveredError(MemplanError):
    """A configuration of more than the families know, out of which transformers may make something all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A configuration that says everything."""

    config: Facts
    """For transformers' `AutoConfig.for_model`, nested configurations completed too."""
    notes: tuple[str, ...]
    """What was filled in and what was not read, in words."""


def complete(facts: Facts, where: str = "the config") -> Completed:
    """`facts` with every key of its family; MemplanError names the first key that is missing without a sensible
    default, of a wrong kind, at odds with another, or unknown and of a name that might change shapes."""
    kind = model_type(facts)
    if kind not in FAMILIES:
        raise UncoveredError(f"No formula knows models of the type {kind!r}, only {', '.join(supported())}.")
    filled: Facts = {}
    unread: list[str] = []
    config = _complete(kind, facts, "", where, filled, unread)
    config["architectures"] = facts.get("architectures") or [*FAMILIES[kind].trains[:1]]
    notes = []
    if filled:
        notes.append(
            f"not in {where}, so as transformers has it: {', '.join(f'{key} {value}' for key, value in filled.items())}"
        )
    if unread:
        notes.append(f"not read of {where}, since they change no shape: {', '.join(sorted(unread))}")
    if any(facts.get(key) for key in MULTI_TOKEN):
        notes.append("transformers builds no layers for the prediction of several tokens: they are left out")
    if facts.get("quantization_config"):
        notes.append("the weights are taken for unquantised ones: quantization_config is left out")
    return Completed(config=config, notes=tuple(notes))


def model_type(facts: Facts) -> str:
    """The family of `facts`; a SigLIP tower may call itself by the name of the pair."""
    kind = str(facts.get("model_type"))
    return "siglip_vision_model" if kind == "siglip" and "image_size" in facts else kind


def supported() -> tuple[str, ...]:
    """Model types that train, sorted."""
    return tuple(sorted(kind for kind, family in FAMILIES.items() if family.trains))


def _complete(kind: str, facts: Facts, prefix: str, where: str, filled: Facts, unread: list[str]) -> Facts:
    family = FAMILIES[kind]
    said = {family.aliases[key]: value for key, value in facts.items() if key in family.aliases}
    said |= {key: value for key, value in facts.items() if key not in family.aliases}
    if kind == "molmo2" and "vit_config" in facts and "vision_config" not in facts:
        said |= _read_layers(said)
    config: Facts = {"model_type": kind}
    for part, part_kind in family.parts.items():
        nested = said.pop(part, None) or {}
        if not isinstance(nested, Mapping):
            raise MemplanError(f"{prefix}{part} in {where} is {nested!r}, not an object.")
        config[part] = _complete(part_kind, dict(nested), f"{prefix}{part}.", where, filled, unread)
    missing: Facts = {}
    values = _fill(family, said, prefix, where, missing)
    _check_needed(family, missing, prefix, where)
    filled |= missing
    for key, want in family.only.items():
        value = want(values) if callable(want) else want
        if said.get(key) is not None and said[key] != value and (said[key] or value):
            raise UncoveredError(
                f"{prefix}{key} in {where} is {said[key]!r}; of a {kind} the formulas know {value!r} only."
            )
    if family.theta is not None:
        values["rope_parameters"] = rope_parameters(kind, family, said, values, prefix, where)
    _check_unknown(family, said, prefix, where, unread)
    check_heads(kind, family, values, prefix, where)
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) if "vocab_size" in values else {}
    return config | values | tokens


def _check_needed(family: Family, missing: Facts, prefix: str, where: str) -> None:
    """MemplanError where width or depth is among the `missing` keys, naming every size that is."""
    if family.needed and missing.keys() & {prefix + family.width, prefix + family.depth}:
        sizes = {key: value for key, value in missing.items() if type(value) is int}
        raise MemplanError(
            f"{where} does not say {', '.join(sizes)}.",
            f"transformers would take {', '.join(map(str, sizes.values()))}: write down what the model has.",
        )


def _fill(family: Family, said: Facts, prefix: str, where: str, filled: Facts) -> Facts:
    """The family's keys: as said, else transformers' defaults, those that depend on others last."""
    values: Facts = {}
    for key, default in sorted(family.keys.items(), key=lambda item: callable(item[1])):
        if key == "num_labels":
            if not prefix:
                values[key] = said.get(key) or len(said.get("id2label") or ()) or default
            continue
        null = key in said and said[key] is None and (key in NULLABLE or key.endswith("softcapping"))
        if said.get(key) is not None or null:
            check_value(prefix + key, said[key], default, where)
            values[key] = said[key]
            continue
        if key == "num_key_value_heads" and key in said:
            default = values["num_attention_heads"]
        values[key] = default(values) if callable(default) else default
        plain = type(values[key]) is int and (not callable(default) or key == "num_key_value_heads")
        if key not in QUIET and (plain or key == "tie_word_embeddings"):
            filled[prefix + key] = values[key]
    if values.get("use_sliding_window") is False:
        values["sliding_window"] = None
        filled.pop(prefix + "sliding_window", None)
    return {key: values[key] for key in family.keys if key in values}


def _check_unknown(family: Family, said: Facts, prefix: str, where: str, unread: list[str]) -> None:
    for key, value in said.items():
        if key in family.keys or key in family.only:
            continue
        if key in EXPERTS and "num_experts_per_tok" in family.keys and value not in (None, EXPERTS_CODE):
            raise UncoveredError(
                f"{prefix}{key} in {where} is {value!r}; the formulas know experts by {EXPERTS_CODE!r} only."
            )
        if key in FOREIGN or (key in RETURNED and value):
            unread.append(prefix + key)
            continue
        if key in EXPERTS or key in NOTHING | GENERATION or HARMLESS.search(key):
            continue
        if key in ROPE_KEYS and family.theta is not None:
            continue
        if SHAPE_NAMES.search(key) and value not in (None, False, 0, [], {}):
            raise UncoveredError(
                f"{prefix}{key} in {where} is {value!r}, which might change shapes and which no formula knows."
            )
        unread.append(prefix + key)


def _read_layers(said: Facts) -> Facts:
    """A released Molmo2's tower cut behind the last layer that is read, as transformers cuts it."""
    vision, adapter = dict(said.get("vision_config") or {}), dict(said.get("adapter_config") or {})
    layers = vision.get("num_hidden_layers", FAMILIES["molmo2_vision"].keys["num_hidden_layers"])
    read = adapter.pop("vit_layers", adapter.get("vision_feature_layer")) or [24, 18]
    check_value("vit_config.num_hidden_layers", layers, 1, "the config")
    check_value("adapter_config.vit_layers", read, list, "the config")
    read = [layer % layers for layer in read]
    vision["num_hidden_layers"] = max(read) + 1
    return {"vision_config": vision, "adapter_config": adapter | {"vision_feature_layer": read}}
