"""The configuration of a GEMM kernel. No torch import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GemmConfig:
    """Tile, pipeline depth and loading method of one GEMM kernel."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 128
    warps: int = 8
    stages: int = 3
    #: Row tiles that share a column tile before the next column: they find B in L2.
    group_m: int = 8
    #: Load operands by tensor descriptors (TMA).
    tma: bool = False
    #: One program per multiprocessor that walks over tiles: the next tile's loads overlap this tile's epilogue.
    persistent: bool = False
    #: Read and write the epilogue's matrices by descriptors as well.
    tma_epilogue: bool = False
