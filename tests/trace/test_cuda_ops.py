"""Composite ops on fake CPU tensors take the branch that CUDA takes, with its saved tensors."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.trace.cuda_rules.generation import generation
from memplan.trace.cuda_rules.ops import cuda_ops
from memplan.trace.cuda_rules.rules import cuda_rules

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS, H = 6, 64


class Ops(TorchDispatchMode):
    """The names of the ops that come by, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.prim.device.default:
            self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def trace(function) -> tuple[list[str], list[tuple[tuple[int, ...], torch.dtype]]]:
    """The ops of `function`, and shape and dtype of each tensor kept for backward; backward is run as well."""
    kept = []

    def keep(tensor):
        kept.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with Ops() as ops, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = function()
    out.sum().backward()
    return ops.names, kept


def leaf(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.rand(*shape, dtype=dtype, requires_grad=True)


def test_rms_norm_is_fused():
    with FakeTensorMode(), cuda_ops():
        x, weight = leaf(ROWS, H), leaf(H)
        ops, kept = trace(lambda: F.rms_norm(x, (H,), weight, 1e-6))
        assert ops == ["_fused_rms_norm"]
        assert kept == [((ROWS, H), BF16), ((H,), BF16), ((ROWS, 1), FP32)]
        assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)
        assert trace(lambda: F.rms_norm(x, (H,)))[1] == [((ROWS, H), BF16), ((ROWS, 1), FP32)]


def test_rms_norm_of_two_dtypes_is_not_fused():
    with FakeTensorMode(), cuda_ops():
        x, weight = leaf(ROWS, H), leaf(H, dtype=FP32)
        ops, _ = trace(lambda: F.rms_norm(x, (H,), weight, 1e-6))
        assert "_fused_rms_norm" not in ops
        assert "rsqrt" in ops


def test_rms_norm_of_real_tensors_keeps_its_values():
    x, weight = leaf(ROWS, H), leaf(H)
    expected = F.rms_norm(x, (H,), weight, 1e-6)
    with cuda_ops():
        assert torch.equal(F.rms_norm(x, (H,), weight, 1e-6), expected)


def test_dropout_keeps_a_bool_mask():
    with FakeTensorMode(), cuda_ops():
        x = leaf(ROWS, H)
        ops, kept = trace(lambda: F.dropout(x, 0.1))
        assert ops == ["native_dropout"]
        assert kept == [((ROWS, H), torch.bool)]
        assert F.dropout(x, 0.1, training=False) is x
        assert trace(lambda: F.dropout(x, 0.0))[0] == []
        assert F.dropout(x, 1.0).shape == x.shape
    real = torch.ones(1000)
    with cuda_ops():
        assert set(F.dropout(real, 0.5).tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("op", [F.softmax, F.log_softmax], ids=["softmax", "log_softmax"])
def test_softmax_reads_fp16_without_a_copy(op):
    with FakeTensorMode(), cuda_ops():
        half, brain = leaf(ROWS, H, dtype=FP16), leaf(ROWS, H, dtype=BF16)
        name = "_" + op.__name__
        assert trace(lambda: op(half, -1, dtype=FP32))[0] == [name]
        assert trace(lambda: op(brain, -1, dtype=FP32))[0] == ["_to_copy", name]
        assert trace(lambda: op(brain, -1))[0] == [name]
        assert half.grad.dtype == FP16
    real = torch.rand(ROWS, H, dtype=FP16)
    with cuda_ops():
        inside = op(real, -1, dtype=FP32)
    assert torch.equal(inside, op(real, -1, dtype=FP32))


def test_layer_norm_keeps_fp32_statistics():
    def statistics() -> list[torch.dtype]:
        return [dtype for shape, dtype in trace(lambda: F.layer_norm(leaf(ROWS, H), (H,)))[1] if shape == (ROWS, 1)]

    with FakeTensorMode():
        assert statistics() == [BF16, BF16]
        with cuda_ops():
            assert statistics() == [FP32, FP32]
        assert statistics() == [BF16, BF16]


def test_optimizers_and_clipping_take_their_foreach_form():
    def ops() -> set[str]:
        layer = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(torch.rand(2, 4)).sum().backward()
        with Ops() as seen:
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
        return {name for name in seen.names if name.startswith("_foreach")}

    with FakeTensorMode():
        assert not ops()
        with cuda_ops():
            assert {"_foreach_norm", "_foreach_lerp_", "_foreach_addcdiv_"} <= ops()
        assert not ops()


def test_all_rules_at_once_and_undone():
    def step() -> list[str]:
        x, weight = leaf(1, 2, 8, H, dtype=FP32), leaf(H, dtype=FP32)
        with torch.autocast("cpu", BF16):
            return trace(lambda: F.dropout(F.scaled_dot_product_attention(F.rms_norm(x, (H,), weight), x, x), 0.1))[0]

    with FakeTensorMode():
        before = step()
        with cuda_rules(generation("a100-80g")) as log:
            inside = step()
        assert step() == before
    assert {"_fused_rms_norm", "_scaled_dot_product_flash_attention", "native_dropout"} <= set(inside)
    assert not {"_fused_rms_norm", "_scaled_dot_product_flash_attention", "native_dropout"} & set(before)
    assert log.backends() == {"flash": 1}
