"""Inductor's lowering of the fused GEMM: a Triton template. The other operators stay calls of their kernels."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from loka_compile._compat import inductor_templates as inductor
from loka_compile.kernels.config import GemmConfig
from loka_compile.lowering.fused import ops, template
from loka_compile.lowering.fused.configs import config_for

_TMA_BYTES = 16


@functools.cache
def register() -> None:
    """Tell Inductor how to lower ``loka::gemm_block_norm``; the other operators need nothing but their kernels."""
    inductor.register(torch.ops.loka.gemm_block_norm.default, lower_gemm_block_norm)


def lower_gemm_block_norm(
    a: Any, b: Any, scale_a: Any, scale_b: Any, block: int, eps: float, out_dtype: torch.dtype, fast: bool,
    with_rstd: bool, residual: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """One template with the shipped configuration; rstd is a second output, written only where it is asked for."""
    if not inductor.makes_triton_code(a.get_device()):
        op = torch.ops.loka.gemm_block_norm.default
        args = (a, b, scale_a, scale_b, block, eps, out_dtype, fast, with_rstd, residual)
        return tuple(inductor.call_kernel(op, *args))
    scaled = scale_a is not None
    a, b, *scales = inductor.realized(*([a, b, scale_a, scale_b] if scaled else [a, b]))
    added = inductor.realized(residual) if residual is not None else []
    device = a.get_device()
    (m, k), n = a.get_size(), b.get_size()[1]
    columns = inductor.size_of(n, fallback=2048)
    config = config_for(
        "gemm_block_norm", inductor.size_of(m, fallback=4096), columns, inductor.size_of(k, fallback=2048),
        a.get_dtype().itemsize, fast,
    ).fitting(a.get_dtype().itemsize, out_dtype.itemsize, inductor.shared_memory(device))  # fmt: skip
    sms, early = inductor.multiprocessors(device), inductor.launches_early(device)
    splits = config.splits if config.splits <= sms else 1
    options = template_options(replace(config, splits=splits), block, columns)
    aligned = config.tma and _by_tma(a, 1) and _by_tma(b, 0)
    name, source, grid = _template(aligned, config.persistent, splits)
    rstd = inductor.empty([m, ops.blocks_of(n, block)] if with_rstd else [0], torch.float32, device)
    written = [rstd] if with_rstd else []
    if splits > 1:
        tiles = ops.blocks_of(m, options["BLOCK_M"]) * ops.blocks_of(n, options["BLOCK_N"])
        parts = inductor.empty([tiles * splits * options["BLOCK_M"] * options["BLOCK_N"]], torch.float32, device)
        written += [parts, inductor.once_a_graph(("zeros", device), lambda: _zeros(a, sms, early))]
    y = inductor.render(
        inductor.template(f"loka_gemm_block_norm_{name}", source, grid), "loka_gemm_block_norm",
        [a, b, *scales, *added, *written], inductor.output_layout(device, out_dtype, [m, n]),
        mutated_inputs=written or None, launch_early=early, PDL=early, SCALING=_scaling(scales), RESIDUAL=bool(added),
        WITH_RSTD=with_rstd, EPS=eps, FAST=fast, NUM_SMS=sms, EVEN_N=inductor.multiple_of(n, options["BLOCK_N"]),
        EVEN_K=inductor.multiple_of(k, options["BLOCK_K"]), ACC_TYPE="tl.float32", **options,
    )  # fmt: skip
    return y, rstd


def _zeros(a: Any, size: int, early: bool) -> Any:
    """int32 [size], filled behind whoever writes ``a``."""
    made = inductor.template("loka_zeros", template.ZEROS, "one")
    layout = inductor.output_layout(a.get_device(), torch.int32, [size])
    options = {"SIZE": size, "ROUNDED": 1 << (size - 1).bit_length(), "ACC_TYPE": "tl.int32"}
    (zeros,) = inductor.realized(
        inductor.render(
            made, "loka_zeros", [a], layout, launch_early=early, PDL=early, num_warps=4, num_stages=1, **options
        )
    )
    return zeros


def _template(aligned: bool, persistent: bool, splits: int) -> tuple[str, str, str]:
    """Name, source and grid of the template for operands that descriptors can read, or not."""
    if splits > 1:
        return ("split_tma", template.SPLIT_TMA, "split") if aligned else ("split", template.SPLIT_TILED, "split")
    if aligned and persistent:
        return "persistent", template.PERSISTENT, "persistent"
    return "tiled", template.TILED, "tiles"


def template_options(config: GemmConfig, block: int, n: int) -> dict[str, int]:
    """Tile sizes for rows of n features: a tile never cuts a block, and is not wider than the row needs."""
    width = 1 << max(4, (n - 1).bit_length())
    norm = min(block, width)
    return {
        "BLOCK_M": config.block_m,
        "SPLITS": config.splits,
        "ROWS": config.block_m // config.splits,
        "BLOCK_N": max(norm, min(config.block_n, width)),
        "BLOCK_K": config.block_k,
        "NORM": norm,
        "GROUP_M": config.group_m,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def _scaling(scales: list[Any]) -> int:
    """0: none, 1: one scale each, 2: one per row of A and per column of B."""
    if not scales:
        return 0
    one_each = all(len(s.get_size()) == 0 or all(inductor.equals(d, 1) for d in s.get_size()) for s in scales)
    return 1 if one_each else 2


def _by_tma(node: Any, contiguous: int) -> bool:
    """Descriptors need the contraction contiguous and rows that start on 16 bytes."""
    stride = node.get_stride()
    bytes_per_row = stride[1 - contiguous] * node.get_dtype().itemsize
    return (
        inductor.equals(stride[contiguous], 1)
        and inductor.multiple_of(bytes_per_row, _TMA_BYTES)
        and inductor.is_aligned(node)
    )
