"""Configurations of our FP8 GEMM, shipped as data: measured points first, rules for every other shape.

``data/triton_gemm_h200.json`` is what ``benchmarks/triton_sweep.py`` writes; a GPU of another name uses it as well.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from loka_compile.kernels.config import GemmConfig

_DATA = Path(__file__).parents[2] / "data" / "triton_gemm_h200.json"
#: A measured point counts for shapes within this factor in each of m, n and k.
_NEAR = 2.0
#: A part of a cut contraction has at least this many blocks of 128: less does not pay for adding the parts up.
_LEAST_STEPS = 8
_MOST_SPLITS = 16
#: Longest run of products that stays in the tensor cores' reduced-precision accumulator. Beyond it (seen at k = 36,960
#: on an H200) the error of fast accumulation exceeds 0.5 % of the result; parts are added in fp32.
_FAST_RUN = 20480

#: Recipes whose kernels do the same work, and use each other's points where they have none of their own.
_ALIKE = {
    "tensorwise_fast": "rowwise_fast", "tensorwise": "rowwise", "blockwise_1x128": "blockwise",
    "blockwise_128x128": "blockwise",
}  # fmt: skip


@functools.cache
def load(path: Path = _DATA) -> dict[str, Any]:
    """The data file: ``points`` and ``rules``."""
    data: dict[str, Any] = json.loads(path.read_text())
    return data


@functools.lru_cache(maxsize=4096)
def config_for(mode: str, m: int, n: int, k: int, multiprocessors: int, path: Path = _DATA) -> GemmConfig:
    """The configuration for ``[m, k] @ [n, k].T``.

    Args:
        mode: how points are told apart: a recipe's name ("rowwise_fast", "blockwise").
        m: rows of the result; ``n``, ``k`` likewise.
        multiprocessors: of the GPU; a contraction is cut until its tiles fill them.
        path: another data file.
    """
    least = fewest_splits(mode, k)
    for name in (mode, _ALIKE.get(mode, mode)):
        near = nearest(load(path)["points"], name, m, n, k)
        if near is not None:
            config = GemmConfig(**near["config"])
            return replace(config, splits=max(least, config.splits))
    blocked, fast = mode.startswith("blockwise"), mode.endswith("_fast")
    tiles = -(-m // 128) * -(-n // 128)
    sizes = {"m": m, "n": n, "k": k, "tiles": tiles, "blocked": int(blocked), "fast": int(fast)}
    rule = next(r for r in load(path)["rules"] if _holds(r.get("when", {}), sizes))
    config = GemmConfig(**rule["config"])
    return replace(config, splits=max(least, splits(m, n, k, config, multiprocessors)))


def fewest_splits(mode: str, k: int) -> int:
    """Parts that the accuracy of a mode asks for."""
    return -(-k // _FAST_RUN) if mode.endswith("_fast") else 1


def splits(m: int, n: int, k: int, config: GemmConfig, multiprocessors: int) -> int:
    """Into how many parts to cut the contraction: until every multiprocessor has a tile; 1 is not at all."""
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    steps = -(-k // config.block_k)
    return max(1, min(multiprocessors // tiles, steps // _LEAST_STEPS, _MOST_SPLITS))


def nearest(points: list[dict[str, Any]], mode: str, m: int, n: int, k: int) -> dict[str, Any] | None:
    """The point of that mode that is nearest on logarithmic axes, if it is near."""

    def distance(point: dict[str, Any]) -> tuple[float, float]:
        ratios = [abs(math.log(point[letter] / max(1, size))) for letter, size in (("m", m), ("n", n), ("k", k))]
        return max(ratios), sum(ratios)

    found = min((p for p in points if p["mode"] == mode), key=distance, default=None)
    return found if found is not None and distance(found)[0] <= math.log(_NEAR) + 1e-9 else None


def _holds(when: dict[str, list[int]], sizes: dict[str, int]) -> bool:
    return all(low <= sizes[name] <= high for name, (low, high) in when.items())
