"""Tiles whose parts are added up inside the launch (split-K), on real hardware: against fp64, and the same bits in
every run, with the workspace poisoned between runs and under CUDA graph replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from loka_compile.kernels import reference as ref
from loka_compile.kernels.config import GemmConfig

pytestmark = pytest.mark.gpu
E4M3 = torch.float8_e4m3fn
RUNS = 50
#: M, N, K and parts: rows off 16 bytes, fewer K-blocks than parts, a short last block,
#: more tiles than groups of programs.
CASES = [
    (1024, 256, 7680, 8), (1, 384, 448, 2), (199, 384, 479, 4), (199, 3456, 13, 2), (37, 256, 13, 8),
    (300, 512, 4096, 16), (4096, 512, 2048, 4),
]  # fmt: skip


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def operands(m: int, n: int, k: int, kind: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(m + n + k)
    a, b = ((torch.randn(rows, k, device="cuda") * 8).to(kind) for rows in (m, n))
    return a, b


def replayed(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize(("m", "n", "k", "splits"), CASES)
def test_kernel(m: int, n: int, k: int, splits: int) -> None:
    from loka_compile.kernels.gemm_block_norm import launch
    from loka_compile.kernels.tile_parts import TURN, room

    (a, b), scale = operands(m, n, k), torch.tensor(0.01, device="cuda")
    config = GemmConfig(64, 256, 128, 8, 4, tma=True, splits=splits)
    parts, counters = room(-(-m // 64) * -(-n // 256), 64, 256, splits, a.device)
    y, q = torch.empty(m, n, device="cuda"), torch.empty(m, n, device="cuda", dtype=E4M3)
    rstd = torch.empty(m, -(-n // 256), device="cuda")

    def call() -> None:
        for tensor in (parts, y, rstd, q.view(torch.int8)):
            tensor.fill_(0x7F if tensor.dtype == torch.int8 else torch.nan)
        more: dict[str, Any] = {"block": 256, "eps": 1e-5, "fast": True}
        launch(a, b, scale, scale, y, rstd, q, config=config, room=(parts, counters), **more)

    call()
    expected, expected_rstd = ref.block_norm(a.double() @ b.double().t() * 1e-4, 256, 1e-5)
    # The tensor core's fast accumulator keeps about 13 bits.
    assert relative(y, expected) < 2e-3
    assert relative(rstd, expected_rstd) < 2e-3
    assert relative(q.float() / 16, F.hardswish(expected)) < 0.04
    first = [t.clone() for t in (y, rstd, q.view(torch.int8))]
    graph = replayed(call)
    for again in [call] * RUNS + [graph.replay] * RUNS:
        again()
        assert all(torch.equal(t, f) for t, f in zip((y, rstd, q.view(torch.int8)), first, strict=True))
    assert not (counters % TURN.value).any()


@pytest.mark.parametrize(
    ("m", "n", "k", "splits", "kind", "dynamic"),
    [
        (1024, 256, 7680, 8, E4M3, False),
        (199, 384, 479, 4, E4M3, False),
        (1, 3456, 448, 2, torch.bfloat16, False),
        (4096, 512, 2048, 4, E4M3, True),
    ],
)
def test_compiled(
    m: int, n: int, k: int, splits: int, kind: torch.dtype, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them in a graph, which wait at the same counters, and epilogues of Inductor's."""
    import torch._inductor.config as inductor_config

    from loka_compile.lowering.fused import lowerings

    lowerings.register()
    config = GemmConfig(64, 256, 128 // kind.itemsize, 8, 4, tma=True, splits=splits)
    monkeypatch.setattr(lowerings, "config_for", lambda *_: config)
    (a, b), one = operands(m, n, k, kind), torch.tensor(0.01, device="cuda") if kind == E4M3 else None
    residual = torch.randn(m, n, device="cuda").bfloat16() * 30

    def layer(a: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, rstd = torch.ops.loka.gemm_block_norm(a, b.t(), one, one, 256, 1e-5, torch.bfloat16, True, True)
        q = (F.hardswish(y.float()) * 16).clamp(-448, 448).to(E4M3)
        z, _ = torch.ops.loka.gemm_block_norm(a, b.t(), one, one, 256, 1e-5, torch.bfloat16, True, False, r)
        return q, y, rstd, F.hardswish(z) + r

    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):  # the cache's key does not know the configuration
        compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
        found = compiled(a, b, residual)
    product = a.double() @ b.double().t() * (1e-4 if kind == E4M3 else 1.0)
    expected, expected_rstd = ref.block_norm(product, 256, 1e-5)
    after, _ = ref.block_norm(product + residual.double(), 256, 1e-5)
    assert relative(found[0].float() / 16, F.hardswish(expected)) < 0.04
    assert relative(found[1], expected) < 4e-3
    assert relative(found[2], expected_rstd) < 2e-3
    assert relative(found[3], F.hardswish(after) + residual.double()) < 6e-3
    kept: list[torch.Tensor] = []
    graph = replayed(lambda: kept.extend(compiled(a, b, residual)))
    for again in range(2 * RUNS):
        if again < RUNS:
            now = compiled(a, b, residual)
        else:
            graph.replay()
            now = kept[-4:]
        assert all(torch.equal(t.view(torch.int8), f.view(torch.int8)) for t, f in zip(now, found, strict=True))
    if dynamic:
        fewer = compiled(a[:130], b, residual[:130])
        assert relative(fewer[1], expected[:130]) < 4e-3
