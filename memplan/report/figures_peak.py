"""Pictures of memory: how high each rung reaches and what it is made of, and how high each phase of it reaches."""

from collections.abc import Sequence
from typing import Any

from memplan.report.figures import (
    ALARM,
    BESIDE_POINTS,
    BLUE,
    CATEGORY_LOOKS,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PAPER,
    RED,
    SHEET_INCHES,
    SKY,
    Picture,
    beside,
    drawn,
    gate_line,
    gate_of,
    legend,
    list_sheet,
    scale_of,
    spoken,
)
from memplan.report.outside import DRAWN_CHARS, for_plot, visible
from memplan.report.repeats import Repeats
from memplan.units import format_bytes

OVER = ("over_gate", "oom")
"""Statuses whose whole peaks are drawn as too high."""
PEAK_CAPTION = (
    "What each rung needs at its largest moment, by category where that was told; what is free up to the gate."
)
PHASES_CAPTION = "How high each phase of a step reaches; at the right the highest one."
SEEN_FRAC = 0.002
"""Share of a peak below which a category cannot be seen, and is not in the legend."""
PHASE_LOOKS = {
    "init": ("s", FAINT),
    "forward": ("o", SKY),
    "recompute": ("P", GREEN),
    "loss": ("D", RED),
    "backward": ("^", BLUE),
    "optimizer": ("X", ORANGE),
}
"""Marker and colour of each phase, in the order of a step."""


def peak_picture(rungs: Sequence[Repeats], inches: float = SHEET_INCHES) -> Picture:
    """A bar of the peak for each rung, by category where it was told, the estimate as a diamond, the gate as a line,
    and both the peak and the room up to the gate as numbers. Of a rung that failed the largest moment before is an
    empty bar."""
    rungs = drawn(rungs)
    rows = [rung.row for rung in rungs]
    gate_bytes = gate_of(rows)
    sizes = [
        size
        for rung in rungs
        for size in (rung.peak_bytes, rung.gated_bytes, rung.row.estimated_bytes, _until(rung), rung.row.gate_bytes)
        if size is not None
    ]
    scale = scale_of(sizes)
    figure, axes = list_sheet(rungs, "Peak memory by rung", scale, "peak allocated", inches)
    for place, rung in enumerate(rungs):
        _bar(axes, place, rung, scale)
        row = rung.row
        if row.estimated_bytes is not None:
            axes.scatter(scale(row.estimated_bytes), place, marker="D", s=34, color=INK, edgecolor=PAPER, zorder=5)
        if gate_bytes is None and row.gate_bytes is not None:
            axes.plot([scale(row.gate_bytes)] * 2, [place - 0.4, place + 0.4], color=RED, linestyle="--", zorder=4)
    axes.set_xlim(0, 1.05 * scale(max([1, *sizes])))
    legend(figure, [*_peak_handles(rungs), *gate_line(axes, scale, gate_bytes)])
    said = "; ".join(_said(rung, rungs) for rung in rungs)
    gate = "" if gate_bytes is None else f" The gate is at {format_bytes(gate_bytes)}."
    return Picture(
        name="peak",
        title="Peak memory by rung",
        caption=PEAK_CAPTION,
        figure=figure,
        alt=f"A bar for each rung: {said}.{gate}",
    )


def phases_picture(rungs: Sequence[Repeats], inches: float = SHEET_INCHES) -> Picture | None:
    """The peak of each phase as a mark on the rung's line; None where no phase was told."""
    rungs = drawn([rung for rung in rungs if rung.row.phase_peaks])
    if not rungs:
        return None
    from matplotlib.lines import Line2D

    gate_bytes = gate_of([rung.row for rung in rungs])
    scale = scale_of([gate_bytes, *(size for rung in rungs for size in rung.row.phase_peaks.values())])
    figure, axes = list_sheet(rungs, "Peak memory by phase", scale, "largest allocated in the phase", inches)
    told, said = [], []
    for place, rung in enumerate(rungs):
        peaks = {name: rung.row.phase_peaks[name] for name in PHASE_LOOKS if name in rung.row.phase_peaks}
        if not peaks:
            continue
        ends = scale(min(peaks.values())), scale(max(peaks.values()))
        axes.plot(ends, [place, place], color=FAINT, linewidth=0.9, zorder=2)
        for lane, (name, (marker, color)) in enumerate(PHASE_LOOKS.items()):
            if name not in peaks:
                continue
            height = place + 0.1 * (lane - len(PHASE_LOOKS) / 2 + 0.5)
            axes.scatter(
                scale(peaks[name]), height, marker=marker, s=46, color=color, edgecolor=PAPER, linewidth=0.7, zorder=4
            )
        largest = max(peaks, key=lambda name: peaks[name])
        beside(axes, place, 84, largest, weight="bold")
        beside(axes, place, BESIDE_POINTS, format_bytes(peaks[largest]))
        told += [name for name in peaks if name not in told]
        said.append(f"{spoken(rung, rungs)} peaks in {largest} with {format_bytes(peaks[largest])}")
    axes.set_xlim(left=0)
    handles = [
        Line2D([], [], marker=PHASE_LOOKS[name][0], linestyle="", color=PHASE_LOOKS[name][1], label=name)
        for name in PHASE_LOOKS
        if name in told
    ]
    legend(figure, [*handles, *gate_line(axes, scale, gate_bytes)])
    alt = f"A mark for each phase on the line of each rung: {'; '.join(said)}."
    return Picture(name="phases", title="Peak memory by phase", caption=PHASES_CAPTION, figure=figure, alt=alt)


