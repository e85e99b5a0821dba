"""The ladders of real work, and the conclusions that they must come to."""

from pathlib import Path

import pytest

from memplan.analysis import findings
from memplan.backends.simulated import simulate
from memplan.ladder.points import Point, points
from memplan.record import RungResult, read_rows
from memplan.spec import Ladder
from memplan.spec.device import card
from memplan.units import GIB

ROOT = Path(__file__).parents[2]
LADDERS = ROOT / "ladders"
REPORTS = ROOT / "reports"


def climbed(name: str) -> tuple[Ladder, tuple[Point, ...]]:
    ladder = Ladder.from_toml(LADDERS / f"{name}.toml")
    return ladder, points(ladder, card(ladder.gpu or "h100-80g"), simulated=True)


def test_a_drafter_under_a_large_head_fits_with_recomputed_chunks_alone() -> None:
    """Experiment B: full and chunked run out of 95 GB, chunked and checkpointed fits; what chunking alone keeps is two
    fp32 matrices of 32,768 x 248,320, log-probabilities and the teacher's probabilities, less one chunk's."""
    _, found = climbed("drafter-27b-vocab_95g")
    steps = {point.run.step.loss: simulate(point.run).steps for point in found}
    assert {loss: step.out_of_memory is None for loss, step in steps.items()} == {
        "full": False,
        "chunked:16": False,
        "chunked-ckpt:16": True,
    }
    assert steps["chunked-ckpt:16"].needed_bytes < 60 * GIB
    matrix = 4 * 32_768 * 248_320
    graph = steps["chunked:16"].needed_bytes - steps["chunked-ckpt:16"].needed_bytes
    assert graph == pytest.approx(2 * matrix * 15 / 16, rel=0.01)


@pytest.mark.slow  # some 20 s for each of two rungs
def test_a_trunk_with_a_live_cache_fits_under_its_gate_when_checkpointed() -> None:
    """Experiment A: B12c6 over 71 GiB without checkpointing, under it with; every block of both parts is recomputed."""
    ladder, found = climbed("molmo2-4b_h100-80g")
    needed = {point.run.step.ckpt: simulate(point.run).steps.needed_bytes for point in found if point.rung.batch == 12}
    assert ladder.gate_bytes == 71 * GIB
    assert needed["full"] < ladder.gate_bytes < needed["none"]


@pytest.mark.parametrize("name", ["qwen2.5-coder-1.5b_cpu", "qwen3.5-0.8b_cpu"])
def test_checkpointing_lowers_the_graph_and_leaves_the_losses_alone(name: str) -> None:
    """Experiment D, as measured: the same losses to the last bit, a lower peak, and what it costs in time."""
    rows = read_rows(next(REPORTS.glob(f"{name}_*")) / "ladder.jsonl")
    by_mode: dict[str, RungResult] = {row.step["ckpt"]: row for row in rows}
    none, full = by_mode["none"], by_mode["full"]
    assert {row.source for row in rows} == {"measured"}
    assert full.loss == none.loss
    assert len(none.loss) >= 2
    assert full.peak_allocated_bytes is not None
    assert none.peak_allocated_bytes is not None
    assert full.peak_allocated_bytes < none.peak_allocated_bytes
    (told,) = findings(rows)
    assert "ckpt full saves" in told
    assert "step time +" in told
