"""Models of maintained packages under backend="loka": one graph, the expected chains, gradients for all.

Skipped where the packages are absent; the versions that go with torch 2.13 on a CPU:

    pip install fbgemm-gpu-cpu==1.8.0 tensordict torchmetrics==1.0.3 tqdm pyre-extensions torch-rechub
    pip install --no-deps torchrec==1.9.2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from loka_compile import Report, reports
from tests.backend.helpers_backend import Interpreted


@pytest.fixture(autouse=True)
def _no_codegen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Interpreted().install(monkeypatch)
    # By default Dynamo steps around torchrec's own code, one break for each of its modules.
    with torch._dynamo.config.patch(skip_torchrec=False):
        yield


def check(model: nn.Module, call: Callable[[Any], torch.Tensor], wanted: set[str] | None = None) -> Report:
    """Compile, compare with eager (no Mods: the same numbers), train one step with all Mods; returns that report."""
    expected = call(model)
    plain = torch.compile(model, backend="loka", fullgraph=True, options={"mods": "none", "table": "off"})
    torch.testing.assert_close(call(plain), expected, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    out = call(torch.compile(model, backend="loka", fullgraph=True, options={"table": "off"}))
    assert out.shape == expected.shape
    out.square().sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    missing = {n for n, p in model.named_parameters() if p.grad is None and p.requires_grad}
    assert missing <= (wanted or set()), missing
    return reports()[-1]


def test_torchrec_mlp_with_swish_layer_norm() -> None:
    mlp = pytest.importorskip("torchrec.modules.mlp", exc_type=ImportError)
    model = mlp.MLP(24, [32, 16], activation="swish_layernorm", device=torch.device("cpu"))
    report = check(model, lambda m: m(torch.ones(5, 24).cumsum(0)))
    assert list(report.chains.values()) == ["linear-swishnorm"] * 2


def jagged(batch: int) -> Any:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    lengths = torch.ones(2 * batch, dtype=torch.int64)
    return KeyedJaggedTensor(keys=["a", "b"], values=torch.arange(2 * batch) % 10, lengths=lengths)


@pytest.mark.parametrize("kind", ["DLRM", "DLRM_DCN"])
def test_torchrec_dlrm(kind: str) -> None:
    dlrm = pytest.importorskip("torchrec.models.dlrm", exc_type=ImportError)
    modules = pytest.importorskip("torchrec.modules.embedding_modules", exc_type=ImportError)
    configs = pytest.importorskip("torchrec.modules.embedding_configs", exc_type=ImportError)
    tables = [
        configs.EmbeddingBagConfig(name=f"t_{n}", embedding_dim=8, num_embeddings=10, feature_names=[n]) for n in "ab"
    ]
    bags = modules.EmbeddingBagCollection(tables=tables)
    extra = {} if kind == "DLRM" else {"dcn_num_layers": 2, "dcn_low_rank_dim": 4}
    model = getattr(dlrm, kind)(
        bags, dense_in_features=13, dense_arch_layer_sizes=[16, 8], over_arch_layer_sizes=[16, 1], **extra
    )
    numerics = torch.randn(6, 13)
    report = check(model, lambda m: m(numerics, jagged(6)))
    assert report.count("block_norm") == 0
    sites = {g.gemm.site for g in report.gemms}
    assert any("dense_arch" in s for s in sites)
    assert any("over_arch" in s for s in sites)


def test_torch_rechub_dcnv2() -> None:
    ranking = pytest.importorskip("torch_rechub.models.ranking", exc_type=ImportError)
    features = pytest.importorskip("torch_rechub.basic.features", exc_type=ImportError)
    columns = [features.SparseFeature(n, vocab_size=10, embed_dim=4) for n in ("a", "b")]
    columns.append(features.DenseFeature("x"))
    model = ranking.DCNv2(
        features=columns, n_cross_layers=2, mlp_params={"dims": [16, 8]}, model_structure="parallel",
        use_low_rank_mixture=False,
    ).eval()  # fmt: skip
    x = {"a": torch.arange(6) % 10, "b": torch.arange(6) % 7, "x": torch.randn(6)}
    report = check(model, lambda m: m(x))
    # BatchNorm is not a norm of features: nothing to rewrite.
    assert report.count("block_norm") == 0


def test_torch_rechub_hstu() -> None:
    generative = pytest.importorskip("torch_rechub.models.generative", exc_type=ImportError)
    model = generative.HSTUModel(vocab_size=20, d_model=16, n_heads=2, n_layers=1, max_seq_len=6, dropout=0.0).eval()
    tokens = torch.arange(12).reshape(2, 6) % 20
    report = check(model, lambda m: m(tokens))
    # Its norms come before their linears.
    assert report.count("block_norm") == 0
