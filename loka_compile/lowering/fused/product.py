"""The GEMM in front of a BlockNorm: finds it, says why the fused kernels do not take it, hands its operands over."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

import loka_compile.lowering.providers.torch_scaled_mm  # noqa: F401  (registers the block-scaled GEMM)
from loka_compile._compat.shapes import size_hint
from loka_compile.lowering.fused import configs
from loka_compile.lowering.fused.match import (
    ALIAS,
    CONVERT,
    FP8,
    VIEWS,
    arg,
    copy_meta,
    dtype_of,
    emit,
    is_call,
    is_rounded_later,
    shape_to_view,
)

aten = torch.ops.aten

#: Widest block that fits a tile of the kernels.
MAX_BLOCK = 256
#: Narrowest last block (issue 5): below it the mean of squares is taken over too few values.
MIN_LAST_BLOCK = 128


@dataclass(frozen=True)
class Product:
    """The GEMM in front of a BlockNorm."""

    node: fx.Node
    #: Nodes between the GEMM and the norm, GEMM included.
    path: tuple[fx.Node, ...]
    a: fx.Node
    b: fx.Node
    scale_a: fx.Node | None
    scale_b: fx.Node | None
    fast: bool
    #: What is added to the product in front of the norm, in the shape of the norm's input or [M, N].
    residual: fx.Node | None = None
    #: The product as it is added: the GEMM's result behind its casts and views, without the residual.
    summand: fx.Node | None = None
    #: Scaled in blocks: b lies as [N, K], and the scales of 1x128 blocks as [blocks of K, rows].
    in_blocks: bool = False
    #: Only with in_blocks: B is scaled in 128x128 blocks, [N/128, blocks of K or more].
    squares: bool = False

    #: The sum with the residual.
    total: fx.Node | None = None

    @property
    def rowwise(self) -> bool:
        """Whether each row of A and each column of B has a scale."""
        return not self.in_blocks and self.scale_a is not None and self.scale_a.meta["val"].numel() != 1

    @property
    def value(self) -> fx.Node:
        """What the norm reads, without casts and views: the GEMM's result, or its sum with the residual."""
        return self.node if self.total is None else self.total

    @property
    def below(self) -> tuple[fx.Node, ...]:
        """The part of the path that is not ``value`` or made from it."""
        return self.path[self.path.index(self.value) + 1 :]


def on_this_device(value: torch.Tensor) -> str:
    """Why the kernels cannot run on the device of ``value``, or ""."""
    if value.device.type != "cuda":
        return f"the fused kernels are for CUDA, not {value.device.type}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(value.device) < (8, 9):
        return "FP8 needs a GPU of compute capability 8.9"
    return ""


def block_refusal(n: Any, block: int) -> str:
    """Why rows of n features in blocks of ``block`` do not fit the kernels, or ""."""
    if not isinstance(n, int):
        return "the number of features is not known when compiling"
    if block > MAX_BLOCK or block & (block - 1):
        return f"a block of {block} does not fit a tile of {MAX_BLOCK} columns"
    if n > MAX_BLOCK and 0 < n % block < min(MIN_LAST_BLOCK, block):
        return f"{n} features leave a last block of {n % block}"
    return ""


def product_of(norm: fx.Node) -> Product | None:
    """Walk from the norm's input over casts, aliases, views of the rows and one sum with a residual to the GEMM."""
    path: list[fx.Node] = []
    node = arg(norm, 0)
    while _keeps_rows(node):
        path.append(node)
        node = arg(node, 0)
    if not is_sum(node):
        return _gemm(node, path)
    left, right = node.args
    products = [
        replace(found, residual=residual, summand=summand, total=node)
        for summand, residual in ((left, right), (right, left))
        if (found := _gemm(summand, [*path, node])) is not None
    ]
    # Where both are products, the one that nothing else reads.
    return next((p for p in products if _alone(p.below)), products[0] if products else None)


def _alone(path: tuple[fx.Node, ...]) -> bool:
    return all(len(node.users) == 1 for node in path)


def _keeps_rows(node: Any) -> bool:
    """Whether a node only casts its input, or groups the rows of [..., N] differently."""
    same_width = is_call(node, *VIEWS) and arg(node, 0).meta["val"].shape[-1] == node.meta["val"].shape[-1]
    return is_call(node, *CONVERT, *ALIAS) or same_width


def is_sum(node: Any) -> bool:
    """Whether a node adds two tensors of its own shape."""
    if not is_call(node, aten.add.Tensor) or node.kwargs:
        return False
    shape = node.meta["val"].shape
    return all(isinstance(n, fx.Node) and n.meta["val"].shape == shape for n in node.args)


