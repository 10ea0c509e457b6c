"""The loss gate: effects against a reference by hand, the budget against brute force, a planted sensitive layer."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from loka_compile.errors import ConfigError, CorruptFileError, StaleTableError, UnknownNameError
from loka_compile.loss import Sensitivity, loss_of_plan, loss_sensitivity, plan_by_loss
from loka_compile.loss.effects import Running
from loka_compile.loss.switches import Switchboard
from loka_compile.lowering.providers import get_provider
from loka_compile.plan import make_plan
from loka_compile.selection.candidates import candidates_of
from loka_compile.selection.thresholds import Limits
from loka_compile.table import Header, Measurement, Table

FORWARD, WEIGHT = "forward", "grad_weight"


class Sensitive(nn.Module):
    """Two equal layers, whose GEMMs err alike; the output of one counts a thousand times as much."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loud, self.quiet = nn.Linear(48, 16, bias=False), nn.Linear(48, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return 10 * self.loud(x).sum(-1) + 0.01 * self.quiet(x).sum(-1)


def batches(count: int = 12, rows: int = 128, width: int = 48) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    model = Sensitive()
    found = []
    for _ in range(count):
        x = torch.randn(rows, width, generator=generator)
        found.append((x, (torch.rand(rows, generator=generator) < model(x).sigmoid()).float().detach()))
    return found


def bce(run, batch) -> Tensor:
    x, labels = batch
    return nn.functional.binary_cross_entropy_with_logits(run(x), labels, reduction="none")


def row(site: str, role: str = FORWARD, recipe: str = "tensorwise", gain: float = 10.0, mere: float = 0.03, **more):
    shape = {"m_min": 1, "m_max": 255, "n": 16, "k": 48, "dtype": "float32"} | more
    return Measurement(
        site, role, provider="torch", recipe=recipe, quantize_us=1.0, gemm_us=9.0, baseline_us=10.0 + gain, mere=mere,
        **shape,
    )  # fmt: skip


TABLE = Table(Header(), [row("loud#0"), row("quiet#0"), row("loud#0", WEIGHT), row("quiet#0", WEIGHT)])


def fp8(x: Tensor, w: Tensor) -> Tensor:
    """Tensorwise by hand, in fp64."""

    def rounded(t: Tensor) -> Tensor:
        scale = t.abs().max() / 448
        return (t / scale).to(torch.float8_e4m3fn).double() * scale.double()

    return rounded(x) @ rounded(w).t()


def test_the_error_gate_misses_a_sensitive_layer_that_the_loss_gate_finds():
    model, data = Sensitive(), batches()
    found = loss_sensitivity(model, bce, data, TABLE, progress=False)
    plain = make_plan(TABLE)
    assert all(not d.is_high_precision for d in plain.decisions)  # the two layers' errors are alike
    loud, quiet = (found.effect(site, FORWARD, "torch:tensorwise") for site in ("loud#0", "quiet#0"))
    assert loud is not None
    assert quiet is not None
    assert loud.low > 2e-4 > quiet.high
    chosen = plan_by_loss(TABLE, found)
    assert chosen.plan.lookup("loud#0", FORWARD).is_high_precision
    assert not chosen.plan.lookup("quiet#0", FORWARD).is_high_precision
    assert not chosen.plan.lookup("loud#0", WEIGHT).is_high_precision  # not measured: left to the error gate
    assert [(entry[0], entry[1]) for entry in chosen.excluded] == [("loud#0", FORWARD)]
    assert "loss budget" in chosen.plan.lookup("loud#0", FORWARD).reason
    assert "left out: loud#0 forward torch:tensorwise" in str(chosen)
    whole = loss_of_plan(model, bce, data, chosen.plan, progress=False)
    assert whole.high < 2e-4
    assert loss_of_plan(model, bce, data, plain, progress=False).low > 2e-4


