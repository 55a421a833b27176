"""ZeRO-1: every rank holds all parameters and gradients, and one N-th of the optimizer's state.

A step reduces each bucket of gradients to shards (Partial to Shard), lets the optimizer update this
rank's shard, and gathers the parameters (Shard to Replicate). The two together move what one
all-reduce moves: 2Ψ(N-1)/N elements. Without mixed precision a shard is a view of the parameters,
so the optimizer updates them in place and nothing is copied; with it, it is the fp32 master copy.

Until `step()`, or `finalize_grads()`, `param.grad` is this rank's own gradient (see `gradient`); so
accumulation over several backwards costs nothing and needs no `no_sync`. Under mixed precision
autograd rounds each running sum G of gradients g: off by u (sum |g| + sum |G|), u = 2^-8 for bf16.

Source: Rajbhandari et al. 2020, section 5.1 (P_os).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.flat import Flat
from ddpz_lite.strategies.gradient import own_grad, set_own_grad
from ddpz_lite.strategies.guards.model import check_frozen, check_separate
from ddpz_lite.strategies.mesh import broadcast
from ddpz_lite.strategies.optim import ShardedOptimizer
from ddpz_lite.strategies.ownership import laid_out
from ddpz_lite.strategies.precision import LossScale


class ZeRO1(ShardedOptimizer):
    """A torch optimizer whose state is sharded.

        optimizer = ZeRO1(model.parameters(), torch.optim.AdamW, lr=1e-3)

    Parameters get rank 0's values and become views of flat buffers. Every rank must call `step()`.

    Args:
        params: parameters or groups, as for any torch optimizer; frozen ones are left alone.
        optimizer_class: one that works element by element, or by whole parameters: see
            `ownership` ("parameter", or None: Muon and Adafactor only). `options` are its own.
        mesh: a process group, a mesh (2-D: replicate, shard), or None for the world.
        bucket_mb: megabytes (1e6 bytes) of parameters per transition.
        mixed_precision: torch.bfloat16 or torch.float16: the dtype parameters are kept in for
            forward and backward; the optimizer steps on master copies in the dtype they had.
        reduce_dtype: in which gradients are sent, summed in fp32; default: that of the parameters.
        offload: keep shards and state in the memory of the host.
        loss_scale: see `precision.LossScale`.
        keep: parameters that mixed_precision leaves as they are; see `precision.keeps_dtype`.

    Raises: TypeError for an optimizer that mixes elements; RuntimeError if ranks' models differ.
    """

    reduces_later = True  # whether own gradients wait for the step
    may_own = True

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        mesh: dist.DeviceMesh | dist.ProcessGroup | Comm | None = None,
        bucket_mb: float = 8.0,
        mixed_precision: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        offload: bool = False,
        loss_scale: LossScale | None = None,
        keep: Collection[nn.Parameter] = (),
        **options: Any,
    ) -> None:
        self._shard_of: dict[nn.Parameter, nn.Parameter] = {}
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._bucket_mb, self._keep = bucket_mb, set(keep)
        self._flat_options = {
            "dtype": mixed_precision,
            "reduce_dtype": reduce_dtype,
            "offload": offload,
        }
        super().__init__(
            params, optimizer_class, comm=Comm.of(mesh), loss_scale=loss_scale, **options
        )

    def flatten(self, groups: list[dict[str, Any]]) -> None:
        params = [p for group in groups for p in group["params"]]
        whole = {p for group in groups if self.owns_whole(group) for p in group["params"]}
        lines = [f"{tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for p in params]
        self.comm.check_equal("the optimizer's parameters", lines)
        shapes = [(f"a parameter of shape {tuple(p.shape)}", p) for p in params]
        check_separate(shapes)
        broadcast(params, self.comm)
        self._frozen += [(name, p) for name, p in shapes if not p.requires_grad]
        cast = [p for p in params if p not in self._keep]
        kept = [p for p in params if p in self._keep]
        as_they_are = self._flat_options | {"dtype": None}
        for some, options in ((cast, self._flat_options), (kept, as_they_are)):
            for bucket, layout in laid_out(some, whole, self._bucket_mb, self.comm.shards):
                flat = Flat(bucket, self.comm, layout=layout, **options)
                flat.owner = self
                self.flats.append(flat)
                self._shard_of.update(zip(flat.params, flat.shards, strict=True))

    def shard_of(self, param: nn.Parameter) -> nn.Parameter:
        return self._shard_of.get(param, param)

    def reduce(self) -> None:
        """Each gradient is copied once, to be sent, and freed; two buckets at a time."""
        flats = self._to_reduce()
        for flat, before_last in zip(flats, [None, None, *flats], strict=False):
            for index, param in enumerate(flat.params):
                if (grad := own_grad(param)) is not None:
                    flat.collect(index, grad)
                    set_own_grad(param, None)
            if before_last is not None:
                before_last.wait_for_reduce()
            flat.reduce()
        for flat in flats[-2:]:
            flat.wait_for_reduce()
        super().reduce()

    def _to_reduce(self) -> list[Flat]:
        return self.flats

    def has_unreduced(self) -> bool:
        """Also own gradients of this rank."""
        own = any(own_grad(p) is not None for flat in self.flats for p in flat.params)
        return own or super().has_unreduced()

    def finalize_grads(self) -> None:
        check_frozen(self._frozen)
        super().finalize_grads()

    def publish(self) -> None:
        """Shard to Replicate: the updated parameters, on every rank."""
        super().publish()
        for flat in self.flats:
            flat.unshard()
        for flat in self.flats:
            flat.wait_for_unshard()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Changes nothing: gradients are only ever reduced in `step()`."""
        yield

    def memory_extra(self) -> dict[str, list[Tensor]]:
        waiting = [flat.partial for flat in self.flats if flat.partial is not None]
        transient = [t for flat in self.flats for t in flat.transient()]
        return {"gradients": waiting, "transient": transient}
