"""All-reduces that know the far links: sums, bytes and rounds, against the formulas and torch's."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ddpz_lite as dz
from ddpz_lite.strategies.all_reduces import halving_doubling_all_reduce, hierarchical_all_reduce

NETWORKS = {nodes: dz.Network(0, 1e12, nodes=nodes) for nodes in (1, 2, 3)}
LENGTH = 240  # float32; all worlds below divide it


def far(run, rank):
    return sum(run.bytes_sent(far=True)[rank].values())


def both_ways(nodes):
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (nodes, world // nodes))
    near, between = mesh.get_group(1), mesh.get_group(0)
    same = []
    for shape, dtype in (((LENGTH,), torch.float32), ((7, 3), torch.float64), ((1,), torch.int64)):
        torch.manual_seed(dist.get_rank())
        ours = (100 * torch.randn(shape)).to(dtype)
        theirs = ours.clone()
        dist.all_reduce(theirs)
        result = hierarchical_all_reduce(ours, near, between)
        same.append(result is ours and torch.allclose(ours, theirs, atol=1e-3))
    return same


@pytest.mark.parametrize(("nodes", "local"), [(1, 1), (1, 3), (2, 1), (2, 2), (2, 3), (3, 2)])
def test_the_hierarchy_adds_up(nodes, local):
    run = dz.launch(both_ways, nodes * local, args=(nodes,))
    assert all(all(same) for same in run)


def hierarchy(nodes):
    mesh = init_device_mesh("cpu", (nodes, dist.get_world_size() // nodes))
    hierarchical_all_reduce(torch.ones(LENGTH), mesh.get_group(1), mesh.get_group(0))


def halving(length=LENGTH):
    x = torch.arange(length) + 1.0
    halving_doubling_all_reduce(x)
    return torch.equal(x, (torch.arange(length) + 1.0) * dist.get_world_size())


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (2, 3), (3, 2)])
def test_every_rank_sends_its_part_to_other_nodes(nodes, local):
    run = dz.launch(hierarchy, nodes * local, args=(nodes,), network=NETWORKS[nodes])
    expected = 2 * LENGTH * 4 // local * (nodes - 1) // nodes
    assert [far(run, rank) for rank in range(nodes * local)] == [expected] * (nodes * local)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7, 8])
def test_halving_adds_up_in_few_rounds(world):
    run = dz.launch(halving, world)
    power = 1 << (world.bit_length() - 1)
    most = 2 * (power.bit_length() - 1) + (world > power)
    assert all(run)
    sends = [sum(r.op == "send" and r.rank == rank for r in run.ledger) for rank in range(world)]
    assert max(sends) <= most
    if power == world:
        total = 2 * LENGTH * 4 * (world - 1) // world
        assert [sum(run.bytes_sent()[rank].values()) for rank in range(world)] == [total] * world


@pytest.mark.parametrize("length", [0, 1, 2, 5])
def test_halving_takes_a_tensor_of_few_elements(length):
    assert all(dz.launch(halving, 4, args=(length,)))


def test_halving_sends_the_small_parts_far():
    run = dz.launch(halving, 8, network=NETWORKS[2])
    assert [far(run, rank) for rank in range(8)] == [2 * LENGTH * 4 // 8] * 8


def in_a_group():
    group = dist.new_group([1, 2])
    x = torch.full((4,), float(dist.get_rank()))
    if dist.get_rank() in (1, 2):
        halving_doubling_all_reduce(x, group)
    return x[0].item()


def test_halving_inside_a_group():
    assert list(dz.launch(in_a_group, 4)) == [0, 3, 3, 3]


def refused():
    messages = []
    for call in (
        lambda: halving_doubling_all_reduce(torch.ones(2, 2)),
        lambda: hierarchical_all_reduce(torch.ones(4, 2).t(), dist.group.WORLD, dist.group.WORLD),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_they_refuse_has_a_cure():
    (messages,) = dz.launch(refused, 1)
    assert len(messages) == 2 and all("Fix: " in words for words in messages)
