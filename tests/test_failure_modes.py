"""Every failure mode that a harness must survive has a test named after it, or a sentence that says why it cannot be.

The numbers are those of the catalogue of failure modes, F1 to F52: of a climb (out of memory and its disguises, kills,
hangs, devices that others use, counters that mislead) and of comparisons of two results.
"""

import ast
import re
from pathlib import Path

NUM_MODES = 52
TESTS = Path(__file__).parent


def covered(folder: Path) -> dict[int, list[str]]:
    """Tests, or sentences, by the number of the failure mode that they are named after."""
    found: dict[int, list[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                for number in re.findall(r"(?:^test|_)_?f(\d\d)(?=_)", node.name):
                    found.setdefault(int(number), []).append(node.name)
            elif isinstance(node, ast.Assign) and any(getattr(one, "id", "") == "CANNOT" for one in node.targets):
                for mode, sentence in ast.literal_eval(node.value).items():
                    assert len(sentence) > 20, f"{mode}: why?"
                    found.setdefault(int(mode.removeprefix("F")), []).append(sentence)
    return found


def test_every_failure_mode_has_its_test() -> None:
    found = covered(TESTS)
    assert sorted(set(range(1, NUM_MODES + 1)) - found.keys()) == []


def test_a_missing_one_is_seen(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        'def test_f07_and_f09_(): ...\nCANNOT = {"F49": "no ladder has several ranks yet"}'
    )
    assert sorted(covered(tmp_path)) == [7, 9, 49]
