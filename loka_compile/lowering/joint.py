"""Lowers the GEMMs of a joint graph by the plan: the chosen kernel goes INTO the graph.

It must stand there, as operators and arguments, and not in a table beside it: the compile cache's key is made from
the graph, and a cached entry would otherwise bring back a kernel that another plan had chosen.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from loka_compile._compat.shapes import size_hint
from loka_compile.gemm import NATIVE, Gemm, Recipe, Role
from loka_compile.lowering.bounds import bound
from loka_compile.lowering.by_batch import encode
from loka_compile.lowering.inline import inline
from loka_compile.lowering.providers import get_provider
from loka_compile.lowering.providers.base import Provider
from loka_compile.lowering.roles import MatMul, as_it_stands, find_matmuls
from loka_compile.lowering.selftest import refusal
from loka_compile.plan import BatchRange, Decision, Plan
from loka_compile.report import LoweredGemm, Report
from loka_compile.table import BASELINE

logger = logging.getLogger(__name__)


def remove_anchors(graph: fx.Graph) -> None:
    """Drop ``loka::anchor``: its zero gradients are in the joint graph by now."""
    for node in list(graph.nodes):
        if node.target is torch.ops.loka.anchor.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def lower_gemms(graph: fx.Graph, plan: Plan | None, report: Report, *, emulate: bool = False) -> int:
    """Replace each GEMM that the plan sends to an FP8 kernel; returns how many were replaced.

    ``emulate``: the plan is for another device, so its recipes are emulated here.
    """
    matmuls, unmapped = find_matmuls(graph)
    report.unmapped = unmapped
    lowered = 0
    for before in matmuls:
        matmul = as_it_stands(before.node, before.site, before.role, before.grad_first)
        gemm = describe(matmul)
        if gemm is None:
            report.unmapped.append(f"{matmul.node.name}: of {matmul.site}, its size is unknown when compiling")
            continue
        decision, fallback = _settle(_decide(plan, gemm), matmul, gemm, emulate), ""
        if decision.ranges:
            _lower_by_batch(matmul, gemm, decision, emulate)
            lowered += 1
        elif decision.recipe != NATIVE.name:
            fallback = _lower(matmul, gemm, decision, emulate)
            lowered += not fallback
        report.gemms.append(LoweredGemm(gemm, _as_run(decision, fallback), fallback))
    if emulate and lowered:
        report.notes.append(
            f"the plan is for another device: {lowered} GEMMs run here as an emulation of its kernels (same FP8 "
            "rounding, fp32 products), which says nothing about speed"
        )
    logger.info("lowered %d of %d GEMMs to FP8: %s", lowered, len(matmuls), report.counts())
    return lowered


def describe(matmul: MatMul) -> Gemm | None:
    """The GEMM's shape, dtype and proven bounds; None where a size is not known at compile time."""
    a, b = _shape(matmul.a.base), _shape(matmul.b.base)
    m_k = reversed(a) if matmul.a.transposed else a
    n_k = reversed(b) if matmul.b.transposed else b
    (m, k), (n, _) = m_k, n_k
    hints = [size_hint(size) for size in (m, n, k)]
    if None in hints:
        return None
    return Gemm(
        matmul.site,
        matmul.role,
        m=int(hints[0] or 0),
        n=int(hints[1] or 0),
        k=int(hints[2] or 0),
        dtype=str(matmul.node.meta["val"].dtype).removeprefix("torch."),
        dynamic="".join(letter for letter, size in zip("mnk", (m, n, k), strict=True) if not isinstance(size, int)),
        a_bound=bound(matmul.a.base),
        b_bound=bound(matmul.b.base),
    )


def _shape(node: fx.Node) -> list[Any]:
    return list(node.meta["val"].shape)


def _decide(plan: Plan | None, gemm: Gemm) -> Decision:
    decision = plan.lookup(gemm.site, gemm.role) if plan is not None else None
    if decision is not None:
        return decision
    reason = "no plan" if plan is None else "the plan does not name this GEMM"
    return Decision(gemm.site, str(gemm.role), "high_precision", NATIVE.name, reason)


def _as_run(decision: Decision, fallback: str) -> Decision:
    if not fallback:
        return decision
    return Decision(decision.site, decision.role, "high_precision", NATIVE.name, fallback, verdicts=decision.verdicts)


def _settle(decision: Decision, matmul: MatMul, gemm: Gemm, emulate: bool) -> Decision:
    """Choose among a decision's ranges of batch size what can be chosen when compiling.

    A static batch leaves one kernel. Of a dynamic one, ranges whose kernel is refused here are in high precision.
    """
    if not decision.ranges:
        return decision
    letter = _batch_letter(matmul)
    if letter not in gemm.dynamic:
        provider, recipe = decision.at(getattr(gemm, letter))
        return dataclasses.replace(decision, provider=provider, recipe=recipe, ranges=())
    parts: list[BatchRange] = []
    reasons = [decision.reason] if decision.reason else []
    for part in decision.ranges:
        reason = "" if part.recipe == NATIVE.name else _refused(matmul, gemm, part.provider, part.recipe, emulate)
        if reason:
            reasons.append(f"from M = {part.m_from}: {reason}")
            part = BatchRange(part.m_from, *BASELINE)
        if not parts or parts[-1].candidate != part.candidate:
            parts.append(part)
    kernel = next((p for p in parts if p.candidate == decision.candidate), parts[-1])
    return dataclasses.replace(
        decision, provider=kernel.provider, recipe=kernel.recipe, reason="; ".join(reasons),
        ranges=tuple(parts) if len(parts) > 1 else (),
    )  # fmt: skip


