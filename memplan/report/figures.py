"""What all pictures share: colours, a sheet, the scale, names of rungs, and how a figure becomes a file.

Figures are objects of their own on the Agg canvas; nothing global is touched, no display is needed.
"""

import html
import io
import itertools
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplan.record import RungResult
from memplan.report.outside import DRAWN_CHARS, for_plot, visible
from memplan.report.repeats import Repeats, worst_first
from memplan.units import GIB, format_bytes, gib, mib

INK, FAINT, GRID, PAPER, ALARM = "#222222", "#6f6f6f", "#e6e6e6", "#ffffff", "#b23a00"
"""Words, quiet words, lines behind, the sheet, and words of what failed. A page changes them for the dark."""
BLUE, SKY, GREEN, ORANGE, RED, YELLOW, PURPLE, GREY, PALE = (
    "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#f0e442", "#cc79a7", "#767676", "#bdbdbd",
)  # fmt: skip
"""Okabe and Ito's colours, which stay apart for the colour-blind, and two greys. Each use has a shape or a hatch of its
own besides."""
CATEGORY_LOOKS = {
    "params": (BLUE, ""),
    "buffers": (GREY, ""),
    "optimizer": (SKY, "//"),
    "other": (PALE, "xx"),
    "grads": (GREEN, "\\\\"),
    "activations": (ORANGE, ""),
    "logits": (RED, "..."),
    "temps": (YELLOW, "--"),
    "comm": (PURPLE, "++"),
}
"""Colour and hatch of each category, in the order in which they are stacked: what stays, then what a batch brings."""
SHEET_INCHES = 8.4
"""Width of a picture."""
PHONE_INCHES = 4.8
"""Width of a picture that a phone shows: its letters stay as large as those of the page's tables."""
PHONE_NAME_CHARS = 20
"""Characters of a name that stands above its bar, beside the numbers."""
BESIDE_POINTS = 160
"""Room for numbers right of a plot."""
MOST_ALT_CHARS = 4000
"""Characters of the words beside a picture."""
MOST_DRAWN = 40
"""Rungs that one picture shows; the others stand in the table."""
VARIABLES = {INK: "--ink", FAINT: "--faint", GRID: "--grid", PAPER: "--paper", ALARM: "--alarm"}
"""Colours that a page may change, and the names under which it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure with what it says."""

    name: str
    """Stem of its file."""
    title: str
    """What it is, in a few words."""
    caption: str
    """How to read it, in a sentence."""
    alt: str
    """What is to be seen, for those who cannot."""
    figure: Any
    """Matplotlib's figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The unit of an axis of bytes."""

    unit: str
    """GiB or MiB."""

    def __call__(self, num_bytes: int) -> float:
        """`num_bytes` in it."""
        return gib(num_bytes) if self.unit == "GiB" else mib(num_bytes)


def scale_of(sizes: Iterable[int | None]) -> Scale:
    """The scale on which the largest of `sizes` reads well."""
    return Scale(unit="GiB" if max((size for size in sizes if size is not None), default=0) >= GIB else "MiB")


def drawn(rungs: Sequence[Repeats]) -> list[Repeats]:
    """The rungs that a picture has room for, the worst ones, in their order."""
    kept = {id(rung) for rung in worst_first(rungs)[:MOST_DRAWN]}
    return [rung for rung in rungs if id(rung) in kept]


def name_of(rung: Repeats, rungs: Sequence[Repeats], chars: int = DRAWN_CHARS) -> str:
    """The rung, and whatever else tells it from the others, to be drawn."""
    return for_plot(spoken(rung, rungs, chars), chars)


def spoken(rung: Repeats, rungs: Sequence[Repeats], chars: int = DRAWN_CHARS) -> str:
    """The same in words."""
    row, others = rung.row, [other.row for other in rungs]
    parts = [row.rung]
    if len({other.model for other in others}) > 1:
        parts.append(row.model)
    for name in ("seq", "loss", "precision", "optimizer"):
        if len({str(other.step.get(name)) for other in others}) > 1:
            parts.append(f"seq {row.step.get(name)}" if name == "seq" else str(row.step.get(name)))
    return visible(" ".join(parts), chars)


def gate_of(rows: Sequence[RungResult]) -> int | None:
    """The gate, where all rows that have one have the same."""
    gates = {row.gate_bytes for row in rows if row.gate_bytes is not None}
    return gates.pop() if len(gates) == 1 else None


