"""The verbs over results that are there already: `report`, `compare`, `baseline`, `history`."""

import sys
from pathlib import Path
from typing import Annotated

from memplan.cli_io import Output, say, show, show_json
from memplan.cli_options import Argument, Verb, option
from memplan.units import parse_percent

SUMMARIES = ("junit", "comment")
"""Outputs of verbs that judge, beside those of any table: XML, and Markdown short enough for a comment."""
ReportOutput = Annotated[
    str, option("-o", "--output", help="table, json, jsonl, md (a step's summary), comment, csv, html, junit.")
]
Store = Annotated[
    Path | None, option("--store", help="Folder of baselines, reports/baselines otherwise.", shows_default=False)
]
MemoryWithin = Annotated[str, option("--memory-within", help="Share of the bytes that is no change (2 MiB never are).")]
SpeedWithin = Annotated[str, option("--speed-within", help="Share of the step time that is no change.")]


def report(
    folder: Annotated[Path, Argument(help="Folder of a ladder, or its jsonl file.", metavar="DIR")],
    out: Annotated[Path | None, option("--out", help="Folder for the page, DIR otherwise.")] = None,
    output: ReportOutput = "table",
) -> None:
    """Make report.html, tables, and pictures as PNG and SVG of a ladder's rows; nothing is run, torch is not needed.

    Exit code 3 where no row says anything about its rung."""
    from memplan.analysis.matching import is_final
    from memplan.errors import NothingMeasuredError
    from memplan.record import read_results
    from memplan.report.junit import junit, ladder_cases
    from memplan.report.ladder_table import ladder_table, provenance
    from memplan.report.page import report_folder
    from memplan.report.render import check_form, render, wants_rich
    from memplan.report.summary import COMMENT_BYTES, STEP_SUMMARY_BYTES, ladder_summary

    check_form(output, SUMMARIES)
    files = report_folder(folder, out)
    rows = read_results(folder).rows
    if output == "junit":
        show(junit(ladder_cases(rows), folder.resolve().name))
    elif output in ("md", "comment"):
        show(ladder_summary(rows, COMMENT_BYTES if output == "comment" else STEP_SUMMARY_BYTES))
    else:
        show(render(ladder_table(rows, footer=provenance(rows)), output, rich=wants_rich()))
    say([f"page: {file}" for file in files if file.suffix == ".html"])
    if not is_final(rows):
        say(["Nothing was measured."])
        sys.exit(NothingMeasuredError.exit_code)


def compare(
    base: Annotated[str, Argument(help="A folder, a jsonl file, or a baseline's name.", metavar="BASE")],
    new: Annotated[str, Argument(help="What is held against it.", metavar="NEW")],
    allow_missing: Annotated[bool, option("--allow-missing", help="Rungs may be gone.")] = False,
    strict: Annotated[bool, option("--strict", help="Fail on what is ambiguous and on a stale base.")] = False,
    across: Annotated[
        bool, option("--across", help="Compare bytes whatever machine and torch, times whatever software.")
    ] = False,
    memory_within: MemoryWithin = "0.1%",
    speed_within: SpeedWithin = "5%",
    details: Annotated[bool, option("--details", help="Every metric, phase and category.")] = False,
    store: Store = None,
    output: ReportOutput = "table",
) -> None:
    """Hold one result against an earlier one: memory exactly, times over the repeats; exit code 1 when it is worse."""
    from memplan import api_reports
    from memplan.analysis.compare import Tolerance
    from memplan.report.compare_table import compare_table, comparison_record, finding_record, findings_table
    from memplan.report.junit import comparison_cases, junit
    from memplan.report.outside import LINE_CHARS, visible
    from memplan.report.render import check_form, render, wants_rich
    from memplan.report.summary import COMMENT_BYTES, STEP_SUMMARY_BYTES, comparison_summary

    check_form(output, SUMMARIES)
    found, refreshed = api_reports.compare(
        base,
        new,
        store=store or api_reports.BASELINES,
        tolerance=Tolerance(memory_frac=parse_percent(memory_within), time_frac=parse_percent(speed_within)),
        across=across,
        allow_missing=allow_missing,
        strict=strict,
    )
    table = compare_table(found, details=details)
    if output == "json":
        show_json([comparison_record(found)], lines=False, single=True)
    elif output == "jsonl":
        show_json([finding_record(finding) for finding in found.findings], lines=True)
    elif output == "csv":
        show(render(findings_table(found), "csv"))
    elif output == "junit":
        show(junit(comparison_cases(found), f"{base} and {new}"))
    elif output in ("md", "comment"):
        show(comparison_summary(found, COMMENT_BYTES if output == "comment" else STEP_SUMMARY_BYTES))
    else:
        show(render(table, output, rich=wants_rich()))
    if output in ("json", "jsonl", "csv"):
        say([visible(table.title, LINE_CHARS)])
    if refreshed is not None:
        say([f"an up-to-date base is in {refreshed}: look at it, then put it in the old one's place"])
    sys.exit(found.exit_code)


