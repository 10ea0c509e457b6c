"""The model families: published shapes, the papers' equations against plain loops, one graph under torch.compile."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from examples.data.stream import Schema
from examples.models.attention import AttentionPool, SelfAttention
from examples.models.dcnv2 import CrossLayer, DCNv2Config
from examples.models.dhen import DHENConfig, DHENLayer
from examples.models.dlrm import DotInteraction
from examples.models.embedding import EmbeddingTables
from examples.models.hstu import HSTUConfig, HSTULayer, SwishLayerNorm
from examples.models.interformer import InterFormerConfig, PersonalisedFFN, SequenceSummary
from examples.models.registry import MODELS, build
from examples.models.wukong import Wukong

CRITEO = Schema(13, (100,) * 26, 128)
SMALL = Schema(5, (40, 7, 100), 6)
BATCH = 9


def inputs(schema: Schema, batch: int = BATCH, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    numerics = torch.randn(batch, schema.n_numerics, generator=generator)
    categories = torch.stack([torch.randint(n, (batch,), generator=generator) for n in schema.table_sizes], dim=1)
    if not schema.history_length:
        return numerics, categories, None
    history = torch.randint(schema.table_sizes[0], (batch, schema.history_length), generator=generator)
    history[0] = -1
    history[1, :4] = -1
    return numerics, categories, history


def linears(module: nn.Module) -> set[tuple[int, int]]:
    return {(m.in_features, m.out_features) for m in module.modules() if isinstance(m, nn.Linear)}


def check_gradients(model: nn.Module) -> None:
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.to_dense().abs().sum() > 0]
    # A key's bias shifts all scores of a query alike, which a softmax does not feel.
    assert not [n for n in without if "qkv" not in n and "key_value" not in n], without


@pytest.mark.parametrize("name", MODELS)
def test_trains_in_one_graph(name: str) -> None:
    model = build(name, "tiny", SMALL, seed=1)
    numerics, categories, past = inputs(SMALL)
    logits = model(numerics, categories, past)
    assert logits.shape == (BATCH,)
    features = model.embed(categories, past if model.reads_history else None)
    compiled = torch.compile(model.dense_arch, backend="aot_eager", fullgraph=True)(numerics, *features)
    torch.testing.assert_close(compiled, logits)
    compiled.square().sum().backward()
    check_gradients(model)


@pytest.mark.parametrize("name", [n for n, (_, _, history) in MODELS.items() if history])
def test_works_without_a_history(name: str) -> None:
    schema = dataclasses.replace(SMALL, history_length=0)
    model = build(name, "tiny", schema, seed=1)
    logits = model(*inputs(schema))
    assert logits.shape == (BATCH,)
    logits.square().sum().backward()
    check_gradients(model)


@pytest.mark.parametrize("name", MODELS)
def test_loss_falls(name: str) -> None:
    model = build(name, "tiny", SMALL, seed=2)
    numerics, categories, past = inputs(SMALL, 64, seed=3)
    labels = (numerics[:, 0] + (categories[:, 1] % 2) > 0.5).float()
    optimizer = torch.optim.Adam(model.dense_arch.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        loss = nn.functional.binary_cross_entropy_with_logits(model(numerics, categories, past), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses


@pytest.mark.parametrize("name", MODELS)
def test_initial_weights_depend_on_the_seed_alone(name: str) -> None:
    torch.manual_seed(5)
    first = build(name, "tiny", SMALL, seed=3).state_dict()
    torch.rand(7)
    before = torch.get_rng_state()
    second = build(name, "tiny", SMALL, seed=3).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[k], second[k]) for k in first)
    other = build(name, "tiny", SMALL, seed=4).state_dict()
    assert not torch.equal(first["embed.table.weight"], other["embed.table.weight"])


@pytest.mark.parametrize(
    ("name", "size", "shapes"),
    [
        ("dlrm", "h200", {(13, 512), (512, 256), (256, 128), (479, 1024), (1024, 1024), (1024, 512), (256, 1)}),
        ("dcnv2", "h200", {(13, 512), (3456, 512), (512, 3456), (3456, 1024), (256, 1)}),
        ("dcnv2", "paper", {(27 * 160, 512), (512, 27 * 160), (27 * 160, 4096), (4096, 4096)}),
        ("hstu", "paper", {(512, 2048), (1536, 512), (512, 256), (256, 512), (512, 512)}),
        ("interformer", "h200", {(9216, 1024), (1024, 8192), (1024, 4096), (128, 384), (128, 128)}),
        ("interformer", "paper", {(18432, 1024), (1024, 16384), (2048, 16384), (256, 768), (256, 256)}),
        ("dhen", "h200", {(10240 + 2016, 2048), (2048, 2048), (10240, 512)}),
        ("wukong", "h200", {(1536, 2048), (2048, 2048), (2048, 4096)}),
    ],
)
def test_published_shapes(name: str, size: str, shapes: set[tuple[int, int]]) -> None:
    with torch.device("meta"):
        model = build(name, size, CRITEO, device="meta")
    assert shapes <= linears(model.dense_arch)


def test_split_wukong_is_wukong() -> None:
    split = build("wukong", "tiny", SMALL, seed=6)
    with torch.random.fork_rng():
        torch.manual_seed(6)
        whole = Wukong(split.config)
    numerics, categories, _ = inputs(SMALL)
    assert torch.equal(split(numerics, categories), whole(numerics, categories))
    split(numerics, categories).sum().backward()
    assert split.embed.table.weight.grad.is_sparse


def test_dot_interaction_takes_each_pair_once() -> None:
    tokens = torch.randn(4, 5, 3)
    expected = [[float(t[i] @ t[j]) for i in range(5) for j in range(i)] for t in tokens]
    torch.testing.assert_close(DotInteraction(5)(tokens), torch.tensor(expected))


def test_cross_layers() -> None:
    x0, x = torch.randn(3, 7, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)
    full = CrossLayer(7, 0).double()
    weight, bias = full.expand.weight.detach().numpy(), full.expand.bias.detach().numpy()
    expected = x0.numpy() * (x.numpy() @ weight.T + bias) + x.numpy()
    np.testing.assert_allclose(full(x0, x).detach().numpy(), expected, rtol=1e-12)
    low = CrossLayer(7, 2).double()
    # A low-rank layer is a full one whose matrix is the product of the two.
    full.expand.weight.data = low.expand.weight.data @ low.compress.weight.data
    full.expand.bias.data = low.expand.bias.data
    torch.testing.assert_close(low(x0, x), full(x0, x))


def test_dcnv2_structures_differ_in_what_the_prediction_reads() -> None:
    stacked = build("dcnv2", "tiny", SMALL)
    parallel = build("dcnv2", "tiny", SMALL, structure="parallel")
    assert stacked.dense_arch.predict.in_features == 32
    assert parallel.dense_arch.predict.in_features == 32 + 4 * 8


@pytest.mark.parametrize("name", ["wukong", "dhen"])
def test_a_wide_head_reads_the_numerics_as_they_are(name: str) -> None:
    model = build(name, "tiny", SMALL, wide=True)
    numerics, categories, _ = inputs(SMALL)
    seen: list[torch.Tensor] = []
    model.dense_arch.head[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(1e5 * numerics, categories)
    narrow = build(name, "tiny", SMALL).dense_arch.head[0].in_features
    assert seen[0].shape == (BATCH, narrow + SMALL.n_numerics)
    assert torch.equal(seen[0][:, narrow:], 1e5 * numerics)


def test_dhen_layer_is_a_normalised_sum() -> None:
    config = DHENConfig.named(
        "tiny", table_sizes=(9,) * 4, numerics=3, ensemble="sum",
        modules=(("linear", 6), ("attention", 6), ("dcn", 6), ("fm_mlp", 6)),
    )  # fmt: skip
    layer = DHENLayer(config, 6)
    x = torch.randn(2, 6, 8)
    total = sum(expert(x) for expert in layer.experts) + x
    centred = total - total.mean(-1, keepdim=True)
    torch.testing.assert_close(layer(x), centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    concat = DHENLayer(dataclasses.replace(config, ensemble="concat"), 5)
    assert concat(torch.randn(2, 5, 8)).shape == (2, 24, 8)


def test_norm_switch() -> None:
    for name in ("wukong", "dhen", "interformer"):
        inside = build(name, "tiny", SMALL)
        without = build(name, "tiny", SMALL, mlp_norm="none")
        count = [sum(isinstance(m, nn.LayerNorm) for m in model.modules()) for model in (inside, without)]
        assert count[0] > count[1] > 0  # what is left are the norms of tokens, outside the MLPs


def test_self_attention_against_a_loop() -> None:
    attention = SelfAttention(8, 2).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    mask = torch.tensor([[True, False, True, True, True]])
    q, k, v = (t.detach().numpy()[0] for t in attention.qkv(x).chunk(3, dim=-1))
    joined = np.zeros((5, 8))
    for head in range(2):
        part = slice(4 * head, 4 * head + 4)
        for i in range(5):
            scores = np.array([q[i, part] @ k[j, part] / 2.0 for j in range(5)])
            scores[~mask[0].numpy()] = -np.inf
            weight = np.exp(scores - scores.max())
            joined[i, part] = weight / weight.sum() @ v[:, part]
    expected = joined @ attention.out.weight.detach().numpy().T + attention.out.bias.detach().numpy()
    np.testing.assert_allclose(attention(x, mask)[0].detach().numpy(), expected, rtol=1e-9)


def test_rotary_positions_are_relative() -> None:
    attention, longer = SelfAttention(8, 2, length=4), SelfAttention(8, 2, length=7)
    longer.load_state_dict(attention.state_dict())
    x = torch.randn(1, 4, 8)
    # Shift the tokens by three positions behind hidden ones: what they see of each other stays.
    shifted = torch.cat([torch.randn(1, 3, 8), x], dim=1)
    mask = torch.tensor([[False] * 3 + [True] * 4])
    torch.testing.assert_close(longer(shifted, mask)[:, 3:], attention(x), rtol=1e-4, atol=1e-5)
    swapped = attention(x.flip(1)).flip(1)
    assert not torch.allclose(swapped, attention(x), atol=1e-3)


def test_interformer_summary_gates_class_pooled_and_recent_tokens() -> None:
    config = InterFormerConfig.named("tiny", table_sizes=(9,) * 4, numerics=3, history_length=5)
    summary = SequenceSummary(config)
    s = torch.randn(2, 7, 8)
    mask = torch.ones(2, 7, dtype=torch.bool)
    parts = torch.cat([s[:, :2], summary.pool(s, mask), s[:, -1:]], dim=1)
    weight, bias = summary.gate.linear.weight, summary.gate.linear.bias
    torch.testing.assert_close(summary(s, mask), parts / (1 + torch.exp(-(parts @ weight.T + bias))))


@pytest.mark.parametrize("rank", [0, 3])
def test_personalised_ffn_applies_each_examples_own_matrix(rank: int) -> None:
    config = InterFormerConfig.named("tiny", table_sizes=(9,) * 4, numerics=3, history_length=5, rank=rank)
    ffn = PersonalisedFFN(config).double()
    x_sum, s = torch.randn(3, 2, 8, dtype=torch.float64), torch.randn(3, 5, 8, dtype=torch.float64)
    out = ffn(x_sum, s)
    for i in range(3):
        weight = ffn.weight(x_sum[i].flatten()) * 8**-0.5
        matrix = weight.view(8, 8) if rank == 0 else weight[: 8 * rank].view(8, rank) @ weight[8 * rank :].view(rank, 8)
        torch.testing.assert_close(out[i], s[i] + s[i] @ matrix)


def test_pool_queries_are_learnt_not_read() -> None:
    pool = AttentionPool(8, 2, 3)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(pool(x.flip(1)), pool(x), rtol=1e-4, atol=1e-5)
    assert pool(x).shape == (2, 3, 8)


def test_hstu_layer_against_a_loop() -> None:
    config = HSTUConfig.named("tiny", table_sizes=(9, 9), numerics=3, history_length=2)
    layer = HSTULayer(config).double()
    t = config.sequence_length
    x = torch.randn(1, t, 16, dtype=torch.float64)
    hidden = torch.ones(t, t).triu(1).bool()
    u, v, q, k = (
        p.detach().numpy()[0] for p in nn.functional.silu(layer.uvqk(layer.norm(x))).split([16, 16, 8, 8], -1)
    )
    attended = np.zeros((t, 16))
    for head in range(2):
        for i in range(t):
            for j in range(i + 1):
                score = q[i, 4 * head : 4 * head + 4] @ k[j, 4 * head : 4 * head + 4]
                weight = score / (1 + np.exp(-score)) / t
                attended[i, 8 * head : 8 * head + 8] += weight * v[j, 8 * head : 8 * head + 8]
    normed = (attended - attended.mean(1, keepdims=True)) / np.sqrt(attended.var(1, keepdims=True) + 1e-5)
    joined = np.concatenate([u, attended, normed * u], axis=1)
    expected = x[0].numpy() + joined @ layer.out.weight.detach().numpy().T + layer.out.bias.detach().numpy()
    np.testing.assert_allclose(layer(x, hidden)[0].detach().numpy(), expected, rtol=1e-9, atol=1e-12)


def test_swish_layer_norm() -> None:
    x = torch.randn(4, 6)
    normed = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(SwishLayerNorm(6)(x), x / (1 + torch.exp(-normed)))


@pytest.mark.parametrize("name", [n for n, (_, _, history) in MODELS.items() if history])
def test_what_a_history_hides_does_not_matter_and_the_rest_does(name: str) -> None:
    model = build(name, "tiny", SMALL).eval()
    numerics, categories, history = inputs(SMALL)
    tokens, past, mask = model.embed(categories, history)
    logits = model.dense_arch(numerics, tokens, past, mask)
    noise = torch.randn_like(past) * ~mask.unsqueeze(-1)
    torch.testing.assert_close(model.dense_arch(numerics, tokens, past + noise, mask), logits)
    noise = torch.randn_like(past) * mask.unsqueeze(-1)
    changed = (model.dense_arch(numerics, tokens, past + noise, mask) - logits).abs() > 1e-6
    assert not changed[0]  # no history at all
    assert changed[1:].all()


def test_embedding_rows_of_columns_do_not_overlap() -> None:
    tables = EmbeddingTables((3, 5, 2), 4)
    (tokens,) = tables(torch.tensor([[2, 0, 1]]))
    assert torch.equal(tokens[0], tables.table.weight[[2, 3, 9]])
    tokens, past, mask = tables(torch.tensor([[2, 0, 1]]), torch.tensor([[-1, 1]]))
    assert torch.equal(past[0, 1], tables.table.weight[1])
    assert mask.tolist() == [[False, True]]


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="no model 'wukon'; there are: wukong, interformer"):
        build("wukon", "tiny", SMALL)
    for name in MODELS:
        with pytest.raises(ValueError, match="huge"):
            build(name, "huge", SMALL)
    with pytest.raises(ValueError, match='legal: "stacked", "parallel"'):
        DCNv2Config.named("tiny", table_sizes=(3,), numerics=1, structure="both")
    with pytest.raises(ValueError, match="no DHEN module 'cnn'"):
        DHENConfig.named("tiny", table_sizes=(3,), numerics=1, modules=(("cnn", 2),))
    with pytest.raises(ValueError, match="equally many tokens"):
        DHENConfig.named("tiny", table_sizes=(3,), numerics=1, ensemble="sum")
    with pytest.raises(ValueError, match="3 heads do not divide width 8"):
        SelfAttention(8, 3)
