"""How a rung that fails is told: its kind, its moment, its numbers, and that nothing runs behind it."""

import dataclasses
import gc
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import AcceleratorError, FakeCuda, OutOfMemoryError, fake_torch
from samples import run_of
from subjects import Heard, Small, Steps
from torch.utils.checkpoint import checkpoint

from memplan.backends.base import Room
from memplan.backends.cpu import CpuBackend
from memplan.backends.cuda import CudaBackend
from memplan.backends.failure import (
    MOST_LETTERS,
    MOST_TEXT,
    NotTraining,
    explain,
    is_poisoning,
    requested_bytes,
    status_of,
)
from memplan.backends.subject import Subject
from memplan.launch import worker
from memplan.record import Failure
from memplan.spec.device import card
from memplan.spec.entry import EntryRun
from memplan.units import GIB

EMPTY = Room(free_bytes=70 * GIB, total_bytes=80 * GIB, reserved_bytes=8 * GIB)
FULL = Room(free_bytes=GIB // 2, total_bytes=80 * GIB, reserved_bytes=70 * GIB)
AT_CAP = Room(free_bytes=60 * GIB, total_bytes=140 * GIB, reserved_bytes=70 * GIB, cap_bytes=71 * GIB)
KNOWN: list[tuple[BaseException, str]] = [
    (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "oom"),
    (AcceleratorError("CUDA error: unknown", error_code=2), "oom"),
    (AcceleratorError("CUDA error: out of memory"), "oom"),
    (RuntimeError("CUDA driver error: out of memory"), "oom"),
    (
        RuntimeError("NCCL error: unhandled cuda error, NCCL version 2.27\nLast error: Cuda failure 2 'out of memory'"),
        "oom",
    ),
    (AcceleratorError("CUDA error: an illegal memory access was encountered", error_code=700), "error"),
    (AcceleratorError("CUDA error: invalid configuration argument", error_code=9), "error:kernel_limit"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), "host_oom"),
    (MemoryError(), "host_oom"),
    (NotTraining("the loss of step 3 is nan"), "numerics_fail"),
    (KeyError("out of memory"), "error"),
    (ValueError("CUDA error: out of memory"), "error"),
    (RuntimeError("something new about memory"), "error"),
]


@pytest.mark.parametrize(("error", "status"), KNOWN, ids=lambda value: str(value)[:30])
def test_f03_type_then_code_then_text_and_what_is_unknown_is_an_error(error: BaseException, status: str) -> None:
    assert status_of(error, on_cuda=True, room=EMPTY) == status


def test_f03_on_the_cpu_the_hosts_memory_is_the_devices() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert status_of(caught.value, on_cuda=False, room=None) == "oom"
    assert requested_bytes(caught.value) == 4 << 60
    assert status_of(MemoryError(), on_cuda=False, room=None) == "oom"


def test_f03_what_an_error_was_raised_from_counts() -> None:
    try:
        try:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        except RuntimeError as error:
            raise ValueError("the compiled graph failed") from error
    except ValueError as error:
        assert status_of(error, on_cuda=True, room=EMPTY) == "oom"
        assert requested_bytes(error) == 20 << 20


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        '!handles_.at(i) INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp"',
        "CUDA driver error: device not ready",
    ],
)
def test_f04_a_library_that_cannot_start_is_suspected_where_nothing_is_free(text: str) -> None:
    error = RuntimeError(text)
    assert status_of(error, on_cuda=True, room=FULL) == "oom_suspect"
    assert status_of(error, on_cuda=True, room=AT_CAP) == "oom_suspect"
    assert status_of(error, on_cuda=True, room=EMPTY) == "error", "an index out of range says the same"
    assert status_of(error, on_cuda=True, room=None) == "error"


def test_f05_so_is_a_convolution_that_is_not_supported() -> None:
    error = RuntimeError(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous"
    )
    assert status_of(error, on_cuda=True, room=FULL) == "oom_suspect"
    assert status_of(error, on_cuda=True, room=EMPTY) == "error"


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: invalid configuration argument\nCUDA kernel errors might be asynchronously reported",
        "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got false.",
        "Expected query.size(0) <= 65535 to be true, but got false.",
        "upsample_nearest_nhwc only supports output tensors with less than INT_MAX elements",
        "input tensor is too large for this kernel",
        "value cannot be converted to type int without overflow",
    ],
)
def test_f06_a_kernel_at_its_limit_is_no_lack_of_memory(text: str) -> None:
    assert status_of(RuntimeError(text), on_cuda=True, room=FULL) == "error:kernel_limit"
    assert status_of(ValueError(text), on_cuda=True, room=FULL) == "error"


