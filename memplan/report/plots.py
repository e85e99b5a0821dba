"""Two pictures of a ladder: how high each rung reaches, and what it gives for it.

Figures are objects of their own on the Agg canvas; nothing global is touched, no display is needed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memplan.record import RungResult
from memplan.units import GIB, format_bytes, gib, mib

MEASURED, OVER, ESTIMATED, INK, FAINT, GRID = "#2f6f9f", "#b5473c", "#e8a33d", "#222222", "#767676", "#e6e6e6"
"""Blue, red and amber stay apart for the colour-blind, and each has a shape of its own besides."""
_LABEL_PLACES = ((8, 0), (-8, 0), (0, 11), (0, -11), (8, 11), (8, -11), (-8, 11), (-8, -11), (0, 24), (0, -24))
"""Where a point's name may stand, in points from it; the first free place is taken."""


def peak_plot(rows: Sequence[RungResult], path: Path) -> None:
    """Writes a bar of the peak for each rung, the estimate as a diamond, the gate as a line, and both the peak
    and the room up to the gate as numbers. A rung that failed has its status instead of a bar."""
    size, unit = _scale(rows)
    figure, axes = _figure(height=1.75 + 0.42 * max(2, len(rows)))
    gate_bytes = _gate(rows)
    for place, row in enumerate(rows):
        peak_bytes = row.whole_peak_bytes
        if peak_bytes is None:
            _beside(axes, place, 72, row.status, OVER)
        else:
            over = row.status in ("over_gate", "oom")
            color, hatch = (OVER, "///") if over else (MEASURED, None)
            axes.barh(place, size(peak_bytes), height=0.56, color=color, hatch=hatch, edgecolor="white", linewidth=0)
            _beside(axes, place, 72, format_bytes(peak_bytes), INK, weight="bold")
            if row.gate_bytes is not None:
                room_bytes = row.gate_bytes - peak_bytes
                text = f"{format_bytes(abs(room_bytes))} {'over' if room_bytes < 0 else 'free'}"
                _beside(axes, place, 160, text, OVER if over else FAINT)
        if row.estimated_bytes is not None:
            estimate = size(row.estimated_bytes)
            axes.scatter(estimate, place, marker="D", s=38, color=ESTIMATED, edgecolor="white", zorder=4)
    if gate_bytes is not None:
        axes.axvline(size(gate_bytes), color=OVER, linestyle="--", linewidth=1.4, zorder=3)
    axes.set_yticks(range(len(rows)), [_label(row, rows, " ") for row in rows])
    axes.set_ylim(max(2, len(rows)) - 0.4, -0.6)
    known = [
        value for row in rows for value in (row.whole_peak_bytes, row.estimated_bytes, gate_bytes) if value is not None
    ]
    axes.set_xlim(0, 1.05 * size(max(known, default=1)))
    axes.set_xlabel(f"peak allocated [{unit}]")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.tick_params(axis="y", length=0)
    _title(axes, rows, "Peak memory by rung")
    _legend(figure, rows, ("bar", "estimate", "gate"))
    figure.savefig(path)


def throughput_plot(rows: Sequence[RungResult], path: Path) -> None:
    """Writes samples a second against the measured peak, one named point a rung; rungs that failed are listed."""
    size, unit = _scale(rows)
    figure, axes = _figure(height=4.6)
    gate_bytes = _gate(rows)
    points = [
        (row, size(peak_bytes), speed)
        for row in rows
        if (peak_bytes := row.whole_peak_bytes) is not None and (speed := row.samples_per_s) is not None
    ]
    for row, peak, speed in points:
        over = row.status in ("over_gate", "oom")
        color, marker = (OVER, "X") if over else (MEASURED, "o")
        axes.scatter(peak, speed, s=62, color=color, marker=marker, edgecolor="white", zorder=3)
    if gate_bytes is not None:
        axes.axvline(size(gate_bytes), color=OVER, linestyle="--", linewidth=1.4, zorder=2)
    ends = [peak for _, peak, _ in points] + ([size(gate_bytes)] if gate_bytes is not None else [])
    axes.set_xlim(0, 1.15 * max(ends, default=1.0))
    axes.set_ylim(0, 1.2 * max((speed for _, _, speed in points), default=1.0))
    axes.set_xlabel(f"peak allocated [{unit}]")
    axes.set_ylabel("samples a second")
    axes.grid(color=GRID, linewidth=0.8)
    _title(axes, rows, "Throughput against memory")
    _legend(figure, rows, ("point", "gate"))
    failed = [f"{row.rung} ({row.status})" for row in rows if row.whole_peak_bytes is None]
    if failed:
        axes.text(
            0.98, 0.03, "not shown: " + ", ".join(failed), transform=axes.transAxes, ha="right", fontsize=8, color=OVER
        )
    if not points:
        axes.text(0.5, 0.5, "no rung was timed", transform=axes.transAxes, ha="center", color=FAINT)
    _name_points(figure, axes, [(peak, speed, _label(row, rows, " ")) for row, peak, speed in points])
    figure.savefig(path)


