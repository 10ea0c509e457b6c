"""The scatter matrix of a feature distribution, in full or, for wide layers, in a form of bounded size.

    form       kept exactly                 kept approximately              fp32 bytes at K = 123,200
    full       all of it                                                    61 GB (not done above ``full_limit``)
    blocks     diagonal blocks of 128       the rest, as a rank-64 sketch   63 MB + 32 MB
    diagonal   the variances                                                0.5 MB

The sketch is frequent directions (Liberty, KDD 2013; Ghashami et al., SICOMP 2016): it never overestimates, so what
the blocks hold beyond it is positive semi-definite, and the model ``sketch + block-diagonal rest`` has the exact
diagonal blocks and, across blocks, an error of at most twice ``shrunk`` in spectral norm. Blocks of 128 because no FP8
recipe scales anything finer along the features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from loka_compile.errors import ProbeError
from loka_compile.probe.numerics import product_dtype, tensor_bytes

FULL_LIMIT = 4096
BLOCK = 128
RANK = 64
#: Standard deviation, as part of its magnitude, that a feature without any variance is given.
FLOOR = 1e-6
#: Relative jitter of the regularisation (the paper's epsilon); grown tenfold until the Cholesky factorisation succeeds.
JITTER = 1e-6
_SKETCH_ROWS = 256
_COLUMNS = 16384
_DENSE_LIMIT = 16384


@dataclass(frozen=True)
class Factor:
    """A square root of a regularised covariance: ``cov = blockdiag(L L^T) + low_rank^T low_rank``, in fp64.

    Attributes:
        blocks: lower triangular factors [blocks, b, b] (the last one padded).
        low_rank: [rank, features] or None.
        jitter: the relative jitter that was needed.
    """

    features: int
    blocks: Tensor
    low_rank: Tensor | None
    jitter: float

    def draw(self, rows: int, generator: torch.Generator | None = None) -> Tensor:
        """Rows [rows, features] of a centred Gaussian with this covariance."""
        count, width, _ = self.blocks.shape
        device, dtype = self.blocks.device, self.blocks.dtype
        z = torch.randn(count, rows, width, generator=generator, device=device, dtype=dtype)
        out = torch.bmm(z, self.blocks.mT).permute(1, 0, 2).reshape(rows, -1)[:, : self.features]
        if self.low_rank is not None:
            rank = self.low_rank.shape[0]
            z = torch.randn(rows, rank, generator=generator, device=device, dtype=dtype)
            out = out + z @ self.low_rank
        return out

    def covariance(self) -> Tensor:
        """The regularised covariance [features, features] itself."""
        _refuse_dense(self.features)
        dense = _block_diag(self.blocks @ self.blocks.mT)[: self.features, : self.features]
        if self.low_rank is not None:
            dense = dense + self.low_rank.mT @ self.low_rank
        return (dense + dense.mT) / 2


class Scatter:
    """The unnormalised scatter ``sum (x - mean)^T (x - mean)``: diagonal blocks, and a sketch of all of it.

    ``block == features`` is the full matrix, ``block == 1`` the diagonal.
    """

    def __init__(self, features: int, block: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        """Start with no rows; ``rank`` 0 keeps no sketch."""
        self.features = features
        count = -(-features // block)
        self.blocks = torch.zeros(count, block, block, dtype=dtype, device=device)
        self.sketch = torch.zeros(rank, features, dtype=dtype, device=device) if rank else None
        #: Bound of the sketch's error in spectral norm, in units of the scatter.
        self.shrunk = torch.zeros((), dtype=torch.float64)

    @property
    def block(self) -> int:
        """Features in one diagonal block."""
        return self.blocks.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return tensor_bytes(self.blocks, self.sketch, self.shrunk)

    def in_blocks(self, x: Tensor) -> Tensor:
        """[rows, features] as [blocks, rows, b], padded with zeros."""
        count, width, _ = self.blocks.shape
        padded = functional.pad(x, (0, count * width - self.features))
        return padded.view(x.shape[0], count, width).permute(1, 0, 2)

    def rescale(self, ratio: Tensor) -> None:
        """Multiply feature i of all data seen so far by ratio[i]."""
        parts = self.in_blocks(ratio[None])
        self.blocks.mul_(parts.mT).mul_(parts)
        if self.sketch is not None:
            self.sketch.mul_(ratio)

    def add(self, rows: Tensor) -> None:
        """Add the outer products of centred rows [rows, features]."""
        self._add_to_blocks(rows)
        if self.sketch is not None:
            for some in torch.split(rows, _SKETCH_ROWS):
                self._shrink(some)

    def merge(self, other: Scatter, correction: Tensor) -> None:
        """Add another scatter in the same units, and the row that accounts for the two means being apart."""
        self.blocks += other.blocks
        self._add_to_blocks(correction[None])
        if self.sketch is not None and other.sketch is not None:
            self._shrink(torch.cat([other.sketch, correction[None]]))
            self.shrunk += other.shrunk

    def _add_to_blocks(self, rows: Tensor) -> None:
        if self.block == 1:
            self.blocks += rows.square().sum(0)[:, None, None]
            return
        parts = self.in_blocks(rows.to(product_dtype(rows)))
        if parts.dtype == self.blocks.dtype:
            self.blocks.baddbmm_(parts.mT, parts)
        else:
            self.blocks += torch.bmm(parts.mT, parts).to(self.blocks.dtype)

    def _shrink(self, rows: Tensor) -> None:
        """One step of frequent directions: stack, rotate to principal axes, take the first left-out one off all."""
        assert self.sketch is not None
        stacked = torch.cat([self.sketch, rows])
        gram = torch.zeros(len(stacked), len(stacked), dtype=torch.float64, device=stacked.device)
        for columns in torch.split(stacked, _COLUMNS, dim=1):
            wide = columns.double()
            gram += wide @ wide.mT
        values, vectors = torch.linalg.eigh(gram.cpu())  # a small matrix; on the CPU for its precise eigh
        rank = self.sketch.shape[0]
        values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
        cut = values[rank]
        gain = ((values[:rank] - cut) / values[:rank].clamp(min=torch.finfo(torch.float64).tiny)).clamp(min=0).sqrt()
        rotation = (vectors[:, :rank] * gain).mT.to(stacked)
        self.sketch = (rotation.to(product_dtype(stacked)) @ stacked.to(product_dtype(stacked))).to(stacked.dtype)
        self.shrunk += cut

    def variances(self, degrees: float) -> Tensor:
        """Exact variances [features] in fp64."""
        diagonal = self.blocks.diagonal(dim1=1, dim2=2).reshape(-1)[: self.features]
        return diagonal.double().clamp(min=0) / degrees

    def covariance(self, degrees: float) -> Tensor:
        """The modelled covariance [features, features] in fp64, symmetric; not regularised."""
        _refuse_dense(self.features)
        blocks = self.blocks.double() / degrees
        blocks = (blocks + blocks.mT) / 2
        exact = _block_diag(blocks)[: self.features, : self.features]
        if self.sketch is None:
            return exact
        low = self.sketch.double() / degrees**0.5
        block = torch.arange(self.features, device=low.device) // self.block
        modelled = torch.where(block[:, None] == block, exact, low.mT @ low)
        return (modelled + modelled.mT) / 2

    def factor(self, degrees: float) -> Factor:
        """Regularise and factorise: ``R + jitter I`` where R is the correlation matrix.

        The paper adds ``1e-6 trace/K`` to every variance. Applied to correlations the same epsilon also leaves
        features with a small variance beside very large ones as they are. Features without variance get FLOOR.
        """
        blocks = self.blocks.double() / degrees
        blocks = (blocks + blocks.mT) / 2
        low = None
        variance = blocks.diagonal(dim1=1, dim2=2).clamp(min=0)
        if self.sketch is not None:
            low = self.sketch.double() / degrees**0.5
            parts = self.in_blocks(low)
            blocks = blocks - parts.mT @ parts
        alive = variance > 0
        deviation = torch.where(alive, variance.sqrt(), FLOOR)
        correlation = blocks / (deviation[:, :, None] * deviation[:, None, :])
        correlation.diagonal(dim1=1, dim2=2).copy_(torch.where(alive, correlation.diagonal(dim1=1, dim2=2), 1.0))
        eye = torch.eye(self.block, dtype=torch.float64, device=blocks.device)
        jitter = JITTER
        while jitter <= 1.0:
            lower, info = torch.linalg.cholesky_ex(correlation + jitter * eye)
            if not bool(info.any()):
                return Factor(self.features, deviation[:, :, None] * lower, low, jitter)
            jitter *= 10
        raise ProbeError("the covariance is not positive definite even with a jitter of its own size: it is damaged")


def _block_diag(blocks: Tensor) -> Tensor:
    """[blocks, b, b] as one [blocks * b, blocks * b] matrix."""
    count, width, _ = blocks.shape
    dense = blocks.new_zeros(count, width, count, width)
    dense.diagonal(dim1=0, dim2=2).copy_(blocks.permute(1, 2, 0))
    return dense.view(count * width, count * width)


def _refuse_dense(features: int) -> None:
    if features > _DENSE_LIMIT:
        raise ProbeError(
            f"a dense covariance of {features} features would take {features**2 * 8 / 1e9:.0f} GB; "
            "use variances(), factor() or sample()"
        )
