import torch
import torch.distributed as dist


def reduced(part):
    dist.all_reduce(part.contiguous())
    return part


def train():
    x = torch.arange(6.0).view(2, 3)
    weight = torch.ones(4, 3)
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [i for i in range(3) if i % world == rank]  # this rank's part of the inner dimension
    part = (weight[:, rows] @ x[:, rows].t()).t()  # (2, 4)
    return {"x": reduced(part)}
