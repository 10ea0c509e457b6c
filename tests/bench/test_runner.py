"""The runner with a timer that counts instead of timing: order, budget, resuming, broken arms."""

import os
from dataclasses import dataclass

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from loka_compile.bench import arms, command, runner
from loka_compile.bench.operands import Operands, copies_past_l2
from loka_compile.bench.prepare import FirstCall, Preparation, SelfTest
from loka_compile.bench.records import Records, Timing, kernel_key
from loka_compile.bench.runner import Bench
from loka_compile.bench.timing import DeviceLostError, summarise
from loka_compile.bench.workload import Operand, gemms, read_layers
from loka_compile.cli import app
from loka_compile.costs import CostTable
from loka_compile.errors import UnknownNameError
from loka_compile.gemm import BLOCKWISE, ROWWISE, TENSORWISE, Gemm, Role, Scaling
from loka_compile.lowering.providers import get_provider
from loka_compile.lowering.providers.base import Provider
from loka_compile.lowering.quantize import quantize

L2 = 1 << 16
rowwise = pytest.mark.skipif(
    bool(get_provider("torch").supported(ROWWISE, "cpu")), reason="torch < 2.13 has no rowwise scaled_mm on a CPU"
)
HEADER = {"gpu": "none", "driver": "", "torch": "x", "triton": ""}


class FakeTimer:
    """Makes the calls of every arm, runs the first, and says how many bytes came out."""

    def __init__(self, fails=(), kills=()):
        self.groups, self.fails, self.kills = [], fails, kills

    def measure(self, makers, on_try):
        self.groups.append(list(makers))
        found = {}
        for name, make in makers.items():
            on_try(name)
            if any(text in name for text in self.kills):
                raise DeviceLostError("illegal address")
            if any(text in name for text in self.fails):
                found[name] = "RuntimeError: no luck"
                continue
            out = make()[0]()
            out = out if isinstance(out, tuple) else (out,)
            found[name] = Timing(1.0 + 1e-3 * sum(t.nbytes for t in out), 0.01)
        return found


class Clock:
    """Every look takes a second."""

    def __init__(self):
        self.now = -1.0

    def __call__(self):
        self.now += 1.0
        return self.now


@pytest.fixture
def layers(tmp_path):
    (tmp_path / "s.csv").write_text("group,layer,M_batch,K_in,N_out\na,0,64,128,256\na,1,48,13,1\nb,0,32,256,128\n")
    return read_layers(tmp_path / "s.csv")


def bench(path, layers, timer, *, seconds=1e9, clock=lambda: 0.0, roles=tuple(Role)):
    providers, operands = [get_provider("torch")], Operands(torch.device("cpu"), 1 << 18)
    wanted, records = gemms(layers, roles, ["bfloat16"]), Records(path, HEADER)
    return Bench(wanted, providers, records, timer, operands, seconds=seconds, l2=L2, clock=clock)


