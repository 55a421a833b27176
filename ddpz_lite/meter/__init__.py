"""Measure a run: bytes, calls, time, late ranks, and arithmetic against the peak.

breakdown       where a step's time goes, with `intervals`
explain         what a trace or flight records show, from the `calls` in them
span_records    the records inside a span
memory_use      bytes held by a model and its optimizer, by kind
timeline        the same through a training step
host_traffic    bytes copied between host and device
tcp_traffic     bytes sent over TCP, as the Linux kernel counts them
replicas        replicas that differ, found by checksums
speed           FLOPs against the peak, and seconds of collectives
"""

from ddpz_lite.meter.breakdown import Parts, Step, breakdown
from ddpz_lite.meter.explain import explain
from ddpz_lite.meter.host_traffic import HostTraffic
from ddpz_lite.meter.memory_use import KINDS, memory
from ddpz_lite.meter.replicas import checksums, drifted
from ddpz_lite.meter.span_records import records_in
from ddpz_lite.meter.speed import (
    best_seconds,
    home,
    matmul_peak,
    moments,
    ping_pong,
    utilization,
)
from ddpz_lite.meter.tcp_traffic import tcp_bytes_sent
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
    "tcp_bytes_sent",
    "utilization",
    "zero_memory",
]
