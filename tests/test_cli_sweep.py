"""`memplan estimate` for many configurations: what is left out and why, what a row says, and how it ends; and levers
that are named twice."""

import csv
import json
import sys
from typing import Any

import pytest

from memplan.cli import main


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Exit code of `memplan WORDS`, in this process."""
    monkeypatch.setattr(sys, "argv", ["memplan", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code if isinstance(ended.value.code, int) else 1


def rows_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Rows that a sweep prints, and what it says beside them."""
    assert run(monkeypatch, "estimate", *words, "-o", "json") == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


@pytest.mark.parametrize(
    ("words", "number", "said"),
    [
        (
            ["--sweep", "batch=1:8", "--sweep", "chunks=1,2,3"],
            14,
            "left out 10 of the sweep: the batch does not divide",
        ),
        (
            ["--batch", "2", "--sweep", "update=step,backward", "--sweep", "chunks=1,2"],
            3,
            "left out 1 of the sweep: An",
        ),
        (["--world", "8", "--sweep", "parallel=single,ddp,fsdp2"], 2, "left out 1 of the sweep: world is 8, but"),
        (["--model", "tiny-gpt2", "--sweep", "seq=64,65536,65537"], 1, "left out 1 of the sweep: tiny-gpt2 has"),
        (["--sweep", "optimizer=adamw,adafactor", "--parallel", "fsdp2", "--world", "4"], 1, "adafactor needs whole"),
        (["--sweep", "lora=8:q,8:qq"], 1, "left out 1 of the sweep: No linear of the blocks is called 'qq'"),
    ],
)
def test_what_no_step_can_be_is_left_out_and_said(
    words: list[str], number: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, err = rows_of(monkeypatch, capsys, *([] if "--model" in words else ["--model", "tiny"]), *words)
    assert len(rows) == number
    assert said in err


def test_a_row_says_what_it_is_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gate", "1GiB", "--seq", "64", "--rung", "B2@full", "--freeze", "none", "--sweep", "chunks=1,2"]
    rows, _ = rows_of(monkeypatch, capsys, "--model", "tiny", *words)
    told = {"model": "tiny", "device": "h100-80g", "seq": 64, "ckpt": "full", "freeze": "none", "batch": 2,
            "gate_bytes": 1 << 30, "limit_bytes": 1 << 30, "fits": True, "unsplit": False}  # fmt: skip
    assert [row["chunks"] for row in rows] == [1, 2]
    for row in rows:
        assert told.items() <= row.items()
    assert run(monkeypatch, "estimate", "--model", "tiny", *words, "-o", "csv") == 0
    lines = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [line["model"] for line in lines] == ["tiny", "tiny"]


def test_models_cards_implementations_and_frozen_parts_are_swept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    axes = ["gpu=h100-80g,h200", "model=tiny,tiny-wide", "freeze=none,embedding"]
    rows, _ = rows_of(monkeypatch, capsys, "--batch", "2", *(word for axis in axes for word in ("--sweep", axis)))
    assert {(row["device"], row["model"], row["freeze"]) for row in rows} == {
        (card, model, freeze)
        for card in ("h100-80g", "h200")
        for model in ("tiny", "tiny-wide")
        for freeze in ("none", "embedding")
    }
    assert len({row["limit_bytes"] for row in rows}) == 2
    alone = ["--batch", "2", "--model", "tiny-wide", "--freeze", "embedding", "--gpu", "h200", "-o", "json"]
    assert run(monkeypatch, "estimate", *alone) == 0
    single = json.loads(capsys.readouterr().out)
    [same] = [row for row in rows if (row["device"], row["model"], row["freeze"]) == ("h200", "tiny-wide", "embedding")]
    assert same["peak_allocated_bytes"] == single["peak"]["allocated_bytes"] - single["unsplit_bytes"]


@pytest.mark.parametrize(("gate", "code"), [("1MiB", 1), ("1GiB", 0)])
def test_a_sweep_with_nothing_within_the_gate_ends_with_1(
    gate: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "estimate", "--model", "tiny", "--sweep", "batch=1,2", "--gate", gate) == code
    assert f"gate {gate[0]}.00 {gate[1:]}" in capsys.readouterr().out


def test_near_the_end_of_a_card_a_row_and_a_single_answer_leave_it_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "qwen3-4b", "--ckpt", "full", "--seq", "4096", "--gpu", "h100-80g"]
    rows, _ = rows_of(monkeypatch, capsys, *words, "--sweep", "batch=1:12")
    answers = [row["fits"] for row in rows]
    assert answers == sorted(answers, key=[True, None, False].index) and {True, None, False} == set(answers)
    assert run(monkeypatch, "estimate", *words, "--batch", str(1 + answers.index(None)), "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["fits"] is None


@pytest.mark.parametrize(
    ("words", "twice"),
    [
        (["estimate", "--rung", "B4@none", "--ckpt", "full"], "The rung B4c1@none and --ckpt full name ckpt twice"),
        (["trace", "--rung", "B4l16", "--loss", "full"], "The rung B4c1l16 and --loss full name loss twice"),
        (["explain", "checkpoint", "--rung", "B4s256", "--seq", "512"], "B4c1s256 and --seq 512 name seq twice"),
        (["ladder", "B4@none,B2", "--ckpt", "full"], "The rung B4c1@none and --ckpt full"),
        (["verify", "B4@full", "--ckpt", "none,full"], "The rung B4c1@full and --ckpt none,full"),
        (["estimate", "--batch", "4", "--sweep", "batch=1:8"], "--sweep batch=1:8 and --batch 4 name batch twice"),
        (["estimate", "--rung", "B4c2", "--sweep", "chunks=1,2"], "--sweep chunks=1,2 and --rung B4c2"),
        (["estimate", "--ckpt", "full", "--sweep", "ckpt=full,none"], "--sweep ckpt=full,none and --ckpt full"),
        (["estimate", "--gpu", "h200", "--sweep", "gpu=h100-80g"], "--sweep gpu=h100-80g and --gpu h200"),
        (["estimate", "--sweep", "batch=1:8", "--explain"], "--explain answers for one configuration"),
        (["estimate", "--sweep", "batch=1:8", "--method", "trace"], "--method trace answers for one configuration"),
        (["estimate", "--explain", "--method", "trace"], "--method trace has none"),
    ],
)
def test_what_is_typed_twice_and_differs_is_refused(
    words: list[str], twice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *words, "--model", "tiny") == 2
    out, err = capsys.readouterr()
    assert twice in err and "Leave one out." in err
    assert out == ""


def test_what_is_typed_twice_and_is_the_same_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--rung", "B4l16s128@full", "--ckpt", "full", "--seq", "128", "--loss", "chunked-ckpt:16"]
    assert run(monkeypatch, "estimate", "--model", "tiny", *words) == 0


def test_a_rung_of_a_file_yields_to_no_option_but_to_no_default_either(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('model = "tiny"\nrungs = "B2@full,B4"\nckpt = "none"\nseq = 32\ndevice = "cpu"\n')
    assert run(monkeypatch, "ladder", str(file), "--dry-run", "-o", "json") == 0
    assert {row["rung"] for row in json.loads(capsys.readouterr().out)} == {"B2c1@full", "B4c1@none"}
    assert run(monkeypatch, "ladder", str(file), "--ckpt", "selective", "--dry-run") == 2
    assert "The rung B2c1@full and --ckpt selective name ckpt twice" in capsys.readouterr().err
