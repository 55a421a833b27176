"""The cost of an operation: bytes that a rank sends, and messages on the critical path.

These are the algorithms that the backends run; a test compares the gloo column with the counters of
the loopback interface. N ranks, B bytes in the full tensor, b = B/N in one rank's part:

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

    to: dict[int, int]  # {receiver: bytes}, group ranks
    steps: int
    path: float

    @property
    def sent(self) -> int:
        return sum(self.to.values())


def collective(
    op: str, backend: str, rank: int, size: int, nbytes: int, itemsize: int, root: int = 0
) -> Cost:
    """The cost for `rank` of `size`; nbytes: of the full tensor (see `call.Call`)."""
    if size == 1:
        return Cost({}, 0, 0.0)
    part, others = nbytes // size, size - 1
    before, after = (rank - 1) % size, (rank + 1) % size
    each = {other: part for other in range(size) if other != rank}
    rounds = others.bit_length()  # ceil(log2 size)
    ring = others / size * nbytes
    if op == "all_reduce" or (op == "reduce_scatter" and backend == "gloo"):
        if backend == "gloo":
            return Cost(
                {before: _ring_all_reduce(rank, size, nbytes, itemsize)}, 2 * others, 2 * ring
            )
        return Cost({after: round(2 * ring)}, 2 * others, 2 * ring)
    if op == "reduce_scatter" or op == "all_gather":
        return Cost({after: others * part}, others, ring)
    if op == "broadcast":
        if backend == "gloo":
            to = dict.fromkeys(children(rank, size, root), nbytes)
            return Cost(to, rounds, float(rounds * nbytes))
        return Cost({} if after == root else {after: nbytes}, others, float(nbytes))
    if op == "reduce":
        if backend == "gloo":
            return Cost(_ring_reduce(rank, size, nbytes, itemsize, root), size, 2 * ring)
        return Cost({} if rank == root else {after: nbytes}, others, float(nbytes))
    if op == "gather":
        return Cost({} if rank == root else {root: part}, 1, float(others * part))
    if op == "scatter":
        return Cost(each if rank == root else {}, 1, float(others * part))
    if op == "all_to_all":
        return Cost(each, 1, float(others * part))
    if op == "barrier":
        return Cost({}, rounds, 0.0)
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
    """gloo's split: (bytes in a segment, segments in a chunk); the tail may be short or empty."""
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


def _ring_reduce(rank: int, size: int, nbytes: int, itemsize: int, root: int) -> dict[int, int]:
    """All but two segments of its chunk go to the left neighbour, the reduced chunk to the root.

    With more than two segments per chunk (from 2N MB on) this is more than a ring needs, but gloo
    sends it.
    """
    segment, per_rank = _segments(size, nbytes, itemsize)
    chunk = segment * per_rank
    kept = _between((rank + 1) * chunk - 2 * segment, 2 * segment, nbytes)
    to = {(rank - 1) % size: nbytes - kept}
    if rank != root:
        to[root] = to.get(root, 0) + _between(rank * chunk, chunk, nbytes)
    return to
