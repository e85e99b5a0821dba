"""How the blocks of a model repeat, and the same model with some of them left out."""

import dataclasses
import json
from collections.abc import Hashable, Sequence
from typing import Any

from memplan.models.hf_build import built_config
from memplan.spec.model import ModelSpec

Kinds = tuple[Hashable, ...]
"""What each block of a list is: equal for blocks whose steps tell the same story."""
NUMBERED = ("mlp_only_layers", "rope_scaling_layers", "vision_feature_layer")
"""Fields of configurations that list blocks by their numbers; a negative one counts from the end."""


def block_kinds(spec: ModelSpec) -> tuple[Kinds, ...]:
    """The kinds of each list of blocks in the order of the module's `block_paths`; empty where nobody can tell."""
    if spec.impl == "hf":
        return hf_kinds(spec)
    decoder = spec.decoder
    if spec.impl != "memplan" or decoder.kv_shared:
        return ()
    text = tuple(decoder.slides(index) for index in range(decoder.num_layers))
    if spec.vision is None:
        return (text,)
    return text, tuple(index in spec.vision.layers_read for index in range(spec.vision.num_layers))


def with_blocks(spec: ModelSpec, kept: Sequence[Sequence[int]]) -> ModelSpec:
    """`spec` with just the blocks of these numbers, list by list."""
    decoder = dataclasses.replace(spec.decoder, num_layers=len(kept[0]))
    if spec.impl == "hf":
        return dataclasses.replace(spec, decoder=decoder, config=hf_with_blocks(spec, kept))
    vision = spec.vision
    if vision is not None:
        read = tuple(kept[1].index(number) for number in vision.layers_read)
        vision = dataclasses.replace(vision, num_layers=len(kept[1]), layers_read=read)
    return dataclasses.replace(spec, decoder=decoder, vision=vision)


# transformers' configurations


def hf_kinds(spec: ModelSpec) -> tuple[Kinds, ...]:
    """The kinds by the fields of a configuration that speak of single blocks."""
    config = built_config(spec)
    return tuple(part_kinds(config, part) for part in block_parts(config))


def block_parts(config: Any) -> tuple[Any, ...]:
    """The parts of a configuration that have blocks: the language model's first, an image encoder's behind it."""
    vision = getattr(config, "vision_config", None)
    if vision is not None and any("ForImageClassification" in name for name in config.architectures):
        return (vision,)
    text = config.get_text_config()
    return (text,) if vision is None else (text, vision)


def part_kinds(config: Any, part: Any) -> Kinds:
    """What each block of `part` is: its entries in lists as long as the blocks, and whether it is named by number."""
    count = part.num_hidden_layers
    facts = part.to_dict()
    lists = [facts[key] for key in sorted(facts) if is_per_block(key, facts[key], count)]
    marked = [numbers(one, key, count) for one in owners(config, part) for key in NUMBERED if getattr(one, key, None)]
    dense, every = facts.get("first_k_dense_replace"), facts.get("decoder_sparse_step")
    return tuple(
        (
            tuple(str(one[index]) for one in lists),
            tuple(index in one for one in marked),
            dense is not None and index < dense,
            every is not None and (index + 1) % every == 0,
        )
        for index in range(count)
    )


def is_per_block(key: str, value: Any, count: int) -> bool:
    """Whether `value` has an entry for each of `count` blocks."""
    return "layer" in key and key not in NUMBERED and isinstance(value, list | tuple) and len(value) == count


def owners(config: Any, part: Any) -> list[Any]:
    """The parts of `config` that name blocks of `part` by number: itself, and for an image encoder the adapter."""
    adapter = getattr(config, "adapter_config", None)
    return [part] if adapter is None or part is not config.vision_config else [part, adapter]


def numbers(owner: Any, key: str, count: int) -> set[int]:
    """The numbers that `key` of `owner` lists, from 0 on."""
    return {number % count for number in getattr(owner, key)}


def hf_with_blocks(spec: ModelSpec, kept: Sequence[Sequence[int]]) -> str:
    """The configuration of `spec` with just the blocks of these numbers, as canonical JSON."""
    config = built_config(spec)
    facts = json.loads(spec.config)
    for part, numbers_kept in zip(block_parts(config), kept, strict=True):
        count, whole = part.num_hidden_layers, part.to_dict()
        own = own_facts(facts, config, part)
        own[part.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(numbers_kept)
        for key, value in whole.items():
            if is_per_block(key, value, count):
                own[key] = [value[number] for number in numbers_kept]
        if "first_k_dense_replace" in whole:
            own["first_k_dense_replace"] = sum(number < whole["first_k_dense_replace"] for number in numbers_kept)
        renumbered = {number: index for index, number in enumerate(numbers_kept)}
        for owner in owners(config, part):
            for key in NUMBERED:
                if listed := getattr(owner, key, None):
                    found = (renumbered.get(number % count) for number in listed)
                    own_facts(facts, config, owner)[key] = [number for number in found if number is not None]
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))


def own_facts(facts: dict[str, Any], config: Any, part: Any) -> dict[str, Any]:
    """The object in `facts` that `part` of `config` was made of."""
    if part is config:
        return facts
    name = next(name for name in config.sub_configs if getattr(config, name) is part)
    found: dict[str, Any] = facts.setdefault(name, {})
    return found
