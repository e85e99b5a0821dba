"""For tests of one's own code: `@pytest.mark.memplan(gate="2GiB")` and the fixture `memory_peak`.

pytest loads this wherever memplan is installed, so that everything else is imported by the first test that asks.
"""

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from memplan.pytest_plugin.fixture import MemoryPeak
    from memplan.pytest_plugin.ledger import ItemPeaks, Ledger

MARKER = "memplan"
ABOUT = (
    'memplan(gate="2GiB", trace=False, device=None): the test fails when its peak of memory is over the gate, or above '
    "the baseline; with the fixture memory_peak, each of the fixture's peaks."
)
ARGUMENTS = ("gate", "trace", "device")
"""What the marker takes."""
FIXTURE = "memory_peak"
WHOLE = "call"
"""Name of the peak of a whole test."""

_ledger = pytest.StashKey["Ledger"]()
_peaks = pytest.StashKey["ItemPeaks"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("memplan", "peaks of memory")
    group.addoption("--memplan-update", action="store_true", help="Record the peaks of this run as the baseline.")
    group.addoption(
        "--memplan-baseline",
        metavar="PATH",
        help="The baseline's file, memory_baseline.json beside the tests otherwise.",
    )
    group.addoption("--memplan-strict", action="store_true", help="Fail tests whose peak has no baseline.")
    parser.addini("memplan_baseline", "The baseline's file, below the root of the tests.", default="")


def pytest_configure(config: pytest.Config) -> None:
    """Tells of the marker, and refuses a baseline that was named and is none."""
    config.addinivalue_line("markers", ABOUT)
    config.pluginmanager.register(Reports(config), "memplan-reports")
    named = config.getoption("memplan_baseline")
    if named or config.getoption("memplan_update"):
        from memplan.errors import MemplanError

        try:
            ledger = _ledger_of(config)
            if named and not config.getoption("memplan_update") and not ledger.path.is_file():
                raise MemplanError(f"There is no file {named}.", "To record one, type --memplan-update beside it.")
            config.option.memplan_baseline = str(ledger.path)  # for processes that start elsewhere
            ledger.baseline  # noqa: B018 - read now, so that it is refused now
        except MemplanError as error:
            raise pytest.UsageError(str(error)) from None


class Reports:
    """Hears of the peaks that come with reports, in the process that has the run's ledger."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keeps the peaks of a test."""
        if hasattr(report, "memplan_peaks"):
            _ledger_of(self._config).keep(report.memplan_peaks)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begins anew where a test is run again."""
    if _peaks in item.stash:
        del item.stash[_peaks]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Takes the peak of a marked test that does not take its own."""
    if item.get_closest_marker(MARKER) is None:
        return (yield)
    from memplan.errors import MemplanError
    from memplan.pytest_plugin.fixture import JudgedStretch
    from memplan.pytest_plugin.ledger import one_sentence

    own = FIXTURE in getattr(item, "fixturenames", ())
    with one_sentence():
        marked = marked_with(item)
        peaks = _peaks_of(item)
        whole = JudgedStretch(peaks, WHOLE, trace=marked.get("trace", False), device=marked.get("device"))
    if not own:
        with whole:
            return (yield)
    result = yield
    with one_sentence():
        if not peaks.taken:
            raise MemplanError(f"The marker found no peak: the test asked for {FIXTURE} and took none.")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    """Sends the peaks of a test that passed along with its report, through whatever processes there are."""
    report = yield
    if call.when == "call" and report.passed and _peaks in item.stash:
        report.memplan_peaks = [peak.to_dict() for peak in item.stash[_peaks].taken]
    return report


@pytest.fixture
def memory_peak(request: pytest.FixtureRequest) -> "MemoryPeak":
    """Takes peaks: `with memory_peak("step") as peak: ...` or `memory_peak(step)`; `trace=True` takes them from a trace
    on fake tensors. Each is held against the baseline, and against a gate where one is given or marked."""
    from memplan.pytest_plugin.fixture import MemoryPeak
    from memplan.pytest_plugin.ledger import one_sentence

    with one_sentence():
        return MemoryPeak(_peaks_of(request.node))


def marked_with(item: pytest.Item) -> dict[str, Any]:
    """What the marker of `item` says, nothing where there is none; MemplanError where it says something else."""
    from memplan.errors import MemplanError, near_names

    marker = item.get_closest_marker(MARKER)
    if marker is None:
        return {}
    if marker.args:
        raise MemplanError(f"The marker {MARKER} takes no argument without a name.", f'Type {MARKER}(gate="2GiB").')
    for name in marker.kwargs:
        if name not in ARGUMENTS:
            raise MemplanError(f"The marker {MARKER} takes no {name!r}.", near_names(name, ARGUMENTS))
    return dict(marker.kwargs)


def _ledger_of(config: pytest.Config) -> "Ledger":
    """The run's ledger, made when it is first asked for."""
    if _ledger not in config.stash:
        from memplan.pytest_plugin.ledger import Ledger

        config.stash[_ledger] = ledger = Ledger(config)
        config.pluginmanager.register(ledger, "memplan-ledger")
    return config.stash[_ledger]


def _peaks_of(item: pytest.Item) -> "ItemPeaks":
    """The peaks of `item`, made when they are first asked for."""
    if _peaks not in item.stash:
        from memplan.pytest_plugin.ledger import ItemPeaks

        item.stash[_peaks] = ItemPeaks(item, _ledger_of(item.config), marked_with(item).get("gate"))
    return item.stash[_peaks]
