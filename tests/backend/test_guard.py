"""The drift guard: a planted drift puts exactly that site back, once; noise does not; training is not touched."""

import copy
import logging
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers_backend import Watch, plan_for, python
from torch import nn

import loka_compile
from loka_compile.drift.put_back import is_put_back, put_back, restore
from loka_compile.drift.strikes import Check, Drift
from loka_compile.errors import ProbeError
from loka_compile.gemm import Role
from loka_compile.plan import Decision, Plan


class Towers(nn.Module):
    """Two layers side by side. The weight's first column is 0: a huge first feature leaves the output as it is, but
    takes the resolution of a tensorwise scale away from all others."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 48, bias=False)
        self.b = nn.Linear(32, 48, bias=False)
        with torch.no_grad():
            self.a.weight[:, 0] = 0
            self.b.weight[:, 0] = 0

    def forward(self, x, z):
        return torch.relu(self.a(x)) + torch.relu(self.b(z))


def plan(max_mere=0.2, roles=("forward",), mere=0.05):
    return Plan(
        [Decision(f"{site}#0", role, "emulated", "tensorwise", mere=mere) for site in "ab" for role in roles],
        max_mere=max_mere,
    )


def batches(step, drift_from=None, rows=64):
    generator = torch.Generator().manual_seed(step)
    x, z = (torch.randn(rows, 32, generator=generator) for _ in range(2))
    if drift_from is not None and step >= drift_from:
        x[:, 0] = 1e7
    return x, z


def train(model, compiled, steps, guard=None, drift_from=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    departed = []
    for step in range(steps):
        compiled(*batches(step, drift_from)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if guard is not None:
            guard._worker.drain()  # what was submitted is measured: a test does not wait for the thread
        departed.append(set(guard.departed) if guard is not None else set())
    return departed


def compile_towers(the_plan):
    torch.manual_seed(0)
    model = Towers()
    return model, torch.compile(model, backend="loka", options={"plan": the_plan, "mods": "none"})


def kernels(report):
    return {d.site: d.provider for d in report.decisions if d.role == "forward"}


def test_a_planted_drift_puts_exactly_that_site_back_once(no_codegen, caplog):
    model, compiled = compile_towers(plan())
    watch = Watch()
    with caplog.at_level(logging.WARNING, "loka_compile"), loka_compile.guard(model, every=2, budget=None) as guard:
        train(model, compiled, 6, guard)
        compiles = len(watch.reports)
        assert not guard.departed
        assert guard.errors["a#0", "forward"][0] < 0.2
        departed = train(model, compiled, 12, guard, drift_from=0)
        assert departed[1] == set(), "one bad look is not enough"
        assert departed.index({"a#0"}) in (3, 4, 5)
        assert departed[-1] == {"a#0"}
        # The graph without taps once, and the tapped one once.
        train(model, compiled, 12, guard, drift_from=0)
        after = watch.reports[compiles:]
        assert guard.recompiles == 1
        assert len(after) == 2
        for report in after:
            assert kernels(report) == {"a#0": "high_precision", "b#0": "emulated"}
            assert "put back to high precision by the drift guard: a#0" in report.notes
    told = [r.message for r in caplog.records if "drift" in r.message]
    assert len(told) == 1
    assert "a#0: error of forward in emulated:tensorwise is" in told[0]
    assert "table: 0.05, limit 0.2" in told[0]
    # The live error that decided is that of a kernel that sees nothing but the huge feature.
    assert guard.departed["a#0"].check.mere > 0.5
    assert guard.plan.lookup("a#0", "forward").is_high_precision
    assert not guard.plan.lookup("b#0", "forward").is_high_precision


def test_it_stays_put_back_when_the_data_come_back_and_after_the_context(no_codegen):
    model, compiled = compile_towers(plan())
    watch = Watch()
    with loka_compile.guard(model, every=1, budget=None) as guard:
        train(model, compiled, 8, guard, drift_from=0)
        assert set(guard.departed) == {"a#0"}
        seen = len(watch.reports)
        train(model, compiled, 8, guard)
        assert len(watch.reports) == seen, "nothing flaps"
    train(model, compiled, 2)
    assert len(watch.reports) == seen + 1, "every step was looked at: the graph without taps is new"
    assert kernels(watch.last) == {"a#0": "high_precision", "b#0": "emulated"}
    x, z = batches(0)
    with torch.no_grad():
        high = model.a(x)
        assert torch.allclose(compiled(x, z) - torch.relu(high), torch.relu(model.b(z)), atol=0.2)
    guard.restore()
    assert type(model.a) is nn.Linear
    train(model, compiled, 1)
    # One for the call without gradients; the training graph of the beginning is still there.
    assert len(watch.reports) == seen + 2


def test_noise_around_the_limit_moves_nothing(no_codegen, monkeypatch):
    """The limit lies in the middle of what the looks find, and a little above: they scatter to both sides of it."""
    found = []
    add = Drift.add
    monkeypatch.setattr(Drift, "add", lambda self, check: (found.append(check.mere), add(self, check))[1])
    model, compiled = compile_towers(plan(max_mere=1.0))
    with loka_compile.guard(model, every=1, budget=None) as guard:
        train(model, compiled, 25, guard)
    usual = sum(found) / len(found)
    for limit in (usual, 1.02 * usual):
        model, compiled = compile_towers(plan(max_mere=limit))
        watch = Watch()
        found.clear()
        with loka_compile.guard(model, every=1, budget=None) as guard:
            train(model, compiled, 40, guard)
            assert guard.errors["a#0", "forward"][2] == pytest.approx(limit)
        assert guard.looks == 39  # all but the first, which compiles
        assert sum(mere > limit for mere in found) > 10, "the limit is not in the noise"
        assert not guard.departed
        assert len(watch.reports) == 2


def test_every_role_is_looked_at(no_codegen):
    """The gradient of b's output gets a row that hides all others: grad_weight loses them, the site goes back."""
    roles = [r.value for r in Role]
    model, compiled = compile_towers(plan(roles=roles, max_mere=0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with loka_compile.guard(model, every=1, budget=None) as guard:
        for step in range(8):
            x, z = (t.requires_grad_() for t in batches(step))
            out = compiled(x, z)
            out.square().mean().backward()
            optimizer.step()
        errors = guard.errors
    assert {role for site, role in errors if site == "a#0"} == set(roles)
    for (site, role), (live, table, limit) in errors.items():
        assert 0 < live < 0.3, (site, role)
        assert (table, limit) == (0.05, 0.3)


def test_a_kernel_chosen_by_hand_above_the_limit_has_headroom(no_codegen):
    model, compiled = compile_towers(plan(max_mere=1e-4, mere=0.5))
    with loka_compile.guard(model, every=1, budget=None) as guard:
        train(model, compiled, 6, guard)
        assert guard.errors["a#0", "forward"][1:] == (0.5, 0.625)
    assert not guard.departed


def test_after_enough_recompiles_it_only_warns(no_codegen, caplog):
    model, compiled = compile_towers(plan())
    watch = Watch()
    with caplog.at_level(logging.WARNING), loka_compile.guard(model, every=1, budget=None, max_recompiles=0) as guard:
        train(model, compiled, 10, guard, drift_from=0)
    assert set(guard.departed) == {"a#0"}
    assert len(watch.reports) == 2
    assert sum("Left as it is" in r.message for r in caplog.records) == 1


def test_training_is_bit_identical_under_the_guard(no_codegen):
    def run(guarded):
        model, compiled = compile_towers(plan())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = loka_compile.guard(model, every=2) if guarded else torch.no_grad()
        steps = []
        if guarded:
            guard.__enter__()
        for step in range(9):
            compiled(*batches(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append([p.detach().clone() for p in model.parameters()])
        if guarded:
            guard.__exit__(None, None, None)
            assert guard.looks
        return steps

    for mine, theirs in zip(run(True), run(False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_copies_and_pickles_of_a_layer_put_back_are_of_its_own_class(no_codegen):
    layer = nn.Linear(3, 4)
    put_back(layer)
    put_back(layer)
    assert is_put_back(type(layer))
    assert isinstance(layer, nn.Linear)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is nn.Linear
        assert torch.equal(other.weight, layer.weight)
    restore(layer)
    assert type(layer) is nn.Linear


def test_without_a_plan_or_without_fp8_nothing_is_touched(no_codegen):
    model = Towers()
    compiled = torch.compile(model, backend="loka", options={"table": "off", "mods": "none"})
    watch = Watch()
    with loka_compile.guard(model, every=1) as guard:
        train(model, compiled, 5, guard)
        assert type(model.a) is nn.Linear
    assert guard.looks == 0
    assert len(watch.reports) == 1


def test_the_plan_that_table_auto_makes_is_found(no_codegen):
    torch.manual_seed(0)
    model = Towers()
    options = {"target": "h200", "max_mere": 0.3, "min_speedup": 1e-3, "auto_calls": 2, "mods": "none"}
    compiled = torch.compile(model, backend="loka", options=options)
    with loka_compile.guard(model, every=1, budget=None) as guard:
        train(model, compiled, 6, guard)
        assert guard.looks
        live, table, limit = guard.errors["a#0", "forward"]
        assert live == pytest.approx(table, rel=0.5)
        assert limit == 0.3
        train(model, compiled, 10, guard, drift_from=0)
    # The cached table serves the recompile: no sampling again.
    assert "a#0" in guard.departed
    assert not math.isnan(table)


def test_ranks_agree_on_what_leaves(tmp_path):
    """A site that drifts on one rank goes back on all of them, in the same step."""
    code = """
        import sys, torch, torch.distributed as dist
        from torch import nn
        from loka_compile.drift.guard import agreed
        rank, where = int(sys.argv[1]), sys.argv[2]
        dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=2)
        leaving = {"b#0"} if rank else set()
        found = [agreed(leaving, ["a#0", "b#0", "c#0"], nn.Linear(2, 2)), agreed(set(), ["a#0"], nn.ReLU())]
        print(*map(sorted, found))
        dist.destroy_process_group()
    """
    with ThreadPoolExecutor() as pool:
        ranks = [pool.submit(python, code, args=(str(rank), str(tmp_path / "store"))) for rank in range(2)]
        assert [rank.result().stdout.strip() for rank in ranks] == ["['b#0'] []"] * 2


@pytest.mark.parametrize("options", [{"every": 0}, {"rows": 1}, {"patience": 0}, {"budget": 1.5}, {"every": 2.5}])
def test_wrong_arguments_are_named(options):
    (name,) = options
    with pytest.raises(ProbeError, match=name):
        loka_compile.guard(Towers(), **options)


def test_a_model_that_is_probed_cannot_be_guarded():
    model = Towers()
    with loka_compile.probe(model, every=1), pytest.raises(ProbeError, match="probed or guarded"):
        loka_compile.guard(model).__enter__()
    with pytest.raises(ProbeError, match=r"no nn\.Linear"):
        loka_compile.guard(nn.ReLU()).__enter__()


def test_strikes_have_hysteresis():
    """Only looks in a row whose whole interval is above count; a mean within the limit clears; between is neither."""
    drift = Drift(plan(max_mere=0.1), patience=2)

    def look(mere, low):
        return drift.add(Check("a#0", "forward", "emulated:tensorwise", mere, low, 2 * mere - low))

    for mere, low in [(0.2, 0.15), (0.08, 0.05)] * 3:
        assert look(mere, low) is None
    for mere, low in [(0.2, 0.15), (0.12, 0.09), (0.12, 0.02)]:
        assert look(mere, low) is None
    assert drift.add(Check("b#0", "forward", "emulated:tensorwise", 0.2, 0.15, 0.3)) is None, "sites count apart"
    assert str(look(0.3, 0.2)) == (
        "a#0: error of forward in emulated:tensorwise is 0.3 on live data (table: 0.05, limit 0.1)"
    )
    assert look(0.3, 0.2) is None, "a site leaves once"
    single = Drift(plan(max_mere=0.1), patience=1)
    assert single.add(Check("a#0", "forward", "x:y", 0.124)) is None
    assert single.add(Check("a#0", "forward", "x:y", math.nan)) is None
    assert single.add(Check("a#0", "forward", "x:y", 0.126)) is not None
    assert single.add(Check("b#0", "forward", "x:y", math.inf)) is not None


def test_a_second_model_in_the_code_of_a_first_one(no_codegen):
    """Dynamo compiles nothing for it; the guard finds what it runs, and puts its layer back, not the other's."""
    first, compiled = compile_towers(plan())
    train(first, compiled, 2)
    watch = Watch()
    second = Towers()
    again = torch.compile(second, backend="loka", options={"plan": plan(), "mods": "none"})
    with loka_compile.guard(second, every=1, budget=None) as guard:
        train(second, again, 8, guard, drift_from=0)
    assert set(guard.departed) == {"a#0"}
    assert is_put_back(type(second.a))
    assert not is_put_back(type(first.a))
    before = len(watch.reports)
    train(first, compiled, 2)
    assert len(watch.reports) == before


def test_the_public_name_is_a_function_whatever_was_imported():
    import loka_compile.drift.guard
    import loka_compile.drift.in_use

    assert isinstance(loka_compile.guard(Towers()), loka_compile.drift.guard.Guard)
    assert loka_compile.Guard is loka_compile.drift.guard.Guard
    assert loka_compile.drift.in_use.layers_of(Towers())[0] == ["a", "b"]


def test_a_given_plan_says_what_to_watch():
    """Also where the reports know nothing."""
    from loka_compile.drift.in_use import watched_gemms

    given = plan_for({"a#0 forward": "emulated:rowwise", "c#0 forward": "emulated:rowwise"})
    found, watched = watched_gemms(given, {"a": nn.Linear(3, 4), "b": nn.Linear(3, 4)})
    assert set(watched) == {"a#0"}
    assert watched["a#0"][0].kernel_at(7) == ("emulated", "rowwise")
    assert found.lookup("a#0", "forward").recipe == "rowwise"
