"""Checkpoint modes as a person types them: `full`, `every:2`, `first:8`, `selective:mm+sdpa`."""

from dataclasses import dataclass

from memplan.errors import MemplanError

FORMS = ("none", "full", "every:K", "first:N", "selective", "selective:OPS", "submodule", "offload")
_COUNTED = {"every": "K", "first": "N"}
_PLAIN = ("none", "full", "selective", "submodule", "offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """What becomes of the tensors that blocks keep for backward."""

    kind: str
    """`none` keeps them; `full` keeps a block's input and runs the block again in backward, `every` and `first` do so
    with some of the blocks; `selective` keeps the results of some ops and runs the others again; `submodule` treats
    each norm, attention and feed-forward layer as a block of its own; `offload` keeps them in the host's memory."""
    count: int | None = None
    """K of `every:K` (blocks 0, K, 2K, ...), N of `first:N`."""
    ops: tuple[str, ...] = ()
    """Ops of `selective:OPS` whose results are kept, all others run again: aten names without overload, or `sdpa` for
    every attention kernel. Empty for the standing policy."""

    @staticmethod
    def parse(text: str) -> "Checkpointing":
        """The mode that `text` names; MemplanError when it is none."""
        kind, colon, rest = text.partition(":")
        if kind in _COUNTED:
            if not (rest.isascii() and rest.isdigit() and int(rest) >= 1):
                raise MemplanError(
                    f"ckpt {text!r} needs a whole number {_COUNTED[kind]} of 1 or more.", f"Type {kind}:2."
                )
            return Checkpointing(kind=kind, count=int(rest))
        if kind not in _PLAIN:
            raise MemplanError(f"Unknown ckpt {text!r}.", "Known: " + ", ".join(FORMS) + ".")
        if not colon:
            return Checkpointing(kind=kind)
        if kind != "selective":
            raise MemplanError(f"ckpt {kind!r} takes no number.", f"Type {kind}.")
        ops = tuple(rest.split("+"))
        if not all(op.replace("_", "").isalnum() and op.isascii() for op in ops):
            raise MemplanError(f"ckpt {text!r} names no ops.", "Type selective:mm+sdpa.")
        return Checkpointing(kind=kind, ops=ops)

    def treats(self, index: int) -> bool:
        """Whether block `index`, counted from 0, is checkpointed."""
        if self.kind == "none":
            return False
        if self.kind == "every":
            return index % (self.count or 1) == 0
        return self.kind != "first" or index < (self.count or 0)
