"""Wrong answers to lesson 05 that people give, and the sentence that each must hear."""

from answers import Wrong

MEAN = ("after backward() every gradient is the mean",)
ODD = ("tied and frozen parameters",)
READY = ("each gradient is sent once, when it is ready",)
RIGHT_BUCKETS = ("the right buckets, from the last layer to the first",)
HIDDEN = ("at least half of the communication is hidden",)
COLLECTED = ("the mean of the accumulated gradients",)
SILENT = ("nothing is sent under no_sync",)
FAILS = ("an exception leaves the switch as it was",)

HOOKS = """
def average_when_ready(model):
    def average(parameter):
        {body}

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)
"""


def hooks(body):
    return HOOKS.format(body=body.replace("\n", "\n        "))


BUCKETS = """
def average_in_buckets(model, limit):
    buckets = [[]]
    for parameter in {order}:
        held = sum(p.numel() for p in buckets[-1])
        if held and held + parameter.numel() > {limit}:
            buckets.append([])
        buckets[-1].append(parameter)
    waiting = [set(bucket) for bucket in buckets]
    home = {{p: index for index, bucket in enumerate(buckets) for p in bucket}}

    def send(bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket])
        dist.all_reduce(flat)
        {divide}
        for p, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad.copy_(mean.view_as(p))

    def ready(parameter):
        waiting[home[parameter]].discard(parameter)
        while ready.next < {last} and not waiting[ready.next]:
            send(buckets[ready.next])
            ready.next += 1
        if ready.next == {last}:
            {again}

    ready.next = 0
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ready)
"""
SOLVED = {
    "order": "reversed(list(model.parameters()))",
    "limit": "limit",
    "divide": "flat /= dist.get_world_size()",
    "last": "len(buckets)",
    "again": "ready.next, waiting[:] = 0, [set(bucket) for bucket in buckets]",
}


def buckets(**wrong):
    return BUCKETS.format(**(SOLVED | wrong))


OVERLAP = """
def overlap(model):
    world, pending = dist.get_world_size(), []

    def finish():
        for parameter, work in pending:
            work.wait()
            parameter.grad /= world
        pending.clear()

    def send(parameter):
        {send}

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(send)
"""


def overlap(send):
    return OVERLAP.format(send=send.replace("\n", "\n        "))


NO_SYNC = """
def with_no_sync(model):
    silent = []

    {hook}

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)

    @contextlib.contextmanager
    def no_sync():
        {context}

    return no_sync
"""
RIGHT_HOOK = """def average(parameter):
        if not silent:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()"""
RIGHT_CONTEXT = """silent.append(True)
        try:
            yield
        finally:
            silent.pop()"""


def no_sync(hook=RIGHT_HOOK, context=RIGHT_CONTEXT):
    return NO_SYNC.format(hook=hook, context=context)


