"""The fusion on the joint graph: matching of quantisations, gradients, weights; and whole models with it on the CPU."""

from __future__ import annotations

import copy
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

sys.path.insert(0, str(Path(__file__).parent))
from fused_graphs import E4M3, aten, fp8_linear, loka, quantise, targets, trace

from loka_compile.kernels import reference as ref
from loka_compile.lowering.fused import gradients, grouped, joint, product
from loka_compile.lowering.fused.joint import fuse_joint
from loka_compile.lowering.fused.match import quantisations, shape_to_view, sort_topologically
from loka_compile.plan import Decision, Plan
from loka_compile.report import Report, reports

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture
def _emit_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emit the operators; on a CPU Inductor calls their twins instead of making templates of them."""
    monkeypatch.setattr(product, "on_this_device", lambda value: "")
    monkeypatch.setattr(joint, "on_this_device", lambda value: "")
    monkeypatch.setattr(gradients, "on_this_device", lambda value: "")
    monkeypatch.setattr(grouped, "on_this_device", lambda value: "")


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
def test_quantisations_are_recognised(dtype: torch.dtype) -> None:
    from loka_compile.gemm import Scaling
    from loka_compile.lowering.quantize import quantize

    def several(x: Tensor) -> tuple[Tensor, ...]:
        own = quantize(x, Scaling.TENSORWISE, dtype=dtype)
        turned = quantize(x, Scaling.TENSORWISE, dtype=dtype, transpose=True)
        fixed = quantize(F.hardswish(x), Scaling.TENSORWISE, dtype=dtype, bound=16.0)
        rows = quantize(x, Scaling.ROWWISE, dtype=dtype)
        return own.data, own.scale, turned.data, turned.scale, fixed.data, rows.data, rows.scale, x.to(dtype)

    gm = trace(several, ((64, 48), BF16), device="cpu")
    found = list(quantisations(gm.graph))
    assert [q.factor for q in found] == [None, None, 16.0 if dtype is E4M3 else 2048.0]
    assert [q.source.name for q in found[:2]] == ["x_1", "x_1"]
    assert [len(q.transposes()) for q in found] == [0, 1, 0]
    assert all(q.scale is not None for q in found[:2])


def test_sorting_moves_only_what_must_move() -> None:
    gm = trace(lambda x: ((x + 1) * 2, x - 3), ((4,), F32))
    nodes = list(gm.graph.nodes)
    nodes[1].append(nodes[0]) if nodes[0].op != "placeholder" else None
    add, mul = nodes[1], nodes[2]
    mul.append(add)  # behind its reader
    sort_topologically(gm.graph)
    gm.graph.lint()
    assert [n.name for n in gm.graph.nodes if n.op == "call_function"] == [add.name, mul.name, nodes[3].name]


def backward_graph(with_activation: bool = True) -> torch.fx.GraphModule:
    """What AOTAutograd leaves of a layer's backward: grad -> HardSwish' -> BlockNorm' -> both FP8 layouts."""

    def layer(grad: Tensor, y: Tensor, rstd: Tensor, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        g = aten.hardswish_backward(grad, y) if with_activation else grad
        dx = loka.block_norm_backward(g, y, rstd, 256)
        q, scale = quantise(dx)
        again, scale2 = quantise(dx)
        wq, ws = quantise(w)
        xq, xs = quantise(x)
        grad_input = fp8_linear(q, wq.t().contiguous(), scale, ws)
        grad_weight = fp8_linear(again.t().contiguous(), xq.t().contiguous(), scale2, xs)
        return grad_input, grad_weight

    shapes = ((64, 512), BF16), ((64, 512), BF16), ((64, 2), F32), ((512, 256), BF16), ((64, 256), BF16)
    return trace(layer, *shapes, device="cpu")


@pytest.fixture
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors count as too large for the kernel whose programs meet."""
    known = gradients.configs.find
    meeting = "block_norm_backward_fp8"
    monkeypatch.setattr(gradients.configs, "find", lambda k, *size: None if k == meeting else known(k, *size))


@pytest.mark.usefixtures("_emit_on_cpu")
@pytest.mark.parametrize("with_activation", [True, False])
def test_gradient_and_its_casts_become_one_operator(with_activation: bool) -> None:
    gm, report = backward_graph(with_activation), Report()
    assert fuse_joint(gm.graph, report) == 2
    assert targets(gm) == Counter({
        "<built-in function getitem>": 7, "aten.t.default": 2, "aten._scaled_mm.default": 2,
        "loka.quantize_weights.default": 1, "loka.meeting_state.default": 1, "loka.block_norm_backward_fp8.default": 1,
    })  # fmt: skip
    node = next(n for n in gm.graph.nodes if str(n.target) == "loka.block_norm_backward_fp8.default")
    # dx in bf16 has no reader left, and no transposed activation is asked for.
    assert node.args[4:] == (256, with_activation, E4M3, False, True, True, False)
    assert node.meta["val"][0].shape == (0,)
    assert any("2 weights and inputs quantised together, 2 also transposed" in line for line in report.fusions)
    assert sum("FP8 gradient in both layouts in one kernel" in line for line in report.fusions) == 1


@pytest.mark.usefixtures("_emit_on_cpu", "_large")
@pytest.mark.parametrize("with_activation", [True, False])
def test_a_large_gradient_and_its_casts_become_two_operators(with_activation: bool) -> None:
    gm, report = backward_graph(with_activation), Report()
    assert fuse_joint(gm.graph, report) == 2
    found = targets(gm)
    assert found["loka.block_norm_backward_amax.default"] == 1
    assert found["loka.cast_transpose.default"] == 1  # both GEMMs read one cast
    assert found["loka.quantize_weights.default"] == 1
    left = {"aten.hardswish_backward.default", "loka.block_norm_backward.default", "aten.amax.default"}
    assert not left & set(found)
    node = next(n for n in gm.graph.nodes if str(n.target) == "loka.block_norm_backward_amax.default")
    assert node.args[3:] == (256, with_activation, False)
    cast = next(n for n in gm.graph.nodes if str(n.target) == "loka.cast_transpose.default")
    assert cast.args[2:] == (E4M3, True, True)


@pytest.mark.usefixtures("_emit_on_cpu")
def test_a_gradient_that_others_read_is_written_in_its_own_dtype_too() -> None:
    def layer(grad: Tensor, y: Tensor, rstd: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        dx = loka.block_norm_backward(grad, y, rstd, 256)
        q, scale = quantise(dx)
        return fp8_linear(q, w.to(E4M3), scale, scale), dx + 1

    shapes = ((64, 512), BF16), ((64, 512), BF16), ((64, 2), F32), ((256, 512), BF16)
    gm = trace(layer, *shapes, device="cpu")
    assert fuse_joint(gm.graph, Report()) == 1
    node = next(n for n in gm.graph.nodes if str(n.target) == "loka.block_norm_backward_fp8.default")
    assert node.args[7:] == (True, True, False, False)
    gm.recompile()
    grad, y, rstd = torch.randn(64, 512).bfloat16(), torch.randn(64, 512).bfloat16(), torch.rand(64, 2) + 0.5
    expected = ref.block_norm_backward_ref(grad.double(), y.double(), rstd.double(), 256, False)
    assert relative(gm(grad, y, rstd, torch.randn(256, 512).bfloat16())[1] - 1, expected) < 0.01


@pytest.mark.usefixtures("_emit_on_cpu")
def test_two_moving_sizes_are_left_alone() -> None:
    def layer(grad: Tensor, y: Tensor, rstd: Tensor, w: Tensor) -> Tensor:
        dx = loka.block_norm_backward(grad, y, rstd, 256)
        q, scale = quantise(dx.reshape(-1, 512))
        wq, ws = quantise(w)
        return fp8_linear(q, wq.t().contiguous(), scale, ws)

    shapes = ((4, 16, 512), BF16), ((4, 16, 512), BF16), ((4, 16, 2), F32), ((512, 256), BF16)
    gm, report = trace(layer, *shapes, device="cpu"), Report()
    node = next(n for n in gm.graph.nodes if str(n.target) == "loka.block_norm_backward.default")
    assert shape_to_view(node.meta["val"].shape) == [4, 16, 512]
    env = ShapeEnv()
    s, t = (env.create_unbacked_symint() for _ in range(2))
    assert shape_to_view((s, 16, 512)) == [-1, 16, 512]
    assert shape_to_view((s, t, 512)) is None
    assert fuse_joint(gm.graph, report) == 1
    found = targets(gm)
    assert found["loka.block_norm_backward_fp8.default"] == 1


def test_nothing_is_fused_on_the_cpu_or_without_an_fp8_reader() -> None:
    def high(grad: Tensor, y: Tensor, rstd: Tensor, w: Tensor) -> Tensor:
        return loka.block_norm_backward(grad, y, rstd, 256) @ w

    shapes = (((64, 512), BF16), ((64, 512), BF16), ((64, 2), F32), ((512, 256), BF16))
    report = Report()
    assert fuse_joint(trace(high, *shapes).graph, report) == 0
    assert "no FP8 GEMM reads its gradient" in report.fusions[0]
    report = Report()
    assert fuse_joint(trace(high, *shapes, device="cpu").graph, report) == 0
    assert "for CUDA, not cpu" in report.fusions[0]


@pytest.mark.usefixtures("_emit_on_cpu")
def test_rewritten_backward_is_no_less_accurate() -> None:
    before, after = backward_graph(), backward_graph()
    fuse_joint(after.graph, Report())
    after.recompile()
    torch.manual_seed(0)
    y, rstd = torch.randn(64, 512).bfloat16(), torch.rand(64, 2) + 0.5
    grad, w, x = torch.randn(64, 512).bfloat16(), torch.randn(512, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    g = aten.hardswish_backward(grad.double(), y.double())
    dx = ref.block_norm_backward_ref(g, y.double(), rstd.double(), 256, False)
    exact = (dx @ w.double(), dx.t() @ x.double())
    args = (grad, y, rstd, w, x)
    for fused, unfused, expected in zip(after(*args), before(*args), exact, strict=True):
        assert relative(fused, expected) < 1.05 * relative(unfused, expected)
        assert relative(fused, expected) < 0.05


@pytest.mark.usefixtures("_emit_on_cpu")
@pytest.mark.parametrize("read_elsewhere", [False, True])
def test_a_grad_input_gemm_is_folded_into_the_gradient_below(read_elsewhere: bool) -> None:
    def two_layers(a: Tensor, b: Tensor, s: Tensor, y: Tensor, rstd: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        grad = fp8_linear(a, b, s, s).view(4, 16, 512)
        dx = loka.block_norm_backward(aten.hardswish_backward(grad, y), y, rstd, 256)
        q, scale = quantise(dx.view(64, 512))
        out = fp8_linear(q, w.to(E4M3), scale, s)
        return (out, grad.sum(0)) if read_elsewhere else (out,)

    shapes = (((64, 128), E4M3), ((512, 128), E4M3), ((), F32), ((4, 16, 512), BF16), ((4, 16, 2), F32),
              ((256, 512), BF16))  # fmt: skip
    gm, report = trace(two_layers, *shapes, device="cpu"), Report()
    fuse_joint(gm.graph, report)
    found = targets(gm)
    assert found["loka.grad_input_fp8.default"] == (0 if read_elsewhere else 1)
    assert found["loka.block_norm_backward_fp8.default"] == (1 if read_elsewhere else 0)
    assert found["aten._scaled_mm.default"] == (2 if read_elsewhere else 1)
    assert sum("gradient below in one kernel" in line for line in report.fusions) == (0 if read_elsewhere else 1)
    gm.recompile()
    a, b, s, y = (
        torch.randn(64, 128).to(E4M3),
        torch.randn(512, 128).to(E4M3),
        torch.tensor(0.5),
        torch.randn(4, 16, 512),
    )
    rstd, w = torch.rand(4, 16, 2) + 0.5, torch.randn(256, 512).bfloat16()
    y = y.bfloat16()
    grad = aten.hardswish_backward(0.25 * a.double() @ b.double().t(), y.double().view(64, 512))
    dx = ref.block_norm_backward_ref(grad, y.double().view(64, 512), rstd.double().view(64, 2), 256, False)
    assert relative(gm(a, b, s, y, rstd, w)[0], 0.5 * dx @ w.to(E4M3).double().t()) < 0.05


# ---------------------------------------------------------------------------------------------- whole models
def layers(width: int, count: int = 3) -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(count):
        parts += [nn.Linear(width, width), nn.LayerNorm(width), nn.SiLU()]
    return nn.Sequential(*parts).bfloat16()


def fp64_gradients(model: nn.Sequential, x: Tensor, grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The Mods model in fp64: no bias, BlockNorm, HardSwish."""
    model = copy.deepcopy(model).double()
    out = x.double()
    for index in range(0, len(model), 3):
        z = out @ model[index].weight.t()
        parts = [p * torch.rsqrt(p.square().mean(-1, keepdim=True) + 1e-5) for p in z.split(256, -1)]
        out = F.hardswish(torch.cat(parts, -1))
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


@pytest.mark.usefixtures("_emit_on_cpu")
@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
@pytest.mark.parametrize(
    ("first", "batch", "width", "dynamic"),
    [(FP8, (64,), 512, False), (HIGH, (16,), 384, False), (FP8, (4, 16), 512, False), (FP8, (4, 16), 256, True)],
)
def test_training_through_the_backend_matches_fp64(
    first: str, batch: tuple[int, ...], width: int, dynamic: bool
) -> None:
    torch.manual_seed(0)
    model = layers(width)
    x, grad = torch.randn(*batch, width).bfloat16(), torch.randn(*batch, width).bfloat16() / 64
    expected, gradients = fp64_gradients(model, x, grad)
    compiled = torch.compile(model, backend="loka", options={"plan": plan_of(model, first, FP8)})
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
    assert kinds["HardSwish'"] == 3
    assert sum("in one kernel" in line and "GEMM + BlockNorm" in line for line in reports()[-1].fusions) == 3
    # One e4m3 rounding is 2.6 % of a value on average; a forward of three layers has six in series, a gradient ten.
    assert relative(out, expected) < 0.026 * 6**0.5 * 1.5
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert relative(parameter.grad, gradients[name]) < 0.026 * 10**0.5 * 1.5


def relative(found: Tensor | None, expected: Tensor) -> float:
    assert found is not None
    return ((found.double() - expected).norm() / expected.norm()).item()


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
