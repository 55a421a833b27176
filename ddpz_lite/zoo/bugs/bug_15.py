import time

import torch
import torch.distributed as dist

import ddpz_lite as dz


def train():
    weights, rank = torch.zeros(3), dist.get_rank()
    for step in range(3):
        if rank == 1:
            time.sleep(0.1)  # this rank is a little slower
        with dz.span("backward"):
            overflow = torch.tensor([float(step == 1 and rank == 1)])
        work = dist.all_reduce(overflow, async_op=True)
        skip = overflow.item() > 0
        work.wait()
        if not skip:
            weights += 1
    return {"weights": weights}
