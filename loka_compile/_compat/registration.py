"""Makes ``backend="loka"`` known in a checkout that is not installed, without importing torch.

Dynamo looks for the entry point group ``torch_dynamo_backends`` when it needs a backend for the first time. An
installed package has that entry point; for a checkout on ``sys.path`` a distribution finder provides the same one.
Where Dynamo has looked already, the backend is registered directly (``register_backend``, torch 2.11 to 2.14).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

GROUP = "torch_dynamo_backends"
_FILES = {
    "METADATA": "Metadata-Version: 2.1\nName: loka-compile\nVersion: 0\n",
    "entry_points.txt": f"[{GROUP}]\nloka = loka_compile.backend:loka\n",
}


def register_uninstalled() -> None:
    """Announce the backend unless an installed entry point does; calling it again changes nothing."""
    if metadata.entry_points(group=GROUP, name="loka"):
        return
    registry = sys.modules.get("torch._dynamo.backends.registry")
    if registry is None:
        sys.meta_path.append(_CheckoutFinder())
    elif "loka" not in registry.list_backends(exclude_tags=()):
        registry.register_backend(_loka, name="loka")


class _CheckoutDistribution(metadata.Distribution):
    """What the installed package's metadata would say about entry points."""

    def read_text(self, filename: str) -> str | None:
        return _FILES.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parents[2] / path


class _CheckoutFinder(metadata.DistributionFinder):
    """Finds no modules, only the distribution above."""

    @staticmethod
    def find_spec(*_: Any) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterable[metadata.Distribution]:
        name = getattr(context, "name", None)
        return [_CheckoutDistribution()] if name in (None, "loka-compile", "loka_compile") else []


def _loka(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
    from loka_compile.backend import loka

    return loka(gm, example_inputs, **kwargs)
