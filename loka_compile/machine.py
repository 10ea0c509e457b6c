"""What a measurement was taken on: GPU, driver, versions. Every file of results and every table names it."""

from __future__ import annotations

import logging
import shutil
import subprocess
from importlib import metadata

logger = logging.getLogger(__name__)
#: Distributions of the kernel libraries, as installed.
LIBRARIES = ("mslk-cuda", "fbgemm-gpu-genai", "sgl-deep-gemm", "torchao")


def describe() -> dict[str, str]:
    """GPU (or "cpu"), driver, and versions of the packages that the numbers depend on; what is absent is left out."""
    import torch

    cuda = torch.cuda.is_available()
    found = {
        "gpu": torch.cuda.get_device_name() if cuda else "cpu",
        "driver": driver() if cuda else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        **{name: version(name) for name in ("triton", *LIBRARIES)},
    }
    return {name: value for name, value in found.items() if value}


def version(distribution: str) -> str:
    """Version of an installed distribution, or ""."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def driver() -> str:
    """Version of the GPU's driver, or "" where nvidia-smi cannot tell."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("driver version not known: %s", error)
        return ""
    return answer.stdout.strip().splitlines()[0]
