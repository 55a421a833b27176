"""The kernel's count of bytes sent over TCP, and the ledger's formulas next to it."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist

import ddpz_lite as dz
from ddpz_lite.meter import tcp_bytes_sent

HEADERS = 0.01  # of messages of this size: gloo's own

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "TCP_INFO"), reason="this system does not count per connection"
)


def test_counts_what_a_connection_sends_to_the_byte():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0] as theirs,
    ):
        before = tcp_bytes_sent()
        ours.sendall(bytes(100_000))
        left = 100_000
        while left:
            left -= len(theirs.recv(left))
        assert tcp_bytes_sent() - before == 100_000


def test_other_sockets_do_not_count():
    before = tcp_bytes_sent()
    a, b = socket.socketpair()
    with a, b:
        a.sendall(bytes(1000))
        assert b.recv(1000) == bytes(1000)
        assert tcp_bytes_sent() == before


def test_counting_opens_no_file():
    def is_open(number: int) -> bool:
        try:
            os.fstat(number)
        except OSError:
            return False
        return True

    with open(__file__):  # a file, not a socket
        before = [number for number in range(1024) if is_open(number)]
        tcp_bytes_sent()
        assert [number for number in range(1024) if is_open(number)] == before


def test_none_where_the_system_does_not_count(monkeypatch):
    monkeypatch.delattr(socket, "TCP_INFO")
    assert tcp_bytes_sent() is None


def count_calls() -> dict[str, int]:
    size = dist.get_world_size()
    whole, part = torch.ones(size * 60_000), torch.empty(60_000)
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter(part, list(whole.chunk(size))),
        "all_gather": lambda: dist.all_gather(list(whole.chunk(size)), part),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    counted = {}
    for op, call in calls.items():
        dist.barrier()
        before = tcp_bytes_sent()
        call()
        dist.barrier()
        counted[op] = tcp_bytes_sent() - before
    return counted


@pytest.mark.parametrize("size", [2, 3])
def test_gloo_sends_what_the_ledger_says(size):
    run = dz.launch(count_calls, size, backend="gloo")
    for rank, counted in enumerate(run):
        recorded = run.bytes_sent()[rank]
        for op, count in counted.items():
            headers = max(HEADERS * recorded[op], 5000)
            assert 0 <= count - recorded[op] <= headers, (rank, op, count, recorded[op])
