"""The bytes of the ledger: formulas for small cases, and gloo's real traffic for large ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import ddpz_lite as dz
from ddpz_lite.wire import cost

ROOT = Path(__file__).resolve().parents[2]
HEADERS = 0.05  # of the payload, for messages of megabytes: TCP, IP and gloo's own preambles
TURNS = 3  # the quietest counts: a busy machine cuts the stream into more packets


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("elements", [1, 3, 64, 1000, 840 * 1000])
def test_ring_formulas_add_up_over_the_ranks(size, elements):
    def total(op: str, backend: str) -> int:
        return sum(
            cost.collective(op, backend, rank, size, 4 * elements, 4).sent for rank in range(size)
        )

    everything = 4 * elements
    for backend in ("gloo", "nccl"):
        assert total("all_reduce", backend) == pytest.approx(2 * (size - 1) * everything, abs=size)
        assert total("broadcast", backend) == (size - 1) * everything
        assert total("barrier", backend) == 0
    assert total("reduce_scatter", "gloo") == total("all_reduce", "gloo")
    if elements % size == 0:
        for op in ("all_gather", "all_to_all"):
            assert total(op, "gloo") == total(op, "nccl") == (size - 1) * everything
        for op in ("gather", "scatter"):
            assert total(op, "gloo") == (size - 1) * everything // size
        assert total("reduce_scatter", "nccl") == (size - 1) * everything
        if elements % (2 * size) == 0 and everything <= 2 * size * cost.SEGMENT:
            per_rank = cost.collective("all_reduce", "gloo", 0, size, everything, 4).sent
            assert per_rank == 2 * (size - 1) * everything // size
            reduced = total("reduce", "gloo")
            assert reduced == (size - 1) * everything + (size - 1) * everything // size


def test_broadcast_tree_reaches_every_rank_once():
    for size in range(1, 18):
        for root in range(size):
            reached = [child for rank in range(size) for child in cost.children(rank, size, root)]
            assert sorted([*reached, root]) == list(range(size))


def test_one_rank_sends_nothing():
    for op in ("all_reduce", "broadcast", "all_gather", "barrier"):
        assert cost.collective(op, "gloo", 0, 1, 4096, 4) == ({}, 0, 0.0)
    with pytest.raises(ValueError, match="no collective is called 'all_sort'"):
        cost.collective("all_sort", "gloo", 0, 2, 4096, 4)


def one_shape(elements: int) -> None:
    import torch

    dist.all_reduce(torch.ones(elements))


def test_ledger_follows_the_ring_where_it_does_not_divide():
    run = dz.launch(one_shape, 2, args=(1,))  # one element: rank 0 holds the only chunk
    assert [run.bytes_sent()[rank]["all_reduce"] for rank in range(2)] == [4, 4]
    run = dz.launch(one_shape, 3, args=(600,))
    assert [run.bytes_sent()[rank]["all_reduce"] for rank in range(3)] == [4 * 800] * 3


# -- gloo itself ---------------------------------------------------------------------------------

IN_A_NAMESPACE = '''
import fcntl, json, socket, struct, sys, time
import torch, torch.distributed as dist
import ddpz_lite as dz

def loopback_up():
    with socket.socket() as s:
        fcntl.ioctl(s, 0x8914, struct.pack("16sH14s", b"lo", 0x1 | 0x8 | 0x40, b""))

def sent():
    """Bytes that the loopback interface of this namespace has sent."""
    for line in open("/proc/self/net/dev"):
        name, _, fields = line.partition(":")
        if name.strip() == "lo":
            return int(fields.split()[8])

def work(mib):
    rank, size = dist.get_rank(), dist.get_world_size()
    n = mib * 2**18 // (2 * size) * (2 * size) + 2 * size  # does not divide into segments
    whole, part, other = torch.ones(n), torch.ones(n // size), torch.ones(n)
    pieces = list(whole.chunk(size))
    at_root = pieces if rank == 0 else None
    splits = [n // size + (1 if r == 0 else 0) - (1 if r == 1 else 0) for r in range(size)]
    into = [splits[rank]] * size
    cases = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce": lambda: dist.reduce(whole, 1),
        "broadcast": lambda: dist.broadcast(whole, size - 1),
        "all_gather": lambda: dist.all_gather(pieces, part),
        "reduce_scatter": lambda: dist.reduce_scatter(part, pieces),
        "gather": lambda: dist.gather(part, at_root),
        "scatter": lambda: dist.scatter(part, at_root),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(sum(into)), whole, into, splits),
        "send": lambda: rank or dist.send(whole, 1),
    }
    measured = {op: [] for op in cases}
    for op, call in [case for case in cases.items() for _ in range(TURNS)]:
        dist.barrier()
        time.sleep(0.05)  # let the barrier's last packets pass
        before = sent()
        dist.barrier()
        call()
        if op == "send" and rank == 1:
            dist.recv(other, 0)
        dist.barrier()
        time.sleep(0.05)
        measured[op].append(sent() - before)
    return {op: min(counts) for op, counts in measured.items()}

if __name__ == "__main__":
    loopback_up()
    results = []
    for size, mib in ((2, 1), (3, 5), (4, 3), (2, 12)):
        run = dz.launch(work, size, args=(mib,), output="by_rank")
        for op, measured in run[0].items():
            recorded = sum(ops.get(op, 0) for ops in run.bytes_sent().values()) // TURNS
            results.append([op, size, mib, measured, recorded])
    print(json.dumps(results))
'''


def namespaces() -> str | None:
    """Why this machine allows no private network namespace, or None."""
    if shutil.which("unshare") is None:
        return "there is no unshare command"
    tried = subprocess.run(["unshare", "-rn", "true"], capture_output=True, text=True, timeout=10)
    return None if tried.returncode == 0 else f"unshare -rn: {tried.stderr.strip()}"


@pytest.mark.extra
def test_ledger_agrees_with_the_loopback_interface(tmp_path):
    reason = namespaces()
    if reason:
        pytest.skip(f"needs a private network namespace: {reason}")
    script = tmp_path / "traffic.py"
    script.write_text(f"TURNS = {TURNS}\n{IN_A_NAMESPACE}")
    command = ["unshare", "-rn", sys.executable, "-W", "ignore", str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 4 * 9
    wrong = [r for r in results if not 0 <= r[3] - r[4] <= HEADERS * r[4]]
    assert not wrong, f"op, ranks, MiB, loopback, ledger: {wrong}"
