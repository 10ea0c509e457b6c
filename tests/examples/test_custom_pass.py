"""The example of a user's own pass: what it rewrites, what it leaves, and that its function is the one that runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loka_compile
from examples import custom_pass
from loka_compile.errors import UnknownNameError
from loka_compile.passes.registry import snapshot

pytestmark = pytest.mark.filterwarnings("ignore::loka_compile.ModsWarning")


@pytest.fixture
def with_pass():
    # An inference graph shows all that the pass does, and compiles in half the time.
    with custom_pass.registered(), torch.no_grad():
        yield


def with_hard_swish(model):
    return nn.Sequential(*(nn.Hardswish() if isinstance(step, nn.ReLU6) else step for step in model))


def test_relu6_towers_join_the_mods(with_pass):
    torch.manual_seed(0)
    model, x = custom_pass.tower(64), torch.randn(7, 64)
    found = torch.compile(model, backend="loka", options={"table": "off"})(x)
    report = loka_compile.reports()[-1]
    assert report.count(custom_pass.NAME) == 2
    assert report.chains == {"0#0": "linear-norm-swish", "3#0": "linear-norm-swish"}
    # What runs is the tower with HardSwish in ReLU6's place, after loka's own Mods.
    torch.testing.assert_close(found, loka_compile.apply_mods(with_hard_swish(model))(x), rtol=1e-5, atol=1e-6)


def test_without_the_mods_it_is_the_only_change(with_pass):
    torch.manual_seed(0)
    model, x = custom_pass.tower(64), torch.randn(7, 64)
    found = torch.compile(model, backend="loka", options={"table": "off", "mods": "none"})(x)
    torch.testing.assert_close(found, with_hard_swish(model)(x), rtol=1e-5, atol=1e-6)


class Clamps(nn.Module):
    """ReLU6 in its spellings, and clamps that only look like it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.relu6(x), F.relu6(input=x), F.hardtanh(x, 0.0, 6.0), F.hardtanh(x), F.hardtanh(x, max_val=6.0)


def test_only_the_bounds_0_and_6_are_relu6(with_pass):
    x = torch.linspace(-8, 8, 33)
    found = torch.compile(Clamps(), backend="loka", options={"table": "off"})(x)
    swish = F.hardswish(x)
    expected = (swish, swish, swish, x.clamp(-1, 1), x.clamp(-1, 6))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    stage = next(s for s in loka_compile.reports()[-1].stages if s.name == custom_pass.NAME)
    assert len(stage.matched) == 3
    assert [r.reason for r in stage.refused] == [
        "clamps to (-1.0, 1.0), which is not ReLU6's 0 to 6",
        "clamps to (-1.0, 6.0), which is not ReLU6's 0 to 6",
    ]


def test_registered_ends_with_the_block_and_can_be_switched_off():
    with custom_pass.registered():
        assert snapshot(loka_compile.LokaConfig())[0].name == custom_pass.NAME
        off = loka_compile.LokaConfig(disable_passes=(custom_pass.NAME,))
        assert custom_pass.NAME not in [p.name for p in snapshot(off)]
    with pytest.raises(UnknownNameError, match=custom_pass.NAME):
        loka_compile.unregister_pass(custom_pass.NAME)
