"""Wrong answers to lesson 14 that people give, and the sentence that each must hear."""

from answers import Wrong
from answers.altered import altered

GRADIENTS = ("gradients and loss of the batch",)
LIVE = ("a stage keeps at most p - stage micro-batches",)
TIME = ("no stage waits longer than it must",)
TRAFFIC = ("only activations and their gradients are sent",)
LAYER = ("result and gradients of the full layer",)
CALLS = ("one all-reduce forward, one backward",)
HELD = ("a rank keeps its own hidden units alone",)
NUMBERS = ("seconds and bytes are those of the plan",)
FITS = ("the plan fits the memory",)
EDGE = ("one device, a tight fit, and nothing fits",)
FAST = ("within 5% of the best",)

ONE_F_ONE_B = """
def one_f_one_b(stage, shapes, inputs, targets):
    rank, world, micros = dist.get_rank(), dist.get_world_size(), len(shapes)
    first, last = rank == 0, rank == world - 1
    dtype = next(stage.parameters()).dtype
    total = sum(target.numel() for target in targets) if last else None
    kept, sending, losses = {{}}, [], []

    def received(shape, source):
        mailbox = torch.empty(shape, dtype=dtype)
        dist.recv(mailbox, src=source)
        return mailbox

    def send(tensor, rank):
        {send}

    def forward(i):
        x = inputs[i] if first else {received}
        y = stage(x)
        if last:
            y = {loss}
            losses.append(y.item())
        else:
            send({sent}, rank + 1)
        kept[i] = x, y

    def backward(i):
        x, y = kept.{kept}
        {before}
        y.backward(None if last else received(y.shape, rank + 1))
        if not first:
            send({back}, rank - 1)

    ahead = {ahead}
    {order}
    for message in sending:
        message.wait()
    return {said} if last else None
"""
SOLVED = {
    "send": "sending.append(dist.isend(tensor, dst=rank))",
    "received": "received(shapes[i], rank - 1).requires_grad_()",
    "loss": "(y - targets[i]).square().sum() / total",
    "sent": "y.detach()",
    "kept": "pop(i)",
    "before": "pass",
    "back": "x.grad",
    "ahead": "min(world - rank - 1, micros)",
    "order": """for i in range(micros + ahead):
        if i < micros:
            forward(i)
        if i >= ahead:
            backward(i - ahead)""",
    "said": "sum(losses)",
}


def pipe(**wrong):
    return ONE_F_ONE_B.format(**(SOLVED | wrong))


GATED = """
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        {copy}
        return total


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        {reduce}


class GatedMLP(torch.nn.Module):
    def __init__(self, gate, up, down, bias):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()

        def own(weight, dim):
            return torch.nn.Parameter({own})

        self.gate, self.up, self.down = own(gate, 0), own(up, 0), own(down, 1)
        self.bias = torch.nn.Parameter(bias.clone())

    def forward(self, x):
        {forward}
"""
SOLVED_MLP = {
    "copy": "dist.all_reduce(total)",
    "reduce": "return gradient",
    "own": "weight.tensor_split(world, dim)[rank].clone()",
    "forward": """x = Copy.apply(x)
        hidden = torch.nn.functional.silu(x @ self.gate.T) * (x @ self.up.T)
        return Reduce.apply(hidden @ self.down.T) + self.bias""",
}


def gated(**wrong):
    return GATED.format(**(SOLVED_MLP | wrong))


