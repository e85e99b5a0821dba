"""LitGPT's LoRA, Adapter and Adapter v2 on one GPU: one iteration on the longest sample, as of October 2023.

Written from Lightning-AI/litgpt@8641822, which the table names (lit_gpt/model.py, lora.py, adapter.py, adapter_v2.py,
config.py, utils.py and the scripts), with the norm of @6178c7cc: it raises its input to fp32 and was committed on
2023-10-24, between the table's date and its publication on 2023-10-27. What matters for memory there:

- LoRA's adapters sit on the fused qkv matrix, for q and v only: their part is padded with zeros to all of it by an
  out-of-place `index_copy`, which keeps both the padded part's source and the index;
- the head runs over 128 tokens at a time, and Fabric gives back outputs in the default dtype (lightning 2.1,
  `HalfPrecision.convert_output`): all logits stay in fp32 from forward to the end of the iteration;
- Adapter adds attention to 10 trained rows in all blocks but the first two, under a mask; Adapter v2 besides scales
  and shifts the outputs of all linears, for which each output is kept, and trains the norms;
- the longest sample comes in the first iteration, before there is any gradient or optimizer state;
- quantised models have all of their linears in nf4, the head too, first when they are built and again when the
  checkpoint is loaded, which leaves the allocator with blocks to reuse (Adapter's rows: @0f021f3a, 2024-01-18).

Letters: `B` batch, `S` sequence, `H` hidden, `A` heads, `D` head size, `V` vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from litgpt_nf4 import Nf4Linear
from litgpt_shapes import DROPOUT, FIRST_PROMPTED, HEAD_ROWS, PROMPT_ROWS, RANK, SHAPES, TRAINED, Shape
from torch import Tensor, nn

SCALE = 2.0
IGNORED = -1


class Norm(nn.Module):
    """RMSNorm in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        x = x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5)
        return (self.weight * x).to(dtype)


class AdaptedQkv(nn.Module):
    """A frozen fused projection [H, 3H] with adapters for q and v."""

    def __init__(self, width: int, recipe: "Recipe", *, bias: bool) -> None:
        super().__init__()
        self.width = width
        self.linear = recipe.frozen(width, 3 * width, bias=bias)
        self.lora_down = nn.Parameter(torch.zeros(2 * RANK, width))
        self.lora_up = nn.Parameter(torch.zeros(2 * width, RANK))
        self.dropout = nn.Dropout(DROPOUT)
        self.columns = [*range(width), *range(2 * width, 3 * width)]

    def forward(self, x: Tensor) -> Tensor:
        frozen = self.linear(x)
        inner = F.linear(self.dropout(x), self.lora_down)
        outer = F.conv1d(inner.transpose(1, 2), self.lora_up.unsqueeze(-1), groups=2).transpose(1, 2)
        return frozen + self.padded(outer) * SCALE

    def padded(self, x: Tensor) -> Tensor:
        """[B, S, 2H] -> [B, S, 3H], zeros for k."""
        x = x.transpose(0, 1)
        width = 3 * self.width
        whole = x.new_zeros(*x.shape[:-1], width).view(-1, width)
        whole = whole.index_copy(1, torch.tensor(self.columns), x.reshape(-1, x.size(-1)))
        return whole.view(*x.shape[:-1], width).transpose(0, 1)


class ScaledLinear(nn.Module):
    """Adapter v2: a frozen linear, its output shifted and scaled."""

    def __init__(self, width: int, out: int, recipe: "Recipe", *, bias: bool) -> None:
        super().__init__()
        self.linear = recipe.frozen(width, out, bias=bias)
        self.adapter_bias = nn.Parameter(torch.zeros(out))
        self.adapter_scale = nn.Parameter(torch.ones(out))

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter_scale * (self.linear(x) + self.adapter_bias)


