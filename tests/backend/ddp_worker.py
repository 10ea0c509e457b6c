"""One of two gloo processes of test_ddp.py: trains a few steps in every wrapping order and checks the gradients."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
import torch.distributed as dist
from helpers_backend import Interpreted, Watch, close
from models_backend import Tower, exact, mods_of
from torch.nn.parallel import DistributedDataParallel as DDP

OFF = {"table": "off"}
AUTO = {"target": "h200", "max_mere": 1e3, "min_speedup": 1e-3, "auto_calls": 2}

CASES = {
    "compile(DDP)": (lambda m, o: torch.compile(DDP(m), backend="loka", options=o), OFF),
    "DDP(compile)": (lambda m, o: DDP(torch.compile(m, backend="loka", options=o)), OFF),
    # Buckets this small make Dynamo cut the graph into several, each compiled by the backend on its own.
    "small buckets": (lambda m, o: torch.compile(DDP(m, bucket_cap_mb=0.1), backend="loka", options=o), OFF),
    "planned, small buckets": (lambda m, o: torch.compile(DDP(m, bucket_cap_mb=0.1), backend="loka", options=o), AUTO),
}
FIRST_BUCKET = dist._DEFAULT_FIRST_BUCKET_BYTES


def main(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    Interpreted().install(pytest.MonkeyPatch())
    for name, (wrap, options) in CASES.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        small = "small" in name
        dist._DEFAULT_FIRST_BUCKET_BYTES = 50_000 if small else FIRST_BUCKET
        tower, watch = Tower((16, 256, 256)), Watch()
        reference = exact(tower)
        forward = mods_of(reference)
        run = wrap(tower, options)
        optimizer = torch.optim.SGD(tower.parameters(), lr=1e-2, weight_decay=0.1)
        tolerance = 0.4 if options is AUTO else 1e-5  # FP8 in every GEMM, three layers deep
        for step in range(4):
            batches = [torch.randn(32, 16, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(2)]
            optimizer.zero_grad(set_to_none=True)
            run(batches[rank]).square().mean().backward()
            reference.load_state_dict(copy.deepcopy(tower.state_dict()))
            reference.zero_grad()
            (sum(forward(b).square().mean() for b in batches) / 2).backward()
            for (key, p), q in zip(tower.named_parameters(), reference.parameters(), strict=True):
                assert p.grad is not None, f"{name}, step {step}: no gradient for {key}"
                if key in tower.unused:
                    assert not p.grad.any(), f"{name}, step {step}: {key}"
                else:
                    close(p.grad, q.grad, tolerance, f"{name}, step {step}: {key}")
            optimizer.step()
        assert (len(watch.reports) > 1) == small, f"{name}: {len(watch.reports)} graphs"
        sites = {g.gemm.site for report in watch.reports for g in report.gemms}
        assert sites == {"linears.0#0", "linears.1#0", "head#0"}, f"{name}: {sites}"
        mine = torch.cat([p.detach().flatten() for p in tower.parameters()])
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        assert torch.equal(both[0], both[1]), f"{name}: the ranks have drifted apart"
        planned = sum(r.plan is not None for r in watch.reports)
        assert (planned > 0) == (options is AUTO), f"{name}: {planned} plans"
        fp8 = [g for r in watch.reports for g in r.gemms if not g.decision.is_high_precision]
        assert bool(fp8) == (options is AUTO), f"{name}: {len(fp8)} GEMMs in FP8"
        print(f"{name}: {len(watch.reports)} graphs, right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
