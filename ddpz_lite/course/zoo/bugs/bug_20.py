import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

X = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1))  # two views of 8 images


def gathered(part):
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    parts[dist.get_rank()] = part  # this one has a gradient
    return torch.cat(parts)


def train():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, rank, world = [], dist.get_rank(), dist.get_world_size()
    for _ in range(8):
        a, b = model(X.chunk(world, dim=1)[rank]).unbind()  # (8 / world, 4) each
        targets = rank * len(a) + torch.arange(len(a))
        loss = nn.functional.cross_entropy(a @ gathered(b).t(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": model.module.weight.detach()}
