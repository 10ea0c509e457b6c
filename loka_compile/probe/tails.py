"""What a Gaussian forgets: the largest values, kurtosis and tail quantiles.

``Moments`` is exact and per feature: amax, and central moments up to the fourth in fp64 (Pebay 2008: they merge
exactly). ``TailSketch`` holds quantiles of |x|: Apache DataSketches' REQ sketch (Cormode et al., PODS 2021), whose rank
error shrinks towards the tail, where that of KLL sketches is the same everywhere and t-digests promise none. A sketch
takes some kilobytes, so there are at most 32 of them for a site, each over a group of neighbouring features: one
feature each up to K = 32, multiples of 128 (the blocks that FP8 recipes scale) from K = 4096 on. The sketch compacts by
coin flips of its own: two runs agree within its error, not in every bit.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loka_compile.errors import ProbeError
from loka_compile.probe.numerics import plain_math, tensor_bytes
from loka_compile.probe.structured import BLOCK

#: Sketches per site.
GROUPS = 32
#: Accuracy parameter of the REQ sketch (relative rank error of about 1 % towards the tail).
ACCURACY = 12
#: Elements that are held in fp64 at a time.
_CHUNK = 1 << 22


class Moments:
    """Count, amax, mean and central sums of powers 2 to 4 of every feature."""

    def __init__(self, features: int, device: torch.device | str = "cpu") -> None:
        """Start with no rows."""
        self.features = features
        device = torch.device(device)
        with plain_math(device):
            self.count = torch.zeros((), dtype=torch.int64, device=device)
            self.amax = torch.zeros(features, device=device)
            #: mean, M2, M3, M4.
            self.sums = torch.zeros(4, features, dtype=torch.float64, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return tensor_bytes(self.count, self.amax, self.sums)

    def update(self, rows: Tensor, valid: Tensor) -> None:
        """Take in the rows [rows, features] whose ``valid`` is set. Does not wait for the device."""
        if not len(rows):
            return
        with plain_math(self.amax.device):
            size = valid.sum()
            width = max(1, _CHUNK // len(rows))
            parts = [self._of_batch(columns, valid, size) for columns in torch.split(rows.detach(), width, dim=1)]
            amax, sums = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts], dim=1)
            self._combine(size, amax, sums)

    @staticmethod
    def _of_batch(rows: Tensor, valid: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        mask = valid[:, None]
        wide = torch.where(mask, rows.double(), 0)
        mean = wide.sum(0) / size.clamp(min=1)
        distance = torch.where(mask, wide - mean, 0)
        square = distance * distance
        powers = torch.stack([mean, square.sum(0), (square * distance).sum(0), (square * square).sum(0)])
        return wide.abs().amax(0).float(), powers

    def merge(self, other: Moments) -> None:
        """Add the rows that ``other`` has seen."""
        if other.features != self.features:
            raise ProbeError(f"moments of {self.features} and of {other.features} features do not merge")
        device = self.amax.device
        with plain_math(device):
            self._combine(other.count.to(device), other.amax.to(device), other.sums.to(device))

    def _combine(self, size: Tensor, amax: Tensor, sums: Tensor) -> None:
        na, nb = self.count.double(), size.double()
        n = (na + nb).clamp(min=1)
        a, b = self.sums, sums
        d = torch.where((size > 0) & (self.count > 0), b[0] - a[0], 0)
        step = torch.where(size > 0, b[0] - a[0], 0) * (nb / n)
        m2 = a[1] + b[1] + d**2 * (na * nb / n)
        m3 = a[2] + b[2] + d**3 * (na * nb * (na - nb) / n**2) + 3 * d * (na * b[1] - nb * a[1]) / n
        m4 = (
            a[3]
            + b[3]
            + d**4 * (na * nb * (na**2 - na * nb + nb**2) / n**3)
            + 6 * d**2 * (na**2 * b[1] + nb**2 * a[1]) / n**2
            + 4 * d * (na * b[2] - nb * a[2]) / n
        )
        self.sums = torch.stack([a[0] + step, m2, m3, m4])
        self.count = self.count + size
        self.amax = torch.maximum(self.amax, amax)

    def mean(self) -> Tensor:
        """[features] in fp64."""
        return self.sums[0].clone()

    def kurtosis(self) -> Tensor:
        """Pearson's kurtosis [features] in fp64: 3 for a Gaussian, and for features that never varied."""
        _, m2, _, m4 = self.sums
        # In units of the variance, so that no intermediate leaves fp64's range.
        variance = m2 / self.count.clamp(min=1)
        out = m4 / self.count.clamp(min=1) / variance / variance
        return torch.where(variance > 0, out, 3.0)

    def skewness(self) -> Tensor:
        """[features] in fp64; 0 for features that never varied."""
        _, m2, m3, _ = self.sums
        variance = m2 / self.count.clamp(min=1)
        out = m3 / self.count.clamp(min=1) / variance / variance.sqrt()
        return torch.where(variance > 0, out, 0.0)

    def state(self) -> dict[str, Tensor]:
        """Everything as copied tensors, by name."""
        return {"count": self.count.clone(), "amax": self.amax.clone(), "sums": self.sums.clone()}

    @classmethod
    def from_state(cls, state: dict[str, Tensor], device: torch.device | str = "cpu") -> Moments:
        """The moments whose ``state()`` this is."""
        new = cls(len(state["amax"]), device)
        new.count, new.amax, new.sums = (state[name].to(device) for name in ("count", "amax", "sums"))
        return new