def _gemm(node: Any, path: list[fx.Node]) -> Product | None:
    """The GEMM behind casts, aliases and views of the rows; path is what lies between the norm and ``node``."""
    path, operands = list(path), list[Any]()
    while isinstance(node, fx.Node):
        path.append(node)
        if is_call(node, aten.mm.default):
            return Product(node, tuple(path), arg(node, 0), arg(node, 1), None, None, True)
        if is_call(node, aten._scaled_mm.default):
            operands = [*node.args, *[None] * (8 - len(node.args))]
            a, b, scale_a, scale_b, bias, scale_result, _, fast = operands
            if bias is not None or scale_result is not None or node.kwargs:
                return None
            return Product(node, tuple(path), a, b, scale_a, scale_b, bool(fast))
        if is_call(node, torch.ops.loka.scaled_mm_blockwise.default) and not node.kwargs:
            operands = list(node.args)
            a, scale_a, b, scale_b, squares, _ = operands
            return Product(node, tuple(path), a, b, scale_a, scale_b, True, in_blocks=True, squares=bool(squares))
        if not _keeps_rows(node):
            return None
        node = arg(node, 0)
    return None


def refusal(norm: fx.Node, product: Product, gated: bool = False, quantised: bool = False) -> str:
    """Why the fused kernels do not take a GEMM and its norm, or "".

    ``gated``: with SwishNorm's gate, which reads the product as well as the norm does. ``quantised``: with a result in
    FP8 and 1x128 blocks.
    """
    value = product.node.meta["val"]
    reason = on_this_device(value) or block_refusal(value.shape[1], int(arg(norm, 1)))
    if reason:
        return reason
    if not _alone(product.below if gated else product.path):
        return "the GEMM's result is read by others as well"
    if shape_to_view(norm.meta["val"][0].shape) is None:
        return "more than one of its sizes changes from call to call"
    operand = dtype_of(product.a)
    if operand not in (*FP8, torch.bfloat16, torch.float16):
        return f"{operand} operands have no fused kernel"
    if operand not in FP8 and dtype_of(product.b) != operand:
        return "the operands' dtypes differ"
    if operand in FP8 and not product.in_blocks:
        scales = [s.meta["val"].numel() for s in (product.scale_a, product.scale_b) if s is not None]
        m, n = value.shape
        if scales != [1, 1] and [s == size for s, size in zip(scales, (m, n), strict=True)] != [True, True]:
            return "its scales are in blocks of another kind"
    if any(dtype_of(node) == torch.float64 for node in product.path):
        return "float64 has no fused kernel"
    m, n, k = sizes_of(product)
    if m is None or n is None or k is None:
        return "its size is unknown when compiling"
    kernel = configs.gemm_kernel(product.in_blocks, gated, quantised)
    if configs.find(kernel, m, n, k, operand.itemsize, product.fast, product.rowwise) is None:
        of = f"{' with SwishNorm' * gated}{' of block scales' * product.in_blocks}"
        return f"at {m}x{n}x{k} the fused kernel{of} was not measured to be faster"
    return ""


def sizes_of(product: Product) -> tuple[int | None, int | None, int | None]:
    """M, N and K as far as they are known when compiling."""
    (m, n), k = product.node.meta["val"].shape, product.a.meta["val"].shape[1]
    return size_hint(m), size_hint(n), size_hint(k)


def kind_of(product: Product) -> str:
    """The operands in words."""
    if dtype_of(product.a) not in FP8:
        return str(dtype_of(product.a)).removeprefix("torch.")
    return "block-scaled FP8" if product.in_blocks else "FP8"


def operands_of(graph: fx.Graph, product: Product) -> tuple[fx.Node | None, ...]:
    """A [M, K], B [K, N] and their scales as ``loka::gemm_block_norm`` takes them; views at the insertion point."""
    if not product.in_blocks:
        return product.a, product.b, product.scale_a, product.scale_b

    def turned(node: fx.Node | None) -> fx.Node:
        assert node is not None
        return emit(graph, product.node, aten.permute.default, (node, [1, 0]))[0]

    scale_b = product.scale_b if product.squares else turned(product.scale_b)
    return product.a, turned(product.b), turned(product.scale_a), scale_b


def handed_on(product: Product, value: fx.Node) -> torch.dtype:
    """The dtype in which a fused kernel hands ``value`` on: its own, or the GEMM's if it is rounded later anyway.

    Under autocast a norm returns fp32, and what follows rounds it. A tile in fp32 would take the shared memory of a
    stage of the pipeline, although the epilogue writes 16 bits or FP8 (and computes in fp32 in any case).
    """
    own, narrow = dtype_of(value), dtype_of(product.node)
    return narrow if narrow.itemsize < own.itemsize and is_rounded_later(value) else own


def reshaped(graph: fx.Graph, node: fx.Node, like: torch.Tensor) -> fx.Node:
    """[M, N] in the shape of ``like`` [..., N], or the other way round."""
    if node.meta["val"].dim() == like.dim():
        return node
    # Not the shape itself: a symbolic size must not stand in a graph's arguments.
    new = graph.call_function(aten.reshape.default, (node, shape_to_view(like.shape)))
    return copy_meta(new, node, like)


def eps_of(norm: fx.Node) -> float:
    """What a ``loka::block_norm`` adds to the mean of squares."""
    eps = arg(norm, 2) if len(norm.args) > 2 else None
    return torch.finfo(torch.float32).eps if eps is None else float(eps)
