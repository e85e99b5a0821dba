"""How a finding about a pair is written down."""

from memplan.analysis.comparison import Finding
from memplan.analysis.matching import Pair


def finding(
    pair: Pair,
    metric: str,
    label: str,
    base: int | float | str | None = None,
    new: int | float | str | None = None,
    *,
    unit: str = "",
    counts: bool = True,
    change: float | None = None,
    interval: tuple[float, float] | None = None,
    num_base: int | None = None,
    num_new: int | None = None,
    why: str = "",
) -> Finding:
    """A finding about `pair`; the change is that of the two numbers where none is given, and every repeat stands behind
    them where nobody says how many do."""
    if change is None and isinstance(base, int | float) and isinstance(new, int | float) and base:
        change = new / base - 1
    row = pair.shown
    return Finding(
        rung=row.rung,
        name=pair.name,
        model=row.model,
        run_id=row.run_id,
        source=row.source,
        metric=metric,
        label=label,
        counts=counts,
        base=base,
        new=new,
        unit=unit,
        change=change,
        interval=interval,
        num_base=len(pair.base) if num_base is None else num_base,
        num_new=len(pair.new) if num_new is None else num_new,
        why=why,
    )
