"""What a run cost: bytes by kind, a step in bytes and calls, and arithmetic against the peak."""

from ddpz_lite.meter.crossing import HostTraffic
from ddpz_lite.meter.held import KINDS, memory
from ddpz_lite.meter.inside import records_in
from ddpz_lite.meter.speed import (
    best_seconds,
    home,
    matmul_peak,
    moments,
    ping_pong,
    utilization,
)
from ddpz_lite.meter.timeline import TIMELINE_KINDS, MemoryTimeline
from ddpz_lite.placement import zero_memory

__all__ = [
    "KINDS",
    "TIMELINE_KINDS",
    "HostTraffic",
    "MemoryTimeline",
    "best_seconds",
    "home",
    "matmul_peak",
    "memory",
    "moments",
    "ping_pong",
    "records_in",
    "utilization",
    "zero_memory",
]
