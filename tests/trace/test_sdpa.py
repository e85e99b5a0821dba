"""The attention kernel that CUDA would choose: by mask, heads, dtype, head size, card and flags, with the reasons."""

import dataclasses
import subprocess
import sys

import pytest

from memplan.errors import MemplanError
from memplan.spec.device import cards
from memplan.trace.cuda_rules.generation import generation
from memplan.trace.cuda_rules.sdpa import (
    CUDNN_FIRST,
    FUSED_FIRST,
    AttentionShape,
    Flags,
    Mask,
    TensorShape,
    choose,
    default_priority,
)

A100, H100, B200, ADA, RTX5090 = (generation(c) for c in ("a100-80g", "h100-80g", "b200", "rtx-4090", "rtx-5090"))
NO_CUDNN = Flags(cudnn=False)


def call(heads: int = 8, kv: int | None = None, s: int = 1100, d: int = 128, **rest: object) -> AttentionShape:
    """A bf16 call of 2 samples that asks for gradients; `keys` keys where their number differs."""
    keys, dv = rest.pop("keys", s), rest.pop("dv", d)
    kv = heads if kv is None else kv
    rest = {"dtype": "bfloat16", "requires_grad": True, "enable_gqa": kv != heads, **rest}
    q, k = TensorShape.dense(2, heads, s, d), TensorShape.dense(2, kv, keys, d)
    return AttentionShape(query=q, key=k, value=TensorShape.dense(2, kv, keys, dv), **rest)


def mask(*shape: int, kind: str = "additive", **rest: object) -> Mask:
    return Mask(tensor=TensorShape.dense(*shape), kind=kind, **rest)


MASK = mask(2, 1, 1100, 1100)

CHOICES = [
    # a call without a mask
    pytest.param(call(), A100, None, "flash", id="A100 takes flash"),
    pytest.param(call(), ADA, None, "flash", id="Ada takes flash"),
    pytest.param(call(), RTX5090, None, "flash", id="sm120 takes flash"),
    pytest.param(call(), H100, None, "cudnn", id="Hopper prefers cuDNN"),
    pytest.param(call(), B200, None, "cudnn", id="data-centre Blackwell prefers cuDNN"),
    pytest.param(call(is_causal=True, kv=2), A100, None, "flash", id="flash groups heads"),
    pytest.param(call(is_causal=True, kv=2), H100, None, "cudnn", id="cuDNN groups heads"),
    # masks
    pytest.param(call(mask=MASK), A100, None, "efficient", id="a dense mask rules out flash"),
    pytest.param(call(mask=MASK, kv=2), A100, None, "math", id="mask and grouped heads leave math on A100"),
    pytest.param(call(mask=MASK, kv=2), H100, None, "cudnn", id="cuDNN takes mask and groups"),
    pytest.param(call(mask=MASK, kv=2), H100, NO_CUDNN, "math", id="seed C: a pin without cuDNN leaves math"),
    pytest.param(call(mask=mask(2, 1, 1, 1100, kind="bool")), H100, None, "cudnn", id="a broadcast bool mask"),
    pytest.param(call(mask=mask(2, 1100, 1100)), H100, None, "efficient", id="cuDNN wants 2 or 4 dimensions"),
    pytest.param(call(mask=mask(1100, 1100, requires_grad=True)), H100, None, "efficient", id="cuDNN trains no mask"),
    # dtypes
    pytest.param(call(dtype="float32"), H100, None, "efficient", id="fp32 goes to efficient"),
    pytest.param(call(dtype="float64"), H100, None, "math", id="fp64 goes to math"),
    pytest.param(call(dtype="float16"), H100, None, "cudnn", id="fp16 as bf16"),
    # head sizes
    pytest.param(call(d=256), A100, None, "flash", id="flash goes to 256"),
    pytest.param(call(d=264), A100, None, "efficient", id="above 256 only efficient"),
    pytest.param(call(d=256), H100, None, "cudnn", id="cuDNN goes to 256 on Hopper"),
    pytest.param(call(d=256), B200, None, "flash", id="cuDNN stops at 128 on Blackwell"),
    pytest.param(call(d=192, dv=128), B200, None, "cudnn", id="192 and 128 on Blackwell"),
    pytest.param(call(d=192, dv=128), A100, None, "efficient", id="flash wants one head size"),
    pytest.param(call(d=12), A100, None, "flash", id="flash pads to a multiple of 8"),
    pytest.param(call(d=12, mask=MASK), A100, None, "math", id="efficient does not pad"),
    pytest.param(call(d=12, mask=MASK, dtype="float32"), A100, None, "efficient", id="fp32 aligns to 4"),
    pytest.param(call(d=224), ADA, None, "efficient", id="flash's backward on sm89 stops at 192"),
    pytest.param(call(d=224, requires_grad=False), ADA, None, "flash", id="forward alone does not care"),
    pytest.param(call(d=256), ADA, None, "flash", id="256 without dropout works on sm89"),
    pytest.param(call(d=256, dropout=0.1), ADA, None, "efficient", id="256 with dropout does not"),
    pytest.param(call(d=256, dropout=0.1), RTX5090, None, "efficient", id="nor on sm120"),
    pytest.param(call(d=224), A100, None, "flash", id="sm80 has no such limit"),
    # lengths and dropout
    pytest.param(call(s=60, keys=1100, is_causal=True), A100, None, "efficient", id="causal wants a square in flash"),
    pytest.param(call(keys=1), H100, None, "flash", id="cuDNN wants more than one key"),
    pytest.param(call(dropout=0.1), H100, None, "flash", id="cuDNN's dropout counts in sixteenths"),
    pytest.param(call(dropout=0.125), H100, None, "cudnn", id="an eighth will do"),
    # flags
    pytest.param(call(), H100, Flags(deterministic=True), "flash", id="cuDNN is not deterministic"),
    pytest.param(call(), A100, Flags(flash=False, efficient=False, math=False), "cudnn", id="cuDNN behind math"),
    pytest.param(call(), H100, Flags(priority=("efficient", "cudnn")), "efficient", id="the order asked for"),
]