PLACE = """
from itertools import permutations


def place(job):
    ranks = job["nodes"] * job["per_node"]
    message = 2 * job["tokens"] * job["width"]

    def seconds(plan):
        size, link, inside = dict(plan), {{}}, 1
        for axis, n in plan:
            inside *= n
            link[axis] = {link}
        d, p, t = size["data"], size["pipeline"], size["tensor"]
        one = 6 * job["params"] * job["tokens"] / (p * t * job["flops"])
        one += 4 * (job["layers"] / p) * 2 * (t - 1) / t * message / link["tensor"]
        if p > 1:
            one += 2 * message / link["pipeline"]
        gradients = 2 * (d - 1) / d * 2 * job["params"] / (p * t) / link["data"]
        return {step}

    def held(d, p, t):
        micros = {micros}
        layer = 34 * job["tokens"] * job["width"]
        return 16 * job["params"] / (p * t) + micros * layer * (job["layers"] / p) / t

    plans = []
    for t in range(1, ranks + 1):
        for p in range(1, ranks // t + 1):
            d = ranks // (t * p)
            if d * t * p != ranks or {divides}:
                continue
            if {fits}:
                plans += {orders}
    if not plans:
        return {nothing}
    plan = {best}
    size = dict(plan)
    return {answer}
"""
SOLVED_PLACE = {
    "link": 'job["far"] if job["per_node"] % inside else job["near"]',
    "step": '(job["batch"] // d + p - 1) * one + gradients',
    "micros": 'min(p, job["batch"] // d)',
    "fits": 'held(d, p, t) <= job["memory"]',
    "divides": 'job["layers"] % p or job["heads"] % t or job["batch"] % d',
    "orders": 'permutations([("data", d), ("pipeline", p), ("tensor", t)])',
    "nothing": "None",
    "best": "list(min(plans, key=seconds))",
    "answer": 'plan, seconds(plan), held(size["data"], size["pipeline"], size["tensor"])',
}


def placed(**wrong):
    return PLACE.format(**(SOLVED_PLACE | wrong))


