"""Wrong answers to lesson 07 that people give, and the sentence that each must hear."""

from answers import Wrong
from answers.altered import altered, wrapped

SGD = ("the weights of synchronous SGD on every rank",)
UNEVEN = ("lengths that do not divide by N",)
IN_PLACE = ("each rank's shard is updated in place",)
ALONE = ("send and recv alone",)
BYTES = ("at most 2(N-1)/N of the weights from each rank",)
KEPT = ("gradients and returned weights stay unchanged",)

# ---- 07.sharded_server ----

SERVER = """
def sharded_server(shard, gradient, rate):
    rank, world, part = dist.get_rank(), dist.get_world_size(), len(shard)
    mine = pad(gradient, (0, world * part - len(gradient))).view(world, part)

    def exchange(outgoing, incoming):
        messages = []
        for peer in range(world):
            if peer != rank:
                messages.append(dist.P2POp(dist.isend, outgoing[peer], peer))
                messages.append(dist.P2POp(dist.irecv, incoming[peer], peer))
        for request in dist.batch_isend_irecv(messages) if messages else []:
            request.wait()

    pushes = torch.empty_like(mine)
    pushes[rank] = mine[rank]
    {push}
    {step}
    weights = torch.empty_like(mine)
    weights[rank] = shard
    {pull}
    {end}
"""
RIGHT_SERVER = {
    "push": "exchange(mine, pushes)",
    "step": "shard -= rate * pushes.mean(0)",
    "pull": "exchange([shard] * world, weights)",
    "end": "return weights.flatten()[: len(gradient)]",
}


def server(**wrong):
    parts = {name: text.replace("\n", "\n    ") for name, text in (RIGHT_SERVER | wrong).items()}
    return SERVER.format(**parts)


CENTRAL = """
def sharded_server(shard, gradient, rate):
    rank, world, part = dist.get_rank(), dist.get_world_size(), len(shard)
    mine = pad(gradient, (0, world * part - len(gradient)))
    shards = [torch.empty_like(shard) for _ in range(world)]
    if rank > 0:
        dist.send(mine, 0)
        dist.send(shard, 0)
        whole = torch.empty_like(mine)
        dist.recv(whole, 0)
    else:
        shards[0] = shard
        total, push = mine.clone(), torch.empty_like(mine)
        for peer in range(1, world):
            dist.recv(push, peer)
            dist.recv(shards[peer], peer)
            total += push
        whole = torch.cat(shards) - rate * total / world
        for peer in range(1, world):
            dist.send(whole, peer)
    shard.copy_(whole.split(part)[rank])
    return whole[: len(gradient)]
"""
PARTIAL = """
def sharded_server(shard, gradient, rate):
    rank, world, part = dist.get_rank(), dist.get_world_size(), len(shard)
    mine = pad(gradient, (0, world * part - len(gradient))).view(world, part)
    weights, push = torch.empty_like(mine), torch.empty_like(shard)
    shard -= rate * mine[rank] / world
    for shift in range(1, world):
        to, source = (rank + shift) % world, (rank - shift) % world
        sent = dist.isend(mine[to].clone(), to)
        dist.recv(push, source)
        sent.wait()
        shard -= rate * push / world
        sent = dist.isend(shard.clone(), source)
        dist.recv(weights[to], to)
        sent.wait()
    weights[rank] = shard
    return weights.flatten()[: len(gradient)]
"""
RING = """
def sharded_server(shard, gradient, rate):
    rank, world, part = dist.get_rank(), dist.get_world_size(), len(shard)
    chunks = list(pad(gradient.clone(), (0, world * part - len(gradient))).split(part))

    def exchange(outgoing):
        into = torch.empty_like(shard)
        ops = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world),
               dist.P2POp(dist.irecv, into, (rank - 1) % world)]
        for request in dist.batch_isend_irecv(ops):
            request.wait()
        return into

    for k in range(world - 1):
        place = (rank - k - 2) % world
        chunks[place] = chunks[place] + exchange(chunks[(rank - k - 1) % world])
    shard.sub_(chunks[rank] / world, alpha=rate)
    chunks[rank] = shard.clone()
    for k in range(world - 1):
        chunks[(rank - k - 1) % world] = exchange(chunks[(rank - k) % world])
    return torch.cat(chunks)[: len(gradient)]
"""

# ---- 07.bounded ----

