"""Fresh caches, a fresh Dynamo and, on request, a compile without code generation."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from helpers_backend import Interpreted


@pytest.fixture(scope="session", autouse=True)
def compile_caches(tmp_path_factory):
    """Nothing that an earlier session compiled or measured is seen here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "1"))
        yield


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """Each test begins with an empty Dynamo, its own cache of tables and a known random state."""
    monkeypatch.setenv("LOKA_CACHE_DIR", str(tmp_path / "loka_cache"))
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_codegen(monkeypatch):
    """Everything up to code generation runs; the graphs that it would get are run by torch's own operators."""
    interpreted = Interpreted()
    interpreted.install(monkeypatch)
    return interpreted
