"""The ``loka::`` operators that the Mods put into a graph, each with its reference in plain torch.

    block_norm(x, block, eps) -> (y, rstd)        RMS normalisation of each block of features, no parameters
    block_norm_backward(grad, y, rstd, block)     its gradient, from the output alone
    anchor(x, unused) -> x                        gives parameters that a Mod no longer reads a zero gradient

They stay whole through AOTAutograd, so that a fused kernel can swallow them; what nothing swallows is decomposed
into the reference below and left to Inductor. ``torch.compile(backend="inductor")`` decomposes them as well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loka_compile._compat.exporting import is_exporting

LIBRARY = torch.library.Library("loka", "FRAGMENT")


def block_norm_ref(x: Tensor, block: int, eps: float | None = None) -> tuple[Tensor, Tensor]:
    """BlockNorm (paper section III-B.2): RMS-normalise each block of ``block`` features on its own.

    Args:
        x: [..., N], floating point. Cut from the left; a last short block is normalised over its own width.
        block: features per block. N <= block is one block.
        eps: added to the mean square; None is the machine epsilon of the dtype it is computed in.

    Returns:
        y [..., N] in x's dtype, and rstd [..., ceil(N / block)] in fp32 (fp64 for fp64 input). Computed in fp32.
    """
    blocks, widths = _split(x, block)
    if eps is None:
        eps = torch.finfo(blocks.dtype).eps
    mean_square = blocks.square().sum(-1, keepdim=True) / widths
    rstd = torch.rsqrt(mean_square + eps)
    return _join(blocks * rstd, x), rstd.squeeze(-1)


def block_norm_backward_ref(grad: Tensor, y: Tensor, rstd: Tensor, block: int) -> Tensor:
    """Gradient of BlockNorm: ``dx = rstd * (grad - y * mean(grad * y))`` within each block.

    Args:
        grad: [..., N], gradient of y.
        y: [..., N], the normalised output that the forward returned.
        rstd: [..., ceil(N / block)], from the forward.
        block: features per block.

    Returns:
        dx [..., N] in grad's dtype.
    """
    grads, widths = _split(grad, block)
    ys, _ = _split(y, block)
    projection = (grads * ys).sum(-1, keepdim=True) / widths
    return _join(rstd.unsqueeze(-1) * (grads - ys * projection), grad)


def _split(x: Tensor, block: int) -> tuple[Tensor, Tensor | float]:
    """[..., N] -> [..., blocks, block] in at least fp32, zero-padded, and the true width of each block."""
    n = x.shape[-1]
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if n <= block:
        return x.unsqueeze(-2), float(n)
    count, last = -(-n // block), n % block
    if last == 0:
        return x.unflatten(-1, (count, block)), float(block)
    padded = F.pad(x, (0, count * block - n)).unflatten(-1, (count, block))
    index = torch.arange(count, device=x.device).unsqueeze(-1)
    widths = torch.where(index == count - 1, float(last), float(block)).to(x.dtype)
    return padded, widths


def _join(blocks: Tensor, like: Tensor) -> Tensor:
    # Contiguous like the fake results below, also where a short block was padded.
    return blocks.flatten(-2)[..., : like.shape[-1]].to(like.dtype).contiguous()


LIBRARY.define("block_norm(Tensor x, int block, float? eps=None) -> (Tensor, Tensor)")
LIBRARY.define("block_norm_backward(Tensor grad, Tensor y, Tensor rstd, int block) -> Tensor")
LIBRARY.define("anchor(Tensor x, Tensor[] unused) -> Tensor")
LIBRARY.impl("block_norm", block_norm_ref, "CompositeExplicitAutograd")
LIBRARY.impl("block_norm_backward", block_norm_backward_ref, "CompositeExplicitAutograd")
# An operator may not return its input, hence the clone; the compiled graph has neither (the lowering removes it).
LIBRARY.impl("anchor", lambda x, unused: x.clone(), "CompositeExplicitAutograd")


# Without shapes of their own, fake tensors would run the references, whose padding specialises a dynamic batch.
@torch.library.register_fake("loka::block_norm", lib=LIBRARY)
def _(x: Tensor, block: int, eps: float | None = None) -> tuple[Tensor, Tensor]:
    blocks = max(1, -(-x.shape[-1] // block))
    rstd = x.new_empty((*x.shape[:-1], blocks), dtype=torch.promote_types(x.dtype, torch.float32))
    return x.new_empty(x.shape), rstd


@torch.library.register_fake("loka::block_norm_backward", lib=LIBRARY)
def _(grad: Tensor, y: Tensor, rstd: Tensor, block: int) -> Tensor:
    return grad.new_empty(grad.shape)


@torch.library.register_fake("loka::anchor", lib=LIBRARY)
def _(x: Tensor, unused: list[Tensor]) -> Tensor:
    return x.clone()


def _block_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)
    ctx.block = inputs[1]
    ctx.mark_non_differentiable(output[1])


def _block_norm_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    y, rstd = ctx.saved_tensors
    return torch.ops.loka.block_norm_backward(grad, y, rstd, ctx.block), None, None


def _anchor_setup(ctx: Any, inputs: tuple[Tensor, list[Tensor]], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1])


def _anchor_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    return grad, [torch.zeros_like(p) if p.requires_grad else None for p in ctx.saved_tensors]


torch.library.register_autograd("loka::block_norm", _block_norm_backward, setup_context=_block_norm_setup, lib=LIBRARY)
torch.library.register_autograd("loka::anchor", _anchor_backward, setup_context=_anchor_setup, lib=LIBRARY)

# On CUDA autocast runs layer_norm and rms_norm in fp32 and returns fp32; on the CPU it leaves their dtype alone.
torch.library.register_autocast("loka::block_norm", "cuda", torch.float32, lib=LIBRARY)

#: What each operator means in plain torch: the lowering inlines these, and Inductor decomposes with them.
DECOMPOSITIONS = {
    torch.ops.loka.block_norm.default: block_norm_ref,
    torch.ops.loka.block_norm_backward.default: block_norm_backward_ref,
}


def block_norm(x: Tensor, block: int, eps: float | None = None) -> Tensor:
    """Differentiable BlockNorm of x [..., N]; see :func:`block_norm_ref`."""
    if is_exporting():  # an exported program must load where loka_compile is not installed
        return block_norm_ref(x, block, eps)[0]
    y: Tensor = torch.ops.loka.block_norm.default(x, block, eps)[0]
    return y


class _Anchor(torch.autograd.Function):
    """The anchor in eager: a view instead of the operator's copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *unused: Tensor) -> Tensor:
        ctx.save_for_backward(*unused)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], *(torch.zeros_like(p) if p.requires_grad else None for p in ctx.saved_tensors)


def anchor(x: Tensor, unused: list[Tensor]) -> Tensor:
    """x itself; in the backward every tensor of ``unused`` gets a zero gradient, never None."""
    if is_exporting():
        return x
    if torch.compiler.is_compiling():
        anchored: Tensor = torch.ops.loka.anchor.default(x, unused)
        return anchored
    viewed: Tensor = _Anchor.apply(x, *unused)  # type: ignore[no-untyped-call]
    return viewed