FORM = ("lists of workers that wait",)
AHEAD = ("no worker is more than the bound ahead",)
HELD = ("no worker waits that may begin",)
LEFT = ("a worker that has left blocks no other",)

CLOCK = """
class BoundedClock:
    {before}

    def __init__(self, workers, bound):
        self.bound, self.waiting = bound, []
        self.done = dict.fromkeys(range(workers), 0)
        {init}

    def finished(self, worker):
        self.done[worker] += 1
        self.waiting.append(worker)
        return self.ready(worker)

    def left(self, worker):
        {left}
        return self.ready(worker)

    def ready(self, caller):
        {slowest}
        may = [w for w in self.waiting if {test}]
        {then}
        return may
"""
RIGHT_CLOCK = {
    "before": "pass",
    "init": "pass",
    "left": "del self.done[worker]\nself.waiting = [w for w in self.waiting if w != worker]",
    "slowest": "slowest = min(self.done.values(), default=0)",
    "test": "self.done[w] - slowest <= self.bound",
    "then": "self.waiting = [w for w in self.waiting if w not in may]",
}


def clock(**wrong):
    chosen = (RIGHT_CLOCK | wrong).items()
    return CLOCK.format(**{name: text.replace("\n", "\n        ") for name, text in chosen})


# ---- 07.largest_rate ----

ONE = ("one curvature, without delay",)
SEVERAL = ("several curvatures",)
DELAY_ONE = ("a delay of 1",)
ANY_DELAY = ("any delay",)


def rate(formula, before="pass"):
    return f"def largest_rate(curvatures, delay):\n    {before}\n    return {formula}"


