"""Wrong answers to lesson 05 that people give, and the sentence that each must hear."""

from answers import Wrong
from answers.altered import altered, solution, wrapped

MEAN = ("after backward() every gradient is the mean",)
ODD = ("tied and frozen parameters",)
READY = ("each gradient is sent once, when it is ready",)
RIGHT_BUCKETS = ("the right buckets, from the last layer to the first",)
HIDDEN = ("at least half of the communication is hidden",)
COLLECTED = ("the mean of the accumulated gradients",)
SILENT = ("nothing is sent under no_sync",)
ORDER = ("ranks whose backward runs in another order",)
NESTED = ("nested contexts, an exception, another model",)

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
            says="A post-accumulate hook receives the parameter itself: average its .grad",
            loses=MEAN,
        ),
        Wrong(
            "the sum", hooks("dist.all_reduce(parameter.grad)"), "is the sum over the ranks", MEAN
        ),
        Wrong(
            "divided and never added up",
            hooks("parameter.grad /= dist.get_world_size()"),
            says="by the number of ranks, but was not added up before backward() returned",
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
            says="gradients. Send each one alone, as soon as it is ready",
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
            says="some were sent more than once",
            loses=READY,
        ),
        Wrong(
            "a tied weight is sent for each of its layers",
            """
def average_when_ready(model):
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for name in names:
        parameter = model.get_parameter(name)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)


def average(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()
""",
            says="some were sent more than once",
            loses=ODD,
        ),
        Wrong(
            "only the first model gets hooks",
            """
DONE = []


def average_when_ready(model):
    def average(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    for parameter in model.parameters():
        if parameter.requires_grad and not DONE:
            parameter.register_post_accumulate_grad_hook(average)
    DONE.append(model)
""",
            says="in model 2 is still the rank's own",
            loses=MEAN,
        ),
        Wrong(
            "the sum is kept from step to step",
            """
def average_when_ready(model):
    sums = {}

    def average(parameter):
        total = parameter.grad.clone()
        dist.all_reduce(total)
        sums[parameter] = sums.get(parameter, 0) + total / dist.get_world_size()
        parameter.grad = sums[parameter]

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)
""",
            says="in step 2 is wrong",
            loses=MEAN,
        ),
        Wrong(
            "all gradients become float32",
            hooks(
                "total = parameter.grad.float().contiguous()\ndist.all_reduce(total)\n"
                "parameter.grad.data = total / dist.get_world_size()"
            ),
            says="has dtype float32, and float64 was expected",
            loses=MEAN,
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
            says="had sent 0 elements, but could have sent 54",
            loses=READY,
        ),
    ],
    "05.buckets": [
        Wrong(
            "one bucket for each parameter",
            buckets(limit="0"),
            says="one for each parameter",
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
        Wrong(
            "not ready for a second step",
            buckets(again="pass"),
            "in step 2 is still the rank's own",
            MEAN,
        ),
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
            loses=ORDER,
        ),
        Wrong(
            "all buckets when the last gradient is there",
            buckets().replace(
                "        while ready.next",
                "        while not any(waiting) and ready.next",
            ),
            says="had sent 0 elements, but could have sent 36",
            loses=RIGHT_BUCKETS,
        ),
        Wrong(
            "the limit in bytes",
            buckets().replace(
                "parameter.numel() > limit", "parameter.numel() > limit / parameter.itemsize"
            ),
            says="as if `limit` were bytes. It counts elements",
            loses=RIGHT_BUCKETS,
        ),
        Wrong(
            "a bucket is never quite full",
            buckets().replace("parameter.numel() > limit", "parameter.numel() >= limit"),
            says="a bucket may hold exactly `limit` elements",
            loses=RIGHT_BUCKETS,
        ),
        Wrong(
            "an empty bucket before a large parameter",
            buckets().replace("if held and held +", "if held +"),
            says="raised",
            loses=MEAN,
        ),
        Wrong(
            "a buffer of float32",
            buckets().replace(
                "flat = torch.cat([p.grad.flatten() for p in bucket])",
                "flat = torch.zeros(sum(p.numel() for p in bucket))\n"
                "        flat.copy_(torch.cat([p.grad.flatten() for p in bucket]))",
            ),
            says="is wrong: it is off by up to",
            loses=MEAN,
        ),
    ],
    "05.overlap": [
        Wrong(
            "continue until the call is complete. How long can you delay the waiting?",
            overlap("dist.all_reduce(parameter.grad)\nparameter.grad /= world"),
            says="continue until the call is complete. How long can you delay the waiting?",
            loses=HIDDEN,
        ),
        Wrong(
            "async, and then waits at once",
            overlap(
                "dist.all_reduce(parameter.grad, async_op=True).wait()\nparameter.grad /= world"
            ),
            says="continue until the call is complete. How long can you delay the waiting?",
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
                "        for p, mean in zip(model.parameters(), flat.split(\n"
                "                [p.numel() for p in model.parameters()])):\n"
                "            p.grad = mean.view_as(p) / world\n",
            ),
            says="All gradients travel in one call",
            loses=HIDDEN,
        ),
        Wrong(
            "nobody waits",
            overlap("dist.all_reduce(parameter.grad, async_op=True)"),
            says="was still in flight: wait for every Work before backward() returns",
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
            "divided on the way",
            overlap(
                "if not pending:\n"
                "    torch.autograd.Variable._execution_engine.queue_callback(finish)\n"
                "pending.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))\n"
                "parameter.grad /= world"
            ).replace("            parameter.grad /= world\n        pending", "        pending"),
            says="so the value is undefined. Divide before the call, or after the wait",
            loses=MEAN,
        ),
        Wrong(
            "written for two ranks",
            overlap(
                "if not pending:\n"
                "    torch.autograd.Variable._execution_engine.queue_callback(finish)\n"
                "pending.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))"
            ).replace("parameter.grad /= world", "parameter.grad /= 2"),
            says="is half of the sum, on 3 ranks",
            loses=MEAN,
        ),
        Wrong(
            "all gradients from all ranks",
            """
def overlap(model):
    pending = []

    def finish():
        for p, every, work in pending:
            work.wait()
            p.grad.copy_(torch.stack(every).mean(0))
        pending.clear()

    def hook(p):
        if not pending:
            torch.autograd.Variable._execution_engine.queue_callback(finish)
        grad = p.grad.contiguous()
        every = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        pending.append((p, every, dist.all_gather(every, grad, async_op=True)))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
""",
            says="an all-reduce of each gradient takes",
            loses=HIDDEN,
        ),
        Wrong(
            "sent as it comes, and once more at the end",
            overlap(
                "if not pending:\n"
                "    torch.autograd.Variable._execution_engine.queue_callback(finish)\n"
                "work = dist.all_reduce(parameter.grad.clone(), async_op=True)\n"
                "pending.append((parameter, work))"
            ).replace("work.wait()", "work.wait()\n            dist.all_reduce(parameter.grad)"),
            says="sent 1,280 bytes; an all-reduce of each gradient takes 640",
            loses=HIDDEN,
        ),
    ],
    "05.no_sync": [
        Wrong(
            "the inner context ends the outer one",
            no_sync(context=RIGHT_CONTEXT.replace("silent.pop()", "silent.clear()")),
            says="with one context inside another, rank 0's gradient 0 was averaged already",
            loses=NESTED,
        ),
        Wrong(
            "one switch for all models",
            no_sync()
            .replace("    silent = []\n", "")
            .replace("def with", "silent = []\n\n\ndef with"),
            says="while another model's no_sync is on is still the rank's own",
            loses=NESTED,
        ),
        Wrong(
            "the context swallows exceptions",
            no_sync(
                context=RIGHT_CONTEXT.replace(
                    "finally:", "except ArithmeticError:\n            pass\n        finally:"
                )
            ),
            says="does not come out of it",
            loses=NESTED,
        ),
        Wrong(
            "every gradient goes twice, as a sum and as a check",
            no_sync(
                hook=RIGHT_HOOK.replace(
                    "            parameter.grad /=",
                    "            dist.all_reduce(parameter.grad.clone())\n"
                    "            parameter.grad /=",
                )
            ),
            says="an all-reduce of each gradient takes",
            loses=SILENT,
        ),
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
            loses=NESTED,
        ),
        Wrong(
            "never restored",
            no_sync(context="silent.append(True)\n        yield"),
            says="it was not averaged",
            loses=COLLECTED,
        ),
        Wrong(
            "averaged when the context ends",
            no_sync(
                context=RIGHT_CONTEXT
                + """
            for parameter in model.parameters():
                average(parameter)"""
            ),
            says="was averaged already",
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
            says="calls under no_sync, but must send nothing there",
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

# ---- what the texts promise, as words of theirs -> (the criterion, the kind of case), or None

PROMISES = {
    "05.hooks": {
        "every `.grad` is the mean over the ranks": (*MEAN, ""),
        "Send each gradient in its own all-reduce as soon as it is ready": (*READY, ""),
        "and send nothing else": (*READY, ""),
        "its gradient is sent once": (*ODD, "odd"),
        "A frozen weight has no gradient, and must get none": (*ODD, "odd"),
        "Do not change the weights": (*MEAN, ""),
        "the same on every rank": None,
        "All its parameters except the frozen ones": None,
        "average each gradient over all ranks during backward": (*READY, ""),
        "different dtypes, and be contiguous or not": (*MEAN, ""),
        "there may be two models": (*MEAN, ""),
        "None or zero, or still hold the previous gradients": (*MEAN, ""),
    },
    "05.buckets": {
        "The same, with fewer and larger messages": (*MEAN, ""),
        "from the last to the first and put each into the current bucket": (*RIGHT_BUCKETS, ""),
        "make the bucket larger than `limit` elements": (*RIGHT_BUCKETS, ""),
        "Send each bucket in one all-reduce when all its gradients are ready": (*RIGHT_BUCKETS, ""),
        "and send nothing else": (*RIGHT_BUCKETS, ""),
        "even if its gradients become ready in another order": (*ORDER, "order"),
        "average the gradients bucket by bucket during backward": (*MEAN, ""),
        "all its parameters get a gradient in every backward": None,
        "unless one parameter alone has more": (*RIGHT_BUCKETS, ""),
    },
    "05.overlap": {
        "As in task 1, but on a slow network": (*MEAN, "slow"),
        "at least half of the communication must happen": (*HIDDEN, "slow"),
        "you may also use buckets or another collective": None,
        "no more bytes than one all-reduce of every gradient would": (*HIDDEN, ""),
        "so that all gradients are final then": (*MEAN, "slow"),
        "average the gradients over all ranks while backward continues": (*MEAN, ""),
        "every parameter gets a gradient in every backward": None,
        "All have one dtype": None,
    },
    "05.no_sync": {
        "backward sends nothing, and gradients accumulate on each rank": (*SILENT, ""),
        "averages everything that has accumulated": (*COLLECTED, ""),
        "It sends no more bytes than one all-reduce of every gradient would": (*SILENT, ""),
        "nothing is sent until the outermost one ends": (*NESTED, "odd"),
        "If the block raises an exception, it leaves the context": (*NESTED, "odd"),
        "A context of one model does not affect other models": (*NESTED, "odd"),
        "every parameter gets a gradient in every backward;": None,
        "all have one dtype": None,
        "any number of times": (*COLLECTED, ""),
    },
}

# ---- mutants of the solution that are right ----

WORLD = "`world = dist.get_world_size()` -> the first one, kept"
EQUIVALENT = {
    "05.hooks": {WORLD: "a job has one world"},
    "05.buckets": {
        WORLD: "a job has one world",
        "`zip(bucket, flat.split([p.numel() for p in bucket]), stri...` -> "
        "`zip(bucket, flat.split([p.numel() for p in bucket]))`": "not strict is the default",
        "`True` -> `False`": "the same, said",
    },
    "05.overlap": {
        WORLD: "a job has one world",
        "`if not pending: torch.autograd.Variable._execution_engine...` -> if True": (
            "called again, finish finds nothing left to do"
        ),
    },
    "05.no_sync": {
        WORLD: "a job has one world",
        "`True` -> `False`": "silent holds something, whatever it is",
    },
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
        (
            "functional collectives, and nothing sent by one rank alone",
            """
import torch.distributed._functional_collectives as funcol


def average_when_ready(model):
    world = dist.get_world_size()

    def hook(p):
        total = funcol.all_reduce(p.grad.contiguous(), "sum", dist.group.WORLD)
        p.grad.copy_(total.wait() / world)

    for p in model.parameters() if world > 1 else ():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(hook)
""",
        ),
        (
            "DTensor: a partial mean becomes replicas",
            """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate


def average_when_ready(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def hook(p):
        mean = DTensor.from_local(p.grad, mesh, [Partial("avg")])
        p.grad = mean.redistribute(placements=[Replicate()]).to_local()

    for p in model.parameters():
        if p.requires_grad:
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
        numel = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(numel, dtype=parameters[0].dtype)
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
            "two phases: parts to their rank in one hook, sums to all in the next",
            """
def overlap(model):
    rank, world = dist.get_rank(), dist.get_world_size()
    phases = []  # (parameter, parts, Work), then (parameter, whole, Work)

    def scatter(p):
        flat = torch.nn.functional.pad(p.grad.flatten(), (0, -p.numel() % world))
        parts = torch.empty_like(flat)
        phases.append((p, parts, dist.all_to_all_single(parts, flat, async_op=True), False))

    def gather():
        for index, (p, parts, work, summed) in enumerate(phases):
            if not summed:
                work.wait()
                mean = torch.full((1, world), 1 / world, dtype=p.dtype) @ parts.view(world, -1)
                whole = torch.empty_like(parts)
                work = dist.all_gather_into_tensor(whole, mean.flatten(), async_op=True)
                phases[index] = (p, whole, work, True)

    def finish():
        gather()
        for p, whole, work, _ in phases:
            work.wait()
            p.grad = whole[: p.numel()].view(p.shape)
        phases.clear()

    def hook(p):
        if not phases:
            torch.autograd.Variable._execution_engine.queue_callback(finish)
        gather()
        scatter(p)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
""",
        ),
        (
            "functional collectives, two gradients in each",
            """
import torch.distributed._functional_collectives as funcol


def overlap(model):
    parameters = list(model.parameters())
    waiting, under_way = [], []

    def send():
        flat = torch.cat([p.grad.flatten() for p in waiting]) / dist.get_world_size()
        under_way.append((list(waiting), funcol.all_reduce(flat, "sum", dist.group.WORLD)))
        waiting.clear()

    def finish():
        if waiting:
            send()
        for ps, mean in under_way:
            for p, part in zip(ps, mean.wait().split([p.numel() for p in ps])):
                p.grad = part.view(p.shape)
        under_way.clear()

    def hook(p):
        if not waiting and not under_way:
            torch.autograd.Variable._execution_engine.queue_callback(finish)
        waiting.append(p)
        if len(waiting) == 2:
            send()

    for p in parameters if dist.get_world_size() > 1 else ():
        p.register_post_accumulate_grad_hook(hook)
""",
        ),
        (
            "one under way at a time, waited for by the next hook",
            """
def overlap(model):
    parameters, seen = list(model.parameters()), []
    under_way = []

    def settle():
        for work in under_way:
            work.wait()
        under_way.clear()

    def hook(p):
        settle()
        p.grad /= dist.get_world_size()
        under_way.append(dist.all_reduce(p.grad, async_op=True))
        seen.append(p)
        if len(seen) == len(parameters):  # the last of this backward
            seen.clear()
            settle()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
""",
        ),
        (
            "DTensor: redistributed while backward goes on",
            """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate


def overlap(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    under_way = []

    def finish():
        for p, total in under_way:
            p.grad = total.wait() / mesh.size()
        under_way.clear()

    def hook(p):
        if not under_way:
            torch.autograd.Variable._execution_engine.queue_callback(finish)
        total = DTensor.from_local(p.grad, mesh, [Partial()])
        total = total.redistribute(placements=[Replicate()], async_op=True)
        under_way.append((p, total.to_local()))

    for p in model.parameters() if mesh.size() > 1 else ():
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
        outermost = bool(handles)
        while handles:
            handles.pop().remove()
        try:
            yield
        finally:
            if outermost:
                attach()

    attach()
    return no_sync
""",
        ),
    ],
}


# -- what an answer may not assume -----------------------------------------------------------------

WRONG["05.overlap"] += [
    Wrong(
        "all are waited for in the hook of the first parameter",
        """
def overlap(model):
    first = next(model.parameters())
    pending = []

    def hook(p):
        pending.append((p, dist.all_reduce(p.grad, async_op=True)))
        if p is first:
            for parameter, work in pending:
                work.wait()
                parameter.grad /= dist.get_world_size()
            pending.clear()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
""",
        says="it was not averaged",
    )
]
WRONG["05.buckets"] += [
    Wrong(
        "a bucket is closed when it has reached the limit",
        altered(
            "05.buckets",
            ("if held and held + parameter.numel() > limit:", "if held >= limit:"),
        ),
        says="was closed after it had reached the limit. Close it before it gets larger",
        loses=("the right buckets, from the last layer to the first",),
    ),
    Wrong(
        "the first model's limit",
        wrapped(
            "05.buckets",
            "average_in_buckets",
            "LIMIT = []\n\n\ndef average_in_buckets(model, limit):\n"
            "    LIMIT.append(limit)\n    solution(model, LIMIT[0])\n",
        ),
        says="rank 0 sent buckets of",
        loses=("the right buckets, from the last layer to the first",),
    ),
]
WRONG["05.hooks"] += [
    Wrong(
        "one model of each shape",
        wrapped(
            "05.hooks",
            "average_when_ready",
            "SEEN = set()\n\n\ndef average_when_ready(model):\n"
            "    shapes = tuple(p.shape for p in model.parameters())\n"
            "    if shapes not in SEEN:\n        SEEN.add(shapes)\n        solution(model)\n",
        ),
        says="it was not averaged",
    )
]

# -- 05.rebuild ------------------------------------------------------------------------------------

EACH = ("after each backward() every gradient is the mean",)
TOLD = ("one broadcast, in the first backward",)
ARRIVAL = ("from the second on, buckets in the order of arrival",)


def rebuilt(*changes):
    return altered("05.rebuild", *changes)


WRONG["05.rebuild"] = [
    Wrong(
        "the buckets of task 2, never made again",
        solution("05.buckets").replace("average_in_buckets", "rebuild_buckets"),
        says="made 0 broadcasts in the first backward",
        loses=TOLD,
    ),
    Wrong(
        "told, and not used",
        rebuilt(("for p in (parameters[index] for index in order.tolist())",
                 "for p in reversed(parameters)")),
        says="in the order in which the model registers its parameters",
        loses=ARRIVAL,
    ),
    Wrong(
        "every rank its own order",
        rebuilt(("        dist.broadcast(order, src=0)\n", "")),
        says="made 0 broadcasts",
        loses=TOLD,
    ),
    Wrong(
        "told in every backward",
        rebuilt(("            if not rebuilt:\n                rebuild()",
                 "            rebuild()")),
        says="Send the order once, in the first",
        loses=TOLD,
    ),
    Wrong(
        "told by pickled objects",
        rebuilt(("        dist.broadcast(order, src=0)\n",
                 "        objects = [arrived]\n        dist.broadcast_object_list(objects, src=0)\n"
                 "        order = torch.tensor(objects[0])\n")),
        says="made 2 broadcasts",
        loses=TOLD,
    ),
    Wrong(
        "the last rank's order",
        rebuilt(("src=0", "src=world - 1")),
        says="sends its order. Use the order of rank 0",
        loses=TOLD,
    ),
    Wrong(
        "the last to arrive come first",
        rebuilt(("for index in order.tolist())", "for index in order.tolist()[::-1])")),
        says="came first are in the last one. Fill the buckets in the order of arrival",
        loses=ARRIVAL,
    ),
    Wrong(
        "a bucket is closed when it has reached the limit",
        rebuilt(("if held and held + p.numel() > limit", "if held >= limit")),
        says="was closed after it had reached the limit. Close it before it gets larger",
        loses=ARRIVAL,
    ),
    Wrong(
        "all is sent at the end of backward",
        rebuilt(("        while sent < len(buckets) and all(",
                 "        while len(arrived) == len(parameters) and sent < len(buckets) and all(")),
        says="Send from the hooks, not at the end",
        loses=ARRIVAL,
    ),
    Wrong(
        "what has arrived is kept for the next backward",
        rebuilt(("            arrived.clear()\n", "")),
        says="send each once",
        loses=TOLD,
    ),
    Wrong(
        "a sum",
        rebuilt(("        flat /= world\n", "")),
        says="is the sum over the ranks",
        loses=EACH,
    ),
]  # fmt: skip
RIGHT["05.rebuild"] = [
    (
        "counts down, and one all-reduce for the first backward",
        """
class Rebuilt:
    def __init__(self, model, limit):
        self.parameters, self.limit = list(model.parameters()), limit
        self.order, self.plan = [], None
        for number, p in enumerate(self.parameters):
            p.register_post_accumulate_grad_hook(lambda p, number=number: self.hook(number))

    def average(self, numbers):
        gradients = [self.parameters[i].grad for i in numbers]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        start = 0
        for g in gradients:
            g.copy_(flat[start : start + g.numel()].view(g.shape) / dist.get_world_size())
            start += g.numel()

    def hook(self, number):
        if self.plan is None:
            self.order.append(number)
            if len(self.order) == len(self.parameters):
                self.average(range(len(self.order)))
                told = torch.tensor(self.order, dtype=torch.int32)
                dist.broadcast(told, 0)
                self.plan, size = [], 0
                for i in told.tolist():
                    n = self.parameters[i].numel()
                    if not self.plan or size + n > self.limit:
                        self.plan.append([])
                        size = 0
                    self.plan[-1].append(i)
                    size += n
                self.begin()
            return
        self.there.add(number)
        while self.next < len(self.plan) and self.there.issuperset(self.plan[self.next]):
            self.average(self.plan[self.next])
            self.next += 1
        if self.next == len(self.plan):
            self.begin()

    def begin(self):
        self.next, self.there = 0, set()


def rebuild_buckets(model, limit):
    Rebuilt(model, limit)
""",
    ),
    (
        "finishes the first backward in a callback of autograd",
        altered(
            "05.rebuild",
            ("            if not rebuilt:\n                rebuild()\n"
             "            rebuilt, sent = True, 0\n            arrived.clear()",
             "            if rebuilt:\n                sent = 0\n                arrived.clear()\n"
             "            else:\n                torch.autograd.Variable._execution_engine"
             ".queue_callback(first_over)"),
            ("    def ready(parameter):",
             "    def first_over():\n        nonlocal sent, rebuilt\n        rebuild()\n"
             "        rebuilt, sent = True, 0\n        arrived.clear()\n\n"
             "    def ready(parameter):"),
        ),
    ),
]  # fmt: skip
PROMISES["05.rebuild"] = {
    "send each gradient once, by all-reduce": (*TOLD, ""),
    "in one broadcast, one integer per parameter": (*TOLD, ""),
    "From the second backward on, send each bucket in one all-reduce": (*ARRIVAL, ""),
    "a bucket takes the next parameters in the new order": (*ARRIVAL, ""),
    "but ranks may differ": (*ORDER, "order"),
    "all its parameters get a gradient in every backward": None,
    "unless one parameter alone has more": (*ARRIVAL, ""),
}
STRICT = "the bucket and its parts are equally many"
EQUIVALENT["05.rebuild"] = {
    "`zip(bucket, flat.split([p.numel() for p in bucket]), stri...` -> "
    "`zip(bucket, flat.split([p.numel() for p in bucket]))`": STRICT,
    "`True` -> `False`": STRICT,
    "`def rebuild(): order = torch.tensor(arrived) dist.broadca...` -> its first result, kept": (
        "it is called once for each model"
    ),
}

# -- what authors who had not read the judge got away with -----------------------------------------

WRONG["05.buckets"] += [
    Wrong(
        "an earlier bucket with room is filled up",
        altered(
            "05.buckets",
            ("held = sum(p.numel() for p in buckets[-1])", "more = parameter.numel()"),
            (
                "if held and held + parameter.numel() > limit:\n            buckets.append([])",
                "held = [sum(p.numel() for p in b) for b in buckets]\n"
                "        room = [b for b, n in zip(buckets, held) if not n or n + more <= limit]\n"
                "        room = room or [[]]\n"
                "        buckets += [] if any(b is room[0] for b in buckets) else room",
            ),
            ("buckets[-1].append(parameter)", "room[0].append(parameter)"),
        ),
        says="an earlier bucket. Once a new bucket is started, do not fill earlier ones",
        loses=RIGHT_BUCKETS,
    ),
]
