"""`compare`, `baseline` and `history` as a user and a CI job meet them."""

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from samples import row_of

from memplan.cli import main
from memplan.record import RungResult, append_row, read_rows
from memplan.units import MIB

PARTS = {"params": 40 * MIB, "activations": 50 * MIB, "temps": 10 * MIB}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Exit code, output and errors of `memplan WORDS`, in this process."""

    def ran(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["memplan", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code if isinstance(ended.value.code, int) else 1, out, err

    return ran


def climbed(name: str, *rows: RungResult) -> str:
    """A folder with a ladder's rows."""
    Path(name).mkdir()
    for row in rows:
        append_row(Path(name) / "ladder.jsonl", row)
    return name


def six(**of_the_first: Any) -> list[RungResult]:
    """Six rungs; the first one is changed."""
    rows = [row_of(run_id=f"{number}" * 12, rung=f"B{number}c1@none", breakdown=PARTS) for number in range(2, 8)]
    return [RungResult.from_dict(rows[0].to_dict() | of_the_first), *rows[1:]]


def test_a_regression_is_named_in_the_first_line_and_ends_with_1(run: Any) -> None:
    grown = PARTS | {"activations": 62 * MIB}
    base, new = climbed("base", *six()), climbed("new", *six(breakdown=grown, peak_allocated_bytes=112 * MIB))
    code, out, _ = run("compare", base, new)
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == "1 of 6 rungs needs more memory: B2c1@none +12.00 MiB in activations."
    assert next(line for line in lines if "@none" in line and "MiB" in line and line != lines[0]).startswith(
        "B2c1@none"
    )
    assert "model tiny, source measured" in out, "what never varies is said once"
    assert "activations grew by 12.00 MiB" in out


def test_f39_both_commits_stand_under_the_table(run: Any) -> None:
    base = climbed("base", row_of(environment={"device": "cpu", "torch": "2.13.0", "commit": "abc1234"}))
    new = climbed("new", row_of(environment={"device": "cpu", "torch": "2.13.0", "commit": "def5678+"}))
    code, out, _ = run("compare", base, new)
    assert code == 0
    assert "base base: measured on cpu, torch 2.13.0, commit abc1234" in out
    assert "new new: measured on cpu, torch 2.13.0, commit def5678+" in out


@pytest.mark.parametrize(
    ("change", "options", "code"),
    [
        ({}, (), 0),
        ({"peak_allocated_bytes": 104 * MIB}, (), 1),
        ({"peak_allocated_bytes": 104 * MIB}, ("--memory-within", "5%"), 0),
        ({"peak_allocated_bytes": 60 * MIB}, (), 0),
        ({"peak_allocated_bytes": 60 * MIB}, ("--strict",), 1),
        ({"status": "oom"}, (), 1),
        ({"environment": {"device": "cpu", "torch": "2.14.0"}}, (), 1),
        ({"environment": {"device": "cpu", "torch": "2.14.0"}}, ("--allow-missing",), 0),
        ({"environment": {"device": "cpu", "torch": "2.14.0"}}, ("--across",), 0),
    ],
)
def test_exit_codes(change: dict[str, Any], options: tuple[str, ...], code: int, run: Any) -> None:
    assert run("compare", climbed("base", *six()), climbed("new", *six(**change)), *options)[0] == code


def test_f40_exit_codes_where_there_is_nothing_to_compare(run: Any) -> None:
    good, died = climbed("good", row_of()), climbed("died", row_of(status="error", peak_allocated_bytes=None))
    assert run("compare", good, died)[0] == 3
    assert run("compare", died, good)[0] == 3
    Path("empty").mkdir()
    (Path("empty") / "ladder.jsonl").write_text("")
    code, out, _ = run("compare", good, "empty", "--allow-missing")
    assert code == 3
    assert out.startswith("Nothing to compare: empty has no row.")


