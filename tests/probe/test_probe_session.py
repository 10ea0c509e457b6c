"""Sessions over eager and compiled models: what is seen is what happened, and training does not notice."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import loka_compile.probe as probe
from loka_compile.errors import ProbeError, StaleTableError
from loka_compile.passes.sites import name_sites
from loka_compile.probe import intake, load_stats, taps
from loka_compile.probe.intake import Intake
from loka_compile.probe.probe import BLIND_WINDOWS, Probe


class Net(nn.Module):
    """Linear, norm, activation; one layer is called twice."""

    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(13, 24)
        self.norm = nn.LayerNorm(24)
        self.shared = nn.Linear(24, 24)
        self.last = nn.Linear(24, 1, bias=False)
        self.reentrant = checkpointed

    def middle(self, h: Tensor) -> Tensor:
        return torch.relu(self.shared(torch.relu(self.shared(h))))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.silu(self.norm(self.first(x)))
        h = self.middle(h) if self.reentrant is None else checkpoint(self.middle, h, use_reentrant=self.reentrant)
        return self.last(h)


SITES = ["first#0", "last#0", "shared#0", "shared#1"]


def batch(step: int, rows: int = 20) -> Tensor:
    return torch.randn(rows, 13, generator=torch.Generator().manual_seed(step)) * 2 + 1


def train(
    model: nn.Module,
    steps: int,
    run: Callable[[Tensor], Tensor] | None = None,
    rows: Callable[[int], int] = lambda _: 20,
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = model if run is None else run
    for step in range(steps):
        run(batch(step, rows(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 8), nn.SiLU(), nn.Linear(8, 1))


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def recorded(model: Net, steps: int, every: int) -> dict[str, list[np.ndarray]]:
    """The operands of every layer in the sampled steps, by ordinary hooks on a run of its own."""
    seen: dict[str, list[np.ndarray]] = defaultdict(list)
    step, calls = [0], defaultdict(int)

    def hook(module: nn.Module, args: Any, y: Tensor, name: str) -> None:
        if step[0] % every:
            return
        site = f"{name}#{calls[name]}"
        calls[name] += 1
        seen[site + " x"].append(args[0].detach().double().numpy())
        y.register_hook(lambda grad: seen[site + " dy"].append(grad.double().numpy()))

    for name, module in model.named_children():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, a, y, name=name: hook(m, a, y, name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step[0] in range(steps):
        calls.clear()
        model(batch(step[0])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


def check_against_hooks(stats: Any, seen: dict[str, list[np.ndarray]], tolerance: float = 1e-5) -> None:
    assert sorted(stats) == SITES
    for site, one in stats.items():
        for rows, what in ((one.input, " x"), (one.grad_output, " dy")):
            want = np.concatenate(seen[site + what])
            assert rows.n == len(want)
            covariance = np.cov(want, rowvar=False).reshape(want.shape[1], -1)
            scale = np.abs(np.diag(covariance)).max()
            np.testing.assert_allclose(rows.tracker.mean().numpy(), want.mean(0), atol=tolerance * np.abs(want).max())
            np.testing.assert_allclose(rows.tracker.covariance().numpy(), covariance, atol=tolerance * scale)
            np.testing.assert_allclose(rows.moments.amax.numpy(), np.abs(want).max(0), rtol=tolerance, atol=1e-12)


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


@pytest.mark.parametrize("options", [{}, {"taps": "always"}])
@pytest.mark.parametrize("already_run", [False, True])
def test_compiled_statistics_graphs_and_bits(options: dict[str, str], already_run: bool) -> None:
    plain = net()
    train(plain, 10, torch.compile(plain, backend="aot_eager"))
    torch._dynamo.reset()

    model, counter = net(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    if already_run:  # a forward hook added now would not be seen
        compiled(batch(0))
    with probe(compiled, every=3, budget=None, **options) as p:
        train(model, 10, compiled)
    check_against_hooks(p.stats, recorded(net(), 10, 3))
    assert same(values(model), values(plain))
    # With and without taps; "always" needs the second one only for what was compiled before.
    assert counter.frame_count == (2 if already_run or not options else 1)


def test_no_recompilation_when_a_sampling_step_comes_and_goes() -> None:
    model = net()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with probe(compiled, every=3, budget=None) as p, torch._dynamo.config.patch(error_on_recompile=True):
        train(model, 14, compiled)
    assert p.windows == 5
    compiled(batch(0))


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_200_steps_leave_bit_identical_parameters(backend: str | None) -> None:
    def run(probed: bool) -> list[Tensor]:
        torch._dynamo.reset()
        model = net() if backend != "inductor" else small()  # its compilation takes long
        compiled = torch.compile(model, backend=backend) if backend else model
        with probe(compiled, every=10) if probed else contextlib.nullcontext():
            train(model, 200, compiled)
        return values(model)

    torch.manual_seed(0)
    state = torch.get_rng_state()
    plain = run(False)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    assert same(run(True), plain)
    assert torch.equal(torch.get_rng_state(), after)  # the user's random numbers are not touched either


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_what_a_checkpoint_recomputes_is_not_counted_twice(reentrant: bool, backend: str | None) -> None:
    model = net(checkpointed=reentrant)
    run = torch.compile(model, backend=backend) if backend else model
    with probe(model, every=3, budget=None) as p:
        train(model, 10, run)
    check_against_hooks(p.stats, recorded(net(), 10, 3))


def test_sites_are_those_of_the_backend() -> None:
    names: set[str] = set()

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        names.update(name_sites(gm).values())
        return gm.forward

    model = nn.ModuleDict({"over": nn.Sequential(net(), nn.Linear(1, 3)), "tied": nn.Linear(3, 3)})
    model.over.add_module("again", nn.Linear(3, 3))
    model.over.again.weight = model.tied.weight

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["tied"](self.parts["over"](x))

    whole = Model()
    with probe(whole, budget=None) as p:
        train(whole, 1, torch.compile(whole, backend=backend))
    assert set(p.stats) == names
    assert {"parts.over.again#0", "parts.over.again#1"} <= names


def test_a_graph_break_and_a_region_compiled_on_its_own_keep_the_names() -> None:
    class Broken(Net):
        def middle(self, h: Tensor) -> Tensor:
            h = torch.relu(self.shared(h))
            torch._dynamo.graph_break()
            return torch.relu(self.shared(h))

    torch.manual_seed(0)
    model = Broken()
    with probe(model, every=3, budget=None) as p:
        train(model, 10, torch.compile(model, backend="aot_eager"))
    check_against_hooks(p.stats, recorded(net(), 10, 3))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(13, 13)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.silu(self.fc(x))

    torch._dynamo.reset()
    blocks, counter = nn.Sequential(*(Block() for _ in range(10))), CompileCounterWithBackend("aot_eager")
    for block in blocks:
        block.compile(backend=counter, fullgraph=True)
    with probe(blocks, every=2, budget=None) as p:
        train(blocks, 4)
    assert sorted(p.stats) == sorted(f"{i}.fc#0" for i in range(10))
    assert all(s.input.n == 40 for s in p.stats.values())
    assert counter.frame_count <= 4  # equal blocks share their graphs, with taps too (the first takes no gradient)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_several_forward_passes_before_their_backward_passes(backend: str | None) -> None:
    def run(probed: bool) -> tuple[list[Tensor], Probe | None]:
        torch._dynamo.reset()
        model = net()
        compiled = torch.compile(model, backend=backend) if backend else model
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with probe(model, every=2, budget=None) if probed else contextlib.nullcontext() as p:
            for step in range(4):
                a, b, c = (compiled(batch(3 * step + part)) for part in range(3))
                c.square().mean().backward()
                (a * b).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return values(model), p

    plain, _ = run(False)
    probed, p = run(True)
    assert same(probed, plain)
    assert p is not None
    assert sorted(p.stats) == SITES
    assert all(s.input.n == s.grad_output.n == 2 * 3 * 20 for s in p.stats.values())  # type: ignore[union-attr]


def test_changing_batch_sizes() -> None:
    model, counter = net(), CompileCounterWithBackend("aot_eager")
    with probe(model, every=2, budget=None) as p:
        train(model, 12, torch.compile(model, backend=counter), rows=lambda step: [20, 20, 33, 7, 5, 1][step % 6])
    assert p.stats["first#0"].input.n == 2 * (20 + 33 + 5)
    assert counter.frame_count <= 6


def test_autocast_tells_the_dtype_of_the_gemm() -> None:
    model = net()
    compiled = torch.compile(model, backend="aot_eager")

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return compiled(x).float()

    with probe(model, every=1, budget=None) as p:
        train(model, 3, run)
    assert {s.dtype for s in p.stats.values()} == {"bfloat16"}
    assert p.stats["first#0"].input.reservoir.rows.dtype == torch.float32  # what the layer was given
    assert p.stats["first#0"].grad_output.reservoir.rows.dtype == torch.bfloat16  # type: ignore[union-attr]


def test_between_windows_and_afterwards_the_model_is_its_own() -> None:
    model = net()
    keys = list(model.state_dict())
    x = batch(0)
    with probe(model, every=2, budget=None):
        assert taps.is_attached(model.first)
        assert type(model.first) is not nn.Linear
        assert isinstance(model.first, nn.Linear)
        assert list(model.state_dict()) == keys
        assert not list(model.buffers())
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for other in copies:  # an EMA or a checkpoint of the whole module, taken in a sampled window
            assert type(other) is Net
            assert type(other.first) is nn.Linear
            assert not [name for m in other.modules() for name in vars(m) if "loka" in name]
            torch.testing.assert_close(other(x), model(x))
        assert repr(model) == repr(net())
        train(model, 1)
        assert all(type(m) in (nn.Linear, nn.LayerNorm, Net) for m in model.modules())
        train(model, 1)
        assert taps.is_attached(model.first)
    assert all(type(m) in (nn.Linear, nn.LayerNorm, Net) for m in model.modules())
    assert not [name for m in model.modules() for name in vars(m) if "loka" in name]


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
    with pytest.raises(KeyError, match="the user's"), probe(model, every=1, dir=tmp_path):
        train(model, 2)
        raise KeyError("the user's")
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


def test_distributed_wrappers(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    want = recorded(net(), 4, 2)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        for wrap in ("ddp", "compiled ddp", "fsdp2"):
            torch._dynamo.reset()
            model = net()
            run: Any = model
            if wrap == "fsdp2":
                for layer in (model.first, model.shared, model.last, model):
                    fully_shard(layer)
            else:
                run = nn.parallel.DistributedDataParallel(model)
            if wrap == "compiled ddp":
                run = torch.compile(run, backend="aot_eager")
            with probe(run, every=2, budget=None) as p:
                train(model, 4, run)
            check_against_hooks(p.stats, want)
            assert p.stats["first#0"].weight.mean().shape == (24, 13)  # type: ignore[union-attr]
            check_against_hooks(p.merged(), want)
    finally:
        dist.destroy_process_group()


def test_quantify_makes_a_table_of_what_was_seen() -> None:
    model = net()
    with probe(model, every=1, budget=None) as p:
        train(model, 3)
    for raw in (False, True):
        table = p.quantify(["emulated"], pairs=2, rows=16, raw=raw)
        assert {row.site for row in table.rows} == set(SITES)
        assert {row.role for row in table.rows} == {"forward", "grad_input", "grad_weight"}
        assert any(row.mere > 0 for row in table.rows if row.provider == "emulated")


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
def entered() -> Iterator[Net]:
    model = net()
    with probe(model):
        yield model


def test_misuse_is_named(entered: Net) -> None:
    with pytest.raises(ProbeError, match="being probed already"), probe(entered):
        pass
    with pytest.raises(ProbeError, match="holds no nn.Linear"), probe(nn.ReLU()):
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


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
def test_on_a_gpu_with_and_without_cuda_graphs(mode: str | None) -> None:
    def run(probed: bool) -> tuple[list[Tensor], Probe | None]:
        torch._dynamo.reset()
        model = net().cuda()
        compiled = torch.compile(model, mode=mode) if mode else model
        with probe(model, every=4, budget=None) if probed else contextlib.nullcontext() as p:
            train(model, 40, lambda x: compiled(x.cuda()))
        return values(model), p

    plain, _ = run(False)
    probed, p = run(True)
    assert p is not None
    assert same(probed, plain)
    assert sorted(p.stats) == SITES
    assert all(s.input.n == 200 and s.grad_output.n == 200 for s in p.stats.values())  # type: ignore[union-attr]
    assert p.stats["first#0"].device.type == "cuda"
    want = np.concatenate([batch(step).double().numpy() for step in range(0, 40, 4)])
    got = p.stats["first#0"].input.tracker.covariance().cpu().numpy()
    np.testing.assert_allclose(got, np.cov(want, rowvar=False), atol=1e-4)
