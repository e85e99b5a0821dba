"""A picture of a step: allocated bytes over its events, stacked by category, the gate drawn in."""

from collections.abc import Sequence
from pathlib import Path

from memplan.errors import MemplanError
from memplan.record import TracedSteps
from memplan.report.plots import FAINT, INK, OVER
from memplan.units import GIB, format_bytes, gib, mib

COLORS = {
    "params": "#1b4f72",
    "buffers": "#7f8c8d",
    "optimizer": "#2e86c1",
    "other": "#b2babb",
    "grads": "#a9cce3",
    "activations": "#e8a33d",
    "logits": "#b5473c",
    "temps": "#f5d9a8",
    "comm": "#6c3483",
}
"""What stays is blue, what a batch brings is amber and red; neighbours differ in lightness for the colour-blind."""


LABEL_WIDTH_FRAC = 0.075
"""Share of the axis that a phase's name takes."""


def timeline_plot(traced: TracedSteps, path: Path, *, title: str, gate_bytes: int | None, gate_name: str) -> None:
    """Writes the picture to `path`; MemplanError where it cannot be written or its ending names no kind of picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timeline, peak = traced.timeline, traced.steady.peak_allocated_bytes
    scale, unit = (gib, "GiB") if max(peak, gate_bytes or 0) >= GIB else (mib, "MiB")
    figure = Figure(figsize=(9.6, 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [name for name in COLORS if name in timeline.bytes_by_category]
    series = [[scale(value) for value in timeline.bytes_by_category[name]] for name in names]
    points = range(len(series[0]) if series else 0)
    axes.stackplot(points, series, labels=names, colors=[COLORS[name] for name in names], linewidth=0)
    top = scale(max(peak, gate_bytes or 0)) * 1.12
    if gate_bytes is not None:
        axes.axhline(scale(gate_bytes), color=OVER, linestyle="--", linewidth=1.4)
        text = f"{gate_name}: {format_bytes(gate_bytes)}"
        axes.annotate(text, (0, scale(gate_bytes)), (4, 3), textcoords="offset points", color=OVER, fontsize=8)
    for start, _ in timeline.phases:
        axes.axvline(start, color=FAINT, linewidth=0.6, linestyle=":")
    for start, phase in labelled(timeline.phases, len(points)):
        axes.annotate(phase, (start, top), (3, -9), textcoords="offset points", color=FAINT, fontsize=7.5)
    axes.set_xlim(0, max(1, len(points) - 1))
    axes.set_ylim(0, top)
    axes.set_xticks([])
    axes.set_xlabel("allocations and frees of one step, in order")
    axes.set_ylabel(f"allocated [{unit}]")
    peak_text = f"peak {format_bytes(peak)} in {traced.steady.phase}"
    axes.set_title(f"{title} traced for {traced.device.name}: {peak_text}", loc="left", fontsize=10, color=INK)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8, reverse=True)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise MemplanError(f"{path} cannot be written: {error}.", "Name a file that ends in .png or .svg.") from None


def labelled(phases: Sequence[tuple[int, str]], num_points: int) -> list[tuple[int, str]]:
    """The phases whose names find room, the longest first, so that no name stands over another phase's stretch."""
    width = num_points * LABEL_WIDTH_FRAC
    ends = [start for start, _ in phases[1:]] + [num_points]
    longest = sorted(zip(phases, ends, strict=False), key=lambda each: each[0][0] - each[1])
    found: list[tuple[int, str]] = []
    for (start, phase), _ in longest:
        if start + width <= num_points and all(abs(start - other) >= width for other, _ in found):
            found.append((start, phase))
    return sorted(found)
