"""Finds the chains that the Mods rewrite, and says why what looks like one is not.

    linear -> norm -> activation              LayerNorm or RMSNorm over the features; SiLU in all its spellings
    linear -> add(residual) -> norm [-> act]  the norm after the residual add
    linear -> x * sigmoid(norm(x))            SwishNorm; the linear has two users
    linear -> norm,  linear -> activation

Rewritten chains (BlockNorm, HardSwish) are found as well, so a Mod sees the same chains whether or not the others
have run, and running twice changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from loka_compile.passes.base import Refusal, source_line
from loka_compile.passes.nodes import NORMS, argument, dropout_p, kind, last_dim, skip_identity, subgraphs, users
from loka_compile.passes.sites import learnt_weight

_OTHER_NORMS = {
    "batch_norm": "BatchNorm normalises over the batch, which a row-wise kernel cannot see",
    "group_norm": "GroupNorm normalises over other dimensions than the features of a row",
    "instance_norm": "InstanceNorm normalises over other dimensions than the features of a row",
}


@dataclass(eq=False)
class Chain:
    """One linear layer with what follows it. At least one of ``norm`` and ``activation`` is set."""

    linear: fx.Node
    norm: fx.Node | None = None
    #: The add between linear and norm.
    residual: fx.Node | None = None
    #: The node whose value leaves the activation: silu, hardswish or the final mul.
    activation: fx.Node | None = None
    #: The sigmoid or hardsigmoid of an activation that is spelled out.
    gate: fx.Node | None = None

    @property
    def kind(self) -> str:
        """A name such as ``linear-residual-norm-swish`` for reports."""
        parts = ["linear"]
        if self.residual is not None:
            parts.append("residual")
        if self.is_swish_norm:
            return "-".join([*parts, "swishnorm"])
        if self.norm is not None:
            parts.append("norm")
        if self.activation is not None:
            parts.append("swish")
        return "-".join(parts)

    @property
    def is_swish_norm(self) -> bool:
        """Whether this is ``x * sigmoid(norm(x))``."""
        return (
            self.gate is not None
            and self.norm is not None
            and skip_identity(self.gate.args[0]) is self.norm
            and (
                not any(skip_identity(a) is self.norm for a in self.activation.args)  # type: ignore[union-attr]
            )
        )

    @property
    def norm_params(self) -> list[fx.Node]:
        """The norm's weight and bias, as far as it has them."""
        if self.norm is None or kind(self.norm) == "block_norm":
            return []
        given = [argument(self.norm, 2, "weight")]
        if kind(self.norm) == "layer_norm":
            given.append(argument(self.norm, 3, "bias"))
        return [p for p in given if isinstance(p, fx.Node)]


@dataclass
class Findings:
    """All chains of a graph, and the refusals by what they are about: "norm" or "activation"."""

    chains: list[Chain] = field(default_factory=list)
    refusals: dict[str, list[Refusal]] = field(default_factory=lambda: {"norm": [], "activation": []})

    def refuse(self, about: str, node: fx.Node, reason: str) -> None:
        """Record why ``node`` is not part of a chain."""
        self.refusals[about].append(Refusal(node.name, reason, source_line(node)))


def find_chains(gm: fx.GraphModule, block_size: int) -> Findings:
    """All chains of the graph and its sub-graphs, in graph order."""
    findings = Findings()
    for sub in subgraphs(gm):
        by_end: dict[fx.Node, Chain] = {}
        for node in sub.graph.nodes:
            what = kind(node)
            if what in NORMS:
                chain = _norm_chain(node, block_size, findings)
                if chain is not None:
                    findings.chains.append(chain)
                    by_end[node] = chain
            elif what in _OTHER_NORMS:
                if _from_linear(_data(node)):
                    findings.refuse("norm", node, _OTHER_NORMS[what])
            elif what in ("silu", "hardswish", "mul"):
                _activation(node, what, by_end, findings)
    return findings


def _data(node: fx.Node) -> Any:
    return argument(node, 0, "input")


def _from_linear(node: Any) -> bool:
    return _is_layer(skip_identity(node))


def _is_layer(node: Any) -> bool:
    """A linear layer, or a matmul with a learnt weight; attention's product of two activations is none."""
    return kind(node) == "linear" or (kind(node) == "matmul" and learnt_weight(node) is not None)


