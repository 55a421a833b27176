"""ZeRO-2: gradients are sharded too. Each bucket is reduced while backward runs, and freed.

After `backward()` the mean lies in shards, and `param.grad` is this rank's part (see `gradient`).
At no time does a rank hold all gradients: two buckets at most are in flight.

Accumulation has a price, and two ways to pay it. By default every backward reduces and adds to the
shards: m micro-batches move (m+1)Ψ, and memory stays sharded. Under `no_sync` gradients stay
unsharded until the first backward outside: 2Ψ are moved, and memory is that of ZeRO-1 meanwhile.

Source: Rajbhandari et al. 2020, section 5.2 (P_os+g).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ddpz_lite.strategies.flat import Flat
from ddpz_lite.strategies.gradient import own_grad, set_own_grad
from ddpz_lite.strategies.reducer import Reducer
from ddpz_lite.strategies.zero1 import ZeRO1


class ShardedBucket:
    """A flat buffer as a bucket that the Reducer reduces: to shards, where DDP's stays full."""

    def __init__(self, flat: Flat) -> None:
        self.flat, self.params = flat, flat.params

    def collect(self, index: int, param: nn.Parameter) -> None:
        self.flat.collect(index, own_grad(param))
        set_own_grad(param, None)

    def reduce(self, missing: list[int]) -> None:
        self.flat.reduce()  # its flags say what is missing

    def wait_for_reduce(self) -> None:
        self.flat.wait_for_reduce()


class ZeRO2(ZeRO1):
    """ZeRO-1 whose gradients are reduced to shards during backward; same arguments, same use."""

    reduces_later = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._reducer = Reducer([], in_flight=2)
        super().__init__(*args, **kwargs)

    def flatten(self, groups: list[dict[str, Any]]) -> None:
        known = len(self.flats)
        super().flatten(groups)
        self._reducer.add([ShardedBucket(flat) for flat in self.flats[known:]])

    def _to_reduce(self) -> list[Flat]:
        """Backward has reduced, but for what was assigned to `.grad`, or left by `no_sync`."""
        return [f for f in self.flats if any(own_grad(p) is not None for p in f.params)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._reducer.reset()
        for flat in self.flats:
            flat.forget()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep full gradients here; the next one outside reduces the sum."""
        with self._reducer.no_sync():
            yield
