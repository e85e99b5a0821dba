"""What spreads a step over devices, as a person types it."""

import pytest
from samples import run_of

from memplan.errors import MemplanError
from memplan.spec import Ladder
from memplan.spec.parallel import Parallel


def test_a_plain_kind_has_nothing_out_of_the_ordinary() -> None:
    assert Parallel.parse("fsdp2") == Parallel(kind="fsdp2")
    assert Parallel.parse("single") == Parallel()
    assert not Parallel().sharded
    assert Parallel.parse("zero1").sharded


def test_options_stand_behind_a_colon_in_any_order() -> None:
    asked = Parallel.parse("fsdp2:reduce-fp32+keep+noprefetch+param-bf16+offload")
    assert asked == Parallel(
        kind="fsdp2", keep=True, prefetch=False, offload=True, param_dtype="bf16", reduce_dtype="fp32"
    )
    assert Parallel.parse("ddp:view") == Parallel(kind="ddp", view=True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fsdp3", "Did you mean fsdp2"),
        ("", "Unknown parallel"),
        ("zero1:view", "takes no options"),
        ("ddp:", "no option ''"),
        ("ddp:keep", "Known: view."),
        ("fsdp2:keep+keep", "names keep twice"),
        ("fsdp2:reduce-fp32+reduce-bf16", "in two dtypes"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(text: str, says: str) -> None:
    with pytest.raises(MemplanError, match=says):
        Parallel.parse(text)


@pytest.mark.parametrize(("parallel", "world", "says"), [("fsdp2", 1, "needs 2 devices"), ("single", 8, "one device")])
def test_the_world_must_suit_the_kind(parallel: str, world: int, says: str) -> None:
    with pytest.raises(MemplanError, match=says):
        run_of(parallel=parallel, world=world)


@pytest.mark.parametrize(("parallel", "optimizer"), [("zero2", "muon"), ("fsdp2", "adafactor")])
def test_an_optimizer_that_needs_whole_tensors_is_not_given_pieces(parallel: str, optimizer: str) -> None:
    with pytest.raises(MemplanError, match="needs whole tensors"):
        run_of(parallel=parallel, world=2, optimizer=optimizer)
    run_of(parallel="zero1", world=2, optimizer=optimizer)


def test_another_world_is_another_question() -> None:
    ids = {
        run_of(parallel=kind, world=world).run_id
        for kind, world in [("single", 1), ("ddp", 2), ("ddp", 4), ("ddp:view", 2)]
    }
    assert len(ids) == 4


def test_a_ladder_takes_them_as_options_and_from_a_file() -> None:
    ladder = Ladder.from_dict(
        {"model": "tiny", "rungs": "B2c1", "parallel": "fsdp2:keep", "world": 4}, name="some", origin="options"
    )
    assert (ladder.parallel, ladder.world) == ("fsdp2:keep", 4)
