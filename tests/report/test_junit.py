"""JUnit XML: one case a rung and metric, red where something is wrong, never green where nothing was judged."""

from xml.etree import ElementTree

from rich_rows import HOSTILE, failed, hostile, ladder, rich
from samples import row_of

from memplan.analysis.comparison import LABELS, Comparison, Finding
from memplan.report.junit import comparison_cases, junit, ladder_cases


def suite(text: str) -> ElementTree.Element:
    """The suite of an XML text."""
    [found] = ElementTree.fromstring(text.encode())
    return found


def outcomes(found: ElementTree.Element) -> dict[str, str]:
    """Each case's name and how it ended."""
    return {
        case.attrib["name"]: next((child.tag for child in case if child.tag != "system-out"), "passed")
        for case in found
    }


def test_each_rung_has_a_case_for_its_status_its_gate_and_its_parity() -> None:
    found = outcomes(suite(junit(ladder_cases(ladder()), "molmo")))
    assert found["B8c4@full status"] == found["B8c4@full peak_allocated_bytes"] == found["B8c4@full parity"] == "passed"
    assert found["B12c6@none status"] == "passed"  # it came to its end
    assert found["B12c6@none peak_allocated_bytes"] == "failure"
    assert found["B16c4@none status"] == found["B16c4@none peak_allocated_bytes"] == "failure"
    assert found["B16c8@none status"] == "skipped"
    assert "B12c6@full, repeat 3 status" in found


def test_counts_are_those_of_the_cases_and_a_failure_tells_its_numbers() -> None:
    text = junit(ladder_cases(ladder()), "molmo")
    found = suite(text)
    kinds = list(outcomes(found).values())
    assert found.attrib["tests"] == str(len(kinds))
    assert found.attrib["failures"] == str(kinds.count("failure"))
    assert found.attrib["skipped"] == str(kinds.count("skipped"))
    assert "asked for in vain: 2.00 GiB" in text
    assert "74.20 GiB measured on allocated bytes, gate 71.00 GiB" in text


def test_what_is_no_fault_of_the_rung_is_an_error_and_a_difference_a_failure() -> None:
    rows = [
        failed(status="killed", verdict="inconclusive"),
        rich("B4c1@full", 9, 1.0, parity={"same": False, "says": "differs"}),
    ]
    found = outcomes(suite(junit(ladder_cases(rows), "x")))
    assert found["B16c4@none status"] == "error"
    assert found["B16c4@none peak_allocated_bytes"] == "skipped"
    assert found["B4c1@full parity"] == "failure"


def test_nothing_measured_is_an_error() -> None:
    assert outcomes(suite(junit([], "x"))) == {"rungs": "error"}


def test_illegal_characters_leave_the_xml_whole() -> None:
    for name in (HOSTILE, "\x01\x0b\ufffe\ud800]]>", "x" * 10_000):
        text = junit(ladder_cases(hostile(name)), name)
        assert len(outcomes(suite(text))) >= 2
        assert len(text) < 60_000


def finding(label: str, **values: object) -> Finding:
    """A finding of a rung named as its label."""
    known = {"rung": label, "name": label, "model": "tiny", "run_id": label, "source": "measured", "label": label}
    return Finding(**known | {"metric": "step_ns", "unit": "ns", "base": 10, "new": 12, "num_base": 1} | values)  # type: ignore[arg-type]


def comparison(*findings: Finding, **values: object) -> Comparison:
    """A comparison with these findings."""
    known = {"findings": findings, "base_name": "a", "new_name": "b", "base_rows": (row_of(),), "new_rows": (row_of(),)}
    return Comparison(**known | values)  # type: ignore[arg-type]


def test_a_comparison_fails_where_something_is_worse_or_gone() -> None:
    every = [finding(label) for label in LABELS]
    found = outcomes(suite(junit(comparison_cases(comparison(*every)), "x")))
    assert {name.partition(" ")[0]: outcome for name, outcome in found.items()} == {
        "broke": "failure", "worse": "failure", "missing": "failure", "incomparable": "failure",
        "insufficient": "failure", "ambiguous": "skipped", "fixed": "passed", "better": "passed", "new": "passed",
        "same": "passed", "moved": "passed",
    }  # fmt: skip
    allowed = outcomes(suite(junit(comparison_cases(comparison(*every, allow_missing=True)), "x")))
    assert allowed["missing step_ns"] == "skipped"
    strict = outcomes(suite(junit(comparison_cases(comparison(*every, strict=True)), "x")))
    assert strict["ambiguous step_ns"] == "failure"


def test_a_comparison_that_compared_nothing_is_an_error() -> None:
    only_new = comparison(finding("new"))
    assert only_new.exit_code == 4
    assert outcomes(suite(junit(comparison_cases(only_new), "x")))["rungs"] == "error"
    assert outcomes(suite(junit(comparison_cases(comparison(nothing="no rows")), "x"))) == {"rungs": "error"}


def test_details_of_a_peak_are_no_cases_of_their_own() -> None:
    cases = comparison_cases(comparison(finding("worse"), finding("same", metric="phase:loss", counts=False)))
    assert [case.name for case in cases] == ["worse step_ns"]
