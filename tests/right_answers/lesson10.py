"""Right answers to lesson 10 that look different from the solution."""

RIGHT = {
    "10.shard_gradients": [
        (
            "sent while backward goes on, added up at its end",
            """
def shard_gradients(model):
    world = dist.get_world_size()
    parameters = list(model.parameters())
    shards = [None for _ in parameters]
    under_way = []

    def finish():
        for index, parts, work in under_way:
            work.wait()
            mean = parts.view(world, -1).mean(0)
            if shards[index] is None:
                shards[index] = mean
            else:
                shards[index] += mean
        under_way.clear()

    def send(parameter):
        index = next(i for i, p in enumerate(parameters) if p is parameter)
        flat = torch.zeros(-(-parameter.numel() // world) * world)
        flat[: parameter.numel()] = parameter.grad.view(-1)
        parameter.grad = None
        parts = torch.empty_like(flat)
        if not under_way:
            torch.autograd.Variable._execution_engine.queue_callback(finish)
        work = dist.all_to_all_single(parts, flat, async_op=True)
        under_way.append((index, parts, work))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(send)
    return shards
""",
        ),
        (
            "a tensor hook reduces, a second hook frees",
            """
def shard_gradients(model):
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = []

    def free(parameter):
        parameter.grad = None

    for index, parameter in enumerate(model.parameters()):
        shards.append(None)

        def keep(gradient, index=index):
            size = (gradient.numel() + world - 1) // world
            padding = gradient.new_zeros(size * world - gradient.numel())
            parts = torch.cat([gradient.flatten(), padding]).split(size)
            mine, inbox = parts[rank].clone(), torch.empty(size)
            for distance in range(1, world):
                request = dist.isend(parts[(rank + distance) % world], (rank + distance) % world)
                dist.recv(inbox, (rank - distance) % world)
                request.wait()
                mine += inbox
            before = 0 if shards[index] is None else shards[index]
            shards[index] = before + mine / world

        parameter.register_hook(keep)
        parameter.register_post_accumulate_grad_hook(free)
    return shards
""",
        ),
    ],
    "10.clip_shards": [
        (
            "replicated ones shared out before the sum, clipped as torch does",
            """
def clip_shards(shards, replicated, max_norm):
    total = 0.0
    for s in shards:
        total += torch.linalg.vector_norm(s).item() ** 2
    for r in replicated:
        total += torch.linalg.vector_norm(r).item() ** 2 / dist.get_world_size()
    total = torch.tensor([total])
    dist.all_reduce(total)
    norm = total.item() ** 0.5
    if norm > max_norm:
        torch._foreach_mul_(shards + replicated, max_norm / (norm + 1e-6))
    return norm
""",
        ),
        (
            "an all_gather, and the replicated ones on rank 0 alone",
            """
def clip_shards(shards, replicated, max_norm):
    counted = shards + (replicated if dist.get_rank() == 0 else [])
    mine = torch.cat([t.flatten() for t in counted]).norm()
    norms = torch.empty(dist.get_world_size())
    dist.all_gather_into_tensor(norms, mine.reshape(1))
    norm = torch.linalg.vector_norm(norms)
    scale = torch.minimum(torch.ones(()), max_norm / norm)
    for tensor in shards + replicated:
        tensor.mul_(scale)
    return norm
""",
        ),
    ],
}
