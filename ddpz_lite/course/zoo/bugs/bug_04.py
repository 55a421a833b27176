import torch
import torch.distributed as dist
from torch import nn

import ddpz_lite as dz


class Chat(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, rounds):
        x = self.body(x)
        for _ in range(rounds):
            x = self.head(x)
        return x


def train():
    torch.manual_seed(0)
    model = dz.ZeRO3(Chat(), units=[nn.Linear])
    rounds = 1 + dist.get_rank()  # this rank's conversation has so many
    loss = model(torch.ones(2, 8), rounds).square().mean()
    loss.backward()
    return {"loss": loss.item()}