def _batch_letter(matmul: MatMul) -> str:
    """Which of the GEMM's sizes m, n, k is the batch."""
    if matmul.role is Role.GRAD_WEIGHT:
        return "k"
    return "m" if matmul.grad_first else "n"


def _lower_by_batch(matmul: MatMul, gemm: Gemm, decision: Decision, emulate: bool) -> None:
    """Replace the node by an operator that chooses the kernel when it runs."""
    kernels = []
    for part in decision.ranges:
        provider, recipe = executor(part.provider, part.recipe, emulate)
        assert recipe is not None  # _settle has asked
        kernels.append((part.m_from, provider, recipe))
    ranges = encode([BatchRange(start, provider.name, recipe.name) for start, provider, recipe in kernels])
    letter, out_dtype = _batch_letter(matmul), matmul.node.meta["val"].dtype
    _, first, recipe = kernels[0]
    alike = not recipe.is_high_precision and all(p.form(gemm, r) == first.form(gemm, recipe) for _, p, r in kernels)

    def compute(a: Tensor, b: Tensor, *bias: Tensor) -> Tensor:
        if alike:
            out = _by_batch_of_quantised(matmul, gemm, first, recipe, a, b, ranges)
        else:
            out = torch.ops.loka.gemm_by_batch.default(
                a, matmul.a.transposed, b, matmul.b.transposed, letter, ranges, out_dtype, gemm.a_bound, gemm.b_bound
            )
        return (out.float() + bias[0].float()).to(out_dtype) if bias else out

    replace_matmul(matmul, compute)


def _by_batch_of_quantised(
    matmul: MatMul, gemm: Gemm, provider: Provider, recipe: Recipe, a: Tensor, b: Tensor, ranges: str
) -> Tensor:
    """Operands that suit the kernels of all ranges are quantised in the graph, where they fuse and are shared."""
    m, k = reversed(a.shape) if matmul.a.transposed else a.shape
    n = b.shape[1] if matmul.b.transposed else b.shape[0]
    (qa, sa), (qb, sb) = provider.operands(
        a, matmul.a.transposed, b, matmul.b.transposed, recipe, gemm.a_bound, gemm.b_bound
    )
    size = {"m": m, "n": n, "k": k}[_batch_letter(matmul)]
    out_dtype = matmul.node.meta["val"].dtype
    out = torch.ops.loka.gemm_of_quantised_by_batch.default(qa, sa, qb, sb, size, ranges, out_dtype)
    if all(statically_known_true(size == wide) for size, wide in zip((m, n), out.shape, strict=True)):
        return out
    return out[:m, :n].contiguous()


def _refused(matmul: MatMul, gemm: Gemm, provider_name: str, recipe_name: str, emulate: bool) -> str:
    """Why this kernel cannot run here, or ""."""
    provider, recipe = executor(provider_name, recipe_name, emulate)
    if recipe is None:
        return f"provider {provider.name} has no recipe {recipe_name!r}"
    reason = refusal(provider, provider.padded(gemm, recipe), recipe, matmul.node.meta["val"].device.type)
    return f"{provider_name}:{recipe_name} was planned, but: {reason}" if reason else ""


def _lower(matmul: MatMul, gemm: Gemm, decision: Decision, emulate: bool) -> str:
    """Replace the node; returns "" or the reason why it had to stay."""
    reason = _refused(matmul, gemm, decision.provider, decision.recipe, emulate)
    if reason:
        return reason
    provider, recipe = executor(decision.provider, decision.recipe, emulate)
    assert recipe is not None
    out_dtype = matmul.node.meta["val"].dtype

    def compute(a: Tensor, b: Tensor, *bias: Tensor) -> Tensor:
        out = provider.gemm(
            a,
            matmul.a.transposed,
            b,
            matmul.b.transposed,
            recipe,
            out_dtype,
            a_bound=gemm.a_bound,
            b_bound=gemm.b_bound,
        )
        return (out.float() + bias[0].float()).to(out_dtype) if bias else out

    replace_matmul(matmul, compute)
    return ""


def executor(provider_name: str, recipe_name: str, emulate: bool) -> tuple[Provider, Recipe | None]:
    """The provider and recipe that carry a decision out: the planned ones, or their emulation."""
    provider = get_provider(provider_name)
    recipe = provider.recipes.get(recipe_name)
    if emulate and recipe is not None and not recipe.is_high_precision:
        emulated = get_provider("emulated")
        # Fast accumulation is not emulated: its products are exact here.
        return emulated, emulated.recipes.get(recipe_name.removesuffix("_fast"))
    return provider, recipe


def replace_matmul(matmul: MatMul, compute: Callable[..., Tensor]) -> None:
    """Put ``compute(a, b[, bias])`` over the operands as stored in the place of the product."""
    inputs = [matmul.a.base, matmul.b.base] + ([matmul.bias] if matmul.bias is not None else [])
    (out,) = inline(matmul.node, compute, inputs)
    matmul.node.replace_all_uses_with(out)
    matmul.node.graph.erase_node(matmul.node)


def gemms_of(graph: fx.Graph) -> list[tuple[MatMul, Gemm]]:
    """Every mapped GEMM with its description; used where a plan is made for a graph."""
    found, _ = find_matmuls(graph)
    pairs = [(m, describe(m)) for m in found]
    return [(m, g) for m, g in pairs if g is not None]


__all__ = ["Role", "describe", "gemms_of", "lower_gemms", "remove_anchors", "replace_matmul"]
