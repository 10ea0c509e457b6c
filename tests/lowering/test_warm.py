"""What is imported ahead: by which processes, when, how often, and that nothing is harmed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch

import loka_compile.backend
from loka_compile._compat import kernel_cache
from loka_compile.lowering import warm

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


class Pool:
    """Instead of Inductor's: remembers what was submitted."""

    def __init__(self) -> None:
        self.tasks: list[Any] = []

    def submit(self, *task: Any) -> Future[None]:
        self.tasks.append(task)
        return Future()


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """A pool that is ready, of three workers; nothing was warmed before, nor is after, and nobody waits."""
    from torch._inductor import async_compile

    made = Pool()
    monkeypatch.setattr(async_compile.AsyncCompile, "use_process_pool", lambda: True)
    monkeypatch.setattr(async_compile.AsyncCompile, "process_pool", lambda: made)
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 3)
    monkeypatch.setattr(async_compile.AsyncCompile, "wait", lambda self, scope: None)
    monkeypatch.setattr(warm, "_workers", [])
    monkeypatch.setattr(warm, "_thread", None)
    return made


def run(program: str) -> Any:
    """What a process of its own prints last, as JSON."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_worker_is_warmed_once(pool: Pool) -> None:
    warm.warm_workers(CUDA)
    assert [task[0] for task in pool.tasks] == [kernel_cache.warm] * 3
    warm.warm_workers(CUDA)
    assert len(pool.tasks) == 3


def test_not_for_a_cpu_and_not_before_the_workers_are_ready(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile

    warm.warm_workers(CPU)
    with monkeypatch.context() as patch:
        patch.setattr(AsyncCompile, "use_process_pool", lambda: False)
        patch.setattr(AsyncCompile, "process_pool", lambda: pytest.fail("waits for the pool"))
        warm.warm_workers(CUDA)
    assert pool.tasks == []
    warm.warm_workers(CUDA)
    assert len(pool.tasks) == 3, "ready at a later graph"


def test_a_pool_that_fails_harms_nothing(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    pool.submit = lambda *task: 1 / 0  # type: ignore[method-assign]
    with caplog.at_level("DEBUG", "loka_compile"):
        warm.warm_workers(CUDA)
    warm.import_launched()
    assert warm._thread is None, "nothing to wait for: the launches import"
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


def test_the_backend_has_workers_warmed_before_its_passes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    run_passes = loka_compile.backend.run_passes
    monkeypatch.setattr(warm, "warm_workers", events.append)
    monkeypatch.setattr(warm, "import_launched", lambda: events.append("import"))
    monkeypatch.setattr(loka_compile.backend, "run_passes", lambda *a: events.append("passes") or run_passes(*a))
    torch._dynamo.reset()
    torch.compile(torch.nn.Linear(4, 4), backend="loka", options={"table": "off"})(torch.randn(2, 4))
    assert events == [CPU, "passes"], "plain Inductor launches no kernel of ours"
    events.clear()
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.LayerNorm(256), torch.nn.Hardswish())
    torch.compile(model, backend="loka", options={"table": "off"})(torch.randn(2, 256))
    assert events == [CPU, "passes", "import"]


def test_a_worker_is_given_the_environment_of_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's code in C is looked for where Inductor keeps its kernels; another cache would not have it."""
    pytest.importorskip("triton")
    from torch._inductor.runtime import triton_helpers

    seen: list[str] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    monkeypatch.setattr(triton_helpers, "set_driver_to_gpu", lambda: seen.append(os.environ["TRITON_CACHE_DIR"]))
    kernel_cache.warm({"TRITON_CACHE_DIR": "theirs"})
    assert seen == ["theirs"]
    assert os.environ["TRITON_CACHE_DIR"] == "mine"


WORKERS = """
import json, torch
import torch._inductor.config as config
config.compile_threads = 3
from torch._inductor.async_compile import AsyncCompile
from loka_compile._compat.kernel_cache import warm_workers
AsyncCompile.wait_pool_ready()
question = '''[__import__("time").sleep(0.3), __import__("os").getpid(), "NAME" in __import__("sys").modules,
    __import__("sys").modules["triton.backends.nvidia.compiler"].get_ptxas_version.cache_info().currsize]'''
question = question.replace("NAME", "torch._inductor.runtime.triton_heuristics")
ask = lambda: [f.result()[1:] for f in [AsyncCompile.process_pool().submit(eval, question) for _ in range(3)]]
before = ask()
for future in warm_workers(0):
    future.exception()  # without a GPU there is none to find
print(json.dumps([before, ask()]))
"""


def test_inductors_workers_are_new_and_then_warm() -> None:
    """In a real pool: each worker has imported what kernels are loaded with, and none knows a version of ptxas."""
    pytest.importorskip("triton")
    before, after = run(WORKERS)
    assert sorted(pid for pid, _, _ in before) == sorted(pid for pid, _, _ in after)
    assert len({pid for pid, _, _ in after}) == 3
    assert [loaded for _, loaded, _ in before] == [False] * 3
    assert [loaded for _, loaded, _ in after] == [True] * 3
    assert [versions for _, _, versions in after] == [0] * 3


