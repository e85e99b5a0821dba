"""The rung: `B12c6l16@full`, one point of a ladder as a person types it.

Letters: `B` batch, `c` chunks, `l` loss chunks, `s` sequence, `@` checkpoint mode.
"""

import re
from dataclasses import dataclass

from memplan.errors import MemplanError
from memplan.spec.checkpointing import Checkpointing
from memplan.spec.step import divisible_rungs

_EXAMPLE = "Type a rung like B12c6, B12c6l16@full or B4c1s8192@every:2."
_PART = re.compile(r"(?P<letter>[cls])(?P<digits>\d*)|@(?P<ckpt>[^,@\s]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A batch of `batch` samples in `chunks` backward passes; None means: as the ladder says."""

    batch: int
    """B, samples a step."""
    chunks: int
    """C, backward passes a step."""
    loss_chunks: int | None = None
    """Parts of the head and loss, or None."""
    seq: int | None = None
    """S, tokens a sample, or None."""
    ckpt: str | None = None
    """Checkpoint mode, or None."""

    def __str__(self) -> str:
        text = f"B{self.batch}c{self.chunks}"
        if self.loss_chunks is not None:
            text += f"l{self.loss_chunks}"
        if self.seq is not None:
            text += f"s{self.seq}"
        if self.ckpt is not None:
            text += f"@{self.ckpt}"
        return text

    @staticmethod
    def parse(text: str) -> "Rung":
        """The rung that `text` names; MemplanError that points at the first wrong character."""
        text = text.strip()
        head = re.match(r"B(\d+)", text)
        if head is None:
            at = 1 if text[:1] == "B" else 0
            raise _pointed(text, at, "a rung starts with B and a batch size")
        batch = int(head[1])
        if batch == 0:
            raise _pointed(text, 1, "a batch has 1 sample or more")
        values: dict[str, int] = {}
        ckpt: str | None = None
        position = head.end()
        while position < len(text):
            part = _PART.match(text, position)
            if part is None:
                raise _pointed(text, position, "expected c, l, s with a number, or @ with a checkpoint mode")
            if part["letter"] is None:
                if ckpt is not None:
                    raise _pointed(text, position, "the checkpoint mode is given twice")
                ckpt = part["ckpt"]
                try:
                    Checkpointing.parse(ckpt)
                except MemplanError as error:
                    raise _pointed(text, position + 1, str(error).rstrip(".")) from None
            else:
                letter = part["letter"]
                if letter in values:
                    raise _pointed(text, position, f"{letter} is given twice")
                if not part["digits"]:
                    raise _pointed(text, position + 1, f"{letter} needs a whole number")
                values[letter] = int(part["digits"])
                if values[letter] == 0:
                    raise _pointed(text, position + 1, f"{letter} must be 1 or more")
            position = part.end()
        chunks = values.get("c", 1)
        if batch % chunks:
            raise MemplanError(
                f"{text}: {batch} samples do not divide into {chunks} chunks;", f"try {divisible_rungs(batch, chunks)}."
            )
        return Rung(batch=batch, chunks=chunks, loss_chunks=values.get("l"), seq=values.get("s"), ckpt=ckpt)


def parse_rungs(text: str) -> tuple[Rung, ...]:
    """The rungs of `B12c6,B8c4`; MemplanError when one is wrong, named twice, or none is there."""
    parts = [part for part in text.split(",") if part.strip()]
    if not parts:
        raise MemplanError("No rung was given.", _EXAMPLE)
    rungs = tuple(Rung.parse(part) for part in parts)
    for index, rung in enumerate(rungs):
        if rung in rungs[:index]:
            raise MemplanError(f"The rung {rung} is given twice.", "Leave one out.")
    return rungs


def _pointed(text: str, position: int, why: str) -> MemplanError:
    return MemplanError(f"{text!r}: {why}, at character {position + 1}:\n  {text}\n  {' ' * position}^\n", _EXAMPLE)
