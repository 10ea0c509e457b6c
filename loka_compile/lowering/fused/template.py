"""Source of the fused GEMM's Triton template (Jinja; Inductor fills in sizes, loads and the epilogue).

BlockNorm is in the body because Inductor never fuses a reduction behind a template, SwishNorm's gate because it needs
the value in front of the norm as well, and FP8 in 1x128 blocks because their scales are reductions too. What follows
pointwise (HardSwish, residual, casts, the FP8 quantisation with a fixed scale) Inductor adds to ``store_output``
itself.

The tensor core waits while a tile is finished, so that each instruction a value takes shows in the kernel's time. One
scale (or one of a row) is therefore applied together with rstd, a tile as wide as a block is not reshaped, and with PTX
a gate is one instruction and the cast to FP8 saturates by itself.

ACTIVATION in the body: 0 none, 1 HardSwish, 2 SwishNorm; KEPT takes y, or SwishNorm's h. QUANTISED: 0 no, 1 the
template's output is FP8 in 1x128 blocks, 2 they are written beside it. SCALING is ``kernels.config.Scaling.kind``. With
scales in blocks the accumulator is held as in ``kernels/block_scales.py``.

``split_template.py`` makes of the same pieces the template whose programs share a tile.
"""

from __future__ import annotations

from loka_compile.kernels.config import GATE_PTX

NAMES = """\
{% set names = ["A", "B"] + (["SA", "SB"] if SCALING else []) + (["R"] if RESIDUAL else []) %}
{% set names = names + (["RSTD"] if WITH_RSTD else []) + (["KEPT"] if KEEP else []) %}
{% set names = names + (["QS"] if QUANTISED else []) + (["Q"] if QUANTISED == 2 else []) %}
"""

ARGUMENTS = """\
{{def_kernel(*names)}}
    M = {{size("A", 0)}}
    N = {{size("B", 1)}}
    K = {{size("A", 1)}}
    if M * N == 0:
        return
    stride_am = {{stride("A", 0)}}
    stride_ak = {{stride("A", 1)}}
    stride_bk = {{stride("B", 0)}}
    stride_bn = {{stride("B", 1)}}
    grid_m = (M + BLOCK_M - 1) // BLOCK_M
    grid_n = (N + BLOCK_N - 1) // BLOCK_N
    width = GROUP_M * grid_n
"""

# Programmatic dependent launch: the kernel starts while the one before it ends, and waits here before it reads or
# writes. The next kernel may start as soon as all programs of this one run.
WAIT = """\
    {% if PDL %}
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    {% endif %}
"""

# Scales that the first step of the main loop reads; they move along with it.
SCALES = """\
{% if SCALING == 3 %}
rows_of_a = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
rows_of_b = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N // COLUMNS) * COLUMNS) % N
sa_ptr = SA + (rows_of_a // ROWS_A) * {{stride("SA", 0)}}
sb_ptr = SB + (rows_of_b // ROWS_B) * {{stride("SB", 0)}}
acc = tl.zeros((BLOCK_M, BLOCK_N // COLUMNS, COLUMNS), dtype=tl.float32)
{% else %}
acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
{% endif %}
"""

STEP = """\
{% if SCALING == 3 %}
scale = tl.load(sa_ptr)[:, None] * tl.load(sb_ptr)[None, :]
acc += tl.reshape(tl.dot(a, b), (BLOCK_M, BLOCK_N // COLUMNS, COLUMNS)) * scale[:, :, None]
sa_ptr += {{stride("SA", 1)}}
sb_ptr += {{stride("SB", 1)}}
{% elif FAST %}
acc = tl.dot(a, b, acc)
{% else %}
acc += tl.dot(a, b)
{% endif %}
"""

POINTERS = """\
offs_m = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
offs_n = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
offs_k = tl.arange(0, BLOCK_K)
a_ptr = A + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
b_ptr = B + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
"""

# The K-blocks that a program multiplies.
LOOP = """\
for k_idx in range(0, tl.cdiv(K, BLOCK_K)):
"""

