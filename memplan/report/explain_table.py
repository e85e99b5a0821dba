"""What checkpointing does with each op of a block, for people."""

from typing import Any

from memplan.analysis.checkpointing import findings
from memplan.record.explain import BlockPolicy
from memplan.report.step_line import step_line
from memplan.report.table import Column, Table
from memplan.units import format_bytes, format_flops, format_percent


def explain_json(answer: BlockPolicy) -> dict[str, Any]:
    """The JSON form: the answer's own keys and what follows from them."""
    return answer.to_dict() | {"findings": findings(answer)}


def explain_table(answer: BlockPolicy) -> Table:
    """Each op once, the dearest first; below it what the modes keep and run again, and what follows."""
    columns = (
        Column(key="op", header="op", align="left"),
        Column(key="policy", header="policy", align="left"),
        Column(key="num_calls", header="calls"),
        Column(key="num_kept", header="kept"),
        Column(key="num_bytes", header="results", text=format_bytes),
        Column(key="bytes_frac", header="of bytes", text=_share),
        Column(key="num_flops", header="FLOPs", text=format_flops),
        Column(key="flops_frac", header="of FLOPs", text=_share),
    )
    rows = tuple(
        (
            op.op.removeprefix("aten."),
            op.policy,
            op.num_calls,
            op.num_kept,
            op.num_bytes or None,
            answer.bytes_frac(op) or None,
            op.num_flops or None,
            answer.flops_frac(op) or None,
        )
        for op in answer.ops
    )
    run = answer.run
    title = f"{answer.block} of {run.model.name} by {run.device.name}'s rules: {step_line(run)}"
    return Table(columns=columns, rows=rows, title=title, footer=findings(answer))


def _share(frac: float) -> str:
    return format_percent(frac, 1).lstrip("+")
