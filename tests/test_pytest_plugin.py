"""Tests that fail by their memory: the marker, the fixture and the baseline, in runs of pytest inside of this one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import MemplanError
from memplan.pytest_plugin.baseline import FORMAT, Baseline
from memplan.pytest_plugin.peak import shown
from memplan.units import MIB

pytest_plugins = ["pytester"]

STAND_IN = """
import pytest
from memplan.pytest_plugin.stretch import Stretch

MIB = 1 << 20

class Window:  # an allocator that was told what happened
    live_bytes = allocated_bytes = 0
    def __init__(self): self.phase_peaks = {}
    def open(self): return self
    close = open
    def mark(self, phase): self.phase = phase
    def __exit__(self, *error): OPEN.remove(self)

OPEN = []

def touch(size):
    for window in OPEN:
        window.allocated_bytes = max(window.allocated_bytes, size)
        if hasattr(window, "phase"):
            window.phase_peaks[window.phase] = max(window.phase_peaks.get(window.phase, 0), size)

@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    def enter(self):
        self.torch, self.device = "2.99", DEVICE
        self._window = Window()
        OPEN.append(self._window)
        return self
    monkeypatch.setattr(Stretch, "__enter__", enter)
    monkeypatch.setattr(Stretch, "_read", lambda self, window: (
        setattr(self, "allocated_bytes", window.allocated_bytes), setattr(self, "phases", window.phase_peaks)))
"""
"""A conftest with which no torch is needed: `touch(size)` allocates and frees."""


class Pytest:
    """pytest in a folder of its own, with this plugin alone."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester = pytester
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
        pytester.makeini(
            "[pytest]\naddopts = --strict-markers -p no:cacheprovider\n"
            "filterwarnings = ignore:Module already imported so cannot be rewritten\n"
        )
        self.use("cpu")

    def use(self, device: str) -> None:
        """Sets what the stand-in says that it watches."""
        self.pytester.makeconftest(STAND_IN + f"\nDEVICE = {device!r}\n")

    def tests(self, text: str) -> None:
        """Writes the file of tests."""
        self.pytester.makepyfile(test_it="import pytest\nfrom conftest import MIB, touch\n" + text)

    def run(self, *arguments: str) -> pytest.RunResult:
        """One run of it."""
        sys.modules.pop("conftest", None)
        return self.pytester.runpytest_inprocess("-p", "memplan.pytest_plugin", *arguments)

    @property
    def file(self) -> Path:
        """The baseline."""
        return self.pytester.path / "memory_baseline.json"

    def recorded(self) -> dict[str, Any]:
        """What the baseline holds."""
        peaks: dict[str, Any] = json.loads(self.file.read_text())["peaks"]
        return peaks


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Pytest:
    return Pytest(pytester, monkeypatch)


WHOLE = "@pytest.mark.memplan{arguments}\ndef test_step(): touch({size})\n"


@pytest.mark.parametrize(
    ("gate", "size", "passes"),
    [("4MiB", "4 * MIB", True), ("4MiB", "4 * MIB + 1", False), (4 * MIB, "6 * MIB", False)],
)
def test_a_test_over_its_gate_fails_and_one_at_the_gate_passes(
    inner: Pytest, gate: str | int, size: str, passes: bool
) -> None:
    inner.tests(WHOLE.format(arguments=f"(gate={gate!r})", size=size))
    result = inner.run()
    result.assert_outcomes(passed=int(passes), failed=int(not passes))
    if passes:
        result.stdout.fnmatch_lines(["1 measured on cpu, torch 2.99"])
    else:
        result.stdout.fnmatch_lines(
            ["test_it.py::test_step (call): * is over the gate of 4.00 MiB by *; measured on *"]
        )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ('(gate="lots")', "'lots' is not a size. Type it like*"),
        ("(gate=True)", "The gate True is not a size. Type it like*"),
        ("(gate=-1)", "The gate -1 is not a size.*"),
        ('(gates="1GiB")', "The marker memplan takes no 'gates'. Did you mean gate[?]"),
        ('("1GiB")', "The marker memplan takes no argument without a name.*"),
        ('(trace=True, device="cpu")', "A trace needs no device, and 'cpu' was given.*"),
    ],
)
def test_a_marker_that_is_not_understood_is_one_sentence(inner: Pytest, arguments: str, says: str) -> None:
    inner.tests(WHOLE.format(arguments=arguments, size="MIB"))
    result = inner.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([says])
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*During handling*")


