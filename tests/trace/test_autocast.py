"""CUDA's autocast on CPU tensors: the lists against torch's own header and registrations, the dtypes, the cache."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memplan.trace.cuda_rules import autocast_lists as lists
from memplan.trace.cuda_rules.autocast import cuda_autocast, kernels

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def header_list(name: str) -> set[str]:
    found = re.search(rf"#define AT_FORALL_{name}\(_\)(.*?)\n\n", HEADER.read_text(), re.DOTALL)
    return {op.replace(", ", ".") for op in re.findall(r"_\(([\w, ]+)\)", found[1])}


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("LOWER_PRECISION_FP", lists.LOWER_PRECISION),
        ("FP32", lists.FP32),
        ("FP32_SET_OPT_DTYPE", lists.FP32_BY_DTYPE),
        ("PROMOTE", lists.PROMOTE),
    ],
)
def test_lists_are_the_header_s(name, ours):
    assert set(ours) == header_list(name)
    assert len(ours) == len(set(ours))


def test_lists_are_what_torch_registers_for_cuda():
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    registered = {name.removeprefix("aten::") for name in names if name.startswith("aten::")}
    assert registered == lists.cuda_ops() | set(lists.UNREACHABLE)


def test_every_op_on_which_the_devices_differ_has_a_kernel():
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    on_cpu = {name.removeprefix("aten::") for name in names}
    assert (lists.cuda_ops() ^ on_cpu) <= set(kernels())


def half(dtype: torch.dtype) -> Tensor:
    return torch.rand(4, 8, dtype=dtype) + 0.5


X = torch.rand(4, 8)
W = torch.rand(8, 8, requires_grad=True)
ROWS = torch.tensor([0, 1, 2, 3])
ZEROS = torch.zeros(4, 8, dtype=torch.long)
LOW = "low"

# (op on a low-precision tensor `h` and fp32 `X`, `W`; dtype on CUDA)
TABLE = {
    "softmax": (lambda h: F.softmax(h, -1), FP32),
    "softmax to half": (lambda h: F.softmax(h, -1, dtype=h.dtype), LOW),
    "log_softmax": (lambda h: F.log_softmax(h, -1), FP32),
    "layer_norm": (lambda h: F.layer_norm(h, (8,)), FP32),
    "rms_norm": (lambda h: F.rms_norm(h, (8,)), FP32),
    "group_norm": (lambda h: F.group_norm(h[None], 4), FP32),
    "pow": (lambda h: h.pow(2), FP32),
    "pow of tensors": (lambda h: h.pow(h), FP32),
    "rsqrt": (torch.rsqrt, FP32),
    "exp": (torch.exp, FP32),
    "log": (torch.log, FP32),
    "logsumexp": (lambda h: h.logsumexp(-1), FP32),
    "softplus": (F.softplus, FP32),
    "sum": (torch.sum, FP32),
    "sum over a dimension": (lambda h: h.sum(-1), FP32),
    "cumsum": (lambda h: h.cumsum(-1), FP32),
    "prod": (torch.prod, FP32),
    "norm": (torch.norm, FP32),
    "norm over a dimension": (lambda h: h.norm(dim=-1, keepdim=True), FP32),
    "vector_norm": (torch.linalg.vector_norm, FP32),
    "cross_entropy": (lambda h: F.cross_entropy(h, ROWS), FP32),
    "nll_loss": (lambda h: F.nll_loss(h, ROWS), FP32),
    "mse_loss": (lambda h: F.mse_loss(h, h), FP32),
    "bce with logits": (lambda h: F.binary_cross_entropy_with_logits(h, h), FP32),
    "mm": (lambda h: X @ W, LOW),
    "mv": (lambda h: torch.mv(W, X[0]), LOW),
    "bmm": (lambda h: torch.bmm(X[None], W[None]), LOW),
    "addmm": (lambda h: torch.addmm(W, W, W), LOW),
    "linear": (lambda h: F.linear(X, W, W[0]), LOW),
    "einsum": (lambda h: torch.einsum("ij,jk->ik", X, W), LOW),
    "conv1d": (lambda h: F.conv1d(X[None], X[:, :, None].expand(4, 8, 1)[:, :4]), LOW),
    "sdpa": (lambda h: F.scaled_dot_product_attention(X[None], X[None], X[None]), LOW),
    "cat of both": (lambda h: torch.cat((X, h)), FP32),
    "cat of halves": (lambda h: torch.cat((h, h)), LOW),
    "stack": (lambda h: torch.stack((h, X)), FP32),
    "scatter_add": (lambda h: X.scatter_add(0, ZEROS, h), FP32),
    "index_put": (lambda h: X.index_put((ROWS,), h), FP32),
    "addcmul": (lambda h: torch.addcmul(h, X, h), FP32),
    "dot of halves": (lambda h: torch.dot(h[0], h[1]), LOW),
    "mean": (torch.mean, LOW),
    "silu": (F.silu, LOW),
    "gelu": (F.gelu, LOW),
    "mul": (lambda h: h * h, LOW),
    "add of both": (lambda h: h + X, FP32),
    "fp64 stays": (lambda h: h.double().pow(2), torch.float64),
}


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
@pytest.mark.parametrize("low", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("op", TABLE)
def test_dtypes(op, low, device_type):
    function, dtype = TABLE[op]
    with cuda_autocast(), torch.autocast(device_type, low):
        out = function(half(low))
    assert out.dtype == (low if dtype == LOW else dtype)


def dtypes(names: tuple[str, ...]) -> dict[str, torch.dtype]:
    with torch.autocast("cpu", BF16):
        return {name: TABLE[name][0](half(BF16)).dtype for name in names}


def test_the_cpu_s_lists_are_back_outside():
    names = ("softmax", "layer_norm", "pow", "sum", "einsum", "mm", "cat of both")
    before = dtypes(names)
    with cuda_autocast():
        inside = dtypes(names)
    with pytest.raises(ZeroDivisionError), cuda_autocast():
        raise ZeroDivisionError
    assert dtypes(names) == before
    assert {name for name in names if inside[name] != before[name]} == {"softmax", "layer_norm", "pow", "sum"}


def test_without_autocast_nothing_is_cast():
    with cuda_autocast():
        assert F.softmax(half(BF16), -1).dtype == BF16
        assert torch.einsum("ij,jk->ik", X, W).dtype == FP32
        with torch.autocast("cuda", BF16), torch.autocast("cuda", enabled=False):
            assert torch.einsum("ij,jk->ik", X, W).dtype == FP32


def test_autocast_of_cuda_is_this_one():
    with cuda_autocast():
        assert not torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda"):
            assert torch.is_autocast_enabled()
            assert (X @ W).dtype == torch.get_autocast_dtype("cuda") == FP16
        with torch.amp.autocast(device_type="cuda", dtype=BF16):
            assert (X @ W).dtype == BF16
        assert torch.get_autocast_dtype("cpu") == BF16
    assert not torch.is_autocast_enabled("cuda")


def test_the_plain_loss_is_refused_as_on_cuda():
    with cuda_autocast(), torch.autocast("cuda", BF16), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(half(BF16) / 2, half(BF16) / 2)


class Casts(TorchDispatchMode):
    """How often a tensor of the weight's size was cast."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].shape == (8, 8):
            self.count += 1
        return func(*args, **(kwargs or {}))