WRONG = {
    "07.sharded_server": [
        Wrong("central", CENTRAL, "let every rank serve its part", BYTES),
        Wrong(
            "the whole gradient is pushed to everyone",
            server(
                push="every = [torch.empty_like(mine) for _ in range(world)]\n"
                "exchange([mine] * world, every)\n"
                "every[rank] = mine\n"
                "pushes = torch.stack([one[rank] for one in every])"
            ),
            "Push to a server the part that it serves",
            BYTES,
        ),
        Wrong(
            "the whole model is pulled",
            server(
                pull="every = [torch.empty_like(mine) for _ in range(world)]\n"
                "exchange([weights] * world, every)\n"
                "for peer in range(world):\n"
                "    if peer != rank:\n"
                "        weights[peer] = every[peer][peer]"
            ),
            "pull from it that part",
            BYTES,
        ),
        Wrong(
            "the server's own gradient only",
            server(push="pass", step="shard -= rate * mine[rank]"),
            "each server only that rank's own gradient: push to the other servers, too",
        ),
        Wrong("pulled while pushes are missing", PARTIAL, "answers when all ranks have pushed"),
        Wrong(
            "pulled before the step",
            server(pull="exchange([shard + rate * pushes.mean(0)] * world, weights)\n"
                   "weights[rank] += rate * pushes.mean(0)"),
            "are the weights before the step",
        ),
        Wrong("the sum", server(step="shard -= rate * pushes.sum(0)"),
            "used the sum of the gradients; SGD in lockstep uses their mean"),
        Wrong("a rate of 1", server(step="shard -= pushes.mean(0)"),
            "used the mean with a rate of 1: multiply by `rate`"),
        Wrong("up the gradient", server(step="shard += rate * pushes.mean(0)"), "not down"),
        Wrong(
            "no message at all",
            "def sharded_server(shard, gradient, rate):\n"
            "    whole = torch.cat([shard] * dist.get_world_size())[: len(gradient)]\n"
            "    shard -= rate * gradient[: len(shard)].mean()\n    return whole",
            "is off by up to",
        ),
        Wrong(
            "one part is returned", server(end="return shard[: len(gradient)]"), "pull the parts"
        ),
        Wrong(
            "the padding is returned", server(end="return weights.flatten()"),
            "has the padding, too", UNEVEN,
        ),
        Wrong(
            "a length that divides is assumed",
            server().replace("pad(gradient, (0, world * part - len(gradient)))", "gradient"),
            "raised", UNEVEN,
        ),
        Wrong(
            "the shard stays",
            server(step="shard = shard - rate * pushes.mean(0)"),
            "What rank 0 returned in step 2 began from the shard before step 1",
        ),
        Wrong(
            "the shard is not the state",
            "_kept = {}\n\n" + server(
                step="new = _kept.get(len(shard), shard) - rate * pushes.mean(0)\n"
                "_kept[len(shard)] = shard = new"
            ),
            "update it in place",
            IN_PLACE,
        ),
        Wrong(
            "torch's collectives",
            server(
                push="dist.all_to_all_single(pushes, mine)",
                pull="dist.all_gather(list(weights), shard)",
            ),
            "called all_to_all. Build push and pull",
            ALONE,
        ),
        Wrong(
            "the gradient is averaged in place",
            server(end="gradient /= world\nreturn weights.flatten()[: len(gradient)]"),
            "changed gradients[0]",
            KEPT,
        ),
    ],
    "07.bounded": [
        Wrong("never waits", clock(test="True"), "All workers begin at once", AHEAD),
        Wrong(
            "a barrier in each step",
            clock(test="self.done[w] == slowest"),
            "It is lockstep, whatever the bound is",
            HELD,
        ),
        Wrong(
            "against the mean",
            clock(slowest="slowest = sum(self.done.values()) / max(1, len(self.done))"),
            "counts from the mean",
            AHEAD,
        ),
        Wrong(
            "one too few",
            clock(test="self.done[w] - slowest < self.bound"),
            "exactly `bound` steps ahead",
            HELD,
        ),
        Wrong(
            "one too many",
            clock(test="self.done[w] - slowest <= self.bound + 1"),
            "`bound` + 1 steps ahead",
            AHEAD,
        ),
        Wrong(
            "waits for the finished",
            clock(left="self.waiting = [w for w in self.waiting if w != worker]"),
            "still counts a worker that has left",
            LEFT,
        ),
        Wrong(
            "only the caller is answered",
            clock(then="may = [w for w in may if w == caller]\nself.waiting = []"),
            "forgets the waiting workers",
            HELD,
        ),
        Wrong(
            "one at a time",
            clock(then="may = may[:1]\nself.waiting = [w for w in self.waiting if w not in may]"),
            "returns one worker at a time",
            HELD,
        ),
        Wrong(
            "the dead are answered",
            clock(
                left="self.done[worker] = self.done.pop(worker)\nself.dead.add(worker)",
                init="self.dead = set()",
                slowest="here = [n for w, n in self.done.items() if w not in self.dead]\n"
                "slowest = min(here, default=0)",
            ),
            "which has left",
            LEFT,
        ),
        Wrong("who waits is returned again", clock(then="pass"), "answer each step once"),
        Wrong("nothing is returned", clock(then="may = None"), "must return a list of workers"),
        Wrong(
            "clocks that share their state",
            clock(before="done, waiting = {}, []").replace(
                "self.bound, self.waiting = bound, []", "self.bound = bound"
            ).replace(
                "self.done = dict.fromkeys(range(workers), 0)",
                "self.done.update(dict.fromkeys(range(workers), 0))",
            ).replace("self.waiting = [w for w in self.waiting if w not in may]",
                      "self.waiting[:] = [w for w in self.waiting if w not in may]"),
            "raised KeyError",
        ),
    ],
    "07.largest_rate": [
        Wrong("forgets the delay", rate("2 / max(curvatures)"), "forgets the delay", DELAY_ONE),
        Wrong(
            "one over the delay",
            rate("1 / delay / max(curvatures) if delay else 2 / max(curvatures)"),
            "not 1 over the delay",
            ANY_DELAY,
        ),
        Wrong(
            "two over delay + 1",
            rate("2 / (delay + 1) / max(curvatures)"),
            "not 2 over (delay + 1)",
            ANY_DELAY,
        ),
        Wrong(
            "the smallest curvature",
            rate("2 * math.sin(math.pi / (4 * delay + 2)) / min(curvatures)"),
            "The smallest curvature does not decide",
            SEVERAL,
        ),
        Wrong(
            "the mean curvature",
            rate("2 * math.sin(math.pi / (4 * delay + 2)) / (sum(curvatures) / len(curvatures))"),
            "The mean of the curvatures does not decide",
            SEVERAL,
        ),
        Wrong(
            "the sum of the curvatures",
            rate("2 * math.sin(math.pi / (4 * delay + 2)) / sum(curvatures)"),
            "The sum is not the curvature of any direction",
            SEVERAL,
        ),
        Wrong(
            "a delay of one alone",
            rate("(2 if delay == 0 else 1) / max(curvatures)"),
            "takes every delay for a delay of 1",
            ANY_DELAY,
        ),
        Wrong(
            "degrees",
            rate("2 * math.sin(180 / (4 * delay + 2)) / max(curvatures)"),
            "an angle in radians",
        ),
        Wrong(
            "one over the curvature",
            rate("math.sin(math.pi / (4 * delay + 2)) / max(curvatures)"),
            "2 over it, not 1",
        ),
        Wrong(
            "the curvatures are sorted in place",
            rate(
                "2 * math.sin(math.pi / (4 * delay + 2)) / curvatures[-1]",
                before="curvatures.sort()",
            ),
            "which was handed in to be read",
            ("the curvatures stay unchanged",),
        ),
        Wrong("no number", rate("'2 / max(curvatures)'"), "must be a positive number"),
    ],
}  # fmt: skip

