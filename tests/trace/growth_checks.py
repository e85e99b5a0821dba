"""A grown trace held against the whole one."""

from memplan.backends.fewer import fewer_blocks
from memplan.backends.simulated import trace_steps
from memplan.spec import RunSpec


def check_growth(whole: RunSpec, *, lists: int = 1) -> None:
    """The trace of fewer blocks, grown in `lists` lists, is event for event that of all of `whole`."""
    few = fewer_blocks(whole)
    assert len(few.stacks) == lists
    assert few.run.model.decoder.num_layers < whole.model.decoder.num_layers
    story, full = trace_steps(few.run), trace_steps(whole)
    few = few.named(story.block_paths)
    grown = few.grown(story.trace)
    assert grown is not None
    assert grown.allocs == full.trace.allocs
    assert grown.events == full.trace.events
    assert grown.marks == full.trace.marks
    assert grown.places == full.trace.places
    assert grown.syncs == full.trace.syncs
    assert few.counted((name, size) for name, size, _ in story.params) == sum(size for _, size, _ in full.params)
