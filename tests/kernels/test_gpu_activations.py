"""Scales in blocks, SwishNorm and results in 1x128 blocks on real hardware, against fp64: the kernel, and the template
as Inductor generates it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from loka_compile.kernels import reference as ref
from loka_compile.kernels.config import GemmConfig

pytestmark = pytest.mark.gpu
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
CONFIGS = {
    "pointers": GemmConfig(64, 256, 128, 8, 3),
    "tma": GemmConfig(64, 256, 128, 4, 2, tma=True),
    # With room for what is written in fp32 beside the stages.
    "persistent": GemmConfig(128, 256, 128, 8, 3, tma=True, persistent=True).fitting(1, 4, 232_448),
}
#: M, N, K, and whether B is scaled in squares.
SHAPES = [(1, 384, 256, True), (199, 384, 640, False), (2048, 512, 1024, True), (199, 3456, 128, True)]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def operands(m: int, n: int, k: int, squares: bool) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """a [M, K], b [N, K], their scales as the provider ``torch`` lays them out; the product in fp64."""
    a, b = ((torch.randn(rows, k, device="cuda") * 8).to(E4M3) for rows in (m, n))
    kb = k // 128
    sa = (torch.rand(kb, m, device="cuda") * 0.02 + 0.001).t()
    columns = -(-kb // 4) * 4
    sb = torch.rand(n // 128, columns, device="cuda") if squares else torch.rand(kb, n, device="cuda").t()
    left = a.double() * sa.double().repeat_interleave(128, 1)
    wide = sb[:, :kb].double().repeat_interleave(128, 1)
    return (a, b, sa, sb), left @ (b.double() * (wide.repeat_interleave(128, 0) if squares else wide)).t()


def activated(h: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, what is kept, rstd."""
    y, rstd = ref.block_norm(h, 256, 1e-5)
    return (h * F.hardsigmoid(y), h, rstd) if activation == "swish_norm" else (F.hardswish(y), y, rstd)


