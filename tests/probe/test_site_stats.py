"""One site's bundle: what goes in, what merging gives, and two real processes against one."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from loka_compile.errors import ProbeError
from loka_compile.probe.norms import Behaviour
from loka_compile.probe.ranks import merge_across_ranks
from loka_compile.probe.reservoir import seeded
from loka_compile.probe.site_stats import RowStats, SiteStats, Stats, StatsOptions
from loka_compile.probe.weights import WeightTracker

K, N = 7, 4


def rows_of(step: int, rank: int, width: int, count: int = 50) -> torch.Tensor:
    g = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(count, width, generator=g) @ torch.randn(width, width, generator=g) + rank


def keys_of(step: int, rank: int, count: int = 50) -> torch.Tensor:
    return torch.rand(count, generator=seeded(step, rank), dtype=torch.float64)


def weight_of(step: int) -> torch.Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(step))


def fed(ranks: list[int], dtype: torch.dtype = torch.float64, steps: int = 3) -> SiteStats:
    """A site that has seen the rows of these ranks; the weight is the same on all."""
    site = SiteStats("a#0", K, N, torch.float32, options=StatsOptions(dtype=dtype, reservoir_rows=16))
    for step in range(steps):
        for rank in ranks:
            site.update_input(rows_of(step, rank, K), keys_of(step, rank), step)
            site.update_grad_output(rows_of(step, rank, N), keys_of(step, rank), step)
        site.update_weight(weight_of(step))
        site.update_bias(torch.full((N,), float(step)), step)
    return site


def assert_equal_statistics(got: SiteStats, want: SiteStats, tolerance: float) -> None:
    for mine, theirs in ((got.input, want.input), (got.grad_output, want.grad_output)):
        assert mine is not None
        assert theirs is not None
        assert (mine.n, mine.skipped) == (theirs.n, theirs.skipped)
        for a, b in (
            (mine.tracker.covariance(), theirs.tracker.covariance()),
            (mine.tracker.mean(), theirs.tracker.mean()),
            (mine.moments.kurtosis(), theirs.moments.kurtosis()),
            (mine.moments.amax, theirs.moments.amax),
        ):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        assert torch.equal(mine.reservoir.sample(), theirs.reservoir.sample())
    assert got.weight is not None
    assert want.weight is not None
    torch.testing.assert_close(got.weight.mean(), want.weight.mean())
    torch.testing.assert_close(got.weight.column_covariance(), want.weight.column_covariance())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_merge_of_ranks_equals_one_process(dtype: torch.dtype, tolerance: float) -> None:
    merged = fed([0], dtype)
    merged.merge(fed([1], dtype))
    assert_equal_statistics(merged, fed([0, 1], dtype), tolerance)
    assert merged.calls == 6
    assert merged.input.sketch is not None
    assert math.isfinite(merged.input.sketch.site_quantile(0.99))


def run_rank(rank: int, world: int, folder: str) -> None:
    """What each process of the test below runs."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    stats = Stats({"a#0": fed([rank])})
    if rank == 1:
        stats["only one rank saw it#0"] = fed([5])
    before = stats["a#0"].input.tracker.covariance()
    merged = merge_across_ranks(stats)
    assert sorted(merged) == ["a#0", "only one rank saw it#0"]
    assert_equal_statistics(merged["a#0"], fed(list(range(world))), 1e-10)
    assert_equal_statistics(merged["only one rank saw it#0"], fed([5]), 0)
    assert torch.equal(stats["a#0"].input.tracker.covariance(), before)  # its own are left as they are
    dist.destroy_process_group()
    Path(folder, f"done{rank}").touch()


#: Forks after the imports, which take longer than everything else.
PROCESSES = """
import os, sys
import torch
from tests.probe.test_site_stats import run_rank

torch.set_num_threads(1)
failed = 0
for world in (2, 3):
    folder = f"{sys.argv[1]}/{world}"
    os.mkdir(folder)
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            run_rank(rank, world, folder)
            os._exit(0)
        children.append(child)
    failed += sum(os.waitpid(child, 0)[1] != 0 for child in children)
sys.exit(failed)
"""


def test_real_processes_merge_to_what_one_process_sees(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROCESSES, str(tmp_path)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("*/done*"))) == 2 + 3


