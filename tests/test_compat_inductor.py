"""What we rely on of AOTAutograd and Inductor beyond their documented API; see test_compat.py."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import fx, nn

from loka_compile.lowering.decompose import decompose

aten = torch.ops.aten


def test_joint_and_post_grad_hooks_see_what_we_stamped_on_every_gemm():
    """One real compile: hooks by ``config_patches`` (also in the backward, which is compiled later), decompositions."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.decomposition import select_decomp_table

    seen: dict[str, list[fx.Graph]] = {"joint": [], "post_grad": []}

    class Hook(CustomGraphPass):
        def __init__(self, name):
            self.name = name

        def __call__(self, graph):
            seen[self.name].append([(n.target, dict(n.meta)) for n in graph.nodes if n.op == "call_function"])
            if self.name == "post_grad":
                decompose(graph)  # what was kept whole until here has no lowering

        def uuid(self):
            return ("loka_compat", self.name)

    kept = (aten.hardswish.default, aten.hardswish_backward.default)
    table = {op: fn for op, fn in select_decomp_table().items() if op not in kept}
    assert len(table) == len(select_decomp_table()) - 2, "Inductor decomposes hardswish no more"

    def backend(gm, example_inputs):
        for node in gm.graph.nodes:
            if node.target is torch._C._nn.linear:
                node.meta["custom"] = {"loka.site": "probe#0"}
        patches = {"joint_custom_pre_pass": Hook("joint"), "post_grad_custom_pre_pass": Hook("post_grad")}
        return compile_fx(gm, example_inputs, config_patches=patches, decompositions=table)

    model = nn.Sequential(nn.Linear(12, 16), nn.Hardswish())
    x = torch.randn(4, 12, requires_grad=True)
    torch.compile(model, backend=backend)(x).sum().backward()

    (joint,) = seen["joint"]
    gemms = [meta for target, meta in joint if target in (aten.mm.default, aten.addmm.default)]
    assert [meta["custom"]["loka.site"] for meta in gemms] == ["probe#0"] * 3
    assert sum(meta["partitioner_tag"] == "is_backward" for meta in gemms) == 2
    targets = {target for target, _ in joint}
    assert {aten.hardswish.default, aten.hardswish_backward.default} <= targets
    forward, backward = seen["post_grad"]
    assert aten.hardswish.default in {target for target, _ in forward}
    assert aten.hardswish_backward.default in {target for target, _ in backward}


def test_stamps_are_copied_to_the_backward():
    from torch.fx.proxy import _COPY_META_FIELDS

    assert "custom" in _COPY_META_FIELDS


def test_compile_fx_takes_what_we_pass():
    from torch._inductor.compile_fx import compile_fx

    assert {"config_patches", "decompositions"} <= set(inspect.signature(compile_fx).parameters)


def test_a_pass_without_an_identity_is_legal():
    """``uuid() -> None`` keeps a graph out of the compile caches."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    assert CustomGraphPass.__abstractmethods__ == {"__call__", "uuid"}
    assert "None" in inspect.getdoc(CustomGraphPass.uuid)


@pytest.mark.parametrize(
    "name",
    ["joint_custom_pre_pass", "post_grad_custom_pre_pass", "triton.cudagraphs", "freezing",
     "max_autotune", "fx_graph_cache"],
)  # fmt: skip
def test_options_of_inductor(name):
    import torch._inductor.config as inductor_config

    assert name in inductor_config.get_config_copy()


def test_caches_can_be_switched_off_for_one_compile():
    """An alias of another module's option: it can be patched, though no list of options has it."""
    import torch._inductor.config as inductor_config

    with inductor_config.patch({"force_disable_caches": True}):
        assert inductor_config.force_disable_caches is True
    assert inductor_config.force_disable_caches is False


def test_modes():
    from torch._inductor import list_mode_options

    assert list_mode_options("max-autotune")["max_autotune"] is True
    assert list_mode_options("reduce-overhead") == {"triton.cudagraphs": True}
    with pytest.raises(RuntimeError, match="quick"):
        list_mode_options("quick")


def test_tables_of_inductor():
    from torch._inductor.decomposition import decompositions, register_decomposition
    from torch._inductor.lowering import lowerings, register_lowering

    assert aten.mm.default in lowerings
    assert torch.ops.loka_compat_probe not in lowerings
    assert aten.hardswish.default in decompositions
    assert "type_promotion_kind" in inspect.signature(register_lowering).parameters
    assert callable(register_decomposition([]))


