"""What we rely on of torch beyond its documented API. A torch that changes it fails here, by name, and not in a model.

The rule: private names live in ``loka_compile/_compat``. ``OUTSIDE`` lists those that do not, each with the reason, and
every one of them has a test below.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from loka_compile._compat.autocast import enter_autocast, exit_autocast, has_autocast_rule
from loka_compile._compat.tracing import in_backward
from loka_compile._compat.versions import check_torch
from loka_compile.errors import LokaError, UnsupportedTorchError
from loka_compile.lowering.decompose import decompose

PACKAGE = Path(__file__).parents[1] / "loka_compile"
aten = torch.ops.aten

#: Private by name, used outside of _compat. Prefixes count.
OUTSIDE = {
    # Documented for writers of backends and passes.
    "torch._inductor.config": "Inductor's options",
    "torch._inductor.custom_graph_pass.CustomGraphPass": "the hook for passes",
    "torch._inductor.list_mode_options": "what a mode means",
    "torch._inductor.compile_fx.compile_fx": "Inductor as a function",
    "torch.fx.experimental.proxy_tensor.make_fx": "tracing to aten",
    "torch.fx.experimental.symbolic_shapes.statically_known_true": "questions that add no guard",
    "torch.utils._pytree": "nested containers",
    # Types of values that the public API hands out.
    "torch._ops.OpOverload": "type of torch.ops.x.y.z",
    "torch._ops.OpOverloadPacket": "type of torch.ops.x.y",
    "torch._subclasses.fake_tensor.FakeTensor": "type of a graph's values",
    "torch._C._nn.linear": "how Dynamo writes nn.Linear",
    # Behaviour.
    "torch._C._DisableAutocast": "tracing under autocast",
    "torch._C._dispatch_has_computed_kernel_for_dispatch_key": "whether an operator has a kernel",
    "torch._guards.detect_fake_mode": "the mode of a graph's values",
    "torch._inductor.decomposition.select_decomp_table": "Inductor's decompositions",
    "torch._inductor.lowering.lowerings": "whether an operator has a lowering",
    "torch._logging.trace_structured": "artifacts for tlparse",
}


# ------------------------------------------------------------------------------------------------ where they stand
def private_names(path: Path) -> set[str]:
    """Dotted names below ``torch`` with a private or experimental part, as imported or as attributes."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    found = {name for name in found if re.fullmatch(r"[\w.]+", name)}

    def is_private(name: str) -> bool:
        parts = name.split(".")
        return parts[0] == "torch" and not name.startswith("torch.ops.") and any(
            part == "experimental" or (part.startswith("_") and not part.startswith("__")) for part in parts
        )  # fmt: skip

    return {name for name in found if is_private(name)}


def listed(name: str) -> bool:
    # "torch._ops" is the inner part of the expression "torch._ops.OpOverload".
    return any(name == entry or name.startswith(f"{entry}.") or entry.startswith(f"{name}.") for entry in OUTSIDE)


def test_private_names_are_in_compat_or_listed_here():
    stray = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name != "_compat":
            names = {name for name in private_names(path) if not listed(name)}
            if names:
                stray[str(path.relative_to(PACKAGE))] = names
    assert stray == {}, "move these into loka_compile/_compat"


# ------------------------------------------------------------------------------------------------ versions
@pytest.mark.parametrize(
    "version", ["2.11.0", "2.11.0+cu130", "2.12.1", "2.13.0+cpu", "2.14.1", "2.14.0a0+git1234", None]
)
def test_supported(version):
    check_torch(version)


@pytest.mark.parametrize("version", ["2.10.0", "1.13.1", "2.15.0", "2.15.0.dev20270101", "3.0.0", "nightly"])
def test_unsupported(version):
    with pytest.raises(UnsupportedTorchError, match=r"supports torch >= 2\.11, < 2\.15") as caught:
        check_torch(version)
    assert version in str(caught.value)
    assert isinstance(caught.value, LokaError)


def test_the_range_is_that_of_the_package():
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    assert '"torch>=2.11,<2.15"' in text


# ------------------------------------------------------------------------------------------------ AOTAutograd, Inductor
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


