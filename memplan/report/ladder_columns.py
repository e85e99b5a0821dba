"""What the table of a ladder can say of a rung, column by column."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memplan.analysis import Pulled
from memplan.record import RungResult
from memplan.report.repeats import Repeats
from memplan.report.table import Column
from memplan.spec.run import NEW_LEVERS
from memplan.units import format_bytes, format_ns, format_percent

STEP = (
    "seq",
    "workload",
    "suffix",
    "loss",
    "precision",
    "optimizer",
    "attention",
    "norm",
    "dropout",
    "lora",
    "compile",
)
"""Fields of the step that a rung's name does not say."""
LEAST_FOR_PERCENTILES = 5
"""Timed steps below which no percentile is told: of three samples the 80th and the 50th may be the same one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What a line of the table is made from."""

    rung: Repeats
    """The rung."""
    lever: Pulled | None
    """The rung beside the one without its lever, where there is one."""

    @property
    def row(self) -> RungResult:
        """The repeat to show."""
        return self.rung.row


def step_columns(names: Sequence[str] = STEP) -> tuple[Column, ...]:
    """A column for each field of the step that the rung's name does not say, hidden where it never varies."""
    return tuple(Column(key=name, header=name, align="left", hide_constant=True) for name in names)


def step_values(row: RungResult) -> tuple[Any, ...]:
    """The values of `step_columns`."""
    return tuple(None if row.step.get(name) in NEW_LEVERS.get(name, ()) else row.step.get(name) for name in STEP)


def peak_phase(row: RungResult) -> str | None:
    """Phase with the largest peak; the earlier one when two are equal."""
    return max(row.phase_peaks, key=lambda phase: row.phase_peaks[phase], default=None)


def spread_ns(row: RungResult) -> tuple[int, int] | None:
    """20th and 80th percentile of the timed steps; None of fewer than `LEAST_FOR_PERCENTILES`."""
    if len(row.step_ns) < LEAST_FOR_PERCENTILES:
        return None
    fifths = statistics.quantiles(row.step_ns, n=5, method="inclusive")
    return int(fifths[0]), int(fifths[3])


def counted(counts: dict[str, Any]) -> str:
    """`flash 36, math 2`."""
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def uncounted(counts: str) -> str:
    """What `counted` said without the numbers: `flash, math`."""
    return ", ".join(one.rpartition(" ")[0] for one in counts.split(", "))


def _first_step(line: Line) -> int | None:
    first = line.row.windows.get("first_step")
    return None if first is None else first.allocated_bytes


def _host(line: Line) -> int | None:
    return max((peak.host_bytes for peak in line.row.windows.values() if peak.host_bytes is not None), default=None)


def _failed_in(line: Line) -> str | None:
    failure = line.row.failure
    return None if failure is None else ", ".join(word for word in (failure.window, failure.phase) if word)


def _telemetry(key: str) -> Callable[[Line], Any]:
    return lambda line: line.row.telemetry.get(key)


