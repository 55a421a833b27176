"""Wrong answers to lesson 02 that people give, and the sentence that each must hear."""

from wrong_answers import Wrong

SUM = ("the sum on every rank",)
UNEVEN = ("lengths that do not divide by N",)
BYTES = ("at most 2(N-1)/N of the tensor from each rank",)
HALF = ("(N-1)/N of the tensor from each rank",)
NEIGHBOURS = ("send and recv between neighbours alone",)
MESSAGES = ("N - 1 messages, by send and recv alone",)
ROUNDS = ("log2 N rounds, rounded up",)

RANKS = "    rank, world = dist.get_rank(), dist.get_world_size()\n"


def tree(body):
    return f"def tree_broadcast(tensor, root):\n{RANKS}{body}"


RING = """
def ring_all_reduce(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = {chunks}
    right, left = (rank + 1) % world, (rank - 1) % world

    def exchange(outgoing, incoming):
        ops = [dist.P2POp(dist.isend, outgoing, right)] if outgoing.numel() else []
        ops += [dist.P2POp(dist.irecv, incoming, left)] if incoming.numel() else []
        for request in dist.batch_isend_irecv(ops) if ops else []:
            request.wait()

    for k in range({adding}):
        other = chunks[(rank - k - 1) % world]
        received = torch.empty_like(other)
        exchange(chunks[(rank - k) % world], received)
        {add}
    for k in range({copying}):
        exchange(chunks[(rank + 1 - k) % world], chunks[(rank - k) % world])
    {end}
"""
RIGHT_RING = {
    "chunks": "tensor.tensor_split(world)",
    "adding": "world - 1",
    "add": "other += received",
    "copying": "world - 1",
    "end": "",
}


def ring(**wrong):
    return RING.format(**(RIGHT_RING | wrong))


SCATTER = """
def reduce_scatter(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    shard = -(-len(tensor) // world)
    padded = torch.nn.functional.pad(tensor, (0, shard * world - len(tensor)))
    {body}
"""


def scatter(body):
    return SCATTER.format(body=body.replace("\n", "\n    "))


ALL_TO_ALL = "parts = torch.empty_like(padded)\ndist.all_to_all_single(parts, padded)\n"


def hangs(a, b, c):
    return f"def hangs():\n    return {{'A': {a}, 'B': {b}, 'C': {c}}}"


A, B, C = (2, "barrier"), (0, "broadcast"), (1, "recv")

