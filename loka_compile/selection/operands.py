"""Which tensor of a linear layer each GEMM reads, and in which forms a tensor can be quantised. No torch import.

Two GEMMs of one graph that read the same tensor in the same form run one quantisation: the operators are equal, and
the compiler merges them. In tensorwise and 128x128 scaling the form does not depend on the layout, because both layouts
have the same scales: what comes on top for a transposed operand is a copy of its bytes. A scale per row (or per 1x128
block) of the transpose is another scale, and so another form.
"""

from __future__ import annotations

from loka_compile.gemm import Role, Scaling

#: Operands A and B of each role: ``A @ B.T``.
OPERANDS = {
    Role.FORWARD: ("input", "weight"),
    Role.GRAD_INPUT: ("grad_output", "weight"),
    Role.GRAD_WEIGHT: ("grad_output", "input"),
}
#: Whether A and B are the transposes of what is stored.
TRANSPOSED = {
    Role.FORWARD: (False, False),
    Role.GRAD_INPUT: (False, True),
    Role.GRAD_WEIGHT: (True, True),
}
#: Scalings whose scales serve both layouts of a tensor.
LAYOUT_FREE = frozenset({Scaling.TENSORWISE, Scaling.BLOCK_128X128})


def form(scaling: Scaling, dtype: str, transposed: bool, quantiser: str = "", padding: tuple[int, int] = (1, 1)) -> str:
    """The name of a quantised form; equal names of one tensor are one quantisation.

    Args:
        scaling: of the operand.
        dtype: FP8 format without "torch.".
        transposed: whether the operand is the transpose of what is stored.
        quantiser: the provider's name where it does not use the common quantiser.
        padding: what the operand's rows and contraction are padded to multiples of, 1 where they are not: a padded
            tensor is another one.
    """
    if scaling is Scaling.NONE:
        return ""
    words = [str(scaling), dtype]
    if transposed and scaling not in LAYOUT_FREE:
        words.append("across")
    rows, columns = reversed(padding) if transposed else padding
    if (rows, columns) != (1, 1):
        words.append(f"padded {rows}x{columns}")
    if quantiser:
        words.append(f"by {quantiser}")
    return " ".join(words)


def tensor(site: str, operand: str) -> str:
    """The name of a tensor: ``"over.mlp.2#0 input"``."""
    return f"{site} {operand}"
