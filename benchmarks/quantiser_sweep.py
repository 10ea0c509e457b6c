"""Finds tiles for the FP8 quantisers on a GPU: every candidate of every scaling and output, beside a copy.

    python benchmarks/quantiser_sweep.py --out results/ --seconds 120

Kernels are compiled first, in parallel processes. A candidate counts only if it is right: the bits of x are those of
the shipped tile, which is held to the plain ops, and the bits of x.T are those of x transposed beforehand. Times are
CUDA graphs over inputs that together exceed L2. Writes ``quantiser_sweep.json`` after every line.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from _timing import copies_past_l2, measure
from quantisers import FP8, OUTPUTS, SCALINGS, copy_bandwidth, keeping, moved

from loka_compile import machine
from loka_compile.gemm import Scaling
from loka_compile.kernels import device as dev
from loka_compile.kernels import quantize as kernel
from loka_compile.kernels.quantize_tiles import TILES, Tile
from loka_compile.lowering.quantize import quantize

SHAPES = [(4096, 4096), (8192, 4096), (16384, 8192), (4096, 2048)]
#: Where the shipped tiles are only checked: cut tiles, rows of x.T that are no whole words, rows that are not aligned.
AWKWARD = [(130, 300), (199, 256), (1030, 640)]
Tiles = dict[str, Tile]
Timer = Callable[[dict[str, list[Callable[[], object]]]], dict[str, float]]


def t(block_m: int, block_n: int, warps: int, group: int = 8, **more: Any) -> Tile:
    return Tile(block_m, block_n, warps, group, **more)


#: What is tried. A kernel that has two passes gets the maxima's and the cast's candidates, one changed at a time, and
#: at the end the best of each together.
ROWS_1X128 = [t(8, 512, w, g) for w in (4, 8) for g in (1, 8)] + [
    t(32, 128, 4, 8), t(16, 256, 4, 8), t(4, 1024, 4, 1), t(16, 512, 8, 1), t(8, 512, 4, 1, held=True),
]  # fmt: skip
SQUARES = [
    t(128, 128, w, g, registers=r, held=h) for w, r in ((4, 0), (8, 0), (8, 80), (16, 0)) for g in (1, 8)
    for h in (False, True)
]  # fmt: skip
TURNED_1X128 = [
    t(128, n, w, g, registers=r, held=h) for n, w in ((64, 4), (128, 8), (32, 2)) for g in (1, 8)
    for r, h in ((80, False), (0, True))
]  # fmt: skip
BOTH_1X128 = [t(128, 128, 8, g, registers=r) for g in (1, 8) for r in (0, 72, 80, 96)] + [
    t(128, 64, 4, g, registers=r) for g in (1, 2, 8) for r in (0, 80, 96, 112, 128, 160)
] + [
    t(128, 64, 8, 8, registers=r) for r in (0, 64, 80)
] + [t(128, 128, 4, 8, registers=r) for r in (0, 128, 160)] + [
    t(128, 128, 16, 8), t(128, 32, 2, 8, registers=128), t(128, 32, 4, 8, registers=96)
]  # fmt: skip
MAXIMA = [
    t(m, n, w, g, steps=steps) for m, n, w in ((64, 64, 4), (32, 64, 4), (32, 128, 4), (64, 128, 8), (128, 64, 8))
    for steps in (1, 2, 4) for g in (1, 8)
] + [
    t(128, 128, 8, 8), t(128, 128, 16, 8), t(32, 32, 2, 8, steps=2), t(64, 32, 2, 8, steps=2),
    t(16, 256, 4, 8, steps=2),
    t(16, 256, 4, 8, steps=4), t(32, 256, 8, 8, steps=2), t(8, 512, 4, 8, steps=4), t(64, 64, 4, 8, steps=8),
]  # fmt: skip
CASTS = [
    t(m, n, w, g) for m, n, w in ((128, 64, 4), (128, 128, 8), (64, 128, 4), (64, 64, 4), (64, 128, 8), (64, 64, 2))
    for g in (1, 8)
] + [t(128, 128, 16, 1), t(128, 64, 8, 8), t(256, 64, 8, 8), t(128, 128, 8, 8, registers=80),
     t(128, 64, 4, 8, registers=80), t(64, 128, 4, 8, registers=80), t(64, 256, 8, 8)]  # fmt: skip
CASTS_X = [t(32, 128, 4, g) for g in (1, 8)] + [t(8, 512, 4, 1), t(8, 512, 4, 8), t(16, 256, 4, 8), t(64, 128, 8, 8)]


def candidates(scaling: str, output: str) -> Iterator[Tiles]:
    """What to try: the tiles that differ from the shipped ones. The shipped ones come first."""
    yield {}
    if scaling in ("1x128", "128x128"):
        lists = {
            "1x128 x": ROWS_1X128, "128x128 x": SQUARES, "1x128 x.T": TURNED_1X128, "128x128 x.T": SQUARES,
            "1x128 both": BOTH_1X128, "128x128 both": SQUARES,
        }  # fmt: skip
        name = f"{scaling} {output}"
        for tile in lists[name]:
            yield {name: tile}
    elif scaling == "tensorwise" or output != "x":
        for tile in MAXIMA:
            yield {"amax all" if scaling == "tensorwise" else f"amax {output}": tile}
        for tile in CASTS_X if output == "x" else CASTS:
            yield {f"cast {output}": tile}


def short(tiles: Tiles) -> str:
    def one(tile: Tile) -> str:
        text = f"{tile.block_m}x{tile.block_n}/w{tile.warps}/g{tile.group}"
        text += f"/steps{tile.steps}" * (tile.steps > 1) + f"/r{tile.registers}" * bool(tile.registers)
        return text + "/held" * tile.held

    return " ".join(f"{name.split()[0]} {one(tile)}" for name, tile in tiles.items()) or "shipped"


def launch(x: torch.Tensor, scaling: str, output: str, tiles: Tiles) -> tuple[torch.Tensor, ...]:
    with_q, with_qt = OUTPUTS[output]
    return kernel.quantize(x, scaling, FP8, with_q=with_q, with_qt=with_qt, tiles=TILES | tiles)


def compile_one(job: tuple[str, str, Tiles, tuple[int, int]]) -> str:
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
    dev.early = lambda device: {"PDL": True, "launch_pdl": True}
    dev.ptx = lambda device: True
    for name, value in vars(kernel).items():
        if isinstance(value, JITFunction) and name.endswith("kernel") and not hasattr(value, "patched"):
            original = value.run
            value.run = lambda *a, grid, warmup, _run=original, **kw: _run(*a, grid=grid, warmup=True, **kw)
            value.patched = True
    scaling, output, tiles, shape = job
    try:
        launch(torch.empty(shape, dtype=torch.bfloat16), scaling, output, tiles)
    except Exception as failure:
        return f"{scaling} {output} {short(tiles)}: {type(failure).__name__} {str(failure)[:200]}"
    return ""


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8)


class Check:
    """Whether a candidate's results at one shape are right."""

    def __init__(self, x: torch.Tensor, scaling: str) -> None:
        self.straight = launch(x, scaling, "x", {})
        self.turned = launch(x.t().contiguous(), scaling, "x", {})
        for (q, scale, *_), transpose in ((self.straight, False), (self.turned, True)):
            expected = quantize(x, Scaling(scaling), transpose=transpose)
            torch.testing.assert_close(scale, expected.scale, rtol=2.0**-22, atol=0)
            # A last bit of the scale moves a few numbers to a neighbour.
            differ = bits(q).int() - bits(expected.data).int()
            if differ.abs().max() > 1 or differ.count_nonzero() > 1e-3 * differ.numel():
                raise AssertionError(f"{scaling}: data differs from the plain ops in {differ.count_nonzero()} places")

    def wrong(self, found: tuple[torch.Tensor, ...], output: str) -> str:
        pairs = []
        if output != "x.T":
            pairs.append(("x", found[:2], self.straight))
        if output != "x":
            pairs.append(("x.T", found[2:], self.turned))
        for name, (data, scale), (expected, expected_scale, *_) in pairs:
            if not torch.equal(scale, expected_scale):
                return f"scales of {name}"
            if not torch.equal(bits(data), bits(expected)):
                return f"{int((bits(data) != bits(expected)).sum())} numbers of {name}"
        return ""


