"""Two pictures of a ladder: how high each rung reaches, and what it gives for it.

Figures are objects of their own on the Agg canvas; nothing global is touched, no display is needed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memplan.record import RungResult
from memplan.units import GIB, format_bytes, gib, mib

MEASURED, ESTIMATED, OVER, GATE, INK, FAINT = "#2f6f9f", "#e08a1e", "#b5473c", "#b5473c", "#222222", "#8a8a8a"
"""Colours that stay apart for the colour-blind: blue, orange, red; each also has a shape of its own."""


def peak_plot(rows: Sequence[RungResult], path: Path) -> None:
    """Writes a bar of the measured peak for each rung, the estimate as a diamond on it, the gate as a line, and the
    room up to the gate as a number. A rung that failed has no bar but its status."""
    size, unit = _scale(rows)
    figure, axes = _figure(width=max(6.4, 1.1 * len(rows) + 2.4))
    gate_bytes = next((row.gate_bytes for row in rows if row.gate_bytes is not None), None)
    peaks = [_peak(row) for row in rows]
    estimates = [row.estimated_bytes for row in rows]
    top = max([size(value) for value in [*peaks, *estimates, gate_bytes] if value is not None], default=1.0)
    for place, (row, peak_bytes) in enumerate(zip(rows, peaks, strict=True)):
        if peak_bytes is None:
            axes.text(place, 0.02 * top, row.status.upper(), ha="center", va="bottom", color=OVER, weight="bold")
            continue
        over = row.status == "over_gate"
        axes.bar(place, size(peak_bytes), width=0.56, color=OVER if over else MEASURED, hatch="//" if over else None,
                 edgecolor="white", linewidth=0, zorder=2)  # fmt: skip
        axes.text(place, size(peak_bytes) / 2, format_bytes(peak_bytes), ha="center", va="center", color="white",
                  fontsize=9, weight="bold", zorder=4)  # fmt: skip
        if row.gate_bytes is not None:
            room = row.gate_bytes - peak_bytes
            text = f"{format_bytes(room)} free" if room >= 0 else f"{format_bytes(-room)} over"
            axes.annotate(text, (place, size(peak_bytes)), xytext=(0, 7), textcoords="offset points", ha="center",
                          fontsize=8, color=FAINT if room >= 0 else OVER,
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0}, zorder=5)  # fmt: skip
    known = [(place, size(value)) for place, value in enumerate(estimates) if value is not None]
    if known:
        axes.scatter(*zip(*known, strict=True), marker="D", s=42, color=ESTIMATED, edgecolor="white", zorder=6)
    if gate_bytes is not None:
        axes.axhline(size(gate_bytes), color=GATE, linestyle="--", linewidth=1.4, zorder=3)
    axes.set_xticks(range(len(rows)), [_label(row, rows) for row in rows])
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylim(0, top * 1.14)
    axes.set_ylabel(f"peak allocated [{unit}]")
    _titled(axes, rows, "Peak memory by rung")
    _legend(axes, gate_bytes, any(row.status == "over_gate" for row in rows), bool(known))
    figure.savefig(path)


def throughput_plot(rows: Sequence[RungResult], path: Path) -> None:
    """Writes samples a second against the measured peak, one point a rung; rungs that failed are listed."""
    size, unit = _scale(rows)
    figure, axes = _figure(width=7.2)
    points = [(row, peak, row.samples_per_s) for row in rows if (peak := _peak(row)) is not None and row.samples_per_s]
    for row, peak_bytes, speed in points:
        over = row.status == "over_gate"
        axes.scatter(size(peak_bytes), speed, s=64, color=OVER if over else MEASURED, marker="X" if over else "o",
                     edgecolor="white", zorder=3)  # fmt: skip
        axes.annotate(_label(row, rows).replace("\n", " "), (size(peak_bytes), speed), xytext=(7, 6),
                      textcoords="offset points", fontsize=9, color=INK)  # fmt: skip
    gate_bytes = next((row.gate_bytes for row in rows if row.gate_bytes is not None), None)
    if points:
        right = max(size(peak_bytes) for _, peak_bytes, _ in points)
        if gate_bytes is not None:
            right = max(right, size(gate_bytes))
            axes.axvline(size(gate_bytes), color=GATE, linestyle="--", linewidth=1.4, zorder=2)
            axes.annotate(f"gate {format_bytes(gate_bytes)}", (size(gate_bytes), 0), xytext=(-5, 5), rotation=90,
                          textcoords="offset points", ha="right", va="bottom", fontsize=9, color=GATE)  # fmt: skip
        axes.set_xlim(0, right * 1.14)
        axes.set_ylim(0, max(speed for _, _, speed in points) * 1.2)
    else:
        axes.text(0.5, 0.5, "no rung was timed", transform=axes.transAxes, ha="center", color=FAINT)
        axes.set_xticks([])
        axes.set_yticks([])
    failed = [f"{row.rung} {row.status}" for row in rows if _peak(row) is None]
    if failed:
        axes.text(
            0.02, 0.97, "not shown: " + ", ".join(failed), transform=axes.transAxes, va="top", fontsize=8, color=OVER
        )
    axes.set_xlabel(f"peak allocated [{unit}]")
    axes.set_ylabel("samples a second")
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    _titled(axes, rows, "Throughput against memory")
    figure.savefig(path)


def _peak(row: RungResult) -> int | None:
    return row.peak_allocated_bytes if row.status in ("ok", "over_gate") else None


def _scale(rows: Sequence[RungResult]) -> tuple[Any, str]:
    largest = max(
        [value for row in rows for value in (_peak(row), row.estimated_bytes, row.gate_bytes) if value], default=0
    )
    return (gib, "GiB") if largest >= GIB else (mib, "MiB")


def _label(row: RungResult, rows: Sequence[RungResult]) -> str:
    """The rung, and below it whatever else tells it from the others."""
    parts = [row.rung]
    if len({other.model for other in rows}) > 1:
        parts.append(row.model)
    for name in ("loss", "precision"):
        if len({other.step.get(name) for other in rows}) > 1:
            parts.append(str(row.step.get(name)))
    return "\n".join(parts)


def _figure(width: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.4), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)
    return figure, axes


def _titled(axes: Any, rows: Sequence[RungResult], title: str) -> None:
    models = sorted({row.model for row in rows})
    common = [", ".join(models)]
    for name in ("seq", "precision", "optimizer"):
        values = {row.step.get(name) for row in rows}
        if len(values) == 1:
            value = values.pop()
            common.append(f"seq {value}" if name == "seq" else str(value))
    axes.set_title(f"{title}\n", loc="left", fontsize=12, weight="bold", color=INK)
    axes.text(0, 1.025, ", ".join(common), transform=axes.transAxes, fontsize=9, color=FAINT)


def _legend(axes: Any, gate_bytes: int | None, any_over: bool, any_estimate: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=MEASURED, label="measured")]
    if any_over:
        handles.append(Patch(facecolor=OVER, hatch="//", edgecolor="white", label="measured, over the gate"))
    if any_estimate:
        handles.append(Line2D([], [], marker="D", linestyle="", color=ESTIMATED, label="estimated"))
    if gate_bytes is not None:
        handles.append(Line2D([], [], linestyle="--", color=GATE, label=f"gate {format_bytes(gate_bytes)}"))
    axes.legend(
        handles=handles, frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, -0.3), ncols=len(handles)
    )
