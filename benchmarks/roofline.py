"""Each fused kernel against the roofline of the card it runs on, and against the bare cuBLASLt GEMM (issue 5).

    python benchmarks/roofline.py --out results/

Three ceilings are measured first: the best FP8 rate that cuBLASLt reaches on large squares, the bandwidth of a large
copying kernel (read plus written), and a launch: one kernel that does next to nothing, in a CUDA graph. A kernel's
floor is the largest of its operations at that rate, its least bytes at that bandwidth, and a launch; its share is
floor / time.
Medians of CUDA-graph replays, arms of a shape interleaved, inputs rotated past the L2.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from _epilogue import hardswish  # noqa: E402
from _timing import copies_past_l2, measure  # noqa: E402

from loka_compile import machine  # noqa: E402

E4M3 = torch.float8_e4m3fn
#: (M, N, K): layers of the chains of issue 5, and of the paper's figure 13.
SHAPES = (
    (4096, 512, 512), (4096, 1024, 1024), (4096, 2048, 2048), (4096, 4096, 4096), (16384, 1024, 1024),
    (1024, 2048, 4096), (1024, 4096, 2048), (1024, 7680, 256),
)  # fmt: skip


@dataclass(frozen=True)
class Ceilings:
    """What the card can do, measured."""

    fp8_tflops: float
    copy_gb_s: float
    launch_us: float

    def floor_us(self, flop: float, size: float) -> float:
        """Microseconds that no kernel with so many operations and bytes goes below."""
        return max(flop / self.fp8_tflops / 1e6, size / self.copy_gb_s / 1e3, self.launch_us)


@dataclass(frozen=True)
class Kernel:
    """One kernel on one shape: its calls (on different inputs) and the least it must do."""

    name: str
    calls: list[Callable[[], object]]
    flop: float
    bytes: float


def ceilings() -> Ceilings:
    """Measure them; a few hundred milliseconds."""
    one = torch.ones((), device="cuda")
    best = 0.0
    for size in (4096, 8192):
        a, b = (torch.randn(size, size, device="cuda").to(E4M3) for _ in range(2))
        gemm = lambda a=a, b=b: _gemm(a, b, one, one)  # noqa: E731
        best = max(best, 2 * size**3 / measure({"gemm": [gemm] * 4}, rounds=15)["gemm"] / 1e6)
    source = torch.randn(1 << 28, device="cuda")  # 1 GiB; by a kernel, for a graph's copy node takes another way
    target = torch.empty_like(source)
    copy = measure({"copy": [lambda: torch.neg(source, out=target)]}, rounds=15)["copy"]
    tiny = torch.zeros(8, device="cuda")
    launch = measure({"tiny": [lambda: tiny.add_(1)] * 50}, rounds=15)["tiny"]
    return Ceilings(best, 2 * source.nbytes / copy / 1e3, launch)


def _gemm(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
    return torch._scaled_mm(a, b.t(), sa, sb, out_dtype=torch.bfloat16, use_fast_accum=True)


def _inference(a, b, sa, sb):
    y, _ = torch.ops.loka.gemm_block_norm(a, b.t(), sa, sb, 256, 1e-5, torch.bfloat16, True, False)
    return (hardswish(y) * 16).to(E4M3)


def _training(a, b, sa, sb):
    y, rstd = torch.ops.loka.gemm_block_norm(a, b.t(), sa, sb, 256, 1e-5, torch.bfloat16, True, True)
    return (hardswish(y) * 16).to(E4M3), y, rstd


def kernels(m: int, n: int, k: int) -> list[Kernel]:
    """The kernels of a layer [k] -> [n] on m rows, as Inductor makes them and as our operators run."""
    from loka_compile.kernels.block_norm_backward import block_norm_backward
    from loka_compile.kernels.cast import cast_transpose, quantize_weights
    from loka_compile.lowering.fused import lowerings

    lowerings.register()
    like = {"device": "cuda", "dtype": torch.bfloat16}
    copies = copies_past_l2(m * k + n * k + m * n)
    s = torch.full((), 1 / 16, device="cuda")
    xs = [torch.randn(m, k, **like).to(E4M3) for _ in range(copies)]
    ws = [torch.randn(n, k, **like).to(E4M3) for _ in range(copies)]
    ys = [torch.randn(m, n, **like) for _ in range(copies)]
    grads = [torch.randn(m, n, **like) for _ in range(copies)]
    rstd = torch.rand(m, math.ceil(n / 256), device="cuda") + 0.5
    parts = torch.rand(math.ceil(m / 32) * math.ceil(n / 256), device="cuda")
    weights = [torch.randn(n, k, **like) for _ in range(copies)]
    torch._dynamo.reset()
    inference, training = torch.compile(_inference), torch.compile(_training)
    flop, operands = 2.0 * m * n * k, m * k + n * k
    kept = 2 * m * n + 4 * rstd.numel()
    pairs = list(zip(xs, ws, strict=True))
    return [
        Kernel("bare GEMM", [lambda x=x, w=w: _gemm(x, w, s, s) for x, w in pairs], flop, operands + 2 * m * n),
        Kernel("GEMM + norm + HardSwish + FP8", [lambda x=x, w=w: inference(x, w, s, s) for x, w in pairs],
               flop, operands + m * n),
        Kernel("the same, y and rstd too", [lambda x=x, w=w: training(x, w, s, s) for x, w in pairs],
               flop, operands + m * n + kept),
        Kernel("HardSwish' + BlockNorm' + amax",
               [lambda g=g, y=y: block_norm_backward(g, y, rstd, block=256, activation="hardswish", with_xt=False)
                for g, y in zip(grads, ys, strict=True)], 0.0, 6 * m * n + 4 * rstd.numel()),
        Kernel("the same, FP8 transpose of x too",
               [lambda g=g, y=y: block_norm_backward(g, y, rstd, block=256, activation="hardswish", with_xt=True)
                for g, y in zip(grads, ys, strict=True)], 0.0, 7 * m * n + 4 * rstd.numel()),
        Kernel("cast, both layouts", [lambda g=g: cast_transpose(g, parts, E4M3) for g in grads], 0.0, 4 * m * n),
        Kernel("weights, both layouts (2 launches)",
               [lambda w=w: quantize_weights([w], E4M3, [True]) for w in weights], 0.0, 4 * n * k),
    ]  # fmt: skip


def main() -> None:
    """Measure, print a table, write ``roofline.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    start, top = time.time(), ceilings()
    results = {"versions": machine.describe(), "command": " ".join(sys.argv), "ceilings": vars(top), "kernels": []}
    print(f"FP8 {top.fp8_tflops:.0f} TFLOP/s, copy {top.copy_gb_s:.0f} GB/s, launch {top.launch_us:.2f} us")
    options.out.mkdir(parents=True, exist_ok=True)
    for m, n, k in SHAPES:
        try:
            found = kernels(m, n, k)
            times = measure({kernel.name: kernel.calls for kernel in found}, rounds=15)
        except Exception as error:
            print(f"{m}x{n}x{k}: {type(error).__name__}: {str(error)[:300]}")
            results["kernels"].append({"shape": [m, n, k], "error": str(error)[:300]})
            continue
        for kernel in found:
            us, floor = times[kernel.name], top.floor_us(kernel.flop, kernel.bytes)
            of_bare = times["bare GEMM"] / us if kernel.flop else None
            results["kernels"].append(
                {"shape": [m, n, k], "kernel": kernel.name, "us": us, "floor_us": floor, "share": floor / us,
                 "of_bare_gemm": of_bare}
            )  # fmt: skip
            more = "" if of_bare is None else f"  {of_bare:4.0%} of the bare GEMM's speed"
            print(f"[{time.time() - start:4.0f}s] {m}x{n}x{k} {kernel.name:36} {us:7.1f} us {floor / us:4.0%}{more}")
        (options.out / "roofline.json").write_text(json.dumps(results, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