def check_awkward(cases: list[tuple[str, str]], device: str = "cuda") -> list[str]:
    """What is wrong with the shipped tiles at awkward shapes."""
    problems = []
    for (m, n), (scaling, output) in itertools.product(AWKWARD, cases):
        x = torch.randn(m, n, device=device).bfloat16()
        x[m // 2] = 0
        try:
            problem = Check(x, scaling).wrong(launch(x, scaling, output, {}), output)
        except Exception as failure:
            problem = f"{type(failure).__name__}: {str(failure)[:200]}"
        if problem:
            problems.append(f"{m}x{n} {scaling} {output}: {problem}")
    return problems


def sweep(m: int, n: int, scaling: str, output: str, timer: Timer, copy_gbs: float, check: Check,
          sets: list[torch.Tensor]) -> dict[str, Any]:  # fmt: skip
    """Measure every candidate at one shape; what is broken or wrong is named and left out."""
    broken: dict[str, str] = {}
    times: dict[str, float] = {}
    by_name: dict[str, Tiles] = {}

    def try_all(todo: list[Tiles]) -> None:
        arms: dict[str, list[Callable[[], object]]] = {}
        for tiles in todo:
            name = short(tiles)
            try:
                problem = check.wrong(launch(sets[0], scaling, output, tiles), output)
            except Exception as failure:
                problem = f"{type(failure).__name__}: {str(failure)[:200]}"
            if problem:
                broken[name] = problem
                continue
            by_name[name] = tiles
            arms[name] = keeping(functools.partial(launch, scaling=scaling, output=output, tiles=tiles), sets)
        times.update(timer(arms))

    try_all(list(candidates(scaling, output)))
    passes = sorted({key for tiles in by_name.values() for key in tiles})
    if len(passes) == 2:
        ranked = {
            key: sorted((name for name in times if key in by_name[name]), key=lambda name: times[name])[:2]
            for key in passes
        }
        try_all([by_name[a] | by_name[b] for a in ranked[passes[0]] for b in ranked[passes[1]]])
    size = moved(m, n, Scaling(scaling), output)
    of_copy = {name: size / us / 1e3 / copy_gbs for name, us in times.items()}
    ranking = sorted(times, key=lambda name: times[name])
    best = {key: asdict(tile) for key, tile in by_name[ranking[0]].items()} if ranking else {}
    return {"m": m, "n": n, "scaling": scaling, "output": output, "bytes": size, "broken": broken, "best": best,
            "ranking": ranking, "times_us": times, "of_copy": of_copy}  # fmt: skip


def line(row: dict[str, Any], count: int = 3) -> str:
    of_copy = row["of_copy"]
    best = " | ".join(f"{100 * of_copy[name]:.0f} % {name}" for name in row["ranking"][:count])
    broken = f" | broken: {len(row['broken'])}" if row["broken"] else ""
    shipped = 100 * of_copy.get("shipped", math.nan)
    return f"{row['m']}x{row['n']:<5} {row['scaling']:>10} {row['output']:>4} shipped {shipped:.0f} % | {best}{broken}"


def winners(rows: list[dict[str, Any]], count: int = 3) -> list[str]:
    """For each quantiser, the candidates whose geometric mean over the shapes is best, with the worst of the shapes."""
    lines = []
    for scaling, output in dict.fromkeys((row["scaling"], row["output"]) for row in rows):
        own = [row["of_copy"] for row in rows if (row["scaling"], row["output"]) == (scaling, output)]
        shared = [name for name in own[0] if all(name in each for each in own)]
        mean = {name: math.exp(sum(math.log(each[name]) for each in own) / len(own)) for name in shared}
        best = sorted(mean, key=lambda name: -mean[name])[:count]
        text = " | ".join(f"{100 * mean[n]:.0f} % (least {100 * min(e[n] for e in own):.0f}) {n}" for n in best)
        lines.append(f"{scaling:>10} {output:>4} {text}")
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120, help="no line is begun after this time")
    parser.add_argument("--processes", type=int, default=15, help="that compile before anything is measured")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    cases = [(scaling.value, output) for scaling in SCALINGS for output in OUTPUTS]
    # The least known first: a clock that runs out takes what is fast already.
    cases.sort(key=lambda case: ("1x128", "128x128", "rowwise", "tensorwise").index(case[0]))
    jobs = [(*case, tiles, (4096, 4096)) for case in cases for tiles in candidates(*case)]
    jobs += [(*case, {}, shape) for m, n in AWKWARD for shape in ((m, n), (n, m)) for case in cases]
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        failed = [text for text in pool.imap_unordered(compile_one, jobs, chunksize=1) if text]
    print(f"compiled {len(jobs)} kernels in {time.monotonic() - start:.0f} s; failed: {failed}", flush=True)
    results: dict[str, Any] = {"machine": machine.describe(), "copy_gbs": {}, "rows": []}
    results["awkward"] = check_awkward(cases)
    print(f"wrong at awkward shapes: {results['awkward']}; {time.monotonic() - start:.0f} s", flush=True)

    def timer(arms: dict[str, list[Callable[[], object]]]) -> dict[str, float]:
        return measure(arms, rounds=9) if arms else {}

    for m, n in SHAPES:
        results["copy_gbs"][f"{m}x{n}"] = copy = copy_bandwidth(m, n, timer)
        print(f"copy {m}x{n}: {copy:.0f} GB/s", flush=True)
        sets = [torch.randn(m, n, device="cuda").bfloat16() for _ in range(copies_past_l2(3 * m * n, most=16))]
        checks: dict[str, Check] = {}
        for scaling, output in cases:
            if time.monotonic() - start > options.seconds:
                print(f"out of time before {m}x{n} {scaling} {output}", flush=True)
                break
            try:
                if scaling not in checks:
                    checks = {scaling: Check(sets[0], scaling)}
                row = sweep(m, n, scaling, output, timer, copy, checks[scaling], sets)
            except Exception as failure:
                print(f"{m}x{n} {scaling} {output} failed: {type(failure).__name__}: {str(failure)[:300]}", flush=True)
                continue
            torch.cuda.empty_cache()  # what the graphs had
            results["rows"].append(row)
            print(line(row), flush=True)
            (options.out / "quantiser_sweep.json").write_text(json.dumps(results, indent=1))
    print("\n".join(winners(results["rows"])))
    print(f"total {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
