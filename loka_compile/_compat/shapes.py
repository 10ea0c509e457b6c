"""Sizes that may be symbolic. Private: ``SymInt.node`` (torch 2.11 to 2.14)."""

from __future__ import annotations

from typing import Any

import torch


def size_hint(size: Any) -> int | None:
    """The concrete value a size had when the graph was captured, without adding a guard; None where it is unknown."""
    if isinstance(size, int):
        return size
    if isinstance(size, torch.SymInt):
        node = size.node
        if not node.has_hint():
            return None
        return int(node.hint)
    return None
