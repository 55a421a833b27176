"""Wrong answers to lesson 17 that people give, and the sentence that each must hear."""

from answers import Wrong
from answers.altered import altered

PLAIN = ("plain training on the mean gradient, from rank 0's weights",)
MORE = ("another optimizer, another dtype, called again",)
BITS = ("two ranks: DDP's parameters to the last bit",)
SHARE = ("each rank keeps its share of the states",)
TRAFFIC = ("sends no more than an all-reduce in each step",)
SUMS = ("sums: all_reduce, reduce, reduce_scatter",)
MOVES = ("copies and pieces",)
CHEAP = ("the cheaper one where two fit",)
NONE = ("None where no single one does it, or none is needed",)
MEMORY = ("GB on a rank, all stages",)
SENT = ("GB that a rank sends in a step",)
SECONDS = ("seconds of a step, slow and fast networks",)
ALONE = ("one rank sends nothing, and computes",)

TRAIN = """
def train(parameters, backward, steps, optimizer_class, **options):
    rank, world = dist.get_rank(), dist.get_world_size()
    {start}
    padding = -sum(p.numel() for p in parameters) % world
    sizes = [p.numel() for p in parameters]

    def flat(tensors):
        return torch.nn.functional.pad(torch.cat([t.flatten() for t in tensors]), (0, padding))

    part = torch.nn.Parameter(flat(p.detach() for p in parameters).chunk(world)[rank].clone())
    optimizer = optimizer_class([part], **options)
    for step in range(steps):
        backward(step)
        part.grad = {reduce}
        optimizer.step()
        whole = {gather}
        with torch.no_grad():
            for p, new in zip(parameters, whole.split([*sizes, padding])):
                {copy}
"""
SOLVED = {
    "start": "[dist.broadcast(p.detach(), src=0) for p in parameters]",
    "reduce": "reduce_scatter(flat(p.grad for p in parameters)) / world",
    "gather": "all_gather(part.detach())",
    "copy": "p.copy_(new.view_as(p))",
}
LOOP = """
def train(parameters, backward, steps, optimizer_class, **options):
    {start}
    optimizer = optimizer_class(parameters, **options)
    for step in range(steps):
        backward(step)
        {reduce}
        optimizer.step()
        {after}
"""
EACH = "[dist.all_reduce(p.grad) for p in parameters]"
MEAN = "[p.grad.div_(dist.get_world_size()) for p in parameters]"


def train(**wrong):
    return TRAIN.format(**(SOLVED | wrong))


def loop(start="pass", reduce="pass", after="pass"):
    return LOOP.format(start=start, reduce=reduce, after=after)


BROADCAST = SOLVED["start"]

WHICH = """
def which_collective(before, after):
    n, k = len(before), len(before[0])
    {first}
    total = [sum(column) for column in zip(*before)]
    every = [x for row in before for x in row]

    def at(root, row):
        return [row if rank == root else before[rank] for rank in range(n)]

    def cut(row):
        return [row[rank * k // n : (rank + 1) * k // n] for rank in range(n)]

    makes = {{
        "broadcast": [[row] * n for row in before],
        "reduce": [at(root, total) for root in range(n)],
        "gather": [at(root, every) for root in range(n)],
        "all_reduce": [[total] * n],
        "all_gather": [[every] * n],
    }}
    if k % n == 0:
        makes["scatter"] = [cut(row) for row in before]
        makes["reduce_scatter"] = [cut(total)]
        makes["all_to_all"] = [
            [[x for row in before for x in cut(row)[rank]] for rank in range(n)]
        ]
    {rest}
"""
COST = 'cost = {"all_reduce": 2 * k, "all_gather": n * k, "scatter": k / n}\n    '
FITS = "fits = [name for name, tables in makes.items() if after in tables]\n    "
LEAST = "return min(fits, key=lambda name: cost.get(name, k), default=None)"


def which(first="if before == after:\n        return None", rest=COST + FITS + LEAST):
    return WHICH.format(first=first, rest=rest)


