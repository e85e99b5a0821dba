"""The step of vit_huge_sizes.py for torch; sources and letters as there.

torchao's optimizers are told by what they keep: their compiled step makes nothing of the size of what backward does.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vit_huge_shapes import CLASSES, HEADS, HIDDEN, LAYERS, PATCH, SIDE


class Attention(nn.Module):
    """q, k and v [B, A, N, D] are views of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Block(nn.Module):
    """x + attention(norm(x)), then the same with the feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(HIDDEN, eps=1e-6), Attention()
        self.norm2 = nn.LayerNorm(HIDDEN, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Classifier(nn.Module):
    """Patches behind a row of the whole image, blocks, norm, and a linear over that row."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, HIDDEN, PATCH, PATCH)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, HIDDEN))
        self.pos_embed = nn.Parameter(torch.zeros(1, (SIDE // PATCH) ** 2 + 1, HIDDEN))
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(HIDDEN, eps=1e-6), nn.Linear(HIDDEN, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0])


class Kept:
    """Two moments of each parameter in `bits`, with a scale for each block of `block` and a table of codes."""

    def __init__(self, parameters: Iterable[Tensor], bits: int, block: int) -> None:
        self.states = [moment for one in parameters for _ in range(2) for moment in state_of(one, bits, block)]

    def step(self) -> None:
        """Makes nothing."""


def state_of(parameter: Tensor, bits: int, block: int) -> list[Tensor]:
    """One moment; like the parameter where it is small or blocks do not fit."""
    n = parameter.numel()
    if n < 4096 or n % block:
        return [torch.zeros_like(parameter)]
    return [torch.zeros(n * bits // 8, dtype=torch.uint8), torch.zeros(n // block), torch.zeros(2**bits)]


def finetune(*, optimizer: str, batch: int = 8) -> Callable[[], object]:
    """The step: fp32 parameters, products in bf16, one backward, `optimizer`."""
    model = Classifier()
    parameters = list(model.parameters())
    update: torch.optim.Optimizer | Kept | None = None

    def step() -> None:
        nonlocal update
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(torch.zeros(batch, 3, SIDE, SIDE)), torch.zeros(batch, dtype=torch.long))
        loss.backward()
        if update is None:
            low = {"adamw-8bit-torchao": (8, 256), "adamw-4bit-torchao": (4, 128)}.get(optimizer)
            update = torch.optim.AdamW(parameters, fused=True) if low is None else Kept(parameters, *low)
        update.step()
        for parameter in parameters:
            parameter.grad = None

    return step
