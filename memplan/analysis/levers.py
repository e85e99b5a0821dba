"""What a lever saves and costs: a row against the row that differs from it in that lever alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memplan.record import RungResult
from memplan.units import format_bytes, format_percent

PLAIN = {"ckpt": "none", "loss": "full", "compile": "off"}
"""Levers, and what each says where it is not pulled."""
BEYOND_NOISE_FRAC = 0.02
"""Savings below this are called none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """A row beside the one without its lever."""

    lever: str
    """`ckpt`, `loss` or `compile`."""
    row: RungResult
    """With the lever pulled."""
    plain: RungResult
    """Without."""

    @property
    def saved_bytes(self) -> int | None:
        """Peak bytes less than without; negative when more, None where one has no whole peak."""
        with_it, without = self.row.whole_peak_bytes, self.plain.whole_peak_bytes
        return None if with_it is None or without is None else without - with_it

    @property
    def saved_frac(self) -> float | None:
        """Saved bytes as a fraction of the peak without."""
        without = self.plain.whole_peak_bytes
        return self.saved_bytes / without if self.saved_bytes is not None and without else None

    @property
    def slower_frac(self) -> float | None:
        """Median step time over that without, less 1; None where one was not timed."""
        with_it, without = self.row.median_step_ns, self.plain.median_step_ns
        return with_it / without - 1 if with_it is not None and without else None


def pulled(rows: Sequence[RungResult]) -> list[Pulled | None]:
    """Each of `rows` beside the first one of them that differs in one lever, which it leaves alone; the lever first
    named in `PLAIN` where there are several, None where there is none."""
    found: dict[str, RungResult] = {}
    for row in rows:
        found.setdefault(_step(row, row.step), row)

    def beside(row: RungResult) -> Pulled | None:
        for lever, plain in PLAIN.items():
            other = found.get(_step(row, row.step | {lever: plain}))
            if row.step.get(lever, plain) != plain and other is not None:
                return Pulled(lever=lever, row=row, plain=other)
        return None

    return [beside(row) for row in rows]


def findings(rows: Sequence[RungResult]) -> tuple[str, ...]:
    """What the rows say about each lever, in words."""
    lines = [line for pair in pulled(rows) if pair is not None and (line := sentence(pair))]
    return (*lines, *losses(rows))


def _step(row: RungResult, step: dict[str, Any]) -> str:
    return f"{row.model} {row.source} {sorted(step.items())}"


def sentence(pair: Pulled) -> str:
    """Saving and cost of one lever; empty where neither is known."""
    if pair.saved_bytes is None or pair.saved_frac is None:
        return ""
    named = f"{pair.row.rung}: {pair.lever} {pair.row.step[pair.lever]}"
    if abs(pair.saved_frac) < BEYOND_NOISE_FRAC:
        saving = "saves nothing"
    else:
        share = format_percent(abs(pair.saved_frac)).lstrip("+")
        saving = f"{'saves' if pair.saved_bytes > 0 else 'adds'} {format_bytes(abs(pair.saved_bytes))} ({share})"
    cost = "" if pair.slower_frac is None else f", step time {format_percent(pair.slower_frac)}"
    shared = pair.row.step[pair.lever] == "offload" and pair.row.environment.get("device") == "cpu"
    return f"{named} {saving}{cost}" + (", the host's copies included, as on the CPU both are one memory" * shared)


def losses(rows: Sequence[RungResult]) -> list[str]:
    """For rows that differ in the loss alone: which of them find room, and that a chunked forward is no chunked memory
    where both forms are among them."""
    groups: dict[str, list[RungResult]] = {}
    for row in rows:
        same = {key: value for key, value in row.step.items() if key != "loss"}
        groups.setdefault(f"{row.model} {row.source} {sorted(same.items())}", []).append(row)
    lines = []
    for group in groups.values():
        fits = [row for row in group if row.status == "ok" and row.verdict != "fail"]
        fails = [row for row in group if row.status in ("oom", "over_gate") or row.verdict == "fail"]
        if fits and fails:
            fit, do = "fits" if len(fits) == 1 else "fit", "does" if len(fails) == 1 else "do"
            lines.append(f"{group[0].rung}: loss {named(fits)} {fit}; {named(fails)} {do} not")
        kinds = {row.step.get("loss", "full").partition(":")[0]: row for row in group}
        if {"chunked", "chunked-ckpt"} <= kinds.keys():
            chunked, again = kinds["chunked"].whole_peak_bytes, kinds["chunked-ckpt"].whole_peak_bytes
            if chunked is not None and again is not None and chunked > again * (1 + BEYOND_NOISE_FRAC):
                lines.append(
                    "a chunked forward is not chunked memory: every chunk's logits stay in the graph until backward; "
                    f"making them again there saves another {format_bytes(chunked - again)}"
                )
    return lines


def named(rows: Sequence[RungResult]) -> str:
    """The losses of `rows` with what each needs: `full (80.00 GiB) and chunked:16 (70.00 GiB)`."""
    sizes = [
        row.step.get("loss", "full") + (f" ({format_bytes(row.whole_peak_bytes)})" if row.whole_peak_bytes else "")
        for row in rows
    ]
    return " and ".join(sizes)
