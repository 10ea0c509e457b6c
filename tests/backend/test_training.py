"""Training as it is done: checkpointing, accumulation, loss scaling, clipping, optimizers, saving, copying."""

import copy
import io
import pickle

import pytest
import torch
from helpers_backend import Watch, assert_same_step, close, gradients, role_counts, train_step
from models_backend import Checkpointed, Tower, exact, mods_of
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import loka_compile

OFF = {"table": "off"}


def compiled(model, **kwargs):
    return torch.compile(model, backend="loka", options=OFF, **kwargs)


# ------------------------------------------------------------------ activation checkpointing
@pytest.mark.parametrize("codegen", [False, True])
def test_activation_checkpointing(codegen, request):
    """Gradients are those of the plain model; the chains inside a checkpointed body are rewritten all the same."""
    if not codegen:
        request.getfixturevalue("no_codegen")
    model, watch = Checkpointed(), Watch()
    reference = exact(model)
    x = torch.randn(19, 13, requires_grad=True)
    got = train_step(compiled(model), model, x)
    assert_same_step(got, train_step(mods_of(reference), reference, x), 1e-5, model.unused)
    report = watch.last
    assert report.chains == {"linears.0#0": "linear-norm-swish", "linears.1#0": "linear-norm-swish"}
    assert role_counts(report) == {"forward": 3, "grad_input": 3, "grad_weight": 3}
    assert not report.unmapped


def must_save_mm(ctx, op, *args, **kwargs):
    saved = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("plan", ["off", "emulated:rowwise"])
def test_selective_checkpointing_saves_what_it_is_told_to(plan, no_codegen):
    """MUST_SAVE of aten.mm: as under eager semantics no product is computed twice, and so neither is its FP8 twin."""

    class Selective(Checkpointed):
        context_fn = staticmethod(lambda: create_selective_checkpoint_contexts(must_save_mm))

    options = OFF
    if plan != "off":
        from helpers_backend import plan_for

        options = {"plan": plan_for({f"linears.{i}#0 forward": plan for i in range(2)})}
    counts = {}
    for cls in (Checkpointed, Selective):
        torch.manual_seed(0)
        model = cls(widths=(16, 256, 256))
        no_codegen.graphs.clear()
        torch._dynamo.reset()
        x = torch.randn(19, 16, requires_grad=True)
        got = train_step(torch.compile(model, backend="loka", options=options), model, x)
        reference = exact(model)
        want = train_step(mods_of(reference), reference, x)
        assert_same_step(got, want, 1e-5 if plan == "off" else 0.2, model.unused)
        counts[cls] = [
            sum(no_codegen.targets(i)[f"aten.{op}.default"] for op in ("mm", "addmm")) for i in range(2)
        ]  # fmt: skip
    forward, backward = counts[Selective]
    assert forward == 3
    # Two gradients of each of three layers, and not one forward product more.
    assert backward == 6
    assert counts[Checkpointed][1] > backward, "without the policy the checkpoint recomputes products"


# ------------------------------------------------------------------ the training loop
def test_gradient_accumulation(no_codegen):
    """Micro-batches sum up to the big batch, and outputs of earlier ones stay intact."""
    tower = Tower()
    reference = exact(tower)
    run, x = compiled(tower), torch.randn(24, 13)
    want = train_step(mods_of(reference), reference, x, torch.ones(24, 1, dtype=torch.float64))
    for _ in range(2):
        tower.zero_grad(set_to_none=True)
        outputs = []
        for part in x.chunk(3):
            y = run(part)
            outputs.append(y)
            y.sum().backward()
        assert_same_step((torch.cat(outputs), gradients(tower)), want, 1e-5, tower.unused)


def test_two_forwards_before_two_backwards(no_codegen):
    tower = Tower()
    reference = exact(tower)
    run, x = compiled(tower), torch.randn(16, 13)
    want = train_step(mods_of(reference), reference, x, torch.ones(16, 1, dtype=torch.float64))
    first, second = (run(part) for part in x.chunk(2))
    tower.zero_grad(set_to_none=True)
    second.sum().backward()
    first.sum().backward()
    assert_same_step((torch.cat([first, second]).detach(), gradients(tower)), want, 1e-5, tower.unused)


def test_grad_scaler_with_clipping(no_codegen):
    """Unscaled gradients are the true ones; the zero gradients of unused parameters neither add Infs nor block it."""
    tower = Tower()
    reference = exact(tower)
    x = torch.randn(8, 13)
    run = compiled(tower)
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(run(x).sum()).backward()
    scaler.unscale_(optimizer)
    mods_of(reference)(x).sum().backward()
    want = gradients(reference)
    norm = torch.nn.utils.clip_grad_norm_(tower.parameters(), 1e9)
    want_norm = torch.sqrt(sum(g.square().sum() for g in want.values() if g is not None))
    assert abs(float(norm) - float(want_norm)) <= 1e-5 * float(want_norm)
    close(tower.linears[0].weight.grad, want["linears.0.weight"], 1e-5)
    before = {n: p.detach().clone() for n, p in tower.named_parameters()}
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**10
    moved = {n for n, p in tower.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(before) - tower.unused
    # An overflow is seen, and the step is skipped.
    optimizer.zero_grad()
    scaler.scale(run(x).sum() * 1e38).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 2.0**10


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, weight_decay=0.1),
}


