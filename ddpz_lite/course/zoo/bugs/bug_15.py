import time

import torch
import torch.distributed as dist

import ddpz_lite as dz


def train():
    weights, last = torch.zeros(3), dist.get_rank() == dist.get_world_size() - 1
    for step in range(3):
        if last:
            time.sleep(0.3)  # this rank is a little slower
        with dz.span("backward"):
            overflow = torch.tensor([float(step == 1 and last)])
        work = dist.all_reduce(overflow, async_op=True)
        skip = overflow.item() > 0
        work.wait()
        if not skip:
            weights += 1
    return {"weights": weights}
