"""Wrong answers to lesson 02 that people give, and the sentence that each must hear."""

from answers import Wrong
from answers.altered import altered, wrapped

SUM = ("the sum on every rank",)
UNEVEN = ("lengths that do not divide by N",)
BYTES = ("at most 2(N-1)/N of the tensor from each rank",)
HALF = ("(N-1)/N of the tensor from each rank",)
NEIGHBOURS = ("send and recv between neighbours alone",)
MESSAGES = ("N - 1 messages, by send and recv alone",)
ROUNDS = ("log2 N rounds, rounded up",)

WAIT = "Do you wait for each message before you use it?"
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
            says="but the root is rank 1",
            loses=("any root",),
        ),
        Wrong(
            "torch's own broadcast",
            tree("    dist.broadcast(tensor, root)"),
            "called broadcast",
            MESSAGES,
        ),
        Wrong(
            "nothing is sent",
            tree("    pass"),
            says="still has its own tensor: no rank sent it the root's",
        ),
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
            "received into a tensor of its own",
            tree(
                "    place, step = (rank - root) % world, 1\n    while step < world:\n"
                "        if place < step and place + step < world:\n"
                "            dist.send(tensor, (place + step + root) % world)\n"
                "        elif step <= place < 2 * step:\n"
                "            tensor = torch.empty_like(tensor)\n"
                "            dist.recv(tensor, (place - step + root) % world)\n        step *= 2"
            ),
            says="into that tensor; `tensor = ...` only gives its name to another one",
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
            says="It passes the full tensor on; pass on one chunk of N",
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
        Wrong("the mean", ring(end="tensor /= world"), says="is the mean"),
        Wrong("not waited for", ring().replace("request.wait()", "pass"), says=WAIT),
        Wrong(
            "not waited for, isend and irecv",
            """
def ring_all_reduce(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    right, left = (rank + 1) % world, (rank - 1) % world
    for k in range(world - 1):
        other = chunks[(rank - k - 1) % world]
        received = torch.zeros_like(other)
        dist.isend(chunks[(rank - k) % world], right)
        dist.irecv(received, left)
        other += received
    for k in range(world - 1):
        dist.isend(chunks[(rank + 1 - k) % world], right)
        dist.irecv(chunks[(rank - k) % world], left)
""",
            says=WAIT,
        ),
        Wrong(
            "the second half of the rounds left out", ring(copying="0"), says="go all the way round"
        ),
        Wrong("one round too few", ring(copying="world - 2"), says="go all the way round"),
        Wrong(
            "copied instead of added",
            ring(add="other.copy_(received)"),
            says="each received chunk added? Do you wait for each message before you use it?",
        ),
        Wrong(
            "the remainder is left out",
            ring(chunks="tensor[: len(tensor) // world * world].tensor_split(world)"),
            says="round, also a shorter one? Do you wait for each message before you use it?",
            loses=UNEVEN,
        ),
        Wrong(
            "a copy is summed",
            ring(chunks="tensor.clone().tensor_split(world)"),
            says="has not changed: put the sum into the tensor that was given",
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
            "widened before it travels",
            scatter(
                "padded = padded.float()\n"
                + ALL_TO_ALL
                + "return parts.view(world, shard).sum(0).to(tensor.dtype)"
            ),
            says="It is sent in float32. Send bfloat16, and convert after receiving",
            loses=HALF,
        ),
        Wrong(
            "rounded after each addition",
            scatter(
                ALL_TO_ALL + "total = torch.zeros(shard, dtype=tensor.dtype)\n"
                "for part in parts.view(world, shard):\n    total += part\nreturn total"
            ),
            says="sum was rounded to bfloat16 several times. Add up in float32, round once",
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
            "a rank that waits",
            hangs((0, "barrier"), B, C),
            "Rank 0 does not cause the hang",
            ("program A",),
        ),
        Wrong(
            "the call that was made",
            hangs((2, "all_reduce"), B, C),
            "the rank that left the others",
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
            "The rank is right, but not the call",
            ("program B",),
        ),
        Wrong(
            "the sender",
            hangs(A, B, (0, "send")),
            "which rank sends to which. Which message has no sender or no receiver?",
            ("program C",),
        ),
        Wrong("a word for a call", hangs((2, "waits"), B, C), "and the calls are all_reduce"),
        Wrong("ranks without calls", hangs(2, 0, 1), "give a pair, a rank and the name"),
        Wrong("a list", "def hangs():\n    return [(2, 'barrier')]", "Return a dict"),
    ],
}

