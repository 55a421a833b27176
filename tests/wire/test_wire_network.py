"""The shaped network: as slow as it says, never faster, idle while it waits, and real overlap."""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

import ddpz_lite as dz
from ddpz_lite.wire.shaping import Link, Transfer

SLOW = dz.Network(latency=0.02, bandwidth=400e6)
SIZES = (1 << 10, 1 << 16, 1 << 24)  # bytes: 1 KB to 16 MB
BUSY = 1.0  # seconds by which a machine with other work may wake us late


def model(op: str, nbytes: int, size: int) -> float:
    """What the alpha-beta model says for `op`, in seconds."""
    alpha, beta = SLOW.latency, 1 / SLOW.bandwidth
    return {
        "send": alpha + nbytes * beta,
        "exchange": alpha + nbytes * beta,
        "all_reduce": 2 * (size - 1) * alpha + 2 * (size - 1) / size * nbytes * beta,
        "async": 2 * (size - 1) * alpha + 2 * (size - 1) / size * nbytes * beta,
        "future": 2 * (size - 1) * alpha + 2 * (size - 1) / size * nbytes * beta,
        "broadcast": (size - 1).bit_length() * (alpha + nbytes * beta),
    }[op]


def timed(ops: tuple[str, ...], sizes: tuple[int, ...]) -> dict:
    """{(op, bytes): [(when this rank called, when it had the result)]} on the machine's clock."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    times: dict = {}
    for nbytes in sizes:
        local, other = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)

        def exchange(local=local, other=other):
            messages = [dist.P2POp(dist.isend, local, right), dist.P2POp(dist.irecv, other, left)]
            for work in dist.batch_isend_irecv(messages):
                work.wait()

        calls = {
            "send": lambda x=local: dist.recv(x, 0) if rank else dist.send(x, 1),
            "exchange": exchange,
            "all_reduce": lambda x=local: dist.all_reduce(x),
            "async": lambda x=local: dist.all_reduce(x, async_op=True).wait(),
            "future": lambda x=local: dist.all_reduce(x, async_op=True).get_future().wait(),
            "broadcast": lambda x=local: dist.broadcast(x, 0),
        }
        for op in ops:
            for _ in range(3):  # the best is compared
                dist.barrier()
                called = time.monotonic()
                calls[op]()
                times.setdefault((op, nbytes), []).append((called, time.monotonic()))
    return times


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.extra)])
def test_every_operation_takes_what_the_model_says(size):
    ops = ("send", "exchange", "all_reduce", "async", "future", "broadcast")
    ops = ops if size == 2 else ops[1:]
    run = dz.launch(timed, size, args=(ops, SIZES), network=SLOW)
    for key in run[0]:
        expected = model(*key, size)
        rounds = list(zip(*(times[key] for times in run), strict=True))
        took = [[done - max(called for called, _ in each) for _, done in each] for each in rounds]
        for each in took:  # a broadcast's root need not wait for those that it does not send to
            assert min(each) >= expected * 0.999 or key[0] == "broadcast", (key, expected, took)
        best = min(max(each) for each in took)
        assert best <= expected + BUSY, (key, expected, took)


def idle() -> tuple[float, float]:
    x = torch.zeros(8)
    dist.all_reduce(x)  # threads are started by the first
    dist.all_reduce(x, async_op=True).wait()
    started, used = time.monotonic(), time.process_time()
    for _ in range(5):
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).get_future().wait()
    return time.monotonic() - started, time.process_time() - used


def test_waiting_costs_no_processor_time():
    run = dz.launch(idle, 2, network=dz.Network(latency=0.05, bandwidth=1e9))
    for waited, used in run:
        assert waited >= 10 * 2 * 0.05
        assert used < 0.1 * waited


def overlapped() -> float:
    x = torch.zeros(1000)
    dist.barrier()
    started = time.monotonic()
    pending = dist.all_reduce(x, async_op=True)
    while time.monotonic() < started + 1.5:  # compute while the network is busy
        x.new_ones(1000).sum()
    pending.wait()
    return time.monotonic() - started


def test_computation_continues_while_the_network_is_busy():
    run = dz.launch(overlapped, 2, network=dz.Network(latency=1.0, bandwidth=1e9))
    assert min(run) >= 2.0  # two steps of 1 s
    calls = [record for record in run.ledger if record.op == "all_reduce"]
    begun = max(call.started for call in calls)
    assert all(call.finished <= begun + 2.0 + 1.0 for call in calls)  # not 1.5 of computing, then 2


def ddp_step(bucket_mb: float) -> tuple[float, list]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(4)]
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*layers), bucket_cap_mb=bucket_mb
    )
    x = torch.full((2, 64), float(dist.get_rank()))
    for _ in range(2):  # the second step uses DDP's final buckets
        dist.barrier()
        started = time.monotonic()
        model(x).sum().backward()
        took = time.monotonic() - started
    return took, [layer.weight.grad for layer in layers]


def test_ddp_waits_for_the_network_through_its_futures():
    network = dz.Network(latency=0.03, bandwidth=1e9)
    many, one = (dz.launch(ddp_step, 2, args=(mb,), network=network) for mb in (0.001, 25))
    plain = dz.launch(ddp_step, 2, args=(25,), record=False)
    assert min(took for took, _ in one) >= 2 * 0.03
    assert min(took for took, _ in many) >= 4 * 2 * 0.03  # one bucket per layer
    for got, expected in zip((*many, *one), (*plain, *plain), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got[1], expected[1], strict=True))


def fsdp_step() -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    dist.barrier()
    started = time.monotonic()
    model(torch.ones(2, 8)).sum().backward()
    return time.monotonic() - started


def test_fsdp2_waits_for_the_network_too():
    run = dz.launch(fsdp_step, 2, network=dz.Network(latency=0.02, bandwidth=1e9))
    ops = [r.op for r in run.ledger if r.rank == 0]
    assert (gathers := ops.count("all_gather")) >= 3 and (
        scatters := ops.count("reduce_scatter")
    ) == 3
    assert min(run) >= (gathers + 2 * scatters) * 0.02  # gloo's reduce_scatter takes two rounds


def impatient() -> float:
    got = torch.zeros(1)
    if dist.get_rank() == 1:
        dist.recv(got, 0)  # until the other's deadline is at its end
        dist.send(got, 0)
        return got.item()
    receiving = dist.irecv(got, 1)
    with pytest.raises(RuntimeError, match=r"recv at .* took longer than 0\.05 s"):
        receiving.wait(timedelta(seconds=0.05))  # nothing has been sent
    dist.send(torch.ones(1), 1)
    receiving.wait()
    return got.item()


def test_a_wait_that_gave_up_can_be_taken_up_again():
    assert dz.launch(impatient, 2, network=dz.Network(0.01, 1e9))[0] == 1.0


def gives_up_in_time() -> tuple[float, float]:
    total = torch.ones(1)
    started = time.monotonic()
    work = dist.all_reduce(total, async_op=True)
    with pytest.raises(RuntimeError, match=r"took longer than 0\.2 s"):
        work.wait(timedelta(seconds=0.2))
    gave_up = time.monotonic() - started
    work.wait()
    return gave_up, time.monotonic() - started


def test_a_time_limit_counts_the_shaped_time_too():
    for gave_up, done in dz.launch(gives_up_in_time, 2, network=dz.Network(5.0, 1e9)):
        assert 0.2 <= gave_up < 2 * 5.0 <= done


def late_partner() -> tuple[float, float]:
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.15)
    called = time.monotonic()
    dist.all_reduce(torch.zeros(1))
    return called, time.monotonic()


def test_an_operation_starts_when_the_last_has_come():
    run = dz.launch(late_partner, 2, network=dz.Network(latency=0.05, bandwidth=1e9))
    last = max(called for called, _ in run)
    assert all(done >= last + 2 * 0.05 for _, done in run)


def across() -> dict[str, float]:
    rank = dist.get_rank()
    groups = {"inside": [[0, 1], [2, 3]], "across": [[0, 2], [1, 3]]}
    took = {}
    for name, pairs in groups.items():
        local = [dist.new_group(pair) for pair in pairs][
            [rank in pair for pair in pairs].index(True)
        ]
        dist.barrier()
        times = [time.monotonic()]
        for _ in range(3):
            dist.all_reduce(torch.zeros(2), group=local)
            times.append(time.monotonic())
        took[name] = min(after - before for before, after in pairwise(times))
    return took


def test_what_crosses_nodes_takes_the_inter_figures():
    network = dz.Network(0.001, 1e9, nodes=2, inter_latency=1.0, inter_bandwidth=1e9)
    for took in dz.launch(across, 4, network=network):
        assert 0.002 <= took["inside"] < 2.0 <= took["across"]


def test_network_geometry_and_bad_figures():
    network = dz.Network(1e-6, 1e9, nodes=2, inter_latency=1e-3)
    assert [network.node_of(rank, 4) for rank in range(4)] == [0, 0, 1, 1]
    assert network.link((0, 1), 4) == (1e-6, 1e9)
    assert network.link((1, 2), 4) == (1e-3, 1e9)
    for figures in [
        {"latency": -1, "bandwidth": 1e9},
        {"latency": 0, "bandwidth": 0},
        {"latency": None, "bandwidth": 1e9},
        {"latency": "fast", "bandwidth": 1e9},
        {"latency": 0, "bandwidth": 1e9, "nodes": 0},
        {"latency": 0, "bandwidth": 1e9, "inter_latency": 1},
        {"latency": float("inf"), "bandwidth": 1e9},
        {"latency": 0, "bandwidth": float("nan")},
    ]:
        with pytest.raises(ValueError, match="Network: "):
            dz.Network(**figures)


def test_the_link_serves_in_the_order_of_readiness():
    link = Link()

    def transfer(at: float | None, way: str = "both") -> Transfer:
        return Transfer(lambda done: at if at is not None or not done else 9.0, 1.0, 2.0, way)

    late, early, never = transfer(5.0), transfer(1.0), transfer(None)
    for each in (never, late, early):
        link.add(each)
    assert (
        link.finish_time(late) == 8.0
    )  # early: 1 to 3 on the link, late: 5 to 7, then the latency
    assert early.finish == 4.0 and never.finish is None
    incoming = transfer(6.0, "in")
    link.add(incoming)
    assert link.finish_time(incoming) == 10.0  # the link is free again at 7
    link.drop(never)
    link.add(again := transfer(0.0))
    assert link.finish_time(again) == 12.0