@pytest.mark.parametrize(
    ("error", "poisons"),
    [
        (AcceleratorError("CUDA error: an illegal memory access was encountered", error_code=700), True),
        (AcceleratorError("CUDA error: device-side assert triggered", error_code=710), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (OutOfMemoryError("CUDA out of memory."), False),
        (ValueError("illegal memory access"), False),
    ],
)
def test_errors_that_poison_a_context_are_marked(error: BaseException, poisons: bool) -> None:
    assert is_poisoning(error) is poisons


def ended(job: dict[str, Any], backend: Any, subject: Callable[[], Subject], monkeypatch: pytest.MonkeyPatch) -> Heard:
    """What a worker says of a job, its device and its step stood in for."""
    gc.freeze()
    heard = Heard()
    monkeypatch.setattr(worker, "open_backend", lambda device: backend)
    monkeypatch.setattr(worker, "subject_of", lambda run, backend, seed: subject())
    work = worker.Work(job, heard)
    try:
        heard.write("end", **work.done())
    except BaseException as error:
        heard.write("end", **work.failed(error))
    return heard


def cuda_job(**more: Any) -> dict[str, Any]:
    """A job on a card."""
    return {
        "run": run_of().to_dict() | {"device": dataclasses.asdict(card("h100-80g"))},
        "warmup": 2,
        "steps": 2,
    } | more


def test_a_rung_that_ran_out_of_memory_gives_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()

    def each(number: int) -> None:
        cuda.free(cuda.allocate(3 << 20))
        if number == 2:
            cuda.allocate(5_000_000)

    backend = CudaBackend(fake_torch(cuda))
    heard = ended(cuda_job(cap_bytes=4 << 20), backend, Steps(cuda, each).subject, monkeypatch)
    (end,) = heard.of("end")
    failure = Failure.from_dict(end["failure"])
    assert end["status"] == "oom"
    assert (failure.window, failure.phase) == ("warmup", "forward")
    assert failure.requested_bytes == 5_000_192, "as the observer heard it, not as the text rounds it"
    assert failure.allocated_bytes == 3 << 20
    assert failure.reserved_bytes == 3 << 20
    assert failure.cap_bytes == 4 << 20
    assert failure.free_bytes == 80 * GIB - (3 << 20)
    assert failure.text is not None and failure.text.startswith("CUDA out of memory.")
    assert "in warmup" in end["error"]
    assert not end["poisoned"]


def test_f44_the_cap_holds_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a rung that cannot pass fails with its first request too many, and not after minutes of thrashing."""
    cuda = FakeCuda()
    steps = Steps(cuda)

    def build() -> Subject:
        cuda.calls.append(("build", None))
        return steps.subject()

    heard = ended(cuda_job(cap_bytes=40 * GIB), CudaBackend(fake_torch(cuda)), build, monkeypatch)
    assert cuda.calls == [("cap", 0.5), ("build", None)]
    assert heard.of("environment")[0]["cap_bytes"] == 40 * GIB
    assert heard.of("end")[0]["status"] == "ok"
    uncapped = FakeCuda()
    ended(cuda_job(), CudaBackend(fake_torch(uncapped)), Steps(uncapped).subject, monkeypatch)
    assert uncapped.calls == []


@pytest.mark.parametrize("fails", [False, True])
def test_f47_history_is_recorded_in_a_second_run_alone(
    fails: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def each(number: int) -> None:
        if fails and number == 3:
            cuda.allocate(100 * GIB)

    cuda = FakeCuda()
    ended(cuda_job(), CudaBackend(fake_torch(cuda)), Steps(cuda, each).subject, monkeypatch)
    assert cuda.calls == [], "neither recorded nor dumped"
    cuda, path = FakeCuda(), str(tmp_path / "B1.snapshot.pickle")
    heard = ended(cuda_job(snapshot=path), CudaBackend(fake_torch(cuda)), Steps(cuda, each).subject, monkeypatch)
    assert [name for name, _ in cuda.calls] == (["record", "dump"] if fails else ["record"])
    if fails:
        assert cuda.calls[1] == ("dump", path)
        assert heard.of("end")[0]["failure"]["snapshot"] == "B1.snapshot.pickle"


def test_a_snapshot_that_nobody_can_take_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"run": run_of().to_dict(), "warmup": 0, "steps": 1, "snapshot": "x.pickle"}
    heard = ended(job, CpuBackend(), lambda: Small().subject(), monkeypatch)
    assert "only CUDA's allocator records its history" in heard.row()["warnings"][0]


class Failing(Small):
    """Fails in its second step, in `where`."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.num_taken = 0

    def __call__(self, mark: Callable[[str], None]) -> torch.Tensor:
        self.num_taken += 1
        return super().__call__(mark)

    def loss(self) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.model(self.batch))
        if self.num_taken == 2 and self.where == "forward":
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        if self.num_taken == 2:
            hidden.register_hook(self.fail)
        return hidden.square().mean()

    def fail(self, gradient: torch.Tensor) -> None:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_f01_f02_nothing_runs_behind_a_failure(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception keeps the failed step's tensors alive, and a backward that failed keeps them for good: the process
    tells who is there, and is over. Another rung has another process."""
    failing = Failing(where)
    job = {"run": run_of().to_dict(), "warmup": 1, "steps": 3}
    heard = ended(job, CpuBackend(), failing.subject, monkeypatch)
    assert failing.num_taken == 2
    assert [said["event"] for said in heard.said][-2:] == ["phase", "end"]
    failure = Failure.from_dict(heard.of("end")[0]["failure"])
    assert (failure.window, failure.phase, failure.requested_bytes) == ("warmup", where, GIB)
    held = {(tensor.category, tensor.op) for tensor in failure.alive}
    assert {("params", "parameter"), ("activations", "addmm")} <= held


def test_a_process_does_one_job_and_says_so_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "end_with_parent", lambda: None)
    monkeypatch.setattr(
        worker.Work, "done", lambda self: (_ for _ in ()).throw(OutOfMemoryError("CUDA out of memory."))
    )
    job, events = tmp_path / "job.json", tmp_path / "events.jsonl"
    job.write_text(json.dumps({"run": {}}))
    assert worker.main([str(job), str(events)]) == 0
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["end"]
    assert lines[0]["status"] == "oom"


def test_f23_a_recomputation_that_differs_is_told_with_what_differed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another dtype in the recomputation, as a cache, autocast or another attention kernel would make it."""

    class Changing(Small):
        num_runs = 0

        def block(self, rows: torch.Tensor) -> torch.Tensor:
            self.num_runs += 1
            low = rows.double() if self.num_runs == 2 else rows
            return torch.tanh(torch.tanh(low)).to(rows.dtype)

        def loss(self) -> torch.Tensor:
            return checkpoint(self.block, self.model(self.batch), use_reentrant=False).square().mean()

    job = {"run": run_of().to_dict(), "warmup": 0, "steps": 1}
    heard = ended(job, CpuBackend(), Changing().subject, monkeypatch)
    (end,) = heard.of("end")
    assert end["status"] == "ac_error"
    assert "saved metadata" in end["error"] and "torch.float64" in end["error"]
    assert "sdpa_kernel" in end["error"]
    assert "recomputed metadata" in end["failure"]["text"]
    assert end["failure"]["alive"] == ()


def test_f23_an_oom_inside_a_recomputation_is_an_oom(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(Small):
        num_runs = 0

        def block(self, rows: torch.Tensor) -> torch.Tensor:
            self.num_runs += 1
            if self.num_runs == 2:
                torch.empty(1 << 60)
            return torch.tanh(rows)

        def loss(self) -> torch.Tensor:
            return checkpoint(self.block, self.model(self.batch), use_reentrant=False).square().mean()

    job = {"run": run_of().to_dict(), "warmup": 0, "steps": 1}
    assert ended(job, CpuBackend(), Large().subject, monkeypatch).of("end")[0]["status"] == "oom"


def test_a_poisoned_context_is_said_with_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()

    def each(number: int) -> None:
        if number == 5:
            raise AcceleratorError("CUDA error: device-side assert triggered", error_code=710)

    heard = ended(cuda_job(), CudaBackend(fake_torch(cuda)), Steps(cuda, each).subject, monkeypatch)
    (end,) = heard.of("end")
    assert (end["status"], end["poisoned"]) == ("error", True)
    assert "in timed" in end["error"] or "in measured" in end["error"]


def test_a_healthy_device_multiplies_and_a_sick_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"kind": "health", "run": run_of().to_dict()}
    heard = ended(job, CpuBackend(), lambda: Small().subject(), monkeypatch)
    assert [said.get("phase", said.get("status")) for said in heard.said] == ["health", "ok"]
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, **options: ones(*shape, **options) * 1.5)
    (end,) = ended(job, CpuBackend(), lambda: Small().subject(), monkeypatch).of("end")
    assert end["status"] == "error"
    assert end["error"].startswith("The device computes wrong")


