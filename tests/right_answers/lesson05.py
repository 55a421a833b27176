"""Right answers to lesson 05 that look different from the solution."""

RIGHT = {
    "05.hooks": [
        (
            "tensor hooks that return the mean",
            """
def average_when_ready(model):
    world = dist.get_world_size()

    def mean(gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total / world

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(mean)
""",
        ),
        (
            "asynchronous, finished with the last gradient",
            """
def average_when_ready(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    works = []

    def hook(p):
        p.grad.div_(dist.get_world_size())
        works.append(dist.all_reduce(p.grad, async_op=True))
        if len(works) == len(trained):
            while works:
                works.pop().wait()

    for p in trained:
        p.register_post_accumulate_grad_hook(hook)
""",
        ),
    ],
    "05.buckets": [
        (
            "counters, and gradients that are views of their bucket",
            """
class Bucket:
    def __init__(self, parameters):
        self.parameters = parameters
        self.flat = torch.zeros(sum(p.numel() for p in parameters))
        self.views, offset = {}, 0
        for p in parameters:
            self.views[p] = self.flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        self.missing = len(parameters)


def average_in_buckets(model, limit):
    groups, size = [], limit + 1
    for p in reversed(list(model.parameters())):
        if size + p.numel() > limit:
            groups.append([])
            size = 0
        groups[-1].append(p)
        size += p.numel()
    buckets = [Bucket(group) for group in groups]
    of = {p: bucket for bucket in buckets for p in bucket.parameters}
    state = {"next": 0}

    def hook(p):
        bucket = of[p]
        bucket.views[p].copy_(p.grad)
        p.grad = bucket.views[p]
        bucket.missing -= 1
        while state["next"] < len(buckets) and buckets[state["next"]].missing == 0:
            ready = buckets[state["next"]]
            ready.flat.div_(dist.get_world_size())
            dist.all_reduce(ready.flat)
            state["next"] += 1
        if state["next"] == len(buckets):
            state["next"] = 0
            for bucket in buckets:
                bucket.missing = len(bucket.parameters)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
""",
        ),
        (
            "asynchronous, copied back in a final callback",
            """
def average_in_buckets(model, limit):
    buckets, bucket = [], []
    for p in list(model.parameters())[::-1]:
        if bucket and sum(q.numel() for q in bucket) + p.numel() > limit:
            buckets.append(bucket)
            bucket = []
        bucket.append(p)
    buckets.append(bucket)
    done, sent = set(), []

    def finish():
        for bucket, flat, work in sent:
            work.wait()
            flat = flat / dist.get_world_size()
            for p in bucket:
                mean, flat = flat[: p.numel()], flat[p.numel() :]
                p.grad = mean.reshape(p.shape).clone()
        done.clear()
        sent.clear()

    def hook(p):
        if not done:
            torch.autograd.Variable._execution_engine.queue_callback(finish)
        done.add(id(p))
        while len(sent) < len(buckets) and all(id(q) in done for q in buckets[len(sent)]):
            bucket = buckets[len(sent)]
            flat = torch.cat([q.grad.reshape(-1) for q in bucket])
            sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
""",
        ),
    ],
    "05.overlap": [
        (
            "the hook of the last gradient waits for all",
            """
def overlap(model):
    count = sum(1 for _ in model.parameters())
    works = {}

    def hook(p):
        works[p] = dist.all_reduce(p.grad, async_op=True)
        if len(works) == count:
            for q, work in works.items():
                work.wait()
                q.grad.div_(dist.get_world_size())
            works.clear()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
""",
        ),
        (
            "futures that divide by themselves",
            """
def overlap(model):
    world = dist.get_world_size()
    futures = []

    def finish():
        torch.futures.wait_all(futures)
        futures.clear()

    def hook(p):
        def divide(future):
            future.value()
            p.grad.div_(world)

        if not futures:
            torch.autograd.Variable._execution_engine.queue_callback(finish)
        futures.append(dist.all_reduce(p.grad, async_op=True).get_future().then(divide))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
""",
        ),
        (
            "messages to the other rank",
            """
def overlap(model):
    other, under_way = 1 - dist.get_rank(), []

    def finish():
        for p, inbox, works in under_way:
            for work in works:
                work.wait()
            p.grad.add_(inbox).div_(2)
        under_way.clear()

    def hook(p):
        if not under_way:
            torch.autograd.Variable._execution_engine.queue_callback(finish)
        inbox = torch.empty_like(p.grad)
        works = [dist.isend(p.grad, other), dist.irecv(inbox, other)]
        under_way.append((p, inbox, works))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
""",
        ),
        (
            "gathered two by two",
            """
def overlap(model):
    world, parameters = dist.get_world_size(), list(model.parameters())
    waiting, under_way = [], []

    def send():
        flat = torch.cat([p.grad.flatten() for p in waiting])
        every = [torch.empty_like(flat) for _ in range(world)]
        under_way.append((list(waiting), every, dist.all_gather(every, flat, async_op=True)))
        waiting.clear()

    def finish():
        for ps, every, work in under_way:
            work.wait()
            mean = torch.stack(every).mean(0)
            for p, part in zip(ps, mean.split([p.numel() for p in ps])):
                p.grad = part.view_as(p)
        under_way.clear()

    def hook(p):
        waiting.append(p)
        if len(waiting) == 2 or p is parameters[0]:
            send()
        if p is parameters[0]:
            finish()

    for p in parameters:
        p.register_post_accumulate_grad_hook(hook)
""",
        ),
        (
            "one under way at a time, waited for by the next hook",
            """
def overlap(model):
    first = next(model.parameters())
    under_way = []

    def settle():
        for work in under_way:
            work.wait()
        under_way.clear()

    def hook(p):
        settle()
        p.grad /= dist.get_world_size()
        under_way.append(dist.all_reduce(p.grad, async_op=True))
        if p is first:  # backward ends with the first layer
            settle()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
""",
        ),
    ],
    "05.no_sync": [
        (
            "a class, and a count so that contexts may nest",
            """
def with_no_sync(model):
    depth = [0]

    class NoSync:
        def __enter__(self):
            depth[0] += 1

        def __exit__(self, *error):
            depth[0] -= 1

    def hook(p):
        if depth[0] == 0:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return NoSync
""",
        ),
        (
            "decided in forward, as DDP does, and sent as one",
            """
def with_no_sync(model):
    switch = {"on": True, "this backward": True, "queued": False}
    parameters = list(model.parameters())

    def decide(module, inputs):
        switch["this backward"] = switch["on"]

    def send_all():
        switch["queued"] = False
        flat = torch.cat([p.grad.flatten() for p in parameters])
        dist.all_reduce(flat)
        means = (flat / dist.get_world_size()).split([p.numel() for p in parameters])
        for p, mean in zip(parameters, means):
            p.grad = mean.view_as(p)

    def hook(p):
        if switch["this backward"] and not switch["queued"]:
            switch["queued"] = True
            torch.autograd.Variable._execution_engine.queue_callback(send_all)

    model.register_forward_pre_hook(decide)
    for p in parameters:
        p.register_post_accumulate_grad_hook(hook)

    @contextlib.contextmanager
    def no_sync():
        before, switch["on"] = switch["on"], False
        try:
            yield
        finally:
            switch["on"] = before

    return no_sync
""",
        ),
        (
            "hooks taken off and put on again",
            """
def with_no_sync(model):
    handles = []

    def hook(p):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

    def attach():
        for p in model.parameters():
            handles.append(p.register_post_accumulate_grad_hook(hook))

    @contextlib.contextmanager
    def no_sync():
        while handles:
            handles.pop().remove()
        try:
            yield
        finally:
            attach()

    attach()
    return no_sync
""",
        ),
    ],
}
