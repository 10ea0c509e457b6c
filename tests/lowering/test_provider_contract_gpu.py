"""The contract of kernel libraries where the kernels are: in CUDA graphs, with a batch that changes, and all of them.

python3 -m pytest -m gpu -n 6 tests/lowering
"""

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees

from loka_compile.errors import LoweringError
from loka_compile.gemm import Gemm, Role
from loka_compile.lowering.providers import available_providers, deepgemm, get_provider
from loka_compile.lowering.selftest import self_test
from tests.lowering.contract import CASES, IDS, SHAPES, check, operand, reduced_precision, stored, usable

GPU = pytest.mark.gpu

#: What each kernel refuses of SHAPES, in their order, in the first role that it has: "x", or "." for what it computes.
REFUSED = {
    "high_precision:native": "...............",
    "torch:tensorwise": "xxxxxxxx.x....x", "torch:tensorwise_fast": "xxxxxxxx.x....x",
    "torch:rowwise": "xxxxxxxx.x....x", "torch:rowwise_fast": "xxxxxxxx.x....x",
    "torch:blockwise": "xxxxxxxxxx....x", "torch:blockwise_1x128": "xxxxxxxxxx....x",
    "fbgemm:rowwise": "x.xxxxxx.......", "fbgemm:rowwise_fast": "x.xxxxxx.......",
    "fbgemm:blockwise": "xxxxxxxxxx....x", "fbgemm:blockwise_128x128": "x.xxxxxx.......",
    "deepgemm:blockwise": "x.xxxxxx.......", "deepgemm:blockwise_1x128": "x.xxxxxx.......",
    "torchao:blockwise": "xxxxxxxxxxxxx.x", "torchao:blockwise_1x128": "xxxxxxxxxxxxx.x",
    "torch_mx:mxfp8": "xxxxxxxxxx....x", "torch_rocm:tensorwise_fnuz": "xxxxxxxx.x....x",
    "torch_rocm:rowwise_fnuz": "xxxxxxxx.x....x",
    **{f"triton:{name}": "x.xxxxxx......." for name in get_provider("triton").recipes},
    **{f"emulated:{name}": "..............." for name in get_provider("emulated").recipes},
}  # fmt: skip
#: The sizes among m, n, k that may not move from call to call.
STILL = {
    "high_precision": "", "torch": "nk", "fbgemm": "nk", "deepgemm": "nk", "torchao": "mnk", "triton": "k",
    "torch_mx": "nk", "torch_rocm": "nk", "emulated": "",
}  # fmt: skip
#: What writes fewer dtypes than bf16, fp16 and fp32 (the baseline also fp64).
BFLOAT16_ONLY = {"fbgemm:rowwise", "fbgemm:rowwise_fast", "fbgemm:blockwise", "fbgemm:blockwise_128x128",
                 "deepgemm:blockwise"}  # fmt: skip
#: Why: the first of these that a shape violates is the reason, with its number.
NEEDS = {
    "torch:tensorwise": "k16 n16", "torch:tensorwise_fast": "k16 n16", "torch:rowwise": "k16 n16",
    "torch:rowwise_fast": "k16 n16", "torch:blockwise": "k128 n128", "torch:blockwise_1x128": "k128 n128",
    "fbgemm:rowwise": "k16 n8", "fbgemm:rowwise_fast": "k16 n8", "fbgemm:blockwise": "k128 n128",
    "fbgemm:blockwise_128x128": "k16 n8", "deepgemm:blockwise": "k16 n8", "deepgemm:blockwise_1x128": "k16 n4",
    "torchao:blockwise": "k128 m256 n256", "torchao:blockwise_1x128": "k128 m256 n256", "torch_mx:mxfp8": "k32 n16",
    "torch_rocm:tensorwise_fnuz": "k16 n16", "torch_rocm:rowwise_fnuz": "k16 n16",
    **{f"triton:{name}": "k16" for name in get_provider("triton").recipes},
}  # fmt: skip


def reason_of(which, role, m, n, k):
    """The end of the reason why this candidate must not take this GEMM, or None."""
    if role is Role.GRAD_WEIGHT and which.endswith(":blockwise"):
        return "grad_weight has none, use blockwise_1x128"
    sizes = {"m": m, "n": n, "k": k}
    for letter, *number in NEEDS.get(which, "").split():
        if sizes[letter] % int("".join(number)):
            return f"needs {letter} to be a multiple of {''.join(number)}; it is {sizes[letter]}"
    return None


def test_the_exact_list_of_what_is_refused():
    """Role, shape with its reason, moving size, dtype, for every candidate: nothing drops out of the tests unseen."""
    assert {f"{name}:{recipe.name}" for name, recipe, _ in CASES} == set(REFUSED)
    for name, recipe, role in CASES:
        which, refuses = f"{name}:{recipe.name}", get_provider(name).refuses_shape
        reasons = [refuses(Gemm("s#0", role, *shape), recipe) for shape in SHAPES]
        for shape, reason in zip(SHAPES, reasons, strict=True):
            expected = reason_of(which, role, *shape)
            assert (reason or "").endswith(expected) if expected else reason is None, (which, role, shape, reason)
        verdicts = "".join("x" if reason else "." for reason in reasons)
        without_role = role is Role.GRAD_WEIGHT and recipe.name == "blockwise"
        assert verdicts == ("x" * len(SHAPES) if without_role else REFUSED[which]), (which, role)
        if without_role:
            continue
        moving = "".join(
            letter for letter in "mnk" if refuses(Gemm("s#0", role, 256, 256, 256, dynamic=letter), recipe)
        )
        assert moving == STILL[name], (which, role)
        for dtype in ("float16", "float32"):
            refused = refuses(Gemm("s#0", role, 256, 256, 256, dtype), recipe) is not None
            assert refused == (which in BFLOAT16_ONLY), (which, dtype)