WRONG = {
    "14.one_f_one_b": [
        Wrong("GPipe", pipe(ahead="micros"), "which is GPipe", LIVE),
        Wrong("one at a time", pipe(ahead="0"), "One micro-batch at a time", TIME),
        Wrong(
            "as many ahead on every stage",
            pipe(ahead="min(world - 1, micros)"),
            "are enough",
            LIVE,
        ),
        Wrong(
            "one ahead too few",
            pipe(ahead="min(max(world - rank - 2, 0), micros)"),
            "if a forward takes 1 and a backward 2",
            TIME,
        ),
        Wrong(
            "the mean losses are added",
            pipe(loss="(y - targets[i]).square().mean()"),
            "is the gradient of the sum of the micro-batches' mean losses",
            GRADIENTS,
        ),
        Wrong(
            "a mean of means",
            pipe(loss="(y - targets[i]).square().mean() / micros"),
            "a small micro-batch counts as much as a large one",
            GRADIENTS,
        ),
        Wrong(
            "squares never divided",
            pipe(loss="(y - targets[i]).square().sum()"),
            "it was never divided by their number",
            GRADIENTS,
        ),
        Wrong(
            "gradients cleared for each micro-batch",
            pipe(before="stage.zero_grad()"),
            "contains the last micro-batch alone",
            GRADIENTS,
        ),
        Wrong(
            "gradients cleared at the start",
            pipe(ahead="min(world - rank - 1, micros)\n    stage.zero_grad()"),
            "add to what .grad held before",
            ("a second step adds to the gradients",),
        ),
        Wrong(
            "both send first and wait",
            pipe(send="dist.send(tensor, dst=rank)"),
            "waits in",
            GRADIENTS,
        ),
        Wrong(
            "the graph is cut",
            pipe(
                received="received(shapes[i], rank - 1)",
                back="torch.zeros_like(x)",
            ),
            "send its gradient back to the left",
            GRADIENTS,
        ),
        Wrong(
            "float32 whatever comes",
            pipe().replace("next(stage.parameters()).dtype", "torch.float32"),
            "of float64",
            ("another dtype",),
        ),
        Wrong(
            "more micro-batches than stages assumed",
            pipe(
                ahead="world - rank - 1",
                order="""for i in range(ahead):
        forward(i)
    for i in range(ahead, micros):
        forward(i)
        backward(i - ahead)
    for i in range(max(micros - ahead, 0), micros):
        backward(i)""",
            ),
            "IndexError",
            ("fewer micro-batches than stages",),
        ),
        Wrong(
            "the loss of the last micro-batch",
            pipe(said="losses[-1]"),
            "The loss that the last rank returns",
            GRADIENTS,
        ),
        Wrong(
            "a barrier at the end",
            pipe().replace(
                "    for message in sending:",
                "    dist.barrier()\n    for message in sending:",
            ),
            "Stages only send to their neighbours",
            TRAFFIC,
        ),
    ],
    "14.column_row": [
        Wrong(
            "hidden units are gathered in between",
            gated(
                forward="""x = Copy.apply(x)
        hidden = torch.nn.functional.silu(x @ self.gate.T) * (x @ self.up.T)
        sizes = [0] * dist.get_world_size()
        sizes[dist.get_rank()] = hidden.shape[-1]
        sizes = torch.tensor(sizes)
        dist.all_reduce(sizes)
        places = hidden.split(hidden.shape[-1], -1)
        parts = [places[0] if r == dist.get_rank() else hidden.new_zeros(*x.shape[:-1], n)
                 for r, n in enumerate(sizes.tolist())]
        every = Reduce.apply(torch.cat(parts, -1)).split(sizes.tolist(), -1)
        return Reduce.apply(every[dist.get_rank()] @ self.down.T) + self.bias""",
            ),
            "elements; expected is",
            CALLS,
        ),
        Wrong(
            "silu of partial sums",
            gated(
                forward="""rank, world = dist.get_rank(), dist.get_world_size()
        x = x.tensor_split(world, -1)[rank]
        hidden = torch.nn.functional.silu(x @ self.gate.T) * (x @ self.up.T)
        return Reduce.apply(hidden @ self.down.T) + self.bias"""
            ).replace(
                "own(gate, 0), own(up, 0), own(down, 1)",
                "own(gate, 1), own(up, 1), torch.nn.Parameter(down.clone())",
            ),
            "silu would see parts of sums",
            LAYER,
        ),
        Wrong(
            "the bias before the sum",
            gated(
                forward="""x = Copy.apply(x)
        hidden = torch.nn.functional.silu(x @ self.gate.T) * (x @ self.up.T)
        return Reduce.apply(hidden @ self.down.T + self.bias)"""
            ),
            "has the bias once for each rank",
            LAYER,
        ),
        Wrong(
            "a share of the bias before the sum",
            gated(
                forward="""x = Copy.apply(x)
        hidden = torch.nn.functional.silu(x @ self.gate.T) * (x @ self.up.T)
        return Reduce.apply(hidden @ self.down.T + self.bias / dist.get_world_size())"""
            ),
            "is smaller by the number of ranks",
            LAYER,
        ),
        Wrong(
            "the input's gradient stays local",
            gated(copy="pass"),
            "is this rank's part of it",
            LAYER,
        ),
        Wrong(
            "the result's gradient is added up, too",
            gated(
                reduce="total = gradient.clone()\n        dist.all_reduce(total)\n"
                "        return total"
            ),
            "larger by the number of ranks",
            LAYER,
        ),
        Wrong(
            "x enters twice",
            gated(
                forward="""gate, up = Copy.apply(x) @ self.gate.T, Copy.apply(x) @ self.up.T
        hidden = torch.nn.functional.silu(gate) * up
        return Reduce.apply(hidden @ self.down.T) + self.bias"""
            ),
            "Gate and up read the same x",
            CALLS,
        ),
        Wrong(
            "replicated",
            gated(
                own="weight.clone()",
                forward="""hidden = torch.nn.functional.silu(x @ self.gate.T) * (x @ self.up.T)
        return hidden @ self.down.T + self.bias""",
            ),
            "it is not divided",
            LAYER,
        ),
        Wrong(
            "views of the whole weights",
            gated(own="weight.tensor_split(world, dim)[rank]"),
            "its own weights take at most",
            HELD,
        ),
        Wrong(
            "the sum is left out",
            gated(
                forward="""x = Copy.apply(x)
        hidden = torch.nn.functional.silu(x @ self.gate.T) * (x @ self.up.T)
        return hidden @ self.down.T + self.bias"""
            ),
            "is this rank's partial sum",
            LAYER,
        ),
        Wrong(
            "rounded up, as chunk does",
            gated(own="weight.chunk(world, dim)[rank].clone()"),
            "its hidden units are",
            ("called again, with other shapes, and an x that needs no gradient",),
        ),
    ],
    "14.place": [
        Wrong(
            "tensor parallel across nodes",
            placed(orders='[(("data", d), ("pipeline", p), ("tensor", t))]'),
            "Which axis should stay inside a node",
            FAST,
        ),
        Wrong(
            "data on the fast links",
            placed(orders='[(("data", d), ("tensor", t), ("pipeline", p))]'),
            "Which axis should stay inside a node",
            FAST,
        ),
        Wrong("memory forgotten", placed(fits="True"), "GB are needed, a device has", FITS),
        Wrong(
            "activations forgotten",
            placed(micros="0"),
            "is without the activations",
            NUMBERS,
        ),
        Wrong(
            "all micro-batches kept",
            placed(micros='job["batch"] // d'),
            "all m micro-batches; min(p, m) are live",
            NUMBERS,
        ),
        Wrong(
            "one micro-batch kept",
            placed(micros="1"),
            "counts the activations of one micro-batch",
            NUMBERS,
        ),
        Wrong(
            "more stages than layers",
            placed(divides='job["heads"] % t or job["batch"] % d'),
            "some would have none",
            NUMBERS,
        ),
        Wrong(
            "always the same",
            'def place(job):\n    return [("tensor", 8), ("pipeline", 4), ("data", 1)], 1.0, 1.0\n',
            "is wrong",
            NUMBERS,
        ),
        Wrong(
            "bubble forgotten",
            placed(step='job["batch"] // d * one + gradients'),
            "is without the bubble",
            NUMBERS,
        ),
        Wrong(
            "all links are fast",
            placed(link='job["near"]'),
            "takes all links as near",
            NUMBERS,
        ),
        Wrong(
            "gradients forgotten",
            placed(step='(job["batch"] // d + p - 1) * one'),
            "is without the gradients",
            NUMBERS,
        ),
        Wrong(
            "the first that fits",
            placed(best="list(plans[0])"),
            "times as long as it could",
            FAST,
        ),
        Wrong(
            "data parallel as far as it goes",
            placed(best="list(max(plans, key=lambda plan: dict(plan)['data']))"),
            "times as long as it could",
            FAST,
        ),
        Wrong(
            "an empty plan if nothing fits",
            placed(nothing="[]"),
            "the answer is None",
            NUMBERS,
        ),
        Wrong(
            "the plan alone",
            placed(answer="plan[:2]"),
            "must be three things",
            NUMBERS,
        ),
        Wrong(
            "sizes without axes",
            placed(answer="[n for _, n in plan], 1.0, 1.0"),
            "must be a list of three pairs",
            NUMBERS,
        ),
    ],
}

