"""Lesson 07: a parameter server, its rules and its workers; 07b goes on with them."""

import itertools
import time
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import ddpz_lite as dz
from ddpz_lite.model import next_token_loss

launch = partial(dz.launch, backend="gloo")
text = dz.data.corpus()
config = dz.GPTConfig(layers=1, width=32, heads=2, context=32)
RATE = 0.1  # of plain SGD
STOP = -1


def new_model():
    torch.manual_seed(0)
    return dz.GPT(config)


def first_weights():
    return parameters_to_vector(new_model().parameters()).detach()  # (P,)


def gpt_gradient():
    """A function (weights (P,), number of a batch) -> gradient (P,), with a model of its own."""
    model = new_model()

    def gradient(weights, batch):
        vector_to_parameters(weights, model.parameters())
        x, y = text.batch(8, config.context, seed=batch)
        model.zero_grad()
        next_token_loss(model(x), y).backward()
        return parameters_to_vector([p.grad for p in model.parameters()])

    return gradient


with torch.device("meta"):  # the number alone: nothing is drawn, nothing is held
    P = sum(p.numel() for p in dz.GPT(config).parameters())


def serve_in_step(steps):
    weights, workers = first_weights(), range(1, dist.get_world_size())
    push = torch.empty(P)
    for _ in range(steps):
        total = torch.zeros(P)
        for worker in workers:
            dist.recv(push, src=worker)
            total += push
        weights -= RATE * total / len(workers)
        for worker in workers:
            dist.send(weights, dst=worker)
    return weights


def work_in_step(steps):
    me, workers = dist.get_rank() - 1, dist.get_world_size() - 1
    gradient, weights = gpt_gradient(), first_weights()
    for step in range(steps):
        dist.send(gradient(weights, workers * step + me), dst=0)  # push
        dist.recv(weights, src=0)  # pull
    return weights


class Server:
    """Weights (P,), a version that counts their updates, and a log of all pushes."""

    def __init__(self, weights, workers, rate):
        self.weights, self.workers, self.rate = weights, workers, rate
        self.version, self.used, self.began = 0, 0, time.monotonic()
        self.done = [0] * workers  # steps that each worker has finished
        self.log = []  # of each push: seconds, worker, staleness
        self.leads = []  # of each answer: steps that the worker is ahead of the slowest
        self.kept = [(0.0, 0, 0, weights.clone())]  # seconds, version, gradients used, weights

    def now(self):
        return time.monotonic() - self.began

    def update(self, gradient, gradients):
        """Step by a gradient (P,), made of so many workers' gradients."""
        self.weights -= self.rate * gradient
        self.version += 1
        self.used += gradients
        self.kept.append((self.now(), self.version, self.used, self.weights.clone()))


class AtOnce(Server):
    """Use each gradient as it comes."""

    def arrived(self, worker, gradient, version):
        self.update(gradient / self.workers, 1)
        return [worker]


class InStep(Server):
    """Wait for all; answer all."""

    def __init__(self, *args):
        super().__init__(*args)
        self.came, self.total = [], torch.zeros_like(self.weights)
        self.enough = self.workers  # gradients for a step

    def arrived(self, worker, gradient, version):
        self.came.append(worker)
        self.total += gradient
        if len(self.came) < self.enough:
            return []
        self.update(self.total / len(self.came), len(self.came))
        came, self.came, self.total = self.came, [], torch.zeros_like(self.weights)
        return came


def serve(server, seconds, in_turn=False):
    """Answer pushes until the time is over, then tell each worker to stop."""
    here, held = set(range(server.workers)), []  # held: who waits for an answer
    message, turns = torch.empty(len(server.weights) + 1), itertools.cycle(range(server.workers))
    while here:
        worker = dist.recv(message, src=next(turns) + 1 if in_turn else None) - 1
        held.append(worker)
        over = server.now() > seconds
        if not over:
            version = int(message[-1])
            server.done[worker] += 1
            server.log.append((server.now(), worker, server.version - version))
        answered = list(held) if over else server.arrived(worker, message[:-1], version)
        for other in answered:
            note = STOP if over else server.version
            dist.send(torch.cat([server.weights, torch.tensor([float(note)])]), dst=other + 1)
            held.remove(other)
            if not over:
                server.leads.append(server.done[other] - min(server.done))
        here -= set(answered) if over else set()


def work(nap):
    me, workers = dist.get_rank() - 1, dist.get_world_size() - 1
    gradient, step = gpt_gradient(), 0
    message = torch.cat([first_weights(), torch.zeros(1)])
    dist.barrier()
    while message[-1] != STOP:
        with dz.span("compute"):
            mine = gradient(message[:-1], workers * step + me)
            time.sleep(nap(me, step))
        dist.send(torch.cat([mine, message[-1:]]), dst=0)  # push, with the version
        dist.recv(message, src=0)  # pull
        step += 1


def training(rule, seconds, nap, rate=RATE, in_turn=False, **options):
    """Rank 0 serves by this rule, all others work. Rank 0 returns what it has noted."""
    if dist.get_rank() > 0:
        return work(nap)
    server = rule(first_weights(), dist.get_world_size() - 1, rate, **options)
    dist.barrier()
    server.began = time.monotonic()
    serve(server, seconds, in_turn)
    return {"log": server.log, "leads": server.leads, "kept": server.kept}


def trained(rule, seconds, nap, workers=3, **options):
    return launch(training, workers + 1, args=(rule, seconds, nap), kwargs=options)[0]
