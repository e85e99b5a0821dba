"""Memory inside ops, by hand-checked figures, on real calls of a traced step, each entry with its source."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memplan.trace.cuda_rules.attention import cuda_sdpa
from memplan.trace.cuda_rules.generation import generation
from memplan.trace.cuda_rules.hidden import (
    BY_OP,
    ENTRIES,
    HOST_OUTPUTS,
    NOTHING_HIDDEN,
    Operand,
    Workspaces,
    hidden_blocks,
    hidden_bytes,
)
from memplan.trace.tracing import tracing
from memplan.units import MIB

A100, H100, ADA = generation("a100-80g"), generation("h100-80g"), generation("rtx-4090")
FLASH_BACKWARD = "_scaled_dot_product_flash_attention_backward"
EFFICIENT_BACKWARD = "_scaled_dot_product_efficient_attention_backward"
B, A, K, S, D = 2, 32, 8, 1000, 128


def seen(heads: int, *, layout: str = "bshd", itemsize: int = 2, s: int = S, d: int = D) -> Operand:
    """[B, heads, S, D], laid out as [B, S, heads, D] or as it stands."""
    strides = (s * heads * d, d, heads * d, 1) if layout == "bshd" else None
    return Operand(shape=(B, heads, s, d), itemsize=itemsize, strides=strides)


def named(op: str, card, *args: object) -> dict[str, int]:
    return {block.name: block.num_bytes for block in hidden_blocks(op, card, *args)}


def test_flash_backward():
    q, k = seen(A), seen(A)
    blocks = named(FLASH_BACKWARD, A100, q, q, k, k, q)
    assert blocks == {
        "softmax_d": B * A * 1024 * 4,  # 1000 rows rounded up to 128s
        "dq_accum": B * 1024 * A * D * 4,
    }


def test_flash_backward_with_grouped_heads_and_layouts_that_are_copied():
    q, k, other = seen(A), seen(K), seen(A, layout="bhsd")
    blocks = named(FLASH_BACKWARD, A100, other, q, k, k, other)
    assert blocks["dk_expanded"] == blocks["dv_expanded"] == B * S * A * D * 2
    assert blocks["contiguous_grad_out"] == blocks["contiguous_out"] == B * A * S * D * 2


def test_flash_backward_rounds_the_head():
    q = seen(A, d=72)
    assert named(FLASH_BACKWARD, A100, q, q, q, q, q)["dq_accum"] == B * 1024 * A * 96 * 4
    q = seen(A, d=200)
    assert named(FLASH_BACKWARD, A100, q, q, q, q, q)["dq_accum"] == B * 1024 * A * 256 * 4


def test_flash_forward_splits_keys_only_where_the_card_would_idle():
    op = "_scaled_dot_product_flash_attention"
    full = seen(A)
    assert hidden_blocks(op, A100, full, full, full) == ()
    q, k = Operand(shape=(1, 8, 64, D), itemsize=2), Operand(shape=(1, 8, 8192, D), itemsize=2)
    blocks = named(op, A100, q, k, k)  # 8 blocks for 216 places, 64 blocks of keys
    splits = blocks["softmax_lse_accum"] // (8 * 64 * 4)
    assert blocks["out_accum"] == splits * 8 * 64 * D * 4
    assert 20 <= splits <= 27
    assert hidden_blocks(op, A100, q, k, k, 0.1) == ()


@pytest.mark.parametrize(
    ("card", "head", "itemsize", "tiles"),
    [
        pytest.param(A100, 64, 2, 16 * (4 + 64 * 64), id="64 rows of 64"),
        pytest.param(A100, 128, 2, 8 * (4 + 128 * 128), id="128 rows of 128"),
        pytest.param(A100, 64, 4, 16 * (4 + 64 * 64), id="fp32"),
        pytest.param(ADA, 128, 2, 16 * 2 * (4 + 64 * 64) + 64 * 256, id="small shared memory: keys and values too"),
    ],
)
def test_efficient_backward(card, head, itemsize, tiles):
    q = seen(A, s=1024, d=head, itemsize=itemsize)
    assert named(EFFICIENT_BACKWARD, card, q, q, q, q) == {
        "delta": B * A * 1024 * 4,
        "workspace": B * A * tiles * 4,
    }


def test_safe_softmax_makes_the_plain_one_first():
    scores = Operand(shape=(B, A, 64, 64), itemsize=4)
    assert hidden_bytes("_safe_softmax", A100, scores) == B * A * 64 * 64 * (4 + 1) + B * A * 64 + 4


def test_embedding_backward():
    op, V, H = "embedding_dense_backward", 151_936, 2560
    few, many = Operand(shape=(3, 1024), itemsize=8), Operand(shape=(4, 1100), itemsize=8)
    assert hidden_blocks(op, A100, Operand(shape=(3, 1024, H), itemsize=2), few, V, -1, False) == ()
    blocks = named(op, A100, Operand(shape=(4, 1100, H), itemsize=2), many, V, -1, False)
    assert blocks["sorted_indices"] == blocks["orig_indices"] == 4400 * 8
    assert blocks["grad_weight_per_segment"] == (440 + 4400) * H * 4
    assert "count" not in blocks
    few_rows = named(op, A100, Operand(shape=(4, 1100, H), itemsize=2), many, 10, -1, False)
    assert few_rows["grad_weight_per_segment"] == (440 + 10) * H * 4


def test_index_put_sorts_for_sums_only():
    values, rows = Operand(shape=(500, 64), itemsize=2), Operand(shape=(500,), itemsize=8)
    table = Operand(shape=(1000, 64), itemsize=2)
    assert hidden_bytes("index_put_", A100, table, [rows, None], values, True) == 3 * 500 * 8
    assert hidden_bytes("index_put_", A100, table, [rows, None], values, False) == 0


@pytest.mark.parametrize("rms", [False, True])
def test_norm_backward_sums_in_parts_where_rows_are_many_and_short(rms):
    op = "_fused_rms_norm_backward" if rms else "native_layer_norm_backward"

    def bytes_of(num_rows: int, width: int) -> int:
        x, weight = Operand(shape=(num_rows, width), itemsize=2), Operand(shape=(width,), itemsize=2)
        rest = (None, weight, [True, True]) if rms else (None, None, weight, weight, [True, True, True])
        return hidden_bytes(op, A100, x, x, [width], *rest)

    assert bytes_of(65_536, 128) == 0
    assert bytes_of(100_000, 2048) == 0  # 64 columns of blocks fill half of 108 multiprocessors
    assert bytes_of(100_000, 128) == (1 if rms else 2) * 3125 * 128 * 2
    wide = Operand(shape=(100, 128), itemsize=2, strides=(0, 0))
    args = (wide, Operand(shape=(100, 128), itemsize=2), [128], None)
    assert hidden_bytes(op, A100, *args, *(() if rms else (None,))) == 100 * 128 * 2  # an expanded gradient is copied


def test_ops_without_an_entry_hide_nothing():
    assert hidden_blocks("add", A100, Operand(shape=(4,), itemsize=2)) == ()


def test_every_entry_names_its_source():
    assert len(BY_OP) == len(ENTRIES)
    for entry in ENTRIES:
        assert hasattr(torch.ops.aten, entry.op)
        assert entry.what
        assert "torch 2.13" in entry.source
        assert ".cu" in entry.source or ".cpp" in entry.source
    assert not set(NOTHING_HIDDEN) & set(BY_OP)
    for op, outputs in HOST_OUTPUTS.items():
        names = [r.name for r in getattr(torch.ops.aten, op).default._schema.returns]
        assert [names[i] for i in outputs] == ["philox_seed", "philox_offset"]


def test_what_a_kernel_leaves_on_the_host_stays_there_through_views() -> None:
    """Selective checkpointing keeps what it caches detached."""
    with tracing("h100-80g", frames=False) as t:
        q = torch.empty(1, 2, 16, 8)
        _, _, seed, _ = torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True)
        num_allocs = len(t.trace.allocs)
        kept = seed.detach()
        assert kept.numel() == 1 and len(t.trace.allocs) == num_allocs


class Hidden(TorchDispatchMode):
    """Asks `Workspaces` after each op, as a recorder does."""

    def __init__(self, card) -> None:
        super().__init__()
        self.workspaces = Workspaces(card)
        self.found: list[tuple[str, int, bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.found += self.workspaces(func, args, out)
        return out


def test_a_step_takes_two_workspaces_and_the_blocks_of_its_ops():
    """Every entry is met with the arguments that autograd really passes."""
    with FakeTensorMode(), cuda_sdpa(A100), Hidden(A100) as hidden:
        table, layer = nn.Embedding(5000, 64), nn.Linear(64, 64, bias=False)
        h = table(torch.zeros(4, 1024, dtype=torch.long)).bfloat16()
        q = h.unflatten(-1, (4, 16)).transpose(1, 2)
        mask = torch.zeros(1024, 1024, dtype=torch.bfloat16)
        out = F.scaled_dot_product_attention(q, q, q) + F.scaled_dot_product_attention(q, q, q, mask)
        out = out + F.scaled_dot_product_attention(q, q[:, :2], q[:, :2], mask, enable_gqa=True)
        out = F.layer_norm(layer(out.transpose(1, 2).flatten(2).float()), (64,), layer.weight[0])
        rows = out[torch.zeros(7, dtype=torch.long)]
        assert [name for name, _, stays in hidden.found if stays] == ["cublas workspace of the forward thread"]
        rows.sum().backward()
    stays = [(name, num_bytes) for name, num_bytes, stays in hidden.found if stays]
    assert stays == [(f"cublas workspace of the {side} thread", 8_519_680) for side in ("forward", "backward")]
    met = {name.partition(".")[0] for name, _, stays in hidden.found if not stays}
    assert {FLASH_BACKWARD, EFFICIENT_BACKWARD, "_safe_softmax", "embedding_dense_backward"} <= met
    assert {"index_put_", "index_put", "_index_put_impl_"} & met


def test_a_recompute_uses_the_workspace_of_the_backward_thread():
    with FakeTensorMode(), Hidden(H100) as hidden:
        layer = nn.Linear(64, 64)
        out = checkpoint(layer, torch.rand(2, 64), use_reentrant=False)
        with torch.no_grad():
            layer(torch.rand(2, 64))
        out.sum().backward()
    assert hidden.found == [
        (f"cublas workspace of the {side} thread", 32 * MIB, True) for side in ("forward", "backward")
    ]
