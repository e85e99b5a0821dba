"""Many configurations at once: the same numbers as one by one, and thousands a second."""

import json
import random
import subprocess
import sys
import time
from typing import Any

import pytest
from samples import asked, swept

from memplan.cli import run
from memplan.errors import MemplanError
from memplan.estimate.explain import explain
from memplan.estimate.peak import peak_of
from memplan.estimate.search import largest
from memplan.estimate.sweep import replaced
from memplan.spec.axes import parse_axis
from memplan.spec.device import card

AXES: dict[str, Any] = {
    "batch": range(1, 33),
    "seq": [64, 128, 320],
    "chunks": [1, 2],
    "ckpt": ["none", "full", "selective", "every:2"],
    "loss": ["full", "chunked:4", "chunked-ckpt:4", "fused"],
    "precision": ["fp32", "bf16-mixed"],
}


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2", "tiny-moe"])
def test_a_sweep_says_what_single_estimates_say(name: str) -> None:
    run = asked(name, "B1c1", device=card("h100-80g"))
    axes = AXES if name == "tiny" else AXES | {"seq": [64, 128], "ckpt": ["none", "selective"], "precision": ["bf16"]}
    rows = list(swept(run, axes))
    assert len(rows) == len(axes["seq"]) * (32 + 16) * len(axes["ckpt"]) * 4 * len(axes["precision"])
    for row in random.Random(7).sample(rows, 15):
        levers = {key: value for key, value in row.items() if key != "peak_allocated_bytes"}
        assert row["peak_allocated_bytes"] == peak_of(replaced(run, levers)), levers


def test_ten_thousand_configurations_take_a_second() -> None:
    """On a quiet machine; a busy one is given three."""
    run = asked("qwen3-4b", "B1c1", device=card("h100-80g"))
    axes = {"batch": range(1, 65), "seq": range(512, 8193, 512), "ckpt": ["none", "full", "selective", "every:2"]}
    axes |= {"loss": ["full", "chunked:8", "chunked-ckpt:8"]}
    started = time.process_time()
    rows = list(swept(run, axes))
    assert len(rows) == 64 * 16 * 12
    assert (time.process_time() - started) / len(rows) <= 3 / 10_000


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("batch=1:4", (1, 2, 3, 4)),
        ("seq=1024:4096:1024", (1024, 2048, 3072, 4096)),
        ("batch=1:2,8,8", (1, 2, 8)),
        ("ckpt=none,every:2", ("none", "every:2")),
        ("dropout=0,0.5", (0.0, 0.5)),
    ],
)
def test_axes_are_read_as_typed(text: str, values: tuple[object, ...]) -> None:
    assert parse_axis(text)[1] == values


@pytest.mark.parametrize(
    "text",
    ["batch", "batch=", "batch=x", "batch=2:1", "batch=1:2:0", "dropout=x", "world=0", "steps=2", "ckpt=none,ful"],
)
def test_axes_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(MemplanError):
        parse_axis(text)


def test_the_lines_of_an_explanation_add_up_to_the_peak() -> None:
    run = asked("tiny", "B4c2@every:2", precision="bf16-mixed", device=card("h100-80g"))
    lines, letters = explain(run)
    assert sum(line.num_bytes for line in lines) == peak_of(run)
    formulas = {(line.op, line.formula) for line in lines}
    assert ("_log_softmax", "4 * B*S*V") in formulas
    assert letters["B"] == 2
    assert letters["V"] == 1024


def test_the_largest_count_is_found_in_a_few_looks() -> None:
    """On convex peaks of random lines, and on one that never grows up to its end."""
    rng = random.Random(11)
    looks = 0
    for _ in range(300):
        lines = [(rng.randint(0, 10**9), rng.randint(1, 10**7)) for _ in range(4)]
        gate_bytes = rng.randint(0, 2 * 10**9)

        def peak(count: int, lines: list[tuple[int, int]] = lines) -> int:
            nonlocal looks
            looks += 1
            return max(start + slope * count for start, slope in lines)

        found = largest(peak, gate_bytes)
        spent = looks
        assert found == 0 or peak(found) <= gate_bytes
        assert peak(found + 1) > gate_bytes
        looks = spent
    assert looks / 300 <= 10
    assert largest(lambda count: 5, 5, most=77) == 77


def test_an_estimate_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from memplan.estimate import estimate; from memplan.models.registry import model_spec; "
        "from memplan.spec import RunSpec, StepSpec; from memplan.spec.device import card; "
        "run = RunSpec(model=model_spec('qwen3-30b-a3b'), step=StepSpec(batch=1, seq=128), device=card('h200')); "
        "estimate(run); sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pandas', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_explanation_in_json_says_what_its_letters_stand_for(capsys: pytest.CaptureFixture[str]) -> None:
    run(["estimate", "--model", "tiny", "--gate", "1GiB", "--explain", "-o", "json"])
    found = json.loads(capsys.readouterr().out)
    assert sum(line["num_bytes"] for line in found["lines"]) == found["peak_allocated_bytes"]
    assert found["letters"]["S"] == 128
    assert {"phase", "moment", "run_id", "unsplit_bytes"} <= found.keys()
