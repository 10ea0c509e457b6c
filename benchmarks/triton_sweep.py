"""Finds configurations of our Triton FP8 GEMM on a GPU, and what they are worth beside ``torch._scaled_mm``.

    python benchmarks/triton_sweep.py --out results/ --seconds 60

Kernels are compiled first, in parallel processes, so that measuring takes little time on the device. The shapes are
the 27 layers of the LoKA paper's section II-C (two are published, the others reconstructed from its figure 13 and from
model configurations), narrow outputs first. Writes ``triton_sweep.json`` after every shape, and
``triton_gemm_<gpu>.json``, which can be shipped as ``loka_compile/data/triton_gemm_h200.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from _timing import copies_past_l2, measure

from loka_compile import machine
from loka_compile.kernels import scaled_gemm as kernel
from loka_compile.kernels.config import GemmConfig
from loka_compile.lowering.providers import torch_scaled_mm
from loka_compile.lowering.providers.triton_configs import config_for, fewest_splits, load, splits

#: (m, n, k). First those for which a plain tile grid leaves most of an H200 idle.
SHAPES = [(1024, 256, 7680)] + [
    (2048, n, k)
    for k, n in (
        (7680, 256), (7680, 512), (123200, 1024), (18480, 2048), (10240, 2048), (256, 256), (512, 512), (256, 768),
        (768, 256), (1024, 1024), (256, 7680), (2048, 1280), (768, 3072), (1152, 2048), (1536, 2048), (2048, 2048),
        (2048, 2560), (4096, 2048), (4096, 2560), (2560, 4096), (2048, 4096), (2048, 5120), (4096, 4096), (4608, 4096),
        (4096, 7680), (8192, 8192), (36960, 4096),
    )
]  # fmt: skip
#: Recipes whose kernels differ: fast accumulation, promoted, and scales in blocks. The other recipes use their points.
MODES = ("rowwise_fast", "rowwise", "blockwise")
TILES = {
    True: [(64, 128, 4), (64, 256, 4), (128, 128, 8), (128, 128, 4), (128, 256, 8), (256, 128, 8)],
    False: [(64, 128, 4), (64, 64, 4), (128, 128, 8), (64, 256, 8)],
}
FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def is_fast(mode: str) -> bool:
    return mode.endswith("_fast")


def candidates(mode: str, m: int, n: int, k: int, multiprocessors: int) -> Iterator[GemmConfig]:
    """Configurations that make sense for a shape: tiles not wider than the output, contraction cut if tiles are few."""
    for block_m, block_n, warps in TILES[is_fast(mode)]:
        if block_n > 64 and block_n >= 2 * n:
            continue
        for stages in (3, 4):
            if stages * (block_m + block_n) * 128 > 220_000:
                continue
            plain = GemmConfig(block_m, block_n, 128, warps, stages, tma=k > 512)
            tiles = -(-m // block_m) * -(-n // block_n)
            fill = splits(m, n, k, plain, multiprocessors)
            least = fewest_splits(mode, k)
            for cut in sorted({max(least, c) for c in ((1, fill, fill // 2) if tiles < multiprocessors else (1,))}):
                yield replace(plain, persistent=tiles * cut > multiprocessors, splits=cut)


def make(mode: str, m: int, n: int, k: int, device: str = "cuda") -> dict[str, Any]:
    """Operands and scales of one GEMM, and how the kernel and torch take them."""
    blocks = -(-k // 128)
    a, b = ((torch.randn(rows, k, device=device) * 8).to(FP8) for rows in (m, n))
    if mode.startswith("blockwise"):
        sa, sb, rows = (
            torch.rand(blocks, m, device=device).t(),
            torch.rand(-(-n // 128), blocks, device=device),
            (1, 128),
        )
    else:
        sa, sb, rows = torch.rand(m, 1, device=device), torch.rand(n, 1, device=device), (0, 0)
    return {"a": a, "b": b, "sa": sa, "sb": sb, "rows": rows, "fast": is_fast(mode)}


def ours(t: dict[str, Any], config: GemmConfig) -> torch.Tensor:
    rows_a, rows_b = t["rows"]
    return kernel.scaled_gemm(
        t["a"], t["b"], t["sa"], t["sb"], torch.bfloat16, fast=t["fast"], config=config, rows_a=rows_a, rows_b=rows_b
    )


def theirs(t: dict[str, Any]) -> torch.Tensor:
    """torch's kernel of the same recipe (cuBLASLt). It raises where it has none: blocks that k or n cuts."""
    if t["rows"] != (0, 0):
        if t["b"].shape[0] % 128 or t["b"].shape[1] % 128:
            raise ValueError("torch has no block scales for k or n that are no multiples of 128")
        padded = t.setdefault("padded", torch_scaled_mm._pad_k_blocks(t["sb"]))
        return torch_scaled_mm.scaled_mm_blockwise(t["a"], t["sa"].t(), t["b"], padded, True, torch.bfloat16)
    sa, sb = t["sa"], t["sb"].t()
    return torch._scaled_mm(t["a"], t["b"].t(), sa, sb, out_dtype=torch.bfloat16, use_fast_accum=t["fast"])


