"""What a checkpoint policy is worth for a block, in words: whether selective can beat full, and where it cannot."""

from collections.abc import Sequence

from memplan.record.explain import RECOMPUTE, BlockPolicy, OpPolicy
from memplan.units import format_bytes, format_flops, format_percent

DEAR_FRAC = 0.1
"""An op with more than this share of a block's floating-point operations is dear."""
EXPERTS_FRAC = 0.25
"""With more than this share in experts' products a block is one of experts."""


def findings(answer: BlockPolicy) -> tuple[str, ...]:
    """Totals of the modes, then what follows from them."""
    kept, again = answer.kept_bytes, answer.recomputed_flops
    totals = ", ".join(
        f"{mode} keeps {format_bytes(kept[mode])} and runs {format_flops(again[mode])} again"
        for mode in ("none", "selective", "full")
    )
    lines = [f"a block: {totals}", *([answer.note] if answer.note else [])]
    return (*lines, *verdicts(answer)) if answer.run.step.checkpointing.kind == "selective" else tuple(lines)


def verdicts(answer: BlockPolicy) -> list[str]:
    """What to think of the selective policy."""
    kept, again = answer.kept_bytes, answer.recomputed_flops
    of_full = share(again["selective"] / again["full"]) if again["full"] else "all"
    lines = [
        f"{op.op} is {share(answer.flops_frac(op))} of the block's FLOPs and is run again: "
        f"selective cannot beat full here (it runs {of_full} of full's FLOPs again)"
        for op in answer.ops
        if op.policy == RECOMPUTE and answer.flops_frac(op) > DEAR_FRAC
    ]
    if kept["selective"] >= kept["none"]:
        lines.append("selective keeps as much as none: it saves nothing")
    experts = [op for op in answer.ops if op.kind == "grouped"]
    others = [op for op in answer.ops if op.kind != "grouped"]
    experts_frac = sum(answer.flops_frac(op) for op in experts)
    if experts_frac > EXPERTS_FRAC and any(op.num_kept for op in experts):
        lines.append(
            f"experts' products are {share(experts_frac)} of the block's FLOPs; keeping their results takes "
            f"{format_bytes(sum(op.kept_bytes for op in experts))} and saves {per_byte(experts)} FLOPs a byte, keeping "
            f"the others' {per_byte(others)}: prefer full, which keeps {format_bytes(kept['full'])} "
            f"instead of {format_bytes(kept['selective'])}"
        )
    return lines or ["nothing dear is run again but every second product"]


def per_byte(ops: Sequence[OpPolicy]) -> int:
    """Floating-point operations saved by each byte that `ops` keep."""
    kept = sum(op.kept_bytes for op in ops)
    return sum(op.kept_flops for op in ops) // kept if kept else 0


def share(frac: float) -> str:
    """A share as a percentage without sign."""
    return format_percent(frac, 0).lstrip("+")
