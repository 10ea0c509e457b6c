"""Sessions: windows, clocks, budgets, files, and what happens when something goes wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import loka_compile.probe as probe
from loka_compile.errors import ProbeError, StaleTableError
from loka_compile.probe import intake, load_stats
from loka_compile.probe.intake import Intake
from loka_compile.probe.probe import BLIND_WINDOWS, PAUSE, Probe
from tests.probe.training import SITES, batch, check_against_hooks, net, recorded, same, train, values


def test_eager_statistics_are_those_of_ordinary_hooks() -> None:
    model = net()
    with probe(model, every=3, budget=None) as p:
        train(model, 10)
    check_against_hooks(p.stats, recorded(net(), 10, 3))
    assert (p.steps, p.windows) == (10, 4)
    first = p.stats["first#0"]
    assert (first.in_features, first.out_features, first.batch, first.dtype) == (13, 24, 20, "float32")
    assert first.weight is not None
    assert first.weight.updates == 4
    assert len(first.bias_norm) == 4
    assert first.bias_norm.steps == [0, 3, 6, 9]
    assert len(p.stats["last#0"].bias_norm) == 0
    assert p.stats["shared#1"].weight is not None
    x, dy = first.input.reservoir.paired(first.grad_output.reservoir)  # type: ignore[union-attr]
    assert len(x) == len(dy) == 80


def test_rows_of_long_batches_are_drawn_uniformly() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    model = Rows()
    with probe(model, every=1, rows=100, budget=None, seed=3) as p:
        for _ in range(20):
            model(torch.arange(1000.0).view(10, 100, 1))
            p.step()
    seen = p.stats["fc#0"]
    assert (seen.input.n, seen.batch) == (2000, 1000)
    assert float(seen.input.tracker.mean()) == pytest.approx(499.5, abs=5 * 289 / 2000**0.5)
    again = Rows()
    with probe(again, every=1, rows=100, budget=None, seed=3) as q:
        for _ in range(20):
            again(torch.arange(1000.0).view(10, 100, 1))
            q.step()
    assert torch.equal(q.stats["fc#0"].input.reservoir.sample(), seen.input.reservoir.sample())


def test_gradient_accumulation_is_one_window() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with probe(model, every=2, budget=None) as p:
        for step in range(4):
            for micro in range(3):
                model(batch(step * 3 + micro)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert sorted(p.stats) == SITES
    assert (p.steps, p.windows, p.stats["first#0"].input.n) == (4, 2, 2 * 3 * 20)
    assert p.stats["first#0"].weight.updates == 2  # type: ignore[union-attr]
    assert len(p.stats["first#0"].bias_norm) == 2


@pytest.mark.parametrize(("every", "save_every"), [(1, 3), (4, 10), (7, 5)])
def test_steps_with_nothing_to_do_count_and_earn_like_any_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, every: int, save_every: int
) -> None:
    """Against a probe that does everything in every step; the clock stands still but for the steps, one a pause."""

    def session(where: Path) -> tuple[list[int], list[int], int, float]:
        seconds = iter([0.0, *range(1, 12), *range(3600, 3700)])
        clock = SimpleNamespace(perf_counter=lambda: float(next(seconds)))
        monkeypatch.setattr("loka_compile.probe.probe.time", clock)
        model = net()
        opened: list[int] = []
        saved: list[int] = []
        with probe(model, every=every, save_every=save_every, dir=where) as p, monkeypatch.context() as patch:
            patch.setattr(p._intake, "open", lambda step: opened.append(step) or False)
            patch.setattr(p, "_save", lambda: saved.append(p.steps))
            train(model, 24)
            allowance = p.report().allowance_s
        return opened, saved, p.steps, round(allowance, 9)

    found = session(tmp_path / "quiet")
    monkeypatch.setattr(Probe, "_steps_until_something", lambda self: 0)
    wanted = session(tmp_path / "busy")
    assert found == wanted
    assert found[:3] == (*([step for step in range(1, 25) if step % n == 0] for n in (every, save_every)), 24)
    assert found[3] == pytest.approx(2.0 + 0.005 * (23 + PAUSE))


def test_one_optimizer_of_several_is_the_clock_and_a_foreign_one_is_not() -> None:
    model, other = net(), nn.Linear(3, 3)
    optimizers = [
        torch.optim.SGD([model.first.weight], lr=1e-3),
        torch.optim.Adam([model.last.weight], lr=1e-3),
        torch.optim.SGD(other.parameters(), lr=1e-3),
    ]
    with probe(model, every=2, budget=None) as p:
        for step in range(4):
            model(batch(step)).square().mean().backward()
            for optimizer in (optimizers[2], *optimizers):
                optimizer.step()
    assert p.steps == 4
    optimizers[0].step()
    assert p.steps == 4  # the session is over


def test_steps_by_hand_replace_the_optimizers() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with probe(model, every=2, budget=None) as p:
        for step in range(4):
            model(batch(step)).square().mean().backward()
            p.step()
            optimizer.step()
    assert (p.steps, p.windows) == (4, 2)


def test_without_a_clock_the_work_is_bounded_and_the_user_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(intake, "MAX_CALLS", 5)
    model = net()
    with probe(model, budget=None) as p:
        for step in range(20):
            model(batch(step))
    assert sorted(p.stats) == SITES
    assert p.stats["first#0"].input.n == 5 * 20
    assert caplog.text.count("call p.step() after each batch") == 1


def test_validation_is_not_training_but_inference_can_be_probed() -> None:
    model = net()
    with probe(model, every=1, budget=None) as p:
        train(model, 2)
        model.eval()
        model(batch(9))
        model.train()
    assert p.stats["first#0"].input.n == 40
    assert sorted(p.stats) == SITES

    model.eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with probe(model, every=1, budget=None) as p, torch.inference_mode():
        for step in range(3):
            compiled(batch(step))
            p.step()
    assert sorted(p.stats) == SITES
    assert p.stats["first#0"].input.n == 60
    assert p.stats["first#0"].grad_output is None


def test_a_method_other_than_forward_is_counted_as_one_pass_too() -> None:
    model = net()
    with probe(model, every=1, budget=None) as p:
        for step in range(3):
            model.middle(torch.relu(model.first(batch(step)))).sum().backward()
            model.middle(torch.relu(model.first(batch(step)))).sum().backward()  # no step in between
            p.step()
    assert sorted(p.stats) == ["first#0", "shared#0", "shared#1"]


def test_bad_rows_are_named_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    with probe(model, every=1, budget=None) as p:
        for step in range(3):
            x = batch(step)
            x[3, 4] = float("inf")
            model(x)
            p.step()
    assert (p.stats["first#0"].input.n, p.stats["first#0"].skipped) == (57, 3)
    assert caplog.text.count("site first#0: rows of its input hold Inf or NaN") == 1
    assert torch.isfinite(p.stats["shared#0"].input.tracker.covariance()).all()
    assert {s.site: s.skipped for s in p.report().sites}["first#0"] == 3


def test_an_error_in_training_goes_through_and_the_model_is_restored(tmp_path: Path) -> None:
    model = net()

    def fail() -> None:
        with probe(model, every=1, dir=tmp_path):
            train(model, 2)
            raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        fail()
    assert type(model.first) is nn.Linear
    assert load_stats(tmp_path)["first#0"].input.n == 40  # what was learnt until then is kept


def test_a_failing_statistic_does_not_stop_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug of ours")

    model, plain = net(), net()
    train(plain, 6)
    monkeypatch.setattr(Intake, "_take_weight", fail)
    with pytest.raises(ProbeError, match="a bug of ours"), probe(model, every=2):
        train(model, 6)
    assert same(values(model), values(plain))
    assert "training goes on without them" in caplog.text


def test_a_model_that_is_never_run_with_taps_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    with probe(model, every=1, budget=None) as p:
        for _ in range(BLIND_WINDOWS + 2):
            p.step()
    assert caplog.text.count("no layer showed its input") == 1
    assert p.report().unseen == ("first", "shared", "last")
    assert p.windows == 0


def test_lazy_layers_are_probed_once_they_have_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(1))
    with probe(model, every=2, budget=None) as p:
        x = batch(0)
        model(x)
        train(model, 4)
    assert sorted(p.stats) == ["0#0", "2#0"]
    assert p.stats["0#0"].in_features == 13


def test_a_layer_with_a_forward_of_its_own_is_listed() -> None:
    model = net()
    original = model.shared.forward
    model.shared.forward = lambda x: original(x) * 1  # type: ignore[method-assign,assignment]
    with probe(model, every=1, budget=None) as p:
        train(model, 2)
    assert sorted(p.stats) == ["first#0", "last#0"]
    assert list(p.report().unsupported) == ["shared"]
    assert "not tapped: shared" in str(p.report())


def test_a_second_session_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    whole, halves = net(), net()
    with probe(whole, every=4, budget=None) as p:
        train(whole, 10)
    optimizer = torch.optim.AdamW(halves.parameters(), lr=1e-2)
    for start, stop in ((0, 6), (6, 10)):
        with probe(halves, every=4, budget=None, dir=tmp_path) as q:
            for step in range(start, stop):
                halves(batch(step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert q.steps == 10
    for site in SITES:
        (mine, rest), (theirs, other) = p.stats[site].state(), q.stats[site].state()
        assert rest == other
        for name in mine:
            if ".sketch." not in name:  # its coin flips are its own
                assert torch.equal(mine[name], theirs[name]), name
    assert sorted(load_stats(tmp_path)) == SITES
    with pytest.raises(StaleTableError, match="kept as"), probe(halves, precision="fp64", dir=tmp_path):
        pass
    with pytest.raises(StaleTableError, match="has no such layer"), probe(nn.Linear(13, 24), dir=tmp_path):
        pass
    wider = net()
    wider.first = nn.Linear(14, 24)
    with pytest.raises(StaleTableError, match=r"has \(24, 14\) there"), probe(wider, dir=tmp_path):
        pass


def test_saving_happens_while_training_goes_on(tmp_path: Path) -> None:
    model = net()
    with probe(model, every=5, save_every=10, budget=None, dir=tmp_path) as p:
        train(model, 25)
        p.stats  # noqa: B018 (waits for the worker, not for the disk)
        deadline = 200
        while not (tmp_path / "rank0.json").exists() and deadline:
            torch.linalg.inv(torch.eye(200))
            deadline -= 1
        assert deadline
    assert p.report().saved >= 2
    assert load_stats(tmp_path)["first#0"].input.n == 5 * 20


def test_over_the_budget_windows_are_left_out() -> None:
    model = net()
    with probe(model, every=1, budget=1e-9, grace=1e-9) as p:
        train(model, 30)
    assert p.over_budget > 20
    assert 1 <= p.windows < 10
    assert p.report().spent_s > p.report().allowance_s > 0
    free = net()
    with probe(free, every=1, budget=0.01, grace=60.0) as q:
        train(free, 30)
    assert (q.windows, q.over_budget) == (30, 0)


def test_copies_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "STAGE_BYTES", 5000)
    monkeypatch.setattr(intake, "ROW_BYTES", 13 * 4 * 7)
    model = net()
    with probe(model, every=1, budget=None) as p:
        model(batch(0)).sum().backward()
        assert p._intake.most_staged <= 5000
        assert p._intake.dropped > 0
    assert p.stats["first#0"].input.n == 7


def test_quantify_makes_a_table_of_what_was_seen() -> None:
    model = net()
    with probe(model, every=1, budget=None) as p:
        train(model, 3)
    for operands in ("both", "drawn", "raw"):
        table = p.quantify(["emulated"], pairs=2, cap=2, rows=16, operands=operands)
        assert {row.site for row in table.rows} == set(SITES)
        assert {row.role for row in table.rows} == {"forward", "grad_input", "grad_weight"}
        measured = [row for row in table.rows if row.mere == row.mere]
        assert any(row.mere > 0 for row in measured if row.provider == "emulated")
        for row in measured:
            known = (not math.isnan(row.mere_drawn), not math.isnan(row.mere_raw))
            assert known == {"both": (True, True), "drawn": (True, False), "raw": (False, True)}[operands]
            assert row.mere == max(m for m in (row.mere_drawn, row.mere_raw) if m == m)
    with pytest.raises(ProbeError, match="operands is 'cooked'"):
        p.quantify(["emulated"], operands="cooked")
    with pytest.raises(ProbeError, match="pairs"):
        p.quantify(["emulated"], pairs=0)


def test_the_report_says_what_it_cost() -> None:
    model = net()
    with probe(model, every=2, budget=None) as p:
        train(model, 6)
    report = p.report()
    assert (report.steps, report.windows, report.dropped) == (6, 3, 0)
    assert report.bytes == p.stats.nbytes > 0
    assert report.most_staged_bytes > 0
    assert [s.site for s in report.sites] == SITES
    assert report.to_dict()["sites"][0]["input_rows"] == 60
    text = str(report)
    assert "shared#1" in text
    assert "memory" in text


@pytest.fixture
def entered() -> Iterator[nn.Module]:
    model = net()
    with probe(model):
        yield model


def test_misuse_is_named(entered: nn.Module) -> None:
    with pytest.raises(ProbeError, match="being probed already"), probe(entered):
        pass
    with pytest.raises(ProbeError, match=r"holds no nn\.Linear"), probe(nn.ReLU()):
        pass
    p = probe(net())
    with p:
        pass
    with pytest.raises(ProbeError, match="entered before"), p:
        pass
    for options in ({"every": 0}, {"save_every": 0}, {"rows": 0}, {"budget": 2.0}, {"precision": "tf32"},
                    {"taps": "sometimes"}, {"momentum": 1.0}):  # fmt: skip
        with pytest.raises(ProbeError, match=next(iter(options))):
            Probe(net(), **options)  # type: ignore[arg-type]
