"""Runs the passes: times them, records what they did, and checks that each left a valid graph."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from unittest import mock

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from loka_compile._compat.python_dispatch import enable_python_dispatcher
from loka_compile.config import LokaConfig
from loka_compile.errors import LokaError, PassError
from loka_compile.passes.base import Changes, Pass, PassContext, source_line
from loka_compile.passes.nodes import subgraphs
from loka_compile.report import Report, Stage

logger = logging.getLogger(__name__)

#: ``Pass.origin`` of the passes in this package; all others are a user's own.
OUR_ORIGIN = "loka_compile.passes"


def run_passes(gm: fx.GraphModule, passes: Sequence[Pass], config: LokaConfig, report: Report) -> bool:
    """Run ``passes`` over ``gm`` in place; returns whether any of them reported a match.

    Raises:
        PassError: a pass raised, or left a graph that is not valid; the text names the pass and the node.
    """
    ctx = PassContext(config)
    report.add_stage(Stage("before"), gm)
    expected = output_values(gm)
    changed = False
    for p in passes:
        inputs = _interface(gm)
        began = time.perf_counter()
        try:
            changes = p.fn(gm, ctx)
        except LokaError:
            raise
        except Exception as error:
            raise PassError(f"pass {p.name!r} ({p.origin}) raised {type(error).__name__}: {error}") from error
        seconds = time.perf_counter() - began
        if not isinstance(changes, Changes):
            raise PassError(f"pass {p.name!r} ({p.origin}) must return Changes, not {type(changes).__name__}")
        _check(gm, p, inputs)
        foreign = p.origin != OUR_ORIGIN
        if changes.matched or foreign:
            changed = True
            for sub in subgraphs(gm):
                sub.recompile()
        if foreign:
            check_outputs(gm, expected, [p])  # ours are checked once, all together
        logger.debug("pass %s: %d matched, %d refused, %.1f ms", p.name, len(changes.matched), len(changes.refused),
                     seconds * 1e3)  # fmt: skip
        report.add_stage(Stage(p.name, p.tier.value, seconds, tuple(changes.matched), tuple(changes.refused)), gm)
    return changed


def _interface(gm: fx.GraphModule) -> tuple[list[str], int]:
    """What a pass must keep: the inputs by name and the number of outputs."""
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    output = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    return names, len(output) if isinstance(output, (tuple, list)) else 1


def _check(gm: fx.GraphModule, p: Pass, before: tuple[list[str], int]) -> None:
    for sub in subgraphs(gm):
        try:
            sub.graph.lint()
        except Exception as error:
            raise PassError(f"pass {p.name!r} ({p.origin}) left an invalid graph: {error}") from error
        for node in sub.graph.nodes:
            if node.op == "call_function" and not callable(node.target):
                raise PassError(f"pass {p.name!r} left node {node.name} ({source_line(node)}) calling {node.target!r}")
    if _interface(gm) != before:
        raise PassError(f"pass {p.name!r} ({p.origin}) changed the graph's inputs or its number of outputs")


def check_outputs(gm: fx.GraphModule, expected: Sequence[torch.Tensor | None], passes: Sequence[Pass]) -> None:
    """Assert that rewriting kept shape, dtype and device of what the graph returns.

    Raises:
        PassError: names the output that changed, and the passes that may have done it.
    """
    names = ", ".join(f"{p.name!r} ({p.origin})" for p in passes)
    inputs = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    # The mode in which Dynamo captured, which is not the one in which it calls the backend.
    fake_mode = next((v.fake_mode for v in inputs if isinstance(v, FakeTensor)), None)
    if fake_mode is None or any(v is None for v in inputs):
        return
    try:
        # Parameters may be attributes of the graph (freezing) instead of inputs; these are real tensors.
        symbols = fake_mode.shape_env.ignore_fresh_unbacked_symbols() if fake_mode.shape_env else nullcontext()
        with (
            fake_mode,
            enable_python_dispatcher(),
            torch.no_grad(),
            symbols,
            mock.patch.object(fake_mode, "allow_non_fake_inputs", True),
        ):
            got = gm(*inputs)
    except Exception as error:
        raise PassError(f"the graph no longer runs after pass {names}: {type(error).__name__}: {error}") from error
    for index, (new, old) in enumerate(zip(got, expected, strict=True)):
        if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor):
            same = new.dtype == old.dtype and new.device == old.device and _same_sizes(new, old)
            if not same:
                raise PassError(
                    f"pass {names} changed output {index} from {old.dtype} {tuple(old.shape)} on {old.device} "
                    f"to {new.dtype} {tuple(new.shape)} on {new.device}"
                )


def _same_sizes(new: torch.Tensor, old: torch.Tensor) -> bool:
    """Sizes that depend on the batch are not compared: that would add guards."""
    pairs = zip(new.shape, old.shape, strict=False)
    return new.dim() == old.dim() and all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))


def output_values(gm: fx.GraphModule) -> list[torch.Tensor | None]:
    """The fake values that Dynamo recorded for the graph's outputs; for :func:`check_outputs`."""
    output = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    nodes = output if isinstance(output, (tuple, list)) else (output,)
    return [n.meta.get("example_value") if isinstance(n, fx.Node) else None for n in nodes]
