"""What a block keeps, against torch's own `saved_tensors_hooks`, and as whole numbers of one B*S*H tensor.

Letters: `B` batch, `S` sequence, `H` hidden, `A` query heads, `T` keys (= S here).
"""

import dataclasses

import pytest
import torch
from samples import run_of
from torch import nn

from memplan.estimate.checkpoint import LEAF
from memplan.estimate.modules import Module
from memplan.estimate.reference import Block as EstimatedBlock
from memplan.estimate.setup import Setup
from memplan.estimate.tape import Node, Parameter, Tape, Tensor
from memplan.models.blocks import find_blocks
from memplan.models.decoder import Block, Decoder
from memplan.models.registry import model_spec
from memplan.spec.checkpointing import Checkpointing
from memplan.spec.model import DecoderSpec
from memplan.step.checkpoint import checkpoint_blocks

BATCH, SEQ = 2, 48
TOY = DecoderSpec(
    num_layers=4, hidden=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn=256, vocab=32, max_positions=SEQ
)
"""A*D = K*D = H and F = 4*H, so that every kept tensor is a whole number of B*S*H."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-mixed": torch.float32}


def saved_bytes(out: Tensor, *shared: Tensor | None) -> int:
    """Bytes of the storages that the graph of `out` saves, those of parameters and of `shared` left out."""
    assert out.node is not None
    nodes: list[Node] = [out.node]
    seen: set[int] = {id(out.node)}
    tape, kept = out.tape, set()
    for node in nodes:
        kept |= {one.storage.index for one in node.saved if one is not None}
        for edge in node.edges:
            if (
                edge is not None
                and edge[0] is not LEAF
                and not isinstance(edge[0], Parameter)
                and id(edge[0]) not in seen
            ):
                seen.add(id(edge[0]))
                nodes.append(edge[0])
    known = {tensor.storage.index for tensor in shared if tensor is not None}
    return sum(a.num_bytes for i, a in enumerate(tape.allocs) if i in kept - known and a.category != "params")


def new_tape(precision: str) -> Tape:
    tape = Tape("cpu")
    tape.setup = Setup.of(run_of(precision=precision))
    tape.autocast = "bfloat16" if precision == "bf16-mixed" else None
    return tape


def run_block(tape: Tape, block: Module, spec: DecoderSpec, samples: int, seq: int, *, dense: bool) -> int:
    """Bytes that a block of the ledger saves."""
    dtype = tape.setup.dtype
    x = tape.new("x", (samples, seq, spec.hidden), dtype)
    x.requires_grad, x.node = True, LEAF
    tables = tuple(tape.new("table", (seq, spec.head_dim), "float32" if spec.rope_fp32 else dtype) for _ in "cs")
    rope = tables if spec.positions == "rope" else None
    mask = tape.new("mask", (samples if spec.mask == "dense" else 1, 1, seq, seq), "float32") if dense else None
    return saved_bytes(block(x, rope, mask), *tables, mask)


def estimated(
    spec: DecoderSpec, precision: str, *, attention: str, norm: str = "eager", samples: int = BATCH, seq: int = SEQ
) -> int:
    """Bytes that the estimate has a decoder block save."""
    tape = new_tape(precision)
    block = EstimatedBlock(tape, spec, attention=attention, norm=norm, index=0, store={})
    return run_block(tape, block, spec, samples, seq, dense=attention == "eager" or spec.mask == "dense")


def kept_bytes(module: nn.Module, *inputs: object, mixed: bool = False) -> int:
    """Bytes of the storages that autograd keeps for `module`'s backward, parameters and small inputs left out."""
    outside = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            kept[storage.data_ptr()] = storage
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=mixed),
    ):
        out = module(*inputs)
    assert out.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def measured(spec: DecoderSpec, precision: str, *, attention: str, norm: str) -> int:
    """Bytes that one decoder block keeps, the rotary tables left out."""
    torch.set_default_dtype(DTYPES[precision])
    try:
        decoder = Decoder(dataclasses.replace(spec, num_layers=1), attention=attention, norm=norm)
        hidden = torch.randn(BATCH, SEQ, spec.hidden, requires_grad=True)
    finally:
        torch.set_default_dtype(torch.float32)
    rope = decoder.rope_tables(hidden) if spec.positions == "rope" else None
    mask = decoder.causal_mask(hidden)
    block = decoder.blocks[0]
    assert isinstance(block, Block)
    tables = sum(table.nbytes for table in rope or ())
    # Backward makes an fp32 mask's own storage part of what is kept; it is shared by all blocks.
    shared_mask = mask.nbytes if mask is not None and attention == "sdpa" and precision == "fp32" else 0
    return kept_bytes(block, hidden, rope, mask, mixed=precision == "bf16-mixed") - tables - shared_mask