# ---- what the texts promise, as words of theirs -> (the criterion, the kind of case), or None

PROMISES = {
    "14.one_f_one_b": {
        "The loss is the mean of": (*GRADIENTS, ""),
        "There may be fewer micro-batches than stages": ("fewer micro-batches than stages", "few"),
        "added to what `.grad` held before": ("a second step adds to the gradients", "again"),
        "never keeps more than min(p − stage, m) micro-batches": (*LIVE, ""),
        "no stage waits longer than it must": (*TIME, ""),
        "one message each, between neighbours": (*TRAFFIC, ""),
        "The arguments stay unchanged": ("inputs and weights are unchanged", ""),
        "Returns the loss on the last rank": (*GRADIENTS, ""),
        "Run one training step in the order": (*TIME, ""),
        "the shape of this": None,
        "of the dtype of the stage's parameters": ("another dtype", "other"),
    },
    "14.column_row": {
        "rank r gets the r-th part of": (*LAYER, ""),
        "The parts may have different sizes": (*LAYER, ""),
        "They are the same on all ranks": None,
        "x: (..., width), the same on all ranks": None,
        "Returns (..., width), the same on all ranks": (*LAYER, ""),
        "On every rank the result is the layer's": (*LAYER, ""),
        "Each weight has the gradient of its": (*LAYER, ""),
        "one all-reduce in forward and one in backward": (*CALLS, ""),
        "none in backward if x needs": (*CALLS, "again"),
        "and no other part of the full ones": (*HELD, ""),
    },
    "14.place": {
        "if its groups never cross a node": (*NUMBERS, ""),
        "Nothing overlaps": (*NUMBERS, ""),
        "one sample to a micro-batch": (*NUMBERS, ""),
        "Then the replicas average their gradients": (*NUMBERS, ""),
        "the ring all-reduces of tensor parallelism": (*NUMBERS, ""),
        "16 for each parameter of a device": (*NUMBERS, ""),
        "each of its layers adds 34 bytes": (*NUMBERS, ""),
        "The sizes must multiply to the number of devices": (*NUMBERS, ""),
        "together with its seconds": (*NUMBERS, ""),
        "at most `memory`": (*FITS, ""),
        "at most 5% longer than the fastest that fits": (*FAST, ""),
        "None if nothing fits": (*EDGE, "edge"),
        "`job` stays unchanged": ("the job is unchanged", ""),
    },
}

