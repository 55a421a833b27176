"""A slower network, for experiments on one machine.

On one machine all ranks share memory, so communication looks free, and nothing that hides or saves
it pays. A `Network` gives the job the two parameters of the alpha-beta model (Hockney 1994; Thakur,
Rabenseifner and Gropp 2005, section 3): a message of n bytes takes `latency + n / bandwidth`
seconds. With `nodes` > 1 the ranks are assigned to nodes in blocks, and messages between nodes use
the `inter_` parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """A network on which a message takes latency + bytes / bandwidth.

    latency: seconds; bandwidth: bytes per second; each rank has one link, both ways at once.

    The `inter_` parameters default to the others. Raises ValueError for impossible parameters.
    """

    latency: float
    bandwidth: float
    nodes: int = 1
    inter_latency: float | None = None
    inter_bandwidth: float | None = None

    def __post_init__(self) -> None:
        for name in ("latency", "inter_latency"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 <= value < math.inf):
                raise ValueError(
                    f"Network: {name} must be a time in seconds, zero or more, got {value!r}"
                )
        for name in ("bandwidth", "inter_bandwidth"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value > 0):
                raise ValueError(
                    f"Network: {name} must be bytes per second, more than zero, got {value!r}"
                )
        if self.bandwidth is None or self.latency is None:
            raise ValueError(
                "Network: latency (seconds) and bandwidth (bytes per second) are needed, got None"
            )
        if not isinstance(self.nodes, int) or isinstance(self.nodes, bool) or self.nodes < 1:
            raise ValueError(
                f"Network: nodes must be a whole number, one or more, got {self.nodes!r}"
            )
        if self.nodes == 1 and (self.inter_latency is not None or self.inter_bandwidth is not None):
            raise ValueError(
                "Network: inter_latency and inter_bandwidth need nodes=2 or more; "
                "with one node there is no inter-node traffic"
            )

    def node_of(self, rank: int, world_size: int) -> int:
        """The node of a global rank: nodes hold blocks of ranks, in order, as equal as they can."""
        return rank * self.nodes // world_size

    def inter_node_bytes(
        self, sent: Mapping[int, int], rank: int, ranks: Sequence[int], world_size: int
    ) -> int:
        """Of the bytes that a global rank sends to members of `ranks`, the inter-node ones.

        sent: {index in `ranks`: bytes}, see `cost.Cost`.
        """
        here = self.node_of(rank, world_size)
        return sum(n for to, n in sent.items() if self.node_of(ranks[to], world_size) != here)

    def link(self, ranks: Iterable[int], world_size: int) -> tuple[float, float]:
        """(latency, bandwidth) between these global ranks: inter-node unless all are on one."""
        if len({self.node_of(rank, world_size) for rank in ranks}) <= 1:
            return self.latency, self.bandwidth
        latency = self.latency if self.inter_latency is None else self.inter_latency
        bandwidth = self.bandwidth if self.inter_bandwidth is None else self.inter_bandwidth
        return latency, bandwidth


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
