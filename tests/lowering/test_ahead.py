"""Kernels built by worker processes while Inductor is at work: which, for which calls, and that nothing is harmed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from fused_graphs import E4M3, loka, trace

from loka_compile._compat import kernel_cache
from loka_compile.kernels import (  # noqa: F401  (launches of theirs are watched)
    block_norm_backward,
    block_norm_backward_fp8,
    cast,
    grad_input_fp8,
    quantize,
    running,
    scaled_gemm,
    turn,
)  # fmt: skip
from loka_compile.lowering import ahead, quantize_op  # noqa: F401  (registers loka::quantize_fp8)
from loka_compile.lowering.fused import grad_input, ops_meeting  # noqa: F401  (register operators)
from loka_compile.lowering.providers import triton_gemm  # noqa: F401  (likewise)

BF16, F32 = torch.bfloat16, torch.float32


def graph(device: str = "cuda") -> torch.fx.GraphModule:
    """A call of each kind on 96 x 1024 values; the weight of a product is a transpose, as torch wants it."""

    def fn(
        w: Tensor, v: Tensor, grad: Tensor, y: Tensor, rstd: Tensor, q: Tensor, qw: Tensor, scale: Tensor
    ) -> tuple[Tensor, ...]:
        weights = loka.quantize_weights([w, v], E4M3, [True, False])
        dx, amax, xt = loka.block_norm_backward_amax(grad, y, rstd, 256, "hardswish", True)
        rows = loka.quantize_fp8(grad, "rowwise", E4M3, True, False)
        state = loka.meeting_state(grad)
        how = (state, 256, "silu", E4M3, False, True, True, True)
        below = loka.grad_input_fp8(q, qw.t(), scale, scale, y, rstd, *how)
        met = loka.block_norm_backward_fp8(grad, y, rstd, *how)
        product = loka.scaled_gemm(q, scale, qw, scale, "tensorwise", BF16)
        return (
            *weights, *loka.cast_transpose(dx, amax, E4M3, True, True), xt, loka.turn_fp8(q), *rows, *below, *met,
            product,
        )  # fmt: skip

    shapes = [((64, 1024), BF16), ((48, 80), BF16), ((96, 1024), BF16), ((96, 1024), BF16), ((96, 4), F32)]
    return trace(fn, *shapes, ((96, 1024), E4M3), ((1024, 1024), E4M3), ((), F32), device=device)


#: What they launch; the product does not use TMA at this size, of which a fake tensor can say nothing.
KERNELS = [
    "_amax_weights_kernel", "_backward_fp8_kernel", "_backward_kernel", "_cast_transpose_kernel",
    "_cast_weights_kernel", "_grad_input_fp8_kernel", "_rows_kernel", "_scaled_gemm_kernel", "_turn_kernel",
]  # fmt: skip


def child(*args: str, folder: Path) -> dict:
    """What this file prints as a program, with Triton's cache in ``folder``."""
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "TRITON_CACHE_DIR")}
    env |= {"TRITON_CACHE_DIR": str(folder)}
    done = subprocess.run([sys.executable, __file__, *args], env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT"))


def test_what_workers_build_is_what_the_calls_take(tmp_path: Path) -> None:
    """In processes that believe in an H200: one describes and lets Inductor's workers build, then another calls with
    real tensors, as far as a launch goes without a GPU, and finds everything in Triton's cache."""
    begun = child("build", folder=tmp_path)
    assert sorted(set(begun["names"])) == KERNELS
    assert begun["errors"] == []
    assert begun["again"] == 0, "submitted once"
    called = child("call", folder=tmp_path)
    assert sorted(set(called["found"])) == KERNELS
    assert called["compiled"] == []


@pytest.mark.gpu
def test_a_training_step_compiles_no_kernel_of_ours_itself(tmp_path: Path) -> None:
    trained = child("train", folder=tmp_path)
    assert {"_amax_weights_kernel", "_cast_weights_kernel"} <= set(trained["begun"])
    assert set(trained["begun"]) <= set(trained["found"])
    assert not set(trained["begun"]) & set(trained["compiled"])


def test_on_a_cpu_and_without_workers_nothing_is_begun() -> None:
    assert ahead.build(graph("cpu").graph) == 0
    with torch._inductor.config.patch(compile_threads=1):
        assert kernel_cache.submit(kernel_cache.Launch("m", "k", "{}", ("cuda", 90, 32), ""), 0) is None


def test_launches_that_cannot_be_described_are_left_to_themselves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is told but the log."""
    monkeypatch.setattr(ahead, "describe", lambda kernel, args, options: 1 / 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with caplog.at_level("DEBUG", "loka_compile"):
        assert ahead.build(graph().graph) == 0
    assert sum("could not be described" in record.message for record in caplog.records) == 8


class Kernel:
    """Something to launch."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.calls.append((grid, args, options))


def test_a_launch_waits_for_its_own_kernel_and_survives_a_failed_worker() -> None:
    one, other = Kernel(), Kernel()
    slow: Future[None] = Future()
    running.expect(one, slow)
    running.run_kernel(other, (3,), 1, A=2)
    assert other.calls == [((3,), (1,), {"A": 2})], "another kernel's worker is not waited for"
    thread = threading.Thread(target=running.run_kernel, args=(one, (4,)))
    thread.start()
    thread.join(0.2)
    assert one.calls == []
    slow.set_exception(RuntimeError("the worker died"))
    thread.join(10)
    assert one.calls == [((4,), (), {})]
    running.run_kernel(one, (5,))
    assert len(one.calls) == 2
    assert not running._building


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_expects_nothing() -> None:
    kernel = Kernel()
    running.expect(kernel, Future())
    try:
        process = os.fork()
        if process == 0:
            running.run_kernel(kernel, (1,))  # for ever, if it waited for its parent's workers
            os._exit(0 if kernel.calls else 1)
        assert os.waitpid(process, 0)[1] == 0
    finally:
        running.forget()


def test_another_threads_launch_is_not_swallowed_by_a_description(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    knobs = triton.knobs
    seen: list[str] = []

    class Described:
        fn = SimpleNamespace(__module__="m", __name__="k")

        def warmup(self, *args, grid, **options):
            hook = knobs.runtime.jit_cache_hook
            thread = threading.Thread(target=lambda: seen.append(hook(compile={"specialization_data": "theirs"})))
            thread.start()
            thread.join()
            assert hook(compile={"specialization_data": "ours"}) is True

    before = knobs.runtime.jit_cache_hook
    target = SimpleNamespace(backend="cuda", arch=90, warp_size=32)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_target=lambda: target))
    monkeypatch.setattr(triton.compiler, "make_backend", lambda target: SimpleNamespace(hash=lambda: "ptxas"))
    found = kernel_cache.describe(Described(), (), {})
    assert found == kernel_cache.Launch("m", "k", "ours", ("cuda", 90, 32), "ptxas")
    assert seen == [None]
    assert knobs.runtime.jit_cache_hook is before


