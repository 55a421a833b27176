"""A rank of test_two_hosts.py, under torchrun: some steps of ZeRO-3, and nothing else."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import ddpz_lite as dz


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(2)))
    if dist.get_rank() == 0:
        print("parameters", sum(p.numel() for p in model.parameters()), flush=True)
    model, optimizer = dz.parallelize(model, torch.optim.SGD, stage=3, lr=1e-3)
    for _ in range(steps):
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main(int(sys.argv[1]))
