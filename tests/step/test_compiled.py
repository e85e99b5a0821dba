"""Compiled blocks: same numbers, one graph for equal blocks, and a selective policy that the graph honours."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from samples import run_of
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor
from torch.utils.checkpoint import checkpoint

from memplan.step import compiled
from memplan.step.builder import TrainStep, build_step
from memplan.step.parity import outcome
from memplan.step.region import Region
from memplan.step.selective import policy_contexts

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """Nothing is compiled before, nothing is left behind."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> str:
    """Blocks are compiled into graphs that run op by op, as eager code does."""
    monkeypatch.setitem(compiled.compile_blocks.__kwdefaults__, "backend", "aot_eager")
    return "aot_eager"


def step_of(model: str, ckpt: str, compile: str, **step: Any) -> TrainStep:
    images = {"images": 1} if model == "tiny-molmo2" else {}
    return build_step(run_of(model, ckpt=ckpt, compile=compile, **{"batch": 3, "seq": 32} | images | step), CPU)


def numbers_of(step: TrainStep) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return outcome(step)


def differing(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> list[str]:
    assert found.keys() == expected.keys()
    return [
        name
        for name, value in expected.items()
        if float((found[name] - value).abs().max()) > tolerance * float(value.abs().max())
    ]


# The numbers


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("model", "chunks", "dropout"),
    [
        ("tiny", 3, 0.1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("tiny-gpt2", 3, 0.1), ("tiny-molmo2", 1, 0.0), ("tiny-moe", 3, 0.1))
        ),
    ],
)
def test_compiled_blocks_give_the_same_numbers_to_the_bit(model: str, chunks: int, dropout: float) -> None:
    expected = numbers_of(step_of(model, "none", "off", chunks=chunks, dropout=dropout))
    for ckpt in ("none", "full", "every:2", "selective", "offload"):
        step = step_of(model, ckpt, "on", chunks=chunks, dropout=dropout)
        assert differing(numbers_of(step), expected) == [], ckpt


@pytest.mark.usefixtures("backend")
def test_compiled_submodules_differ_by_the_order_of_a_sum_alone() -> None:
    # A block's input takes three gradients: one from the residual, two from the norm, which its graph adds first.
    expected = numbers_of(step_of("tiny", "none", "off"))
    assert differing(numbers_of(step_of("tiny", "submodule", "on")), expected, tolerance=2e-5) == []


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("ckpt", ["none", "full", "selective"])
def test_equal_blocks_share_one_graph_without_a_break(ckpt: str) -> None:
    step = step_of("tiny", ckpt, "on")
    numbers_of(step)
    numbers_of(step)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.usefixtures("backend")
def test_checkpointing_stands_outside_and_counts_as_ever() -> None:
    full, selective = (step_of("tiny", ckpt, "on") for ckpt in ("full", "selective"))
    numbers_of(full)
    numbers_of(selective)
    assert [(region.num_checkpointed, region.num_calls) for region in full.regions] == [(1, 2)] * 4
    # What the compiled policy runs again is inside of its graph.
    assert [(region.num_checkpointed, region.num_calls) for region in selective.regions] == [(1, 0)] * 4


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("ckpt", ["full", "selective"])
def test_without_gradients_no_compiled_block_enters_checkpointing(ckpt: str) -> None:
    step, plain = step_of("tiny", ckpt, "on"), step_of("tiny", "none", "off")
    with torch.no_grad():
        assert torch.equal(step.model(step.batch), plain.model(plain.batch))
    assert [region.num_checkpointed for region in step.regions] == [0] * 4


# The policy in the graph


