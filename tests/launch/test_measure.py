"""The windows of a step, its times, and whether it trains: on the CPU with real steps, on CUDA against a stand-in."""

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, OutOfMemoryError, backend_of
from samples import run_of
from subjects import Heard, Small, Steps
from torch import nn

from memplan.backends.base import Reading
from memplan.backends.cpu import CpuBackend
from memplan.backends.failure import NotTraining
from memplan.backends.subject import Subject, subject_of_run
from memplan.launch.measure import MOST_EXTRA, Plan, measure
from memplan.models.batch import synthetic_batch
from memplan.models.factory import build_model

MIB = 1 << 20


def on_cuda(
    each: Callable[[int], Any] = lambda number: None, cuda: FakeCuda | None = None, **plan: Any
) -> tuple[Heard, tuple[str, str | None]]:
    """What is said of steps on the stand-in, and how it ended."""
    gc.freeze()  # a full collection looks at a million objects of torch's own, and there are a dozen here
    heard, cuda = Heard(), cuda or FakeCuda()
    how = Plan(**{"warmup": 2, "steps": 3} | plan)
    return heard, measure(backend_of(cuda), Steps(cuda, each).subject, how, heard)


def on_cpu(build: Callable[[], Subject], **plan: Any) -> Heard:
    """What is said of real steps."""
    gc.collect()
    gc.freeze()
    heard = Heard()
    assert measure(CpuBackend(), build, Plan(**{"warmup": 0, "steps": 2} | plan), heard) == ("ok", None)
    return heard


def test_f13_a_peak_stays_in_the_window_that_it_is_of() -> None:
    """And f14: what autotuning takes in the first step is no part of the steady state; the row knows both."""
    cuda = FakeCuda()

    def tuning(number: int) -> None:
        if number == 1:
            cuda.free(cuda.allocate(30 * MIB))

    heard, _ = on_cuda(tuning, cuda)
    windows = heard.row()["windows"]
    assert list(windows) == ["init", "first_step", "warmup", "phases", "measured"]
    assert windows["first_step"].allocated_bytes == 30 * MIB
    assert windows["measured"].allocated_bytes == windows["warmup"].allocated_bytes == 4096
    assert heard.row()["peak_allocated_bytes"] == 30 * MIB


def test_f10_retries_in_the_measured_steps_are_thrash_and_those_before_are_not() -> None:
    cuda = FakeCuda()

    def retrying(numbers: range) -> Callable[[int], None]:
        def each(number: int) -> None:
            cuda.counters["num_alloc_retries"] += number in numbers

        return each

    heard, (status, error) = on_cuda(retrying(range(1, 5)), cuda)  # first step, warm-up, marked step
    assert (status, error) == ("ok", None)
    assert heard.row()["windows"]["warmup"].num_alloc_retries == 2
    heard, (status, error) = on_cuda(retrying(range(5, 100)), cuda)
    assert status == "thrash"
    assert error is not None and error.startswith("3 requests")
    assert len(heard.row()["step_ns"]) == 3, "told at the end, with everything measured"


def test_f15_a_rung_is_ok_after_two_whole_steps_at_least_and_not_before() -> None:
    """The optimizer's state is made in the first step, so that the second one needs more."""
    cuda = FakeCuda()
    cuda.cap_bytes = 5 * MIB

    def lazily(number: int) -> None:
        cuda.free(cuda.allocate(3 * MIB))
        if number == 1:
            cuda.allocate(3 * MIB)

    with pytest.raises(OutOfMemoryError):
        on_cuda(lazily, cuda, warmup=0, steps=1)
    heard, (status, _) = on_cuda(warmup=0, steps=1)
    assert status == "ok"
    assert len(heard.row()["loss"]) == 3