def sketches_available() -> bool:
    """Whether the datasketches package is installed (there is none for Python 3.14 yet)."""
    return importlib.util.find_spec("datasketches") is not None


class TailSketch:
    """Quantiles of |x| for groups of neighbouring features, on the CPU."""

    def __init__(self, features: int) -> None:
        """Start with no rows.

        Raises:
            ProbeError: the package datasketches is not installed.
        """
        if not sketches_available():
            raise ProbeError("tail quantiles need the package datasketches: pip install datasketches")
        datasketches: Any = importlib.import_module("datasketches")
        self.features = features
        self.group = -(-features // GROUPS)
        if self.group > BLOCK:
            self.group = -(-self.group // BLOCK) * BLOCK
        self._kind = datasketches.req_floats_sketch
        self.sketches: list[Any] = [self._new() for _ in range(-(-features // self.group))]

    def _new(self) -> Any:
        return self._kind(ACCURACY, True)  # True: accurate for large values

    @property
    def nbytes(self) -> int:
        """Bytes of the serialised sketches."""
        return sum(len(s.serialize()) for s in self.sketches)

    def update(self, rows: Tensor) -> None:
        """Take in finite rows [rows, features] on the CPU."""
        magnitudes = rows.detach().abs().float().numpy()
        for index, sketch in enumerate(self.sketches):
            sketch.update(np.ascontiguousarray(magnitudes[:, index * self.group : (index + 1) * self.group]).ravel())
            time.sleep(0)  # lets the thread that trains have the interpreter, which a sketch holds for some 0.1 ms

    def merge(self, other: TailSketch) -> None:
        """Add what ``other`` has seen."""
        if other.features != self.features:
            raise ProbeError(f"sketches of {self.features} and of {other.features} features do not merge")
        for mine, others in zip(self.sketches, other.sketches, strict=True):
            mine.merge(others)

    def quantile(self, q: float) -> np.ndarray:
        """The q-quantile of |x| for every group [groups]; NaN before the first row."""
        return np.array([s.get_quantile(q) if s.n else np.nan for s in self.sketches])

    def feature_quantile(self, q: float) -> np.ndarray:
        """The same for every feature [features]: that of the feature's group."""
        return np.repeat(self.quantile(q), self.group)[: self.features]

    def site_quantile(self, q: float) -> float:
        """The q-quantile of |x| over all features; NaN before the first row."""
        whole = self._new()
        for sketch in self.sketches:
            whole.merge(sketch)
        return float(whole.get_quantile(q)) if whole.n else float("nan")

    def state(self) -> dict[str, Tensor]:
        """Everything as tensors, by name."""
        parts = [s.serialize() for s in self.sketches]
        return {
            "features": torch.tensor(self.features),
            "sizes": torch.tensor([len(p) for p in parts]),
            "bytes": torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8),
        }

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> TailSketch:
        """The sketch whose ``state()`` this is."""
        new = cls(int(state["features"]))
        data, start = state["bytes"].cpu().numpy().tobytes(), 0
        for index, size in enumerate(state["sizes"].tolist()):
            new.sketches[index] = new._kind.deserialize(data[start : start + size])
            start += size
        return new
