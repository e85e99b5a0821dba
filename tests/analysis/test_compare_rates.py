"""How often a comparison is wrong: identical code under realistic noise, and true changes that have to be seen.

A row here is one process; its steps agree within 0.3 % while processes differ by far more, as they do on real machines.
"""

import dataclasses
import random

import pytest
from samples import row_of

from memplan.analysis.compare import compare
from memplan.record import RungResult
from memplan.units import MIB

COMPARISONS = 200


@dataclasses.dataclass(frozen=True)
class Noise:
    """What a machine does to the times of processes that run by turns."""

    spread: float
    """Standard deviation between processes."""
    drift: float = 0.0
    """By how much the machine gets slower from the first to the last process."""
    outliers: float = 0.0
    """Share of processes that take half as long again."""

    def sides(self, source: random.Random, repeats: int, slower: float = 1.0) -> tuple[list[float], list[float]]:
        """Medians of the base's and the new processes, seconds, as they are measured by turns."""
        sides: tuple[list[float], list[float]] = ([], [])
        for number in range(2 * repeats):
            value = source.lognormvariate(0, self.spread) * (1 + self.drift * number / (2 * repeats))
            if source.random() < self.outliers:
                value *= 1.5
            side = number % 2 if number // 2 % 2 == 0 else 1 - number % 2  # A B B A
            sides[side].append(value * (slower if side else 1.0))
        return sides


def rows(medians: list[float], peak_bytes: int = 100 * MIB) -> tuple[RungResult, ...]:
    return tuple(
        row_of(
            repeat=number,
            peak_allocated_bytes=peak_bytes,
            step_ns=tuple(int(median * step * 10**8) for step in (0.997, 1, 1.003)),
        )
        for number, median in enumerate(medians, 1)
    )


def labels(noise: Noise, repeats: int, seed: int, slower: float = 1.0) -> dict[str, float]:
    """Share of each label of the step time over the comparisons."""
    source = random.Random(seed)
    counts: dict[str, float] = {}
    for _ in range(COMPARISONS):
        base, new = noise.sides(source, repeats, slower)
        found = compare(rows(base), rows(new))
        label = next(one.label for one in found.findings if one.metric == "step_ns")
        assert found.exit_code == (label == "worse")
        counts[label] = counts.get(label, 0) + 1 / COMPARISONS
    return counts


QUIET, BUSY, WILD = Noise(spread=0.03), Noise(spread=0.1), Noise(spread=0.3)
NOISES = {
    "3 %": QUIET,
    "10 %": BUSY,
    "30 %": WILD,
    "3 % and drift": dataclasses.replace(QUIET, drift=0.1),
    "10 % and outliers": dataclasses.replace(BUSY, outliers=0.1),
    "30 %, drift and outliers": dataclasses.replace(WILD, drift=0.1, outliers=0.1),
}


@pytest.mark.parametrize(
    ("name", "repeats"),
    [*((name, 5) for name in NOISES), ("3 %", 3), ("30 %", 3), ("30 %", 4), ("30 %", 7)],
)
def test_f35_identical_code_is_hardly_ever_called_worse(name: str, repeats: int) -> None:
    found = labels(NOISES[name], repeats, seed=repeats)
    assert found.get("worse", 0) <= 0.02, found
    assert found.get("better", 0) <= 0.02, found
    if NOISES[name].spread >= 0.1:
        assert found.get("same", 0) <= 0.02, found


def test_a_speed_lower_by_a_tenth_is_caught() -> None:
    assert labels(QUIET, 5, seed=1, slower=1 / 0.9).get("worse", 0) >= 0.9


def test_f35_noise_wider_than_the_effect_is_ambiguous_and_not_the_same() -> None:
    found = labels(WILD, 5, seed=2, slower=1 / 0.9)
    assert found.get("ambiguous", 0) >= 0.9
    assert found.get("same", 0) == 0


def test_quiet_machines_get_an_answer() -> None:
    """Rules that never say anything would pass every test above."""
    assert labels(Noise(spread=0.01), 5, seed=3).get("same", 0) >= 0.95
    assert labels(Noise(spread=0.01), 3, seed=3, slower=1.15).get("worse", 0) >= 0.95


@pytest.mark.parametrize("peak_bytes", [50 * MIB, 700 * MIB, 70_000 * MIB])
def test_five_per_cent_more_memory_are_always_caught_by_one_run(peak_bytes: int) -> None:
    source = random.Random(4)
    for _ in range(COMPARISONS // 4):
        more = int(peak_bytes * 1.05 + source.randint(0, MIB))
        found = compare(rows([1.0], peak_bytes), rows([source.lognormvariate(0, 0.3)], more))
        assert found.exit_code == 1
        assert next(one.label for one in found.findings if one.metric == "peak_allocated_bytes") == "worse"
        again = compare(rows([1.0], peak_bytes), rows([source.lognormvariate(0, 0.3)], peak_bytes))
        assert again.exit_code == 0
