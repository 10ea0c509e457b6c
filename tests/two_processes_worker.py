"""One of two processes of test_two_processes.py: trains in some wrappings, with FP8 and with the probe."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import loka_compile
import loka_compile.probe
from loka_compile.gemm import Role
from loka_compile.plan import Decision, Plan

#: Layers, width, rows of a rank's batch, steps, and steps from one sampled one to the next (1: one graph to compile).
SIZES = {"cuda": (2, 512, 1024, 6, 2), "cpu": (1, 64, 128, 3, 1)}


class Tower(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = F.silu(norm(linear(x)))
        return x


def batch(step: int, rank: int, device: torch.device) -> torch.Tensor:
    _, width, rows, *_ = SIZES[device.type]
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (torch.randn(rows, width, generator=generator) + 0.1 * rank).to(device, torch.bfloat16)


def plan() -> Plan:
    return Plan([Decision(f"linears.{i}#0", r.value, "torch", "tensorwise_fast") for i in range(3) for r in Role])


WRAPPINGS = {
    "DDP, loka": lambda m: torch.compile(DDP(m), backend="loka", options={"plan": plan()}),
    # Sharded as a whole: a linear layer that is sharded on its own ends the graph before its norm.
    "FSDP2, loka": lambda m: torch.compile(fully_shard(m), backend="loka", options={"plan": plan()}),
    "DDP, eager": DDP,
}


def main(rank: int, file: str, kind: str, *names: str) -> None:
    warnings.filterwarnings("ignore")
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(rank)
    how: dict[str, Any] = {"backend": "nccl", "device_id": device} if kind == "cuda" else {"backend": "gloo"}
    dist.init_process_group(init_method=f"file://{file}", rank=rank, world_size=2, **how)
    layers, width, rows, steps, every = SIZES[kind]
    for name in names:
        wrap = WRAPPINGS[name]
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Tower(layers, width).to(device, torch.bfloat16)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        run = wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        seen, losses = len(loka_compile.reports()), []
        with loka_compile.probe(run, every=every, budget=None, rows=rows) as p:
            for step in range(steps):
                loss = (run(batch(step, rank, device)).float() - 1).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert losses[-1] < losses[0], f"{name}: {losses}"
        kernels = [g for r in loka_compile.reports()[seen:] for g in r.gemms if not g.decision.is_high_precision]
        assert bool(kernels) == ("loka" in name), f"{name}: {len(kernels)} GEMMs in FP8"
        assert not [g for g in kernels if g.fallback], name
        whole = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
        mine = torch.cat([whole[key].flatten().float() for key in before])
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        assert torch.equal(both[0], both[1]), f"{name}: the ranks have drifted apart"
        assert not torch.equal(mine, torch.cat([v.flatten().float() for v in before.values()])), name
        # The rows of both ranks, as if one process had seen them.
        merged = p.merged()
        assert sorted(merged) == [f"linears.{i}#0" for i in range(layers)], f"{name}: {sorted(merged)}"
        x = torch.cat([batch(step, r, device) for step in range(0, steps, every) for r in range(2)]).double()
        first = merged["linears.0#0"]
        assert first.input.n == len(x), f"{name}: {first.input.n} rows"
        assert first.weight.mean().shape == (width, width), name
        found, want = first.input.tracker.covariance().double().to(device), torch.cov(x.t())
        error = ((found - want).norm() / want.norm()).item()
        assert error < 1e-4, f"{name}: covariance off by {error}"
        print(f"{name}: {len(kernels)} GEMMs in FP8, right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
