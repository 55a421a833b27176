import torch
import torch.distributed as dist


def train():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[dist.get_rank() // 2]
    weights = torch.full((3,), float(dist.get_rank()))
    dist.broadcast(weights, src=0, group=pair)
    return {"weights": weights}