RIGHT = {
    "07.sharded_server": [
        ("a ring", RING),
        (
            "pairs, one after the other, with send and recv that wait",
            """
def sharded_server(shard, gradient, rate):
    rank, world, part = dist.get_rank(), dist.get_world_size(), len(shard)
    padded = torch.zeros(world * part, dtype=shard.dtype)
    padded[: len(gradient)] = gradient
    mine = list(padded.split(part))

    def swap(out, into, peer):
        if rank < peer:
            dist.send(out, peer)
            dist.recv(into, peer)
        else:
            dist.recv(into, peer)
            dist.send(out, peer)

    total, push = mine[rank].clone(), torch.empty_like(shard)
    others = [(k - rank) % world for k in range(world)]  # in round k ranks r and k - r meet
    for peer in others:
        if peer != rank:
            swap(mine[peer], push, peer)
            total.add_(push)
    shard.sub_(total, alpha=rate / world)
    parts = [torch.empty_like(shard) for _ in range(world)]
    parts[rank].copy_(shard)
    for peer in others:
        if peer != rank:
            swap(shard, parts[peer], peer)
    return torch.cat(parts)[: len(gradient)].clone()
""",
        ),
    ],
    "07.bounded": [
        (
            "counts from all that is known, recomputed each time",
            """
class BoundedClock:
    def __init__(self, workers, bound):
        self.bound = bound
        self.finished_steps, self.begun = [0] * workers, [1] * workers
        self.here = set(range(workers))

    def _go(self):
        if not self.here:
            return []
        slowest = min(self.finished_steps[w] for w in self.here)
        out = set()
        for w in self.here:
            waits = self.begun[w] == self.finished_steps[w]
            if waits and self.finished_steps[w] <= slowest + self.bound:
                self.begun[w] += 1
                out.add(w)
        return sorted(out, reverse=True)

    def finished(self, worker):
        self.finished_steps[worker] += 1
        return self._go()

    def left(self, worker):
        self.here.discard(worker)
        return self._go()
""",
        ),
    ],
    "07.largest_rate": [
        (
            "found by trying",
            """
def largest_rate(curvatures, delay):
    def radius(x):  # of z^(delay + 1) = z^delay - x, the largest root
        matrix = torch.zeros(delay + 1, delay + 1, dtype=torch.float64)
        matrix[0, 0] += 1
        matrix[0, -1] -= x
        for row in range(1, delay + 1):
            matrix[row, row - 1] = 1
        return torch.linalg.eigvals(matrix).abs().max().item()

    low, high = 0.0, 4.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if radius(middle) < 1 else (low, middle)
    return torch.tensor(low / max(curvatures))
""",
        ),
        ("a cosine", rate("2 * math.cos(math.pi * delay / (2 * delay + 1)) / max(curvatures)")),
    ],
}

# ---- what the texts promise, as words of theirs -> (the criterion, the kind of case), or None

