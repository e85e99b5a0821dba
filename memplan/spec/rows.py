"""How the rows of a batch are filled: `full`, `padded:0.25`, `packed:4`.

Letters: `S` sequence.
"""

from dataclasses import dataclass

from memplan.errors import MemplanError

FORMS = ("full", "padded:FRACTION", "packed:N")
WORKLOADS = ("lm", "distill")
"""Workloads whose rows may be something else than full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What stands in every row, the same in each. Unless rows are full, a dense mask says who sees whom."""

    kind: str = "full"
    """`full` of one document, `padded` behind it, or `packed` with several that do not see one another."""
    padding: float = 0.0
    """Share of a padded row that is padding, above 0 and below 1."""
    documents: int = 1
    """Documents of a packed row, as equal in length as can be."""

    @staticmethod
    def parse(text: str) -> "Rows":
        """The rows that `text` names; MemplanError when it is none."""
        kind, _, rest = text.partition(":")
        if text == "full":
            return Rows()
        if kind == "padded":
            try:
                share = float(rest)
            except ValueError:
                share = 0.0
            if not 0 < share < 1:
                raise MemplanError(f"rows {text!r} need a fraction above 0 and below 1.", "Type padded:0.25.")
            return Rows(kind=kind, padding=share)
        if kind == "packed":
            if not (rest.isascii() and rest.isdigit() and int(rest) >= 1):
                raise MemplanError(f"rows {text!r} need a whole number N of 1 or more.", "Type packed:4.")
            return Rows(kind=kind, documents=int(rest))
        raise MemplanError(f"Unknown rows {text!r}.", "Known: " + ", ".join(FORMS) + ".")

    def check(self, seq: int, workload: str) -> None:
        """MemplanError where rows of `seq` tokens have no room for a target, or `workload` fills its rows itself."""
        if self.kind == "full":
            return
        if workload not in WORKLOADS:
            raise MemplanError(f"The workload {workload} fills its rows itself.", "Type --rows full.")
        if not self.targets(seq):
            raise MemplanError(
                f"A {self.kind} row of {seq} tokens has no next token to learn.", "Type a longer --seq, or --rows full."
            )

    def ends(self, seq: int) -> list[int]:
        """Where each document of a row ends, in order."""
        tokens = seq - round(self.padding * seq)
        return [tokens * number // self.documents for number in range(1, self.documents + 1)]

    def segments(self, seq: int) -> list[int]:
        """For each token of a row the number of its document, from 1; 0 for padding."""
        ends = self.ends(seq)
        return [next((number for number, end in enumerate(ends, 1) if at < end), 0) for at in range(seq)]

    def targets(self, seq: int) -> list[int]:
        """Positions whose next token is of the same document; every position of a full row, whose last one has a token
        behind the row."""
        if self.kind == "full":
            return list(range(seq))
        last = {end - 1 for end in self.ends(seq)}
        return [at for at, number in enumerate(self.segments(seq)) if number and at not in last]
