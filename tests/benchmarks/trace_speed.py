"""How fast a Qwen3-4B step is traced, against torch's own tracker on the same step in the same process.

    python tests/benchmarks/trace_speed.py [--tracker]

36 blocks, B4, S1100, bf16, AdamW foreach. Without `--tracker` only ours is timed. The tracker needs half a minute.
"""

import dataclasses
import resource
import sys
import time

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.backends.simulated import simulate, trace_steps
from memplan.models.registry import model_spec
from memplan.spec import RunSpec, StepSpec
from memplan.spec.device import card
from memplan.step.builder import build_step
from memplan.units import format_bytes

SEQ = 1100


class AnswerReads(TorchDispatchMode):
    """Lets a step on fake tensors read values, as the trace does by itself."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


def question(batch: int = 4, seq: int = SEQ) -> RunSpec:
    step = StepSpec(batch=batch, seq=seq, precision="bf16", optimizer="adamw-foreach")
    return RunSpec(model=model_spec("qwen3-4b"), step=step, device=card("h100-80g"))


def seconds(work: object) -> float:
    start = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - start


def tracker_seconds(run: RunSpec) -> float:
    """Seconds of one step under torch.distributed._tools.mem_tracker.MemTracker, building not counted."""
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(allow_non_fake_inputs=True), AnswerReads():
        step = build_step(run, torch.device("cpu"))
        tracker = MemTracker()
        tracker.track_external(step.model, step.optimizer)
        with tracker:
            return seconds(step)


def main() -> None:
    run = question()
    simulate(dataclasses.replace(run, model=model_spec("tiny")))  # imports and caches
    ours = min(seconds(lambda: simulate(run)) for _ in range(3))
    print(f"memplan, two steps, grown from a few blocks: {ours:.2f} s")
    print(f"memplan, another batch and length: {seconds(lambda: simulate(question(32, 4096))):.2f} s")
    print(f"memplan, two steps, every block traced: {seconds(lambda: trace_steps(run)):.2f} s")
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"largest host memory so far: {format_bytes(peak_bytes)}")
    if "--tracker" in sys.argv:
        theirs = tracker_seconds(run)
        print(f"MemTracker, one step: {theirs:.2f} s, {theirs / ours:.1f} times as long")


if __name__ == "__main__":
    main()