def test_a_planted_regression_goes_red_and_the_phase_that_grew_is_named(inner: Pytest) -> None:
    text = """
def test_step(memory_peak):
    with memory_peak("step") as peak:
        peak.mark("forward")
        touch(8 * MIB)
        peak.mark("backward")
        touch({size})
"""
    inner.tests(text.format(size="16 * MIB"))
    inner.run("--memplan-update").assert_outcomes(passed=1)
    inner.run("--memplan-strict").assert_outcomes(passed=1)
    inner.tests(text.format(size="18 * MIB"))  # 2 MiB are no change
    inner.run("--memplan-strict").assert_outcomes(passed=1)
    inner.tests(text.format(size="18 * MIB + 1"))
    result = inner.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "test_it.py::test_step (step): the peak of 18.00 MiB is 2.00 MiB (+12.50 %) above the baseline's 16.00 "
            "MiB: backward grew by 2.00 MiB; measured on cpu, torch 2.99. If that is meant, type: pytest --memplan-*"
        ]
    )
    inner.run("--memplan-update").assert_outcomes(passed=1)
    inner.run("--memplan-strict").assert_outcomes(passed=1)


def test_above_2_gib_a_thousandth_is_no_change(inner: Pytest) -> None:
    inner.tests(WHOLE.format(arguments="", size="4000 * MIB"))
    inner.run("--memplan-update").assert_outcomes(passed=1)
    inner.tests(WHOLE.format(arguments="", size="4004 * MIB"))
    inner.run("--memplan-strict").assert_outcomes(passed=1)
    inner.tests(WHOLE.format(arguments="", size="4004 * MIB + 1"))
    inner.run().assert_outcomes(failed=1)


def test_a_peak_below_its_baseline_passes_and_the_baseline_is_called_stale(inner: Pytest) -> None:
    inner.tests(WHOLE.format(arguments="", size="16 * MIB"))
    inner.run("--memplan-update")
    inner.tests(WHOLE.format(arguments="", size="8 * MIB"))
    result = inner.run()
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*PeakWarning: *8.00 MiB (-50.00 %) below the baseline's 16.00 MiB*stale*"])


def test_without_a_baseline_a_test_passes_with_a_warning_and_strictly_fails(inner: Pytest) -> None:
    inner.tests(WHOLE.format(arguments="", size="MIB"))
    result = inner.run()
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*PeakWarning: *has no such peak. To record one, type: pytest --memplan-update"])
    assert not inner.file.exists()
    result = inner.run("--memplan-strict")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*has no such peak. To record one, type: pytest --memplan-update"])


def test_a_gate_needs_no_baseline_and_what_is_recorded_counts_beside_it(inner: Pytest) -> None:
    inner.tests(WHOLE.format(arguments='(gate="64MiB")', size="8 * MIB"))
    inner.run("--memplan-strict").assert_outcomes(passed=1, warnings=0)
    inner.run("--memplan-update")
    inner.tests(WHOLE.format(arguments='(gate="64MiB")', size="16 * MIB"))
    result = inner.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*above the baseline's 8.00 MiB*"])


