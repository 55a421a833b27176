"""What a run cost: bytes, calls, time and who was late, and arithmetic against the peak."""

from ddpz_lite.meter.breakdown import Parts, Step, breakdown
from ddpz_lite.meter.crossing import HostTraffic
from ddpz_lite.meter.drift import checksums, drifted
from ddpz_lite.meter.explain import explain
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
from ddpz_lite.strategies.costs import zero_memory
from ddpz_lite.wire.trace import Trace, read_trace

__all__ = [
    "KINDS",
    "TIMELINE_KINDS",
    "HostTraffic",
    "MemoryTimeline",
    "Parts",
    "Step",
    "Trace",
    "best_seconds",
    "breakdown",
    "checksums",
    "drifted",
    "explain",
    "home",
    "matmul_peak",
    "memory",
    "moments",
    "ping_pong",
    "read_trace",
    "records_in",
    "utilization",
    "zero_memory",
]
