"""Parameters that several stages of a pipeline share: one start, and the sum of all gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.gradient import own_grad, set_own_grad
from ddpz_lite.strategies.mesh import mark
from ddpz_lite.strategies.parameters import UnshardedParameter
from ddpz_lite.strategies.replica import Replica


class Ties:
    """The tied parameters of this rank's part of the model: {index of the parameter: ranks}.

    The parameter starts with the values of the first of these ranks. Its gradient on each is the
    sum over all, added in the order of ranks, so that all have the same bits.
    """

    def __init__(self, comm: Comm, stages: Sequence[nn.Module], module: nn.Module) -> None:
        self.comm = comm
        holders: dict[nn.Parameter, list[int]] = {}
        for index, stage in enumerate(stages):
            for param in stage.parameters():
                holders.setdefault(param, []).append(index % comm.world)
        named = list(module.named_parameters())
        index_of = {param: index for index, (_, param) in enumerate(named)}
        self._tied: dict[int, list[int]] = {}
        self._earlier: list[Tensor | None] | None = None  # sums of steps before those under no_sync
        for param, ranks in holders.items():
            where = list(dict.fromkeys(ranks))
            if len(where) == 1 or comm.rank not in where:
                continue
            if param.is_meta:
                raise ValueError(
                    f"{named[index_of[param]][0]} is on the meta device and in several stages, "
                    "which would draw different values. Fix: build the model on a device."
                )
            self._tied[index_of[param]] = where
            self._start_alike(param, where)

    def _start_alike(self, param: nn.Parameter, where: list[int]) -> None:
        is_first = self.comm.rank == where[0]
        mark(param, apart=True, elsewhere=not is_first)
        to, come = (where[1:], []) if is_first else ([], where[:1])
        for value in self._swap(param.detach(), to, come).values():
            param.data.copy_(value)

    def _swap(self, tensor: Tensor, to: Sequence[int], come: Sequence[int]) -> dict[int, Tensor]:
        """Send the tensor to some ranks and get theirs from others; waits for all."""
        tensor = tensor.contiguous()
        got = {rank: torch.empty_like(tensor) for rank in come}
        sent, received = self.comm.exchange(
            [(tensor, rank) for rank in to], [(t, rank) for rank, t in got.items()]
        )
        for work in (*sent, *received):
            work.wait()
        return got

    def _trained(self, model: nn.Module) -> list[tuple[nn.Parameter, list[int]]]:
        """The trainable ones, each where backward leaves its gradient, and the ranks."""
        module = model.module if isinstance(model, Replica) else model
        params = list(module.parameters())
        tied = [(params[index], where) for index, where in self._tied.items()]
        return [(_shard_of(param), where) for param, where in tied if param.requires_grad]

    @contextmanager
    def summing(self, model: nn.Module, syncs: bool) -> Iterator[None]:
        """Add what the other stages have of each tied gradient to what the block leaves.

        What was there before the block, from an earlier step, is a sum already, and is set aside
        meanwhile. Without `syncs` gradients stay this rank's own until a block that does.
        """
        tied = self._trained(model)
        with torch._C.DisableTorchFunctionSubclass():  # shards of ZeRO-3 are plain ones here
            if self._earlier is None or all(own_grad(p) is None for p, _ in tied):
                self._earlier = [None if (g := own_grad(p)) is None else g.clone() for p, _ in tied]
                for param, _ in tied:
                    set_own_grad(param, None)
        yield
        if not syncs:
            return
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for (param, where), earlier in zip(tied, self._earlier, strict=True):
                self._sum(param, where)
                if earlier is not None:
                    own_grad(param).add_(earlier)
        self._earlier = None

    def _sum(self, param: nn.Parameter, where: list[int]) -> None:
        if own_grad(param) is None:  # not used here
            set_own_grad(param, torch.zeros_like(param))
        grad, others = own_grad(param), [rank for rank in where if rank != self.comm.rank]
        parts = self._swap(grad, others, others) | {self.comm.rank: grad.clone()}
        grad.copy_(sum(parts[rank] for rank in where))


def _shard_of(param: nn.Parameter) -> nn.Parameter:
    """Where backward leaves the gradient of a parameter: on it, or in shards on its shard."""
    if isinstance(param, UnshardedParameter):
        flat, index = param.place
        return param if flat.owner.reduces_later else flat.shards[index]
    return param
