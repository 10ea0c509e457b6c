"""Shipped configurations of the fused kernels: measured on a device, chosen by shape, read without importing torch.

``data/fused_h200.json`` holds for each kernel a list of rules; the first whose conditions hold is taken. A condition
bounds M, N, K, M * N, the number of 128x256 output tiles, the time that tiles of half as many rows take ("halved"), the
bytes of an operand's number, or whether (1) or not (0) sums are fast, rows have a scale each, the epilogue is crowded
(something is added in front of the norm, or results are in fp32), or rows of the operands begin on 16 bytes. A crowded
epilogue and rows that do not begin so take more registers.
Where no rule holds, or the first that holds says "apart", the kernel is not used, because it was not faster than its
parts.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from loka_compile.kernels.config import BackwardConfig, GemmConfig

_DATA = Path(__file__).parents[2] / "data" / "fused_h200.json"
#: Multiprocessors of an H200, which have a tile each in a round.
_SMS = 132


@functools.cache
def _rules() -> dict[str, list[dict[str, Any]]]:
    data: dict[str, Any] = json.loads(_DATA.read_text())
    return data["kernels"]


def gemm_kernel(in_blocks: bool = False, gated: bool = False, quantised: bool = False) -> str:
    """Under which name the file has the fused GEMM: of operands scaled in blocks, with SwishNorm's gate, with a result
    in FP8 and 1x128 blocks."""
    return f"gemm_{'swish' if gated else 'block'}_norm{'_in_blocks' * in_blocks}{'_to_blocks' * quantised}"


def find(
    kernel: str, m: int, n: int, k: int, itemsize: int, fast: bool = True, rowwise: bool = False,
    crowded: bool = False, aligned: bool = True,
) -> dict[str, Any] | None:  # fmt: skip
    """The first rule of ``kernel`` that holds for ``[m, k] @ [k, n]`` with operands of ``itemsize`` bytes, or None.

    Without ``fast`` accumulation a second accumulator needs registers, so that tiles must be smaller. torch's GEMM of
    operands with a scale per row (``rowwise``) is slower than the one with one scale, so that fusion pays for more.
    """
    columns = -(-n // 256)
    tiles = -(-m // 128) * columns
    sizes = {"m": m, "n": n, "k": k, "tiles": tiles, "itemsize": itemsize, "fast": int(fast or itemsize > 1)}
    sizes |= {"elements": m * n, "rowwise": int(rowwise), "halved": _halved(tiles, -(-m // 64) * columns)}
    sizes |= {"crowded": int(crowded), "aligned": int(aligned and k * itemsize % 16 == 0)}
    for rule in _rules()[kernel]:
        when = rule.get("when", {})
        if all(low <= sizes[name] <= high for name, (low, high) in when.items()):
            return None if rule.get("apart") else rule
    return None


def _halved(tiles: int, halves: int) -> int:
    """The rounds in which ``halves`` of tiles are done, in percent of the time that the tiles take: less than 100 where
    their last round leaves half of the device idle."""
    return 50 * -(-halves // _SMS) // max(1, -(-tiles // _SMS))


def config_for(
    kernel: str, m: int, n: int, k: int, itemsize: int, fast: bool = True, rowwise: bool = False,
    crowded: bool = False, aligned: bool = True,
) -> GemmConfig:  # fmt: skip
    """The configuration for a shape; the general one where the kernel would not be chosen for it.

    Not ``aligned``: ``k`` is what it was once, and may be another number.
    """
    rule = find(kernel, m, n, k, itemsize, fast, rowwise, crowded, aligned)
    return GemmConfig(**rule["config"]) if rule is not None and "config" in rule else GemmConfig()


def backward_config(m: int, n: int, itemsize: int) -> BackwardConfig:
    """The configuration of ``block_norm_backward_fp8`` for a gradient [m, n] with numbers of ``itemsize`` bytes."""
    rule = find("block_norm_backward_fp8", m, n, 1, itemsize)
    return BackwardConfig(**rule.get("config", {})) if rule is not None else BackwardConfig()
