"""An estimate of a module of the user's own: states by formula equal to the trace's, peaks that are the trace's."""

import sys
from pathlib import Path
from typing import Any

import pytest

from memplan import api
from memplan.api_module import module_states, traced
from memplan.api_sweep import sweep
from memplan.errors import MemplanError
from memplan.estimate.reading import largest as ledger_peaks
from memplan.estimate.states import FORMULAS
from memplan.estimate.step import write_step
from memplan.estimate.traced import sum_of
from memplan.models.registry import model_spec
from memplan.record import Estimate, Fit
from memplan.record.trace import TracedRun
from memplan.report.estimate_page import estimate_json, estimate_page, witnesses
from memplan.spec import DeviceSpec, Ladder, RunSpec, StepSpec
from memplan.spec.device import CPU, card
from memplan.step.optimizer_low_bit import LOW_BIT
from memplan.units import MIB, format_exact_bytes

CODE = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 160), nn.Linear(160, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(97, 64), nn.Linear(64, 97, bias=False)
        self.head.weight = self.tokens.weight
        self.stack = nn.ModuleList(Layer() for _ in range(2))
        self.stack[0].up.requires_grad_(False)
        self.unused = nn.Linear(64, 64)
        self.register_buffer("turns", torch.zeros(32, dtype=torch.complex64))
        self.longest = None

    def forward(self, tokens):
        if self.longest is not None and tokens.size(1) > self.longest:
            raise ValueError(f"no more than {self.longest} tokens")
        x = self.tokens(tokens)
        for layer in self.stack:
            x = layer(x)
        return self.head(x)


def make():
    return Net()


def frozen():
    return Net().requires_grad_(False)


def plain():
    net = Net()
    net.unused = None
    return net


def short():
    net = Net()
    net.longest = 256
    return net


def raises():
    raise OSError("no weights here")
"""


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the user's code, stood in."""
    (tmp_path / "mynet.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "broken.py").write_text("import nothing_of_the_sort\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "mynet", raising=False)


def run_on(device: DeviceSpec, name: str = "make", **step: Any) -> RunSpec:
    return RunSpec(model=model_spec(f"mynet:{name}"), step=StepSpec(**{"batch": 2, "seq": 32} | step), device=device)


def question(rungs: str = "B2c1", **values: Any) -> Ladder:
    return Ladder.from_dict({"model": "mynet:make", "seq": 64, "rungs": rungs} | values, name="a test", origin="here")


def asked(rungs: str = "B2c1", **values: Any) -> tuple[Estimate, Fit]:
    return api.estimate(question(rungs, **values), card("h100-80g"))


def between_steps(found: TracedRun) -> dict[str, int]:
    return {name: sum_of(found.steps.steady.between, name, found.run.device) for name in FORMULAS}


def states_by_both(device: DeviceSpec, name: str = "make", **step: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the states between two steps by formula and by trace."""
    run = run_on(device, name, **step)
    by_formula = module_states(run)[1].held.to_dict()
    return {name: by_formula[name] for name in FORMULAS}, between_steps(traced(run))


SETTINGS = [
    {"optimizer": "adamw", "precision": "bf16-mixed"},
    {"optimizer": "adamw-foreach", "precision": "bf16-masters"},
    {"optimizer": "adamw-8bit", "precision": "fp32"},
]


@pytest.mark.parametrize("step", SETTINGS, ids=str)
def test_states_by_formula_are_the_traces_to_the_byte(step: dict[str, Any]) -> None:
    by_formula, by_trace = states_by_both(card("h100-80g"), **step)
    assert by_formula == by_trace
    assert all(by_formula.values())


@pytest.mark.slow
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-masters"])
@pytest.mark.parametrize(
    "optimizer",
    ["adamw", "adamw-foreach", "adamw-loop", "adamw-8bit", "adamw-8bit-paged", "adamw-8bit-torchao",
     "adamw-4bit-torchao", "sgd", "sgd-momentum", "adafactor", "muon"],
)  # fmt: skip
@pytest.mark.parametrize("device", [CPU, card("h100-80g")], ids=lambda device: device.name)
def test_all_states_are(device: DeviceSpec, optimizer: str, precision: str, update: str) -> None:
    if device is CPU and optimizer.startswith("adamw-8bit") and "torchao" not in optimizer:
        pytest.skip("bitsandbytes steps on a GPU only")
    name = "plain" if update == "backward" else "make"  # torchao has a rate for each optimizer, idle ones too
    by_formula, by_trace = states_by_both(device, name, optimizer=optimizer, precision=precision, update=update)
    assert by_formula == by_trace


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "ddp:view", "zero1", "fsdp2", "fsdp2:offload"])
def test_a_ranks_states_are(parallel: str) -> None:
    name = "plain" if parallel.startswith("ddp") else "make"  # DDP waits for idle parameters
    by_formula, by_trace = states_by_both(card("h100-80g"), name, parallel=parallel, world=4, optimizer="adamw-foreach")
    assert by_formula == by_trace


@pytest.mark.slow
def test_adapters_states_are() -> None:
    by_formula, by_trace = states_by_both(card("h100-80g"), lora="4:up", optimizer="adamw")
    assert by_formula == by_trace


def test_the_peak_is_the_traces_and_the_largest_batch_was_traced() -> None:
    gate_bytes = 66 * MIB  # a batch of a few
    answer, fit = asked(gate=format_exact_bytes(gate_bytes))
    steps = traced(answer.run).steps
    assert answer.peak_allocated_bytes == steps.steady.peak_allocated_bytes
    assert answer.static.total_bytes == steps.steady.static_bytes
    assert answer.peak.breakdown == steps.steady.breakdown
    assert fit.max_batch
    peaks = [traced(run_on(card("h100-80g"), batch=fit.max_batch + more, seq=64)).steps.needed_bytes for more in (0, 1)]
    assert peaks[0] <= gate_bytes < peaks[1]
    assert fit.max_seq and fit.max_seq % 64 == 0
    assert [line for line in witnesses(answer.run) if "states by formula" in line]
    page, row = estimate_page(answer, fit), estimate_json(answer, fit)
    assert "params (static)" in page and "formula" in page and "traced" in page
    assert (row["source"], row["sources"]["static.optimizer"], row["sources"]["peak"]) == (
        "traced",
        "formula",
        "traced",
    )
    assert sum(row["breakdown"].values()) == row["peak"]["allocated_bytes"]
    assert sum(row["static"].values()) == row["static_bytes"]


def test_the_lines_of_its_peak_add_up_to_it() -> None:
    lines, letters = api.explain_estimate(question(optimizer="adamw-8bit", precision="bf16-masters"), card("h100-80g"))
    run = run_on(card("h100-80g"), seq=64, optimizer="adamw-8bit", precision="bf16-masters")
    assert sum(line.num_bytes for line in lines) == traced(run).steps.steady.peak_allocated_bytes
    formulas = {(line.op, line.formula) for line in lines if line.category in FORMULAS}
    assert ("master", "4 * 160*64") in formulas and ("parameter", "2 * 97*64") in formulas
    assert {line.formula.partition(":")[0] for line in lines if line.category == "activations"} == {"traced"}
    assert letters == {"B": 2, "S": 64}


@pytest.mark.slow
def test_a_length_that_it_refuses_bounds_the_longest_sample() -> None:
    answer, fit = asked(model="mynet:short", gate="1GiB")
    assert (fit.max_seq, fit.model_ends) == (256, ("max_seq",))
    assert "256 tokens, in steps of 64, as many as the model takes" in estimate_page(answer, fit)
    answer, fit = asked(gate=format_exact_bytes(answer.peak_allocated_bytes + MIB))
    assert fit.max_seq and fit.model_ends == ()


@pytest.mark.slow
def test_a_batch_that_fragments_keep_out_is_not_claimed() -> None:
    device = card("h100-80g")
    answer, fit = api.estimate(question(), device)
    assert fit.max_batch and fit.limit_bytes == device.usable_bytes
    traces = [traced(run_on(device, batch=fit.max_batch + more, seq=64)) for more in (0, 1)]
    assert [one.steps.out_of_memory is None for one in traces] == [True, False]
    assert answer.reserved.low_bytes == answer.reserved.high_bytes >= answer.peak_allocated_bytes


@pytest.mark.slow
def test_a_sweep_traces_each_configuration() -> None:
    found = sweep(question("B2c2"), card("h100-80g"), {"batch": (2, 3), "ckpt": ("none",)})
    assert [(row["batch"], row["ckpt"]) for row in found.rows] == [(2, "none")]
    assert found.traced and found.rows[0]["peak_allocated_bytes"] == traced(found.run).steps.needed_bytes


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"model": "mynet:raises"}, r"mynet:raises raised OSError at mynet\.py:\d+: no weights here"),
        ({"model": "mynet:gone"}, "mynet has no function 'gone'"),
        ({"model": "broken:make"}, "Importing 'broken' raised ModuleNotFoundError: No module named 'nothing_of"),
        ({"model": "mynet:short", "seq": 512}, r"mynet:short raised ValueError at mynet\.py:\d+: no more than 256"),
        ({"model": "mynet:frozen"}, "No parameter trains"),
        ({"blocks": "nope"}, "has no module 'nope'"),
        ({"freeze": "embedding"}, "Nobody knows which parameters of mynet:make are its embedding"),
        ({"lora": "4@nf4"}, "A base in nf4 runs kernels that a trace cannot.* Type --lora 4"),
    ],
)
def test_what_cannot_be_said_is_one_sentence(values: dict[str, Any], text: str) -> None:
    with pytest.raises(MemplanError, match=text):
        asked(**values)


def test_a_sweep_of_hundreds_is_refused() -> None:
    with pytest.raises(MemplanError, match=r"300 configurations.*256 or fewer"):
        sweep(question(), card("h100-80g"), {"batch": range(1, 301)})


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16-masters", "fp16-mixed"])
@pytest.mark.parametrize("optimizer", sorted(LOW_BIT))
def test_a_stand_in_takes_the_step_that_the_ledger_tells(optimizer: str, precision: str) -> None:
    run = RunSpec(
        model=model_spec("tiny"),
        step=StepSpec(batch=4, seq=32, optimizer=optimizer, precision=precision),
        device=card("h100-80g"),
    )
    by_trace = {name: totals.allocated_bytes for name, totals in traced(run).steps.steady.phases.items()}
    assert by_trace == {name: size for name, (_, size) in ledger_peaks(write_step(run)).items()}
