"""The operators that the fusion passes emit. On CUDA they run this package's kernels; elsewhere the plain-torch twins.

    gemm_block_norm           y, rstd = BlockNorm(a @ b * scales + residual)
    block_norm_backward_amax  gradient through activation and BlockNorm, its tile maxima, the FP8 transpose of the input
    cast_transpose            FP8 of a tensor and of its transpose, from known maxima
    quantize_weights          every weight of a model in FP8, in both orientations
    turn_fp8                  the transpose of an FP8 tensor
    gate                      relu6(x + 3) / 6, which Inductor makes one instruction of
    constant                  a number that a GEMM reads from memory; in compiled code it is there before the call
    materialise               a tensor as it is; Inductor writes it to memory in a kernel that ends there

All are functional: outputs are fresh, inputs are not written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka_compile._compat.inductor_templates import shared_memory
from loka_compile.kernels import reference as ref
from loka_compile.lowering.ahead import on_cuda
from loka_compile.lowering.fused.configs import config_for, gemm_kernel

LIBRARY = torch.library.Library("loka", "FRAGMENT")
FP8 = torch.float8_e4m3fn

_TAGS = (torch.Tag.pt2_compliant_tag,)
LIBRARY.define(
    "gemm_block_norm(Tensor a, Tensor b, Tensor? scale_a, Tensor? scale_b, int block, float eps, ScalarType out_dtype, "
    "bool fast, bool with_rstd, Tensor? residual=None) -> (Tensor, Tensor)",
    tags=_TAGS,
)
LIBRARY.define(
    "block_norm_backward_amax(Tensor grad, Tensor y, Tensor rstd, int block, str activation, bool with_xt) "
    "-> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
LIBRARY.define(
    "cast_transpose(Tensor x, Tensor amax, ScalarType dtype, bool with_q, bool with_qt) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
LIBRARY.define("quantize_weights(Tensor[] weights, ScalarType dtype, bool[] with_qt) -> Tensor[]", tags=_TAGS)
LIBRARY.define("turn_fp8(Tensor x) -> Tensor", tags=_TAGS)
LIBRARY.define("gate(Tensor x) -> Tensor", tags=_TAGS)
LIBRARY.define("constant(float value, Device device) -> Tensor", tags=_TAGS)
LIBRARY.define("materialise(Tensor x) -> Tensor", tags=_TAGS)


def blocks_of(n: int, block: int) -> int:
    """Number of BlockNorm blocks in a row of n features."""
    return -(-n // block)


# ---------------------------------------------------------------------------------------------- gemm_block_norm
def _gemm_block_norm_fake(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, block: int, eps: float,
    out_dtype: torch.dtype, fast: bool, with_rstd: bool, residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """a [M, K], b [K, N] as for ``aten._scaled_mm``, residual [M, N] -> y [M, N] in out_dtype, rstd fp32
    [M, ceil(N/block)] or [0].

    Scales as ``kernels.config.scaling_of`` tells them apart: scalars, [M, 1] with [1, N], or in blocks of 128:
    [M, blocks of K] with [N, blocks of K] or [ceil(N/128), blocks of K or more], of any strides."""
    m, n = a.shape[0], b.shape[1]
    rstd_shape = (m, blocks_of(n, block)) if with_rstd else (0,)
    return a.new_empty((m, n), dtype=out_dtype), a.new_empty(rstd_shape, dtype=torch.float32)


def _gemm_block_norm_any(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, block: int, eps: float,
    out_dtype: torch.dtype, fast: bool, with_rstd: bool, residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y, rstd = ref.gemm_block_norm_ref(a, b, scale_a, scale_b, block, eps, out_dtype, residual)
    return y, rstd if with_rstd else rstd.new_empty((0,))


def _gemm_block_norm_cuda(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, block: int, eps: float,
    out_dtype: torch.dtype, fast: bool, with_rstd: bool, residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from loka_compile.kernels.gemm_block_norm import launch

    y, rstd = _gemm_block_norm_fake(a, b, scale_a, scale_b, block, eps, out_dtype, fast, with_rstd)
    if y.numel() == 0:
        return y, rstd
    (m, k), n = a.shape, b.shape[1]
    scaling = ref.scaling(scale_a, scale_b, m, n)
    # Crowded: the kernel written by hand takes a few registers more than the template.
    config = config_for(
        gemm_kernel(scaling.in_blocks), m, n, k, a.element_size(), fast, scaling.kind == 2, crowded=True
    )
    config = config.fitting(a.element_size(), out_dtype.itemsize, shared_memory(a.device))
    launch(
        a, b.t().contiguous(), scale_a, scale_b, y, rstd if with_rstd else None, None, block=block, eps=eps, fast=fast,
        config=config, residual=None if residual is None else residual.contiguous(),
    )  # fmt: skip
    return y, rstd


# ---------------------------------------------------------------------------------------------- backward
def _backward_fake(
    grad: Tensor, y: Tensor, rstd: Tensor, block: int, activation: str, with_xt: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """grad, y [M, N], rstd [M, blocks] -> dx [M, N] in grad's dtype, fp32 maxima of |dx| [tiles], and
    ``fp8(act(y) * 16)`` transposed [N, M] (empty unless with_xt). activation: "hardswish", "silu" or ""."""
    m, n = grad.shape
    xt_shape = (n, m) if with_xt else (0,)
    return (
        grad.new_empty((m, n)),
        grad.new_empty((-(-m // 32) * blocks_of(n, 256),), dtype=torch.float32),
        grad.new_empty(xt_shape, dtype=FP8),
    )


def _backward_any(
    grad: Tensor, y: Tensor, rstd: Tensor, block: int, activation: str, with_xt: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx = ref.block_norm_backward_ref(grad, y, rstd, block, activation).to(grad.dtype)
    _, amax, xt = _backward_fake(grad, y, rstd, block, activation, with_xt)
    amax = amax.fill_(dx.abs().max().float()) if dx.numel() else amax.zero_()
    return dx, amax, ref.activation_fp8_ref(y, activation).t().contiguous() if with_xt else xt


def _backward_cuda(
    grad: Tensor, y: Tensor, rstd: Tensor, block: int, activation: str, with_xt: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from loka_compile.kernels.block_norm_backward import block_norm_backward

    if grad.numel() == 0:
        dx, amax, xt = _backward_fake(grad, y, rstd, block, activation, with_xt)
        return dx, amax.zero_(), xt
    return block_norm_backward(
        grad.contiguous(), y.contiguous(), rstd.contiguous(), block=block, activation=activation, with_xt=with_xt
    )


# ---------------------------------------------------------------------------------------------- casts
def _cast_fake(
    x: Tensor, amax: Tensor, dtype: torch.dtype, with_q: bool, with_qt: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, N], amax fp32 (maxima that cover x) -> q [M, N], qt [N, M] in FP8 (empty if not asked for), scale []."""
    m, n = x.shape
    return (
        x.new_empty((m, n) if with_q else (0,), dtype=dtype),
        x.new_empty((n, m) if with_qt else (0,), dtype=dtype),
        x.new_empty((), dtype=torch.float32),
    )


