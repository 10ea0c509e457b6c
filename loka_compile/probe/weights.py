"""The distribution of a weight: matrix-normal ``W ~ MN(M, U, V)``, ``cov(vec W) = V (x) U`` (paper section III-A.1).

One update with a weight W [rows, columns], ``Wc = W - M``, is the paper's flip-flop step:

    L_V L_V^T = V + eps I    W~ = Wc L_V^-T    U' = W~ W~^T / columns
    L_U L_U^T = U + eps I    W^ = L_U^-1 Wc    V' = W^^T W^ / rows
    U'' = m U + (1-m) U'     V'' = m V + (1-m) V'
    U = (U'' + U''^T)/2 + eps I                V likewise
    s = trace(U)/rows        U = U/s           V = s V

with ``eps = 1e-6 trace/size`` of the matrix in question. The paper leaves open what M and the first U and V are. Here
M is the moving average of W with the same momentum, so U and V describe how the weight moves in training around where
it is; before the weight first moves, U is I and V is nothing but a floor. A weight too large to keep a copy of
(``MEAN_LIMIT`` elements) has ``M = row means + column means - total mean``: U and V then describe the weight itself.
A side longer than ``full_limit`` is block-diagonal.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from loka_compile.errors import ProbeError
from loka_compile.probe.numerics import grown_exponent, plain_math, power_of_two, product_dtype, tensor_bytes
from loka_compile.probe.structured import BLOCK, FULL_LIMIT, JITTER

#: Elements up to which the mean is kept for every element of the weight.
MEAN_LIMIT = 1 << 24
#: The least eps, for a side of which nothing is known yet; weights are scaled to about 1.
_TINY = 1e-20
MOMENTUM = 0.95


class Side:
    """The covariance of one side, U or V: one full matrix, or diagonal blocks (the last one padded with zeros)."""

    def __init__(self, size: int, full_limit: int, dtype: torch.dtype, device: torch.device) -> None:
        """Start from the identity."""
        self.size = size
        block = size if size <= full_limit else min(BLOCK, size)
        count = -(-size // block)
        ones = torch.ones(size, dtype=dtype, device=device)
        self.inside = functional.pad(ones, (0, count * block - size)).view(count, block)
        self.blocks = torch.diag_embed(self.inside)

    def in_blocks(self, x: Tensor) -> Tensor:
        """[size, other] as [blocks, b, other], padded with zeros."""
        count, block = self.inside.shape
        return functional.pad(x, (0, 0, 0, count * block - self.size)).view(count, block, -1)

    def from_blocks(self, x: Tensor) -> Tensor:
        """[blocks, b, other] as [size, other]."""
        return x.reshape(-1, x.shape[-1])[: self.size]

    def mean_variance(self) -> Tensor:
        """trace/size."""
        return (self.blocks.diagonal(dim1=1, dim2=2) * self.inside).sum() / self.size

    def jitter(self) -> Tensor:
        """The paper's eps."""
        return (JITTER * self.mean_variance()).clamp(min=_TINY)

    def cholesky(self, dtype: torch.dtype) -> Tensor:
        """L [blocks, b, b] with L L^T = blocks + eps I; the padding is the identity."""
        eps = self.jitter().to(dtype)
        for _ in range(8):
            diagonal = torch.where(self.inside > 0, eps, 1.0)
            lower, info = torch.linalg.cholesky_ex(self.blocks.to(dtype) + torch.diag_embed(diagonal))
            if not bool(info.any()):
                return lower
            eps, dtype = eps * 10, torch.float64
        raise ProbeError("a weight's covariance is not positive definite: it is damaged")

    def move(self, new: Tensor, momentum: float) -> None:
        """The exponential moving average, symmetrised and regularised."""
        mixed = momentum * self.blocks + (1 - momentum) * new.to(self.blocks.dtype)
        self.blocks = (mixed + mixed.mT) / 2
        self.blocks = self.blocks + torch.diag_embed(self.jitter() * self.inside)

    def dense(self) -> Tensor:
        """[size, size] in fp64."""
        return torch.block_diag(*self.blocks.double())[: self.size, : self.size]


