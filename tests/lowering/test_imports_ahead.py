"""What is imported ahead: when, how often, and that nothing is harmed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from loka_compile._compat import kernel_cache
from loka_compile.lowering import imports


@pytest.fixture(autouse=True)
def _new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was imported ahead before, nor is after, and nobody waits."""
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr(AsyncCompile, "wait", lambda self, scope: None)
    monkeypatch.setattr(imports, "_thread", None)


class OnCuda(torch.Tensor):
    """One that says so."""

    device = torch.device("cuda", 0)


CUDA, CPU = [3, torch.zeros(2).as_subclass(OnCuda)], [3, torch.zeros(2)]


def run(program: str) -> Any:
    """What a process of its own prints last, as JSON."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


IMPORTS = """
import json, sys, torch, types
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=132)
import loka_compile.backend
from loka_compile.lowering import imports
from loka_compile.lowering.fused import ops, ops_meeting
from torch._inductor.async_compile import AsyncCompile
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
if AHEAD:
    class OnCuda(torch.Tensor):
        device = torch.device("cuda", 0)
    imports.import_launched([torch.zeros(2).as_subclass(OnCuda)])
    AsyncCompile().wait({})
    imports._thread.join()
before = set(sys.modules)
from loka_compile.kernels.running import telling
x, y, rstd = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((8, 256), (8, 256), (8, 1)))
native_specialize_impl(BaseBackend, x, False, True, True)
with telling(lambda kernel, args, options: None):
    ops._weights_cuda([x, y], torch.float8_e4m3fn, [True, False])
    state = torch.zeros(3, dtype=torch.int32)
    ops_meeting._cuda(x, y, rstd.float(), state, 256, "hardswish", torch.float8_e4m3fn, False, True, True, False)
print(json.dumps(sorted(name for name in set(sys.modules) - before if name.startswith(("triton", "loka_compile")))))
"""


def test_a_chains_launches_import_nothing_that_was_imported_ahead() -> None:
    pytest.importorskip("triton")
    without = run(IMPORTS.replace("AHEAD", "False"))
    assert {"loka_compile.kernels.cast", "loka_compile.kernels.block_norm_backward_fp8"} <= set(without)
    assert run(IMPORTS.replace("AHEAD", "True")) == []


def test_imports_begin_once_and_when_the_compile_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier they would take the compile's turns. Inductor's method is as it was afterwards."""
    from torch._inductor.async_compile import AsyncCompile

    events: list[Any] = []
    waits = lambda self, scope: events.append(scope)  # noqa: E731
    monkeypatch.setattr(AsyncCompile, "wait", waits)
    monkeypatch.setattr(imports.importlib, "import_module", events.append)
    imports.import_launched(CPU)
    assert AsyncCompile.wait is waits, "a CPU launches none of these"
    imports.import_launched(CUDA)
    imports.import_launched(CUDA)
    assert events == []
    AsyncCompile().wait({"a": 1})
    assert imports._thread is not None
    assert imports._thread.daemon, "it must not hold up the end of the process"
    imports._thread.join(10)
    assert sorted(events, key=str) == sorted([*imports.LAUNCHED, {"a": 1}], key=str)
    assert AsyncCompile.wait is waits
    AsyncCompile().wait({"b": 2})
    imports.import_launched(CUDA)
    assert AsyncCompile.wait is waits
    assert events[-1] == {"b": 2}


def test_a_wait_that_another_has_replaced_stays_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_thread_that_cannot_start_does_not_stop_the_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    waited: list[Any] = []
    monkeypatch.setattr(AsyncCompile, "wait", lambda self, scope: waited.append(scope))
    monkeypatch.setattr(threading.Thread, "start", start)
    imports.import_launched(CUDA)
    AsyncCompile().wait({})
    assert waited == [{}]


def test_what_fails_to_import_is_left_to_the_launch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    """The others are imported, nobody but the log is told, and the next import raises the same error again."""
    (tmp_path / "loka_broken.py").write_text("raise RuntimeError('broken')")
    (tmp_path / "loka_sound.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(imports, "LAUNCHED", ("loka_nowhere", "loka_broken", "loka_sound"))
    with caplog.at_level("DEBUG", "loka_compile"):
        imports._import()
    assert [record.levelname for record in caplog.records] == ["DEBUG", "DEBUG"]
    assert sys.modules.pop("loka_sound", None) is not None
    with pytest.raises(RuntimeError, match="broken"):
        import loka_broken  # noqa: F401


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_waits_for_imports_and_its_child_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the child could find a module locked by a thread that it does not have."""
    begun, end, done = threading.Event(), threading.Event(), []

    def import_module(name: str) -> None:
        begun.set()
        end.wait(10)
        done.append(name)

    monkeypatch.setattr(imports.importlib, "import_module", import_module)
    monkeypatch.setattr(imports, "PATIENCE", 10.0)
    imports.import_launched(CUDA)
    imports._begin()
    assert begun.wait(10)
    threading.Timer(0.2, end.set).start()
    process = os.fork()
    if process == 0:
        os._exit(0 if len(done) == len(imports.LAUNCHED) and imports._thread is None else 1)
    assert os.waitpid(process, 0)[1] == 0
    assert imports._thread is not None


GIVEN = """
import json, sys, torch, types
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=132)
import loka_compile.backend
from loka_compile.plan import Plan
torch.compile(torch.nn.Linear(4, 4), backend="loka", options={"plan": Plan([])})(torch.randn(2, 4))
print(json.dumps([name in sys.modules for name in ("loka_compile.compile_fx", "loka_compile.auto")]))
"""


def test_a_given_plan_does_not_bring_the_probe() -> None:
    assert run(GIVEN) == [True, False]
