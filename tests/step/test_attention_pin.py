"""The kernels that the caller allows in forward are those of the recomputation, which runs in backward, outside of the
caller's `sdpa_kernel`. The uncured code is torch's checkpoint without the pin, and fails."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointError, checkpoint

from memplan import tracing
from memplan.models.decoder import Block
from memplan.models.factory import build_model
from memplan.models.registry import model_spec
from memplan.record import RecomputeDifference
from memplan.step.attention import allowed_backends, attention_pin
from memplan.step.region import Region
from memplan.step.witness import Witness

Call = Callable[..., Any]


def uncured(block: Block) -> Call:
    """The block under torch's checkpoint, as it stood when the bug was met."""
    plain = block.forward

    def call(*args: Any) -> Any:
        return checkpoint(plain, *args, use_reentrant=False)

    return call


def cured(block: Block) -> Call:
    """The block as a region."""
    return Region("decoder.blocks.0", block.forward)


def train_one_block(made: Callable[[Block], Call], device: str = "cpu") -> None:
    """Forward and backward of one block in bf16 autocast: forward may use math alone, backward runs behind it."""
    with torch.device(device):
        model = build_model(model_spec("tiny"))
        hidden = torch.randn(2, 64, 128, requires_grad=True)
        rope = model.decoder.rope_tables(hidden)
    call = made(model.decoder.blocks[0])  # type: ignore[arg-type]
    with sdpa_kernel([SDPBackend.MATH]), torch.autocast(device, torch.bfloat16):
        out: Tensor = call(hidden, rope, None)
    out.float().sum().backward()


def test_without_the_pin_torch_raises_in_a_trace_without_a_gpu() -> None:
    """Forward saved fp32 tensors of matmul and softmax, the recomputation bf16 tensors of a fused kernel."""
    with tracing(gpu="h100-80g") as trace, pytest.raises(CheckpointError, match=r"float32(.|\n)*bfloat16"):
        train_one_block(uncured)
    assert trace.attention == {"math": 1, "cudnn": 1}


def test_with_the_pin_the_recomputation_takes_the_callers_kernel() -> None:
    with tracing(gpu="h100-80g") as trace:
        train_one_block(cured)
    assert trace.attention == {"math": 2}


def test_the_witness_names_the_kernel_in_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recomputed_in_a_trace() is None
    monkeypatch.setattr("memplan.step.region.attention_pin", lambda: (nullcontext(), nullcontext()))
    first = recomputed_in_a_trace()
    assert first is not None
    assert first.module == "decoder.blocks.0.attn"
    assert first.op_again == "aten._scaled_dot_product_cudnn_attention"
    assert first.max_abs is None


def recomputed_in_a_trace() -> RecomputeDifference | None:
    """The first difference of a block in a trace, where tensors have no values."""
    with tracing(gpu="h100-80g"):
        model = build_model(model_spec("tiny"))
        region = Region("decoder.blocks.0", model.decoder.blocks[0].forward)
        hidden = torch.randn(2, 64, 128, requires_grad=True)
        witness = Witness(model)
        region.watch = witness
        try:
            with witness:
                with sdpa_kernel([SDPBackend.MATH]), torch.autocast("cpu", torch.bfloat16):
                    out = region(hidden, model.decoder.rope_tables(hidden), None)
                out.float().sum().backward()
        except CheckpointError:
            assert witness.first is not None
    return witness.first


@pytest.mark.parametrize("made", [uncured, cured])
def test_on_the_cpu_forward_and_recomputation_differ_without_the_pin_alone(made: Callable[[Block], Call]) -> None:
    if made is uncured:
        with pytest.raises(CheckpointError):
            train_one_block(made)
    else:
        train_one_block(made)


@pytest.mark.gpu
def test_on_a_gpu_torch_raises_without_the_pin_and_not_with_it() -> None:
    with pytest.raises(CheckpointError, match=r"float32(.|\n)*bfloat16"):
        train_one_block(uncured, "cuda")
    train_one_block(cured, "cuda")


def test_a_recomputation_leaves_the_allowed_kernels_and_their_order_as_they_were() -> None:
    """The order is global too; a caller who asked for another finds it again behind backward, and the recomputation
    has the one of its forward."""
    at_first = allowed_backends()
    seen: list[list[SDPBackend]] = []
    asked = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]

    def look(x: Tensor) -> Tensor:
        seen.append(allowed_backends())
        return x.sin()

    with sdpa_kernel(asked, set_priority=True):
        out = Region("look", look)(torch.ones(2, requires_grad=True))
        within = allowed_backends()
    outside = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(outside, set_priority=True):
        out.sum().backward()
        assert allowed_backends() == outside
    assert seen == [within, within]
    assert within == asked
    assert allowed_backends() == at_first


def test_the_order_of_preference_outlives_a_recompute_under_a_pin_on_one_kernel() -> None:
    """torch's own context, nested in one that shuts kernels out, leaves its first kernel in front for good."""
    before = torch._C._get_sdp_priority_order()
    with sdpa_kernel([SDPBackend.MATH]):
        _, again = attention_pin()
        with again:
            assert allowed_backends() == [SDPBackend.MATH]
    assert torch._C._get_sdp_priority_order() == before
