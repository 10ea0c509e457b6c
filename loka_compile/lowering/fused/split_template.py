"""The fused GEMM's template with K cut where programs would rest: SPLITS of them share a tile, each with a part of it.

A persistent kernel whose tiles fill the device twice and a little more leaves most of it idle in the third round. Here
the tiles of whole rounds are computed as ever, and those of the last one, if it has at most a SPLITS-th as many tiles
as there are programs, in parts; all of them are, where there are no whole rounds (split-K). So the batch may move.

Parts are as in ``kernels/tile_parts.py``, which says why: the programs of a tile write theirs, wait for each other's,
and each adds up and finishes ROWS = BLOCK_M / SPLITS rows. PARTS and COUNTERS are the last arguments. Not for scales in
blocks, activations in the body and results in 1x128 blocks.
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

_ROUNDS = """\
    programs = tl.num_programs(0).to(INDEX_DTYPE)
    tiles = grid_m * grid_n
    whole = tl.where(tiles % programs * SPLITS > programs, tiles, tiles - tiles % programs)
    for tile in tl.range(tl.program_id(0).to(INDEX_DTYPE), whole, programs, flatten=FLATTEN):
"""

_REST = """\
    if tl.program_id(0) < (tiles - whole) * SPLITS:
        split = tl.program_id(0).to(INDEX_DTYPE) % SPLITS
        group = tl.program_id(0).to(INDEX_DTYPE) // SPLITS
        steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS)
        first = split * steps
        last = tl.minimum(first + steps, tl.cdiv(K, BLOCK_K))
        tile = whole + group
"""

_TO_FIRST = """\
a_ptr += first * BLOCK_K * stride_ak
b_ptr += first * BLOCK_K * stride_bk
"""

_PART = """\
for k_idx in range(first, last):
"""

_ADD_UP = """\
part_row = group * (SPLITS * BLOCK_M) + tl.arange(0, BLOCK_M).to(tl.int64) + split * BLOCK_M
part_column = tl.arange(0, BLOCK_N)[None, :]
tl.store(PARTS + part_row[:, None] * BLOCK_N + part_column, acc)
tl.debug_barrier()
goal = (tl.atomic_add(COUNTERS + group, 16 // SPLITS, sem="acq_rel") | 15) + 1
waiting = tl.atomic_add(COUNTERS + group, 0, sem="acquire") - goal < 0
while waiting:
    waiting = tl.atomic_add(COUNTERS + group, 0, sem="acquire") - goal < 0
part_row = group * (SPLITS * BLOCK_M) + tl.arange(0, ROWS).to(tl.int64) + split * ROWS
part = PARTS + part_row[:, None] * BLOCK_N + part_column
acc = tl.load(part, cache_modifier=".cg")
for i in tl.static_range(1, SPLITS):
    acc += tl.load(part + i * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
"""


def _tiles(before: str, loads: str, to_first: str = "", *, flatten: bool = False) -> str:
    """The tiles of whole rounds, then those in parts. ``before`` the main loop, ``loads`` in it; ``flatten``: a tile's
    first loads begin before the one in front is finished."""
    start, step = template.ORDER + template.SCALES + before, template.indent(loads + template.STEP, 4)
    return (
        _ROUNDS.replace("FLATTEN", str(flatten))
        + template.indent(start + template.LOOP + step, 8)
        + template.finish(8)
        + _REST
        + template.indent(start + to_first + _PART + step + _ADD_UP, 8)
        + template.finish(8, "pid_m * BLOCK_M + split * ROWS", "ROWS")
    )


#: Operands by pointer: any strides, any alignment.
POINTERS = _ARGUMENTS + template.WAIT + _tiles(template.POINTERS, template.LOADS, _TO_FIRST)

#: Operands by TMA.
TMA = _ARGUMENTS + template.WAIT + template.DESCRIPTORS + _tiles("", template.TMA_LOADS, flatten=True)

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
