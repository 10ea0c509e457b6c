"""FP8 GEMMs by the documented rule, written out with numpy-like loops: the reference of the lowering tests."""

from __future__ import annotations

import torch
from torch import Tensor

#: How each recipe scales A and B; written down here, not read from the package.
RECIPES = {
    "tensorwise": ("tensor", "tensor"),
    "rowwise": ("row", "row"),
    "blockwise": ("1x128", "128x128"),
    "blockwise_1x128": ("1x128", "1x128"),
    "blockwise_128x128": ("128x128", "128x128"),
}


def rounded(x: Tensor, scaling: str, fixed: float | None = None) -> Tensor:
    """x [rows, k] after quantisation to e4m3 and back, fp64. ``fixed``: multiply by that, with no amax."""
    x = x.detach().float()
    out = torch.empty(x.shape, dtype=torch.float64)
    rows, k = x.shape
    height = {"tensor": rows, "row": 1, "1x128": 1, "128x128": 128}[scaling]
    width = {"tensor": k, "row": k, "1x128": 128, "128x128": 128}[scaling]
    for top in range(0, rows, height):
        for left in range(0, k, width):
            part = x[top : top + height, left : left + width]
            scale = 1 / fixed if fixed else max(float(part.abs().max()), 1e-12) / 448.0
            data = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            out[top : top + height, left : left + width] = data.double() * scale
    return out


class Layer(torch.autograd.Function):
    """``y = x @ w.T`` in which each GEMM that ``recipes`` names runs in FP8; fp64 sums."""

    @staticmethod
    def forward(ctx, x, w, recipes, fixed):
        ctx.save_for_backward(x, w)
        ctx.recipes, ctx.fixed = recipes, fixed
        return product(x, w, recipes.get("forward"), a_fixed=fixed)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        dx = product(grad, w.t(), ctx.recipes.get("grad_input"))
        dw = product(grad.t(), x.t(), ctx.recipes.get("grad_weight"), b_fixed=ctx.fixed)
        return dx, dw, None, None


def product(a: Tensor, b: Tensor, recipe: str | None, a_fixed=None, b_fixed=None) -> Tensor:
    """``A [m, k] @ B [n, k].T``."""
    if recipe is None:
        return a @ b.t()
    left, right = RECIPES[recipe]
    tensorwise = recipe == "tensorwise"
    return rounded(a, left, a_fixed if tensorwise else None) @ rounded(b, right, b_fixed if tensorwise else None).t()