# ---- what the texts promise, as words of theirs -> (the criterion, the kind of case), or None

ROOT0 = ("every rank has the root's tensor, root 0", "")
RING2 = ("2(N-1) messages from each rank", "uneven")
PROMISES = {
    "02.tree_broadcast": {
        "Afterwards every rank's `tensor` holds the root's values": ROOT0,
        "`tensor` has the same shape on every rank": None,
        "Use only `dist.send(tensor, dst)` and `dist.recv(tensor, src)`": (*MESSAGES, ""),
        "Send N − 1 messages in all": (*MESSAGES, "root"),
        "a rank sends or receives at most one message": (*ROUNDS, "root"),
        "Copy the root's tensor to all ranks, in place": ROOT0,
        "any shape, the same on every rank": ROOT0,
        "root: a rank": ("any root", "root"),
    },
    "02.ring_all_reduce": {
        "Cut the tensor into N chunks": (*BYTES, ""),
        "2(N − 1) rounds": RING2,
        "need not be a multiple of N, and may be smaller than N": (*UNEVEN, "uneven"),
        "Each rank exchanges messages only with its neighbours": (*NEIGHBOURS, ""),
        "sends at most 2(N − 1)/N of the tensor": (*BYTES, "uneven"),
        "`wait()` for each": None,
        "Replace the tensor on every rank by the sum over all ranks": (*SUM, ""),
        "any float dtype, the same length on every rank": None,
    },
    "02.reduce_scatter": {
        "Rank r needs only the r-th part of the sum": ("each rank's shard of the sum", ""),
        "half of them are enough": (*HALF, ""),
        "return this rank's shard, padding included": (*UNEVEN, "uneven"),
        "A bfloat16 tensor travels as bfloat16": (*HALF, "bf16"),
        "added up in float32, so that the sum is rounded once": (
            "bfloat16 is added up in float32",
            "bf16",
        ),
        "sends as many bytes as an all-reduce": None,
        "This rank's shard of the sum over all ranks": ("each rank's shard of the sum", ""),
        "it must not change": ("each rank's shard of the sum", ""),
        "of the same dtype": ("bfloat16 is added up in float32", "bf16"),
    },
    "02.hangs": {
        "Each of these programs, on three ranks, has one bug": None,
        "one that this rank makes but should not, or should make but does not": ("program A", ""),
        "First find both by reading": None,
        "the name without `dist.`": ("program C", ""),
        "For each program the rank that causes the hang": (
            "a rank and a call for each program",
            "",
        ),
    },
}

# ---- mutants of the solution that are right ----

WORLD = {"`world = dist.get_world_size()` -> the first one, kept": "a job has one world"}
EQUIVALENT = {
    "02.tree_broadcast": {
        **WORLD,
        "`step < world` -> `step <= world`": "in a round too many nobody has anyone to send to",
    },
    "02.ring_all_reduce": {
        "`(rank - k) % world` -> `rank - k`": "a tuple counts negative places from its end",
        "`(rank - k - 1) % world` -> `rank - k - 1`": "the same",
        "`(rank - k) % world` -> `rank - k` (#2)": "the same",
    },
    "02.hangs": {
        '`def hangs(): """For each program the rank where it begins...` -> '
        "its first result, kept": ("it takes nothing, and says the same each time"),
    },
    "02.reduce_scatter": {
        **WORLD,
        "`parts.view(world, shard).sum(0, dtype=torch.float32)` -> "
        "`parts.view(world, shard).sum(0)`": "torch adds up bfloat16 in float32 here as well",
    },
}

# ---- right answers that look different from the solution ----