def test_another_device_is_another_peak_and_the_known_ones_are_named(inner: Pytest) -> None:
    inner.tests(WHOLE.format(arguments="", size="8 * MIB"))
    inner.run("--memplan-update")
    inner.use("H100")
    inner.tests(WHOLE.format(arguments="", size="16 * MIB"))
    result = inner.run()
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*on H100*has no such peak. There is one measured cpu torch-2.99. To record one*"])
    inner.run("--memplan-update")
    assert set(inner.recorded()["test_it.py::test_step"]["call"]) == {
        "measured H100 torch-2.99",
        "measured cpu torch-2.99",
    }


def test_a_peak_of_nothing_is_never_green(inner: Pytest) -> None:
    inner.tests(WHOLE.format(arguments='(gate="64MiB")', size="0"))
    result = inner.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*nothing was allocated, so there is no peak to judge*"])


def test_with_the_fixture_the_marked_gate_is_about_the_fixtures_peaks(inner: Pytest) -> None:
    inner.tests("""
@pytest.mark.memplan(gate="4MiB")
def test_outside(memory_peak):
    touch(64 * MIB)
    with memory_peak("small"):
        touch(4 * MIB)

@pytest.mark.memplan(gate="4MiB")
def test_inside(memory_peak):
    with memory_peak("large"):
        touch(5 * MIB)

@pytest.mark.memplan(gate="4MiB")
def test_nowhere(memory_peak):
    touch(MIB)

def test_own_gate(memory_peak):
    with memory_peak("own", gate="1MiB"):
        touch(2 * MIB)
""")
    result = inner.run()
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(
        [
            "test_it.py::test_inside (large): * over the gate of 4.00 MiB by 1.00 MiB*",
            "The marker found no peak: the test asked for memory_peak and took none.",
            "test_it.py::test_own_gate (own): * over the gate of 1.00 MiB by 1.00 MiB*",
        ]
    )


def test_a_function_is_run_and_its_result_kept(inner: Pytest) -> None:
    inner.tests("""
def step():
    touch(3 * MIB)
    return 7

def test_step(memory_peak):
    peak = memory_peak(step)
    assert (peak.result, peak.allocated_bytes, peak.witness) == (7, 3 * MIB, "measured")
    again = memory_peak(step, name="again")
    assert again.allocated_bytes == 3 * MIB
""")
    inner.run("--memplan-update").assert_outcomes(passed=1)
    assert set(inner.recorded()["test_it.py::test_step"]) == {"step", "again"}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("memory_peak(3)", "memory_peak takes a name or a function, not 3.*"),
        ('memory_peak("a", gate="lots")', "'lots' is not a size.*"),
        ('[memory_peak("a", device="cpu", trace=True)]', "A trace needs no device*"),
        ('[memory_peak(lambda: touch(MIB), name="a") for _ in range(2)]', "This test has a peak 'a' already.*"),
        ('memory_peak("a").mark("forward")', "*This peak is not being taken.*"),
    ],
)
def test_a_fixture_that_is_misused_says_what_to_type(inner: Pytest, call: str, says: str) -> None:
    inner.tests(f"def test_step(memory_peak):\n    {call}\n")
    result = inner.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([says])


def test_a_failure_of_the_tests_own_is_the_one_that_is_seen(inner: Pytest) -> None:
    inner.tests("""
from memplan.errors import MemplanError

@pytest.mark.memplan(gate="1MiB")
def test_step():
    touch(9 * MIB)
    raise MemplanError("their own")

def test_block(memory_peak):
    with memory_peak("a", gate="1MiB"):
        touch(9 * MIB)
        assert 1 == 2
""")
    result = inner.run("--memplan-update")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*raise MemplanError*", "*assert 1 == 2*", "No test that passed took a peak*"])
    result.stdout.no_fnmatch_line("*over the gate*")
    assert not inner.file.exists()


