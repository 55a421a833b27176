"""Answers that want the points of a task without its property, and the most that each may get.

They do not break the grader; they look for what its judges do not look at. The parts of a property
that they really have keep their points.
"""

# ruff: noqa: E501 (attacks are written as their authors would write them)
# fmt: off

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cheat:
    name: str
    task: str
    points: int  # the most it may get
    source: str


CHEATS: list[Cheat] = []


def add(name: str, task: str, points: int, source: str) -> None:
    CHEATS.append(Cheat(name, task, points, source))


# -- 03 --------------------------------------------------------------------------------------------

add("everything three times by messages", "03.same_start", 3, '''
def same_start(model):
    for _ in range(3):
        for t in model.state_dict(keep_vars=True).values():
            if dist.get_rank() == 0:
                for r in range(1, dist.get_world_size()): dist.send(t.detach(), r)
            else: dist.recv(t.detach(), 0)
''')

add("no seed, no shuffling: backwards, turned by the epoch", "03.rank_indices", 4, '''
def rank_indices(length, epoch, seed, evaluate):
    rank, world = dist.get_rank(), dist.get_world_size()
    order = list(range(length))[::-1]
    order = order[epoch:] + order[:epoch]
    if not evaluate: order += order[: -length % world]
    return order[rank::world]
''')

add("one order forever, turned by seed and epoch", "03.rank_indices", 4, '''
import random
def rank_indices(length, epoch, seed, evaluate):
    rank, world = dist.get_rank(), dist.get_world_size()
    order = list(range(length)); random.Random(0).shuffle(order)
    k = (seed + epoch) % length
    order = order[k:] + order[:k]
    if not evaluate: order += order[: -length % world]
    return order[rank::world]
''')

add("the library's sampler, from a second copy of its file", "03.rank_indices", 0, '''
import importlib.util, os, ddpz_lite
def rank_indices(length, epoch, seed, evaluate):
    path = os.path.dirname(ddpz_lite.__file__) + "/data/sampler.py"
    spec = importlib.util.spec_from_file_location("copy", path)
    m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)
    s = m.RankSampler(length, seed=seed, uneven="keep" if evaluate else "pad"); s.set_epoch(epoch)
    return list(s)
''')

# -- 02, 09, 10: the library's own packages -----------------------------------------------------------

add("the library's reduce_scatter", "02.reduce_scatter", 0, '''
from ddpz_lite.strategies.comm import Comm
def reduce_scatter(tensor):
    comm = Comm(); comm.size = 1  # a sum, not a mean
    rows = torch.nn.functional.pad(tensor, (0, -len(tensor) % comm.world)).view(comm.world, -1)
    return comm.reduce_scatter(rows, torch.float32).wait().to(tensor.dtype)
''')

add("the library's Flat and Comm", "09.zero1", 0, '''
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.flat import Flat
class ZeRO1:
    def __init__(self, parameters, optimizer_class, **options):
        self.flat = Flat(parameters, Comm())
        self.inner = optimizer_class(self.flat.shards, **options)
    def step(self):
        for i, p in enumerate(self.flat.params): self.flat.collect(i, p.grad)
        self.flat.reduce(); self.flat.wait_for_reduce()
        self.inner.step(); self.inner.zero_grad()
        self.flat.unshard(); self.flat.wait_for_unshard()
''')

add("the library's norm", "10.clip_shards", 0, '''
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.clip import total_norm
def clip_shards(shards, replicated, max_norm):
    norm = total_norm([total_norm(shards, 2, Comm()), *replicated], 2, Comm.alone())
    for t in (*shards, *replicated): t *= (max_norm / norm).clamp(max=1.0)
    return norm
''')

add("a norm that is not a number", "10.clip_shards", 0, '''
def clip_shards(shards, replicated, max_norm):
    square = sum((s.square().sum() for s in shards), torch.zeros(()))
    dist.all_reduce(square)
    square += sum(r.square().sum() for r in replicated)
    for t in (*shards, *replicated): t *= (max_norm / square.sqrt()).clamp(max=1.0)
    return float("nan")
''')

add("junk to oneself while gradients are kept", "10.shard_gradients", 5, '''
def shard_gradients(model):
    world, ps, me = dist.get_world_size(), list(model.parameters()), dist.get_rank()
    shards, held = [None] * len(ps), {}
    def keep(i, p):
        if not held: torch.autograd.Variable._execution_engine.queue_callback(end)
        held[i] = p.grad; p.grad = None
        n = 2 * held[i].numel(); sizes = [n if r == me else 0 for r in range(world)]
        dist.all_to_all_single(torch.empty(n), torch.zeros(n), sizes, sizes)
    def end():
        for i in range(len(ps)):
            g = held[i].flatten()
            s = reduce_scatter(torch.nn.functional.pad(g, (0, -len(g) % world))) / world
            shards[i] = s if shards[i] is None else shards[i] + s
        held.clear()
    for i, p in enumerate(ps): p.register_post_accumulate_grad_hook(lambda p, i=i: keep(i, p))
    return shards
''')

# -- 05 --------------------------------------------------------------------------------------------

