"""Configurations of the fused GEMM as Inductor generates it: template, epilogue and early launch as in a model.

    python benchmarks/template_sweep.py --out results/ --seconds 60

For each case (activation, operand dtype, M, N, K, whether y and rstd are written too, fast accumulation) the shipped
configuration of data/fused_h200.json against others, and against cuBLASLt's GEMM with what Inductor makes of the rest
("apart"), in medians of CUDA-graph replays, interleaved, inputs rotated past the L2. "by comparisons" is the shipped
one with HardSwish as it was before its gate was one instruction. Written case by case. With HardSwish the result is
FP8, with SwishNorm bf16 or FP8 in 1x128 blocks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from _epilogue import hardswish  # noqa: E402
from _timing import capture, copies_past_l2, measure_graphs  # noqa: E402

from loka_compile import machine  # noqa: E402
from loka_compile.gemm import Scaling  # noqa: E402
from loka_compile.kernels.config import GemmConfig  # noqa: E402
from loka_compile.lowering.fused import configs, lowerings  # noqa: E402
from loka_compile.lowering.quantize import packed, quantize  # noqa: E402
from loka_compile.ops import block_norm_ref  # noqa: E402

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One GEMM with its epilogue."""

    dtype: torch.dtype
    m: int
    n: int
    k: int
    training: bool
    fast: bool = True
    gated: bool = False
    blocks: bool = False

    @property
    def name(self) -> str:
        """How results call it."""
        kind = f"{str(self.dtype).removeprefix('torch.')} {self.m}x{self.n}x{self.k}"
        words = {"training": self.training, "exact": not self.fast, "SwishNorm": self.gated, "1x128": self.blocks}
        return " ".join([kind, *(word for word, true in words.items() if true)])


CASES = (
    Case(E4M3, 4096, 512, 512, True), Case(E4M3, 4096, 512, 512, False), Case(BF16, 4096, 512, 512, False),
    Case(BF16, 4096, 1024, 1024, False), Case(E4M3, 4096, 1024, 1024, True), Case(E4M3, 1024, 7680, 256, False),
    Case(E4M3, 4096, 2048, 2048, True), Case(BF16, 4096, 2048, 2048, False), Case(E4M3, 4096, 1024, 1024, False),
    Case(E4M3, 16384, 1024, 1024, True), Case(E4M3, 1024, 2048, 4096, False), Case(E4M3, 1024, 4096, 2048, False),
    Case(BF16, 1024, 2048, 4096, False), Case(BF16, 1024, 4096, 2560, False), Case(E4M3, 1024, 1024, 1024, True),
    Case(E4M3, 2048, 1024, 1024, True), Case(E4M3, 4096, 1024, 1024, False, fast=False),
    Case(E4M3, 4096, 1024, 1024, True, fast=False), Case(E4M3, 2048, 1024, 1024, True, fast=False),
    Case(E4M3, 4096, 2048, 2048, True, fast=False), Case(E4M3, 4096, 512, 512, True, fast=False),
    Case(E4M3, 4096, 1024, 1024, False, gated=True), Case(E4M3, 4096, 1024, 1024, True, gated=True),
    Case(BF16, 4096, 1024, 1024, False, gated=True), Case(BF16, 4096, 1024, 1024, True, gated=True),
    Case(E4M3, 4096, 2048, 2048, False, gated=True), Case(E4M3, 4096, 2048, 2048, True, gated=True),
    Case(BF16, 4096, 2048, 2048, False, gated=True), Case(BF16, 4096, 2048, 2048, True, gated=True),
    Case(E4M3, 4096, 4096, 4096, True, gated=True), Case(BF16, 4096, 4096, 4096, True, gated=True),
    Case(E4M3, 16384, 1024, 1024, True, gated=True), Case(BF16, 16384, 1024, 1024, True, gated=True),
    Case(E4M3, 4096, 512, 512, True, gated=True), Case(E4M3, 4096, 512, 512, True, fast=False, gated=True),
    Case(E4M3, 4096, 1024, 1024, True, fast=False, gated=True), Case(E4M3, 1024, 1024, 1024, True, gated=True),
    Case(E4M3, 1024, 2048, 4096, True, gated=True), Case(BF16, 1024, 2048, 4096, True, gated=True),
    Case(E4M3, 4096, 1024, 1024, False, gated=True, blocks=True),
    Case(E4M3, 4096, 2048, 2048, False, gated=True, blocks=True),
)  # fmt: skip
#: Rows, columns and bytes of K of a tile, warps, stages, by descriptors (and then persistent).
SHAPES = (
    (64, 256, 128, 8, 4, False), (64, 256, 128, 4, 4, False), (64, 256, 64, 4, 4, False), (128, 256, 128, 8, 3, False),
    (64, 256, 128, 4, 4, True), (64, 256, 128, 8, 4, True), (128, 256, 128, 8, 3, True),
)  # fmt: skip


