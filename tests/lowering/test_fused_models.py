"""Whole models with the fusion on the joint graph, on the CPU: numbers against fp64, and what the backward is given."""

from __future__ import annotations

import copy
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from fused_graphs import relative

from loka_compile.lowering.fused import inputs
from loka_compile.plan import Decision, Plan
from loka_compile.report import reports


def layers(width: int, count: int = 3) -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(count):
        parts += [nn.Linear(width, width), nn.LayerNorm(width), nn.SiLU()]
    return nn.Sequential(*parts).bfloat16()


def fp64_gradients(
    model: nn.Sequential, x: Tensor, grad: Tensor, activation: Callable[[Tensor], Tensor] = F.hardswish
) -> tuple[Tensor, dict[str, Tensor]]:
    """The Mods model in fp64: no bias, BlockNorm, HardSwish."""
    model = copy.deepcopy(model).double()
    out = x.double()
    for index in range(0, len(model), 3):
        z = out @ model[index].weight.t()
        parts = [p * torch.rsqrt(p.square().mean(-1, keepdim=True) + 1e-5) for p in z.split(256, -1)]
        out = activation(torch.cat(parts, -1))
    out.backward(grad.double())
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.dim() == 2}


def plan_of(model: nn.Module, first: str, rest: str) -> Plan:
    decisions = []
    for index, (name, _) in enumerate((n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)):
        provider, recipe = (first if index == 0 else rest).split(":")
        for role in ("forward", "grad_input", "grad_weight"):
            decisions.append(Decision(f"{name}#0", role, provider, recipe, "test", None, None, ()))
    return Plan(tuple(decisions))


FP8, HIGH = "torch:tensorwise", "high_precision:native"
KEEPS_SILU = ("bias_removal", "block_norm")


