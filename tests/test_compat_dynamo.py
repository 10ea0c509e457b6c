"""What we rely on of Dynamo beyond its documented API (see test_compat.py)."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._guards import TracingContext, tracing
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true

from loka_compile._compat.recompile import SavedCapture
from loka_compile._compat.shapes import size_hint


class Captured:
    """A backend that keeps what it is given."""

    def __call__(self, gm, example_inputs):
        self.gm, self.inputs, self.context = gm, example_inputs, TracingContext.try_get()
        return gm.forward


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16))
        self.register_buffer("projection", torch.randn(16, 8))

    def forward(self, x):
        return F.silu(self.tower(x)) @ self.projection


@pytest.fixture
def captured():
    seen = Captured()
    torch.compile(Tied(), backend=seen, dynamic=True, fullgraph=True)(torch.randn(6, 12))
    return seen


def placeholders(gm):
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def test_parameters_and_buffers_are_inputs_that_know_their_source(captured):
    named = {str(node._dynamo_source.name): node for node in placeholders(captured.gm)}
    weight = next(name for name in named if name.endswith("_modules['0']._parameters['weight']"))
    assert "._modules['tower']._modules['0']" in weight
    assert isinstance(named[weight].meta["example_value"], nn.Parameter)
    assert any(name.endswith("_buffers['projection']") for name in named)


def test_linear_is_written_as_a_private_function(captured):
    targets = {node.target for node in captured.gm.graph.nodes if node.op == "call_function"}
    assert torch._C._nn.linear in targets
    assert {F.layer_norm, F.silu} <= targets


def test_nodes_carry_values_and_the_user_s_code(captured):
    (norm,) = [node for node in captured.gm.graph.nodes if node.target is F.layer_norm]
    assert norm.meta["example_value"].shape[-1] == 16
    assert isinstance(norm.meta["example_value"].shape[-1], int)
    assert Path(__file__).name in norm.meta["stack_trace"]
    path, cls = next(reversed(norm.meta["nn_module_stack"].values()))
    assert "tower" in path
    assert cls is nn.LayerNorm or "LayerNorm" in str(cls)


def test_values_are_fake_and_share_a_mode(captured):
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensor

    values = [node.meta["example_value"] for node in placeholders(captured.gm)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    assert all(isinstance(value, FakeTensor) for value in tensors)
    assert {value.fake_mode for value in tensors} == {detect_fake_mode(tensors)}


def test_a_dynamic_size_has_a_hint_and_asking_adds_no_guard(captured):
    values = [node.meta["example_value"] for node in placeholders(captured.gm)]
    batch = next(v.shape[0] for v in values if isinstance(v, torch.Tensor) and isinstance(v.shape[0], torch.SymInt))
    assert isinstance(batch, torch.SymInt)
    guards = len(batch.node.shape_env.guards)
    assert size_hint(batch) == 6
    assert size_hint(batch * 2) == 12
    assert len(batch.node.shape_env.guards) == guards


def test_a_size_that_depends_on_data_has_no_hint():
    size = ShapeEnv().create_unbacked_symint()
    assert size_hint(size) is None
    assert not statically_known_true(size == 0)  # and raises nothing
    assert size_hint(7) == 7


def test_the_context_of_a_compile_can_be_entered_again(captured):
    assert captured.context is not None
    assert TracingContext.try_get() is None
    with tracing(captured.context):
        assert TracingContext.try_get() is captured.context
    with tracing(None):
        assert TracingContext.try_get() is None


def test_a_captured_graph_can_be_compiled_again():
    """In the backend call the context knows how each input's sizes were meant; a copy forgets its inputs' sources."""
    kept = []

    def backend(gm, example_inputs):
        kept.append(SavedCapture(gm, example_inputs))
        assert kept[0]._tensor_contexts
        kept.append([node._dynamo_source for node in placeholders(gm)])
        kept.append([node for node in placeholders(copy.deepcopy(gm)) if hasattr(node, "_dynamo_source")])
        return gm

    torch.compile(Tied(), backend=backend, dynamic=True, fullgraph=True)(torch.randn(6, 12))
    saved, sources, of_a_plain_copy = kept
    assert of_a_plain_copy == [], "copies keep their sources now: SavedCapture need not restore them"
    assert [node._dynamo_source for node in placeholders(saved.gm)] == sources
    gm, inputs, context = saved.compile(lambda gm, inputs: (gm, inputs, TracingContext.try_get()))
    assert gm is saved.gm
    assert inputs is saved.inputs
    assert context.fake_mode is saved._context.fake_mode
    assert all(context.tensor_to_context[tensor] is meant for tensor, meant in saved._tensor_contexts)
    for name in ("fw_metadata", "output_strides", "ddp_optimizer_ctx"):
        assert hasattr(context, name), name


def test_checkpointed_bodies_are_submodules_called_by_one_operator():
    from torch.utils.checkpoint import checkpoint

    seen, linear = Captured(), nn.Linear(4, 4)
    torch.compile(lambda x: checkpoint(linear, x, use_reentrant=False), backend=seen, fullgraph=True)(torch.randn(2, 4))
    (call,) = [n for n in seen.gm.graph.nodes if n.target is torch.ops.higher_order.tag_activation_checkpoint]
    body = getattr(seen.gm, call.args[0].target)
    assert isinstance(body, fx.GraphModule)
    given = [a for a in call.args[1:] if isinstance(a, fx.Node)]
    assert len(given) == len(placeholders(body))


def test_what_dynamo_raises():
    from torch._dynamo.exc import BackendCompilerFailed, RestartAnalysis

    class Refused(Exception):
        pass

    def backend(gm, example_inputs):
        raise Refused("no")

    with pytest.raises(BackendCompilerFailed) as caught:
        torch.compile(nn.Linear(2, 2), backend=backend)(torch.randn(1, 2))
    assert isinstance(caught.value.inner_exception, Refused)
    assert issubclass(RestartAnalysis, Exception)


def test_backends_register_by_name_once():
    from torch._dynamo.backends import registry

    def probe(gm, example_inputs):
        return gm.forward

    registry.register_backend(probe, name="loka_compat_probe")
    try:
        assert "loka_compat_probe" in registry.list_backends(exclude_tags=())
        with pytest.raises(AssertionError):
            registry.register_backend(probe, name="loka_compat_probe")
    finally:
        registry._COMPILER_FNS.pop("loka_compat_probe")
        registry._BACKENDS.pop("loka_compat_probe", None)
