"""A wrong entry is told before anything is started."""

from pathlib import Path

import pytest

from memplan.errors import MemplanError
from memplan.models.entry_source import check_entry

MINE = """
import math
from os import path as way
known = other = 3

def make(batch, chunks, ckpt):
    return lambda: None

def keen(batch, *, chunks, **more):
    return lambda: None

def old(size):
    return lambda: None
"""
ARGUMENTS = ("batch", "chunks", "ckpt")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "pack" / "inner.py").write_text(MINE)
    (tmp_path / "open_ended.py").write_text("from mine import *")
    (tmp_path / "broken.py").write_text("def make(:")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "entry", ["mine:make", "mine:keen", "mine:known", "mine:way", "pack.inner:make", "open_ended:x"]
)
def test_what_may_be_right_is_left_to_the_run(here: Path, entry: str) -> None:
    check_entry(entry, ARGUMENTS)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("mine", "names no function. Type the module"),
        (":", "names no function"),
        ("mine:make me", "names no function"),
        ("nope:make", "There is no module 'nope' here"),
        ("pack.nope:make", "There is no module 'pack.nope' here"),
        ("mine:makes", "mine has no function 'makes'. Did you mean make"),
        ("pack.inner:makes", "has no function"),
        ("broken:make", "broken.py, line 1 is no Python"),
        (
            "mine:old",
            r"does not take batch and chunks and ckpt. A ladder calls it by name: def old\(batch, chunks, ckpt\)",
        ),
    ],
)
def test_what_is_plainly_wrong_is_one_sentence(here: Path, entry: str, why: str) -> None:
    with pytest.raises(MemplanError, match=why):
        check_entry(entry, ARGUMENTS)