def config_of(shape: tuple[int, int, int, int, int, bool], itemsize: int) -> GemmConfig:
    """A configuration from a row of SHAPES."""
    m, n, k, warps, stages, tma = shape
    return GemmConfig(m, n, k // itemsize, warps, stages, tma=tma, persistent=tma)


def by_comparisons(y: torch.Tensor) -> torch.Tensor:
    """HardSwish as the epilogue had it before its gate was one instruction."""
    y = y.float()
    return torch.where(y <= -3, 0.0, torch.where(y >= 3, y, y * (y * (1 / 6) + 0.5)))


def layer(case: Case, activation: Callable[[torch.Tensor], torch.Tensor] = hardswish) -> Callable[..., object]:
    """What is compiled: GEMM, norm, activation and its output, with what the backward needs if training."""

    def fn(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> object:
        scales = (s, s) if case.dtype == E4M3 else (None, None)
        if case.gated:
            flags = (case.fast, not case.blocks, case.training, case.blocks)
            found = torch.ops.loka.gemm_norm_activation(a, b.t(), *scales, "swish_norm", 256, 1e-5, BF16, BF16, *flags)
            if case.blocks:
                return found[3:]
            return found[:3] if case.training else found[0]
        y, rstd = torch.ops.loka.gemm_block_norm(a, b.t(), *scales, 256, 1e-5, BF16, case.fast, case.training)
        q = (activation(y) * 16).to(E4M3)
        return (q, y, rstd) if case.training else q

    return fn


def apart(case: Case) -> Callable[..., object]:
    """The same from cuBLASLt's GEMM and what Inductor makes of the rest."""

    def fn(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> object:
        fp8 = case.dtype == E4M3
        h = torch._scaled_mm(a, b.t(), s, s, None, None, BF16, case.fast) if fp8 else a @ b.t()
        y, rstd = block_norm_ref(h, 256, 1e-5)
        if not case.gated:
            q = (F.hardswish(y.float()) * 16).to(E4M3)
            return (q, y, rstd) if case.training else q
        out = h * F.hardsigmoid(y)
        if case.blocks:
            q, scale = quantize(out, Scaling.BLOCK_1X128)
            return q, packed(scale.t())
        return (out, rstd) if case.training else out

    return fn


def measure(case: Case, log: Callable[[str], None]) -> dict[str, float]:
    """Microseconds by configuration; one that does not compile is logged and left out."""
    dtype, m, n, k = case.dtype, case.m, case.n, case.k
    one = torch.full((), 1 / 16, device="cuda")
    pairs = [
        tuple(torch.randn(rows, k, device="cuda", dtype=BF16).to(dtype) for rows in (m, n))
        for _ in range(copies_past_l2((m * k + n * k) * dtype.itemsize + 3 * m * n))
    ]
    kernel = configs.gemm_kernel(gated=case.gated, quantised=case.blocks)
    shipped = configs.config_for(kernel, m, n, k, dtype.itemsize, case.fast)
    graphs, known = {}, lowerings.config_for
    others = {str(row): config_of(row, dtype.itemsize) for row in SHAPES}
    if not case.gated:
        others["by comparisons"] = shipped
    for name, config in {"apart": None, "shipped": shipped, **others}.items():
        torch._dynamo.reset()
        lowerings.config_for = lambda *_, c=config: c  # type: ignore[assignment, misc]
        try:
            activation = by_comparisons if name == "by comparisons" else hardswish
            compiled = torch.compile(layer(case, activation) if config is not None else apart(case))
            calls = [lambda a=a, b=b, f=compiled: f(a, b, one) for a, b in pairs]
            calls[0]()
            # Captured now: the next configuration resets Dynamo, and with it this one's compiled code.
            graphs[name] = (capture(calls, warmup=1), len(calls))
        except Exception as error:
            log(f"    {name}: {type(error).__name__}: {str(error)[:200]}")
        finally:
            lowerings.config_for = known
    return measure_graphs(graphs, rounds=15)


def main() -> None:
    """Measure, print a line a case, write ``template_sweep.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no case begins after so long")
    parser.add_argument("--only", default="", help="cases with this in their name")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.time()
    results = {"versions": machine.describe(), "command": " ".join(sys.argv), "us": {}}
    lowerings.register()

    def log(text: str) -> None:
        print(f"[{time.time() - start:4.0f}s] {text}", flush=True)

    for case in CASES:
        if options.only not in case.name:
            continue
        if time.time() - start > options.seconds:
            log(f"{case.name}: not run in time")
            continue
        times = measure(case, log)
        results["us"][case.name] = times
        log(f"{case.name}: " + " | ".join(f"{config} {us:.1f}" for config, us in times.items()))
        (options.out / "template_sweep.json").write_text(json.dumps(results, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    import torch._inductor.config as inductor_config

    inductor_config.force_disable_caches = True  # the cache's key does not know the configuration
    main()
