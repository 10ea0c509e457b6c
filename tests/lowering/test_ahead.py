"""Kernels built while Inductor is at work: which, for which calls, and that what cannot be built harms nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from fused_graphs import E4M3, loka, trace

from loka_compile.lowering.fused import ahead

BF16, F32 = torch.bfloat16, torch.float32


def graph(device: str = "cuda") -> torch.fx.GraphModule:
    """A call of each kind on 96 x 1024 values, and one on a shape that the second part of the test does not use."""

    def fn(w: Tensor, v: Tensor, grad: Tensor, y: Tensor, rstd: Tensor, q: Tensor) -> tuple[Tensor, ...]:
        weights = loka.quantize_weights([w, v], E4M3, [True, False])
        dx, amax, xt = loka.block_norm_backward_amax(grad, y, rstd, 256, True, True)
        return *weights, *loka.cast_transpose(dx, amax, E4M3, True, True), xt, loka.turn_fp8(q)

    shapes = ((64, 1024), BF16), ((48, 80), BF16), ((96, 1024), BF16), ((96, 1024), BF16), ((96, 4), F32)
    return trace(fn, *shapes, ((96, 1024), E4M3), device=device)


def test_what_is_built_is_what_the_calls_take() -> None:
    """In a process that believes in an H200: each kernel once, and calls with real tensors find them."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr[-3000:]
    found = json.loads(lines[0].removeprefix("RESULT"))
    assert found["begun"] == 4
    assert set(found["built"].values()) == {1}
    assert found["called"] == found["built"]


def test_on_a_cpu_nothing_is_begun() -> None:
    assert ahead.build(graph("cpu").graph) == 0
    ahead.wait()


def test_a_kernel_that_cannot_be_built_is_left_to_its_launch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here there is no CUDA: every build fails, and nobody is told but the log."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: 1 / 0)
    with caplog.at_level("DEBUG", "loka_compile"):
        assert ahead.build(graph().graph) == 4
        ahead.wait()
    assert sum("was not built ahead" in record.message for record in caplog.records) == 4
    ahead.wait()  # nothing is left of it


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_threads_of_its_own() -> None:
    ahead.build(graph().graph)
    ahead.wait()
    child = os.fork()
    if child == 0:
        try:
            ahead.build(graph().graph)
            ahead.wait()  # for ever, if it waited for its parent's threads
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def main() -> None:
    """Build ahead, then call the same with tensors that exist, as far as launches go without a GPU."""
    import triton

    sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
    from compiled_cases import Driver

    from loka_compile.kernels import block_norm_backward, cast, device, turn

    triton.runtime.driver.set_active(Driver())
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    kernels = (
        cast._amax_weights_kernel, cast._cast_weights_kernel, cast._cast_transpose_kernel,
        block_norm_backward._backward_kernel, turn._turn_kernel,
    )  # fmt: skip

    def compiled() -> dict[str, int]:
        return {kernel.__name__: len(kernel.device_caches[0][0]) for kernel in kernels}

    begun = ahead.build(graph().graph)
    ahead.wait()
    built = compiled()
    device.launch = lambda kernel, grid, *args, **options: kernel.warmup(*args, grid=grid, **options)
    device.early = lambda device: {"PDL": True, "launch_pdl": True}
    device.ptx = lambda device: True
    rows = torch.zeros(96, 1024, dtype=BF16)
    cast.quantize_weights([torch.zeros(64, 1024, dtype=BF16), torch.zeros(48, 80, dtype=BF16)], E4M3, [True, False])
    block_norm_backward.block_norm_backward(rows, rows, torch.zeros(96, 4), block=256, hardswish=True, with_xt=True)
    cast.cast_transpose(rows, torch.zeros(12), E4M3)
    turn.turn(rows.to(E4M3))
    print("RESULT" + json.dumps({"begun": begun, "built": built, "called": compiled()}))


if __name__ == "__main__":
    main()
