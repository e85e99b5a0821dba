"""The table of cards."""

import pytest

from memplan.errors import MemplanError
from memplan.spec.device import CPU, card, cards
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
