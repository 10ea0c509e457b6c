"""What every kernel library must keep to: refuse with a reason, or compute the right thing.

Two references: the fp64 product of the operands as they were quantised (tight: it is the kernel that is tested), and
the fp64 product of the operands as they were given, within the bound of FP8 rounding (it is the recipe).
"""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

from loka_compile.errors import UnknownNameError
from loka_compile.gemm import NATIVE, ROWWISE, Gemm, Recipe, Role, Scaling
from loka_compile.lowering.providers import PROVIDERS, available_providers, get_provider
from loka_compile.lowering.quantize import Quantized, dequantize

NAMES = [name for name, _, _ in PROVIDERS]
DEVICES = ["cpu"] + [pytest.param("cuda", marks=pytest.mark.gpu)] * torch.cuda.is_available()
CASES = [(name, recipe, role) for name in NAMES for recipe in get_provider(name).recipes.values() for role in Role]
IDS = [f"{name}:{recipe.name}-{role}" for name, recipe, role in CASES]
K, N, M = (13, 479, 18480), (1, 8, 384, 3456), (0, 1, 199, 2048)
#: (m, n, k) of the GEMM. Every K, N and M occurs, and what no FP8 kernel refuses: whole blocks, an odd number of them.
SHAPES = [
    (0, 384, 479), (0, 8, 18480), (1, 1, 13), (199, 8, 13), (2048, 384, 13), (1, 3456, 479), (199, 384, 479),
    (2048, 1, 479), (1, 48, 18480), (199, 8, 18480), (199, 3456, 128), (2048, 384, 256), (1, 384, 640),
    (256, 256, 384), (384, 8, 0),
]  # fmt: skip
#: Error of the accumulation relative to sum(|a||b|): fp32 sums on a CPU, tensor cores on a GPU.
ACCUMULATION = {("cpu", False): 2.0**-16, ("cpu", True): 2.0**-16, ("cuda", False): 2.0**-10, ("cuda", True): 2.0**-8}
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-21}