def history(
    folders: Annotated[list[Path], Argument(help="Folders of ladders, or one that has them.", metavar="DIR...")],
    memory_within: MemoryWithin = "0.1%",
    speed_within: SpeedWithin = "5%",
    plot: Annotated[Path | None, option("--plot", help="Picture of the trend, .png or .svg.")] = None,
    output: Output = "table",
) -> None:
    """Follow each rung over several results, oldest first, and mark where it moved."""
    from memplan import api_reports
    from memplan.analysis.compare import Tolerance
    from memplan.report.history_page import history_plot, history_table
    from memplan.report.render import check_form, render, wants_rich

    check_form(output)
    tolerance = Tolerance(memory_frac=parse_percent(memory_within), time_frac=parse_percent(speed_within))
    moments, warnings = api_reports.history(folders, tolerance)
    if plot is not None:
        history_plot(moments, plot)
    show(render(history_table(moments, warnings), output, rich=wants_rich()))


def save(
    name: Annotated[str, Argument(help="What to call it: main.", metavar="NAME")],
    folder: Annotated[Path, Argument(help="Folder of a ladder, or its jsonl file.", metavar="DIR")],
    replace: Annotated[bool, option("--replace", help="In the place of the one of that name.")] = False,
    store: Store = None,
) -> None:
    """Keep the rows of a ladder, in a folder for the kind of machine they come from."""
    from memplan import api_reports

    baseline, doubts = api_reports.save_baseline(name, folder, store=store or api_reports.BASELINES, replace=replace)
    say(doubts)
    show(f"{len(baseline.rows)} rows: {baseline.path}")


def list_(store: Store = None, output: Output = "table") -> None:
    """List what is kept."""
    from memplan import api_reports
    from memplan.report.baseline_table import baselines_table
    from memplan.report.render import check_form, render, wants_rich

    check_form(output)
    found = api_reports.list_baselines(store or api_reports.BASELINES)
    if not found:
        say([f"{store or api_reports.BASELINES} has no baseline. To record one, type: memplan baseline save main DIR"])
    if found or output != "table":
        show(render(baselines_table(found), output, rich=wants_rich()))


def show_(
    name: Annotated[str, Argument(help="The baseline.", metavar="NAME")],
    machine: Annotated[str | None, option("--machine", help="Beginning of the machine's folder.")] = None,
    store: Store = None,
    output: Output = "table",
) -> None:
    """Show the rows of a baseline, of each kind of machine that has one of that name."""
    from memplan import api_reports
    from memplan.report.ladder_table import ladder_table, provenance
    from memplan.report.render import check_form, render, wants_rich

    check_form(output)
    found = api_reports.show_baseline(name, machine, store=store or api_reports.BASELINES)
    for baseline in found:
        say([str(baseline.path), *baseline.warnings])
        if output not in ("json", "jsonl"):
            show(render(ladder_table(baseline.rows, footer=provenance(baseline.rows)), output, rich=wants_rich()))
    if output in ("json", "jsonl"):
        show_json([row.to_dict() for baseline in found for row in baseline.rows], lines=output == "jsonl")


VERBS = {
    "report": Verb(report),
    "compare": Verb(compare),
    "history": Verb(history),
    "baseline save": Verb(save),
    "baseline list": Verb(list_),
    "baseline show": Verb(show_),
}
"""The verbs by what is typed for them."""
