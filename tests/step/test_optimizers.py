"""Each optimizer's name is the implementation of that name, over the parameters that train and no others."""

from collections import Counter
from typing import Any

import pytest
import torch
from samples import run_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.backends.simulated import simulate
from memplan.errors import MemplanError
from memplan.spec.step import OPTIMIZERS
from memplan.step import optimizer_low_bit
from memplan.step.builder import TrainStep, build_step
from memplan.step.optimizer_low_bit import LOW_BIT
from memplan.step.optimizers import Muon, make_optimizer

CPU = torch.device("cpu")
TORCHS = [name for name in OPTIMIZERS if name not in LOW_BIT]
ADAMS = [name for name in TORCHS if name.startswith("adamw")]


class Ops(TorchDispatchMode):
    """Counts the operators that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.__name__.split(".")[0]] += 1
        return func(*args, **kwargs or {})


def ops_of_a_step(name: str, num_params: int = 3) -> Counter[str]:
    params = [nn.Parameter(torch.ones(5)) for _ in range(num_params)]
    optimizer = make_optimizer(name, params)
    for param in params:
        param.grad = torch.ones(5)
    with Ops() as ops:
        optimizer.step()
    return ops.names


def test_adamw_is_one_fused_operator() -> None:
    assert ops_of_a_step("adamw")["_fused_adamw_"] == 1


def test_foreach_takes_all_parameters_at_once() -> None:
    names = ops_of_a_step("adamw-foreach")
    assert names["_foreach_lerp_"] == 1
    assert names["_fused_adamw_"] == 0


@pytest.mark.parametrize(("name", "operator"), [("adamw-loop", "lerp_"), ("sgd", "add_"), ("adafactor", "rsqrt_")])
def test_loops_take_one_parameter_after_the_other(name: str, operator: str) -> None:
    for num_params in (1, 3):
        names = ops_of_a_step(name, num_params)
        assert names[operator] == num_params
        assert not any("foreach" in one or "fused" in one for one in names)


@pytest.mark.parametrize(
    ("name", "fused", "foreach"),
    [
        ("adamw", True, False),
        ("adamw-foreach", False, True),
        ("adamw-loop", False, False),
        ("sgd", None, False),
        ("sgd-momentum", None, False),
    ],
)
def test_no_name_leaves_the_choice_to_the_device(name: str, fused: bool | None, foreach: bool) -> None:
    """Left at None, torch loops on the CPU and takes foreach on CUDA; Adafactor and Muon loop on both."""
    defaults = make_optimizer(name, [nn.Parameter(torch.ones(1))]).defaults
    assert (defaults["fused"], defaults["foreach"]) == (fused, foreach)


def test_all_adamws_take_the_same_step() -> None:
    """Bitwise they are not: the fused one computes in another order."""
    after = []
    for name in ADAMS:
        step = tiny_step(optimizer=name)
        step()
        after.append(torch.cat([param.detach().flatten() for param in step.model.parameters()]))
    for found in after[1:]:
        torch.testing.assert_close(found, after[0], rtol=0, atol=1e-6)


def test_sgd_moves_by_the_rate_times_the_gradient() -> None:
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.tensor([0.0, 1.0, -2.0])
    make_optimizer("sgd", [param]).step()
    torch.testing.assert_close(param.detach(), torch.tensor([1.0, 1 - 1e-4, 1 + 2e-4]))


def test_momentum_goes_on_without_a_gradient() -> None:
    param = nn.Parameter(torch.ones(1))
    optimizer = make_optimizer("sgd-momentum", [param])
    for gradient, expected in ((1.0, 1 - 1e-4), (0.0, 1 - 1.9e-4)):
        param.grad = torch.tensor([gradient])
        optimizer.step()
        assert param.item() == pytest.approx(expected, abs=1e-7)


def test_muon_makes_the_update_of_a_matrix_orthogonal_and_leaves_the_others_to_adamw() -> None:
    torch.manual_seed(0)
    matrix, table, vector = (nn.Parameter(torch.zeros(shape)) for shape in ((6, 6), (6, 6), (6,)))
    optimizer = make_optimizer("muon", [matrix, table, vector], [matrix])
    for param in (matrix, table, vector):
        param.grad = torch.randn_like(param)
    optimizer.step()
    singular = torch.linalg.svdvals(matrix.detach())
    assert singular.max() < 2 * singular.min()
    torch.testing.assert_close(table.detach().abs(), torch.full((6, 6), 1e-4))
    assert [set(optimizer.state[param]) for param in (matrix, table, vector)] == [
        {"momentum_buffer"},
        {"step", "exp_avg", "exp_avg_sq"},
        {"step", "exp_avg", "exp_avg_sq"},
    ]


def test_muon_is_missed_in_a_torch_before_2_9(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(MemplanError, match=r"has no Muon, which came with 2\.9"):
        make_optimizer("muon", [nn.Parameter(torch.ones(2, 2))])


# Other libraries'


@pytest.mark.parametrize("name", LOW_BIT)
def test_what_is_not_installed_is_refused_in_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_low_bit, "find_spec", lambda library: None)
    library = "torchao" if "torchao" in name else "bitsandbytes"
    with pytest.raises(MemplanError, match=f"{name} needs {library}, which is not installed. Type memplan estimate"):
        tiny_step(optimizer=name)


@pytest.mark.parametrize("name", LOW_BIT)
def test_no_trace_runs_another_librarys_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_low_bit, "find_spec", lambda library: object())
    with pytest.raises(MemplanError, match="which a trace cannot"):
        simulate(run_of(optimizer=name))


def test_bitsandbytes_steps_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_low_bit, "find_spec", lambda library: object())
    with pytest.raises(MemplanError, match="on a CUDA GPU only"):
        tiny_step(optimizer="adamw-8bit-paged")


# In a step


def tiny_step(model: str = "tiny", **step: Any) -> TrainStep:
    return build_step(run_of(model, **{"batch": 2, "seq": 24} | step), CPU)


def test_states_begin_with_the_first_step() -> None:
    step = tiny_step()
    assert not step.optimizer.state
    step()
    assert len(step.optimizer.state) == len(list(step.model.parameters()))


@pytest.mark.parametrize("name", ADAMS)
@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("bf16-mixed", torch.float32)]
)
def test_adamw_keeps_two_moments_of_the_parameters_dtype_and_an_fp32_count(
    name: str, precision: str, dtype: torch.dtype
) -> None:
    step = tiny_step(optimizer=name, precision=precision)
    step()
    for param, state in step.optimizer.state.items():
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert (state["exp_avg"].dtype, state["exp_avg"].shape) == (dtype, param.shape)
        assert (state["exp_avg_sq"].dtype, state["exp_avg_sq"].shape) == (dtype, param.shape)
        assert (state["step"].dtype, state["step"].numel()) == (torch.float32, 1)


def test_muon_takes_the_matrices_of_the_blocks() -> None:
    step = tiny_step(optimizer="muon")
    step()
    optimizer = step.optimizer
    assert isinstance(optimizer, Muon)
    taken = {id(param) for group in optimizer.parts[0].param_groups for param in group["params"]}
    names = {name for name, param in step.model.named_parameters() if id(param) in taken}
    assert names == {
        f"decoder.blocks.{index}.{linear}.weight"
        for index in range(4)
        for linear in ("attn.q", "attn.k", "attn.v", "attn.out", "mlp.gate", "mlp.up", "mlp.down")
    }


def test_adafactor_keeps_rows_and_columns_of_a_matrix_and_the_whole_of_a_vector() -> None:
    step = tiny_step(optimizer="adafactor")
    step()
    for param, state in step.optimizer.state.items():
        shapes = {name: tuple(value.shape) for name, value in state.items() if name != "step"}
        if param.dim() == 1:
            assert shapes == {"variance": tuple(param.shape)}
        else:
            assert shapes == {"row_var": (param.size(0), 1), "col_var": (1, param.size(1))}


def test_sgd_keeps_no_tensor() -> None:
    step = tiny_step(optimizer="sgd")
    step()
    assert not any(torch.is_tensor(value) for state in step.optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("name", TORCHS)
def test_a_step_moves_every_parameter_that_trains_and_no_bit_of_the_frozen_ones(name: str) -> None:
    step = tiny_step("tiny-molmo2", images=1, optimizer=name, precision="fp32")
    before = {key: param.detach().clone() for key, param in step.model.named_parameters()}
    # A tower drawn at random passes gradients of 1e-10 on, less than a rounding of the weights at sgd's rate.
    for group in step.optimizer.param_groups:
        group["lr"] = 1e12 if name.startswith("sgd") else group["lr"]
    step()
    frozen = [key for key, param in step.model.named_parameters() if not param.requires_grad]
    still = [key for key, param in step.model.named_parameters() if torch.equal(param, before[key])]
    assert frozen == ["decoder.embedding.weight"]
    assert still == frozen


def test_frozen_parameters_get_no_state_and_no_gradient() -> None:
    step = tiny_step("tiny-molmo2", images=1)
    step.accumulate()
    frozen = step.model.decoder.embedding.weight
    assert frozen.grad is None
    step.optimizer.step()
    assert frozen not in step.optimizer.state
    held = [param for group in step.optimizer.param_groups for param in group["params"]]
    assert sum(param.numel() for param in held) == 627_392
    assert len(step.optimizer.state) == len(held)


def test_an_optimizer_that_were_given_the_frozen_parameters_would_decay_them() -> None:
    """The check above can fail: weight decay needs no gradient's value, only a gradient."""
    step = tiny_step("tiny-molmo2", images=1)
    weight = step.model.decoder.embedding.weight
    before = weight.detach().clone()
    weight.requires_grad_(True)
    weight.grad = torch.zeros_like(weight)
    make_optimizer("adamw", [weight]).step()
    assert not torch.equal(weight, before)
