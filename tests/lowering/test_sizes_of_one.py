"""One row, one column, a short contraction: the strides that a kernel gets to see are those that the shape implies.

torch and the libraries check the numbers, and a dimension of size 1 counts as contiguous with any of them. Inductor's
passes over the joint graph may take away what brings them in order, so it is the graph that these leave which counts.
"""

import pytest
import torch
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from loka_compile.gemm import Gemm, Role
from loka_compile.lowering.providers import get_provider
from loka_compile.lowering.quantize import packed
from tests.lowering.contract import CASES, IDS, stored

#: M, K, N of the linear layer.
LAYERS = [(1, 13, 48), (16, 64, 1), (48, 1, 16)]
#: Operators that exist where the library does; and what hands over nothing in FP8, or is plain operators.
ABSENT = {("fbgemm", "rowwise"), ("fbgemm", "rowwise_fast"), ("fbgemm", "blockwise_128x128")}
WITHOUT = {"high_precision", "emulated"}
KERNELS = [
    i for i, (name, recipe, _) in enumerate(CASES)
    if name not in WITHOUT and (name, recipe.name) not in ABSENT and not recipe.fast_accum
]  # fmt: skip


class Operands(TorchDispatchMode):
    """Collects what kernels get in FP8."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "loka" or "scaled_mm" in str(func):
            self.seen += [x for x in args if isinstance(x, torch.Tensor) and x.dim() == 2 and x.is_floating_point()
                          and x.dtype.itemsize == 1]  # fmt: skip
        return func(*args, **(kwargs or {}))


def after_the_passes(function, *tensors):
    """The graph that Inductor would generate code for, as a callable."""
    found = []

    def keep(gm, inputs, **_):
        found.append(gm)
        return gm.forward

    gm = make_fx(lambda *t: (function(*t),), tracing_mode="fake")(*tensors)
    with torch.no_grad():
        compile_fx(gm, list(tensors), inner_compile=keep)
    return found[0]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """torch checks strides for operands on a GPU alone."""
    monkeypatch.setattr("torch._meta_registrations.device_hint", lambda _: "cuda")


@pytest.mark.parametrize("case", KERNELS, ids=[IDS[i] for i in KERNELS])
def test_kernels_see_the_strides_of_the_shape(case, as_on_a_gpu):
    name, recipe, role = CASES[case]
    provider = get_provider(name)
    checked = 0
    for batch, inputs, outputs in LAYERS:
        m, n, k = {
            Role.FORWARD: (batch, outputs, inputs), Role.GRAD_INPUT: (batch, inputs, outputs),
            Role.GRAD_WEIGHT: (outputs, inputs, batch),
        }[role]  # fmt: skip
        if provider.refuses_shape(provider.padded(Gemm("s#0", role, m, n, k), recipe), recipe):
            continue
        a_t, b_t = stored(role)
        tensors = [
            torch.randn((k, rows) if turned else (rows, k), dtype=torch.bfloat16)
            for rows, turned in ((m, a_t), (n, b_t))
        ]
        graph = after_the_passes(lambda a, b: provider.gemm(a, a_t, b, b_t, recipe, torch.bfloat16), *tensors)  # noqa: B023
        with FakeTensorMode() as mode, Operands() as operands:
            graph(*(mode.from_tensor(t) for t in tensors))
        assert len(operands.seen) >= 2
        for x in operands.seen:
            rows, columns = x.shape
            assert x.stride() in ((columns, 1), (1, rows)), (batch, inputs, outputs)
            assert max(x.stride()) > 1, (batch, inputs, outputs)  # by which torch tells row-major from column-major
        checked += 1
    assert checked or (recipe.name == "blockwise" and role is Role.GRAD_WEIGHT)


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 1), (3, 4), (0, 4), (4, 0)])
@pytest.mark.parametrize("turned", [False, True])
def test_packed(shape, turned):
    x = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    x = x.t() if turned else x
    y = packed(x)
    assert torch.equal(x, y)
    if x.numel():
        assert y.stride() == (x.shape[1], 1)
