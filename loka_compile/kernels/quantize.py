"""FP8 quantisers: every scaling, along either dimension or along both in one call, in as few passes as possible.

For x [M, N] they give the operand x (contraction along N) and the operand x.T (contraction along M, contiguous as
[N, M]), either or both::

    tensorwise, rowwise with x.T   two reads: maxima (integer atomics, so that their order does not matter), then cast
    rowwise without x.T            one read, or two of a row that stays in L2 where it does not fit the registers
    1x128, 128x128                 one read: a block lies in one tile

The plain-torch twin, which defines scales, zeros, NaN and Inf, is ``loka_compile.lowering.quantize.quantize``; scales
agree to the last bit or two. Transposed FP8 is stored as bytes, and maxima are compared
as integers: Triton 3.6 miscompiles some transposed FP8 stores next to min.NaN and max.NaN (triton-lang/triton #11111).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka_compile.kernels import device as dev
from loka_compile.kernels.reference import LIMITS

#: Rows and columns of a block in the block scalings.
BLOCK = 128
#: Elements of a row that one program holds in registers; a longer row is read twice.
ROW = 16384
#: Bits of the smallest amax, 1e-12, as an integer that orders like the number.
_FLOOR = tl.constexpr(0x2B8CBCCC)


@triton.jit
def _scale_of(largest, LIMIT: tl.constexpr):
    """From maxima as :func:`device.bits`: the scale that multiplies FP8 data, and what x is multiplied by.

    Without exact divisions: their slow path, once for each column in each thread, takes longer than the memory.
    """
    scale = tl.maximum(largest, _FLOOR).to(tl.float32, bitcast=True) * (1.0 / LIMIT)
    return scale, 1.0 / scale


@triton.jit
def _store_q(Q, q, rm, rn, M, N):
    tl.store(Q + rm.to(tl.int64)[:, None] * N + rn[None, :], q, mask=(rm[:, None] < M) & (rn[None, :] < N))


@triton.jit
def _store_qt(QT, q, rm, rn, M, N):
    ptr = QT.to(tl.pointer_type(tl.uint8), bitcast=True) + rn.to(tl.int64)[:, None] * M + rm[None, :]
    tl.store(ptr, tl.trans(q.to(tl.uint8, bitcast=True)), mask=(rn[:, None] < N) & (rm[None, :] < M))


@triton.jit
def _load(X, rm, rn, M, N, stride):
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    return tl.load(X + rm.to(tl.int64)[:, None] * stride + rn[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _blocks_kernel(
    X, Q, S, QT, ST, M, N, stride, TYPE: tl.constexpr, LIMIT: tl.constexpr, SQUARE: tl.constexpr,
    WRITE_Q: tl.constexpr, WRITE_QT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile holds whole blocks: BLOCK_N is 128, and BLOCK_M too where columns or squares share a scale."""
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    size = dev.bits(_load(X, rm, rn, M, N, stride))
    # The tile is loaded again for each output, from the L1 cache: held in registers it would leave room for one program
    # per multiprocessor, and Triton would turn it byte by byte. The stores in between keep the loads apart.
    if SQUARE:
        scale, inverse = _scale_of(tl.max(tl.max(size, axis=1), axis=0), LIMIT)
        if WRITE_Q:
            tl.store(S + pid_m * tl.num_programs(1) + pid_n, scale)
            _store_q(Q, dev.to_fp8(_load(X, rm, rn, M, N, stride), inverse, TYPE, LIMIT), rm, rn, M, N)
        if WRITE_QT:
            tl.store(ST + pid_n * tl.num_programs(0) + pid_m, scale)
            _store_qt(QT, dev.to_fp8(_load(X, rm, rn, M, N, stride), inverse, TYPE, LIMIT), rm, rn, M, N)
    else:
        if WRITE_Q:
            scale, inverse = _scale_of(tl.max(size, axis=1), LIMIT)
            tl.store(S + pid_n.to(tl.int64) * M + rm, scale, mask=rm < M)
            _store_q(Q, dev.to_fp8(_load(X, rm, rn, M, N, stride), inverse[:, None], TYPE, LIMIT), rm, rn, M, N)
        if WRITE_QT:
            scale, _ = _scale_of(tl.max(size, axis=0), LIMIT)
            at = ST + pid_m.to(tl.int64) * N + rn
            tl.store(at, scale, mask=rn < N)
            # Read back, so that each thread finds the scales of the columns that it has after the transpose.
            tl.debug_barrier()
            inverse = 1.0 / tl.load(at, mask=rn < N, other=1.0, cache_modifier=".cg")
            _store_qt(QT, dev.to_fp8(_load(X, rm, rn, M, N, stride), inverse[None, :], TYPE, LIMIT), rm, rn, M, N)


