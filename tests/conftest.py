"""What all tests share: GPU tests need a GPU, no test sees another one's caches, and no test is dead."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

from tests.cpu_fp8 import speed_up

#: A run of other numbers: ``LOKA_TEST_SEED=1 make test``. No test may depend on which they are.
SEED = int(os.environ.get("LOKA_TEST_SEED", "0"))


def pytest_configure() -> None:
    """FP8 on a CPU is fast enough to be tested with, and what modules of tests draw is the same in every run."""
    torch.manual_seed(SEED)
    with contextlib.suppress(ImportError):  # a machine with a GPU may have nothing but torch and pytest
        from hypothesis import settings

        settings.register_profile("same", derandomize=SEED == 0)
        settings.load_profile("same")
    with warnings.catch_warnings(action="ignore"):
        speed_up()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device: run `make test-gpu` on a machine that has one")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking through torch's modules again and again while graphs are made.

    What there is now stays until the end; what tests make is collected as ever, if not as often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> None:
    """A public method of a Test class that pytest would not run is a test that somebody believes in."""
    if isinstance(obj, type) and name.startswith("Test"):
        methods = {m: f for m, f in vars(obj).items() if callable(f) and "Fixture" not in type(f).__name__}
        dead = [m for m in methods if not m.startswith(("test", "_", "setup", "teardown"))]
        if dead:
            raise collector.CollectError(f"{obj.__qualname__} has methods that never run as tests: {', '.join(dead)}")


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Own table cache, no compiled graphs from another test or run, no graphs left in Dynamo, the same random numbers.

    A graph that comes from a compile cache is not lowered again, and its report then holds no GEMMs. What only saves
    time (compiled C++, its headers) stays shared: ``force_disable_caches`` would make each compile seconds longer.
    """
    monkeypatch.setenv("LOKA_CACHE_DIR", str(tmp_path / "loka_cache"))
    torch.manual_seed(SEED)
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def compile_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A compile cache of this test's own, empty and switched on; for tests of what is cached."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor_cache"))
    with inductor_config.patch(fx_graph_cache=True), functorch_config.patch(enable_autograd_cache=True):
        yield tmp_path / "inductor_cache"


@pytest.fixture
def norms_in_fp32() -> Iterator[None]:
    """CUDA's rule for norms under the CPU's autocast, which has none: they run in fp32 and return fp32.

    Dynamo then records, AOTAutograd traces and the CPU computes what a GPU would.
    """
    import loka_compile.ops  # noqa: F401  (defines torch.ops.loka)

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) else value

    def in_fp32(op: Any) -> Any:
        def run(*args: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
                return op(*map(wide, args))

        return run

    aten, loka = torch.library.Library("aten", "IMPL"), torch.library.Library("loka", "FRAGMENT")
    aten.impl("layer_norm", in_fp32(torch.ops.aten.layer_norm), "AutocastCPU")
    aten.impl("rms_norm", in_fp32(torch.ops.aten.rms_norm), "AutocastCPU")
    loka.impl("block_norm", in_fp32(torch.ops.loka.block_norm), "AutocastCPU")
    yield
    aten._destroy()
    loka._destroy()
