"""The one family of FP8 quantisers, in plain traceable torch ops that Inductor fuses into the producer.

Every kernel library is fed from here, never from its own quantiser: the libraries disagree on the smallest amax (none,
1e-12, 1e-4, 1/512), and that alone changes the error of small gradients.

A tensor ``x`` is cut into groups that share one fp32 scale (:class:`~loka_compile.gemm.Scaling`). In each group::

    scale = max(amax(|x|), 1e-12) / fp8_max        # dequantisation scale: x is about data * scale
    data  = fp8(clamp(x / scale, -fp8_max, fp8_max))

What happens at the edges:

* a group of zeros gets the scale ``1e-12 / fp8_max`` and zeros, never 0/0;
* a NaN or an Inf in a group makes the *whole group* NaN once it is dequantised (the scale is NaN or Inf), so that it
  reaches the output of the GEMM and a GradScaler or a guard can see it; other groups are untouched;
* 1x32 (MX) rounds the scale up to a power of two, so that nothing saturates; it has no Inf, and becomes NaN instead;
* with ``bound`` there is no amax: NaN stays where it is, and what exceeds the bound saturates, Inf included;
* after scaling, what is below half of the smallest FP8 subnormal (``2**-10`` for e4m3) becomes 0;
* the clamp is explicit because torch up to 2.11 casts an overflow to NaN.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from loka_compile.errors import ConfigError, UnknownNameError
from loka_compile.gemm import Scaling

#: Smallest amax that a scale is made from.
AMAX_FLOOR = 1e-12
#: Elements along the contraction (and, in 128x128, along the rows) that share a scale in the block scalings.
BLOCK = 128
#: Elements that share a scale in 1x32 (MX).
BLOCK_MX = 32
#: Largest number of the FP8 formats that the quantiser writes; fnuz is what AMD's MI300 has.
FP8_MAXIMUM = {
    torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0,
    torch.float8_e4m3fnuz: 240.0, torch.float8_e5m2fnuz: 57344.0,
}  # fmt: skip


class Quantized(NamedTuple):
    """An FP8 operand: ``data`` [rows, k] contiguous, and the fp32 ``scale`` that multiplies it to give x back.

    The shape of ``scale``: TENSORWISE [], ROWWISE [rows, 1], 1x128 [rows, ceil(k/128)],
    128x128 [ceil(rows/128), ceil(k/128)], 1x32 [rows, ceil(k/32)] (powers of two).
    """

    data: Tensor
    scale: Tensor


def quantize(
    x: Tensor,
    scaling: Scaling,
    *,
    transpose: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
    bound: float | None = None,
) -> Quantized:
    """Quantise the operand ``x`` (or ``x.T``) to FP8.

    Args:
        x: [rows, k] as stored, any strides; bf16, fp16 or fp32.
        scaling: which elements share a scale. ``Scaling.NONE`` quantises nothing: ``data`` is a view of ``x`` in its
            own dtype and ``scale`` is 1.
        transpose: the operand is ``x.T``, that is, its contraction runs along the rows of ``x``. ``data`` comes out
            contiguous as [cols, rows of x]. For TENSORWISE and 128x128 the same ops run as without ``transpose``,
            followed by a byte transpose, so that a graph which needs both quantises once.
        dtype: one of :data:`FP8_MAXIMUM`.
        bound: a proven upper bound of ``|x|``. TENSORWISE then scales by the power of two
            ``2**floor(log2(fp8_max / bound))`` (16 for a bound of 16 in e4m3) and reads no amax. Ignored by the
            other scalings.

    Raises:
        UnknownNameError: ``dtype`` is no FP8 format that we write.
        ConfigError: ``x`` is not 2-D, or ``bound`` is not a positive finite number.
    """
    if x.dim() != 2:
        raise ConfigError(f"quantize takes a 2-D tensor, not one of shape {tuple(x.shape)}")
    if scaling is Scaling.NONE:
        return Quantized(x.t() if transpose else x, x.new_ones((), dtype=torch.float32))
    fp8_max = fp8_maximum(dtype)
    values = x.to(torch.float32)
    if scaling is Scaling.TENSORWISE and bound is not None:
        factor = fixed_scale(bound, dtype)
        # Made without x, so that the scales of all bounded operands of a graph are one node after CSE.
        scale = torch.full((), 1.0 / factor, dtype=torch.float32, device=x.device)
        values = values * factor
    else:
        scale, values = _scale_groups(values, _group_shape(scaling, transpose), fp8_max, scaling is Scaling.BLOCK_1X32)
    # The cast comes before the blocks are joined again: only then do amax, division and cast share one loop, which
    # Inductor makes one kernel of (1x128, a multiple of 128).
    data = values.clamp(-fp8_max, fp8_max).to(dtype)
    if data.dim() != 2:
        data = data.reshape(x.shape)
    if transpose:
        data = data.t()
        scale = scale.t() if scale.dim() == 2 else scale
    if scaling is Scaling.ROWWISE:
        scale = scale.unsqueeze(1)
    return Quantized(packed(data), packed(scale))


def dequantize(q: Quantized, scaling: Scaling) -> Tensor:
    """The fp32 operand [rows, k] that ``q`` stands for: every element times the scale of its group."""
    data = q.data.to(torch.float32)
    if scaling in (Scaling.NONE, Scaling.TENSORWISE, Scaling.ROWWISE):
        return data * q.scale
    scale = q.scale
    for dim, size in enumerate(_group_shape(scaling, transpose=False)):
        if size is not None and size > 1:
            scale = _repeat(scale, dim, data.shape[dim], size)
    return data * scale


def fixed_scale(bound: float, dtype: torch.dtype) -> float:
    """The factor for data that never exceeds ``bound``: the largest power of two that keeps it inside FP8.

    Raises:
        ConfigError: ``bound`` is not a positive finite number.
    """
    if not (math.isfinite(bound) and bound > 0):
        raise ConfigError(f"a bound of |x| must be a positive finite number, not {bound!r}")
    exponent = math.frexp(fp8_maximum(dtype) / bound)[1] - 1
    # Both the factor and its reciprocal must be normal fp32 numbers.
    return float(2.0 ** max(-126, min(126, exponent)))


def fp8_maximum(dtype: torch.dtype) -> float:
    """The largest finite number of an FP8 format: 448 for e4m3fn, 240 for e4m3fnuz, 57344 for e5m2.

    Raises:
        UnknownNameError: not an FP8 format that we write.
    """
    if dtype not in FP8_MAXIMUM:
        raise UnknownNameError("FP8 dtype", str(dtype), [str(d) for d in FP8_MAXIMUM])
    return FP8_MAXIMUM[dtype]


def packed(t: Tensor) -> Tensor:
    """t contiguous, with the strides that its shape implies.

    A dimension of size 1 counts as contiguous with any stride, but libraries check the numbers: a [1, k] operand must
    have the strides (k, 1), a [rows, 1] scale (1, 1).
    """
    t = t.contiguous()
    if t.dim() != 2 or (statically_known_true(t.stride(0) == t.shape[1]) and statically_known_true(t.stride(1) == 1)):
        return t
    for dim in (0, 1):
        if statically_known_true(t.shape[dim] == 1):
            # Not a second view: Inductor takes two views that end in the first shape for none, strides or not.
            return t.view(-1).unsqueeze(dim)
    return t.view(-1).view(t.shape)


def _group_shape(scaling: Scaling, transpose: bool) -> tuple[int | None, int | None]:
    """Rows and columns of x that share a scale; None is all of them. Stored orientation, not the operand's."""
    rows, contraction = {
        Scaling.TENSORWISE: (None, None),
        Scaling.ROWWISE: (1, None),
        Scaling.BLOCK_1X32: (1, BLOCK_MX),
        Scaling.BLOCK_1X128: (1, BLOCK),
        Scaling.BLOCK_128X128: (BLOCK, BLOCK),
    }[scaling]
    return (contraction, rows) if transpose else (rows, contraction)


