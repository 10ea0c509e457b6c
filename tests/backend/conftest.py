"""A fresh Dynamo and, on request, a compile without code generation."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from helpers_backend import Interpreted


@pytest.fixture(autouse=True)
def fresh():
    """Each test begins with an empty Dynamo and a known random state."""
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def no_codegen(monkeypatch):
    """Everything up to code generation runs; the graphs that it would get are run by torch's own operators."""
    interpreted = Interpreted()
    interpreted.install(monkeypatch)
    return interpreted
