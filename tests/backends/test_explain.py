"""What checkpointing does with each op of a block, in numbers that a reader can check by hand.

Letters: `B` batch, `S` sequence, `H` hidden, `F` feed-forward, `A` query heads.
"""

import pytest
from samples import asked, run_of

from memplan.analysis.checkpointing import findings
from memplan.backends.explain import explain
from memplan.backends.simulated import alive_after_forward
from memplan.errors import MemplanError
from memplan.record.explain import BlockPolicy, OpPolicy
from memplan.report.explain_table import explain_json, explain_table
from memplan.report.render import render
from memplan.spec import RunSpec
from memplan.spec.device import card

H100 = card("h100-80g")
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"

# tiny: B*S = 2*64 tokens of H = 128 in fp32; heads of 4*32, keys and values of half of it, F = 2.75 H.
TENSOR = 2 * 64 * 128 * 4  # bytes of one B*S*H tensor
PRODUCT = 2 * 2 * 64 * 128 * 128  # floating-point operations of one H*H matrix over all tokens


def tiny(ckpt: str = "selective", **step: object) -> BlockPolicy:
    return explain(run_of("tiny", ckpt=ckpt, **{"batch": 2, "seq": 64} | step))


def by_name(answer: BlockPolicy) -> dict[str, OpPolicy]:
    rows = {op.op: op for op in answer.ops}
    assert len(rows) == len(answer.ops), "an op stands in two rows"
    return rows


def test_products_alternate_attention_is_saved_and_views_are_free() -> None:
    rows = by_name(tiny())
    assert {name: row.policy for name, row in rows.items()} == {
        "aten.mm.default": "ALTERNATE",
        ATTENTION: "SAVE",
        "aten.mul.Tensor": "RECOMPUTE",
        "aten.add.Tensor": "RECOMPUTE",
        "aten.pow.Tensor_Scalar": "RECOMPUTE",
        "aten.mean.dim": "RECOMPUTE",
        "aten.rsqrt.default": "RECOMPUTE",
        "aten.silu.default": "RECOMPUTE",
        "aten.neg.default": "RECOMPUTE",
        "aten.cat.default": "RECOMPUTE",
        "aten._unsafe_view.default": "FREE",
        "aten.detach.default": "FREE",
        "aten.split.Tensor": "FREE",
        "aten.t.default": "FREE",
        "aten.transpose.int": "FREE",
        "aten.view.default": "FREE",
    }


def test_calls_bytes_and_operations_of_a_block_in_small_numbers() -> None:
    rows = by_name(tiny())
    products, attention = rows["aten.mm.default"], rows[ATTENTION]
    # q 1, k and v 0.5 each, out 1, gate and up 2.75 each, down 1 wide; down reads 2.75.
    assert products.num_calls == 7
    assert products.num_bytes / TENSOR == 1 + 0.5 + 0.5 + 1 + 2.75 + 2.75 + 1
    assert products.num_flops / PRODUCT == 1 + 0.5 + 0.5 + 1 + 2.75 + 2.75 + 2.75
    # Two products of S*S scores, S = H / 2.
    assert attention.num_flops / PRODUCT == 0.5 + 0.5
    assert rows["aten.silu.default"].num_bytes / TENSOR == 2.75
    assert rows["aten.view.default"].num_bytes == 0
    # The first product is kept, the second not, and so on: q, v, gate and down.
    assert (products.num_kept, products.kept_bytes / TENSOR) == (4, 1 + 0.5 + 2.75 + 1)
    assert products.kept_flops / PRODUCT == 1 + 0.5 + 2.75 + 2.75


def test_totals_of_the_three_modes_in_small_numbers() -> None:
    answer = tiny()
    assert answer.num_flops / PRODUCT == 11.25 + 1
    scores = 2 * 4 * 64 * 4  # attention's number a head and token
    rows = 2 * 2 * 64 * 4  # the two norms' number a token
    # As counted in test_checkpoint.py: 20 tensors without checkpointing, the block's input with full.
    assert answer.kept_bytes["full"] == TENSOR
    assert answer.kept_bytes["none"] == 20 * TENSOR + scores + rows
    # Input 1, four products 5.25, attention 1.
    assert answer.kept_bytes["selective"] == 7.25 * TENSOR + scores
    # Full runs all again but down, whose result backward does not need; selective k, out and up.
    assert answer.recomputed_flops["none"] == 0
    assert answer.recomputed_flops["full"] / PRODUCT == 12.25 - 2.75
    assert answer.recomputed_flops["selective"] / PRODUCT == 0.5 + 1 + 2.75


def test_shares_add_up_to_one() -> None:
    answer = tiny()
    assert sum(answer.flops_frac(op) for op in answer.ops) == pytest.approx(1)
    assert sum(answer.bytes_frac(op) for op in answer.ops) == pytest.approx(1)


