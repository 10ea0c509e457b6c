"""Statistics on disk: whole after any kill, damage is named, and what is read back goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from loka_compile.errors import CorruptFileError, ProbeError, StaleTableError
from loka_compile.probe import storage
from loka_compile.probe.site_stats import SiteStats, Stats, StatsOptions
from loka_compile.probe.storage import Snapshot, Writer, load_stats, read, write

OPTIONS = StatsOptions(momentum=0.9, reservoir_rows=8)


def site(name: str, seed: int = 0, rows: int = 30) -> SiteStats:
    g = torch.Generator().manual_seed(seed)
    out = SiteStats(name, 5, 3, torch.bfloat16, options=OPTIONS)
    for step in range(2):
        keys = torch.rand(rows, dtype=torch.float64, generator=g)
        out.update_input(torch.randn(rows, 5, generator=g).bfloat16(), keys, step, batch=4096)
        out.update_grad_output(torch.randn(rows, 3, generator=g), keys, step)
        out.update_weight(torch.randn(3, 5, generator=g))
        out.update_bias(torch.randn(3, generator=g), step)
    return out


def snapshot(stats: Stats, step: int = 7, rank: int = 0, world: int = 1) -> Snapshot:
    return Snapshot.take(stats, step, OPTIONS, rank, world)


def some() -> Stats:
    return Stats({name: site(name, seed) for seed, name in enumerate(["over.mlp.2#0", "a#0", "a#1"])})


def assert_same(a: Stats, b: Stats) -> None:
    assert sorted(a) == sorted(b)
    for name in a:
        (mine, rest), (theirs, other) = a[name].state(), b[name].state()
        assert rest == other
        assert sorted(mine) == sorted(theirs)
        assert all(torch.equal(mine[k], theirs[k]) for k in mine)


def test_everything_comes_back(tmp_path: Path) -> None:
    stats = some()
    stats["a#0"].bias_norm.append(3, float("nan"))
    write(tmp_path, snapshot(stats))
    saved = read(tmp_path)
    assert saved is not None
    assert (saved.step, saved.rank, saved.world, saved.options) == (7, 0, 1, OPTIONS)
    assert saved.stats["a#0"].bias_norm.values[2] != saved.stats["a#0"].bias_norm.values[2]  # NaN
    for each in (stats, saved.stats):
        each["a#0"].bias_norm.values.pop()
    assert_same(saved.stats, stats)
    assert (saved.stats["a#0"].batch, saved.stats["a#0"].dtype) == (4096, "bfloat16")
    json.loads((tmp_path / "rank0.json").read_text(), parse_constant=pytest.fail)


def test_a_new_version_replaces_the_old_one_and_its_leavings(tmp_path: Path) -> None:
    write(tmp_path, snapshot(some(), step=1))
    (tmp_path / "rank0-deadbeef.tmp").write_bytes(b"half a file")
    (tmp_path / "rank1-000000000001-abc.safetensors").write_bytes(b"another rank's")
    write(tmp_path, snapshot(some(), step=2))
    names = sorted(p.name for p in tmp_path.iterdir())
    assert len(names) == 3
    assert names[0].startswith("rank0-000000000002-")
    assert names[1:] == ["rank0.json", "rank1-000000000001-abc.safetensors"]
    write(tmp_path, snapshot(some(), step=2))  # the same once more
    assert read(tmp_path) is not None


def test_nothing_saved_yet(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    with pytest.raises(ProbeError, match="holds no probe statistics"):
        load_stats(tmp_path)


def damaged_index(folder: Path) -> None:
    path = folder / "rank0.json"
    path.write_bytes(path.read_bytes()[:200])


def flipped_bit(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def lost_data(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    path.unlink()


def lost_key(folder: Path) -> None:
    path = folder / "rank0.json"
    index = json.loads(path.read_text())
    del index["sites"]["a#0"]["input"]
    path.write_text(json.dumps(index))


def other_sites(folder: Path) -> None:
    path = folder / "rank0.json"
    index = json.loads(path.read_text())
    index["sites"]["zzz"] = index["sites"]["a#0"]
    path.write_text(json.dumps(index))


def foreign(folder: Path) -> None:
    (folder / "rank0.json").write_text('{"format": "something else", "version": 1}')


@pytest.mark.parametrize("damage", [damaged_index, flipped_bit, lost_data, lost_key, other_sites, foreign])
def test_damage_is_named(damage: object, tmp_path: Path) -> None:
    write(tmp_path, snapshot(some()))
    damage(tmp_path)  # type: ignore[operator]
    with pytest.raises(CorruptFileError, match=r"rank0"):
        read(tmp_path)


def test_another_version_is_named(tmp_path: Path) -> None:
    write(tmp_path, snapshot(some()))
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    with pytest.raises(StaleTableError, match="99"):
        read(tmp_path)


def test_ranks_are_merged_on_reading_and_a_missing_one_is_named(tmp_path: Path) -> None:
    first, second = Stats({"a#0": site("a#0", 0)}), Stats({"a#0": site("a#0", 1), "b#0": site("b#0", 2)})
    write(tmp_path, snapshot(first, rank=0, world=3))
    write(tmp_path, snapshot(second, rank=2, world=3))
    with pytest.raises(ProbeError, match=r"lacks the statistics of ranks \[1\], of 3"):
        load_stats(tmp_path)
    write(tmp_path, snapshot(Stats(), rank=1, world=3))
    merged = load_stats(tmp_path)
    assert sorted(merged) == ["a#0", "b#0"]
    assert merged["a#0"].input.n == 120
    first.merge(second)
    torch.testing.assert_close(
        merged["a#0"].input.tracker.covariance(), first["a#0"].input.tracker.covariance(), rtol=1e-12, atol=0
    )


def test_the_writer_never_makes_the_caller_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, started, steps = threading.Event(), threading.Event(), []

    def slow(folder: Path, given: Snapshot) -> None:
        started.set()
        assert gate.wait(30)
        steps.append(given.step)

    monkeypatch.setattr(storage, "write", slow)
    writer = Writer(tmp_path)
    writer.submit(snapshot(Stats(), step=1))
    assert started.wait(30)
    for step in (2, 3, 4):  # the disk is busy: only the newest waits
        writer.submit(snapshot(Stats(), step=step))
    gate.set()
    writer.close()
    assert steps == [1, 4]
    assert writer.written == 2


def test_a_full_disk_is_logged_and_told_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    writer = Writer(tmp_path / "file" / "folder")
    writer.submit(snapshot(Stats(), step=5))
    with pytest.raises(ProbeError, match="could not be saved"):
        writer.close()
    assert "step 5 could not be saved" in caplog.text


KILLED = """
import os, random, signal, sys, time
import torch
from loka_compile.probe.site_stats import Stats, StatsOptions
from loka_compile.probe.storage import Snapshot, read, write
from tests.probe.test_storage import site

folder, rng = sys.argv[1], random.Random(0)
whole = site("a#0")
tensors, rest = whole.state()


def save_forever():
    step = 0
    while True:
        step += 1
        rest["batch"] = step
        marked = {f"0.{name}": t for name, t in tensors.items()}
        marked["0.weight.amax"] = torch.tensor(float(step))
        write(folder, Snapshot(step, 0, 1, whole.options, marked, {"a#0": rest}))


reached = []
for trial in range(25):
    child = os.fork()
    if child == 0:
        save_forever()
    time.sleep(rng.uniform(0.02, 0.08))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    saved = read(folder)
    assert saved is not None, trial
    one = saved.stats["a#0"]
    assert saved.step == one.batch == float(one.weight.amax), (saved.step, one.batch, one.weight.amax)
    reached.append(saved.step)
print("whole", max(reached))
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork to be quick")
def test_killed_at_any_moment_the_last_whole_version_is_left(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("whole")
    assert int(done.stdout.split()[1]) > 1
