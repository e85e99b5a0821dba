"""Models by name: built in, one data file each in `data/`, read when it is asked for; of a configuration; of a user.
No torch."""

import json
import tomllib
from pathlib import Path
from typing import Any

from memplan.errors import MemplanError, near_names
from memplan.models.hf_config import canonical, hf_spec, spec_of
from memplan.models.hf_reference import as_hf, as_reference
from memplan.spec.hf_facts import complete
from memplan.spec.model import ConnectorSpec, DecoderSpec, ModelSpec, RopeScaling, VisionSpec

_DATA = Path(__file__).parent / "data"
IMPLS = ("reference", "hf")
"""Whose modules train: memplan's own, or transformers'."""


def names() -> tuple[str, ...]:
    """Names of the built-in models, sorted."""
    return tuple(sorted(path.stem for path in _DATA.glob("*.toml")))


def model_spec(name: str, impl: str | None = None) -> ModelSpec:
    """The model that `name` means: a built-in one, a user's `pkg.mod:make`, of which nothing else is known, the path of
    a Hugging Face configuration or of its folder, or `org/name` in the local hub cache. `impl` is `reference`
    (memplan's own modules), `hf` (transformers') or None, the usual one. MemplanError when there is none."""
    if impl is not None and impl not in IMPLS:
        raise MemplanError(f"Unknown impl {impl!r}.", near_names(impl, IMPLS))
    if name in names():
        spec = _built_in(name)
        return spec if impl in (None, _impl(spec)) else _other_impl(spec)
    if ":" in name and not Path(name).exists():
        if impl is not None:
            raise MemplanError(f"{name} is a module of your own, which has one implementation.", "Leave --impl out.")
        return _user_spec(name)
    if "/" in name or Path(name).exists() or name.endswith(".json"):
        spec = hf_spec(name, impl=impl)
        return _other_impl(spec) if impl == "reference" else spec
    raise MemplanError(f"Unknown model {name!r}.", near_names(name, names()))


def _built_in(name: str) -> ModelSpec:
    facts = _facts(name)
    del facts["counts"]
    if "hf" in facts and "decoder" not in facts:
        said = facts.pop("hf") | dict.fromkeys(facts.pop("hf_null", ()))  # TOML has no null
        return spec_of(complete(said, name).config, name=name, **facts)
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
        facts |= {"impl": "hf", "config": canonical(facts.pop("hf"))}
    return ModelSpec(name=name, **facts)


def _impl(spec: ModelSpec) -> str:
    """The implementation of `spec` as the command line spells it."""
    return "reference" if spec.impl == "memplan" else spec.impl


def _other_impl(spec: ModelSpec) -> ModelSpec:
    """`spec` in the other of both implementations."""
    if spec.impl == "memplan":
        return as_hf(spec)
    return as_reference(spec, complete(json.loads(spec.config), spec.name).config)


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
