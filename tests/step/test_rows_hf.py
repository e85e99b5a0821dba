"""Padded and packed rows of transformers' models: who sees whom, which families know of it, and what the masks cost."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from models.hf_configs import SMALL, small_run, small_spec
from samples import measured_peak

from memplan.backends.simulated import simulate
from memplan.errors import MemplanError
from memplan.estimate import estimate
from memplan.models.batch import IGNORED
from memplan.spec import DeviceSpec, RunSpec
from memplan.spec.device import CPU, card
from memplan.spec.rows import PACKED, UNPACKED
from memplan.step.builder import TrainStep, build_step

pytest.importorskip("transformers")

H100, HERE = card("h100-80g"), torch.device("cpu")
TEXT = tuple(name for name in SMALL if small_spec(name).family in (*PACKED, *UNPACKED) and name != "gemma3")
"""Small models that read text alone."""
QUICK = ("gpt2", "gemma3_text")
"""Of tables of places, and of windows."""
FORMS = ("padded:0.25", "packed:2")
ENDS = {"packed:3": [12, 25, 38], "padded:0.5": [19]}
"""Where documents end in a row of 38 tokens: longer than a window of 24 together, and shorter alone."""


def is_known(family: str, rows: str) -> bool:
    """Whether transformers knows how to fill the rows of `family` so."""
    return not rows.startswith("packed") or small_spec(family).family in PACKED


def each(values: Iterable[str]) -> list[object]:
    """Each family with each of the rows that it can be fed with, slow but for `QUICK`."""
    return [
        pytest.param(family, value, marks=[] if family in QUICK else [pytest.mark.slow])
        for family in TEXT
        for value in values
        if is_known(family, value)
    ]


def hidden_of(step: TrainStep, start: int, end: int) -> torch.Tensor:
    """Hidden states of the tokens from `start` to `end` of each row, as if nothing else were there."""
    tokens = step.batch.tokens[:, start:end]
    return step.model(dataclasses.replace(step.batch, tokens=tokens, attention_mask=None, position_ids=None))


@pytest.mark.parametrize(("family", "rows"), each(ENDS))
def test_each_document_is_encoded_as_if_it_were_alone(family: str, rows: str) -> None:
    step = build_step(small_run(family, layers=0 if family == "qwen3_5_text" else 2, seq=38, rows=rows), HERE)
    ends = ENDS[rows]
    with torch.no_grad():
        hidden, whole = step.model(step.batch), hidden_of(step, 0, 38)
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            torch.testing.assert_close(hidden[:, start:end], hidden_of(step, start, end), rtol=0, atol=5e-5)
    assert (hidden[:, ends[0] :] - whole[:, ends[0] :]).abs().max() > 0.01


def test_a_batch_says_what_is_padding_or_where_documents_begin() -> None:
    padded, packed = (build_step(small_run("llama", layers=1, seq=8, rows=rows), HERE).batch for rows in FORMS)
    assert padded.attention_mask is not None
    assert packed.position_ids is not None
    assert padded.attention_mask[1].tolist() == [1] * 6 + [0] * 2
    assert packed.position_ids[1].tolist() == [0, 1, 2, 3] * 2
    assert [batch.segments for batch in (padded, packed)] == [None] * 2
    assert [padded.position_ids, packed.attention_mask] == [None] * 2
    ignored = [[at for at, label in enumerate(batch.labels[0]) if label == IGNORED] for batch in (padded, packed)]
    assert ignored == [[5, 6, 7], [3, 7]]


TRACED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sdpa": ("llama", "packed:2", {"device": H100, "precision": "bf16"}),
    "a norm of heads": (
        "qwen3",
        "padded:0.25",
        {"device": H100, "precision": "bf16-mixed", "ckpt": "selective", "loss": "chunked:2"},
    ),
    "eager": ("gpt2", "packed:2", {"device": H100, "precision": "bf16", "attention": "eager", "ckpt": "full"}),
    "both sides": ("bert", "padded:0.25", {"device": CPU, "precision": "bf16"}),
    "windows": ("gemma3_text", "packed:2", {"device": CPU, "precision": "bf16-mixed"}),
    "one document": ("llama", "packed:1", {"device": CPU}),
}
"""Steps that between them meet all that masks differ in."""
FEW = ("a norm of heads", "both sides", "windows")


def filled(family: str, rows: str, **step: Any) -> RunSpec:
    """A small step in two chunks over rows that no kernel's alignment divides."""
    return small_run(family, **{"layers": 2, "seq": 36, "batch": 4, "chunks": 2, "rows": rows} | step)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k in FEW else [pytest.mark.slow]) for k in TRACED])
def test_the_ledger_makes_the_masks_that_are_traced(kind: str) -> None:
    family, rows, step = TRACED[kind]
    run = filled(family, rows, **step)
    assert estimate(run).peak_allocated_bytes == simulate(run).steps.steady.peak_allocated_bytes


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        ("llama", "packed:2"),
        pytest.param("qwen3", "padded:0.25", marks=pytest.mark.slow),
        pytest.param("gemma3_text", "packed:2", marks=pytest.mark.slow),
    ],
)
def test_what_is_traced_is_what_the_cpu_measures(family: str, rows: str) -> None:
    run = filled(family, rows, ckpt="full")
    assert simulate(run).steps.steady.peak_allocated_bytes == measured_peak(run)


def test_rows_that_hide_nothing_need_no_mask() -> None:
    """What is padded away of 36 tokens by 1 % is nothing, and one document is a full row: 8 bytes a token are added,
    and tables of places for each sample where they are given."""
    full, padded, one = (
        estimate(filled("llama", rows)).peak_allocated_bytes for rows in ("full", "padded:0.01", "packed:1")
    )
    assert padded - full == 4 * 36 * 8
    assert one > padded
    assert estimate(filled("llama", "packed:2")).peak_allocated_bytes > one


@pytest.mark.parametrize("family", ["bert", "gpt_oss", "qwen3_5_text"])
def test_a_family_that_cannot_keep_documents_apart_is_refused(family: str) -> None:
    small_run(family, rows="padded:0.25")
    with pytest.raises(MemplanError, match=f"packed row of {family} would see one another"):
        small_run(family, rows="packed:2")


@pytest.mark.parametrize("family", ["molmo2", "gemma3", "vit", "siglip"])
def test_models_that_read_images_fill_their_rows_themselves(family: str) -> None:
    for rows in FORMS:
        with pytest.raises(MemplanError, match="Type --rows full"):
            small_run(family, rows=rows)


@pytest.mark.slow
@pytest.mark.parametrize("device", [H100, CPU], ids=["h100", "cpu"])
@pytest.mark.parametrize(("family", "rows"), each(FORMS))
def test_every_family_is_what_the_trace_says(family: str, rows: str, device: DeviceSpec) -> None:
    for ckpt in ("none", "full", "selective"):
        if (family, ckpt) == ("gpt_oss", "selective"):
            continue
        for precision, loss in (("bf16", "full"), ("bf16-mixed", "chunked:2")):
            layers = 4 if family == "qwen3_5_text" else 2
            run = small_run(family, layers=layers, seq=40, batch=4, chunks=2, rows=rows, ckpt=ckpt,
                            precision=precision, loss=loss, device=device)  # fmt: skip
            ours, theirs = estimate(run).peak_allocated_bytes, simulate(run).steps.steady.peak_allocated_bytes
            assert ours == pytest.approx(theirs, rel=1e-4)
