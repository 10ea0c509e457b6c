"""Triton kernels built by Inductor's worker processes before they are launched, through Triton's cache on disk.

Private: ``FakeTensorMode``, ``AsyncCompile`` with ``use_process_pool``, ``process_pool`` and ``wait`` (torch 2.11 to
2.14), Triton's ``jit_cache_hook``, ``JITFunction.preload``, ``DriverConfig._active`` and ``CudaLauncher`` (triton 3.6
to 3.8). Where one of them is missing a kernel is built at its first launch, as it would be without this file.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

logger = logging.getLogger(__name__)
#: What Triton and Inductor read of the environment: it decides where a kernel is kept and under which key.
_PREFIXES = ("TRITON_", "TORCHINDUCTOR_CACHE_DIR")


@dataclass(frozen=True)
class Launch:
    """What one call of a kernel compiles: the kernel's place, Triton's own description of it, and for which GPU."""

    module: str
    name: str
    data: str
    #: Triton's GPUTarget as (backend, architecture, threads of a warp).
    target: tuple[str, int | str, int]
    #: Of Triton's backend here, a part of every key in its cache: it holds the version of the ptxas that this process
    #: asked first, whichever it uses now. A worker may have asked another, as Inductor has it use the one torch brings.
    backend: str


def fake_mode() -> FakeTensorMode:
    """Tensors made in it have no data."""
    return FakeTensorMode()


def describe(kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Launch | None:
    """The launch ``kernel[grid](*args, **options)`` of fake tensors; None if it is compiled already.

    Described is what tensors take that begin on 16 bytes; others are compiled when they come.
    """
    from triton import knobs
    from triton.compiler import make_backend
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    found: list[str] = []
    here, outer = threading.get_ident(), knobs.runtime.jit_cache_hook

    def hook(**call: Any) -> Any:
        if threading.get_ident() != here:  # another thread's launch must not be lost
            return outer(**call) if outer is not None else None
        found.append(call["compile"]["specialization_data"])
        return True

    def without_data(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(map(without_data, arg))
        return MockTensor(arg.dtype) if isinstance(arg, FakeTensor) else arg

    knobs.runtime.jit_cache_hook = hook
    try:
        kernel.warmup(*map(without_data, args), grid=(1,), **options)
    finally:
        knobs.runtime.jit_cache_hook = outer
    if not found:
        return None
    target = driver.active.get_current_target()
    backend = make_backend(target).hash()
    where = (kernel.fn.__module__, kernel.fn.__name__)
    return Launch(*where, found[0], (target.backend, target.arch, target.warp_size), backend)


def build(launch: Launch, environment: Mapping[str, str]) -> None:
    """Compile a launch, and the C code that performs it, into Triton's cache; in a worker process, without a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime import driver

    class Driver:
        """What Triton asks of a GPU before it compiles for one."""

        def get_current_device(self) -> int:
            return 0

        def get_current_target(self) -> Any:
            return GPUTarget(*launch.target)

    kernel = getattr(importlib.import_module(launch.module), launch.name)
    before = driver._active
    backend = type(make_backend(GPUTarget(*launch.target)))
    with _environment(environment), mock.patch.object(backend, "hash", return_value=launch.backend):
        driver.set_active(Driver())
        try:
            built = kernel.preload(launch.data)
        finally:
            driver.set_active(before)
        _build_launcher(built)


def _build_launcher(built: Any) -> None:
    try:
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(built.src, built.metadata)
    except Exception:  # no CUDA driver's library here, or a Triton that launches in another way: the launch does it
        logger.debug("the code that launches %s was not built", built.metadata.name, exc_info=True)


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    before = relevant_environment()
    _exchange(before, wanted)
    try:
        yield
    finally:
        _exchange(wanted, before)


def _exchange(old: Mapping[str, str], new: Mapping[str, str]) -> None:
    for name in old.keys() - new.keys():
        del os.environ[name]
    os.environ.update(new)


def relevant_environment(device: int | None = None) -> dict[str, str]:
    """The environment that kernels are built in; with a device, as Inductor will have set it at the first launch."""
    found = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
    if device is not None:
        from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

        found["TRITON_CACHE_DIR"] = triton_cache_dir(device)
    return found


def submit(launch: Launch, device: int) -> Future[None] | None:
    """Have a launch built by one of Inductor's workers; None where there are none, or none yet."""
    from torch._inductor.async_compile import AsyncCompile

    if not AsyncCompile.use_process_pool():
        return None
    return AsyncCompile.process_pool().submit(build, launch, relevant_environment(device))


def at_next_wait(begin: Callable[[], None]) -> None:
    """Call ``begin`` when Inductor next waits for its workers, before it does."""
    from torch._inductor.async_compile import AsyncCompile

    original, begun = AsyncCompile.wait, threading.Lock()

    def wait(self: Any, scope: dict[str, Any]) -> None:
        if begun.acquire(blocking=False):  # never released: once, whichever thread it is
            begin()
            if AsyncCompile.wait is wait:  # nobody has put another one over it
                AsyncCompile.wait = original  # type: ignore[method-assign]
        original(self, scope)

    AsyncCompile.wait = wait  # type: ignore[method-assign]
