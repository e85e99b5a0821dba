"""What a worker says while it works: one JSON object a line, on the disk before anything else happens."""

import json
import os
from typing import Any, TextIO

from memplan.backends.base import Window
from memplan.units import format_bytes


class Events:
    """Writes one JSON line an event, and waits until the disk has it: what was said survives a kill."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.phase = "the start"
        """What goes on."""
        self.step_phase: str | None = None
        """Phase of the step in which the last window ended that was not finished."""
        self.allocated_bytes: int | None = None
        """Largest allocated bytes so far."""
        self.reserved_bytes: int | None = None
        """Largest reserved bytes so far."""
        self._lost = ""

    def write(self, event: str, **values: Any) -> None:
        """Adds an event."""
        self._file.write(json.dumps({"event": event} | values) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def begin(self, phase: str) -> None:
        """Says what begins now: `build`, a window's name, `timed`, `look`, `parity` or `health`."""
        self.phase, self.step_phase, self._lost = phase, None, ""
        self.write("phase", phase=phase)

    def warn(self, text: str | None) -> None:
        """Says what to know before believing the numbers, where there is something."""
        if text:
            self.write("warning", text=text)

    def reached(self, window: Window) -> None:
        """Remembers the largest bytes of a window that has ended, whichever way."""
        if window.reading is not None:
            peak = window.reading.peak
            self.allocated_bytes = max(self.allocated_bytes or 0, peak.allocated_bytes)
            if peak.reserved_bytes is not None:
                self.reserved_bytes = max(self.reserved_bytes or 0, peak.reserved_bytes)

    def losing(self, window: Window) -> None:
        """Remembers how far a window came that will not be finished; its peak is a lower bound, so it is no result."""
        self.reached(window)
        if window.reading is not None:
            last = next((segment.phase for segment in window.reading.segments[::-1] if segment.phase), None)
            self.step_phase = last or self.step_phase
            during = f" ({self.step_phase})" if self.step_phase else ""
            self._lost = f"{during}, {format_bytes(window.reading.peak.allocated_bytes)} allocated until then"

    def where(self) -> str:
        """Where the work stands, to be added to an error."""
        during = f" ({self.step_phase})" if self.step_phase and not self._lost else ""
        return f" [in {self.phase}{during}{self._lost}]"
