"""The command line as a user meets it: frozen surface, one sentence for a mistake, exit codes with one meaning."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer.main
from samples import row_of

from memplan.cli import main, verbs
from memplan.cli_typer import application
from memplan.record import append_row, read_rows

STEP = {"--seq", "--images", "--ckpt", "--loss", "--precision", "--optimizer", "--attention", "--norm", "--clip"}
STEP |= {"--workload", "--suffix", "--blocks", "--dropout", "--lora", "--compile", "--freeze", "--update", "--rows"}
STEP |= {"--impl", "--parallel", "--world"}
OUT = {"-o", "--output"}
CLIMB = {"--device", "--gpu", "--gate", "--gate-on", "--warmup", "--steps", "--timeout", "--out", "--resume"}
CLIMB |= {"--entry", "--search", "--min-time", "--repeat", "--parity", "--allow-shared", "--snapshot-on-oom"}
CLIMB |= {"--retry", "--dry-run", "--trace"}
ASKED = {"--model", "--rung", "--batch", "--chunks", "--gpu", "--device", "--gate"}
WITHIN = {"--memory-within", "--speed-within"}
SURFACE = {
    "ladder": {"RUNGS", "--model"} | STEP | CLIMB | OUT,
    "estimate": ASKED | {"--method", "--sweep", "--explain"} | STEP | OUT,
    "trace": ASKED | {"--plot", "--entry"} | STEP | OUT,
    "explain": {"WHAT"} | ASKED - {"--gate"} | STEP | OUT,
    "models": OUT,
    "doctor": OUT,
    "verify": {"RUNGS", "--model", "--device"} | STEP | OUT,
    "calibrate": {"DIR...", "--published", "--within"} | OUT,
    "compare": {"BASE", "NEW", "--allow-missing", "--strict", "--across", "--details", "--store"} | WITHIN | OUT,
    "report": {"DIR", "--out"} | OUT,
    "history": {"DIR...", "--plot"} | WITHIN | OUT,
    "baseline save": {"NAME", "DIR", "--replace", "--store"},
    "baseline list": {"--store"} | OUT,
    "baseline show": {"NAME", "--machine", "--store"} | OUT,
}
"""Verbs and their options. Adding one is a change to this table; removing or renaming one breaks somebody's script."""


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Exit code of `memplan WORDS`, in this process."""
    monkeypatch.setattr(sys, "argv", ["memplan", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code if isinstance(ended.value.code, int) else 1


def surface() -> dict[str, set[str]]:
    found: dict[str, Any] = dict(typer.main.get_command(application(verbs())).commands)  # type: ignore[attr-defined]
    for name, verb in list(found.items()):
        if hasattr(verb, "commands"):
            del found[name]
            found |= {f"{name} {inner}": command for inner, command in verb.commands.items()}
    return {
        name: {
            word
            for param in verb.params
            for word in ([param.metavar] if param.param_type_name == "argument" else param.opts)
            if word != "--help"
        }
        for name, verb in found.items()
    }


def test_the_surface_is_frozen() -> None:
    assert surface() == SURFACE


def test_each_verb_is_found_alone_too() -> None:
    for verb in {words.partition(" ")[0] for words in verbs()}:
        alone: Any = typer.main.get_command(application(verbs(verb)))
        assert list(alone.commands) == [verb]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["estimate", "--model", "smollm-135m"], "Unknown model 'smollm-135m'. Did you mean smollm2-135m"),
        (["estimate", "--model", "tiny", "--gate", "lots"], "'lots' is not a size. Type it like 71GiB"),
        (["estimate", "--model", "tiny", "--rung", "B7c2"], "7 samples do not divide into 2 chunks; try B8c2 or B6c2"),
        (["estimate", "--model", "tiny", "--batch", "4", "--chunks", "0"], "c must be 1 or more"),
        (["estimate", "--model", "tiny", "--batch", "0"], "1 sample or more"),
        (["estimate", "--model", "tiny", "--batch", "-1"], "batch size"),
        (
            ["estimate", "--model", "tiny", "--rung", "B4", "--batch", "8"],
            "name batch twice, and not the same. Leave one out",
        ),
        (["estimate", "--model", "tiny", "--gpu", "h100"], "Unknown card 'h100'. Did you mean"),
        (["estimate", "--model", "tiny", "--gpu", "h200", "--device", "cpu"], "two devices"),
        (["estimate", "--model", "tiny", "--device", "tpu"], "not for 'tpu'"),
        (["estimate", "--model", "tiny", "--ckpt", "none,full"], "one rung at a time"),
        (["estimate", "--model", "tiny", "--optimizer", "adam"], "Did you mean adamw"),
        (["estimate", "--model", "tiny", "-o", "xml"], "Unknown output 'xml'"),
        (["estimate", "--model", "tiny", "--seq", "many"], "--seq"),
        (["estimate", "--model", "tiny", "--seq", "0"], "seq is 0; it must be 1 or more"),
        (["estimate", "--model", "tiny", "--images", "2"], "no vision tower"),
        (["estimate", "--modle", "tiny"], "--modle"),
        (["ladder", "B4c2", "--device", "cuda"], "Type --device simulated to trace the step, or --device cpu"),
        (["ladder", "B4c2", "--device", "cpu", "--gpu", "h200"], "--gpu h200 imagines a card"),
        (["ladder", "B4c2", "--gpu", "h300"], "Unknown card 'h300'. Did you mean h200"),
        (["trace", "--model", "tiny", "--gpu", "h300"], "Unknown card 'h300'. Did you mean h200"),
        (["trace", "--model", "tiny", "--ckpt", "none,full"], "one rung at a time"),
        (["estimate", "--model", "tiny", "--sweep", "batch"], "has no values. Type --sweep batch=1:64"),
        (["estimate", "--model", "tiny", "--sweep", "batch=8:1"], "'8:1' is an empty range"),
        (["estimate", "--model", "tiny", "--sweep", "bacth=1:8"], "'bacth' cannot be swept. Did you mean batch"),
        (["estimate", "--model", "tiny", "--sweep", "ckpt=none,ful"], "Unknown ckpt 'ful'"),
        (
            ["estimate", "--model", "tiny", "--sweep", "batch=1,3", "--sweep", "chunks=2"],
            "No batch of the sweep divides",
        ),
        (["estimate", "--model", "tiny", "--lora", "8:qq"], "No linear of the blocks is called 'qq'"),
        (["estimate", "--model", "tiny", "--parallel", "fsdp2"], "needs 2 devices or more"),
        (["estimate", "--model", "tiny", "--batch", "abc"], "memplan: --batch takes a whole number. Type --batch 4.\n"),
        (["estimate", "--model", "tiny", "--clip", "x"], "memplan: --clip takes a number. Type --clip 0.5.\n"),
        (["compare", "base"], "memplan: Missing argument 'NEW'. Type memplan compare --help to see what there is.\n"),
        (["trace", "--model", "tiny-molmo2", "--images", "1", "--workload", "lm"], "has no images beside text"),
        (["estimate", "--model", "tiny", "--method", "guess"], "Type --method formulas or --method trace"),
        (["ladder", "B4c2", "--model", "tinny", "--device", "cpu"], "Did you mean tiny"),
        (["ladder", "B4c0", "--model", "tiny", "--device", "cpu"], "c must be 1 or more, at character 4"),
        (["ladder", "nowhere.toml"], "no ladder file nowhere.toml"),
        (["ladder", "B4c2", "--device", "gpu"], "Unknown device 'gpu'"),
        (["ladder", "B4c2", "--model", "tiny", "--device", "cpu", "--steps", "0"], "steps is 0"),
        (["ladder", "B4c2", "--model", "tiny", "--device", "cpu", "--gate-on", "reserved"], "--gate-on allocated"),
        (["estimate", "--model", "tiny", "--gate", "71"], "--gate 71 is 71 bytes. Type 71GiB."),
        (["estimate", "--model", "tiny", "--gate", "0"], "'0' is not a size above zero. Type it like 71GiB."),
        (["estimate", "--model", "tiny", "--freeze", "vision"], "It has embedding, blocks, head."),
        (["estimate", "--model", "qwen3-4b", "--freeze", "embedding+blocks+head"], "No parameter trains"),
        (["trace", "--model", "tiny", "--optimizer", "adamw-8bit"], "kernels of bitsandbytes, which a trace cannot"),
        (["ladder"], "No rung was given. Type rungs like B12c6,B8c4, or --search"),
        (["ladder", "--search", "--model", "tiny"], "A search needs a gate"),
        (["ladder", "--search", "--gate", "1GiB", "--model", "tiny", "--repeat", "2"], "Climb what it finds again"),
        (["ladder", "--search", "--gate", "1GiB", "--model", "tiny", "--dry-run"], "A search decides as it goes"),
        (["ladder", "B2", "--model", "tiny", "--retry", "oom"], "Type --resume too"),
        (["ladder", "B2", "--model", "tiny", "--dry-run", "--resume"], "A dry run knows no kept rows"),
        (["ladder", "B2", "--model", "tiny", "--resume", "--retry", "ooom"], "Unknown status 'ooom'"),
        (["ladder", "B2", "--model", "tiny", "--device", "cpu", "--gate-on", "used"], "Type --gate-on allocated"),
        (["ladder", "B2", "--model", "tiny", "--gate-on", "used"], "Type --gate-on reserved"),
        (["ladder", "B2", "--entry", "mine:make", "--loss", "full"], "Leave --loss out"),
        (["ladder", "B2", "--model", "tiny", "--repeat", "0"], "repeat is 0"),
        (["ladder", "B2", "--model", "tiny", "--min-time", "-1"], "min-time is -1"),
        (["calibrate", "nowhere"], "cannot be read"),
        (["calibrate", ".", "--within", "two"], "Type it like 2%"),
        (["climb"], "climb"),
    ],
)
def test_bad_input_is_one_clear_sentence_and_exit_code_2(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("memplan.ladder.points.gpu", lambda: None)
    assert run(monkeypatch, *words) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert "Traceback" not in err and "Usage: " not in err
    assert out == ""


def test_a_file_that_is_not_toml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("rungs: B4c2")
    assert run(monkeypatch, "ladder", str(path)) == 2
    assert "mine.toml is not TOML" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("memplan.ladder.runner.climb", None)
    out = str(tmp_path / "file" / "out")
    assert run(monkeypatch, "ladder", "B2c1", "--model", "tiny", "--device", "cpu", "--out", out) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_estimate_prints_a_page_and_says_what_it_assumed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "estimate", "--gate", "71GB") == 1, "the gate does not hold"
    out, err = capsys.readouterr()
    assert "assumed: molmo2-4b" in err and "h100-80g" in err
    assert "71GB is decimal" in err
    for word in ("params (static)", "saved for backward by one sample", "logits", "<- peak", "largest batch"):
        assert word in out


def test_estimate_json_keeps_its_promises(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "tiny", "--rung", "B4c2@full", "--seq", "64", "--gate", "1GiB")
    assert run(monkeypatch, "estimate", *words, "-o", "json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema_version"] == 1
    assert data["source"] == "estimated"
    assert data["gate_bytes"] == 1 << 30
    assert data["fits"] is True
    assert data["max_batch"] >= data["max_batch_unchunked"] > 4
    assert sum(data["breakdown"].values()) == data["peak"]["allocated_bytes"]
    assert {"batch", "chunks", "seq", "ckpt", "loss", "optimizer", "precision", "parallel", "world"} <= data[
        "step"
    ].keys()
    assert {"allocated_bytes", "reserved_bytes", "phase"} <= data["peak"].keys()
    assert {"total", "trainable"} <= data["params"].keys()
    assert {"run_id", "static_bytes", "per_sample_bytes"} <= data.keys()


def test_without_a_limit_nothing_is_held_against_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "estimate", "--model", "tiny", "--device", "cpu", "-o", "json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["gate_bytes"], data["fits"], data["max_batch"]) == (None, None, None)


def test_models_and_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "models", "-o", "json") == 0
    counts = {row["model"]: row["params_total"] for row in json.loads(capsys.readouterr().out)}
    assert counts["smollm2-135m"] == 134_515_008
    assert run(monkeypatch, "doctor") == 0
    assert "memory" in capsys.readouterr().out


def test_verify_exits_1_on_a_difference(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    words = ("verify", "B2c2@full", "--model", "tiny", "--seq", "16", "--loss", "full")
    assert run(monkeypatch, *words) == 0
    assert "same" in capsys.readouterr().out
    from memplan.step import builder

    monkeypatch.setattr(builder.TrainStep, "accumulate", _drop_a_chunk(builder.TrainStep.accumulate))
    assert run(monkeypatch, *words) == 1
    assert "differs" in capsys.readouterr().out


def _drop_a_chunk(whole: Any) -> Any:
    def accumulate(self: Any, *arguments: Any) -> Any:
        chunk_loss, left = self.chunk_loss, iter([1.0] + [0.0] * (self.run.step.chunks - 1))
        self.chunk_loss = lambda *parts: chunk_loss(*parts) * next(left)
        try:
            return whole(self, *arguments)
        finally:
            self.chunk_loss = chunk_loss

    return accumulate


@pytest.mark.parametrize(("estimated", "within", "code"), [(99, "2%", 0), (97, "2%", 1), (97, "5%", 0)])
def test_calibrate_judges(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    estimated: int,
    within: str,
    code: int,
) -> None:
    append_row(tmp_path / "ladder.jsonl", row_of(estimated_bytes=estimated, peak_allocated_bytes=100))
    assert run(monkeypatch, "calibrate", str(tmp_path), "--within", within, "-o", "md") == code
    assert capsys.readouterr().out.startswith("| model | rung |")


@pytest.mark.parametrize(("figure", "code"), [("8MiB", 0), ("9MiB", 1)])
def test_calibrate_holds_traces_against_published_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], figure: str, code: int
) -> None:
    (tmp_path / "step.py").write_text("import torch\ndef make():\n    return lambda: torch.zeros(1 << 21)\n")
    (tmp_path / "X-1.toml").write_text(
        f'source = "a page"\nfigure = "{figure}"\ngpu = "a100-80g"\nstep = "step.py:make"\n'
    )
    assert run(monkeypatch, "calibrate", "--published", str(tmp_path), "-o", "md") == code
    assert "X-1" in capsys.readouterr().out


def test_calibrate_holds_an_estimate_where_nothing_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sizes.py").write_text('def make(tape):\n    return lambda: tape.new("x", (1 << 21,), "float32")\n')
    text = 'source = "a page"\nfigure = "8MiB"\ngpu = "a100-80g"\nsizes = "sizes.py:make"\n'
    (tmp_path / "X-1.toml").write_text(text)
    assert run(monkeypatch, "calibrate", "--published", str(tmp_path), "-o", "csv") == 0
    told = next(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert (told["traced_bytes"], told["estimated_bytes"]) == ("", str(8 << 20))


def test_calibrate_with_nothing_measured_exits_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_row(tmp_path / "ladder.jsonl", row_of(status="killed"))
    assert run(monkeypatch, "calibrate", str(tmp_path)) == 3


def memplan(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`memplan WORDS` in a process of its own."""
    return subprocess.run([sys.executable, "-m", "memplan", *words], capture_output=True, text=True, **options)


