"""Whether ``torch.export`` is at work.

``torch.compiler.is_exporting`` says so, but Dynamo of torch 2.11 makes True of it in every compile (2.13 asks the flag
behind it). Private: ``torch.compiler._is_exporting_flag``, in 2.11 to 2.14.
"""

from __future__ import annotations

import torch


def is_exporting() -> bool:
    """Whether the code runs, or is traced, for ``torch.export``; not for ``torch.compile``."""
    return bool(torch.compiler._is_exporting_flag)