class Graphs:
    """A backend that counts the products of each graph it compiles, forward and backward."""

    def __init__(self) -> None:
        self.products: dict[str, list[int]] = {"forward": [], "backward": []}
        self.backend = aot_autograd(
            fw_compiler=partial(self.count, "forward"),
            bw_compiler=partial(self.count, "backward"),
            partition_fn=min_cut_rematerialization_partition,
        )

    def count(self, kind: str, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        self.products[kind].append(sum(target.startswith("aten.mm") for target in targets))
        run: Callable[..., Any] = make_boxed_func(graph.forward)
        return run


def products(ckpt: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Products in the graphs of a step of equal blocks."""
    torch._dynamo.reset()
    graphs = Graphs()
    monkeypatch.setitem(compiled.compile_blocks.__kwdefaults__, "backend", graphs.backend)
    numbers_of(step_of("tiny", ckpt, "on"))
    return graphs.products


def test_the_compiled_backward_runs_just_what_the_policy_says(monkeypatch: pytest.MonkeyPatch) -> None:
    # 7 products a block, 14 for their gradients. The policy runs 3 again (k, out, up), within the graph of backward.
    assert products("none", monkeypatch) == {"forward": [7], "backward": [14]}
    assert products("selective", monkeypatch) == {"forward": [7], "backward": [14 + 3]}
    assert products("selective:sdpa", monkeypatch) == {"forward": [7], "backward": [14 + 6]}
    assert products("selective:mm+sdpa", monkeypatch) == {"forward": [7], "backward": [14]}
    # Full runs the whole graph of forward again.
    assert products("full", monkeypatch) == {"forward": [7], "backward": [14]}


def test_a_policy_outside_of_a_compiled_block_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """THE FAULT: the block compiled inside, checkpointed under a policy outside."""
    runs: list[int] = []
    graphs = Graphs()
    count = graphs.count

    def spied(kind: str, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        plain = count(kind, graph, inputs)
        if kind == "backward":
            return plain

        def run(arguments: list[Any]) -> Any:
            runs.append(graphs.products["forward"][0])
            return plain(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    monkeypatch.setattr(graphs, "count", spied)
    graphs.backend = aot_autograd(
        fw_compiler=partial(spied, "forward"),
        bw_compiler=partial(spied, "backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    step = step_of("tiny", "none", "off")
    for block in step.model.decoder.blocks:
        inside = torch.compile(block.forward, backend=graphs.backend)
        block.forward = partial(checkpoint, inside, use_reentrant=False, context_fn=partial(policy_contexts, ()))
    numbers_of(step)
    assert graphs.products["backward"] == [14]  # nothing of the policy is in the graph,
    assert runs == [7] * (2 * 4)  # and all 7 products of each block run again


# torch's own compiler


@pytest.mark.slow
@pytest.mark.parametrize("ckpt", ["none", "full", "selective"])
def test_inductors_blocks_give_the_same_numbers_within_rounding(ckpt: str) -> None:
    for dropout in (0.0, 0.1):
        torch._dynamo.reset()
        expected = numbers_of(step_of("tiny", "none", "off", dropout=dropout))
        with inductor.patch(fallback_random=True):  # its own generator otherwise, as the next test shows
            found = numbers_of(step_of("tiny", ckpt, "on", dropout=dropout))
        assert differing(found, expected, tolerance=2e-5) == []


@pytest.mark.slow
def test_inductor_draws_its_own_random_numbers_where_nobody_asks_for_eager_ones() -> None:
    """`outcome` asks; a step by itself does not."""
    losses = []
    for compile in ("off", "on"):
        step = step_of("tiny", "none", compile, dropout=0.1)
        torch.manual_seed(1)
        losses.append(step())
    assert abs(losses[1] - losses[0]) > 1e-3


@pytest.mark.slow
def test_inductor_redraws_alike_in_the_recomputation() -> None:
    found = [numbers_of(step_of("tiny", ckpt, "on", dropout=0.1)) for ckpt in ("none", "full", "selective")]
    assert differing(found[1], found[0], tolerance=2e-5) == []
    assert differing(found[2], found[0], tolerance=2e-5) == []


def test_a_function_that_is_no_method_is_compiled_too() -> None:
    region = Region("sine", lambda x: (x @ x).sin() @ x, contexts=partial(policy_contexts, ()))
    compiled.compile_blocks({}, [region], backend="aot_eager")
    x = torch.randn(4, 4, requires_grad=True)
    (found,) = torch.autograd.grad(region(x).sum(), x)
    (expected,) = torch.autograd.grad(((x @ x).sin() @ x).sum(), x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(4, 4), (2, 4, 4)])
def test_a_write_to_a_kept_result_is_no_write_in_a_graph(shape: tuple[int, ...]) -> None:
    # Eagerly the policy refuses it: test_selective.py.
    torch.manual_seed(0)
    first, second = torch.randn(2, 4, 4)

    def written(x: Tensor) -> Tensor:
        raised = (x @ first).add_(1.0)
        return (raised @ second).sin() * raised

    region = Region("written", written, contexts=partial(policy_contexts, ()))
    compiled.compile_blocks({}, [region], backend="aot_eager")
    grads = []
    for function in (region, written):
        x = torch.ones(shape, requires_grad=True)
        grads.append(torch.autograd.grad(function(x).sum(), x)[0])
    assert torch.equal(*grads)
