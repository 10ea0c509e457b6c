"""Mean and covariance over the features of what flows into a linear layer, and of its output gradients.

A batched Welford update (Chan, Golub, LeVeque 1983; the paper's section III-A.1): with the batch's mean ``b`` and
scatter ``S_b`` and the history ``(n, mean, S)``,

    delta = b - mean,  mean += delta B/(n+B),  S += S_b + delta^T delta nB/(n+B),  n += B

Rows with an Inf or a NaN are masked and counted, on the device. Nothing here waits for the device, except the sketch
of the wide form. The mean is kept in fp64, because it costs nothing; the scatter in fp32 or fp64, of features divided
by a power of two each, so that values near 3e38 and near 1e-30 have squares.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka_compile.errors import ProbeError
from loka_compile.probe.numerics import grown_exponent, plain_math, power_of_two, tensor_bytes
from loka_compile.probe.structured import BLOCK, FULL_LIMIT, RANK, Factor, Scatter

FORMS = ("full", "blocks", "diagonal")


class ActivationTracker:
    """Online mean and covariance of rows of ``features`` numbers.

    Args:
        features: K, the length of a row.
        dtype: torch.float32, or torch.float64 for statistics to 1e-10.
        form: "full", "blocks" or "diagonal" (see ``structured``); None chooses by ``full_limit``.
        full_limit: the widest K whose K x K covariance is kept in full.
        device: where the statistics live; rows must be there too.

    Raises:
        ProbeError: for a row width that does not fit, or an unknown form.
    """

    def __init__(
        self,
        features: int,
        *,
        dtype: torch.dtype = torch.float32,
        form: str | None = None,
        full_limit: int = FULL_LIMIT,
        device: torch.device | str = "cpu",
    ) -> None:
        """Start with no rows."""
        form = form or ("full" if features <= full_limit else "blocks")
        if form not in FORMS:
            raise ProbeError(f"form is {form!r}; legal are: {', '.join(FORMS)}")
        if dtype not in (torch.float32, torch.float64):
            raise ProbeError(f"statistics are kept in float32 or float64, not {dtype}")
        self.features, self.form, self.dtype = features, form, dtype
        device = torch.device(device)
        block = {"full": features, "blocks": min(BLOCK, features), "diagonal": 1}[form]
        rank = min(RANK, features) if form == "blocks" else 0
        with plain_math(device):
            self.scatter = Scatter(features, block, rank, dtype, device)
            self.count = torch.zeros((), dtype=torch.int64, device=device)
            self.skipped = torch.zeros((), dtype=torch.int64, device=device)
            self.running_mean = torch.zeros(features, dtype=torch.float64, device=device)
            self.amax = torch.zeros(features, dtype=dtype, device=device)
            self.exponent = torch.zeros(features, dtype=torch.int32, device=device)

    @property
    def device(self) -> torch.device:
        """Where the statistics live."""
        return self.count.device

    @property
    def n(self) -> int:
        """Rows counted (waits for the device)."""
        return int(self.count)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.scatter.nbytes + tensor_bytes(self.count, self.skipped, self.running_mean, self.amax, self.exponent)

    def update(self, x: Tensor) -> Tensor:
        """Take in rows x [..., features] of any floating-point dtype. Returns the mask [rows] of the finite ones."""
        if x.shape[-1] != self.features:
            raise ProbeError(f"rows of {x.shape[-1]} features were given to statistics of {self.features}")
        with plain_math(self.device):
            rows = x.detach().reshape(-1, self.features).to(self.dtype)
            valid = torch.isfinite(rows).all(1)
            if not len(rows):
                return valid
            rows = torch.where(valid[:, None], rows, 0)
            amax = torch.maximum(self.amax, rows.abs().amax(0))
            self._rescale(grown_exponent(self.exponent, self.amax, amax), amax)
            size = valid.sum()
            self.skipped += len(rows) - size

            scaled = rows * power_of_two(-self.exponent, self.dtype)
            center = scaled.sum(0, dtype=torch.float64) / size.clamp(min=1)
            scaled = torch.where(valid[:, None], scaled - center.to(self.dtype), 0)
            # The rounded centre was off by up to half a unit in the last place: large beside a small deviation.
            rest = (scaled.sum(0) / size.clamp(min=1)).to(self.dtype)
            scaled = torch.where(valid[:, None], scaled - rest, 0)
            self._combine(size, center * power_of_two(self.exponent, torch.float64), scaled)
            return valid

    def _rescale(self, exponent: Tensor, amax: Tensor) -> None:
        """Express what is stored in units of the new exponents."""
        ratio = power_of_two((self.exponent - exponent).clamp(-126, 126), self.dtype)
        if self.device.type != "cpu" or not torch.equal(exponent, self.exponent):  # elsewhere asking costs more
            self.scatter.rescale(ratio)
        self.exponent, self.amax = exponent, amax

    def _correction(self, size: Tensor, mean: Tensor) -> Tensor:
        """sqrt(nB/(n+B)) delta in scaled units, moving count and mean on."""
        total = self.count + size
        delta = torch.where(size > 0, mean - self.running_mean, 0)
        weight = (self.count.double() * size / total.clamp(min=1)).sqrt()
        self.running_mean += delta * (size / total.clamp(min=1).double())
        self.count = total
        return (delta * power_of_two(-self.exponent, torch.float64) * weight).to(self.dtype)

    def _combine(self, size: Tensor, mean: Tensor, centred: Tensor) -> None:
        self.scatter.add(torch.cat([centred, self._correction(size, mean)[None]]))

    def merge(self, other: ActivationTracker) -> None:
        """Add the rows that ``other`` has seen, as if they had been seen here. ``other`` is left as it is."""
        if (other.features, other.form, other.dtype) != (self.features, self.form, self.dtype):
            raise ProbeError(
                f"statistics differ in kind: {self.features} {self.form} {self.dtype} "
                f"and {other.features} {other.form} {other.dtype}"
            )
        other = other.clone(self.device)
        with plain_math(self.device):
            exponent = torch.where(self.amax > 0, self.exponent, other.exponent)
            exponent = torch.where(
                (self.amax > 0) & (other.amax > 0), torch.maximum(exponent, other.exponent), exponent
            )
            self._rescale(exponent, torch.maximum(self.amax, other.amax))
            other._rescale(exponent, other.amax)
            self.skipped += other.skipped
            self.scatter.merge(other.scatter, self._correction(other.count, other.running_mean))

    def mean(self) -> Tensor:
        """The mean [features] in fp64."""
        return self.running_mean.clone()

    def variances(self) -> Tensor:
        """The unbiased variances [features] in fp64; zero before the second row."""
        scale = power_of_two(self.exponent, torch.float64)
        return self.scatter.variances(max(self.n - 1, 1)) * scale * scale

    def covariance(self) -> Tensor:
        """The unbiased covariance [features, features] in fp64 as modelled by the form, symmetric, not regularised."""
        scale = power_of_two(self.exponent, torch.float64)
        return self.scatter.covariance(max(self.n - 1, 1)) * scale[:, None] * scale

    def factor(self) -> Factor:
        """The factorised regularised covariance in units of ``units()``."""
        return self.scatter.factor(max(self.n - 1, 1))

    def units(self) -> Tensor:
        """The power of two [features] in fp64 by which each feature of ``factor()`` is to be multiplied.

        A feature that was never anything but zero takes the smallest unit of the others.
        """
        scale = power_of_two(self.exponent, torch.float64)
        alive = self.amax > 0
        smallest = scale[alive].min() if bool(alive.any()) else scale.new_ones(())
        return torch.where(alive, scale, smallest)

    def regularised(self) -> Tensor:
        """The covariance [features, features] in fp64 that samples are drawn from: symmetric, positive definite."""
        units = self.units()
        return self.factor().covariance() * units[:, None] * units

    def clone(self, device: torch.device | str | None = None) -> ActivationTracker:
        """A copy, on another device if asked."""
        return ActivationTracker.from_state(self.state(), device or self.device)

    def state(self) -> dict[str, Tensor]:
        """Everything as copied tensors, by name."""
        out = {
            "count": self.count,
            "skipped": self.skipped,
            "mean": self.running_mean,
            "amax": self.amax,
            "exponent": self.exponent,
            "blocks": self.scatter.blocks,
        }
        if self.scatter.sketch is not None:
            out |= {"sketch": self.scatter.sketch, "shrunk": self.scatter.shrunk}
        return {name: tensor.detach().clone() for name, tensor in out.items()}

    @classmethod
    def from_state(cls, state: dict[str, Tensor], device: torch.device | str = "cpu") -> ActivationTracker:
        """The tracker whose ``state()`` this is."""
        blocks, features = state["blocks"], len(state["mean"])
        form = "blocks" if "sketch" in state else "full" if blocks.shape[1] == features else "diagonal"
        new = cls(features, dtype=blocks.dtype, form=form, device=device)
        if new.scatter.blocks.shape != blocks.shape:
            raise ProbeError(f"blocks of shape {tuple(blocks.shape)} do not fit {features} features")
        new.count, new.skipped = state["count"].to(device), state["skipped"].to(device)
        new.running_mean, new.amax = state["mean"].to(device), state["amax"].to(device)
        new.exponent, new.scatter.blocks = state["exponent"].to(device), blocks.to(device)
        if "sketch" in state:
            new.scatter.sketch, new.scatter.shrunk = state["sketch"].to(device), state["shrunk"].cpu()
        return new