def instead(**names):
    """The right answer, but one name is said for another."""
    return which(rest=COST + FITS + f"said = {LEAST.removeprefix('return ')}\n"
                 f"    return {names!r}.get(said, said)")  # fmt: skip


ESTIMATE = """
def estimate(job):
    world, stage, width = job["world"], job["stage"], job["width"]
    psi = 12 * job["layers"] * width**2 + 2 * job["vocab"] * width
    tokens = job["batch"] * job["context"]
    {held}
    held += {activations}
    sent = {sent}
    network = {network}
    compute = {compute}
    return {returns}
"""
ESTIMATED = {
    "held": "held = sum(size * psi / (world if stage >= first else 1) "
    "for size, first in ((2, 3), (2, 2), (12, 1)))",
    "activations": '34 * job["layers"] * tokens * width',
    "sent": "(3 if stage == 3 else 2) * psi * 2 * (world - 1) / world",
    "network": '8 * sent / (job["gbit"] * 1e9)',
    "compute": '6 * psi * tokens / (job["tflops"] * 1e12)',
    "returns": "held / 1e9, sent / 1e9, max(network, compute)",
}


def estimated(**wrong):
    return ESTIMATE.format(**(ESTIMATED | wrong))


WRONG = {
    "17.repair_the_article": [
        Wrong("as printed", loop(), "each rank trained alone", PLAIN),
        Wrong(
            "all-reduce alone: DDP",
            loop(BROADCAST, f"{EACH}; {MEAN}"),
            says="nothing is sharded",
            loses=SHARE,
        ),
        Wrong(
            "a broadcast, and no gradient travels",
            loop(BROADCAST),
            says="stepped on its own gradient",
            loses=PLAIN,
        ),
        Wrong(
            "the shards are never gathered",
            train(gather="flat(p.detach() for p in parameters)"),
            says="never moved",
            loses=PLAIN,
        ),
        Wrong(
            "weights are averaged",
            loop(
                BROADCAST,
                after="[(dist.all_reduce(p.detach()), p.detach().div_(dist.get_world_size()))"
                " for p in parameters]",
            ),
            says="that is local SGD",
            loses=PLAIN,
        ),
        Wrong(
            "own weights at the start",
            loop(reduce=f"{EACH}; {MEAN}"),
            says="began with weights of their own",
            loses=PLAIN,
        ),
        Wrong(
            "a sum",
            train(reduce="reduce_scatter(flat(p.grad for p in parameters))"),
            says="added up, not averaged",
        ),
        Wrong(
            "an all-reduce, of which a part is kept",
            """
def train(parameters, backward, steps, optimizer_class, **options):
    rank, world = dist.get_rank(), dist.get_world_size()
    for p in parameters:
        dist.broadcast(p.detach(), src=0)
    padding = -sum(p.numel() for p in parameters) % world
    sizes = [p.numel() for p in parameters]

    def flat(tensors):
        return torch.nn.functional.pad(torch.cat([t.flatten() for t in tensors]), (0, padding))

    part = torch.nn.Parameter(flat(p.detach() for p in parameters).chunk(world)[rank].clone())
    optimizer = optimizer_class([part], **options)
    for step in range(steps):
        backward(step)
        whole = flat(p.grad for p in parameters)
        dist.all_reduce(whole)
        part.grad = whole.chunk(world)[rank] / world
        optimizer.step()
        whole = all_gather(part.detach())
        with torch.no_grad():
            for p, new in zip(parameters, whole.split([*sizes, padding])):
                p.copy_(new.view_as(p))
""",
            says="All ranks sent",
            loses=TRAFFIC,
        ),
        Wrong(
            "backward is called once",
            train().replace(
                "        backward(step)", "        if not step:\n            backward(step)"
            ),
            says="each step once, in order",
            loses=PLAIN,
        ),
        Wrong(
            "torch's ZeroRedundancyOptimizer inside",
            """
def train(parameters, backward, steps, optimizer_class, **options):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    for p in parameters:
        dist.broadcast(p.detach(), src=0)
    optimizer = ZeroRedundancyOptimizer(parameters, optimizer_class, **options)
    for step in range(steps):
        backward(step)
        for p in parameters:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
""",
            says="is ready-made",
            loses=PLAIN,
        ),
    ],
    "17.which_collective": [
        Wrong(
            "broadcast as partial synchronisation",
            instead(all_reduce="broadcast"),
            says="it adds up nothing",
            loses=SUMS,
        ),
        Wrong(
            "all_reduce for reduce_scatter",
            instead(reduce_scatter="all_reduce"),
            says="here each has its part",
            loses=SUMS,
        ),
        Wrong("through a root", instead(all_gather="gather"), "on the root alone", MOVES),
        Wrong(
            "all_to_all for gather",
            instead(gather="all_to_all"),
            says="no rank gets a full row by it",
            loses=MOVES,
        ),
        Wrong("a barrier", instead(broadcast="barrier"), "it only waits", MOVES),
        Wrong(
            "the first that fits",
            which(
                rest=FITS.replace("makes.items()", "sorted(makes.items())")
                + "return fits[0] if fits else None"
            ),
            says="another one makes it with",
            loses=CHEAP,
        ),
        Wrong(
            "an all_reduce where nothing fits",
            which(rest=COST + FITS + LEAST.replace("None", '"all_reduce"')),
            says="no other single one does",
            loses=NONE,
        ),
        Wrong(
            "a broadcast where nothing must be sent",
            which(first='if before == after:\n        return "broadcast"'),
            says="Nothing must be sent",
            loses=NONE,
        ),
        Wrong(
            "None for a scatter of equal rows",
            which(
                first="if before == after or before.count(before[0]) == n and "
                "sum(after, []) == before[0]:\n        return None"
            ),
            says="None is for an `after` that equals `before`",
            loses=NONE,
        ),
        Wrong("a name with hyphens", instead(all_reduce="all-reduce"), "is none of", SUMS),
        Wrong(
            "never anything",
            "def which_collective(before, after):\n    return None\n",
            "there is one that makes this",
            SUMS,
        ),
        Wrong(
            "the rows are changed",
            which(
                first="if before == after:\n        return None\n    before.append([0] * k)"
                "\n    before.pop()\n    before[0].append(0)"
            )
            .replace("    makes = {", "    before[0].pop()\n    makes = {", 1)
            .replace("if after in tables]", "if after in tables]\n    before[0][0] += 1"),
            says="changed",
            loses=SUMS,
        ),
    ],
    "17.estimate": [
        Wrong(
            "parameters alone",
            estimated(held="held = 2 * psi", activations="0"),
            says="the parameters alone",
            loses=MEMORY,
        ),
        Wrong("no activations", estimated(activations="0"), "Where are the activations", MEMORY),
        Wrong(
            "everything divided by N",
            estimated(held="held = 16 * psi / world"),
            says="divides all by N",
            loses=MEMORY,
        ),
        Wrong(
            "activations divided by N",
            estimated(activations=ESTIMATED["activations"] + " / world"),
            says="no rank shares them",
            loses=MEMORY,
        ),
        Wrong("nothing divided", estimated(held="held = 16 * psi"), "This divides nothing", MEMORY),
        Wrong(
            "GiB for GB",
            estimated(returns="held / 2**30, sent / 1e9, max(network, compute)"),
            says="GB is 1e9 bytes",
            loses=MEMORY,
        ),
        Wrong(
            "bytes for bits",
            estimated(network='sent / (job["gbit"] * 1e9)'),
            says="bytes were taken for bits",
            loses=SECONDS,
        ),
        Wrong(
            "2Ψ at every stage",
            estimated(sent="2 * psi * 2 * (world - 1) / world"),
            says="Stage 3 gathers parameters twice",
            loses=SENT,
        ),
        Wrong(
            "without the ring's factor",
            estimated(sent="(3 if stage == 3 else 2) * psi * 2"),
            says="without the ring's",
            loses=SENT,
        ),
        Wrong(
            "numbers of 4 bytes",
            estimated(sent="(3 if stage == 3 else 2) * psi * 4 * (world - 1) / world"),
            says="Numbers of 4 bytes",
            loses=SENT,
        ),
        Wrong(
            "one after the other",
            estimated(returns="held / 1e9, sent / 1e9, network + compute"),
            says="not their sum",
            loses=SECONDS,
        ),
        Wrong(
            "forward alone",
            estimated(compute='2 * psi * tokens / (job["tflops"] * 1e12)'),
            says="with backward it is 6",
            loses=SECONDS,
        ),
        Wrong("one number", estimated(returns="held / 1e9"), "must be three numbers", MEMORY),
    ],
}

