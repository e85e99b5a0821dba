"""A run's identity: the same question has the same name, on every machine and after a trip through JSON."""

import dataclasses
import json

import pytest
from samples import run_of

from memplan.errors import MemplanError
from memplan.models.registry import names
from memplan.spec import RunSpec, StepSpec
from memplan.spec.device import card


@pytest.mark.parametrize("name", names())
def test_a_run_survives_json(name: str) -> None:
    run = dataclasses.replace(run_of(name), device=card("h100-80g"))
    back = RunSpec.from_dict(json.loads(json.dumps(run.to_dict())))
    assert back == run
    assert back.run_id == run.run_id


def test_the_identity_is_hex_and_follows_every_field() -> None:
    run = run_of()
    assert len(run.run_id) == 12
    assert int(run.run_id, 16) >= 0
    assert run.run_id == run_of().run_id
    others = [
        run_of(batch=8),
        run_of(ckpt="full"),
        run_of(clip=1.0),
        run_of("tiny-gpt2"),
        dataclasses.replace(run, device=card("h100-80g")),
    ]
    assert len({run.run_id, *(other.run_id for other in others)}) == 6


def test_what_is_not_asked_leaves_the_identity_alone() -> None:
    """Sources and the usual set-up may be corrected; a card's sizes decide whether a step fits, and count."""
    run = dataclasses.replace(run_of(), device=card("h100-80g"))
    model = dataclasses.replace(run.model, source="elsewhere", seq=7, precision="bf16")
    device = dataclasses.replace(run.device, source="elsewhere")
    assert dataclasses.replace(run, model=model, device=device).run_id == run.run_id
    smaller = dataclasses.replace(run.device, context_bytes=0)
    assert dataclasses.replace(run, device=smaller).run_id != run.run_id
    wider = dataclasses.replace(run.model, decoder=dataclasses.replace(run.model.decoder, ffn=353))
    assert dataclasses.replace(run, model=wider).run_id != run.run_id


@pytest.mark.parametrize(
    ("step", "why"),
    [
        ({"chunks": 0}, "chunks is 0"),
        ({"batch": 7, "chunks": 2}, "try B8c2 or B6c2"),
        ({"seq": 0}, "seq is 0"),
        ({"images": -1}, "images is -1"),
        ({"ckpt": "ful"}, "Unknown ckpt"),
        ({"ckpt": "full:2"}, "takes no number"),
        ({"loss": "chunked:x"}, "whole number N"),
        ({"optimizer": "adam"}, "Did you mean adamw"),
        ({"precision": "bf61"}, "Did you mean bf16"),
        ({"clip": 0.0}, "above zero"),
        ({"clip": float("nan")}, "above zero"),
        ({"world": 2}, "one device"),
        (
            {"workload": "prefix-suffix", "suffix": 8, "ckpt": "selective", "precision": "bf16-mixed"},
            "leaves the suffix casts",
        ),
    ],
)
def test_a_step_that_cannot_be_says_why(step: dict[str, object], why: str) -> None:
    with pytest.raises(MemplanError, match=why):
        run_of(**step)


@pytest.mark.parametrize(
    ("name", "step", "why"),
    [
        ("tiny", {"images": 2}, "tiny has no vision tower. Leave --images out"),
        ("tiny-molmo2", {"images": 2, "seq": 18}, "2 crops make 18 image tokens, .* Type --seq 19 or more"),
        ("tiny-gpt2", {"seq": 257}, "256 learned positions, .* Type --seq 256 or less"),
    ],
)
def test_a_step_that_the_model_cannot_make_says_why(name: str, step: dict[str, object], why: str) -> None:
    with pytest.raises(MemplanError, match=why):
        run_of(name, **step)


def test_a_step_may_fill_the_models_sequence() -> None:
    assert run_of("tiny-molmo2", images=2, seq=19).step.images == 2
    assert run_of("tiny-gpt2", seq=256).step.seq == 256


def test_derived_numbers() -> None:
    step = StepSpec(batch=12, chunks=6, seq=8, ckpt="every:2", loss="chunked-ckpt:16")
    assert (step.micro_batch, step.checkpointing.count, step.loss_kind, step.loss_chunks) == (2, 2, "chunked-ckpt", 16)
    plain = StepSpec(batch=1, seq=8)
    assert (plain.checkpointing.count, plain.loss_kind, plain.loss_chunks) == (None, "full", 1)
