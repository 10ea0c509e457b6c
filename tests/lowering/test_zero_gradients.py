"""Zero gradients share one buffer, and are still gradients of their own."""

import pytest
import torch
from torch import fx, nn

from loka_compile.lowering.zero_gradients import ALIGNMENT_BYTES, share_zero_gradients

aten = torch.ops.aten


def norms(layers: int = 3, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [m for _ in range(layers) for m in (nn.Linear(24, 24), nn.LayerNorm(24), nn.SiLU())]
    return nn.Sequential(*parts).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_buffer_for_all_of_them(dtype):
    model = norms(dtype=dtype)
    compiled = torch.compile(model, backend="loka", options={"table": "off"})
    compiled(torch.randn(5, 24, dtype=dtype)).sum().backward()
    unread = [p.grad for name, p in model.named_parameters() if not (name.endswith("weight") and p.dim() == 2)]
    assert len(unread) == 9
    assert len({g.untyped_storage().data_ptr() for g in unread}) == 1
    assert all(g.data_ptr() % 16 == 0 and not g.any() for g in unread)
    weights = [m.weight.grad for m in model if isinstance(m, nn.Linear)]
    assert all(g.any() for g in weights)
    for index, grad in enumerate(unread):  # each its own memory: what is written into one shows in no other
        grad.fill_(index + 1)
    assert [g.unique().item() for g in unread] == list(range(1, 10))


def test_two_steps_with_weight_decay_and_accumulation_as_with_separate_zeros():
    def train(parameters):
        return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)

    trained = []
    for backend, options in (("loka", {"table": "off"}), ("aot_eager", {})):
        torch._dynamo.reset()
        model = norms()
        from loka_compile import apply_mods

        run = torch.compile(model if backend == "loka" else apply_mods(model), backend=backend, options=options or None)
        optimizer = train(model.parameters())
        torch.manual_seed(1)
        for _ in range(2):
            for _ in range(2):
                run(torch.randn(7, 24)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        trained.append([p.detach() for p in model.parameters()])
    for ours, want in zip(*trained, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-5)


def graph_of(*outputs) -> fx.Graph:
    """A graph that returns what the functions make of it."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        x.meta["val"] = torch.empty(4, 4)
    made = []
    for shape, value, dtype, read in outputs:
        node = graph.call_function(aten.full.default, (shape, value), {"dtype": dtype, "device": torch.device("cpu")})
        with mode:
            node.meta["val"] = torch.full(shape, value, dtype=dtype)
        made.append(node)
        if read:
            made.append(graph.call_function(aten.add.Tensor, (x, node)))
    graph.output(tuple(made))
    return graph


def test_only_zeros_that_nothing_reads():
    f32, bf16 = torch.float32, torch.bfloat16
    graph = graph_of(
        ([4], 0, f32, False), ([3, 5], 0, f32, False), ([4], 1, f32, False), ([4, 4], 0, f32, True),
        ([4], 0, bf16, False), ([0], 0, f32, False), ([], 0.0, f32, False),
    )  # fmt: skip
    assert share_zero_gradients(graph) == 3  # [4], [3, 5] and the scalar; one bfloat16 alone gains nothing
    graph.lint()
    module = fx.GraphModule(nn.Module(), graph)
    x = torch.randn(4, 4)
    first, second, ones, zeros, total, other, empty, scalar = module(x)
    assert [t.shape for t in (first, second, scalar)] == [(4,), (3, 5), ()]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert (second.data_ptr() - first.data_ptr()) % ALIGNMENT_BYTES == 0
    assert not first.any()
    assert not second.any()
    assert not scalar.any()
    assert not zeros.any()
    assert not other.any()
    assert ones.all()
    assert empty.numel() == 0
    assert other.dtype == bf16
    torch.testing.assert_close(total, x)


def test_one_alone_stays():
    graph = graph_of(([4], 0, torch.float32, False))
    assert share_zero_gradients(graph) == 0
