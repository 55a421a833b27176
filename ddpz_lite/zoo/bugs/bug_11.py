import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def train():
    data = torch.arange(8)
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    orders = []
    for epoch in range(3):
        orders.append([])
        for batch in loader:
            orders[epoch] += batch.tolist()
    return {"orders": orders}
