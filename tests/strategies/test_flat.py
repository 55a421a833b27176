"""Flat buffers: every element in exactly one piece, gradients reduced where they belong."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.flat import Flat
from ddpz_lite.strategies.layout import Layout

SHAPES = [(3, 5), (), (7,), (1, 1), (2, 3, 4)]


@pytest.mark.parametrize(("world", "count"), list(product(range(1, 9), range(1, 6))))
def test_every_element_is_owned_once(world, count):
    shapes = tuple(torch.Size(s) for s in SHAPES[:count])
    numel = sum(s.numel() for s in shapes)
    for index, shape in enumerate(shapes):
        owners = torch.zeros(shape.numel(), dtype=torch.int)
        for rank in range(world):
            start, stop = Layout(shapes, world, rank).owned(index)
            owners[start:stop] += 1
        assert (owners == 1).all()
    layouts = [Layout(shapes, world, rank) for rank in range(world)]
    assert 0 <= layouts[0].padded - numel < world
    full = torch.arange(layouts[0].padded)
    views = layouts[0].views(full)
    assert torch.equal(torch.cat([v.flatten() for v in views]), full[:numel])
    shards = full.view(world, -1)
    for index, view in enumerate(views):
        pieces = [layouts[r].split(shards[r])[index] for r in range(world)]
        assert torch.equal(torch.cat(pieces), view.flatten())


@pytest.mark.parametrize("world", range(1, 9))
def test_segments_cover_a_range(world):
    layout = Layout((torch.Size((11,)), torch.Size((6,))), world, 0)
    source, rows = torch.arange(1, 12), torch.zeros(world, layout.shard_numel + 2)
    for place, elements in layout.places(world, extra=2)[0]:
        rows.view(-1)[place] = source[elements].float()
    assert torch.equal(rows[:, : layout.shard_numel].flatten()[:11], source.float())


def make(**options) -> tuple[Flat, list[nn.Parameter]]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(s)) for s in SHAPES]
    return Flat(params, Comm.alone(), **options), params


def test_gradients_reach_the_pieces_and_missing_ones_do_not():
    flat, params = make()
    for index in (0, 2):
        flat.collect(index, torch.full(SHAPES[index], index + 1.0))
    flat.reduce()
    flat.wait_for_reduce()
    assert [p.grad is None for p in flat.shards] == [False, True, False, True, True]
    assert flat.shards[2].grad.tolist() == [3.0] * 7
    flat.collect(2, torch.ones(7))
    flat.reduce()
    flat.wait_for_reduce()
    assert flat.shards[2].grad.tolist() == [4.0] * 7  # added
    assert all(a is b for a, b in zip(flat.params, params, strict=True))


def test_a_transposed_gradient_is_laid_out_in_the_parameters_order():
    flat, _ = make()
    grad = torch.arange(15.0).view(5, 3).t()
    flat.collect(0, grad)
    flat.reduce()
    flat.wait_for_reduce()
    assert torch.equal(flat.shards[0].grad.view(3, 5), grad)


def test_freed_and_gathered_again():
    flat, params = make(resident=False)
    values = [p.detach().clone() for p in params]
    held = flat.params[0] * 2  # autograd keeps the view
    flat.reshard()
    assert flat.full.untyped_storage().size() == 0
    flat.unshard()
    flat.wait_for_unshard()
    assert all(torch.equal(p, v) for p, v in zip(flat.params, values, strict=True))
    held.sum().backward()  # no complaint about a changed version
    assert all(
        torch.equal(p.data.view(v.shape), v) for p, v in zip(flat.shards, values, strict=True)
    )


def test_master_copies_keep_what_half_precision_loses():
    flat, params = make(dtype=torch.bfloat16)
    assert {p.dtype for p in params} == {torch.bfloat16}
    assert {p.dtype for p in flat.shards} == {torch.float32}
    torch.manual_seed(0)
    exact = [torch.randn(s) for s in SHAPES]
    assert all(torch.equal(m, e) for m, e in zip(flat.gather_master(), exact, strict=True))


def test_sparse_gradients_are_refused():
    flat, _ = make()
    with pytest.raises(TypeError, match="sparse=False"):
        flat.collect(0, torch.zeros(3, 5).to_sparse())
