"""The range of torch versions that the private APIs in this folder were checked against."""

from __future__ import annotations

import re

from loka_compile.errors import UnsupportedTorchError

MINIMUM, LIMIT = (2, 11), (2, 15)


def check_torch(version: str | None = None) -> None:
    """Raise unless ``MINIMUM <= torch < LIMIT``.

    Raises:
        UnsupportedTorchError: says which version is installed and which are supported.
    """
    if version is None:
        import torch

        version = torch.__version__
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not MINIMUM <= (int(found[1]), int(found[2])) < LIMIT:
        low, high = (".".join(map(str, v)) for v in (MINIMUM, LIMIT))
        raise UnsupportedTorchError(
            f"loka_compile supports torch >= {low}, < {high}, but torch {version} is installed; "
            f'install a supported one, e.g. pip install "torch>={low},<{high}"'
        )
