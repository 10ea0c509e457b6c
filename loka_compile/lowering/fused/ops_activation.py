"""The operator of a GEMM with BlockNorm and an activation that its kernel has to hold in its body.

    swish_norm   out = h * hardsigmoid(BlockNorm(h)): h is read twice, by the norm and by the gate
    hardswish    out = HardSwish(BlockNorm(h)): where the next GEMM wants it in FP8 with scales in 1x128 blocks

with ``h = a @ b * scales + residual``. On CUDA it runs this package's kernel; elsewhere the plain-torch twin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka_compile._compat.inductor_templates import shared_memory
from loka_compile.kernels import reference as ref
from loka_compile.kernels.config import BLOCK
from loka_compile.lowering.ahead import on_cuda
from loka_compile.lowering.fused.configs import config_for, gemm_kernel
from loka_compile.lowering.fused.ops import FP8, LIBRARY, blocks_of

LIBRARY.define(
    "gemm_norm_activation(Tensor a, Tensor b, Tensor? scale_a, Tensor? scale_b, str activation, int block, float eps, "
    "ScalarType out_dtype, ScalarType kept_dtype, bool fast, bool with_out, bool kept, bool quantised, "
    "Tensor? residual=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)

_Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _fake(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, activation: str, block: int, eps: float,
    out_dtype: torch.dtype, kept_dtype: torch.dtype, fast: bool, with_out: bool, kept: bool, quantised: bool,
    residual: Tensor | None = None,
) -> _Results:  # fmt: skip
    """Operands and scales as of ``loka::gemm_block_norm``; what is not asked for comes back empty, [0].

    Returns out [M, N] in out_dtype; for the backward h (swish_norm) or BlockNorm(h) (hardswish) [M, N] in kept_dtype
    and rstd fp32 [M, ceil(N/block)]; out in e4m3 [M, N] and its fp32 scales in 1x128 blocks [N/128, M].
    """
    m, n = a.shape[0], b.shape[1]

    def empty(wanted: bool, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return a.new_empty(size if wanted else (0,), dtype=dtype)

    return (
        empty(with_out, (m, n), out_dtype), empty(kept, (m, n), kept_dtype),
        empty(kept, (m, blocks_of(n, block)), torch.float32), empty(quantised, (m, n), FP8),
        empty(quantised, (n // BLOCK, m), torch.float32),
    )  # fmt: skip


def _any(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, activation: str, block: int, eps: float,
    out_dtype: torch.dtype, kept_dtype: torch.dtype, fast: bool, with_out: bool, kept: bool, quantised: bool,
    residual: Tensor | None = None,
) -> _Results:  # fmt: skip
    out, h, rstd = ref.gemm_norm_activation_ref(a, b, scale_a, scale_b, activation, block, eps, residual)
    empty = [x.new_empty((0,), dtype=dtype) for x, dtype in ((out, FP8), (out, torch.float32))]
    q, scale = ref.quantize_1x128_ref(out) if quantised else empty
    found = (out.to(out_dtype), h.to(kept_dtype), rstd, q, scale)
    wanted = (with_out, kept, kept, True, True)
    made = [x if want else x.new_empty((0,)) for x, want in zip(found, wanted, strict=True)]
    return made[0], made[1], made[2], made[3], made[4]


def _cuda(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, activation: str, block: int, eps: float,
    out_dtype: torch.dtype, kept_dtype: torch.dtype, fast: bool, with_out: bool, kept: bool, quantised: bool,
    residual: Tensor | None = None,
) -> _Results:  # fmt: skip
    from loka_compile.kernels.gemm_block_norm import launch

    out, h, rstd, q, scale = found = _fake(
        a, b, scale_a, scale_b, activation, block, eps, out_dtype, kept_dtype, fast, with_out, kept, quantised, residual
    )
    if not any(t.numel() for t in found):
        return found
    (m, k), n = a.shape, b.shape[1]
    scaling = ref.scaling(scale_a, scale_b, m, n)
    kernel = gemm_kernel(scaling.in_blocks, activation == "swish_norm", quantised)
    # Crowded: the kernel written by hand takes a few registers more than the template.
    config = config_for(kernel, m, n, k, a.element_size(), fast, scaling.kind == 2, crowded=True)
    config = config.fitting(a.element_size(), max(out_dtype.itemsize, kept_dtype.itemsize), shared_memory(a.device))
    launch(
        a, b.t().contiguous(), scale_a, scale_b, out if with_out else None, rstd if kept else None,
        q if quantised else None, block=block, eps=eps, fast=fast, config=config,
        residual=None if residual is None else residual.contiguous(), activation=activation,
        kept=h if kept else None, q_scales=scale if quantised else None,
    )  # fmt: skip
    return found


LIBRARY.impl("gemm_norm_activation", _any, "CPU")
LIBRARY.impl("gemm_norm_activation", _cuda, "CUDA")
on_cuda("loka::gemm_norm_activation", _cuda)
torch.library.register_fake("loka::gemm_norm_activation", _fake, lib=LIBRARY)
