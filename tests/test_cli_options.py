"""Plain words are read as the whole parser reads them, and no others are read at all."""

import itertools
from typing import Any, get_args

import pytest
import typer.main
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.cli import verbs
from memplan.cli_options import plain_values
from memplan.cli_typer import application

ESTIMATE = verbs("estimate")["estimate"]
PARSER: Any = typer.main.get_command(application({"estimate": ESTIMATE})).commands["estimate"]  # type: ignore[attr-defined]
OPTIONS = [
    (flag, str(get_args(one.annotation)[0])) for one in ESTIMATE.takes() for flag in get_args(one.annotation)[1].flags
]
VALUES = {"int": ("4", "0", "007"), "float": ("0.5", "2")}
TEXTS = ("a=b", "", "1e3", "é", "none,full", "a\nb")


def whole_parser(words: list[str]) -> dict[str, Any]:
    """What typer hands to the verb, those that were not typed left out."""
    parsed = PARSER.make_context("estimate", list(words)).params
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in parsed.items()}
    return {name: value for name, value in lists.items() if value not in (None, [])}


def words_of(flag: str, kind: str) -> st.SearchStrategy[list[str]]:
    """Ways to type one option."""
    if "bool" in kind:
        return st.just([flag])
    values = st.sampled_from(next((found for name, found in VALUES.items() if name in kind), TEXTS))
    apart = values.map(lambda value: [flag, value])
    return apart | values.map(lambda value: [f"{flag}={value}"]) if flag.startswith("--") else apart


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(OPTIONS).flatmap(lambda option: words_of(*option)), max_size=6))
def test_plain_words_are_read_as_the_whole_parser_reads_them(typed: list[list[str]]) -> None:
    words = list(itertools.chain(*typed))
    plain = plain_values(ESTIMATE, words)
    assert plain is not None
    defaults = {"method": "formulas", "output": "table", "explain": False}
    assert defaults | {name: value for name, value in plain.items() if value is not None} == whole_parser(words)


@pytest.mark.parametrize(
    "words",
    ["--help", "--model", "--modle tiny", "tiny", "--seq many", "--seq -1", "--seq 1_0", "--clip 1e3", "--explain=yes",
     "-ojson", "-o=json", "--model -o", "--", "--no-explain"],
)  # fmt: skip
def test_what_is_not_plain_is_left_to_the_whole_parser(words: str) -> None:
    assert plain_values(ESTIMATE, words.split()) is None


def test_a_verb_with_words_of_its_own_is_left_to_the_whole_parser() -> None:
    assert plain_values(verbs("ladder")["ladder"], ["B4c2"]) is None