def test_f37_another_machine_ends_with_4_and_names_the_keys(run: Any) -> None:
    other = row_of(environment={"device": "cpu", "torch": "2.14.0"})
    code, out, _ = run("compare", climbed("base", row_of()), climbed("new", other))
    assert code == 4
    assert out.startswith("Not comparable: torch 2.13.0 before, 2.14.0 now.")


def test_f38_a_stale_base_gets_a_fresh_file_beside_it(run: Any) -> None:
    base, new = climbed("base", *six()), climbed("new", *six(peak_allocated_bytes=60 * MIB))
    code, out, err = run("compare", base, new)
    assert code == 0
    assert "The base is stale: B2c1@none improved" in out
    assert "base/ladder.refreshed.jsonl" in err
    fresh = read_rows(Path("base/ladder.refreshed.jsonl"))
    assert [(row.peak_allocated_bytes or 0) // MIB for row in fresh] == [60, 100, 100, 100, 100, 100]
    assert run("compare", "base/ladder.refreshed.jsonl", new)[0] == 0
    assert run("compare", "base/ladder.refreshed.jsonl", base)[0] == 1, "the fresh base holds what was gained"


def test_no_file_is_written_beside_a_base_that_is_up_to_date(run: Any) -> None:
    run("compare", climbed("base", *six()), climbed("new", *six(peak_allocated_bytes=160 * MIB)))
    assert [path.name for path in Path("base").iterdir()] == ["ladder.jsonl"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("compare", "nowhere", "good"), "There is no file, folder or baseline nowhere."),
        (("compare", "no/where", "good"), "no/where cannot be read"),
        (("compare", "good", "good"), "the same file"),
        (("compare", "good", "good/ladder.jsonl"), "the same file"),
        (("compare", "empty", "good"), "holds no ladder.jsonl"),
        (("compare", "foreign", "good"), "is not a ladder's file"),
        (("compare", "newer", "good"), "written by a newer memplan"),
        (("compare", "good", "other", "-o", "xml"), "Unknown output 'xml'"),
        (("compare", "good", "other", "--memory-within", "lots"), "'lots' is not a share"),
        (("baseline", "save", "a/b", "good"), "cannot name a baseline"),
        (("baseline", "show", "main"), "There is no file, folder or baseline main."),
        (("history", "nowhere"), "cannot be read"),
    ],
)
def test_wrong_usage_is_one_sentence_and_2(words: tuple[str, ...], said: str, run: Any) -> None:
    climbed("good", row_of())
    climbed("other", row_of())
    for name, text in (("foreign", "a,b\n"), ("newer", json.dumps(row_of().to_dict() | {"schema_version": 99}))):
        Path(name).mkdir()
        (Path(name) / "ladder.jsonl").write_text(text)
    Path("empty").mkdir()
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert said in err and "Traceback" not in err


def test_a_torn_line_is_named_and_the_rest_is_compared(run: Any) -> None:
    base, new = climbed("base", row_of()), climbed("new", row_of())
    with Path("new/ladder.jsonl").open("ab") as file:
        file.write(b'{"rung": "B2c1\xc3')
    code, out, _ = run("compare", base, new)
    assert code == 0
    assert "line 2 was torn, and left out." in out


def test_every_form_says_the_same(run: Any) -> None:
    base, new = climbed("base", *six()), climbed("new", *six(peak_allocated_bytes=112 * MIB))
    said = "1 of 6 rungs needs more memory: B2c1@none +12.00 MiB"
    whole = json.loads(run("compare", base, new, "-o", "json")[1])
    assert whole["verdict"].startswith(said)
    assert whole["exit_code"] == 1
    worst = whole["findings"][0]
    assert (worst["rung"], worst["metric"], worst["label"]) == ("B2c1@none", "peak_allocated_bytes", "worse")
    assert (worst["base"], worst["new"], worst["unit"]) == (100 * MIB, 112 * MIB, "bytes")
    lines = [json.loads(line) for line in run("compare", base, new, "-o", "jsonl")[1].splitlines()]
    assert lines == whole["findings"]
    _, text, err = run("compare", base, new, "-o", "csv")
    table = list(csv.DictReader(io.StringIO(text)))
    assert len(table) == len(lines)
    assert table[0]["new"] == str(112 * MIB)
    assert said in err
    markdown = run("compare", base, new, "-o", "md")[1]
    assert "1 of 6 rungs needs more memory" in markdown.splitlines()[0]
    assert "| B2c1@none | peak | worse |" in markdown


