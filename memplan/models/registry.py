"""Built-in models: one data file each in `data/`, read when it is asked for. No torch."""

import json
import tomllib
from pathlib import Path
from typing import Any

from memplan.errors import MemplanError, near_names
from memplan.spec.model import ConnectorSpec, DecoderSpec, ModelSpec, RopeScaling, VisionSpec

_DATA = Path(__file__).parent / "data"


def names() -> tuple[str, ...]:
    """Names of the built-in models, sorted."""
    return tuple(sorted(path.stem for path in _DATA.glob("*.toml")))


def model_spec(name: str) -> ModelSpec:
    """The built-in model called `name`, or a user's `pkg.mod:make`, of which nothing else is known; MemplanError with
    the closest names when there is none."""
    if ":" in name:
        return _user_spec(name)
    facts = _facts(name)
    del facts["counts"]
    decoder = facts.pop("decoder")
    if "rope_scaling" in decoder:
        decoder["rope_scaling"] = RopeScaling(**decoder["rope_scaling"])
    facts["decoder"] = DecoderSpec(**decoder)
    if "vision" in facts:
        vision = facts["vision"]
        facts["vision"] = VisionSpec(**vision | {"layers_read": tuple(vision["layers_read"])})
        facts["connector"] = ConnectorSpec(**facts["connector"])
    facts["frozen"] = tuple(facts.get("frozen", ()))
    if "hf" in facts:
        facts |= {"impl": "hf", "config": json.dumps(facts.pop("hf"), sort_keys=True, separators=(",", ":"))}
    return ModelSpec(name=name, **facts)


def published_counts(name: str) -> dict[str, Any]:
    """Parameter counts of `name` as others state them: `total` (a tied matrix once), `trainable`, `embedding` (token
    tables only, positions excluded) and their `source`."""
    counts: dict[str, Any] = _facts(name)["counts"]
    return counts


def _user_spec(entry: str) -> ModelSpec:
    unknown = DecoderSpec(
        num_layers=0, hidden=0, num_heads=0, num_kv_heads=0, head_dim=0, ffn=0, vocab=0, max_positions=0
    )
    return ModelSpec(
        name=entry,
        family="user",
        decoder=unknown,
        seq=0,
        precision="fp32",
        impl="user",
        config=entry,
        source="code of a user's",
    )


def _facts(name: str) -> dict[str, Any]:
    known = names()
    if name not in known:
        raise MemplanError(f"Unknown model {name!r}.", near_names(name, known))
    with (_DATA / f"{name}.toml").open("rb") as file:
        return tomllib.load(file)