add("no gradient leaves before backward is over", "05.hooks", 3, '''
def average_when_ready(model):
    ready = []
    def end():
        for p in ready: dist.all_reduce(p.grad); p.grad /= dist.get_world_size()
        ready.clear()
    def hook(p):
        if not ready: torch.autograd.Variable._execution_engine.queue_callback(end)
        ready.append(p)
    for p in model.parameters():
        if p.requires_grad: p.register_post_accumulate_grad_hook(hook)
''')

add("right calls of nothing in backward, the real ones after it", "05.buckets", 3, '''
import sys
def average_in_buckets(model, limit):
    sizes, real = [], model.parameters
    for p in reversed(list(real())):
        if sizes and sizes[-1] + p.numel() <= limit: sizes[-1] += p.numel()
        else: sizes.append(p.numel())
    def at_end():
        for n in sizes: dist.all_reduce(torch.zeros(n))
    list(real())[-1].register_post_accumulate_grad_hook(
        lambda p: torch.autograd.Variable._execution_engine.queue_callback(at_end))
    def averaged():
        for p in real():
            dist.all_reduce(p.grad); p.grad /= dist.get_world_size()
            yield p
    model.parameters = lambda: averaged() if sys._getframe(1).f_code.co_name == "_gradients" else real()
''')

add("the first three gradients leave with the third", "05.hooks", 3, '''
def average_when_ready(model):
    ps = [p for p in model.parameters() if p.requires_grad]
    ready = []
    def hook(p):
        ready.append(p)
        if len(ready) == len(ps) - 1 or p is ps[0]:
            for q in ready if len(ready) < len(ps) else [p]: dist.all_reduce(q.grad); q.grad /= dist.get_world_size()
        if p is ps[0]: ready.clear()
    for p in ps: p.register_post_accumulate_grad_hook(hook)
''')

add("junk is hidden, the real work is not", "05.overlap", 2, '''
def overlap(model):
    other, junk, ps = 1 - dist.get_rank(), [], list(model.parameters())
    def start(p):
        if not junk: torch.autograd.Variable._execution_engine.queue_callback(end)
        for _ in range(20): junk.extend([dist.isend(torch.zeros(1), other), dist.irecv(torch.zeros(1), other)])
    def end():
        for j in junk: j.wait()
        flat = torch.cat([p.grad.flatten() for p in ps])
        dist.all_reduce(flat); flat /= dist.get_world_size()
        for p, g in zip(ps, flat.split([p.numel() for p in ps])): p.grad.copy_(g.view_as(p))
    for p in ps: p.register_post_accumulate_grad_hook(start)
''')

add("crumbs are hidden, the real work is not", "05.overlap", 2, '''
def overlap(model):
    junk, ps = [], list(model.parameters())
    def start(p):
        if p is ps[-1]:
            torch.autograd.Variable._execution_engine.queue_callback(end)
            for i in range(16): junk.append(dist.all_reduce(p.grad.view(-1)[i:i+1], async_op=True))
    def end():
        for j in junk: j.wait()
        ps[-1].grad /= dist.get_world_size()
        flat = torch.cat([p.grad.flatten() for p in ps[:-1]])
        dist.all_reduce(flat); flat /= dist.get_world_size()
        for p, g in zip(ps, flat.split([p.numel() for p in ps[:-1]])): p.grad.copy_(g.view_as(p))
    for p in ps: p.register_post_accumulate_grad_hook(start)
''')

add("waiting that calls itself computing", "05.overlap", 2, '''
def overlap(model):
    import ddpz_lite as dz
    def now(p):
        with dz.span("compute"):
            dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    for p in model.parameters(): p.register_post_accumulate_grad_hook(now)
''')

add("the job's sleep sends and waits", "05.overlap", 2, '''
import time
nap, left = time.sleep, []
def sleep(seconds):
    while left:
        p = left.pop()
        dist.all_reduce(p.grad); p.grad /= dist.get_world_size()
    nap(seconds)
time.sleep = sleep
def overlap(model):
    ps = list(model.parameters())
    def ready(p):
        left.append(p)
        if p is ps[0]: sleep(0)
    for p in ps: p.register_post_accumulate_grad_hook(ready)
''')

# -- 09, 11 ----------------------------------------------------------------------------------------

add("plain AdamW behind an all-reduce, and a decoy that gets the real gradients", "09.zero1", 6, '''
class ZeRO1:
    def __init__(self, parameters, optimizer_class, **options):
        self.parameters, world = parameters, dist.get_world_size()
        self.plain = optimizer_class.__mro__[1](parameters, **options)
        self.pad = -sum(p.numel() for p in parameters) % world
        own = self.flat(p.detach() for p in parameters).chunk(world)[dist.get_rank()]
        self.shard = torch.nn.Parameter(own.clone())
        self.decoy = optimizer_class([self.shard], **options)
    def flat(self, ts): return torch.nn.functional.pad(torch.cat([t.flatten() for t in ts]), (0, self.pad))
    def step(self):
        flat = self.flat(p.grad for p in self.parameters)
        dist.all_reduce(flat); flat /= dist.get_world_size()
        for p, g in zip(self.parameters, flat.split([p.numel() for p in self.parameters] + [self.pad])): p.grad.copy_(g.view_as(p))
        self.shard.grad = flat.chunk(dist.get_world_size())[dist.get_rank()]
        self.plain.step(); self.decoy.step()
''')

