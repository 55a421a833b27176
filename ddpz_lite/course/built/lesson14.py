"""Lesson 14: a stage of a GPT, and what a rank does with it; 14b goes on with them."""

import torch
import torch.distributed as dist
from torch import nn

from ddpz_lite.model import next_token_loss

WIDTH, CONTEXT = 64, 32


class Stage(nn.Module):
    """The blocks that belong to a stage, with the names that they have in the GPT."""

    def __init__(self, gpt, stage, stages):
        super().__init__()
        self.first, self.last = stage == 0, stage == stages - 1
        begin, end = (len(gpt.blocks) * s // stages for s in (stage, stage + 1))
        self.blocks = nn.ModuleDict({str(i): gpt.blocks[i] for i in range(begin, end)})
        if self.first:
            self.tokens, self.positions = gpt.tokens, gpt.positions
        if self.last:
            self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x):
        if self.first:  # x: (b, T) tokens; on all others (b, T, C)
            x = self.tokens(x) + self.positions(torch.arange(x.size(1), device=x.device))
        for block in self.blocks.values():
            x = block(x)  # (b, T, C)
        return self.head(self.norm(x)) if self.last else x


class Pipe:
    """This rank's stage, and what it does with a micro-batch."""

    def __init__(self, stage):
        self.stage = stage
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1

    def forward(self, i):
        x = self.inputs[i] if self.rank == 0 else self.receive(self.rank - 1).requires_grad_()
        y = self.stage(x)
        if self.rank == self.last:
            y = self.scaled(next_token_loss(y, self.targets[i]))
            self.loss += y.item()
        else:
            self.send(y.detach(), self.rank + 1)
        self.kept[i] = x, y
        self.most = max(self.most, len(self.kept))

    def backward(self, i):
        x, y = self.kept.pop(i)
        y.backward(None if self.rank == self.last else self.receive(self.rank + 1))
        if self.rank > 0:
            self.send(x.grad, self.rank - 1)

    def scaled(self, loss):
        return loss / len(self.inputs)  # a mean of means, all of the same size

    def send(self, tensor, to):
        self.sending.append(dist.isend(tensor, dst=to))

    def receive(self, source):
        device = self.inputs[0].device
        activation = torch.empty(len(self.inputs[0]), CONTEXT, WIDTH, device=device)  # (b, T, C)
        dist.recv(activation, src=source)
        return activation

    def step(self, actions, x, y):
        """Work off the actions: ("F", 0) is the forward of micro-batch 0, ("B", 0) its backward."""
        micros = 1 + max(i for _, i in actions)
        self.inputs, self.targets = x.chunk(micros), y.chunk(micros)
        self.kept, self.sending, self.most, self.loss = {}, [], 0, 0.0
        for kind, i in actions:
            if kind == "F":
                self.forward(i)
            else:
                self.backward(i)
        for message in self.sending:
            message.wait()
