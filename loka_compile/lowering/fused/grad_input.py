"""Puts a layer's grad_input GEMM and the gradient of the layer below into one kernel (joint graph, after the others).

``loka::block_norm_backward_fp8`` of what an FP8 GEMM made, and nothing else reads, becomes ``loka::grad_input_fp8``
where all tiles of the GEMM are resident at once (``data/fused_h200.json`` names the shapes).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from loka_compile._compat.inductor_templates import multiprocessors, shared_memory
from loka_compile._compat.shapes import size_hint
from loka_compile.kernels import reference as ref
from loka_compile.lowering.ahead import on_cuda
from loka_compile.lowering.fused import configs
from loka_compile.lowering.fused.match import ALIAS, CONVERT, VIEWS, arg, emit, is_call, result
from loka_compile.lowering.fused.ops import FP8, LIBRARY
from loka_compile.lowering.roles import site_of
from loka_compile.report import Report

aten = torch.ops.aten

LIBRARY.define(
    "grad_input_fp8(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor y, Tensor rstd, Tensor state, "
    "int block, str activation, ScalarType dtype, bool fast, bool with_q, bool with_qt, bool with_xt) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def fold_grad_inputs(graph: fx.Graph, report: Report) -> int:
    """Fold GEMMs into the gradients behind them; returns how many. In place; dead nodes are left."""
    folded = 0
    for node in list(graph.nodes):
        if not is_call(node, torch.ops.loka.block_norm_backward_fp8.default) or result(node, 0) is not None:
            continue
        product = _product(arg(node, 0))
        if product is None:
            continue
        (m, k), n = product.args[0].meta["val"].shape, product.meta["val"].shape[1]  # type: ignore[union-attr]
        sizes = (size_hint(m), size_hint(n), size_hint(k))
        if None in sizes or configs.find("grad_input_fp8", *sizes, 1) is None:  # type: ignore[arg-type]
            continue
        _rewrite(graph, node, product)
        report.fusions.append(
            f"{site_of(product) or product.name}: grad_input GEMM and the gradient below in one kernel"
        )
        folded += 1
    return folded


def _product(node: Any) -> fx.Node | None:
    """The tensorwise e4m3 GEMM behind casts and views, if nothing else reads what lies in between."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if is_call(node, aten._scaled_mm.default):
            operands: list[Any] = [*node.args, *[None] * (8 - len(node.args))]
            a, b, scale_a, scale_b, bias, scale_result, _, _ = operands
            plain = bias is None and scale_result is None and not node.kwargs
            scalars = scale_a.meta["val"].numel() == 1 and scale_b.meta["val"].numel() == 1
            values = a.meta["val"], b.meta["val"]
            rows = values[0].stride(1) == 1 and values[1].stride(0) == 1
            e4m3 = all(value.dtype == FP8 for value in values)
            return node if plain and scalars and rows and e4m3 else None
        if not is_call(node, *CONVERT, *ALIAS, *VIEWS):
            return None
        node = arg(node, 0)
    return None


def _rewrite(graph: fx.Graph, node: fx.Node, product: fx.Node) -> None:
    _, y, rstd, state, block, activation, dtype, _, with_q, with_qt, with_xt = node.args
    fast = bool(product.args[7]) if len(product.args) > 7 else False
    with graph.inserting_before(node):
        outs = emit(
            graph, node, torch.ops.loka.grad_input_fp8.default,
            (*product.args[:4], y, rstd, state, block, activation, dtype, fast, with_q, with_qt, with_xt),
        )  # fmt: skip
    for index, new in enumerate(outs, start=1):
        old = result(node, index)
        if old is not None:
            old.replace_all_uses_with(new)


# ---------------------------------------------------------------------------------------------- the operator
def _fake(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, y: Tensor, rstd: Tensor, state: Tensor, block: int,
    activation: str, dtype: torch.dtype, fast: bool, with_q: bool, with_qt: bool, with_xt: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """a [M, K], b [K, N] as for ``aten._scaled_mm``, y and rstd of the layer below -> q [M, N], qt [N, M], scale [] and
    xt [N, M], as ``block_norm_backward_fp8`` has them."""
    m, n = a.shape[0], b.shape[1]
    return (
        a.new_empty((m, n) if with_q else (0,), dtype=dtype), a.new_empty((n, m) if with_qt else (0,), dtype=dtype),
        a.new_empty((), dtype=torch.float32), a.new_empty((n, m) if with_xt else (0,), dtype=FP8),
    )  # fmt: skip


def _any(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, y: Tensor, rstd: Tensor, state: Tensor, block: int,
    activation: str, dtype: torch.dtype, fast: bool, with_q: bool, with_qt: bool, with_xt: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grad = ref.scaled_product(a, b, scale_a, scale_b)
    _, *found = ref.block_norm_backward_fp8_ref(grad, y, rstd, block, activation, dtype)
    fake = _fake(a, b, scale_a, scale_b, y, rstd, state, block, activation, dtype, fast, with_q, with_qt, with_xt)
    q, qt, scale, xt = (t if w else e for t, e, w in zip(found, fake, (with_q, with_qt, True, with_xt), strict=True))
    return q, qt, scale, xt


def _cuda(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, y: Tensor, rstd: Tensor, state: Tensor, block: int,
    activation: str, dtype: torch.dtype, fast: bool, with_q: bool, with_qt: bool, with_xt: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from loka_compile.kernels.grad_input_fp8 import grad_input_fp8

    if a.numel() == 0:
        return _any(a, b, scale_a, scale_b, y, rstd, state, block, activation, dtype, fast, with_q, with_qt, with_xt)
    m, n, k = a.shape[0], b.shape[1], a.shape[1]
    config = configs.config_for("grad_input_fp8", m, n, k, 1).fitting(1, 1, shared_memory(a.device))
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    if tiles > multiprocessors(a.device):  # a batch that grew since it was compiled
        grad = aten._scaled_mm(a, b, scale_a, scale_b, None, None, torch.bfloat16, fast)
        _, *found = torch.ops.loka.block_norm_backward_fp8(
            grad, y, rstd, state, block, activation, dtype, False, with_q, with_qt, with_xt
        )  # fmt: skip
        return found[0], found[1], found[2], found[3]
    return grad_input_fp8(
        a, b.t(), scale_a, scale_b, y.contiguous(), rstd.contiguous(), state, block=block, activation=activation,
        dtype=dtype, fast=fast, config=config, with_q=with_q, with_qt=with_qt, with_xt=with_xt,
    )  # fmt: skip


LIBRARY.impl("grad_input_fp8", _any, "CPU")
LIBRARY.impl("grad_input_fp8", _cuda, "CUDA")
on_cuda("loka::grad_input_fp8", _cuda)
torch.library.register_fake("loka::grad_input_fp8", _fake, lib=LIBRARY)