def test_details_show_every_metric_and_the_rest_is_counted(run: Any) -> None:
    base, new = climbed("base", *six()), climbed("new", *six())
    assert "6 further metrics are the same" in run("compare", base, new)[1]
    everything = run("compare", base, new, "--details")[1]
    assert "further metrics" not in everything
    assert everything.count("backward") == 6 and everything.count("activations") == 6


def test_times_are_shown_with_their_interval_and_what_to_type_for_more(run: Any) -> None:
    def timed(name: str, *times: float) -> str:
        command = "memplan ladder B4c2@none --model tiny --seq 64"
        return climbed(name, *(row_of(repeat=number, step_ns=(int(time * 10**9),), command=command)
                               for number, time in enumerate(times, 1)))  # fmt: skip

    code, out, _ = run("compare", timed("base", 1.0, 1.3, 0.8, 1.1, 0.9), timed("new", 1.1, 0.9, 1.2, 1.0, 1.3))
    assert code == 0
    assert " % to +" in out
    assert "AMBIGUOUS" in out
    assert "to tell: memplan ladder B4c2@none --model tiny --seq 64 --repeat 10 --out new --resume" in out
    assert run("compare", "base", "new", "--strict")[0] == 1
    assert run("compare", "base", timed("slow", 2.0, 2.3, 1.8, 2.1, 1.9))[0] == 1
    assert run("compare", "base", "slow", "--speed-within", "99%", "--strict")[0] == 1, "ambiguous now"


def test_a_hostile_name_is_shown_and_does_nothing(run: Any) -> None:
    name = "<script>alert(1)</script>|\n\x1b[31m" + "x" * 10_000
    base = climbed("base", row_of(rung=name))
    new = climbed("new", row_of(rung=name, peak_allocated_bytes=150 * MIB))
    for form in ("table", "md", "csv", "jsonl"):
        code, out, _ = run("compare", base, new, "-o", form)
        assert code == 1
        assert "\x1b" not in out, form
    markdown = run("compare", base, new, "-o", "md")[1]
    assert "<script>" not in markdown
    assert len(markdown) < 10_000


def test_a_baseline_is_saved_listed_shown_and_found_by_its_name(run: Any) -> None:
    folder, new = climbed("first", *six()), climbed("second", *six(peak_allocated_bytes=112 * MIB))
    code, out, err = run("baseline", "save", "main", folder)
    assert code == 0
    assert out.startswith("6 rows: reports/baselines/cpu-abacus_torch-2.13.0_")
    assert "fewer than 3 processes" in err
    assert "main" in run("baseline", "list")[1]
    listed = json.loads(run("baseline", "list", "-o", "json")[1])
    assert [(one["name"], one["rungs"], one["repeats"], one["commit"]) for one in listed] == [("main", 6, 1, "abc1234")]
    assert run("baseline", "show", "main")[1].count("@none") >= 6
    assert len(run("baseline", "show", "main", "-o", "jsonl")[1].splitlines()) == 6
    code, out, _ = run("compare", "main", new)
    assert code == 1
    assert "base main:" in out
    assert run("baseline", "save", "main", new)[0] == 2
    assert run("baseline", "save", "main", new, "--replace")[0] == 0
    assert run("compare", "main", new)[0] == 0


def test_f37_a_baseline_of_another_machine_is_not_taken(run: Any) -> None:
    run("baseline", "save", "main", climbed("first", row_of()))
    elsewhere = climbed("second", row_of(environment={"device": "cpu", "torch": "2.14.0"}))
    code, out, err = run("compare", "main", elsewhere)
    assert (code, out) == (4, "")
    assert "torch 2.13.0 before, 2.14.0 now" in err
    assert "memplan baseline save main DIR" in err
    assert run("compare", "main", elsewhere, "--across")[0] == 0