def _told(value: Any) -> str:
    """A reading of a sensor, or several."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_told(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_told(each) for each in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def _spread(value: tuple[int, int]) -> str:
    return f"{format_ns(value[0])} to {format_ns(value[1])}"


def _two_digits(value: float) -> str:
    return f"{value:.2f}"


def _share(value: float) -> str:
    return format_percent(value, 1).lstrip("+")


def _column(key: str, header: str, read: Callable[[Line], Any], text: Any = None, **how: Any) -> tuple[Column, Any]:
    words = {"align": "left"} if text is None else {"text": text}
    return Column(key=key, header=header, **words | how), read


_UNSTEPPED: tuple[tuple[Column, Callable[[Line], Any]], ...] = (
    _column("source", "source", lambda line: line.row.source),
    _column("repeats", "repeats", lambda line: len(line.rung.rows) if len(line.rung.rows) > 1 else None, str,
            hide_constant=True),
    _column("status", "status", lambda line: line.rung.status),
    _column("failed_in", "failed in", _failed_in, hide_empty=True),
    _column("peak_allocated_bytes", "peak", lambda line: line.rung.peak_bytes, format_bytes),
    _column("peak_reserved_bytes", "reserved", lambda line: line.row.peak_reserved_bytes, format_bytes,
            hide_empty=True),
    _column("peak_used_bytes", "used", lambda line: line.row.peak_used_bytes, format_bytes, hide_empty=True),
    _column("estimated_bytes", "estimated", lambda line: line.row.estimated_bytes, format_bytes, hide_empty=True),
    _column("error_frac", "estimate's error", lambda line: line.rung.error_frac, format_percent, hide_empty=True),
    _column("traced_bytes", "traced",
            lambda line: None if line.row.source == "simulated" else line.row.traced_bytes, format_bytes,
            hide_empty=True),
    _column("headroom_bytes", "headroom", lambda line: line.rung.headroom_bytes, format_bytes,
            hide_empty=True),
    _column("first_step_bytes", "first step", _first_step, format_bytes, hide_empty=True),
    _column("host_bytes", "on the host", _host, format_bytes, hide_empty=True),
    _column("saved_bytes", "saves", lambda line: None if line.lever is None else line.lever.saved_bytes, format_bytes,
            hide_empty=True),
    _column("peak_phase", "peaks in", lambda line: peak_phase(line.row) if line.rung.peak_bytes else None),
    _column("step_ns", "step", lambda line: line.rung.step_ns, format_ns, hide_empty=True),
    _column("timed_steps", "timed", lambda line: len(line.row.step_ns) or None, str, hide_constant=True),
    _column("step_spread_ns", "step's p20 to p80", lambda line: spread_ns(line.row), _spread, hide_empty=True),
    _column("slower_frac", "slower by", lambda line: None if line.lever is None else line.lever.slower_frac,
            format_percent, hide_empty=True),
    _column("samples_per_s", "samples/s", lambda line: line.rung.samples_per_s, _two_digits, hide_empty=True),
    _column("tokens_per_s", "tokens/s", lambda line: line.rung.middle(lambda row: row.tokens_per_s),
            lambda value: f"{value:,.0f}", hide_empty=True),
    _column("mfu_frac", "MFU", lambda line: line.rung.middle(lambda row: row.mfu_frac), _share, hide_empty=True),
    _column("hfu_frac", "HFU", lambda line: line.rung.middle(lambda row: row.hfu_frac), _share, hide_empty=True),
    _column("kernels", "attention kernels", lambda line: counted(line.row.attention) or None, hide_constant=True,
            gist=uncounted),
    _column("sm_clock_mhz", "SM clock [MHz]", _telemetry("sm_clock_mhz"), _told, hide_empty=True),
    _column("power_w", "power [W]", _telemetry("power_w"), _told, hide_empty=True),
    _column("temperature_c", "temperature [°C]", _telemetry("temperature_c"), _told, hide_empty=True),
    _column("throttled", "throttled", _telemetry("throttled"), _told, align="left", hide_empty=True),
    _column("parity", "as the plain step", lambda line: _same(line.row), hide_empty=True),
    _column("warnings", "warnings", lambda line: len(line.row.warnings) or None, str, hide_empty=True),
    _column("verdict", "verdict", lambda line: line.rung.verdict),
)  # fmt: skip

COLUMNS = (
    Column(key="rung", header="rung", align="left"),
    Column(key="model", header="model", align="left", hide_constant=True),
    *step_columns(),
    *(column for column, _ in _UNSTEPPED),
)
"""The columns, in order."""


SPEED = (
    "step_ns",
    "timed_steps",
    "step_spread_ns",
    "slower_frac",
    "samples_per_s",
    "tokens_per_s",
    "mfu_frac",
    "hfu_frac",
    "kernels",
    "sm_clock_mhz",
    "power_w",
    "temperature_c",
    "throttled",
)
"""Keys of the columns that speak of time; the others speak of memory."""
NAMES = ("rung", "model", *STEP)
"""Keys of the columns that say which rung it is."""


def values(line: Line) -> tuple[Any, ...]:
    """What `COLUMNS` say of a rung."""
    return line.row.rung, line.row.model, *step_values(line.row), *(read(line) for _, read in _UNSTEPPED)


def _same(row: RungResult) -> str | None:
    same = row.parity.get("same")
    return None if same is None else "same" if same else "differs"
