"""`--search` on a card that is not there: the largest batch that passes, exactly, in three rungs a mode at most."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from climbing import in_this_process

from memplan.analysis import brackets
from memplan.api_ladder import climb
from memplan.errors import MemplanError
from memplan.ladder.plan import MOST_RUNGS
from memplan.record import RungResult
from memplan.spec import Ladder
from memplan.units import MIB

NUM_SHAPES = 20
NUM_BY_DEFAULT = 0


def search(folder: Path, **data: Any) -> tuple[RungResult, ...]:
    known = {"rungs": "B1c1", "model": "tiny", "device": "simulated"}
    question = Ladder.from_dict(known | data, name="search", origin="options")
    return climb(question, out=folder, search=True, run=in_this_process).rows


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.slow if seed >= NUM_BY_DEFAULT else ()) for seed in range(NUM_SHAPES)],
)
def test_the_largest_batch_of_a_random_shape(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("torch")
    draw = random.Random(seed)
    modes = ("none", "full", "selective")
    shape = {
        "model": draw.choice(["tiny", "tiny-wide", "tiny-moe"]),
        "seq": draw.choice([64, 96, 256]),
        "precision": draw.choice(["fp32", "bf16", "bf16-mixed"]),
        "loss": draw.choice(["full", "chunked:2"]),
    }
    gate_bytes = draw.randint(150, 600) * MIB
    rows = search(tmp_path / "found", ckpt=",".join(modes), gate=str(gate_bytes), **shape)
    for mode in modes:
        mine = [row for row in rows if row.step["ckpt"] == mode]
        assert 2 <= len(mine) <= MOST_RUNGS
        largest = max(row.step["batch"] for row in mine if row.verdict == "pass")
        [above] = [row for row in mine if row.step["batch"] == largest + 1]
        assert above.verdict == "fail" and (above.peak_allocated_bytes or 0) > gate_bytes
    assert all("is the largest that passes" in line for line in brackets(rows))


def test_a_search_keeps_the_chunks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    rows = search(tmp_path, rungs="B4c4", seq=64, gate="100MiB")
    batches = [row.step["batch"] for row in rows]
    assert all(batch % 4 == 0 for batch in batches)
    assert sorted(row.verdict for row in rows) == ["fail", "pass"]
    assert max(later - before for before, later in itertools.pairwise(sorted(batches))) == 4


def test_a_search_without_a_gate_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(MemplanError, match="needs a gate"):
        search(tmp_path)
    assert not list(tmp_path.glob("*.jsonl"))
