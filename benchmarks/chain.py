"""Chains of linear + norm + activation: compiled bf16, torchao float8 and loka_compile side by side (issue 5).

    python benchmarks/chain.py --out results/            # everything
    python benchmarks/chain.py --only inference --widths 1024 2048 --arms A B E

Arms: A the original model (bias, LayerNorm, SiLU), bf16, Inductor. A' the same with max-autotune. B the Mods by hand
(no bias, BlockNorm, HardSwish), bf16, Inductor. C and D torchao float8 on the models of A and B (every recipe; the best
counts). E ``backend="loka"`` on the model of A. N the same without FP8: Mods and fusion alone. Input arrives and output
leaves in bf16. Medians of CUDA-graph replays, arms interleaved.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import math
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from _timing import capture, measure, measure_graphs  # noqa: E402

from loka_compile import machine  # noqa: E402
from loka_compile.plan import Decision, Plan  # noqa: E402

LAYERS = 4
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def original(width_in: int, width: int, layers: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for index in range(layers):
        parts += [nn.Linear(width_in if index == 0 else width, width), nn.LayerNorm(width), nn.SiLU()]
    return nn.Sequential(*parts).cuda().bfloat16()


class BlockNorm(nn.Module):
    """In plain torch, so that arms B and D know nothing of loka_compile."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] % 256:
            parts = x.float().split(256, dim=-1)
            return torch.cat([p * torch.rsqrt(p.square().mean(-1, keepdim=True) + 1e-5) for p in parts], -1).to(x.dtype)
        parts = x.float().unflatten(-1, (-1, 256))
        return (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + 1e-5)).flatten(-2).to(x.dtype)


def modded(model: nn.Sequential) -> nn.Sequential:
    parts: list[nn.Module] = []
    for module in model:
        if isinstance(module, nn.Linear):
            linear = nn.Linear(module.in_features, module.out_features, bias=False).cuda().bfloat16()
            linear.weight.data.copy_(module.weight.data)
            parts.append(linear)
        else:
            parts.append(BlockNorm() if isinstance(module, nn.LayerNorm) else nn.Hardswish())
    return nn.Sequential(*parts)


def plan_of(model: nn.Module, first: str, rest: str) -> Plan:
    """``first`` is the candidate of the first layer, ``rest`` of the others."""
    decisions, seen = [], 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            for role in ("forward", "grad_input", "grad_weight"):
                candidate = first if seen == 0 else rest
                provider, recipe = candidate.split(":")
                decisions.append(Decision(f"{name}#0", role, provider, recipe, "benchmark", None, None, ()))
            seen += 1
    return Plan(tuple(decisions))


def loka(model: nn.Module, plan: Plan, training: bool, **more: object) -> nn.Module:
    return torch.compile(model, backend="loka", options={"plan": plan, "fx_graph_cache": False, **more})


class PreparedChain(nn.Module):
    """Inference with weights quantised once, from the fused operators by hand: what the backend's graph is after its
    passes when the weights are constants. First GEMM bf16, the others FP8."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        from loka_compile.lowering.fused import lowerings

        lowerings.register()
        weights = [m.weight.data for m in model if isinstance(m, nn.Linear)]
        self.first = weights[0]
        scales = [w.float().abs().max() / 448 for w in weights[1:]]
        self.rest = [((w.float() / s).to(torch.float8_e4m3fn), s) for w, s in zip(weights[1:], scales, strict=True)]
        self.sixteenth = torch.tensor(1 / 16, device="cuda")
        self.compiled = torch.compile(self.chain)

    @staticmethod
    def activation(y: torch.Tensor) -> torch.Tensor:
        y = y.float()
        return torch.where(y <= -3, 0.0, torch.where(y >= 3, y, y * (y * (1 / 6) + 0.5)))

    def chain(self, x: torch.Tensor, first: torch.Tensor, rest, sixteenth) -> torch.Tensor:
        op = torch.ops.loka.gemm_block_norm
        h = self.activation(op(x, first.t(), None, None, 256, 1e-5, torch.bfloat16, True, False)[0])
        for w, s in rest:
            q = (h * 16).to(torch.float8_e4m3fn)
            h = self.activation(op(q, w.t(), sixteenth, s, 256, 1e-5, torch.bfloat16, True, False)[0])
        return h.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compiled(x, self.first, self.rest, self.sixteenth)


class Frozen(nn.Module):
    """Inference with Inductor's freezing: weights are constants, quantised when compiling."""

    def __init__(self, compiled: nn.Module) -> None:
        super().__init__()
        self.compiled = compiled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import torch._inductor.config as inductor_config

        with inductor_config.patch(freezing=True):
            return self.compiled(x)


