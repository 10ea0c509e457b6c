"""A uniform sample of the raw rows that were seen, to check the Gaussian's prediction against.

Every row gets a random key, and the rows with the largest keys are kept. Hence the sample is uniform over all rows so
far, deterministic for given keys, and the best of two reservoirs' rows are the reservoir of both (Efraimidis, Spirakis
2006, with equal weights). Keys come from (seed, rank, step, ...), the same for a layer's input and its output's
gradient, so that equal keys find the same row of the batch in both. Nothing here waits for the device.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from loka_compile.errors import ProbeError
from loka_compile.probe.numerics import plain_math, tensor_bytes

ROWS = 256
#: Rows of wide layers are fewer: a reservoir holds at most so many bytes.
MAX_BYTES = 16 << 20


def seed_of(*parts: object) -> int:
    """A stable hash of the parts, below 2**63."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def seeded(*parts: object) -> torch.Generator:
    """A CPU generator whose seed is a stable hash of the parts."""
    return torch.Generator().manual_seed(seed_of(*parts))


def draw_rows(batch: int, count: int, *parts: object) -> tuple[Tensor, Tensor]:
    """The largest ``count`` of ``batch`` random keys, descending, and the rows that have them, both [count].

    A batch of a million tokens has a million keys; only the largest are made. The largest of n uniform numbers is
    distributed as ``u**(1/n)``, the next one as that times ``u**(1/(n-1))``, and so on; any row may have any of them.
    """
    count = min(batch, count)
    random = np.random.default_rng(seed_of(*parts))
    rows = random.choice(batch, count, replace=False)
    shrink = np.log1p(-random.random(count)) / np.arange(batch, batch - count, -1)
    return torch.from_numpy(np.exp(np.cumsum(shrink))), torch.from_numpy(rows)


class Reservoir:
    """At most ``rows`` raw rows of ``features`` numbers, in the dtype in which they were seen."""

    def __init__(
        self, features: int, dtype: torch.dtype, *, rows: int = ROWS, device: torch.device | str = "cpu"
    ) -> None:
        """Start empty; ``rows`` is reduced where they would take more than MAX_BYTES."""
        self.features = features
        fitting = MAX_BYTES // (features * dtype.itemsize)
        capacity = max(1, min(rows, fitting))
        with plain_math(torch.device(device)):
            self.rows = torch.zeros(capacity, features, dtype=dtype, device=device)
            #: Descending; -1 marks an empty place.
            self.keys = torch.full((capacity,), -1.0, dtype=torch.float64, device=device)

    @property
    def capacity(self) -> int:
        """Rows that fit."""
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return tensor_bytes(self.rows, self.keys)

    def update(self, x: Tensor, keys: Tensor, valid: Tensor | None = None) -> None:
        """Offer rows x [rows, features] with their keys [rows] in [0, 1); rows whose ``valid`` is not set have none."""
        if x.shape != (len(keys), self.features):
            raise ProbeError(f"rows of shape {tuple(x.shape)} with {len(keys)} keys for a width of {self.features}")
        with plain_math(self.rows.device):
            keys = keys.to(self.rows.device, torch.float64, non_blocking=True)
            if valid is not None:
                keys = torch.where(valid, keys, -1.0)
            all_keys = torch.cat([self.keys, keys])
            self.keys, order = torch.topk(all_keys, self.capacity, sorted=True)
            rows = torch.cat([self.rows, x.detach().to(self.rows.dtype)])
            self.rows = torch.where((self.keys >= 0)[:, None], rows.index_select(0, order), 0)

    def merge(self, other: Reservoir) -> None:
        """Keep the best rows of both."""
        self.update(other.rows.to(self.rows.device), other.keys, other.keys.to(self.rows.device) >= 0)

    def sample(self) -> Tensor:
        """The rows kept [n, features] (waits for the device)."""
        return self.rows[self.keys >= 0]

    def paired(self, other: Reservoir) -> tuple[Tensor, Tensor]:
        """The rows of both that come from the same row of a batch, in the same order."""
        mine = {key: index for index, key in enumerate(self.keys.tolist()) if key >= 0}
        pairs = [(mine[key], index) for index, key in enumerate(other.keys.tolist()) if key in mine]
        left = torch.tensor([a for a, _ in pairs], dtype=torch.int64, device=self.rows.device)
        right = torch.tensor([b for _, b in pairs], dtype=torch.int64, device=other.rows.device)
        return self.rows.index_select(0, left), other.rows.index_select(0, right)

    def state(self) -> dict[str, Tensor]:
        """Everything as copied tensors, by name."""
        return {"rows": self.rows.clone(), "keys": self.keys.clone()}

    @classmethod
    def from_state(cls, state: dict[str, Tensor], device: torch.device | str = "cpu") -> Reservoir:
        """The reservoir whose ``state()`` this is."""
        capacity, features = state["rows"].shape
        new = cls(features, state["rows"].dtype, rows=capacity, device=device)
        new.rows, new.keys = state["rows"].to(device), state["keys"].to(device)
        return new
