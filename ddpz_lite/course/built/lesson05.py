"""Lesson 05: DDP from hooks, buckets and asynchronous all-reduces; 05b goes on with it."""

from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

import ddpz_lite as dz


def groups_of(sizes, most):
    """Cut a list of sizes into runs of at most `most` bytes: lists of positions."""
    groups, held = [[]], 0
    for position, size in enumerate(sizes):
        if groups[-1] and held + size > most:
            groups.append([])
            held = 0
        groups[-1].append(position)
        held += size
    return groups


class Bucket:
    """Gradients of `params`, end to end in one flat tensor, and the all-reduce for them."""

    def __init__(self, params):
        self.params, counts = params, [p.numel() for p in params]
        self.flat = torch.zeros(sum(counts), device=params[0].device)  # (elements of params,)
        parts = zip(self.flat.split(counts), params, strict=True)
        self.views = [part.view_as(p) for part, p in parts]
        self.arrived = set()

    @property
    def full(self):
        return len(self.arrived) == len(self.params)

    def collect(self, i):
        """Move gradient i in, divided by the number of ranks; from now on .grad is the view."""
        p, view = self.params[i], self.views[i]
        if p.grad is not view:
            view.copy_(p.grad)
            p.grad = view
        view /= dist.get_world_size()
        self.arrived.add(i)

    def reduce(self):
        self.work = dist.all_reduce(self.flat, async_op=True)

    def wait(self):
        self.work.wait()
        self.arrived.clear()


class MyDDP(nn.Module):
    """Average the gradients of all ranks while backward runs; final when it returns."""

    def __init__(self, module, bucket_mb=0.5, bucket_class=Bucket):
        super().__init__()
        self.module, self.sync = module, True
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        params = [p for p in module.parameters() if p.requires_grad][::-1]
        groups = groups_of([4 * p.numel() for p in params], most=bucket_mb * 1e6)
        self.buckets = [bucket_class([params[i] for i in group]) for group in groups]
        for b, bucket in enumerate(self.buckets):
            for i, p in enumerate(bucket.params):
                p.register_post_accumulate_grad_hook(partial(self.ready, b, i))
        self.running, self.next = False, 0

    def forward(self, *inputs):
        for buffer in self.module.buffers() if self.training else ():
            dist.broadcast(buffer, src=0)
        return self.module(*inputs)

    def ready(self, b, i, p):
        if not self.sync:
            return
        if not self.running:  # the first gradient of this backward
            self.running = True
            Variable._execution_engine.queue_callback(self.end)
        self.buckets[b].collect(i)
        while self.next < len(self.buckets) and self.buckets[self.next].full:
            self.buckets[self.next].reduce()  # in index order
            self.next += 1

    def end(self):
        for bucket in self.buckets[self.next :]:
            self.fill(bucket)
            bucket.reduce()
        with dz.span("wait"):
            for bucket in self.buckets:
                bucket.wait()
        self.running, self.next = False, 0

    def fill(self, bucket):
        for i, p in enumerate(bucket.params):
            if i not in bucket.arrived:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                bucket.collect(i)

    @contextmanager
    def no_sync(self):
        self.sync = False
        try:
            yield
        finally:
            self.sync = True