@pytest.mark.parametrize("zero", [True, False])
def test_optimizers_with_weight_decay_and_clipping(zero, no_codegen):
    """Ten steps give the parameters of the hand-written model; an unused one sees zeros, and so decays as it would."""
    torch.manual_seed(1)
    start = Tower((13, 256))
    x, target = torch.randn(16, 13), torch.randn(16, 1)
    names = sorted(start.unused)
    run_model = copy.deepcopy(start)
    run = compiled(run_model)
    for name, make in OPTIMIZERS.items():
        run_model.load_state_dict(start.state_dict())
        reference = exact(start)
        forward = mods_of(reference)
        for p in reference.parameters():  # what the backend gives for parameters that are not read
            p.grad = torch.zeros_like(p)
        mine, theirs = make(list(run_model.parameters())), make(list(reference.parameters()))
        for _ in range(10):
            mine.zero_grad(set_to_none=zero)
            theirs.zero_grad(set_to_none=False)
            torch.nn.functional.mse_loss(run(x), target).backward()
            torch.nn.functional.mse_loss(forward(x), target.double()).backward()
            assert all(p.grad is not None for p in run_model.parameters())
            torch.nn.utils.clip_grad_norm_(run_model.parameters(), 0.5)
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            mine.step()
            theirs.step()
        for (key, p), q in zip(run_model.named_parameters(), reference.parameters(), strict=True):
            close(p.detach(), q.detach(), 2e-3, f"{name} {key}")
        assert {n for n, p in run_model.named_parameters() if not p.grad.any()} == set(names)


# ------------------------------------------------------------------ checkpoints and copies
def test_state_dict_round_trip(tmp_path, no_codegen):
    """Names and shapes are those of the plain model before and after training; strict both ways."""
    tower = Tower()
    shapes = {k: v.shape for k, v in tower.state_dict().items()}
    run = compiled(tower)
    optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2)
    run(torch.randn(5, 13)).sum().backward()
    optimizer.step()
    assert {k: v.shape for k, v in tower.state_dict().items()} == shapes
    assert list(run.state_dict()) == [f"_orig_mod.{k}" for k in shapes]
    torch.save({"model": tower.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    loaded = torch.load(tmp_path / "c.pt", weights_only=True)
    other = Tower()
    other.load_state_dict(loaded["model"], strict=True)
    optimizer.load_state_dict(loaded["optimizer"])
    x = torch.randn(3, 13)
    close(compiled(other)(x), run(x), 1e-6)
    in_place = Tower()
    in_place.load_state_dict(loaded["model"], strict=True)
    in_place.compile(backend="loka", options=OFF)
    close(in_place(x), run(x), 1e-6)
    assert list(in_place.state_dict()) == list(shapes)


def test_new_weights_are_seen_by_compiled_code(no_codegen):
    tower, x = Tower(), torch.randn(3, 13)
    run = compiled(tower)
    run(x)
    tower.load_state_dict(Tower().state_dict())
    close(run(x), mods_of(exact(tower))(x), 1e-5)


def test_deepcopy_and_pickle(no_codegen):
    """A copy of the compiled model is independent, and the plain module carries nothing of ours."""
    tower, x = Tower(), torch.randn(3, 13)
    text, attributes = repr(tower), set(vars(tower))
    run = compiled(tower)
    run(x).sum().backward()
    twin = copy.deepcopy(run)
    want = run(x).detach().clone()
    with torch.no_grad():
        for p in tower.parameters():
            p.zero_()
    assert not run(x).any()
    close(twin(x), want, 1e-6)
    assert repr(tower) == text
    assert set(vars(tower)) - attributes <= {"_is_torch_compile"}, "only torch.compile's own mark"
    assert not pickle.loads(pickle.dumps(tower))(x).any()
    buffer = io.BytesIO()
    torch.save(tower, buffer)
    buffer.seek(0)
    assert not torch.load(buffer, weights_only=False)(x).any()


def test_zero_gradients_are_never_none(no_codegen):
    """Also where a layer's output gradient is zero, and for a parameter that is used twice."""
    model = loka_compile.apply_mods(Tower())  # the eager reference behaves the same way
    model(torch.randn(4, 13)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    tower = Tower()
    compiled(tower)(torch.zeros(4, 13)).sum().mul(0).backward()
    assert all(p.grad is not None and not p.grad.any() for p in tower.parameters())


def test_double_use_of_anchored_parameters(no_codegen):
    """A bias that a Mod drops in one place but that is read in another keeps its true gradient."""

    class Both(Tower):
        def forward(self, x):
            return super().forward(x) * self.linears[0].bias.sum()

    model = Both()
    reference = exact(model)
    x = torch.randn(5, 13)
    compiled(model)(x).sum().backward()
    (mods_of(reference)(x) * reference.linears[0].bias.sum()).sum().backward()
    close(model.linears[0].bias.grad, reference.linears[0].bias.grad, 1e-5)
    close(model.linears[0].weight.grad, reference.linears[0].weight.grad, 1e-5)
