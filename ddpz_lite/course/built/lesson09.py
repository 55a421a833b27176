"""Lesson 09: DDP written out, a flat buffer and its two movements; lesson 10 goes on with them."""

import torch
import torch.distributed as dist


def average(tensor):
    """Make a tensor its mean over the ranks, in place."""
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


class Replicated:
    """Every rank updates everything."""

    def __init__(self, params, optimizer_class, **options):
        self.params = list(params)
        self.inner = optimizer_class(self.params, **options)

    @torch.no_grad()
    def step(self):
        for p in self.params:
            average(p.grad)
        self.inner.step()


def padded(numel):
    """numel, or a little more: the next multiple of the world size."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return -(-numel // world) * world


def lay_flat(params):
    """Move parameters into one buffer (padded,); each becomes a view of its part."""
    params = list(params)
    full = torch.zeros(padded(sum(p.numel() for p in params)), device=params[0].device)
    start = 0
    for p in params:
        view = full[start : start + p.numel()].view(p.shape)
        view.copy_(p.detach())
        p.data = view  # the values are the same; the memory is now the buffer's
        start += p.numel()
    return full


def reduce_scatter_mean(rows):
    """Partial to Shard: the mean over ranks of row r, on rank r. rows (world, n) to (n,)."""
    received = torch.empty_like(rows)  # (world, n)
    dist.all_to_all_single(received, rows)
    return received.sum(0) / dist.get_world_size()


def my_slice(full):
    """Replicate to Shard: a view of this rank's slice. full (n * world,) to (n,)."""
    return full.chunk(dist.get_world_size())[dist.get_rank()]


def all_gather(full):
    """Shard to Replicate: every slice from its owner, in place. full (n * world,)."""
    dist.all_gather(list(full.chunk(dist.get_world_size())), my_slice(full).clone())
