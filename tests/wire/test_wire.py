"""The wire's ledger: every operation, who called it, what it moved, when it was over."""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ddpz_lite as dz
from ddpz_lite import wire


def every_operation() -> str:
    """Call all that torch.distributed offers; each line is checked by its values."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = list(range(size))
    local = torch.full((4,), float(rank))
    parts = [torch.empty(4) for _ in ranks]
    unsharded = torch.arange(4.0 * size)

    dist.all_reduce(total := local.clone())
    assert torch.equal(total, torch.full((4,), float(sum(ranks))))
    dist.all_gather(parts, local)
    assert [part[0].item() for part in parts] == ranks
    dist.reduce_scatter(part := torch.empty(4), list(unsharded.chunk(size)))
    assert torch.equal(part, size * unsharded.chunk(size)[rank])
    dist.broadcast(copy := local.clone(), size - 1)
    assert torch.equal(copy, torch.full((4,), float(size - 1)))
    dist.reduce(total := local.clone(), 0, dist.ReduceOp.MAX)
    assert rank or total[0] == size - 1
    dist.gather(local, parts if rank == 0 else None)
    dist.scatter(part, parts if rank == 0 else None)
    assert torch.equal(part, local)
    dist.all_to_all_single(swapped := torch.empty(size), torch.full((size,), float(rank)))
    assert swapped.tolist() == ranks
    dist.barrier()
    if rank == 0:
        dist.send(local, 1, tag=3)
    if rank == 1:
        dist.recv(part, 0, tag=3)
        assert torch.equal(part, torch.zeros(4))
    dist.monitored_barrier()
    return dist.get_backend()


SEQUENCE = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_operation_is_recorded_with_its_place_and_its_line(size):
    run = dz.launch(every_operation, size)
    assert list(run) == ["gloo"] * size
    first = every_operation.__code__.co_firstlineno
    for rank in range(size):
        records = [r for r in run.ledger if r.rank == rank]
        assert [r.seq for r in records] == list(range(len(records)))
        extra = {0: ["send"], 1: ["recv"]}.get(rank, [])
        assert [r.op for r in records] == [*SEQUENCE, *extra, "barrier"]
        collectives = [r for r in records if r.group_seq is not None]
        assert [r.group_seq for r in collectives] == list(range(10))
        assert {r.group for r in records} == {tuple(range(size))}
        for r in records:
            name, line = r.where.split(":")
            assert name == "test_wire.py" and first < int(line) < first + 40
            assert 0 < r.started <= r.finished <= run.seconds
        by_op = {r.op: r for r in records}
        assert by_op["all_reduce"].elements == 4 and by_op["all_reduce"].dtype == "float32"
        assert by_op["all_gather"].elements == by_op["reduce_scatter"].elements == 4 * size
        assert by_op["broadcast"].peer == size - 1 and by_op["gather"].peer == 0
    assert run.bytes_sent()[0]["send"] == 16 and run.bytes_sent()[1]["recv"] == 0


def composed_operations() -> list[float]:
    """Objects, coalesced calls, batches of messages, uneven splits, functional collectives."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.distributed_c10d import _coalescing_manager

    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert [o["rank"] for o in objects] == list(range(size))
    box = [rank]
    dist.broadcast_object_list(box, 1)
    assert box == [1]
    a, b = torch.ones(3), torch.ones(5)
    with _coalescing_manager():
        dist.all_reduce(a)
        dist.all_reduce(b)
    assert torch.equal(torch.cat([a, b]), torch.full((8,), float(size)))
    right, left = (rank + 1) % size, (rank - 1) % size
    received = torch.empty(2)
    batch = [
        dist.P2POp(dist.isend, torch.full((2,), float(rank)), right),
        dist.P2POp(dist.irecv, received, left),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert received[0] == left
    rows = [rank + 1] * size  # rank r sends r + 1 rows to each
    arriving = [r + 1 for r in range(size)]
    out = torch.empty(sum(arriving), 2)
    dist.all_to_all_single(out, torch.full((sum(rows), 2), float(rank)), arriving, rows)
    assert out[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
    one = torch.ones(2 * size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has new names for two of them
        reduced = functional.all_reduce(one, "sum", world)
        shard = functional.reduce_scatter_tensor(one, "sum", 0, world)
        again = functional.all_gather_tensor(shard, 0, world)
    assert torch.equal(reduced + 0, again + 0)
    if rank == 0:
        dist.recv(received)  # from anyone
        assert received[0] == 1
    if rank == 1:
        dist.send(torch.ones(2), 0)
    return received.tolist()


@pytest.mark.parametrize("size", [2, 3])
def test_composed_operations_work_and_are_recorded(size):
    run = dz.launch(composed_operations, size)
    ops = [r.op for r in run.ledger if r.rank == 1]
    assert ops[:2] == ["all_gather", "all_gather"]  # sizes, then the pickled objects
    sent = run.bytes_sent()[1]["all_to_all"]
    assert sent == (size - 1) * 2 * 2 * 4  # two rows of two floats to each of the others
    assert run.bytes_sent()[1]["send"] == 2 * 4 + 2 * 4
    assert all(r.finished >= r.started for r in run.ledger)


def groups_and_meshes() -> tuple:
    rank = dist.get_rank()
    low = dist.new_group([0, 1])
    high = dist.new_group([2, 3], backend="gloo")
    local = low if rank < 2 else high
    dist.all_reduce(torch.ones(8), group=local)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    total = torch.full((8,), float(rank))
    dist.all_reduce(total, group=mesh.get_group("replica"))
    assert total[0] == {0: 2, 1: 4}[rank % 2]
    for _ in range(3):  # made again under another name each time
        again = dist.new_group([0, 1, 2, 3])
        dist.broadcast(total, 2, group=again)
        dist.destroy_process_group(again)
    return dist.get_backend(local), total[0].item()


def test_groups_and_meshes_are_on_the_wire_and_known_by_global_ranks():
    run = dz.launch(groups_and_meshes, 4)
    assert list(run) == [("gloo", 2.0)] * 4
    for rank in range(4):
        pair, replicas, *rest = [r for r in run.ledger if r.rank == rank]
        assert pair.group == ((0, 1) if rank < 2 else (2, 3))
        assert replicas.group == ((0, 2) if rank % 2 == 0 else (1, 3))
        assert [(r.group, r.group_seq, r.peer) for r in rest] == [((0, 1, 2, 3), 0, 2)] * 3


def async_and_spans() -> dict[str, float]:
    rank = dist.get_rank()
    started = time.monotonic()
    with dz.span("compute"):
        if rank == 1:
            time.sleep(0.1)
        reduce = dist.all_reduce(torch.ones(4), async_op=True)
        peer = 1 - rank
        send = dist.isend(torch.ones(4), peer)
        receive = dist.irecv(torch.empty(4), peer)
        while any(work._entry.finished is None for work in (reduce, send, receive)):
            time.sleep(0.01)
        time.sleep(0.5)
    for work in (reduce, send, receive):
        work.wait()
        assert work.is_completed()
    assert reduce.get_future().wait()[0].tolist() == [2.0] * 4
    return started


def test_async_operations_end_when_they_end_and_not_when_they_are_waited_for():
    run = dz.launch(async_and_spans, 2)
    spans = {span.rank: span for span in run.spans}
    assert [span.name for span in run.spans] == ["compute"] * 2
    for record in run.ledger:
        assert record.finished < spans[record.rank].finished - 0.1
    late = spans[1].started + 0.1  # rank 1 comes a tenth of a second after rank 0
    first = [r for r in run.ledger if r.rank == 0]
    assert all(r.finished >= late for r in first)


def test_span_outside_a_job_does_nothing():
    with wire.span("nothing"):
        pass
    assert wire.detach() == ([], [])


def helper_of_the_learner(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def backward() -> list[int]:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()  # the line of the all_reduce
    helper_of_the_learner(torch.ones(1))
    return [loss.grad_fn is not None]


def test_the_line_is_the_learners_even_when_cpp_makes_the_call():
    run = dz.launch(backward, 2)
    source = backward.__code__.co_firstlineno
    reductions = [r for r in run.ledger if r.rank == 0 and r.op == "all_reduce"]
    assert reductions[0].where == f"test_wire.py:{source + 3}"
    helper = helper_of_the_learner.__code__.co_firstlineno
    assert reductions[-1].where == f"test_wire.py:{helper + 1}"


def test_callsite_names_cells_and_skips_machinery():
    site = wire.callsite
    try:
        site.set_cells({"/tmp/ipykernel_1/42.py": "cell 12"})
        assert site.label("/tmp/ipykernel_1/42.py", 3) == "cell 12:3"
        assert site.label("/home/me/train.py", 40) == "train.py:40"
        assert site.filename("cell 12") == "/tmp/ipykernel_1/42.py"
        assert site.set_name("/tmp/ipykernel_1/42.py") == "cell 12"
        assert not site.is_library("/tmp/ipykernel_1/42.py")
        assert not site.is_library("/venv/lib/python3.11/site-packages/accelerate/x.py")
    finally:
        site.set_cells({})
    assert site.is_library(torch.__file__) and site.is_library(dz.__file__)
    assert site.is_library(threading_file()) and site.is_library("<frozen runpy>")
    for typed in ("<stdin>", "<string>", "<python-input-3>", "<timed exec>", "<ipython-input-1>"):
        assert not site.is_library(typed)
    assert site.caller().startswith("test_wire.py:")


def test_callsite_skips_the_methods_that_a_dataclass_generates():
    places = []

    class Seen:
        def __set__(self, instance, value):
            places.append(wire.callsite.of_frame(sys._getframe(1)))
            stack = traceback.extract_stack(sys._getframe(1))[::-1]
            names = [(frame.filename, frame.lineno, frame.name) for frame in stack]
            assert names[0][0] == "<string>"
            places.append(wire.callsite.of_stack(names))

        def __get__(self, instance, owner):
            return 0

    @dataclasses.dataclass
    class Point:
        x: int = Seen()

    here = sys._getframe().f_lineno + 1
    Point(3)
    assert places == [f"test_wire.py:{here}"] * 2


def threading_file() -> str:
    import threading

    return threading.__file__


def sparse_reduction() -> torch.Tensor:
    index = torch.tensor([[dist.get_rank(), 2]])
    sparse = torch.sparse_coo_tensor(index, torch.ones(2), (4,))
    dist.all_reduce(sparse)
    return sparse.to_dense()


def test_sparse_all_reduce():
    run = dz.launch(sparse_reduction, 2)
    assert run[0].tolist() == run[1].tolist() == [1, 1, 2, 0]
    assert run.ledger[0].bytes_sent == 2 * (4 + 8)  # two values and two indices to the other


def attach_twice() -> str:
    status_file = dist.group.WORLD._state.status_file
    with pytest.raises(RuntimeError, match="attached already"):
        wire.attach(status_file, backend="gloo")
    return "ok"


def test_attach_refuses_what_it_cannot_do(tmp_path):
    assert dz.launch(attach_twice, 1)[0] == "ok"
    status_file = wire.StatusFile.create(tmp_path / "status", 2)
    with pytest.raises(ValueError, match="the status file of a rank"):
        wire.attach(status_file, backend="gloo")
    with pytest.raises(ValueError, match="gloo and nccl, got 'mpi'"):
        wire.attach(wire.StatusFile(tmp_path / "status", 0), backend="mpi")
    status_file.close()
