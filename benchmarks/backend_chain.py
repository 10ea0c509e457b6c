"""FP8 by plan against bf16 on a chain of bias-free BlockNorm-HardSwish layers, forward and forward+backward.

    python benchmarks/backend_chain.py [--width 2048] [--batch 4096] [--layers 4] [--out FILE.json]

Arms, interleaved in one run, CUDA-graph medians:
    inductor   the Mods in eager (plain torch), torch.compile(backend="inductor"), bf16
    loka       the same model, torch.compile(backend="loka"), plan from the shipped H200 cost table (table="auto")
    loka:unfused  the same with fuse=False: torch's kernels, quantisation left to Inductor
    loka:off   the same, table="off": no FP8, to tell the rewriting's share from FP8's
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

os.environ.setdefault("LOKA_CACHE_DIR", tempfile.mkdtemp())


class Mods(nn.Module):
    """Bias-free linear, BlockNorm and HardSwish in plain torch; nothing of loka_compile."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            blocks = linear(x).float().unflatten(-1, (-1, 256))
            y = blocks * torch.rsqrt(blocks.square().mean(-1, keepdim=True) + 1e-5)
            x = F.hardswish(y.flatten(-2).to(x.dtype))
        return x


class Norms(nn.Module):
    """The same function written for loka: bias-free linear, RMSNorm without weight, SiLU; the Mods do the rest."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-5, elementwise_affine=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = F.silu(norm(linear(x)))
        return x


def graphed(fn, warmup: int = 6):
    """Capture ``fn`` in a CUDA graph after warming it up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def interleaved(arms: dict, rounds: int = 30, inner: int = 10) -> dict[str, float]:
    """Median microseconds of each arm; the arms take turns within every round."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, run in arms.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            run()
            start.record()
            for _ in range(inner):
                run()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / inner * 1e3)
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="*", default=[2048])
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import loka_compile
    from loka_compile import machine

    results = {
        **machine.describe(), "batch": args.batch, "layers": args.layers, "rows": [],
    }  # fmt: skip
    for width in args.width:
        row: dict = {"width": width}
        torch.manual_seed(0)
        plain = Mods(width, args.layers).cuda().bfloat16()
        x = torch.randn(args.batch, width, device="cuda", dtype=torch.bfloat16)
        grad = torch.randn_like(x) * 1e-3
        models = {"inductor": torch.compile(plain, backend="inductor")}
        for name, options in (
            ("loka", {"auto_calls": 2}),
            ("loka:unfused", {"auto_calls": 2, "fuse": False}),
            ("loka:off", {"table": "off"}),
        ):
            model = Norms(width, args.layers).cuda().bfloat16()
            model.load_state_dict(plain.state_dict())
            models[name] = torch.compile(model, backend="loka", options=options)
        with torch.no_grad():
            want = plain.double()(x.double())
            plain.bfloat16()
        for mode in ("forward", "forward+backward"):
            arms = {}
            for name, model in models.items():
                arms[name] = graphed(_forward(model, x) if mode == "forward" else _train(model, x, grad))
                if name.startswith("loka"):
                    report = loka_compile.reports()[-1]
                    row.setdefault(f"{mode} plan", {})[name] = report.counts()
                    row.setdefault(f"{mode} fusions", {})[name] = report.fusions
            times = interleaved(arms)
            row[mode] = {"us": times, "speed-up": times["inductor"] / times["loka"]}
            shown = ", ".join(f"{n} {t:.1f} us" for n, t in times.items())
            speedup, plan = row[mode]["speed-up"], row[f"{mode} plan"]["loka"]
            print(f"width {width} {mode}: {shown}, inductor/loka {speedup:.3f}, plan {plan}", flush=True)
            if mode == "forward":
                with torch.no_grad():
                    for name, model in models.items():
                        got = model(x).double()
                        row.setdefault("error", {})[name] = ((got - want).norm() / want.norm()).item()
                print("  relative Frobenius error against fp64:", row["error"], flush=True)
        results["rows"].append(row)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1))


def _forward(model, x):
    def run():
        with torch.no_grad():
            return model(x)

    return run


def _train(model, x, grad):
    def run():
        for p in model.parameters():
            p.grad = None
        model(x).backward(grad)

    return run


if __name__ == "__main__":
    main()