def _beside(axes: Any, place: int, points: int, text: str, color: str, weight: str = "normal") -> None:
    """Writes `text` right of the plot, ending `points` from its edge, so that numbers stand under each other."""
    axes.annotate(text, (1, place), xycoords=("axes fraction", "data"), xytext=(points, 0), ha="right", va="center",
                  textcoords="offset points", fontsize=9, color=color, weight=weight)  # fmt: skip


def _gate(rows: Sequence[RungResult]) -> int | None:
    return next((row.gate_bytes for row in rows if row.gate_bytes is not None), None)


def _scale(rows: Sequence[RungResult]) -> tuple[Any, str]:
    known = [
        value
        for row in rows
        for value in (row.whole_peak_bytes, row.estimated_bytes, row.gate_bytes)
        if value is not None
    ]
    return (gib, "GiB") if max(known, default=0) >= GIB else (mib, "MiB")


def _label(row: RungResult, rows: Sequence[RungResult], glue: str) -> str:
    """The rung, and whatever else tells it from the others."""
    parts = [row.rung]
    if len({other.model for other in rows}) > 1:
        parts.append(row.model)
    for name in ("loss", "precision"):
        if len({other.step.get(name) for other in rows}) > 1:
            parts.append(str(row.step.get(name)))
    return glue.join(parts)


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, height), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)
    return figure, axes


def _title(axes: Any, rows: Sequence[RungResult], title: str) -> None:
    common = [", ".join(sorted({row.model for row in rows}))]
    for name in ("seq", "precision", "optimizer"):
        values = {row.step.get(name) for row in rows}
        if len(values) == 1:
            common.append(f"seq {values.pop()}" if name == "seq" else str(values.pop()))
    axes.set_title(f"{title}\n", loc="left", fontsize=12, weight="bold", color=INK)
    axes.annotate(", ".join(common), (0, 1), xycoords="axes fraction", xytext=(0, 8), textcoords="offset points",
                  fontsize=9, color=FAINT)  # fmt: skip


def _legend(figure: Any, rows: Sequence[RungResult], kinds: tuple[str, ...]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    source = " or ".join(sorted({row.source for row in rows})) or "measured"
    statuses = {row.status for row in rows if row.whole_peak_bytes is not None}
    words = [word for status, word in (("over_gate", "over the gate"), ("oom", "out of memory")) if status in statuses]
    over = f"{source}, {' or '.join(words)}"
    handles: list[Any] = []
    if "bar" in kinds:
        handles.append(Patch(facecolor=MEASURED, label=source))
        handles += [Patch(facecolor=OVER, hatch="///", edgecolor="white", label=over)] * bool(words)
    if "point" in kinds:
        handles.append(Line2D([], [], marker="o", linestyle="", color=MEASURED, label=source))
        handles += [Line2D([], [], marker="X", linestyle="", color=OVER, label=over)] * bool(words)
    if "estimate" in kinds and any(row.estimated_bytes is not None for row in rows):
        handles.append(Line2D([], [], marker="D", linestyle="", color=ESTIMATED, label="estimated"))
    gate_bytes = _gate(rows)
    if gate_bytes is not None:
        handles.append(Line2D([], [], linestyle="--", color=OVER, label=f"gate {format_bytes(gate_bytes)}"))
    figure.legend(handles=handles, frameon=False, fontsize=9, loc="outside lower center", ncols=len(handles))


def _name_points(figure: Any, axes: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Writes each point's name at the first place where it touches neither a point nor another name."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    centres = [axes.transData.transform((x, y)) for x, y, _ in points]
    taken = [Bbox.from_bounds(x - 9, y - 9, 18, 18) for x, y in centres]
    inside = axes.get_window_extent(renderer)
    for (x, y, name), own in zip(points, list(taken), strict=True):
        others = [box for box in taken if box is not own]
        for place in _LABEL_PLACES:
            text = _name(axes, x, y, name, place)
            box = text.get_window_extent(renderer)
            if inside.x0 <= box.x0 and box.x1 <= inside.x1 and not any(box.overlaps(other) for other in others):
                break
            text.remove()
        else:
            box = _name(axes, x, y, name, _LABEL_PLACES[0]).get_window_extent(renderer)
        taken.append(box)


def _name(axes: Any, x: float, y: float, name: str, place: tuple[int, int]) -> Any:
    right, up = place
    return axes.annotate(
        name,
        (x, y),
        xytext=place,
        textcoords="offset points",
        fontsize=9,
        color=INK,
        ha="left" if right > 0 else "right" if right < 0 else "center",
        va="bottom" if up > 0 else "top" if up < 0 else "center",
    )
