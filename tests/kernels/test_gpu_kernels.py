"""The kernels on real hardware, FP8 rounding included: against fp64, on poisoned outputs; each transposed FP8 output
against its contiguous twin (Triton 3.6 miscompiles some transposed FP8 stores)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from loka_compile.kernels import reference as ref
from loka_compile.kernels.config import GemmConfig

pytestmark = pytest.mark.gpu
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(1, 384, 448), (199, 3456, 448), (2048, 256, 1024), (4096, 512, 1024), (199, 384, 16), (64, 7680, 256)]
CONFIGS = {
    "pointers": GemmConfig(block_m=64, block_k=64, stages=2),
    "tma": GemmConfig(block_m=64, block_k=64, stages=2, tma=True),
    "persistent": GemmConfig(block_m=64, block_k=64, stages=2, tma=True, persistent=True),
}


def fp8(rows: int, columns: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return (torch.randn(rows, columns, device="cuda") * 8).to(dtype)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("config", CONFIGS)
def test_gemm_block_norm(m: int, n: int, k: int, config: str) -> None:
    from loka_compile.kernels.gemm_block_norm import launch

    a, b, scale = fp8(m, k), fp8(n, k), torch.tensor(0.01, device="cuda")
    y = torch.full((m, n), float("nan"), device="cuda")
    rstd = torch.full((m, -(-n // 256)), float("nan"), device="cuda")
    q = torch.full((m, n), float("nan"), device="cuda").to(E4M3)
    launch(a, b, scale, scale, y, rstd, q, block=256, eps=1e-5, fast=True, config=CONFIGS[config])
    expected, expected_rstd = ref.block_norm(a.double() @ b.double().t() * 1e-4, 256, 1e-5)
    # The tensor core's fast accumulator keeps about 13 bits.
    assert relative(y, expected) < 2e-3
    assert relative(rstd, expected_rstd) < 2e-3
    assert torch.equal(q.float(), ref.activation_fp8_ref(y, "hardswish").float()) or (
        relative(q.float() / 16, F.hardswish(expected)) < 0.04
    )


@pytest.mark.parametrize(("m", "n"), [(1, 384), (199, 3456), (2048, 256), (4096, 512), (64, 7680), (200, 100)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", ref.ACTIVATIONS)
def test_backward(m: int, n: int, dtype: torch.dtype, activation: str) -> None:
    from loka_compile.kernels.block_norm_backward import block_norm_backward

    z = torch.randn(m, n, device="cuda", dtype=torch.float64, requires_grad=True)
    y64 = torch.cat([p * torch.rsqrt(p.square().mean(1, keepdim=True) + 1e-5) for p in z.split(256, 1)], 1)
    y, rstd = y64.detach().to(dtype), ref.block_norm(z.detach(), 256, 1e-5)[1].float()
    grad = (torch.randn(m, n, device="cuda") * 1e-4).to(dtype)
    # HardSwish' jumps at 3: it is taken where the kernel takes it, at the rounded y.
    at = y.double().requires_grad_()
    act = {"hardswish": F.hardswish, "silu": F.silu}[activation]
    act(at).backward(grad.double())
    y64.backward(at.grad)
    dx, amax, xt = block_norm_backward(grad, y, rstd, block=256, activation=activation, with_xt=True)
    assert relative(dx, z.grad) < (1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert amax.max().item() == dx.float().abs().max().item()
    expected = ref.activation_fp8_ref(y, activation)
    # The kernel's product may round the other way in the last bit before the cast.
    assert (xt.float().t() != expected.float()).float().mean().item() < 1e-2
    assert relative(xt.float().t() / 16, act(y64)) < 0.04


@pytest.mark.parametrize(
    ("m", "n"), [(1, 384), (199, 3456), (4096, 512), (4096, 1024), (4096, 2048), (64, 7680), (200, 100)]
)
@pytest.mark.parametrize("keep", [1, 2, 4, None])
@pytest.mark.parametrize(
    ("dtype", "activation", "wide"),
    [(E4M3, "hardswish", torch.bfloat16), (E5M2, "hardswish", torch.float16), (E4M3, "silu", torch.bfloat16)],
)
def test_backward_in_fp8(
    m: int, n: int, dtype: torch.dtype, activation: str, wide: torch.dtype, keep: int | None
) -> None:
    """The kernel whose programs meet, as shipped (None) and with so many tiles kept: many times, for what a missed
    meeting would change; in a CUDA graph too."""
    from loka_compile.kernels.block_norm_backward_fp8 import block_norm_backward_fp8
    from loka_compile.kernels.config import BackwardConfig
    from loka_compile.kernels.grid_barrier import STATE
    from loka_compile.lowering.fused.configs import backward_config

    shipped = backward_config(m, n, 2)
    config = shipped if keep is None else BackwardConfig(keep=keep)
    y = (torch.randn(m, n, device="cuda") * 1.5).to(wide)
    rstd, state = torch.rand(m, -(-n // 256), device="cuda") + 0.5, torch.zeros(STATE, dtype=torch.int32, device="cuda")
    grads = [(torch.randn(m, n, device="cuda") * 10.0 ** -(i / 2)).to(wide) for i in range(8)]

    def run(grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return block_norm_backward_fp8(
            grad, y, rstd, state, block=256, activation=activation, dtype=dtype, with_dx=True, with_xt=True,
            config=config,
        )  # fmt: skip

    def check(grad: torch.Tensor, found: tuple[torch.Tensor, ...]) -> None:
        dx, q, qt, scale, xt = found
        expected = ref.block_norm_backward_ref(grad.double(), y.double(), rstd.double(), 256, activation)
        assert relative(dx, expected) < 4e-3
        amax = expected.abs().max().item()
        # Of values that were rounded to 16 bits, where more than one tile is kept.
        assert scale.item() == pytest.approx(amax / torch.finfo(dtype).max, rel=1e-4 if keep == 1 else 4e-3)
        assert torch.equal(q.float().t(), qt.float())
        assert relative(q.double() * scale.double(), expected) < (0.04 if dtype == E4M3 else 0.08)
        assert (xt.float().t() != ref.activation_fp8_ref(y, activation).float()).float().mean().item() < 1e-2
        assert not state.any()

    for grad, found in [(grad, run(grad)) for grad in grads]:
        check(grad, found)
    static = grads[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(static)
    for grad in (grads[3], grads[1]):
        static.copy_(grad)
        graph.replay()
        check(grad, found)


@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("m", "n"), [(199, 384), (4096, 1024), (4096, 2048)])
@pytest.mark.parametrize("where", ["grad", "y"])
def test_a_nan_reaches_the_scale(where: str, m: int, n: int, wide: torch.dtype) -> None:
    """Though one instruction makes 0 of it: the gate of HardSwish."""
    from loka_compile.kernels.block_norm_backward import block_norm_backward
    from loka_compile.kernels.block_norm_backward_fp8 import block_norm_backward_fp8
    from loka_compile.kernels.grid_barrier import STATE
    from loka_compile.lowering.fused.configs import backward_config

    tensors = {name: torch.randn(m, n, device="cuda").to(wide) for name in ("grad", "y")}
    tensors[where][m // 2, n - 3] = torch.nan
    grad, y = tensors["grad"], tensors["y"]
    rstd, state = torch.rand(m, -(-n // 256), device="cuda") + 0.5, torch.zeros(STATE, dtype=torch.int32, device="cuda")
    dx, amax, xt = block_norm_backward(grad, y, rstd, block=256, activation="hardswish", with_xt=True)
    assert amax.isnan().any()
    assert dx.isnan().any(1).nonzero().flatten().tolist() == [m // 2]
    assert xt.float().isnan().sum().item() == (where == "y")
    config = backward_config(m, n, grad.element_size())
    scale = block_norm_backward_fp8(
        grad, y, rstd, state, block=256, activation="hardswish", dtype=E4M3, config=config
    )[3]  # fmt: skip
    assert scale.isnan()
    assert not state.any()


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 512, 512), (199, 384, 448), (1, 512, 64), (2048, 256, 1024)])
@pytest.mark.parametrize(("tma", "activation"), [(False, "hardswish"), (True, "hardswish"), (True, "silu")])
def test_grad_input_with_the_gradient_below(m: int, n: int, k: int, tma: bool, activation: str) -> None:
    from loka_compile.kernels.grad_input_fp8 import grad_input_fp8
    from loka_compile.kernels.grid_barrier import STATE

    a, b, s = fp8(m, k), fp8(n, k), torch.tensor(0.01, device="cuda")
    y = (torch.randn(m, n, device="cuda") * 1.5).bfloat16()
    rstd, state = torch.rand(m, -(-n // 256), device="cuda") + 0.5, torch.zeros(STATE, dtype=torch.int32, device="cuda")
    product = a.double() @ b.double().t() * 1e-4
    expected = ref.block_norm_backward_ref(product, y.double(), rstd.double(), 256, activation)
    config = GemmConfig(block_m=64, block_k=128, warps=8, stages=4, tma=tma)
    for _ in range(3):
        q, qt, scale, xt = grad_input_fp8(
            a, b, s, s, y, rstd, state, block=256, activation=activation, dtype=E4M3, fast=True, config=config,
            with_xt=True,
        )  # fmt: skip
        assert scale.item() == pytest.approx(expected.abs().max().item() / 448, rel=5e-3)
        assert relative(q.double() * scale.double(), expected) < 0.04
        assert torch.equal(q.float().t(), qt.float())
        assert (xt.float().t() != ref.activation_fp8_ref(y, activation).float()).float().mean().item() < 1e-2
        assert not state.any()


@pytest.mark.parametrize(("m", "n"), [(199, 384), (4096, 512)])
def test_backward_of_values_kept_in_fp8(m: int, n: int) -> None:
    from loka_compile.kernels.block_norm_backward import block_norm_backward
    from loka_compile.kernels.block_norm_backward_fp8 import block_norm_backward_fp8
    from loka_compile.kernels.grid_barrier import STATE

    grad, rstd = torch.randn(m, n, device="cuda").bfloat16(), torch.rand(m, -(-n // 256), device="cuda") + 0.5
    kept, state = (torch.randn(m, n, device="cuda") * 24).to(E4M3), torch.zeros(STATE, dtype=torch.int32, device="cuda")
    expected = ref.block_norm_backward_ref(grad.double(), kept.double() / 16, rstd.double(), 256, "hardswish")
    dx = block_norm_backward(grad, kept, rstd, block=256, activation="hardswish", with_xt=False)[0]
    assert relative(dx, expected) < 4e-3
    _, q, qt, scale, xt = block_norm_backward_fp8(
        grad, kept, rstd, state, block=256, activation="hardswish", dtype=E4M3, with_xt=True
    )  # fmt: skip
    assert relative(q.double() * scale.double(), expected) < 0.04
    assert torch.equal(q.float().t(), qt.float())
    assert (xt.float().t() != ref.activation_fp8_ref(kept, "hardswish").float()).float().mean().item() < 1e-2


@pytest.mark.parametrize("shape", [(4096, 512), (199, 3456), (1, 17), (130, 70)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("magnitude", [1.0, 0.0, 1e-20])
def test_cast_transpose(shape: tuple[int, int], dtype: torch.dtype, magnitude: float) -> None:
    from loka_compile.kernels.cast import cast_transpose

    x = (torch.randn(*shape, device="cuda") * magnitude).bfloat16()
    parts = x.float().abs().amax(1)
    q, qt, scale = cast_transpose(x, parts, dtype)
    assert torch.equal(q.float().t(), qt.float())
    assert qt.is_contiguous()
    expected, _, expected_scale = ref.cast_transpose_ref(x, parts, dtype)
    assert scale.item() == pytest.approx(expected_scale.item(), rel=1e-6)
    assert (q.float() != expected.float()).float().mean().item() < 1e-2


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(
    ("m", "n"), [(1, 1), (1, 384), (4, 13), (199, 384), (2048, 448), (8192, 1536), (4096, 13), (30, 70000)]
)
def test_turned_bytes(m: int, n: int, dtype: torch.dtype) -> None:
    import loka_compile.lowering.fused.ops  # noqa: F401  (registers the operator)
    from loka_compile.kernels.turn import turn

    x = torch.randint(0, 256, (m, n), device="cuda", dtype=torch.uint8)  # every byte, NaN too
    found = turn(x.view(dtype))
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.uint8), x.t())
    assert torch.equal(torch.ops.loka.turn_fp8(x.view(dtype)).view(torch.uint8), x.t())


def test_weights_together() -> None:
    from loka_compile.kernels.cast import quantize_weights

    shapes = [
        (2048, 2048),
        (384, 448),
        (7, 13),
        (256, 256),
        (100, 300),
        (1, 1),
        (512, 64),
        (3456, 448),
        (9, 9),
        (30, 40),
    ]
    weights = [torch.randn(*shape, device="cuda").bfloat16() for shape in shapes]
    weights[-1].zero_()
    wanted = [i % 2 == 0 for i in range(len(shapes))]
    found = quantize_weights(weights, E4M3, wanted)
    for weight, q, qt, scale, transposed in zip(weights, *found, wanted, strict=True):
        assert scale.item() == pytest.approx(max(weight.float().abs().max().item(), 1e-12) / 448, rel=1e-6)
        # e4m3 keeps 3 bits behind the leading one, and multiples of 2**-9 below 2**-6.
        bound = (weight.float().abs() * 2**-4).clamp_min(scale * 2**-10)
        assert ((q.float() * scale - weight.float()).abs() <= 1.001 * bound).all()
        assert qt.numel() == (weight.numel() if transposed else 0)
        if transposed:
            assert torch.equal(q.float().t(), qt.float())


@pytest.mark.parametrize(("m", "n", "k"), [(512, 512, 4096), (1024, 1024, 4096), (1024, 512, 208), (7, 384, 4096)])
@pytest.mark.parametrize("fast", [True, False])
def test_grouped_scaled_mm(m: int, n: int, k: int, fast: bool) -> None:
    a, b = [fp8(m, k) for _ in range(9)], [fp8(n, k) for _ in range(9)]
    scales = [torch.tensor(0.01 * (i + 1), device="cuda") for i in range(9)]
    import loka_compile.lowering.fused.grouped  # noqa: F401  (registers the operator)

    outs = torch.ops.loka.grouped_scaled_mm(a, b, scales, scales, torch.bfloat16, fast)
    for out, x, w, s in zip(outs, a, b, scales, strict=True):
        assert relative(out, x.double() @ w.double().t() * s.double() ** 2) < 4e-3


@pytest.mark.parametrize("kind", [E4M3, torch.bfloat16])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 384, 448), (199, 3456, 448), (4096, 512, 1024)])
def test_compiled_residual_before_the_norm(kind: torch.dtype, m: int, n: int, k: int) -> None:
    from loka_compile.lowering.fused import lowerings

    lowerings.register()
    a, b = torch.randn(m, k, device="cuda").to(kind), torch.randn(n, k, device="cuda").to(kind).t()
    residual = torch.randn(m, n, device="cuda").bfloat16() * 30
    one = torch.ones((), device="cuda") if kind == E4M3 else None

    def layer(a: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, rstd = torch.ops.loka.gemm_block_norm(a, b, one, one, 256, 1e-5, torch.bfloat16, True, True, r)
        return (F.hardswish(y.float()) * 16).clamp(-448, 448).to(E4M3), y, rstd

    expected, expected_rstd = ref.block_norm(a.double() @ b.double() + residual.double(), 256, 1e-5)
    eager = torch.ops.loka.gemm_block_norm(a, b, one, one, 256, 1e-5, torch.float32, True, True, residual)
    assert relative(eager[0], expected) < 2e-3
    q, y, rstd = torch.compile(layer, fullgraph=True)(a, b, residual)
    assert relative(q.float() / 16, F.hardswish(expected)) < 0.04
    assert relative(y, expected) < 4e-3
    assert relative(rstd, expected_rstd) < 2e-3


@pytest.mark.parametrize("kind", [E4M3, torch.bfloat16])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 384, 448), (199, 3456, 448), (4096, 512, 1024), (2048, 256, 64)])
@pytest.mark.parametrize("training", [False, True])
def test_compiled_operator_with_its_epilogue(kind: torch.dtype, m: int, n: int, k: int, training: bool) -> None:
    from loka_compile.lowering.fused import lowerings

    lowerings.register()
    a = torch.randn(m, k, device="cuda").to(kind)
    b = torch.randn(n, k, device="cuda").to(kind).t()
    scales = (torch.tensor(0.5, device="cuda"), torch.tensor(2.0, device="cuda")) if kind == E4M3 else (None, None)

    def chain(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, rstd = torch.ops.loka.gemm_block_norm(a, b, *scales, 256, 1e-5, torch.bfloat16, True, training)
        q = (F.hardswish(y.float()) * 16).clamp(-448, 448).to(E4M3)
        return (q, y, rstd) if training else (q,)

    found = torch.compile(chain, fullgraph=True)(a, b)
    expected, expected_rstd = ref.block_norm(a.double() @ b.double(), 256, 1e-5)
    assert relative(found[0].float() / 16, F.hardswish(expected)) < 0.04
    if training:
        assert relative(found[1], expected) < 4e-3
        assert relative(found[2], expected_rstd) < 2e-3
