"""The loka:: operators against fp64 references written here, on awkward widths."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka_compile.nn import BlockNorm, HardSwish
from loka_compile.ops import DECOMPOSITIONS, anchor, block_norm, block_norm_ref


def reference(x: torch.Tensor, block: int, eps: float) -> torch.Tensor:
    """BlockNorm in fp64, block by block."""
    parts = [p / (p.square().mean(-1, keepdim=True) + eps).sqrt() for p in x.double().split(block, -1)]
    return torch.cat(parts, -1)


@pytest.mark.parametrize(
    ("n", "block"), [(256, 256), (13, 256), (384, 256), (3456, 256), (512, 128), (300, 32), (1, 256)]
)
@pytest.mark.parametrize("rows", [(1,), (199,), (0,), (2, 3)])
def test_block_norm_and_its_gradient(n, block, rows):
    torch.manual_seed(n)
    x = (torch.randn(*rows, n) * torch.rand(*rows, 1) * 100).requires_grad_()
    grad = torch.randn(*rows, n)
    y = block_norm(x, block, 1e-5)
    y.backward(grad)
    x64 = x.detach().double().requires_grad_()
    want = reference(x64, block, 1e-5)
    want.backward(grad.double())
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-4, atol=1e-5)
    assert block_norm_ref(x.detach(), block, 1e-5)[1].shape == (*rows, -(-n // block))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_in_and_out(dtype):
    x = torch.randn(7, 384).to(dtype).requires_grad_()
    y = block_norm(x, 256)
    y.float().sum().backward()
    assert y.dtype == dtype == x.grad.dtype
    eps = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
    # One rounding of the result, relative to itself.
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), reference(x.detach(), 256, eps), rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30])
def test_zero_tiny_and_huge_inputs_stay_finite(value):
    x = torch.full((2, 256), value, requires_grad=True)
    y = block_norm(x, 256, 1e-5)
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(y).all() or value == 1e30  # 1e30 squared leaves fp32's range
    assert y.abs().max() <= 16


def test_gradcheck():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: block_norm(t, 2, 1e-3), (x,))


def test_the_output_never_exceeds_the_root_of_the_block():
    x = torch.zeros(1, 256)
    x[0, 3] = 5.0
    assert block_norm(x, 256, 0.0).max().item() == pytest.approx(16.0)


@pytest.mark.parametrize("op", DECOMPOSITIONS, ids=str)
def test_opcheck(op):
    x, y = torch.randn(4, 300), torch.randn(4, 300)
    rstd = torch.rand(4, 2)
    args = (x.requires_grad_(), 256, 1e-5) if "backward" not in str(op) else (x, y, rstd, 256)
    if "backward" in str(op):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
    else:
        torch.library.opcheck(op, args)


@pytest.mark.parametrize("compiled", [False, True])
def test_anchor_gives_zero_gradients_and_changes_nothing_else(compiled):
    x, a = torch.randn(3, 4, requires_grad=True), torch.randn(5, requires_grad=True)
    frozen = torch.randn(2)

    def fn(x, a, frozen):
        return anchor(x * 2, [a, frozen])

    y = (torch.compile(fn, backend="aot_eager", fullgraph=True) if compiled else fn)(x, a, frozen)
    y.sum().backward()
    assert torch.equal(y, x * 2)
    assert torch.equal(x.grad, torch.full((3, 4), 2.0))
    assert a.grad is not None
    assert not a.grad.any()
    assert frozen.grad is None


def test_modules_export_without_our_operators():
    model = nn.Sequential(nn.Linear(8, 384, bias=False), BlockNorm(), HardSwish())
    x = torch.randn(5, 8)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    assert "loka" not in program.graph_module.code
    torch.testing.assert_close(program.module()(torch.randn(3, 8).fill_(0.5)), model(torch.full((3, 8), 0.5)))


def test_plain_inductor_takes_block_norm_apart():
    from torch._inductor.utils import run_and_get_code

    model = nn.Sequential(nn.Linear(8, 256, bias=False), BlockNorm(), HardSwish())
    x = torch.randn(5, 8)
    torch._dynamo.reset()
    y, code = run_and_get_code(torch.compile(model, backend="inductor"), x)
    torch.testing.assert_close(y, model(x))
    assert "loka.block_norm" not in "".join(code)
    assert repr(model[1]) == "BlockNorm(block_size=256, eps=1e-05)"
