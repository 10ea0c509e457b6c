"""The two places where Inductor lets us in: the joint graph before partitioning, each half before lowering.

Both are keyed: ``uuid`` covers our code, the options, the plan and the library versions, so that neither Inductor's
nor AOTAutograd's cache ever serves code that another plan or another version made.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from loka_compile.config import LokaConfig
from loka_compile.lowering import ahead
from loka_compile.lowering.checkpointing import keep_fp8_between_regions
from loka_compile.lowering.constants import hold_constants
from loka_compile.lowering.decompose import check_lowered, decompose, decompose_unfusable
from loka_compile.lowering.fused.forward import fuse
from loka_compile.lowering.fused.inputs import quantise_inputs
from loka_compile.lowering.fused.joined import write_joined
from loka_compile.lowering.fused.joint import fuse_joint
from loka_compile.lowering.joint import lower_gemms, remove_anchors
from loka_compile.lowering.share import merge_equal
from loka_compile.lowering.zero_gradients import share_zero_gradients
from loka_compile.plan import Plan
from loka_compile.report import Report

#: Files of the package that decide what is compiled.
_DIGESTED = (".py", ".json", ".csv", ".jinja")
_LIBRARIES = ("triton", "torchao", "mslk-cuda", "fbgemm-gpu-genai", "sgl-deep-gemm")


@dataclass
class Lowering:
    """What the hooks of one compile share."""

    config: LokaConfig
    report: Report
    plan: Plan | None = None
    #: Emulate the planned kernels, because the plan is for another device.
    emulate: bool = False
    #: Puts sampling taps into the joint graph instead of lowering it (``table="auto"`` before there is a table).
    tap: Callable[[fx.Graph], None] | None = None
    #: Anything else that makes this compile different, for the cache key.
    salt: str = ""
    #: The user's own Inductor passes, which run before ours.
    user_joint: Sequence[Any] = ()
    user_post_grad: Sequence[Any] = ()
    ran: list[str] = field(default_factory=list)

    @functools.cached_property
    def key(self) -> str:
        """Digest of everything that the hooks read."""
        options = {k: v for k, v in vars(self.config).items() if k not in ("table", "plan")}
        parts = [
            source_digest(), json.dumps(options, default=repr, sort_keys=True), self.salt,
            self.plan.digest() if self.plan is not None else "", str(self.emulate), _versions(), _device(),
        ]  # fmt: skip
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


#: Tensors that an elementwise value with several readers may be made of before Inductor writes it to memory (its own
#: default: 4). Where a residual stream branches, its gradient is a sum of four and a norm's weight: written in fp32 and
#: read again, it cost a Wukong on an H200 6 % of a step (docs/fused_kernels.md).
_READS = 8


class JointPass(CustomGraphPass):
    """On the joint forward and backward graph: roles, plan, kernels."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering = lowering

    def __deepcopy__(self, memo: dict[int, Any]) -> JointPass:
        """Itself: torch copies its options here and there, and a hook belongs to one compile."""
        return self

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite ``graph`` in place."""
        low = self.lowering
        _run_user(low.user_joint, graph)
        low.ran.append("joint")
        low.report.is_training = any(n.op == "placeholder" and "tangents" in n.name for n in graph.nodes)
        remove_anchors(graph)
        if low.tap is not None:
            low.tap(graph)
        else:
            lower_gemms(graph, low.plan, low.report, emulate=low.emulate)
            keep_fp8_between_regions(graph)
            if low.config.fuse:
                fuse_joint(graph, low.report, low.config.save_fp8)
            merge_equal(graph)
            ahead.build(graph)
        if low.config.fuse:
            decompose_unfusable(graph)
        else:
            decompose(graph)
        _finish(graph)
        _keep(low.report, "joint", graph)

    def uuid(self) -> Any:
        """Part of Inductor's and AOTAutograd's cache keys."""
        return _uuid("joint", self.lowering, self.lowering.user_joint)


class PostGradPass(CustomGraphPass):
    """On the forward and on the backward graph, each on its own: fuse, then decompose the rest."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering = lowering

    def __deepcopy__(self, memo: dict[int, Any]) -> PostGradPass:
        """Itself: torch copies its options here and there, and a hook belongs to one compile."""
        return self

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite ``graph`` in place."""
        low = self.lowering
        _run_user(low.user_post_grad, graph)
        half = "forward" if "forward" not in low.ran else "backward"
        low.ran.append(half)
        if low.config.fuse:
            fuse(graph, low.report)
            if quantise_inputs(graph, low.report):
                ahead.build(graph)
            write_joined(graph, low.report)
        decompose(graph)
        hold_constants(graph)
        if half == "backward":
            share_zero_gradients(graph)
        check_lowered(graph)
        _finish(graph)
        _keep(low.report, half, graph)

    def uuid(self) -> Any:
        """Part of Inductor's and AOTAutograd's cache keys."""
        return _uuid("post_grad", self.lowering, self.lowering.user_post_grad)


def config_patches(lowering: Lowering, patches: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor options that install the hooks, after the passes that the user has configured there."""
    import torch._inductor.config as inductor_config

    def configured(name: str) -> list[Any]:
        return _as_list(patches[name] if name in patches else getattr(inductor_config, name))

    lowering.user_joint = configured("joint_custom_pre_pass")
    lowering.user_post_grad = configured("post_grad_custom_pre_pass")
    # One composite each: torch 2.11 takes a single pass where 2.13 takes a list.
    hooks = {"joint_custom_pre_pass": JointPass(lowering), "post_grad_custom_pre_pass": PostGradPass(lowering)}
    if "realize_reads_threshold" in patches:
        return hooks
    return {**hooks, "realize_reads_threshold": max(_READS, inductor_config.realize_reads_threshold)}


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _run_user(passes: Sequence[Any], graph: fx.Graph) -> None:
    for p in passes:
        p(graph)


def _uuid(name: str, lowering: Lowering, user: Sequence[Any]) -> Any:
    """None, which bypasses the caches: where a user's pass cannot be identified, and where our passes have to run (a
    pass does not when its result comes from a cache) to be inspected or to put in taps."""
    if lowering.config.inspect or lowering.tap is not None:
        return None
    ids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in user]
    return None if any(not i for i in ids) else ("loka", name, lowering.key, tuple(ids))


def _finish(graph: fx.Graph) -> None:
    graph.eliminate_dead_code()
    graph.lint()
    if graph.owning_module is not None:
        graph.owning_module.recompile()


def _keep(report: Report, name: str, graph: fx.Graph) -> None:
    if graph.owning_module is not None:
        report.add_graph(name, graph.owning_module)


@functools.cache
def source_digest() -> str:
    """Digest of this package's source and shipped data: a changed package never reuses compiled code."""
    return _digest(Path(__file__).parents[1])


def _digest(root: Path) -> str:
    # Every process pays for this before it can find anything in a cache; pathlib would take twice as long.
    base = os.path.join(root, "")
    files = [os.path.join(folder, name) for folder, _, names in os.walk(base) for name in names]
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.endswith(_DIGESTED)):
        digest.update(file.removeprefix(base).replace(os.sep, "/").encode())
        with open(file, "rb", buffering=0) as content:
            digest.update(content.read())
    return digest.hexdigest()


@functools.cache
def _versions() -> str:
    found = {"torch": str(torch.__version__)}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return json.dumps(found, sort_keys=True)


def _device() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    return f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()}"
