"""What a step costs inside the ladder's timed loop, against a loop written by hand around the same model.

    python tests/benchmarks/ladder_overhead.py [--model tiny] [--batch 4] [--seq 256] [--rounds 40]

On the CPU, in one process, in rounds of ladder, hand, hand, ladder: a machine that gets slower or faster does so for
both, and the median of the rounds' ratios counts. The peak that the ladder's `measured` window tells is held against a
hand-written loop, from its first line on, which must need the same to the byte. Exit code 1 when the ratio is more than
3 % away from 1, or the peaks differ at all.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import memplan
from memplan.backends.cpu import CpuBackend
from memplan.backends.subject import Subject, subject_of_run
from memplan.launch.events import Events
from memplan.launch.measure import Measuring, Plan
from memplan.models.batch import IGNORED, Batch, synthetic_batch
from memplan.models.factory import build_model
from memplan.models.registry import model_spec
from memplan.spec import RunSpec, StepSpec
from memplan.spec.device import CPU
from memplan.units import format_bytes, format_ns, format_percent

LARGEST = 0.03
"""Share by which the ladder's steps may differ."""
DEVICE = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Both loops, side by side."""

    ladder_ns: list[int]
    """Times of the ladder's steps, as its events tell them."""
    hand_ns: list[int]
    """Times of the hand-written steps."""
    ladder_bytes: int
    """Peak of the ladder's `measured` window."""
    hand_bytes: int
    """Peak of a hand-written loop's second step."""

    @property
    def differences(self) -> list[float]:
        """Of each round, the ladder's two steps over the hand-written two, less 1."""
        pairs = zip(_twos(self.ladder_ns), _twos(self.hand_ns), strict=True)
        return [ladder / hand - 1 for ladder, hand in pairs]

    @property
    def difference_frac(self) -> float:
        """Their median."""
        return median(self.differences)

    @property
    def holds(self) -> bool:
        """Whether times are close and peaks the same."""
        return abs(self.difference_frac) <= LARGEST and self.ladder_bytes == self.hand_bytes


def _twos(times_ns: list[int]) -> list[int]:
    return [first + second for first, second in zip(times_ns[::2], times_ns[1::2], strict=True)]


def hand_step(model: Any, batch: Batch, optimizer: torch.optim.Optimizer) -> float:
    """One optimizer step as anybody would write it, no tensor's name outliving its use."""
    labels = batch.labels.flatten()
    total = F.cross_entropy(
        model.head.logits(model(batch).flatten(0, 1)).float(), labels, ignore_index=IGNORED, reduction="sum"
    )
    loss: Tensor = total / int((labels != IGNORED).sum())
    del total
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def hand_peak(run: RunSpec) -> int:
    """Peak of the second step of a loop written by hand, with all that the loop made before."""
    with memplan.PeakWindow(DEVICE) as window:
        torch.manual_seed(0)
        model = build_model(run.model)
        batch = synthetic_batch(run, DEVICE, 0, vocab=None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
        for _ in range(2):
            hand_step(model, batch, optimizer)
            window.step()
    return window.history[-1].peak.allocated_bytes


class LadderLoop:
    """The ladder's own loop around a subject, brought to where steps are timed."""

    def __init__(self, run: RunSpec, file: Any) -> None:
        self._file = file
        self._measuring = Measuring(CpuBackend(), Plan(warmup=1, steps=1), Events(file))
        self._measuring.build(lambda: subject_of_run(run, DEVICE, 0))
        self._measuring.first_step()
        self._measuring.warm_up()
        self._measuring.marked("measured")

    @property
    def subject(self) -> Subject:
        """What it measures."""
        return self._measuring.subject

    @property
    def peak_bytes(self) -> int:
        """What its `measured` window says."""
        (window,) = (event for event in self._events("window") if event["name"] == "measured")
        return int(window["peak"]["allocated_bytes"])

    def timed(self) -> int:
        """Time of one step of its timed loop, as it writes it down."""
        self._measuring.time(None)
        return int(self._events("step")[-1]["ns"])

    def _events(self, name: str) -> list[dict[str, Any]]:
        self._file.seek(0)
        return [event for event in map(json.loads, self._file) if event["event"] == name]


def by_hand(subject: Subject) -> Callable[[], int]:
    """Takes one step by hand on the subject's own model and optimizer, and says its time."""
    (model,), (optimizer,) = subject.models.values(), subject.optimizers
    batch: Batch = subject.take.batch  # type: ignore[attr-defined]

    def timed() -> int:
        start_ns = time.perf_counter_ns()
        hand_step(model, batch, optimizer)
        return time.perf_counter_ns() - start_ns

    return timed


def compare(run: RunSpec, rounds: int) -> Comparison:
    """Both loops of `run`: two steps of each a round."""
    with tempfile.TemporaryFile("w+") as file:
        loop = LadderLoop(run, file)
        hand = by_hand(loop.subject)
        ladder_ns, hand_ns = [], []
        for _ in range(rounds):
            ladder_ns.append(loop.timed())
            hand_ns += [hand(), hand()]
            ladder_ns.append(loop.timed())
        ladder_bytes = loop.peak_bytes
    return Comparison(ladder_ns=ladder_ns, hand_ns=hand_ns, ladder_bytes=ladder_bytes, hand_bytes=hand_peak(run))


def report(found: Comparison) -> str:
    """The comparison in lines."""
    low, _, high = quantiles(found.differences, n=4)
    return "\n".join(
        (
            f"ladder   {format_ns(int(median(found.ladder_ns)))} a step, the median of {len(found.ladder_ns)}",
            f"by hand  {format_ns(int(median(found.hand_ns)))} a step, the median of {len(found.hand_ns)}",
            f"the ladder's steps take {format_percent(found.difference_frac)} (at most {LARGEST:.0%} either way);"
            f" half of the rounds between {format_percent(low)} and {format_percent(high)}",
            f"peak     {found.ladder_bytes} bytes in the ladder, {found.hand_bytes} by hand"
            f" ({format_bytes(found.hand_bytes)})",
        )
    )


def main(arguments: list[str]) -> int:
    """Exit code, as the first lines of this file say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=40)
    asked = parser.parse_args(arguments)
    step = StepSpec(batch=asked.batch, seq=asked.seq)
    found = compare(RunSpec(model=model_spec(asked.model), step=step, device=CPU), asked.rounds)
    print(report(found))
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