def test_effects_are_those_of_the_gemm_alone():
    """Against the model computed by hand in fp64 with one product rounded to FP8."""
    model, data = Sensitive().double(), batches(3)
    data = [(x.double(), y.double()) for x, y in data]
    table = Table(Header(), [row(site, dtype="float64") for site in ("loud#0", "quiet#0")])
    # torch's kernels do not compute fp64: emulated refuses as well, and says why.
    found = loss_sensitivity(model, bce, data, table, progress=False)
    assert not found.effects()
    assert "float64" in found.skipped["loud#0", FORWARD]

    model = Sensitive()
    data = batches(3)
    found = loss_sensitivity(model, bce, data, TABLE, progress=False)
    changes, bases = [], []
    for x, labels in data:
        loud, quiet = 10 * x.double() @ model.loud.weight.double().t(), x.double() @ model.quiet.weight.double().t()
        rounded = 10 * fp8(x, model.loud.weight)

        def loss(logit: Tensor, labels: Tensor = labels) -> float:
            return nn.functional.binary_cross_entropy_with_logits(logit, labels.double()).item()

        bases.append(loss(loud.sum(-1) + 0.01 * quiet.sum(-1)))
        changes.append(loss(rounded.sum(-1) + 0.01 * quiet.sum(-1)) - bases[-1])
    effect = found.effect("loud#0", FORWARD, "torch:tensorwise")
    assert effect.change == pytest.approx(sum(changes) / sum(bases), rel=1e-3)
    assert found.base_loss == pytest.approx(sum(bases) / 3, rel=1e-5)
    mean = sum(changes) / 3
    spread = math.sqrt(sum((c - mean) ** 2 for c in changes) / 2 / 3) / (sum(bases) / 3)
    assert effect.stderr == pytest.approx(spread, rel=1e-2)
    assert effect.high - effect.change == pytest.approx(4.302653 * effect.stderr, rel=1e-5)  # t, 2 degrees of freedom