@triton.jit
def _rows_kernel(
    X, Q, S, M, N, stride, TYPE: tl.constexpr, LIMIT: tl.constexpr, ONCE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    rm = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tl.arange(0, BLOCK_N)
    if ONCE:
        x = _load(X, rm, rn, M, N, stride)
        scale, inverse = _scale_of(tl.max(dev.bits(x), axis=1), LIMIT)
        q = dev.to_fp8(x, inverse[:, None], TYPE, LIMIT)
        _store_q(Q, q, rm, rn, M, N)
    else:
        largest = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
        for start in range(0, N, BLOCK_N):
            largest = tl.maximum(largest, dev.bits(_load(X, rm, start + rn, M, N, stride)))
        scale, inverse = _scale_of(tl.max(largest, axis=1), LIMIT)
        for start in range(0, N, BLOCK_N):
            q = dev.to_fp8(_load(X, rm, start + rn, M, N, stride), inverse[:, None], TYPE, LIMIT)
            _store_q(Q, q, rm, start + rn, M, N)
    tl.store(S + rm, scale, mask=rm < M)


@triton.jit
def _amax_kernel(
    X, ROWS, COLUMNS, M, N, stride, ALL: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rm = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    size = dev.bits(_load(X, rm, rn, M, N, stride))
    if ALL:
        tl.atomic_max(ROWS, tl.max(tl.max(size, axis=1), axis=0), sem="relaxed")
    if BY_ROW:
        tl.atomic_max(ROWS + rm, tl.max(size, axis=1), mask=rm < M, sem="relaxed")
    if BY_COLUMN:
        tl.atomic_max(COLUMNS + rn, tl.max(size, axis=0), mask=rn < N, sem="relaxed")


@triton.jit
def _cast_kernel(
    X, ROWS, COLUMNS, Q, S, QT, ST, M, N, stride, TYPE: tl.constexpr, LIMIT: tl.constexpr, ALL: tl.constexpr,
    WRITE_Q: tl.constexpr, WRITE_QT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Loaded for each output; see _blocks_kernel.
    if ALL:
        scale, inverse = _scale_of(tl.load(ROWS), LIMIT)
        first = (pid_m == 0) & (pid_n == 0)
        if WRITE_Q:
            tl.store(S, scale, mask=first)
            _store_q(Q, dev.to_fp8(_load(X, rm, rn, M, N, stride), inverse, TYPE, LIMIT), rm, rn, M, N)
        if WRITE_QT:
            tl.store(ST, scale, mask=first)
            _store_qt(QT, dev.to_fp8(_load(X, rm, rn, M, N, stride), inverse, TYPE, LIMIT), rm, rn, M, N)
    else:
        if WRITE_Q:
            scale, inverse = _scale_of(tl.load(ROWS + rm, mask=rm < M, other=0), LIMIT)
            tl.store(S + rm, scale, mask=(rm < M) & (pid_n == 0))
            _store_q(Q, dev.to_fp8(_load(X, rm, rn, M, N, stride), inverse[:, None], TYPE, LIMIT), rm, rn, M, N)
        if WRITE_QT:
            scale, inverse = _scale_of(tl.load(COLUMNS + rn, mask=rn < N, other=0), LIMIT)
            tl.store(ST + rn, scale, mask=(rn < N) & (pid_m == 0))
            _store_qt(QT, dev.to_fp8(_load(X, rm, rn, M, N, stride), inverse[None, :], TYPE, LIMIT), rm, rn, M, N)


@torch.no_grad()
def quantize(
    x: Tensor, scaling: str, dtype: torch.dtype, *, with_q: bool = True, with_qt: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(q, scale, qt, scale_t)`` of x [M, N], neither of them 0: the operands x and x.T, each as quantize has it.

    Args:
        x: bf16, fp16 or fp32; copied if its rows are not contiguous.
        scaling: "tensorwise", "rowwise", "1x128" or "128x128".
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        with_q: make q [M, N]; its scale is [], [M, 1], [M, ceil(N/128)] (rows adjacent) or [ceil(M/128), ceil(N/128)].
        with_qt: make qt [N, M]; its scale likewise, with M and N exchanged. What is not asked for is empty.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    (m, n), device = x.shape, x.device

    def scales(*shape: int, wanted: bool) -> Tensor:
        return torch.empty(shape if wanted else (0,), dtype=torch.float32, device=device)

    q = torch.empty((m, n) if with_q else (0,), dtype=dtype, device=device)
    qt = torch.empty((n, m) if with_qt else (0,), dtype=dtype, device=device)
    kind = {"TYPE": tl.float8e4nv if dtype is torch.float8_e4m3fn else tl.float8e5, "LIMIT": LIMITS[dtype]}
    blocks_m, blocks_n = triton.cdiv(m, BLOCK), triton.cdiv(n, BLOCK)
    if scaling in ("1x128", "128x128"):
        square = scaling == "128x128"
        s = scales(*((blocks_m, blocks_n) if square else (blocks_n, m)), wanted=with_q)
        st = scales(*((blocks_n, blocks_m) if square else (blocks_m, n)), wanted=with_qt)
        block_m = BLOCK if square or with_qt else 32
        _blocks_kernel[(triton.cdiv(m, block_m), blocks_n)](
            x, q, s, qt, st, m, n, x.stride(0), **kind, SQUARE=square, WRITE_Q=with_q, WRITE_QT=with_qt,
            BLOCK_M=block_m, BLOCK_N=BLOCK, num_warps=8 if block_m == BLOCK else 4, num_stages=1,
        )  # fmt: skip
        return (q, s, qt, st) if square else (q, s.t() if with_q else s, qt, st.t() if with_qt else st)
    if scaling == "rowwise" and not with_qt:
        s = scales(m, 1, wanted=True)
        block_n = min(ROW, triton.next_power_of_2(n))
        block_m = max(1, 2048 // block_n)
        _rows_kernel[(triton.cdiv(m, block_m),)](
            x, q, s, m, n, x.stride(0), **kind, ONCE=n <= block_n, BLOCK_M=block_m, BLOCK_N=block_n,
            num_warps=4 if block_n <= 4096 else 8, num_stages=1,
        )  # fmt: skip
        return q, s, qt, scales(wanted=False)
    everything = scaling == "tensorwise"
    rows = torch.zeros(1 if everything else m, dtype=torch.int32, device=device)
    columns = rows if everything else torch.zeros(n, dtype=torch.int32, device=device)
    s = scales(*(() if everything else (m, 1)), wanted=with_q)
    st = scales(*(() if everything else (n, 1)), wanted=with_qt)
    # A transposed tile writes pieces of block_m bytes.
    block_m = BLOCK if with_qt else 64
    tile = {"BLOCK_M": block_m, "BLOCK_N": BLOCK, "num_warps": block_m // 16, "num_stages": 1}
    grid = (triton.cdiv(m, block_m), blocks_n)
    _amax_kernel[grid](
        x, rows, columns, m, n, x.stride(0), ALL=everything, BY_ROW=with_q and not everything,
        BY_COLUMN=with_qt and not everything, **tile,
    )  # fmt: skip
    _cast_kernel[grid](
        x, rows, columns, q, s, qt, st, m, n, x.stride(0), **kind, ALL=everything, WRITE_Q=with_q, WRITE_QT=with_qt,
        **tile,
    )  # fmt: skip
    return q, s, qt, st