def test_without_a_process_group_merging_gives_a_copy() -> None:
    stats = Stats({"a#0": fed([0])})
    merged = merge_across_ranks(stats)
    assert_equal_statistics(merged["a#0"], stats["a#0"], 0)
    merged["a#0"].update_input(torch.zeros(3, K), torch.rand(3, dtype=torch.float64), 9)
    assert (merged["a#0"].input.n, stats["a#0"].input.n) == (153, 150)


def test_norms_over_time_and_their_behaviour() -> None:
    site = SiteStats("a#0", K, N, torch.float32)
    for step in range(0, 4000, 100):
        rows = torch.full((3, K), float(step))
        rows[1, 2] = math.inf  # not part of the mean
        site.update_input(rows, torch.rand(3, dtype=torch.float64), step)
        site.update_bias(torch.full((N,), math.exp(-step / 300)), step)
    assert site.input.mean_norm.values == pytest.approx([s * math.sqrt(K) for s in range(0, 4000, 100)])
    assert site.bias_norm.values[1] == pytest.approx(2 * math.exp(-1 / 3))
    assert site.bias_norm.steps[:3] == [0, 100, 200]
    assert site.bias_norm.behaviour() is Behaviour.VANISHING
    assert site.input.mean_norm.behaviour() is Behaviour.DRIFTING


def test_bad_rows_are_counted_once_and_nowhere_used() -> None:
    site = SiteStats("a#0", K, N, torch.float32)
    rows = rows_of(0, 0, K)
    rows[[1, 7], [0, 3]] = math.nan
    site.update_input(rows, keys_of(0, 0), 0)
    site.update_input(torch.full((2, K), math.inf), keys_of(1, 0, 2), 1)
    site.update_weight(torch.full((N, K), math.nan))
    assert (site.input.n, site.input.skipped, site.skipped) == (48, 4, 5)
    assert int(site.input.moments.count) == 48
    assert len(site.input.reservoir.sample()) == 48
    assert site.input.sketch is not None
    assert np.isfinite(site.input.sketch.quantile(1.0)).all()
    assert len(site.input.mean_norm) == 1


def test_the_sketch_takes_a_limited_number_of_rows() -> None:
    stats = RowStats(K, torch.float32, StatsOptions(sketch_values=5 * K + 3), torch.device("cpu"))
    for step in range(3):
        stats.update(rows_of(step, 0, K), keys_of(step, 0), step)
    assert stats.sketch is not None
    assert sum(s.n for s in stats.sketch.sketches) == 3 * 5 * K
    off = RowStats(K, torch.float32, StatsOptions(sketch_values=0), torch.device("cpu"))
    assert off.sketch is None


def test_memory_is_what_the_parts_hold() -> None:
    site = fed([0], torch.float32)
    assert site.grad_output is not None
    assert site.weight is not None
    assert site.nbytes == site.input.nbytes + site.grad_output.nbytes + site.weight.nbytes
    assert site.input.tracker.scatter.nbytes == K * K * 4 + 8
    assert Stats({"a#0": site, "b#0": site}).nbytes == 2 * site.nbytes


def test_memory_of_a_layer_of_123200_features_is_as_documented() -> None:
    wide, narrow = 123_200, 1024
    site = SiteStats("wide#0", wide, narrow, torch.bfloat16)
    site.update_grad_output(torch.zeros(1, narrow, dtype=torch.bfloat16), torch.rand(1, dtype=torch.float64), 0)
    site.weight = WeightTracker(narrow, wide)
    assert site.grad_output is not None
    parts = {
        "input covariance": site.input.tracker.nbytes,
        "input moments": site.input.moments.nbytes,
        "input reservoir": site.input.reservoir.nbytes,
        "weight": site.weight.nbytes,
        "gradient": site.grad_output.nbytes,
    }
    megabytes = {name: round(count / 1e6) for name, count in parts.items()}
    documented = {"input covariance": 97, "input moments": 4, "input reservoir": 17, "weight": 68, "gradient": 5}
    assert megabytes == documented
    assert site.nbytes < 192e6


def test_statistics_of_different_layers_do_not_merge() -> None:
    with pytest.raises(ProbeError, match="do not belong to"):
        fed([0]).merge(SiteStats("b#0", K, N, torch.float32))
