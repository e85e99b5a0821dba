"""The largest size that fits, where each size that is asked about costs a trace."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

FARTHEST = 64
"""Times the largest size that fits so far, beyond which no line is followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a trace said of one size."""

    fits: bool
    """Whether it finds room."""
    num_bytes: int | None
    """What it needs; None where there is no such step."""


def largest_fitting(
    ask: Callable[[int], Probe], limit_bytes: int, *, near: int, known: Mapping[int, Probe], most: int | None = None
) -> tuple[int, bool]:
    """The largest size from 1 to `most` that fits, sought from `near` on, 0 when none does; and whether it ends where
    there is no step of the next size. It was asked about, and so was the next one.

    Memory grows by pieces of lines: the line through the two largest sizes that fit says where to ask next, then the
    one between a size that fits and one that needs more than the limit. Every second guess behind a miss is the middle,
    since fragments, and lengths that a module does not take, lie on no line.
    """
    answers = dict(known)

    def at(size: int) -> Probe:
        if size not in answers:
            answers[size] = ask(size)
        return answers[size]

    if most is not None and most < 1:
        return 0, True
    low = near if at(near).fits else 1
    if not at(low).fits:
        return 0, at(low).num_bytes is None
    high = near if low < near else None if most is None else most + 1  # the least that does not fit
    halve = False
    while high is None or high - low > 1:
        if high is not None and high in answers:
            guess = (low + high) // 2 if halve else between(low, high, at(low), at(high), limit_bytes)
            halve = not halve
        else:
            smaller = [size for size, answer in answers.items() if answer.fits and size < low]
            guess = beyond(max(smaller), low, at(max(smaller)), at(low), limit_bytes) if smaller else low + 1
        guess = max(guess, low + 1) if high is None else min(max(guess, low + 1), high - 1)
        if at(guess).fits:
            low = guess
        else:
            high = guess
    return low, high not in answers or answers[high].num_bytes is None


def beyond(first: int, second: int, one: Probe, other: Probe, limit_bytes: int) -> int:
    """Where the line through two sizes that fit meets the limit."""
    assert one.num_bytes is not None and other.num_bytes is not None
    rise = other.num_bytes - one.num_bytes
    farthest = FARTHEST * second
    if rise <= 0:
        return farthest
    return min(second + (limit_bytes - other.num_bytes) * (second - first) // rise, farthest)


def between(low: int, high: int, fitting: Probe, missing: Probe, limit_bytes: int) -> int:
    """Where the line between a size that fits and one that does not meets the limit; the middle where there is none."""
    if fitting.num_bytes is None or missing.num_bytes is None or missing.num_bytes <= limit_bytes:
        return (low + high) // 2
    return low + (limit_bytes - fitting.num_bytes) * (high - low) // (missing.num_bytes - fitting.num_bytes)
