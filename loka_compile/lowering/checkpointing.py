"""Activation checkpointing and FP8: an operand that a layer's kernel writes
belongs to that layer's checkpointed region.

A checkpoint around each layer keeps what goes from layer to layer, and the region behind quantises it again when it
recomputes. In the forward the value was quantised by the kernel that made it, before it was rounded to bf16; from what
was kept a few in a hundred values fall on the other side of a rounding, and the recomputed layer is another one. With
the quantisation in the region in front, what is kept *is* the FP8 operand: the same bits, and half of the memory.
"""

from __future__ import annotations

from torch import fx

from loka_compile.lowering.fused.match import Quantise, quantisations, rows

#: What the partitioner reads: the region that a node is in, and what is to become of it.
_TAGS = ("ac_graph_id", "recompute")


def keep_fp8_between_regions(graph: fx.Graph) -> None:
    """Put tensorwise quantisations of the forward into the region of what they quantise.

    To run on the joint graph; ``graph`` is changed in place.
    """
    for q in list(quantisations(graph)):
        producer = rows(q.source)  # a view [M, N] of [..., N] is in the reader's region
        if producer.op != "placeholder" and q.node.meta.get("partitioner_tag") != "is_backward":
            _join(q, producer)


def _join(q: Quantise, producer: fx.Node) -> None:
    waiting = [q.node] if q.scale is None else [q.node, q.scale]
    while waiting:
        node = waiting.pop()
        if node is producer:
            continue
        for tag in _TAGS:
            node.meta.pop(tag, None)
            if tag in producer.meta:
                node.meta[tag] = producer.meta[tag]
        waiting.extend(node.all_input_nodes)
