"""Multi-head attention over tokens, for DHEN and InterFormer: self-attention with rotary positions, and pooling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotary_tables(length: int, dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, dim / 2] of the rotary position embedding (Su et al., arXiv 2104.09864)."""
    rates = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head's features by its position's angles: [B, h, T, e] -> the same."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, h e] -> [B, h, T, e]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(e)) v, heads joined again: [B, h, m, e], 2 x [B, h, n, e], mask [B, n] -> [B, m, h e].

    ``mask`` False hides a token; each row must show at least one.
    """
    shown = None if mask is None else mask[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=shown).transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Tokens [B, n, d] look at each other: -> [B, n, d].

    Args:
        length: rotary positions for exactly this many tokens; 0 leaves positions away, for any number.

    Raises:
        ValueError: ``heads`` does not divide ``dim`` (into even parts, with rotary positions).
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, heads: int, length: int = 0) -> None:
        super().__init__()
        if dim % (heads * (2 if length else 1)):
            raise ValueError(f"{heads} heads do not divide width {dim}" + (" into even parts" if length else ""))
        self.heads = heads
        self.rotary = length > 0
        cos, sin = rotary_tables(length, dim // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(tokens).chunk(3, dim=-1)
        q, k, v = (split_heads(t, self.heads) for t in (query, key, value))
        if self.rotary:
            q, k = (rotate(t, self.cos, self.sin) for t in (q, k))
        return self.out(attend(q, k, v, mask))


class AttentionPool(nn.Module):
    """Pooling by learnt queries (PMA of the Set Transformer): [B, n, d] -> [B, seeds, d]."""

    def __init__(self, dim: int, heads: int, seeds: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"{heads} heads do not divide width {dim}")
        self.heads = heads
        self.seeds = nn.Parameter(torch.randn(seeds, dim) * dim**-0.5)
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        key, value = self.key_value(tokens).chunk(2, dim=-1)
        # The queries are the same for all examples: one small linear for the whole batch.
        query = self.query(self.seeds).expand(tokens.shape[0], -1, -1)
        q, k, v = (split_heads(t, self.heads) for t in (query, key, value))
        return self.out(attend(q, k, v, mask))
