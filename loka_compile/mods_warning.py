"""The one warning that the Mods change what the model computes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings

import torch

from loka_compile.config import MODS
from loka_compile.report import Report

_lock = threading.Lock()
_warned = False


class ModsWarning(UserWarning):
    """The Mods changed the model's function; shown once per process."""


def warn_about_mods(report: Report) -> None:
    """Warn if this is the first compile of the process in which a Mod rewrote something."""
    global _warned
    used = [mod for mod in MODS if report.count(mod)]
    if not used:
        return
    with _lock:
        if _warned:
            return
        _warned = True
    chains = len(report.chains)
    warnings.warn(
        f"loka rewrote {chains} chain{'s' * (chains != 1)} of this model with the Mods {', '.join(used)}: "
        f"{report.unused('bias')} biases and {report.unused('norm')} norm parameters are no longer used, and results "
        'differ from those of the eager model. options={"mods": "none"} keeps the model\'s own math; '
        "loka_compile.apply_mods(model) gives the rewritten model in eager; loka_compile.explain shows each change.",
        ModsWarning,
        stacklevel=_level_of_caller(),
    )


def _level_of_caller() -> int:
    """Stack level, as seen by ``warnings.warn`` in the calling function, of the line that called the compiled model."""
    # Python 3.12 has skip_file_prefixes for this.
    inside = (os.path.dirname(torch.__file__), os.path.dirname(__file__), contextlib.__file__, "<")
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return level
