"""GEMMs with scales in blocks, SwishNorm and results in 1x128 blocks: fused, by configuration, against unfused.

    python benchmarks/activation_sweep.py --compile          # no GPU needed: fused kernels into Triton's cache
    python benchmarks/activation_sweep.py --warm 0           # the unfused arms of a shape into Inductor's cache; 0 to 7
    python benchmarks/activation_sweep.py --out results/     # measure

Unfused is what a compiled model runs without these kernels: cuBLASLt's GEMM (block-scaled, tensorwise or bf16), and
what Inductor makes of norm, activation and quantisation behind it. Medians of CUDA-graph replays, arms interleaved,
inputs rotated past the L2. The fused kernel is the one that configurations are measured with
(``kernels/gemm_block_norm.py``).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from loka_compile.gemm import Scaling  # noqa: E402
from loka_compile.kernels import gemm_block_norm  # noqa: E402
from loka_compile.kernels.config import GemmConfig as C  # noqa: E402
from loka_compile.lowering.fused import lowerings  # noqa: E402
from loka_compile.lowering.providers.torch_scaled_mm import scaled_mm_blockwise  # noqa: E402
from loka_compile.lowering.quantize import packed, quantize  # noqa: E402
from loka_compile.ops import block_norm_ref  # noqa: E402

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
#: M, N, K; the first four are also measured as Inductor generates the template.
SHAPES = (
    (4096, 512, 512), (4096, 1024, 1024), (4096, 2048, 2048), (1024, 2048, 4096), (256, 1024, 1024),
    (16384, 1024, 1024), (4096, 4096, 4096), (1024, 512, 512),
)  # fmt: skip
IN_BLOCKS = (
    C(64, 256, 128, 8, 4), C(64, 256, 128, 8, 4, tma=True, persistent=True), C(64, 256, 128, 4, 2, tma=True),
    C(128, 256, 128, 8, 3, tma=True, persistent=True), C(64, 256, 128, 8, 4, tma=True),
)  # fmt: skip
IN_FP8 = (
    C(64, 256, 128, 8, 4), C(128, 256, 128, 8, 3, tma=True, persistent=True),
    C(64, 256, 128, 4, 4, tma=True, persistent=True),
)  # fmt: skip
IN_BF16 = (
    C(64, 256, 64, 8, 4), C(128, 256, 64, 8, 3, tma=True, persistent=True),
    C(64, 256, 64, 4, 4, tma=True, persistent=True),
)  # fmt: skip
#: GEMM, activation, what is written, configurations.
KINDS: dict[str, tuple[str, str, str, tuple[C, ...]]] = {
    "blocks, HardSwish, bf16": ("blocks", "hardswish", "out", IN_BLOCKS),
    "blocks, HardSwish, 1x128": ("blocks", "hardswish", "q", IN_BLOCKS),
    "blocks, HardSwish, 1x128, y": ("blocks", "hardswish", "q kept", IN_BLOCKS),
    "blocks, SwishNorm, 1x128": ("blocks", "swish_norm", "q", IN_BLOCKS),
    "blocks, SwishNorm, bf16, h": ("blocks", "swish_norm", "out kept", IN_BLOCKS),
    "tensorwise, SwishNorm, bf16": ("fp8", "swish_norm", "out", IN_FP8),
    "tensorwise, SwishNorm, bf16, h": ("fp8", "swish_norm", "out kept", IN_FP8),
    "tensorwise, SwishNorm, 1x128": ("fp8", "swish_norm", "q", IN_FP8),
    "bf16, SwishNorm, bf16": ("bf16", "swish_norm", "out", IN_BF16),
    "bf16, SwishNorm, bf16, h": ("bf16", "swish_norm", "out kept", IN_BF16),
}


def make(gemm: str, m: int, n: int, k: int, device: str = "cuda") -> dict[str, torch.Tensor]:
    """Operands and outputs."""
    dtype = BF16 if gemm == "bf16" else E4M3
    t = {name: torch.randn(rows, k, device=device).to(dtype) for name, rows in (("a", m), ("b", n))}
    if gemm == "blocks":
        t["sa"], t["sb"] = torch.rand(k // 128, m, device=device) + 0.5, torch.rand(n // 128, k // 128, device=device)
    else:
        t["sa"] = t["sb"] = torch.full((), 0.5, device=device)
    for name, size, kind in (
        ("out", (m, n), BF16), ("kept", (m, n), BF16), ("rstd", (m, -(-n // 256)), torch.float32), ("q", (m, n), E4M3),
        ("qs", (n // 128, m), torch.float32),
    ):  # fmt: skip
        t[name] = torch.empty(size, dtype=kind, device=device)
    return t


def fused(kind: str, t: dict[str, torch.Tensor], config: C) -> None:
    """One launch."""
    gemm, activation, writes, _ = KINDS[kind]
    scales = {"blocks": (t["sa"].t(), t["sb"]), "fp8": (t["sa"], t["sb"]), "bf16": (None, None)}[gemm]
    q, kept = "q" in writes, "kept" in writes
    gemm_block_norm.launch(
        t["a"], t["b"], *scales, None if q else t["out"], t["rstd"] if kept else None, t["q"] if q else None, block=256,
        eps=1e-5, fast=True, config=config, activation=activation, kept=t["kept"] if kept else None,
        q_scales=t["qs"] if q else None,
    )  # fmt: skip


def behind(activation: str, writes: str) -> Callable[[torch.Tensor], Any]:
    """What Inductor compiles behind the GEMM; h is in memory already where it is kept."""

    def fn(h: torch.Tensor) -> Any:
        y, rstd = block_norm_ref(h, 256, 1e-5)
        out = F.hardswish(y) if activation == "hardswish" else h * F.hardsigmoid(y)
        kept = (y, rstd) if activation == "hardswish" else (rstd,)
        if "q" in writes:
            q, scale = quantize(out, Scaling.BLOCK_1X128)
            out = (q, packed(scale.t()))
        return (out, *kept) if "kept" in writes else out

    return fn


def meant(gemm: str, m: int, n: int, k: int) -> C:
    """The configuration that the template is measured with: by pointers where building descriptors costs too much."""
    if gemm == "blocks" or k <= 512:
        return {"blocks": IN_BLOCKS, "fp8": IN_FP8, "bf16": IN_BF16}[gemm][0]
    many = -(-m // 128) * -(-n // 256) > 64
    return (IN_BF16 if gemm == "bf16" else IN_FP8)[1 if many else 2]


def template(kind: str, m: int, n: int, k: int, t: dict[str, torch.Tensor]) -> Any:
    """The operators compiled and called once; the configuration is not in the cache's key, but one shape has one."""
    lowerings.config_for = lambda *_: meant(KINDS[kind][0], m, n, k)
    compiled = torch.compile(operator(kind), dynamic=False)
    compiled(t["a"], t["b"], t["sa"], t["sb"])
    return compiled


