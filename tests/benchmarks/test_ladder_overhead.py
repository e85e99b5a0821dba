"""The ladder's timed loop against one written by hand: the comparison's own arithmetic, and both loops for real."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parent))

import ladder_overhead as benchmark

from memplan.models.registry import model_spec
from memplan.spec import RunSpec, StepSpec
from memplan.spec.device import CPU


def comparison(ladder_ns: list[int], hand_ns: list[int], *, hand_bytes: int = 7) -> benchmark.Comparison:
    return benchmark.Comparison(ladder_ns=ladder_ns, hand_ns=hand_ns, ladder_bytes=7, hand_bytes=hand_bytes)


def test_a_machine_that_gets_slower_is_slower_for_both() -> None:
    found = comparison([100, 202, 300, 404, 101, 99], [101, 199, 300, 400, 100, 100])
    assert found.differences == pytest.approx([302 / 300 - 1, 704 / 700 - 1, 0.0])
    assert found.holds


def test_a_slower_loop_and_another_peak_do_not_hold() -> None:
    assert not comparison([104, 104], [100, 100]).holds
    assert not comparison([96, 96], [100, 100]).holds
    assert not comparison([100, 100], [100, 100], hand_bytes=8).holds


@pytest.mark.slow
def test_the_ladders_peak_is_the_bare_loops_to_the_byte() -> None:
    """Times of so short a run say nothing; bytes are bytes."""
    run = RunSpec(model=model_spec("tiny"), step=StepSpec(batch=2, seq=32), device=CPU)
    found = benchmark.compare(run, 2)
    assert found.ladder_bytes == found.hand_bytes > 10**6
    assert len(found.ladder_ns) == len(found.hand_ns) == 4
    assert f"{found.hand_bytes} by hand" in benchmark.report(found)


@pytest.mark.slow
def test_steps_in_the_ladder_take_as_long_as_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """Three tries: a machine on which others are at work may spoil one."""
    codes = []
    while len(codes) < 3 and 0 not in codes:
        codes.append(benchmark.main([]))
    assert 0 in codes, capsys.readouterr().out
