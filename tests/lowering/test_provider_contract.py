"""What every kernel library must keep to: refuse with a reason, or compute the right thing. See contract.py."""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

from loka_compile.errors import UnknownNameError
from loka_compile.gemm import NATIVE, ROWWISE, Gemm, Recipe, Role, Scaling, is_fast
from loka_compile.lowering.providers import available_providers, get_provider
from tests.lowering.contract import CASES, IDS, NAMES, SHAPES, check, operand, stored, usable

DEVICES = ["cpu"] + [pytest.param("cuda", marks=pytest.mark.gpu)] * torch.cuda.is_available()
K, N, M = (13, 479, 18480), (1, 8, 384, 3456), (0, 1, 199, 2048)


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "recipe", "role"), CASES, ids=IDS)
def test_what_is_padded_is_right(name, recipe, role, device):
    """Every shape that the kernel does not take as it is; the operands are as the model stores them."""
    provider = get_provider(name)
    usable(provider, recipe, device)
    for m, n, k in SHAPES:
        gemm = Gemm("site#0", role, m, n, k)
        padded = provider.padded(gemm, recipe)
        if padded is not gemm:
            assert provider.refuses(gemm, recipe, device)
            assert provider.refuses(padded, recipe, device) is None
            check(provider, recipe, role, m, n, k, device)


@pytest.mark.parametrize(("name", "recipe", "role"), CASES, ids=IDS)
def test_padding_accepts_every_shape_and_no_other_role(name, recipe, role):
    """Only what the library cannot do at all is left: a role, a dtype, tensors beyond 32-bit indices."""
    provider = get_provider(name)
    has_role = provider.refuses_shape(Gemm("s#0", role, 256, 256, 256), recipe) is None
    for m, n, k in itertools.product(M, N, K):
        for dynamic in ("", "m", "mnk"):
            gemm = Gemm("s#0", role, m, n, k, dynamic=dynamic)
            padded = provider.padded(gemm, recipe)
            assert (provider.refuses_shape(padded, recipe) is None) == has_role
            for letter in "mnk":
                size, wide = getattr(gemm, letter), getattr(padded, letter)
                assert size <= wide < size + 256
                multiple = provider.multiples(recipe).get(letter, 1)
                assert wide % multiple == 0 or not has_role
                assert wide == size or multiple > 1
                if multiple == 1 or not has_role:
                    assert (letter in padded.dynamic) == (letter in dynamic)
            if not dynamic and provider.refuses_shape(gemm, recipe) is None:
                assert padded is gemm
        big = Gemm("s#0", role, 2**16, 2**16, 16)
        assert provider.padded(big, recipe) is big


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


#: grad_input moves the same size as the forward does; test_provider_contract_gpu.py has all three, in Inductor.
TRACED = [(name, recipe, role) for name, recipe, role in CASES if role is not Role.GRAD_INPUT]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "recipe", "role"), TRACED, ids=[i for i in IDS if not i.endswith("grad_input")])
def test_traces_into_one_graph_for_every_batch(name, recipe, role, device):
    """fullgraph, dynamic batch, one graph; an odd batch is padded where the kernel asks for it."""
    provider = get_provider(name)
    usable(provider, recipe, device)
    letter = "k" if role is Role.GRAD_WEIGHT else "m"
    sizes = {"m": 256, "n": 384, "k": 384}
    if provider.refuses(provider.padded(Gemm("s#0", role, **sizes, dynamic=letter), recipe), recipe, device):
        return
    a_t, b_t = stored(role)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda a, b: provider.gemm(a, a_t, b, b_t, recipe, torch.bfloat16), backend=counter, fullgraph=True
    )
    for batch in (256, 192, 331):
        sizes[letter] = batch
        a, b = (
            operand(sizes["m"], sizes["k"], a_t, 1, device=device),
            operand(sizes["n"], sizes["k"], b_t, 2, device=device),
        )
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
        "triton": gpu.format("9.0 or newer"),
        "torch_mx": gpu.format("10.0 or newer"),
        "torch_rocm": "needs an AMD GPU of gfx94x (MI300); the operands are on the CPU",
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
        "triton:tensorwise", "triton:tensorwise_fast", "triton:rowwise", "triton:rowwise_fast", "triton:blockwise",
        "triton:blockwise_1x128", "triton:blockwise_128x128",
        "torch_mx:mxfp8", "torch_rocm:tensorwise_fnuz", "torch_rocm:rowwise_fnuz",
    }  # fmt: skip
    if torch.__version__ < "2.13":
        expected |= {"torch:rowwise", "torch:rowwise_fast"}
    assert skipped == expected


def test_every_recipe_has_an_emulation_unless_it_accumulates_fast():
    emulated = get_provider("emulated").recipes
    for name in NAMES:
        for recipe in get_provider(name).recipes.values():
            assert recipe == NATIVE or recipe.fast_accum or emulated[recipe.name] == recipe


def test_the_name_of_a_recipe_says_whether_it_accumulates_fast():
    for name in NAMES:
        for recipe in get_provider(name).recipes.values():
            assert recipe.fast_accum == is_fast(recipe.name)


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