PROMISES = {
    "07.sharded_server": {
        "Every rank works, with a gradient of its own batch": (*SGD, ""),
        "**Push** each part of your gradient to the rank that serves it": (*BYTES, ""),
        "with the mean of all ranks' gradients": (*SGD, ""),
        "Use only messages": (*ALONE, ""),
        "No rank sends more than 2(N − 1)/N of the padded weights": (*BYTES, "uneven"),
        "need not be a multiple of N, and may be smaller than N": (*UNEVEN, "uneven"),
        "N may be 1": (*SGD, ""),
        "Then there is no message to send": (*SGD, ""),
        "`wait()` for": None,
        "Send outgoing[q] to each other rank q": None,
        "returns the new weights, (length,)": (*SGD, ""),
        "Updated in place": (*IN_PLACE, "uneven"),
        "one after the other, are the weights and then zeros": (*UNEVEN, "uneven"),
        "of the shard's dtype": (*UNEVEN, "uneven"),
        "is not changed": (*KEPT, ""),
        "rate: the learning rate": (*SGD, ""),
    },
    "07.bounded": {
        "All workers begin their first step without asking": (*FORM, ""),
        "`left(worker)` when one has been lost or has no batches left": (*LEFT, "left"),
        "An optional helper for both": None,
        "they wait no more": None,
        "Returns a list of workers, in any order": (*FORM, ""),
        "Both return the workers that may begin their next step now": (*FORM, ""),
        "at most `bound` steps more than the slowest worker that has not left": (*AHEAD, ""),
        "Return a worker from the call after which it may begin": (*HELD, ""),
        "once for each step": (*FORM, ""),
        "while it computed or while it waited, holds back no other worker": (*LEFT, "left"),
        "is never returned again": (*LEFT, "left"),
        "they are called 0 to workers - 1": (*FORM, ""),
        "with 0, all begin a step together": (*AHEAD, ""),
        "Two clocks are independent of each other": (*FORM, ""),
    },
    "07.largest_rate": {
        "for each curvature separately": (*SEVERAL, "several"),
        "Up to which rate does w shrink for all of them": (*SEVERAL, "several"),
        "gradients that are `delay` updates old": (*ANY_DELAY, "delay"),
        "Your answer may be off by 2%": (*ONE, ""),
        "The check runs the recursion slightly below it": (*ONE, ""),
        "does not diverge: a number": (*ONE, ""),
        "a list of positive numbers, in any order": (*SEVERAL, "several"),
        "not changed": ("the curvatures stay unchanged", "several"),
    },
}

# ---- mutants of the solution that are right ----

COUNTS = "counts are only compared with each other"
NONE = "no worker waits where none is left"
EQUIVALENT = {
    "07.bounded": {
        "`0` -> `1`": COUNTS,
        "`0` -> `-1`": COUNTS,
        "`0` -> `1` (#2)": NONE,
        "`0` -> `-1` (#2)": NONE,
    },
}


# -- what an answer may not assume -----------------------------------------------------------------

WRONG["07.sharded_server"] += [
    Wrong(
        "an empty list of messages at N = 1",
        altered("07.sharded_server", (" if messages else []", "")),
        says="raised IndexError",
    ),
    Wrong(
        "the first model's rate",
        wrapped(
            "07.sharded_server",
            "sharded_server",
            "RATES = {}\n\n\ndef sharded_server(shard, gradient, rate):\n"
            "    rate = RATES.setdefault(gradient.shape, rate)\n"
            "    return solution(shard, gradient, rate)\n",
        ),
        says="What rank 0 returned in step 1",
    ),
    Wrong(
        "sends that are never waited for",
        altered(
            "07.sharded_server",
            ("        for request in dist.batch_isend_irecv(messages) if messages else []:\n"
             "            request.wait()",
             "        for i, request in enumerate(dist.batch_isend_irecv(messages) if "
             "messages else "
             "[]):\n            if i % 2:\n                request.wait()"),
        ),
        says="never waited for",
        loses=("send and recv alone",),
    ),
]  # fmt: skip
WRONG["07.bounded"] += [
    Wrong(
        "left() returns no worker",
        altered(
            "07.bounded",
            ("[other for other in self.waiting if other != worker]\n        return self.release()",
             "[other for other in self.waiting if other != worker]\n        return []"),
        ),
        says="left() returned no worker",
        loses=("a worker that has left blocks no other",),
    )
]  # fmt: skip
WRONG["07.largest_rate"] += [
    Wrong(
        "bisection between 0 and 10",
        wrapped(
            "07.largest_rate",
            "largest_rate",
            "def largest_rate(curvatures, delay):\n    return min(10.0, solution(curvatures, "
            "delay))\n",
        ),
        says="w still shrinks",
        loses=("several curvatures",),
    ),
    Wrong(
        "where w begins to swing",
        "def largest_rate(curvatures, delay):\n"
        "    return delay**delay / (delay + 1) ** (delay + 1) / max(curvatures) * (2 - (delay "
        "> 0))\n",
        says="the fastest rate. Above it w begins to swing",
        loses=("a delay of 1", "any delay"),
    ),
]


# -- what authors who had not read the judge got away with -----------------------------------------

