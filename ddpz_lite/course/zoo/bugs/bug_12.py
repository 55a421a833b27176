import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

RIGHT = torch.tensor([1.0, 1, 0, 1, 0])  # is sample i classified as it should be?


def train():
    mine = DistributedSampler(RIGHT, shuffle=False)
    counts = torch.zeros(2)  # right, all
    for index in mine:
        counts += torch.tensor([RIGHT[index], 1])
    dist.all_reduce(counts)
    return {"accuracy": (counts[0] / counts[1]).item()}
