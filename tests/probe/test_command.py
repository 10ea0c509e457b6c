"""``loka probe`` and ``loka table make``: a user's training, resumed, and its table; mistakes are named."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loka_compile.cli import app
from loka_compile.errors import ConfigError
from loka_compile.probe import load_stats, partial
from loka_compile.probe.command import find_function
from loka_compile.probe.gate import Effort
from loka_compile.probe.partial import make_table
from loka_compile.probe.storage import read
from loka_compile.table import Table

ROOT = Path(__file__).parents[2]
CODE = """
import torch
from torch import nn

starts = []

def training(width=16, start=0, pause=0.0, length=10**6):
    starts.append(start)
    torch.manual_seed(start)
    model = nn.Sequential(nn.Linear(13, width), nn.ReLU(), nn.Linear(width, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def steps():
        import time
        for _ in range(length):
            loss = model(torch.randn(20, 13)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(pause)
            yield loss.detach()

    return model, steps()

def by_hand():
    model = nn.Linear(13, 4)
    return model, (model(torch.randn(20, 13)) and None for _ in range(5))

def inference():
    model = nn.Linear(13, 4)
    def steps():
        for _ in range(7):
            model(torch.randn(20, 13))
            yield
    return model, steps()

def no_model():
    return 1, []

def no_loop():
    return nn.Linear(2, 2), 3
"""


@pytest.fixture
def code(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(CODE)
    return f"{tmp_path / 'mine.py'}"


def loka(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == code, (result.output, result.exception)
    return " ".join(result.output.split())


def test_a_training_is_probed_and_continued(code: str, tmp_path: Path) -> None:
    folder = tmp_path / "stats"
    text = loka("probe", f"{code}:training", "--dir", folder, "--steps", 12, "--every", 4, "--arg", "width=32")
    assert "3 of 12 steps sampled" in text
    stats = load_stats(folder)
    assert {site: (s.in_features, s.out_features) for site, s in stats.items()} == {"0#0": (13, 32), "2#0": (32, 4)}
    assert stats["0#0"].input.n == 60
    text = loka("probe", f"{code}:training", "--dir", folder, "--steps", 20, "--every", 4, "--arg", "width=32")
    assert "of 20 steps sampled" in text
    assert sys.modules["mine"].starts == [12]  # type: ignore[attr-defined]
    assert load_stats(folder)["0#0"].input.n == 100
    assert "20 steps already" in loka("probe", f"{code}:training", "--dir", folder, "--steps", 20)
    assert "has no such layer" in loka("probe", f"{code}:inference", "--dir", folder, "--steps", 30, code=2)


def test_a_killed_training_goes_on_where_it_was_saved(code: str, tmp_path: Path) -> None:
    folder = tmp_path / "stats"
    main = "from loka_compile.cli import app; app()"
    options = ["--steps", "100000", "--every", "5", "--save-every", "10", "--arg", "pause=0.005"]
    command = [sys.executable, "-c", main, "probe", f"{code}:training", "--dir", str(folder), *options]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (folder / "rank0.json").exists():
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    saved = read(folder)
    assert saved is not None
    assert saved.step >= 10
    assert saved.step % 10 == 0
    loka("probe", f"{code}:training", "--dir", folder, "--steps", saved.step + 5, "--every", 5)
    assert read(folder).step == saved.step + 5  # type: ignore[union-attr]


def test_loops_without_an_optimizer_and_loops_that_end(code: str, tmp_path: Path) -> None:
    text = loka("probe", f"{code}:inference", "--dir", tmp_path / "a", "--steps", 100, "--every", 2)
    assert "4 of 7 steps sampled" in text
    assert "ended after 7 of 100 steps" in text
    (stats,) = load_stats(tmp_path / "a").values()
    assert stats.input.n == 80


def test_an_example_model_and_its_table(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    text = loka("probe", "examples.probing:synthetic", "--dir", tmp_path / "stats", "--steps", 3, "--every", 1,
                "--arg", "batch_size=32", "--no-budget", "--table", out, "--target", "h200", "--providers", "torch",
                "--pairs", 2, "--cap", 2)  # fmt: skip
    assert "rows" in text
    table = Table.load(out)
    assert table.header.target == "h200"
    assert len(table.header.fingerprint) == 15
    assert {row.provider for row in table.rows} == {"high_precision", "torch"}
    assert not Path(f"{out}.part").exists()
    assert "layers.0.lcb#0" in loka("table", "show", out, "--all")


def test_a_table_goes_on_where_it_was(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = tmp_path / "stats", tmp_path / "t.json"
    loka("probe", f"{code}:training", "--dir", folder, "--steps", 4, "--every", 2)
    whole = make_table(folder, tmp_path / "whole.json", providers=["emulated"], effort=Effort(2, 2))
    asked: list[list[str]] = []
    real = partial.quantify_stats

    def killed(stats, *args, **more):  # type: ignore[no-untyped-def]
        asked.append(list(stats))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(stats, *args, **more)

    monkeypatch.setattr(partial, "quantify_stats", killed)
    with pytest.raises(KeyboardInterrupt):
        make_table(folder, out, providers=["emulated"], effort=Effort(2, 2))
    assert Path(f"{out}.part").exists()
    assert not out.exists()
    table = make_table(folder, out, providers=["emulated"], effort=Effort(2, 2))
    assert asked == [["0#0"], ["2#0"], ["2#0"]]
    assert table.digest() == whole.digest() == Table.load(out).digest()
    # Other statistics or arguments: nothing of the old part is used.
    asked.clear()
    with pytest.raises(KeyboardInterrupt):
        make_table(folder, out, providers=["emulated"], effort=Effort(2, 2))
    make_table(folder, out, providers=["emulated"], effort=Effort(3, 3))
    assert asked[2:] == [["0#0"], ["2#0"]]


def test_mistakes_are_named(code: str, tmp_path: Path) -> None:
    there = ("--dir", tmp_path / "x", "--steps", 2)
    assert "names no function" in loka("probe", "training", *there, code=2)
    assert "there is no file" in loka("probe", "nowhere.py:f", *there, code=2)
    assert "there is no module 'examples.nowhere'" in loka("probe", "examples.nowhere:f", *there, code=2)
    text = loka("probe", f"{code}:trainin", *there, code=2)
    assert "has no function 'trainin'; it has: training, by_hand" in text
    assert "is not of the form NAME=VALUE" in loka("probe", f"{code}:training", *there, "--arg", "width", code=2)
    assert "cannot be called with" in loka("probe", f"{code}:training", *there, "--arg", "depth=3", code=2)
    assert "must return (model, iterator of training steps)" in loka("probe", f"{code}:no_model", *there, code=2)
    assert "cannot be iterated over" in loka("probe", f"{code}:no_loop", *there, code=2)
    (tmp_path / "empty").mkdir()
    assert "holds no probe statistics" in loka("table", "make", tmp_path / "empty", "--out", tmp_path / "t", code=2)
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        find_function(f"{tmp_path / 'broken.py'}:f")
    with pytest.raises(ConfigError):
        find_function(":f")
