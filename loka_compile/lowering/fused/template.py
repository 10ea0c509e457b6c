"""Source of the fused GEMM's Triton template (Jinja; Inductor fills in sizes, loads and the epilogue).

BlockNorm is in the body because Inductor never fuses a reduction behind a template. What follows pointwise (HardSwish,
gates, residual, casts, the FP8 quantisation of the next operand) Inductor adds to ``store_output`` itself.
"""

from __future__ import annotations

_ARGUMENTS = """\
{% set names = ["A", "B"] + (["SA", "SB"] if SCALING else []) + (["R"] if RESIDUAL else []) + (["RSTD"] if WITH_RSTD else []) + (["PARTS", "COUNTERS"] if SPLITS > 1 else []) %}
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

# Programmatic dependent launch: the kernel starts while the one before it ends, and waits here before it reads. The
# next kernel may start as soon as all programs of this one run.
_WAIT = """\
    {% if PDL %}
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    {% endif %}
"""

# The K-blocks that a program multiplies: all of them, or its part.
_STEPS = 'range({{"first, last" if SPLITS > 1 else "0, tl.cdiv(K, BLOCK_K)"}})'

_POINTERS = f"""\
offs_m = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
offs_n = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
offs_k = tl.arange(0, BLOCK_K)
{{% if SPLITS > 1 %}}
offs_k += first * BLOCK_K
{{% endif %}}
a_ptr = A + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
b_ptr = B + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
for k_idx in {_STEPS}:
    {{% if EVEN_K %}}
    a = tl.load(a_ptr)
    b = tl.load(b_ptr)
    {{% else %}}
    left = K - k_idx * BLOCK_K
    a = tl.load(a_ptr, mask=tl.arange(0, BLOCK_K)[None, :] < left, other=0.0)
    b = tl.load(b_ptr, mask=tl.arange(0, BLOCK_K)[:, None] < left, other=0.0)
    {{% endif %}}
    {{% if FAST %}}
    acc = tl.dot(a, b, acc)
    {{% else %}}
    acc += tl.dot(a, b)
    {{% endif %}}
    a_ptr += BLOCK_K * stride_ak
    b_ptr += BLOCK_K * stride_bk
"""

_DESCRIPTORS = """\
    a_desc = tl.make_tensor_descriptor(A, shape=[M, K], strides=[stride_am, 1], block_shape=[BLOCK_M, BLOCK_K])
    b_desc = tl.make_tensor_descriptor(B, shape=[N, K], strides=[stride_bn, 1], block_shape=[BLOCK_N, BLOCK_K])
"""

_TMA_LOOP = f"""\
acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
for k_idx in {_STEPS}:
    a = a_desc.load([pid_m * BLOCK_M, k_idx * BLOCK_K])
    b = b_desc.load([pid_n * BLOCK_N, k_idx * BLOCK_K])
    {{% if FAST %}}
    acc = tl.dot(a, b.T, acc)
    {{% else %}}
    acc += tl.dot(a, b.T)
    {{% endif %}}