def test_a_real_climb_leaves_a_page_and_its_numbers_agree(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words = ["ladder", "B2c1", "--model", "tiny", "--seq", "32", "--ckpt", "none,full", "--device", "cpu"]
    done = memplan(*words, "--gate", "1GiB", "--steps", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "reports").iterdir()
    assert folder.name.startswith("tiny_cpu_")
    made = {"ladder.jsonl", "parity.jsonl", "report.html", "summary.json", "table.csv", "table.md"}
    assert {path.name for path in folder.iterdir() if path.suffix not in (".png", ".svg")} == made
    assert {path.stem for path in folder.glob("*.png")} == {path.stem for path in folder.glob("*.svg")}
    assert {path.stem for path in folder.glob("*.png")} >= {"peak", "throughput", "phases", "agreement"}
    rows = read_rows(folder / "ladder.jsonl")
    assert [(row.rung, row.status, row.verdict) for row in rows] == [
        ("B2c1@none", "ok", "pass"),
        ("B2c1@full", "ok", "pass"),
    ]
    assert len(rows[0].loss) >= 4  # more where the warm-up took longer to settle
    assert "\x1b" not in done.stdout + done.stderr
    assert "[1/2] B2c1@none first_step ..." in done.stderr
    assert done.stderr.startswith("on cpu; assumed for tiny: fp32\n")
    kept = memplan(*words, "--gate", "1MiB", "--out", str(folder), "--resume", "-o", "jsonl", cwd=tmp_path)
    assert kept.returncode == 1
    assert [json.loads(line)["status"] for line in kept.stdout.splitlines()] == ["over_gate", "over_gate"]


def test_an_interrupt_leaves_a_valid_file_and_a_table(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words = [
        "ladder",
        "B1c1s16,B512c1s512",
        "--model",
        "tiny",
        "--device",
        "cpu",
        "--steps",
        "1",
        "--out",
        "out",
    ]
    # A shell starts what runs in the background with SIGINT ignored, and children inherit that.
    heeding = [
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)",
        "from memplan.cli import main",
    ]
    command = [sys.executable, "-c", "; ".join([*heeding, "main()"]), *words]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rows = tmp_path / "out" / "ladder.jsonl"
    deadline = time.monotonic() + 60
    while not rows.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert [row.rung for row in read_rows(rows)] == ["B1c1s16@none"]
    assert "B1c1s16@none" in out
    assert (tmp_path / "out" / "table.md").exists()


@pytest.mark.parametrize("words", [["models"], ["estimate", "--model", "tiny", "-o", "jsonl"]])
def test_a_closed_pipe_is_no_error(words: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "memplan", *words], stdout=write_end, stderr=subprocess.PIPE, text=True
    )
    os.close(write_end)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Broken pipe" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_is_one_clear_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "memplan", "models"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr.startswith("memplan: No space left on device.")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(closed: str) -> None:
    """A file that is opened later must not take a stream's number: a rung's pipes would go astray."""
    look = "import os; from memplan.cli import open_streams; open_streams(); print(os.dup(0) > 2, file=open(3, 'w'))"
    command = f'"{sys.executable}" -c "{look}" 3>&1 {closed}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_where_nobody_can_hear_it_the_work_goes_on() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "memplan", "estimate", "--model", "tiny"],
            stdout=subprocess.PIPE, stderr=full, text=True,
        )  # fmt: skip
    assert done.returncode == 0
    assert "peak: " in done.stdout


def test_a_dry_run_starts_nothing_and_knows_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["ladder", "B1,B4,B8,B999999999", "--model", "tiny", "--device", "cpu", "--gate", "20MiB", "--dry-run"]
    assert run(monkeypatch, *words, "-o", "json") == 0
    fates = {row["rung"]: row["fate"] for row in json.loads(capsys.readouterr().out)}
    assert fates == {
        "B1c1@none": "climbed",
        "B4c1@none": "climbed; over the gate by the estimate",
        "B8c1@none": "skipped if B4c1@none is over the gate",
        "B999999999c1@none": "skipped: this machine has no room for it",
    }
    assert list(tmp_path.iterdir()) == []
