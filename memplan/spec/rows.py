"""How the rows of a batch are filled: `full`, `padded:0.25`, `packed:4`.

Letters: `S` sequence.
"""

from dataclasses import dataclass

from memplan.errors import MemplanError
from memplan.spec.model import ModelSpec

FORMS = ("full", "padded:FRACTION", "packed:N")
WORKLOADS = ("lm", "distill")
"""Workloads whose rows may be something else than full."""
PACKED = (
    "llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "phi3", "mixtral", "qwen3_moe", "deepseek_v2",
    "deepseek_v3", "gpt2", "gpt_neox", "gemma2", "gemma3",
)  # fmt: skip
"""Families in which transformers keeps documents apart whose positions begin anew. Source: the calls of
`create_causal_mask` in each modeling file, transformers 5.24; held by tests/step/test_rows_hf.py."""
UNPACKED = {
    "bert": "its mask knows of padding alone",
    "gpt_oss": "transformers makes its masks without regard to positions",
    "qwen3_5": "its delta-nets carry their state from one document into the next",
}
"""Why not, for those that are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What stands in every row, the same in each. Unless rows are full, a mask says who sees whom: memplan's own models
    make it of the numbers of documents, transformers' of what is padding or of positions that begin anew."""

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

    def check_model(self, model: ModelSpec) -> None:
        """MemplanError where `model` cannot be fed with such rows."""
        if self.kind == "full":
            return
        if model.vision or model.impl == "user" or (model.impl == "memplan" and model.decoder.window):
            raise MemplanError(
                f"{model.name} makes its masks itself: no row of it is padded or packed.", "Type --rows full."
            )
        if model.impl == "hf" and self.kind == "packed" and model.family not in PACKED:
            reason = UNPACKED.get(model.family, "nothing is known of how transformers masks it")
            raise MemplanError(
                f"Documents in a packed row of {model.name} would see one another: {reason}.",
                "Type --rows padded:0.25, or --rows full.",
            )

    def ends(self, seq: int) -> list[int]:
        """Where each document of a row ends, in order."""
        tokens = seq - round(self.padding * seq)
        return [tokens * number // self.documents for number in range(1, self.documents + 1)]

    def segments(self, seq: int) -> list[int]:
        """For each token of a row the number of its document, from 1; 0 for padding."""
        ends = self.ends(seq)
        return [next((number for number, end in enumerate(ends, 1) if at < end), 0) for at in range(seq)]

    def positions(self, seq: int) -> list[int]:
        """For each token of a row its place in its document, or in the row where that is padded."""
        starts = [0, *self.ends(seq)[:-1]]
        return [at - max(start for start in starts if start <= at) for at in range(seq)]

    def masks(self, seq: int) -> bool:
        """Whether in a row of `seq` tokens some may not see all that stands before them, or all that is there."""
        return self.documents > 1 or self.ends(seq)[-1] < seq

    def targets(self, seq: int) -> list[int]:
        """Positions whose next token is of the same document; every position of a full row, whose last one has a token
        behind the row."""
        if self.kind == "full":
            return list(range(seq))
        last = {end - 1 for end in self.ends(seq)}
        return [at for at, number in enumerate(self.segments(seq)) if number and at not in last]
