"""The tiles of the FP8 quantisers, as data. No torch import.

``benchmarks/quantiser_sweep.py`` finds them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """What one program of a quantiser works on, and how."""

    block_m: int = 128
    block_n: int = 128
    warps: int = 8
    #: Row tiles that share a column tile before the next column: neighbours in x.T; 1 walks along the rows of x.
    group: int = 8
    #: Tiles below each other that a program of the pass for the maxima reads.
    steps: int = 1
    #: Most registers of a thread, so that more programs fit a multiprocessor; 0 is no limit. For aligned 16-bit x.
    registers: int = 0
    #: Keep x as it came between the maxima and the cast, and convert it twice: half of the registers. 16-bit x only.
    held: bool = False


#: For each scaling and output. Two passes: "amax" is the first one's, "cast" the second one's. One table for all sizes:
#: from 4096x2048 to 16384x8192 these were within a few percent of the best of each on an H200.
TILES = {
    "1x128 x": Tile(8, 512, 8, group=1),
    "1x128 x.T": Tile(128, 64, 4, registers=80),
    "1x128 both": Tile(128, 128, 4),
    "128x128 x": Tile(128, 128, 8, registers=80),
    "128x128 x.T": Tile(128, 128, 8, registers=80, held=True),
    "128x128 both": Tile(128, 128, 8, group=1, held=True),
    "amax all": Tile(128, 128, 16),
    "amax x.T": Tile(64, 64, 4, steps=2),
    "amax both": Tile(64, 64, 4, steps=2),
    "cast x": Tile(32, 128, 4),
    "cast x.T": Tile(128, 64, 4),
    "cast both": Tile(64, 128, 4),
}
