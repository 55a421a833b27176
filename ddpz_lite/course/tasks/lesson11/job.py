"""Jobs of lesson 11: ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpz_lite.course.check.watch import Holding, Kept, tell_when_reached
from ddpz_lite.meter.memory_use import storages
from ddpz_lite.wire import span


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind the tensors, each counted once."""
    every = {storage._cdata: storage for storage in storages(tensors)}
    return sum(storage.nbytes() for storage in every.values())


def _there(tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage holds all of its elements: torch reads on where one has ended."""
    ends = (stride * (size - 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    last = tensor.storage_offset() + sum(ends)
    return (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _nudge(shard: torch.Tensor, nudge: torch.Tensor) -> None:
    """Change a shard by what this rank alone knows: whoever needs the whole must gather it. A shard
    of a wrong size is the judge's to find.
    """
    if not _there(shard):
        raise RuntimeError("the shard has lost its memory: it is a view of what was freed")
    with torch.no_grad():
        nudge = nn.functional.pad(nudge, (0, shard.numel() - len(nudge)))
        shard += nudge.view_as(shard)


def _parameter(tensor: torch.Tensor, turned: bool, requires_grad: bool = True) -> nn.Parameter:
    """A copy as a parameter, with its memory in the order of its transpose if `turned`."""
    if turned and tensor.dim() == 2:
        turned_round = tensor.T.clone(memory_format=torch.contiguous_format)
        return nn.Parameter(turned_round.T, requires_grad)
    return nn.Parameter(tensor.clone(), requires_grad)


# ---- one unit ----


def unit(
    answer: Callable[..., Any],
    *,
    units: list[list[torch.Tensor]],
    x: torch.Tensor,
    nudges: list[list[torch.Tensor]],
    odd: bool = False,
) -> dict[str, Any]:
    """All units are gathered and freed in turn, and again, and once more.

    The first weight is used in a product whose backward comes after free and gather. nudges: for
    each gather, of this rank's shard of each unit, before it. odd: parameters are transposed, and
    every other one is frozen.
    """
    every = [
        [_parameter(w, odd, not (odd and i % 2)) for i, w in enumerate(weights)]
        for weights in units
    ]
    flat = [p for parameters in every for p in parameters]
    trained = [p.requires_grad for p in flat]
    given = [list(parameters) for parameters in every]
    holding = Holding()
    with holding:
        made = [answer(parameters) for parameters in given]
    kept: list[torch.Tensor] = []  # as autograd keeps them, views

    def freed() -> dict[str, Any]:
        return {
            "parameters": _bytes(flat),
            "kept": _bytes(kept),
            "held": holding.now([*flat, *kept]),
            "shapes": [list(p.shape) for p in flat],
        }

    got: dict[str, Any] = {"freed": [freed()], "gathered": [], "raised": None}
    got["shards"] = [_read(m.shard) for m in made]
    for turn, own in enumerate(nudges):
        for one, nudge in zip(made, own, strict=True):
            _nudge(one.shard, nudge)
            with holding, span("gather"):
                one.gather()
        if not all(map(_there, flat)):
            raise RuntimeError("after gather, a parameter has less memory than elements")
        got["gathered"].append([p.detach().clone() for p in flat])
        kept = [p.detach() for p in flat]
        if turn == 0:
            x = x.clone().requires_grad_()
            product = x @ flat[0].T  # autograd keeps the weight for the gradient of x
        if turn == 1:
            got["raised"] = _backward(product)
            del product
            got["whole"] = [holding.now()]
        for one in made:
            with holding:
                one.free()
        got["freed"].append(freed())
    same = [[id(p) for p in own] for own in given] == [[id(p) for p in own] for own in every]
    got["same"] = same and [p.requires_grad for p in flat] == trained
    return got | {"x_grad": x.grad}


def _read(shard: torch.Tensor) -> torch.Tensor:
    """A copy of a shard; raises where an optimizer would, or where its memory is gone."""
    if not shard.is_leaf:
        raise RuntimeError("an optimizer cannot update the shard: it is no leaf, so detach it")
    _nudge(shard, shard.new_zeros(0))
    return shard.detach().clone()


def _backward(product: torch.Tensor) -> str | None:
    try:
        product.sum().backward()
    except RuntimeError as error:
        return str(error)
    return None


# ---- a row of blocks ----


class _Block(nn.Module):
    """Linear layers, a tanh after each; it looks for its parameters whenever it computes.

    layers: [bias, weight, bias, weight ...], in the order of `parameters()`.
    """

    def __init__(self, layers: list[torch.Tensor], index: int, turned: bool, watch: _Watch) -> None:
        super().__init__()
        self.layers = nn.ParameterList([_parameter(t, turned) for t in layers])
        self.index, self.watch = index, watch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.watch.holding.paused():
            pairs = list(zip(self.layers[::2], self.layers[1::2], strict=True))
            for place, (bias, weight) in enumerate(pairs):
                self.watch.computes(self, "forward", begun=place > 0)
                z = nn.functional.linear(x, weight, bias)
                if z.requires_grad:  # after the hooks of the block's output
                    begun = place < len(pairs) - 1
                    z.register_hook(
                        lambda _, begun=begun: self.watch.computes(self, "backward", begun)
                    )
                x = torch.tanh(z)
        tell_when_reached(x, self.index)
        return x


class _Watch:
    """most: of the blocks of one model, how many were whole at once while one computed."""

    def __init__(self) -> None:
        self.holding, self.most, self.rows = Holding(), 0, []

    def row(self, blocks: list[list[torch.Tensor]], turned: bool) -> nn.Sequential:
        made = [_Block(b, i, turned, self) for i, b in enumerate(blocks)]
        self.rows.append(made)
        return nn.Sequential(*made)

    def computes(self, block: _Block, direction: str, begun: bool) -> None:
        """A layer of the block computes; begun: another one has, in this direction."""
        if not all(map(_there, block.parameters())):
            until = {"forward": "its output is there", "backward": "its last gradient has come"}
            raise RuntimeError(
                f"block {block.index} is in the middle of its {direction}, and parameters are gone:"
                f" it needs them until {until[direction]}"
                if begun
                else f"block {block.index} begins its {direction}, and not all of its parameters "
                "are there: gather them before"
            )
        (row,) = (row for row in self.rows if any(b is block for b in row))
        self.most = max(self.most, sum(_bytes(b.parameters()) > 0 for b in row))

    def state(self, models: list[nn.Sequential]) -> dict[str, Any]:
        blocks = [block for model in models for block in model]
        unsharded = [i for i, block in enumerate(blocks) if _bytes(block.parameters())]
        parameters = [p for model in models for p in model.parameters()]
        grads = [p for p in parameters if p.grad is not None and p.grad.numel()]
        held = self.holding.now()
        return {
            "bytes": _bytes(parameters),
            "unsharded": unsharded,
            "gradients": len(grads),
            "held": held,
        }


def zero3(
    answer: Callable[..., Any],
    *,
    models: list[list[list[torch.Tensor]]],
    steps: list[list[torch.Tensor]],
    x: torch.Tensor,
    nudges: list[list[torch.Tensor]],
    turned: bool = False,
) -> dict[str, Any]:
    """models: of each, for each block its parameters. steps: of plain SGD on the shards, for each
    its batches, whose gradients add up. x: of an evaluation at the end. nudges: for each step, of
    this rank's shards of all blocks, before it.
    """
    watch = _Watch()
    watch.holding.know([x, *(batch for batches in steps for batch in batches)])
    rows = [watch.row(blocks, turned) for blocks in models]
    with watch.holding:
        lists = [answer(row) for row in rows]
    shards = [shard for made in lists for shard in made]
    got: dict[str, Any] = {"counts": [len(made) for made in lists], "begun": watch.state(rows)}
    got |= {"shards": [_read(shard) for shard in shards], "forward": [], "after": []}
    for batches, own in zip(steps, nudges, strict=True):
        for shard, nudge in zip(shards, own, strict=False):  # the judge counts the shards
            _nudge(shard, nudge)
        for batch in batches:
            with watch.holding, span("forward"):
                ys = [row(batch) for row in rows]
            watch.holding.know(ys)
            got["forward"].append(watch.holding.now())
            losses = [y.square().mean() for y in ys]
            with watch.holding, span("backward"):
                for loss in reversed(losses):
                    loss.backward()
            del ys, loss, losses
        grads = [None if shard.grad is None else shard.grad.clone() for shard in shards]
        got["after"].append(watch.state(rows) | {"grads": grads})
        with torch.no_grad():
            for shard in shards:
                if shard.grad is not None:
                    shard -= 0.5 * shard.grad
                shard.grad = None
    with torch.no_grad(), watch.holding, span("evaluation"):
        got["outputs"] = [row(x) for row in rows]
    watch.holding.know(got["outputs"])
    return got | {"most": watch.most, "end": watch.state(rows)}


# ---- prefetching ----


class _Unit:
    """A unit of the prefetching task, which notes what is done with it.

    there: the units that are gathered or on their way.
    """

    def __init__(self, name: str, shard: torch.Tensor, there: list[str], log: list[Any]) -> None:
        self.name, self.shard, self.there, self.log = name, shard, there, log
        self.full: torch.Tensor | None = None
        self.work: Any = None

    def gather(self) -> Any:
        """Start to gather; returns the Work to wait for."""
        self.full = self.shard.new_empty(dist.get_world_size() * len(self.shard))
        parts = list(self.full.chunk(dist.get_world_size()))
        self.work = _Waited(dist.all_gather(parts, self.shard, async_op=True), self.name)
        self.there.append(self.name)
        self.log.append(["gather", self.name, len(self.there)])
        return self.work

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """The unit's output. Its gather must have been waited for."""
        if self.full is None:
            raise RuntimeError(f"{self.name} computes, and is not gathered")
        if not self.work.waited:
            raise RuntimeError(f"{self.name} computes before its gather was waited for")
        self.log.append(["compute", self.name, len(self.there)])
        with span(f"compute {self.name}"):
            return torch.tanh(x * self.full.mean() + self.full.sum())

    def free(self) -> None:
        """Give the gathered parameters back."""
        if self.full is None:
            raise RuntimeError(f"{self.name} is freed, and is not gathered")
        self.full = None
        self.there.remove(self.name)
        self.log.append(["free", self.name, len(self.there)])


class _Waited:
    """A Work that knows whether somebody waited for it."""

    def __init__(self, work: Any, name: str) -> None:
        self.work, self.name, self.waited = work, name, False

    def wait(self) -> None:
        with span(f"wait {self.name}"):
            self.work.wait()
        self.waited = True


def prefetch(
    answer: Callable[..., Any], *, rows: list[list[torch.Tensor]], x: list[torch.Tensor]
) -> dict[str, Any]:
    """rows: of units, for each unit this rank's shard. One row after the other is run,
    each on its x.
    """
    kept = Kept(x=x)
    outputs, logs = [], []
    for number, shards in enumerate(rows):
        there: list[str] = []
        logs.append([])
        names = [f"unit {i}" if number == 0 else f"unit {number}.{i}" for i in range(len(shards))]
        units = [_Unit(n, s, there, logs[-1]) for n, s in zip(names, shards, strict=True)]
        given = list(units)
        outputs.append(answer(given, x[number]))
    return {"outputs": outputs, "logs": logs, "changed": kept.changed()}


def backward_order(answer: Callable[..., Any]) -> dict[str, Any]:
    return {"order": answer()}


def shared_blocks(answer: Callable[..., Any], *, questions: list[dict[str, Any]]) -> dict[str, Any]:
    """questions: the keyword arguments of one call each."""
    kept = Kept(questions=questions)
    return {"plans": [answer(**question) for question in questions], "changed": kept.changed()}