@pytest.mark.parametrize(("query", "card", "flags", "backend"), CHOICES)
def test_choice(query, card, flags, backend):
    assert choose(query, card, flags).backend == backend


def test_reasons_name_every_kernel_passed_over():
    choice = choose(call(mask=MASK, kv=2), H100, NO_CUDNN)
    assert [backend for backend, _ in choice.reasons] == ["cudnn", "flash", "efficient"]
    assert "switched off" in choice.why_not("cudnn")
    assert "attn_mask" in choice.why_not("flash")
    assert "enable_gqa" in choice.why_not("efficient")
    assert choice.why_not("math") is None


def test_nothing_left_says_why():
    with pytest.raises(MemplanError, match=r"flash: it takes no attn_mask.*math: it is switched off"):
        choose(call(mask=MASK, kv=2), A100, Flags(math=False, cudnn=False))


def test_strides_matter_where_torch_asks():
    last_stepped = TensorShape(shape=(2, 8, 64, 64), strides=(32768, 4096, 1, 64))
    query = dataclasses.replace(call(s=64, d=64), query=last_stepped)
    assert choose(query, A100).backend == "math"
    narrow = TensorShape(shape=(2, 8, 64, 1), strides=(512, 64, 1, 7))
    assert choose(dataclasses.replace(call(s=64, d=1), query=narrow), A100).backend == "flash"
    assert choose(dataclasses.replace(call(s=64, d=64, mask=mask(64, 64)), query=last_stepped), A100).backend == "math"


def test_an_old_cudnn_is_not_preferred():
    assert default_priority(H100) == CUDNN_FIRST
    assert default_priority(dataclasses.replace(H100, cudnn_version=91002)) == FUSED_FIRST
    assert default_priority(A100) == FUSED_FIRST


@pytest.mark.parametrize("card", cards())
def test_every_card_has_a_generation(card):
    assert generation(card).num_sms >= 100


def test_an_unknown_card_is_told_near_names():
    with pytest.raises(MemplanError, match="h100-80g"):
        generation("h10-80g")


def test_the_choice_needs_no_torch():
    names = ("generation", "sdpa", "sdpa_rules", "autocast_lists", "hidden_ops", "workspaces")
    imports = "".join(f"import memplan.trace.cuda_rules.{name}\n" for name in names)
    code = f"import sys\n{imports}assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
