"""The planted teacher of the synthetic stream: what really makes people click in that world.

    logit = a . n                          numerics (standardised logarithms n)
          + sum_f  w_f . v_f               ids, each with a latent vector v
          + sum_{f<g} v_f . v_g            pairs of ids
          + u . tanh(W [n, mean v] + c)    an MLP
          + sum_j  n_j (c_j . v_f(j))      numerics times ids
          + mean_t v_0 . v_h(t)            likeness of the candidate to its history, where there is one

Each term is scaled to its share of a logit of about unit variance. Latent vectors are looked up by a hash of the id, so
ids without number have one. The drift turns each category's vectors in fixed planes by an angle of their own, which
swings slowly: inner products between categories change, lengths do not, so the spread of the logit stays as it was.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Width of the latent vectors, rows of their table, hidden units of the MLP.
LATENT = 8
LATENT_ROWS = 2**18
HIDDEN = 32
#: Standard deviation of each term in the teacher's logit.
SHARES = {"numeric": 0.4, "linear": 0.5, "pairs": 0.5, "mlp": 0.5, "cross": 0.3, "history": 0.4}


class Teacher:
    """The teacher of one seed. Its parameters are drawn on the CPU, so they are the same on every device."""

    def __init__(self, categories: int, numerics: int, seed: int, drift: float, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed * 2 + 1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        self._drift = drift
        self._categories = categories
        self._latent = normal(LATENT_ROWS, LATENT)
        self._salt = torch.randint(2**40, (categories,), generator=generator).to(device)
        # Periods of 10 to 40 days, and the place in them at time zero.
        uniform = torch.rand(2, categories, generator=generator)
        self._rate = (2 * math.pi / (10 + 30 * uniform[0])).to(device)
        self._phase = (2 * math.pi * uniform[1]).to(device)
        pairs = categories * (categories - 1) / 2
        self._numeric = normal(numerics) * (SHARES["numeric"] * numerics**-0.5)
        self._linear = normal(categories, LATENT) * (SHARES["linear"] * (categories * LATENT) ** -0.5)
        self._pair_scale = SHARES["pairs"] * (max(pairs, 1) * LATENT) ** -0.5
        self._hidden = normal(numerics + LATENT, HIDDEN) * (numerics + LATENT) ** -0.5 * 2.0
        self._shift = normal(HIDDEN) * 0.5
        # tanh of a unit normal has standard deviation 0.63.
        self._out = normal(HIDDEN) * (SHARES["mlp"] / 0.8 * HIDDEN**-0.5)
        # Numeric j weighs the vector of category j % C: as a matrix [F, C * LATENT], most of it zero.
        cross = torch.zeros(numerics, categories, LATENT, device=device)
        own = torch.arange(numerics, device=device)
        cross[own, own % categories] = normal(numerics, LATENT) * (SHARES["cross"] * (numerics * LATENT) ** -0.5)
        self._cross = cross.flatten(1)
        self._history_scale = SHARES["history"] * LATENT**-0.5

    def logits(self, numerics: Tensor, ids: Tensor, history: Tensor | None, time: Tensor | float) -> Tensor:
        """Logits [n] without bias: numerics [n, F] float, ids [n, C] and history [n, T] int64 (-1: none), at a day."""
        v = self._vectors(ids, slice(None), time)
        total = v.sum(dim=1)
        logits = numerics @ self._numeric + torch.einsum("nfd,fd->n", v, self._linear)
        logits = logits + self._pair_scale * 0.5 * (total.square().sum(dim=1) - v.square().sum(dim=(1, 2)))
        seen = torch.cat([numerics, total * self._categories**-0.5], dim=1)
        logits = logits + torch.tanh(seen @ self._hidden + self._shift) @ self._out
        logits = logits + ((numerics @ self._cross) * v.flatten(1)).sum(dim=1)
        if history is not None:
            past = self._vectors(history.clamp(min=0).unsqueeze(-1), slice(0, 1), time).squeeze(-2)
            there = (history >= 0).unsqueeze(-1)
            count = there.sum(dim=1).clamp(min=1)
            # The sum of T vectors over sqrt(T), so that long and short histories speak equally loud.
            taste = (past * there).sum(dim=1) / count.sqrt()
            logits = logits + self._history_scale * (taste * v[:, 0]).sum(dim=1)
        return logits

    def _vectors(self, ids: Tensor, columns: slice, time: Tensor | float) -> Tensor:
        """Latent vectors [..., C, LATENT] of ids [..., C], turned to where they stand at that time."""
        # Two rounds of multiply and shift; the mask keeps the products positive, within 63 bits.
        key = (ids * 0x9E3779B1 + self._salt[columns]) & 0x7FFFFFFF
        key = ((key ^ (key >> 15)) * 0x85EBCA6B) & 0x7FFFFFFF
        v = self._latent[(key ^ (key >> 13)) % LATENT_ROWS]
        angle = self._drift * torch.sin(self._rate[columns] * time + self._phase[columns]).unsqueeze(-1)
        first, second = v[..., : LATENT // 2], v[..., LATENT // 2 :]
        cos, sin = torch.cos(angle), torch.sin(angle)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
