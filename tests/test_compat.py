"""What we rely on of torch beyond its documented API. A torch that changes it fails here, by name, and not in a model.

The rule: private names live in ``loka_compile/_compat``. ``OUTSIDE`` lists those that do not, each with the reason, and
every one of them has a test below or, if it is of AOTAutograd or Inductor, in test_compat_inductor.py.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from loka_compile._compat.autocast import enter_autocast, exit_autocast, has_autocast_rule
from loka_compile._compat.tracing import in_backward
from loka_compile._compat.versions import check_torch
from loka_compile.errors import LokaError, UnsupportedTorchError

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