IMPORTS = """
import json, sys, torch
from concurrent.futures import Future
import loka_compile.backend
from loka_compile.lowering import warm
from loka_compile.lowering.fused import ops
from torch._inductor.async_compile import AsyncCompile
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
if AHEAD:
    warm._workers.append(Future())
    warm.import_launched()
    AsyncCompile().wait({})
    warm._thread.join()
before = set(sys.modules)
from loka_compile.kernels.running import telling
x, y, rstd = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((8, 256), (8, 256), (8, 1)))
native_specialize_impl(BaseBackend, x, False, True, True)
with telling(lambda kernel, args, options: None):
    ops._weights_cuda([x, y], torch.float8_e4m3fn, [True, False])
    dx, amax, xt = ops._backward_cuda(x, y, rstd.float(), 256, "hardswish", False)
    ops._cast_cuda(dx, amax, torch.float8_e4m3fn, True, True)
print(json.dumps(sorted(name for name in set(sys.modules) - before if name.startswith(("triton", "loka_compile")))))
"""


def test_a_chains_launches_import_nothing_that_was_imported_ahead() -> None:
    pytest.importorskip("triton")
    without = run(IMPORTS.replace("AHEAD", "False"))
    assert {"loka_compile.kernels.cast", "loka_compile.kernels.block_norm_backward"} <= set(without)
    assert run(IMPORTS.replace("AHEAD", "True")) == []


def test_imports_begin_once_and_when_the_compile_waits(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier they would take the compile's turns. Inductor's method is as it was afterwards."""
    from torch._inductor.async_compile import AsyncCompile

    events: list[Any] = []
    waits = lambda self, scope: events.append(scope)  # noqa: E731
    monkeypatch.setattr(AsyncCompile, "wait", waits)
    monkeypatch.setattr(warm.importlib, "import_module", events.append)
    warm.import_launched()
    assert AsyncCompile.wait is waits, "no worker, no wait to make use of"
    warm.warm_workers(CUDA)
    warm.import_launched()
    warm.import_launched()
    assert events == []
    AsyncCompile().wait({"a": 1})
    assert warm._thread is not None
    assert warm._thread.daemon, "it must not hold up the end of the process"
    warm._thread.join(10)
    assert sorted(events, key=str) == sorted([*warm.LAUNCHED, {"a": 1}], key=str)
    assert AsyncCompile.wait is waits
    AsyncCompile().wait({"b": 2})
    warm.import_launched()
    assert AsyncCompile.wait is waits
    assert events[-1] == {"b": 2}


def test_a_wait_that_another_has_replaced_stays_theirs(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile

    events: list[str] = []
    monkeypatch.setattr(AsyncCompile, "wait", lambda self, scope: events.append("waited"))
    kernel_cache.at_next_wait(lambda: events.append("begun"))
    ours = AsyncCompile.wait
    theirs = lambda self, scope: ours(self, scope)  # noqa: E731
    monkeypatch.setattr(AsyncCompile, "wait", theirs)
    AsyncCompile().wait({})
    AsyncCompile().wait({})
    assert events == ["begun", "waited", "waited"]
    assert AsyncCompile.wait is theirs


def test_a_thread_that_cannot_start_does_not_stop_the_compile(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    waited: list[Any] = []
    monkeypatch.setattr(AsyncCompile, "wait", lambda self, scope: waited.append(scope))
    monkeypatch.setattr(threading.Thread, "start", start)
    warm.warm_workers(CUDA)
    warm.import_launched()
    AsyncCompile().wait({})
    assert waited == [{}]


def test_what_fails_to_import_is_left_to_the_launch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    """The others are imported, nobody but the log is told, and the next import raises the same error again."""
    (tmp_path / "loka_broken.py").write_text("raise RuntimeError('broken')")
    (tmp_path / "loka_sound.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(warm, "LAUNCHED", ("loka_nowhere", "loka_broken", "loka_sound"))
    with caplog.at_level("DEBUG", "loka_compile"):
        warm._import()
    assert [record.levelname for record in caplog.records] == ["DEBUG", "DEBUG"]
    assert sys.modules.pop("loka_sound", None) is not None
    with pytest.raises(RuntimeError, match="broken"):
        import loka_broken  # noqa: F401


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_waits_for_imports_and_its_child_has_none(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the child could find a module locked by a thread that it does not have."""
    begun, end, done = threading.Event(), threading.Event(), []

    def import_module(name: str) -> None:
        begun.set()
        end.wait(10)
        done.append(name)

    monkeypatch.setattr(warm.importlib, "import_module", import_module)
    monkeypatch.setattr(warm, "PATIENCE", 10.0)
    warm.warm_workers(CUDA)
    warm.import_launched()
    warm._begin()
    assert begun.wait(10)
    threading.Timer(0.2, end.set).start()
    process = os.fork()
    if process == 0:
        os._exit(0 if len(done) == len(warm.LAUNCHED) and warm._thread is None and not warm._workers else 1)
    assert os.waitpid(process, 0)[1] == 0
    assert warm._thread is not None


GIVEN = """
import json, sys, torch
import loka_compile.backend
from loka_compile.plan import Plan
torch.compile(torch.nn.Linear(4, 4), backend="loka", options={"plan": Plan([])})(torch.randn(2, 4))
print(json.dumps([name in sys.modules for name in ("loka_compile.compile_fx", "loka_compile.auto")]))
"""


def test_a_given_plan_does_not_bring_the_probe() -> None:
    assert run(GIVEN) == [True, False]