def operand(rows, k, transposed, seed, dtype=torch.bfloat16, device="cpu"):
    """[rows, k] (stored transposed if asked) with rows and columns of different magnitude; one row is zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    x *= torch.exp2(torch.randint(-3, 4, (rows, 1), generator=generator).float())
    x *= torch.exp2(torch.randint(-2, 3, (1, k), generator=generator).float())
    if rows > 2:
        x[1] = 0
    x = x.to(dtype).to(device)
    return x.t().contiguous() if transposed else x


def stored(role):
    """Which operands are stored transposed."""
    return role is Role.GRAD_WEIGHT, role is not Role.FORWARD


def dequantised(provider, x, transposed, scaling, dtype):
    q = provider.quantize(x, scaling, getattr(torch, dtype), transposed, None)
    exact = dequantize(q, scaling).double()
    unit = dequantize(Quantized(torch.ones_like(q.data, dtype=torch.float32), q.scale), scaling).double()
    return exact, unit


def check(provider, recipe, role, m, n, k, device="cpu", dtype=torch.bfloat16, bases=None):
    a_t, b_t = stored(role)
    a, b = bases or (operand(m, k, a_t, 1, dtype, device), operand(n, k, b_t, 2, dtype, device))
    out = provider.gemm(a, a_t, b, b_t, recipe, dtype)
    case = f"{m}x{n}x{k}"
    assert out.shape == (m, n), case
    assert out.dtype == dtype, case
    assert out.device == a.device, case
    assert out.is_contiguous(), case
    left, right = (a.t() if a_t else a).double(), (b.t() if b_t else b).double()
    if not (m and n and k):
        assert not out.any(), case
        return
    if recipe.is_high_precision:
        reference = left @ right.t()
        allowed = ROUNDING[dtype] * reference.abs() + ACCUMULATION[device, False] * (left.abs() @ right.abs().t())
        assert ((out.double() - reference).abs() <= allowed).all(), case
        return
    # The steps of fp8: half a unit in the last place of e4m3, or half of its smallest number.
    (qa, unit_a), (qb, unit_b) = (
        dequantised(provider, x, transposed, scaling, fp8)
        for x, transposed, scaling, fp8 in ((a, a_t, recipe.a, recipe.a_dtype), (b, b_t, recipe.b, recipe.b_dtype))
    )
    reference = qa @ qb.t()
    allowed = ROUNDING[dtype] * reference.abs() + ACCUMULATION[device, recipe.fast_accum] * (qa.abs() @ qb.abs().t())
    assert ((out.double() - reference).abs() <= allowed).all(), case
    step_a, step_b = left.abs() * 2.0**-4 + unit_a * 2.0**-10, right.abs() * 2.0**-4 + unit_b * 2.0**-10
    step_a, step_b = step_a * 1.001, step_b * 1.001
    fp8 = step_a @ right.abs().t() + left.abs() @ step_b.t() + step_a @ step_b.t()
    assert ((out.double() - left @ right.t()).abs() <= fp8 + allowed).all(), case


def usable(provider, recipe, device):
    reason = provider.supported(recipe, device)
    if reason:
        pytest.skip(f"{provider.name}:{recipe.name}: {reason}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "recipe", "role"), CASES, ids=IDS)
def test_refuses_or_is_right(name, recipe, role, device):
    provider = get_provider(name)
    usable(provider, recipe, device)
    for m, n, k in SHAPES:
        reason = provider.refuses(Gemm("site#0", role, m, n, k), recipe, device)
        if reason is None:
            check(provider, recipe, role, m, n, k, device)
        else:
            assert reason.strip(), (m, n, k)


@pytest.mark.parametrize(("name", "recipe", "role"), CASES, ids=IDS)
def test_whatever_the_shape_there_is_an_answer(name, recipe, role):
    """A reason is a text that names the numbers; asking never raises; a moving size is refused if a fixed one is."""
    provider = get_provider(name)
    for m, n, k in itertools.product(M, N, K):
        for dtype in ("bfloat16", "float16", "float32", "int8"):
            fixed = provider.refuses_shape(Gemm("s#0", role, m, n, k, dtype), recipe)
            moving = provider.refuses_shape(Gemm("s#0", role, m, n, k, dtype, dynamic="mnk"), recipe)
            for reason in (fixed, moving):
                assert reason is None or len(reason) > 10
            assert moving is not None or fixed is None
            if dtype == "int8":
                assert "int8" in fixed or str(role) in fixed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("name", "recipe", "role"), CASES, ids=IDS)
def test_other_dtypes(name, recipe, role, dtype, device):
    provider = get_provider(name)
    m, n, k = 64, 256, 256
    if provider.refuses(Gemm("s#0", role, m, n, k, str(dtype).removeprefix("torch.")), recipe, device) is None:
        check(provider, recipe, role, m, n, k, device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "recipe", "role"), CASES, ids=IDS)
def test_operands_of_any_strides(name, recipe, role, device):
    provider = get_provider(name)
    m, n, k = 256, 256, 256
    if provider.refuses(Gemm("s#0", role, m, n, k), recipe, device):
        return
    a_t, b_t = stored(role)
    wide_a, wide_b = operand(2 * m, 2 * k, a_t, 3, device=device), operand(2 * n, 2 * k, b_t, 4, device=device)
    rows_a, cols_a = (k, m) if a_t else (m, k)
    rows_b, cols_b = (k, n) if b_t else (n, k)
    views = [
        (wide_a[3 : 3 + rows_a, 5 : 5 + cols_a], wide_b[:rows_b, :cols_b]),
        (wide_a[:cols_a, :rows_a].t(), wide_b[:cols_b, :rows_b].t()),
        (wide_a[::2, ::2], wide_b[:1, :cols_b].expand(rows_b, cols_b)),
    ]
    for bases in views:
        check(provider, recipe, role, m, n, k, device, bases=bases)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "recipe", "role"), CASES, ids=IDS)
def test_traces_into_one_graph_for_every_batch(name, recipe, role, device):
    """fullgraph, dynamic batch, one graph; what is refused with a moving batch is compiled with a fixed one."""
    provider = get_provider(name)
    usable(provider, recipe, device)
    n_or_m, k = 256, 384
    letter = "k" if role is Role.GRAD_WEIGHT else "m"
    sizes = {"m": n_or_m, "n": 384, "k": k}
    moving = provider.refuses(Gemm("s#0", role, **sizes, dynamic=letter), recipe, device) is None
    if provider.refuses(Gemm("s#0", role, **sizes), recipe, device):
        return
    a_t, b_t = stored(role)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda a, b: provider.gemm(a, a_t, b, b_t, recipe, torch.bfloat16), backend=counter, fullgraph=True
    )
    for batch in (256, 192, 320) if moving else (256,):
        sizes[letter] = batch
        a, b = (
            operand(sizes["m"], sizes["k"], a_t, 1, device=device),
            operand(sizes["n"], sizes["k"], b_t, 2, device=device),
        )
        if moving:
            torch._dynamo.mark_dynamic(a, 0)
            if role is Role.GRAD_WEIGHT:
                torch._dynamo.mark_dynamic(b, 0)
        out = compiled(a, b)
        torch.testing.assert_close(out, provider.gemm(a, a_t, b, b_t, recipe, torch.bfloat16), rtol=0.01, atol=1e-3)
    assert counter.frame_count == 1


INDUCTOR = [
    ("torch", "rowwise_fast", Role.FORWARD), ("torch", "tensorwise", Role.GRAD_INPUT),
    ("emulated", "blockwise_1x128", Role.GRAD_WEIGHT),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "recipe", "role"), INDUCTOR)
def test_inductor(name, recipe, role, device):
    """Compiled ``_scaled_mm`` wants a column-major B on the CPU (pytorch 191138); the batch is dynamic."""
    provider = get_provider(name)
    recipe = provider.recipe(recipe)
    usable(provider, recipe, device)
    a_t, b_t = stored(role)
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: provider.gemm(a, a_t, b, b_t, recipe, torch.bfloat16), fullgraph=True)
    for batch in (199, 130):
        m, n, k = (64, 48, batch) if role is Role.GRAD_WEIGHT else (batch, 256, 128)
        a, b = operand(m, k, a_t, 1, device=device), operand(n, k, b_t, 2, device=device)
        for x in (a, b) if role is Role.GRAD_WEIGHT else (a,):
            torch._dynamo.mark_dynamic(x, 0)
        expected = provider.gemm(a, a_t, b, b_t, recipe, torch.bfloat16).double()
        # A value that sits on a rounding boundary may go the other way in compiled code.
        assert (compiled(a, b).double() - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.parametrize("role", list(Role))
def test_the_baseline_is_the_node_that_was_there(role):
    """Bit for bit what torch computes, and one mm over views: nothing is copied or quantised."""
    provider = get_provider("high_precision")
    a_t, b_t = stored(role)
    a, b = operand(199, 384, a_t, 1), operand(256, 384, b_t, 2)
    traced = make_fx(lambda a, b: provider.gemm(a, a_t, b, b_t, NATIVE, torch.bfloat16))(a, b)
    traced.graph.eliminate_dead_code()
    targets = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert targets.count("aten.mm.default") == 1
    assert set(targets) <= {"aten.mm.default", "aten.t.default"}
    assert torch.equal(traced(a, b), torch.mm(a.t() if a_t else a, b if b_t else b.t()))


def test_bounds_reach_the_quantiser():
    """With proven bounds the scales are fixed: 28 is representable after scaling by 16, a larger value saturates."""
    provider = get_provider("emulated")
    recipe = provider.recipe("tensorwise")
    x, w = torch.tensor([[30.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    bounded = provider.gemm(x, False, w, False, recipe, torch.float32, a_bound=16.0, b_bound=1.0)
    assert bounded.item() == 28.0
    assert provider.gemm(x, False, w, False, recipe, torch.float32).item() == pytest.approx(30.0)


def test_outputs_are_owned():
    """A library that reuses its buffer would change an earlier result (FBGEMM 4314)."""
    for name, recipe, role in CASES:
        provider = get_provider(name)
        if provider.refuses(Gemm("s#0", role, 64, 128, 128), recipe, "cpu"):
            continue
        a_t, b_t = stored(role)
        results = [
            provider.gemm(
                operand(64, 128, a_t, s, torch.float32), a_t, operand(128, 128, b_t, s), b_t, recipe, torch.float32
            )
            for s in range(4)
            if not recipe.is_high_precision
        ]
        for seed, result in enumerate(results):
            again = provider.gemm(
                operand(64, 128, a_t, seed, torch.float32),
                a_t,
                operand(128, 128, b_t, seed),
                b_t,
                recipe,
                torch.float32,
            )
            assert torch.equal(result, again)


def test_what_a_machine_without_a_gpu_skips():
    """The exact list, so that nothing drops out of the tests unseen."""
    gpu = "needs an NVIDIA GPU of compute capability {}; the operands are on the CPU"
    assert available_providers("cpu") == {
        "high_precision": None,
        "torch": None,
        "fbgemm": gpu.format("9.0"),
        "deepgemm": gpu.format("9.0"),
        "torchao": gpu.format("8.9 or newer"),
        "emulated": None,
    }
    skipped = {
        f"{name}:{recipe.name}"
        for name in NAMES
        for recipe in get_provider(name).recipes.values()
        if get_provider(name).supported(recipe, "cpu")
    }
    expected = {
        "torch:blockwise", "torch:blockwise_1x128",
        "fbgemm:rowwise", "fbgemm:rowwise_fast", "fbgemm:blockwise", "fbgemm:blockwise_128x128",
        "deepgemm:blockwise", "deepgemm:blockwise_1x128", "torchao:blockwise", "torchao:blockwise_1x128",
    }  # fmt: skip
    if torch.__version__ < "2.13":
        expected |= {"torch:rowwise", "torch:rowwise_fast"}
    assert skipped == expected


def test_every_recipe_has_an_emulation_unless_it_accumulates_fast():
    emulated = get_provider("emulated").recipes
    for name in NAMES:
        for recipe in get_provider(name).recipes.values():
            assert recipe == NATIVE or recipe.fast_accum or emulated[recipe.name] == recipe


def test_names():
    with pytest.raises(UnknownNameError, match=r"cutlass.*deepgemm, emulated, fbgemm, high_precision, torch"):
        get_provider("cutlass")
    with pytest.raises(UnknownNameError, match=r"int4.*rowwise"):
        get_provider("torch").recipe("int4")
    assert get_provider("torch") is get_provider("torch")
    assert [get_provider(name).name for name in NAMES] == NAMES
    assert get_provider("torch").version() == f"torch {torch.__version__}"


def test_a_recipe_of_another_provider_is_refused():
    gemm = Gemm("s#0", Role.FORWARD, 64, 64, 64)
    assert "no recipe" in get_provider("deepgemm").refuses_shape(gemm, ROWWISE)
    impostor = Recipe("rowwise", Scaling.TENSORWISE, Scaling.TENSORWISE)
    assert "no recipe" in get_provider("torch").refuses_shape(gemm, impostor)


def test_tensors_beyond_32_bit_indices_are_refused():
    gemm = Gemm("s#0", Role.FORWARD, 2**16, 256, 2**15)
    for name in NAMES:
        provider = get_provider(name)
        for recipe in provider.recipes.values():
            if not recipe.is_high_precision:
                assert "2**31" in provider.refuses_shape(gemm, recipe)
