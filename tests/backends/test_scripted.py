"""Published steps as their sources define them, traced: figures that nobody tuned anything to."""

from pathlib import Path

import pytest

from memplan.analysis.published import PublishedPair, peak_of
from memplan.backends.loading import load
from memplan.backends.scripted import trace_published
from memplan.errors import MemplanError
from memplan.spec.published import Published, read_published

FOLDER = Path(__file__).parents[2] / "ladders" / "published"
WITHIN = 0.0025
"""Two digits behind the point are a thousandth of the smallest figure; torch was two years older then."""
QUICK = {"LG-001", "LG-009"}
ROWS = [row for row in read_published(FOLDER) if row.step is not None]


def pair(row: Published) -> PublishedPair:
    return PublishedPair(row=row, traced_bytes=peak_of(trace_published(row), row), estimated_bytes=None)


@pytest.mark.parametrize("row", [r for r in ROWS if r.name in QUICK], ids=lambda row: row.name)
def test_a_published_peak_is_traced(row: Published) -> None:
    assert pair(row).holds(WITHIN), pair(row).traced_error_frac


@pytest.mark.slow
@pytest.mark.parametrize("row", [r for r in ROWS if r.name not in QUICK], ids=lambda row: row.name)
def test_a_published_peak_of_a_large_model_is_traced(row: Published) -> None:
    assert pair(row).holds(WITHIN), pair(row).traced_error_frac


def test_the_first_step_has_no_gradients_to_add_to(tmp_path: Path) -> None:
    """A window from the start holds the making of the optimizer's states, and no more than that."""
    (tmp_path / "step.py").write_text(
        "import torch\n"
        "def make(width):\n"
        "    weight = torch.zeros(width, width, requires_grad=True)\n"
        "    def step():\n"
        "        (weight * 2).sum().backward()\n"
        "    return step\n"
    )
    text = 'source = "here"\nfigure = "12MiB"\nwindow = "{}"\ngpu = "a100-80g"\nstep = "step.py:make"\n'
    peaks = {}
    for window in ("first_step", "steady"):
        path = tmp_path / f"{window}.toml"
        path.write_text(text.format(window) + "[arguments]\nwidth = 1024\n")
        peaks[window] = pair(Published.from_toml(path)).traced_bytes
    assert peaks["steady"] - peaks["first_step"] == 4 << 20  # the gradient of the step before


def test_what_was_there_before_is_left_out_where_the_figure_leaves_it_out(tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(
        "import torch\ndef make():\n    weight = torch.zeros(1024, 1024)\n    return lambda: weight * 2\n"
    )
    text = 'source = "here"\nfigure = "4MiB"\ngpu = "a100-80g"\nstep = "step.py:make"\nabove_start = {}\n'
    peaks = []
    for above_start in ("false", "true"):
        path = tmp_path / f"{above_start}.toml"
        path.write_text(text.format(above_start))
        peaks.append(pair(Published.from_toml(path)).traced_bytes)
    assert peaks == [8 << 20, 4 << 20]


def test_a_script_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(MemplanError, match="no Python file"):
        load(tmp_path / "nothing.py", "make")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(MemplanError, match="no function 'make'"):
        load(tmp_path / "empty.py", "make")