# ---- mutants of the solution that are right ----

EQUIVALENT = {
    "14.cut_layers": {
        "`slowest < best[0]` -> `slowest <= best[0]`": "of two cuts as fast either is right",
    },
    "14.one_f_one_b": {
        "`y.detach()` -> `y`": "a message is values, not the graph",
        "`0.0` -> `1.0` (#2)": "the last rank alone returns what is added up",
        "`loss += forward(i)` -> `loss -= forward(i)`": "the last rank never goes ahead",
    },
    "14.column_row": {
        "`gradient.clone()` -> `gradient`": "nobody else has this sum of two gradients",
        "`part.clone()` -> `part`": "a product keeps its factors for backward, not its result",
        "`bias.clone()` -> `bias`": "every rank has the whole bias; nobody changes it here",
    },
    "14.place": {
        "`range(1, ranks + 1)` -> `range(1, ranks + 1 + 1)`": "one more does not divide",
        "`range(1, ranks // t + 1)` -> `range(1, ranks // t + 1 + 1)`": "nor here",
        "`1` -> `2` (#4)": "one more rank does not divide",
        "`1` -> `2` (#6)": "nor here",
        "`ranks // t` -> `ranks`": "those beyond give no data rank, and are passed over",
    },
}

# ---- right answers that look different from the solution ----

