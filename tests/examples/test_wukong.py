"""Wukong: the paper's formulas against plain loops, shapes, gradients, state."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from examples.data.stream import Schema
from examples.models.registry import build
from examples.models.wukong import MLP, SIZES, FactorisationMachineBlock, TokenLinear, Wukong, WukongConfig, WukongLayer

TABLES, NUMERICS = (5, 11, 3), 7


def config(size: str = "tiny", **changes) -> WukongConfig:
    return WukongConfig.named(size, table_sizes=TABLES, numerics=NUMERICS, **changes)


def inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    categories = torch.stack([torch.randint(n, (batch,)) for n in TABLES], dim=1)
    return torch.randn(batch, NUMERICS), categories


@pytest.mark.parametrize("batch", [1, 199])
@pytest.mark.parametrize("mlp_norm", ["none", "inside"])
def test_one_logit_per_row_and_a_gradient_everywhere(batch, mlp_norm):
    torch.manual_seed(0)
    model = Wukong(config(mlp_norm=mlp_norm))
    logits = model(*inputs(batch))
    assert logits.shape == (batch,)
    logits.square().sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert missing == []


def test_rows_do_not_see_each_other():
    torch.manual_seed(0)
    model = Wukong(config()).double()
    numerics, categories = inputs(6)
    together = model(numerics.double(), categories)
    alone = torch.cat([model(numerics[i : i + 1].double(), categories[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(together, alone)


def test_factorisation_machine_block_against_all_pairwise_products():
    """X (X^T Y) is the matrix of all inner products of tokens, projected: (X X^T) Y."""
    torch.manual_seed(0)
    c = config()
    block = FactorisationMachineBlock(c, tokens=6).double()
    x = torch.randn(4, 6, c.dim, dtype=torch.float64)
    rows = []
    for row in x:
        pairs = torch.tensor([[float(a @ b) for b in row] for a in row], dtype=torch.float64)
        rows.append((pairs @ block.project.weight.T).flatten())
    expected = block.mlp(block.norm(torch.stack(rows))).reshape(4, c.fmb_tokens, c.dim)
    torch.testing.assert_close(block(x), expected)


def test_token_linear_mixes_tokens_and_leaves_features_apart():
    torch.manual_seed(0)
    layer = TokenLinear(5, 3)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(layer(x), torch.einsum("on,bnd->bod", layer.weight, x))


def test_layer_normalises_the_sum_of_new_tokens_and_residual():
    torch.manual_seed(0)
    c = config()
    projected = WukongLayer(c, tokens=6)
    straight = WukongLayer(c, tokens=c.fmb_tokens + c.lcb_tokens)
    assert isinstance(projected.residual, TokenLinear)
    assert isinstance(straight.residual, nn.Identity)
    for layer, tokens in ((projected, 6), (straight, 8)):
        x = torch.randn(3, tokens, c.dim)
        expected = layer.norm(torch.cat([layer.fmb(x), layer.lcb(x)], dim=1) + layer.residual(x))
        torch.testing.assert_close(layer(x), expected)
        torch.testing.assert_close(layer(x).mean(dim=2), torch.zeros(3, 8), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("norm", "kinds"),
    [
        ("inside", [nn.Linear, nn.LayerNorm, nn.SiLU, nn.Linear, nn.LayerNorm, nn.SiLU, nn.Linear]),
        ("none", [nn.Linear, nn.SiLU, nn.Linear, nn.SiLU, nn.Linear]),
    ],
)
def test_order_inside_the_mlp(norm, kinds):
    mlp = MLP(13, (32, 16), 5, norm)
    assert [type(step) for step in mlp] == kinds
    assert [(m.in_features, m.out_features) for m in mlp if isinstance(m, nn.Linear)] == [(13, 32), (32, 16), (16, 5)]


def test_categories_of_different_columns_have_rows_of_their_own():
    model = Wukong(config())
    assert model.embedding.num_embeddings == sum(TABLES)
    assert model.offsets.tolist() == [0, 5, 16]
    last = torch.tensor([[n - 1 for n in TABLES]])
    assert (last + model.offsets).tolist() == [[4, 15, 18]]


def test_state_round_trip_and_same_seed_same_model():
    torch.manual_seed(3)
    first = Wukong(config())
    torch.manual_seed(3)
    again = Wukong(config())
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    other = Wukong(config())
    other.load_state_dict(torch.load(file), strict=True)
    x = inputs(9)
    assert torch.equal(other(*x), first(*x))


@pytest.mark.parametrize("size", SIZES)
def test_named_sizes_have_the_widths_that_fp8_wants(size):
    with torch.device("meta"):
        model = Wukong(config(size))
    hidden = [m.out_features for m in model.layers.modules() if isinstance(m, nn.Linear)]
    if size != "tiny":
        assert all(width % 16 == 0 for width in model.config.mlp + model.config.head)
        assert max(hidden) >= 256
    assert model.config.layers == len(model.layers)


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match="no Wukong of size 'huge'; there are: tiny, demo"):
        config("huge")
    with pytest.raises(ValueError, match="mlp_norm is 'before'"):
        config(mlp_norm="before")
    with pytest.raises(ValueError, match="at least 1"):
        config(rank=0)


def test_a_split_model_is_the_whole_one_with_a_wide_head_too():
    torch.manual_seed(0)
    model = Wukong(config("tiny", wide=True))
    split = build("wukong", "tiny", Schema(NUMERICS, TABLES), wide=True)
    split.embed.table.weight.data.copy_(model.embedding.weight)
    split.dense_arch.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("embedding")})
    numerics, categories = inputs(5)
    torch.testing.assert_close(split(numerics, categories), model(numerics, categories))