class WeightTracker:
    """Online matrix-normal model of a weight [rows, columns] = [out_features, in_features].

    Args:
        rows: N.
        columns: K.
        momentum: m of the moving averages, 0.9 to 0.99.
        dtype: torch.float32, or torch.float64: U and V to 1e-10 of what the equations give.
        full_limit: the longest side whose covariance is kept in full.
        device: where the statistics live; the weight must be there too.

    An update waits for the device (it has to know whether a factorisation succeeded), so the probe runs it beside the
    training.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        *,
        momentum: float = MOMENTUM,
        dtype: torch.dtype = torch.float32,
        full_limit: int = FULL_LIMIT,
        device: torch.device | str = "cpu",
    ) -> None:
        """Start with no weight seen."""
        if dtype not in (torch.float32, torch.float64):
            raise ProbeError(f"statistics are kept in float32 or float64, not {dtype}")
        if not 0.0 < momentum < 1.0:
            raise ProbeError(f"momentum is {momentum}; it must lie between 0 and 1, the paper uses 0.9 to 0.99")
        self.rows, self.columns, self.momentum, self.full_limit = rows, columns, momentum, full_limit
        self.dtype, device = dtype, torch.device(device)
        with plain_math(device):
            self.u, self.v = (Side(size, full_limit, dtype, device) for size in (rows, columns))
            self.v.blocks.mul_(_TINY)
            self.elementwise = rows * columns <= MEAN_LIMIT
            #: M itself, or the means of its rows [rows, 1] beside those of its columns [1, columns].
            self.row_mean = torch.zeros(rows, columns if self.elementwise else 1, dtype=dtype, device=device)
            self.column_mean = None if self.elementwise else torch.zeros(1, columns, dtype=dtype, device=device)
            self.amax = torch.zeros((), device=device)
            self.exponent = torch.zeros((), dtype=torch.int32, device=device)
        self.updates = 0
        self.skipped = 0
        self.moved = False

    @property
    def device(self) -> torch.device:
        """Where the statistics live."""
        return self.amax.device

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        sides = tensor_bytes(self.u.blocks, self.u.inside, self.v.blocks, self.v.inside)
        return sides + tensor_bytes(self.row_mean, self.column_mean, self.amax, self.exponent)

    def update(self, weight: Tensor) -> bool:
        """Take in the weight as it is now. False (and counted) if it holds an Inf or a NaN."""
        if weight.shape != (self.rows, self.columns):
            raise ProbeError(f"a weight of {tuple(weight.shape)} was given to statistics of {self.rows, self.columns}")
        with plain_math(self.device):
            weight = weight.detach().to(self.dtype)
            if not bool(torch.isfinite(weight).all()):
                self.skipped += 1
                return False
            scaled = weight * self._scale_for(weight.abs().amax().float())
            centred = scaled - self._scaled_mean() if self.updates else torch.zeros_like(scaled)
            self._move_mean(scaled)
            if not self.elementwise and not self.updates:
                centred = scaled - self._scaled_mean()
            self.updates += 1
            if not self.moved:
                spread = centred.square().mean()
                self.moved = bool(spread > 0)
                self.v.blocks = torch.diag_embed(self.v.inside * spread.clamp(min=_TINY))
            if self.moved:
                self._flip_flop(centred)
            return True

    def _scale_for(self, amax: Tensor) -> Tensor:
        amax = torch.maximum(self.amax, amax)
        exponent = grown_exponent(self.exponent, self.amax, amax)
        ratio = power_of_two((self.exponent - exponent).clamp(-126, 126), self.dtype)
        if self.updates and bool(ratio != 1):
            self.row_mean *= ratio
            self.v.blocks *= ratio * ratio
            if self.column_mean is not None:
                self.column_mean *= ratio
        self.amax, self.exponent = amax, exponent
        return power_of_two(-exponent, self.dtype)

    def _scaled_mean(self) -> Tensor:
        if self.column_mean is None:
            return self.row_mean
        return self.row_mean + self.column_mean - self.row_mean.mean()

    def _move_mean(self, scaled: Tensor) -> None:
        part = 1 - self.momentum if self.updates else 1.0
        rows = scaled if self.column_mean is None else scaled.mean(1, keepdim=True)
        self.row_mean = torch.lerp(self.row_mean, rows, part)
        if self.column_mean is not None:
            self.column_mean = torch.lerp(self.column_mean, scaled.mean(0, keepdim=True), part)

    def _flip_flop(self, centred: Tensor) -> None:
        dtype = product_dtype(centred)
        centred = centred.to(dtype)
        u, v = self.u, self.v
        left = torch.linalg.solve_triangular(v.cholesky(dtype).to(dtype), v.in_blocks(centred.mT), upper=False)
        whitened = u.in_blocks(v.from_blocks(left).mT)
        new_u = whitened @ whitened.mT / self.columns
        right = torch.linalg.solve_triangular(u.cholesky(dtype).to(dtype), u.in_blocks(centred), upper=False)
        whitened = v.in_blocks(u.from_blocks(right).mT)
        new_v = whitened @ whitened.mT / self.rows
        u.move(new_u, self.momentum)
        v.move(new_v, self.momentum)
        scale = u.mean_variance()
        u.blocks = u.blocks / scale
        v.blocks = v.blocks * scale

    def merge(self, other: WeightTracker) -> None:
        """Average with what another rank has seen, weighted by updates. Equal replicas stay as they are."""
        mine = (self.rows, self.columns, self.full_limit, self.dtype)
        if (other.rows, other.columns, other.full_limit, other.dtype) != mine:
            raise ProbeError(f"weights of {self.rows, self.columns} and {other.rows, other.columns} differ in kind")
        self.skipped += other.skipped
        if not other.updates:
            return
        if not self.updates:
            skipped, self.__dict__ = self.skipped, other.clone(self.device).__dict__
            self.skipped = skipped
            return
        other = other.clone(self.device)
        with plain_math(self.device):
            part = other.updates / (self.updates + other.updates)
            self._scale_for(other.amax)
            ratio = power_of_two((other.exponent - self.exponent).clamp(-126, 126), self.dtype)
            self.row_mean = torch.lerp(self.row_mean, other.row_mean * ratio, part)
            if self.column_mean is not None and other.column_mean is not None:
                self.column_mean = torch.lerp(self.column_mean, other.column_mean * ratio, part)
            self.u.blocks = torch.lerp(self.u.blocks, other.u.blocks, part)
            self.v.blocks = torch.lerp(self.v.blocks, other.v.blocks * ratio * ratio, part)
            self.updates, self.moved = self.updates + other.updates, self.moved or other.moved

    def clone(self, device: torch.device | str | None = None) -> WeightTracker:
        """A copy, on another device if asked."""
        return WeightTracker.from_state(self.state(), device or self.device)

    def state(self) -> dict[str, Tensor]:
        """Everything as copied tensors, by name."""
        numbers = [self.updates, self.skipped, int(self.moved), self.full_limit, self.rows, self.columns]
        out = {
            "counts": torch.tensor(numbers, dtype=torch.int64),
            "momentum": torch.tensor(self.momentum, dtype=torch.float64),
            "u": self.u.blocks,
            "v": self.v.blocks,
            "row_mean": self.row_mean,
            "amax": self.amax,
            "exponent": self.exponent,
        }
        if self.column_mean is not None:
            out["column_mean"] = self.column_mean
        return {name: tensor.detach().clone() for name, tensor in out.items()}

    @classmethod
    def from_state(cls, state: dict[str, Tensor], device: torch.device | str = "cpu") -> WeightTracker:
        """The tracker whose ``state()`` this is."""
        updates, skipped, moved, limit, rows, columns = state["counts"].tolist()
        momentum, dtype = float(state["momentum"]), state["u"].dtype
        new = cls(rows, columns, momentum=momentum, dtype=dtype, full_limit=limit, device=device)
        if (new.u.blocks.shape, new.v.blocks.shape) != (state["u"].shape, state["v"].shape):
            raise ProbeError(f"the covariances stored for a weight of {rows, columns} are not of its size")
        new.updates, new.skipped, new.moved = updates, skipped, bool(moved)
        new.u.blocks, new.v.blocks = state["u"].to(device), state["v"].to(device)
        new.row_mean, new.amax, new.exponent = (state[k].to(device) for k in ("row_mean", "amax", "exponent"))
        new.column_mean = state["column_mean"].to(device) if "column_mean" in state else None
        return new

    def mean(self) -> Tensor:
        """M [rows, columns] in fp64."""
        return self._scaled_mean().double() * power_of_two(self.exponent, torch.float64)

    def row_covariance(self) -> Tensor:
        """U [rows, rows] in fp64, of trace ``rows``."""
        return self.u.dense()

    def column_covariance(self) -> Tensor:
        """V [columns, columns] in fp64."""
        return self.v.dense() * power_of_two(self.exponent, torch.float64) ** 2

    def draw(self, generator: torch.Generator | None = None) -> Tensor:
        """A weight ``M + L_U Z L_V^T`` [rows, columns] in fp32, within its range."""
        with plain_math(self.device):
            z = torch.randn(self.rows, self.columns, dtype=self.dtype, generator=generator, device=self.device)
            z = self.u.from_blocks(self.u.cholesky(z.dtype).to(z.dtype) @ self.u.in_blocks(z))
            z = self.v.from_blocks(self.v.cholesky(z.dtype).to(z.dtype) @ self.v.in_blocks(z.mT)).mT
            largest = torch.finfo(torch.float32).max * power_of_two(-self.exponent, self.dtype)
            drawn = (self._scaled_mean() + z).clamp(-largest, largest) * power_of_two(self.exponent, self.dtype)
            return drawn.float()
