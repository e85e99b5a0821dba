"""Results as JUnit XML, which CI systems show: one case a rung and metric."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

from memplan.analysis.comparison import Comparison, Finding
from memplan.analysis.verdict import number, verdict
from memplan.record import RungResult
from memplan.report.failures import failure_lines
from memplan.report.ladder_table import labels
from memplan.report.outside import CELL_CHARS, LINE_CHARS, visible, visible_lines
from memplan.units import format_bytes, seconds

TEXT_CHARS = 4000
"""Characters of a case's text."""
RED = ("oom", "thrash", "ac_error", "numerics_fail", "oom_suspect")
"""Statuses that are failures of the rung; other unwanted ones are errors, of whatever was around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing that may fail."""

    group: str
    """Its class: the model."""
    name: str
    """Rung and metric."""
    outcome: Literal["passed", "failure", "error", "skipped"]
    """How it ended."""
    message: str = ""
    """Why, in one line."""
    text: str = ""
    """Everything to know about it."""
    time_ns: int | None = None
    """How long it took."""


def junit(cases: Sequence[Case], suite: str) -> str:
    """The XML of `cases`. Nothing to judge is an error: no case must never look like all well."""
    cases = cases or [Case(group=suite, name="rungs", outcome="error", message="nothing was measured")]
    counts = {
        "tests": len(cases),
        "failures": sum(case.outcome == "failure" for case in cases),
        "errors": sum(case.outcome == "error" for case in cases),
        "skipped": sum(case.outcome == "skipped" for case in cases),
    }
    numbers = {name: str(count) for name, count in counts.items()}
    root = ElementTree.Element("testsuites", {"name": "memplan"} | numbers)
    time = f"{seconds(sum(case.time_ns or 0 for case in cases)):.3f}"
    inside = ElementTree.SubElement(root, "testsuite", {"name": visible(suite, CELL_CHARS), "time": time} | numbers)
    for case in cases:
        names = {"classname": visible(case.group, CELL_CHARS), "name": visible(case.name, 2 * CELL_CHARS)}
        element = ElementTree.SubElement(inside, "testcase", names, time=f"{seconds(case.time_ns or 0):.3f}")
        if case.outcome == "passed":
            if case.text:
                ElementTree.SubElement(element, "system-out").text = visible_lines(case.text, TEXT_CHARS)
        else:
            what = ElementTree.SubElement(element, case.outcome, message=visible(case.message, LINE_CHARS))
            what.text = visible_lines(case.text, TEXT_CHARS) or None
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False).join(
        ('<?xml version="1.0" encoding="utf-8"?>\n', "\n")
    )


def ladder_cases(rows: Sequence[RungResult]) -> list[Case]:
    """For each row whether it came to its end, whether its peak holds the gate, and whether it computes what the plain
    step does."""
    found, label = [], labels(rows)
    for row in rows:
        name = label(row) + (f", repeat {row.repeat}" if row.repeat > 1 else "")
        found.append(_status_case(row, name))
        if row.gate_bytes is not None:
            found.append(_gate_case(row, name, row.gate_bytes))
        if row.parity.get("same") is not None:
            same, says = row.parity["same"], str(row.parity.get("says", ""))
            outcome: Literal["passed", "failure"] = "passed" if same else "failure"
            found.append(Case(group=row.model, name=f"{name} parity", outcome=outcome, message=says))
    return found


def comparison_cases(found: Comparison) -> list[Case]:
    """For each finding that is a verdict of its own whether it is worse than before."""
    cases = [_finding_case(finding, found) for finding in found.counted]
    if found.nothing is None and found.num_compared:
        return cases
    return [Case(group="compare", name="rungs", outcome="error", message=verdict(found)), *cases]


def _status_case(row: RungResult, name: str) -> Case:
    outcome: Literal["passed", "failure", "error", "skipped"] = "error"
    if row.kind in ("ok", "over_gate"):
        outcome = "passed"
    elif row.kind == "skipped":
        outcome = "skipped"
    elif row.kind in RED:
        outcome = "failure"
    text = "\n".join([*failure_lines(row), *row.warnings])
    message = row.status + (f": {row.error}" if row.error else "")
    return Case(group=row.model, name=f"{name} status", outcome=outcome, message=message, text=text,
                time_ns=row.elapsed_ns)  # fmt: skip


def _gate_case(row: RungResult, name: str, gate_bytes: int) -> Case:
    gated_bytes = row.gated_bytes if row.whole_peak_bytes is not None else None
    size = "no peak" if gated_bytes is None else f"{format_bytes(gated_bytes)} {row.source}"
    message = f"{row.verdict}: {size} on {row.gate_on} bytes, gate {format_bytes(gate_bytes)}"
    outcomes: dict[str, Literal["passed", "failure"]] = {"pass": "passed", "fail": "failure"}
    return Case(group=row.model, name=f"{name} peak_{row.gate_on}_bytes", message=message, text=message,
                outcome=outcomes.get(row.verdict, "skipped"))  # fmt: skip


def _finding_case(finding: Finding, found: Comparison) -> Case:
    lost = finding.name in found.uncovered and finding.label in ("missing", "incomparable", "insufficient")
    outcome: Literal["passed", "failure", "error", "skipped"] = "passed"
    if finding.label in ("broke", "worse") or (lost and not found.allow_missing):
        outcome = "failure"
    elif finding.label in ("missing", "incomparable", "insufficient", "ambiguous"):
        outcome = "failure" if finding.label == "ambiguous" and found.strict else "skipped"
    base, new = number(finding, finding.base), number(finding, finding.new)
    message = f"{finding.label}: {base or 'none'} before, {new or 'none'} now" + (
        f", {finding.why}" * bool(finding.why)
    )
    text = f"{message}\n{finding.source}, {finding.num_base} and {finding.num_new} processes"
    return Case(
        group=finding.model, name=f"{finding.name} {finding.metric}", outcome=outcome, message=message, text=text
    )
