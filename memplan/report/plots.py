"""The pictures of a ladder, and which of them there is nothing to draw for."""

from collections.abc import Sequence

from memplan.record import RungResult
from memplan.report.figures import MOST_DRAWN, SHEET_INCHES, Picture
from memplan.report.figures_agreement import agreement_picture
from memplan.report.figures_peak import peak_picture, phases_picture
from memplan.report.figures_speed import speed_picture
from memplan.report.repeats import Repeats
from memplan.report.timeline_plot import TIMELINE_FILE, StepStory, timeline_picture

NOTHING = {
    "throughput": "throughput against memory: no rung was timed",
    "agreement": "estimated, traced and measured side by side: no rung has a peak and another witness",
    "phases": "peaks by phase: no rung told them",
    "timeline": f"the step moment by moment: there is no {TIMELINE_FILE}; memplan trace --plot {TIMELINE_FILE} writes "
    "one",
}
"""Why a picture is not there."""


def pictures(
    rungs: Sequence[Repeats],
    *,
    recommended: RungResult | None = None,
    story: StepStory | None = None,
    inches: float = SHEET_INCHES,
) -> tuple[list[Picture], list[str]]:
    """All pictures that there is something to draw for, `inches` wide, and what was left out of them, a sentence
    each."""
    found = {
        "peak": peak_picture(rungs, inches),
        "throughput": speed_picture(rungs, recommended, inches),
        "agreement": agreement_picture(rungs, inches),
        "phases": phases_picture(rungs, inches),
        "timeline": None if story is None else timeline_picture(story, inches),
    }
    left_out = [NOTHING[name] for name, picture in found.items() if picture is None]
    if len(rungs) > MOST_DRAWN:
        left_out.append(f"pictures show {MOST_DRAWN} of {len(rungs)} rungs, the worst ones; the table shows all")
    if all(not rung.row.breakdown for rung in rungs):
        left_out.append("categories in the bars of the peak: no rung told its breakdown")
    return [picture for picture in found.values() if picture is not None], left_out
