"""The models and arms of benchmarks/chain.py: see there."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence

import torch
from _epilogue import hardswish
from torch import nn

from loka_compile.plan import Decision, Plan

#: A CPU only runs the program for its tests.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def original(width_in: int, width: int, layers: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for index in range(layers):
        parts += [nn.Linear(width_in if index == 0 else width, width), nn.LayerNorm(width), nn.SiLU()]
    return nn.Sequential(*parts).to(DEVICE).bfloat16()


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
            linear = nn.Linear(module.in_features, module.out_features, bias=False).to(DEVICE).bfloat16()
            linear.weight.data.copy_(module.weight.data)
            parts.append(linear)
        else:
            parts.append(BlockNorm() if isinstance(module, nn.LayerNorm) else nn.Hardswish())
    return nn.Sequential(*parts)


def plan_of(model: nn.Module, first: str, rest: str) -> Plan:
    """``first`` is the candidate of the first layer, ``rest`` of the others; grad_weight sums over the batch in fp32,
    as in every plan that is made (and in torchao)."""
    decisions, seen = [], 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            for role in ("forward", "grad_input", "grad_weight"):
                candidate = first if seen == 0 else rest
                provider, recipe = candidate.split(":")
                if role == "grad_weight":
                    recipe = recipe.removesuffix("_fast")
                decisions.append(Decision(f"{name}#0", role, provider, recipe, "benchmark", None, None, ()))
            seen += 1
    return Plan(tuple(decisions))


def loka(model: nn.Module, plan: Plan, **more: object) -> nn.Module:
    """Without caches, unless a program that measures them has left them on: every run compiles what it measures."""
    cached = os.environ.get("TORCHINDUCTOR_FX_GRAPH_CACHE") != "0"
    return torch.compile(model, backend="loka", options={"plan": plan, "fx_graph_cache": cached, **more})


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
        self.sixteenth = torch.tensor(1 / 16, device=DEVICE)
        self.compiled = torch.compile(self.chain)

    def chain(self, x: torch.Tensor, first: torch.Tensor, rest, sixteenth) -> torch.Tensor:
        op = torch.ops.loka.gemm_block_norm
        h = hardswish(op(x, first.t(), None, None, 256, 1e-5, torch.bfloat16, True, False)[0])
        for w, s in rest:
            q = (h * 16).to(torch.float8_e4m3fn)
            h = hardswish(op(q, w.t(), sixteenth, s, 256, 1e-5, torch.bfloat16, True, False)[0])
        return h.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compiled(x, self.first, self.rest, self.sixteenth)


def torchao(model: nn.Module, recipe: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = convert_to_float8_training(copy.deepcopy(model), config=Float8LinearConfig.from_recipe_name(recipe))
    return torch.compile(model)


def arms(
    model: nn.Sequential, training: bool, wanted: list[str], torchao_recipes: Sequence[str] = TORCHAO
) -> dict[str, Callable[[], nn.Module]]:
    """How to make every wanted arm of a model, by name."""
    made: dict[str, Callable[[], nn.Module]] = {}
    mods = modded(model)
    if "A" in wanted:
        made["A"] = lambda: torch.compile(copy.deepcopy(model))
    if "A'" in wanted:
        made["A'"] = lambda: torch.compile(copy.deepcopy(model), mode="max-autotune-no-cudagraphs")
    if "B" in wanted:
        made["B"] = lambda: torch.compile(copy.deepcopy(mods))
    for name, base in (("C", model), ("D", mods)):
        if name in wanted and training:
            for recipe in torchao_recipes:
                made[f"{name} torchao {recipe}"] = lambda base=base, recipe=recipe: torchao(base, recipe)
    fp8, high = "torch:tensorwise_fast", "high_precision:native"
    if "E" in wanted:
        made["E all FP8"] = lambda: loka(copy.deepcopy(model), plan_of(model, fp8, fp8))
        made["E first bf16"] = lambda: loka(copy.deepcopy(model), plan_of(model, high, fp8))
        if training:
            made["E all FP8, FP8 saved"] = lambda: loka(copy.deepcopy(model), plan_of(model, fp8, fp8), save_fp8=True)
        else:
            frozen = {"freeze_weights": True}
            made["E all FP8, frozen"] = lambda: loka(copy.deepcopy(model), plan_of(model, fp8, fp8), **frozen)
            made["E first bf16, frozen"] = lambda: loka(copy.deepcopy(model), plan_of(model, high, fp8), **frozen)
            rows = "torch:rowwise_fast"
            made["E first rowwise, frozen"] = lambda: loka(copy.deepcopy(model), plan_of(model, rows, fp8), **frozen)
            made["E by hand"] = lambda: PreparedChain(model)
    if "N" in wanted:
        made["E no FP8"] = lambda: loka(copy.deepcopy(model), plan_of(model, high, high))
    return made


def bare(fp8: bool, xs: Sequence[torch.Tensor], weight: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
    """cuBLASLt's GEMM alone, on operands that are in its dtype already: what fusion can reach at most."""
    if not fp8:
        return [lambda x=x: x @ weight.t() for x in xs]
    one, w = torch.ones((), device=DEVICE), weight.to(torch.float8_e4m3fn)
    qs = [x.to(torch.float8_e4m3fn) for x in xs]
    return [lambda q=q: torch._scaled_mm(q, w.t(), one, one, None, None, torch.bfloat16, True) for q in qs]


def step(model: nn.Module, x: torch.Tensor, grad: torch.Tensor | None) -> Callable[[], object]:
    """One call of the model: a training step (gradients dropped first) with ``grad``, inference without."""

    def inference() -> object:
        with torch.no_grad():
            return model(x)

    def training() -> None:
        for p in model.parameters():
            p.grad = None
        model(x).backward(grad)

    return training if grad is not None else inference