RIGHT = {
    "17.repair_the_article": [
        (
            "each parameter cut by itself",
            """
def train(parameters, backward, steps, optimizer_class, **options):
    rank, world = dist.get_rank(), dist.get_world_size()

    def padded(t):
        return torch.nn.functional.pad(t.flatten(), (0, -t.numel() % world))

    parts = []
    for p in parameters:
        dist.broadcast(p.detach(), src=0)
        parts.append(torch.nn.Parameter(padded(p.detach()).chunk(world)[rank].clone()))
    optimizer = optimizer_class(parts, **options)
    for step in range(steps):
        backward(step)
        for p, part in zip(parameters, parts):
            part.grad = reduce_scatter(padded(p.grad)) / world
        optimizer.step()
        for p, part in zip(parameters, parts):
            p.data.copy_(all_gather(part.detach())[: p.numel()].view_as(p))
""",
        ),
    ],
    "17.which_collective": [
        ("one comparison after the other", """
def which_collective(before, after):
    n, k = len(before), len(before[0])
    columns = list(zip(*before))
    total, every = [sum(c) for c in columns], sum(before, [])
    step = k // n
    whole = k % n == 0
    if after == before:
        return None
    for row in before:
        if whole and after == [row[i * step:(i + 1) * step] for i in range(n)]:
            return "scatter"
    for row in before:
        if after == [row] * n:
            return "broadcast"
    for root in range(n):
        others = all(after[i] == before[i] for i in range(n) if i != root)
        if others and after[root] == total:
            return "reduce"
        if others and after[root] == every:
            return "gather"
    if whole and after == [total[i * step:(i + 1) * step] for i in range(n)]:
        return "reduce_scatter"
    if whole and after == [sum((r[i * step:(i + 1) * step] for r in before), []) for i in range(n)]:
        return "all_to_all"
    if after == [total] * n:
        return "all_reduce"
    return "all_gather" if after == [every] * n else None
"""),
    ],
    "17.estimate": [
        ("a list, and constants by stage", """
def estimate(job):
    L, C, V, N = job["layers"], job["width"], job["vocab"], job["world"]
    psi, T = (12 * L * C + 2 * V) * C, job["batch"] * job["context"]
    whole = (16, 4, 2, 0)[job["stage"]]
    memory = whole * psi + (16 - whole) * psi / N + 34 * L * T * C
    volume = (4, 4, 4, 6)[job["stage"]] * psi * (1 - 1 / N)
    return [memory * 1e-9, volume * 1e-9,
            max(volume / (job["gbit"] * 1e9 / 8), 6e-12 * psi * T / job["tflops"])]
"""),
    ],
}  # fmt: skip

