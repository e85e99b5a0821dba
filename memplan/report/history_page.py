"""The trend of each rung: a table, and a picture of peaks and step times over results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memplan.analysis.history import Moment
from memplan.analysis.verdict import signed_bytes
from memplan.errors import MemplanError
from memplan.report.figures import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    GRID,
    INK,
    ORANGE,
    PAPER,
    PURPLE,
    RED,
    SKY,
    Picture,
    legend,
    save,
    scale_of,
    sheet,
)
from memplan.report.outside import for_plot
from memplan.report.table import Column, Table
from memplan.units import format_bytes, format_ns, format_percent, seconds

LOOKS = tuple(zip((BLUE, ORANGE, GREEN, PURPLE, SKY, GREY), ("o", "s", "^", "D", "v", "P"), strict=True))
"""Colour and mark of each line, one rung a line; where there are more they come again with dashes."""
PICTURES = (".png", ".svg")
"""Endings of a picture's file."""
MOST_DRAWN = 12
"""Rungs that the picture shows, those with a step in their trend first; the table shows all."""
CAPTION = "Triangles mark what moved beyond the tolerance: upwards it got worse, downwards better."
"""What stands below the picture."""
COLUMNS = (
    Column(key="rung", header="rung", align="left"),
    Column(key="model", header="model", align="left", hide_constant=True),
    Column(key="source", header="source", align="left", hide_constant=True),
    Column(key="at", header="began", align="left"),
    Column(key="commit", header="commit", align="left", hide_empty=True),
    Column(key="status", header="status", align="left", hide_constant=True),
    Column(key="peak_bytes", header="peak", text=format_bytes),
    Column(key="peak_change_bytes", header="change of peak", text=lambda size: signed_bytes(size) if size else "0 B"),
    Column(key="step_ns", header="step time", text=format_ns, hide_empty=True),
    Column(key="step_change_frac", header="change of time", text=format_percent, hide_empty=True),
    Column(key="num_processes", header="processes", hide_constant=True),
    Column(key="marks", header="what moved", align="left", hide_empty=True),
    Column(key="path", header="result", align="left"),
)
"""What is known of each moment."""


def history_table(moments: Sequence[Moment], footer: Sequence[str] = ()) -> Table:
    """Rung by rung, oldest first; what moved beyond the tolerance is marked."""
    models = {moment.model for moment in moments}
    return Table(columns=COLUMNS, rows=tuple(_values(moment, models) for moment in moments), footer=tuple(footer))


def _values(moment: Moment, models: set[str]) -> tuple[Any, ...]:
    return (
        moment.name,
        moment.model if len(models) == 1 else None,  # where they differ the name tells it
        moment.source,
        moment.at.replace("+00:00", "Z"),
        moment.commit,
        moment.status,
        moment.peak_bytes,
        moment.peak_change_bytes,
        moment.step_ns,
        moment.step_change,
        moment.num_processes,
        "; ".join(moment.marks) or None,
        str(moment.path.parent if moment.path.name == "ladder.jsonl" else moment.path),
    )


def history_plot(moments: Sequence[Moment], path: Path) -> None:
    """Writes the picture of the trend as the kind of file that the ending of `path` names; MemplanError where that is
    neither of `PICTURES`."""
    if path.suffix not in PICTURES:
        raise MemplanError(f"{path} names no picture.", f"Type a file that ends in {' or '.join(PICTURES)}.")
    save(history_picture(moments).figure, path)