def reference(t: dict[str, Any]) -> torch.Tensor:
    """The first 64 rows in fp64."""
    rows, k = min(64, t["a"].shape[0]), t["a"].shape[1]
    a, b, sa, sb = t["a"][:rows].double(), t["b"].double(), t["sa"].double(), t["sb"].double()
    if t["rows"] != (0, 0):
        a = a * sa[:rows].repeat_interleave(128, 1)[:, :k]
        return a @ (b * sb.repeat_interleave(128, 0)[: b.shape[0]].repeat_interleave(128, 1)[:, :k]).t()
    return a @ b.t() * sa[:rows] * sb.t()


def error(expected: torch.Tensor, out: torch.Tensor) -> float:
    """Relative Frobenius error of the rows that the reference has."""
    return float((out[: expected.shape[0]].double() - expected).norm() / expected.norm())


def short(c: GemmConfig) -> str:
    flags = "".join(f"/{name}" for name in ("tma", "persistent") if getattr(c, name))
    return f"{c.block_m}x{c.block_n}/w{c.warps}/s{c.stages}/x{c.splits}{flags}"


def compile_one(job: tuple[str, tuple[int, int, int], GemmConfig]) -> str:
    """In a child process: compile for sm_90 without touching the device, into Triton's disk cache."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    triton.runtime.driver.set_active(Driver())
    torch.cuda.get_device_properties = lambda d: type("P", (), {"multi_processor_count": 132})  # type: ignore[assignment]
    for name, value in vars(kernel).items():
        if isinstance(value, JITFunction) and name.endswith("kernel") and not hasattr(value, "patched"):
            original = value.run
            value.run = lambda *a, grid, warmup, _run=original, **kw: _run(*a, grid=grid, warmup=True, **kw)
            value.patched = True
    mode, (m, n, k), config = job
    blocks = -(-k // 128)
    a, b = torch.empty(m, k, dtype=FP8), torch.empty(n, k, dtype=FP8)
    rows_a, rows_b = (1, 128) if mode == "blockwise" else (0, 0)
    if mode == "blockwise":
        sa, sb = torch.empty(blocks, m).t(), torch.empty(-(-n // 128), blocks)
    else:
        sa, sb = torch.empty(m, 1), torch.empty(n, 1)
    try:
        kernel.scaled_gemm(
            a, b, sa, sb, torch.bfloat16, fast=is_fast(mode), config=config, rows_a=rows_a, rows_b=rows_b
        )
    except Exception as failure:
        return f"{mode} {short(config)}: {type(failure).__name__} {str(failure)[:200]}"
    return ""


def sweep_shape(mode: str, shape: tuple[int, int, int], multiprocessors: int, timer: Callable[..., dict[str, float]],
                device: str = "cuda") -> dict[str, Any]:  # fmt: skip
    """Measure every candidate at one shape; a broken one is named and left out."""
    m, n, k = shape
    count = copies_past_l2(m * k + n * k + m * n * 2, most=16)
    if (m * k + n * k) * count > 8e9:
        count = 3
    sets = [make(mode, m, n, k, device) for _ in range(count)]
    arms: dict[str, list[Callable[[], object]]] = {}
    by_name: dict[str, GemmConfig] = {}
    broken: dict[str, str] = {}
    shipped = config_for(mode, m, n, k, multiprocessors)
    expected = reference(sets[0])
    for config in dict.fromkeys([shipped, *candidates(mode, m, n, k, multiprocessors)]):
        try:
            wrong = error(expected, ours(sets[0], config))
        except Exception as failure:
            broken[short(config)] = f"{type(failure).__name__}: {str(failure)[:200]}"
            continue
        if not wrong < 5e-3:
            broken[short(config)] = f"relative error {wrong:.3g}"
            continue
        by_name[short(config)] = config
        arms[short(config)] = [lambda t=t, c=config: ours(t, c) for t in sets]
    try:
        theirs(sets[0])
        arms["torch"] = [lambda t=t: theirs(t) for t in sets]
    except Exception as failure:
        broken["torch"] = f"{type(failure).__name__}: {str(failure)[:200]}"
    times = timer(arms)
    best = min(by_name, key=lambda name: times[name], default=None)
    row = {"mode": mode, "m": m, "n": n, "k": k, "torch_us": times.get("torch", math.nan), "broken": broken,
           "shipped": short(shipped), "shipped_us": times.get(short(shipped), math.nan), "times_us": times}  # fmt: skip
    if best is not None:
        row |= {"best": short(best := by_name[best]), "us": times[short(best)], "config": asdict(best)}
    return row


def points(rows: list[dict[str, Any]], info: dict[str, str], command: str) -> dict[str, Any]:
    """The data file that ships: the best configuration of every measured shape, and the rules as they are."""
    kept = ("mode", "m", "n", "k", "us", "torch_us", "config")
    return {
        "device": info.get("gpu", ""), "measured_with": command, "versions": info, "note": load()["note"],
        "points": [{name: row[name] for name in kept} for row in rows if "best" in row], "rules": load()["rules"],
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    ratio = row["torch_us"] / row["us"] if "best" in row else math.nan
    size = f"{row['m']}x{row['n']}x{row['k']}"
    broken = f" | broken: {len(row['broken'])}" if row["broken"] else ""
    ours = f"torch {row['torch_us']:8.1f}  ours {row.get('us', math.nan):8.1f} us  x{ratio:.2f}"
    return f"{row['mode']:>16} {size:>17} {ours}  {row.get('best', 'none')}  shipped {row['shipped_us']:.1f}{broken}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60, help="no shape is begun after this time")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--processes", type=int, default=15, help="that compile before anything is measured")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    todo = [(mode, shape) for shape in SHAPES for mode in options.modes]
    # One job for each kernel that differs: the numbers that its code is specialised on, and the configuration.
    jobs = {}
    for mode, (m, n, k) in todo:
        for config in candidates(mode, m, n, k, 132):
            like = replace(config, splits=min(config.splits, 2))
            jobs.setdefault((mode, like, k % 128 == 0, -(-k // 128) % 16 == 0), (mode, (m, n, k), config))
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        failed = [text for text in pool.imap_unordered(compile_one, jobs.values(), chunksize=4) if text]
    print(f"compiled {len(jobs)} kernels in {time.monotonic() - start:.0f} s; failed: {failed}", flush=True)
    info = machine.describe()
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    rows: list[dict[str, Any]] = []
    command = f"python benchmarks/triton_sweep.py --seconds {options.seconds:g}"
    name = f"triton_gemm_{info['gpu'].split()[-1].lower()}.json"
    for mode, shape in todo:
        if time.monotonic() - start > options.seconds:
            print(f"out of time before {mode} {shape}; {len(rows)} of {len(todo)} measured", flush=True)
            break
        try:
            row = sweep_shape(mode, shape, multiprocessors, lambda arms: measure(arms, rounds=9))
        except Exception as failure:
            print(f"{mode} {shape} failed: {type(failure).__name__}: {str(failure)[:300]}", flush=True)
            continue
        rows.append(row)
        print(line(row), flush=True)
        (options.out / "triton_sweep.json").write_text(json.dumps({"machine": info, "command": command, "rows": rows}))
        (options.out / name).write_text(json.dumps(points(rows, info, command), indent=1))
    ratios = [row["torch_us"] / row["us"] for row in rows if "best" in row and row["torch_us"] > 0]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"geometric mean of torch / ours: {mean:.3f} over {len(ratios)}; total {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
