"""GEMM + BlockNorm + HardSwish + FP8 output where the output has few tiles and K is long, by how K is cut.

    python benchmarks/split_sweep.py --out results/ --seconds 60

Through Inductor, as in a model: without a cut ("unsplit"), and cut with the parts added up inside the launch, by parts
and tile; cuBLASLt's GEMM with a kernel of Inductor's behind it ("apart"), which is what a fused kernel has to beat;
the zeros that the programs count with are filled once a call, and once for four GEMMs ("x4"). Then the hand-written
twin, its zeros reused, and cuBLASLt's bare GEMM. Medians of CUDA-graph replays, arms of a shape
interleaved, inputs rotated past the L2. Each shape compiles in a process of its own, all at once, and measures alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from _at_once import MEASURING, compile_here, configured, keep, measure_alone, parser, run_shapes  # noqa: E402
from _epilogue import hardswish  # noqa: E402
from _timing import capture, copies_past_l2  # noqa: E402

from loka_compile import machine  # noqa: E402
from loka_compile.kernels import gemm_block_norm, tile_parts  # noqa: E402
from loka_compile.kernels.config import GemmConfig  # noqa: E402
from loka_compile.lowering.fused import configs  # noqa: E402

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
#: Operands' dtype, M, K, N.
SHAPES = (
    (E4M3, 1024, 7680, 256), (E4M3, 4096, 7680, 256), (E4M3, 1024, 4096, 512), (E4M3, 1024, 2048, 512),
    (E4M3, 256, 2048, 1024), (E4M3, 2048, 18480, 256), (E4M3, 8192, 7680, 256), (E4M3, 512, 2048, 512),
    (E4M3, 2048, 2048, 256), (E4M3, 4096, 4096, 256), (E4M3, 4096, 18480, 256), (BF16, 1024, 7680, 256),
    (BF16, 1024, 4096, 512),
)  # fmt: skip
#: Rows, columns and bytes of K of a tile, warps, stages.
TILES = {
    "64 w8": GemmConfig(64, 256, 128, 8, 4, tma=True),
    "64 w4": GemmConfig(64, 256, 128, 4, 4, tma=True),
    "64 w4 s5": GemmConfig(64, 256, 128, 4, 5, tma=True),
    "128 w8": GemmConfig(128, 256, 128, 8, 3, tma=True),
    "128 w8 s4": GemmConfig(128, 256, 128, 8, 4, tma=True),
}
SPLITS = (1, 2, 4, 8, 16)
#: The tiles that are measured through Inductor as well.
COMPILED = ("64 w4", "128 w8")
SMS = 132

Graphs = dict[str, tuple[torch.cuda.CUDAGraph, int]]


def fitting(m: int, n: int, block_m: int) -> int:
    """The most parts with which all programs run at once."""
    return max(s for s in SPLITS if s == 1 or -(-m // block_m) * -(-n // 256) * s <= SMS)


def _activation(y: torch.Tensor) -> torch.Tensor:
    return (hardswish(y) * 16).to(E4M3)


def one_kernel(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor | None) -> torch.Tensor:
    """GEMM, norm, activation and quantisation by the template."""
    return _activation(torch.ops.loka.gemm_block_norm(a, b.t(), s, s, 256, 1e-5, BF16, True, False)[0])


def apart(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor | None) -> torch.Tensor:
    """The library's GEMM, and a kernel of Inductor's that normalises, activates and quantises."""
    z = a @ b.t() if s is None else torch._scaled_mm(a, b.t(), s, s, None, None, BF16, True)
    z = z.float().view(a.shape[0], -1, 256)
    y = (z * torch.rsqrt(z.square().mean(2, keepdim=True) + 1e-5)).to(BF16)
    return _activation(y.view(a.shape[0], -1))


class Shape:
    """All arms of one shape, captured as they are compiled."""

    def __init__(self, kind: torch.dtype, m: int, k: int, n: int, log: Callable[[str], None]) -> None:
        self.kind, self.m, self.k, self.n, self.log = kind, m, k, n, log
        self.graphs: Graphs = {}
        self.kept: list[Any] = []  # what graphs read and write lives as long as they do
        torch.manual_seed(0)
        copies = -(-copies_past_l2((m * k + n * k) * kind.itemsize + m * n) // 4) * 4
        self.pairs = [tuple(torch.randn(r, k, device="cuda").to(kind) for r in (m, n)) for _ in range(copies)]
        self.scale = torch.full((), 1 / 16, device="cuda") if kind == E4M3 else None
        a, b = self.pairs[0]
        product = (a.double() @ b.double().t() / (256 if kind == E4M3 else 1)).view(m, -1, 256)
        y = product * torch.rsqrt(product.square().mean(2, keepdim=True) + 1e-5)
        self.expected = F.hardswish(y).view(m, n)

    def add(self, name: str, make: Callable[[], tuple[list[Callable[[], Any]], int]]) -> None:
        """Capture an arm: its calls, the first of which gives the result for the first pair, and GEMMs a call."""
        try:
            calls, each = make()
            found = calls[0]()
            found = found[0] if isinstance(found, tuple) else found
            error = ((found.double() / 16 - self.expected).norm() / self.expected.norm()).item()
            if not error < 0.04 and name != "cuBLASLt":
                raise AssertionError(f"error {error:.3g}")
            self.kept.append(calls)
            self.graphs[name] = (capture(calls, warmup=1), len(calls) * each)
        except Exception as error:
            self.log(f"    {name}: {type(error).__name__}: {str(error)[:300]}")

    def inductor(self, name: str, fn: Callable[..., Any], config: GemmConfig | None, together: int = 1) -> None:
        """An arm through Inductor; ``together`` GEMMs in a graph."""

        def make() -> tuple[list[Callable[[], Any]], int]:
            torch._dynamo.reset()
            with configured(config):
                compiled = torch.compile(lambda s, *flat: [fn(*flat[i : i + 2], s) for i in range(0, len(flat), 2)])
                sets = [sum(self.pairs[i : i + together], ()) for i in range(0, len(self.pairs), together)]
                calls = [lambda f=flat: compiled(self.scale, *f)[0] for flat in sets]
                calls[0]()
            return calls, together

        self.add(name, make)

    def twin(self, name: str, config: GemmConfig) -> None:
        """The hand-written kernel."""

        def make() -> tuple[list[Callable[[], Any]], int]:
            tiles = -(-self.m // config.block_m) * -(-self.n // 256)
            room = tile_parts.room(tiles, config.block_m, 256, config.splits, torch.device("cuda"))
            q = torch.empty(self.m, self.n, device="cuda", dtype=E4M3)

            def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                gemm_block_norm.launch(
                    a,
                    b,
                    self.scale,
                    self.scale,
                    None,
                    None,
                    q,
                    block=256,
                    eps=1e-5,
                    fast=True,
                    config=config,
                    room=room,
                )
                return q

            return [lambda a=a, b=b: call(a, b) for a, b in self.pairs], 1

        self.add(name, make)

    def bare(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The library's GEMM alone."""
        if self.scale is None:
            return a @ b.t()
        return torch._scaled_mm(a, b.t(), self.scale, self.scale, out_dtype=BF16, use_fast_accum=True)

    def compile_all(self, first: int, end: float) -> None:
        """Every arm, the twin's from the first-th on, until ``end``."""
        m, k, n, itemsize = self.m, self.k, self.n, self.kind.itemsize
        tiles = {name: replace(tile, block_k=tile.block_k // itemsize) for name, tile in TILES.items()}
        self.inductor("unsplit", one_kernel, configs.config_for("gemm_block_norm", m, n, k, itemsize))
        fit = {name: fitting(m, n, tile.block_m) for name, tile in tiles.items()}
        cuts = [(name, splits) for name in tiles for splits in (fit[name], fit[name] // 2) if splits > 1]
        for name, splits in cuts:
            if name in COMPILED:
                self.inductor(f"{splits} parts, {name}", one_kernel, replace(tiles[name], splits=splits))
        self.inductor("apart", apart, None)
        name, splits = next(cut for cut in cuts if cut[0] in COMPILED)
        self.inductor(f"x4 {splits} parts, {name}", one_kernel, replace(tiles[name], splits=splits), together=4)
        self.add("cuBLASLt", lambda: ([lambda a=a, b=b: self.bare(a, b) for a, b in self.pairs], 1))
        twins = [(f"twin {splits}, {name}", replace(tiles[name], splits=splits)) for name, splits in cuts]
        for i in range(len(twins)):
            if time.time() < end:
                self.twin(*twins[(first + i) % len(twins)])


def one_shape(index: int, folder: Path, end: float) -> None:
    """Compile the arms of a shape, wait until all shapes are compiled, measure alone."""
    compile_here()
    lines: list[str] = []
    shape = Shape(*SHAPES[index], lines.append)
    shape.compile_all(3 * index, end - MEASURING)
    times = measure_alone(shape.graphs, folder, index, len(SHAPES), end)
    keep(folder, index, {"us": times, "log": lines})


def main() -> None:
    """Measure, print a table, write ``split_sweep.json``."""
    options = parser(__doc__, 75.0).parse_args()
    folder = options.out / "split_sweep_parts"
    if options.shape is not None:
        one_shape(options.shape, folder, options.end)
        return
    results: dict[str, Any] = {"versions": machine.describe(), "command": " ".join(sys.argv), "us": {}}
    parts = run_shapes(__file__, options.out, folder, len(SHAPES), options.seconds)
    for (kind, m, k, n), found in zip(SHAPES, parts, strict=True):
        name = f"{str(kind).removeprefix('torch.')} M {m} K {k} N {n}"
        if found is None:
            print(f"{name}: not measured in time")
            continue
        results["us"][name] = found["us"]
        print(name, *found["log"], sep="\n")
        for arm, us in sorted(found["us"].items(), key=lambda item: (item[0].startswith("twin"), item[1])):
            print(f"    {arm:28} {us:7.2f}")
    (options.out / "split_sweep.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
