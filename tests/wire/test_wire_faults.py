"""Calls that do not match, waits that can never end, and no alarm for anything else."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

import ddpz_lite as dz
from ddpz_lite import wire
from ddpz_lite.wire.status_format import CHANNELS, COLLECTIVE, GROUPS, RECV, RING, digest

# -- different calls -----------------------------------------------------------------------------


def different_operation():
    if dist.get_rank() == 1:
        time.sleep(0.2)
        dist.all_reduce(torch.ones(2, 3))
    else:
        dist.broadcast(torch.ones(2, 3), 0)


def different_shape():
    dist.all_reduce(torch.ones(4 + dist.get_rank()))


def different_dtype():
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if dist.get_rank() else torch.float32))


def different_root():
    dist.broadcast(torch.ones(4), dist.get_rank())


def different_reduction():
    dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)


def different_splits():
    size = dist.get_world_size()
    rows = [2] * size
    if dist.get_rank() == 1:
        rows[0] = 3
    dist.all_to_all_single(torch.ones(2 * size), torch.ones(sum(rows)), [2] * size, rows)


def different_in_a_group_after_many():
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return
    for _ in range(3 * RING):
        dist.all_reduce(torch.ones(2), group=group)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2), group=group, async_op=True).wait()
    else:
        dist.barrier(group=group)


def groups_of_their_own():
    dist.new_group([dist.get_rank()])


DIFFER_THREE_WAYS = (different_shape, different_root, groups_of_their_own)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("fn", "calls"),
    [
        (
            different_operation,
            ("all_reduce(float32[2, 3], sum)", "broadcast(float32[2, 3], root 0)"),
        ),
        (different_shape, ("all_reduce(float32[4], sum)", "all_reduce(float32[5], sum)")),
        (different_dtype, ("all_reduce(int32[4], sum)", "all_reduce(float32[4], sum)")),
        (different_root, ("root 0", "root 1")),
        (different_reduction, ("sum)", "max)")),
        (different_splits, ("sends 3 elements to rank 0", "expects 2 from it")),
        (groups_of_their_own, ("every rank must make every group", "([0])", "([1])")),
        (different_in_a_group_after_many, (f"call #{3 * RING}", "barrier()", "group (0, 1)")),
    ],
)
def test_a_mismatch_names_both_calls_and_both_lines_at_once(fn, calls, size):
    with pytest.raises(dz.RankFailed) as failed:
        dz.launch(fn, size)
    message = str(failed.value)
    assert failed.value.kind == "mismatch", message
    for part in calls:
        assert part in message or (size == 3 and fn in DIFFER_THREE_WAYS), message
    lines = [line for line in message.splitlines() if " at test_wire_faults.py:" in line]
    assert len(lines) >= 2 and all("rank" in line for line in lines)


def shapes_that_fit():
    """Legal differences: shapes of equal length, an uneven all_to_all, all roots' own arguments."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(6, 1) if rank else torch.ones(2, 3))
    rows = [rank] * size
    arriving = list(range(size))
    dist.all_to_all_single(torch.ones(sum(arriving)), torch.ones(sum(rows)), arriving, rows)
    parts = [torch.ones(2) for _ in range(size)] if rank == 0 else None
    dist.scatter(torch.ones(2), parts)
    return True


def test_what_is_legal_passes():
    assert all(dz.launch(shapes_that_fit, 3))


# -- waits without end ---------------------------------------------------------------------------


def returns_early():
    if dist.get_rank():
        dist.all_reduce(torch.ones(2))


def nobody_sends():
    dist.recv(torch.ones(2), (dist.get_rank() + 1) % dist.get_world_size())


def other_tags():
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1, tag=2)
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(2), 0, tag=3)


def groups_crossed():
    one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
    if dist.get_rank() < 2:
        first = one if dist.get_rank() else two
        dist.all_reduce(torch.ones(1), group=first)


def nobody_receives():
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1)


def the_root_is_gone():
    if dist.get_rank():
        dist.broadcast(torch.ones(1), 0)


def the_root_is_alone():
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(1), 0)


def the_root_is_alone_and_the_others_wait():
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(1), 0)
    else:
        dist.recv(torch.ones(1), 0)


def the_root_scatters_alone():
    if dist.get_rank() == 0:
        dist.scatter(torch.ones(1), [torch.ones(1)] * dist.get_world_size())


