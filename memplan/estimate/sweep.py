"""Thousands of configurations at once: batches, chunks and lengths as arrays."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from memplan.errors import MemplanError
from memplan.estimate.batch import Sizes
from memplan.estimate.families import RECURRENT, config_of
from memplan.estimate.reading import peak_bytes
from memplan.estimate.step import write_step
from memplan.spec.run import RunSpec

Point = tuple[int, int, int]
"""Batch, chunks and length."""


def sweep_sizes(run: RunSpec, points: Sequence[Point]) -> dict[Point, int | MemplanError]:
    """Peaks of `run` with each batch, number of chunks and length, blocks as large as what was asked for; the error
    where formulas know nothing of it."""
    import numpy as np

    found: dict[Point, int | MemplanError] = {}
    by_length = run.model.impl == "hf" and config_of(run)["model_type"] in RECURRENT
    for part in told_together(run, points, by_length=by_length):
        like = replaced(run, dict(zip(("batch", "chunks", "seq"), part[0], strict=True)))
        columns: list[Any] = [np.array(column, dtype=np.int64) for column in zip(*part, strict=True)]
        batch, chunks_of, seq = part[0] if len(part) == 1 else columns
        seq = part[0][2] if by_length else seq
        sizes = Sizes(batch=batch, micro_batch=1 if part[0][0] == part[0][1] else batch // chunks_of, seq=seq)
        try:
            peaks = np.broadcast_to(peak_bytes(write_step(like, sizes)), len(part))
        except MemplanError as error:
            found |= dict.fromkeys(part, error)
        else:
            found |= {point: int(peak) for point, peak in zip(part, peaks, strict=True)}
    return found


def told_together(run: RunSpec, grid: Sequence[Point], *, by_length: bool = False) -> list[list[Point]]:
    """Points of one ledger: those whose steps run the same ops, and those of one length where the number of ops depends
    on it (`by_length`); each alone where the host takes what is large."""
    if run.step.ckpt == "offload":
        return [[point] for point in grid]
    window = window_of(run)
    parts: dict[tuple[Any, ...], list[Point]] = {}
    for point in grid:
        batch, chunks, seq = point
        seen = seq + run.step.suffix
        hides = run.step.filling.masks(seq)
        key = chunks > 1, batch == chunks, seen >= window, seen > window, seen % 8 == 0, hides, seq if by_length else 0
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
