"""A picture of a step: allocated bytes over its events, stacked by category, the gate drawn in."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplan.errors import MemplanError
from memplan.record import TracedSteps
from memplan.record.memory import SCHEMA_VERSION
from memplan.record.trace import Timeline
from memplan.report.figures import (
    CATEGORY_LOOKS,
    FAINT,
    INK,
    PAPER,
    RED,
    SHEET_INCHES,
    Picture,
    is_narrow,
    legend,
    save,
    scale_of,
    sheet,
)
from memplan.report.outside import for_plot
from memplan.units import format_bytes

TIMELINE_FILE = "timeline.json"
"""A step's timeline in a folder of results: the ladder's rows carry none, and a page is made without tracing."""
CAPTION = "What is alive from the first allocation of a step to its last free, as the trace tells it."
MOST_POINTS = 500
"""Points of a picture, which is about as many as can be told apart in print."""
LABEL_WIDTH_FRAC = 0.075
"""Share of the axis that a phase's name takes on a wide sheet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStory:
    """A traced step as a picture tells it."""

    title: str
    """What was traced: model and rung."""
    device: str
    """Whose rules held."""
    peak_allocated_bytes: int
    """Largest allocated bytes of the step."""
    phase: str
    """Phase in which they are."""
    gate_bytes: int | None
    """What the peak is held against."""
    gate_name: str
    """What that is: `gate`, or a card's name."""
    timeline: Timeline
    """The step, moment by moment."""

    @staticmethod
    def of(traced: TracedSteps, *, title: str, gate_bytes: int | None, gate_name: str) -> "StepStory":
        """The story of a later step of `traced`."""
        return StepStory(
            title=title,
            device=traced.device.name,
            peak_allocated_bytes=traced.steady.peak_allocated_bytes,
            phase=traced.steady.phase,
            gate_bytes=gate_bytes,
            gate_name=gate_name,
            timeline=traced.timeline,
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"schema_version": SCHEMA_VERSION, "source": "traced"} | dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "StepStory":
        """The story that `to_dict` described; KeyError, TypeError or ValueError where `data` is none."""
        timeline = Timeline(
            bytes_by_category={
                str(name): tuple(int(size) for size in sizes)
                for name, sizes in data["timeline"]["bytes_by_category"].items()
            },
            phases=tuple((int(start), str(name)) for start, name in data["timeline"]["phases"]),
        )
        known = {field.name: data[field.name] for field in dataclasses.fields(StepStory)}
        return StepStory(**known | {"timeline": timeline})


def read_story(path: Path) -> StepStory:
    """The story in the file at `path`; MemplanError where it holds none."""
    try:
        return StepStory.from_dict(json.loads(path.read_text(encoding="utf-8", errors="replace")))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise MemplanError(
            f"{path} is not the timeline of a step.", "Write it by memplan trace --plot timeline.json."
        ) from None


def timeline_plot(traced: TracedSteps, path: Path, *, title: str, gate_bytes: int | None, gate_name: str) -> None:
    """Writes the picture to `path`, or its numbers where that ends in .json; MemplanError where it cannot be written or
    its ending names no kind of picture."""
    story = StepStory.of(traced, title=title, gate_bytes=gate_bytes, gate_name=gate_name)
    try:
        if path.suffix == ".json":
            path.write_text(json.dumps(story.to_dict()) + "\n", encoding="utf-8")
        else:
            save(timeline_picture(story).figure, path)
    except (OSError, ValueError) as error:
        raise MemplanError(
            f"{path} cannot be written: {error}.", "Name a file that ends in .png, .svg or .json."
        ) from None