def the_last_leaf_is_missing():
    if dist.get_rank() < dist.get_world_size() - 1:
        dist.broadcast(torch.ones(1), 0)


FOUR = pytest.param(4, marks=pytest.mark.extra)


@pytest.mark.parametrize("size", [2, 3, FOUR])
@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (returns_early, ("waits in all_reduce #0", "rank 0 returned without calling it")),
        (nobody_sends, ("waits in recv from rank 1", "Each rank waits for another")),
        (other_tags, ("waits in send to rank 1, tag 2", "waits in recv from rank 0, tag 3")),
        (groups_crossed, ("rank 0 waits in all_reduce", "rank 1 waits in all_reduce")),
        (
            nobody_receives,
            ("rank 0 waits in send to rank 1", "rank 1 returned without receiving it"),
        ),
        (the_root_is_gone, ("waits in broadcast #0", "rank 0 returned without calling it")),
        (the_root_is_alone, ("rank 0 waits in broadcast #0", "returned without calling it")),
        (
            the_root_is_alone_and_the_others_wait,
            ("rank 0 waits in broadcast #0", "waits in recv from rank 0"),
        ),
        (the_root_scatters_alone, ("rank 0 waits in scatter #0", "returned without calling it")),
        (the_last_leaf_is_missing, ("waits in broadcast #0", "returned without calling it")),
    ],
)
def test_a_hopeless_wait_becomes_a_sentence_long_before_the_timeout(fn, words, size):
    with pytest.raises(dz.RankFailed) as failed:
        dz.launch(fn, size)
    assert failed.value.kind == "stalled"  # and not "timeout"
    for part in (*words, "test_wire_faults.py:"):
        assert part in str(failed.value)


# -- no false alarms -----------------------------------------------------------------------------


def one_sided():
    """Much waiting, in every direction, all of which ends."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    buffer = torch.ones(2)
    for step in range(25):
        root = step % size
        if rank == root:
            time.sleep(0.01)
            for other in range(size):
                if other != root:
                    dist.send(buffer, other, tag=step)
        else:
            dist.recv(buffer, root, tag=step)
        early = dist.all_reduce(torch.ones(3), async_op=True)
        dist.broadcast(buffer, root)
        sending = dist.isend(buffer, right)
        dist.recv(torch.ones(2))  # from anyone: from the left
        sending.wait()
        early.wait()
    if rank == 0:  # a wait with a time limit is not hopeless
        with pytest.raises(RuntimeError):
            dist.irecv(buffer, left).wait(__import__("datetime").timedelta(seconds=0.3))
    return step


@pytest.mark.parametrize("size", [2, 3])
def test_waits_that_end_raise_no_alarm(size):
    assert dz.launch(one_sided, size)[1] == 24


def another_thread_sends():
    """Both main threads receive; the messages come from threads that the program starts."""
    peer = 1 - dist.get_rank()

    def later():
        time.sleep(0.4)
        dist.send(torch.full((1,), 7.0), peer)

    thread = threading.Thread(target=later)
    thread.start()
    dist.recv(got := torch.zeros(1), peer)
    thread.join()
    return got.item()


def test_a_program_with_its_own_threads_is_never_called_stuck():
    assert list(dz.launch(another_thread_sends, 2)) == [7.0, 7.0]


# -- the status file itself --------------------------------------------------------------------


@pytest.fixture
def status_files(tmp_path):
    """The launcher's board and those of three ranks, which are all in one group."""
    reader = wire.StatusFile.create(tmp_path / "status", 3)
    writers = [wire.StatusFile(tmp_path / "status", rank) for rank in range(3)]
    for status_file in writers:
        status_file.set_helper_threads(1000)
        status_file.mark("running")
        assert status_file.join("0", (0, 1, 2)) == 0
    yield reader, writers
    for status_file in (reader, *writers):
        status_file.close()


def publish(status_file: wire.StatusFile, number: int, signature: bytes = b"s" * 16) -> None:
    status_file.publish(
        0, number, time.monotonic(), signature, b"all_reduce(float32[4])", "cell 7:3"
    )


