"""Inference with frozen weights: no work on them after the first call, and every change that torch can see is seen."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from helpers_backend import Watch, close, plan_for
from models_backend import Plain
from torch import nn

import loka_compile
from loka_compile.frozen import FrozenWeights

CHOICES = {f"layers.{i}#0 forward": "torch:tensorwise" for i in range(2)}
OPTIONS = {"plan": plan_for(CHOICES), "mods": "none"}


@pytest.fixture
def compiles(monkeypatch):
    """One entry for each compile of a graph with frozen weights."""
    made = []
    original = FrozenWeights._compile

    def count(self, weights):
        made.append([w.clone() for w in weights])
        return original(self, weights)

    monkeypatch.setattr(FrozenWeights, "_compile", count)
    return made


def frozen(model, **options):
    return torch.compile(model, backend="loka", options={**OPTIONS, "freeze_weights": True, **options})


def same(run, model, x):
    """What the graph computes that quantises its weights at every call."""
    with torch.no_grad():
        got = run(x)
        torch._dynamo.reset()
        want = torch.compile(copy.deepcopy(model), backend="loka", options=OPTIONS)(x)
    close(got, want, 1e-5)


def quantised(graphs):
    """Casts to FP8 in the graphs: activations, and weights if they are not frozen."""
    casts = ("prims.convert_element_type.default", "aten._to_copy.default")
    return sum(
        str(n.target) in casts and n.meta["val"].dtype == torch.float8_e4m3fn for g in graphs for n in g.graph.nodes
    )


def test_no_work_on_weights(no_codegen):
    model, x = Plain().eval(), torch.randn(8, 48)
    with torch.no_grad():
        torch.compile(copy.deepcopy(model), backend="loka", options=OPTIONS)(x)
        assert quantised(no_codegen.graphs) == 4
        no_codegen.graphs.clear()
        run = frozen(model)
        close(run(x), model(x), 0.15)
    assert quantised(no_codegen.graphs) == 2
    inputs = [n for n in no_codegen.graphs[0].graph.nodes if n.op == "placeholder"]
    assert [tuple(n.meta["val"].shape) for n in inputs] == [(8, 48)]


def test_by_default_weights_are_quantised_at_every_call(no_codegen):
    """Of an inference model: so nothing that is done to them is missed, ``.data`` included."""
    model, x = Plain().eval(), torch.randn(8, 48)
    run = torch.compile(model, backend="loka", options=OPTIONS)
    with torch.no_grad():
        run(x)
        model.layers[0].weight.data.mul_(3)
        close(run(x), model(x), 0.15)
    assert quantised(no_codegen.graphs) == 4


def test_in_training_a_weight_has_one_scale_a_step(no_codegen):
    """Its forward and its grad_input share the pass that finds the scale; so do both uses of x and of dy.

    The cast is pointwise, and torch's partitioner does it once more in the backward rather than save its result.
    """
    roles = ("forward", "grad_input", "grad_weight")
    choices = {f"layers.1#0 {role}": "torch:tensorwise" for role in roles}
    run = torch.compile(Plain(), backend="loka", options={"plan": plan_for(choices), "mods": "none"})
    run(torch.randn(32, 48)).square().sum().backward()
    assert no_codegen.targets()["aten.amax.default"] == 3
    assert quantised(no_codegen.graphs) == 4


def step(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(8, 48)).square().sum().backward()
    optimizer.step()


def ema(model):
    average = torch.optim.swa_utils.AveragedModel(copy.deepcopy(model))
    with torch.no_grad():
        for kept in average.module.parameters():
            kept.add_(1.0)
        for now, kept in zip(model.parameters(), average.module.parameters(), strict=True):
            now.copy_(kept)


def inference_mode(model):
    with torch.inference_mode():
        model.layers[1].weight.mul_(-2)


def new_parameter(model):
    model.layers[0].weight = nn.Parameter(torch.randn(96, 48))


def under_no_grad(model):
    with torch.no_grad():
        model.layers[0].weight[3] += 5


def swapped_data(model):
    model.layers[0].weight.data = torch.randn(96, 48)


CHANGES = {
    "optimizer": step,
    "load_state_dict": lambda model: model.load_state_dict(Plain().state_dict()),
    "assign": lambda model: model.load_state_dict(Plain().state_dict(), assign=True),
    "ema": ema,
    "no_grad": under_no_grad,
    "inference_mode": inference_mode,
    "new parameter": new_parameter,
    ".data is another tensor": swapped_data,
    "init": lambda model: nn.init.normal_(model.layers[1].weight),
    "detached": lambda model: model.layers[1].weight.detach().mul_(3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change, no_codegen, compiles):
    model, x = Plain().eval(), torch.randn(8, 48)
    run = frozen(model)
    with torch.no_grad():
        before = run(x)
    CHANGES[change](model)
    same(run, model, x)
    assert len(compiles) == 2
    with torch.no_grad():
        assert not torch.allclose(before, run(x), rtol=0.05, atol=0.05)


def test_without_a_change_there_is_one_compile(no_codegen, compiles):
    model = Plain().eval()
    run = frozen(model)
    with torch.no_grad():
        for rows in (8, 8, 8):
            x = torch.randn(rows, 48)
            close(run(x), model(x), 0.15)
        for p in model.parameters():
            p.sum(), p.detach(), p.data, p.view(-1), copy.deepcopy(p)
        run(x)
    assert len(compiles) == 1


def test_what_torch_does_not_see_is_told(no_codegen, compiles):
    """Writing through ``.data`` changes no version: the old weights stay until they are thawed, as the docs say."""
    model, x = Plain().eval(), torch.randn(8, 48)
    run = frozen(model)
    with torch.no_grad():
        before = run(x)
        model.layers[0].weight.data.mul_(3)
        assert torch.equal(run(x), before)
        loka_compile.thaw()
        close(run(x), model(x), 0.15)
    assert len(compiles) == 2


def test_generated_code_and_the_compile_cache(compile_cache, compiles):
    """Scales are numbers in the generated code: a cached graph with other weights must not bring them back."""
    x = torch.randn(8, 48)
    model = Plain().eval()
    run = frozen(model)
    with torch.no_grad():
        for factor in (1.0, 7.0):
            model.layers[0].weight.mul_(factor)
            close(run(x), model(x), 0.15)
    assert len(compiles) == 2


def test_training_is_not_frozen(no_codegen, compiles):
    model, x = Plain(), torch.randn(8, 48)
    run = frozen(model)
    for _ in range(2):
        run(x).square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert compiles == []
    with torch.no_grad():
        close(run(x), model(x), 0.15)
    assert len(compiles) == 1


def test_old_weights_are_let_go(no_codegen):
    model, x = Plain().eval(), torch.randn(8, 48)
    run = frozen(model)
    with torch.no_grad():
        run(x)
        from weakref import ref

        old = ref(model.layers[0].weight)
        model.load_state_dict(Plain().state_dict(), assign=True)
        run(x)
    no_codegen.graphs.clear()
    torch._dynamo.reset()
    import gc

    gc.collect()
    assert old() is None


def test_the_graph_of_old_weights_is_let_go(no_codegen):
    """Its constants are a copy of the model's weights."""
    model = Plain((48, 80, 64)).eval()
    run, x = frozen(model), torch.randn(16, 48)
    known = set(loka_compile.frozen._all)
    with torch.no_grad():
        run(x)
        (now,) = set(loka_compile.frozen._all) - known
        first = weakref.ref(now._now[1])
        model.layers[0].weight.mul_(2)
        run(x)
    gc.collect()
    assert now._compiles == 2
    assert first() is None