def _norm_chain(norm: fx.Node, block_size: int, findings: Findings) -> Chain | None:
    """The chain that ends in this norm, or None with a refusal."""

    def refuse(reason: str) -> None:
        findings.refuse("norm", norm, reason)

    x = skip_identity(_data(norm))
    chain: Chain | None = None
    if _is_layer(x):
        chain = Chain(x, norm)
    elif kind(x) == "add" and len(x.args) >= 2:
        operand = next((skip_identity(a) for a in x.args[:2] if _from_linear(a)), None)
        if operand is not None:
            chain = Chain(operand, norm, residual=x)
    if chain is None:
        refuse(_why_no_linear(x))
        return None

    width = _width(norm, refuse)
    if width is None:
        return None
    if width > block_size and 0 < width % block_size < block_size // 2:
        refuse(
            f"{width} features leave a last block of {width % block_size}, narrower than half of "
            f"block_size={block_size}: its RMS would be too noisy"
        )
        return None
    stray = _stray_user(chain)
    if stray is not None:
        refuse(f"the output of the linear layer is also used by {stray.name}, whose meaning would change")
        return None
    return chain


def _why_no_linear(x: Any) -> str:
    what = kind(x)
    if what == "dropout":
        return "dropout stands between the linear layer and the norm"
    if isinstance(x, fx.Node) and x.op == "call_method" and x.target in ("view", "reshape", "unflatten", "flatten"):
        return "the linear layer's output is reshaped before the norm"
    return "the norm does not follow a linear layer: its input comes from " + (
        f"{x.op} {x.name}" if isinstance(x, fx.Node) else repr(x)
    )


def _width(norm: fx.Node, refuse: Any) -> int | None:
    """Number of features of a norm over the last dimension; refuses norms over others."""
    if kind(norm) == "block_norm":
        return last_dim(norm.args[0]) or 1  # type: ignore[arg-type]  # rewritten already: its width was checked then
    shape = argument(norm, 1, "normalized_shape")
    if isinstance(shape, int):
        shape = (shape,)
    if len(shape) != 1:
        refuse(f"the norm covers the last {len(shape)} dimensions, not the features of a row alone")
        return None
    if not isinstance(shape[0], int):
        refuse("the norm's width is not a constant")
        return None
    return shape[0]


def _stray_user(chain: Chain) -> fx.Node | None:
    """A consumer of the linear's output (or of the residual sum) outside of the chain."""
    allowed = {chain.residual or chain.norm}
    for user in users(chain.linear):
        if user in allowed or (chain.residual is None and _is_swish_norm_mul(user, chain)):
            continue
        return user
    if chain.residual is not None:
        for user in users(chain.residual):
            if user is not chain.norm and not _is_swish_norm_mul(user, chain):
                return user
    return None


def _is_swish_norm_mul(user: fx.Node, chain: Chain) -> bool:
    """``x * sigmoid(norm(x))`` with x the chain's linear (or residual sum)."""
    if kind(user) != "mul":
        return False
    gate = _sigmoid_operand(user)
    return gate is not None and skip_identity(gate.args[0]) is chain.norm


def _sigmoid_operand(mul: fx.Node) -> fx.Node | None:
    for arg in mul.args[:2]:
        node = skip_identity(arg)
        if kind(node) in ("sigmoid", "hardsigmoid"):
            return node
    return None


def _activation(node: fx.Node, what: str, by_end: dict[fx.Node, Chain], findings: Findings) -> None:
    """Attach an activation to the chain that it ends, or start a chain ``linear -> activation``."""
    gate: fx.Node | None = None
    if what == "mul":
        gate = _sigmoid_operand(node)
        if gate is None or len(node.args) < 2:
            return
        inner = skip_identity(gate.args[0])
        other = next((skip_identity(a) for a in node.args[:2] if skip_identity(a) is not gate), gate)
        chain = by_end.get(inner)
        if chain is not None and other in (chain.norm, chain.residual or chain.linear):
            _set_activation(chain, node, gate)
            return
        if other is not inner:
            if _is_layer(inner):
                findings.refuse("activation", node, "a gate sigmoid(linear(x)) * y is not a Swish of its own input")
            return
        x: Any = inner
    else:
        x = skip_identity(_data(node))
        chain = by_end.get(x)
        if chain is not None:
            _set_activation(chain, node, None)
            return
    if _is_layer(x):
        mine = {node, gate}
        stray = next((u for u in users(x) if u not in mine), None)
        if stray is not None:
            findings.refuse(
                "activation", node, f"the output of the linear layer is also used by {stray.name}, "
                "whose meaning would change"
            )  # fmt: skip
            return
        findings.chains.append(Chain(x, activation=node, gate=gate))
    elif kind(x) == "dropout" and dropout_p(x) > 0:
        findings.refuse("activation", node, "dropout stands before the activation")
    elif kind(x) in NORMS or kind(x) in _OTHER_NORMS:
        findings.refuse("activation", node, f"its norm ({x.name}) is not part of a chain")
    else:
        findings.refuse("activation", node, "the activation does not follow a linear layer or its norm")


def _set_activation(chain: Chain, node: fx.Node, gate: fx.Node | None) -> None:
    if chain.activation is None:
        chain.activation, chain.gate = node, gate
