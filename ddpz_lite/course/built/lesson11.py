"""Lesson 11: units, what gathers, frees and reduces them, and hooks; 11b goes on with them."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ddpz_lite as dz
from ddpz_lite.model import next_token_loss


@dataclass(eq=False)
class Unit:
    name: str
    params: list[torch.nn.Parameter]  # views of full, in their own shapes
    full: torch.Tensor  # (padded,)
    shard: torch.nn.Parameter  # (padded // world,)
    work: Any = None  # a gather under way; used in 11b


def make_unit(name, params):
    """Lay parameters flat, in place, and keep this rank's part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    numel = sum(p.numel() for p in params)
    padded = -(-numel // world) * world  # rounded up
    full = torch.zeros(padded, device=params[0].device)
    end = 0
    for p in params:
        start, end = end, end + p.numel()
        full[start:end] = p.detach().flatten()
        p.data = full[start:end].view(p.shape)
    return Unit(name, params, full, torch.nn.Parameter(full.chunk(world)[rank].clone()))


def free(unit):
    unit.full.untyped_storage().resize_(0)


def is_free(unit):
    return unit.full.untyped_storage().size() == 0


def gather(unit):
    """Make a unit whole, if it is not."""
    if is_free(unit):
        unit.full.untyped_storage().resize_(unit.full.nbytes)
        parts = list(unit.full.chunk(dist.get_world_size()))  # views, (padded // world,) each
        dist.all_gather(parts, unit.shard.detach())


def rows_of(unit):
    """The unit's gradients, laid flat: (padded,), row r of N for rank r. Then `.grad` is None."""
    rows = torch.zeros_like(unit.full)
    gradients = [p.grad.flatten() for p in unit.params]
    torch.cat(gradients, out=rows[: sum(g.numel() for g in gradients)])
    for p in unit.params:
        p.grad = None
    return rows


def add_mean(unit, received):
    """received: (padded,), this rank's part from each rank. Adds their mean to the gradient."""
    mean = received.view(dist.get_world_size(), -1).mean(0)  # (padded // world,)
    unit.shard.grad = mean if unit.shard.grad is None else unit.shard.grad + mean


def reduce(unit):
    """From whole gradients on every rank to the mean of this rank's part."""
    rows = rows_of(unit)
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows)
    add_mean(unit, received)


class Sharded(torch.nn.Module):
    """A GPT under ZeRO-3. keep: blocks stay whole from forward to backward."""

    def __init__(self, module, keep=False):
        super().__init__()
        self.module, self.keep = module, keep
        in_blocks = {p for block in module.blocks for p in block.parameters()}
        rest = [p for p in module.parameters() if p not in in_blocks]
        self.units = [self.shard("root", rest)]
        for i, block in enumerate(module.blocks):
            unit = self.shard(f"block {i}", list(block.parameters()))
            self.units.append(unit)
            block.register_forward_pre_hook(
                lambda block, inputs, unit=unit: self.before_forward(unit)
            )
            block.register_forward_hook(
                lambda block, inputs, y, unit=unit: self.after_forward(unit, y)
            )

    def shard(self, name, params):
        unit = make_unit(name, params)
        free(unit)
        for p in params:
            p.register_post_accumulate_grad_hook(lambda p: self.collect(unit))
        return unit

    def forward(self, tokens):
        gather(self.units[0])
        logits = self.module(tokens)
        if not logits.requires_grad:  # evaluation: no backward will free it
            free(self.units[0])
        return logits

    def before_forward(self, unit):
        gather(unit)

    def after_forward(self, unit, y):
        if y.requires_grad:
            y.register_hook(lambda gradient: self.before_backward(unit))
        if not (self.keep and y.requires_grad):
            free(unit)

    def before_backward(self, unit):
        gather(unit)  # does nothing if the unit was kept

    def collect(self, unit):
        if all(p.grad is not None for p in unit.params):
            free(unit)
            reduce(unit)

    def named_parameters(self, *args, **kwargs):
        """What an optimizer gets: this rank's shards."""
        for unit in self.units:
            yield unit.name, unit.shard


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def train_on(model, steps, batch, optimizer=adamw):
    optimizer = optimizer(model.parameters())
    for step in range(steps):
        x, y = batch(step)
        next_token_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def flat_from(state):
    """Parameters by name, laid flat in the order of our units; a tied one once: (P,)."""
    rest = [p for name, p in state.items() if not name.startswith("blocks.")]
    in_blocks = [p for name, p in state.items() if name.startswith("blocks.")]
    once = {id(p): p for p in rest + in_blocks}.values()
    return torch.cat([p.detach().flatten().cpu() for p in once])


def whole(model):
    """All parameters of a Sharded, flat, on every rank: (P,)."""
    found = []
    for unit in model.units:
        gather(unit)
        found.append(torch.cat([p.detach().flatten() for p in unit.params]).cpu())  # a copy
        free(unit)
    return torch.cat(found)


def fsdp2(module, keep=False):
    from torch.distributed.fsdp import fully_shard  # here, since to import it takes a second

    mesh = init_device_mesh(dz.device().type, (dist.get_world_size(),))
    for block in module.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
    return fully_shard(module, mesh=mesh)  # the root: kept after forward, by default
