"""The backward's own kernels in several configurations, against what they stand in for (data/fused_h200.json).

    python benchmarks/backward_sweep.py --out results/ --seconds 60

Gradient: HardSwish' + BlockNorm' + FP8 in both layouts + FP8 transpose of the activation, in one kernel whose programs
meet, by configuration (rows of a tile, warps, programs of a multiprocessor), against two kernels. The same in the
epilogue of the grad_input GEMM, against cuBLASLt and that kernel. Grad_weights: four
FP8 GEMMs of one shape in one launch, by configuration, against four of cuBLASLt. Medians of CUDA-graph replays, arms of
a shape interleaved, inputs rotated past the L2. Results are written shape by shape.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from _timing import copies_past_l2, measure  # noqa: E402

from loka_compile import machine  # noqa: E402
from loka_compile.kernels.config import BackwardConfig, GemmConfig  # noqa: E402

E4M3 = torch.float8_e4m3fn
GRADIENTS = ((4096, 512), (4096, 1024), (4096, 2048), (4096, 4096), (1024, 2048), (16384, 1024))
#: Rows of a tile, warps, programs of a multiprocessor, tiles that a program keeps at most.
MEETING = ((32, 8, 2, 1), (64, 16, 1, 1), (32, 8, 2, 4), (64, 16, 1, 4))
#: The same of the first of two kernels, which keeps none, and the tiles that it reads ahead, and one.
TWO = ((32, 8, 3, 1, 2), (32, 8, 3, 1, 3), (32, 8, 2, 1, 3), (32, 8, 8, 1, 1))
WEIGHTS = ((512, 4096), (1024, 4096), (2048, 4096))
#: Rows, columns and K of a tile, warps, stages.
GROUPED = ((64, 128, 128, 4, 4), (128, 128, 128, 4, 4), (128, 128, 128, 8, 3), (256, 128, 128, 8, 4))

#: Rows and K of a tile, warps, stages, by descriptors.
FUSED = ((64, 128, 8, 4, False), (64, 128, 8, 4, True), (128, 128, 16, 3, True))

Arms = dict[str, list[Callable[[], object]]]


def gradients(m: int, n: int) -> Arms:
    """Arms of one gradient [m, n]."""
    from loka_compile.kernels.block_norm_backward import block_norm_backward
    from loka_compile.kernels.block_norm_backward_fp8 import block_norm_backward_fp8
    from loka_compile.kernels.cast import cast_transpose
    from loka_compile.kernels.grid_barrier import STATE

    pairs = [
        tuple(torch.randn(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for _ in range(copies_past_l2(7 * m * n))
    ]
    rstd = torch.rand(m, -(-n // 256), device="cuda") + 0.5
    state = torch.zeros(STATE, dtype=torch.int32, device="cuda")

    def two(g: torch.Tensor, y: torch.Tensor, config: BackwardConfig) -> object:
        dx, amax, xt = block_norm_backward(
            g, y, rstd, block=256, activation="hardswish", with_xt=True, config=config
        )  # fmt: skip
        return cast_transpose(dx, amax, E4M3), xt

    def one(g: torch.Tensor, y: torch.Tensor, config: BackwardConfig) -> object:
        return block_norm_backward_fp8(
            g, y, rstd, state, block=256, activation="hardswish", dtype=E4M3, with_xt=True, config=config
        )  # fmt: skip

    arms: Arms = {}
    for make, name, configurations in ((two, "two kernels ", TWO), (one, "", MEETING)):
        for values in configurations:
            config = BackwardConfig(*values)
            arms[f"{name}{values}"] = [lambda g=g, y=y, c=config, f=make: f(g, y, c) for g, y in pairs]
    return arms


def weights(width: int, batch: int) -> Arms:
    """Arms of four grad_weights [width, width] of a batch."""
    from loka_compile.kernels.grouped_gemm import grouped_gemm

    sets = [
        [[torch.randn(width, batch, device="cuda").to(E4M3) for _ in range(4)] for _ in range(2)]
        for _ in range(copies_past_l2(8 * width * batch))
    ]
    scales = [torch.full((), 0.1, device="cuda")] * 4

    def single(a: list[torch.Tensor], b: list[torch.Tensor]) -> object:
        return [
            torch._scaled_mm(x, w.t(), s, s, out_dtype=torch.bfloat16, use_fast_accum=True)
            for x, w, s in zip(a, b, scales, strict=True)
        ]

    arms: Arms = {"cuBLASLt, one by one": [lambda a=a, b=b: single(a, b) for a, b in sets]}
    for m, n, k, warps, stages in GROUPED:
        config = GemmConfig(m, n, k, warps, stages)
        arms[str((m, n, k, warps, stages))] = [
            lambda a=a, b=b, c=config: grouped_gemm(a, b, scales, scales, torch.bfloat16, fast=True, config=c)
            for a, b in sets
        ]
    return arms


def grad_inputs(width: int, batch: int) -> Arms:
    """Arms of a grad_input GEMM [batch, width] x [width, width] and the gradient of the layer below."""
    from loka_compile.kernels.block_norm_backward_fp8 import block_norm_backward_fp8
    from loka_compile.kernels.grad_input_fp8 import grad_input_fp8
    from loka_compile.kernels.grid_barrier import STATE

    sets = [
        (torch.randn(batch, width, device="cuda").to(E4M3), torch.randn(width, width, device="cuda").to(E4M3),
         torch.randn(batch, width, device="cuda").bfloat16())
        for _ in range(copies_past_l2(6 * width * batch))
    ]  # fmt: skip
    s, rstd = torch.full((), 0.1, device="cuda"), torch.rand(batch, -(-width // 256), device="cuda") + 0.5
    state = torch.zeros(STATE, dtype=torch.int32, device="cuda")

    def two(a: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> object:
        g = torch._scaled_mm(a, b.t(), s, s, out_dtype=torch.bfloat16, use_fast_accum=True)
        return block_norm_backward_fp8(
            g, y, rstd, state, block=256, activation="hardswish", dtype=E4M3, with_xt=True
        )  # fmt: skip

    def one(a: torch.Tensor, b: torch.Tensor, y: torch.Tensor, config: GemmConfig) -> object:
        return grad_input_fp8(
            a, b, s, s, y, rstd, state, fast=True, config=config, block=256, activation="hardswish", dtype=E4M3,
            with_xt=True,
        )  # fmt: skip

    arms: Arms = {"cuBLASLt and a kernel": [lambda t=t: two(*t) for t in sets]}
    for m, k, warps, stages, tma in FUSED:
        config = GemmConfig(m, 256, k, warps, stages, tma=tma)
        name = f"{(m, 256, k, warps, stages)}{' TMA' * tma}"
        if -(-batch // m) * -(-width // 256) <= torch.cuda.get_device_properties(0).multi_processor_count:
            arms[name] = [lambda t=t, c=config: one(*t, c) for t in sets]
    return arms


def working(arms: Arms, log: Callable[[str], None]) -> Arms:
    """The arms whose first call succeeds."""
    found: Arms = {}
    for name, calls in arms.items():
        try:
            calls[0]()
            torch.cuda.synchronize()
            found[name] = calls
        except Exception as error:
            log(f"    {name}: {type(error).__name__}: {str(error)[:200]}")
    return found


def main() -> None:
    """Measure, print a line a shape, write ``backward_sweep.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no shape begins after so long")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.time()
    results = {"versions": machine.describe(), "command": " ".join(sys.argv), "us": {}}

    def log(text: str) -> None:
        print(f"[{time.time() - start:4.0f}s] {text}", flush=True)

    shapes = [(grad_inputs, s) for s in WEIGHTS[:2]]
    shapes += [(gradients, s) for s in GRADIENTS[:2]] + [(weights, s) for s in WEIGHTS[:2]]
    shapes += [(gradients, s) for s in GRADIENTS[2:]] + [(weights, s) for s in WEIGHTS[2:]]
    for make, shape in shapes:
        name = f"{make.__name__} {shape[0]}x{shape[1]}"
        if time.time() - start > options.seconds:
            log(f"{name}: not run in time")
            continue
        times = measure(working(make(*shape), log), rounds=15)
        results["us"][name] = times
        log(f"{name}: " + " | ".join(f"{arm} {us:.1f}" for arm, us in times.items()))
        (options.out / "backward_sweep.json").write_text(json.dumps(results, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