def test_a_store_may_be_elsewhere_and_an_empty_one_says_how_to_begin(run: Any) -> None:
    code, out, err = run("baseline", "list", "--store", "kept")
    assert (code, out) == (0, "")
    assert "memplan baseline save main DIR" in err
    climbed("first", row_of())
    assert run("baseline", "save", "main", "first", "--store", "kept")[0] == 0
    assert run("compare", "main", "first", "--store", "kept")[0] == 0
    assert run("baseline", "show", "main", "--store", "kept", "--machine", "nvidia")[0] == 2


@pytest.mark.parametrize("picture", ["trend.png", "trend.svg"])
def test_a_history_is_a_table_and_a_picture(picture: str, run: Any) -> None:
    Path("all").mkdir()
    for day, size in enumerate((100, 100, 130), 1):
        facts = {"device": "cpu", "torch": "2.13.0", "commit": f"c{day}"}
        at = f"2026-11-0{day}T10:00:00+00:00"
        climbed(f"all/{day}", row_of(peak_allocated_bytes=size * MIB, environment=facts, started_at=at))
    code, out, _ = run("history", "all", "--plot", picture)
    assert code == 0
    assert "+30.00 MiB" in out and "memory worse" in out
    assert Path(picture).stat().st_size > 5000
    records = json.loads(run("history", "all/3", "all/1", "all/1", "-o", "json")[1])
    assert [(one["commit"], one["peak_change_bytes"]) for one in records] == [("c1", None), ("c3", 30 * MIB)]


@pytest.mark.parametrize("picture", ["trend.html", "trend.gif", "."])
def test_a_trend_is_drawn_as_png_or_svg_alone(picture: str, run: Any) -> None:
    code, _, err = run("history", climbed("first", row_of()), "--plot", picture)
    assert code == 2
    assert "Type a file that ends in .png or .svg." in err


def test_estimates_are_compared_as_they_were_printed(run: Any) -> None:
    asked = ("estimate", "--model", "tiny", "--rung", "B4c2@full", "--seq", "64")
    printed = run(*asked, "-o", "json")[1]
    Path("base.json").write_text(printed)
    Path("base.jsonl").write_text(run(*asked, "-o", "jsonl")[1])
    assert run("compare", "base.json", "base.jsonl")[0] == 0, "the same twice"
    grown = json.loads(printed)
    grown["peak"]["allocated_bytes"] += 12 * MIB
    grown["breakdown"]["logits"] += 12 * MIB
    Path("new.jsonl").write_text(json.dumps(grown))
    code, out, _ = run("compare", "base.json", "new.jsonl")
    assert code == 1
    assert out.startswith("1 of 1 rung needs more memory: B4c2@full +12.00 MiB in logits.")
    Path("less.jsonl").write_text(json.dumps(grown | {"peak": {}}))
    assert (
        "line 1 is not a row of a ladder: its estimate lacks 'allocated_bytes'"
        in run("compare", "base.json", "less.jsonl")[2]
    )


def test_a_report_of_rows_that_say_nothing_is_written_and_ends_with_3(run: Any) -> None:
    """A rung without room was measured, one that broke was not; a gate that does not hold is no fault of the page."""
    nothing = {"peak_allocated_bytes": None, "windows": {}, "phase_peaks": {}, "step_ns": ()}
    broke = climbed("broke", row_of(status="error", error="boom", verdict="fail", gate_bytes=MIB, **nothing))
    code, _, errors = run("report", broke)
    assert code == 3 and "Nothing was measured." in errors
    assert "Nothing was measured: 1 rung ended without a peak" in Path("broke/report.html").read_text()
    full = climbed("full", row_of(status="oom", verdict="fail", gate_bytes=MIB, **nothing))
    assert run("report", full)[0] == 0
