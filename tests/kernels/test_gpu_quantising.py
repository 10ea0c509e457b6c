"""The fused GEMM that quantises its input itself, on real hardware: against fp64, and the same bits in every run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from loka_compile.kernels import reference as ref
from loka_compile.kernels.config import GemmConfig

pytestmark = pytest.mark.gpu
E4M3 = torch.float8_e4m3fn


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (1024, 256, 7680, GemmConfig(64, 256, 128, 8, 4, tma=True, splits=8)),
        (1024, 512, 7680, GemmConfig(64, 256, 128, 8, 4, tma=True, splits=4)),
        (199, 384, 479, GemmConfig(64, 256, 128, 8, 4, splits=2)),
        (1, 3456, 13, GemmConfig(64, 256, 128, 8, 4)),
        (4096, 512, 1024, GemmConfig(64, 256, 128, 8, 4)),
        (1000, 256, 256, GemmConfig(16, 256, 128, 4, 4)),
        (300, 512, 2048, GemmConfig(128, 256, 128, 8, 3, tma=True, persistent=True)),
    ],
)
@pytest.mark.parametrize("heavy", [False, True])
def test_compiled(m: int, n: int, k: int, config: GemmConfig, heavy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor_config

    from loka_compile.lowering.fused import lowerings

    lowerings.register()
    monkeypatch.setattr(lowerings, "config_for", lambda *_: config)
    torch.manual_seed(m + n + k)
    x = torch.randn(m, k, device="cuda") * torch.logspace(-3, 3, m, device="cuda")[:, None]
    x = (x * torch.randn(k, device="cuda").exp() ** 2 if heavy else x).bfloat16()
    x[m // 2] = 0
    w, scale = (torch.randn(n, k, device="cuda") * 8).to(E4M3), torch.rand(1, n, device="cuda") + 0.5

    def layer(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, rstd = torch.ops.loka.gemm_block_norm(x, w.t(), None, scale, 256, 1e-5, torch.bfloat16, True, True)
        return F.hardswish(y), y, rstd

    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):  # the cache's key does not know the configuration
        compiled = torch.compile(layer, fullgraph=True)
        found = compiled(x, w, scale)
    product = x.double() @ (w.double() * scale.double().t()).t()
    exact, exact_rstd = ref.block_norm(product, 256, 1e-5)
    twin, twin_rstd = ref.gemm_block_norm_ref(x, w.t(), None, scale, 256, 1e-5, torch.float32)
    # What is left to the twin: bf16 of the result, and values on the edge of two FP8 numbers.
    assert relative(found[1], twin) < 5e-3
    assert relative(found[2], twin_rstd) < 5e-3
    assert relative(found[0], F.hardswish(twin)) < 6e-3
    assert relative(found[1], exact) < 1.05 * relative(twin, exact) + 4e-3 < 0.05
    assert relative(found[2], exact_rstd) < 0.05
    assert not found[1][m // 2].any()
    for _ in range(20):
        assert all(torch.equal(now, first) for now, first in zip(compiled(x, w, scale), found, strict=True))


def test_a_nan_reaches_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from loka_compile.lowering.fused import lowerings

    lowerings.register()
    monkeypatch.setattr(lowerings, "config_for", lambda *_: GemmConfig(64, 256, 128, 8, 4))
    x = torch.randn(70, 300, device="cuda").bfloat16()
    x[5, 200], x[66, 3] = torch.nan, torch.inf
    w, scale = torch.randn(256, 300, device="cuda").to(E4M3), torch.ones(1, 256, device="cuda")
    torch._dynamo.reset()
    y, _ = torch.compile(
        lambda x, w, s: torch.ops.loka.gemm_block_norm(x, w.t(), None, s, 256, 1e-5, torch.bfloat16, True, False)
    )(x, w, scale)
    assert y[[5, 66]].isnan().all()
    assert y.isnan().any(1).sum() == 2
