"""The table of cards."""

import pytest

from memplan.errors import MemplanError
from memplan.spec.device import CPU, card, cards, kin_of
from memplan.units import GIB


@pytest.mark.parametrize("name", cards())
def test_card_is_sourced_and_plausible(name: str) -> None:
    found = card(name)
    assert found.name == name
    assert found.rules == "cuda"
    assert "#" in found.source or "report" in found.source
    assert found.capacity_bytes is not None
    assert 20 * GIB < found.capacity_bytes < 200 * GIB
    assert 0.4 * GIB < found.context_bytes < 0.8 * GIB
    assert "; context: " in found.source
    assert found.usable_bytes == found.capacity_bytes - found.context_bytes


def test_capacity_is_below_the_printed_size() -> None:
    for name in cards():
        if name.endswith("g"):
            printed = int(name.rpartition("-")[2][:-1]) * GIB
            capacity = card(name).capacity_bytes
            assert capacity is not None
            assert 0.97 * printed < capacity < printed


def test_unknown_card_lists_near_ones() -> None:
    with pytest.raises(MemplanError, match="h100-80g"):
        card("h100")


def test_cpu_has_no_known_size() -> None:
    assert CPU.rules == "cpu"
    assert CPU.capacity_bytes is None
    assert (CPU.context_bytes, CPU.usable_bytes) == (0, None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h100-80g", "h100-80g"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("nvidia-h100-80gb-hbm3", "h100-80g"),
        ("NVIDIA H100 PCIe", "h100-80g"),
        ("NVIDIA GH200 480GB", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("A100-PCIE-40GB", "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA L4", "rtx-4090"),
        ("NVIDIA L40S", "l40s"),
        ("nvidia-geforce-rtx-4090", "rtx-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-4090"),
        ("NVIDIA GeForce RTX 5080", "rtx-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA B200", "b200"),
        ("Tesla V100-SXM2-16GB", None),
        ("NVIDIA A10", None),
        ("cpu", None),
    ],
)
def test_a_gpu_has_the_rules_of_the_card_that_it_is_or_of_its_nearest_kin(name: str, expected: str | None) -> None:
    assert kin_of(name) == expected
