"""Right answers to lesson 03 that look different from the solution."""

RIGHT = {
    "03.same_start": [
        (
            "one flat buffer for each dtype",
            """
def same_start(model):
    by_dtype = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    for tensors in by_dtype.values():
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.broadcast(flat, 0)
        offset = 0
        for t in tensors:
            t.copy_(flat[offset : offset + t.numel()].view(t.shape))
            offset += t.numel()
""",
        ),
        (
            "the state_dict, each address once",
            """
def same_start(model):
    sent = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in sent:
            sent.add(tensor.data_ptr())
            dist.broadcast(tensor.data, src=0)
""",
        ),
        (
            "messages from rank to rank",
            """
@torch.no_grad()
def same_start(model):
    rank, world = dist.get_rank(), dist.get_world_size()
    for tensor in list(model.parameters()) + list(model.buffers()):
        if rank > 0:
            dist.recv(tensor, src=rank - 1)
        if rank + 1 < world:
            dist.send(tensor, dst=rank + 1)
""",
        ),
    ],
    "03.average_gradients": [
        (
            "torch's own flattening, divided before it is sent",
            """
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def average_gradients(model):
    ready = [p for p in model.parameters() if p.grad is not None]
    flat = _flatten_dense_tensors([p.grad for p in ready]).div_(dist.get_world_size())
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    for p, mean in zip(ready, _unflatten_dense_tensors(flat, [p.grad for p in ready])):
        p.grad = mean.clone()
""",
        ),
        (
            "a buffer filled by offsets, asynchronous",
            """
def average_gradients(model):
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    buffer = torch.empty(sum(g.numel() for g in grads.values()))
    views, offset = {}, 0
    for name, grad in grads.items():
        views[name] = buffer[offset : offset + grad.numel()].view(grad.shape)
        views[name].copy_(grad)
        offset += grad.numel()
    work = dist.all_reduce(buffer, async_op=True)
    work.wait()
    for name, grad in grads.items():
        grad.copy_(views[name]).div_(dist.get_world_size())
""",
        ),
    ],
    "03.weighted_mean": [
        (
            "the count comes first, float64",
            """
def weighted_mean(gradients, samples):
    flat = torch.cat([g.reshape(-1) for g in gradients]).double()
    message = torch.empty(1 + len(flat), dtype=torch.float64)
    message[0] = samples
    message[1:] = flat * samples
    dist.all_reduce(message)
    total = message[0].item()
    at = 1
    for g in gradients:
        g[...] = (message[at : at + g.numel()] / total).reshape(g.shape).float()
        at += g.numel()
""",
        ),
        (
            "scaled in place, copied back by vector_to_parameters",
            """
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def weighted_mean(gradients, samples):
    count = torch.full((1,), samples, dtype=torch.float32)
    for g in gradients:
        g.mul_(samples)
    vector = torch.cat((parameters_to_vector(gradients), count))
    dist.all_reduce(vector)
    vector_to_parameters(vector[:-1] / vector[-1], gradients)
""",
        ),
    ],
    "03.rank_indices": [
        (
            "Python's own dice, each rank a stretch",
            """
import random


def rank_indices(length, epoch, seed, evaluate):
    rank, world = dist.get_rank(), dist.get_world_size()
    indices = list(range(length))
    random.Random(1000003 * seed + epoch).shuffle(indices)
    if evaluate:
        return indices[rank * length // world : (rank + 1) * length // world]
    each = (length + world - 1) // world
    indices.extend(indices[: each * world - length])
    return indices[rank * each : (rank + 1) * each]
""",
        ),
        (
            "NumPy, evaluation in order",
            """
import math

import numpy as np


def rank_indices(length, epoch, seed, evaluate):
    rank, world = dist.get_rank(), dist.get_world_size()
    if evaluate:
        return list(range(rank, length, world))
    order = np.random.default_rng([seed, epoch]).permutation(length)
    order = np.resize(order, math.ceil(length / world) * world)
    return order[rank::world].tolist()
""",
        ),
        (
            "the global generator, put back afterwards",
            """
def rank_indices(length, epoch, seed, evaluate):
    with torch.random.fork_rng():
        torch.manual_seed(seed * 100 + epoch)
        order = torch.randperm(length)
    if not evaluate:
        missing = -length % dist.get_world_size()
        order = torch.cat([order, order[:missing]])
    return [int(i) for i in order.tensor_split(dist.get_world_size())[dist.get_rank()]]
""",
        ),
    ],
    "03.batch_norm": [
        (
            "an all_gather of counts, means and squared distances",
            """
def batch_norm(x, weight, bias, eps):
    world, channels = dist.get_world_size(), x.shape[1]
    mean = x.mean(0)
    squares = (x - mean).square().sum(0)
    mine = torch.cat([torch.tensor([float(len(x))]), mean, squares])
    all_of_them = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(all_of_them, mine)
    n, m, s = 0.0, torch.zeros(channels), torch.zeros(channels)
    for other in all_of_them:  # Chan, Golub and LeVeque
        count, other_mean, other_squares = other[0].item(), *other[1:].chunk(2)
        delta = other_mean - m
        m = m + delta * (count / (n + count))
        s = s + other_squares + delta**2 * (n * count / (n + count))
        n += count
    return (x - m) * torch.rsqrt(s / n + eps) * weight + bias
""",
        ),
        (
            "three numbers per channel, stacked",
            """
def batch_norm(x, weight, bias, eps):
    x64 = x.to(torch.float64)
    var, mean = torch.var_mean(x64, dim=0, correction=0)
    mine = torch.stack([torch.full_like(mean, len(x)), mean, var])
    every = torch.empty(dist.get_world_size(), *mine.shape, dtype=torch.float64)
    dist.all_gather(list(every.unbind()), mine)
    share = every[:, 0] / every[:, 0].sum(0)
    mean = (share * every[:, 1]).sum(0)
    var = (share * (every[:, 2] + (every[:, 1] - mean) ** 2)).sum(0)
    y = torch.nn.functional.batch_norm(
        x64, mean, var, weight.double(), bias.double(), training=False, eps=eps
    )
    return y.to(x.dtype)
""",
        ),
    ],
    "03.f1": [
        (
            "an all_gather of TP, FP and FN",
            """
def f1(predicted, labels):
    mine = torch.tensor(
        [
            int((predicted & labels).sum()),
            int((predicted & ~labels).sum()),
            int((~predicted & labels).sum()),
        ]
    )
    every = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    tp, fp, fn = (sum(counts[i].item() for counts in every) for i in range(3))
    if tp == 0:
        return 0.0
    precision, recall = tp / (tp + fp), tp / (tp + fn)
    return 2 * precision * recall / (precision + recall)
""",
        ),
        (
            "a float tensor of all four counts",
            """
def f1(predicted, labels):
    table = torch.zeros(2, 2)
    for p, y in zip(predicted.tolist(), labels.tolist()):
        table[int(p), int(y)] += 1
    dist.all_reduce(table)
    wrong = table[0, 1] + table[1, 0]
    return 2 * table[1, 1] / (2 * table[1, 1] + wrong).clamp(min=1)
""",
        ),
    ],
}
