"""What a GEMM costs on a GPU that is not here. No torch import.

``target`` answers for one GPU, from the points of a ``file`` and the ``surface`` through them.
"""

from loka_compile.costs.file import RECIPES
from loka_compile.costs.target import CostTable, Latency, target_of_device_name

__all__ = ["RECIPES", "CostTable", "Latency", "target_of_device_name"]