def sheet(height: float, inches: float = SHEET_INCHES) -> tuple[Any, Any]:
    """An empty figure, `inches` wide, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(inches, height), dpi=150, layout="constrained", facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_facecolor(PAPER)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    return figure, axes


def is_narrow(figure: Any) -> bool:
    """Whether `figure` is one for a phone."""
    return bool(figure.get_figwidth() < SHEET_INCHES)


def list_sheet(
    rungs: Sequence[Repeats], title: str, scale: Scale, axis: str, inches: float = SHEET_INCHES
) -> tuple[Any, Any]:
    """A sheet with a line for each rung and an axis of bytes; a narrow one has the names above the bars."""
    lines = max(2, len(rungs))
    if inches < SHEET_INCHES:
        figure, axes = sheet(1.9 + 0.66 * lines, inches)
        axes.set_yticks([])
        axes.set_ylim(lines - 0.5, -0.8)
        for place, rung in enumerate(rungs):
            axes.annotate(name_of(rung, rungs, PHONE_NAME_CHARS), (0, place - 0.5), va="center", fontsize=9, color=INK,
                          xycoords=("axes fraction", "data"), xytext=(3, 0), textcoords="offset points")  # fmt: skip
    else:
        figure, axes = sheet(1.75 + 0.42 * lines)
        axes.set_yticks(range(len(rungs)), [name_of(rung, rungs) for rung in rungs])
        axes.set_ylim(lines - 0.4, -0.6)
    axes.set_xlabel(f"{axis} [{scale.unit}]")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.tick_params(axis="y", length=0)
    heading(axes, rungs, title)
    return figure, axes


def heading(axes: Any, rungs: Sequence[Repeats], title: str) -> None:
    """The title, and below it what all rungs share."""
    rows = [rung.row for rung in rungs]
    common = [for_plot(", ".join(sorted({row.model for row in rows})), 60)]
    for name in ("seq", "precision", "optimizer"):
        values = {str(row.step.get(name)) for row in rows}
        if len(values) == 1:
            common.append(for_plot(f"seq {values.pop()}" if name == "seq" else values.pop()))
    axes.set_title(f"{title}\n", loc="left", fontsize=12, weight="bold", color=INK)
    words = visible(", ".join(common), 56 if is_narrow(axes.figure) else None)
    shared = axes.annotate(words, (0, 1), xycoords="axes fraction", xytext=(0, 8),
                           textcoords="offset points", fontsize=9, color=FAINT)  # fmt: skip
    shared.set_in_layout(False)


def beside(axes: Any, place: float, points: int, text: str, color: str = INK, weight: str = "normal") -> None:
    """Writes `text` right of the plot, ending `points` from its edge, so that numbers stand under each other; on a
    narrow sheet above the bar, as far from the plot's right end."""
    behind = None
    if is_narrow(axes.figure):
        behind = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.4}
        points, place, text = min(0, points - BESIDE_POINTS), place - 0.5, text.replace("\n", ", ")
    axes.annotate(text, (1, place), xycoords=("axes fraction", "data"), xytext=(points, 0), ha="right", va="center",
                  textcoords="offset points", fontsize=9, color=color, weight=weight, bbox=behind,
                  zorder=5)  # fmt: skip


def gate_line(axes: Any, scale: Scale, gate_bytes: int | None) -> list[Any]:
    """Draws the gate, where there is one; its entry of the legend."""
    from matplotlib.lines import Line2D

    if gate_bytes is None:
        return []
    axes.axvline(scale(gate_bytes), color=RED, linestyle="--", linewidth=1.6, zorder=3)
    return [Line2D([], [], linestyle="--", color=RED, label=f"gate {format_bytes(gate_bytes)}")]


def legend(figure: Any, handles: Sequence[Any]) -> None:
    """The legend below the axes, in as few lines as its words have room for."""
    words, inches = [len(handle.get_label()) for handle in handles], figure.get_figwidth()
    columns = next((count for count in range(len(words), 1, -1) if _legend_inches(words, count) <= inches), 1)
    figure.legend(handles=handles, frameon=False, fontsize=9, loc="outside lower center", ncols=columns,
                  labelcolor=INK)  # fmt: skip


def _legend_inches(words: Sequence[int], columns: int) -> float:
    """Width of a legend whose entries have labels of so many letters: its columns are filled one after the other."""
    least, more = divmod(len(words), columns)
    ends = list(itertools.accumulate(least + (place < more) for place in range(columns)))
    longest = [max(words[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return sum(0.62 + 0.08 * letters for letters in longest)


def save(figure: Any, path: Path) -> None:
    """Writes `figure` as the kind of picture that the ending of `path` names, the same bytes each time."""
    with _Quiet(path.stem):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def svg_text(picture: Picture) -> str:
    """`picture` as an SVG file, the same text each time."""
    buffer = io.StringIO()
    unsaid = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with _Quiet(picture.name):
        picture.figure.savefig(buffer, format="svg", metadata=unsaid)
    return buffer.getvalue().rstrip()


def inline_svg(picture: Picture, svg: str) -> str:
    """The file `svg` of `picture` as an element of a page: named, its ids its own, the colours of `VARIABLES` left to
    the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{picture.name}-", svg)
    svg = svg.replace("*{stroke-linejoin", f"#{picture.name} *{{stroke-linejoin", 1)
    for color, variable in VARIABLES.items():
        svg = re.sub(rf"(fill|stroke): {color}\b", rf"\1: var({variable})", svg)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r' d="[^"]+"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    label = html.escape(visible(picture.alt, MOST_ALT_CHARS))
    return svg.replace("<svg ", f'<svg id="{picture.name}" role="img" aria-label="{label}" ', 1)


class _Quiet:
    """Text of an SVG stays text and its ids are the same each time; letters that the font lacks are no warning."""

    def __init__(self, salt: str) -> None:
        from matplotlib import rc_context

        self._settings = rc_context({"svg.fonttype": "none", "svg.hashsalt": salt})
        self._warnings = warnings.catch_warnings()

    def __enter__(self) -> None:
        self._settings.__enter__()
        self._warnings.__enter__()
        warnings.filterwarnings("ignore", message="Glyph ")

    def __exit__(self, *error: Any) -> None:
        self._warnings.__exit__(*error)
        self._settings.__exit__(*error)
