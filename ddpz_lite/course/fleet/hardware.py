"""GPUs, the links between them, and clusters, from data sheets and papers.

Units: bytes, seconds, FLOP/s, and bytes/s in one direction of one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class GPU:
    """What a data sheet says: dense bf16 FLOP/s, bytes of memory, and its bytes/s."""

    name: str
    flops: float
    memory: float
    bandwidth: float


@dataclass(frozen=True)
class Link:
    """bandwidth: bytes/s of one GPU in one direction. latency: seconds of one message."""

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Cluster:
    """gpus of one kind. `inside` joins the GPUs of a node, `rail` the nodes of a pod, `spine` pods.

    node, pod: GPUs in one. Every GPU has its own network card, which is its part of the rail.
    """

    gpu: GPU
    gpus: int
    inside: Link
    rail: Link
    spine: Link
    node: int = 8
    pod: int = 3072

    def link(self, size: int, stride: int) -> Link:
        """The slowest link between `size` ranks that are `stride` GPUs apart."""
        if size * stride <= self.node:
            return self.inside
        return self.rail if size * stride <= self.pod else self.spine

    def ring(self, size: int, stride: int) -> Link:
        """The same for a ring. Out of a node it uses the cards of all its members there at once."""
        link, members = self.link(size, stride), max(1, self.node // stride)
        if link is self.inside:
            return link
        return replace(link, bandwidth=min(members * link.bandwidth, self.inside.bandwidth))


# NVIDIA's data sheets: A100 80GB SXM, H100 SXM; the H800 is an H100 with 200 GB/s of NVLink.
A100 = GPU("A100", 312e12, 80e9, 2.04e12)
H100 = GPU("H100", 989e12, 80e9, 3.35e12)
H800 = GPU("H800", 989e12, 80e9, 3.35e12)


def h100(gpus: int) -> Cluster:
    """Nodes of 8 with 450 GB/s of NVLink and 400 Gb/s a card; pods of 3,072 GPUs.

    Between pods a seventh of the rail: Llama Team 2024, section 3.3.1. Latencies are assumed.
    """
    inside, rail = Link("NVLink", 450e9, 2e-6), Link("rail", 50e9, 6e-6)
    return Cluster(H100, gpus, inside, rail, Link("spine", 50e9 / 7, 10e-6))


def h800(gpus: int) -> Cluster:
    """As `h100` with 200 GB/s of NVLink, in one pod: DeepSeek-AI 2024, section 3.1."""
    return replace(h100(gpus), gpu=H800, inside=Link("NVLink", 200e9, 2e-6), pod=gpus)


def a100(gpus: int) -> Cluster:
    """Nodes of 8, 300 GB/s of NVLink, 200 Gb/s a card, a full fat tree: Narayanan et al. 2021."""
    inside, rail = Link("NVLink", 300e9, 2e-6), Link("rail", 25e9, 6e-6)
    return Cluster(A100, gpus, inside, rail, rail, pod=gpus)