PROMISES = {
    "17.repair_the_article": {
        "It trains every rank alone": None,
        "every rank begins with rank 0's weights": (*PLAIN, ""),
        "the optimizer's states for its part alone": (*SHARE, ""),
        "sends no more than an all-reduce would": (*TRAFFIC, ""),
        "It must run on any number of ranks": (*MORE, "again"),
        "the parameters are DDP's to the last bit": (*BITS, ""),
        "each of any shape, all of one dtype": (*MORE, "double"),
        "called once for each of range(steps)": (*PLAIN, ""),
        "all states lie in optimizers of this class": (*SHARE, ""),
    },
    "17.which_collective": {
        "have a row of numbers for each rank": None,
        "Return None if `after` equals `before`": (*NONE, "none"),
        "name the collective all the same": (*NONE, "none"),
        "all ranks together send least": (*CHEAP, "cheap"),
        "all ranks together send:": (*CHEAP, "cheap"),
        "have a root, which may be any rank": (*MOVES, "moves"),
        "n must divide k": (*MOVES, "moves"),
        "a list for each rank": None,
    },
    "17.estimate": {
        "2 bytes for each parameter": (*MEMORY, ""),
        "activations for each token": (*MEMORY, ""),
        "6 operations for each parameter and token": (*SECONDS, "time"),
        "Each must be within 5%": (*MEMORY, ""),
        "`job` stays as it is": (*ALONE, "alone"),
        "batch (sequences of each rank)": None,
    },
}

