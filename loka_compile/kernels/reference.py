"""What each kernel of this room computes, in plain torch: the twins that tests and the CPU use. At least fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from loka_compile.kernels.config import Scaling, scaling_of

LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
#: Smallest amax that a scale is made from: an all-zero tensor then gets a finite scale and stays zero.
AMAX_FLOOR = 1e-12
#: What may stand behind a BlockNorm and does not exceed its input, and the gradient through it: (gradient, input).
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "hardswish": (F.hardswish, torch.ops.aten.hardswish_backward), "silu": (F.silu, torch.ops.aten.silu_backward)
}  # fmt: skip


def wide(x: Tensor) -> Tensor:
    """x in fp32, or fp64 if it is that already."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def saved(y: Tensor) -> Tensor:
    """A normalised value as it was kept for the backward, wide: in e4m3 it was multiplied by 16."""
    return wide(y) / 16 if y.dtype == torch.float8_e4m3fn else wide(y)


def to_fp8(x: Tensor, factor: Tensor | float, dtype: torch.dtype) -> Tensor:
    """``x * factor``, saturated, as FP8."""
    return (wide(x) * factor).clamp(-LIMITS[dtype], LIMITS[dtype]).to(dtype)


def scaling(scale_a: Tensor | None, scale_b: Tensor | None, m: int, n: int) -> Scaling:
    """How two scales multiply a product [m, n]."""
    if scale_a is None or scale_b is None:
        return Scaling(0)
    return scaling_of(scale_a.shape, scale_b.shape, m, n)


def scaled_product(a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None) -> Tensor:
    """``a [M, K] @ b [K, N]`` times the scales, not rounded to 16 bits.

    Scales: both scalar, [M, 1] and [1, N], or in blocks of 128: [M or ceil(M/128), blocks of K] and [N or ceil(N/128),
    blocks of K or more].
    """
    if scale_a is None or scale_b is None:
        return wide(a) @ wide(b)
    (m, k), n = a.shape, b.shape[1]
    kind = scaling(scale_a, scale_b, m, n)
    if not kind.in_blocks:
        return (
            wide(a) @ wide(b) * scale_a * (scale_b.t() if scale_b.dim() == 2 and scale_b.shape != (1, n) else scale_b)
        )
    along = torch.arange(k, device=a.device) // 128
    rows, columns = (torch.arange(size, device=a.device) for size in (m, n))
    left = wide(a) * scale_a[rows // kind.rows_a][:, along]
    return left @ (wide(b) * scale_b[columns // kind.rows_b][:, along].t())


def block_norm(x: Tensor, block: int, eps: float) -> tuple[Tensor, Tensor]:
    """RMS normalisation of each block of columns; the last block may be short. y like x, rstd [M, blocks]."""
    parts = wide(x).split(block, dim=1)
    rstd = [torch.rsqrt(p.square().mean(1, keepdim=True) + eps) for p in parts]
    return torch.cat([p * r for p, r in zip(parts, rstd, strict=True)], 1), torch.cat(rstd, 1)


def gemm_block_norm_ref(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, block: int, eps: float,
    out_dtype: torch.dtype, residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``y = BlockNorm(a @ b * scales + residual)`` in out_dtype and rstd; normalised before anything is rounded."""
    z = scaled_product(a, b, scale_a, scale_b)
    y, rstd = block_norm(z if residual is None else z + wide(residual), block, eps)
    return y.to(out_dtype), rstd


def gemm_norm_activation_ref(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, activation: str, block: int, eps: float,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """out, what the backward needs, rstd, with ``h = a @ b * scales + residual``; wide.

    "swish_norm": ``h * hardsigmoid(BlockNorm(h))`` and h. "hardswish": HardSwish of y = BlockNorm(h), and y.
    """
    h = scaled_product(a, b, scale_a, scale_b)
    h = h if residual is None else h + wide(residual)
    y, rstd = block_norm(h, block, eps)
    return (h * F.hardsigmoid(y), h, rstd) if activation == "swish_norm" else (F.hardswish(y), y, rstd)


def quantize_1x128_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, N] in e4m3 with a scale per row and 128 columns, and the scales [N/128, M]; N a multiple of 128."""
    groups = wide(x).unflatten(1, (-1, 128))
    scale = (groups.abs().amax(2) / LIMITS[torch.float8_e4m3fn]).clamp(min=AMAX_FLOOR / LIMITS[torch.float8_e4m3fn])
    q = to_fp8(groups, 1 / scale.unsqueeze(2), torch.float8_e4m3fn).flatten(1)
    return q, scale.t().to(torch.float32).contiguous()


def block_norm_backward_ref(
    grad: Tensor, y: Tensor, rstd: Tensor, block: int, activation: str
) -> Tensor:  # fmt: skip
    """``rstd * (g - y * mean(g * y))`` in each block, with ``g = grad * act'(y)``; wide. ``activation``: see
    :data:`ACTIVATIONS`, or "" for none."""
    g, y = wide(grad), saved(y)
    if activation:
        g = ACTIVATIONS[activation][1](g, y)
    out = []
    for gp, yp, r in zip(g.split(block, 1), y.split(block, 1), rstd.split(1, 1), strict=True):
        out.append(r * (gp - yp * (gp * yp).mean(1, keepdim=True)))
    return torch.cat(out, 1)


def block_norm_backward_fp8_ref(
    grad: Tensor, y: Tensor, rstd: Tensor, block: int, activation: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx in grad's dtype, dx in FP8, its transpose, their scale, and ``fp8(act(y) * 16)`` transposed.

    The cast reads dx before it is rounded to grad's dtype.
    """
    dx = block_norm_backward_ref(grad, y, rstd, block, activation)
    amax = dx.abs().max().reshape(1) if dx.numel() else dx.new_zeros((1,))
    return dx.to(grad.dtype), *cast_transpose_ref(dx, amax, dtype), activation_fp8_ref(y, activation).t().contiguous()


def activation_fp8_ref(y: Tensor, activation: str) -> Tensor:
    """``fp8(act(y) * 16)`` in e4m3."""
    act = ACTIVATIONS[activation][0] if activation else wide
    return to_fp8(act(saved(y)), 16.0, torch.float8_e4m3fn)


def cast_transpose_ref(x: Tensor, parts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x in FP8, the same transposed and contiguous, and the scale; ``parts`` are maxima of |x| that cover x."""
    amax = parts.max().to(torch.float32).clamp(min=AMAX_FLOOR)
    q = to_fp8(x, LIMITS[dtype] / amax, dtype)
    return q, q.t().clone(memory_format=torch.contiguous_format), amax / LIMITS[dtype]


def quantize_weights_ref(weights: list[Tensor], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Each weight tensorwise in FP8, the transposes, the scales."""
    triples = [cast_transpose_ref(w, w.abs().max(), dtype) for w in weights]
    return [t[0] for t in triples], [t[1] for t in triples], [t[2] for t in triples]
