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
    #: Of these, how many are on their way at once; 1 leaves that to the compiler.
    stages: int = 1
    #: Most registers of a thread, so that more programs fit a multiprocessor; 0 is no limit. For 16-bit x only.
    registers: int = 0
    #: L2's policy for what is read: "" or "evict_first" or "evict_last".
    evict: str = ""
    #: The same for what is written: "" or "evict_first".
    keep: str = ""
    #: x and x.T by two programs each, of which the second to load finds the tile in L2.
    pairs: bool = False
    #: Keep x as it came between the maxima and the cast, and convert it twice: half of the registers. 16-bit x only.
    held: bool = False
    #: Begin while the kernel in front ends.
    early: bool = True


#: For each scaling and output. Two passes: "amax" is the first one's, "cast" the second one's.
TILES = {
    "1x128 x": Tile(8, 512, 4, group=1),
    "1x128 x.T": Tile(128, 64, 4, held=True),
    "1x128 both": Tile(128, 128, 8, pairs=True, held=True),
    "128x128 x": Tile(128, 128, 8, held=True),
    "128x128 x.T": Tile(128, 128, 8, held=True),
    "128x128 both": Tile(128, 128, 8, held=True),
    "rows": Tile(),
    "amax all": Tile(64, 128, 8, steps=2),
    "amax x.T": Tile(64, 128, 8, steps=2),
    "amax both": Tile(64, 128, 8, steps=2),
    "cast x": Tile(32, 128, 4),
    "cast x.T": Tile(128, 64, 4),
    "cast both": Tile(128, 64, 4),
}