EQUIVALENT = {
    "17.repair_the_article": {
        "`p.detach()` -> `p`": "a collective reads and writes values, not the graph",
        "`p.detach()` -> `p` (#2)": "nn.Parameter leaves the graph behind",
        "`flat((p.detach() for p in parameters)).chunk(world)[rank]...` -> "
        "`flat((p.detach() for p in parameters)).chunk(world)[rank]`": "flat has made a copy",
        "`part.detach()` -> `part`": "a collective reads values, not the graph",
        "`zip(parameters, whole.split([*sizes, padding]), strict=Fa...` -> "
        "`zip(parameters, whole.split([*sizes, padding]))`": "not strict is the default",
    },
    "17.which_collective": {
        "`0` -> `-1`": "all rows are of one length",
        "`range(n)` -> `range(n + 1)` (#3)": "a root that is no rank changes nothing, which was "
        "answered before",
        "`range(n)` -> `range(n + 1)` (#4)": "the same",
        "`zip(*before, strict=True)` -> `zip(*before)`": "all rows are of one length",
        "`True` -> `False`": "the same",
    },
    "17.estimate": {
        "`34` -> `35`": "3% more activations, and 5% are allowed",
        "`34` -> `33`": "the same",
    },
}


# -- what authors who had not read the judge got away with -----------------------------------------

WRONG["17.repair_the_article"] += [
    Wrong(
        "float32 whatever the dtype",
        altered(
            "17.repair_the_article",
            (
                "torch.cat([t.flatten() for t in tensors])",
                "torch.cat([t.flatten() for t in tensors]).float()",
            ),
        ),
        says="float64 was rounded on the way",
        loses=MORE,
    ),
    Wrong(
        "new parameters in the list",
        altered(
            "17.repair_the_article",
            (
                "for p, new in zip(parameters, whole.split([*sizes, padding]), strict=False):\n"
                "                p.copy_(new.view_as(p))",
                "parts = zip(list(parameters), whole.split([*sizes, padding]), strict=False)\n"
                "            made = [torch.nn.Parameter(t.view_as(p).clone()) for p, t in parts]\n"
                "            parameters[:] = made",
            ),
        ),
        says="ranks 0 and 1 raised",
    ),
]
WRONG["17.which_collective"] += [
    Wrong(
        "the rows of the first and the last rank decide",
        altered(
            "17.which_collective",
            ("[[total] * n]", "[after if after[0] == after[-1] == total else None]"),
        ),
        says="no other single one does: None",
        loses=NONE,
    ),
    Wrong(
        "rows that do not divide are cut, too",
        altered(
            "17.which_collective",
            ("if k % n:", "if k < n:"),
            (
                "row[rank * k // n : (rank + 1) * k // n]",
                "row[rank * (k // n) : (rank + 1) * (k // n)]",
            ),
        ),
        says="no other single one does: None",
        loses=NONE,
    ),
]


# -- 17.fastest_route ------------------------------------------------------------------------------