def test_templates_of_inductor():
    """All that ``_compat/inductor_templates.py`` touches, as far as it can be asked without a GPU."""
    from torch._inductor.ir import FixedLayout
    from torch._inductor.kernel.mm_common import mm_grid, persistent_mm_grid
    from torch._inductor.lowering import empty_strided
    from torch._inductor.select_algorithm import TritonTemplate, realize_inputs
    from torch._inductor.sizevars import SizeVarAllocator
    from torch._inductor.virtualized import V

    assert isinstance(TritonTemplate.all_templates, dict)
    assert {"name", "grid", "source"} <= set(inspect.signature(TritonTemplate.__init__).parameters)
    choice = inspect.signature(TritonTemplate.maybe_append_choice).parameters
    assert list(choice)[:2] == ["self", "choices"]
    generate = set(inspect.signature(TritonTemplate.generate).parameters)
    assert {"input_nodes", "layout", "num_stages", "num_warps", "mutated_inputs"} <= generate
    assert list(inspect.signature(FixedLayout.__init__).parameters)[1:4] == ["device", "dtype", "size"]
    assert {"size", "stride", "dtype", "device"} <= set(inspect.signature(empty_strided).parameters)
    for name in ("optimization_hint", "statically_known_multiple_of", "statically_known_equals"):
        assert callable(getattr(SizeVarAllocator, name)), name
    assert "fallback" in inspect.signature(SizeVarAllocator.optimization_hint).parameters
    assert callable(realize_inputs)
    assert callable(mm_grid)
    assert callable(persistent_mm_grid)
    assert hasattr(type(V), "graph") or hasattr(V, "graph")


def test_what_our_operators_are_lowered_with():
    """An instruction in a pointwise kernel, and a tensor that the compiled graph holds."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.lowering import make_pointwise
    from torch._inductor.ops_handler import OpsHandler
    from torch._inductor.virtualized import V
    from torch.utils._python_dispatch import _disable_current_modes

    assert callable(make_pointwise)
    asm = inspect.signature(OpsHandler.inline_asm_elementwise).parameters
    assert {"asm", "constraints", "dtype", "is_pure", "pack"} <= set(asm)
    assert list(inspect.signature(GraphLowering.add_tensor_constant).parameters)[:2] == ["self", "data"]
    mode = torch._subclasses.FakeTensorMode()
    with mode, _disable_current_modes():
        assert type(torch.ones(())) is torch.Tensor
    with V.set_fake_mode(mode):
        assert V.fake_mode.allow_non_fake_inputs is False


def test_workers_of_inductor():
    """What ``_compat/kernel_cache.py`` asks of them: no arguments, no waiting."""
    from torch._inductor.async_compile import AsyncCompile

    assert not inspect.signature(AsyncCompile.use_process_pool).parameters
    assert not inspect.signature(AsyncCompile.process_pool).parameters
    assert list(inspect.signature(AsyncCompile.wait).parameters) == ["self", "scope"]
    with torch._inductor.config.patch(compile_threads=1):
        assert AsyncCompile.use_process_pool() is False


def test_the_loop_split_that_is_guarded():
    from torch._inductor.codegen.cpp import CppScheduling

    assert list(inspect.signature(CppScheduling.try_loop_split).parameters) == ["self", "nodes"]


def test_operators_outside_of_cuda_graphs_end_in_any_order():
    """Two probes at a time, the first of which ends first, left their operators in Inductor's configuration."""
    import torch._inductor.config as config

    from loka_compile._compat.tracing import outside_cuda_graphs

    before = list(config.custom_should_partition_ops)
    first, second = outside_cuda_graphs("a::x", "a::y"), outside_cuda_graphs("a::x", "b::z")
    first.__enter__()
    second.__enter__()
    assert config.custom_should_partition_ops == [*before, "a::x", "a::y", "b::z"]
    first.__exit__(None, None, None)
    assert config.custom_should_partition_ops == [*before, "a::x", "b::z"]
    second.__exit__(None, None, None)
    assert config.custom_should_partition_ops == before


def test_a_loop_that_does_not_split_evenly_is_left_whole():
    """Inductor's C++ loop split dropped what lies behind the last whole block: rows of 384 have one and a half."""
    from loka_compile._compat import cpp_loop_split

    def per_block(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        each = scale.unsqueeze(-1).expand(*scale.shape, 256).flatten(-2)
        return x * each[:, : x.shape[1]]

    cpp_loop_split.install()
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(per_block)
        for m, n in ((3, 384), (1, 384), (3, 512)):
            x, scale = torch.randn(m, n), torch.rand(m, 2)
            torch.testing.assert_close(compiled(x, scale), per_block(x, scale))


def test_where_a_barrier_is_put_in_front_of_what_is_read_back():
    """Torch does so itself from 2.14 on; before, ours stands in these methods (tests/lowering/test_quantize_codegen.py
    looks at the code that comes out)."""
    from torch._inductor.codegen.common import CSE
    from torch._inductor.codegen.triton import TritonKernel

    from loka_compile._compat import read_back

    read_back.install()
    load = TritonKernel.load
    read_back.install()
    assert TritonKernel.load is load, "installed twice"
    assert "invalidated_stores" in inspect.getsource(CSE.invalidate)
    original = inspect.unwrap(load)
    assert list(inspect.signature(original).parameters) == ["self", "name", "index"]
    assert "self.get_load_buffer(indexing)" in inspect.getsource(original)
    assert getattr(load, "_loka", False) != ("debug_barrier" in inspect.getsource(original))
    assert (torch.__version__ >= (2, 14)) == (read_back._BARRIER in original.__code__.co_consts)