def test_an_update_keeps_what_did_not_run_and_leaves_out_what_failed(inner: Pytest) -> None:
    inner.tests(
        WHOLE.format(arguments="", size="8 * MIB") + "def test_late(memory_peak): memory_peak(lambda: touch(5))"
    )
    inner.run("--memplan-update").assert_outcomes(passed=2)
    before = inner.file.read_text()
    inner.tests(
        WHOLE.format(arguments='(gate="1MiB")', size="9 * MIB")
        + "def test_late(memory_peak):\n    memory_peak(lambda: touch(6))\n    assert False\n"
    )
    inner.run("--memplan-update").assert_outcomes(failed=2)
    assert inner.file.read_text() == before
    inner.tests(WHOLE.format(arguments="", size="9 * MIB"))
    inner.run("--memplan-update").assert_outcomes(passed=1)
    assert inner.recorded()["test_it.py::test_step"]["call"]["measured cpu torch-2.99"] == {"bytes": 9 * MIB}
    assert "test_it.py::test_late" in inner.recorded()
    assert [path.name for path in inner.pytester.path.glob(".memory*")] == []


@pytest.mark.parametrize(
    "text", ["{", '{"peaks": {}}', f'{{"format": "{FORMAT}", "peaks": {{"a": {{"b": 1}}}}}}', "[]"]
)
def test_a_torn_or_foreign_baseline_is_refused_and_kept(inner: Pytest, text: str) -> None:
    inner.tests(WHOLE.format(arguments="", size="MIB"))
    inner.file.write_text(text)
    result = inner.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"{inner.file} is no*"])
    result = inner.run("--memplan-update")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {inner.file} is no*"])
    assert inner.file.read_text() == text


def test_a_baseline_that_is_named_must_be_there(inner: Pytest) -> None:
    inner.tests(WHOLE.format(arguments="", size="MIB"))
    result = inner.run("--memplan-baseline", "peaks.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: There is no file peaks.json. To record one, type --memplan-update beside it."])
    inner.run("--memplan-baseline", "peaks.json", "--memplan-update").assert_outcomes(passed=1)
    inner.run("--memplan-baseline", "peaks.json", "--memplan-strict").assert_outcomes(passed=1)
    inner.run("--memplan-strict").assert_outcomes(failed=1)


def test_the_baseline_is_beside_the_tests_or_where_the_configuration_says(inner: Pytest) -> None:
    (inner.pytester.path / "tests").mkdir()
    inner.tests(WHOLE.format(arguments="", size="MIB"))
    inner.run("--memplan-update").stdout.fnmatch_lines(["written to tests/memory_baseline.json"])
    inner.run("--memplan-update", "-o", "memplan_baseline=kept/p.json").stdout.fnmatch_lines(["written to kept/p.json"])
    assert (inner.pytester.path / "kept" / "p.json").is_file()


def test_a_baseline_that_cannot_be_written_ends_the_run_red(inner: Pytest) -> None:
    inner.tests(WHOLE.format(arguments="", size="MIB"))
    (inner.pytester.path / "blocked").write_text("a file where a folder should be")
    result = inner.run("--memplan-update", "-o", "memplan_baseline=blocked/p.json")
    assert result.ret != 0


def test_the_numbers_go_into_the_junit_file(inner: Pytest) -> None:
    inner.tests(WHOLE.format(arguments='(gate="8MiB")', size="6 * MIB"))
    inner.run("--junitxml=out.xml", "-o", "junit_family=xunit1")
    assert (
        '"memplan call" value="6.00 MiB measured on cpu, torch 2.99"' in (inner.pytester.path / "out.xml").read_text()
    )


def test_every_peak_is_listed_when_more_is_asked_for(inner: Pytest) -> None:
    inner.tests(WHOLE.format(arguments='(gate="8MiB")', size="6 * MIB"))
    inner.run("-v").stdout.fnmatch_lines(["test_it.py::test_step (call): 6.00 MiB measured on cpu, torch 2.99"])