def einsum(weight: Tensor) -> Tensor:
    return torch.einsum("ij,jk->ik", X, weight)


def linear(weight: Tensor) -> Tensor:
    return F.linear(X, weight)


@pytest.mark.parametrize("function", [linear, einsum], ids=["on both lists", "on CUDA's alone"])
def test_casts_of_leaves_are_cached_until_autocast_ends(function):
    weight, made = torch.rand(8, 8, requires_grad=True), torch.rand(8, 8)
    with cuda_autocast(), Casts() as casts:
        for _ in range(2):
            with torch.autocast("cuda", BF16):
                function(weight)
                function(weight)
        assert casts.count == 2  # once for each time autocast was entered
        with torch.autocast("cuda", BF16):
            function(made)
            function(made)
            doubled = weight * 2
            function(doubled)
            function(doubled)
        assert casts.count == 6  # neither a tensor without gradient nor a result is kept
        with torch.autocast("cuda", BF16, cache_enabled=False):
            function(weight)
            function(weight)
        assert casts.count == 8


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_a_checkpoint_recomputes_under_the_same_casts(device_type):
    weight = torch.rand(8, 8, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        return F.softmax(F.layer_norm(x @ weight, (8,)), -1).pow(2)

    with FakeTensorMode(allow_non_fake_inputs=True), cuda_autocast():
        with torch.autocast(device_type, BF16):
            out = checkpoint(block, torch.rand(4, 8, requires_grad=True), use_reentrant=False)
        assert out.dtype == FP32
        out.sum().backward()  # a recompute with other dtypes raises CheckpointError
    assert weight.grad.dtype == FP32