RIGHT = {
    "02.tree_broadcast": [
        (
            "counts down, from the far half to the neighbours",
            """
def tree_broadcast(tensor, root):
    world = dist.get_world_size()
    me = (dist.get_rank() - root) % world
    distance = 1
    while distance < world:
        distance *= 2
    while distance > 1:
        half = distance // 2
        if me % distance == 0 and me + half < world:
            dist.send(tensor, dst=(me + half + root) % world)
        elif me % distance == half:
            dist.recv(tensor, src=(me - half + root) % world)
        distance = half
""",
        ),
        (
            "halves a range of ranks, recursively",
            """
def tree_broadcast(tensor, root):
    world = dist.get_world_size()
    me = (dist.get_rank() - root) % world

    def spread(first, beyond):
        if beyond - first < 2:
            return
        middle = (first + beyond + 1) // 2
        if me == first:
            dist.isend(tensor, (middle + root) % world).wait()
        if me == middle:
            dist.irecv(tensor, (first + root) % world).wait()
        if me < middle:
            spread(first, middle)
        else:
            spread(middle, beyond)

    spread(0, world)
""",
        ),
        (
            "bits: first the parent, then the children",
            """
def tree_broadcast(tensor, root):
    world = dist.get_world_size()
    me = (dist.get_rank() - root) % world
    if me:
        parent = me - (1 << (me.bit_length() - 1))
        dist.recv(tensor, (parent + root) % world)
    for bit in range(me.bit_length(), (world - 1).bit_length()):
        child = me + (1 << bit)
        if child < world:
            dist.send(tensor, (child + root) % world)
""",
        ),
    ],
    "02.ring_all_reduce": [
        (
            "even ranks send first, odd ones receive first",
            """
def ring_all_reduce(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    sizes = [len(tensor) // world + (i < len(tensor) % world) for i in range(world)]
    chunks = list(torch.split(tensor, sizes))

    def shift(outgoing, incoming):
        if rank % 2 == 0:
            dist.send(outgoing, right)
            dist.recv(incoming, left)
        else:
            dist.recv(incoming, left)
            dist.send(outgoing, right)

    for step in range(world - 1):
        buffer = torch.empty_like(chunks[(rank - step - 1) % world])
        shift(chunks[(rank - step) % world], buffer)
        chunks[(rank - step - 1) % world].add_(buffer)
    for step in range(world - 1):
        shift(chunks[(rank + 1 - step) % world], chunks[(rank - step) % world])
""",
        ),
        (
            "padded rows, isend and blocking recv, leftwards",
            """
def ring_all_reduce(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    size = (len(tensor) + world - 1) // world
    rows = tensor.new_zeros(world * size)
    rows[: len(tensor)] = tensor
    rows = rows.view(world, size)
    inbox = tensor.new_empty(size)
    for step in range(2 * (world - 1)):
        request = dist.isend(rows[(rank + step) % world], (rank - 1) % world)
        dist.recv(inbox, (rank + 1) % world)
        request.wait()
        target = rows[(rank + step + 1) % world]
        if step < world - 1:
            target += inbox
        else:
            target.copy_(inbox)
    tensor.copy_(rows.view(-1)[: len(tensor)])
""",
        ),
        (
            "narrow, irecv first, ends so that rank r owns chunk r",
            """
def ring_all_reduce(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    edges = [i * len(tensor) // world for i in range(world + 1)]

    def chunk(i):
        i %= world
        return tensor.narrow(0, edges[i], edges[i + 1] - edges[i])

    def swap(outgoing, incoming):
        coming = dist.irecv(incoming, (rank - 1) % world)
        going = dist.isend(outgoing, (rank + 1) % world)
        coming.wait()
        going.wait()

    for k in range(1, world):
        received = torch.zeros_like(chunk(rank - k - 1))
        swap(chunk(rank - k), received)
        chunk(rank - k - 1).add_(received)
    for k in range(world - 1):
        swap(chunk(rank - k), chunk(rank - k - 1))
""",
        ),
    ],
    "02.reduce_scatter": [
        (
            "isend and irecv to and from everybody",
            """
def reduce_scatter(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    shard = (len(tensor) + world - 1) // world
    padded = torch.zeros(shard * world, dtype=tensor.dtype)
    padded[: len(tensor)] = tensor
    parts = padded.split(shard)
    total = parts[rank].float()
    others = [r for r in range(world) if r != rank]
    inbox = {r: torch.empty_like(parts[0]) for r in others}
    requests = [dist.irecv(inbox[r], r) for r in others]
    requests += [dist.isend(parts[r], r) for r in others]
    for request in requests:
        request.wait()
    for r in others:
        total += inbox[r].float()
    return total.to(tensor.dtype)
""",
        ),
        (
            "sends what there is, and pads at the end",
            """
def reduce_scatter(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    shard = -(-len(tensor) // world)
    starts = [min(r * shard, len(tensor)) for r in range(world)]
    sizes = [min(shard, len(tensor) - start) for start in starts]
    mine = sizes[rank]
    received = tensor.new_empty(world * mine)
    dist.all_to_all_single(received, tensor, [mine] * world, sizes)
    total = received.view(world, mine).double().sum(dim=0)
    out = torch.zeros(shard, dtype=tensor.dtype)
    out[:mine] = total.to(tensor.dtype)
    return out
""",
        ),
        (
            "batch_isend_irecv, in turn round the ring of distances",
            """
def reduce_scatter(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    if len(tensor) % world:
        tensor = torch.cat([tensor, tensor.new_zeros(world - len(tensor) % world)])
    rows = tensor.reshape(world, -1)
    total = rows[rank].to(torch.float32)
    for distance in range(1, world):
        to, source = (rank + distance) % world, (rank - distance) % world
        inbox = torch.empty_like(rows[rank])
        for request in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, rows[to], to), dist.P2POp(dist.irecv, inbox, source)]
        ):
            request.wait()
        total = total + inbox
    return total.to(tensor.dtype)
""",
        ),
    ],
    "02.hangs": [
        (
            "lists, and the names as they are called",
            """
def hangs():
    return {"C": [1, "dist.recv"], "B": [0, "dist.broadcast"], "A": [2, "dist.barrier"]}
""",
        ),
    ],
}