def timeline_picture(story: StepStory, inches: float = SHEET_INCHES) -> Picture:
    """Allocated bytes over the moments of a step, stacked by category."""
    from matplotlib.patches import Patch

    timeline, peak, gate_bytes = thinned(story.timeline), story.peak_allocated_bytes, story.gate_bytes
    scale = scale_of([peak, gate_bytes])
    figure, axes = sheet(5.2, inches)
    names = [name for name in CATEGORY_LOOKS if any(timeline.bytes_by_category.get(name, ()))]
    series = [[scale(value) for value in timeline.bytes_by_category[name]] for name in names]
    num_points = len(series[0]) if series else 0
    if series:
        stacks = axes.stackplot(range(num_points), series, colors=[CATEGORY_LOOKS[name][0] for name in names])
        for name, stack in zip(names, stacks, strict=True):
            stack.set(hatch=CATEGORY_LOOKS[name][1], edgecolor=PAPER, linewidth=0)
        totals = [sum(sizes) for sizes in zip(*series, strict=True)]
        highest = max(range(num_points), key=totals.__getitem__)
        axes.scatter(highest, totals[highest], marker="v", s=42, color=INK, zorder=4)
        side, place = ("left", 8) if highest < num_points / 2 else ("right", -8)
        axes.annotate(
            f"peak {format_bytes(peak)}",
            (highest, totals[highest]),
            (place, 2),
            ha=side,
            color=INK,
            textcoords="offset points",
            fontsize=8,
        )
    top = scale(max(peak, gate_bytes or 0)) * 1.12 or 1.0
    if gate_bytes is not None:
        axes.axhline(scale(gate_bytes), color=RED, linestyle="--", linewidth=1.4)
        text = for_plot(f"{story.gate_name}: {format_bytes(gate_bytes)}")
        axes.annotate(text, (0, scale(gate_bytes)), (4, 3), textcoords="offset points", color=INK, fontsize=8)
    for start, _ in timeline.phases:
        axes.axvline(start, color=FAINT, linewidth=0.6, linestyle=":", zorder=0.5)
    for start, phase in labelled(timeline.phases, num_points, LABEL_WIDTH_FRAC * SHEET_INCHES / inches):
        axes.annotate(for_plot(phase), (start, top), (3, -9), textcoords="offset points", color=FAINT, fontsize=7.5)
    axes.set_xlim(0, max(1, num_points - 1))
    axes.set_ylim(0, top)
    axes.set_xticks([])
    axes.set_xlabel("allocations and frees of one step, in order")
    axes.set_ylabel(f"allocated [{scale.unit}]")
    said = f"{story.title} traced for {story.device}: peak {format_bytes(peak)} in {story.phase}"
    axes.set_title(for_plot(said, 52 if is_narrow(figure) else 100), loc="left", fontsize=10, color=INK)
    legend(
        figure,
        [
            Patch(facecolor=CATEGORY_LOOKS[name][0], hatch=CATEGORY_LOOKS[name][1], edgecolor=PAPER, linewidth=0,
                  label=name)
            for name in names
        ],
    )  # fmt: skip
    alt = f"Allocated bytes over one step, stacked by {', '.join(names)}. {said}."
    return Picture(name="timeline", title="One step, moment by moment", caption=CAPTION, figure=figure, alt=alt)


def thinned(timeline: Timeline, most: int = MOST_POINTS) -> Timeline:
    """`timeline` in at most `most` points: of each stretch its highest moment stays."""
    sizes = list(timeline.bytes_by_category.values())
    totals = [sum(moment) for moment in zip(*sizes, strict=True)]
    width = -(-len(totals) // most)
    if width <= 1:
        return timeline
    kept = [
        max(range(start, min(start + width, len(totals))), key=totals.__getitem__)
        for start in range(0, len(totals), width)
    ]
    return Timeline(
        bytes_by_category={
            name: tuple(values[index] for index in kept) for name, values in timeline.bytes_by_category.items()
        },
        phases=tuple((start // width, name) for start, name in timeline.phases),
    )


def labelled(
    phases: Sequence[tuple[int, str]], num_points: int, width_frac: float = LABEL_WIDTH_FRAC
) -> list[tuple[int, str]]:
    """The phases whose names find room, the longest first, so that no name stands over another phase's stretch."""
    width = num_points * width_frac
    ends = [start for start, _ in phases[1:]] + [num_points]
    longest = sorted(zip(phases, ends, strict=False), key=lambda each: each[0][0] - each[1])
    found: list[tuple[int, str]] = []
    for (start, phase), _ in longest:
        if start + width <= num_points and all(abs(start - other) >= width for other, _ in found):
            found.append((start, phase))
    return sorted(found)