def history_picture(moments: Sequence[Moment]) -> Picture:
    """Peaks above, step times below where there are any, one line a rung; what moved beyond the tolerance is marked."""
    from matplotlib.gridspec import GridSpec

    lines = _lines(moments)
    places = {place: number for number, place in enumerate(sorted({moment.place for moment in moments}))}
    timed = any(moment.step_ns is not None for line in lines.values() for moment in line)
    figure, upper = sheet(height=6.4 if timed else 4.2)
    scale = scale_of(moment.peak_bytes for moment in moments)
    panels = [(upper, f"peak allocated [{scale.unit}]", "memory", lambda moment: _peak(moment, scale))]
    if timed:
        grid = GridSpec(2, 1, figure=figure)
        upper.set_subplotspec(grid[0])
        lower = figure.add_subplot(grid[1], sharex=upper)
        lower.spines[["top", "right"]].set_visible(False)
        upper.tick_params(labelbottom=False)
        panels.append((lower, "step [s]", "speed", _step))
    handles: list[Any] = []
    for axes, label, what, read in panels:
        handles = _panel(axes, lines, places, label, what, read)
    said = {places[moment.place]: moment.commit or moment.at[:10] for moment in moments}
    panels[-1][0].set_xticks(list(said), [for_plot(text, 12) for text in said.values()], rotation=30)
    upper.set_title("Trend of each rung", loc="left", fontsize=12, weight="bold", color=INK)
    left_out = len({(moment.run_id, moment.source) for moment in moments}) - len(lines)
    if left_out:
        upper.annotate(f"{left_out} more rungs stand in the table", (1, 1.02), xycoords="axes fraction", ha="right",
                       fontsize=8, color=FAINT)  # fmt: skip
    legend(figure, handles)
    return Picture(name="history", title="Trend of each rung", figure=figure, alt=_alt(moments), caption=CAPTION)


def _panel(
    axes: Any, lines: dict[str, list[Moment]], places: dict[int, int], label: str, what: str, read: Any
) -> list[Any]:
    """Draws one number of all rungs; the entries of the legend."""
    handles = []
    for number, (name, line) in enumerate(lines.items()):
        color, mark = LOOKS[number % len(LOOKS)]
        points = [(places[moment.place], read(moment), moment) for moment in line]
        known = [(place, value, moment) for place, value, moment in points if value is not None]
        (drawn,) = axes.plot([place for place, _, _ in known], [value for _, value, _ in known], color=color,
                             marker=mark, markeredgecolor=PAPER, linestyle="--" if number >= len(LOOKS) else "-",
                             label=for_plot(name), zorder=3)  # fmt: skip
        handles.append(drawn)
        for place, value, moment in known:
            for way, shape, ring in (("worse", "^", RED), ("better", "v", GREEN)):
                if f"{what} {way}" in moment.marks:
                    axes.scatter(place, value, s=330, marker=shape, facecolor="none", edgecolor=ring, linewidth=2,
                                 zorder=4)  # fmt: skip
    axes.set_ylabel(label, color=INK)
    axes.margins(x=0.06)
    values = [value for line in lines.values() for moment in line if (value := read(moment)) is not None]
    axes.set_ylim(0, 1.15 * max(values, default=1))
    axes.grid(color=GRID, linewidth=0.8)
    axes.tick_params(colors=INK, labelsize=9)
    return handles


def _lines(moments: Sequence[Moment]) -> dict[str, list[Moment]]:
    """Moments by rung, as many rungs as the picture has room for."""
    lines: dict[str, list[Moment]] = {}
    for moment in moments:
        lines.setdefault(moment.name, []).append(moment)
    ranked = sorted(lines, key=lambda name: not any(moment.marks for moment in lines[name]))[:MOST_DRAWN]
    return {name: line for name, line in lines.items() if name in ranked}


def _alt(moments: Sequence[Moment]) -> str:
    steps = [f"{moment.name} {mark} at {moment.commit or moment.at}" for moment in moments for mark in moment.marks]
    names = len({moment.name for moment in moments})
    said = "; ".join(steps[:10]) if steps else "none moved beyond the tolerance"
    return f"A line for each of {names} rungs over {len({moment.place for moment in moments})} results: {said}."


def _peak(moment: Moment, scale: Any) -> float | None:
    return None if moment.peak_bytes is None else scale(moment.peak_bytes)


def _step(moment: Moment) -> float | None:
    return None if moment.step_ns is None else seconds(moment.step_ns)
