"""A feed-forward layer of experts, each token through the few that its router picks.

Letters: `N` tokens, `k` experts a token, `E` experts, `H` hidden, `F` feed-forward of one expert.

No shape depends on what is picked: the N*k copies of the tokens are sorted by expert, and each product is one grouped
product. Every sum has an order of its own, so that a second run gives the same bits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import library as torch_library
from torch.utils.flop_counter import flop_registry, register_flop_formula

from memplan.spec.model import DecoderSpec

ALIGNMENT = 8
"""bf16 elements in the 16 bytes that rows of a grouped product start at. Source: `check_valid_strides_and_return_
transposed` in aten/src/ATen/native/GroupedMMUtils.h, torch 2.13."""


class MoE(nn.Module):
    """Router, softmax in fp32, the k best experts with their shares made to add up to one: [B, S, H] -> [B, S, H]."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.num_chosen = spec.experts_per_token
        self.router = nn.Linear(spec.hidden, spec.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(spec.experts, 2 * spec.expert_ffn, spec.hidden))
        self.down = nn.Parameter(torch.empty(spec.experts, spec.hidden, spec.expert_ffn))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        shares, chosen = self.route(rows)
        experts, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(self.router.out_features, device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        rows = rows.repeat_interleave(self.num_chosen, dim=0).index_select(0, order)
        gate, up = grouped_linear(rows, self.gate_up, ends).chunk(2, dim=-1)
        rows = grouped_linear(F.silu(gate) * up, self.down, ends)
        del gate, up
        rows = rows.index_select(0, order.argsort()).view(*chosen.shape, -1)
        return (rows * shares[..., None].to(rows.dtype)).sum(1).view_as(x)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Shares [N, k] of the experts that each of `rows` [N, H] goes through, and their numbers, int64 [N, k]."""
        chances = F.softmax(self.router(rows), dim=-1, dtype=torch.float32)
        shares, chosen = chances.topk(self.num_chosen, dim=-1)
        return (shares / shares.sum(-1, keepdim=True)).to(rows.dtype), chosen


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows [n, out] of sorted `rows` [n, in], those up to `ends[e]` times matrix `weight[e]` of [E, out, in], in
    autocast's dtype where that is on (torch leaves grouped products out of autocast)."""
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, weight = rows.to(dtype), weight.to(dtype)
    aligned = rows.size(1) % ALIGNMENT == 0 and weight.size(1) % ALIGNMENT == 0
    if rows.dtype == torch.bfloat16 and aligned and hasattr(torch, "_grouped_mm"):
        out: Tensor = torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)
        return out
    return grouped_mm(rows, weight, ends)


@torch_library.custom_op("memplan::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """What `torch._grouped_mm` makes, for the dtypes that its fake and its compiled form refuse: one product an
    expert, with the group ends read by the host."""
    out = rows.new_empty(rows.size(0), weight.size(1))
    for expert, group in enumerate(groups(ends)):
        torch.mm(rows[group], weight[expert].t(), out=out[group])
    return out


@grouped_mm.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.size(0), weight.size(1))


@torch_library.custom_op("memplan::grouped_mm_backward", mutates_args=())
def grouped_mm_backward(grad: Tensor, rows: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the rows and of the matrices; zero for an expert without rows."""
    grad_rows, grad_weight = torch.empty_like(rows), torch.zeros_like(weight)
    for expert, group in enumerate(groups(ends)):
        torch.mm(grad[group], weight[expert], out=grad_rows[group])
        torch.mm(grad[group].t(), rows[group], out=grad_weight[expert])
    return grad_rows, grad_weight


@grouped_mm_backward.register_fake
def _(grad: Tensor, rows: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weight)


def keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    """Saves what backward reads."""
    ctx.save_for_backward(*inputs)


def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    """Gradients of `grouped_mm`'s inputs."""
    return *grouped_mm_backward(grad, *ctx.saved_tensors), None


grouped_mm.register_autograd(differentiate, setup_context=keep)


def groups(ends: Tensor) -> list[slice]:
    """The rows of each expert."""
    stops = ends.tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def num_forward_flops(rows: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    """2 n in out, whichever rows go to which expert."""
    return 2 * rows[0] * rows[1] * weight[1]


def num_backward_flops(
    grad: tuple[int, ...], rows: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any
) -> int:
    """As many for the rows' gradients as for the matrices'."""
    return 2 * num_forward_flops(rows, weight)


def num_torch_flops(left: tuple[int, ...], right: tuple[int, ...], *_: Any, **__: Any) -> int:
    """2 n in out for torch's own, in forward [n, in] x [E, in, out] and in backward [out, n] x [n, in] alike."""
    return 2 * left[0] * left[1] * right[-1]


register_flop_formula(torch.ops.memplan.grouped_mm)(num_forward_flops)
register_flop_formula(torch.ops.memplan.grouped_mm_backward)(num_backward_flops)
if hasattr(torch, "_grouped_mm") and torch.ops.aten._grouped_mm not in flop_registry:  # torch 2.13 counts none
    register_flop_formula(torch.ops.aten._grouped_mm)(num_torch_flops)
