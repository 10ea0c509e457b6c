"""Models as they are used: autocast, 3-D inputs, dynamic batches, shared and tied modules, graph breaks."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers_backend import Watch, assert_same_step, close, gradients, train_step
from models_backend import Plain, Tower, exact, hard_swish, mods_of
from torch import nn
from torch._dynamo.utils import counters

OFF = {"table": "off"}


def compiled(model, **kwargs):
    return torch.compile(model, backend="loka", options=OFF, **kwargs)


def graphs():
    return counters["stats"]["unique_graphs"]


# ------------------------------------------------------------------ dtypes and autocast
class Island(nn.Module):
    """A chain under autocast, a layer in an island without it, and autocast within the island again."""

    def __init__(self):
        super().__init__()
        self.tower = Tower((16, 256), out=64)
        self.inner = nn.Linear(64, 64)
        self.last = nn.Linear(64, 2)
        self.seen = []

    def forward(self, x):
        h = self.tower(x)
        with torch.autocast("cpu", enabled=False):
            h = self.inner(h.float())
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return h, self.last(h)


@pytest.mark.parametrize("codegen", [False, True])
def test_autocast_outside_inside_and_nested(codegen, request):
    if not codegen:
        request.getfixturevalue("no_codegen")
    model, watch = Island(), Watch()
    reference = exact(model)
    x = torch.randn(19, 16)
    run = compiled(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fp32, bf16 = run(x)
        eager = model(x)
    assert (fp32.dtype, bf16.dtype) == (eager[0].dtype, eager[1].dtype) == (torch.float32, torch.bfloat16)
    (fp32.sum() + bf16.float().sum()).backward()
    dtypes = {g.gemm.site: g.gemm.dtype for g in watch.last.gemms if g.gemm.role == "forward"}
    assert dtypes == {
        "tower.linears.0#0": "bfloat16", "tower.head#0": "bfloat16", "inner#0": "float32", "last#0": "bfloat16"
    }  # fmt: skip

    with torch.no_grad():
        reference.tower.head.bias.zero_()  # its output goes on into another layer: its bias is removed as well
    h = reference.inner(mods_of(reference.tower)(x.double()))
    (h.sum() + reference.last(h).sum()).backward()
    close(fp32, h, 0.03)
    close(bf16, reference.last(h), 0.03)
    got, want = gradients(model), gradients(reference)
    for name, grad in got.items():
        assert grad.dtype == torch.float32
        if want[name] is None or name == "tower.head.bias":
            assert not grad.any(), name
        else:
            close(grad, want[name], 0.05, name)


def test_autocast_on_and_off_and_on_again(no_codegen):
    """Two graphs, not three, and the fp32 one is exact."""
    tower = Tower((16, 256))
    reference = exact(tower)
    run, x = compiled(tower), torch.randn(9, 16)
    counters.clear()
    for on in (True, False, True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            y = run(x)
        assert y.dtype == (torch.bfloat16 if on else torch.float32)
        close(y, mods_of(reference)(x), 0.03 if on else 1e-5)
    assert graphs() == 2


# ------------------------------------------------------------------ shapes
def test_dynamic_batch_with_real_code():
    """Two graphs at most (static, then dynamic), whatever comes; batches of 1 and 0 rows included."""
    tower = Tower((13, 384))
    reference = exact(tower)
    run = compiled(tower)
    counters.clear()
    for index, rows in enumerate((12, 5, 40, 9, 199, 64)):
        x = torch.randn(rows, 13)
        got = train_step(run, tower, x)
        assert_same_step(got, train_step(mods_of(reference), reference, x), 1e-5, tower.unused)
        assert graphs() <= 2, f"{graphs()} graphs after {index + 1} sizes"
    assert graphs() == 2


def test_mark_dynamic_compiles_once(no_codegen):
    """No size is specialised on by our passes or our lowering: mark_dynamic would raise."""
    tower = Tower()
    reference = exact(tower)
    run = compiled(tower)
    counters.clear()
    for rows in (8, 3, 199, 64):
        x = torch.randn(rows, 13)

        def marked(x):
            torch._dynamo.mark_dynamic(x, 0)
            return run(x)

        got = train_step(marked, tower, x)
        assert_same_step(got, train_step(mods_of(reference), reference, x), 1e-5, tower.unused)
    assert graphs() == 1


def test_empty_and_single_row_batches(no_codegen):
    tower = Tower()
    reference = exact(tower)
    run = compiled(tower)
    counters.clear()
    for rows in (32, 7, 1, 0, 32, 1, 0, 19):
        x = torch.randn(rows, 13)
        got = train_step(run, tower, x)
        assert got[0].shape == (rows, 1)
        if rows:
            assert_same_step(got, train_step(mods_of(reference), reference, x), 1e-5, tower.unused)
        else:
            assert all(g is not None and not g.any() for g in got[1].values())
    assert graphs() <= 4


def test_three_dimensional_input_of_changing_sizes(no_codegen):
    tower, watch = Tower(), Watch()
    reference = exact(tower)
    run = compiled(tower, dynamic=True)
    counters.clear()
    for shape in ((3, 5, 13), (4, 7, 13), (2, 33, 13)):
        x = torch.randn(shape, requires_grad=True)
        got = train_step(run, tower, x)
        assert_same_step(got, train_step(mods_of(reference), reference, x), 1e-5, tower.unused)
    assert graphs() == 1
    assert len(watch.reports) == 1


def test_one_dimensional_input_and_transposed_input(no_codegen):
    tower = Tower()
    reference = exact(tower)
    for x in (torch.randn(13), torch.randn(13, 6).t()):
        got = train_step(compiled(tower), tower, x)
        assert_same_step(got, train_step(mods_of(reference), reference, x), 1e-5, tower.unused)


# ------------------------------------------------------------------ module structure
class Shared(nn.Module):
    """One block called twice, and an embedding whose table is also the last weight."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 256)
        self.block = nn.Linear(256, 256)
        self.norm = nn.LayerNorm(256)
        self.out = nn.Linear(256, 50, bias=False)
        self.out.weight = self.table.weight

    def forward(self, index):
        x = self.table(index)
        for _ in range(2):
            x = F.silu(self.norm(self.block(x)))
        return self.out(x)


