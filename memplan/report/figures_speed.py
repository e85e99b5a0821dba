"""The picture of what memory buys: throughput against peak, the Pareto front, and the rung to use."""

from collections.abc import Sequence
from typing import Any

from memplan.record import RungResult
from memplan.report.figures import (
    BLUE,
    FAINT,
    GREEN,
    GRID,
    INK,
    ORANGE,
    PAPER,
    RED,
    SHEET_INCHES,
    Picture,
    gate_line,
    gate_of,
    heading,
    is_narrow,
    legend,
    name_of,
    scale_of,
    sheet,
    spoken,
)
from memplan.report.outside import for_plot
from memplan.report.repeats import Repeats
from memplan.units import format_bytes

CAPTION = "Left is less memory, up is more speed. No rung on the front is beaten in both."
MOST_NAMED = 24
"""Points above which only those of the front are named."""
_PLACES = ((12, 0), (-12, 0), (0, 12), (0, -12), (9, 11), (9, -11), (-9, 11), (-9, -11), (0, 24), (0, -24))
"""Where a point's name may stand, in points from it; the first free place is taken."""

Point = tuple[float, float]


def front(points: Sequence[Point]) -> list[int]:
    """Indices of the points that no other beats in both, less memory and more speed, by memory."""
    order = sorted(range(len(points)), key=lambda index: (points[index][0], -points[index][1]))
    kept: list[int] = []
    for index in order:
        if not kept or points[index][1] > points[kept[-1]][1]:
            kept.append(index)
    return kept


def speed_picture(
    rungs: Sequence[Repeats], recommended: RungResult | None = None, inches: float = SHEET_INCHES
) -> Picture | None:
    """Samples a second against the peak, one named point a rung; rungs without a point are listed. None where nothing
    was timed."""
    from matplotlib.lines import Line2D

    timed = [
        (rung, peak_bytes, speed)
        for rung in rungs
        if (peak_bytes := rung.peak_bytes) is not None and (speed := rung.samples_per_s) is not None
    ]
    if not timed:
        return None
    gate_bytes = gate_of([rung.row for rung in rungs])
    scale = scale_of([gate_bytes, *(peak_bytes for _, peak_bytes, _ in timed)])
    points = [(scale(peak_bytes), speed) for _, peak_bytes, speed in timed]
    figure, axes = sheet(4.6, inches)
    holds = [rung.worst_verdict != "fail" and rung.row.kind == "ok" for rung, _, _ in timed]
    held = [index for index, hold in enumerate(holds) if hold]
    best = [held[index] for index in front([points[index] for index in held])]
    if len(best) > 1:
        xs, ys = zip(*(points[index] for index in best), strict=True)
        axes.plot(xs, ys, color=GREEN, linewidth=1.6, drawstyle="steps-post", zorder=2)
    chosen = next((index for index, (rung, _, _) in enumerate(timed) if _is(rung, recommended)), None)
    for hold, color, marker in ((True, BLUE, "o"), (False, RED, "X")):
        alike = [point for point, one in zip(points, holds, strict=True) if one is hold]
        axes.scatter(*zip(*alike, strict=True) if alike else ((), ()), s=62, color=color, marker=marker,
                     edgecolor=PAPER, zorder=4)  # fmt: skip
    if chosen is not None:
        axes.scatter(*points[chosen], s=210, facecolor="none", edgecolor=ORANGE, linewidth=2.2, zorder=3)
    ends = [peak for peak, _ in points] + ([scale(gate_bytes)] if gate_bytes is not None else [])
    axes.set_xlim(0, 1.15 * max(ends) or 1)
    axes.set_ylim(0, 1.2 * max(speed for _, speed in points))
    axes.set_xlabel(f"peak allocated [{scale.unit}]")
    axes.set_ylabel("samples a second")
    axes.grid(color=GRID, linewidth=0.8)
    heading(axes, rungs, "Throughput against memory")
    gate = gate_line(axes, scale, gate_bytes)
    handles = [Line2D([], [], marker="o", linestyle="", color=BLUE, label=_source(timed))]
    if not all(holds):
        handles.append(Line2D([], [], marker="X", linestyle="", color=RED, label="over the gate, or failed"))
    if len(best) > 1:
        handles.append(Line2D([], [], color=GREEN, label="Pareto front"))
    if chosen is not None:
        handles.append(Line2D([], [], marker="o", markersize=12, markerfacecolor="none", markeredgewidth=2.2,
                              linestyle="", color=ORANGE, label="recommended"))  # fmt: skip
    legend(figure, [*handles, *gate])
    missed = [rung for rung in rungs if rung.peak_bytes is None][:MOST_NAMED]
    lost = [f"{spoken(rung, rungs, 24)} ({rung.status})" for rung in missed]
    if lost:
        text = for_plot("not shown: " + ", ".join(lost), 60 if is_narrow(figure) else 110)
        note = axes.text(0.98, 0.03, text, transform=axes.transAxes, ha="right", fontsize=8, color=FAINT)
        note.set_in_layout(False)
    named = range(len(points)) if len(points) <= MOST_NAMED else best
    name_points(figure, axes, [(*points[index], name_of(timed[index][0], rungs, 28)) for index in named])
    said = "; ".join(
        f"{spoken(rung, rungs)} {speed:.3g} samples a second at {format_bytes(peak_bytes)}"
        for rung, peak_bytes, speed in timed[:MOST_NAMED]
    )
    use = "" if chosen is None else f" Recommended: {spoken(timed[chosen][0], rungs)}."
    alt = f"A point for each rung: {said}.{use}"
    return Picture(name="throughput", title="Throughput against memory", caption=CAPTION, figure=figure, alt=alt)


def name_points(figure: Any, axes: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Writes each point's name at the first place where it touches neither a point nor another name."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    centres = [axes.transData.transform((x, y)) for x, y, _ in points]
    taken = [Bbox.from_bounds(x - 9, y - 9, 18, 18) for x, y in centres]
    inside = axes.get_window_extent(renderer)
    for (x, y, name), own in zip(points, list(taken), strict=True):
        others = [box for box in taken if box is not own]
        for place in _PLACES:
            text = _name(axes, x, y, name, place)
            box = text.get_window_extent(renderer)
            if inside.x0 <= box.x0 and box.x1 <= inside.x1 and not any(box.overlaps(other) for other in others):
                break
            text.remove()
        else:
            box = _name(axes, x, y, name, _PLACES[0]).get_window_extent(renderer)
        taken.append(box)


def _name(axes: Any, x: float, y: float, name: str, place: tuple[int, int]) -> Any:
    right, up = place
    text = axes.annotate(
        name,
        (x, y),
        xytext=place,
        textcoords="offset points",
        fontsize=9,
        color=INK,
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.4},
        ha="left" if right > 0 else "right" if right < 0 else "center",
        va="bottom" if up > 0 else "top" if up < 0 else "center",
    )
    text.set_in_layout(False)
    return text


def _is(rung: Repeats, row: RungResult | None) -> bool:
    return row is not None and any(own.key == row.key and own.model == row.model for own in rung.rows)


def _source(timed: Sequence[tuple[Repeats, int, float]]) -> str:
    return " or ".join(sorted({rung.row.source for rung, _, _ in timed}))
