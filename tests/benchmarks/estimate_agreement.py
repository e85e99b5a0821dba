"""Estimate against trace for every family: python tests/benchmarks/estimate_agreement.py OUT [FAMILY ...]

Small shapes cross {none, full, every:2, selective} x {full, chunked:2, chunked-ckpt:2} x {fp32, bf16, bf16-mixed}, one
full-size model a family in its usual set-up; worst first into OUT/table.md and OUT/table.csv, a line a run into
OUT/rows.jsonl, from which a run that was cut off goes on.
"""

import itertools
import json
import sys
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

sys.path += [str(Path(__file__).parent.parent / "models")]

from hf_configs import SMALL

from memplan.estimate import estimate
from memplan.models.registry import model_spec
from memplan.report.render import render
from memplan.report.table import Column, Table
from memplan.spec import ModelSpec, RunSpec, StepSpec
from memplan.spec.device import card
from memplan.units import format_bytes, format_percent

REFERENCE = ("tiny", "tiny-wide", "tiny-gpt2", "tiny-moe", "tiny-gemma", "tiny-molmo2")
FULL_SIZE = {
    "qwen3-4b": "none", "llama-3.1-8b": "full", "gpt2": "none", "molmo2-4b": "full", "smollm2-1.7b": "selective",
    "mistral-7b": "full", "gemma-2-2b": "full", "gemma-3-4b": "full", "qwen3-30b-a3b": "full", "mixtral-8x7b": "full",
    "moonlight-16b-a3b": "full", "gpt-oss-20b": "full", "qwen3.5-0.8b": "full", "bert-base": "none",
    "vit-base": "none", "siglip2-so400m": "full", "phi-3-mini": "full", "pythia-1b": "none", "olmo-2-7b": "full",
}  # fmt: skip
LEVERS = tuple(
    itertools.product(
        ("none", "full", "every:2", "selective"),
        ("full", "chunked:2", "chunked-ckpt:2"),
        ("fp32", "bf16", "bf16-mixed"),
    )
)
CARD = "h100-80g"


def small_runs(family: str) -> list[RunSpec]:
    """Every combination of levers on a small model of `family`."""
    return [run_of(model_of(family), ckpt, loss, precision) for ckpt, loss, precision in LEVERS]


def model_of(family: str) -> ModelSpec:
    """A small model: built-in, or transformers' from a configuration."""
    if family in REFERENCE:
        return model_spec(family)
    folder = Path("/tmp/memplan-agreement") / family
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMALL[family]))
    return model_spec(str(folder))


def run_of(
    model: ModelSpec, ckpt: str, loss: str, precision: str, *, batch: int = 4, seq: int | None = None
) -> RunSpec:
    """A run of `model` in its usual workload."""
    images = model.images
    usual = model.usual_workload(images)
    size = seq or (model.seq if usual in ("classify", "vlm") else 128)
    step = StepSpec(
        batch=batch, seq=size, images=images, workload=usual, ckpt=ckpt, loss=loss, precision=precision,
        attention=model.usual_attention,
    )  # fmt: skip
    return RunSpec(model=model, step=step, device=card(CARD))


def compared(run: RunSpec) -> dict[str, Any]:
    """What both witnesses say about one run."""
    from memplan.backends.simulated import simulate

    row = {"model": run.model.name, "impl": run.model.impl, "ckpt": run.step.ckpt, "loss": run.step.loss}
    row |= {"precision": run.step.precision, "batch": run.step.batch, "seq": run.step.seq, "run_id": run.run_id}
    try:
        answer, steady = estimate(run), simulate(run).steps.steady
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}"[:300]}
    return row | {
        "estimated_bytes": answer.peak_allocated_bytes,
        "traced_bytes": steady.peak_allocated_bytes,
        "reserved_bytes": answer.reserved.likely_bytes,
        "reserved_traced_bytes": steady.peak_reserved_bytes,
        "error": "",
    }


PAIRS = {"error": ("estimated_bytes", "traced_bytes"), "reserved_error": ("reserved_bytes", "reserved_traced_bytes")}
"""Errors, each of what is estimated against what is traced."""


def off(row: dict[str, Any], estimated: str, traced: str) -> float | None:
    """Relative error of a number of `row`; None where a witness failed."""
    return None if row["error"] else row[estimated] / row[traced] - 1


def table_of(rows: list[dict[str, Any]]) -> Table:
    """The rows, worst first, failures before all."""
    found = [row | {f"{name}_frac": off(row, *pair) for name, pair in PAIRS.items()} for row in rows]
    found.sort(key=lambda row: -9.0 if row["error_frac"] is None else -abs(row["error_frac"]))
    columns = (
        *(Column(key=key, header=key, align="left") for key in ("model", "impl", "ckpt", "loss", "precision")),
        *(Column(key=key, header=key) for key in ("batch", "seq")),
        Column(key="estimated_bytes", header="estimated", text=format_bytes),
        Column(key="traced_bytes", header="traced", text=format_bytes),
        Column(key="error_frac", header="error", text=lambda frac: format_percent(frac, 2)),
        Column(key="reserved_bytes", header="reserved, estimated", text=format_bytes),
        Column(key="reserved_traced_bytes", header="reserved, traced", text=format_bytes),
        Column(key="reserved_error_frac", header="reserved, error", text=lambda frac: format_percent(frac, 2)),
        Column(key="error", header="failed with", align="left", hide_empty=True),
    )
    errors = [abs(row["error_frac"]) for row in found if row["error_frac"] is not None]
    within = sum(error <= 0.02 for error in errors)
    reserved = sorted(abs(row["reserved_error_frac"]) for row in found if row["reserved_error_frac"] is not None)
    footer = (
        f"{len(found)} runs, {len(found) - len(errors)} failed; {within} of {len(errors)} within 2 %; median error "
        f"{format_percent(median(errors), 3).lstrip('+')}, largest {format_percent(max(errors), 2).lstrip('+')}",
        f"reserved bytes: median error {format_percent(median(reserved), 2).lstrip('+')}, nine of ten within "
        f"{format_percent(reserved[len(reserved) * 9 // 10], 2).lstrip('+')}, largest "
        f"{format_percent(reserved[-1], 2).lstrip('+')}",
        f"allocated peak of a steady step on {CARD}; estimate over trace, less 1",
    )
    cells = tuple(
        tuple(row.get(column.key) or None if column.key == "error" else row.get(column.key) for column in columns)
        for row in found
    )
    return Table(columns=columns, rows=cells, footer=footer)


def main(out: Path, families: list[str]) -> None:
    """Writes the tables."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {row["run_id"] for row in rows}
    runs = [run for family in families or (*REFERENCE, *SMALL) for run in small_runs(family)]
    if not families:
        runs += [
            run_of(
                model_spec(name),
                ckpt,
                "full",
                "bf16-mixed",
                batch=2,
                seq=2048
                if model_spec(name).usual_workload(0) == "lm" and model_spec(name).decoder.max_positions >= 2048
                else None,
            )
            for name, ckpt in FULL_SIZE.items()
        ]
    wanted = [run for run in runs if run.run_id not in done]
    with (
        path.open("a") as file,
        get_context("spawn").Pool(2, maxtasksperchild=100) as pool,
    ):
        for row in pool.imap(compared, wanted, chunksize=4):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
    table = table_of([row for row in rows if row["run_id"] in {run.run_id for run in runs}])
    for form in ("md", "csv"):
        (out / f"table.{form}").write_text(render(table, form) + "\n")
    print("\n".join(table.footer))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