add("gathers of one element, a full copy forever", "11.unit", 0, '''
class Unit:
    def __init__(self, parameters):
        self.parameters, world = parameters, dist.get_world_size()
        flat = torch.cat([p.detach().flatten() for p in parameters])
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % world))
        self.all = [p.detach().clone().numpy() for p in parameters]
        self.shard = flat.chunk(world)[dist.get_rank()].clone()
        self.first = float(self.shard[0])
        self.free()
    def gather(self):
        dist.all_gather([torch.zeros(1) for _ in range(dist.get_world_size())], torch.zeros(1))
        for p, a in zip(self.parameters, self.all):
            p.untyped_storage().resize_(p.numel() * 4)
            p.data.copy_(torch.from_numpy(a) + round(float(self.shard[0]) - self.first))
    def free(self):
        for p in self.parameters: p.untyped_storage().resize_(0)
''')

add("a replica; calls that have the right names alone", "11.zero3", 0, '''
def shard_blocks(model):
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = []
    def one(block):
        ps = list(block.parameters())
        flat = torch.cat([p.detach().flatten() for p in ps])
        n = len(flat)
        whole = [torch.nn.functional.pad(flat, (0, -n % world)).numpy().copy(), None]
        shard = torch.from_numpy(whole[0].copy()).chunk(world)[rank].clone()
        waiting = set()
        def free():
            for p in ps: p.untyped_storage().resize_(0)
        def fill():
            if whole[1] is not None: whole[0] -= 0.5 * whole[1]; whole[1] = None
            at = 0
            for p in ps:
                p.untyped_storage().resize_(p.numel() * 4)
                p.data.copy_(torch.from_numpy(whole[0][at:at + p.numel()]).view_as(p)); at += p.numel()
            dist.all_gather([torch.zeros(1) for _ in range(world)], torch.zeros(1))
        def before(g): waiting.update(ps); fill()
        def after(b, i, o):
            free()
            if o.requires_grad: o.register_hook(before)
        def ready(p):
            waiting.discard(p)
            if waiting: return
            g = torch.nn.functional.pad(torch.cat([p.grad.flatten() for p in ps]), (0, -n % world))
            got = torch.empty(world * len(g))
            dist.all_to_all_single(got, g.repeat(world))
            mean = got.view(world, -1).sum(0) / world
            whole[1] = mean.numpy().copy()
            shard.grad = mean.chunk(world)[rank].clone()
            for p in ps: p.grad = None
            free()
        block.register_forward_pre_hook(lambda *_: fill())
        block.register_forward_hook(after)
        for p in ps: p.register_post_accumulate_grad_hook(ready)
        free(); shards.append(shard)
    for b in model: one(b)
    return shards
''')

add("what forward gathered is kept; gathers of one element in backward", "11.zero3", 6, '''
def shard_blocks(model):
    return [shard_block(b) for b in model]
def shard_block(block):
    world, rank = dist.get_world_size(), dist.get_rank()
    ps, kept, waiting = list(block.parameters()), [], set()
    flat = torch.cat([p.detach().flatten() for p in ps])
    shard = torch.nn.functional.pad(flat, (0, -len(flat) % world)).chunk(world)[rank].clone()
    def free():
        for p in ps: p.untyped_storage().resize_(0)
    def fill():
        whole = torch.from_numpy(kept[0])
        for p, w in zip(ps, whole.split([p.numel() for p in ps] + [len(whole) - len(flat)])):
            p.untyped_storage().resize_(p.numel() * 4); p.data.copy_(w.view_as(p))
    def forward(*_):
        kept[:] = [all_gather(shard).numpy().copy()]; fill()
    def backward(_):
        dist.all_gather([torch.zeros(1) for _ in range(world)], torch.zeros(1))
        waiting.update(ps); fill()
    def after(b, i, o):
        free()
        if o.requires_grad: o.register_hook(backward)
    def ready(p):
        waiting.discard(p)
        if waiting: return
        g = torch.cat([p.grad.flatten() for p in ps])
        shard.grad = reduce_scatter(torch.nn.functional.pad(g, (0, -len(g) % world))) / world
        for p in ps: p.grad = None
        free()
    block.register_forward_pre_hook(forward); block.register_forward_hook(after)
    for p in ps: p.register_post_accumulate_grad_hook(ready)
    free()
    return shard
''')

add("junk is hidden, nothing is prefetched", "11.prefetch", 2, '''
def prefetching_forward(units, x):
    other = 1 - dist.get_rank()
    for unit in units:
        unit.gather().wait()
        junk = []
        for tag in range(6): junk += [dist.isend(torch.zeros(1), other, tag=tag), dist.irecv(torch.zeros(1), other, tag=tag)]
        x = unit.compute(x)
        for j in junk: j.wait()
        unit.free()
    return x
''')
