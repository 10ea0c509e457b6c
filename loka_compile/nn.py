"""The Mods as ordinary modules, for models that are written with them from the start and for ``apply_mods``."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from loka_compile._compat.inductor_decomposition import register
from loka_compile.ops import block_norm

register()


class BlockNorm(nn.Module):
    """RMS-normalises each block of features on its own; no parameters (paper section III-B.2).

    Args:
        block_size: features that are normalised together.
        eps: added to the mean square; None is the machine epsilon of the dtype it is computed in (fp32 for bf16).

    Shape:
        x [..., N] -> [..., N], same dtype (fp32 under CUDA autocast, like ``nn.LayerNorm``). A last block shorter than
        ``block_size`` is normalised over its own width.
    """

    def __init__(self, block_size: int = 256, eps: float | None = 1e-5) -> None:
        super().__init__()
        self.block_size, self.eps = block_size, eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., N]."""
        return block_norm(x, self.block_size, self.eps)

    def extra_repr(self) -> str:
        """Arguments for ``repr``."""
        return f"block_size={self.block_size}, eps={self.eps}"


class HardSwish(nn.Module):
    """``x * relu6(x + 3) / 6``, elementwise (paper section III-B.3)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply to x of any shape."""
        return F.hardswish(x)
