"""The verdict on a variant of a step: its tensors beside the plain step's, each recomputed one beside its original."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """One tensor that is not the same in two steps."""

    name: str
    """`loss`, a parameter's name for its gradient, or that of a buffer or a layer of a cache."""
    max_abs: float
    """Largest absolute difference."""
    max_rel: float
    """Largest absolute difference over the largest absolute value of the plain step's tensor, or for a bias of its
    layer's weight where that is larger."""
    shape: tuple[int, ...]
    """Its shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeDifference:
    """The first tensor that a recomputed region makes otherwise than its forward did."""

    region: str
    """Path of the module that runs again, or `loss`."""
    module: str
    """Path of the module inside it whose op differs."""
    position: int
    """Number of the op in its region, from 0."""
    op: str
    """The op of forward; empty where forward had ended by then."""
    op_again: str
    """The op of the recomputation in its place."""
    shape: tuple[int, ...]
    """What forward made."""
    shape_again: tuple[int, ...]
    """What the recomputation makes."""
    dtype: str
    """Of what forward made, without `torch.`."""
    dtype_again: str
    """Of what the recomputation makes."""
    max_abs: float | None = None
    """Largest absolute difference; None where shapes, dtypes or ops differ already."""

    def __str__(self) -> str:
        where = f"{self.region}: op {self.position} of its recomputation"
        inside = f", in {self.module}," if self.module not in ("", self.region) else ""
        if self.op != self.op_again:
            was = f"forward ran {self.op}" if self.op else "forward had ended"
            return f"{where}{inside} is {self.op_again}, where {was}"
        if self.max_abs is None:
            made, again = f"{list(self.shape)} {self.dtype}", f"{list(self.shape_again)} {self.dtype_again}"
            return f"{where}{inside} {self.op} makes {again}, where forward made {made}"
        return f"{where}{inside} {self.op} {list(self.shape)} is off by {self.max_abs:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A tensor from outside of a recomputed region that is written in place before the recomputation, which reads it or
    writes it once more."""

    region: str
    """Path of the module that runs again, or `loss`."""
    tensor: str
    """Name of the parameter or buffer, where it is one, shape and dtype."""
    reader: str
    """Op and module that read it; empty where the region only writes it."""
    writer: str
    """Op and module that write it, as far as they were seen."""
    inside: bool
    """Whether the region itself writes it."""

    def __str__(self) -> str:
        reader = f"{self.reader} reads {self.tensor}"
        keep = "keep the value from before the write, or move the write out of the region"
        if not self.inside:
            return f"{self.region}: {reader}, which {self.writer} writes before it is read again; {keep}"
        if not self.reader:
            return (
                f"{self.region}: {self.writer} writes {self.tensor}, and would again; move the write out of the region"
            )
        return f"{self.region}: {reader}, and {self.writer} writes it, which would happen twice; {keep}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """A plain step against a variant of it."""

    variant: str
    """Name of the variant: `B4c2l2@full`."""
    tolerance: float
    """Largest `max_rel` that counts as equal, the plain step's own rounding apart; 0.0 is bitwise."""
    why: str
    """Why this tolerance."""
    num_tensors: int
    """Loss, gradients, buffers and layers of caches compared."""
    differences: tuple[TensorDifference, ...]
    """Those beyond the tolerance, the largest first."""

    num_recomputed: int = 0
    """Results of ops that were compared with their originals inside the step."""
    recomputed: RecomputeDifference | None = None
    """The first of them that differs."""
    mutations: tuple[Mutation, ...] = ()
    """Tensors that are written where a recomputation would read or write them once more."""
    faults: tuple[str, ...] = ()
    """What else is wrong, in words: checkpointing that never engages, or engages without gradients."""
    num_entered: int = 0
    """Calls that entered checkpointing."""
    num_runs: int = 0
    """Runs of checkpointed regions: two for each call that entered."""
    note: str = ""
    """What was done instead of what was asked for, or could not be looked at."""

    @property
    def same(self) -> bool:
        """Whether every tensor is within the tolerance, each recomputed one its original, and nothing else is wrong."""
        return not (self.differences or self.recomputed or self.mutations or self.faults)