ARRIVES = ("routes of calls that can be made, to the goal",)
FAST_SUMS = ("the fastest one for sums",)
FAST_COPIES = ("the fastest one for copies and parts",)
AXES = ("one axis, and three",)
NO_WAY = ("nothing to do, or no way",)
TOOK = "took = sends(n) * k / rates[axis]"
FOUND = "return route\n"


def route(*changes):
    return altered("17.fastest_route", *changes)


STRAIGHT = """
def fastest_route(start, goal, ranks, rates):
    direct = {"PR": ["all_reduce"], "PS": ["reduce_scatter"], "SR": ["all_gather"], "RS": ["cut"]}
    route = []
    for axis in %s:
        pair = start[axis] + goal[axis]
        if start[axis] != goal[axis]:
            if pair not in direct:
                return None
            route += [(axis, call) for call in direct[pair]]
    return route
"""
GREEDY = """
def fastest_route(start, goal, ranks, rates):
    calls = [("all_reduce", "P", "R", 2), ("reduce_scatter", "P", "S", 1),
             ("all_gather", "S", "R", 0), ("cut", "R", "S", 3)]
    now, route, seen = start, [], {start}
    while now != goal:
        options = []
        for axis, n in enumerate(ranks):
            k = 1.0
            for letter, m in zip(now, ranks):
                k /= m if letter == "S" else 1
            for call, before, after, kind in calls:
                new = now[:axis] + after + now[axis + 1:]
                if now[axis] == before and new not in seen and not stuck(new, goal):
                    share = [n - 1, (n - 1) / n, 2 * (n - 1) / n, 0][kind]
                    options.append((share * k / rates[axis], axis, call, new))
        if not options:
            return None
        _, axis, call, now = min(options)
        route.append((axis, call))
        seen.add(now)
    return route


def stuck(now, goal):
    return any(a != "P" == b for a, b in zip(now, goal))
"""
WRONG["17.fastest_route"] = [
    Wrong(
        "at most five calls",
        route(("if now in done:", "if now in done or len(route) == 5:")),
        says="are possible",
        loses=("one axis, and three",),
    ),
    Wrong(
        "each axis straight to its goal",
        STRAIGHT % "range(len(start))",
        says="Yours has the fewest calls",
        loses=FAST_SUMS,
    ),
    Wrong(
        "the fewest calls",
        route((TOOK, "took = 1")),
        says="Yours has the fewest calls",
        loses=FAST_SUMS,
    ),
    Wrong(
        "the fewest bytes",
        route((TOOK, "took = sends(n) * k")),
        says="Yours sends the fewest bytes",
        loses=FAST_SUMS,
    ),
    Wrong(
        "a rank always holds the full tensor",
        route((TOOK, "took = sends(n) / rates[axis]")),
        says="But while an axis is S a rank holds less",
        loses=FAST_SUMS,
    ),
    Wrong(
        "an all_gather that sends as a ring of the full tensor",
        route(("lambda n: n - 1)", "lambda n: (n - 1) / n)")),
        says="if an all_gather sent (n - 1)k/n",
        loses=FAST_SUMS,
    ),
    Wrong(
        "an all_reduce for half",
        route(("lambda n: 2 * (n - 1) / n)", "lambda n: (n - 1) / n)")),
        says="if an all_reduce sent as little as a reduce_scatter",
        loses=FAST_SUMS,
    ),
    Wrong(
        "a cut that costs",
        route(("lambda n: 0)", "lambda n: (n - 1) / n)")),
        says="if a cut sent something",
        loses=FAST_SUMS,
    ),
    Wrong(
        "times the rate",
        route((TOOK, "took = sends(n) * k * rates[axis]")),
        says="if a fast axis took longer: divide by its rate",
        loses=FAST_SUMS,
    ),
    Wrong(
        "no way round: only axes that differ from the goal",
        route(("if now[axis] == before:", "if now[axis] == before and now[axis] != goal[axis]:")),
        says="so a way round can be faster",
        loses=FAST_SUMS,
    ),
    Wrong(
        "seen when it is pushed",
        route(
            ("        if now in done:\n            continue\n        done.add(now)\n", ""),
            (
                "                    heappush(heap,",
                "                    if new in done:\n"
                "                        continue\n"
                "                    done.add(new)\n"
                "                    heappush(heap,",
            ),
        ),
        says="so a way round can be faster",
        loses=FAST_SUMS,
    ),
    Wrong(
        "always the call that takes least now",
        GREEDY,
        says="The same calls are faster in the order",
        loses=FAST_SUMS,
    ),
    Wrong(
        "at most three calls",
        route(("if now in done:", "if now in done or len(route) == 3:")),
        says="so a way round can be faster",
        loses=AXES,
    ),
    Wrong(
        "sums go over the axes in order",
        """
def fastest_route(start, goal, ranks, rates):
    axes = range(len(start))
    if any(a != "P" == b for a, b in zip(start, goal)):
        return None
    route = []
    sums = [a for a in axes if start[a] == "P" != goal[a]]
    for a in sums[:-1]:
        route.append((a, "reduce_scatter"))
    for a in sums[-1:]:
        route.append((a, "all_reduce" if goal[a] == "R" else "reduce_scatter"))
    for a in axes:
        if start[a] == "R" and goal[a] == "S":
            route.append((a, "cut"))
        if start[a] == "S" and goal[a] == "R" or a in sums[:-1] and goal[a] == "R":
            route.append((a, "all_gather"))
    return route
""",
        says="Is every placement that can be reached looked at",
        loses=FAST_SUMS,
    ),
    Wrong(
        "a cut of what is partial",
        route(("if now[axis] == before:", "if now[axis] == before or call == 'cut':")),
        says="It makes S of R, and there the placement is",
        loses=ARRIVES,
    ),
    Wrong(
        "names without axes",
        route((FOUND, "return [call for _, call in route]\n")),
        says="is not (axis, call)",
        loses=ARRIVES,
    ),
    Wrong(
        "axes counted from 1",
        route((FOUND, "return [(axis + 1, call) for axis, call in route]\n")),
        says="is not an axis of this mesh",
        loses=ARRIVES,
    ),
    Wrong(
        "from the goal to the start",
        route((FOUND, "return route[::-1]\n")),
        says="and there the placement is",
        loses=ARRIVES,
    ),
    Wrong(
        "names with hyphens",
        route((FOUND, 'return [(axis, call.replace("_", "-")) for axis, call in route]\n')),
        says="is not one of all_reduce",
        loses=ARRIVES,
    ),
    Wrong(
        "None where nothing is to be done",
        route((FOUND, "return route or None\n")),
        says="so the route is an empty list, not None",
        loses=NO_WAY,
    ),
    Wrong(
        "an empty list where there is no way",
        route((
            "    heap, done = [(0.0, start, [])], set()",
            "    if any(a != 'P' == b for a, b in zip(start, goal)):\n        return []\n"
            "    heap, done = [(0.0, start, [])], set()",
        )),
        says="no call makes P, so no route leads there: None",
        loses=NO_WAY,
    ),
]  # fmt: skip

