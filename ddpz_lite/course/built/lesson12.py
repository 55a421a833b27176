"""Lesson 12: ZeRO-3 in a group of ranks, in 16 bits over fp32 shards; 12b goes on with it."""

import torch
import torch.distributed as dist
from torch import nn

from ddpz_lite.course.built.lesson11 import Sharded, Unit, free, is_free, rows_of


class Mixed(Sharded):
    """ZeRO-3 in a group of ranks: shards in fp32, whole units and what travels in `dtype`."""

    def __init__(self, module, dtype=torch.bfloat16, inside=None):
        self.dtype, self.inside = dtype, inside or dist.group.WORLD
        super().__init__(module)

    def shard(self, name, params):
        rank, ranks = dist.get_rank(self.inside), dist.get_world_size(self.inside)
        flat = torch.cat([p.detach().flatten() for p in params])
        flat = nn.functional.pad(flat, (0, -len(flat) % ranks))  # (padded,) in fp32
        shard = nn.Parameter(flat.chunk(ranks)[rank].clone())  # (padded // ranks,) the master
        unit = Unit(name, params, flat.to(self.dtype, copy=True), shard)
        views = unit.full.split([p.numel() for p in params] + [len(flat) - numel_of(params)])
        for p, view in zip(params, views, strict=False):
            p.data = view.view(p.shape)
        free(unit)
        for p in params:
            p.register_post_accumulate_grad_hook(lambda p: self.collect(unit))
        return unit

    def gather(self, unit):
        if is_free(unit):
            unit.full.untyped_storage().resize_(unit.full.nbytes)
            parts = list(unit.full.chunk(dist.get_world_size(self.inside)))
            dist.all_gather(parts, unit.shard.detach().to(self.dtype), group=self.inside)

    def reduce(self, unit):
        rows = rows_of(unit)  # (padded,) in dtype, row r for rank r
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=self.inside)
        ranks = dist.get_world_size(self.inside)
        self.add(unit, received.view(ranks, -1).float().mean(0))  # summed in fp32

    def add(self, unit, mean):
        """mean: (padded // ranks,) of the group's gradients. Adds it to the shard's."""
        unit.shard.grad = mean if unit.shard.grad is None else unit.shard.grad + mean

    def forward(self, tokens):
        self.gather(self.units[0])
        logits = self.module(tokens)
        if not logits.requires_grad:  # evaluation: no backward will free it
            free(self.units[0])
        return logits.float()  # the loss is computed in fp32

    def before_forward(self, unit):
        self.gather(unit)

    def before_backward(self, unit):
        self.gather(unit)

    def collect(self, unit):
        if all(p.grad is not None for p in unit.params):
            free(unit)
            self.reduce(unit)


def numel_of(params):
    return sum(p.numel() for p in params)


def whole(model):
    """All parameters as the masters have them, flat, on every rank: (P,)."""
    found = []
    for unit in model.units:
        parts = [torch.empty_like(unit.shard) for _ in range(dist.get_world_size(model.inside))]
        dist.all_gather(parts, unit.shard.detach(), group=model.inside)
        found.append(torch.cat(parts).detach()[: numel_of(unit.params)].cpu())
    return torch.cat(found)