@GPU
def test_on_an_h200_with_every_library_nothing_is_skipped():
    """And no kernel fails its self-test. Needs sm_90, CUDA 12.9, and the wheels of mslk, deep_gemm and torchao."""
    skipped = {name: reason for name, reason in available_providers("cuda").items() if reason}
    absent = {name for name, reason in skipped.items() if "not installed" in reason or "neither" in reason}
    if absent or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"not every library is here, or this is no sm_90: {skipped}")
    assert skipped == {
        "torch_mx": "needs an NVIDIA GPU of compute capability 10.0 or newer; this one has 9.0",
        "torch_rocm": "needs an AMD GPU of gfx94x (MI300); this torch is not built for ROCm",
    }
    for name, recipe, role in CASES:
        provider = get_provider(name)
        for shape in SHAPES if name not in skipped else ():
            # The machine adds nothing to the list above.
            gemm = Gemm("s#0", role, *shape)
            assert provider.refuses(gemm, recipe, "cuda") == provider.refuses_shape(gemm, recipe), (name, shape)
    failed = {}
    for name, recipe, role in CASES:
        provider = get_provider(name)
        if name in skipped or provider.refuses_shape(Gemm("s#0", role, 256, 256, 256), recipe):
            continue
        reason = provider.supported(recipe, "cuda") or self_test(name, recipe.name, role, "cuda")
        if reason:
            failed[f"{name}:{recipe.name}-{role}"] = reason
    assert failed == {}


@GPU
def test_the_baseline_without_reduced_precision_reductions():
    """Then cuBLAS keeps partial sums in fp32, and the tight bound holds where by default it does not."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    try:
        matmul.allow_bf16_reduced_precision_reduction = False
        assert reduced_precision(torch.bfloat16, "cuda") == 0
        name, recipe, _ = CASES[0]
        for role in Role:
            check(get_provider(name), recipe, role, 2048, 384, 13, "cuda")
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


@GPU
@pytest.mark.parametrize("recipe", ["blockwise", "blockwise_1x128"])
def test_deepgemm_compiles_nothing_while_a_graph_is_captured(recipe):
    provider = get_provider("deepgemm")
    recipe = provider.recipe(recipe)
    usable(provider, recipe, "cuda")
    a, b = operand(48, 1280, False, 1, device="cuda"), operand(136, 1280, False, 2, device="cuda")

    def call():
        return provider.gemm(a, False, b, False, recipe, torch.bfloat16)

    expected = call()
    deepgemm.CALLED.clear()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(LoweringError, match="48x136x1280"), torch.cuda.graph(graph):
        call()
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


#: Of the emulation, plain operators as it is, one recipe: each case is a compile of some seconds.
GRAPHED = [
    which for which in IDS
    if not which.endswith(":blockwise-grad_weight") and (not which.startswith("emulated") or "blockwise_1x128" in which)
]  # fmt: skip


@GPU
@pytest.mark.parametrize("which", GRAPHED)
def test_in_cuda_graphs_with_a_moving_batch(which):
    """torch.compile as users call it: Inductor, dynamic batch, one compile, a CUDA graph for each batch size."""
    name, recipe, role = CASES[IDS.index(which)]
    provider = get_provider(name)
    usable(provider, recipe, "cuda")
    letter = "k" if role is Role.GRAD_WEIGHT else "m"
    sizes = {"m": 256, "n": 256, "k": 256}
    assert provider.refuses(provider.padded(Gemm("s#0", role, **sizes, dynamic=letter), recipe), recipe, "cuda") is None
    a_t, b_t = stored(role)
    counters.clear()
    compiled = torch.compile(
        lambda a, b: provider.gemm(a, a_t, b, b_t, recipe, torch.bfloat16), fullgraph=True, mode="reduce-overhead"
    )
    for batch in (256, 199):
        sizes[letter] = batch
        a, b = operand(sizes["m"], sizes["k"], a_t, 1, device="cuda"), operand(sizes["n"], 256, b_t, 2, device="cuda")
        if role is Role.GRAD_WEIGHT:
            b = operand(sizes["n"], sizes["k"], b_t, 2, device="cuda")
        for x in (a, b) if role is Role.GRAD_WEIGHT else (a,):
            torch._dynamo.mark_dynamic(x, 0)
        expected = provider.gemm(a, a_t, b, b_t, recipe, torch.bfloat16).double()
        for _ in range(3):
            # The third call replays what the second recorded.
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(a, b).clone()
            # A value that sits on a rounding boundary may go the other way in compiled code.
            limit = 2e-3 + (0.01 if recipe.is_high_precision else 0.0)
            assert (out.double() - expected).norm() <= limit * expected.norm(), batch
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    manager = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    assert manager is not None
    assert list(manager.get_roots())
