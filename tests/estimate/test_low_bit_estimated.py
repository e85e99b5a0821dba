"""Sizes of low-bit tensors, equal to those that bitsandbytes and torchao make, where they are installed."""

from typing import Any

import pytest
import torch
from samples import run_of
from torch import Tensor

from memplan.estimate import four_bits, low_bit
from memplan.estimate.step import new_tape
from memplan.estimate.tape import Parameter

SHAPES = [(64, 128), (100, 50), (63,), (4096,), (30, 3000)]


def parameter_of(shape: tuple[int, ...]) -> Parameter:
    """A parameter over an empty ledger."""
    return new_tape(run_of()).parameter("weight", shape, "float32", trains=True)


def sizes(tensors: dict[str, Any]) -> dict[str, int]:
    """Bytes of every tensor, the parts of a torchao one by their names."""
    found = {}
    for name, tensor in tensors.items():
        parts = getattr(tensor, "tensor_attrs", None)
        for part in parts or ():
            found[f"{name}.{part}"] = getattr(tensor, part).nbytes
        if isinstance(tensor, Tensor) and not parts:
            found[name] = tensor.nbytes
    return found


def predicted(state: low_bit.Sizes) -> dict[str, int]:
    """Bytes by the ledger."""
    return {name: low_bit.size_of(shape, dtype) for name, shape, dtype in state}


@pytest.mark.parametrize("shape", SHAPES)
def test_bitsandbytes_states(shape: tuple[int, ...]) -> None:
    library = pytest.importorskip("bitsandbytes")
    parameter = torch.nn.Parameter(torch.randn(shape))
    optimizer = library.optim.AdamW8bit([parameter])
    optimizer.init_state(optimizer.param_groups[0], parameter, 0, 0)
    found = sizes(optimizer.state[parameter])
    maps = [found.pop(name, 0) for name in ("qmap1", "qmap2")]
    assert found == predicted(low_bit.bitsandbytes_state(parameter_of(shape)))
    assert maps == [1024 * low_bit.is_large(parameter_of(shape))] * 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_torchao_states(shape: tuple[int, ...], bits: int) -> None:
    library = pytest.importorskip("torchao.optim")
    parameter = torch.nn.Parameter(torch.randn(shape))
    optimizer = getattr(library, f"AdamW{bits}bit")([parameter])
    state = {
        name: optimizer._new_buffer(parameter, signed) for name, signed in (("exp_avg", True), ("exp_avg_sq", False))
    }
    assert sizes(state) == predicted(low_bit.torchao_state(parameter_of(shape), bits))


@pytest.mark.parametrize("shape", [(64, 128), (100, 50), (30, 3000)])
def test_nf4_matrices(shape: tuple[int, int]) -> None:
    library = pytest.importorskip("bitsandbytes")
    matrix = library.nn.Params4bit(torch.randn(shape), requires_grad=False, quant_type="nf4").to("cpu")
    state = matrix.quant_state
    tensors = {"absmax": state.absmax, "nested_absmax": state.state2.absmax, "code": state.code}
    tensors |= {"nested_code": state.state2.code, "offset": state.offset}
    assert matrix.nbytes == -(-shape[0] * shape[1] // 2)
    assert sizes(tensors) == predicted(four_bits.state(shape))
