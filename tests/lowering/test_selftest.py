"""The self-test must see the defects that broken kernels have had, and pass what is right."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from loka_compile.gemm import Gemm, Role, Scaling
from loka_compile.lowering import selftest
from loka_compile.lowering.providers import get_provider
from loka_compile.lowering.providers.emulated import Emulated
from loka_compile.lowering.quantize import Quantized
from loka_compile.lowering.selftest import refusal, run_self_test, self_test

BLOCKED = ("blockwise", "blockwise_1x128", "blockwise_128x128")
ALL = ("tensorwise", "rowwise", *BLOCKED)


class DropsLastBlock(Emulated):
    """FBGEMM 6159: the last 128 of k are left out, where there are several blocks."""

    def compute(self, a, b, recipe, out_dtype):
        data = a.data.clone()
        if data.shape[1] > 128:
            data.view(torch.uint8)[:, (data.shape[1] - 1) // 128 * 128 :] = 0
        return super().compute(Quantized(data, a.scale), b, recipe, out_dtype)


class SwapsTwoScales(Emulated):
    """The scales of two neighbours, along k if there are several, else of two rows, are exchanged."""

    def compute(self, a, b, recipe, out_dtype):
        scale = b.scale.clone()
        dim = 1 if scale.shape[1] > 1 else 0
        if scale.shape[dim] > 1:
            order = [1, 0, *range(2, scale.shape[dim])]
            scale = scale.index_select(dim, torch.tensor(order))
        return super().compute(a, Quantized(b.data, scale), recipe, out_dtype)


class WrongRow(Emulated):
    """Each row of A is scaled like the row above it: an off-by-one in the epilogue."""

    def compute(self, a, b, recipe, out_dtype):
        return super().compute(Quantized(a.data, a.scale.roll(1, 0)), b, recipe, out_dtype)


class WrongBelow64Rows(Emulated):
    """DeepGEMM 268: right for large m only."""

    def compute(self, a, b, recipe, out_dtype):
        out = super().compute(a, b, recipe, out_dtype)
        return out * 1.1 if out.shape[0] < 64 else out


class LeavesARowUnwritten(Emulated):
    """The last row of a ragged m holds whatever was in memory: here NaN."""

    def compute(self, a, b, recipe, out_dtype):
        out = super().compute(a, b, recipe, out_dtype)
        if out.shape[0] % 8:
            out[-1, 3] = float("nan")
        return out


class WrongDtype(Emulated):
    def compute(self, a, b, recipe, out_dtype):
        return super().compute(a, b, recipe, torch.float32)


class Raises(Emulated):
    def compute(self, a, b, recipe, out_dtype):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")


class QuantisesWithALargeFloor(Emulated):
    """FBGEMM 2886: rows with a small amax lose their range."""

    def quantize(self, x, scaling, dtype, transpose, bound):
        q = super().quantize(x, scaling, dtype, transpose, bound)
        factor = (1.0 / 64 / q.scale).clamp(min=1.0)
        if q.scale.dim() == 2 and q.scale.shape[1] == 1:
            return Quantized((q.data.float() / factor).to(dtype), q.scale * factor)
        return q


DEFECTS = [
    (DropsLastBlock, ALL),
    (SwapsTwoScales, ("rowwise", *BLOCKED)),
    (WrongRow, ("rowwise", "blockwise", "blockwise_1x128")),
    (WrongBelow64Rows, ALL),
    (LeavesARowUnwritten, ALL),
    (WrongDtype, ALL),
    (Raises, ALL),
    (QuantisesWithALargeFloor, ("rowwise",)),
]


@pytest.mark.parametrize(
    ("fake", "name", "role"),
    [
        (fake, name, role)
        for fake, names in DEFECTS
        for name in names
        for role in Role
        if (name, role) != ("blockwise", Role.GRAD_WEIGHT)
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_planted_defects_are_found(fake, name, role):
    provider = fake()
    reason = run_self_test(provider, provider.recipe(name), role)
    assert reason is not None
    assert reason.startswith("self-test failed at m=")


def test_fast_accumulation_tolerance_still_sees_a_dropped_block():
    """The bound of a fast recipe is four times as wide."""

    class Fast(DropsLastBlock):
        name = "fast"
        recipes = get_provider("torch").recipes
        roles = frozenset(Role)

    provider = Fast()
    for name in ("rowwise_fast", "tensorwise_fast"):
        assert "times the bound" in run_self_test(provider, provider.recipe(name), Role.FORWARD)


@pytest.mark.parametrize("role", list(Role))
def test_what_works_here_passes(role):
    for name in ("torch", "emulated", "high_precision"):
        provider = get_provider(name)
        for recipe in provider.recipes.values():
            gemm = Gemm("s", role, 64, 128, 128)
            if provider.refuses(gemm, recipe, "cpu") is None:
                assert refusal(provider, gemm, recipe, "cpu") is None, (name, recipe.name)


def test_refusal_gives_the_first_reason(monkeypatch):
    provider = get_provider("torch")
    gemm = Gemm("s", Role.FORWARD, 64, 128, 13)
    assert "multiple of 16" in refusal(provider, gemm, provider.recipe("tensorwise"))
    assert "CPU" in refusal(provider, Gemm("s", Role.FORWARD, 64, 128, 128), provider.recipe("blockwise"), "cpu")
    monkeypatch.setattr(selftest, "self_test", lambda *_: "self-test failed at m=1")
    assert refusal(provider, Gemm("s", Role.FORWARD, 64, 128, 128), provider.recipe("tensorwise")).startswith(
        "self-test"
    )


def test_runs_once_and_untouched_by_the_callers_modes(monkeypatch):
    calls = []
    real = selftest.run_self_test
    monkeypatch.setattr(selftest, "run_self_test", lambda *args: calls.append(args) or real(*args))
    selftest._cached.cache_clear()
    torch.manual_seed(7)
    state = torch.get_rng_state()
    with FakeTensorMode(), torch.autocast("cpu"), torch.inference_mode():
        assert self_test("emulated", "rowwise", Role.GRAD_INPUT, "cpu") is None
    assert self_test("emulated", "rowwise", Role.GRAD_INPUT, "cpu") is None
    assert len(calls) == 1
    assert torch.equal(torch.get_rng_state(), state)
    selftest._cached.cache_clear()


def test_a_failing_kernel_is_logged_with_its_reason(caplog):
    provider = Raises()
    reason = run_self_test(provider, provider.recipe("rowwise"), Role.FORWARD)
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in reason
    assert "emulated:rowwise is disabled for forward" in caplog.text


def test_no_shape_accepted_is_a_reason():
    provider = get_provider("emulated")
    reason = run_self_test(provider, provider.recipe("blockwise"), Role.GRAD_WEIGHT)
    assert reason.startswith("no self-test shape is accepted: blockwise cuts a weight")


def test_its_operands_have_scales_that_differ():
    """Swapped or shifted scales can only be seen if no two neighbours are alike."""
    x = selftest._operand(199, 640, False, 1, torch.bfloat16)
    scale = Emulated().quantize(x, Scaling.BLOCK_1X128, torch.float8_e4m3fn, False, None).scale
    assert (scale[1:] != scale[:-1]).float().mean() > 0.9
    assert (scale[:, 1:] != scale[:, :-1]).float().mean() > 0.9
    assert scale.max() / scale.min() > 100