@pytest.mark.usefixtures("_emit_on_cpu")
@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
@pytest.mark.parametrize(
    ("first", "batch", "width", "dynamic", "mods"),
    [
        (FP8, (64,), 512, False, "all"), (HIGH, (16,), 384, False, "all"), (FP8, (4, 16), 512, False, "all"),
        (FP8, (4, 16), 256, True, "all"), (FP8, (64,), 512, False, KEEPS_SILU), (HIGH, (4, 16), 384, True, KEEPS_SILU),
    ],
)  # fmt: skip
def test_training_through_the_backend_matches_fp64(
    first: str, batch: tuple[int, ...], width: int, dynamic: bool, mods: str | tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    model = layers(width)
    x, grad = torch.randn(*batch, width).bfloat16(), torch.randn(*batch, width).bfloat16() / 64
    activation, name = (F.silu, "SiLU") if mods == KEEPS_SILU else (F.hardswish, "HardSwish")
    expected, gradients = fp64_gradients(model, x, grad, activation)
    compiled = torch.compile(model, backend="loka", options={"plan": plan_of(model, first, FP8), "mods": mods})
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    out = compiled(x)
    out.backward(grad)
    # The gradient of a first layer in bf16 is read in bf16.
    assert sum("FP8 gradient in both layouts" in line for line in reports()[-1].fusions) == (3 if first == FP8 else 2)
    assert sum("gradient below in one kernel" in line for line in reports()[-1].fusions) == (2 if first == FP8 else 1)
    launches = [line for line in reports()[-1].fusions if "in one launch" in line]
    # A first layer joins where a kernel of ours quantised its input, which must be a matrix for that.
    assert [line[0] for line in launches] == (["3"] if first == FP8 and len(batch) == 1 else ["2"])
    kinds = Counter(line.split(": ")[-1].split(" ")[0] for line in reports()[-1].fusions)
    assert kinds[f"{name}'"] == 3
    assert sum("in one kernel" in line and "GEMM + BlockNorm" in line for line in reports()[-1].fusions) == 3
    # One e4m3 rounding is 2.6 % of a value on average; a forward of three layers has six in series, a gradient ten.
    assert relative(out, expected) < 0.026 * 6**0.5 * 1.5
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert relative(parameter.grad, gradients[name]) < 0.026 * 10**0.5 * 1.5


@pytest.mark.usefixtures("_emit_on_cpu")
@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
def test_no_transposed_activation_is_saved_for_the_backward() -> None:
    model = layers(512)
    plan = plan_of(model, HIGH, FP8)
    compiled = torch.compile(model, backend="loka", options={"plan": plan, "inspect": True})
    compiled(torch.randn(64, 512).bfloat16()).sum().backward()
    code = reports()[-1].graph("forward")
    # FP8 tensors of the batch exist in the forward, but only as they are, not transposed.
    assert "f8e4m3fn[64, 512]" in code
    assert "f8e4m3fn[512, 64]" not in code


@pytest.mark.usefixtures("_emit_on_cpu")
@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
def test_outputs_of_the_norm_are_kept_in_fp8() -> None:
    torch.manual_seed(0)
    model = layers(512)
    x, grad = torch.randn(64, 512).bfloat16(), torch.randn(64, 512).bfloat16() / 64
    expected, gradients = fp64_gradients(model, x, grad)
    options = {"plan": plan_of(model, FP8, FP8), "save_fp8": True, "inspect": True}
    compiled = torch.compile(model, backend="loka", options=options)
    out = compiled(x)
    out.backward(grad)
    report = reports()[-1]
    assert sum("kept for the backward in FP8, 0.0 MiB less" in line for line in report.fusions) == 3
    # The backward gets no activation in bf16: of that dtype and size there is the gradient alone.
    placeholders = [
        line for line in report.graph("backward").splitlines() if "bf16[64, 512]" in line and "tangents" not in line
    ]
    assert not [line for line in placeholders if "placeholder" in line or "def forward" in line]
    assert relative(out, expected) < 0.026 * 6**0.5 * 1.5
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            # Per layer two roundings more: of what HardSwish' and BlockNorm' read, and of the activation once more.
            assert relative(parameter.grad, gradients[name]) < 0.026 * 16**0.5 * 1.5


@pytest.mark.usefixtures("_emit_on_cpu")
@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
@pytest.mark.parametrize("recipe", [FP8, "torch:rowwise"])
@pytest.mark.parametrize("batch", [1, 64])
def test_an_input_is_quantised_by_kernels_of_ours(batch: int, recipe: str) -> None:
    torch.manual_seed(0)
    chain, head = layers(384), nn.Linear(384, 1).bfloat16()
    x = torch.randn(batch, 384).bfloat16()
    expected, _ = fp64_gradients(chain, x, torch.zeros(batch, 384))
    expected = F.linear(expected, head.weight.double(), head.bias.double()).detach()
    # The head's bias is a constant that stands in front of the graph's input.
    model = nn.Sequential(*chain, head).eval().requires_grad_(False)
    options = {"plan": plan_of(chain, recipe, FP8), "inspect": True}
    with torch.no_grad(), inductor_config.patch(freezing=True):
        out = torch.compile(model, backend="loka", options=options)(x)
    assert relative(out, expected) < 0.026 * 6**0.5 * 1.5 * 2  # of outputs of both signs
    report = reports()[-1]
    assert report.graph("forward").count("quantize_fp8.default(") == 1
    assert f"'{recipe.split(':')[1]}'" in report.graph("forward")
    assert "aten.amax" not in report.graph("forward")
    kind = "rowwise" if "rowwise" in recipe else "amax and"
    assert any(f"{kind} FP8 of an input by our kernels" in line for line in report.fusions)


@pytest.mark.usefixtures("_emit_on_cpu")
@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_of_inputs_and_weights_in_a_training_step(dynamic: bool) -> None:
    """In a plan by rows each weight is an input that is quantised alone, and a strided activation one too."""
    torch.manual_seed(0)
    chain = layers(256, 2)
    options = {"plan": plan_of(chain, "torch:rowwise", "torch:rowwise"), "inspect": True}
    run = torch.compile(chain, backend="loka", options=options, dynamic=dynamic)
    for batch in (48, 32) if dynamic else (48,):
        x, grad = torch.randn(batch, 512).bfloat16()[:, ::2], torch.randn(batch, 256).bfloat16()
        expected, gradients = fp64_gradients(chain, x, grad)
        chain.zero_grad(set_to_none=True)
        out = run(x)
        out.backward(grad)
        assert relative(out, expected) < 0.026 * 4**0.5 * 1.5
        for name, parameter in chain.named_parameters():
            if parameter.dim() == 2:
                assert relative(parameter.grad, gradients[name]) < 0.026 * 10**0.5 * 1.5, name
    assert reports()[-1].graph("forward").count("quantize_fp8.default(") == 3


@pytest.mark.usefixtures("_emit_on_cpu")
@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
def test_a_wide_input_is_left_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the widths at which ours was measured to be faster."""
    monkeypatch.setattr(inputs, "WIDEST", 383)
    chain = layers(384, 1).eval().requires_grad_(False)
    options = {"plan": plan_of(chain, FP8, FP8), "inspect": True}
    with torch.no_grad(), inductor_config.patch(freezing=True):
        torch.compile(chain, backend="loka", options=options)(torch.randn(64, 384).bfloat16())
    assert "quantize_fp8" not in reports()[-1].graph("forward")
    assert not any("of an input by our kernels" in line for line in reports()[-1].fusions)


class WideNorm(nn.Module):
    """What autocast makes of layers on a GPU: GEMMs in bf16, norms in fp32 (on a CPU it leaves norms in bf16)."""

    def __init__(self, width: int, wide_result: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.wide_result = wide_result

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            wide = F.silu(norm((x.bfloat16() @ layer.weight.bfloat16().t()).float()))
            x = wide.bfloat16()
        return wide if self.wide_result else x


@pytest.mark.usefixtures("_emit_on_cpu")
@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
@pytest.mark.parametrize("wide_result", [False, True])
@pytest.mark.parametrize("batch", [64, 8192])
def test_under_autocast_the_backward_moves_16_bits(batch: int, wide_result: bool) -> None:
    torch.manual_seed(0)
    model = WideNorm(384, wide_result)
    x, grad = torch.randn(batch, 384).bfloat16(), torch.randn(batch, 384).bfloat16() / 64
    expected, gradients = fp64_gradients(
        nn.Sequential(*(m for pair in zip(model.layers, model.norms, strict=True) for m in (*pair, nn.SiLU()))), x, grad
    )
    options = {"plan": plan_of(model, FP8, FP8), "inspect": True}
    out = torch.compile(model, backend="loka", options=options)(x)
    out.backward(grad.to(out.dtype))
    code = reports()[-1].graph("backward")
    arguments = code.split("def forward")[1].split("\n")[0]
    # What is kept has 16 bits, and so has every gradient but the last layer's, if that comes in fp32.
    assert arguments.count(f'"bf16[{batch}, 384]"') == 3 + (not wide_result)
    assert arguments.count(f'"f32[{batch}, 384]"') == wide_result
    gradients_read = re.findall(r"loka.(?:block_norm_backward|grad_input)_\w+\.default\((\w+)", code)
    dtypes = [m.group(1) for name in gradients_read if (m := re.search(rf'\b{name}: "(\w+)\[', code))]
    assert dtypes[0] == ("f32" if wide_result else "bf16")
    assert set(dtypes[1:]) <= {"bf16", "f8e4m3fn"}
    assert len(dtypes) == 3
    assert relative(out, expected) < 0.026 * 6**0.5 * 1.5
    for index, layer in enumerate(model.layers):
        assert relative(layer.weight.grad, gradients[f"{3 * index}.weight"]) < 0.026 * 10**0.5 * 1.5


class PostNorm(nn.Module):
    """Residual, then norm, as the layers of Wukong and DHEN have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.silu(norm(layer(x) + x))
        return x


@pytest.mark.usefixtures("_emit_on_cpu")
@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
def test_training_with_a_residual_before_each_norm_matches_fp64() -> None:
    torch.manual_seed(0)
    model = PostNorm(384).bfloat16()
    x, grad = torch.randn(48, 384).bfloat16(), torch.randn(48, 384).bfloat16() / 48
    exact = copy.deepcopy(model).double()
    out = x.double()
    for layer in exact.layers:
        z = out @ layer.weight.t() + out
        parts = [p * torch.rsqrt(p.square().mean(-1, keepdim=True) + 1e-5) for p in z.split(256, -1)]
        out = F.hardswish(torch.cat(parts, -1))
    out.backward(grad.double())
    compiled = torch.compile(model, backend="loka", options={"plan": plan_of(model, FP8, FP8)})
    found = compiled(x)
    found.backward(grad)
    lines = reports()[-1].fusions
    assert sum("GEMM + residual + BlockNorm(256)" in line for line in lines) == 3, lines
    assert sum("FP8 gradient in both layouts" in line for line in lines) == 3, lines
    assert relative(found, out.detach()) < 0.026 * 6**0.5 * 1.5
    for layer, expected in zip(model.layers, exact.layers, strict=True):
        assert relative(layer.weight.grad, expected.weight.grad) < 0.026 * 10**0.5 * 1.5


@pytest.mark.usefixtures("_emit_on_cpu", "norms_in_fp32")
@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
def test_a_16_bit_residual_stream_fuses_what_an_fp32_one_does() -> None:
    """The cast behind a chain that the quantisation shares with the residual connection keeps no kernel from fusing."""
    torch.manual_seed(0)
    model, x = PostNorm(256), torch.randn(64, 256)
    fused = {}
    for choice in ("model", "autocast"):
        torch._dynamo.reset()
        options = {"plan": plan_of(model, FP8, FP8), "residual_dtype": choice}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.compile(model, backend="loka", options=options)(x).sum().backward()
        report = reports()[-1]
        assert report.count("residual_dtype") == (2 if choice == "autocast" else 0)
        fused[choice] = sorted(re.sub(r"\d+", "", line) for line in report.fusions)
    assert fused["model"]
    assert fused["autocast"] == fused["model"]