def torchao(model: nn.Module, recipe: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = convert_to_float8_training(copy.deepcopy(model), config=Float8LinearConfig.from_recipe_name(recipe))
    return torch.compile(model)


def arms(model: nn.Sequential, training: bool, wanted: list[str]) -> dict[str, object]:
    made: dict[str, object] = {}
    mods = modded(model)
    if "A" in wanted:
        made["A"] = lambda: torch.compile(copy.deepcopy(model))
    if "A'" in wanted:
        made["A'"] = lambda: torch.compile(copy.deepcopy(model), mode="max-autotune-no-cudagraphs")
    if "B" in wanted:
        made["B"] = lambda: torch.compile(copy.deepcopy(mods))
    for name, base in (("C", model), ("D", mods)):
        if name in wanted:
            for recipe in TORCHAO:
                made[f"{name} torchao {recipe}"] = lambda base=base, recipe=recipe: torchao(base, recipe)
    fp8, high = "torch:tensorwise_fast", "high_precision:native"
    if "E" in wanted:
        made["E all FP8"] = lambda: loka(copy.deepcopy(model), plan_of(model, fp8, fp8), training)
        made["E first bf16"] = lambda: loka(copy.deepcopy(model), plan_of(model, high, fp8), training)
        if training:
            made["E all FP8, combo"] = lambda: loka(
                copy.deepcopy(model), plan_of(model, fp8, fp8), training, combo_kernels=True
            )
        else:
            made["E frozen"] = lambda: Frozen(loka(copy.deepcopy(model), plan_of(model, fp8, fp8), training))
            made["E by hand"] = lambda: PreparedChain(model)
    if "N" in wanted:
        made["E no FP8"] = lambda: loka(copy.deepcopy(model), plan_of(model, high, high), training)
    return made


def step(model: nn.Module, x: torch.Tensor, grad: torch.Tensor | None):
    def inference():
        with torch.no_grad():
            return model(x)

    def training():
        for p in model.parameters():
            p.grad = None
        model(x).backward(grad)

    return training if grad is not None else inference


def kernels_of(call) -> list[tuple[str, int, float]]:
    """Name, count and total microseconds of every kernel of one call."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    rows = [(e.key, e.count // 5, e.device_time_total / 5) for e in prof.key_averages() if e.device_time_total]
    return sorted(rows, key=lambda row: -row[2])


def run_case(
    name: str,
    batch: int,
    width_in: int,
    width: int,
    layers: int,
    training: bool,
    wanted: list[str],
    log,
    profile_arms=(),
) -> dict:
    torch.manual_seed(0)
    model = original(width_in, width, layers)
    if not training:
        model.eval().requires_grad_(False)
    inputs = [torch.randn(batch, width_in, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    grad = torch.randn(batch, width, device="cuda", dtype=torch.bfloat16) / batch if training else None
    calls, extra, keep = {}, {}, []
    reference = None
    for arm, make in arms(model, training, wanted).items():
        torch._dynamo.reset()
        try:
            start = time.time()
            compiled = make()
            steps = [step(compiled, x, grad) for x in inputs]
            out = steps[0]()
            torch.cuda.synchronize()
            extra[arm] = {"first_call_s": round(time.time() - start, 2)}
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            steps[0]()
            torch.cuda.synchronize()
            extra[arm]["peak_mb"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
            with torch.no_grad():
                value = compiled(inputs[0]).double() if training else out.double()
            if arm == "B":
                reference = value
            if arm.startswith("E") and reference is not None:
                extra[arm]["output_vs_B"] = round(((value - reference).norm() / reference.norm()).item(), 4)
            # Captured now: the next arm resets Dynamo, and with it this arm's compiled code.
            calls[arm] = (capture(steps), len(steps))
            keep.append((compiled, steps))
            if profile_arms and arm.startswith(tuple(profile_arms)):
                for kernel, count, us in kernels_of(steps[0]):
                    log(f"    {arm}: {us:7.1f} us {count}x {kernel[:110]}")
        except Exception as error:
            extra[arm] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            log(traceback.format_exc()[-1500:])
    times = measure_graphs(calls, rounds=20)
    log(f"{name}: " + " | ".join(f"{arm} {us:.1f}" for arm, us in times.items()))
    log(f"    {json.dumps(extra)}")
    return {"case": name, "us": times, "extra": extra}


PAIRS = ((256, 256), (7680, 256), (512, 512), (7680, 512), (4096, 2048), (4096, 2560), (2048, 4096), (2560, 4096),
         (256, 7680))  # fmt: skip


def stages(k: int, n: int) -> dict[str, object]:
    """One layer [k] -> [n] as the Mods change it one after another."""
    like = {"device": "cuda", "dtype": torch.bfloat16}
    weight, block = torch.randn(n, k, **like) / math.sqrt(k), BlockNorm()
    bias, gain = torch.zeros(n, **like), torch.ones(n, **like)

    def norm(z: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(z, (n,), gain, bias)

    return {
        "original": lambda x: F.silu(norm(F.linear(x, weight, bias))),
        "no bias": lambda x: F.silu(norm(F.linear(x, weight))),
        "BlockNorm": lambda x: F.silu(block(F.linear(x, weight))),
        "HardSwish": lambda x: F.hardswish(block(F.linear(x, weight))),
    }


def fig13(log) -> list[dict]:
    """One layer forward at batch 1024 (paper figure 13): the Mods stacked one after another, then FP8 with fusion."""
    rows = []
    for k, n in PAIRS:
        torch._dynamo.reset()
        count = max(3, min(32, (120 << 20) // (2 * (1024 * k + n * k))))
        xs = [torch.randn(1024, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        calls = {name: [functools.partial(torch.compile(fn), x) for x in xs] for name, fn in stages(k, n).items()}
        model = original(k, n, 1).eval().requires_grad_(False)
        for candidate, label in (("torch:tensorwise_fast", "FP8 + fusion"), ("high_precision:native", "fusion alone")):
            compiled = loka(copy.deepcopy(model), plan_of(model, candidate, candidate), False)
            calls[label] = [step(compiled, x, None) for x in xs]
        with torch.no_grad():
            times = measure(calls, rounds=20)
        log(f"fig13 {k}x{n}: " + " | ".join(f"{s} {us:.1f}" for s, us in times.items()))
        rows.append({"pair": [k, n], "us": times})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--only", choices=("inference", "training", "fig13"), action="append")
    parser.add_argument("--widths", type=int, nargs="*", default=[512, 1024, 2048, 4096])
    parser.add_argument("--arms", nargs="*", default=["A", "A'", "B", "C", "D", "E"])
    parser.add_argument("--profile", nargs="*", default=[], help="arms whose kernels are listed")
    parser.add_argument("--large", action="store_true", help="also the training step at batch 16384, width 1024")
    options = parser.parse_args()
    only = options.only or ["inference", "training", "fig13"]
    results = {"versions": machine.describe(), "command": " ".join(sys.argv), "cases": [], "fig13": []}
    start = time.time()

    def log(text: str) -> None:
        print(f"[{time.time() - start:5.0f}s] {text}", flush=True)

    def save() -> None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "chain.json").write_text(json.dumps(results, indent=1))

    cases = [("inference", 4096, w) for w in options.widths if "inference" in only]
    cases += [("training", 4096, w) for w in options.widths if "training" in only]
    cases += [("training", 16384, 1024)] if options.large else []
    for kind, batch, width in cases:
        results["cases"].append(
            run_case(
                f"{kind} {batch}x{width}",
                batch,
                width,
                width,
                LAYERS,
                kind == "training",
                options.arms,
                log,
                options.profile,
            )
        )
        save()
        gc.collect()
        torch.cuda.empty_cache()
    if "fig13" in only:
        results["fig13"] = fig13(log)
    save()


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
    main()
