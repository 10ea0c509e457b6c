"""Samples what every GEMM sees during the first calls of a compiled graph (``table="auto"``).

Taps are operators in the joint graph, behind AOTAutograd: they need no autograd of their own and see activations,
weights and output gradients as the GEMM itself would. A tap returns a copy of its operand, so that nothing can remove
or reorder it; the copies are gone with the taps once the plan is there.
"""

from __future__ import annotations

import itertools
import threading
import weakref
import zlib
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from loka_compile.gemm import Gemm, Role
from loka_compile.lowering.fused.joint import norm_by_fusion, quantised_by_fusion
from loka_compile.lowering.fused.match import ALIAS, CONVERT, is_call, strip
from loka_compile.lowering.inline import inline
from loka_compile.lowering.joint import gemms_of
from loka_compile.lowering.roles import MatMul
from loka_compile.probe.quantify import SiteSamples
from loka_compile.selection.operands import OPERANDS

#: Rows kept of one activation or gradient over all calls.
ROWS = 512

#: Operators that leave the data as it is.
VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)
_TURNS = (torch.ops.aten.permute.default, torch.ops.aten.t.default, torch.ops.aten.transpose.int)

#: Weak: a graph that is thrown away before it has sampled enough takes its samples along.
_sessions: weakref.WeakValueDictionary[int, Sampler] = weakref.WeakValueDictionary()
_ids = itertools.count(1)


@torch.library.custom_op("loka::tap", mutates_args=())
def tap(x: Tensor, site: str, what: str, session: int) -> Tensor:
    """Show ``x`` to the sampling session (if it is still open) and return a copy of it."""
    sampler = _sessions.get(session)
    if sampler is not None:
        sampler.record(x, site, what)
    return x.clone()


@tap.register_fake
def _(x: Tensor, site: str, what: str, session: int) -> Tensor:
    return torch.empty_like(x)


@dataclass
class _Site:
    weight: Tensor | None = None
    inputs: list[Tensor] = field(default_factory=list)
    grad_outputs: list[Tensor] = field(default_factory=list)
    gemms: dict[Role, Gemm] = field(default_factory=dict)
    fused: set[str] = field(default_factory=set)
    norm: str = ""
    batches: set[int] = field(default_factory=set)
    #: The first site that reads the tensor behind "input", "weight" or "grad_output".
    same: dict[str, str] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)


def _read_by(node: fx.Node, products: set[fx.Node]) -> bool:
    """Whether none but these products read a tensor, in whatever layout or dtype."""
    return all(
        user in products or (is_call(user, *CONVERT, *ALIAS, *VIEWS, *_TURNS) and _read_by(user, products))
        for user in node.users
    )  # fmt: skip


class Sampler:
    """Collects rows of inputs and output gradients, and the weights, of one compiled graph over its first calls."""

    def __init__(self, calls: int, fuse: bool = True) -> None:
        self.calls = calls
        self._fuse = fuse
        self.step = 0
        self.id = next(_ids)
        self._rows = max(16, -(-ROWS // calls))
        self._sites: dict[str, _Site] = defaultdict(_Site)
        self._seen: set[tuple[str, str, int]] = set()
        self._lock = threading.Lock()
        _sessions[self.id] = self

    def close(self) -> None:
        """Stop listening; taps that still run do nothing."""
        _sessions.pop(self.id, None)

    def insert_taps(self, graph: fx.Graph) -> None:
        """Tap activation and weight of every forward GEMM, and the output gradient of every backward one."""
        found = gemms_of(graph)
        self._find_shared([matmul for matmul, _ in found])
        products = {matmul.node for matmul, _ in found}
        for matmul, gemm in found:
            site = self._sites[matmul.site]
            site.gemms[matmul.role] = gemm
            if self._fuse:
                site.fused |= quantised_by_fusion(matmul)
                site.norm = norm_by_fusion(matmul) or site.norm
            bounded = matmul.role is Role.FORWARD and gemm.a_bound is not None
            if bounded and _read_by(strip(matmul.a.base, *VIEWS), products):
                site.written.add("input")
        for matmul, _ in found:
            first, second = matmul.positions
            if matmul.role is Role.FORWARD:
                self._tap(matmul, first, "input", flip=False)
                self._tap(matmul, second, "weight", flip=True)
            elif matmul.role is Role.GRAD_INPUT or not matmul.grad_first:
                # mm(grad, w), and mm(x.T, grad) of a weight that is stored as [K, N]
                self._tap(matmul, first if matmul.grad_first else second, "grad_output", flip=False)
            else:
                self._tap(matmul, first, "grad_output", flip=True)  # mm(grad.T, x)

    def _find_shared(self, matmuls: list[MatMul]) -> None:
        """Note which sites read one and the same tensor. Of equal operators on it the compiler makes one."""
        first: dict[tuple[str, fx.Node, str], str] = {}
        for matmul in sorted(matmuls, key=lambda m: m.site):
            # A weight that is stored as [K, N] puts the operands of grad_weight the other way round.
            operands = (matmul.a.base, matmul.b.base)[:: 1 if matmul.grad_first else -1]
            for what, base in zip(OPERANDS[matmul.role], operands, strict=True):
                key = (what, strip(base, *VIEWS), str(base.meta["val"].shape))
                self._sites[matmul.site].same[what] = first.setdefault(key, matmul.site)

    def _tap(self, matmul: MatMul, position: int, what: str, flip: bool) -> None:
        """Let the product read one operand through a tap. ``flip``: the operand's rows are its columns."""

        def through(x: Tensor) -> Tensor:
            seen = tap(x.t() if flip else x, matmul.site, what, self.id)
            return seen.t() if flip else seen

        operand = matmul.node.args[position]
        assert isinstance(operand, fx.Node)
        (tapped,) = inline(matmul.node, through, [operand])
        matmul.node.update_arg(position, tapped)

    def record(self, x: Tensor, site: str, what: str) -> None:
        """Keep some rows of x (the same rows for a site's input and gradient), or the whole weight."""
        with self._lock:
            key = (site, what, self.step)
            if key in self._seen or self.step > self.calls:
                return  # recomputed under checkpointing, or GRAD_INPUT and GRAD_WEIGHT of the same gradient
            self._seen.add(key)
            kept = self._sites[site]
            if what == "weight":
                kept.weight = x.detach().clone()
                return
            count = x.shape[0]
            generator = torch.Generator().manual_seed(zlib.crc32(f"{site} {self.step}".encode()))
            chosen = torch.randperm(count, generator=generator)[: self._rows].sort().values
            rows = x.detach().index_select(0, chosen.to(x.device))
            (kept.inputs if what == "input" else kept.grad_outputs).append(rows)
            if what == "input":
                kept.batches.add(count)

    def samples(self) -> dict[str, SiteSamples]:
        """What was seen, by site."""
        out = {}
        with self._lock:
            for site, kept in self._sites.items():
                forward = kept.gemms.get(Role.FORWARD)
                if forward is None or kept.weight is None or not kept.inputs:
                    continue
                out[site] = SiteSamples(
                    inputs=kept.inputs,
                    weight=kept.weight,
                    grad_outputs=kept.grad_outputs,
                    dtype=forward.dtype,
                    batch=forward.m,
                    input_bound=forward.a_bound,
                    roles=frozenset(kept.gemms),
                    dynamic="m" in forward.dynamic,
                    batches=tuple(sorted(kept.batches)),
                    same=dict(kept.same),
                    written=frozenset(kept.written),
                    fused=frozenset(kept.fused),
                    norm=kept.norm,
                )
        return out
