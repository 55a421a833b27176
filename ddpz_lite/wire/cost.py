"""What an operation costs: bytes that a rank sends, and messages on the critical path.

The ledger must not guess: these are the algorithms that the backends run, and a test holds the gloo
column against the counters of the loopback interface. N ranks, B bytes in the full tensor, b = B/N
in one rank's part:

    operation       gloo                                      NCCL (ring)
    all_reduce      ring, 2(N-1)/N B                          2(N-1)/N B
    reduce_scatter  an all_reduce inside, 2(N-1)/N B          (N-1)/N B
    all_gather      ring, (N-1) b                             (N-1) b
    broadcast       binomial tree, B per child                chain, B (the last rank: 0)
    reduce          ring reduce-scatter, then to the root     chain, B (the root: 0)
    gather          b to the root                             the same
    scatter         the root sends (N-1) b                    the same
    all_to_all      each part straight to its rank            the same
    barrier         log2 N rounds of empty messages           an all_reduce of one element

gloo cuts a tensor into 2N segments or more, whole elements each, so a length that does not divide
by 2N leaves ranks with unequal shares; the formulas below follow it. Sources: gloo `allreduce.cc`,
`reduce.cc`, `broadcast.cc`, `allgather.cc`, `barrier.cc`; NCCL ring: Patarasuk and Yuan 2009.
"""

from __future__ import annotations

from typing import NamedTuple

SEGMENT = 1 << 20  # bytes: gloo's largest segment


class Cost(NamedTuple):
    """Bytes that this rank sends; a shaped network takes `steps` latencies and `path` bytes."""

    sent: int
    steps: int
    path: float


def collective(
    op: str, backend: str, rank: int, size: int, nbytes: int, itemsize: int, root: int = 0
) -> Cost:
    """The cost for `rank` of `size`; nbytes: of the full tensor (see `group.Call`)."""
    if size == 1:
        return Cost(0, 0, 0.0)
    part, others = nbytes // size, size - 1
    rounds = others.bit_length()  # ceil(log2 size)
    ring = others / size * nbytes
    if op == "all_reduce" or (op == "reduce_scatter" and backend == "gloo"):
        sent = (
            _ring_all_reduce(rank, size, nbytes, itemsize) if backend == "gloo" else round(2 * ring)
        )
        return Cost(sent, 2 * others, 2 * ring)
    if op == "reduce_scatter" or op == "all_gather":
        return Cost(others * part, others, ring)
    if op == "broadcast":
        if backend == "gloo":
            return Cost(nbytes * len(children(rank, size, root)), rounds, float(rounds * nbytes))
        return Cost(0 if (rank + 1) % size == root else nbytes, others, float(nbytes))
    if op == "reduce":
        if backend == "gloo":
            return Cost(_ring_reduce(rank, size, nbytes, itemsize, root), size, 2 * ring)
        return Cost(0 if rank == root else nbytes, others, float(nbytes))
    if op == "gather":
        return Cost(0 if rank == root else part, 1, float(others * part))
    if op == "scatter":
        return Cost(others * part if rank == root else 0, 1, float(others * part))
    if op == "all_to_all":
        return Cost(others * part, 1, float(others * part))
    if op == "barrier":
        return Cost(0, rounds, 0.0)
    raise ValueError(f"no collective is called {op!r}")


def children(rank: int, size: int, root: int) -> list[int]:
    """The ranks that `rank` sends to in gloo's binomial broadcast tree, in order."""
    virtual = (rank + size - root) % size
    below = 1
    while below <= virtual:
        below <<= 1
    found = []
    while virtual + below < size:
        found.append((virtual + below + root) % size)
        below <<= 1
    return found


def _segments(size: int, nbytes: int, itemsize: int) -> tuple[int, int]:
    """gloo's cut: (bytes in a segment, segments in a chunk); the tail may be short or empty."""
    largest = SEGMENT // itemsize * itemsize
    segment = min(-(-nbytes // (2 * size)), largest)
    segment = -(-segment // itemsize) * itemsize
    return segment, -(-max(-(-nbytes // max(segment, 1)), 2 * size) // size)


def _between(start: int, length: int, total: int) -> int:
    """How much of [start, start + length) lies inside a tensor of `total` bytes."""
    return min(length, max(0, total - start))


def _ring_all_reduce(rank: int, size: int, nbytes: int, itemsize: int) -> int:
    """Every chunk but the rank's own, then every chunk but its left neighbour's."""
    segment, per_rank = _segments(size, nbytes, itemsize)
    chunk = segment * per_rank
    kept = (_between(index * chunk, chunk, nbytes) for index in (rank, (rank - 1) % size))
    return 2 * nbytes - sum(kept)


def _ring_reduce(rank: int, size: int, nbytes: int, itemsize: int, root: int) -> int:
    """The own chunk travels but for two segments; once reduced it goes to the root.

    (With more than two segments to a chunk, that is from 2N MB on, this is more than a ring needs;
    gloo does send it.)
    """
    segment, per_rank = _segments(size, nbytes, itemsize)
    chunk = segment * per_rank
    kept = _between((rank + 1) * chunk - 2 * segment, 2 * segment, nbytes)
    home = 0 if rank == root else _between(rank * chunk, chunk, nbytes)
    return nbytes - kept + home
