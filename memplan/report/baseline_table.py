"""What a store of baselines holds."""

from collections.abc import Sequence

from memplan.analysis.baseline import Baseline
from memplan.report.table import Column, Table

COLUMNS = (
    Column(key="name", header="baseline", align="left"),
    Column(key="machine", header="machine", align="left"),
    Column(key="rungs", header="rungs"),
    Column(key="repeats", header="repeats"),
    Column(key="commit", header="commit", align="left", hide_empty=True),
    Column(key="began", header="began", align="left", hide_empty=True),
    Column(key="path", header="file", align="left"),
)
"""What is known of each."""


def baselines_table(found: Sequence[Baseline]) -> Table:
    """One line a baseline; the commits are those of its rows."""
    rows = []
    for baseline in found:
        runs = [(row.run_id, row.source) for row in baseline.rows]
        commits = dict.fromkeys(str(row.environment["commit"]) for row in baseline.rows if "commit" in row.environment)
        began = min((row.started_at for row in baseline.rows if row.started_at), default=None)
        most = max((runs.count(run) for run in set(runs)), default=0)
        rows.append((baseline.name, baseline.machine, len(set(runs)), most, ", ".join(commits) or None, began,
                     str(baseline.path)))  # fmt: skip
    return Table(columns=COLUMNS, rows=tuple(rows))