RIGHT = {
    "14.one_f_one_b": [
        (
            "actions as a list, messages in pairs",
            """
def one_f_one_b(stage, shapes, inputs, targets):
    rank, p, m = dist.get_rank(), dist.get_world_size(), len(shapes)
    dtype = next(stage.parameters()).dtype
    ahead = min(p - rank - 1, m)
    order = [("F", i) for i in range(ahead)]
    for i in range(m - ahead):
        order += [("F", ahead + i), ("B", i)]
    order += [("B", i) for i in range(m - ahead, m)]
    kept, handles, loss = {}, [], torch.zeros((), dtype=dtype)
    for kind, i in order:
        if kind == "F":
            if rank == 0:
                x = inputs[i]
            else:
                x = torch.empty(shapes[i], dtype=dtype)
                dist.irecv(x, src=rank - 1).wait()
                x.requires_grad_()
            y = stage(x)
            if rank == p - 1:
                error = torch.nn.functional.mse_loss(y, targets[i], reduction="sum")
                y = error / sum(t.numel() for t in targets)
                loss += y.detach()
            else:
                handles += dist.batch_isend_irecv([dist.P2POp(dist.isend, y.detach(), rank + 1)])
            kept[i] = (x, y)
        else:
            x, y = kept.pop(i)
            upstream = None
            if rank < p - 1:
                upstream = torch.empty_like(y)
                dist.recv(upstream, src=rank + 1)
            torch.autograd.backward(y, upstream)
            if rank > 0:
                handles.append(dist.isend(x.grad, dst=rank - 1))
    [handle.wait() for handle in handles]
    return float(loss) if rank == p - 1 else None
""",
        ),
    ],
    "14.column_row": [
        (
            "hooks in place of autograd functions",
            """
class GatedMLP(torch.nn.Module):
    def __init__(self, gate, up, down, bias):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        bounds = [0]
        for part in range(world):
            bounds.append(bounds[-1] + len(gate) // world + (part < len(gate) % world))
        own = slice(bounds[rank], bounds[rank + 1])
        for name, value in dict(gate=gate[own], up=up[own], down=down[:, own], bias=bias).items():
            self.register_parameter(name, torch.nn.Parameter(value.detach().clone()))

    def forward(self, x):
        if x.requires_grad:
            x = x.view_as(x)
            x.register_hook(self.added)
        linear = torch.nn.functional.linear
        hidden = torch.nn.functional.silu(linear(x, self.gate)) * linear(x, self.up)
        part = linear(hidden, self.down)
        with torch.no_grad():
            missing = self.added(part) - part
        return part + missing + self.bias

    def added(self, tensor):
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total
""",
        ),
    ],
    "14.place": [
        (
            "sizes first, then the best order",
            """
import itertools


def place(job):
    n = job["nodes"] * job["per_node"]
    a = 2 * job["tokens"] * job["width"]
    best, found = float("inf"), None
    for d, p in itertools.product(range(1, n + 1), repeat=2):
        if n % (d * p):
            continue
        t = n // (d * p)
        if job["layers"] % p or job["heads"] % t or job["batch"] % d:
            continue
        m = job["batch"] // d
        held = 16 * job["params"] / p / t
        held += min(p, m) * 34 * job["tokens"] * job["width"] * job["layers"] / p / t
        if held > job["memory"]:
            continue
        for order in itertools.permutations([["tensor", t], ["pipeline", p], ["data", d]]):
            product, speed = 1, {}
            for axis, size in order:
                product *= size
                speed[axis] = job["near"] if job["per_node"] % product == 0 else job["far"]
            time = 6 * job["params"] * job["tokens"] / p / t / job["flops"]
            time += 8 * job["layers"] / p * (t - 1) / t * a / speed["tensor"]
            time += 2 * a / speed["pipeline"] * (p > 1)
            time = time * (m + p - 1) + 4 * (d - 1) / d * job["params"] / p / t / speed["data"]
            if time < best:
                best, found = time, ([tuple(pair) for pair in order], time, held)
    return found
""",
        ),
    ],
}


WRONG["14.place"] += [
    Wrong(name, placed().replace(*change), says, NUMBERS)
    for name, change, says in (
        (
            "no messages between stages",
            ("2 * message / link", "0 * message / link"),
            "is without the messages",
        ),
        (
            "one message between stages",
            ("2 * message / link", "message / link"),
            "and its gradient the other",
        ),
        ("two all-reduces a layer", ("one += 4 *", "one += 2 *"), "together have four"),
        (
            "an all-reduce is one tensor",
            ("* 2 * (t - 1) / t * message", "* (t > 1) * message"),
            "on a ring a rank sends",
        ),
    )
]