@pytest.fixture(autouse=True)
def eager_quantizers(monkeypatch):
    """Compiling them is not the subject here."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@rowwise
def test_everything_is_measured_once(tmp_path, layers):
    timer = FakeTimer()
    outcome = bench(tmp_path / "h.csv", layers, timer).run()
    assert (outcome.broken, outcome.left) == ({}, 0)
    # K = 13 and N = 1: the baseline alone, and the reason.
    assert timer.groups[1] == [str(("48", "1", "13", "forward", "bfloat16", "high_precision", "native"))]
    assert outcome.refused[("torch:rowwise", "torch._scaled_mm needs k to be a multiple of 16; it is 13")] == 1
    assert len(timer.groups[0]) == 5  # the baseline and four recipes, in turns
    table = CostTable.from_csv(tmp_path / "h.csv")
    assert set(table.candidates()) == {
        ("torch", r) for r in ("tensorwise", "tensorwise_fast", "rowwise", "rowwise_fast")
    }
    # [64, 256] bf16 came out: 32 KiB.
    assert table.latency(Gemm("", Role.FORWARD, 64, 256, 128), "torch", "rowwise").gemm_us == pytest.approx(
        33.77, abs=0.01
    )
    second = FakeTimer()
    assert bench(tmp_path / "h.csv", layers, second).run().measured == 0
    assert all(not group for group in second.groups)


def test_a_budget_ends_it_and_the_rest_is_measured_later(tmp_path, layers):
    first = bench(tmp_path / "h.csv", layers, FakeTimer(), seconds=6, clock=Clock()).run()
    assert first.left > 0
    rest = bench(tmp_path / "h.csv", layers, FakeTimer()).run()
    whole = bench(tmp_path / "w.csv", layers, FakeTimer()).run()
    assert 0 < first.measured < whole.measured
    assert first.measured + rest.measured == whole.measured
    assert rest.left == 0


def test_quantisers_get_their_share_of_a_short_budget(tmp_path, layers):
    timer = FakeTimer()
    bench(tmp_path / "h.csv", layers, timer, seconds=12, clock=Clock()).run()
    kinds = ["quantize" in group[0] for group in timer.groups if group]
    assert kinds[0] is False
    assert True in kinds


@rowwise
def test_a_broken_arm_is_reported_and_does_not_stop_the_others(tmp_path, layers):
    outcome = bench(tmp_path / "h.csv", layers, FakeTimer(fails=["tensorwise_fast"])).run()
    assert set(outcome.broken.values()) == {"RuntimeError: no luck"}
    assert all(key[6] == "tensorwise_fast" for key in outcome.broken)
    table = CostTable.from_csv(tmp_path / "h.csv")
    assert ("torch", "rowwise") in table.candidates()
    assert ("torch", "tensorwise_fast") not in table.candidates()
    again = FakeTimer()
    bench(tmp_path / "h.csv", layers, again).run()
    assert not any("tensorwise_fast" in name for group in again.groups for name in group)


@rowwise
def test_a_lost_device_ends_the_process_and_the_next_goes_on_after_it(tmp_path, layers):
    with pytest.raises(DeviceLostError):
        bench(
            tmp_path / "h.csv", layers, FakeTimer(kills=["'64', '256', '128', '', 'bfloat16', 'torch', 'rowwise'"])
        ).run()
    outcome = bench(tmp_path / "h.csv", layers, FakeTimer()).run()
    assert outcome.left == 0
    records = Records(tmp_path / "h.csv", HEADER)
    assert records.broken == {kernel_key(Gemm("", Role.FORWARD, 64, 256, 128), "torch", "rowwise"): "illegal address"}


@rowwise
def test_what_failed_its_self_test_or_was_not_compiled_in_time_is_not_timed(tmp_path, layers, monkeypatch):
    class Half(Preparation):
        def __init__(self, workers, jobs, **_):
            super().__init__(0, jobs)

        def answer(self, job):
            if isinstance(job, FirstCall) and job.recipe == "rowwise_fast" and job.gemm.m == 64:
                return "it broke the device: CUDA error"
            return "wrong numbers" if isinstance(job, SelfTest) and job.recipe == "rowwise" else None

        def done(self, job):
            return not (isinstance(job, FirstCall) and job.recipe == "tensorwise")

    monkeypatch.setattr(runner, "Preparation", Half)
    monkeypatch.setattr(runner, "COMPILE_AT_FIRST_CALL", {"torch"})
    timer = FakeTimer()
    outcome = bench(tmp_path / "h.csv", layers, timer, roles=(Role.FORWARD,)).run()
    timed = {name for group in timer.groups for name in group if "quantize" not in name}
    assert not any("'rowwise'" in name or "'tensorwise'" in name for name in timed)
    assert [name for name in timed if "'rowwise_fast'" in name] == [
        str(("32", "128", "256", "", "bfloat16", "torch", "rowwise_fast"))
    ]
    assert outcome.failed == {"torch:rowwise": "wrong numbers"}
    assert set(outcome.broken.values()) == {"it broke the device: CUDA error"}
    # rowwise and tensorwise at two shapes each: left to another run, and not recorded.
    assert outcome.left == 4
    assert Records(tmp_path / "h.csv", HEADER).broken == outcome.broken


@dataclass(frozen=True)
class Pretend:
    """A job that breaks its process's device, ends its process, or says which process it runs in."""

    what: str

    def run(self):
        if self.what == "break":
            torch.cuda.is_initialized = lambda: True
            torch.cuda.synchronize = self.fail
            raise RuntimeError("CUDA error: illegal address")
        if self.what == "exit":
            os._exit(1)
        return str(os.getpid())

    def fail(self):
        raise RuntimeError("CUDA error")


def test_preparation_runs_jobs_in_other_processes():
    good, bad = SelfTest("torch", "tensorwise", Role.FORWARD), SelfTest("torch", "no_such", Role.FORWARD)
    with Preparation(1, [good, bad, good]) as preparation:
        preparation.wait([good, bad], 120)
        assert preparation.done(bad)
        assert preparation.answer(good) is None
        assert preparation.answer(bad).startswith("UnknownNameError: unknown recipe of provider 'torch' 'no_such'")


def test_preparation_survives_a_lost_device_and_a_dead_process():
    jobs = [Pretend(what) for what in ("one", "break", "exit", "two", "three")]
    with Preparation(1, jobs) as preparation:
        preparation.wait([jobs[1]], 120)
        assert preparation.answer(jobs[1]) == "it broke the device: RuntimeError: CUDA error: illegal address"
        preparation.wait([jobs[4]], 120)
        pids = [preparation.answer(job) for job in (jobs[0], jobs[4])]
        assert None not in pids
        assert pids[0] != pids[1]
        assert not preparation.done(jobs[2])


# ------------------------------------------------------------------------------------------------ arms
def test_baselines_have_the_layouts_of_their_role():
    operands = Operands(torch.device("cpu"), 1 << 16)
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.mm:
                seen.append([t.stride() for t in args])
            return func(*args, **(kwargs or {}))

    for role in Role:
        (call, *rest) = arms.baseline_calls(Gemm("", role, 32, 48, 64), operands, L2)
        with Mode():
            assert call().shape == (32, 48)
        assert len(rest) + 1 == copies_past_l2([2 * 32 * 64, 2 * 48 * 64, 2 * 32 * 48], L2)
    # x @ W.T, dy @ W, dy.T @ x
    assert seen == [[(64, 1), (1, 64)], [(64, 1), (48, 1)], [(1, 32), (48, 1)]]


