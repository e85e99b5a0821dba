"""Times of separate processes, before and after: what can be said about their difference, and when nothing can.

Two sides of `m` and `n` numbers, one for each process: the median time of its steps. How much the steps of one process
differ among themselves says nothing here, since processes differ far more from each other.

The change is the median of all `m * n` ratios new over base (Hodges and Lehmann's). It lies in an interval of those
ratios, cut at the rank that Mann and Whitney's exact distribution gives: no shape of noise is assumed.

| processes a side | different, beyond the least effect                      | same                                |
|------------------|---------------------------------------------------------|-------------------------------------|
| fewer than 3     | never: `insufficient`                                   | never                               |
| 3 or 4           | no overlap, and a gap wider than the wider side's       | with 3: all ratios, and that gap on |
|                  | spread (half of it with 4): no rank reaches 1 % here    | either side, lie within it; with 4: |
| 5 and more       | the 98 % interval leaves out 1: a chance of 1 % a side  | the 95 % interval lies within it    |

(3 beside 7 or more, and 4 beside 5 or more, do reach 1 %, and go by the last line.) Whatever is neither is `ambiguous`:
noise that is wider than the least effect hides it, and only more processes help.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

LEAST = 3
"""Processes a side below which nothing is said about times."""
SEPARATE = 0.01
"""Chance, on either side, with which the interval that proves a difference misses."""
ALIKE = 0.025
"""Chance, on either side, with which the interval that proves sameness misses."""
LEAST_EFFECT_FRAC = 0.05
"""Changes of the time below this share are none."""
LEAST_EFFECT_NS = 500_000
"""Nor are changes below this many nanoseconds: part of the noise is added to a step, however short the step is."""
EXACT_UP_TO = 40
"""Numbers a side up to which ranks are counted exactly; beyond, the normal approximation is as good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What two sides say."""

    label: str
    """`better`, `worse`, `same`, `ambiguous` or `insufficient`; less time is better."""
    change: float | None
    """New over base, less 1; None where a side has no number."""
    interval: tuple[float, float] | None
    """Where the change lies, as the verdict used it; None where too few processes were timed."""
    least: float
    """The least effect, as a share of the base."""


def difference(
    base: Sequence[float],
    new: Sequence[float],
    *,
    least_frac: float = LEAST_EFFECT_FRAC,
    least_abs: float = LEAST_EFFECT_NS,
) -> Difference:
    """Whether the times `new` differ from `base` by more than the least effect, by the table above."""
    base, new = ([time for time in side if time > 0] for side in (base, new))  # a clock that stood still
    if not base or not new:
        return Difference(label="insufficient", change=None, interval=None, least=least_frac)
    least = max(least_frac, least_abs / statistics.median(base))
    ratios = sorted(math.log(after / before) for before in base for after in new)
    change = math.expm1(statistics.median(ratios))
    if min(len(base), len(new)) < LEAST:
        return Difference(label="insufficient", change=change, interval=None, least=least)
    low, high = interval(base, new, SEPARATE)
    if (low > 0 and change >= least) or (high < 0 and change <= -least):
        return Difference(label="worse" if low > 0 else "better", change=change, interval=(low, high), least=least)
    low, high = interval(base, new, ALIKE)
    label = "same" if -least < low and high < least else "ambiguous"
    return Difference(label=label, change=change, interval=(low, high), least=least)


def interval(base: Sequence[float], new: Sequence[float], miss: float) -> tuple[float, float]:
    """Where new over base, less 1, lies but for a chance of `miss` on either side; where so few numbers cannot promise
    that, all of their ratios, and on either side the wider spread of the two sides shared by all but two numbers."""
    ratios = sorted(math.log(after / before) for before in base for after in new)
    cut = rank_cut(len(base), len(new), miss)
    margin = 0.0
    if cut is None:
        spread = max(math.log(max(side) / min(side)) for side in (base, new))
        cut, margin = 0, spread / max(1, min(len(base), len(new)) - 2)
    return math.expm1(ratios[cut] - margin), math.expm1(ratios[-1 - cut] + margin)


@lru_cache(maxsize=256)
def rank_cut(num_base: int, num_new: int, miss: float) -> int | None:
    """How many of the ratios may be cut off at either end, so that the true one is still outside with a chance of
    `miss` at most; None where even all of them are not enough."""
    pairs = num_base * num_new
    if max(num_base, num_new) > EXACT_UP_TO:
        deviation = math.sqrt(pairs * (num_base + num_new + 1) / 12)
        return int(pairs / 2 + statistics.NormalDist().inv_cdf(miss) * deviation)
    counts = rank_counts(num_base, num_new)
    total, below = sum(counts), 0
    for rank, count in enumerate(counts):
        below += count
        if below > miss * total:
            return rank - 1 if rank else None
    raise AssertionError("a chance of less than 1")


@lru_cache(maxsize=2048)
def rank_counts(num_base: int, num_new: int) -> tuple[int, ...]:
    """In how many orders of two sides of equal numbers 0, 1, 2, ... pairs have the new one below the base's."""
    if not num_base or not num_new:
        return (1,)
    counts = [0] * (num_base * num_new + 1)
    for below, count in enumerate(rank_counts(num_base - 1, num_new)):  # the largest of all is a base
        counts[below + num_new] += count
    for below, count in enumerate(rank_counts(num_base, num_new - 1)):
        counts[below] += count
    return tuple(counts)


def spread(numbers: Sequence[float]) -> float | None:
    """Largest less smallest over the median; None for fewer than two numbers."""
    return (max(numbers) - min(numbers)) / statistics.median(numbers) if len(numbers) > 1 else None
