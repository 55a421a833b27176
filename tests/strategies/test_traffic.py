"""What a step sends, from the ledger: the formula, plus padding and one flag per parameter."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from core_jobs import CASES, gpt
from torch.nn import functional as F

import ddpz_lite as dz
from ddpz_lite.strategies.costs import elements_moved
from ddpz_lite.strategies.parallelize import parallelize


def one_step(stage: int, micro_batches: int, no_sync: bool, options: dict) -> dict[str, int]:
    """Two steps, the second between two marks in the ledger: sends of one float64 element."""
    torch.manual_seed(0)
    model, optimizer = parallelize(
        gpt(layers=3), torch.optim.AdamW, stage, lr=1e-3, bucket_mb=0.005, **options
    )
    mark = torch.zeros(1, dtype=torch.float64)
    for _ in range(2):
        dist.all_reduce(mark)
        for micro in range(micro_batches):
            x, y = CASES["gpt"].inputs(2)
            last = micro == micro_batches - 1
            context = model.no_sync() if no_sync and not last else torch.enable_grad()
            with context:
                F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    flats = model.flats
    if stage == 0:
        parts = [(bucket.numel, len(bucket.params)) for bucket in model.buckets]
    else:
        parts = [(flat.layout.padded, len(flat.params)) for flat in flats]
    return {
        "psi": sum(p.numel() for p in gpt(layers=3).parameters()),
        "padded": sum(n for n, _ in parts),
        "flags": sum(f for _, f in parts),
        "parts": len(parts),
    }


def traffic(world: int, stage: int, micro_batches: int = 1, no_sync: bool = False, **options):
    """(facts, elements sent by rank 0 in the second step, its collectives by name)."""
    run = dz.launch(one_step, world, args=(stage, micro_batches, no_sync, options))
    local = [record for record in run.ledger if record.rank == 0]
    last = max(i for i, r in enumerate(local) if r.dtype == "float64")
    step = local[last + 1 :]
    assert {r.dtype for r in step} == {"float32"}
    return run[0], sum(r.bytes_sent for r in step) / 4, Counter(r.op for r in step)


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.extra)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_moves_exactly_the_formula(world, stage):
    facts, sent, collectives = traffic(world, stage)
    flags = elements_moved(facts["flags"], world, 0) if stage == 0 else facts["flags"] * (world - 1)
    # gloo's ring cuts a buffer into chunks of whole elements, not all equal
    uneven = 2 * world * facts["parts"] if stage == 0 else 1
    assert sent == pytest.approx(elements_moved(facts["padded"], world, stage) + flags, abs=uneven)
    assert facts["padded"] - facts["psi"] < facts["parts"] * world
    parts = facts["parts"]
    assert (
        collectives
        == {
            0: {"all_reduce": parts},
            1: {"all_to_all": parts, "broadcast": parts * world},
            2: {"all_to_all": parts, "broadcast": parts * world},
            3: {"all_to_all": parts, "broadcast": 2 * parts * world},
        }[stage]
    )


@pytest.mark.parametrize(
    ("stage", "no_sync", "options", "volume"),
    [
        (0, True, {}, 2),
        (1, False, {}, 2),
        (2, False, {}, 4),
        (2, True, {}, 2),
        (3, False, {}, 9),
        (3, True, {}, 7),
        (3, False, {"reshard_after_forward": False}, 6),
    ],
)
def test_three_micro_batches(stage, no_sync, options, volume):
    facts, sent, _ = traffic(2, stage, 3, no_sync, **options)
    reductions = {0: 2, 1: 1, 2: volume - 1, 3: 1 if no_sync else 3}[stage]
    flags = facts["flags"] * (reductions / 2 if stage == 0 else reductions)
    assert sent == pytest.approx(volume * facts["padded"] / 2 + flags, abs=1)


def clipped() -> None:
    model, optimizer = parallelize(gpt(), torch.optim.SGD, 3, lr=0.1)
    x, y = CASES["gpt"].inputs(2)
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    dist.all_reduce(torch.zeros(1, dtype=torch.float16))
    optimizer.clip_grad_norm_(1.0)
    dist.all_reduce(torch.zeros(1, dtype=torch.float16))


def test_clipping_costs_one_number():
    local = [r for r in dz.launch(clipped, 2).ledger if r.rank == 0]
    first, second = [i for i, r in enumerate(local) if r.dtype == "float16"]
    assert [(r.op, r.elements) for r in local[first + 1 : second]] == [("all_reduce", 1)]
