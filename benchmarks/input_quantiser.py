"""Tensorwise FP8 of inputs and weights: the two launches of ``kernels/cast.py`` against what Inductor makes of the ops.

    python benchmarks/input_quantiser.py --out input_quantiser.json      # one GPU, 25 s

4096 rows of each width in bf16, and four square weights; medians of CUDA-graph replays, arms interleaved, three sets of
tensors in turns. Inductor is timed for the input alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from _timing import measure  # noqa: E402

from loka_compile.jsonio import atomic_write, dumps  # noqa: E402
from loka_compile.kernels.cast import quantize_weights  # noqa: E402
from loka_compile.machine import describe  # noqa: E402

E4M3, SETS, WIDTHS = torch.float8_e4m3fn, 3, (512, 1024, 2048, 4096)


def plain(x: Tensor) -> tuple[Tensor, Tensor]:
    """As the lowering traces it."""
    scale = x.float().abs().amax().clamp_min(1e-12) / 448
    return (x.float() * scale.reciprocal()).clamp(-448, 448).to(E4M3), scale


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    compiled, found = torch.compile(plain, dynamic=False), {}
    for width in WIDTHS:
        xs = [torch.randn(4096, width, device="cuda").bfloat16() for _ in range(SETS)]
        weights = [[torch.randn(width, width, device="cuda").bfloat16() for _ in range(4)] for _ in range(SETS)]
        calls: dict[str, list[Callable[[], object]]] = {
            "x": [partial(quantize_weights, [x], E4M3, [False]) for x in xs],
            "x, Inductor": [partial(compiled, x) for x in xs],
            "x and 4 weights, both layouts": [
                partial(quantize_weights, [x, *w], E4M3, [True, False, True, True, True])
                for x, w in zip(xs, weights, strict=True)
            ],
        }
        found[str(width)] = measure(calls)
        print(width, " | ".join(f"{name} {us:.1f}" for name, us in found[str(width)].items()), flush=True)
    atomic_write(options.out, dumps({**describe(), "us": found}, indent=1))


if __name__ == "__main__":
    main()
