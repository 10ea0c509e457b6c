"""The fusion on the joint graph: matching of quantisations, gradients, weights."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

sys.path.insert(0, str(Path(__file__).parent))
from fused_graphs import E4M3, aten, fp8_linear, loka, quantise, relative, targets, trace

from loka_compile.kernels import reference as ref
from loka_compile.lowering.fused import gradients
from loka_compile.lowering.fused.joint import fuse_joint
from loka_compile.lowering.fused.match import quantisations, shape_to_view, sort_topologically
from loka_compile.report import Report

BF16, F32 = torch.bfloat16, torch.float32


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


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
def test_quantisations_of_rows_are_recognised(dtype: torch.dtype) -> None:
    """Of a square, where the wrong axis has the right size; not of columns, nor of the whole tensor."""
    from loka_compile.gemm import Scaling
    from loka_compile.lowering.quantize import quantize

    def several(x: Tensor) -> tuple[Tensor, ...]:
        own = quantize(x, Scaling.ROWWISE, dtype=dtype)
        columns = quantize(x, Scaling.ROWWISE, dtype=dtype, transpose=True)
        whole = quantize(x, Scaling.TENSORWISE, dtype=dtype)
        return (*own, *columns, *whole)

    gm = trace(several, ((48, 48), BF16), device="cpu")
    (found,) = quantisations(gm.graph, rowwise=True)
    assert (found.source.name, found.factor, found.dtype, found.rounded) == ("x_1", None, dtype, False)
    assert found.scale is not None
    assert found.scale.meta["val"].shape == (48,)
    assert not found.transposes()


def by_rows(x: Tensor, **other: Any) -> Tensor:
    """As loka_compile.lowering.quantize has it, but for one step."""
    made = {"wide": x.float(), "abs": torch.abs, "amax": lambda v: v.amax([1]), "floor": 1e-12, "limit": 448.0, **other}
    wide = made["wide"]
    scale = made["amax"](made["abs"](wide)).clamp(min=made["floor"]) / made["limit"]
    return (wide * scale.reciprocal().unsqueeze(1)).clamp(-448.0, 448.0).to(E4M3)


@pytest.mark.parametrize(
    ("other", "matches"),
    [
        ({}, True),
        ({"abs": lambda v: v}, False),
        ({"abs": lambda v: v.clamp(-1, 1).abs()}, False),
        ({"floor": 0.5}, False),
        ({"limit": 400.0}, False),
        ({"amax": lambda v: v.amax([0])}, False),
        ({"amax": lambda v: v.amin([1])}, False),
    ],
)
def test_what_differs_in_one_step_is_another_quantisation(other: dict[str, Any], matches: bool) -> None:
    """The kernels compute what the plain ops say, and no more is replaced by them."""
    gm = trace(lambda x: by_rows(x, **other), ((48, 48), BF16), device="cpu")
    assert len(list(quantisations(gm.graph, rowwise=True))) == matches


@pytest.mark.parametrize(("dtype", "rounded"), [(BF16, False), (F32, True)])
def test_a_cast_that_rounds_on_the_way_is_seen(dtype: torch.dtype, rounded: bool) -> None:
    gm = trace(lambda x: by_rows(x, wide=x.to(BF16).float()), ((48, 32), dtype), device="cpu")
    (found,) = quantisations(gm.graph, rowwise=True)
    assert found.rounded == rounded
    assert found.source.op == "placeholder"


def test_sorting_moves_only_what_must_move() -> None:
    gm = trace(lambda x: ((x + 1) * 2, x - 3), ((4,), F32))
    nodes = list(gm.graph.nodes)
    nodes[1].append(nodes[0]) if nodes[0].op != "placeholder" else None
    add, mul = nodes[1], nodes[2]
    mul.append(add)  # behind its reader
    sort_topologically(gm.graph)
    gm.graph.lint()
    assert [n.name for n in gm.graph.nodes if n.op == "call_function"] == [add.name, mul.name, nodes[3].name]


def backward_graph(activation: str = "hardswish") -> torch.fx.GraphModule:
    """What AOTAutograd leaves of a layer's backward: grad -> HardSwish' -> BlockNorm' -> both FP8 layouts."""
    through = {"": lambda g, y: g, "hardswish": aten.hardswish_backward, "silu": aten.silu_backward}[activation]

    def layer(grad: Tensor, y: Tensor, rstd: Tensor, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        g = through(grad, y)
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
@pytest.mark.parametrize("activation", ["hardswish", "silu", ""])
def test_gradient_and_its_casts_become_one_operator(activation: str) -> None:
    gm, report = backward_graph(activation), Report()
    assert fuse_joint(gm.graph, report) == 2
    assert targets(gm) == Counter({
        "<built-in function getitem>": 7, "aten.t.default": 2, "aten._scaled_mm.default": 2,
        "loka.quantize_weights.default": 1, "loka.meeting_state.default": 1, "loka.block_norm_backward_fp8.default": 1,
    })  # fmt: skip
    node = next(n for n in gm.graph.nodes if str(n.target) == "loka.block_norm_backward_fp8.default")
    # dx in bf16 has no reader left, and no transposed activation is asked for.
    assert node.args[4:] == (256, activation, E4M3, False, True, True, False)
    assert node.meta["val"][0].shape == (0,)
    assert any("2 weights and inputs quantised together, 2 also transposed" in line for line in report.fusions)
    assert sum("FP8 gradient in both layouts in one kernel" in line for line in report.fusions) == 1


@pytest.mark.usefixtures("_emit_on_cpu", "_large")
@pytest.mark.parametrize("activation", ["hardswish", "silu", ""])
def test_a_large_gradient_and_its_casts_become_two_operators(activation: str) -> None:
    gm, report = backward_graph(activation), Report()
    assert fuse_joint(gm.graph, report) == 2
    found = targets(gm)
    assert found["loka.block_norm_backward_amax.default"] == 1
    assert found["loka.cast_transpose.default"] == 1  # both GEMMs read one cast
    assert found["loka.quantize_weights.default"] == 1
    left = {
        "aten.hardswish_backward.default",
        "aten.silu_backward.default",
        "loka.block_norm_backward.default",
        "aten.amax.default",
    }
    assert not left & set(found)
    node = next(n for n in gm.graph.nodes if str(n.target) == "loka.block_norm_backward_amax.default")
    assert node.args[3:] == (256, activation, False)
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
    expected = ref.block_norm_backward_ref(grad.double(), y.double(), rstd.double(), 256, "")
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
@pytest.mark.parametrize("activation", ["hardswish", "silu"])
def test_rewritten_backward_is_no_less_accurate(activation: str) -> None:
    before, after = backward_graph(activation), backward_graph(activation)
    fuse_joint(after.graph, Report())
    after.recompile()
    torch.manual_seed(0)
    y, rstd = torch.randn(64, 512).bfloat16(), torch.rand(64, 2) + 0.5
    grad, w, x = torch.randn(64, 512).bfloat16(), torch.randn(512, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    g = getattr(aten, f"{activation}_backward")(grad.double(), y.double())
    dx = ref.block_norm_backward_ref(g, y.double(), rstd.double(), 256, "")
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
    dx = ref.block_norm_backward_ref(grad, y.double().view(64, 512), rstd.double().view(64, 2), 256, "")
    assert relative(gm(a, b, s, y, rstd, w)[0], 0.5 * dx @ w.to(E4M3).double().t()) < 0.05


@pytest.mark.usefixtures("_emit_on_cpu")
@pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")
def test_gradients_of_the_outputs_are_no_weights() -> None:
    """They are inputs of the joint graph as weights are, but what reads them belongs to the backward."""
    from torch import nn

    from loka_compile.plan import Decision, Plan

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 64, bias=False)).bfloat16()
    plan = Plan(tuple(
        Decision(f"{index}#0", role, "torch", "tensorwise", "test", None, None, ())
        for index in (0, 1) for role in ("forward", "grad_input", "grad_weight")
    ))  # fmt: skip
    x, grad = torch.randn(64, 32).bfloat16(), torch.randn(64, 64).bfloat16()
    torch.compile(model, backend="loka", options={"plan": plan, "mods": "none"})(x).backward(grad)
    expected = grad.double().t() @ (x.double() @ model[0].weight.double().t())
    assert relative(model[1].weight.grad, expected) < 0.026 * 3**0.5 * 1.5
