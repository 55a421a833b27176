"""Context parallelism: attention over parts of a sequence, as if one process had all of it."""

from __future__ import annotations

import weakref
from collections import Counter
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as peer
from torch.nn import functional as F

import ddpz_lite as dz
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.context import partial
from ddpz_lite.strategies.context.attention import KINDS
from ddpz_lite.strategies.context.order import Order
from ddpz_lite.strategies.context.rotation import Ring

B, H, T, D = 2, 12, 24, 6  # 24 tokens, 12 heads: for any world from 1 to 4
N = B * H * T * D  # elements of a full tensor


def rest(value: object):
    return pytest.param(value, marks=pytest.mark.rest)


def qkv(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, T, D, generator=generator).to(dtype) for _ in range(4)]


def gradients(attend, tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
    """[output, gradients of the tensors]"""
    tensors = [t.clone().requires_grad_() for t in tensors]
    y = attend(*tensors)
    y.backward(grad)
    return [y.detach(), *(t.grad for t in tensors)]


def distances() -> dict[tuple, float]:
    """To one process, over what bf16 or fp32 rounds, by kind, zigzag, causal and dtype."""
    found = {}
    for dtype, causal in product((torch.float32, torch.bfloat16), (False, True)):
        *inputs, grad = qkv(dtype)
        wanted = gradients(
            lambda *t: F.scaled_dot_product_attention(*t, is_causal=causal),  # noqa: B023
            [t.double() for t in inputs],
            grad.double(),
        )
        for kind, zigzag in product(KINDS, (False, True)):
            attend = dz.ContextAttention(kind=kind, causal=causal, zigzag=zigzag)
            local = [attend.order.of(t, 2) for t in (*inputs, grad)]
            results = gradients(attend, local[:3], local[3])
            assert {t.dtype for t in results} == {dtype}
            parts = [attend.order.of(t, 2) for t in wanted]
            error = max((a - b).abs().max().item() for a, b in zip(results, parts, strict=True))
            found[kind, zigzag, causal, str(dtype)] = error / torch.finfo(dtype).eps
    return found


@pytest.mark.parametrize("world", [rest(1), 2, rest(3), 4])
def test_values_and_gradients_of_one_process(world):
    for found in dz.launch(distances, world, record=False):
        assert len(found) == 24
        assert {case: d for case, d in found.items() if not d < 16} == {}  # eps of values near 1


@pytest.mark.parametrize("masked", [False, True])
def test_tiles_and_merged_parts_are_the_whole(masked, monkeypatch):
    monkeypatch.setattr(partial, "TILE", 7)  # does not divide 24
    q, k, v, grad = [t.double() for t in qkv()]
    wanted = gradients(
        lambda *t: F.scaled_dot_product_attention(*t, is_causal=masked), [q, k, v], grad
    )
    out, lse = partial.attend(q, k, v, masked)
    torch.testing.assert_close(out, wanted[0])
    found = partial.attend_backward(grad, q, k, v, lse, (grad * out).sum(-1), masked)
    torch.testing.assert_close(list(found), wanted[1:])


def test_a_merge_bears_scores_of_any_size_and_rows_without_keys():
    q, k, v, _ = [t.double() for t in qkv()]
    q = q * 1e4  # e^score is inf in every dtype
    wanted, lse = partial.attend(q, k, v, False)
    out, running = torch.zeros_like(q), torch.full_like(lse, -torch.inf)
    for part in (slice(0, 5), slice(5, 24)):
        partial.merge(out, running, *partial.attend(q, k[:, :, part], v[:, :, part], False))
    torch.testing.assert_close((out, running), (wanted, lse))
    unseen = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    partial.merge(out, running, *unseen)
    torch.testing.assert_close((out, running), (wanted, lse))


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_an_order_has_each_token_once(world, zigzag):
    orders = [Order(world, rank, zigzag) for rank in range(world)]
    places = [order.places(T) for order in orders]
    assert sorted(torch.cat(places).tolist()) == list(range(T))
    full = torch.randn(2, T, 3)
    assert torch.equal(orders[0].join([order.of(full) for order in orders]), full)
    chunk = T // orders[0].parts
    seen = [  # tokens that the queries of a rank see, from what `pairs` says
        sum(
            chunk * (chunk + 1) // 2 if masked else chunk * chunk
            for source in range(world)
            for *_, masked in order.pairs(source, causal=True)
        )
        for order in orders
    ]
    assert sum(seen) == T * (T + 1) // 2
    assert seen == [sum(p + 1 for p in place.tolist()) for place in places]
    assert len(set(seen)) == (1 if zigzag else world)


# -- what is sent and held


def one_layer(kind: str) -> int:
    attend = dz.ContextAttention(kind=kind)
    *inputs, grad = (attend.order.of(t, 2) for t in qkv())
    gradients(attend, inputs, grad)
    return attend.comm.world


FLOAT = 4


@pytest.mark.parametrize("world", [rest(2), 3, rest(4)])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_and_calls_are_the_formula(kind, world):
    run = dz.launch(one_layer, world, args=(kind,))
    others, part = world - 1, N // world
    calls, elements = {
        "ulysses": ({"all_to_all": 4}, 8 * part * others / world),
        "ring": (
            dict.fromkeys(("send", "recv"), 2 * others + world),
            4 * part * others + 2 * N,
        ),
        "gather": ({"broadcast": 2 * world, "all_to_all": 1}, 6 * part * others),
    }[kind]
    for rank in range(world):
        assert Counter(r.op for r in run.ledger if r.rank == rank) == calls
        assert sum(r.bytes_sent for r in run.ledger if r.rank == rank) == FLOAT * elements


def blocks_held() -> tuple[int, int, list[int], set[int]]:
    """Most received blocks at once; messages when the first is used; sources; who was sent to."""
    comm, received, peers, began = Comm(), [], set(), []
    exchange = comm.exchange

    def watched(sends, receives):
        peers.update(peer for _, peer in sends)
        received.extend(weakref.ref(tensor) for tensor, _ in receives)
        return exchange(sends, receives)

    comm.exchange = watched
    own, most, sources = torch.full((4,), float(comm.rank)), 0, []
    for source, block in Ring(comm).blocks(own):
        began.append(len(received))
        assert block.tolist() == [source] * 4
        sources.append(source)
        most = max(most, sum(ref() is not None for ref in received))
    return most, began[0], sources, peers


@pytest.mark.parametrize("world", [rest(2), 4])
def test_a_ring_holds_two_blocks_of_others_and_talks_to_neighbours(world):
    for rank, (most, began, sources, peers) in enumerate(dz.launch(blocks_held, world)):
        assert most == min(2, world - 1)
        assert began == 1  # the next block is in flight when the first is used
        assert sources == [(rank - i) % world for i in range(world)]
        assert peers == {(rank + 1) % world}


# -- torch's own


def against_torch(rotate: str) -> list[float]:
    """Largest distances to torch's ring, forward and backward, with its balanced order."""
    peer.set_rotate_method(rotate)
    aten, group = torch.ops.aten, dist.group.WORLD
    attend = dz.ContextAttention(kind="ring" if rotate == "alltoall" else "gather")
    balancer = peer._create_default_load_balancer(T, attend.comm.world, torch.device("cpu"))
    places = balancer._generate_indices()[0].chunk(attend.comm.world)[attend.comm.rank]
    assert torch.equal(places, attend.order.places(T))
    q, k, v, grad = (attend.order.of(t, 2).contiguous() for t in qkv())
    out, lse = peer._templated_ring_attention(
        group, 2, aten._scaled_dot_product_flash_attention_for_cpu, q, k, v, is_causal=True
    )
    theirs = peer._templated_ring_attention_backward(
        group,
        2,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        grad,
        "grad_out",
        q,
        k,
        v,
        out,
        lse,
        True,
        dropout_p=0.0,
    )
    ours = gradients(attend, [q, k, v], grad)
    return [(a - b).abs().max().item() for a, b in zip(ours, (out, *theirs), strict=True)]


@pytest.mark.parametrize("world", [rest(2), 4])
@pytest.mark.parametrize("rotate", ["alltoall", rest("allgather")])
def test_the_same_order_and_gradients_as_torchs_context_parallel(rotate, world):
    for found in dz.launch(against_torch, world, args=(rotate,), record=False):
        assert max(found) < 2e-6


# -- refusals


def refused(what: str) -> None:
    config = dz.GPTConfig(vocab_size=7, context=12, layers=1, heads=3, width=6)
    tokens = torch.zeros(1, 12, dtype=torch.int64)
    if what == "kind":
        dz.ContextAttention(kind="star")
    if what == "heads":
        dz.context_parallel(dz.GPT(config), kind="ulysses")
    if what == "heads of a call":
        q, k, v, _ = qkv()
        dz.ContextAttention(kind="ulysses")(q[:, :3], k[:, :3], v[:, :3])
    if what == "shapes":
        q, k, v, _ = qkv()
        dz.ContextAttention()(q, k[:, :3], v[:, :3])
    if what == "tokens of a call":
        dz.ContextAttention()(*(t[:, :, :7] for t in qkv()[:3]))
    if what == "tokens":
        dz.context_parallel(dz.GPT(config))(tokens[:, :10])
    if what == "dropout":
        dropping = dz.GPTConfig(vocab_size=7, context=12, layers=1, heads=3, width=6, dropout=0.1)
        dz.context_parallel(dz.GPT(dropping))
    gpt = dz.context_parallel(dz.GPT(config))
    if what == "twice":
        dz.context_parallel(gpt)
    if what == "generate":
        gpt.generate(tokens, 1)
    dz.parallelize(gpt, torch.optim.SGD, mesh=Comm.alone(), lr=0.1)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("kind", "kind must be one of ring, gather, ulysses, got 'star'"),
        ("heads", "3 heads do not divide into 2 ranks. Fix: a number of ranks that divides 3"),
        ("heads of a call", "3 heads do not divide into 2 ranks"),
        ("tokens", "10 tokens do not divide into 4 chunks, 2 for each of 2 ranks. Fix: .* 8 for"),
        ("tokens of a call", "14 tokens do not divide into 4 chunks"),
        ("shapes", "need one shape .* Fix: repeat keys and values"),
        ("dropout", r"has dropout=0.1. Fix: GPTConfig\(dropout=0.0\)"),
        ("twice", "cut along its context already"),
        ("generate", "logits of 6 of 12 tokens"),
        ("reduced over fewer ranks", 'summed without those of rank [01]. Fix: .*"data", "context"'),
    ],
)
def test_what_cannot_be_is_refused_with_a_fix(what, words):
    with pytest.raises(dz.RankFailed, match=words):
        dz.launch(refused, 2, args=(what,), record=False)
