"""FP8 quantisers: every scaling, along either dimension or along both in one call, in as few passes as possible.

For x [M, N] they give the operand x (contraction along N) and the operand x.T (contraction along M, contiguous as
[N, M]), either or both::

    tensorwise, rowwise with x.T   two reads: maxima, then cast
    rowwise without x.T            one read, or two of a row that stays in L2 where it does not fit the registers
    1x128, 128x128                 one read: a block lies in one tile

The plain-torch twin, which defines scales, zeros, NaN and Inf, is ``loka_compile.lowering.quantize.quantize``; scales
agree to the last bit or two. Tiles: :mod:`loka_compile.kernels.quantize_tiles`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka_compile.kernels import device as dev
from loka_compile.kernels.quantize_kernels import (
    _amax_kernel,
    _blocks_kernel,
    _cast_kernel,
    _rows_kernel,
    _zero_kernel,
)  # fmt: skip
from loka_compile.kernels.quantize_pairs import _amax_pairs_kernel, _both_1x128_kernel
from loka_compile.kernels.quantize_tiles import TILES, Tile
from loka_compile.kernels.reference import LIMITS
from loka_compile.kernels.running import run_kernel

#: Rows and columns of a block in the block scalings.
BLOCK = 128
#: Elements of a row that one program holds in registers; a longer row is read twice.
ROW = 16384
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@torch.no_grad()
def quantize(
    x: Tensor,
    scaling: str,
    dtype: torch.dtype,
    *,
    with_q: bool = True,
    with_qt: bool = False,
    tiles: Mapping[str, Tile] = TILES,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(q, scale, qt, scale_t)`` of x [M, N], neither of them 0: the operands x and x.T, each as quantize has it.

    Args:
        x: bf16, fp16 or fp32; copied if its rows are not contiguous.
        scaling: "tensorwise", "rowwise", "1x128" or "128x128".
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        with_q: make q [M, N]; its scale is [], [M, 1], [M, ceil(N/128)] (rows adjacent) or [ceil(M/128), ceil(N/128)].
        with_qt: make qt [N, M]; its scale likewise, with M and N exchanged. What is not asked for is empty.
        tiles: other tiles than the shipped ones.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    (m, n), device = x.shape, x.device
    q = torch.empty((m, n) if with_q else (0,), dtype=dtype, device=device)
    qt = torch.empty((n, m) if with_qt else (0,), dtype=dtype, device=device)
    output = "both" if with_q and with_qt else "x.T" if with_qt else "x"
    kind = {
        "TYPE": tl.float8e4nv if dtype is torch.float8_e4m3fn else tl.float8e5, "LIMIT": LIMITS[dtype],
        "PTX": dev.ptx(device),
    }  # fmt: skip
    # Rows of x.T are written as words where they are made of whole ones.
    kind_t = {"words": m // 4, "WORDS": m % 4 == 0, "WRITE_Q": with_q, "WRITE_QT": with_qt, **kind}
    pairs = _pairs(x) if output == "both" else None

    def scales(*shape: int, wanted: bool = True) -> Tensor:
        return torch.empty(shape if wanted else (0,), dtype=torch.float32, device=device)

    def grid(tile: Tile) -> tuple[int]:
        return (triton.cdiv(m, tile.block_m * tile.steps) * triton.cdiv(n, tile.block_n),)

    if scaling in ("1x128", "128x128"):
        square = scaling == "128x128"
        blocks_m, blocks_n = triton.cdiv(m, BLOCK), triton.cdiv(n, BLOCK)
        s = scales(*((blocks_m, blocks_n) if square else (blocks_n, m)), wanted=with_q)
        st = scales(*((blocks_n, blocks_m) if square else (blocks_m, n)), wanted=with_qt)
        tile = tiles[f"{scaling} {output}"]
        if pairs is not None and not square:
            run_kernel(
                _both_1x128_kernel, (blocks_m * blocks_n,),
                pairs, q, s, qt, st, m, n, pairs.stride(0), m // 4, 0, m % 4 == 0, **kind, X_TYPE=_TYPES[x.dtype],
                BLOCK_N=tile.block_n, GROUP=tile.group, **_launch(tile, x),
            )  # fmt: skip
        else:
            tile = replace(tile, block_n=BLOCK) if output == "both" else tile
            run_kernel(
                _blocks_kernel, grid(tile),
                x, q, s, qt, st, m, n, x.stride(0), **kind_t, SQUARE=square,
                HELD=tile.held and kind["PTX"] and x.element_size() == 2, **_sizes(tile), **_launch(tile, x),
            )  # fmt: skip
        return (q, s, qt, st) if square else (q, s.t() if with_q else s, qt, st.t() if with_qt else st)
    if scaling == "rowwise" and not with_qt:
        s = scales(m, 1)
        block_n = min(ROW, triton.next_power_of_2(n))
        block_m = max(1, 2048 // block_n)
        run_kernel(
            _rows_kernel, (triton.cdiv(m, block_m),),
            x, q, s, m, n, x.stride(0), **kind, ONCE=n <= block_n, BLOCK_M=block_m, BLOCK_N=block_n,
            num_warps=4 if block_n <= 4096 else 8, num_stages=1, **dev.early(device),
        )  # fmt: skip
        return q, s, qt, scales(wanted=False)
    everything = scaling == "tensorwise"
    # The maxima of rows, then those of columns: one buffer to set to zero.
    maxima = torch.empty(1 if everything else m + n, dtype=torch.int32, device=device)
    run_kernel(
        _zero_kernel, (triton.cdiv(maxima.numel(), 2048),), maxima, maxima.numel(), BLOCK=2048, num_warps=4,
        num_stages=1, **dev.early(device),
    )  # fmt: skip
    rows, columns = maxima[:m], maxima[-n:]
    s = scales(*(() if everything else (m, 1)), wanted=with_q)
    st = scales(*(() if everything else (n, 1)), wanted=with_qt)
    tile = tiles[f"amax {'all' if everything else output}"]
    if pairs is not None and not everything:
        run_kernel(
            _amax_pairs_kernel, grid(tile),
            pairs, rows, columns, m, n // 2, pairs.stride(0), X_TYPE=_TYPES[x.dtype], PTX=kind["PTX"],
            STEPS=tile.steps, **(_sizes(tile) | {"BLOCK_N": tile.block_n // 2}), **_launch(tile, x),
        )  # fmt: skip
    else:
        run_kernel(
            _amax_kernel, grid(tile),
            x, rows, columns, m, n, x.stride(0), ALL=everything, BY_ROW=with_q and not everything,
            BY_COLUMN=with_qt and not everything, STEPS=tile.steps, **_sizes(tile), **_launch(tile, x),
        )  # fmt: skip
    tile = tiles[f"cast {output}"]
    run_kernel(
        _cast_kernel, grid(tile), x, rows, columns, q, s, qt, st, m, n, x.stride(0), **kind_t, ALL=everything,
        **_sizes(tile), **_launch(tile, x),
    )  # fmt: skip
    return q, s, qt, st


def _pairs(x: Tensor) -> Tensor | None:
    """x [M, N] of 16-bit numbers as int32 [M, N/2]; None where neighbours do not make whole words."""
    if x.element_size() != 2 or any(size % 2 for size in (x.shape[1], x.stride(0), x.storage_offset())):
        return None
    return x.view(torch.int32)


def _sizes(tile: Tile) -> dict[str, int]:
    return {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "GROUP": tile.group}


def _launch(tile: Tile, x: Tensor) -> dict[str, Any]:
    options = {"num_warps": tile.warps, "num_stages": 1, **dev.early(x.device)}
    # In fp32 a tile alone takes as many registers, and numbers that do not come 16 bytes at a time
    # have an address each.
    whole = x.element_size() == 2 and not any(size % 16 for size in (*x.shape, x.stride(0)))
    return options | ({"maxnreg": tile.registers} if tile.registers and whole else {})
