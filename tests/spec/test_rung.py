"""The rung's grammar: parse and format are inverse, errors point at the character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.errors import MemplanError
from memplan.spec import Rung, parse_rungs

_COUNTS = st.integers(min_value=1, max_value=10**6)
_CKPTS = st.one_of(st.none(), st.sampled_from(["none", "full"]), _COUNTS.map(lambda k: f"every:{k}"))


@st.composite
def rungs(draw: st.DrawFn) -> Rung:
    chunks = draw(st.integers(min_value=1, max_value=1000))
    return Rung(
        batch=chunks * draw(st.integers(min_value=1, max_value=1000)),
        chunks=chunks,
        loss_chunks=draw(st.none() | _COUNTS),
        seq=draw(st.none() | _COUNTS),
        ckpt=draw(_CKPTS),
    )


@given(rungs())
def test_parse_undoes_format(rung: Rung) -> None:
    assert Rung.parse(str(rung)) == rung


@given(st.text(alphabet="Bcls@0123456789,:evrynofu ", max_size=16))
def test_any_text_is_a_rung_or_one_clear_error(text: str) -> None:
    try:
        rung = Rung.parse(text)
    except MemplanError as error:
        assert error.hint
    else:
        assert Rung.parse(str(rung)) == rung


def test_parts_come_in_any_order() -> None:
    assert Rung.parse("B12s4096@full") == Rung(batch=12, chunks=1, seq=4096, ckpt="full")
    assert str(Rung.parse("B12s4096l16c6@full")) == "B12c6l16s4096@full"


@pytest.mark.parametrize(
    ("text", "position", "why"),
    [
        ("", 1, "starts with B"),
        ("12c6", 1, "starts with B"),
        ("Bc6", 2, "starts with B and a batch size"),
        ("B0c1", 2, "1 sample or more"),
        ("B12x6", 4, "expected c, l, s"),
        ("B12c", 5, "c needs a whole number"),
        ("B12c0", 5, "c must be 1 or more"),
        ("B12c6c3", 6, "c is given twice"),
        ("B12c6@nome", 7, "Unknown ckpt"),
        ("B12c6@every:0", 7, "whole number"),
        ("B12c6@full@none", 11, "given twice"),
    ],
)
def test_errors_point_at_the_character(text: str, position: int, why: str) -> None:
    with pytest.raises(MemplanError, match=why) as caught:
        Rung.parse(text)
    assert f"at character {position}" in str(caught.value)
    caret = next(line for line in str(caught.value).splitlines() if line.strip() == "^")
    assert caret.index("^") - 2 == position - 1
    assert ".," not in str(caught.value)


def test_a_batch_that_does_not_divide_names_its_neighbours() -> None:
    with pytest.raises(MemplanError, match="7 samples do not divide into 2 chunks; try B8c2 or B6c2"):
        Rung.parse("B7c2")
    with pytest.raises(MemplanError, match=r"try B4c4\."):
        Rung.parse("B3c4")


def test_lists() -> None:
    assert [str(rung) for rung in parse_rungs("B12c6, B8c4,")] == ["B12c6", "B8c4"]
    with pytest.raises(MemplanError, match="No rung"):
        parse_rungs(" , ")
    with pytest.raises(MemplanError, match="B8c4 is given twice"):
        parse_rungs("B8c4,B8c4")