def test_a_comparison_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"kind": "parity", "run": run_of(batch=2, seq=8, ckpt="full").to_dict()}
    heard = ended(job, CpuBackend(), lambda: Small().subject(), monkeypatch)
    assert heard.row()["parity"] == {
        "same": True,
        "rung": "B2c1@full full",
        "says": "40 tensors equal the plain step's bit by bit, and 260 recomputed results theirs",
    }


def test_errors_are_told_in_one_line() -> None:
    assert explain(RuntimeError("first\nsecond")) == "RuntimeError: first"
    assert explain(KeyError()) == "KeyError"
    assert explain(NotTraining("the loss of step 3 is nan")) == "the loss of step 3 is nan"


def test_an_error_that_goes_on_and_on_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def each(number: int) -> None:
        raise ValueError("z" * 5_000_000)

    cuda = FakeCuda()
    (end,) = ended(cuda_job(), CudaBackend(fake_torch(cuda)), Steps(cuda, each).subject, monkeypatch).of("end")
    assert end["status"] == "error"
    assert end["error"].startswith("ValueError: " + "z" * (MOST_LETTERS - 12) + "... (4,999,012 more characters) [in ")
    assert end["failure"]["text"] == "z" * MOST_TEXT + "... (4,980,000 more characters)"


def test_an_error_that_cannot_be_told_is_an_error_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class MuteError(RuntimeError):
        def __str__(self) -> str:
            raise KeyError("no text")

    def each(number: int) -> None:
        raise MuteError

    cuda = FakeCuda()
    (end,) = ended(cuda_job(), CudaBackend(fake_torch(cuda)), Steps(cuda, each).subject, monkeypatch).of("end")
    assert (end["status"], end["poisoned"]) == ("error", False)
    assert end["error"].startswith("MuteError: (its text cannot be told: KeyError) [in first_step")


