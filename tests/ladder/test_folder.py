"""Nothing that was measured is written over."""

from datetime import date
from pathlib import Path

import pytest

from memplan.errors import MemplanError
from memplan.ladder.folder import ROWS_FILE, claimed, open_folder

DAY = date(2026, 1, 31)


def open_default(reports: Path, *, resume: bool = False) -> str:
    return open_folder(None, "tiny_cpu", resume=resume, reports=reports, today=DAY).name


def fill(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ROWS_FILE).write_text("")


def test_the_default_folder_is_fresh_each_time(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        names.append(open_default(tmp_path))
        fill(tmp_path / names[-1])
    assert names == ["tiny_cpu_20260131", "tiny_cpu_20260131-2", "tiny_cpu_20260131-3"]


def test_resume_finds_the_latest_of_the_same_ladder(tmp_path: Path) -> None:
    for name in ("tiny_cpu_20260130-11", "tiny_cpu_20260131-2", "tiny_cpu_20260131-10", "tiny_cpu_x_20260201", "other"):
        fill(tmp_path / name)
    (tmp_path / "tiny_cpu_20260202").mkdir()  # holds no rows
    assert open_default(tmp_path, resume=True) == "tiny_cpu_20260131-10"


def test_resume_without_anything_before_starts_afresh(tmp_path: Path) -> None:
    assert open_default(tmp_path / "none", resume=True) == "tiny_cpu_20260131"


def test_a_named_folder_with_results_is_refused_unless_resumed(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    (out / "sub").mkdir(parents=True)
    assert open_folder(out, "x", resume=False, reports=tmp_path) == out
    (out / "table.md").write_text("kept")
    with pytest.raises(MemplanError, match=r"already holds results\. Type --resume"):
        open_folder(out, "x", resume=False, reports=tmp_path)
    assert open_folder(out, "x", resume=True, reports=tmp_path) == out
    assert (out / "table.md").read_text() == "kept"
    assert not (out / ".probe").exists()


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(MemplanError, match="cannot be written"):
        open_folder(blocker / "out", "x", resume=False, reports=tmp_path)


def test_two_climbs_do_not_share_a_folder(tmp_path: Path) -> None:
    with claimed(tmp_path), pytest.raises(MemplanError, match="Another ladder is climbing into"), claimed(tmp_path):
        pass
    with claimed(tmp_path):
        assert list(tmp_path.iterdir()) == []
