"""Jobs of lesson 11: ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import sleep  # its own: an answer may patch the module's
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...wire import span


def _tensors(thing: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors in an object's attributes, lists and dicts."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif depth and isinstance(thing, (list, tuple, set)):
        for part in thing:
            yield from _tensors(part, depth - 1)
    elif depth and isinstance(thing, dict):
        for part in thing.values():
            yield from _tensors(part, depth - 1)
    elif depth and hasattr(thing, "__dict__"):
        yield from _tensors(vars(thing), depth - 1)


def _bytes(tensors: Any) -> int:
    """Bytes of the storages behind the tensors, each counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _nudge(shard: torch.Tensor, nudge: torch.Tensor) -> None:
    """Change a shard by what this rank alone knows: whoever needs the whole must gather it. A shard
    of a wrong size is the judge's to find.
    """
    with torch.no_grad():
        nudge = nn.functional.pad(nudge, (0, shard.numel() - len(nudge)))
        shard += nudge.view_as(shard)


def unit(
    answer: Callable[..., Any],
    *,
    weights: list[torch.Tensor],
    x: torch.Tensor,
    nudges: list[torch.Tensor],
) -> dict[str, Any]:
    """The first weight is used in a product whose backward comes after free and gather.

    nudges: of this rank's shard, one before each gather.
    """
    parameters = [nn.Parameter(w.clone()) for w in weights]
    shapes = [p.shape for p in parameters]
    made = answer(parameters)

    def held() -> dict[str, Any]:
        return {
            "parameters": _bytes(parameters),
            "all": _bytes([*parameters, *_tensors(made)]),
            "shapes": [p.shape for p in parameters] == shapes,
        }

    gathered = []

    def gather() -> None:
        _nudge(made.shard, nudges[len(gathered)])
        with span("gather"):
            made.gather()
        gathered.append([p.detach().clone() for p in parameters])

    begun, shard = held(), made.shard.detach().clone()
    gather()
    x = x.clone().requires_grad_()
    product = x @ parameters[0].T  # autograd keeps the weight for the gradient of x
    kept = parameters[0].detach()  # as autograd does, a view
    made.free()
    freed = held() | {"kept": _bytes([kept])}
    gather()
    product.sum().backward()
    made.free()
    gather()
    return {
        "begun": begun,
        "shard": shard,
        "gathered": gathered,
        "freed": freed,
        "x_grad": x.grad,
    }


class _Block(nn.Module):
    """A linear layer and a tanh, which notes how many parameter bytes of the model are there."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, note: Callable[[], None]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
        self.note = note

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note()
        y = torch.tanh(nn.functional.linear(x, self.weight, self.bias))
        if y.requires_grad:
            y.register_hook(lambda _: self.note())
        return y


def _stack(weights, biases, live: list[int]) -> nn.Sequential:
    """The blocks. live: what is there while a block computes, forward or backward."""
    model = nn.Sequential()
    model.extend(
        _Block(w, b, lambda: live.append(_bytes(model.parameters())))
        for w, b in zip(weights, biases, strict=True)
    )
    return model


def zero3(
    answer: Callable[..., Any],
    *,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    x: list[torch.Tensor],
    nudges: list[list[torch.Tensor]],
) -> dict[str, Any]:
    """x: a batch for each step of plain SGD on the shards. nudges: of this rank's shards, for each
    step and block.
    """
    live: list[int] = []
    model = _stack(weights, biases, live)
    shards = answer(model)
    begun = _bytes(model.parameters())
    after = []
    for batch, own in zip(x, nudges, strict=True):
        for shard, nudge in zip(shards, own, strict=False):  # the judge counts the shards
            _nudge(shard, nudge)
        with span("forward"):
            loss = model(batch).square().mean()
        with span("backward"):
            loss.backward()
        left = [p for p in model.parameters() if p.grad is not None and p.grad.numel()]
        after.append({"bytes": _bytes(model.parameters()), "gradients": len(left)})
        with torch.no_grad():
            for shard in shards:
                shard -= 0.5 * shard.grad
                shard.grad = None
        after[-1]["shards"] = [s.detach().clone() for s in shards]
    return {"begun": begun, "live": max(live), "after": after}


class _Unit:
    """A unit of the prefetching task: gathers take time on the network, computing in a nap."""

    live = 0  # units that are gathered or on their way

    def __init__(self, name: str, shard: torch.Tensor, seconds: float, log: list[Any]) -> None:
        self.name, self.shard, self.seconds, self.log = name, shard, seconds, log
        self.full: torch.Tensor | None = None
        self.work: Any = None

    def gather(self) -> Any:
        """Start to gather; returns the Work to wait for."""
        self.full = self.shard.new_empty(dist.get_world_size() * len(self.shard))
        parts = list(self.full.chunk(dist.get_world_size()))
        work = dist.all_gather(parts, self.shard, async_op=True)
        self.work = _Waited(work)
        _Unit.live += 1
        self.log.append(["gather", self.name, _Unit.live])
        return self.work

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """The unit's output. Its gather must have been waited for."""
        if self.full is None:
            raise RuntimeError(f"{self.name} computes, and is not gathered")
        if not self.work.waited:
            raise RuntimeError(f"{self.name} computes before its gather was waited for")
        with span("compute"):
            sleep(self.seconds)
        self.log.append(["compute", self.name, _Unit.live])
        return torch.tanh(x * self.full.mean() + self.full.sum())

    def free(self) -> None:
        """Give the gathered parameters back."""
        if self.full is None:
            raise RuntimeError(f"{self.name} is freed, and is not gathered")
        self.full = None
        _Unit.live -= 1
        self.log.append(["free", self.name, _Unit.live])


class _Waited:
    """A Work that knows whether somebody waited for it."""

    def __init__(self, work: Any) -> None:
        self.work, self.waited = work, False

    def wait(self) -> None:
        self.work.wait()
        self.waited = True


def prefetch(
    answer: Callable[..., Any], *, shards: list[torch.Tensor], x: torch.Tensor, seconds: float
) -> dict[str, Any]:
    """shards: this rank's, one for each unit."""
    log: list[Any] = []
    _Unit.live = 0
    units = [_Unit(f"unit {i}", shard, seconds, log) for i, shard in enumerate(shards)]
    dist.barrier()
    with span("answer"):
        y = answer(units, x)
    return {"y": y, "log": log}


def backward_order(answer: Callable[..., Any]) -> dict[str, Any]:
    return {"order": answer()}
