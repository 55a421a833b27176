"""Wrong answers to lesson 05 that people give, and the sentence that each must hear."""

from wrong_answers import Wrong

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
RIGHT = {
    "order": "reversed(list(model.parameters()))",
    "limit": "limit",
    "divide": "flat /= dist.get_world_size()",
    "last": "len(buckets)",
    "again": "ready.next, waiting[:] = 0, [set(bucket) for bucket in buckets]",
}


def buckets(**wrong):
    return BUCKETS.format(**(RIGHT | wrong))


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