@pytest.mark.parametrize(
    ("ckpt", "policy"), [("full", "RECOMPUTE"), ("every:2", "RECOMPUTE"), ("none", "SAVE"), ("offload", "SAVE")]
)
def test_other_modes_treat_every_op_alike(ckpt: str, policy: str) -> None:
    answer = tiny(ckpt)
    assert {op.policy for op in answer.ops} == {policy, "FREE"}
    costly = [op for op in answer.ops if op.policy != "FREE"]
    kept = [op.num_kept == (op.num_calls if policy == "SAVE" else 0) for op in costly]
    assert all(kept)
    assert answer.kept_bytes == tiny().kept_bytes


def test_a_dear_op_that_runs_again_is_called_out() -> None:
    custom = tiny("selective:sdpa")
    assert by_name(custom)["aten.mm.default"].policy == "RECOMPUTE"
    told = "\n".join(findings(custom))
    # 11.25 of 12.25; all but attention and down of the 9.5 that full runs again.
    assert "aten.mm.default is 92 % of the block's FLOPs and is run again" in told
    assert "selective cannot beat full here (it runs 89 % of full's FLOPs again)" in told
    assert "cannot beat full" not in "\n".join(findings(tiny()))
    assert "nothing dear is run again" in "\n".join(findings(tiny()))


def test_experts_are_better_off_with_full_and_the_numbers_are_said() -> None:
    answer = explain(run_of("tiny-moe", ckpt="selective", batch=2, seq=64))
    experts = by_name(answer)["memplan.grouped_mm.default"]
    assert (experts.kind, experts.policy, experts.num_calls, experts.num_kept) == ("grouped", "ALTERNATE", 2, 1)
    # Of gate_up and down, 2 experts a token: 2*64 wide and H wide.
    assert experts.num_bytes / TENSOR == 2 * (1 + 1)
    assert experts.num_flops / PRODUCT == 2 * (1 + 0.5)
    (told,) = [line for line in findings(answer) if "experts" in line]
    # down makes H of 64: 2*64 operations for each 4 bytes.
    assert "saves 32 FLOPs a byte" in told
    assert "prefer full, which keeps 64.00 KiB" in told


def test_a_card_speaks_of_its_own_kernels() -> None:
    answer = explain(asked("tiny-wide", "B2c1@selective", device=H100, precision="bf16"))
    kernels = [op for op in answer.ops if op.kind == "attention"]
    assert [(op.op, op.policy) for op in kernels] == [("aten._scaled_dot_product_cudnn_attention.default", "SAVE")]


def test_a_real_model_takes_one_block_and_says_what_its_trace_shows() -> None:
    answer = explain(asked("qwen3-4b", "B2c1@selective", device=H100))
    again = dict(answer.recomputed_flops)
    assert answer.kept_bytes["full"] < answer.kept_bytes["selective"] < answer.kept_bytes["none"]
    assert 0 < again["selective"] < again["full"] < answer.num_flops
    # Each of the 36 blocks of a traced forward keeps as much more than with full.
    full, selective = (
        alive_after_forward(asked("qwen3-4b", f"B2c1@{ckpt}", device=H100), 2) for ckpt in ("full", "selective")
    )
    assert selective - full == 36 * (answer.kept_bytes["selective"] - answer.kept_bytes["full"])


def test_a_card_adds_masks_out_of_place_under_a_policy_so_that_kept_scores_stay() -> None:
    # In fp32 a card takes the math path for grouped heads; torch adds in place where no policy looks on.
    answer = explain(asked("tiny", "B2c1@selective:bmm", device=H100))
    rows = by_name(answer)
    assert (rows["aten.bmm.default"].policy, rows["aten.bmm.default"].num_kept) == ("SAVE", 2)


def test_chunks_and_compile_leave_the_answer_of_a_chunk_alone() -> None:
    assert tiny(batch=4, chunks=2, compile="on").kept_bytes == tiny().kept_bytes


def test_blocks_that_share_keys_and_values_are_said_to_be_treated_otherwise() -> None:
    answer = explain(run_of("tiny-gemma", ckpt="selective", batch=2, seq=64))
    assert "share keys and values" in "\n".join(findings(answer))
    assert answer.note == findings(answer)[1]
    assert tiny().note == ""


def test_an_unknown_op_is_refused() -> None:
    with pytest.raises(MemplanError, match="Did you mean sdpa"):
        tiny("selective:sdap")


def test_the_page_and_the_json_say_the_same() -> None:
    answer = tiny()
    data = explain_json(answer)
    assert (data["source"], data["model"], data["block"]) == ("traced", "tiny", "decoder.blocks.0")
    assert data["ops"][0]["op"] == "aten.mm.default"
    assert data["ops"][0]["flops_frac"] == pytest.approx(11.25 / 12.25)
    assert RunSpec.from_dict(answer.run.to_dict()) == answer.run
    page = render(explain_table(answer))
    assert "mm.default" in page and "ALTERNATE" in page and "91.8 %" in page
    for line in data["findings"]:
        assert line in page