def operator(kind: str) -> Callable[..., Any]:
    """The operators as the fusion leaves them in a graph."""
    gemm, activation, writes, _ = KINDS[kind]
    q, kept = "q" in writes, "kept" in writes

    def fn(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> Any:
        scales = {"blocks": (sa.t(), sb), "fp8": (sa, sb), "bf16": (None, None)}[gemm]
        if activation == "hardswish" and not q:
            y, rstd = torch.ops.loka.gemm_block_norm(a, b.t(), *scales, 256, 1e-5, BF16, True, kept)
            return (F.hardswish(y), y, rstd) if kept else F.hardswish(y)
        return torch.ops.loka.gemm_norm_activation(
            a, b.t(), *scales, activation, 256, 1e-5, BF16, BF16, True, not q, kept, q
        )

    return fn


def all_behind() -> dict[tuple[str, str], Any]:
    """What is behind the GEMMs of all kinds, compiled at the first call."""
    torch._dynamo.reset()
    kinds = dict.fromkeys(kind[1:3] for kind in KINDS.values())
    return {kind: torch.compile(behind(*kind), dynamic=False) for kind in kinds}


def product(kind: str, t: dict[str, torch.Tensor]) -> torch.Tensor:
    """cuBLASLt's GEMM."""
    gemm = KINDS[kind][0]
    if gemm == "bf16":
        return t["a"] @ t["b"].t()
    if gemm == "fp8":
        return torch._scaled_mm(t["a"], t["b"].t(), t["sa"], t["sb"], out_dtype=BF16, use_fast_accum=True)
    padded = F.pad(t["sb"], (0, -t["sb"].shape[1] % 4), value=1.0) if t["sb"].shape[1] % 4 else t["sb"]
    return scaled_mm_blockwise(t["a"], t["sa"], t["b"], padded, True, BF16)


def name_of(c: C) -> str:
    """A configuration in short."""
    loads = "/pers" if c.persistent else "/tma" if c.tma else ""
    return f"{c.block_m}/w{c.warps}/s{c.stages}{loads}"


def compile_one(job: tuple[str, C]) -> str:
    """In a child process: compile for sm_90 without touching the device, into Triton's disk cache."""
    from fused_sweep import pretend_sm90

    pretend_sm90(gemm_block_norm)
    kind, config = job
    try:
        with torch.device("cpu"):
            fused(kind, make(KINDS[kind][0], 4096, 1024, 1024, "cpu"), config)
    except Exception as error:
        return f"{kind} {name_of(config)}: {type(error).__name__} {str(error)[:200]}"
    return ""


def arms(kind: str, compiled: Any, m: int, n: int, k: int, log: Callable[[str], None]) -> dict[str, tuple[Any, int]]:
    """CUDA graphs of the unfused way and of every configuration."""
    from _timing import capture, copies_past_l2

    gemm, _, _, configs = KINDS[kind]
    sets = [make(gemm, m, n, k) for _ in range(copies_past_l2(m * k + n * k + m * n * 3, most=16))]
    calls = {"GEMM alone": [lambda t=t: product(kind, t) for t in sets]}
    calls["unfused"] = [lambda t=t: compiled(product(kind, t)) for t in sets]
    if (m, n, k) in SHAPES[:4]:
        made = template(kind, m, n, k, sets[0])
        calls["template"] = [lambda t=t: made(t["a"], t["b"], t["sa"], t["sb"]) for t in sets]
    calls |= {name_of(c): [lambda t=t, c=c: fused(kind, t, c) for t in sets] for c in configs}
    graphs = {}
    for name, run in calls.items():
        try:
            graphs[name] = (capture(run, warmup=1), len(run))
        except Exception as error:
            log(f"    {kind} {name}: {type(error).__name__}: {str(error)[:200]}")
    return graphs


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--warm", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no kind begins after so long")
    options = parser.parse_args()
    start = time.time()
    lowerings.register()
    torch._dynamo.config.recompile_limit = 64  # the kinds share the code of their functions

    def log(text: str) -> None:
        print(f"[{time.time() - start:4.0f}s] {text}", flush=True)

    if options.compile:
        jobs = [(kind, config) for kind, (*_, configs) in KINDS.items() for config in configs]
        with multiprocessing.get_context("fork").Pool(12) as pool:
            failed = [f for f in pool.map(compile_one, jobs, chunksize=1) if f]
        log(f"compiled {len(jobs)} kernels; failed: {failed}")
        return
    if options.warm is not None:
        m, n, k = SHAPES[options.warm]
        for compiled in all_behind().values():
            compiled(torch.randn(m, n, device="cuda", dtype=BF16))
        for kind in KINDS if options.warm < 4 else ():
            template(kind, m, n, k, make(KINDS[kind][0], m, n, k))
        log(f"warm: {m}x{n}x{k}")
        return
    from _timing import measure_graphs

    from loka_compile import machine

    results: dict[str, Any] = {"versions": machine.describe(), "command": " ".join(sys.argv), "us": {}}
    options.out.mkdir(parents=True, exist_ok=True)
    for m, n, k in SHAPES:
        compiled = all_behind()
        for kind, (_, activation, writes, _) in KINDS.items():
            if time.time() - start > options.seconds:
                log(f"{m}x{n}x{k} {kind}: not run in time")
                continue
            times = measure_graphs(arms(kind, compiled[activation, writes], m, n, k, log), rounds=11)
            results["us"].setdefault(f"{m}x{n}x{k}", {})[kind] = times
            log(f"{m}x{n}x{k} {kind}: " + " | ".join(f"{name} {us:.1f}" for name, us in times.items()))
            torch.cuda.empty_cache()
        (options.out / "activation_sweep.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
