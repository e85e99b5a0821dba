"""Memory that CUDA ops take inside themselves and that no tensor shows: the entries, and where torch takes them.

The blocks of an entry stand together, beside the op's outputs, and are gone when the op returns; a cuBLAS workspace
stays. An entry's function takes the op's own arguments: fake tensors, real ones and `Operand` all serve.
Checked: tests/trace/test_hidden.py.

Known limits: the temporary storage of cub's sorts and sums is not counted (it is freed before the larger blocks of the
same op come). cuDNN's attention asks its own library for a workspace whose size torch does not know beforehand. The
memory-efficient backward with a head size above 128, or above 64 on a card with 99 KiB of shared memory, splits the
keys by a measure of occupancy; one split is counted, which is the least. A small table that many indices read
(a few thousand rows) may have its gradient summed by atomics instead, which takes less than is counted. Of reductions
sums over the first dimensions alone are counted; others take as much where they leave few outputs of many inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memplan.trace.cuda_rules import hidden_ops
from memplan.trace.cuda_rules.generation import Generation
from memplan.trace.cuda_rules.hidden_ops import Block, Blocks, Operand
from memplan.trace.cuda_rules.workspaces import USES_CUBLAS, cublas_workspace_bytes

__all__ = [
    "BY_OP",
    "ENTRIES",
    "HOST_OUTPUTS",
    "NOTHING_HIDDEN",
    "Block",
    "Entry",
    "Operand",
    "Workspaces",
    "hidden_blocks",
    "hidden_bytes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one op takes inside itself."""

    op: str
    """aten op without its overload."""
    what: str
    """What the memory is for."""
    source: str
    """File, function and torch version."""
    blocks: Callable[..., Blocks]
    """(generation, *args, **kwargs of the op) -> the blocks at the op's peak."""


def hidden_blocks(op: str, generation: Generation, *args: Any, **kwargs: Any) -> Blocks:
    """The blocks that `op` (aten name without overload) takes inside itself in this call; empty for most ops."""
    entry = BY_OP.get(op)
    return () if entry is None else tuple(b for b in entry.blocks(generation, *args, **kwargs) if b.num_bytes)


def hidden_bytes(op: str, generation: Generation, *args: Any, **kwargs: Any) -> int:
    """Bytes of `hidden_blocks` together."""
    return sum(block.num_bytes for block in hidden_blocks(op, generation, *args, **kwargs))


class Workspaces:
    """What a recorder asks after each op: (name, bytes, whether it stays) of the memory inside it.

    Two threads run a step on CUDA, the caller's and autograd's, and each takes its own cuBLAS workspace with its first
    product. A recompute belongs to autograd's. Streams made by the user are not told apart.
    """

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.workspace_bytes = cublas_workspace_bytes(generation)
        self._entries: dict[Any, Entry | None] = {}
        self._holders: set[str] = set()

    def __call__(self, func: Any, args: tuple[Any, ...], out: Any) -> list[tuple[str, int, bool]]:
        """The memory inside one call of `func`; blocks that do not stay are alive together."""
        if func not in self._entries:
            self._entries[func] = _ENTRY_OR_CUBLAS.get(func._schema.name.removeprefix("aten::"))
        entry = self._entries[func]
        if entry is None:
            return []
        if entry is _CUBLAS:
            return self._take(_thread())
        return [(f"{entry.op}.{b.name}", b.num_bytes, False) for b in entry.blocks(self.generation, *args)]

    def _take(self, thread: str) -> list[tuple[str, int, bool]]:
        if thread in self._holders or not self.workspace_bytes:
            return []
        self._holders.add(thread)
        return [(f"cublas workspace of the {thread} thread", self.workspace_bytes, True)]


def _thread() -> str:
    return "forward" if torch._C._current_autograd_node() is None else "backward"


_TORCH = "torch 2.13"
_CUDA = "aten/src/ATen/native/cuda"
_ATTENTION = "aten/src/ATen/native/transformers/cuda"
_INDEX_PUT = f"{_CUDA}/Indexing.cu, index_put_with_sort_kernel, {_TORCH}"

