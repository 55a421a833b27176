import torch
import torch.distributed as dist
from torch import nn

FILES = torch.randn(20, 4, generator=torch.Generator().manual_seed(1)).split([12, 8])


def validate(model):
    total = model(torch.ones(1, 4)).detach().sum()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train():
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    for x in FILES[dist.get_rank()].split(4):
        model.zero_grad()
        model(x).square().mean().backward()
        dist.all_reduce(model.weight.grad)
        with torch.no_grad():
            model.weight -= 0.1 * model.weight.grad / dist.get_world_size()
    return {"held out": validate(model)}