LOADS = """\
{% if EVEN_K %}
a = tl.load(a_ptr)
b = tl.load(b_ptr)
{% else %}
a = tl.load(a_ptr, mask=offs_k[None, :] < K - k_idx * BLOCK_K, other=0.0)
b = tl.load(b_ptr, mask=offs_k[:, None] < K - k_idx * BLOCK_K, other=0.0)
{% endif %}
a_ptr += BLOCK_K * stride_ak
b_ptr += BLOCK_K * stride_bk
"""

# Behind the wait, because they are built in memory: the scratch of a launch is freed when it is queued, and may be that
# of the launch in front, which still reads its own descriptors there.
DESCRIPTORS = """\
    a_desc = tl.make_tensor_descriptor(A, shape=[M, K], strides=[stride_am, 1], block_shape=[BLOCK_M, BLOCK_K])
    b_desc = tl.make_tensor_descriptor(B, shape=[N, K], strides=[stride_bn, 1], block_shape=[BLOCK_N, BLOCK_K])
"""

TMA_LOADS = """\
a = a_desc.load([pid_m * BLOCK_M, k_idx * BLOCK_K])
b = b_desc.load([pid_n * BLOCK_N, k_idx * BLOCK_K]).T
"""

ORDER = """\
group_id = tile // width
group_size = min(grid_m - group_id * GROUP_M, GROUP_M)
pid_m = group_id * GROUP_M + (tile % width) % group_size
pid_n = (tile % width) // group_size
"""

# From the sums of products to what is stored, for some rows of a tile.
_FINISH = """\
rm = FIRST_ROW + tl.arange(0, ROWS)
rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
{% set SCALE_WITH_RSTD = SCALING in (1, 2) and not RESIDUAL and ACTIVATION != 2 %}
{% if SCALING == 1 %}
scale = tl.load(SA) * tl.load(SB)
{% elif SCALING == 2 %}
scale = tl.load(SA + rm, mask=rm < M, other=0.0)[:, None]
acc = acc * tl.load(SB + rn, mask=rn < N, other=0.0)[None, :]
{% elif SCALING == 3 %}
acc = tl.reshape(acc, (ROWS, BLOCK_N))
{% endif %}
{% if SCALING in (1, 2) and not SCALE_WITH_RSTD %}
acc = acc * scale
{% endif %}
{% if RESIDUAL %}
residual_at = rm[:, None] * {{stride("R", 0)}} + rn[None, :] * {{stride("R", 1)}}
acc += tl.load(R + residual_at, mask=(rm[:, None] < M) & (rn[None, :] < N), other=0.0).to(tl.float32)
{% endif %}
{% if not EVEN_N %}
acc = tl.where(rn[None, :] < N, acc, 0.0)
{% endif %}
rb = pid_n * (BLOCK_N // NORM) + tl.arange(0, BLOCK_N // NORM)
{% if BLOCK_N == NORM %}
squares = tl.sum(acc * acc, axis=1, keep_dims=True)
{% else %}
blocks = tl.reshape(acc, (ROWS, BLOCK_N // NORM, NORM))
squares = tl.sum(blocks * blocks, axis=2)
{% endif %}
{% if SCALE_WITH_RSTD %}
squares = squares * scale * scale
{% endif %}
{% if EVEN_N %}
mean_square = squares * (1.0 / NORM)
{% else %}
mean_square = squares / tl.minimum(NORM, tl.maximum(N - rb * NORM, 1)).to(tl.float32)[None, :]
{% endif %}
rstd = tl.rsqrt(mean_square + EPS)
factor = rstd{% if SCALE_WITH_RSTD %} * scale{% endif %}
{% if WITH_RSTD %}
rstd_mask = (rm[:, None] < M) & (rb[None, :] * NORM < N)
tl.store(RSTD + rm[:, None] * ((N + NORM - 1) // NORM) + rb[None, :], rstd, mask=rstd_mask)
{% endif %}
idx_m = rm[:, None]
idx_n = rn[None, :]
mask = (idx_m < M) & (idx_n < N)
{% if KEEP and ACTIVATION == 2 %}
tl.store(KEPT + idx_m * N + idx_n, acc.to(KEPT.dtype.element_ty), mask=mask)
{% endif %}
{% if BLOCK_N == NORM %}
y = acc * factor
{% else %}
y = tl.reshape(blocks * factor[:, :, None], (ROWS, BLOCK_N))
{% endif %}
{% if KEEP and ACTIVATION != 2 %}
tl.store(KEPT + idx_m * N + idx_n, y.to(KEPT.dtype.element_ty), mask=mask)
{% endif %}
{% if ACTIVATION and PTX %}
gate = tl.inline_asm_elementwise("GATE_PTX", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1)
{% elif ACTIVATION %}
gate = y * (1.0 / 6.0) + 0.5
gate = tl.where(gate < 0.0, 0.0, gate)
gate = tl.where(gate > 1.0, 1.0, gate)
{% endif %}
acc = {% if ACTIVATION == 2 %}acc * gate{% elif ACTIVATION == 1 %}y * gate{% else %}y{% endif %}
{% if QUANTISED %}
groups = tl.reshape(acc, (ROWS, BLOCK_N // 128, 128))
largest = tl.max(tl.abs(groups).to(tl.int32, bitcast=True), axis=2).to(tl.float32, bitcast=True)
q_scale = tl.maximum(largest, 1e-12, propagate_nan=tl.PropagateNan.ALL) * (1.0 / 448.0)
rq = pid_n * (BLOCK_N // 128) + tl.arange(0, BLOCK_N // 128)
tl.store(QS + rq[None, :] * M + idx_m, q_scale, mask=(idx_m < M) & (rq[None, :] * 128 < N))
q = tl.reshape(groups * (1.0 / q_scale)[:, :, None], (ROWS, BLOCK_N))
{% if not PTX %}
q = tl.where(q > 448.0, 448.0, tl.where(q < -448.0, -448.0, q))
{% endif %}
{% if QUANTISED == 2 %}
tl.store(Q + idx_m * N + idx_n, q.to(Q.dtype.element_ty), mask=mask)
{% else %}
acc = q
{% endif %}
{% endif %}
"""