ENTRIES: tuple[Entry, ...] = (
    Entry(
        op="_scaled_dot_product_flash_attention",
        what="partial outputs of split keys",
        source=f"{_ATTENTION}/flash_attn/flash_api.cpp, set_params_splitkv and num_splits_heuristic, {_TORCH}",
        blocks=hidden_ops.flash_forward,
    ),
    Entry(
        op="_scaled_dot_product_flash_attention_backward",
        what="fp32 query gradients, row sums, ungrouped key and value gradients",
        source=f"{_ATTENTION}/flash_attn/flash_api.cpp, mha_bwd; attention_backward.cu, {_TORCH}",
        blocks=hidden_ops.flash_backward,
    ),
    Entry(
        op="_scaled_dot_product_efficient_attention_backward",
        what="row sums, tiles of query gradients",
        source=f"{_ATTENTION}/mem_eff_attention/kernel_backward.h, workspace_elements_gq; "
        f"kernels/generate_kernels.py, BwdKernel.get_all; attention_backward.cu, {_TORCH}",
        blocks=hidden_ops.efficient_backward,
    ),
    Entry(
        op="_safe_softmax",
        what="softmax and mask before rows without keys are cleared",
        source=f"aten/src/ATen/native/transformers/attention.cpp, _safe_softmax, {_TORCH}",
        blocks=hidden_ops.safe_softmax,
    ),
    Entry(
        op="embedding_dense_backward",
        what="sorted indices, fp32 sums of runs of equal indices",
        source=f"{_CUDA}/Embedding.cu, embedding_dense_backward_cuda; EmbeddingBackwardKernel.cu, {_TORCH}",
        blocks=hidden_ops.embedding_backward,
    ),
    Entry(op="index_put", what="sorted flat indices", source=_INDEX_PUT, blocks=hidden_ops.index_put),
    Entry(op="index_put_", what="sorted flat indices", source=_INDEX_PUT, blocks=hidden_ops.index_put),
    Entry(op="_index_put_impl_", what="sorted flat indices", source=_INDEX_PUT, blocks=hidden_ops.index_put),
    Entry(
        op="native_layer_norm_backward",
        what="partial sums of weight and bias gradients",
        source=f"{_CUDA}/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel, {_TORCH}",
        blocks=hidden_ops.layer_norm_backward,
    ),
    Entry(
        op="_fused_rms_norm_backward",
        what="partial sums of the weight's gradient",
        source=f"{_CUDA}/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel, {_TORCH}",
        blocks=hidden_ops.rms_norm_backward,
    ),
    Entry(
        op="sum",
        what="partial sums over rows, as of the gradient of a bias",
        source=f"{_CUDA}/Reduce.cuh, setReduceConfig and ReduceConfig::global_memory_size, {_TORCH}",
        blocks=hidden_ops.sum_over_rows,
    ),
)
"""Every op of which hidden memory is known."""

BY_OP = {entry.op: entry for entry in ENTRIES}
"""The entries by op."""

HOST_OUTPUTS: dict[str, tuple[int, ...]] = {"_scaled_dot_product_efficient_attention": (2, 3)}
"""Outputs that a fake CPU trace shows and CUDA keeps on the host: the seed and offset of dropout.

Source: attention.cu, `_efficient_attention_forward`, "Seed and Offset Device": on the device only while a graph is
captured; torch 2.13.
"""

NOTHING_HIDDEN: dict[str, str] = {
    "_fused_adamw_": "updates in place; the list of pointers travels in the kernel's arguments (fused_adamw_impl.cu)",
    "_foreach_*": "results are lists of tensors, which a trace sees; pointers travel in the kernel's arguments "
    "(MultiTensorApply.cuh)",
    "cross_entropy_loss": "a composite of log_softmax and nll_loss, whose outputs a trace sees (LossNLL.cpp)",
    "_log_softmax_backward_data": "writes its output only (SoftMax.cu)",
}
"""Ops that are often suspected, and why there is nothing to add."""


_CUBLAS = Entry(op="mm", what="workspace", source="workspaces.py", blocks=lambda *_: ())
_ENTRY_OR_CUBLAS = {**BY_OP, **dict.fromkeys(USES_CUBLAS, _CUBLAS)}