def _cast_any(
    x: Tensor, amax: Tensor, dtype: torch.dtype, with_q: bool, with_qt: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        amax = amax.new_zeros((1,))
    q, qt, scale = ref.cast_transpose_ref(x, amax, dtype)
    empty = q.new_empty((0,))
    return q if with_q else empty, qt if with_qt else empty, scale


def _cast_cuda(
    x: Tensor, amax: Tensor, dtype: torch.dtype, with_q: bool, with_qt: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from loka_compile.kernels.cast import cast_transpose

    if x.numel() == 0:
        return _cast_any(x, amax, dtype, with_q, with_qt)
    return cast_transpose(x.contiguous(), amax.contiguous(), dtype, with_q=with_q, with_qt=with_qt)


def _weights_fake(weights: list[Tensor], dtype: torch.dtype, with_qt: list[bool]) -> list[Tensor]:
    """Weights [N, K] -> all in FP8, then all transposes [K, N] (empty where not asked for), then all scales []."""
    q = [w.new_empty(w.shape, dtype=dtype) for w in weights]
    shapes = [(w.shape[1], w.shape[0]) if t else (0,) for w, t in zip(weights, with_qt, strict=True)]
    qt = [w.new_empty(shape, dtype=dtype) for w, shape in zip(weights, shapes, strict=True)]
    return q + qt + [w.new_empty((), dtype=torch.float32) for w in weights]


def _weights_any(weights: list[Tensor], dtype: torch.dtype, with_qt: list[bool]) -> list[Tensor]:
    """The same in plain torch."""
    q, qt, scales = ref.quantize_weights_ref(weights, dtype)
    return q + [t if wanted else t.new_empty((0,)) for t, wanted in zip(qt, with_qt, strict=True)] + scales


def _weights_cuda(weights: list[Tensor], dtype: torch.dtype, with_qt: list[bool]) -> list[Tensor]:
    from loka_compile.kernels.cast import quantize_weights

    q, qt, scales = quantize_weights(list(weights), dtype, list(with_qt))
    return q + qt + scales


def _turn_fake(x: Tensor) -> Tensor:
    """x [M, N] in FP8 -> its transpose [N, M], contiguous."""
    return x.new_empty((x.shape[1], x.shape[0]))


def _turn_any(x: Tensor) -> Tensor:
    return x.t().contiguous()


def _turn_cuda(x: Tensor) -> Tensor:
    from loka_compile.kernels.turn import turn

    return turn(x.contiguous()) if x.numel() else _turn_any(x)


def _gate(x: Tensor) -> Tensor:
    """x in fp32 -> ``relu6(x + 3) / 6``, for who multiplies by x afterwards: what becomes of a NaN is open."""
    return (x * (1 / 6) + 0.5).clamp(0.0, 1.0)


def _constant(value: float, device: torch.device) -> Tensor:
    """A number as a tensor [] in fp32."""
    return torch.full((), value, dtype=torch.float32, device=device)


LIBRARY.impl("constant", _constant, "CompositeExplicitAutograd")
torch.library.register_fake("loka::constant", _constant, lib=LIBRARY)

for _name, _any, _cuda, _fake in (
    ("gemm_block_norm", _gemm_block_norm_any, _gemm_block_norm_cuda, _gemm_block_norm_fake),
    ("block_norm_backward_amax", _backward_any, _backward_cuda, _backward_fake),
    ("cast_transpose", _cast_any, _cast_cuda, _cast_fake),
    ("quantize_weights", _weights_any, _weights_cuda, _weights_fake),
    ("turn_fp8", _turn_any, _turn_cuda, _turn_fake),
    ("gate", _gate, _gate, torch.empty_like),
    ("materialise", torch.clone, torch.clone, torch.empty_like),
):
    LIBRARY.impl(_name, _any, "CPU")
    LIBRARY.impl(_name, _cuda, "CUDA")
    on_cuda(f"loka::{_name}", _cuda)
    torch.library.register_fake(f"loka::{_name}", _fake, lib=LIBRARY)