_STORE = """{{store_output(("idx_m", "idx_n"), "acc", "mask", indent_width=%d, val_shape=("ROWS", "BLOCK_N"))}}\n"""


def indent(text: str, width: int) -> str:
    """``text`` in a block, Jinja's own lines left where they are."""
    return "".join(line if line.startswith("{%") else " " * width + line for line in text.splitlines(keepends=True))


def finish(width: int, first_row: str = "pid_m * BLOCK_M", rows: str = "BLOCK_M") -> str:
    """The end of a tile, or of some of its rows; ``store_output`` must be told the indentation."""
    source = _FINISH.replace("GATE_PTX", GATE_PTX) + _STORE % width
    return indent(source.replace("FIRST_ROW", first_row).replace("ROWS", rows), width)


#: One program per tile, operands by pointer: any strides, any alignment.
TILED = (
    NAMES
    + ARGUMENTS
    + WAIT
    + "    tile = tl.program_id(0).to(INDEX_DTYPE)\n"
    + indent(ORDER + SCALES + POINTERS + LOOP + indent(LOADS + STEP, 4), 4)
    + finish(4)
)

#: One program per multiprocessor, operands by TMA: the loads of the next tile overlap this tile's epilogue.
PERSISTENT = (
    NAMES
    + ARGUMENTS
    + WAIT
    + DESCRIPTORS
    + "    for tile in tl.range(tl.program_id(0).to(INDEX_DTYPE), grid_m * grid_n, NUM_SMS, flatten=True):\n"
    + indent(ORDER + SCALES + LOOP + indent(TMA_LOADS + STEP, 4), 8)
    + finish(8)
)