WRONG = {
    "02.tree_broadcast": [
        Wrong(
            "a star",
            tree(
                "    if rank == root:\n        for peer in range(world):\n"
                "            if peer != root:\n                dist.send(tensor, peer)\n"
                "    else:\n        dist.recv(tensor, root)"
            ),
            says="The root sends to all others, one after another",
            loses=ROUNDS,
        ),
        Wrong(
            "a chain",
            tree(
                "    place = (rank - root) % world\n"
                "    if place > 0:\n        dist.recv(tensor, (rank - 1) % world)\n"
                "    if place < world - 1:\n        dist.send(tensor, (rank + 1) % world)"
            ),
            says="The tensor goes from one rank to the next",
            loses=ROUNDS,
        ),
        Wrong(
            "the root is always rank 0",
            tree(
                "    step = 1\n    while step < world:\n"
                "        if rank < step and rank + step < world:\n"
                "            dist.send(tensor, rank + step)\n"
                "        elif step <= rank < 2 * step:\n"
                "            dist.recv(tensor, rank - step)\n        step *= 2"
            ),
            says="and the root is rank 1",
            loses=("any root",),
        ),
        Wrong(
            "torch's own broadcast",
            tree("    dist.broadcast(tensor, root)"),
            "called broadcast",
            MESSAGES,
        ),
        Wrong("nothing is sent", tree("    pass"), says="nobody sent it the root's"),
        Wrong(
            "a power of two assumed",
            tree(
                "    place, step = (rank - root) % world, 1\n    while step < world:\n"
                "        if place < step:\n"
                "            dist.send(tensor, (place + step + root) % world)\n"
                "        elif place < 2 * step:\n"
                "            dist.recv(tensor, (place - step + root) % world)\n        step *= 2"
            ),
            says="rank 1",
        ),
        Wrong(
            "everybody sends to everybody",
            tree(
                "    mine = tensor.clone()\n    got = torch.empty_like(tensor)\n"
                "    for shift in range(1, world):\n"
                "        ops = [dist.P2POp(dist.isend, mine, (rank + shift) % world),\n"
                "               dist.P2POp(dist.irecv, got, (rank - shift) % world)]\n"
                "        for request in dist.batch_isend_irecv(ops):\n            request.wait()\n"
                "        if (rank - shift) % world == root:\n            tensor.copy_(got)"
            ),
            says="every rank but the root receives once",
            loses=MESSAGES,
        ),
    ],
    "02.ring_all_reduce": [
        Wrong(
            "whole tensors round the ring",
            """
def ring_all_reduce(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    passing, received = tensor.clone(), torch.empty_like(tensor)
    for _ in range(world - 1):
        ops = [dist.P2POp(dist.isend, passing, (rank + 1) % world),
               dist.P2POp(dist.irecv, received, (rank - 1) % world)]
        for request in dist.batch_isend_irecv(ops):
            request.wait()
        tensor += received
        passing, received = received.clone(), torch.empty_like(tensor)
""",
            says="passes the whole tensor on; pass on one chunk",
            loses=BYTES,
        ),
        Wrong(
            "a star",
            """
def ring_all_reduce(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    if rank == 0:
        for peer in range(1, world):
            dist.recv(received, peer)
            tensor += received
        for peer in range(1, world):
            dist.send(tensor, peer)
    else:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
""",
            says="In a ring it has one neighbour",
            loses=NEIGHBOURS,
        ),
        Wrong(
            "torch's own all_reduce",
            "def ring_all_reduce(tensor):\n    dist.all_reduce(tensor)",
            says="called all_reduce. Build the ring",
            loses=NEIGHBOURS,
        ),
        Wrong("the mean", ring(end="tensor /= world"), says="has the mean"),
        Wrong(
            "the second half of the rounds left out", ring(copying="0"), says="go all the way round"
        ),
        Wrong("one round too few", ring(copying="world - 2"), says="go all the way round"),
        Wrong(
            "copied instead of added",
            ring(add="other.copy_(received)"),
            says="is off by up to",
        ),
        Wrong(
            "the remainder is left out",
            ring(chunks="tensor[: len(tensor) // world * world].tensor_split(world)"),
            says="the last, shorter one",
            loses=UNEVEN,
        ),
        Wrong(
            "a copy is summed",
            ring(chunks="tensor.clone().tensor_split(world)"),
            says="put the sum into the tensor it was given",
        ),
        Wrong(
            "chunks in two messages",
            ring().replace(
                "def exchange(outgoing, incoming):",
                "def exchange(outgoing, incoming):\n"
                "        for a, b in zip(outgoing.tensor_split(2), incoming.tensor_split(2)):\n"
                "            send_and_receive(a, b)\n\n"
                "    def send_and_receive(outgoing, incoming):",
            ),
            says="a ring takes 2(N-1)",
            loses=("2(N-1) messages from each rank",),
        ),
    ],
    "02.reduce_scatter": [
        Wrong(
            "all_reduce, then a slice",
            scatter(
                "total = padded.float()\ndist.all_reduce(total)\n"
                "return total.split(shard)[rank].to(tensor.dtype)"
            ),
            says="bytes with all_reduce",
            loses=HALF,
        ),
        Wrong(
            "gather everything, add up locally",
            scatter(
                "every = [torch.empty_like(padded) for _ in range(world)]\n"
                "dist.all_gather(every, padded)\ntotal = torch.stack(every).float().sum(0)\n"
                "return total.split(shard)[rank].to(tensor.dtype)"
            ),
            says="bytes with all_gather",
            loses=HALF,
        ),
        Wrong(
            "torch's own reduce_scatter",
            scatter(
                "mine = torch.empty(shard)\nparts = list(padded.float().split(shard))\n"
                "dist.reduce_scatter(mine, parts)\nreturn mine.to(tensor.dtype)"
            ),
            says="bytes with reduce_scatter",
            loses=HALF,
        ),
        Wrong(
            "rounded after each addition",
            scatter(
                ALL_TO_ALL + "total = torch.zeros(shard, dtype=tensor.dtype)\n"
                "for part in parts.view(world, shard):\n    total += part\nreturn total"
            ),
            says="rounded to bfloat16 on the way",
            loses=("bfloat16 is added up in float32",),
        ),
        Wrong(
            "the mean",
            scatter(
                ALL_TO_ALL + "return parts.view(world, shard).float().mean(0).to(tensor.dtype)"
            ),
            says="has the mean of its shard",
        ),
        Wrong(
            "nothing was sent",
            scatter("return padded.split(shard)[rank].clone()"),
            says="nothing was added up",
        ),
        Wrong(
            "the neighbour's shard",
            scatter(
                "padded = padded.view(world, shard).roll(1, 0).flatten()\n"
                + ALL_TO_ALL
                + "return parts.view(world, shard).float().sum(0).to(tensor.dtype)"
            ),
            says="has the shard of rank",
        ),
        Wrong(
            "the whole sum on every rank",
            scatter(
                "total = padded.float()\ndist.all_reduce(total)\nreturn total.to(tensor.dtype)"
            ),
            says="It should keep its shard",
        ),
        Wrong(
            "the input is used as a buffer",
            scatter(
                "dist.all_reduce(tensor)\n"
                "padded[: len(tensor)] = tensor\nreturn padded.split(shard)[rank].clone()"
            ),
            says="input has changed",
        ),
        Wrong(
            "a length that divides is assumed",
            "def reduce_scatter(tensor):\n    world = dist.get_world_size()\n"
            "    parts = torch.empty_like(tensor)\n    dist.all_to_all_single(parts, tensor)\n"
            "    return parts.view(world, -1).float().sum(0).to(tensor.dtype)",
            says="raised",
            loses=UNEVEN,
        ),
    ],
    "02.hangs": [
        Wrong(
            "a rank that waits", hangs((0, "barrier"), B, C), "rank 0 is not where", ("program A",)
        ),
        Wrong(
            "the call that was made",
            hangs((2, "all_reduce"), B, C),
            "Program A: the right rank, and another call",
            ("program A",),
        ),
        Wrong(
            "one of the many",
            hangs(A, (1, "all_reduce"), C),
            "the only one to make",
            ("program B",),
        ),
        Wrong(
            "the call that all make",
            hangs(A, (0, "all_reduce"), C),
            "Program B: the right rank, and another call",
            ("program B",),
        ),
        Wrong(
            "the sender", hangs(A, B, (0, "send")), "Which message has no other end", ("program C",)
        ),
        Wrong("ranks without calls", hangs(2, 0, 1), "give a pair, a rank and the name"),
        Wrong("a list", "def hangs():\n    return [(2, 'barrier')]", "Return a dict"),
    ],
}
