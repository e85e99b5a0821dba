"""The picture of the witnesses: estimated, traced and measured bytes side by side, and how far off they are."""

from collections.abc import Sequence

from memplan.report.figures import (
    BLUE,
    FAINT,
    ORANGE,
    PAPER,
    SHEET_INCHES,
    SKY,
    Picture,
    beside,
    drawn,
    legend,
    list_sheet,
    scale_of,
    spoken,
)
from memplan.report.repeats import Repeats
from memplan.units import format_percent

CAPTION = "The peak by each witness, and how far off the others are from what ran."
LOOKS = {"estimated": (ORANGE, "//"), "traced": (SKY, ".."), "peak": (BLUE, "")}
"""Colour and hatch of each witness, in the order in which they stand under each other."""


def witnesses(rung: Repeats) -> dict[str, int]:
    """What each witness says of the peak; of a simulated rung the peak is the trace's own word."""
    row = rung.row
    said = {
        "estimated": row.estimated_bytes,
        "traced": None if row.source == "simulated" else row.traced_bytes,
        "peak": rung.peak_bytes,
    }
    return {name: size for name, size in said.items() if size is not None}


def agreement_picture(rungs: Sequence[Repeats], inches: float = SHEET_INCHES) -> Picture | None:
    """A bar for each witness of a rung; None where no rung has a peak and another witness."""
    from matplotlib.patches import Patch

    rungs = drawn([rung for rung in rungs if len(witnesses(rung)) > 1 and rung.peak_bytes])
    if not rungs:
        return None
    scale = scale_of([size for rung in rungs for size in witnesses(rung).values()])
    figure, axes = list_sheet(rungs, "What each witness said", scale, "peak allocated", inches)
    told, said = [], []
    for place, rung in enumerate(rungs):
        sizes = witnesses(rung)
        height = 0.66 / len(sizes)
        words = []
        for number, (name, size) in enumerate(sizes.items()):
            color, hatch = LOOKS[name]
            middle = place + (number - (len(sizes) - 1) / 2) * height
            axes.barh(middle, scale(size), height=height, color=color, hatch=hatch, edgecolor=PAPER, linewidth=0)
            if name != "peak":
                words.append(f"{name} {format_percent(size / sizes['peak'] - 1)}")
            told += [name] if name not in told else []
        beside(axes, place, 168, "\n".join(words), FAINT)
        said.append(f"{spoken(rung, rungs)}: {', '.join(words)}")
    sources = " or ".join(sorted({rung.row.source for rung in rungs}))
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor=PAPER, linewidth=0, label=sources if name == "peak" else name)
        for name, (color, hatch) in LOOKS.items()
        if name in told
    ]
    legend(figure, handles)
    alt = f"Bars of each witness side by side; how far each is off what was {sources}: {'; '.join(said)}."
    return Picture(name="agreement", title="What each witness said", caption=CAPTION, figure=figure, alt=alt)
