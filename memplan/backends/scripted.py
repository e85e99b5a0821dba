"""A step that a Python file defines, on a card that is not there."""

from memplan.backends.loading import load
from memplan.record.trace import TraceReport
from memplan.spec.published import Published
from memplan.trace.tracing import tracing


def trace_published(row: Published) -> TraceReport:
    """What the trace says about the step of a published figure, in the window that it speaks of."""
    assert row.step is not None
    build = load(*row.step)
    with tracing(device=row.device, frames=False) as trace:
        step = build(**row.arguments)
        step()
        if row.window == "steady":
            trace.reset_peak()
            step()
        return trace.report()
