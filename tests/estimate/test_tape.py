"""The ledger's rules of who keeps what, one by one, in numbers that a reader can check by hand."""

from typing import Any

import pytest
from samples import run_of

from memplan.estimate import ops, views
from memplan.estimate.checkpoint import region
from memplan.estimate.products import cross_entropy, linear
from memplan.estimate.reading import peak_bytes, totals
from memplan.estimate.setup import Setup
from memplan.estimate.stack import plan
from memplan.estimate.symbols import Letters, text
from memplan.estimate.tape import Parameter, Tape, Tensor

UNIT = 4 * 64 * 64
"""Bytes of one fp32 tensor [64, 64]."""


def tape_of(rules: str = "cpu") -> Tape:
    tape = Tape(rules)
    tape.setup = Setup.of(run_of())
    return tape


def leaf(tape: Tape, name: str = "w") -> Parameter:
    return tape.parameter(name, (64, 64), "float32", trains=True)


def alive(tape: Tape) -> int:
    """Bytes alive now."""
    return sum(alloc.num_bytes for alloc in tape.allocs if not alloc.died)


def scalar(x: Tensor) -> Tensor:
    return ops.total(x)


def test_a_tensor_ends_with_its_last_reference() -> None:
    tape = tape_of()
    x: Any = tape.new("x", (64, 64), "float32")
    view = views.view(x, 4096)
    del x
    assert alive(tape) == UNIT
    del view
    assert alive(tape) == 0


def test_cuda_rounds_up_and_the_cpu_does_not() -> None:
    taken = {}
    for rules in ("cuda", "cpu"):
        tape = tape_of(rules)
        for size in (0, 1, 512, 513):
            tape.new("x", (size,), "uint8")
        taken[rules] = [alloc.num_bytes for alloc in tape.allocs]
    assert taken == {"cuda": [0, 512, 512, 1024], "cpu": [0, 1, 512, 513]}


def test_a_product_keeps_the_factors_whose_partners_train() -> None:
    """x * w keeps x for w's gradient; x itself asks for none, so w is not kept beyond being a parameter."""
    tape = tape_of()
    w = leaf(tape)
    x: Any = tape.new("x", (64, 64), "float32")
    y = ops.mul(x, w)
    del x
    assert alive(tape) == 3 * UNIT
    out = scalar(y)
    del y
    assert alive(tape) == 2 * UNIT + 4
    tape.backward(out)
    del out
    assert alive(tape) == 2 * UNIT  # the parameter and its gradient


def test_a_gradient_that_comes_twice_is_added_in_place_where_nobody_else_holds_it() -> None:
    """exp(x) feeds two squares: the second gradient is added to the first."""
    tape = tape_of()
    w = leaf(tape)
    x = ops.exp(w)
    out = scalar(ops.add(ops.square(x), ops.square(x)))
    del x
    before = len(tape.allocs)
    tape.backward(out)
    made = [alloc.op for alloc in tape.allocs[before:]]
    assert made.count("pow") == 2
    assert "add" not in made


def test_a_view_of_a_gradient_is_added_to_out_of_place() -> None:
    """A matrix that two products read gets transposed views; their sum is a third tensor."""
    tape = tape_of()
    w = leaf(tape)
    x = tape.new("x", (64, 64), "float32")
    out = scalar(ops.add(linear(x, w), linear(x, w)))
    before = len(tape.allocs)
    tape.backward(out)
    made = [alloc.op for alloc in tape.allocs[before:]]
    assert made.count("mm") == 2
    assert made.count("add") == 1


def test_a_checkpointed_region_keeps_its_input_and_stops_when_all_is_there_again() -> None:
    tape = tape_of()
    w = leaf(tape)

    def block(x: Tensor) -> Tensor:
        return ops.mul(ops.exp(ops.mul(x, w)), w)

    x: Any = ops.exp(w)
    kept = alive(tape)
    run = region(tape, block, None)
    y = run(x)
    del x
    assert alive(tape) == kept + UNIT  # the output; the input is exp's own result
    out = scalar(y)
    del y
    tape.backward(out)
    again = [alloc.op for alloc in tape.allocs if alloc.phase == "recompute"]
    assert again == ["mul", "exp"]  # the last product is not needed


def test_a_selective_region_keeps_what_its_policy_names() -> None:
    tape = tape_of()
    w = leaf(tape)
    x = tape.new("x", (64, 64), "float32")
    run = region(tape, lambda x: linear(ops.exp(linear(x, w)), w), ("mm",))
    out = scalar(run(x))
    tape.backward(out)
    again = [alloc.op for alloc in tape.allocs if alloc.phase == "recompute"]
    assert again == ["exp"]


def test_autocast_copies_a_weight_once_and_rows_for_every_reader() -> None:
    tape = tape_of("cuda")
    w = leaf(tape)
    x = tape.new("x", (64, 64), "float32")
    tape.autocast = "bfloat16"
    first, second = linear(x, w), linear(x, w)
    copies = [alloc for alloc in tape.allocs if alloc.op == "to"]
    assert len(copies) == 3
    assert first.dtype == second.dtype == "bfloat16"


def test_cross_entropy_peaks_at_three_tensors_of_logits() -> None:
    """Log-probabilities, their gradient, the logits' gradient; the logits themselves are gone."""
    tape = tape_of()
    w = leaf(tape)
    labels = tape.new("labels", (64,), "int64")
    tape.mark("loss")
    logits = [linear(w, w)]
    out = cross_entropy(logits.pop(), labels)
    tape.mark("backward")
    tape.backward(out)
    most = max(total for _, phase, total in totals(tape) if phase == "backward")
    assert (most - labels.numel * 8) // UNIT == 1 + 3  # the parameter too


@pytest.mark.parametrize(
    ("kinds", "units"),
    [
        ("aaaa", [([0], 1), ([1], 2), ([3], 1)]),
        ("aaa", [([0], 1), ([1], 1), ([2], 1)]),
        ("abababab", [([0, 1], 1), ([2, 3], 2), ([6, 7], 1)]),
        ("daaaaa", [([0], 1), ([1], 1), ([2], 3), ([5], 1)]),
    ],
)
def test_equal_blocks_are_told_by_three(kinds: str, units: list[tuple[list[int], int]]) -> None:
    assert plan(list(kinds)) == units


def test_the_last_two_may_be_told_for_themselves() -> None:
    assert plan(list("aaaaa"), last=2) == [([0], 1), ([1], 2), ([3], 1), ([4], 1)]


def test_the_peak_is_never_below_what_is_alive_at_any_moment() -> None:
    tape = tape_of()
    tape.mark("forward")
    held = [tape.new("x", (64, 64), "float32") for _ in range(3)]
    held.clear()
    assert peak_bytes(tape) == 3 * UNIT


def test_letters_multiply_add_and_divide_as_numbers_do() -> None:
    hidden, heads = Letters.of(64, "H"), Letters.of(4, "A")
    size = 2 * hidden * (heads + 1) - hidden
    assert int(size) == 2 * 64 * 5 - 64
    assert text(size) == "2*A*H + H"
    assert text(size * heads // heads) == "2*A*H + H"
    assert text((hidden * heads) // 3) == f"{64 * 4 // 3}"