def test_a_test_that_is_run_again_may_use_the_same_names(inner: Pytest) -> None:
    inner.pytester.makeconftest(
        STAND_IN
        + """
DEVICE = "cpu"

def pytest_runtest_protocol(item, nextitem):
    from _pytest.runner import runtestprotocol
    return [runtestprotocol(item, nextitem=nextitem) for _ in range(2)]
"""
    )
    inner.tests("def test_step(memory_peak): memory_peak(lambda: touch(MIB))")
    inner.run("--memplan-update").assert_outcomes(passed=2)


def test_processes_of_xdist_send_their_peaks_and_one_of_them_writes(inner: Pytest) -> None:
    pytest.importorskip("xdist")
    inner.tests("".join(f"def test_{n}(memory_peak): memory_peak(lambda: touch({n} * MIB))\n" for n in range(1, 5)))
    extra = ("-p", "xdist", "-n", "2")
    result = inner.run(*extra, "--memplan-update", "--memplan-baseline", "p.json")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["4 measured on cpu, torch 2.99", "written to p.json"])
    path = inner.pytester.path / "p.json"
    peaks = json.loads(path.read_text())["peaks"]
    assert [names["<lambda>"]["measured cpu torch-2.99"]["bytes"] // MIB for names in peaks.values()] == [1, 2, 3, 4]
    assert list(peaks) == sorted(peaks)
    path.write_text(path.read_text().replace(str(4 * MIB), str(1)))
    inner.run("--memplan-baseline", "p.json").assert_outcomes(passed=3, failed=1)


def test_tests_that_do_not_use_it_run_as_before(inner: Pytest) -> None:
    inner.pytester.makeconftest("")
    inner.pytester.makepyfile(
        test_it="""
import sys

def test_one(request):
    assert not request.config.pluginmanager.get_plugin("memplan-ledger")
    assert "memplan.pytest_plugin.ledger" not in sys.modules
"""
    )
    code = "import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'memplan.pytest_plugin', 'test_it.py']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=inner.pytester.path)
    assert done.returncode == 0, done.stdout
    assert "memory peaks" not in done.stdout


def test_starting_it_takes_no_time_and_loads_nothing_large() -> None:
    code = (
        "import pytest, sys, time; start = time.process_time(); import memplan.pytest_plugin;"
        "print(time.process_time() - start, *(name for name in ('torch', 'pandas', 'numpy', 'memplan.analysis')"
        "if name in sys.modules))"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    took = [run.stdout.split() for run in runs]
    assert all(len(words) == 1 for words in took)
    assert min(float(words[0]) for words in took) < 0.02


@pytest.mark.parametrize("size", [-5, 10**40, 1.5, None, "12"])
def test_bytes_that_no_peak_can_have_are_refused_by_name(tmp_path: Path, size: Any) -> None:
    path = tmp_path / "memory_baseline.json"
    peaks = {"test_it.py::test_a": {"step\n2": {"measured cpu torch-2.99": {"bytes": size}}}}
    path.write_text(json.dumps({"format": FORMAT, "peaks": peaks}))
    with pytest.raises(MemplanError) as refused:
        Baseline.read(path)
    said = f"{path}: test_it.py::test_a (step\\n2) is {json.dumps(size)[:40]}, which is no number of bytes."
    assert str(refused.value).startswith(said)


def test_a_name_is_printed_in_one_line_of_bounded_length() -> None:
    assert shown("a\nb\x1b[31m") == r"a\nb\x1b[31m"
    assert len(shown("x" * 10_000)) < 400
    assert shown("größe") == "größe"


def test_a_peak_says_its_number_and_whose_word_it_is(inner: Pytest) -> None:
    inner.tests("""
def test_step(memory_peak):
    with memory_peak("step") as peak:
        assert str(peak) == "a peak that is not over yet"
        touch(8 * MIB)
    assert str(peak) == "8.00 MiB measured on cpu, torch 2.99"
    assert repr(peak) == "<JudgedStretch: 8.00 MiB measured on cpu, torch 2.99>"
""")
    inner.run().assert_outcomes(passed=1, warnings=1)