# -- what an answer may not assume -----------------------------------------------------------------

WRONG["02.tree_broadcast"] += [
    Wrong(
        "the root, remembered by shape",
        wrapped(
            "02.tree_broadcast",
            "tree_broadcast",
            "ROOTS = {}\n\n\ndef tree_broadcast(tensor, root):\n"
            "    solution(tensor, ROOTS.setdefault(tensor.shape, root))\n",
        ),
        says="has rank 2's tensor, but the root is rank 0",
        loses=("any root", "log2 N rounds, rounded up"),
    ),
    Wrong(
        "sends that are never waited for",
        altered("02.tree_broadcast", ("            dist.send(", "            dist.isend(")),
        says="never waited for",
        loses=("N - 1 messages, by send and recv alone",),
    ),
]
WRONG["02.ring_all_reduce"] += [
    Wrong(
        "one outgoing chunk in the first half",
        altered("02.ring_all_reduce", ("chunks[(rank - k) % world], chunks[(rank - k - 1)",
                                       "chunks[rank], chunks[(rank - k - 1)")),
        says="pass on the one that came last",
    ),
    Wrong(
        "addition in the second half, too",
        altered(
            "02.ring_all_reduce",
            (
                "        exchange(chunks[(rank + 1 - k) % world], chunks[(rank - k) % world])",
                "        received = torch.empty_like(chunks[(rank - k) % world])\n"
                "        exchange(chunks[(rank + 1 - k) % world], received)\n"
                "        chunks[(rank - k) % world].add_(received)",
            ),
        ),
        says="adding in the second half, too",
    ),
    Wrong(
        "sends that are never waited for",
        altered(
            "02.ring_all_reduce",
            (
                "        for request in dist.batch_isend_irecv(messages) if messages else []:\n"
                "            request.wait()",
                "        for request, message in zip(\n"
                "            dist.batch_isend_irecv(messages) if messages else [], messages\n"
                "        ):\n"
                "            if message.op is dist.irecv:\n"
                "                request.wait()",
            ),
        ),
        says="never waited for",
        loses=("send and recv between neighbours alone",),
    ),
]  # fmt: skip

# -- 02.node_all_reduce ----------------------------------------------------------------------------

FAR = ("at most half of the tensor from each rank to the other node",)
NEAR = ("at most the tensor from each rank within its node",)
PLACED = ("any two ranks on a node",)
BITS = ("the sum on every rank, the same bits",)

PLACES = """
def node_all_reduce(tensor, nodes):
    rank = dist.get_rank()
    near = [r for r in range(4) if nodes[r] == nodes[rank]]
    far = [r for r in range(4) if nodes[r] != nodes[rank]]
    place = near.index(rank)
    mate, partner = near[1 - place], far[place]

    def swap(peer, outgoing):
        incoming = torch.empty_like(outgoing)
        messages = [dist.P2POp(dist.isend, outgoing, peer), dist.P2POp(dist.irecv, incoming, peer)]
        for request in dist.batch_isend_irecv(messages) if outgoing.numel() else []:
            request.wait()
        return incoming
"""


def node(body):
    return PLACES + "\n" + "\n".join(f"    {line}".rstrip() for line in body.split("\n")) + "\n"


