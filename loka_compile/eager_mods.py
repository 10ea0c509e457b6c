"""The Mods on an eager model: the same passes over a ``torch.fx`` trace instead of Dynamo's graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from loka_compile.config import LokaConfig
from loka_compile.errors import ApplyModsError
from loka_compile.nn import BlockNorm, HardSwish
from loka_compile.ops import anchor
from loka_compile.passes.manager import run_passes
from loka_compile.passes.nodes import argument, kind
from loka_compile.passes.registry import snapshot
from loka_compile.report import Report

#: Modules whose inside the passes must see; other modules of torch.nn stay whole.
_OPENED = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.SiLU, nn.Hardswish, nn.Sigmoid, nn.Hardsigmoid)


def apply_mods(
    model: nn.Module, *, mods: str | tuple[str, ...] = "all", remove_unused: bool = False, **options: Any
) -> fx.GraphModule:
    """Rewrite ``model`` with the Mods and return it as an ordinary eager module.

    It computes what ``torch.compile(model, backend="loka")`` computes without FP8, holds modules ``BlockNorm`` and
    ``HardSwish`` where that compile would rewrite, and shares its parameters with ``model``, which is left as it is
    (``copy.deepcopy`` separates them). ``state_dict`` has the same keys; parameters that a Mod no longer reads get
    a zero gradient. What the passes did is in the result's ``loka_report``.

    Args:
        model: traceable by ``torch.fx``: its forward must not branch on the values or sizes of tensors.
        mods: "all", "none", or names of Mods.
        remove_unused: drop the parameters that are no longer read, before wrapping in DDP or FSDP. The
            ``state_dict`` then lacks their keys.
        **options: further options of :class:`loka_compile.LokaConfig`, such as ``block_size``.

    Raises:
        ApplyModsError: the forward cannot be traced.
        ConfigError: an option is unknown or has an illegal value.
    """
    config, others = LokaConfig.from_options({"mods": mods, **options})
    if others:
        raise ApplyModsError(f"apply_mods takes no options of Inductor: {', '.join(others)}")
    tracer = _Tracer()
    try:
        graph = tracer.trace(model)
    except Exception as error:
        raise ApplyModsError(
            f"torch.fx cannot trace {type(model).__name__}.forward: {type(error).__name__}: {error}. Its forward must "
            "not branch on tensors or their sizes; apply the Mods to the parts that do not "
            '(model.part = apply_mods(model.part)), or use backend="loka", which needs no trace'
        ) from error
    gm = fx.GraphModule(model, graph, type(model).__name__)
    report = Report()
    passes = [p for p in snapshot(config) if p.name != "sites"]
    run_passes(gm, passes, config, report)
    _as_modules(gm, remove_unused)
    gm.graph.eliminate_dead_code()
    _keep_transient(gm, model)
    if remove_unused:
        _drop_unused(gm)
    else:
        _adopt_state(gm, model)
    gm.recompile()
    gm.train(model.training)
    gm.loka_report = report  # type: ignore[assignment]
    return gm


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if type(m) in _OPENED:
            return False
        return isinstance(m, (BlockNorm, HardSwish)) or super().is_leaf_module(m, module_qualified_name)


def _as_modules(gm: fx.GraphModule, remove_unused: bool) -> None:
    """Operators of ours become modules, and a functional dropout follows ``train()`` and ``eval()`` again."""
    counts: dict[str, int] = {}

    def call(node: fx.Node, name: str, module: nn.Module, x: Any) -> None:
        index = counts.get(name, 0)
        counts[name] = index + 1
        gm.add_submodule(f"{name}_{index}", module)
        with gm.graph.inserting_before(node):
            new = gm.graph.call_module(f"{name}_{index}", (x,))
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)

    for node in list(gm.graph.nodes):
        if node.target is operator.getitem and kind(node.args[0]) == "block_norm":
            norm = node.args[0]
            call(node, "block_norm", BlockNorm(norm.args[1], norm.args[2]), norm.args[0])
            gm.graph.erase_node(norm)
        elif node.target is F.hardswish:
            call(node, "hard_swish", HardSwish(), node.args[0])
        elif node.op == "call_function" and node.target is F.dropout:
            call(node, "dropout", nn.Dropout(argument(node, 1, "p", 0.5)), node.args[0])
        elif node.target is torch.ops.loka.anchor.default:
            if remove_unused:
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
            else:
                node.target = anchor


def _adopt_state(gm: fx.GraphModule, model: nn.Module) -> None:
    """Register what the graph does not mention, so that ``state_dict`` has the same keys."""
    own = {name for name, _ in gm.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in gm.named_buffers(remove_duplicate=False)}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None and _join(path, name) not in own:
                _holder(gm, path).register_parameter(name, parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None and _join(path, name) not in own:
                persistent = name not in module._non_persistent_buffers_set
                _holder(gm, path).register_buffer(name, buffer, persistent=persistent)


def _keep_transient(gm: fx.GraphModule, model: nn.Module) -> None:
    """A buffer that was not part of the state_dict is not part of it in the copy that the graph made either."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name in module._non_persistent_buffers_set:
            try:
                holder = gm.get_submodule(path)
            except AttributeError:
                continue
            if name in holder._buffers:
                holder._non_persistent_buffers_set.add(name)


def _drop_unused(gm: fx.GraphModule) -> None:
    """Delete the parameters that the graph does not read, and modules that it does not call."""
    read = {str(n.target) for n in gm.graph.nodes if n.op == "get_attr"}
    called = tuple(f"{n.target}." for n in gm.graph.nodes if n.op == "call_module")
    for name, _ in list(gm.named_parameters(remove_duplicate=False)):
        if name not in read and not name.startswith(called):
            path, _, leaf = name.rpartition(".")
            delattr(gm.get_submodule(path), leaf)
    gm.delete_all_unused_submodules()


def _holder(gm: nn.Module, path: str) -> nn.Module:
    """The module at ``path``, made of empty modules where the graph has none."""
    module = gm
    for part in path.split(".") if path else []:
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = getattr(module, part)
    return module


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