@pytest.mark.parametrize("activation", ["swish_norm", "hardswish"])
@pytest.mark.parametrize("config", CONFIGS)
def test_kernel(config: str, activation: str) -> None:
    from loka_compile.kernels.gemm_block_norm import launch

    for m, n, k, squares in SHAPES:
        (a, b, sa, sb), h = operands(m, n, k, squares)
        out, kept = (torch.full((m, n), float("nan"), device="cuda") for _ in range(2))
        rstd = torch.full((m, -(-n // 256)), float("nan"), device="cuda")
        q, scales = (
            torch.full((m, n), float("nan"), device="cuda").to(E4M3),
            torch.full((n // 128, m), float("nan"), device="cuda"),
        )
        launch(
            a, b, sa, sb, out, rstd, q, block=256, eps=1e-5, fast=True, config=CONFIGS[config], activation=activation,
            kept=kept, q_scales=scales,
        )  # fmt: skip
        expected, expected_kept, expected_rstd = activated(h, activation)
        # fp32 sums of partial products that the tensor core rounds to about 13 bits.
        for found, want in ((out, expected), (kept, expected_kept), (rstd, expected_rstd)):
            assert relative(found, want) < 2e-3
        again, again_scales = ref.quantize_1x128_ref(out)
        torch.testing.assert_close(scales, again_scales, rtol=1e-5, atol=0)
        # The kernel's product with the inverse may round the other way in the last bit before the cast.
        assert (q.float() != again.float()).float().mean().item() < 1e-2
        assert relative(q.double() * scales.double().t().repeat_interleave(128, 1), expected) < 0.04


def test_a_nan_poisons_its_block_and_no_other() -> None:
    from loka_compile.kernels.gemm_block_norm import launch

    (a, b, sa, sb), _ = operands(64, 512, 128, True)
    sa = sa.clone()
    sa[3] = float("nan")
    q, scales = torch.empty(64, 512, dtype=E4M3, device="cuda"), torch.empty(4, 64, device="cuda")
    launch(
        a, b, sa, sb, None, None, q, block=256, eps=1e-5, fast=True, config=CONFIGS["tma"], activation="swish_norm",
        q_scales=scales,
    )  # fmt: skip
    bad = scales.isnan().nonzero().tolist()
    assert bad == [[i, 3] for i in range(4)]


@pytest.mark.parametrize(
    ("config", "squares", "training"), [("pointers", True, False), ("persistent", True, True), ("tma", False, True)]
)
def test_compiled_block_scales(config: str, squares: bool, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from loka_compile.lowering.fused import lowerings

    lowerings.register()
    torch._dynamo.reset()
    monkeypatch.setattr(lowerings, "config_for", lambda *_: CONFIGS[config])

    def layer(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, rstd = torch.ops.loka.gemm_block_norm(a, b.t(), sa, sb, 256, 1e-5, BF16, True, training)
        q = (F.hardswish(y.float()) * 16).clamp(-448, 448).to(E4M3)
        return (q, y, rstd) if training else (q,)

    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    for m, n, k in ((1, 384, 256), (199, 512, 640)):
        args, h = operands(m, n, k, squares)
        expected, y, rstd = activated(h, "hardswish")
        found = compiled(*args)
        assert relative(found[0].float() / 16, expected) < 0.04
        if training:
            assert relative(found[1], y) < 4e-3
            assert relative(found[2], rstd) < 2e-3


@pytest.mark.parametrize(
    ("kind", "activation", "with_out", "kept", "quantised"),
    [
        ("blocks", "swish_norm", True, True, False),
        ("blocks", "swish_norm", False, False, True),
        ("blocks", "hardswish", False, True, True),
        ("tensorwise", "swish_norm", True, True, True),
        ("tensorwise", "swish_norm", True, False, False),
        ("bf16", "swish_norm", True, True, False),
        ("bf16", "hardswish", True, False, True),
    ],
)
def test_compiled_activations(
    kind: str, activation: str, with_out: bool, kept: bool, quantised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loka_compile.lowering.fused import lowerings

    lowerings.register()
    torch._dynamo.reset()
    config = GemmConfig(64, 256, 64, 8, 3, tma=True, persistent=True)
    monkeypatch.setattr(lowerings, "config_for", lambda *_: config)
    m, n, k = 199, 384, 256
    (a, b, sa, sb), h = operands(m, n, k, True)
    scales: tuple[Any, Any] = (sa, sb)
    residual = torch.randn(m, n, device="cuda").to(BF16)
    if kind != "blocks":
        scales = (None, None) if kind == "bf16" else (torch.full((), 0.1, device="cuda"),) * 2
        a, b = (a.to(BF16), b.to(BF16)) if kind == "bf16" else (a, b)
        h = a.double() @ b.double().t() * (1.0 if kind == "bf16" else scales[0].double() ** 2)

    def layer(a: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = torch.ops.loka.gemm_norm_activation(
            a, b.t(), *scales, activation, 256, 1e-5, BF16, BF16, True, with_out, kept, quantised, r
        )
        return (found[0] + 1 if with_out else found[0], *found[1:])  # an epilogue of Inductor's

    expected, expected_kept, expected_rstd = activated(h + residual.double(), activation)
    for run in (torch.compile(layer, fullgraph=True), layer):
        out, held, rstd, q, q_scales = run(a, b, residual)
        if with_out:
            assert relative(out, expected + 1) < 4e-3
        if kept:
            assert relative(held, expected_kept) < 4e-3
            assert relative(rstd, expected_rstd) < 2e-3
        if quantised:
            assert relative(q.double() * q_scales.double().t().repeat_interleave(128, 1), expected) < 0.04
        wanted = (with_out, kept, kept, quantised, quantised)
        assert [t.numel() > 0 for t in (out, held, rstd, q, q_scales)] == list(wanted)