def _bar(axes: Any, place: int, rung: Repeats, scale: Any) -> None:
    row, peak_bytes = rung.row, rung.peak_bytes
    over = row.kind in OVER or rung.worst_verdict == "fail"
    if peak_bytes is None:
        until_bytes = _until(rung)
        beside(axes, place, BESIDE_POINTS, for_plot(row.kind, 16), FAINT if row.kind == "skipped" else ALARM)
        if until_bytes is not None:
            axes.barh(place, scale(until_bytes), height=0.56, facecolor="none", edgecolor=RED, linestyle=":")
            beside(axes, place, 72, f"≥ {format_bytes(until_bytes)}")
        return
    if row.breakdown and sum(row.breakdown.values()):
        start = 0.0
        for name, (color, hatch) in CATEGORY_LOOKS.items():
            width = scale(row.breakdown.get(name, 0))
            if width:
                axes.barh(place, width, left=start, height=0.56, color=color, hatch=hatch, edgecolor=PAPER, linewidth=0)
            start += width
        if over:
            axes.barh(place, start, height=0.56, facecolor="none", edgecolor=RED, linewidth=1.6, zorder=4)
    else:
        color, hatch = (RED, "///") if over else (BLUE, "")
        axes.barh(place, scale(peak_bytes), height=0.56, color=color, hatch=hatch, edgecolor=PAPER, linewidth=0)
    gated_bytes, room_bytes = rung.gated_bytes, rung.headroom_bytes
    if gated_bytes is not None and gated_bytes > peak_bytes:
        axes.barh(place, scale(gated_bytes - peak_bytes), left=scale(peak_bytes), height=0.3, facecolor="none",
                  edgecolor=FAINT, linewidth=1)  # fmt: skip
    beside(axes, place, 72, format_bytes(peak_bytes), weight="bold")
    if room_bytes is not None:
        text = f"{format_bytes(abs(room_bytes))} {'over' if room_bytes < 0 else 'free'}"
        beside(axes, place, BESIDE_POINTS, text, ALARM if room_bytes < 0 else FAINT)


def _until(rung: Repeats) -> int | None:
    """The largest moment that a rung reached before it failed: less than it needs."""
    if rung.peak_bytes is not None or rung.row.kind == "skipped":
        return None
    failure = rung.row.failure
    known = [rung.row.peak_allocated_bytes, None if failure is None else failure.allocated_bytes]
    return max((size for size in known if size is not None), default=None)


def _said(rung: Repeats, rungs: Sequence[Repeats]) -> str:
    name, room_bytes, until_bytes = spoken(rung, rungs), rung.headroom_bytes, _until(rung)
    if rung.peak_bytes is None:
        return f"{name} {visible(rung.status, DRAWN_CHARS)}" + (
            "" if until_bytes is None else f" above {format_bytes(until_bytes)}"
        )
    room = "" if room_bytes is None else f", {format_bytes(abs(room_bytes))} {'over' if room_bytes < 0 else 'free'}"
    return f"{name} {format_bytes(rung.peak_bytes)}{room}"


def _peak_handles(rungs: Sequence[Repeats]) -> list[Any]:
    """Entries of the legend: what the bars say, and which witness spoke."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = [rung.row for rung in rungs if rung.peak_bytes is not None]
    source = " or ".join(sorted({row.source for row in rows})) or "measured"
    categories = {
        name for row in rows for name, size in row.breakdown.items() if size > SEEN_FRAC * sum(row.breakdown.values())
    }
    handles: list[Any] = [
        Patch(facecolor=color, hatch=hatch, edgecolor=PAPER, linewidth=0, label=name)
        for name, (color, hatch) in CATEGORY_LOOKS.items()
        if name in categories
    ]
    plain = [row for row in rows if not sum(row.breakdown.values())]
    if plain or not rows:
        handles.append(Patch(facecolor=BLUE, label=source))
    kinds = {row.kind for row in rows}
    words = [word for kind, word in zip(OVER, ("over the gate", "out of memory"), strict=True) if kind in kinds]
    if words and plain:
        label = f"{source}, {' or '.join(words)}"
        handles.append(Patch(facecolor=RED, hatch="///", edgecolor=PAPER, linewidth=0, label=label))
    elif words:
        handles.append(Patch(facecolor="none", edgecolor=RED, linewidth=1.6, label=f"{source}, {' or '.join(words)}"))
    beyond = {row.gate_on for row in rows if row.gate_on != "allocated"}
    if beyond:
        handles.append(Patch(facecolor="none", edgecolor=FAINT, label=f"{' or '.join(sorted(beyond))} beyond it"))
    if any(_until(rung) is not None for rung in rungs):
        handles.append(Patch(facecolor="none", edgecolor=RED, linestyle=":", label="reached before it failed"))
    if any(rung.row.estimated_bytes is not None for rung in rungs):
        handles.append(Line2D([], [], marker="D", linestyle="", color=INK, label="estimated"))
    return handles
