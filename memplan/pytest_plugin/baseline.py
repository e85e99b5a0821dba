"""Earlier peaks of tests, in a JSON file beside them that git shows well: sorted, a number a line."""

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from memplan.errors import MemplanError
from memplan.pytest_plugin.peak import Peak, shown

FILE = "memory_baseline.json"
"""Name of the file where none is given."""
FORMAT = "memplan peaks 1"
"""What the file calls itself."""

MOST_BYTES = 1 << 60
"""No device has as much."""

Entries = dict[str, dict[str, dict[str, dict[str, Any]]]]


class Baseline:
    """Peaks by test, name and source: `{"bytes": 6291456, "phases": {"backward": 6291456}}`."""

    def __init__(self, entries: Entries | None = None) -> None:
        self._entries: Entries = entries or {}

    @classmethod
    def read(cls, path: Path) -> Self:
        """What `path` holds, nothing where there is no such file; MemplanError where it is something else."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise MemplanError(f"{path} cannot be read: {error.strerror}.") from None
        except ValueError as error:
            raise MemplanError(f"{path} is not JSON: {error}.", "Mend it, or remove it and record anew.") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT or not _is_sound(data.get("peaks")):
            raise MemplanError(f"{path} is no baseline of peaks: its format is not {FORMAT!r}.", "Name another file.")
        if wrong := _impossible(data["peaks"]):
            raise MemplanError(f"{path}: {wrong}.", "Mend it, or remove the file and record anew.")
        return cls(data["peaks"])

    def find(self, peak: Peak) -> dict[str, Any] | None:
        """The entry that `peak` can be held against."""
        return self._entries.get(peak.test, {}).get(peak.name, {}).get(peak.source)

    def sources(self, peak: Peak) -> list[str]:
        """What there is of this peak, from whatever source."""
        return sorted(self._entries.get(peak.test, {}).get(peak.name, {}))

    def take(self, peaks: Iterable[Peak]) -> None:
        """Puts `peaks` in, in the place of those of the same test, name and source."""
        for peak in peaks:
            entry = {"bytes": peak.num_bytes} | ({"phases": dict(peak.phases)} if peak.phases else {})
            self._entries.setdefault(peak.test, {}).setdefault(peak.name, {})[peak.source] = entry

    def write(self, path: Path) -> None:
        """Writes all of it, at once or not at all."""
        text = json.dumps({"format": FORMAT, "peaks": self._entries}, indent=1, sort_keys=True, ensure_ascii=False)
        part = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
            Path(part).chmod(0o644)
            os.replace(part, path)  # noqa: PTH105 - atomic by its contract
        except OSError as error:
            if part:
                Path(part).unlink(missing_ok=True)
            raise MemplanError(f"{path} cannot be written: {error.strerror}.") from None


def _is_sound(entries: object) -> bool:
    if not isinstance(entries, dict):
        return False
    if not all(isinstance(names, dict) for names in entries.values()):
        return False
    sources = [one for names in entries.values() for one in names.values()]
    if not all(isinstance(one, dict) for one in sources):
        return False
    peaks = [peak for one in sources for peak in one.values()]
    return all(isinstance(peak, dict) and isinstance(peak.get("phases", {}), dict) for peak in peaks)


def _impossible(entries: Entries) -> str:
    """The first number of bytes that no peak can have, by its test and name; empty where all can be."""
    for test, names in entries.items():
        for name, sources in names.items():
            for peak in sources.values():
                for size in (peak.get("bytes"), *peak.get("phases", {}).values()):
                    if type(size) is not int or not 0 <= size <= MOST_BYTES:
                        return f"{shown(test)} ({shown(name)}) is {json.dumps(size)[:40]}, which is no number of bytes"
    return ""