def test_weights_that_keep_changing_are_warned_of(no_codegen):
    model, x = Plain().eval(), torch.randn(8, 48)
    run = frozen(model)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(9):
            model.layers[0].weight.mul_(1.01)
            run(x)
    texts = [str(w.message) for w in caught if "frozen weights" in str(w.message)]
    assert len(texts) == 1
    assert '"freeze_weights": False' in texts[0]


def test_each_compile_has_its_report(no_codegen):
    model, x, watch = Plain().eval(), torch.randn(8, 48), Watch()
    run = frozen(model)
    with torch.no_grad():
        run(x)
        model.layers[0].weight.mul_(2)
        run(x)
    assert [r.counts() for r in watch.reports] == [{"torch:tensorwise": 2}] * 2


@pytest.mark.gpu
def test_changes_are_seen_behind_a_cuda_graph():
    model = Plain((64, 96, 64)).cuda().bfloat16().eval()
    run = frozen(model, mode="reduce-overhead")
    with torch.no_grad():
        for factor in (1.0, 3.0):
            model.layers[0].weight.mul_(factor)
            for _ in range(3):
                x = torch.randn(64, 64, device="cuda").bfloat16()
                torch.compiler.cudagraph_mark_step_begin()
                close(run(x).float().cpu(), model(x).float().cpu(), 0.15)
