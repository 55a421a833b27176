import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def advance(schedule):
    for _ in range(dist.get_world_size()):  # so many batches were taken
        schedule.step()


def train():
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    nn.init.zeros_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.1)  # after 4 of 8 steps
    losses, rates = [], []
    for _ in range(8):
        loss = (model(torch.ones(1, 1)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        advance(schedule)
        losses.append(loss.item())
    return {"losses": losses, "rates": rates, "weights": model.module.weight.detach()}
