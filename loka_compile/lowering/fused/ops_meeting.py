"""Operators whose kernel's programs meet (:mod:`loka_compile.kernels.grid_barrier`); elsewhere their plain-torch twins.

    meeting_state            the zeros that the kernels of a graph meet with, one after another
    block_norm_backward_fp8  gradient through activation and BlockNorm in FP8, both layouts, with the activation's
                             transpose

Functional to whoever looks: the state is zero before and after.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka_compile.kernels import reference as ref
from loka_compile.lowering.ahead import on_cuda
from loka_compile.lowering.fused.configs import backward_config
from loka_compile.lowering.fused.ops import FP8, LIBRARY

#: As kernels.grid_barrier.STATE, which needs triton.
STATE = 3

_TAGS = (torch.Tag.pt2_compliant_tag,)
LIBRARY.define("meeting_state(Tensor like) -> Tensor", tags=_TAGS)
LIBRARY.define(
    "block_norm_backward_fp8(Tensor grad, Tensor y, Tensor rstd, Tensor state, int block, str activation, "
    "ScalarType dtype, bool with_dx, bool with_q, bool with_qt, bool with_xt) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


def _state_fake(like: Tensor) -> Tensor:
    return like.new_empty((STATE,), dtype=torch.int32)


def _state(like: Tensor) -> Tensor:
    return like.new_zeros((STATE,), dtype=torch.int32)


def _fake(
    grad: Tensor, y: Tensor, rstd: Tensor, state: Tensor, block: int, activation: str, dtype: torch.dtype,
    with_dx: bool, with_q: bool, with_qt: bool, with_xt: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """grad, y [M, N], rstd [M, blocks] -> dx [M, N] in grad's dtype, q [M, N] and qt [N, M] in FP8, their scale [], and
    ``fp8(act(y) * 16)`` transposed [N, M]; empty what is not asked for. activation: "hardswish", "silu" or ""."""
    m, n = grad.shape
    return (
        grad.new_empty((m, n) if with_dx else (0,)),
        grad.new_empty((m, n) if with_q else (0,), dtype=dtype),
        grad.new_empty((n, m) if with_qt else (0,), dtype=dtype),
        grad.new_empty((), dtype=torch.float32),
        grad.new_empty((n, m) if with_xt else (0,), dtype=FP8),
    )


def _any(
    grad: Tensor, y: Tensor, rstd: Tensor, state: Tensor, block: int, activation: str, dtype: torch.dtype,
    with_dx: bool, with_q: bool, with_qt: bool, with_xt: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    found = ref.block_norm_backward_fp8_ref(grad, y, rstd, block, activation, dtype)
    fake = _fake(grad, y, rstd, state, block, activation, dtype, with_dx, with_q, with_qt, with_xt)
    wanted = (with_dx, with_q, with_qt, True, with_xt)
    dx, q, qt, scale, xt = (a if w else e for a, e, w in zip(found, fake, wanted, strict=True))
    return dx, q, qt, scale, xt


def _cuda(
    grad: Tensor, y: Tensor, rstd: Tensor, state: Tensor, block: int, activation: str, dtype: torch.dtype,
    with_dx: bool, with_q: bool, with_qt: bool, with_xt: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from loka_compile.kernels.block_norm_backward_fp8 import block_norm_backward_fp8

    if grad.numel() == 0:
        return _any(grad, y, rstd, state, block, activation, dtype, with_dx, with_q, with_qt, with_xt)
    m, n = grad.shape
    return block_norm_backward_fp8(
        grad.contiguous(), y.contiguous(), rstd.contiguous(), state, block=block, activation=activation, dtype=dtype,
        with_dx=with_dx, with_q=with_q, with_qt=with_qt, with_xt=with_xt,
        config=backward_config(m, n, grad.element_size()),
    )  # fmt: skip


LIBRARY.impl("meeting_state", _state, "CompositeExplicitAutograd")
torch.library.register_fake("loka::meeting_state", _state_fake, lib=LIBRARY)
LIBRARY.impl("block_norm_backward_fp8", _any, "CPU")
LIBRARY.impl("block_norm_backward_fp8", _cuda, "CUDA")
on_cuda("loka::block_norm_backward_fp8", _cuda)
torch.library.register_fake("loka::block_norm_backward_fp8", _fake, lib=LIBRARY)
