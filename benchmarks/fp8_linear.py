"""Linear layers in emulated FP8: real rounding of every operand, exact products. Runs anywhere, needs nothing of ours.

This is what plain FP8 does to a model (all three GEMMs of each linear, nothing rewritten, nothing kept back), for the
arms that have to show a loss. Speeds of it mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def round_to_fp8(x: Tensor, dim: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values of an FP8 format, in x's dtype, and the scale that brings them back: x ~ values * scale.

    ``dim`` None: one scale for the tensor; else one for each slice along that (contracted) dimension.
    """
    largest = x.abs().amax() if dim is None else x.abs().amax(dim=dim, keepdim=True)
    limit = torch.finfo(dtype).max
    scale = largest.float().clamp(min=1e-12) / limit
    values = (x.float() / scale).clamp(-limit, limit).to(dtype)
    return values.to(x.dtype), scale


def fp8_matmul(a: Tensor, b: Tensor, rowwise: bool, a_dtype: torch.dtype, b_dtype: torch.dtype) -> Tensor:
    """a [m, k] @ b [k, n] with both rounded to FP8. FP8 values are exact in bf16 and fp32, so only the sum rounds."""
    qa, sa = round_to_fp8(a, 1 if rowwise else None, a_dtype)
    qb, sb = round_to_fp8(b, 0 if rowwise else None, b_dtype)
    return ((qa @ qb).float() * sa * sb).to(a.dtype)


class _FP8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rowwise: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rowwise = rowwise
        return fp8_matmul(x, weight.t(), rowwise, E4M3, E4M3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        # The usual choice of formats: with one scale per tensor, gradients need e5m2's range.
        g = E4M3 if ctx.rowwise else E5M2
        grad_input = fp8_matmul(grad, weight, ctx.rowwise, g, E4M3)
        grad_weight = fp8_matmul(grad.t(), x, ctx.rowwise, g, E4M3)
        return grad_input, grad_weight, None


class EmulatedFP8Linear(nn.Module):
    """Takes a linear's place and its parameters, under their names."""

    def __init__(self, linear: nn.Linear, rowwise: bool) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.rowwise = rowwise

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        flat = x.reshape(-1, x.shape[-1]).to(dtype)
        with torch.autocast(kind, enabled=False):
            out = _FP8Linear.apply(flat, self.weight.to(dtype), self.rowwise)
            if self.bias is not None:
                out = out + self.bias.to(dtype)
        return out.unflatten(0, x.shape[:-1])


def is_large(min_features: int) -> Callable[[nn.Module, str], bool]:
    """The paper's choice of layers (section II): linears with at least 128 inputs and outputs; and multiples of 16."""

    def accept(module: nn.Module, name: str = "") -> bool:
        # Subclasses do more than a linear (e.g. mix tokens), which a replacement would lose.
        if type(module) is not nn.Linear:
            return False
        sizes = (module.in_features, module.out_features)
        return min(sizes) >= min_features and not any(s % 16 for s in sizes)

    return accept


def emulate_fp8(module: nn.Module, *, rowwise: bool, min_features: int = 128) -> nn.Module:
    """Replace the large linears of a module, in place; returns the module.

    Raises:
        ValueError: it has none, so that the arm would say nothing.
    """
    accept = is_large(min_features)
    found = [(name, m) for name, m in module.named_modules() if accept(m, name)]
    if not found:
        raise ValueError(f"no linear of {type(module).__name__} has {min_features} or more inputs and outputs")
    for name, linear in found:
        module.set_submodule(name, EmulatedFP8Linear(linear, rowwise))
    return module
