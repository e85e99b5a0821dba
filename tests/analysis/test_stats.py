"""What may be said about two handfuls of times, and what may not."""

import itertools
import math
import random
import time

import pytest

from memplan.analysis.stats import EXACT_UP_TO, difference, interval, rank_counts, rank_cut, spread

MS = 10**6


def ms(*times: float) -> list[float]:
    return [value * MS for value in times]


@pytest.mark.parametrize(("num_base", "num_new"), [(1, 1), (3, 3), (2, 5), (5, 4)])
def test_ranks_are_counted_as_by_hand(num_base: int, num_new: int) -> None:
    orders = itertools.combinations(range(num_base + num_new), num_base)
    by_hand = [0] * (num_base * num_new + 1)
    for base in orders:
        new = [place for place in range(num_base + num_new) if place not in base]
        by_hand[sum(after < before for before in base for after in new)] += 1
    assert list(rank_counts(num_base, num_new)) == by_hand
    assert sum(by_hand) == math.comb(num_base + num_new, num_base)


def test_ranks_cut_as_in_printed_tables() -> None:
    """Critical values of U, one side at 1 %, as every table of Mann and Whitney's test prints them."""
    assert [rank_cut(n, n, 0.01) for n in (3, 4, 5, 6, 7, 8, 9, 10)] == [None, None, 1, 3, 6, 9, 14, 19]
    assert rank_cut(3, 7, 0.01) == 0 and rank_cut(3, 6, 0.01) is None
    assert rank_cut(4, 5, 0.01) == 0
    assert [rank_cut(n, n, 0.025) for n in (3, 4, 5, 10)] == [None, 0, 2, 23]


def test_many_numbers_are_ranked_by_the_normal_curve_without_a_jump() -> None:
    many = EXACT_UP_TO
    exact, approximate = rank_cut(many, many, 0.01), rank_cut(many, many + 1, 0.01)
    assert exact is not None and approximate is not None
    assert abs(approximate - exact) < 0.05 * exact


def test_an_interval_holds_the_true_change_as_often_as_it_promises() -> None:
    source = random.Random(7)
    for number, miss in ((5, 0.01), (6, 0.025), (8, 0.01)):
        missed = 0
        for _ in range(600):
            base = [math.exp(source.gauss(0, 0.1)) for _ in range(number)]
            new = [1.2 * math.exp(source.gauss(0, 0.1)) for _ in range(number)]
            low, high = interval(base, new, miss)
            missed += not low <= 0.2 <= high
        assert missed / 600 <= 2 * miss + 0.015, (number, miss)


@pytest.mark.parametrize(
    ("base", "new", "label"),
    [
        ([], [], "insufficient"),
        (ms(100), [], "insufficient"),
        (ms(100, 100), ms(200, 200), "insufficient"),
        (ms(100, 101, 102, 100, 101), ms(150, 151), "insufficient"),
        (ms(100, 101, 102), ms(120, 121, 122), "worse"),
        (ms(120, 121, 122), ms(100, 101, 102), "better"),
        (ms(100, 101, 102), ms(100.5, 101.5, 101), "same"),
        (ms(100, 110, 120), ms(121, 131, 141), "ambiguous"),  # apart, but by less than the sides spread
        (ms(100, 101, 102), ms(102.5, 103, 103.5), "ambiguous"),  # apart, but by less than the least effect
        (ms(100, 101, 102, 103), ms(105, 106, 107, 108), "ambiguous"),
        (ms(100, 101, 102, 103), ms(112, 113, 114, 115), "worse"),
        (ms(100, 101, 102, 103, 104), ms(108, 109, 110, 111, 112), "worse"),
        (ms(100, 101, 102, 103, 104), ms(101, 100, 103, 102, 104), "same"),
        (ms(70, 100, 130, 90, 110), ms(75, 105, 125, 95, 105), "ambiguous"),
        (ms(100, 100, 100), ms(100, 100, 100), "same"),
    ],
)
def test_small_samples_are_judged_by_the_table(base: list[float], new: list[float], label: str) -> None:
    assert difference(base, new).label == label


def test_one_outlier_of_five_neither_makes_nor_hides_a_change() -> None:
    base = ms(100, 101, 102, 100, 101)
    assert difference(base, ms(101, 100, 300, 101, 102)).label != "worse"
    assert difference(base, ms(115, 116, 117, 60, 116)).label == "ambiguous"
    assert difference(base + ms(100, 102, 101), ms(115, 116, 117, 60, 116, 115, 117, 116)).label == "worse"


def test_f36_noise_that_is_added_to_a_step_is_no_change_of_a_short_one() -> None:
    """A share alone would lie: 0.3 ms are 15 % of a step of 2 ms, and nothing of one of a second."""
    short, shorter = ms(2.00, 2.01, 2.02, 2.00, 2.01), ms(2.30, 2.31, 2.32, 2.30, 2.31)
    assert difference(short, shorter, least_abs=0).label == "worse"
    assert difference(short, shorter).label == "same"
    assert difference(short, ms(2.80, 2.81, 2.82, 2.80, 2.81)).label == "worse"
    long = ms(1000, 1001, 1002, 1000, 1001)
    assert difference(long, [value + 0.3 * MS for value in long]).label == "same"
    assert difference(long, [value + 30 * MS for value in long]).label == "same", "below 5 %"
    assert difference(long, [value * 1.1 for value in long]).label == "worse"


def test_the_change_and_its_interval_are_shares_of_the_base() -> None:
    found = difference(ms(100, 100, 100, 100, 100), ms(125, 125, 125, 125, 125))
    assert found.change == pytest.approx(0.25)
    assert found.interval == pytest.approx((0.25, 0.25))
    back = difference(ms(125, 125, 125, 125, 125), ms(100, 100, 100, 100, 100))
    assert back.change == pytest.approx(-0.2)


def test_turning_the_sides_around_turns_the_answer_around() -> None:
    source = random.Random(3)
    turned = {"worse": "better", "better": "worse", "ambiguous": "ambiguous"}
    for _ in range(200):
        base = [100 * MS * math.exp(source.gauss(0, 0.05)) for _ in range(source.randint(3, 8))]
        new = [115 * MS * math.exp(source.gauss(0, 0.05)) for _ in range(source.randint(3, 8))]
        low, high = interval(base, new, 0.01)
        back_low, back_high = interval(new, base, 0.01)
        assert ((1 + low) * (1 + back_high), (1 + high) * (1 + back_low)) == pytest.approx((1, 1))
        label = difference(base, new).label
        if label in ("worse", "better"):
            assert difference(new, base).label in (turned[label], "ambiguous"), "a share of the larger one is smaller"


def test_a_judgement_takes_no_time() -> None:
    base = [100.0 * MS + number for number in range(40)]
    difference(base, base)
    started = time.perf_counter()
    for _ in range(20):
        difference(base, base)
    assert time.perf_counter() - started < 1


def test_spread_is_a_share_of_the_median() -> None:
    assert spread([100, 110, 130]) == pytest.approx(30 / 110)
    assert spread([100]) is None


def test_a_time_of_zero_is_no_time() -> None:
    assert difference([0, 0, 0, 0, 0], [1, 1, 1, 1, 1]).label == "insufficient"
    assert difference([10**9, 0, 10**9, 10**9], [10**9, 10**9, 10**9, 0]).label == "same"