def test_a_users_step_is_found_out_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module, its optimizer and its gradients, without a word about them; its marks where it wants them."""
    (tmp_path / "my_own_step.py").write_text(
        "import torch\n"
        "def make_step(batch, chunks, ckpt):\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32))\n"
        "    optimizer = torch.optim.AdamW(model.parameters())\n"
        "    data = torch.randn(batch, 32)\n"
        "    def step(mark):\n"
        "        mark('forward')\n"
        "        loss = model(data).square().mean()\n"
        "        mark('backward')\n"
        "        loss.backward()\n"
        "        mark('optimizer')\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        "        return loss\n"
        "    return step\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(worker, "open_backend", lambda device: CpuBackend())
    gc.collect()
    gc.freeze()
    run = EntryRun(entry="my_own_step:make_step", batch=16, chunks=1, ckpt="none", device=run_of().device)
    heard = Heard()
    assert worker.Work({"entry": run.to_dict(), "warmup": 0, "steps": 2}, heard).done()["status"] == "ok"
    row = heard.row()
    params = 2 * (32 * 32 + 32) * 4
    assert row["breakdown"]["params"] == params
    assert row["between_steps"]["optimizer"] == 2 * params + 4 * 4
    assert row["between_steps"]["other"] == 16 * 32 * 4
    assert math.isfinite(row["grad_norm"]) and row["grad_norm"] > 0
    assert row["num_targets"] is None
    assert set(row["phase_peaks"]) == {"init", "forward", "backward", "optimizer"}
    assert len(row["loss"]) == 4
