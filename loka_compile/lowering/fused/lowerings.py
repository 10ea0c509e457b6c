"""Inductor's lowering of the fused GEMMs: a Triton template. The other operators stay calls of their kernels."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from loka_compile._compat import inductor_pointwise
from loka_compile._compat import inductor_templates as inductor
from loka_compile.kernels.config import BLOCK, GemmConfig, Scaling, scaling_of
from loka_compile.lowering.fused import ops, ops_activation, split_template, template  # noqa: F401
from loka_compile.lowering.fused.configs import config_for, gemm_kernel

_TMA_BYTES = 16


@functools.cache
def register() -> None:
    """Tell Inductor how to lower the two fused GEMMs, the gate, constants and the barrier; the others need nothing but
    their kernels."""
    inductor.register(torch.ops.loka.gemm_block_norm.default, lower_gemm_block_norm)
    inductor.register(torch.ops.loka.gemm_norm_activation.default, lower_gemm_norm_activation)
    inductor.register(torch.ops.loka.gate.default, lower_gate)
    inductor.register(torch.ops.loka.constant.default, inductor.constant)
    inductor.register(torch.ops.loka.materialise.default, inductor.written)


def lower_gate(x: Any) -> Any:
    """A pointwise operator, which becomes a part of the GEMM that made x."""
    if not inductor.makes_triton_code(x.get_device()):
        return inductor.call_kernel(torch.ops.loka.gate.default, x)
    return inductor_pointwise.gate(x)


def lower_gemm_block_norm(
    a: Any, b: Any, scale_a: Any, scale_b: Any, block: int, eps: float, out_dtype: torch.dtype, fast: bool,
    with_rstd: bool, residual: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """The template with the shipped configuration; rstd is a second output, written only where it is asked for."""
    if not inductor.makes_triton_code(a.get_device()):
        op = torch.ops.loka.gemm_block_norm.default
        args = (a, b, scale_a, scale_b, block, eps, out_dtype, fast, with_rstd, residual)
        return tuple(inductor.call_kernel(op, *args))
    made = _Rendering((a, b, scale_a, scale_b), block, eps, fast, residual)
    rstd = made.output([made.m, ops.blocks_of(made.n, block)], torch.float32, with_rstd)
    return made.result(out_dtype, {"RSTD": rstd} if with_rstd else {}), rstd


def lower_gemm_norm_activation(
    a: Any, b: Any, scale_a: Any, scale_b: Any, activation: str, block: int, eps: float, out_dtype: torch.dtype,
    kept_dtype: torch.dtype, fast: bool, with_out: bool, kept: bool, quantised: bool, residual: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The same template with the activation in its body; FP8 is its own output where nothing else is wanted."""
    if not inductor.makes_triton_code(a.get_device()):
        op = torch.ops.loka.gemm_norm_activation.default
        args = (a, b, scale_a, scale_b, activation, block, eps, out_dtype, kept_dtype, fast, with_out, kept, quantised)
        return tuple(inductor.call_kernel(op, *args, residual))
    made = _Rendering((a, b, scale_a, scale_b), block, eps, fast, residual, activation)
    size = [made.m, made.n]
    rstd = made.output([made.m, ops.blocks_of(made.n, block)], torch.float32, kept)
    h = made.output(size, kept_dtype, kept)
    scale = made.output([made.n // BLOCK, made.m], torch.float32, quantised)
    beside = quantised and with_out
    q = made.output(size, ops.FP8, beside)
    written = {"RSTD": rstd, "KEPT": h} if kept else {}
    written |= ({"QS": scale} if quantised else {}) | ({"Q": q} if beside else {})
    main = made.result(out_dtype if with_out else ops.FP8, written)
    return (main, h, rstd, q, scale) if with_out else (made.output(size, out_dtype, False), h, rstd, main, scale)


class _Rendering:
    """One call of the template: its operands, configuration and outputs."""

    def __init__(
        self, operands: tuple[Any, ...], block: int, eps: float, fast: bool, residual: Any, activation: str = ""
    ) -> None:
        self.a, self.b, *self.scales = inductor.realized(*(operands if operands[2] is not None else operands[:2]))
        self.added = inductor.realized(residual) if residual is not None else []
        (self.m, self.k), self.n = self.a.get_size(), self.b.get_size()[1]
        self.device = self.a.get_device()
        self.block, self.eps, self.fast, self.activation = block, eps, fast, activation

    def output(self, size: list[Any], dtype: torch.dtype, wanted: bool) -> Any:
        """A buffer that the template writes besides its own output; empty if it is not wanted."""
        return inductor.empty(size if wanted else [0], dtype, self.device)

    def result(self, out_dtype: torch.dtype, written: dict[str, Any]) -> Any:
        """The template's own output, [M, N]; ``written``: the others by their names in the template, in its order."""
        a, b, device, itemsize = self.a, self.b, self.device, self.a.get_dtype().itemsize
        columns = inductor.size_of(self.n, fallback=2048)
        shapes = [s.get_size() for s in self.scales] or (None, None)
        scaling = scaling_of(shapes[0], shapes[1], self.m, self.n, inductor.equals)
        widest = max(out_dtype.itemsize, written["KEPT"].get_dtype().itemsize if "KEPT" in written else 0)
        config = config_for(
            gemm_kernel(scaling.in_blocks, self.activation == "swish_norm", "QS" in written),
            inductor.size_of(self.m, fallback=4096), columns, inductor.size_of(self.k, fallback=2048), itemsize,
            self.fast, scaling.kind == 2, bool(self.added) or widest > 2,
            inductor.multiple_of(self.k, 16 // itemsize),
        )  # fmt: skip
        if scaling.in_blocks:
            config = replace(config, block_k=BLOCK)
        config = config.fitting(itemsize, widest, inductor.shared_memory(device))
        sms, early = inductor.multiprocessors(device), inductor.launches_early(device)
        plain = not scaling.in_blocks and not self.activation
        config = replace(config, splits=config.splits if plain and config.splits <= sms else 1)
        options = template_options(config, self.block, columns, scaling)
        name, source, grid = _template(config, config.tma and _by_tma(a, 1) and _by_tma(b, 0))
        if config.splits > 1:
            tiles = ops.blocks_of(self.m, options["BLOCK_M"]) * ops.blocks_of(self.n, options["BLOCK_N"])
            parts = [tiles * config.splits * options["BLOCK_M"] * options["BLOCK_N"]]
            zeros = inductor.once_a_graph(("zeros", device), lambda: _zeros(a, sms, early))
            written = written | {"PARTS": inductor.empty(parts, torch.float32, device), "COUNTERS": zeros}
        return inductor.render(
            inductor.template(f"loka_gemm_block_norm_{name}", source, grid), "loka_gemm_block_norm",
            [a, b, *self.scales, *self.added, *written.values()],
            inductor.output_layout(device, out_dtype, [self.m, self.n]), mutated_inputs=list(written.values()) or None,
            launch_early=early, PDL=early, PTX=inductor_pointwise.has_ptx(device), SCALING=scaling.kind,
            RESIDUAL=bool(self.added), WITH_RSTD="RSTD" in written, KEEP="KEPT" in written,
            ACTIVATION=("", "hardswish", "swish_norm").index(self.activation),
            QUANTISED=int("QS" in written) + int("Q" in written), EPS=self.eps, FAST=self.fast,
            NUM_SMS=sms, EVEN_N=inductor.multiple_of(self.n, options["BLOCK_N"]),
            EVEN_K=inductor.multiple_of(self.k, options["BLOCK_K"]), ACC_TYPE="tl.float32", **options,
        )  # fmt: skip


def _template(config: GemmConfig, by_tma: bool) -> tuple[str, str, str]:
    """Name, source and grid of the template for operands that descriptors can read, or not."""
    if config.splits > 1:
        return ("split_tma", split_template.TMA, "split") if by_tma else ("split", split_template.POINTERS, "split")
    if by_tma and config.persistent:
        return "persistent", template.PERSISTENT, "persistent"
    return "tiled", template.TILED, "tiles"


def _zeros(a: Any, size: int, early: bool) -> Any:
    """int32 [size], filled behind whoever writes ``a``."""
    made = inductor.template("loka_zeros", split_template.ZEROS, "one")
    layout = inductor.output_layout(a.get_device(), torch.int32, [size])
    (zeros,) = inductor.realized(
        inductor.render(
            made, "loka_zeros", [a], layout, launch_early=early, PDL=early, SIZE=size,
            ROUNDED=1 << (size - 1).bit_length(), ACC_TYPE="tl.int32", num_warps=4, num_stages=1,
        )
    )  # fmt: skip
    return zeros


def template_options(config: GemmConfig, block: int, n: int, scaling: Scaling) -> dict[str, int]:
    """Tile sizes for rows of n features: a tile never cuts a block, and is not wider than the row needs."""
    width = 1 << max(4, (n - 1).bit_length())
    norm = min(block, width)
    block_n = max(norm, min(config.block_n, width))
    options = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": config.block_k,
        "NORM": norm,
        "GROUP_M": config.group_m,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    if scaling.in_blocks:
        options |= {"ROWS_A": scaling.rows_a, "ROWS_B": scaling.rows_b, "COLUMNS": min(scaling.rows_b, block_n)}
    if config.splits > 1:
        options |= {"SPLITS": config.splits, "ROWS": config.block_m // config.splits}
    return options


def _by_tma(node: Any, contiguous: int) -> bool:
    """Descriptors need the contraction contiguous and rows that start on 16 bytes."""
    stride = node.get_stride()
    bytes_per_row = stride[1 - contiguous] * node.get_dtype().itemsize
    return (
        inductor.equals(stride[contiguous], 1)
        and inductor.multiple_of(bytes_per_row, _TMA_BYTES)
        and inductor.is_aligned(node)
    )
