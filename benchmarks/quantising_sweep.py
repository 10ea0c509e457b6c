"""A layer in FP8 whose input comes in bf16: quantised in front of the GEMM, or by the fused GEMM as it is loaded.

    python benchmarks/quantising_sweep.py --out results/ --seconds 100

GEMM, BlockNorm and HardSwish, bf16 in and out, weights quantised before, through Inductor, as in a model: "bf16 apart"
(cuBLASLt's GEMM with a kernel of Inductor's behind it) and "bf16 fused", "rows" (the input quantised by rows in a
kernel of its own, the fused GEMM with the shipped configuration), and "itself" (in the GEMM, with a scale for 128
features of a row) by rows of a tile and parts of K. Medians of CUDA-graph replays, arms of a shape interleaved, inputs
rotated past the L2. Each shape compiles in a process of its own, all at once, and measures alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from _at_once import compile_here, configured, keep, measure_alone, parser, run_shapes  # noqa: E402
from _epilogue import hardswish  # noqa: E402
from _timing import capture, copies_past_l2  # noqa: E402

from loka_compile import machine  # noqa: E402
from loka_compile.gemm import Scaling  # noqa: E402
from loka_compile.kernels.config import GemmConfig  # noqa: E402
from loka_compile.lowering import quantize_op  # noqa: E402, F401
from loka_compile.lowering.fused import configs  # noqa: E402
from loka_compile.lowering.quantize import quantize  # noqa: E402

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
SMS = 132
#: M, K, N.
SHAPES = (
    (1024, 7680, 256), (1024, 7680, 512), (1024, 4096, 512), (1024, 2048, 512), (1024, 2048, 256), (1024, 1024, 256),
    (1024, 512, 512), (1024, 256, 256), (1024, 4096, 1024), (1024, 4096, 2560), (2048, 12256, 256), (4096, 7680, 256),
    (4096, 7680, 512), (4096, 1024, 512), (8192, 2048, 512),
)  # fmt: skip


def apart(x: torch.Tensor, w: torch.Tensor, q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """The library's GEMM in bf16, and a kernel of Inductor's."""
    z = (x @ w.t()).float().view(x.shape[0], -1, 256)
    y = (z * torch.rsqrt(z.square().mean(2, keepdim=True) + 1e-5)).to(BF16)
    return F.hardswish(y.view(x.shape[0], -1))


def fused(x: torch.Tensor, w: torch.Tensor, q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """One kernel in bf16."""
    return _finish(x, w, None, None)


def rows(x: torch.Tensor, w: torch.Tensor, q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """The input in FP8 with a scale for each row, in front of the fused GEMM."""
    x8, scale, _, _ = torch.ops.loka.quantize_fp8(x, "rowwise", E4M3, True, False)
    return _finish(x8, q, scale, s)


def itself(x: torch.Tensor, w: torch.Tensor, q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """One kernel that quantises what it loads."""
    return _finish(x, q, None, s)


def _finish(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor | None, sb: torch.Tensor | None) -> torch.Tensor:
    y, _ = torch.ops.loka.gemm_block_norm(a, b.t(), sa, sb, 256, 1e-5, BF16, True, False)
    return hardswish(y).to(BF16)


def candidates(m: int, n: int) -> Iterator[tuple[str, GemmConfig]]:
    """Configurations of the GEMM that quantises, by name."""
    columns = -(-n // 256)
    for block_m, warps, stages in ((16, 4, 4), (64, 8, 4), (128, 8, 3)):
        yield f"{block_m} rows", GemmConfig(block_m, 256, 128, warps, stages)
        most = max(s for s in (1, 2, 4, 8, 16) if s == 1 or -(-m // block_m) * columns * s <= SMS)
        for splits in sorted({most, most // 2} - {0, 1}):
            for tma in (False, True):
                how = "descriptors" if tma else "pointers"
                yield (
                    f"{block_m} rows, {splits} parts, {how}",
                    GemmConfig(block_m, 256, 128, warps, stages, tma=tma, splits=splits),
                )
    yield "64 rows, persistent", GemmConfig(64, 256, 128, 8, 4, tma=True, persistent=True)


def graphs_of(m: int, k: int, n: int, log: Callable[[str], None]) -> dict[str, tuple[torch.cuda.CUDAGraph, int]]:
    """A captured graph by arm; one that does not compile, or is wrong, is logged and left out."""
    torch.manual_seed(0)
    inputs = []
    for _ in range(copies_past_l2(2 * m * k + 3 * n * k + 2 * m * n)):
        x, w = (torch.randn(size, k, device="cuda", dtype=BF16) for size in (m, n))
        q, scale = quantize(w, Scaling.ROWWISE)
        inputs.append((x, w, q, scale.t()))
    x, w, *_ = inputs[0]
    product = (x.double() @ w.double().t()).view(m, -1, 256)
    expected = F.hardswish(product * torch.rsqrt(product.square().mean(2, keepdim=True) + 1e-5)).view(m, n)
    shipped = [configs.config_for("gemm_block_norm", m, n, k, size, True, size == 1) for size in (1, 2)]
    arms: list[tuple[str, Callable[..., torch.Tensor], GemmConfig | None]] = [
        ("bf16 apart", apart, None), ("bf16 fused", fused, shipped[1]), ("rows", rows, shipped[0]),
        *((f"itself, {name}", itself, config) for name, config in candidates(m, n)),
    ]  # fmt: skip
    graphs = {}
    for name, fn, config in arms:
        torch._dynamo.reset()
        try:
            compiled = torch.compile(fn)
            calls = [lambda given=given, f=compiled: f(*given) for given in inputs]
            with configured(config):
                calls[0]()
            error = ((calls[0]().double() - expected).norm() / expected.norm()).item()
            if not error < 0.06:
                raise AssertionError(f"error {error:.3g}")
            graphs[name] = (capture(calls, warmup=1), len(calls))
        except Exception as problem:
            log(f"    {name}: {type(problem).__name__}: {str(problem)[:200]}")
    return graphs


def one_shape(index: int, folder: Path, end: float) -> None:
    """Compile a shape's arms, wait until all shapes are compiled, measure alone."""
    compile_here()
    lines: list[str] = []
    graphs = graphs_of(*SHAPES[index], lines.append)
    keep(folder, index, {"us": measure_alone(graphs, folder, index, len(SHAPES), end), "log": lines})


def main() -> None:
    """Measure, print a line a shape, write ``quantising_sweep.json``."""
    options = parser(__doc__, 100.0).parse_args()
    folder = options.out / "quantising_sweep_parts"
    if options.shape is not None:
        one_shape(options.shape, folder, options.end)
        return
    results: dict[str, Any] = {"versions": machine.describe(), "command": " ".join(sys.argv), "us": {}}
    parts = run_shapes(__file__, options.out, folder, len(SHAPES), options.seconds)
    for shape, found in zip(SHAPES, parts, strict=True):
        name = "M {} K {} N {}".format(*shape)
        if found is None:
            print(f"{name}: not measured in time")
            continue
        results["us"][name] = found["us"]
        print(*found["log"], f"{name}: " + " | ".join(f"{arm} {us:.1f}" for arm, us in found["us"].items()), sep="\n")
    (options.out / "quantising_sweep.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
