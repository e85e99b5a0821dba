"""Files of published figures: what they say, and what is refused with a sentence."""

from pathlib import Path

import pytest

from memplan.errors import MemplanError
from memplan.spec.published import Published, read_published

WHOLE = 'source = "a page"\nfigure = "4.82GB"\ngpu = "a100-40g"\nstep = "litgpt.py:finetune"\n'


def read(folder: Path, text: str) -> Published:
    path = folder / "LG-001.toml"
    path.write_text(text)
    return Published.from_toml(path)


def test_a_figure_is_read_with_its_step(tmp_path: Path) -> None:
    row = read(tmp_path, WHOLE + '[arguments]\nbatch = 1\n[question]\nmodel = "tiny"\nrungs = "B1c1"\n')
    assert (row.name, row.figure_bytes, row.reads, row.window, row.compiled) == (
        "LG-001",
        4_820_000_000,
        "allocated",
        "steady",
        False,
    )
    assert (row.step, row.arguments) == ((tmp_path / "litgpt.py", "finetune"), {"batch": 1})
    assert row.question is not None
    assert row.question.model == ("tiny",)
    assert read(tmp_path, WHOLE).question is None


@pytest.mark.parametrize(("figure", "rounding"), [("1.1MiB", 52_428), ("4.82 GB", 5_000_000), ("1342309376", 0)])
def test_a_figure_is_known_to_half_its_last_digit(tmp_path: Path, figure: str, rounding: int) -> None:
    assert read(tmp_path, WHOLE.replace("4.82GB", figure)).rounding_bytes == rounding


def test_a_question_is_step_enough(tmp_path: Path) -> None:
    row = read(tmp_path, WHOLE.replace("step =", "# step =") + '[question]\nmodel = "tiny"\nrungs = "B1c1"\n')
    assert row.step is None
    assert row.question is not None


def test_sizes_alone_are_step_enough_but_nothing_to_trace(tmp_path: Path) -> None:
    row = read(tmp_path, WHOLE.replace("step =", "sizes ="))
    assert (row.step, row.question, row.sizes) == (None, None, (tmp_path / "litgpt.py", "finetune"))
    assert not row.traceable
    assert read(tmp_path, WHOLE).traceable


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (WHOLE + "lora = 8\n", "unknown key 'lora'"),
        (WHOLE.replace('source = "a page"\n', ""), "source is None"),
        (WHOLE + 'reads = "used"\n', "unknown reads"),
        (WHOLE.replace("step =", "# step ="), "neither step nor question nor sizes"),
        (WHOLE + 'window = "last"\n', "unknown window"),
        (WHOLE.replace(":finetune", ""), "Write it like"),
        (WHOLE.replace("4.82GB", "much"), "not a size"),
        (WHOLE.replace("a100-40g", "a100"), "Unknown card"),
        (WHOLE + '[question]\nmodel = "tiny"\n', "'rungs' is missing"),
        ("source = ", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(MemplanError, match=words):
        read(tmp_path, text)


def test_a_folder_without_figures_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(MemplanError, match="no published figure"):
        read_published(tmp_path)