def test_a_stall_needs_every_way_out_to_be_closed(status_files):
    reader, (zero, one, two) = status_files
    publish(zero, 0)
    zero.enter(COLLECTIVE, b"all_reduce", "cell 7:3", index=0, number=0)
    assert reader.stall(set()) is None  # the others run
    publish(one, 0)
    one.enter(COLLECTIVE, b"all_reduce", "cell 7:3", index=0, number=0)
    assert reader.stall(set()) is None  # rank 2 may still call
    two.mark("returned")
    assert "rank 2 returned without calling it" in reader.stall(set()).sentence
    publish(two, 0)  # it did call, without waiting
    assert reader.stall(set()) is None


def test_a_rank_that_has_ended_counts_even_if_it_could_not_say_so(status_files):
    reader, (zero, _, _) = status_files
    publish(zero, 0)
    zero.enter(COLLECTIVE, b"barrier", "cell 7:3", index=0, number=0)
    assert reader.stall(set()) is None
    assert "rank 1 returned without calling it" in reader.stall({1}).sentence


def test_messages_in_flight_are_not_a_stall(status_files):
    reader, (zero, one, _) = status_files
    key = zero.key(0, 0)
    zero.enter(RECV, b"recv", "a.py:1", index=0, number=0, peer=1)
    one.enter(RECV, b"recv", "a.py:2", index=0, number=0, peer=0)
    assert "Each rank waits for another" in reader.stall(set()).sentence
    one.count_message(digest(key, "send", 1, 0, 0), time.monotonic())  # sent, not waited for
    assert reader.stall(set()) is None
    one.enter(RECV, b"recv", "a.py:2", index=0, number=0, peer=0, tag=5)
    zero.enter(RECV, b"recv", "a.py:1", index=0, number=1, peer=1)  # the second message
    assert "rank 0 waits in recv from rank 1" in reader.stall(set()).sentence


def test_a_wait_with_a_limit_or_with_other_threads_is_not_a_stall(status_files):
    reader, (zero, one, two) = status_files
    two.mark("returned")
    publish(zero, 0)
    at = {"index": 0, "number": 0}
    zero.enter(COLLECTIVE, b"barrier", "a.py:1", **at, bounded=True)
    assert reader.stall(set()) is None
    zero.set_helper_threads(0)  # this process has a thread that the wire knows nothing of
    zero.enter(COLLECTIVE, b"barrier", "a.py:1", **at)
    assert reader.stall(set()) is None
    zero.set_helper_threads(1000)
    zero.enter(COLLECTIVE, b"barrier", "a.py:1", **at)
    assert reader.stall(set()) is not None
    assert one.describe(0) == "waits in barrier #0 (a.py:1)"


def test_calls_are_compared_only_with_the_same_call(status_files):
    _, (zero, one, _) = status_files
    publish(one, 0, b"x" * 16)
    assert zero.disagrees(1, 0, 0, b"y" * 16) and not zero.disagrees(1, 0, 0, b"x" * 16)
    assert not zero.disagrees(1, 0, 1, b"y" * 16)  # not made yet
    publish(one, RING, b"x" * 16)
    assert not zero.disagrees(1, 0, 0, b"y" * 16)  # long past
    assert zero.slot(1, 0, 0) is None and zero.slot(1, 0, RING).where == "cell 7:3"
    key = zero.key(0, 0)
    assert zero.arrival(1, key, 0) == float("-inf") and zero.arrival(1, key, RING + 1) is None


def test_a_full_status_file_is_reported(status_files):
    reader, (zero, _, _) = status_files
    for n in range(CHANNELS):
        assert zero.count_message(digest("channel", n), 0.0) == 0
    assert zero.count_message(digest("one more"), 0.0) == -1
    assert reader.messages(0, digest("one more")) == -1
    assert reader.messages(0, digest("channel", 3)) == 1
    for n in range(1, GROUPS):
        zero.join(f"g{n}", (0, 1))
    with pytest.raises(RuntimeError, match="make groups once"):
        zero.join("one more", (0, 1))


def test_a_group_made_again_is_another_group(status_files):
    _, (zero, one, _) = status_files
    again = zero.join("0", (0, 1, 2))
    assert zero.key(0, again) != zero.key(0, 0)
    assert zero.find_group(1, zero.key(0, again)) is None
    assert one.join("0", (0, 1, 2)) == 1
    assert zero.find_group(1, zero.key(0, again)) == 1