SPECS = {
    "toy": TOY,
    "grouped heads": dataclasses.replace(TOY, num_kv_heads=2, ffn=176),
    "dense mask": dataclasses.replace(TOY, num_kv_heads=2, mask="dense"),
    "fused": dataclasses.replace(TOY, num_kv_heads=2, projections="fused"),
    "qk-norm": dataclasses.replace(TOY, num_kv_heads=2, qk_norm=True, head_dim=32),
    "fused, qk-norm": dataclasses.replace(TOY, num_kv_heads=2, qk_norm=True, projections="fused"),
    "trainer": dataclasses.replace(
        TOY, num_kv_heads=2, qk_norm=True, projections="fused", mask="dense", rope_fp32=True
    ),
    "biases": dataclasses.replace(TOY, num_kv_heads=2, qkv_bias=True),
    "gpt2": dataclasses.replace(
        TOY,
        norm="layer",
        norm_bias=True,
        positions="learned",
        mlp="gelu-tanh",
        projections="fused",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    ),
}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("norm", ["eager", "fused"])
@pytest.mark.parametrize("name", SPECS)
def test_a_block_keeps_what_the_formula_says_to_the_byte(name: str, norm: str, attention: str, precision: str) -> None:
    spec = SPECS[name]
    found = measured(spec, precision, attention=attention, norm=norm)
    assert estimated(spec, precision, attention=attention, norm=norm) == found


def test_a_toy_block_keeps_26_tensors() -> None:
    """Two norms keep input, normed rows and output (6); attention q, k, v, output (4); SwiGLU 4 of 4 H each (16)."""
    unit = 4 * BATCH * SEQ * TOY.hidden
    small = BATCH * SEQ * (4 * TOY.num_heads + 8)  # log-sum-exp of every head, roots of two norms
    assert divmod(estimated(TOY, "fp32", attention="sdpa") - small, unit) == (26, 0)
    assert divmod(measured(TOY, "fp32", attention="sdpa", norm="eager") - small, unit) == (26, 0)


@pytest.mark.parametrize(
    ("mode", "whole_tensors"),
    [("none", 4 * 26), ("full", 4), ("every:2", 2 * 26 + 2), ("every:3", 2 * 26 + 2), ("first:3", 26 + 3)],
)
def test_checkpointed_blocks_keep_one_tensor_each(mode: str, whole_tensors: int) -> None:
    """Of four toy blocks, `full` recomputes 4, `every:2` blocks 0 and 2, `every:3` blocks 0 and 3."""
    decoder = Decoder(TOY)
    checkpoint_blocks(find_blocks(decoder, "blocks"), Checkpointing.parse(mode))
    hidden = torch.randn(BATCH, SEQ, TOY.hidden, requires_grad=True)
    # The final norm keeps input, normed rows and roots; the tables are shared.
    final = 2 * hidden.nbytes + 4 * BATCH * SEQ
    tables = sum(table.nbytes for table in decoder.rope_tables(hidden))
    outside = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    graph: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # An outer hook does not see what a checkpointed block packs; its input is seen as the block's argument.
        for block in decoder.blocks:
            block.register_forward_pre_hook(lambda _, inputs: graph.append(inputs[0]))
        decoder.trunk(hidden)
    recomputed = list(filter(Checkpointing.parse(mode).treats, range(4)))
    for index in recomputed:
        keep(graph[index])
    num_plain = 4 - len(recomputed)
    small = num_plain * BATCH * SEQ * (4 * TOY.num_heads + 8)
    # A recomputed block's output that a plain neighbour keeps as its own input is the neighbour's.
    unit = hidden.nbytes
    total = sum(kept.values()) - final - small - (tables if num_plain else 0)
    assert divmod(total, unit) == (whole_tensors, 0)
    plain = estimated(TOY, "fp32", attention="sdpa")
    assert len(recomputed) * unit + num_plain * plain == whole_tensors * unit + small


T = 64
RECORDED = [
    # Measured by saved_tensors_hooks on transformers' and Molmo2's own modules, less the rotary tables (512 or 1,024).
    ("qwen3-4b", {}, "sdpa", 170_792 - 512),
    ("qwen3-4b", {"mask": "dense"}, "sdpa", 183_080 + 2 * T - 512),
    ("qwen3-4b", {}, "eager", 182_952 + 6 * 32 * T - 512),
    ("llama-3.1-8b", {}, "sdpa", 201_352 - 512),
    ("molmo2-4b", {}, "sdpa", 183_592 + 2 * T - 1024),
    ("molmo2-8b", {}, "sdpa", 228_648 + 2 * T - 1024),
]


@pytest.mark.parametrize(("model", "changes", "attention", "bytes_a_token"), RECORDED)
def test_full_size_blocks_keep_what_was_recorded(
    model: str, changes: dict[str, str], attention: str, bytes_a_token: int
) -> None:
    spec = dataclasses.replace(model_spec(model).decoder, **changes)
    assert estimated(spec, "bf16", attention=attention, samples=1, seq=T) == bytes_a_token * T