# -- what authors who had not read the judge got away with -----------------------------------------

WRONG["14.column_row"] += [
    Wrong(
        "the gradient of x is always summed up",
        altered(
            "14.column_row",
            (
                "x = Enter.apply(x)",
                "x = Enter.apply(x if x.requires_grad else x.detach().requires_grad_())",
            ),
        ),
        says="an x that needs no gradient: there is nothing to sum up",
        loses=CALLS,
    ),
]
WRONG["14.place"] += [
    Wrong(
        "near if the product is at most a node",
        altered(
            "14.place", ('if job["per_node"] % inside else', 'if inside > job["per_node"] else')
        ),
        says="the time of a step",
        loses=NUMBERS,
    ),
]
# ---- 14.cut_layers ----

CUT_FITS = ("cuts that fit the memory",)
SLOWEST = ("the slowest stage is as fast as possible",)
TIGHT = ("to the byte, and None where nothing fits",)
FEW = ("one stage, one layer each, too few layers",)
SAME = ("the arguments stay as they are",)

CUT = """
from itertools import combinations, pairwise


def cut_layers(times, held, kept, stages, micros, memory):
    best = None
    for ends in {ends}:
        parts = [slice(a, b) for a, b in pairwise([0, *ends, len(times)])]
        sizes = [sum(held[p]) + {keeps} * sum(kept[p]) for s, p in enumerate(parts)]
        cost = {cost}
        if {fits} and (best is None or cost < best[0]):
            best = cost, {found}
    return {result}
"""
SOLVED_CUT = {
    "ends": "combinations(range(1, len(times)), stages - 1)",
    "keeps": "min(stages - s, micros)",
    "cost": "max(sum(times[p]) for p in parts)",
    "fits": "max(sizes) <= memory",
    "found": "[p.stop - p.start for p in parts]",
    "result": "best and best[1]",
}


def cut(**wrong):
    return CUT.format(**(SOLVED_CUT | wrong))


