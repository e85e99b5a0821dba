"""The folder of a climb: tables and pictures made from its rows."""

from collections.abc import Sequence
from pathlib import Path

from memplan.record import RungResult
from memplan.report.ladder_table import ladder_table, provenance
from memplan.report.plots import peak_plot, throughput_plot
from memplan.report.render import render


def write_page(rows: Sequence[RungResult], folder: Path) -> None:
    """Writes `table.md`, `table.csv`, `peak.png` and `throughput.png` into `folder`."""
    table = ladder_table(rows, footer=provenance(rows))
    (folder / "table.md").write_text(render(table, "md") + "\n", encoding="utf-8")
    (folder / "table.csv").write_text(render(table, "csv") + "\n", encoding="utf-8")
    peak_plot(rows, folder / "peak.png")
    throughput_plot(rows, folder / "throughput.png")
