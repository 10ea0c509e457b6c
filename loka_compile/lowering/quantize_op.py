"""``loka::quantize_fp8``: the quantisers as one operator, for tensors that lie in memory.

Where the operand has a producer in the graph, the plain ops of :mod:`loka_compile.lowering.quantize` are better:
Inductor fuses them into it. A weight or a saved activation has none. For these the operator makes x, x.T or both in
as few passes as possible (:mod:`loka_compile.kernels.quantize`); on a CPU it is the plain ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka_compile.gemm import Scaling
from loka_compile.lowering.ahead import on_cuda
from loka_compile.lowering.quantize import BLOCK, Quantized, packed, quantize

__all__ = ["quantize_both", "quantize_fp8"]


def quantize_both(
    x: Tensor, scaling: Scaling, *, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Quantized, Quantized]:
    """The operands x and x.T of x [M, N], read once (rowwise, tensorwise: twice).

    Equal to ``quantize(x, scaling)`` and ``quantize(x, scaling, transpose=True)``; scales of 1x128 blocks have their
    rows adjacent.
    """
    q, scale, qt, scale_t = quantize_fp8(x, scaling.value, dtype, True, True)
    return Quantized(q, scale), Quantized(qt, scale_t)


def launch_quantize_fp8(
    x: Tensor, scaling: str, dtype: torch.dtype, with_q: bool, with_qt: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(q, scale, qt, scale_t)``; see :func:`loka_compile.kernels.quantize.quantize`."""
    from loka_compile.kernels.quantize import quantize as launch

    if x.numel() == 0:
        return quantize_fp8_ref(x, scaling, dtype, with_q, with_qt)
    return launch(x, scaling, dtype, with_q=with_q, with_qt=with_qt)


quantize_fp8 = torch.library.custom_op("loka::quantize_fp8", launch_quantize_fp8, mutates_args=(), device_types="cuda")
on_cuda("loka::quantize_fp8", launch_quantize_fp8)


@quantize_fp8.register_fake
def _(
    x: Tensor, scaling: str, dtype: torch.dtype, with_q: bool, with_qt: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, n = x.shape

    def scale(rows: int, contraction: int, wanted: bool) -> Tensor:
        if not wanted:
            return x.new_empty((0,), dtype=torch.float32)
        k = (contraction + BLOCK - 1) // BLOCK
        shapes = {
            "tensorwise": (), "rowwise": (rows, 1), "1x128": (k, rows), "128x128": ((rows + BLOCK - 1) // BLOCK, k)
        }  # fmt: skip
        empty = x.new_empty(shapes[scaling], dtype=torch.float32)
        return empty.t() if scaling == "1x128" else empty

    q = x.new_empty((m, n) if with_q else (0,), dtype=dtype)
    qt = x.new_empty((n, m) if with_qt else (0,), dtype=dtype)
    return q, scale(m, n, with_q), qt, scale(n, m, with_qt)


@quantize_fp8.register_kernel("cpu")
def quantize_fp8_ref(
    x: Tensor, scaling: str, dtype: torch.dtype, with_q: bool, with_qt: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The op's meaning: the plain ops, once for each operand."""
    made: list[Tensor] = []
    for transpose, wanted in ((False, with_q), (True, with_qt)):
        if wanted:
            data, scale = quantize(x, Scaling(scaling), transpose=transpose, dtype=dtype)
            made += [data, packed(scale.t()).t() if scaling == "1x128" else scale]
        else:
            made += [x.new_empty((0,), dtype=dtype), x.new_empty((0,), dtype=torch.float32)]
    q, scale, qt, scale_t = made
    return q, scale, qt, scale_t
