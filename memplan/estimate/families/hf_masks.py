"""The masks that transformers' models make of a window, of padding and of positions that begin anew, over the ledger.

Locals live here exactly as long as those of transformers 5.24 do (masking_utils.py). Letters: `B` batch, `S` sequence.
"""

from dataclasses import dataclass

from memplan.estimate import views
from memplan.estimate.tape import Tape, Tensor
from memplan.spec.run import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """How the rows of a chunk are filled, as the model hears of it; nothing said of full ones."""

    padding: Tensor | None = None
    """1 at tokens and 0 at padding, [B, S]."""
    positions: Tensor | None = None
    """Place of each token in its document, [B, S]."""
    hides: bool = False
    """Whether there is padding, or more than one document."""

    @staticmethod
    def of(run: RunSpec, batch: dict[str, Tensor]) -> "Filling":
        """That of a chunk of `run`'s batch."""
        hides = run.step.filling.masks(run.step.seq)
        return Filling(padding=batch.get("attention_mask"), positions=batch.get("position_ids"), hides=hides)


FULL = Filling()


def causal_mask(x: Tensor, kind: str, filling: Filling = FULL, window: int | None = None) -> Tensor | None:
    """The mask [B, 1, S, S] that attention of `kind` over x [B, S, H] reads: bools for sdpa, where a window cuts or
    something is hidden, otherwise none; additive in the dtype of `x` where attention is eager."""
    tape, (B, S) = x.tape, x.shape[:2]
    padding = real_tokens(filling)
    numbers = document_numbers(filling)
    cut = window is not None and views.reaches(S, window)
    if kind == "sdpa" and not (cut or filling.hides):
        return None
    aranges = arange(tape, B, S)
    mask = seen_before(tape, B if numbers is not None else 1, S, window, documents=numbers is not None)
    if numbers is not None:
        mask = anded(mask, mask.shape)
        mask = same_document(mask)
    if padding is not None:
        mask = without_padding(mask, B)
    del aranges
    return finished(views.expand(mask, B, 1, S, S), kind, x.dtype)


def mask_to_both_sides(x: Tensor, kind: str, filling: Filling) -> Tensor | None:
    """The mask [B, 1, S, S] of an encoder over x [B, S, H], where there is padding."""
    tape, (B, S) = x.tape, x.shape[:2]
    padding = real_tokens(filling)
    if not filling.hides:
        return None
    aranges = arange(tape, B, S)
    mask = without_padding(tape.make("ge", ((1, 1, S, 1), "bool")), B)
    del aranges, padding
    return finished(views.expand(mask, B, 1, S, S), kind, x.dtype)


def padding_of_states(filling: Filling) -> Tensor | None:
    """What layers with a state multiply their input with; None where nothing is padding."""
    return filling.padding if filling.hides else None


def real_tokens(filling: Filling) -> Tensor | None:
    """Which tokens are no padding, bools [B, S]."""
    padding = filling.padding
    return None if padding is None else padding.tape.make("to", (padding.shape, "bool"))


def document_numbers(filling: Filling) -> Tensor | None:
    """Number of the document of each token [B, S]; None where there is one document."""
    positions = filling.positions
    if positions is None:
        return None
    tape, (B, S) = positions.tape, positions.shape
    first = tape.make("sub", ((B, 1), "int64"))
    joined = tape.make("cat", ((B, S + 1), "int64"))
    steps = tape.make("sub", ((B, S), "int64"))
    del joined
    begins = tape.make("ne", ((B, S), "bool"))
    numbers = tape.make("cumsum", ((B, S), "int64"))
    del first, steps, begins
    return numbers if filling.hides else None


def seen_before(tape: Tape, B: int, S: int, window: int | None, *, documents: bool) -> Tensor:
    """Which keys stand before a query, and no farther than `window` where there is one, [B, 1, S, S]: counted by the
    places in their `documents`, or in the row."""
    shape = B, 1, S, S
    ends = indexed(tape, B, S) if documents else None
    if window is None:
        return tape.make("le", (shape, "bool"))
    first = tape.make("sub", ((B, 1, S, 1), "int64"))
    near = tape.make("gt", (shape, "bool"))
    del first
    inside = anded(near, shape)
    del near
    before = tape.make("le", (shape, "bool"))
    inside = anded(inside, shape)
    del before, ends
    return inside


def same_document(mask: Tensor) -> Tensor:
    """`mask` where query and key are of one document."""
    tape, shape = mask.tape, mask.shape
    ends = indexed(tape, shape[0], shape[2])
    same = tape.make("eq", (shape, "bool"))
    del ends
    mask = anded(mask, shape)
    del same
    return mask


def without_padding(mask: Tensor, B: int) -> Tensor:
    """`mask` [1, 1, S, ...] where the key is no padding, [B, 1, S, S]."""
    tape, S = mask.tape, mask.shape[2]
    mask = anded(mask, mask.shape)
    keys = tape.make("index", ((B, 1, 1, S), "bool"))
    mask = anded(mask, (B, 1, S, S))
    del keys
    return mask


def anded(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`mask` and another together."""
    both: Tensor = mask.tape.make("bitwise_and", (shape, "bool"))
    return both


def indexed(tape: Tape, B: int, S: int) -> tuple[Tensor, Tensor]:
    """A number for each query and for each key."""
    return tape.make("index", ((B, 1, S, 1), "int64")), tape.make("index", ((B, 1, 1, S), "int64"))


def arange(tape: Tape, B: int, S: int) -> list[Tensor]:
    """Numbers of samples, of the one head, of queries and of keys."""
    return [tape.make("arange", ((size,), "int64")) for size in (B, 1, S, S)]


def finished(mask: Tensor, kind: str, dtype: str) -> Tensor:
    """Bools for sdpa; additive in `dtype` where attention is eager."""
    made: Tensor = mask if kind == "sdpa" else mask.tape.make("where", (mask.shape, dtype))
    return made
