"""Each model family under backend="loka": one graph, what is rewritten and what is not, and the loss falls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.model_reports import report_of, table
from examples.data.stream import Schema
from examples.models.registry import MODELS, build
from examples.models.wukong import TokenLinear
from loka_compile import apply_mods, reports
from tests.backend.helpers_backend import Interpreted

SCHEMA = Schema(5, (40, 7, 100), 6)

#: Per model (one layer): the chains it has, by kind, and words of a refusal that must be there.
EXPECTED: dict[str, tuple[dict[str, int], str]] = {
    "wukong": ({"linear-norm-swish": 4}, "output is reshaped before the norm"),
    "interformer": ({"linear-norm-swish": 4, "linear-residual-norm": 1}, "is not a Swish of its own input"),
    "dhen": ({"linear-norm-swish": 4, "linear-residual-norm": 1}, "input comes from"),
    "dcnv2": ({}, "final prediction layer"),
    "dlrm": ({}, "final prediction layer"),
    "hstu": ({"linear-swishnorm": 4, "linear-norm": 3, "linear-swish": 1}, "does not follow a linear layer"),
}
#: With generated C++, which takes up to a minute: chains of every kind, and a model that has none.
GENERATED = ("dhen", "hstu", "dcnv2")


def example(model: nn.Module) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    numerics = torch.randn(48, SCHEMA.n_numerics, generator=generator)
    categories = torch.stack([torch.randint(n, (48,), generator=generator) for n in SCHEMA.table_sizes], dim=1)
    history = torch.randint(-1, 40, (48, SCHEMA.history_length), generator=generator)
    features = model.embed(categories, history if model.reads_history else None)
    return numerics, tuple(f.detach() for f in features), (numerics[:, 0] > 0.3).float()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in GENERATED)) for n in MODELS])
def test_trains_in_one_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name not in GENERATED:  # all of the backend but the generation of code
        Interpreted().install(monkeypatch)
    one_layer = {} if name in ("dlrm", "dcnv2") else {"layers": 1}
    model = build(name, "tiny", SCHEMA, seed=3, **one_layer)
    numerics, features, labels = example(model)
    dense = model.dense_arch
    rewritten = apply_mods(dense)(numerics, *features)
    original = dense(numerics, *features)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(dense, backend="loka", fullgraph=True, options={"table": "off"})
    optimizer = torch.optim.Adam(dense.parameters(), lr=0.02)
    losses = []
    for step in range(15):
        logits = compiled(numerics, *features)
        if step == 0:
            # What runs is the Mods' model, not the original.
            torch.testing.assert_close(logits, rewritten, rtol=1e-4, atol=1e-5)
            assert not torch.allclose(logits, original, atol=1e-3) or not EXPECTED[name][0]
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        assert all(p.grad is not None for p in dense.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.4 * losses[0], losses
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    report = reports()[-1]
    chains, refusal = EXPECTED[name]
    kinds = [kind for site, kind in report.chains.items() if "#" in site]
    assert {kind: kinds.count(kind) for kind in kinds} == chains
    assert any(refusal in r.reason for r in report.refusals), [r.reason for r in report.refusals]
    roles = {(g.gemm.site, str(g.gemm.role)) for g in report.gemms}
    # Layers over the tokens are products of a batch, and no sites.
    batched = {m.site for stage in report.stages if stage.name == "token_mixing" for m in stage.matched}
    assert batched == {n for n, m in dense.named_modules() if is_over_tokens(n, m) and m.out_features <= 8}  # tiny rows
    linears = [n for n, m in dense.named_modules() if isinstance(m, nn.Linear) and n not in batched]
    assert {(f"{n}#0", "forward") for n in linears} <= roles
    # The pool has one query in this size: the gradient of its weight is an outer product, which is no GEMM.
    assert {(f"{n}#0", "grad_weight") for n in linears if not n.endswith("pool.query")} <= roles
    assert report.unmapped == []


def is_over_tokens(name: str, module: nn.Module) -> bool:
    return isinstance(module, TokenLinear) or name.endswith("fmb.project")


def test_code_is_generated_for_chains_of_every_kind() -> None:
    kinds = {name: set(chains) for name, (chains, _) in EXPECTED.items()}
    assert set().union(*(kinds[name] for name in GENERATED)) == set().union(*kinds.values())
    assert any(not kinds[name] for name in GENERATED)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("history", [6, 0])
def test_the_mods_apply_in_eager_too(name: str, history: int) -> None:
    model = build(name, "tiny", Schema(5, (40, 7, 100), history), seed=4)
    numerics, features, _ = example(model)
    rewritten = apply_mods(model.dense_arch)
    out = rewritten(numerics, *features)
    assert out.shape == (48,)
    out.sum().backward()
    assert all(p.grad is not None for p in rewritten.parameters())
    assert dict(rewritten.named_parameters()).keys() == dict(model.dense_arch.named_parameters()).keys()


def test_a_norm_in_front_of_the_mlp_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # The public Wukong codes normalise what goes into the MLP, and nothing in it: BlockNorm has no place there.
    Interpreted().install(monkeypatch)
    model = build("wukong", "tiny", SCHEMA, mlp_norm="none", layers=1)
    numerics, features, _ = example(model)
    torch.compile(model.dense_arch, backend="loka", fullgraph=True, options={"table": "off"})(numerics, *features)
    report = reports()[-1]
    assert report.count("block_norm") == 0
    assert report.unused("norm") == 0
    assert set(report.chains.values()) == {"linear-swish"}
    before = apply_mods(model.dense_arch, mods=("block_norm",))(numerics, *features)
    torch.testing.assert_close(before, model.dense_arch(numerics, *features))


def test_report_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    Interpreted().install(monkeypatch)
    report = report_of("dlrm", "tiny")
    assert report["chains"] == {}
    assert report["biases_removed"] == 5  # three below, two above; the prediction keeps its own
    assert {g["role"] for g in report["gemms"] if g["site"] == "top.0#0"} == {"forward", "grad_input", "grad_weight"}
    assert report["refused"][0]["source"].startswith("examples/models/dlrm.py:")
    assert table([report]).splitlines()[2] == (
        "| dlrm | 0.0 M | 6 | none | 5 | the bias of the final prediction layer is kept (1) |"
    )
