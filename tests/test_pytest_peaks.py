"""What the pytest plugin is made of: peaks, their file, and the stretches that take them from a device or a trace."""

from pathlib import Path

import pytest

from memplan.errors import MemplanError
from memplan.pytest_plugin.baseline import Baseline
from memplan.pytest_plugin.peak import Peak, against, over_gate
from memplan.pytest_plugin.stretch import Stretch
from memplan.units import MIB


def test_the_bytes_alive_before_count_for_the_gate_alone() -> None:
    peak = Peak(test="t", name="call", witness="measured", device="H100", torch="2.13", num_bytes=3 * MIB,
                before_bytes=6 * MIB)  # fmt: skip
    assert "(6.00 MiB of it alive before) is over the gate of 8.00 MiB by 1.00 MiB" in str(over_gate(peak, 8 * MIB))
    assert over_gate(peak, 9 * MIB) is None
    assert against(peak, 3 * MIB, {})[0] == "same"


def test_a_baseline_is_a_line_a_number_and_comes_back_as_it_was(tmp_path: Path) -> None:
    peak = Peak(test="t", name="call", witness="traced", device="h100-80g", torch="2.13", num_bytes=5,
                phases={"forward": 3, "backward": 5})  # fmt: skip
    kept = Baseline()
    kept.take([peak])
    kept.write(tmp_path / "new" / "p.json")
    lines = (tmp_path / "new" / "p.json").read_text().splitlines()
    assert [line.strip() for line in lines if "5" in line or "3" in line][1:] == [
        '"bytes": 5,',
        '"backward": 5,',
        '"forward": 3',
    ]
    assert Baseline.read(tmp_path / "new" / "p.json").find(peak) == {"bytes": 5, "phases": peak.phases}


def test_the_cpus_allocator_is_heard_whatever_ran_before() -> None:
    torch = pytest.importorskip("torch")
    sizes = []
    for _ in range(2):
        with Stretch(device="cpu") as stretch:
            held = torch.empty(MIB, dtype=torch.uint8)
            stretch.mark("forward")
            torch.empty(3 * MIB, dtype=torch.uint8)
        sizes.append((stretch.allocated_bytes, stretch.phases))
        del held  # outside, so that the window never hears of it
    assert sizes == [(4 * MIB, {"forward": 4 * MIB})] * 2
    assert (stretch.witness, stretch.device, stretch.before_bytes) == ("measured", "cpu", 0)


def test_what_was_before_a_reset_is_forgotten() -> None:
    torch = pytest.importorskip("torch")
    with Stretch(device="cpu") as measured:
        torch.empty(8 * MIB, dtype=torch.uint8)
        measured.reset()
        torch.empty(2 * MIB, dtype=torch.uint8)
    with Stretch(trace="cpu") as traced:
        torch.empty(8 * MIB, dtype=torch.uint8)
        traced.reset()
        torch.empty(2 * MIB, dtype=torch.uint8)
    assert measured.allocated_bytes == traced.allocated_bytes == 2 * MIB


def test_a_trace_takes_peaks_that_no_machine_has() -> None:
    torch = pytest.importorskip("torch")
    with Stretch(trace="a100-80g") as stretch:
        layer = torch.nn.Linear(131_072, 131_072, bias=False)
        layer(torch.randn(8, 131_072)).sum().backward()
    assert stretch.allocated_bytes > 128 << 30  # the weight and its gradient
    assert stretch.phases["backward"] == stretch.allocated_bytes
    assert (stretch.witness, stretch.device) == ("traced", "a100-80g")


def test_a_card_that_nobody_knows_is_one_sentence() -> None:
    pytest.importorskip("torch")
    with pytest.raises(MemplanError, match="b1000"), Stretch(trace="b1000"):
        pass
