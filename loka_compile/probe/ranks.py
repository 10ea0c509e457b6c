"""Statistics of a whole distributed job: every rank's, merged as if one process had seen all rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from loka_compile.probe.site_stats import SiteStats, Stats


def merge_across_ranks(stats: Stats, group: dist.ProcessGroup | None = None) -> Stats:
    """The merged statistics, on every rank of ``group``. All of its ranks must call this; ``stats`` stay as they are.

    One site at a time: pairs of ranks merge, then pairs of pairs, then the first rank tells all. So a rank holds two
    copies of one site beyond its own statistics. Counts, means and scatters add up exactly; a reservoir is again a
    uniform sample over all ranks' rows; of weights, which are replicas, the average is taken.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        merged = Stats()
        merged.merge(stats)
        return merged
    size = dist.get_world_size(group)
    names: list[list[str]] = [[] for _ in range(size)]
    dist.all_gather_object(names, sorted(stats), group=group)
    out = Stats()
    for site in sorted({site for own in names for site in own}):
        mine = stats.get(site)
        whole = _reduce(site, mine, group)
        box = [_packed(whole)]
        dist.broadcast_object_list(box, src=_peer(0, group), group=group)
        out[site] = _unpacked(site, box[0], mine)
    return out


def _reduce(site: str, mine: SiteStats | None, group: dist.ProcessGroup | None) -> SiteStats | None:
    """Merge a site along a binary tree; the group's first rank has the result."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    merged = None if mine is None else _unpacked(site, _packed(mine), mine)
    span = 1
    while span < size:
        if rank % (2 * span) == span:
            dist.send_object_list([_packed(merged)], dst=_peer(rank - span, group), group=group)
            return None
        if rank % (2 * span) == 0 and rank + span < size:
            box: list[Any] = [None]
            dist.recv_object_list(box, src=_peer(rank + span, group), group=group)
            if box[0] is not None:
                theirs = _unpacked(site, box[0], merged)
                if merged is None:
                    merged = theirs
                else:
                    merged.merge(theirs)
        span *= 2
    return merged


def _packed(stats: SiteStats | None) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    if stats is None:
        return None
    tensors, rest = stats.state()
    return {name: tensor.cpu() for name, tensor in tensors.items()}, rest


def _unpacked(site: str, packed: Any, like: SiteStats | None) -> SiteStats:
    tensors, rest = packed
    options, device = (like.options, like.device) if like is not None else (None, "cpu")
    return SiteStats.from_state(site, tensors, rest, options=options, device=device)


def _peer(rank: int, group: dist.ProcessGroup | None) -> int:
    """A group rank as a global rank."""
    return rank if group is None else dist.get_global_rank(group, rank)
