"""What feeds many ranks: equal work in each step, a queue, uneven ends, a cache behind workers."""

import os
import time
from itertools import chain, pairwise

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import ddpz_lite as dz
from ddpz_lite import data

torch.set_num_threads(1)
WORLDS = (1, 2, 3, 4)


def unequal(count, seed=0, longest=300):
    """Lengths whose longest are many times the shortest."""
    rng = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, generator=rng).mul(0.9).add(4).exp()  # (count,)
    return drawn.clamp(1, longest).long().tolist()


def batches_by_rank(lengths, budget, world, epoch=0, **options):
    """batches[rank][step]: indices."""
    samplers = [
        data.TokenBudgetSampler(lengths, budget, rank, world, **options) for rank in range(world)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


# ---- token budgets


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_each_sample_once_in_as_many_steps_on_each_rank(world, padded):
    for count, budget in ((400, 800), (57, 300), (world, 10_000), (world + 1, 300)):
        lengths = unequal(count, seed=count)
        epochs = [
            batches_by_rank(lengths, budget, world, epoch, padded=padded) for epoch in range(3)
        ]
        promised = len(data.TokenBudgetSampler(lengths, budget, 0, world, padded=padded))
        for batches in epochs:
            assert sorted(chain(*chain(*batches))) == list(range(count))
            assert {len(steps) for steps in batches} == {promised}
            assert all(batch for steps in batches for batch in steps)
        if count == 400:
            assert all(one != other for one, other in pairwise(epochs))
        assert epochs[1] == batches_by_rank(lengths, budget, world, 1, padded=padded)


@pytest.mark.parametrize("world", WORLDS)
def test_in_each_step_the_ranks_have_about_as_many_tokens(world):
    lengths, budget = unequal(600), 1500
    for epoch in range(3):
        for step in zip(*batches_by_rank(lengths, budget, world, epoch), strict=True):
            tokens = [sum(lengths[i] for i in batch) for batch in step]
            mean, longest = sum(tokens) / world, max(lengths[i] for i in chain(*step))
            assert max(tokens) <= mean + (1 - 1 / world) * longest  # Graham's bound
            assert max(tokens) <= 1.1 * mean, "with many samples far less than the bound"
            assert mean <= budget + longest / world


def test_rectangles_are_equal_and_waste_less_padding():
    lengths, world = unequal(600), 4

    def rectangles(padded):
        steps = zip(*batches_by_rank(lengths, 1500, world, padded=padded), strict=True)
        return [[len(b) * max(lengths[i] for i in b) for b in step] for step in steps]

    sorted_, mixed = rectangles(True), rectangles(False)
    assert sum(map(sum, sorted_)) < 0.6 * sum(map(sum, mixed))
    for step in sorted_:
        assert max(step) <= 1.25 * sum(step) / world
    equal = batches_by_rank([7] * 5, 100, 3, padded=True)
    assert sorted(len(batch) for (batch,) in equal) == [1, 2, 2]


def test_the_longest_sample_goes_to_another_rank_each_time():
    lengths = unequal(400)
    steps = list(zip(*batches_by_rank(lengths, 800, 4), strict=True))
    by = [max(range(4), key=lambda r: max(lengths[i] for i in step[r])) for step in steps]
    assert len(set(by)) > 1


@pytest.mark.parametrize("stop", [0, 1, 5, 1000])
def test_budget_resumes_in_the_middle_of_an_epoch(stop):
    lengths, world = unequal(200), 3
    for rank in range(world):

        def sampler(rank=rank):
            return data.TokenBudgetSampler(lengths, 700, rank, world, seed=4)

        full, first = sampler(), sampler()
        full.set_epoch(2)
        first.set_epoch(2)
        expected, stream = list(full), iter(first)
        head = [next(stream) for _ in range(min(stop, len(expected)))]
        second, third = sampler(), sampler()
        second.load_state_dict(first.state_dict())
        third.load_state_dict(full.state_dict(taken=len(head)))
        second.set_epoch(2)
        assert head + list(second) == head + list(third) == expected
        assert list(second) == expected, "after the resumed epoch comes a whole one"
        second.load_state_dict(first.state_dict())
        again = iter(second)
        if stop < len(expected):
            next(again)
            third.load_state_dict(second.state_dict())
            assert list(third) == expected[len(head) + 1 :], "resumed twice"


def test_budget_resumes_with_another_world():
    lengths = unequal(200)
    for old_world, new_world in ((4, 3), (2, 4), (3, 1)):
        old = [data.TokenBudgetSampler(lengths, 500, r, old_world) for r in range(old_world)]
        seen = []
        for sampler in old:
            stream = iter(sampler)
            seen += next(stream) + next(stream)
        new = [data.TokenBudgetSampler(lengths, 500, r, new_world) for r in range(new_world)]
        for sampler in new:
            sampler.load_state_dict(old[0].state_dict())
        rest = [list(sampler) for sampler in new]
        assert len({len(steps) for steps in rest}) == 1
        assert sorted(seen + list(chain(*chain(*rest)))) == list(range(200))


def test_fewer_samples_left_than_ranks():
    old = data.TokenBudgetSampler([5] * 6, 5, 0, 2)
    stream = iter(old)
    head = [next(stream) for _ in range(2)]  # of each of two ranks: four samples are used
    new = [data.TokenBudgetSampler([5] * 6, 5, r, 4) for r in range(4)]
    for sampler in new:
        sampler.load_state_dict(old.state_dict())
    rest = [list(sampler) for sampler in new]
    assert len(head) == 2 and [len(steps) for steps in rest] == [1] * 4
    assert all(batch for steps in rest for batch in steps)
    assert len(set(chain(*chain(*rest)))) == 4, "the two that were left, and two again"


def test_budget_in_a_loader_and_alone():
    texts = [torch.ones(length) for length in unequal(50)]
    sampler = data.TokenBudgetSampler([len(t) for t in texts], 600, shuffle=False)
    loader = DataLoader(texts, batch_sampler=sampler, collate_fn=torch.cat)
    assert sum(len(batch) for batch in loader) == sum(map(len, texts))
    assert len(loader) == len(sampler)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: data.TokenBudgetSampler([3, 3], 9, 1), "TokenBudgetSampler: only one of rank and"),
        (lambda: data.TokenBudgetSampler([3, 3], 9, 2, 2), "rank 2 is not in a world of 2"),
        (lambda: data.TokenBudgetSampler([3, 3], 9, 0, 3), "2 samples are too few for 3 ranks"),
        (lambda: data.TokenBudgetSampler([3, 0], 9, 0, 1), "sample 1 has 0 tokens"),
        (lambda: data.TokenBudgetSampler([3, 8], 7, 0, 1), "longest sample has 8 tokens.*budget"),
        (lambda: data.TokenBudgetSampler([3], 7, 0, 1).set_epoch(-1), "count from 0"),
        (lambda: data.TokenBudgetSampler([3], 7, 0, 1).state_dict(taken=2), r"in 0\.\.1, got 2"),
        (
            lambda: data.TokenBudgetSampler([3, 4], 7, 0, 1).load_state_dict(
                data.TokenBudgetSampler([3, 5], 7, 0, 1).state_dict()
            ),
            "saved with tokens=8, this sampler has tokens=7",
        ),
        (lambda: data.WorkQueue(-1), "cannot have -1 items"),
        (lambda: data.WorkQueue(3, costs=[1.0]), "1 costs for 3 items"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- the queue


def work(busy):
    """Two rounds of 12 items and another queue. In each round rank `busy` is stuck in its first
    item until all others are taken.
    """
    store, rank, world = data.job_store(), dist.get_rank(), dist.get_world_size()
    queue, other = data.WorkQueue(12), data.WorkQueue(3, costs=[1, 9, 5])
    assert len(queue) == 12
    rounds = []
    for number in range(2):
        dist.barrier()
        with dz.span("round"):
            for item in queue:
                started = store.add(f"started {number}", 1)
                while rank == busy % world and world > 1 and started < 12:
                    started = store.add(f"started {number}", 0)
                    time.sleep(0.01)
                assert item in queue.taken
        rounds.append(queue.taken)
    return rounds, list(other)


def test_the_queue_gives_each_item_once_to_a_free_rank():
    for world in WORLDS:
        run = dz.launch(work, world, args=(1,))
        for number in range(2):
            taken = [rounds[number] for rounds, _ in run]
            assert sorted(chain(*taken)) == list(range(12))
            if world > 1:
                assert len(taken[1 % world]) <= 1, "a busy rank takes no more"
        assert sorted(chain(*(other for _, other in run))) == [0, 1, 2]
        rounds = [s for s in run.spans if s.name == "round"]
        assert not [
            r for r in run.ledger
            if any(s.rank == r.rank and s.started <= r.started <= s.finished for s in rounds)
        ], "nothing is sent while the queue is worked off"  # fmt: skip


def test_the_queue_of_one_process_and_the_longest_first():
    queue = data.WorkQueue(4, costs=[2, 9, 4, 9])
    assert list(queue) == [1, 3, 2, 0] == queue.taken
    assert list(queue) == [1, 3, 2, 0], "each iteration distributes again"
    assert list(data.WorkQueue(0)) == []
    with pytest.raises(RuntimeError, match="is not in a process group"):
        data.job_store()


# ---- uneven ends


def train_joined(wrap):
    """Ranks with 2, 3, 4, 5 batches of unequal sizes; their parameters after the epoch."""
    rank, rng = dist.get_rank(), torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(1 + (rank + b) % 3, 4, generator=rng) for b in range(2 + rank)]
    torch.manual_seed(0)
    model, optimizer = wrap(torch.nn.Linear(4, 2))
    weights = []
    for x, weight in data.joined(batches, len):
        (model(x).square().mean() * weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(weight)
    module = getattr(model, "module", model)
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    return batches, weights, flat


def ddp(module):
    return dz.parallelize(module, torch.optim.SGD, stage=0, lr=0.1)


def in_torch(module):
    model = torch.nn.parallel.DistributedDataParallel(module)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def zero2(module):
    return dz.parallelize(module, torch.optim.SGD, stage=2, lr=0.1)


@pytest.mark.parametrize(("world", "wrap"), [(1, ddp), (2, zero2), (3, in_torch), (4, ddp)])
def test_joined_ranks_train_as_one_process_would(world, wrap):
    run = dz.launch(train_joined, world, args=(wrap,))
    assert {len(weights) for _, weights, _ in run} == {1 + world}, "as many steps as the longest"
    torch.manual_seed(0)
    alone = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(1 + world):
        together = torch.cat([batches[step] for batches, _, _ in run if step < len(batches)])
        alone(together).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = torch.cat([p.detach().flatten() for p in alone.parameters()])
    for _, weights, flat in run:
        torch.testing.assert_close(flat, wanted, atol=1e-6, rtol=1e-5)
        assert sum(weights) <= world * (1 + world)
    if world > 1:
        assert run[0][1][-1] == 0, "who has run out counts nothing"


def join_on_rank_1_without_a_batch():
    for _ in data.joined([torch.ones(2)] * (1 - dist.get_rank()), len):
        pass


def steps_with_nothing_that_counts():
    sizes = [[0, 4], [0]][dist.get_rank()]
    return [weight for _, weight in data.joined(sizes, float)]


def test_joined_without_a_batch_and_with_batches_that_count_nothing():
    with pytest.raises(dz.RankFailed, match="rank 1 has no batch, and"):
        dz.launch(join_on_rank_1_without_a_batch, 2)
    assert list(dz.launch(steps_with_nothing_that_counts, 2)) == [[0, 2], [0, 0]]


# ---- workers, prefetch, cache


class Slow(Dataset):
    """Item i is (i, the process that computed it); each computation leaves a mark in a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if not 0 <= index < 12:
            raise IndexError(index)
        with open(os.path.join(self.folder, "computed"), "a") as file:
            file.write("x")
        return index, os.getpid()


def load(folder, workers):
    """Two epochs through a cache: (indices, processes) of each; and this process."""
    cached = data.Cached(Slow(folder), os.path.join(folder, "cache"))
    assert len(cached) == 12
    options = {"prefetch_factor": 2, "persistent_workers": True} if workers else {}
    sampler = data.RankSampler(12)
    loader = DataLoader(cached, batch_size=2, sampler=sampler, num_workers=workers, **options)
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = list(loader)
        dist.barrier()  # by now all samples are in the cache
        indices = torch.cat([i for i, _ in batches]).tolist()
        seen.append((indices, set(torch.cat([p for _, p in batches]).tolist())))
    return seen, os.getpid()


def test_a_loader_with_workers_and_a_cache_in_ranks(tmp_path):
    def launched_from_a_cell(folder, workers):  # shipped by value, as a cell's functions are
        return load(folder, workers)

    for workers in (0, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        run = dz.launch(launched_from_a_cell, 2, args=(str(folder), workers))
        for epoch in range(2):
            assert sorted(chain(*(seen[epoch][0] for seen, _ in run))) == list(range(12))
        assert (folder / "computed").read_text() == "x" * 12, "each sample is computed once"
        assert not list((folder / "cache").glob("*.part"))
        processes = [seen[0][1] for seen, _ in run]
        ranks = {pid for _, pid in run}
        assert (set().union(*processes) == ranks) if workers == 0 else (
            len(set().union(*processes)) == 4 and not set().union(*processes) & ranks
        )  # fmt: skip
    with pytest.raises(IndexError):
        data.Cached(Slow(str(tmp_path)), tmp_path / "other")[12]