def test_shared_module_and_tied_weight(no_codegen):
    model, watch = Shared(), Watch()
    reference = exact(model)
    index = torch.randint(0, 50, (9,))
    y = compiled(model)(index)
    weight = torch.randn(y.shape)
    (y * weight).sum().backward()
    x = reference.table(index)
    for _ in range(2):
        x = x @ reference.block.weight.t()
        x = hard_swish(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + reference.norm.eps))
    want = x @ reference.table.weight.t()
    (want * weight).sum().backward()
    close(y, want, 1e-5)
    close(model.table.weight.grad, reference.table.weight.grad, 1e-5)
    close(model.block.weight.grad, reference.block.weight.grad, 1e-5)
    assert not model.block.bias.grad.any()
    assert not model.norm.weight.grad.any()
    sites = {g.gemm.site for g in watch.last.gemms}
    assert {"block#0", "block#1"} <= sites
    assert len(sites) == 3


class Broken(Tower):
    def forward(self, x):
        x = self.block(0, x)
        torch._dynamo.graph_break()
        return self.head(self.block(1, x))


def test_graph_break(no_codegen):
    model, watch = Broken(), Watch()
    reference = exact(model)
    x = torch.randn(6, 13)
    got = train_step(compiled(model), model, x)
    assert_same_step(got, train_step(mods_of(reference), reference, x), 1e-5, model.unused)
    assert [set(r.chains) for r in watch.reports] == [{"linears.0#0"}, {"linears.1#0"}]


