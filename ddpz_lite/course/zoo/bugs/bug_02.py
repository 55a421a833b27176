import torch
import torch.distributed as dist
from torch import nn

import ddpz_lite as dz


def train():
    wanted = (1.0, 0.5)[dist.get_rank()]  # in this rank's part of the validation set
    model = dz.DDP(nn.Linear(1, 1, bias=False))
    nn.init.zeros_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one, best = torch.ones(1, 1), float("inf")
    steps = 0
    for _ in range(30):
        optimizer.zero_grad()
        (model(one) - 1.0).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            held_out = (model.module(one) - wanted).square().mean()
        if held_out > best:
            break
        best = held_out
        steps += 1
    return {"steps": steps}