@pytest.mark.parametrize(
    ("name", "recipe"), [pytest.param("torch", ROWWISE, marks=rowwise), ("torch", TENSORWISE), ("deepgemm", BLOCKWISE)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernel_calls_run_the_kernel_alone(name, recipe, dtype):
    """They give what compute gives, from operands of their own, and nothing but the kernel (and a cast) runs."""
    provider, gemm = get_provider(name), Gemm("", Role.FORWARD, 32, 128, 256, dtype)
    operands = Operands(torch.device("cpu"), 1 << 18)
    calls = arms.kernel_calls(gemm, provider, recipe, operands, L2)
    operands.rewind()
    torch.manual_seed(0)
    with torch.profiler.profile() as profile:
        results = [call() for call in calls[:2]]
    assert results[0].dtype == getattr(torch, dtype)
    assert results[0].shape == (32, 128)
    assert not torch.equal(*results)
    ran = {event.name for event in profile.events()}
    assert not ran & {"aten::constant_pad_nd", "aten::pad"}  # the relayout of DeepGEMM's scales
    # torch 2.14 shows of an operator of ours what it runs: here its twin.
    assert ran & {"torch": {"aten::_scaled_mm"}, "deepgemm": {"loka::deepgemm_1d2d", "aten::mm"}}[name]


def test_quantizer_is_the_one_of_the_lowering():
    for scaling in (Scaling.ROWWISE, Scaling.BLOCK_1X128):
        for turned in (False, True):
            operand = Operand(256, 128, scaling, turned, "bfloat16")
            (call, *_) = arms.quantizer_calls(operand, operands := Operands(torch.device("cpu"), 1 << 18), L2)
            operands.rewind()
            data, scale = call()
            expected = quantize(operands.take(256, 128, torch.bfloat16), scaling, transpose=turned)
            assert torch.equal(data.view(torch.uint8), expected.data.view(torch.uint8))
            assert torch.equal(scale, expected.scale)


def test_operands_are_random_and_apart():
    operands = Operands(torch.device("cpu"), 1 << 16)
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
        a, b = operands.take(100, 100, dtype), operands.take(100, 100, dtype)
        assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        assert abs(a.data_ptr() - b.data_ptr()) >= a.nbytes
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
        assert not a._is_view()
        assert a.float().std() > 0.5
        assert not torch.equal(a.float(), b.float())
    operands.rewind()
    assert torch.equal(operands.take(100, 100, torch.float32), operands.take(100, 100, torch.float32)) is False
    with pytest.raises(ValueError, match="exceed the buffer"):
        operands.take(1 << 9, 1 << 9, torch.float32)


def test_copies_and_spread():
    assert copies_past_l2([1 << 20], 60 << 20) == 64
    assert copies_past_l2([10 << 20, 10 << 20], 60 << 20) == 6
    assert copies_past_l2([1 << 40], 60 << 20) == 4
    assert summarise([4.0, 1.0, 2.0, 3.0, 5.0]) == Timing(3.0, pytest.approx(2 / 3))
    assert summarise([4.0]) == Timing(4.0, 0.0)


# ------------------------------------------------------------------------------------------------ command line
def test_providers_are_chosen_by_name_or_left_out(monkeypatch):
    monkeypatch.setattr(Provider, "supported", lambda self, recipe=None, device=None: None)
    for name in ("torch", "fbgemm", "deepgemm", "torchao"):
        monkeypatch.setattr(type(get_provider(name)), "supported", Provider.supported)

    def names(*given):
        return [p.name for p in command._providers(Console(), list(given))]

    everything = names()
    assert {"torch", "fbgemm", "deepgemm", "torchao"} <= set(everything)
    assert not {"high_precision", "emulated"} & set(everything)
    assert names("deepgemm", "torch") == ["deepgemm", "torch"]
    assert names("-torchao") == [name for name in everything if name != "torchao"]
    with pytest.raises(UnknownNameError):
        names("-nobody")


def test_command_needs_a_gpu_and_names_mistakes(tmp_path):
    (tmp_path / "s.csv").write_text("group,layer,M_batch,K_in,N_out\na,0,64,128,256\n")
    run = ["bench", "--shapes", str(tmp_path / "s.csv"), "--out", str(tmp_path / "o.csv")]
    for more, message in (
        (["--groups", "nobody"], "unknown group of layers 'nobody'"),
        (["--roles", "sideways"], "unknown role 'sideways'"),
        (["--dtypes", "int8"], "unknown dtype 'int8'"),
    ):
        result = CliRunner().invoke(app, [*run, *more])
        assert result.exit_code == 2
        assert message in " ".join(result.output.split())
    if not torch.cuda.is_available():
        result = CliRunner().invoke(app, run)
        assert result.exit_code == 2
        assert "measures on a CUDA device" in result.output
        assert not (tmp_path / "o.csv").exists()