WRONG = {
    "05.hooks": [
        Wrong(
            "the parameter is reduced",
            hooks("dist.all_reduce(parameter.data)"),
            says="A post-accumulate hook is given the parameter",
            loses=MEAN,
        ),
        Wrong(
            "the sum", hooks("dist.all_reduce(parameter.grad)"), "is the sum over the ranks", MEAN
        ),
        Wrong(
            "divided and never added up",
            hooks("parameter.grad /= dist.get_world_size()"),
            says="and never added up",
            loses=MEAN,
        ),
        Wrong(
            "divided before and after",
            hooks(
                "parameter.grad /= dist.get_world_size()\ndist.all_reduce(parameter.grad)\n"
                "parameter.grad /= dist.get_world_size()"
            ),
            says="by the number of ranks twice",
            loses=MEAN,
        ),
        Wrong(
            "frozen parameters get a hook",
            """
def average_when_ready(model):
    def average(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
""",
            says="raised RuntimeError",
            loses=ODD,
        ),
        Wrong(
            "one hook that sends all at the end",
            """
def average_when_ready(model):
    def average(_):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for g, mean in zip(gradients, flat.split([g.numel() for g in gradients])):
            g.copy_(mean.view_as(g))

    first = next(p for p in model.parameters() if p.requires_grad)
    first.register_post_accumulate_grad_hook(average)
""",
            says="Here each one travels alone",
            loses=READY,
        ),
        Wrong(
            "every gradient, every time",
            """
def average_when_ready(model):
    seen = set()

    def average(parameter):
        world = dist.get_world_size()
        for other in model.parameters():
            if other is parameter:
                dist.all_reduce(other.grad)
                other.grad /= world
            elif other.requires_grad:
                dist.all_reduce(torch.zeros_like(other))

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)
""",
            says="some travel more than once",
            loses=READY,
        ),
        Wrong("no hook does anything", hooks("pass"), "it was not averaged", MEAN),
        Wrong(
            "each alone, when backward is over",
            """
def average_when_ready(model):
    ready = []

    def send_all():
        for p in ready:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        ready.clear()

    def collect(p):
        if not ready:
            torch.autograd.Variable._execution_engine.queue_callback(send_all)
        ready.append(p)

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(collect)
""",
            says="had sent 0 elements and could have sent 54",
            loses=READY,
        ),
    ],
    "05.buckets": [
        Wrong(
            "one bucket for each parameter",
            buckets(limit="0"),
            says="buckets were to be sent",
            loses=RIGHT_BUCKETS,
        ),
        Wrong(
            "one bucket for everything",
            buckets(limit="1e9"),
            says="Is a bucket sent when its last gradient is there",
            loses=RIGHT_BUCKETS,
        ),
        Wrong(
            "the last bucket never sent",
            buckets(last="len(buckets) - 1"),
            says="it was not averaged",
            loses=MEAN,
        ),
        Wrong("not ready for a second step", buckets(again="pass"), "In the second step", MEAN),
        Wrong("the sum", buckets(divide="pass"), "is the sum over the ranks", MEAN),
        Wrong(
            "from the first layer to the last",
            buckets(order="list(model.parameters())"),
            says="the last layers come first",
            loses=RIGHT_BUCKETS,
        ),
        Wrong(
            "in the order of arrival",
            buckets().replace(
                """        while ready.next < len(buckets) and not waiting[ready.next]:
            send(buckets[ready.next])
            ready.next += 1
""",
                """        if not waiting[home[parameter]]:
            send(buckets[home[parameter]])
            ready.next += 1
""",
            ),
            says="a mean of two different gradients",
            loses=("ranks whose backward runs in another order",),
        ),
        Wrong(
            "all buckets when the last gradient is there",
            buckets().replace(
                "        while ready.next",
                "        while not any(waiting) and ready.next",
            ),
            says="had sent 0 elements and could have sent 54",
            loses=RIGHT_BUCKETS,
        ),
    ],
    "05.overlap": [
        Wrong(
            "the hook waits",
            overlap("dist.all_reduce(parameter.grad)\nparameter.grad /= world"),
            says="the hook waits",
            loses=HIDDEN,
        ),
        Wrong(
            "async, and then waits at once",
            overlap(
                "dist.all_reduce(parameter.grad, async_op=True).wait()\nparameter.grad /= world"
            ),
            says="the hook waits",
            loses=HIDDEN,
        ),
        Wrong(
            "everything at the end",
            overlap(
                "if not pending:\n"
                "    torch.autograd.Variable._execution_engine.queue_callback(finish)\n"
                "    pending.append(None)"
            ).replace(
                "        for parameter, work in pending:\n            work.wait()\n",
                "        for parameter in model.parameters():\n"
                "            dist.all_reduce(parameter.grad)\n",
            ),
            says="nothing is hidden",
            loses=HIDDEN,
        ),
        Wrong(
            "one call for all, when all are there",
            overlap(
                "if not pending:\n"
                "    torch.autograd.Variable._execution_engine.queue_callback(finish)\n"
                "    pending.append(None)"
            ).replace(
                "        for parameter, work in pending:\n"
                "            work.wait()\n"
                "            parameter.grad /= world\n",
                "        flat = torch.cat([p.grad.flatten() for p in model.parameters()])\n"
                "        dist.all_reduce(flat)\n"
                "        for p, mean in zip(model.parameters(), flat.chunk(5)):\n"
                "            p.grad = mean.view_as(p) / world\n",
            ),
            says="All gradients travel in one call",
            loses=HIDDEN,
        ),
        Wrong(
            "nobody waits",
            overlap("dist.all_reduce(parameter.grad, async_op=True)"),
            says="a gradient was still under way",
            loses=MEAN,
        ),
        Wrong(
            "no division",
            overlap(
                "if not pending:\n"
                "    torch.autograd.Variable._execution_engine.queue_callback(finish)\n"
                "pending.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))"
            ).replace(
                "            parameter.grad /= world\n        pending.clear()",
                "        pending.clear()",
            ),
            says="is the sum over the ranks",
            loses=MEAN,
        ),
        Wrong(
            "sent as it comes, and once more at the end",
            overlap(
                "if not pending:\n"
                "    torch.autograd.Variable._execution_engine.queue_callback(finish)\n"
                "work = dist.all_reduce(parameter.grad.clone(), async_op=True)\n"
                "pending.append((parameter, work))"
            ).replace("work.wait()", "work.wait()\n            dist.all_reduce(parameter.grad)"),
            says="sent 640 bytes; to average each gradient once takes 320",
            loses=HIDDEN,
        ),
    ],
    "05.no_sync": [
        Wrong(
            "the context does nothing",
            no_sync(context="yield"),
            says="was averaged already",
            loses=COLLECTED,
        ),
        Wrong(
            "only the newest gradient is averaged",
            """
def with_no_sync(model):
    silent = []

    def average(gradient):
        if silent:
            return gradient
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()

    for parameter in model.parameters():
        parameter.register_hook(average)

    @contextlib.contextmanager
    def no_sync():
        silent.append(True)
        try:
            yield
        finally:
            silent.pop()

    return no_sync
""",
            says="Reduce the accumulated .grad",
            loses=COLLECTED,
        ),
        Wrong(
            "not restored after an exception",
            no_sync(context="silent.append(True)\n        yield\n        silent.pop()"),
            says="restore the switch in `finally`",
            loses=FAILS,
        ),
        Wrong(
            "never restored",
            no_sync(context="silent.append(True)\n        yield"),
            says="it was not averaged",
            loses=COLLECTED,
        ),
        Wrong(
            "sent when the context ends",
            """
def with_no_sync(model):
    @contextlib.contextmanager
    def no_sync():
        yield

    total = []

    def average(parameter):
        total.append(parameter)
        dist.all_reduce(torch.zeros(1))

    def last(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    return no_sync
""",
            says="it was not averaged",
            loses=COLLECTED,
        ),
        Wrong(
            "empty messages to keep in step",
            no_sync(
                hook=RIGHT_HOOK
                + """
        else:
            dist.all_reduce(torch.zeros(1))"""
            ),
            says="and none is needed there",
            loses=SILENT,
        ),
        Wrong(
            "the sum over the ranks",
            no_sync(
                hook=RIGHT_HOOK.replace("            parameter.grad /= dist.get_world_size()", "")
            ),
            says="is the sum over the ranks",
            loses=COLLECTED,
        ),
    ],
}

# ---- right answers that look different from the solution ----

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
