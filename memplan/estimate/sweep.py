"""Thousands of configurations at once: batches and lengths as arrays, every other lever in turn."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memplan.errors import MemplanError
from memplan.estimate.batch import Sizes
from memplan.estimate.families import RECURRENT, config_of
from memplan.estimate.reading import peak_bytes
from memplan.estimate.step import write_step
from memplan.spec.run import RunSpec

ARRAYS = ("batch", "chunks", "seq")
"""Axes whose values are told together."""
Point = tuple[int, int, int]
"""Batch, chunks and length."""


def sweep(run: RunSpec, axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """`run` with each combination of the values of `axes`, fields of its step, in their order: the values and
    `peak_allocated_bytes`. Batches that do not divide into their chunks are left out."""
    import numpy as np

    others = {name: values for name, values in axes.items() if name not in ARRAYS}
    batches, chunks, lengths = (list(axes.get(name, [getattr(run.step, name)])) for name in ARRAYS)
    grid = [
        (batch, parts, seq) for batch, parts, seq in itertools.product(batches, chunks, lengths) if not batch % parts
    ]
    if not grid:
        raise MemplanError("No batch of the sweep divides into its chunks.", "Sweep batch=8:64:8 with chunks=1,2,4.")
    for chosen in itertools.product(*others.values()):
        levers = dict(zip(others, chosen, strict=True))
        peaks: dict[Point, int] = {}
        by_length = run.model.impl == "hf" and config_of(run)["model_type"] in RECURRENT
        for part in told_together(replaced(run, levers), grid, by_length=by_length):
            like = replaced(run, levers | dict(zip(ARRAYS, part[0], strict=True)))
            for parts, seq in {point[1:] for point in part}:  # what no step can be is refused before any number is said
                replaced(run, levers | {"batch": parts, "chunks": parts, "seq": seq})
            columns: list[Any] = [np.array(column, dtype=np.int64) for column in zip(*part, strict=True)]
            batch, chunks_of, seq = part[0] if len(part) == 1 else columns
            seq = part[0][2] if by_length else seq
            sizes = Sizes(batch=batch, micro_batch=1 if part[0][0] == part[0][1] else batch // chunks_of, seq=seq)
            found = np.broadcast_to(peak_bytes(write_step(like, sizes)), len(part))
            peaks |= {point: int(peak) for point, peak in zip(part, found, strict=True)}
        for point in grid:
            yield dict(zip(ARRAYS, point, strict=True)) | levers | {"peak_allocated_bytes": peaks[point]}


def told_together(run: RunSpec, grid: list[Point], *, by_length: bool = False) -> list[list[Point]]:
    """Points of one ledger: those whose steps run the same ops, and those of one length where the number of ops depends
    on it (`by_length`); each alone where the host takes what is large."""
    if run.step.ckpt == "offload":
        return [[point] for point in grid]
    window = window_of(run)
    parts: dict[tuple[Any, ...], list[Point]] = {}
    for point in grid:
        batch, chunks, seq = point
        seen = seq + run.step.suffix
        key = chunks > 1, batch == chunks, seen >= window, seen > window, seen % 8 == 0, seq if by_length else 0
        parts.setdefault(key, []).append(point)
    return list(parts.values())


def window_of(run: RunSpec) -> int:
    """Tokens that a sliding block sees; 0 where none slides."""
    if run.model.impl != "hf":
        return run.model.decoder.window
    config = config_of(run)
    return config.get("text_config", config).get("sliding_window") or 0


def replaced(run: RunSpec, levers: dict[str, Any]) -> RunSpec:
    """`run` with other values in its step."""
    return dataclasses.replace(run, step=dataclasses.replace(run.step, **levers))
