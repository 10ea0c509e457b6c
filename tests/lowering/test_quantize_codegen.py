"""How many GPU kernels Inductor makes of a quantiser, read off its generated code; no GPU runs."""

import re
from contextlib import suppress

import pytest
import torch
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from loka_compile._compat import read_back
from loka_compile.gemm import Scaling
from loka_compile.lowering.quantize import quantize


class PretendedDriver:
    """Says that there is an sm_90, which is all that code generation asks."""

    class utils:
        @staticmethod
        def get_device_properties(*_):
            return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_stream(self, *_):
        return 0


@pytest.fixture
def kernels(monkeypatch):
    """A function that compiles and returns the names of the generated kernels, one per launch site."""
    generate = generator(monkeypatch)
    return lambda fn, *args: re.findall(r"def (triton_\w+)\(", generate(fn, *args))


@pytest.fixture
def code_of(monkeypatch):
    """A function that compiles and returns the generated code."""
    return generator(monkeypatch)


def generator(monkeypatch):
    codes = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(codes.append))
    monkeypatch.setattr(driver, "_active", PretendedDriver())

    def generate(fn, *args):
        codes.clear()
        torch._dynamo.reset()
        # The code is saved before it fails: nothing here can make a binary of it, or launch one.
        with config.patch(cpu_backend="triton", fx_graph_cache=False, compile_threads=1), suppress(Exception):
            torch.compile(fn, fullgraph=True)(*args)
        (code,) = codes
        return code

    return generate


def test_one_pass_where_one_is_possible(kernels):
    x = torch.randn(1024, 2048, dtype=torch.bfloat16)

    def after_hardswish(scaling, **more):
        return lambda x: tuple(quantize(torch.nn.functional.hardswish(x), scaling, **more))

    assert len(kernels(after_hardswish(Scaling.ROWWISE), x)) == 1
    assert len(kernels(after_hardswish(Scaling.BLOCK_1X128), x)) == 1
    # No amax: the producer writes FP8 itself. The second kernel writes the one constant scale.
    bounded = kernels(after_hardswish(Scaling.TENSORWISE, bound=16.0), x)
    assert len(bounded) == 2
    assert not [name for name in bounded if "amax" in name]


def test_both_orientations_share_the_amax(kernels):
    x = torch.randn(1024, 2048, dtype=torch.bfloat16)
    for scaling in (Scaling.TENSORWISE, Scaling.BLOCK_128X128):
        one = kernels(lambda x, s=scaling: tuple(quantize(x, s)), x)
        both = kernels(lambda x, s=scaling: (*quantize(x, s), *quantize(x, s, transpose=True)), x)
        amax = [[name for name in names if re.search(r"(red|per)_fused", name)] for names in (one, both)]
        assert len(amax[0]) == len(amax[1])


@pytest.mark.skipif(
    torch.__version__ >= (2, 14), reason="torch puts the barrier itself, and not where code is made for a CPU, as here"
)
def test_a_kernel_waits_before_it_reads_what_it_wrote(code_of):
    """Else a thread reads what another has not written yet: wrong gradients, another way in each run."""

    def centred(x, w):
        z = x * w
        z = z / z.abs().amax(1, keepdim=True)
        return z, z - z.mean(1, keepdim=True)

    read_back.install()
    with config.patch({"triton.persistent_reductions": False}):
        lines = [line.strip() for line in code_of(centred, torch.randn(64, 8192), torch.randn(8192)).splitlines()]
    reads = [i for i, line in enumerate(lines) if re.search(r"tl\.load\((in_)?out_ptr", line)]
    assert reads, "nothing is read back, so nothing is tested"
    for i in reads:
        behind = [line for line in lines[:i] if not re.search(r"= tl\.load\(", line)]
        assert behind[-1] == "tl.debug_barrier()", lines[i - 3 : i + 1]
