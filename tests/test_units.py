"""Sizes and times: text to numbers and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.errors import MemplanError
from memplan.units import (
    GIB,
    decimal_note,
    format_bytes,
    format_exact_bytes,
    format_ns,
    format_percent,
    parse_bytes,
    parse_percent,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("71GiB", 71 * GIB),
        ("71 GiB", 71 * GIB),
        ("71gib", 71 * GIB),
        ("73728MiB", 72 * GIB),
        ("0.5GiB", GIB // 2),
        ("71GB", 71 * 10**9),
        ("12345", 12345),
        ("12 B", 12),
    ],
)
def test_sizes_parse(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "lots", "GiB", "-1GiB", "0", "1.2.3GiB", "71 GiB please", "1e9", "٣GiB x"])
def test_what_is_no_size_says_how_to_type_one(text: str) -> None:
    with pytest.raises(MemplanError, match="Type it like 71GiB"):
        parse_bytes(text)


def test_decimal_sizes_are_pointed_out_and_binary_ones_are_not() -> None:
    assert decimal_note("71GB") == "71GB is decimal: 66.12 GiB. Type GiB for the binary unit."
    assert decimal_note("71GiB") is None


@given(st.integers(min_value=1, max_value=1 << 60))
def test_exact_sizes_read_back(num_bytes: int) -> None:
    assert parse_bytes(format_exact_bytes(num_bytes)) == num_bytes


def test_texts() -> None:
    assert format_bytes(71 * GIB) == "71.00 GiB"
    assert format_bytes(-3 * GIB // 2) == "-1.50 GiB"
    assert format_bytes(17) == "17 B"
    assert format_exact_bytes(6 * GIB) == "6GiB"
    assert format_ns(1_500_000_000) == "1.50 s"
    assert format_ns(999) == "999.00 ns"
    assert format_percent(0.0149) == "+1.49 %"
    assert format_percent(-1e-9) == "+0.00 %"


@pytest.mark.parametrize(("text", "frac"), [("2%", 0.02), ("0.02", 0.02), (" 0% ", 0.0)])
def test_percentages_parse(text: str, frac: float) -> None:
    assert parse_percent(text) == frac


@pytest.mark.parametrize("text", ["two", "", "%", "-1%", "100%", "nan"])
def test_what_is_no_percentage_is_refused(text: str) -> None:
    with pytest.raises(MemplanError, match="Type it like 2%"):
        parse_percent(text)