def _scale_groups(
    x: Tensor, group: tuple[int | None, int | None], fp8_max: float, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Scale of every group, in the stored orientation ([rows] for ROWWISE), and x divided by it.

    Where blocks fit exactly, the second result keeps each split dimension as [blocks, elements of a block].
    """
    split = [dim for dim in (0, 1) if (group[dim] or 0) > 1]
    if not split:
        dims = [dim for dim in (0, 1) if group[dim] is None]
        scale = _scale_of(_amax(x, dims), fp8_max)
        inverse = scale.reciprocal()
        return scale, x * (inverse.unsqueeze(dims[0]) if len(dims) == 1 else inverse)
    block = group[split[0]] or 1
    ragged = [dim for dim in split if not statically_known_true(x.shape[dim] % block == 0)]
    blocks = _split(_pad(x, ragged, block), split, block)
    # Splitting dimension 0 moves the columns to dimension 2; what is reduced is the inside of each split.
    inner = [dim + 1 if position == 0 else dim + 2 for position, dim in enumerate(split)]
    scale = _scale_of(_amax(blocks, inner, keepdim=True), fp8_max)
    if power_of_two:
        scale = _up_to_a_power_of_two(scale)
    if not ragged:
        return scale.squeeze(inner), blocks * scale.reciprocal()
    scale = scale.squeeze(inner)
    inverse = scale.reciprocal()
    for dim in split:
        inverse = _repeat(inverse, dim, x.shape[dim], block)
    return scale, x * inverse


def _scale_of(amax: Tensor, fp8_max: float) -> Tensor:
    # clamp hands a NaN through, and Inf / fp8_max is Inf: both poison their group on purpose.
    return amax.clamp(min=AMAX_FLOOR) / fp8_max


def _up_to_a_power_of_two(scale: Tensor) -> Tensor:
    """The smallest power of two that is not smaller, by its exponent bits; NaN where the scale is not finite."""
    exponent = (scale.view(torch.int32) + 0x007FFFFF) >> 23
    # The two ends of 8 exponent bits, 2**-127 and 2**127, lie outside of what normal fp32 scales and their inverses
    # can be; the floor of the amax keeps away from the lower one.
    power = (exponent.clamp(1, 253) << 23).view(torch.float32)
    return torch.where(scale.isfinite(), power, torch.full_like(scale, math.nan))


def _amax(x: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
    """Largest ``|x|`` over ``dims``; 0 where there is nothing to reduce (torch's amax raises on that)."""
    if any(statically_known_true(x.shape[dim] == 0) for dim in dims):
        shape = [1 if dim in dims else size for dim, size in enumerate(x.shape) if keepdim or dim not in dims]
        return x.new_zeros(shape)
    return x.abs().amax(dims, keepdim=keepdim)


def _blocks(size: int, block: int) -> int:
    """Blocks that cover ``size`` elements; plain arithmetic, so that a symbolic size stays symbolic."""
    return (size + block - 1) // block


def _pad(x: Tensor, dims: list[int], block: int) -> Tensor:
    """x with zeros up to the next whole block along ``dims``."""
    if not dims:
        return x
    extra = [_blocks(x.shape[dim], block) * block - x.shape[dim] if dim in dims else 0 for dim in (1, 0)]
    return torch.nn.functional.pad(x, (0, extra[0], 0, extra[1]))


def _split(x: Tensor, dims: list[int], block: int) -> Tensor:
    """x with each of ``dims`` cut into [blocks, block]; the last one first, so that the positions stay valid."""
    for dim in reversed(dims):
        x = x.view(*x.shape[:dim], _blocks(x.shape[dim], block), block, *x.shape[dim + 1 :])
    return x


def _repeat(scale: Tensor, dim: int, size: int, block: int) -> Tensor:
    """Each scale of ``dim`` for a block, cut to ``size``. A gather: slicing would guard on a symbolic size."""
    return scale.index_select(dim, torch.arange(size, device=scale.device) // block)
