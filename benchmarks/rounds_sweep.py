"""GEMM + BlockNorm + HardSwish + FP8 output by how tiles fill the device: rounds that are not full, and short K.

    python benchmarks/rounds_sweep.py --sizes uneven --out results/ --seconds 100

Through Inductor, as in a model: the shipped configuration, tiles of 64 and of 128 rows by pointer ("tiles") and in a
persistent kernel ("persistent"), and that with the last round's tiles in parts ("2 parts", where they leave so many
programs idle); cuBLASLt's GEMM with a kernel of Inductor's behind it ("apart"), and alone ("cuBLASLt"). "training"
writes y and rstd as well. Medians of CUDA-graph replays, arms of a shape interleaved, inputs rotated past the L2. Each
shape compiles in a process of its own, all at once, and measures alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from _at_once import MEASURING, keep, measure_alone, run_shapes  # noqa: E402
from split_sweep import BF16, E4M3, SMS, Shape, activated, apart, one_kernel  # noqa: E402

from loka_compile import machine  # noqa: E402
from loka_compile.kernels.config import GemmConfig  # noqa: E402
from loka_compile.lowering.fused import configs, lowerings  # noqa: E402

#: M, K, N of outputs whose last round is not full, and of a short contraction with a wide output.
UNEVEN = (
    (1024, 4096, 2560), (4096, 1024, 1280), (4096, 2048, 1280), (4096, 2048, 2560), (4096, 1536, 1536),
    (2048, 3456, 3456), (1024, 2048, 3072), (4096, 768, 768), (8192, 1280, 1280), (2048, 2048, 2560),
)  # fmt: skip
SHORT = (
    (1024, 256, 7680), (8192, 512, 2048), (8192, 256, 2048), (4096, 512, 2048), (4096, 512, 1024), (16384, 512, 512),
    (16384, 256, 256), (4096, 256, 1024),
)  # fmt: skip
#: Operands' dtype, M, K, N, training.
SHAPES = {
    name: [(kind, *size, training) for size in sizes for kind, training in ((E4M3, False), (E4M3, True), (BF16, False))]
    for name, sizes in {"uneven": UNEVEN, "short": SHORT}.items()
}
#: Rows, columns and bytes of K of a tile, warps, stages.
TILES = {"64": GemmConfig(64, 256, 128, 8, 4), "128": GemmConfig(128, 256, 128, 8, 3)}


def training_kernel(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """As ``one_kernel``, with what the backward needs."""
    y, rstd = torch.ops.loka.gemm_block_norm(a, b.t(), s, s, 256, 1e-5, BF16, True, True)
    return activated(y), y, rstd


def candidates(m: int, n: int) -> Iterator[tuple[str, GemmConfig]]:
    """Configurations of K-blocks in bytes, by name."""
    for rows, tile in TILES.items():
        yield f"{rows} tiles", tile
        persistent = replace(tile, tma=True, persistent=True)
        yield f"{rows} persistent", persistent
        rest = -(-m // tile.block_m) * -(-n // 256) % SMS
        most = max((s for s in (2, 4, 8) if rest * s <= SMS), default=1)
        for splits in {most, most // 2} - {0, 1}:
            yield f"{rows} {splits} parts", replace(persistent, splits=splits)


def one_shape(kinds: str, index: int, folder: Path, end: float) -> None:
    """Compile the arms of a shape, wait until all shapes are compiled, measure alone."""
    import torch._inductor.config as inductor_config

    inductor_config.force_disable_caches = True  # the cache's key does not know the configuration
    inductor_config.compile_threads = 1
    lowerings.register()
    lines: list[str] = []
    kind, m, k, n, training = SHAPES[kinds][index]
    shape = Shape(kind, m, k, n, lines.append)
    fn: Callable[..., Any] = training_kernel if training else one_kernel
    shape.inductor("shipped", fn, configs.config_for("gemm_block_norm", m, n, k, kind.itemsize))
    for name, config in candidates(m, n):
        shape.inductor(name, fn, replace(config, block_k=config.block_k // kind.itemsize))
    if not training:
        shape.inductor("apart", apart, None)
        shape.add("cuBLASLt", lambda: ([lambda a=a, b=b: shape.bare(a, b) for a, b in shape.pairs], 1))
    times = measure_alone(shape.graphs, folder, index, len(SHAPES[kinds]), end)
    keep(folder, index, {"us": times, "log": lines})


def main() -> None:
    """Measure, print a line a shape, write ``rounds_sweep_SIZES.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--seconds", type=float, default=100.0, help=f"no more than so long; {MEASURING} to measure")
    parser.add_argument("--sizes", choices=SHAPES, default="uneven")
    parser.add_argument("--shape", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.out / f"rounds_sweep_{options.sizes}"
    if options.shape is not None:
        one_shape(options.sizes, options.shape, folder, options.end)
        return
    results: dict[str, Any] = {"versions": machine.describe(), "command": " ".join(sys.argv), "us": {}}
    shapes = SHAPES[options.sizes]
    parts = run_shapes(__file__, options.out, folder, len(shapes), options.seconds, ["--sizes", options.sizes])
    for (kind, m, k, n, training), found in zip(shapes, parts, strict=True):
        name = f"{str(kind).removeprefix('torch.')} M {m} K {k} N {n}{' training' * training}"
        if found is None:
            print(f"{name}: not measured in time")
            continue
        results["us"][name] = found["us"]
        print(name, *found["log"], "|", *(f"{arm} {us:.1f} |" for arm, us in found["us"].items()))
    (options.out / f"rounds_sweep_{options.sizes}.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
