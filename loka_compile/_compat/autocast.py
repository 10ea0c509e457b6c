"""Autocast as Dynamo writes it into a graph, and which operators it has a rule for.

Private: ``torch.amp.autocast_mode._enter_autocast``, ``_exit_autocast`` and the dispatcher's table of kernels (torch
2.11 to 2.14).
"""

from __future__ import annotations

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

#: ``enter_autocast(device_type, dtype, enabled, cache)`` and ``exit_autocast(what the former returned)``.
enter_autocast, exit_autocast = _enter_autocast, _exit_autocast


def has_autocast_rule(operator: str, device_type: str) -> bool:
    """Whether autocast on such a device casts for an operator ("aten::layer_norm"), or leaves it to its inputs."""
    if device_type not in ("cpu", "cuda", "xpu"):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, f"Autocast{device_type.upper()}")
