"""What a test run keeps: the baseline, what it was told on the command line, and the peaks of the tests that passed."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import MemplanError
from memplan.pytest_plugin.baseline import FILE, Baseline
from memplan.pytest_plugin.peak import Peak, against, over_gate
from memplan.pytest_plugin.stretch import Stretch
from memplan.units import format_bytes, parse_bytes

RECORD = "To record one, type: pytest --memplan-update"
"""What to type where there is no baseline."""


class PeakWarning(pytest.PytestWarning):
    """A peak without a baseline, or below it."""


class Ledger:
    """One for each process of a run; where pytest-xdist has several, only the first of them writes."""

    def __init__(self, config: pytest.Config) -> None:
        self.update: bool = config.getoption("memplan_update")
        self.strict: bool = config.getoption("memplan_strict")
        self.path = baseline_path(config)
        self._root = config.rootpath
        self._worker = hasattr(config, "workerinput")
        self._verbose = config.get_verbosity() > 0
        self._peaks: list[Peak] = []
        self._unwritten = ""

    @cached_property
    def baseline(self) -> Baseline:
        """What earlier runs recorded."""
        return Baseline.read(self.path)

    @property
    def shown_path(self) -> str:
        """The baseline's file, short where it is below the root."""
        return str(self.path.relative_to(self._root) if self.path.is_relative_to(self._root) else self.path)

    def keep(self, peaks: Iterable[Mapping[str, Any]]) -> None:
        """Takes in what came with the report of a test that passed, from whichever process."""
        self._peaks += [Peak.from_dict(peak) for peak in peaks]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Writes the baseline where that was asked for."""
        if self.update and self._peaks and not self._worker:
            try:
                fresh = Baseline.read(self.path)
                fresh.take(self._peaks)
                fresh.write(self.path)
            except MemplanError as error:
                self._unwritten = str(error)
                session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Says whose word the peaks are; with -v, all of them."""
        if not self._peaks:
            if self.update and not self._worker:
                terminalreporter.write_line(f"No test that passed took a peak: {self.shown_path} is as it was.")
            return
        counts = Counter(peak.spoken for peak in self._peaks)
        told = "; ".join(f"{count} {spoken}" for spoken, count in sorted(counts.items()))
        terminalreporter.section("memory peaks", sep="-")
        if self._verbose:
            for peak in self._peaks:
                terminalreporter.write_line(str(peak))
        terminalreporter.write_line(told)
        if self._unwritten:
            terminalreporter.write_line(self._unwritten, red=True)
        elif self.update:
            terminalreporter.write_line(f"written to {self.shown_path}")


class ItemPeaks:
    """The peaks of one test. MemplanError where its marker's gate is no size."""

    def __init__(self, item: pytest.Item, ledger: Ledger, gate: object = None) -> None:
        self.taken: list[Peak] = []
        self._gates = [] if gate is None else [gate_bytes(gate)]
        self._item = item
        self._ledger = ledger

    def take(self, stretch: Stretch, name: str, gates: Iterable[int] = ()) -> None:
        """Holds a stretch that has ended against its gates and its baseline, and fails the test where it is worse."""
        __tracebackhide__ = True
        peak = Peak(test=self._item.nodeid, name=name, witness=stretch.witness, device=stretch.device,
                    torch=stretch.torch, num_bytes=stretch.allocated_bytes, before_bytes=stretch.before_bytes,
                    phases=stretch.phases)  # fmt: skip
        gates = (*self._gates, *gates)
        if not peak.num_bytes:
            pytest.fail(
                f"{peak.title}: nothing was allocated, so there is no peak to judge; {peak.spoken}. "
                'Type device="cpu", device="cuda" or trace=True to watch something else.',
                pytrace=False,
            )
        failed = [sentence for size in gates if (sentence := over_gate(peak, size)) is not None]
        if failed:
            pytest.fail(failed[0], pytrace=False)
        if not self._ledger.update:
            self._compare(peak, gated=bool(gates))
        self.taken.append(peak)
        self._item.user_properties.append((f"memplan {name}", f"{format_bytes(peak.num_bytes)} {peak.spoken}"))

    def check_name(self, name: str) -> None:
        """MemplanError where a peak of this test has the name already."""
        if any(peak.name == name for peak in self.taken):
            raise MemplanError(f"This test has a peak {name!r} already.", 'Name it: memory_peak("second").')

    def _compare(self, peak: Peak, *, gated: bool) -> None:
        __tracebackhide__ = True
        entry = self._ledger.baseline.find(peak)
        if entry is None:
            if not gated:
                self._lacks(peak)
            return
        label, sentence = against(peak, entry["bytes"], entry.get("phases", {}))
        again = f"type: pytest --memplan-update '{peak.test}'"
        if label == "worse":
            pytest.fail(f"{sentence} If that is meant, {again}", pytrace=False)
        if label == "better":
            self._item.warn(PeakWarning(f"{sentence} The baseline is stale: {again}"))

    def _lacks(self, peak: Peak) -> None:
        __tracebackhide__ = True
        others = self._ledger.baseline.sources(peak)
        known = f" There is one {' and one '.join(others)}." if others else ""
        told = (
            f"{peak.title}: {format_bytes(peak.num_bytes)} {peak.spoken}, and {self._ledger.shown_path} "
            f"has no such peak.{known} {RECORD}"
        )
        if self._ledger.strict:
            pytest.fail(told, pytrace=False)
        self._item.warn(PeakWarning(told))


@contextmanager
def one_sentence() -> Iterator[None]:
    """Fails the test by what a MemplanError says, without a traceback."""
    try:
        yield
    except MemplanError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def baseline_path(config: pytest.Config) -> Path:
    """The file of the command line, of the configuration, or the one beside the tests."""
    given = config.getoption("memplan_baseline")
    if given:
        return Path(config.invocation_params.dir, given)
    named = config.getini("memplan_baseline")
    if named:
        return config.rootpath / str(named)
    folders = [config.rootpath / folder for folder in (*config.getini("testpaths"), "tests")]
    return next((folder for folder in folders if folder.is_dir()), config.rootpath) / FILE


def gate_bytes(gate: object) -> int:
    """Bytes of a gate as it is typed; MemplanError where it is none."""
    if isinstance(gate, int) and not isinstance(gate, bool) and gate > 0:
        return gate
    if not isinstance(gate, str):
        raise MemplanError(f"The gate {gate!r} is not a size.", 'Type it like gate="2GiB".')
    return parse_bytes(gate)