def test_the_environment_of_a_worker_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    monkeypatch.setenv("TRITON_DEBUG", "1")
    with kernel_cache._environment({"TRITON_CACHE_DIR": "theirs", "TRITON_HOME": "there"}):
        assert os.environ["TRITON_CACHE_DIR"] == "theirs"
        assert os.environ["TRITON_HOME"] == "there"
        assert "TRITON_DEBUG" not in os.environ
    assert (os.environ["TRITON_CACHE_DIR"], os.environ["TRITON_DEBUG"]) == ("mine", "1")
    assert "TRITON_HOME" not in os.environ


def train() -> None:
    """One step of two fused layers, all GEMMs in FP8."""
    from torch._inductor.async_compile import AsyncCompile

    from loka_compile.gemm import Role
    from loka_compile.plan import Decision, Plan

    model = torch.nn.Sequential(
        *[m for _ in range(3) for m in (torch.nn.Linear(512, 512), torch.nn.LayerNorm(512), torch.nn.SiLU())]
    ).to("cuda", BF16)
    plan = Plan([Decision(f"{3 * i}#0", role, "torch", "tensorwise") for i in range(3) for role in Role])
    AsyncCompile.wait_pool_ready()
    x = torch.randn(256, 512, device="cuda", dtype=BF16)
    torch.compile(model, backend="loka", options={"plan": plan})(x).sum().backward()
    torch.cuda.synchronize()


def use_another_ptxas() -> None:
    """As Inductor does once it has compiled in a process: by then Triton knows the version of its own."""
    from triton import knobs
    from triton.compiler import make_backend
    from triton.runtime import driver

    make_backend(driver.active.get_current_target()).hash()
    other = Path(os.environ["TRITON_CACHE_DIR"]).with_name("ptxas")
    own = knobs.nvidia.ptxas
    script = f'#!/bin/sh\n[ "$1" = --version ] && echo another build\nexec {own.path} "$@"\n'
    other.write_text(script)
    other.chmod(0o755)
    os.environ["TRITON_PTXAS_PATH"] = str(other)
    assert knobs.nvidia.ptxas.path == str(other)


def main(what: str) -> None:
    """Describe and build, or call, on what is taken for an H200; or train on a GPU."""
    import triton

    found: list[str] = []
    compiled: list[str] = []

    def listener(src: Any, cache_hit: bool, **more: Any) -> None:
        (found if cache_hit else compiled).append(src.name)

    triton.knobs.compilation.listener = listener
    if what == "train":
        train()
        begun = [launch.name for launch, _ in ahead._begun]
        print("RESULT" + json.dumps({"found": found, "compiled": compiled, "begun": begun}))
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
    from compiled_cases import MULTIPROCESSORS, Driver

    from loka_compile.kernels import device, grid_barrier

    triton.runtime.driver.set_active(Driver())
    use_another_ptxas()
    torch.cuda.device = lambda index: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    if what == "build":
        from torch._inductor import config
        from torch._inductor.async_compile import AsyncCompile

        config.compile_threads = 2
        AsyncCompile.wait_pool_ready()
        ahead.build(graph().graph)
        errors = [str(f.exception()) for fs in running._building.values() for f in fs if f.exception() is not None]
        names = [launch.name for launch, _ in ahead._begun]
        print("RESULT" + json.dumps({"names": names, "errors": errors, "again": ahead.build(graph().graph)}))
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("loka_compile.kernels.") and hasattr(module, "run_kernel"):
            module.run_kernel = lambda kernel, grid, *args, **options: kernel.warmup(*args, grid=grid, **options)
    # The tensors that exist here are on the CPU; the launches are those of a GPU.
    device.early = lambda device: {"PDL": True, "launch_pdl": True}
    device.ptx = lambda device: True
    gpu = torch.device("cuda")
    together, phases = grid_barrier.together, grid_barrier.phases
    grid_barrier.together = lambda device, registers=None: together(gpu, registers)
    grid_barrier.phases = lambda device: phases(gpu)
    for node in graph("cpu").graph.nodes:
        run = ahead.ON_CUDA.get(node.target._schema.name) if node.op == "call_function" and real(node) else None
        if run is not None:
            run(*torch.fx.map_arg(node.args, lambda n: zeros(n.meta["val"])))
    print("RESULT" + json.dumps({"found": found, "compiled": compiled}))


def real(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)


def zeros(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()


if __name__ == "__main__":
    main(sys.argv[1])
