"""The fused GEMM's template with K cut: SPLITS programs share a tile, each with a part of the contraction.

As ``kernels/tile_parts.py``, which says why: the programs of a tile write their parts, wait for each other's, and each
adds up and finishes ROWS = BLOCK_M / SPLITS rows. PARTS and COUNTERS are the last arguments. Not for scales in blocks,
activations in the body and results in 1x128 blocks.
"""

from __future__ import annotations

from loka_compile.lowering.fused import template

_ARGUMENTS = (
    template.NAMES
    + """\
{% set names = names + ["PARTS", "COUNTERS"] %}
"""
    + template.ARGUMENTS
)

_GROUPS = """\
    split = tl.program_id(0).to(INDEX_DTYPE) % SPLITS
    group = tl.program_id(0).to(INDEX_DTYPE) // SPLITS
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS)
    first = split * steps
    last = tl.minimum(first + steps, tl.cdiv(K, BLOCK_K))
    for tile in range(group, grid_m * grid_n, tl.num_programs(0) // SPLITS):
"""

_TO_FIRST = """\
a_ptr += first * BLOCK_K * stride_ak
b_ptr += first * BLOCK_K * stride_bk
"""

_LOOP = """\
for k_idx in range(first, last):
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


def _tile(products: str) -> str:
    """A tile from its place to its results; ``products``: the main loop."""
    finish = template.finish(8, "pid_m * BLOCK_M + split * ROWS", "ROWS")
    return template.indent(template.ORDER + template.SCALES + products + _ADD_UP, 8) + finish


#: Operands by pointer: any strides, any alignment.
POINTERS = (
    _ARGUMENTS
    + template.WAIT
    + _GROUPS
    + _tile(template.POINTERS + _TO_FIRST + _LOOP + template.indent(template.LOADS + template.STEP, 4))
)

#: Operands by TMA.
TMA = (
    _ARGUMENTS
    + template.WAIT
    + template.DESCRIPTORS
    + _GROUPS
    + _tile(_LOOP + template.indent(template.TMA_LOADS + template.STEP, 4))
)

#: Zeros for what the programs of a tile count with. It reads nothing of A; it is launched behind whoever writes A, so
#: that the GEMM, whose launch it overlaps, does not wait for it twice.
ZEROS = (
    """\
{{def_kernel("A")}}
"""
    + template.WAIT
    + """\
    at = tl.arange(0, ROUNDED)
    zeros = tl.zeros((ROUNDED,), dtype=tl.int32)
    mask = at < SIZE
    {{store_output(("at",), "zeros", "mask", indent_width=4, val_shape=("ROUNDED",))}}
"""
)
