"""The configurations of GEMM kernels and of a gradient's kernels. No torch import."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

#: Elements of the contraction that share a scale where an operand is scaled in blocks.
BLOCK = 128
#: ``relu6(x + 3) / 6`` in fp32, rounded once; 0 for a NaN. NVIDIA's instruction; the numbers are 1/6 and 1/2.
GATE_PTX = "fma.rn.sat.f32 $0, $1, 0f3E2AAAAB, 0f3F000000;"


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


class Scaling(NamedTuple):
    """How the operands of a GEMM are scaled, as the kernels are told."""

    #: 0: not at all, 1: one scale each, 2: one per row of A and row of B, 3: in blocks of 128 along the contraction.
    kind: int
    #: Rows of A, and of B, that share the scales of a row of blocks: 1 or 128; 0 without blocks.
    rows_a: int = 0
    rows_b: int = 0

    @property
    def in_blocks(self) -> bool:
        """Whether scales vary along the contraction."""
        return self.kind == 3


def scaling_of(
    scale_a: Sequence[Any] | None, scale_b: Sequence[Any] | None, m: Any, n: Any,
    equal: Callable[[Any, Any], bool] = operator.eq,
) -> Scaling:  # fmt: skip
    """What the shapes of two scales say of a product [m, n]; ``equal`` compares sizes.

    One element each; [m, 1] with [1, n] or [n, 1]; else blocks: [m or ceil(m/128), blocks of k] and [n or ceil(n/128),
    blocks of k or more]. Where k has one block, rows of 1x128 are the same as whole rows.
    """
    if scale_a is None or scale_b is None:
        return Scaling(0)
    if all(equal(size, 1) for size in (*scale_a, *scale_b)):
        return Scaling(1)
    (rows_a, last_a), (rows_b, last_b) = scale_a, scale_b
    along_b = (equal(rows_b, 1) and equal(last_b, n)) or (equal(rows_b, n) and equal(last_b, 1))
    if equal(rows_a, m) and equal(last_a, 1) and along_b:
        return Scaling(2)
    return Scaling(3, 1 if equal(rows_a, m) else 128, 1 if equal(rows_b, n) else 128)


@dataclass(frozen=True)
class BackwardConfig:
    """How a gradient's kernel walks over its tiles: ``resident`` programs of ``warps`` warps share a multiprocessor,
    and their registers are bounded so that they fit."""

    block_m: int = 32
    warps: int = 8
    resident: int = 2
    #: Tiles that a program may keep over the meeting, two or more in 16 bits: half of the registers, one rounding more.
    keep: int = 1
    #: Stages of the pipeline where programs do not meet: a program reads ``stages - 1`` tiles ahead.
    stages: int = 1

    @property
    def registers(self) -> int:
        """Registers that a thread may have; an H200's multiprocessor has 65536, a thread at most 255."""
        return min(255, 65536 // (32 * self.warps * self.resident) // 8 * 8)


#: Bytes that Triton's barriers take beside the tiles.
_BARRIERS = 256
