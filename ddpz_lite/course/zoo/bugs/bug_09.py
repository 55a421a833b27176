import torch
import torch.distributed as dist


def train():
    rank = dist.get_rank()
    mine = [0, 1] if rank < 2 else [2, 3]
    pair = dist.new_group(mine)
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=pair)
    return {"sum": x.item()}
