"""What a lever saves and costs, told from rows."""

from typing import Any

from samples import row_of

from memplan.analysis import findings, pulled
from memplan.record import RungResult

STEP = {"batch": 4, "chunks": 1, "seq": 64, "ckpt": "none", "loss": "full", "compile": "off"}


def row(peak: int, seconds: int = 1, *, status: str = "ok", model: str = "tiny", **step: Any) -> RungResult:
    full = STEP | step
    return row_of(
        rung=f"B{full['batch']}c1@{full['ckpt']}", model=model, step=full, status=status,
        peak_allocated_bytes=peak << 30,
        step_ns=(seconds * 10**9,), source="simulated" if status == "oom" else "measured",
    )  # fmt: skip


def test_a_row_is_held_against_the_one_without_its_lever() -> None:
    rows = [row(100, 10), row(60, 13, ckpt="full"), row(50, 9, ckpt="full", batch=8)]
    rows.append(row(60, ckpt="full", model="other"))
    plain, pair, larger, other = pulled(rows)
    assert pair is not None
    assert (pair.plain, pair.saved_bytes, pair.saved_frac) == (rows[0], 40 << 30, 0.4)
    assert pair.slower_frac == 13 / 10 - 1
    assert plain is None
    assert larger is None  # no row of 8 samples without checkpointing
    assert other is None


def test_two_levers_are_told_apart() -> None:
    rows = [row(100), row(90, loss="chunked:4"), row(50, ckpt="full", loss="chunked:4")]
    levers = [(pair.lever, pair.plain) for pair in pulled(rows) if pair is not None]
    assert levers == [("loss", rows[0]), ("ckpt", rows[1])]


def test_findings_say_saving_cost_and_nothing_saved() -> None:
    rows = [row(100, 10), row(60, 13, ckpt="full"), row(99, 10, ckpt="every:2"), row(120, 10, loss="chunked:4")]
    assert findings(rows) == (
        "B4c1@full: ckpt full saves 40.00 GiB (40.00 %), step time +30.00 %",
        "B4c1@every:2: ckpt every:2 saves nothing, step time +0.00 %",
        "B4c1@none: loss chunked:4 adds 20.00 GiB (20.00 %), step time +0.00 %",
    )


def test_a_chunked_forward_is_no_chunked_memory() -> None:
    """The conclusion of experiment B, from three rows."""
    rows = [row(140, status="oom"), row(105, status="oom", loss="chunked:16"), row(70, loss="chunked-ckpt:16")]
    rows[2] = row_of(rung="B4c1@none", source="simulated", step=rows[2].step, peak_allocated_bytes=70 << 30)
    told = findings(rows)
    assert told[-2:] == (
        "B4c1@none: loss chunked-ckpt:16 (70.00 GiB) fits; full (140.00 GiB) and chunked:16 (105.00 GiB) do not",
        "a chunked forward is not chunked memory: every chunk's logits stay in the graph until backward; making them "
        "again there saves another 35.00 GiB",
    )