WRONG["02.node_all_reduce"] = [
    Wrong(
        "the lesson's ring, over all four ranks",
        ring().replace("ring_all_reduce(tensor)", "node_all_reduce(tensor, nodes)"),
        says="Only the sum of the node has to cross",
        loses=FAR,
    ),
    Wrong(
        "torch's own all-reduce",
        "def node_all_reduce(tensor, nodes):\n    dist.all_reduce(tensor)",
        says="called all_reduce",
        loses=FAR,
    ),
    Wrong(
        "one rank of each node carries everything",
        node(
            "if place:\n    dist.send(tensor, mate)\n    dist.recv(tensor, mate)\nelse:\n"
            "    theirs = torch.empty_like(tensor)\n    dist.recv(theirs, mate)\n"
            "    tensor += theirs\n    tensor += swap(partner, tensor)\n    dist.send(tensor, mate)"
        ),
        says="on the same node sends none: let each take one half",
        loses=FAR,
    ),
    Wrong(
        "first across, then within",
        node("tensor += swap(partner, tensor)\ntensor += swap(mate, tensor)"),
        says="Only the sum of the node has to cross",
        loses=FAR,
    ),
    Wrong(
        "halves, first across and then within",
        node(
            "if len(tensor) == 1:\n    tensor += swap(partner, tensor)\n"
            "    tensor += swap(mate, tensor)\n    return\n"
            "low = rank < partner\n"
            "padded = torch.nn.functional.pad(tensor, (0, len(tensor) % 2))\n"
            "mine, other = padded.chunk(2)[:: 1 if low else -1]\n"
            "mine += swap(partner, other)\nmine += swap(mate, mine)\n"
            "other.copy_(swap(partner, mine))\ntensor.copy_(padded[: len(tensor)])"
        ),
        says="could stay in the node",
        loses=FAR,
    ),
    Wrong(
        "the second node's sum never comes",
        node("tensor += swap(mate, tensor)"),
        says="is the sum over its own node",
    ),
    Wrong(
        "the mean",
        altered(
            "02.node_all_reduce",
            ("  # my half, of both nodes", "\n    mine /= 4"),
        ),
        says="is the mean",
    ),
    Wrong(
        "the whole tensor within the node, both ways",
        node(
            "tensor += swap(mate, tensor)\n"
            "half = tensor.tensor_split(2)[place].clone()\n"
            "half += swap(partner, half)\n"
            "padded = torch.zeros_like(tensor)\nstart = 0 if place == 0 else -(-len(tensor) // 2)\n"
            "padded[start : start + len(half)] = half\ntensor.copy_(padded)\n"
            "tensor += swap(mate, tensor)"
        ),
        says="bytes to the rank on its node",
        loses=NEAR,
    ),
    Wrong(
        "ranks 0 and 1 are always neighbours",
        "def node_all_reduce(tensor, nodes):\n    nodes = [0, 0, 1, 1]\n"
        + PLACES.split("nodes):\n")[1]
        + "    size = -(-len(tensor) // 2)\n"
        "    padded = torch.nn.functional.pad(tensor, (0, 2 * size - len(tensor)))\n"
        "    mine, other = padded.split(size)[:: -1 if place else 1]\n"
        "    mine += swap(mate, other)\n    mine += swap(partner, mine)\n"
        "    other.copy_(swap(mate, mine))\n    tensor.copy_(padded[: len(tensor)])\n",
        says="With nodes [0, 1, 0, 1], rank 0 sent",
        loses=PLACED,
    ),
    Wrong(
        "the half chosen by the rank's number, not by its place on the node",
        altered(
            "02.node_all_reduce",
            (
                "mine, other = halves[place], halves[1 - place]",
                "mine, other = halves[rank % 2], halves[1 - rank % 2]",
            ),
            ("exchange(far[place], mine, received)", "exchange(far[rank % 2], mine, received)"),
        ),
        says="deadlock: rank",
        loses=PLACED,
    ),
    Wrong(
        "the odd element is in no half",
        altered(
            "02.node_all_reduce",
            (
                "halves = tensor.tensor_split(2)  # views, the first one element longer where the "
                "length is odd",
                "halves = tensor[: len(tensor) // 2 * 2].chunk(2) if len(tensor) > 1 else "
                "[tensor, tensor[:0]]",
            ),
        ),
        says="in one of the halves? Do you wait for each message before you use it?",
        loses=("odd lengths",),
    ),
    Wrong(
        "16 bits between nodes",
        altered(
            "02.node_all_reduce",
            (
                "    exchange(far[place], mine, received)\n    mine += received",
                "    small = torch.empty_like(mine, dtype=torch.bfloat16)\n"
                "    exchange(far[place], mine.bfloat16(), small)\n    mine += small",
            ),
        ),
        says="send the tensor's own dtype",
    ),
    Wrong(
        "the finished halves stay where they are",
        altered(
            "02.node_all_reduce",
            ("    exchange(near[1 - place], mine, other)", "    pass"),
        ),
        says="in one of the halves? Do you wait for each message before you use it?",
    ),
    Wrong(
        "sends that are never waited for",
        altered(
            "02.node_all_reduce",
            (
                "    exchange(near[1 - place], mine, other)",
                "    if mine.numel():\n        dist.isend(mine, near[1 - place])\n"
                "    if other.numel():\n        dist.recv(other, near[1 - place])",
            ),
        ),
        says="never waited for",
        loses=FAR,
    ),
]
RIGHT["02.node_all_reduce"] = [
    (
        "recursive halving, the neighbour first",
        """
def node_all_reduce(tensor, nodes):
    rank = dist.get_rank()
    (mate,) = (r for r in range(4) if r != rank and nodes[r] == nodes[rank])
    first = rank < mate
    partner = [r for r in range(4) if nodes[r] != nodes[rank]][0 if first else 1]

    def swap(peer, outgoing, incoming):
        requests = [dist.irecv(incoming, peer)] if len(incoming) else []
        requests += [dist.isend(outgoing, peer)] if len(outgoing) else []
        for request in requests:
            request.wait()

    def reduce(part, peers):
        if not peers:
            return
        (peer, low), *rest = peers
        cut = (len(part) + 1) // 2
        mine, other = (part[:cut], part[cut:]) if low else (part[cut:], part[:cut])
        received = torch.zeros_like(mine)
        swap(peer, other, received)
        mine.add_(received)
        reduce(mine, rest)
        swap(peer, mine, other)

    reduce(tensor, [(mate, first), (partner, rank < partner)])
""",
    ),
    (
        "padded, with blocking messages in the order of ranks",
        """
def node_all_reduce(tensor, nodes):
    rank = dist.get_rank()
    half = (len(tensor) + 1) // 2
    rows = torch.nn.functional.pad(tensor, (0, 2 * half - len(tensor))).view(2, half)
    groups = {}
    for r, name in enumerate(nodes):
        groups.setdefault(name, []).append(r)
    mine = groups.pop(nodes[rank])
    (theirs,) = groups.values()
    i = mine.index(rank)

    def trade(peer, out):
        got = torch.empty_like(out)
        if rank < peer:
            dist.send(out, peer)
            dist.recv(got, peer)
        else:
            dist.recv(got, peer)
            dist.send(out, peer)
        return got

    total = rows[i] + trade(mine[1 - i], rows[1 - i].clone())
    total = total + trade(theirs[i], total)
    rows[1 - i] = trade(mine[1 - i], total)
    rows[i] = total
    tensor.copy_(rows.view(-1)[: len(tensor)])
""",
    ),
    (
        "partners in crossed order, the second half first",
        altered(
            "02.node_all_reduce",
            ("mine, other = halves[place], halves[1 - place]",
             "mine, other = halves[1 - place], halves[place]"),
        ),
    ),
]  # fmt: skip
PROMISES["02.node_all_reduce"] = {
    "two on each": None,
    "sends at most half of the tensor to the other node": (*FAR, ""),
    "To the rank on its own node it sends at most as many bytes as the tensor has": (*NEAR, ""),
    "You may send an empty half or skip it": ("odd lengths", "odd"),
    "Use only messages": (*FAR, ""),
    "`nodes` says which ranks share a node": (*PLACED, "placed"),
    "All ranks end with the same bits": (*BITS, ""),
    "The length may be odd, or 1": ("odd lengths", "odd"),
    "Replace the tensor on every rank by the sum over the four ranks": (*BITS, ""),
    "the same on every rank": None,
    "two ranks have the same": (*PLACED, "placed"),
    "The same list on every rank": None,
    "the node of each rank": (*PLACED, "placed"),
}
EQUIVALENT["02.node_all_reduce"] = {
    "`rank = dist.get_rank()` -> the first one, kept": "a rank has one number"
}