# ------------------------------------------------------------------------------------------------ the rest
def test_autocast_can_be_switched_off_whole():
    a = torch.randn(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (a @ a).dtype is torch.bfloat16
        with torch._C._DisableAutocast():
            assert (a @ a).dtype is torch.float32


def test_which_operators_autocast_has_a_rule_for():
    """On CUDA, known without a GPU, it runs norms in fp32; on the CPU it leaves them alone."""
    import loka_compile.ops  # noqa: F401  (defines torch.ops.loka)

    norms = ("aten::layer_norm", "aten::rms_norm", "loka::block_norm")
    assert all(has_autocast_rule(norm, "cuda") for norm in norms)
    assert not any(has_autocast_rule(norm, device) for norm in norms for device in ("cpu", "meta"))
    assert not has_autocast_rule("aten::add.Tensor", "cuda")


def test_autocast_stands_in_dynamos_graph_as_a_pair():
    def fn(x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            return x @ x

    graphs = []
    torch._dynamo.reset()
    torch.compile(fn, backend=lambda gm, _: graphs.append(gm.graph) or gm.forward)(torch.randn(2, 2))
    nodes = list(graphs[0].nodes)
    enter = next(n for n in nodes if n.target is enter_autocast)
    assert enter.args[:3] == ("cpu", torch.bfloat16, False)
    assert [n.args for n in nodes if n.target is exit_autocast] == [(enter,)]


def test_a_backward_is_recognised_from_inside():
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(in_backward()))
    (x * 2).sum().backward()
    assert seen == [True]
    assert not in_backward()


def test_an_operator_without_a_kernel_is_recognised():
    library = torch.library.Library("loka_compat_probe", "DEF")
    library.define("nowhere(Tensor x) -> Tensor")
    has = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    assert not has("loka_compat_probe::nowhere", "CPU")
    library.impl("nowhere", lambda x: x.clone(), "CompositeExplicitAutograd")
    assert has("loka_compat_probe::nowhere", "CPU")
    assert has("loka_compat_probe::nowhere", "CUDA")
    assert isinstance(torch.ops.loka_compat_probe.nowhere, torch._ops.OpOverloadPacket)
    assert isinstance(torch.ops.loka_compat_probe.nowhere.default, torch._ops.OpOverload)


def test_make_fx_decomposes_and_keeps_a_dynamic_batch():
    from torch.fx.experimental.proxy_tensor import make_fx

    table = {aten.silu.default: lambda x: x * torch.sigmoid(x)}
    traced = make_fx(lambda x: F.silu(x), decomposition_table=table, tracing_mode="symbolic")(torch.randn(3, 5))
    targets = {node.target for node in traced.graph.nodes if node.op == "call_function"}
    assert aten.silu.default not in targets
    x = torch.randn(7, 5)
    torch.testing.assert_close(traced(x), F.silu(x))


def test_containers():
    flat, spec = torch.utils._pytree.tree_flatten(((1, [2]), {"k": 3}))
    assert flat == [1, 2, 3]
    assert torch.utils._pytree.tree_unflatten([4, 5, 6], spec) == ((4, [5]), {"k": 6})
    assert torch.utils._pytree.tree_leaves([1, (2,)]) == [1, 2]
    assert torch.utils._pytree.tree_map(lambda v: v + 1, (1, [2])) == (2, [3])


def test_artifacts_for_tlparse():
    from torch._logging import trace_structured

    names = list(inspect.signature(trace_structured).parameters)
    assert names[:2] == ["name", "metadata_fn"]
    assert "payload_fn" in names


def test_libraries_may_register_autocast_and_autograd():
    assert {"op", "device_type", "cast_inputs", "lib"} <= set(
        inspect.signature(torch.library.register_autocast).parameters
    )
    assert {"setup_context", "lib"} <= set(inspect.signature(torch.library.register_autograd).parameters)
    assert {torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout}


def test_exporting_is_not_compiling():
    """torch 2.11's Dynamo takes every compile for an export, which dropped the zero gradients of ``apply_mods``."""
    from loka_compile._compat.exporting import is_exporting

    def fn(x):
        return x + 1 if is_exporting() else x + 2

    class Module(torch.nn.Module):
        def forward(self, x):
            return fn(x)

    x = torch.zeros(1)
    assert fn(x) == 2
    assert torch.compile(fn, backend="eager", fullgraph=True)(x) == 2
    for strict in (False, True):
        assert torch.export.export(Module(), (x,), strict=strict).module()(x) == 1


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
