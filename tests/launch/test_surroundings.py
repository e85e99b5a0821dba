"""What lies around a step."""

from pathlib import Path

from samples import run_of

from memplan.launch.surroundings import surroundings, warnings
from memplan.spec.device import CPU, card


def test_f14_a_cold_cache_of_compiled_code_is_told(tmp_path: Path) -> None:
    """With it inductor tries kernels out in the first step, and their memory is that window's."""
    folder = tmp_path / "cache"
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    assert surroundings(run_of(compile="on"), environment) == {"inductor_cache": "cold"}
    folder.mkdir()
    assert surroundings(run_of(compile="on"), environment) == {"inductor_cache": "cold"}
    (folder / "fx").mkdir()
    assert surroundings(run_of(compile="on"), environment) == {"inductor_cache": "warm"}
    assert (
        surroundings(run_of(compile="on"), {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "no")})["inductor_cache"]
        == "cold"
    )
    assert surroundings(run_of(), environment) == {}


def test_f20_only_a_card_is_warned_of_its_allocators_settings() -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64"}
    (text,) = warnings(card("h100-80g"), environment)
    assert "leave one of them out" in text
    assert warnings(CPU, environment) == []
    assert warnings(card("h100-80g"), {}) == []