"""

_ORDER = """\
group_id = tile // width
group_size = min(grid_m - group_id * GROUP_M, GROUP_M)
pid_m = group_id * GROUP_M + (tile % width) % group_size
pid_n = (tile % width) // group_size
"""

# As kernels/tile_parts.py, which says why: the programs of a tile wait for each other's parts, and each finishes ROWS rows.
_GROUPS = """\
    split = tl.program_id(0).to(INDEX_DTYPE) % SPLITS
    group = tl.program_id(0).to(INDEX_DTYPE) // SPLITS
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS)
    first = split * steps
    last = tl.minimum(first + steps, tl.cdiv(K, BLOCK_K))
    for tile in range(group, grid_m * grid_n, tl.num_programs(0) // SPLITS):
"""

_ADD_UP = """\
part_row = tile * (SPLITS * BLOCK_M) + tl.arange(0, BLOCK_M).to(tl.int64) + split * BLOCK_M
part_column = tl.arange(0, BLOCK_N)[None, :]
tl.store(PARTS + part_row[:, None] * BLOCK_N + part_column, acc)
tl.debug_barrier()
goal = (tl.atomic_add(COUNTERS + group, 16 // SPLITS, sem="acq_rel") | 15) + 1
waiting = tl.atomic_add(COUNTERS + group, 0, sem="acquire") - goal < 0
while waiting:
    waiting = tl.atomic_add(COUNTERS + group, 0, sem="acquire") - goal < 0
part_row = tile * (SPLITS * BLOCK_M) + tl.arange(0, ROWS).to(tl.int64) + split * ROWS
part = PARTS + part_row[:, None] * BLOCK_N + part_column
acc = tl.load(part, cache_modifier=".cg")
for i in tl.static_range(1, SPLITS):
    acc += tl.load(part + i * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
"""

_NORM = """\
rm = pid_m * BLOCK_M + tl.arange(0, ROWS)
{% if SPLITS > 1 %}
rm += split * ROWS
{% endif %}
rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
{% if SCALING == 1 %}
acc = acc * (tl.load(SA) * tl.load(SB))
{% elif SCALING == 2 %}
acc = acc * tl.load(SA + rm, mask=rm < M, other=0.0)[:, None] * tl.load(SB + rn, mask=rn < N, other=0.0)[None, :]
{% endif %}
{% if RESIDUAL %}
residual_at = rm[:, None] * {{stride("R", 0)}} + rn[None, :] * {{stride("R", 1)}}
acc += tl.load(R + residual_at, mask=(rm[:, None] < M) & (rn[None, :] < N), other=0.0).to(tl.float32)
{% endif %}
{% if not EVEN_N %}
acc = tl.where(rn[None, :] < N, acc, 0.0)
{% endif %}
blocks = tl.reshape(acc, (ROWS, BLOCK_N // NORM, NORM))
rb = pid_n * (BLOCK_N // NORM) + tl.arange(0, BLOCK_N // NORM)
{% if EVEN_N %}
mean_square = tl.sum(blocks * blocks, axis=2) * (1.0 / NORM)
{% else %}
mean_square = tl.sum(blocks * blocks, axis=2) / tl.minimum(NORM, tl.maximum(N - rb * NORM, 1)).to(tl.float32)[None, :]
{% endif %}
rstd = tl.rsqrt(mean_square + EPS)
{% if WITH_RSTD %}
rstd_mask = (rm[:, None] < M) & (rb[None, :] * NORM < N)
tl.store(RSTD + rm[:, None] * ((N + NORM - 1) // NORM) + rb[None, :], rstd, mask=rstd_mask)
{% endif %}
acc = tl.reshape(blocks * rstd[:, :, None], (ROWS, BLOCK_N))
idx_m = rm[:, None]
idx_n = rn[None, :]
mask = (idx_m < M) & (idx_n < N)
"""

_STORE = """{{store_output(("idx_m", "idx_n"), "acc", "mask", indent_width=%d, val_shape=("ROWS", "BLOCK_N"))}}\n"""


def _indent(text: str, width: int) -> str:
    return "".join(line if line.startswith("{%") else " " * width + line for line in text.splitlines(keepends=True))


#: One program per tile, operands by pointer: any strides, any alignment.
TILED = (
    _ARGUMENTS
    + _WAIT
    + "    tile = tl.program_id(0).to(INDEX_DTYPE)\n"
    + _indent(_ORDER + _POINTERS + _NORM, 4)
    + "    "
    + _STORE % 4
)

#: One program per multiprocessor, operands by TMA: the loads of the next tile overlap this tile's epilogue.
PERSISTENT = (
    _ARGUMENTS
    + _DESCRIPTORS
    + _WAIT
    + "    for tile in tl.range(tl.program_id(0).to(INDEX_DTYPE), grid_m * grid_n, NUM_SMS, flatten=True):\n"
    + _indent(_ORDER + _TMA_LOOP + _NORM, 8)
    + "        "
    + _STORE % 8
)

#: SPLITS programs per tile, each with a part of K; operands by pointer.
SPLIT_TILED = _ARGUMENTS + _WAIT + _GROUPS + _indent(_ORDER + _POINTERS + _ADD_UP + _NORM, 8) + "        " + _STORE % 8

#: The same with operands by TMA.
SPLIT_TMA = (
    _ARGUMENTS
    + _DESCRIPTORS
    + _WAIT
    + _GROUPS
    + _indent(_ORDER + _TMA_LOOP + _ADD_UP + _NORM, 8)
    + "        "
    + _STORE % 8
)

#: Zeros for what the programs of a tile count with. It reads nothing of A; it is launched behind whoever writes A, so
#: that the GEMM, whose launch it overlaps, does not wait for it twice.
ZEROS = (
    """\
{{def_kernel("A")}}
"""
    + _WAIT
    + """\
    at = tl.arange(0, ROUNDED)
    zeros = tl.zeros((ROUNDED,), dtype=tl.int32)
    mask = at < SIZE
    {{store_output(("at",), "zeros", "mask", indent_width=4, val_shape=("ROUNDED",))}}
"""
)
