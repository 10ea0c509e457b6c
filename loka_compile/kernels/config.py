"""The configuration of a GEMM kernel. No torch import."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
    #: Parts that the contraction is cut into, where a kernel can: more programs for an output of few tiles.
    splits: int = 1

    def fitting(self, itemsize: int, out_itemsize: int, shared_memory: int) -> GemmConfig:
        """This configuration with as many stages as fit into ``shared_memory`` bytes, and at least two.

        Every stage holds a tile of A and of B (``itemsize`` bytes a value). In a persistent kernel the tile that is
        written lies beside them, because the next tile's loads begin before it is gone; in fp32 that is a tile of 128
        kB, with which three stages do not fit an H200's 227 kB.
        """
        stage = (self.block_m + self.block_n) * self.block_k * itemsize
        written = self.block_m * self.block_n * out_itemsize if self.persistent else 0
        fit = (shared_memory - written - _BARRIERS) // stage
        return replace(self, stages=max(2, min(self.stages, fit)))


@dataclass(frozen=True)
class MeetingConfig:
    """Tile and residency of a kernel whose programs meet: ``resident`` programs of ``warps`` warps share a
    multiprocessor, and their registers are bounded so that they fit."""

    block_m: int = 32
    warps: int = 8
    resident: int = 2
    #: Keep what waits for the meeting in 16 bits: half of the registers, one rounding more.
    half: bool = False

    @property
    def registers(self) -> int:
        """Registers that a thread may have; an H200's multiprocessor has 65536, a thread at most 255."""
        return min(255, 65536 // (32 * self.warps * self.resident) // 8 * 8)


#: Bytes that Triton's barriers take beside the tiles.
_BARRIERS = 256