def test_backward_roles_by_one_step_and_nothing_is_left_behind():
    model = nn.Sequential(nn.Linear(48, 32), nn.LayerNorm(32), nn.SiLU(), nn.Dropout(0.5), nn.Linear(32, 1))
    model.append(nn.BatchNorm1d(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model[0].weight.grad = torch.ones_like(model[0].weight)
    table = Table(
        Header(), [row("0#0", role, n=32, k=48) for role in (FORWARD, "grad_weight")] + [row("4#0", n=1, k=32)]
    )

    def loss(run, batch):
        return nn.functional.mse_loss(run(batch[0]).squeeze(-1), batch[1])

    data = batches(6)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    found = loss_sensitivity(model, loss, data, table, roles=(FORWARD, WEIGHT), step=0.1, progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert (model[0].weight.grad == 1).all()
    assert model[4].weight.grad is None
    effect = found.effect("0#0", WEIGHT, "torch:tensorwise")
    assert effect.batches == 5  # a step needs a next batch
    assert effect.change != 0
    assert found.effect("0#0", FORWARD, "torch:tensorwise").batches == 6
    with pytest.raises(ConfigError, match="step="):
        loss_sensitivity(model, loss, batches(1), table, roles=(WEIGHT,), progress=False)


def test_gradients_of_a_switched_layer_are_those_of_its_recipe():
    torch.manual_seed(0)
    layer, x, grad = nn.Linear(48, 32), torch.randn(4, 8, 48, requires_grad=True), torch.randn(4, 8, 32)
    board = Switchboard()
    run = board.compile(layer)
    kernel = ("torch", "tensorwise")
    out = run(x)
    (site,) = board.sites
    for roles in ((), ("grad_input",), ("grad_weight",), ("grad_input", "grad_weight")):
        with board.on({(site, role): kernel for role in roles}):
            out = run(x)
            found = torch.autograd.grad(out, (x, layer.weight, layer.bias), grad)
        torch.testing.assert_close(out, layer(x))
        dy, flat = grad.reshape(-1, 32), x.detach().reshape(-1, 48)
        want_x = fp8(dy, layer.weight.detach().t()) if "grad_input" in roles else (dy @ layer.weight).double()
        want_w = fp8(dy.t(), flat.t()) if "grad_weight" in roles else (dy.t() @ flat).double()
        torch.testing.assert_close(found[0].double(), want_x.reshape(4, 8, 48), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[1].double(), want_w, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[2], dy.sum(0))


def test_a_matmul_with_a_parameter_under_autocast():
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(48, 16))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ self.w

    model, board, x = Plain(), Switchboard(), torch.randn(5, 48)
    run = board.compile(model)
    run(x)
    assert board.sites == {"w#0"}
    with board.on({("w#0", FORWARD): ("torch", "rowwise")}):
        out = run(x)
    assert out.dtype == torch.bfloat16
    exact = x.double() @ model.w.double()
    assert 0.005 < ((out.double() - exact).norm() / exact.norm()).item() < 0.06
    for unknown, match in ((("nowhere", "rowwise"), "nowhere"), (("torch", "columnwise"), "columnwise")):
        with pytest.raises(UnknownNameError, match=match), board.on({("w#0", FORWARD): unknown}):
            run(x)
    assert not torch.is_autocast_enabled("cpu")


# ---------------------------------------------------------------------------------------------- files
def test_a_run_goes_on_where_it_stopped(tmp_path):
    model, data, path = Sensitive(), batches(6), tmp_path / "s.json"
    whole = loss_sensitivity(model, bce, data, TABLE, progress=False)
    first = loss_sensitivity(model, bce, data[:4], TABLE, path=path, progress=False)
    assert Sensitivity.load(path) == first
    rest = loss_sensitivity(model, bce, data, TABLE, path=path, progress=False)
    assert rest.batches == 6
    for arm, running in whole.arms.items():
        assert rest.arms[arm].count == running.count
        assert rest.arms[arm].mean == pytest.approx(running.mean, rel=1e-9)
        assert rest.arms[arm].scatter == pytest.approx(running.scatter, rel=1e-9)
    other = Table(Header(), [row("loud#0")])
    with pytest.raises(StaleTableError, match=r"begun with other kernels.*1 are no longer asked"):
        loss_sensitivity(model, bce, data, other, path=path, progress=False)
    path.write_text(path.read_text()[:-30])
    with pytest.raises(CorruptFileError):
        loss_sensitivity(model, bce, data, TABLE, path=path, progress=False)


# ---------------------------------------------------------------------------------------------- the budget
def random_case(seed: int) -> tuple[Table, Sensitivity]:
    rng = random.Random(seed)
    rows, found = [], Sensitivity(base=Running(10, 1.0, 0.1), batches=10)
    for site in range(5):
        for role in (FORWARD, WEIGHT):
            for recipe in ("tensorwise", "rowwise"):
                shared = {
                    "a_form": recipe, "a_once_us": rng.choice([0.0, 2.0, 6.0]), "b_form": recipe, "b_once_us": 1.0,
                }  # fmt: skip
                quantize = shared["a_once_us"] + 1.0
                rows.append(
                    Measurement(f"s{site}#0", role, 1, 255, 16, 48, "bfloat16", "torch", recipe,
                                quantize_us=quantize, gemm_us=rng.uniform(5, 15), baseline_us=rng.uniform(12, 24),
                                mere=0.03, **shared)
                )  # fmt: skip
                if role == FORWARD and rng.random() < 0.9:
                    change = rng.uniform(-1, 4) * 1e-5
                    found.arms[f"s{site}#0", role, f"torch:{recipe}"] = Running(10, change, 1e-12)
    return Table(Header(), rows), found


def brute_force(table: Table, found: Sensitivity, budget: float) -> tuple[float, dict]:
    """The least time of all combinations within the budget, microseconds; and what every shared item costs."""
    limits = Limits.of()
    options = []
    for key, candidates in candidates_of(table, limits).items():
        usable = [c for c in candidates if c.usable]
        native = float(usable[0].baseline.at(Fraction(128))) / 1.05
        mine = [(native, 0.0, {})]
        for c in usable:
            effect = found.effect(*key, c.verdict.candidate)
            if effect is not None or key[1] != FORWARD:
                cost = max(0.0, effect.change) if effect else 0.0
                items = {i: float(line.at(Fraction(128))) for i, line in c.items.items()}
                mine.append((float(c.own.at(Fraction(128))), cost, items))
        options.append(mine)
    prices: dict = {}
    for mine in options:
        for _, _, items in mine:
            for item, price in items.items():
                prices[item] = max(price, prices.get(item, 0.0))
    best = math.inf
    for combination in itertools.product(*options):
        if sum(cost for _, cost, _ in combination) <= budget * (1 + 1e-9):
            used = {item for _, _, items in combination for item in items}
            best = min(best, sum(own for own, _, _ in combination) + sum(prices[i] for i in used))
    return best, prices


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [0.0, 3e-5, 1.0])
def test_the_choice_is_the_best_of_all(seed, budget):
    table, found = random_case(seed)
    chosen = plan_by_loss(table, found, max_loss_increase=budget)
    assert chosen.increase <= budget + 1e-12
    best, prices = brute_force(table, found, budget)
    # The plan's time, from its decisions.
    limits, time, items = Limits.of(), 0.0, set()
    for key, candidates in candidates_of(table, limits).items():
        decision = chosen.plan.lookup(*key)
        usable = [c for c in candidates if c.usable]
        if decision.is_high_precision:
            time += float(usable[0].baseline.at(Fraction(128))) / 1.05
        else:
            taken = next(c for c in usable if c.verdict.candidate == decision.candidate)
            time += float(taken.own.at(Fraction(128)))
            items |= set(taken.items)
    assert time + sum(prices[item] for item in items) == pytest.approx(best, rel=1e-6)


def test_a_larger_budget_never_saves_less_and_bad_budgets_are_refused():
    table, found = random_case(3)
    saved = [plan_by_loss(table, found, max_loss_increase=b).saved_us for b in (0, 1e-5, 2e-5, 5e-5, 1e-3)]
    assert saved == sorted(saved)
    assert saved[0] < saved[-1]
    for bad in (-1e-9, math.nan, "0.02%"):
        with pytest.raises(ConfigError, match="max_loss_increase"):
            plan_by_loss(table, found, max_loss_increase=bad)


def test_fast_accumulation_has_the_effect_of_its_exact_twin():
    assert "tensorwise_fast" in get_provider("torch").recipes
    table = Table(Header(), [row("loud#0", recipe="tensorwise_fast"), row("quiet#0", recipe="tensorwise_fast")])
    found = loss_sensitivity(Sensitive(), bce, batches(4), table, progress=False)
    assert {arm[2] for arm in found.arms} == {"torch:tensorwise"}
    assert found.effect("loud#0", FORWARD, "torch:tensorwise_fast").change > 0
    assert plan_by_loss(table, found).plan.lookup("quiet#0", FORWARD).recipe == "tensorwise_fast"


def test_a_gemm_that_the_kernel_refuses_is_told_and_stays_as_it_was():
    layer, x = nn.Linear(48, 32).double(), torch.randn(21, 48, dtype=torch.float64)
    board = Switchboard()
    run = board.compile(layer)
    run(x)
    (site,) = board.sites
    with board.on({(site, WEIGHT): ("torch", "tensorwise")}):
        (found,) = torch.autograd.grad(run(x).sum(), layer.weight)
    torch.testing.assert_close(found, torch.ones(32, 21, dtype=torch.float64) @ x)
    assert "float64" in board.refused[site, WEIGHT]


def test_a_ragged_shape_is_padded_as_in_a_plan():
    """A batch of 21 is the contraction of grad_weight, which torch's kernel wants in multiples of 16."""
    torch.manual_seed(0)
    layer, x, grad = nn.Linear(48, 32), torch.randn(21, 48), torch.randn(21, 32)
    board = Switchboard()
    run = board.compile(layer)
    run(x)
    (site,) = board.sites
    with board.on({(site, WEIGHT): ("torch", "tensorwise")}):
        (found,) = torch.autograd.grad(run(x), layer.weight, grad)
    torch.testing.assert_close(found.double(), fp8(grad.t(), x.t()), rtol=1e-4, atol=1e-4)
    assert not board.refused
