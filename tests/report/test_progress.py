"""A live table on a terminal, plain lines in a log."""

import io
import re

from samples import row_of

from memplan.record import Note
from memplan.report.progress import Progress, about
from memplan.units import MIB


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


NOTES = (
    Note(number=2, total=4, rung="B2c1@none", text="warmup", kind="phase"),
    Note(number=2, total=4, rung="B2c1@none", text="timed 1/3", kind="step"),
    Note(
        number=2,
        total=4,
        rung="B2c1@none",
        text="ok, peak 100.00 MiB",
        kind="end",
        left_s=125.0,
        row=row_of(rung="B2c1@none", peak_allocated_bytes=100 * MIB),
    ),
)


def tell(file: io.StringIO) -> str:
    progress = Progress(file)
    progress.expect([("B2c1@none", 99 * MIB), ("B4c1@none", None)])
    for note in NOTES:
        progress.say(note)
    progress.done()
    return file.getvalue()


def test_a_log_gets_plain_lines_without_single_steps() -> None:
    assert tell(io.StringIO()) == ("[2/4] B2c1@none warmup ...\n[2/4] B2c1@none ok, peak 100.00 MiB, 2 min left\n")


def test_a_terminal_gets_one_table_of_all_rungs() -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", tell(Terminal()))
    assert "timed 1/3 ..." in text
    last = text[text.rindex("rung") :]
    assert re.search(r"B2c1@none +ok +100\.00 MiB +2\.00 s", last)
    assert "B4c1@none" in last
    assert "[2/4], 2 min left" in last


def test_a_long_ladder_shows_the_rungs_around_the_one_under_way() -> None:
    file = Terminal()
    progress = Progress(file)
    progress.expect([(f"B{number}c1@none", None) for number in range(1, 101)])
    progress.say(Note(number=50, total=100, rung="B50c1@none", text="warmup", kind="phase"))
    progress.done()
    assert "B50c1@none" in file.getvalue() and "B99c1@none" not in file.getvalue()


def test_time_is_said_in_round_words() -> None:
    assert [about(seconds) for seconds in (12.4, 89, 100, 3600, 7800)] == [
        "12 s",
        "89 s",
        "2 min",
        "1 h 0 min",
        "2 h 10 min",
    ]
