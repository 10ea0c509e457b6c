"""The Triton kernels in Triton's interpreter against their twins. FP8 casts are checked on a GPU: the interpreter of
Triton 3.6 rounds them wrongly (a carry out of the mantissa is lost)."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter must be chosen before the first kernel is defined", allow_module_level=True)

from loka_compile.kernels import gemm_block_norm
from loka_compile.kernels import reference as ref
from loka_compile.kernels.block_norm_backward import block_norm_backward
from loka_compile.kernels.block_norm_backward_fp8 import block_norm_backward_fp8
from loka_compile.kernels.cast import cast_transpose, quantize_weights
from loka_compile.kernels.config import BackwardConfig, GemmConfig
from loka_compile.kernels.gemm_block_norm import launch
from loka_compile.kernels.grad_input_fp8 import grad_input_fp8
from loka_compile.kernels.grid_barrier import STATE
from loka_compile.kernels.grouped_gemm import grouped_gemm
from loka_compile.kernels.tile_parts import TURN, room
from loka_compile.kernels.turn import turn

POINTERS = GemmConfig(block_m=16, block_k=16)
TMA = GemmConfig(block_m=16, block_k=16, tma=True)
PERSISTENT = GemmConfig(block_m=16, block_k=16, tma=True, persistent=True)


@pytest.fixture(autouse=True)
def _two_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2))


def run(a: torch.Tensor, b: torch.Tensor, config: GemmConfig, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    m, n = a.shape[0], b.shape[0]
    block = more.pop("block", 256)
    y = torch.full((m, n), float("nan"))
    rstd = torch.full((m, -(-n // block)), float("nan"))
    scales = more.pop("scales", (None, None))
    launch(a, b, *scales, y, rstd, None, block=block, eps=1e-5, fast=more.pop("fast", True), config=config, **more)
    return y, rstd


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 384, 16), (37, 256, 48), (3, 3456, 16), (20, 512, 32), (5, 100, 16), (1, 512, 13), (17, 384, 29)],
)
@pytest.mark.parametrize("config", [POINTERS, TMA, PERSISTENT], ids=["pointers", "tma", "persistent"])
def test_gemm_block_norm(m: int, n: int, k: int, config: GemmConfig) -> None:
    a, b = torch.randn(m, k), torch.randn(n, k)
    y, rstd = run(a, b, config)
    expected, expected_rstd = ref.gemm_block_norm_ref(a.double(), b.double().t(), None, None, 256, 1e-5, torch.float64)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(rstd.double(), expected_rstd, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("config", [POINTERS, PERSISTENT], ids=["pointers", "persistent"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 384, 16), (37, 256, 48), (5, 100, 13), (20, 512, 32)])
def test_residual_before_the_norm(m: int, n: int, k: int, config: GemmConfig) -> None:
    a, b, residual = torch.randn(m, k), torch.randn(n, k), (torch.randn(m, n) * 5).bfloat16()
    scale = torch.tensor(0.5)
    y, rstd = run(a, b, config, scales=(scale, scale), residual=residual)
    expected, expected_rstd = ref.block_norm(0.25 * a.double() @ b.double().t() + residual.double(), 256, 1e-5)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(rstd.double(), expected_rstd, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("block", [64, 128])
def test_several_blocks_in_a_tile(block: int) -> None:
    a, b = torch.randn(9, 32), torch.randn(320, 32)
    y, rstd = run(a, b, POINTERS, block=block)
    expected, expected_rstd = ref.gemm_block_norm_ref(a, b.t(), None, None, block, 1e-5, torch.float32)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(rstd, expected_rstd, rtol=1e-4, atol=1e-6)


def test_scales_and_slow_accumulation() -> None:
    a, b = torch.randn(19, 48), torch.randn(384, 48)
    rows, columns = torch.rand(19, 1) + 0.1, torch.rand(384, 1) + 0.1
    y, rstd = run(a, b, POINTERS, scales=(rows, columns), fast=False)
    expected, expected_rstd = ref.gemm_block_norm_ref(a, b.t(), rows, columns.t(), 256, 1e-5, torch.float32)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(rstd, expected_rstd, rtol=1e-4, atol=1e-6)
    one = torch.tensor(1e-3)
    _, scaled = run(a, b, TMA, scales=(one, one))
    _, expected_rstd = ref.gemm_block_norm_ref(a, b.t(), one, one, 256, 1e-5, torch.float32)
    torch.testing.assert_close(scaled, expected_rstd, rtol=1e-4, atol=1e-6)


def in_blocks(m: int, n: int, k: int, rows_b: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """a [M, K], b [N, K], scales in blocks of 128 (A's rows adjacent, B's blocks padded), and their product in fp64."""
    a, b, blocks = torch.randn(m, k), torch.randn(n, k), -(-k // 128)
    sa = (torch.rand(blocks, m) + 0.1).t()
    sb = torch.rand(-(-n // 128), blocks + 3) + 0.1 if rows_b == 128 else (torch.rand(blocks, n) + 0.1).t()
    product = torch.zeros(m, n, dtype=torch.float64)
    for i in range(blocks):
        cut = slice(128 * i, 128 * i + 128)
        columns = sb[:, i].repeat_interleave(rows_b)[:n].double()
        product += a[:, cut].double() @ b[:, cut].double().t() * sa[:, i : i + 1].double() * columns
    return (a, b, sa, sb), product


@pytest.mark.parametrize("config", [POINTERS, PERSISTENT], ids=["pointers", "persistent"])
@pytest.mark.parametrize("rows_b", [128, 1])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 384, 256), (37, 256, 384), (5, 100, 128), (17, 384, 200)])
def test_scales_in_blocks(m: int, n: int, k: int, rows_b: int, config: GemmConfig) -> None:
    (a, b, sa, sb), product = in_blocks(m, n, k, rows_b)
    y, rstd = run(a, b, config, scales=(sa, sb))
    expected, expected_rstd = ref.block_norm(product, 256, 1e-5)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(rstd.double(), expected_rstd, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ref.scaled_product(a.double(), b.double().t(), sa, sb), product)


@pytest.mark.parametrize("config", [POINTERS, PERSISTENT], ids=["pointers", "persistent"])
@pytest.mark.parametrize("activation", ["swish_norm", "hardswish"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 384, 256), (37, 256, 128), (5, 128, 13)])
def test_activation_in_the_body_and_1x128_blocks(m: int, n: int, k: int, activation: str, config: GemmConfig) -> None:
    a, b, residual = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n) * 3
    q, scales = torch.full((m, n), float("nan")), torch.full((n // 128, m), float("nan"))
    kept = torch.full((m, n), float("nan"))
    # FP8 is checked on a GPU: what would be cast is written in fp32.
    more = {"activation": activation, "kept": kept, "residual": residual}
    out, rstd = run(a, b, config, **more)
    launch(a, b, None, None, None, None, q, block=256, eps=1e-5, fast=True, config=config, q_scales=scales, **more)
    h = a.double() @ b.double().t() + residual.double()
    y, expected_rstd = ref.block_norm(h, 256, 1e-5)
    swish_norm = activation == "swish_norm"
    expected = h * F.hardsigmoid(y) if swish_norm else F.hardswish(y)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kept.double(), h if swish_norm else y, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rstd.double(), expected_rstd, rtol=1e-4, atol=1e-6)
    groups = expected.unflatten(1, (-1, 128))
    torch.testing.assert_close(scales.t().double(), groups.abs().amax(2) / 448, rtol=1e-4, atol=1e-9)
    back = q.double().unflatten(1, (-1, 128)) * scales.t().double().unsqueeze(2)
    torch.testing.assert_close(back, groups, rtol=1e-4, atol=1e-4)


def test_1x128_blocks_of_zeros_and_nan() -> None:
    a, b = torch.randn(5, 16), torch.randn(256, 16)
    a[1], a[3, 0] = 0.0, float("nan")
    q, scales = torch.full((5, 256), 7.0), torch.full((2, 5), float("nan"))
    launch(
        a, b, None, None, None, None, q, block=256, eps=1e-5, fast=True, config=POINTERS, activation="swish_norm",
        q_scales=scales,
    )  # fmt: skip
    assert not q[1].any()
    torch.testing.assert_close(scales[:, 1], torch.full((2,), 1e-12 / 448))
    assert scales.isnan().nonzero().tolist() == [[0, 3], [1, 3]]


@pytest.mark.parametrize("case", ["blocks", "activation", "kept", "quantised"])
def test_what_is_never_split(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_block_norm, "_split_kernel", None)
    (a, b, sa, sb), product = in_blocks(17, 384, 256, 128)
    product = product if case == "blocks" else a.double() @ b.double().t()
    expected, _ = ref.block_norm(product, 256, 1e-5)
    q, q_scales, kept = torch.empty(17, 384), torch.empty(3, 17), torch.empty(17, 384)
    more: dict[str, Any] = {
        "blocks": {"scales": (sa, sb)}, "activation": {"activation": "hardswish"}, "kept": {"kept": kept},
        "quantised": {},
    }[case]  # fmt: skip
    config = GemmConfig(block_m=16, block_k=16, splits=4)
    if case == "quantised":
        launch(a, b, None, None, None, None, q, block=256, eps=1e-5, fast=True, config=config, q_scales=q_scales)
        y = (q.unflatten(1, (3, 128)) * q_scales.t().unsqueeze(2)).flatten(1)
    else:
        y, _ = run(a, b, config, **more)
    expected = F.hardswish(expected) if case == "activation" else expected
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1e15])
def test_extreme_magnitudes_stay_finite(magnitude: float) -> None:
    a, b = torch.randn(5, 16) * magnitude, torch.randn(384, 16)
    y, rstd = run(a, b, POINTERS)
    expected, _ = ref.gemm_block_norm_ref(a.double(), b.double().t(), None, None, 256, 1e-5, torch.float64)
    assert rstd.isfinite().all()
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)


# Both ways to load for a row, for many tiles and for a short row; once where K is odd, and once for the most parts.
@pytest.mark.parametrize(
    ("m", "n", "k", "splits", "tma"),
    [(1, 384, 208, 4, False), (1, 384, 208, 4, True), (67, 384, 100, 2, False), (67, 384, 100, 2, True),
     (37, 256, 479, 8, False), (20, 100, 13, 2, False), (20, 100, 13, 2, True), (3, 640, 64, 16, True)],
)  # fmt: skip
def test_parts_of_a_tile_added_up_in_the_launch(m: int, n: int, k: int, splits: int, tma: bool) -> None:
    a, b, residual, scale = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n) * 5, torch.tensor(0.5)
    config = GemmConfig(block_m=16, block_k=16, tma=tma, splits=splits)
    tiles = -(-m // 16) * -(-n // 256)
    parts, counters = room(tiles, 16, 256, splits, a.device)
    more: dict[str, Any] = {"scales": (scale, scale), "residual": residual, "room": (parts.fill_(torch.nan), counters)}
    y, rstd = run(a, b, config, **more)
    expected, expected_rstd = ref.block_norm(0.25 * a.double() @ b.double().t() + residual.double(), 256, 1e-5)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(rstd.double(), expected_rstd, rtol=1e-4, atol=1e-6)
    assert not (counters % TURN.value).any()  # the next launch begins as this one did
    again, _ = run(a, b, config, **more)
    assert torch.equal(again, y)


@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.parametrize(("m", "n", "k"), [(40, 33, 52), (16, 16, 48), (1, 5, 13)])
def test_gemms_of_one_shape_together(count: int, m: int, n: int, k: int) -> None:
    a, b = ([torch.randn(rows, k) for _ in range(count)] for rows in (m, n))
    scales = [torch.tensor(0.5 + i) for i in range(count)]
    config = GemmConfig(block_m=16, block_n=16, block_k=16)
    b[-1] = torch.nn.functional.pad(b[-1], (0, 3))[:, :k]  # rows further apart than those of the others
    outs = grouped_gemm(a, b, scales, scales[::-1], torch.float32, fast=True, config=config)
    for out, x, w, s, t in zip(outs, a, b, scales, scales[::-1], strict=True):
        torch.testing.assert_close(out.double(), x.double() @ w.double().t() * s * t, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("m", "n"), [(7, 384), (33, 256), (1, 512), (20, 100), (3, 640)])
@pytest.mark.parametrize("activation", ["", "hardswish", "silu"])
def test_backward(m: int, n: int, activation: str) -> None:
    y, grad = torch.randn(m, n) * 2, torch.randn(m, n)
    y[0, :3] = torch.tensor([-3.0, 3.0, 0.0])
    rstd = torch.rand(m, -(-n // 256)) + 0.5
    dx, amax, _ = block_norm_backward(grad, y, rstd, block=256, activation=activation, with_xt=False)
    expected = ref.block_norm_backward_ref(grad.double(), y.double(), rstd.double(), 256, activation)
    torch.testing.assert_close(dx.double(), expected, rtol=1e-4, atol=1e-5)
    assert amax.max().item() == pytest.approx(expected.abs().max().item(), rel=1e-5)


@pytest.mark.parametrize("activation", ["hardswish", "silu"])
def test_backward_writes_the_transposed_activation(activation: str) -> None:
    y, grad, rstd = torch.randn(37, 384), torch.randn(37, 384), torch.rand(37, 2) + 0.5
    xt = block_norm_backward(grad, y, rstd, block=256, activation=activation, with_xt=True)[2]
    expected = ref.activation_fp8_ref(y, activation).float().t()
    assert xt.shape == (384, 37)
    # Coarse, because the interpreter's casts are wrong by up to half of the value.
    assert ((xt.float() - expected).abs() <= 0.55 * expected.abs() + 2.0**-8).all()


@pytest.mark.parametrize(
    ("m", "n", "activation", "dtype", "keep"),
    [
        (1, 384, "hardswish", torch.float8_e4m3fn, 1),
        (33, 256, "", torch.float8_e4m3fn, 1),
        (76, 384, "hardswish", torch.float8_e5m2, 1),  # more tiles than programs
        (76, 384, "hardswish", torch.float8_e5m2, 2),
        (140, 384, "silu", torch.float8_e4m3fn, 3),
        (200, 384, "hardswish", torch.float8_e4m3fn, 4),
        (129, 640, "silu", torch.float8_e5m2, 4),
        (20, 100, "silu", torch.float8_e4m3fn, 1),
        (2, 640, "", torch.float8_e5m2, 1),
        (76, 384, "silu", torch.float8_e5m2, 1),
    ],
)
def test_backward_in_fp8(m: int, n: int, activation: str, dtype: torch.dtype, keep: int) -> None:
    y, grad, rstd = torch.randn(m, n) * 2, torch.randn(m, n), torch.rand(m, -(-n // 256)) + 0.5
    y[0, :3] = torch.tensor([-3.0, 3.0, 0.0])
    state = torch.zeros(STATE, dtype=torch.int32)
    half = keep > 1
    if half:
        grad = grad.half()  # not bf16, which the interpreter does not know bit by bit
    options = {"block": 256, "activation": activation, "dtype": dtype, "config": BackwardConfig(keep=keep)}
    dx, q, qt, scale, xt = block_norm_backward_fp8(grad, y, rstd, state, with_dx=True, with_xt=True, **options)
    expected = ref.block_norm_backward_ref(grad.double(), y.double(), rstd.double(), 256, activation)
    close = {"rtol": 1e-3, "atol": 1e-4} if half else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(dx.double(), expected, **close)
    assert scale.item() == pytest.approx(expected.abs().max().item() / torch.finfo(dtype).max, rel=close["rtol"])
    assert torch.equal(q.float().t(), qt.float())
    # Coarse, because the interpreter's casts are wrong by up to half of the value.
    assert ((q.double() * scale - expected).abs() <= 0.55 * expected.abs() + scale * 2.0**-8).all()
    assert (
        (xt.float().t() - ref.activation_fp8_ref(y, activation).float()).abs() <= 0.55 * 16 * y.abs() + 2.0**-8
    ).all()
    assert not state.any()
    only = block_norm_backward_fp8(grad, y, rstd, state, with_q=False, **options)
    assert [t.numel() for t in only] == [0, 0, m * n, 1, 0]
    assert torch.equal(only[2].float(), qt.float())


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k", "activation"), [(7, 384, 48, "hardswish"), (40, 512, 32, ""), (33, 100, 16, "silu")]
)
def test_grad_input_with_the_gradient_below(m: int, n: int, k: int, activation: str, tma: bool) -> None:
    a, b, y, rstd = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n) * 2, torch.rand(m, -(-n // 256)) + 0.5
    s, t, state = torch.tensor(0.5), torch.tensor(3.0), torch.zeros(STATE, dtype=torch.int32)
    q, qt, scale, xt = grad_input_fp8(
        a, b, s, t, y, rstd, state, block=256, activation=activation, dtype=torch.float8_e4m3fn, fast=True,
        config=GemmConfig(block_m=16, block_k=16, tma=tma), with_xt=True,
    )  # fmt: skip
    product = 1.5 * a.double() @ b.double().t()
    expected = ref.block_norm_backward_ref(product, y.double(), rstd.double(), 256, activation)
    assert scale.item() == pytest.approx(expected.abs().max().item() / 448, rel=1e-5)
    assert torch.equal(q.float().t(), qt.float())
    # Coarse, because the interpreter's casts are wrong by up to half of the value.
    assert ((q.double() * scale - expected).abs() <= 0.55 * expected.abs() + scale * 2.0**-8).all()
    assert (
        (xt.float().t() - ref.activation_fp8_ref(y, activation).float()).abs() <= 0.55 * 16 * y.abs() + 2.0**-8
    ).all()
    assert not state.any()


def test_backward_of_values_kept_in_fp8() -> None:
    grad, rstd = torch.randn(9, 384), torch.rand(9, 2) + 0.5
    kept = (torch.randn(9, 384) * 32).to(torch.float8_e4m3fn)
    state = torch.zeros(STATE, dtype=torch.int32)
    expected = ref.block_norm_backward_ref(grad.double(), kept.double() / 16, rstd.double(), 256, "hardswish")
    dx = block_norm_backward(grad, kept, rstd, block=256, activation="hardswish", with_xt=False)[0]
    torch.testing.assert_close(dx.double(), expected, rtol=1e-4, atol=1e-5)
    dx = block_norm_backward_fp8(
        grad, kept, rstd, state, block=256, activation="hardswish", dtype=torch.float8_e4m3fn, with_dx=True
    )[0]  # fmt: skip
    torch.testing.assert_close(dx.double(), expected, rtol=1e-4, atol=1e-5)
    wide = ref.block_norm_backward_ref(grad, kept, rstd, 256, "hardswish").double()
    torch.testing.assert_close(wide, expected, rtol=1e-4, atol=1e-5)


def test_nan_reaches_the_maxima() -> None:
    y, grad, rstd = torch.randn(5, 256), torch.randn(5, 256), torch.rand(5, 1)
    grad[3, 200] = float("nan")
    amax = block_norm_backward(grad, y, rstd, block=256, activation="hardswish", with_xt=False)[1]
    assert amax.isnan().any()
    state = torch.zeros(STATE, dtype=torch.int32)
    assert block_norm_backward_fp8(
        grad, y, rstd, state, block=256, activation="hardswish", dtype=torch.float8_e4m3fn
    )[3].isnan()  # fmt: skip
    assert not state.any()
    scale = cast_transpose(grad, amax, torch.float8_e5m2)[2]
    assert scale.isnan()
    assert quantize_weights([grad], torch.float8_e4m3fn, [False])[2][0].isnan()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_cast_transpose(dtype: torch.dtype) -> None:
    x = torch.randn(70, 130)
    q, qt, scale = cast_transpose(x, x.abs().amax(0), dtype)
    assert scale.item() == pytest.approx((x.abs().max() / torch.finfo(dtype).max).item(), rel=1e-6)
    assert torch.equal(q.float().t(), qt.float())
    only = cast_transpose(x, x.abs().amax(0), dtype, with_q=False)
    assert only[0].numel() == 0
    assert torch.equal(only[1].float(), qt.float())


@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 5), (128, 128), (199, 13), (136, 130), (130, 260)])
def test_turned_bytes(m: int, n: int) -> None:
    x = torch.randint(0, 256, (m, n), dtype=torch.uint8)  # every byte, NaN too
    found = turn(x.view(torch.float8_e4m3fn))
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.uint8), x.t())


def test_more_weights_than_one_launch_takes_and_of_two_dtypes() -> None:
    shapes = [(16 * (1 + i % 2), 16 + 16 * (i % 3)) for i in range(70)]
    weights = [torch.randn(*s).to(torch.float32 if i % 5 else torch.bfloat16) * (i + 1) for i, s in enumerate(shapes)]
    q, qt, scales = quantize_weights(weights, torch.float8_e4m3fn, [True] * 70)
    for weight, one, turned, scale in zip(weights, q, qt, scales, strict=True):
        exact = weight.float()
        assert scale.item() == pytest.approx(exact.abs().max().item() / 448, rel=1e-6)
        assert (
            float((one.float() * scale - exact).norm() / exact.norm()) < 0.2
        )  # the interpreter loses carries: 64 for 127.98
        assert torch.equal(one.float().t(), turned.float())


def test_weights_of_all_shapes_together() -> None:
    shapes = [(70, 130), (64, 16), (3, 5), (1, 1), (16, 300), (40, 40), (2, 2), (9, 33), (5, 7), (8, 8)]
    weights = [torch.randn(*shape) * (i + 1) for i, shape in enumerate(shapes)]
    weights[2].zero_()
    wanted = [i % 3 != 0 for i in range(len(shapes))]
    q, qt, scales = quantize_weights(weights, torch.float8_e4m3fn, wanted)
    for i, weight in enumerate(weights):
        assert scales[i].item() == pytest.approx(max(weight.abs().max().item(), ref.AMAX_FLOOR) / 448, rel=1e-6)
        assert q[i].shape == weight.shape
        assert (q[i].float().sign() * weight.sign() >= 0).all()
        assert qt[i].numel() == (weight.numel() if wanted[i] else 0)
        if wanted[i]:
            assert torch.equal(q[i].float().t(), qt[i].float())
