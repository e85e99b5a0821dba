"""The ladder: a file and options say the same, every axis is crossed, mistakes are named."""

from pathlib import Path
from typing import Any

import pytest

from memplan.errors import MemplanError
from memplan.spec import Ladder
from memplan.units import GIB

LADDERS = Path(__file__).parents[2] / "ladders"


def ladder_of(**data: Any) -> Ladder:
    return Ladder.from_dict({"rungs": "B4c2,B2c1@full", "model": "tiny"} | data, name="t", origin="options")


def test_every_axis_crosses_every_rung_but_a_rung_keeps_its_own_mode() -> None:
    ladder = ladder_of(ckpt="none,full", loss=["full", "chunked:2"])
    names = [(loss, str(rung)) for _, _, loss, _, _, rung in ladder.points()]
    of_one_loss = ["B4c2@none", "B4c2@full", "B2c1@full"]
    assert names == [("full", name) for name in of_one_loss] + [("chunked:2", name) for name in of_one_loss]


def test_a_file_is_read_and_options_count_instead_of_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('rungs = ["B4c2", "B2c1"]\nmodel = "tiny"\nseq = 64\ngate = "6GiB"\ngate-on = "allocated"\n')
    ladder = Ladder.from_toml(path)
    assert (ladder.name, ladder.seq, ladder.gate_bytes, len(ladder.rungs)) == ("mine", 64, 6 * GIB, 2)
    assert Ladder.from_toml(path, {"seq": 32}).seq == 32


def test_a_files_keys_are_the_options_and_lists_may_have_spaces() -> None:
    ladder = ladder_of(**{"timeout": 60, "gate-on": "allocated", "model": "tiny, tiny-gpt2", "ckpt": ["none", " full"]})
    assert (ladder.timeout_s, ladder.model, ladder.ckpt) == (60, ("tiny", "tiny-gpt2"), ("none", "full"))


@pytest.mark.parametrize("path", sorted(LADDERS.glob("*.toml")), ids=lambda path: path.stem)
def test_kept_ladders_are_valid(path: Path) -> None:
    assert list(Ladder.from_toml(path).points())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"modle": "tiny"}, "unknown key 'modle'. Did you mean model"),
        ({"seq": "64"}, "seq must be a whole number"),
        ({"seq": True}, "seq must be a whole number"),
        ({"gate": 6}, "gate must be text"),
        ({"gate": "six"}, "not a size"),
        ({"model": []}, "model must be text"),
        ({"clip": "1"}, "clip must be a number"),
        ({"device": "gpu"}, "Unknown device"),
        ({"gate_on": "memory"}, "Unknown gate-on"),
        ({"steps": 0}, "steps is 0"),
        ({"timeout": 0}, "timeout is 0"),
        ({"name": "../mine"}, "unknown key 'name'"),
        ({"rungs": ""}, "rungs is empty"),
        ({"warmup": -1}, "warmup is -1"),
    ],
)
def test_mistakes_are_named(data: dict[str, Any], why: str) -> None:
    with pytest.raises(MemplanError, match=why):
        ladder_of(**data)


@pytest.mark.parametrize("content", [b"rungs = B4c2", b"\xff\xfe", b'model = "tiny"'])
def test_a_file_that_is_no_ladder_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(MemplanError, match=r"bad\.toml"):
        Ladder.from_toml(path)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(MemplanError, match="no ladder file"):
        Ladder.from_toml(Path("nowhere.toml"))
