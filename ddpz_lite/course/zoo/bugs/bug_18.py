import torch
import torch.distributed as dist
from torch import nn

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def train():
    torch.manual_seed(0)
    world, rank, model = dist.get_world_size(), dist.get_rank(), nn.Linear(16, 16, bias=False)
    weight = model.weight.data
    shard = nn.Parameter(weight.chunk(world)[rank].clone())  # the rows that this rank owns
    optimizer = torch.optim.SGD([shard], lr=0.3)
    losses, norms = [], []
    for _ in range(8):
        x = X.chunk(world)[rank]
        loss = (model(x) - 3 * x).square().sum(1).mean()
        gradient = torch.autograd.grad(loss, model.weight)[0]
        dist.all_reduce(gradient)
        shard.grad = gradient.chunk(world)[rank] / world
        norms.append(nn.utils.clip_grad_norm_([shard], 1.0).item())
        optimizer.step()
        dist.all_gather(list(weight.chunk(world)), shard.detach())
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": weight}