WRONG["14.cut_layers"] = [
    Wrong(
        "all micro-batches on every stage",
        cut(keeps="micros"),
        says="if every stage kept all micro-batches, as in GPipe",
        loses=CUT_FITS,
    ),
    Wrong(
        "every stage keeps what the first one does",
        cut(keeps="min(stages, micros)"),
        says="if every stage kept as many micro-batches as the first",
        loses=CUT_FITS,
    ),
    Wrong(
        "the stages from the other end",
        cut(keeps="min(s + 1, micros)"),
        says="if the last stage kept most",
        loses=CUT_FITS,
    ),
    Wrong(
        "one micro-batch at a time",
        cut(keeps="1"),
        says="if a stage kept one micro-batch.",
        loses=CUT_FITS,
    ),
    Wrong(
        "stages counted from 1",
        cut(keeps="min(stages - s - 1, micros)"),
        says="if a stage kept one micro-batch less",
        loses=CUT_FITS,
    ),
    Wrong(
        "one micro-batch in flight too many",
        cut(keeps="min(stages - s + 1, micros)"),
        says="if a stage kept one micro-batch more",
        loses=CUT_FITS,
    ),
    Wrong(
        "more micro-batches kept than there are",
        cut(keeps="(stages - s)"),
        says="if a stage could keep more micro-batches than there are",
        loses=SLOWEST,
    ),
    Wrong(
        "memory is not looked at",
        cut(fits="True"),
        says="Yours are the best cuts if memory had no limit",
        loses=CUT_FITS,
    ),
    Wrong(
        "as many layers in each",
        "def cut_layers(times, held, kept, stages, micros, memory):\n"
        "    n, more = divmod(len(times), stages)\n"
        "    return [n + (s < more) for s in range(stages)]\n",
        says="As many layers are neither as fast nor as large",
        loses=CUT_FITS,
    ),
    Wrong(
        "the least memory",
        cut(cost="max(sizes)"),
        says="Yours take the least memory. It has only to fit",
        loses=SLOWEST,
    ),
    Wrong(
        "the fewest layers in the longest stage",
        cut(cost="max(p.stop - p.start for p in parts)"),
        says="the slowest stage of",
        loses=SLOWEST,
    ),
    Wrong(
        "the smallest difference between stages",
        cut(cost="max(sum(times[p]) for p in parts) - min(sum(times[p]) for p in parts)"),
        says="it sets the pace",
        loses=SLOWEST,
    ),
    Wrong(
        "the first stage as fast as possible",
        cut(cost="sum(times[parts[0]])"),
        says="it sets the pace",
        loses=SLOWEST,
    ),
    Wrong(
        "the first cut that fits",
        cut(cost="0"),
        says="the slowest stage of",
        loses=SLOWEST,
    ),
    Wrong(
        "less than memory",
        cut(fits="max(sizes) < memory"),
        says="None is wrong",
        loses=TIGHT,
    ),
    Wrong(
        "a cut where none fits",
        cut(result="best[1] if best else [1] * (stages - 1) + [len(times) - stages + 1]"),
        says="Nothing fits here: return None",
        loses=TIGHT,
    ),
    Wrong(
        "where stages end",
        cut(found="list(ends)"),
        says="numbers of layers, each at least 1, that add up to",
        loses=CUT_FITS,
    ),
    Wrong(
        "as many stages as there are layers",
        cut().replace("    best = None", "    stages = min(stages, len(times))\n    best = None"),
        says="layers make at most",
        loses=FEW,
    ),
]
RIGHT["14.cut_layers"] = [
    (
        "tries slowest times one by one, recursively",
        """
def cut_layers(times, held, kept, stages, micros, memory):
    def fill(first, stage, pace):
        if stage == stages:
            return [] if first == len(times) else None
        for last in range(first + 1, len(times) + 1):
            size = sum(held[first:last])
            size += sum(kept[first:last]) * (micros if micros < stages - stage else stages - stage)
            if size > memory or sum(times[first:last]) > pace:
                return None
            if (rest := fill(last, stage + 1, pace)) is not None:
                return [last - first, *rest]
        return None

    paces = {sum(times[a:b]) for a in range(len(times)) for b in range(a + 1, len(times) + 1)}
    for pace in sorted(paces):
        if (found := fill(0, 0, pace)) is not None:
            return found
    return None
""",
    ),
    (
        "a table from the last stage back",
        """
def cut_layers(times, held, kept, stages, micros, memory):
    n, inf = len(times), float("inf")
    best = {(stages, n): (0, [])}
    for s in reversed(range(stages)):
        for a in range(n):
            ways = []
            for b in range(a + 1, n + 1):
                pace, rest = best.get((s + 1, b), (inf, []))
                size = sum(held[a:b]) + min(micros, stages - s) * sum(kept[a:b])
                if pace < inf and size <= memory:
                    ways.append((max(pace, sum(times[a:b])), [b - a] + rest))
            best[s, a] = min(ways, default=(inf, []))
    pace, found = best[0, 0]
    return found if pace < inf else None
""",
    ),
]
PROMISES["14.cut_layers"] = {
    "A stage has at least one layer": (*FEW, "few"),
    "that 1F1B keeps on this stage at once": (*CUT_FITS, ""),
    "at most `memory` bytes together": (*TIGHT, "exact"),
    "return one whose slowest stage is as fast as possible": (*SLOWEST, ""),
    "The number of layers in each stage": (*CUT_FITS, ""),
    "None if no cut fits": (*TIGHT, "exact"),
    "1 to 12 layers": (*FEW, "few"),
    "they stay unchanged": (*SAME, ""),
    "ints, at least 1;": (*FEW, "few"),
    "perhaps more stages than layers": (*FEW, "few"),
}
