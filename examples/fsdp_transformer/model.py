"""Define a small transformer that reads bytes and predicts the next one."""

from __future__ import annotations

import torch
from torch import nn

BYTES = 256


class Block(nn.Module):
    """Attention, then two linear layers, each with a way around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 of shape (batch, length, width) in and out."""
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """Byte and place embeddings, blocks, logits."""

    def __init__(self, length: int, width: int = 96, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, BYTES)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Logits, float32 of shape (batch * length, 256), for bytes, int64 of shape (batch, length)."""
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.logits(self.norm(x).flatten(0, 1))
        return logits