RIGHT["17.fastest_route"] = [
    (
        "all routes without a placement twice",
        """
def fastest_route(start, goal, ranks, rates):
    best = [float("inf"), None]
    table = [("all_reduce", "PR"), ("reduce_scatter", "PS"), ("all_gather", "SR"), ("cut", "RS")]

    def sent(call, n, k):
        return {"all_reduce": 2 * k * (n - 1) / n, "reduce_scatter": k * (n - 1) / n,
                "all_gather": k * (n - 1), "cut": 0}[call]

    def walk(now, seconds, path, k, route):
        if now == goal:
            if seconds < best[0]:
                best[:] = seconds, route
            return
        for axis, n in enumerate(ranks):
            for call, (a, b) in table:
                new = now[:axis] + b + now[axis + 1:]
                if now[axis] != a or new in path:
                    continue
                size = k / n if b == "S" else k * n if a == "S" else k
                more = sent(call, n, k) / rates[axis]
                walk(new, seconds + more, path | {new}, size, route + [(axis, call)])

    k = 1.0
    for letter, n in zip(start, ranks):
        if letter == "S":
            k = k / n
    walk(start, 0.0, {start}, k, [])
    return best[1]
""",
    ),
    (
        "Bellman and Ford, over a table of all placements, back from the goal",
        """
from itertools import product


def fastest_route(start, goal, ranks, rates):
    places = list(product("PRS", repeat=len(ranks)))
    roads = {"all_reduce": "PR", "reduce_scatter": "PS", "all_gather": "SR", "cut": "RS"}
    togo = {place: float("inf") for place in places}
    step = {}
    togo[tuple(goal)] = 0.0
    for _ in places:
        for place in places:
            k = 1.0
            for letter, n in zip(place, ranks):
                k /= n if letter == "S" else 1.0
            for axis, n in enumerate(ranks):
                for call, (a, b) in roads.items():
                    if place[axis] != a:
                        continue
                    new = tuple(b if i == axis else x for i, x in enumerate(place))
                    factor = {"PR": 2 / n, "PS": 1 / n, "SR": 1.0, "RS": 0.0}[a + b] * (n - 1)
                    time = factor * k / rates[axis]
                    if togo[new] + time < togo[place]:
                        togo[place], step[place] = togo[new] + time, ((axis, call), new)
    now, route = tuple(start), ()
    if togo[now] == float("inf"):
        return None
    while now != tuple(goal):
        (axis, call), now = step[now]
        route += ((axis, call),)
    return route
""",
    ),
    (
        "an all_reduce is never called: it is a reduce_scatter and an all_gather",
        route(('        "all_reduce": ("P", "R", lambda n: 2 * (n - 1) / n),\n', "")),
    ),
]
PROMISES["17.fastest_route"] = {
    "it must be replicated on both": None,
    "A placement has a letter for each axis": None,
    "all have the same (Replicate)": None,
    "each has a summand": None,
    "`S`, each has a part (Shard)": None,
    "| call | from, to | a rank sends |": (*FAST_SUMS, ""),
    "divided by the ranks of each axis of kind `S`": (*FAST_SUMS, ""),
    "The calls run one after the other": (*FAST_SUMS, ""),
    "that take the least time in all": (*FAST_COPIES, "copies"),
    "If several routes take the same time, return any of them": (*FAST_SUMS, ""),
    "return an empty list, and if no calls lead to the goal, None": (*NO_WAY, "none"),
    "a letter for each of the one to three axes": (*AXES, "three"),
    "of each axis how many ranks it has": (*FAST_COPIES, "copies"),
    "of each axis the bytes that a rank sends over it": (*FAST_SUMS, ""),
    "Both are left as they are": (*ARRIVES, ""),
}
BOTH_HALVES = "a reduce_scatter and an all_gather take as long as the right all_reduce"
EQUIVALENT["17.fastest_route"] = {
    "`2 * (n - 1) / n` -> `2 * (n - 1)`": BOTH_HALVES,
    "`2` -> `3`": BOTH_HALVES,
    "`n - 1` -> `n` (#3)": BOTH_HALVES,
    "`n - 1` -> `n + 1` (#3)": BOTH_HALVES,
    "`1` -> `0` (#3)": BOTH_HALVES,
    "`for call, (before, after, sends) in calls.items(): if now...` -> [1:]": BOTH_HALVES,
    "`0.0` -> `1.0`": "all routes are a second longer",
    "`1.0` -> `3.0`": "all routes take three times as long",
    "`zip(now, ranks, strict=True)` -> `zip(now, ranks)`": "a placement has a letter for each axis",
    "`True` -> `False`": "the same",
    "`took = sends(n) * k / rates[axis]` -> twice": "the same number again",
}