WRONG["07.sharded_server"] += [
    Wrong(
        "alone, a view of the shard is returned",
        altered(
            "07.sharded_server",
            (
                "weights = torch.empty_like(local)",
                "if world == 1:\n        return shard[: len(gradient)]\n"
                "    weights = torch.empty_like(local)",
            ),
        ),
        says="was changed by a later step",
        loses=KEPT,
    ),
]
WRONG["07.largest_rate"] += [
    Wrong(
        "a delay above 100 counts as 100",
        altered("07.largest_rate", ("(4 * delay + 2)", "(4 * min(delay, 100) + 2)")),
        says="of your rate",
        loses=ANY_DELAY,
    ),
]
# ---- 07.update_bound ----

YOUNG = ("no gradient can be older than the bound",)
BEGINS = ("no worker waits that could begin",)
QUEUE = ("the first that asked begins first",)
GONE = ("a worker that has left counts no more",)
AGE = "self.updates - min(self.pulled.values(), default=self.updates)"
SUM = "age + len(self.pulled) > self.bound"


def updates(*changes):
    return altered("07.update_bound", *changes)


WRONG["07.update_bound"] = [
    Wrong(
        "the updates since the pull alone",
        updates((SUM, "age > self.bound")),
        "that may still come: each other worker in flight can push before this one",
        YOUNG,
    ),
    Wrong(
        "no more than the bound in flight",
        updates((SUM, "len(self.pulled) > self.bound")),
        "pulls: a slow worker's gradient grows older while others push and pull",
        YOUNG,
    ),
    Wrong(
        "itself among the others",
        updates((SUM, "age + len(self.pulled) >= self.bound and self.pulled")),
        "A worker's own push does not make its gradient older",
        BEGINS,
    ),
    Wrong(
        "the one that begins is forgotten",
        updates((SUM, "age + len(self.pulled) - 1 > self.bound")),
        "The worker that begins is in flight too, so it counts for all the others",
        YOUNG,
    ),
    Wrong(
        "the newest pull", updates((AGE, AGE.replace("min", "max"))), "not the newest", YOUNG
    ),
    Wrong(
        "the mean of the pulls",
        updates((AGE, "self.updates - (sum(self.pulled.values()) / len(self.pulled) "
                      "if self.pulled else self.updates)")),
        "not the mean",
        YOUNG,
    ),
    Wrong("one at a time", updates((SUM, "self.pulled")), "one worker compute at a time", BEGINS),
    Wrong("no bound", updates((SUM, "False")), "Every worker begins at once", YOUNG),
    Wrong(
        "one for each call",
        updates(("while self.waiting:", "for _ in self.waiting[:1]:")),
        "returns one worker at a time",
        BEGINS,
    ),
    Wrong(
        "all that wait, after one look",
        updates(
            ("while self.waiting:", "room = self.bound >= self.updates - min(self.pulled.values(), "
             "default=self.updates) + len(self.pulled)\n        while self.waiting:"),
            (SUM, "not room"),
        ),
        "begin. Each worker that begins is in flight when you check the next one",
        YOUNG,
    ),
    Wrong(
        "the bound on steps",
        """
class UpdateBound:
    def __init__(self, bound):
        self.bound, self.done, self.waiting = bound, {}, []

    def asks(self, worker):
        self.done.setdefault(worker, 0)
        self.waiting.append(worker)
        return self.begin()

    def pushed(self, worker):
        self.done[worker] += 1
        return self.begin()

    def left(self, worker):
        self.done.pop(worker, None)
        self.waiting = [other for other in self.waiting if other != worker]
        return self.begin()

    def begin(self):
        slowest = min(self.done.values(), default=0)
        may = [w for w in self.waiting if self.done[w] - slowest <= self.bound]
        self.waiting = [w for w in self.waiting if w not in may]
        return may
""",
        "task 2's bound, on finished steps",
        YOUNG,
    ),
    Wrong(
        "a push lets no worker begin",
        updates(("+= 1\n        return self.begin()", "+= 1\n        return []")),
        "pushed() returns no worker",
        BEGINS,
    ),
    Wrong("the last that asked", updates(("pop(0)", "pop()")), "asked before it", QUEUE),
    Wrong(
        "the lowest number first",
        updates(("may.append(self.waiting.pop(0))",
                 "may.append(min(self.waiting))\n            self.waiting.remove(may[-1])")),
        "asked before it",
        QUEUE,
    ),
    Wrong(
        "the lost stay in flight",
        updates(("self.pulled.pop(worker, None)", "pass")),
        "still counts a worker that has left",
        GONE,
    ),
    Wrong(
        "a lost gradient is an update",
        updates(("self.pulled.pop(worker, None)",
                 "self.updates += self.pulled.pop(worker, None) is not None")),
        "counts a lost gradient as an update",
        GONE,
    ),
    Wrong(
        "the lost keep their place in the queue",
        updates(("self.waiting = [other for other in self.waiting if other != worker]", "pass")),
        "none that has left since",
        GONE,
    ),
    Wrong(
        "the lost were computing",
        updates(("self.pulled.pop(worker, None)", "del self.pulled[worker]")),
        "raised KeyError",
        ("lists of workers that wait",),
    ),
    Wrong(
        "a queue for all servers",
        updates(("class UpdateBound:", "queue = []\n\n\nclass UpdateBound:"),
                ("self.waiting = []", "self.waiting = queue"),
                ("self.waiting = [other for other in self.waiting if other != worker]",
                 "self.waiting[:] = [other for other in self.waiting if other != worker]")),
        "which does not wait",
        ("lists of workers that wait",),
    ),
    Wrong(
        "yes or no",
        updates(("return may", "return bool(may)")),
        "must return a list of workers",
        ("lists of workers that wait",),
    ),
]  # fmt: skip
RIGHT["07.update_bound"] = [
    (
        "the age that each gradient can still reach",
        """
from collections import OrderedDict


class UpdateBound:
    def __init__(self, bound):
        self.bound, self.worst, self.queue = bound, {}, OrderedDict()

    def asks(self, worker):
        self.queue[worker] = True
        return self._go()

    def pushed(self, worker):
        self.worst.pop(worker)  # an update for the others, and one fewer that can come
        return self._go()

    def left(self, worker):
        self.queue.pop(worker, None)
        if worker in self.worst:
            del self.worst[worker]
            self.worst = {other: n - 1 for other, n in self.worst.items()}
        return self._go()

    def _go(self):
        begun = set()
        while self.queue and max([len(self.worst), *(n + 1 for n in self.worst.values())]) <= (
            self.bound
        ):
            worker, _ = self.queue.popitem(last=False)
            self.worst = {other: n + 1 for other, n in self.worst.items()}
            self.worst[worker] = len(self.worst)
            begun.add(worker)
        return begun
""",
    ),
    (
        "how many may begin, in one formula",
        """
class UpdateBound:
    def __init__(self, bound):
        self.bound, self.flying, self.line = bound, [], []  # flying: [worker, age]

    def asks(self, worker):
        self.line += [worker]
        return self.answer()

    def pushed(self, worker):
        self.flying = [[w, age + 1] for w, age in self.flying if w != worker]
        return self.answer()

    def left(self, worker):
        self.flying = [[w, age] for w, age in self.flying if w != worker]
        if worker in self.line:
            self.line.remove(worker)
        return self.answer()

    def answer(self):
        oldest = max((age for _, age in self.flying), default=0)
        room = max(0, self.bound + 1 - oldest - len(self.flying))
        go, self.line = self.line[:room], self.line[room:]
        self.flying += [[w, 0] for w in go]
        return go[::-1]
""",
    ),
]
PROMISES["07.update_bound"] = {
    "no gradient may be more than `bound` updates old": (*YOUNG, ""),
    "so that no gradient is too old": (*YOUNG, ""),
    "An optional helper for all three": None,
    "No rank knows how long a step takes": (*YOUNG, ""),
    "A worker that could begin under this guarantee must not wait": (*BEGINS, ""),
    "the one that asked first begins first": (*QUEUE, "left"),
    "and `left(worker)` when a worker is lost": (*GONE, "left"),
    "Every push is one update": (*BEGINS, ""),
    "A worker that has pushed or left may ask again at any time": (*GONE, "left"),
    "it pulls and computes, and is *in flight*": None,
    "Each call returns the workers that begin now": ("lists of workers that wait", ""),
    "Two servers are independent of each other": ("lists of workers that wait", ""),
    "This may happen while it computes, and then its gradient never arrives": (*GONE, "left"),
}
EQUIVALENT["07.update_bound"] = {
    "`0` -> `1`": COUNTS,
    "`0` -> `-1`": COUNTS,
}