def test_fullgraph(no_codegen):
    """No break is added, and one in the model is an error."""
    tower = Tower()
    reference = exact(tower)
    x = torch.randn(6, 13)
    close(compiled(tower, fullgraph=True)(x), mods_of(reference)(x), 1e-5)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(Broken(), fullgraph=True)(x)


def test_several_models_with_different_options(no_codegen):
    """Options and results do not leak from one compiled model into the next, in whatever order they are called."""
    towers = [Tower((13, 512)) for _ in range(3)]
    options = [OFF, {"mods": "none", **OFF}, {"block_size": 128, **OFF}]
    runs = [torch.compile(t, backend="loka", options=o) for t, o in zip(towers, options, strict=True)]
    references = [exact(t) for t in towers]
    wanted = [mods_of(references[0]), references[1], mods_of(references[2], 128)]
    for _ in range(2):
        for tower, run, reference, want in zip(towers, runs, references, wanted, strict=True):
            x = torch.randn(5, 13)
            assert_same_step(
                train_step(run, tower, x), train_step(want, reference, x.double()), 1e-5,
                () if want is reference else tower.unused,
            )  # fmt: skip


def test_one_model_compiled_twice_with_different_options(no_codegen):
    tower = Tower((13, 512))
    reference, x = exact(tower), torch.randn(5, 13)
    with_mods, without = compiled(tower), torch.compile(tower, backend="loka", options={"mods": "none", **OFF})
    for _ in range(2):
        close(with_mods(x), mods_of(reference)(x), 1e-5)
        close(without(x), reference(x.double()), 1e-5)


def test_buffers_and_train_time_state(no_codegen):
    """BatchNorm's running statistics move as in eager: rewriting next to it does not touch it."""
    model = nn.Sequential(nn.Linear(13, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
    eager = copy.deepcopy(model)
    run = compiled(model)
    for _ in range(3):
        x = torch.randn(16, 13)
        run(x)
        for module in eager:
            x = x @ module.weight.t() if module is eager[0] else module(x)
    close(model[1].running_mean, eager[1].running_mean, 1e-5)
    close(model[1].running_var, eager[1].running_var, 1e-5)
    assert int(model[1].num_batches_tracked) == 3


def test_frozen_parameters_get_no_gradient(no_codegen):
    """requires_grad=False stays so: a removed bias that is frozen has no gradient either."""
    tower = Tower()
    for name, p in tower.named_parameters():
        if name in ("linears.0.weight", "linears.0.bias", "norms.1.weight"):
            p.requires_grad_(False)
    compiled(tower)(torch.randn(4, 13)).sum().backward()
    missing = {n for n, p in tower.named_parameters() if p.grad is None}
    assert missing == {"linears.0.weight", "linears.0.bias", "norms.1.weight"}


def test_output_that_needs_no_rewriting(no_codegen):
    """Intermediate values returned beside the prediction are what the rewritten model computes there."""

    class Two(Tower):
        def forward(self, x):
            h = self.block(0, x)
            return h, self.head(self.block(1, h))

    model = Two()
    reference, x = exact(model), torch.randn(3, 13)
    h, _ = compiled(model)(x)
    z = x.double() @ reference.linears[0].weight.t()
    parts = [p * torch.rsqrt(p.square().mean(-1, keepdim=True) + reference.norms[0].eps) for p in z.split(256, -1)]
    close(h, hard_swish(torch.cat(parts, -1)), 1e-5)


def test_plain_layers_are_inductors(no_codegen):
    model = Plain(bias=True)
    reference = exact(model)
    x = torch.randn(5, 48, requires_grad=True)
    got = train_step(torch.compile(model, backend="loka", options={"mods": "none", **OFF}), model, x)
    assert_same_step(got, train_step(reference, reference, x.double()), 1e-5)
    assert all(c["joint_custom_pre_pass"] is None for c in no_codegen.configs)
