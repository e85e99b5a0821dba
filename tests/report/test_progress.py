"""Live on a terminal, plain in a log."""

import io

from memplan.report.progress import LIVE, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def tell(file: io.StringIO) -> str:
    progress = Progress(file)
    progress.say(2, 4, "B2c1@none", "warmup", "phase")
    progress.say(2, 4, "B2c1@none", "timed 1/3", "step")
    progress.say(2, 4, "B2c1@none", "ok, peak 2.00 GiB", "end")
    progress.done()
    return file.getvalue()


def test_a_log_gets_plain_lines_without_single_steps() -> None:
    assert tell(io.StringIO()) == "[2/4] B2c1@none warmup ...\n[2/4] B2c1@none ok, peak 2.00 GiB\n"


def test_a_terminal_gets_one_live_line_and_results_stay() -> None:
    going_on = f"{LIVE}[2/4] B2c1@none warmup ...{LIVE}[2/4] B2c1@none timed 1/3 ..."
    assert tell(Terminal()) == f"{going_on}{LIVE}[2/4] B2c1@none ok, peak 2.00 GiB\n{LIVE}"
