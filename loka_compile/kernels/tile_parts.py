"""Parts of one tile that several programs compute and then add up together: split-K in one launch.

Each of the SPLITS programs of a tile writes its partial sums, waits until all have, and then finishes BLOCK_M / SPLITS
rows of the tile: it adds the parts of these rows in the order of the contraction (the same bits in every run) and goes
on with whatever the tile's epilogue is. Were it left to the program that comes last, one multiprocessor would read all
parts of a tile while the others rest, 64 kB a part at 0.1 TB/s.

COUNTERS holds an int32 for each group of programs that share a tile: a multiple of TURN before and after every launch,
so that one buffer of zeros serves the kernels of a graph one after another, however many parts each makes.

The programs of a group must run at the same time: they have neighbouring ids, and a launch has no more programs than
the device has multiprocessors. Triton's interpreter runs one program after another; there a kernel is launched once for
what is before the waiting and once for what is behind it (:func:`loka_compile.kernels.grid_barrier.phases`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: What a tile adds to its counter, and so the most parts that it can have.
TURN = tl.constexpr(16)


@triton.jit
def hand_in(
    acc, PARTS, COUNTERS, tile, group, split,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Write part ``split`` of a tile; with PHASE 0 wait until all of its parts are there."""
    rows = (tile * SPLITS + split) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    tl.store(PARTS + rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :], acc)
    tl.debug_barrier()  # what other threads of this program wrote comes before the next line
    goal = (tl.atomic_add(COUNTERS + group, TURN // SPLITS, sem="acq_rel") | (TURN - 1)) + 1
    if PHASE == 0:
        # A difference, because the counter may overflow.
        waiting = tl.atomic_add(COUNTERS + group, 0, sem="acquire") - goal < 0
        while waiting:
            waiting = tl.atomic_add(COUNTERS + group, 0, sem="acquire") - goal < 0


@triton.jit
def add_up(PARTS, tile, split, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr):
    """This program's rows of the tile, [BLOCK_M // SPLITS, BLOCK_N]. Read past the first-level cache."""
    ROWS: tl.constexpr = BLOCK_M // SPLITS
    rows = tile * SPLITS * BLOCK_M + split * ROWS + tl.arange(0, ROWS).to(tl.int64)
    part = PARTS + rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    acc = tl.load(part, cache_modifier=".cg")
    for i in tl.static_range(1, SPLITS):
        acc += tl.load(part + i * BLOCK_M * BLOCK_N, cache_modifier=".cg")
    return acc


def room(tiles: int, block_m: int, block_n: int, splits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Uninitialised memory for the parts of all tiles, and counters for a launch."""
    parts = torch.empty((tiles * splits * block_m * block_n,), dtype=torch.float32, device=device)
    return parts, torch.zeros((tiles,), dtype=torch.int32, device=device)