@dataclass(frozen=True)
class Recipe:
    """What a run trains, and how it keeps the rest."""

    kind: str
    """`lora`, `adapter` or `adapter-v2`."""
    quantised: str
    """`nf4`, `nf4-dq`, or empty for bf16."""

    def frozen(self, width: int, out: int, *, bias: bool) -> nn.Module:
        """A linear of the model itself."""
        if self.quantised:
            return Nf4Linear(width, out, bias=bias, nested=self.quantised == "nf4-dq")
        return nn.Linear(width, out, bias=bias)

    def linear(self, width: int, out: int, *, bias: bool) -> nn.Module:
        """A linear with what is trained of it, outside of LoRA's qkv."""
        if self.kind == "adapter-v2":
            return ScaledLinear(width, out, self, bias=bias)
        return self.frozen(width, out, bias=bias)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [B, A, S, D] rotated by two halves; the tables are fp16, so the products are fp32."""
    half = x.size(-1) // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + turned * sin).type_as(x)


class Attention(nn.Module):
    """[B, S, H] -> [B, S, H]."""

    def __init__(self, shape: Shape, recipe: Recipe, *, prompted: bool) -> None:
        super().__init__()
        self.shape = shape
        bias = not shape.llama
        if recipe.kind == "lora":
            self.qkv = AdaptedQkv(shape.hidden, recipe, bias=bias)
        else:
            self.qkv = recipe.linear(shape.hidden, 3 * shape.hidden, bias=bias)
        self.out = recipe.linear(shape.hidden, shape.hidden, bias=bias)
        self.prompted = prompted
        if prompted:
            self.adapter_prompt = nn.Parameter(torch.zeros(PROMPT_ROWS, shape.hidden))
            self.adapter_gate = nn.Parameter(torch.zeros(1, 1, shape.heads, 1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, width = x.shape
        part = self.shape.rotary
        qkv = self.qkv(x).view(batch, seq, self.shape.heads, 3, -1).permute(0, 2, 3, 1, 4)
        q, k, v = (t.squeeze(2) for t in qkv.split(1, dim=2))
        q, k = (torch.cat((rotated(t[..., :part], cos, sin), t[..., part:]), dim=-1) for t in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.prompted:
            out = out + self.adapter_gate * self.attend_prompt(q)
        return self.out(out.reshape(batch, seq, width))

    def attend_prompt(self, q: Tensor) -> Tensor:
        """Attention of the queries to the trained rows, [B, S, A, D]."""
        rows = self.qkv(self.adapter_prompt[None]).view(1, PROMPT_ROWS, self.shape.heads, 3, -1).permute(0, 2, 3, 1, 4)
        _, k, v = (t.squeeze(2) for t in rows.split(1, dim=2))
        mask = torch.ones(q.size(2), PROMPT_ROWS, dtype=torch.bool)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


class Mlp(nn.Module):
    """Gated SiLU, or one GELU between two matrices."""

    def __init__(self, shape: Shape, recipe: Recipe) -> None:
        super().__init__()
        self.gelu = None if shape.llama else shape.gelu
        self.up = recipe.linear(shape.hidden, shape.ffn, bias=not shape.llama)
        self.gate = recipe.linear(shape.hidden, shape.ffn, bias=False) if shape.llama else None
        self.down = recipe.linear(shape.ffn, shape.hidden, bias=not shape.llama)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate=self.gelu))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """[B, S, H] -> [B, S, H]."""

    def __init__(self, shape: Shape, recipe: Recipe, *, prompted: bool) -> None:
        super().__init__()
        norm = Norm if shape.llama else nn.LayerNorm
        self.llama = shape.llama
        self.attn_norm = norm(shape.hidden)
        self.attn = Attention(shape, recipe, prompted=prompted)
        self.mlp_norm = None if shape.one_norm else norm(shape.hidden)
        self.mlp = Mlp(shape, recipe)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.attn_norm(x)
        h = self.attn(normed, cos, sin)
        if self.llama:
            x = x + h
            return x + self.mlp(self.mlp_norm(x))
        return x + h + self.mlp(normed if self.mlp_norm is None else self.mlp_norm(x))


class Gpt(nn.Module):
    """Tokens [B, S] -> logits of 128 tokens each."""

    def __init__(self, shape: Shape, seq: int, recipe: Recipe) -> None:
        super().__init__()
        self.head = recipe.linear(shape.hidden, shape.vocab, bias=shape.head_bias)
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        first = shape.layers if recipe.kind == "lora" else FIRST_PROMPTED
        self.blocks = nn.ModuleList(Block(shape, recipe, prompted=at >= first) for at in range(shape.layers))
        self.norm = Norm(shape.hidden) if shape.llama else nn.LayerNorm(shape.hidden)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(seq, shape.rotary, dtype=torch.float16))

    def forward(self, tokens: Tensor) -> list[Tensor]:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return [self.head(part) for part in self.norm(x).split(HEAD_ROWS, dim=1)]


def finetune(*, kind: str, model: str, batch: int, seq: int, quantised: str = "") -> Callable[[], None]:
    """The iteration: weights in bf16, or linears in `nf4` or `nf4-dq`; what `kind` (`lora`, `adapter`, `adapter-v2`)
    adds is trained by AdamW. bitsandbytes' own, beside nf4, is not there before the peak."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        gpt = Gpt(SHAPES[model], seq, Recipe(kind, quantised))
    finally:
        torch.set_default_dtype(torch.float32)
    for name, parameter in gpt.named_parameters():
        parameter.requires_grad_(any(part in name for part in TRAINED[kind]))
    optimizer = torch.optim.AdamW([p for p in gpt.parameters() if p.requires_grad], lr=3e-4, weight_decay=0.01)
    for module in gpt.modules():
        if isinstance(module, Nf4Linear):
            module.load()
    tokens, labels = (torch.zeros(batch, seq, dtype=torch.long) for _ in range(2))

    def step() -> None:
        logits = [part.float() for part in gpt(tokens)]
        logits[-1] = logits[-1][..., :-1, :]
        targets = labels[..., 1:].split(HEAD_ROWS, dim=1)
        losses = [
            F.cross_entropy(part.reshape(-1, part.size(-1)), target.reshape(-1), ignore_index=IGNORED, reduction="none")
            for part, target in zip(logits, targets, strict=True)
        ]
        loss = torch.cat(losses).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
