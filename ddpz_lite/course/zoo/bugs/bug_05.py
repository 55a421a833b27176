import torch
import torch.distributed as dist


def train():
    rank, world = dist.get_rank(), dist.get_world_size()
    weight = torch.zeros(4)
    for step in range(4):
        gradient = torch.ones(4)
        if step == 1:
            gradient[3] = float("inf")  # fp16 has overflowed
        dist.all_reduce(gradient)
        mine = gradient.chunk(world)[rank] / world  # the part that this rank updates
        if not mine.isfinite().all():
            continue
        new = weight.chunk(world)[rank] - 0.1 * mine
        dist.all_gather(list(weight.chunk(world)), new)
    return {"weights": weight}