@pytest.mark.parametrize("loss", [math.nan, math.inf])
@pytest.mark.parametrize("number", [1, 3, 4, 7])
def test_f16_every_step_up_to_the_last_has_a_finite_loss(number: int, loss: float) -> None:
    with pytest.raises(NotTraining, match=f"the loss of step {number} is"):
        on_cuda(lambda taken: loss if taken == number else 2.0)
    heard, (status, _) = on_cuda(lambda taken: 2.0)
    assert (status, heard.row()["loss"]) == ("ok", (2.0,) * 7)


def test_f33_nothing_but_the_step_runs_while_the_clock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event is written, no mark closes a segment, and no loss is read from the device."""
    cuda, running, watched = FakeCuda(), [False], [0]
    backend = backend_of(cuda)
    plain, heard = type(backend).clock, Heard()

    def clock(self: Any, work: Callable[[], Any]) -> Any:
        def alone() -> Any:
            running[0] = True
            try:
                return work()
            finally:
                running[0] = False

        return plain(self, alone)

    def write(event: str, **values: Any) -> None:
        assert not running[0], event
        Heard.write(heard, event, **values)

    class Loss:
        def __float__(self) -> float:
            assert not running[0]
            return 1.0

    def reset(index: int) -> None:
        watched[0] += running[0]

    monkeypatch.setattr(type(backend), "clock", clock)
    monkeypatch.setattr(heard, "write", write)
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", reset)
    measure(backend, Steps(cuda, lambda number: Loss()).subject, Plan(warmup=2, steps=3), heard)
    assert watched == [0]
    assert [said["event"] for said in heard.said if said["event"] in ("loss", "step")][-6:] == ["loss", "step"] * 3


def test_f33_warm_up_goes_on_until_steps_are_steady() -> None:
    cuda = FakeCuda()

    def settling(number: int) -> None:
        if number in (2, 3, 4):  # another segment each time
            cuda.allocate(MIB)
        cuda.now_ms += {5: 900, 6: 400}.get(number, 0)

    heard, _ = on_cuda(settling, cuda, warmup=2)
    warmup = heard.row()["windows"]["warmup"]
    assert (warmup.num_steps, warmup.steady) == (7, True)
    measured = heard.row()["windows"]["measured"]
    assert (measured.num_steps, measured.num_device_allocs, measured.steady) == (3, 0, True)


def test_a_step_that_never_settles_is_measured_and_said_to_be_unsteady() -> None:
    cuda = FakeCuda()
    heard, _ = on_cuda(lambda number: setattr(cuda, "now_ms", cuda.now_ms + 500 * (number % 2)), cuda, warmup=2)
    warmup = heard.row()["windows"]["warmup"]
    assert (warmup.num_steps, warmup.steady) == (2 + MOST_EXTRA, False)
    slow, _ = on_cuda(lambda number: setattr(cuda, "now_ms", cuda.now_ms + 15_000 * (1 + number % 2)), cuda, warmup=2)
    assert slow.row()["windows"]["warmup"].num_steps == 4, "patience has an end in seconds too"


def test_f32_there_are_steps_enough_and_seconds_enough() -> None:
    many, _ = on_cuda(steps=2, min_time_s=1.05)
    assert len(many.row()["step_ns"]) == 11, "of 0.1 s each"
    few, _ = on_cuda(steps=4, min_time_s=0.1)
    assert len(few.row()["step_ns"]) == 4


class Cyclic(Small):
    """Every step leaves its activations in a cycle of references."""

    def loss(self) -> torch.Tensor:
        hidden = self.model(self.batch.repeat(64, 1))
        cycle: list[Any] = [hidden.detach().clone()]
        cycle.append(cycle)
        return hidden.square().mean()


def test_f22_what_waits_for_the_collector_is_told_and_freed_between_windows() -> None:
    seen: list[bool] = []

    class Watching(Cyclic):
        def loss(self) -> torch.Tensor:
            seen.append(gc.isenabled())
            return super().loss()

    thresholds = gc.get_threshold()
    gc.set_threshold(10**6)  # whatever ran before in this process, no collection comes by itself
    try:
        heard = on_cpu(lambda: Watching().subject(), warmup=1, steps=3)
    finally:
        gc.set_threshold(*thresholds)
    row = heard.row()
    assert gc.isenabled() and gc.get_freeze_count() == 0, "as it was"
    assert seen[-4:] == [False, False, False, True], "off while steps are timed, on for the look behind"
    assert row["windows"]["measured"].num_collections is not None
    assert len({row["windows"][name].live_bytes for name in ("warmup", "measured")}) == 1
    (warning,) = row["warnings"]
    assert "128.00 KiB of a step hang in cycles" in warning


def test_f22_runs_of_the_collector_in_a_window_are_counted() -> None:
    heard, _ = on_cuda(lambda number: gc.collect() and None if number in (4, 6) else None)
    windows = heard.row()["windows"]
    assert (windows["phases"].num_collections, windows["measured"].num_collections) == (1, 1)


def test_the_measured_peak_is_that_of_a_bare_loop_to_the_byte() -> None:
    """The same model, batch and optimizer in a loop that a person would write."""
    run = run_of(seq=32, attention="eager")
    row = on_cpu(lambda: subject_of_run(run, torch.device("cpu"), 0)).row()

    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model.head.logits(model(batch)).flatten(0, 1), batch.labels.flatten())

    def bare() -> Reading:
        torch.manual_seed(0)
        backend = CpuBackend()
        with backend.window():
            model = build_model(run.model, attention="eager", norm="eager", dropout=0.0)
            model.train()
            batch = synthetic_batch(run, "cpu", 0)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        for _ in range(3):
            with backend.window() as window:
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert window.reading is not None
        return window.reading

    assert row["windows"]["measured"].allocated_bytes == bare().peak.allocated_bytes


@pytest.mark.parametrize(
    ("ckpt", "chunks", "update"), [("none", 1, "step"), ("full", 2, "step"), ("none", 1, "backward")]
)
def test_the_breakdown_adds_up_to_the_peak(ckpt: str, chunks: int, update: str) -> None:
    run = run_of(seq=32, ckpt=ckpt, chunks=chunks, update=update)
    heard = on_cpu(lambda: subject_of_run(run, torch.device("cpu"), 0))
    row = heard.row()
    model = build_model(run.model, attention="sdpa", norm="eager", dropout=0.0)
    params = sum(param.numel() * 4 for param in model.parameters())
    assert sum(row["breakdown"].values()) == row["peak_allocated_bytes"]
    assert min(row["breakdown"].values()) >= 0
    assert row["breakdown"]["params"] == params
    assert row["breakdown"]["activations"] > 0
    if chunks == 2:
        assert row["breakdown"]["grads"] == params
    assert sum(row["between_steps"].values()) == row["windows"]["measured"].live_bytes
    assert "activations" not in row["between_steps"]
    assert row["between_steps"]["optimizer"] >= 2 * params
    assert row["warnings"] == ()
    assert row["grad_norm"] > 0
    assert row["num_targets"] == run.step.batch * run.step.seq


def test_the_gradients_norm_is_that_before_clipping() -> None:
    run = run_of(seq=32, clip=1e-3)
    heard = on_cpu(lambda: subject_of_run(run, torch.device("cpu"), 0))
    step = subject_of_run(run, torch.device("cpu"), 0)
    step.take.accumulate()
    norm = math.sqrt(sum(float(grad.double().square().sum()) for _, grad in step.gradients()))
    assert heard.row()["grad_norm"] == pytest.approx(norm, rel=1e-5)


class Leaking(Small):
    """Every step keeps what its forward made."""

    def loss(self) -> torch.Tensor:
        hidden = self.model(self.batch.repeat(64, 1))
        self.left.append(hidden.detach())
        return hidden.square().mean()


def test_what_every_step_leaves_behind_is_a_warning_and_an_activation_between_steps() -> None:
    row = on_cpu(lambda: Leaking().subject(), warmup=1).row()
    assert "128.00 KiB more stay alive after each step" in row["warnings"]
    num_steps = 1 + row["windows"]["warmup"].num_steps + 1
    assert row["between_steps"]["activations"] == num_steps * 128 * 1024


def test_f42_a_step_that_trains_nothing_fails() -> None:
    class Useless(Small):
        def loss(self) -> torch.Tensor:
            return self.model(self.batch).square().mean() * 0

    class Exploding(Small):
        def loss(self) -> torch.Tensor:
            return (self.model(self.batch) * 1e30).square().mean().clamp(max=1.0) + (
                self.model.weight.sum() - self.model.weight.sum().detach()
            ) * float("inf")

    class Frozen(Small):
        def __call__(self, mark: Callable[[str], None]) -> torch.Tensor:
            kept = [param.detach().clone() for param in self.model.parameters()]
            loss = super().__call__(mark)
            with torch.no_grad():
                for param, value in zip(self.model.parameters(), kept, strict=True):
                    param.copy_(value)
            return loss

    for kind, why in ((Useless, "gradient norm of the first step is zero"), (Frozen, "no parameter has changed")):
        with pytest.raises(NotTraining, match=why):
            on_cpu(lambda kind=kind: kind().subject())  # type: ignore[misc]
    with pytest.raises(NotTraining, match=r"the loss of step 1 is nan|gradient norm of the first step is"):
        on_cpu(lambda: Exploding().subject())
    with pytest.raises(NotTraining, match="no token of the batch has a label"):
        on_cpu(lambda: Small().subject(num_targets=0))
    with pytest.raises(NotTraining, match="no parameter has changed"):
        on_cpu(lambda: Small(lr=0.0).subject())


def test_f42_a_learning_rate_of_somebody_elses_may_begin_at_zero() -> None:
    class WarmingUp(Small):
        def __call__(self, mark: Callable[[str], None]) -> torch.Tensor:
            loss = super().__call__(mark)
            self.optimizer.param_groups[0]["lr"] = 0.1
            return loss

    on_cpu(lambda: WarmingUp(lr=0.0).subject(patient=True))
    with pytest.raises(NotTraining, match="no parameter has changed"):
        on_cpu(lambda: Small(lr=0.0).subject(patient=True))


def test_f42_what_nobody_can_look_at_is_a_warning() -> None:
    constant = on_cpu(lambda: Subject(take=lambda mark: 1.0)).row()["warnings"]
    assert constant == ("no parameters that train were found, so nobody knows whether it trains",)
    small = Small()

    def silent(mark: Callable[[str], None]) -> None:
        small(mark)

    heard = on_cpu(lambda: Subject(take=silent, models={"": small.model}, optimizers=[small.optimizer]))
    assert heard.row()["warnings"] == ("the step returns no loss, so nobody looked whether it is finite",)


def test_f25_the_attention_that_ran_is_told_and_math_is_a_warning() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    run = run_of(seq=32)
    assert on_cpu(lambda: subject_of_run(run, torch.device("cpu"), 0)).row()["attention"] == {"flash": 4}
    with sdpa_kernel(SDPBackend.MATH):
        row = on_cpu(lambda: subject_of_run(run, torch.device("cpu"), 0)).row()
    assert row["attention"] == {"math": 4}
    assert any("fell back to its math kernel in 4 of 4 calls" in text for text in row["warnings"])


def test_what_goes_wrong_while_looking_is_no_failure_of_the_rung() -> None:
    heard = Heard()
    small = Small()

    def take(mark: Callable[[str], None]) -> torch.Tensor:
        if heard.phase == "look":
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return small(mark)

    build = lambda: Subject(take=take, models={"": small.model}, optimizers=[small.optimizer])  # noqa: E731
    assert measure(CpuBackend(), build, Plan(warmup=1, steps=1), heard) == ("ok", None)
    assert "looking failed with OutOfMemoryError" in heard.row()["warnings"][0]
