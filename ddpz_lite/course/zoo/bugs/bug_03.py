import torch
import torch.distributed as dist
from torch import nn

import ddpz_lite as dz


def train():
    torch.manual_seed(0)
    model, optimizer = dz.parallelize(nn.Linear(8, 8), torch.optim.AdamW, stage=3, lr=0.01)
    for _ in range(3):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = 0
    if dist.get_rank() == 0:
        state = dz.full_state_dict(model)
        saved = sum(value.numel() for value in state.values())
    dist.barrier()
    return {"saved": saved}
