"""Attention on fake CPU tensors runs the kernel that CUDA would, forward, backward and in a checkpoint's recompute."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, checkpoint

from memplan.trace.cuda_rules.attention import cuda_sdpa, math_attention
from memplan.trace.cuda_rules.generation import generation

from torch.nn.functional import scaled_dot_product_attention as imported_early  # isort: skip

aten = torch.ops.aten
A100, H100 = generation("a100-80g"), generation("h100-80g")
B, A, K, S, D = 2, 8, 2, 64, 32


class Ops(TorchDispatchMode):
    """The names of the ops that come by, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.prim.device.default:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def inputs(*, kv: int = A, dtype: torch.dtype = torch.bfloat16, d: int = D) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value in the layout that projections leave: [B, heads, S, D] seen in [B, S, heads, D]."""

    def make(heads: int) -> Tensor:
        return torch.randn(B, S, heads, d, dtype=dtype, requires_grad=True).transpose(1, 2)

    return make(A), make(kv), make(kv)


def saved_by(function, *args, **kwargs) -> tuple[Tensor, list[tuple[tuple[int, ...], torch.dtype]]]:
    """The output, and shape and dtype of each tensor kept for backward."""
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = function(*args, **kwargs)
    return out, kept


QKV = [((B, A, S, D), torch.bfloat16)] * 3
OUT = ((B, A, S, D), torch.bfloat16)


def test_flash_saves_inputs_output_and_row_sums():
    with FakeTensorMode(), cuda_sdpa(A100) as log:
        out, kept = saved_by(F.scaled_dot_product_attention, *inputs(), is_causal=True)
        assert kept[:3] == QKV
        assert sorted(kept[3:5], key=str) == sorted([OUT, ((B, A, S), torch.float32)], key=str)
        with Ops() as ops:
            out.sum().backward()
    assert "_scaled_dot_product_flash_attention_backward.default" in ops.names
    assert log.backends() == {"flash": 1}


def test_efficient_pads_its_row_sums_and_expands_the_mask():
    with FakeTensorMode(), cuda_sdpa(A100) as log:
        q, k, v = (t[:, :, :50] for t in inputs())
        mask = torch.zeros(B, 1, 50, 50, dtype=torch.bfloat16)
        with Ops() as ops:
            out, kept = saved_by(F.scaled_dot_product_attention, q, k, v, attn_mask=mask)
        assert ((B, A, 64), torch.float32) in kept  # 50 rows rounded up to 32s
        assert ((B, A, 50, 50), torch.bfloat16) in kept
        assert "constant_pad_nd.default" in ops.names  # 50 is no multiple of 8
        out.sum().backward()
    assert log.backends() == {"efficient": 1}


def test_cudnn_on_hopper_with_grouped_heads_and_a_bool_mask():
    with FakeTensorMode(), cuda_sdpa(H100) as log:
        q, k, v = inputs(kv=K)
        mask = torch.ones(S, S, dtype=torch.bool)
        out, kept = saved_by(F.scaled_dot_product_attention, q, k, v, attn_mask=mask, enable_gqa=True)
        assert ((S, S), torch.bfloat16) in kept  # the mask as numbers, in the dtype of the query
        assert ((B, A, S, 1), torch.float32) in kept
        assert ((B, K, S, D), torch.bfloat16) in kept
        out.sum().backward()
    assert log.backends() == {"cudnn": 1}


@pytest.mark.parametrize("size", [36, 40])
def test_flash_pads_the_head_to_a_multiple_of_8(size):
    with FakeTensorMode(), cuda_sdpa(A100):
        out, kept = saved_by(F.scaled_dot_product_attention, *inputs(d=size))
        assert out.shape == (B, A, S, size)
        assert ((B, A, S, 40), torch.bfloat16) in kept


@pytest.mark.parametrize("heads", [A, K])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_math_is_torch_s_own(heads, causal, masked, dropout):
    """Same numbers, same ops, same order; only the bias is added in place, as torch does outside of a trace."""
    if causal and masked:
        pytest.skip("torch refuses both")
    q, k, v = inputs(kv=heads)
    bias = torch.randn(S, S, dtype=torch.bfloat16) if masked else None
    gqa = heads != A
    with Ops() as ours:
        torch.manual_seed(0)
        mine = math_attention(q, k, v, bias, dropout, causal, None, gqa)
    with Ops() as torchs:
        torch.manual_seed(0)
        theirs = aten._scaled_dot_product_attention_math(q, k, v, bias, dropout, causal, enable_gqa=gqa)[0]
    assert torch.equal(mine, theirs)
    assert [name.replace("add_", "add") for name in ours.names] == torchs.names
    with torch.profiler.profile() as profile:
        aten._scaled_dot_product_attention_math(q, k, v, bias, dropout, causal, enable_gqa=gqa)
    in_place = "add_.Tensor" in ours.names
    assert in_place == ("aten::add_" in [event.name for event in profile.events()]) == (masked or causal)


def test_every_way_of_calling_is_met():
    with FakeTensorMode(), cuda_sdpa(A100) as log:
        q, k, v = inputs()
        for function in (F.scaled_dot_product_attention, imported_early, aten.scaled_dot_product_attention):
            function(q, k, v)
        with torch.no_grad():
            imported_early(q, k, v)
        with torch.inference_mode():
            imported_early(q.detach(), k.detach(), v.detach())
        aten.scaled_dot_product_attention.default(q, k, v)
        assert log.backends() == {"flash": 6}
        with torch.autocast("cpu", torch.bfloat16):  # attention is on the lower-precision list
            assert imported_early(*inputs(dtype=torch.float32)).dtype == torch.bfloat16
        assert log.backends() == {"flash": 7}


def test_outside_the_context_torch_s_own_choice_is_back():
    def name() -> str:
        with FakeTensorMode():
            return F.scaled_dot_product_attention(*inputs()).grad_fn.name()

    before = name()
    with cuda_sdpa(A100):
        assert name() == "ScaledDotProductFlashAttentionBackward0"
    assert name() == before == "ScaledDotProductFlashAttentionForCpuBackward0"


def test_real_tensors_keep_the_cpu_s_kernel():
    q, k, v = inputs()
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    cases = [{}, {"is_causal": True}, {"attn_mask": mask}, {"dropout_p": 0.0, "scale": 0.5}]
    expected = [F.scaled_dot_product_attention(q, k, v, **case) for case in cases]
    with cuda_sdpa(A100) as log:
        for case, out in zip(cases, expected, strict=True):
            assert torch.equal(F.scaled_dot_product_attention(q, k, v, **case), out)
    assert not log.calls


@pytest.mark.parametrize(
    ("backends", "name"),
    [
        ([SDPBackend.MATH], "math"),
        ([SDPBackend.EFFICIENT_ATTENTION], "efficient"),
        ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], "flash"),
        ([SDPBackend.CUDNN_ATTENTION], "cudnn"),
    ],
)
def test_pins_are_honoured(backends, name):
    with FakeTensorMode(), cuda_sdpa(A100) as log, sdpa_kernel(backends):
        F.scaled_dot_product_attention(*inputs())
    assert log.backends() == {name: 1}


def test_an_order_is_honoured_and_given_back():
    order = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with FakeTensorMode(), cuda_sdpa(H100) as log:
        with sdpa_kernel(order, set_priority=True):
            F.scaled_dot_product_attention(*inputs())
        assert log.backends() == {"efficient": 1}
        F.scaled_dot_product_attention(*inputs())
        assert log.backends() == {"efficient": 1, "cudnn": 1}


def test_the_reasons_are_kept():
    with FakeTensorMode(), cuda_sdpa(A100) as log:
        for _ in range(3):
            q, k, v = inputs(kv=K)
            mask = torch.zeros(S, S, dtype=torch.bfloat16)
            F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    ((_, choice), count), *rest = log.calls.items()
    assert not rest
    assert count == 3
    assert choice.backend == "math"
    assert "enable_gqa" in choice.why_not("efficient")


def run_block(card, *, cure: bool) -> None:
    """Experiment A: forward of a checkpointed block under a pin to math, backward outside of the pin."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with FakeTensorMode(), cuda_sdpa(card):
        q, k, v = inputs()
        with sdpa_kernel([SDPBackend.MATH]):
            pinned = torch.nn.attention._cur_sdpa_kernel_backends()

            def again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                with sdpa_kernel(pinned) if cure else contextlib.nullcontext():
                    return attend(q, k, v)

            out = checkpoint(again, q, k, v, use_reentrant=False)
        out.sum().backward()


@pytest.mark.parametrize("card", [A100, H100], ids=["A100", "H100"])
def test_experiment_a_a_recompute_outside_the_pin_picks_another_kernel(card):
    with pytest.raises(CheckpointError):
        run_block(card, cure=False)


@pytest.mark.parametrize("card", [A100, H100], ids=["A100", "H100"])
def test_experiment_a_the_captured_pin_cures_it(card):
    run_block(card, cure=True)


def test_the_recompute_asks_the_same_chooser():
    with FakeTensorMode(), cuda_sdpa(A100) as log:
        out = checkpoint(F.scaled_dot_product_attention, *inputs(), use_reentrant=False)
        assert log.backends() == {"flash": 1}
        out.sum().backward()
        assert log.backends() == {"flash": 2}


def test_dtypes_that_differ_are_refused_as_torch_refuses_them():
    with FakeTensorMode(), cuda_sdpa(A100):
        q, k, v = inputs()
        with pytest.raises(RuntimeError, match="same dtype"):
            F.scaled_dot_product_attention(q, k.float(), v)
        with pytest.raises(RuntimeError, match="attn_mask dtype"):
            F.scaled_dot_product_attention(q, k, v, torch.zeros(S, S, dtype=torch.float16))
