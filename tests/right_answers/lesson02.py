"""Right answers to lesson 02 that look different from the solution."""

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
    inbox = torch.empty(size)
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
