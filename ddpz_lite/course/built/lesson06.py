"""Lesson 06: a loop that trains with any way to take the mean of gradients; 06b goes on with it."""

import torch
import torch.distributed as dist

import ddpz_lite as dz
from ddpz_lite.model import next_token_loss

RANKS, STEPS = 4, 96
world = dist.get_world_size
text = dz.data.corpus()
config = dz.GPTConfig(context=32, layers=2, width=64)


def new_model():
    torch.manual_seed(0)
    return dz.GPT(config).to(dz.device())


with torch.device("meta"):  # shapes alone: nothing is drawn, nothing is held
    SHAPES = [p.shape for p in dz.GPT(config).parameters()]
P = sum(shape.numel() for shape in SHAPES)


def batch(step, rank, windows=4, split="train"):
    seed = RANKS * step + rank
    return text.batch(windows, config.context, split=split, seed=seed, device=dz.device())


def flatten(tensors):
    return torch.cat([t.flatten() for t in tensors])


def views(flat):
    """The flat tensor, cut into the shapes of the parameters again."""
    parts = flat.split([shape.numel() for shape in SHAPES])
    return [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def backward(model, step):
    """Backward of this rank's batch of a step."""
    x, y = batch(step, dist.get_rank())
    next_token_loss(model(x), y).backward()


def put(mean, model):
    """Let the parameters' gradients be parts of the mean."""
    for p, part in zip(model.parameters(), views(mean), strict=True):
        p.grad = part


def float32():
    def mean_of(gradient):  # (P,)
        dist.all_reduce(gradient)
        return gradient / world()

    return mean_of


def gather(mine):
    pieces = [torch.empty_like(mine) for _ in range(world())]
    dist.all_gather(pieces, mine)
    return torch.stack(pieces)  # (N, *)


class TopK:
    def __init__(self, share=0.01, feedback=True):
        self.k, self.feedback = round(share * P), feedback
        self.residual = torch.zeros(P, device=dz.device())

    def __call__(self, gradient):
        total = gradient + self.residual
        places = total.abs().topk(self.k).indices  # (k,)
        if self.feedback:
            self.residual = total.index_fill(0, places, 0)  # what is not sent
        mean = torch.zeros_like(total)
        for where, values in zip(gather(places.int()), gather(total[places]), strict=True):
            mean.index_add_(0, where, values)
        return mean / world()


def average_weights(model):
    flat = flatten(p.detach() for p in model.parameters())
    dist.all_reduce(flat)
    with torch.no_grad():
        for p, part in zip(model.parameters(), views(flat / world()), strict=True):
            p.copy_(part)


def held_out(model):
    x, y = batch(0, 0, windows=32, split="validation")
    with torch.no_grad():
        return next_token_loss(model(x), y).item()


def train(make=None, every=None):
    """Losses of rank 0. make: what makes the method. every: average weights after so many steps."""
    torch.set_num_threads(1)
    model, losses = new_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mean_of = make() if make else None
    for step in range(STEPS + 1):
        if step % 16 == 0 and dist.get_rank() == 0:
            losses.append(held_out(model))
        if step == STEPS:
            return losses
        optimizer.zero_grad()
        backward(model, step)
        if mean_of is not None:
            put(mean_of(flatten(p.grad for p in model.parameters())), model)
        optimizer.step()
        if every and (step + 1) % every == 0:
            average_weights(model)


def weights_after(steps, hook=None, make=None):
    torch.set_num_threads(1)
    model = new_model()
    wrapped = dz.DDP(model, comm_hook=hook) if make is None else model
    mean_of = make() if make else None
    for step in range(steps):
        model.zero_grad()
        backward(wrapped, step)
        if mean_of is not None:
            put(mean_of(flatten(p.grad for p in model.parameters())), model)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    kept = dz.memory(wrapped)["transient"] if make is None else 0
    return flatten(p.detach() for p in model.parameters()), kept
