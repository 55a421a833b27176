"""Wrong answers to lesson 04 that people give, right ones in another style, and promises."""

from answers import Wrong
from answers.altered import altered, wrapped

ONCE = ("each sample once, on one rank",)
AS_MANY = ("equally many batches on each rank, and few",)
WITHIN = ("no batch above the budget",)
WORK = ("about equal tokens on each rank in a step",)
MIXED = ("other batches in another epoch",)
NO_TRACE = ("nothing sent, nothing changed",)

BUCKETS = """
def token_buckets(lengths, budget, epoch, seed):
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed({seed})
    order = torch.randperm(len(lengths), generator=generator).tolist()
    steps, fits = {steps}, False
    while not fits:
        groups, before = [[] for _ in range(steps)], 0
        for i in order:
            groups[before * steps // sum(lengths)].append(i)
            before += lengths[i]
        mine, fullest = [], 0
        for group in groups:
            parts, tokens = [[] for _ in range(world)], [0] * world
            for i in {first}:
                fewest = tokens.index(min(tokens))
                parts[fewest].append(i)
                tokens[fewest] += {cost}
            mine.append(parts[rank])
            fullest = max(fullest, *tokens)
        fits = {fits}
        steps += 1
    {end}
"""
SOLVED_BUCKETS = {
    "seed": "seed + epoch",
    "steps": "-(-sum(lengths) // (budget * world))",
    "first": "sorted(group, key=lambda i: -lengths[i])",
    "cost": "lengths[i]",
    "fits": "fullest <= budget",
    "end": "return mine",
}


def buckets(**wrong):
    return BUCKETS.format(**(SOLVED_BUCKETS | wrong))


# Where an assignment is wrong in another way, one step more than the fewest makes room.
SORTED = """
def token_buckets(lengths, budget, epoch, seed):
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed + epoch)
    steps = -(-sum(lengths) // (budget * world)) + 1
    batches, tokens = [[] for _ in range(steps * world)], [0] * (steps * world)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fewest = tokens.index(min(tokens))
        batches[fewest].append(i)
        tokens[fewest] += lengths[i]
    batches = [batches[b] for b in torch.randperm(len(batches), generator=generator).tolist()]
    return batches[rank::world]
"""

STRIDE = """
def token_buckets(lengths, budget, epoch, seed):
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed + epoch)
    steps = -(-sum(lengths) // (budget * world)) + 1
    order = torch.randperm(len(lengths), generator=generator).tolist()
    mine = order[rank::world]
    return [mine[step::steps] for step in range(steps)]
"""

OVER_THE_EPOCH = """
def token_buckets(lengths, budget, epoch, seed):
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed + epoch)
    steps = -(-sum(lengths) // (budget * world)) + 1
    order = torch.randperm(len(lengths), generator=generator).tolist()
    parts, tokens = [[] for _ in range(world)], [0] * world
    for i in sorted(order, key=lambda i: -lengths[i]):
        fewest = tokens.index(min(tokens))
        parts[fewest].append(i)
        tokens[fewest] += lengths[i]
    mine = parts[rank]
    size = -(-len(mine) // steps)
    return [mine[step * size : (step + 1) * size] for step in range(steps)]
"""

SNAKE = """
def token_buckets(lengths, budget, epoch, seed):
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1000003 * seed + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    there_and_back = [*range(world), *reversed(range(world))]

    def batches(steps):
        total, before, groups = sum(lengths), 0, [[]]
        for i in order:
            if before * steps >= total * len(groups):
                groups.append([])
            groups[-1].append(i)
            before += lengths[i]
        for group in groups:
            group.sort(key=lambda i: lengths[i], reverse=True)
            places = list(enumerate(group))
            yield [
                [i for place, i in places if there_and_back[place % (2 * world)] == r]
                for r in range(world)
            ]

    for steps in range(1, len(lengths)):
        assigned = list(batches(steps))
        if all(sum(lengths[i] for i in batch) <= budget for step in assigned for batch in step):
            return [step[rank] for step in assigned]
"""

# ---- 04.work_queue ----

DONE_ONCE = ("each text is worked on once",)
MEAN = ("the mean over all tokens, on every rank",)
NO_WAIT = ("no text waits for a rank that is busy",)
ONE_SUM = ("one collective, and no messages",)
FEW = ("fewer texts than ranks",)

QUEUE = """
def work_queue(store, tokens, gradient, zeros):
    rank, world = dist.get_rank(), dist.get_world_size()
    total, done = zeros, 0
    {take}:
        total += {part}
        done += tokens[i]
    {end}
"""
SOLVED_QUEUE = {
    "take": "while (i := store.add('next', 1) - 1) < len(tokens)",
    "part": "tokens[i] * gradient(i)",
    "end": "dist.all_reduce(total)\n    return total / sum(tokens)",
}


def queue(**wrong):
    return QUEUE.format(**(SOLVED_QUEUE | wrong))


# ---- 04.stop_together ----

MAJORITY = ("wishes of more than half stop all, after that step",)
ODD_WISHES = ("ties, wishes of other steps, and none",)
ASKED = ("each rank is asked once after each step",)
ONE_NUMBER = ("one collective of one number a step",)

STOP = """
def stop_together(step, wants_to_stop, most):
    for taken in range(1, most + 1):
        step()
        {decide}
            return taken
    return most
"""


def stop(*lines):
    return STOP.format(decide="\n        ".join(lines))


ADDED_UP = ("wishes = torch.tensor(int(wants_to_stop()))", "dist.all_reduce(wishes)")
ENOUGH = "if 2 * wishes > dist.get_world_size():"

WRONG = {
    "04.token_buckets": [
        Wrong("counts, not tokens", STRIDE, "tokens take the time", WORK),
        Wrong("sorted once", SORTED, "have the same batches, in another order", MIXED),
        Wrong(
            "one rank has one step more",
            buckets(
                end="if rank == 0:\n"
                "        mine = [*mine[:-1], mine[-1][:1], mine[-1][1:]]\n"
                "    return mine"
            ),
            "A rank with one more waits",
            AS_MANY,
        ),
        Wrong(
            "the tail is dropped",
            buckets().replace("for i in order:", "for i in order[: len(order) // world * world]:"),
            "not even the last ones",
        ),
        Wrong("steps for the mean, and no look at the fullest", buckets(fits="True"),
              "the fullest rank does not. Check the fullest one, and take one more step", WITHIN),
        Wrong("the budget of all ranks together", buckets(steps="-(-sum(lengths) // budget)"),
              "The budget is for one rank", AS_MANY),
        Wrong("two steps more, to be safe",
              buckets(steps="-(-sum(lengths) // (budget * world)) + 2"),
              "and one more is allowed.", AS_MANY),
        Wrong("each rank fills its own stride to the brim", """
def token_buckets(lengths, budget, epoch, seed):
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches, tokens = [[]], 0
    for i in order[dist.get_rank() :: dist.get_world_size()]:
        if tokens + lengths[i] > budget:
            batches.append([])
            tokens = 0
        batches[-1].append(i)
        tokens += lengths[i]
    return batches
""", "batches. A rank with one more waits", (*AS_MANY, *WORK)),
        Wrong("rank after rank, each to the brim", """
def token_buckets(lengths, budget, epoch, seed):
    generator = torch.Generator().manual_seed(seed + epoch)
    batches, tokens = [[]], 0
    for i in torch.randperm(len(lengths), generator=generator).tolist():
        if tokens + lengths[i] > budget:
            batches.append([])
            tokens = 0
        batches[-1].append(i)
        tokens += lengths[i]
    batches += [[] for _ in range(-len(batches) % dist.get_world_size())]
    return batches[dist.get_rank() :: dist.get_world_size()]
""", "has an empty batch in step", AS_MANY),
        Wrong("another seed on each rank", buckets(seed="seed + epoch + rank"),
              "never from the rank"),
        Wrong("no epoch in the seed", buckets(seed="seed"), "exactly the same batches", MIXED),
        Wrong(
            "every rank takes all",
            buckets().replace("mine.append(parts[rank])", "mine.append(group)"),
            "every rank got all samples",
        ),
        Wrong("equal over the epoch", OVER_THE_EPOCH, "but not in each step", WORK),
        Wrong(
            "shuffled with the global generator",
            buckets().replace(
                "    generator = torch.Generator().manual_seed(seed + epoch)\n"
                "    order = torch.randperm(len(lengths), generator=generator).tolist()\n",
                "    torch.manual_seed(seed + epoch)\n"
                "    order = torch.randperm(len(lengths)).tolist()\n",
            ),
            "Make a separate generator",
            NO_TRACE,
        ),
        Wrong(
            "the library's own",
            """
from ddpz_lite import data


def token_buckets(lengths, budget, epoch, seed):
    sampler = data.TokenBudgetSampler(lengths, budget, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)
""",
            "is ready-made",
        ),
        Wrong(
            "rank 0 tells its order",
            buckets().replace(
                "    steps, fits", "    dist.broadcast_object_list(order)\n    steps, fits"
            ),
            "nothing has to be sent",
            NO_TRACE,
        ),
    ],
    "04.work_queue": [
        Wrong(
            "read, then written",
            """
def work_queue(store, tokens, gradient, zeros):
    while (i := int(store.get("next"))) < len(tokens):
        store.set("next", str(i + 1))
        zeros += tokens[i] * gradient(i)
    dist.all_reduce(zeros)
    return zeros / sum(tokens)
""",
            "add() does both at once",
        ),
        Wrong(
            "rank 0 assigns",
            """
def work_queue(store, tokens, gradient, zeros):
    rank, world = dist.get_rank(), dist.get_world_size()
    told = torch.zeros(1, dtype=torch.int64)
    if rank == 0 and world > 1:
        for i in [*range(len(tokens)), *[-1] * (world - 1)]:
            free = dist.recv(told)
            dist.send(torch.tensor([i]), free)
    while rank or world == 1:
        if world == 1:
            told += 1
            i = int(told) - 1 if told <= len(tokens) else -1
        else:
            dist.send(told, 0)
            dist.recv(told, 0)
            i = int(told)
        if i < 0:
            break
        zeros += tokens[i] * gradient(i)
    dist.all_reduce(zeros)
    return zeros / sum(tokens)
""",
            "messages. The store has the counter, so no rank has to assign texts",
            ONE_SUM,
        ),
        Wrong(
            "a stride in disguise",
            queue(
                take="while (i := store.add(f'next {rank}', world) - world + rank) < len(tokens)"
            ),
            "they were assigned in advance",
            NO_WAIT,
        ),
        Wrong(
            "with few texts, a rank without any leaves",
            queue(
                end="if not done and len(tokens) < dist.get_world_size():\n"
                "        return total\n    " + SOLVED_QUEUE["end"]
            ),
            "without calling it",
            ONE_SUM,
        ),
        Wrong(
            "mean of means",
            queue(
                end="total /= max(done, 1)\n    dist.all_reduce(total)\n    return total / world"
            ),
            "a rank that did little counts as much",
            MEAN,
        ),
        Wrong(
            "texts count equally",
            queue(part="gradient(i)", end="dist.all_reduce(total)\n    return total / len(tokens)"),
            "a short one counts as much as a long one",
            MEAN,
        ),
        Wrong("not divided", queue(end="dist.all_reduce(total)\n    return total"),
              "divide by their number", MEAN),
        Wrong("not added up", queue(end="return total / sum(tokens)"),
              "add up over the ranks", MEAN),
        Wrong("every rank does all", queue(take="for i in range(len(tokens))"),
              "Every rank worked on every text"),
        Wrong(
            "a collective for each text",
            """
def work_queue(store, tokens, gradient, zeros):
    world = dist.get_world_size()
    for start in range(0, len(tokens), world):
        i = store.add("next", 1) - 1
        part = tokens[i] * gradient(i) if i < len(tokens) else torch.zeros_like(zeros)
        dist.all_reduce(part)
        zeros += part
    return zeros / sum(tokens)
""",
            "they were assigned in advance",
            NO_WAIT,
        ),
        Wrong("the first number is lost", queue(
            take="while (i := store.add('next', 1)) < len(tokens)"), "No rank worked on text 0"),
    ],
    "04.stop_together": [
        Wrong("one rank breaks", stop("if wants_to_stop():"), "in all_reduce #2", MAJORITY),
        Wrong(
            "the wishes of all, and also its own",
            stop("wish = wants_to_stop()", "wishes = torch.tensor(int(wish))",
                 "dist.all_reduce(wishes)", ENOUGH.replace("if", "if wish and")),
            "in all_reduce #8",
            MAJORITY,
        ),
        Wrong(
            "any rank's wish",
            stop("wish = torch.tensor(float(wants_to_stop()))",
                 "dist.all_reduce(wish, op=dist.ReduceOp.MAX)", "if wish:"),
            "One wish alone ended the run",
            MAJORITY,
        ),
        Wrong(
            "all ranks' wish",
            stop("wish = torch.tensor(float(wants_to_stop()))",
                 "dist.all_reduce(wish, op=dist.ReduceOp.MIN)", "if wish:"),
            "The run continued until all wished to stop",
            MAJORITY,
        ),
        Wrong("half is enough", stop(*ADDED_UP, ENOUGH.replace(">", ">=")),
              "Half of the ranks ended the run", ODD_WISHES),
        Wrong("a world of 3", stop(*ADDED_UP, "if wishes >= 2:"), "Two wishes ended", ODD_WISHES),
        Wrong(
            "a wish counts in all later steps",
            stop("wished = (taken > 1 and wished) or wants_to_stop()",
                 "wishes = torch.tensor(int(wished))", "dist.all_reduce(wishes)", ENOUGH),
            "Wishes of earlier steps were counted",
            ODD_WISHES,
        ),
        Wrong(
            "rank 0 decides",
            stop("wish = torch.tensor(float(wants_to_stop()))", "dist.broadcast(wish, src=0)",
                 "if wish:"),
            "Only rank 0's wish counted",
            MAJORITY,
        ),
        Wrong(
            "a step late",
            stop("ending = taken > 1 and ended", *ADDED_UP, "ended = " + ENOUGH[3:-1],
                 "if ending:"),
            "Stop before the next step begins",
            MAJORITY,
        ),
        Wrong(
            "asked twice",
            stop("if wants_to_stop():", "    pass", *ADDED_UP, ENOUGH),
            "ask once after each step",
            ASKED,
        ),
        Wrong(
            "as an object",
            stop("wishes = [None] * dist.get_world_size()",
                 "dist.all_gather_object(wishes, wants_to_stop())",
                 "if 2 * sum(wishes) > len(wishes):"),
            "One a step is enough",
            ONE_NUMBER,
        ),
        Wrong(
            "the whole model's worth",
            stop("wishes = torch.full((8,), float(wants_to_stop()))", "dist.all_reduce(wishes)",
                 ENOUGH.replace("wishes", "wishes[0]")),
            "one number per rank",
            ONE_NUMBER,
        ),
    ],
}  # fmt: skip

# ---- right answers that look different from the solution ----

RIGHT = {
    "04.token_buckets": [
        ("there and back through the ranks", SNAKE),
        (
            "a heap, and the ranks in another order in each step",
            """
import heapq


def token_buckets(lengths, budget, epoch, seed):
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator()
    generator.manual_seed(seed * 4096 + epoch)
    order = torch.randperm(len(lengths), generator=generator)
    sums = torch.tensor(lengths)[order].cumsum(0) - torch.tensor(lengths)[order]
    steps = (sum(lengths) - 1) // (budget * world)
    while True:
        steps += 1
        step_of = sums * steps // sum(lengths)
        mine, most = [], 0
        for step in range(steps):
            parts = [(0, place, []) for place in range(world)]
            samples = order[step_of == step].tolist()
            for i in sorted(samples, key=lengths.__getitem__, reverse=True):
                tokens, place, part = heapq.heappop(parts)
                heapq.heappush(parts, (tokens + lengths[i], place, [*part, i]))
            mine.append(sorted(parts, key=lambda p: p[1])[(rank + step) % world][2])
            most = max([most] + [tokens for tokens, _, _ in parts])
        if most <= budget:
            return mine
""",
        ),
    ],
    "04.work_queue": [
        (
            "the longest first, gathered at the end",
            """
def work_queue(store, tokens, gradient, zeros):
    order = sorted(range(len(tokens)), key=lambda i: -tokens[i])
    weight = 1 / sum(tokens)
    parts = [zeros.clone()]
    while True:
        place = store.add("taken", 1)
        if place > len(order):
            break
        i = order[place - 1]
        parts.append(weight * tokens[i] * gradient(i))
    mine = torch.stack(parts).sum(0)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return torch.stack(every).sum(0)
""",
        ),
        (
            "the tokens travel with the sum",
            """
def work_queue(store, tokens, gradient, zeros):
    total = torch.cat([zeros, zeros.new_zeros(1)])
    i = store.add("last", 1)
    while i <= len(tokens):
        total[:-1] += gradient(i - 1) * tokens[i - 1]
        total[-1] += tokens[i - 1]
        i = store.add("last", 1)
    dist.all_reduce(total)
    return total[:-1] / total[-1]
""",
        ),
    ],
    "04.stop_together": [
        (
            "a mean, and a while",
            """
def stop_together(step, wants_to_stop, most):
    taken, share = 0, torch.zeros(1)
    while taken < most and share.item() <= 0.5:
        step()
        taken += 1
        share.fill_(wants_to_stop() / dist.get_world_size())
        dist.all_reduce(share)
    return taken
""",
        ),
        (
            "gathered, and not after the last step",
            """
def stop_together(step, wants_to_stop, most):
    for taken in range(1, most + 1):
        step()
        mine = torch.tensor([wants_to_stop()], dtype=torch.uint8)
        every = torch.empty(dist.get_world_size(), dtype=torch.uint8)
        if taken == most:
            break
        dist.all_gather(list(every.split(1)), mine)
        if every.sum() > len(every) // 2:
            break
    return taken
""",
        ),
        (
            "for or against",
            """
def stop_together(step, wants_to_stop, most):
    for taken in range(1, most + 1):
        step()
        balance = torch.tensor(1 if wants_to_stop() else -1, dtype=torch.int8)
        dist.all_reduce(balance)
        if balance > 0:
            return taken
    return taken
""",
        ),
    ],
}

# ---- what the texts promise, and who judges it: (criterion, kind of case) ----

PROMISES = {
    "04.token_buckets": {
        "no batch may have more than `budget` tokens": (*WITHIN, ""),
        "each sample comes exactly once": (*ONCE, ""),
        "All ranks get the same number of batches, none of them empty": (*AS_MANY, ""),
        "This number is the minimum, or one more": (*AS_MANY, "equal"),
        "divided by N · `budget`, rounded up": (*AS_MANY, "equal"),
        "1.05 times the mean number of tokens over the ranks": (*WORK, ""),
        "nothing is sent": (*NO_TRACE, ""),
        "The same epoch and seed give the same batches again": (*MIXED, ""),
        "at most a third share one again": (*MIXED, ""),
        "The global random generators stay as they are": (*NO_TRACE, ""),
        "the same on all ranks": None,  # of what is handed in
        "There are many samples for each batch, or all have one length": (*WITHIN, "equal"),
        "the most tokens of a batch": (*WITHIN, ""),
        "No sample is longer": None,  # of what is handed in
    },
    "04.work_queue": {
        "no text is assigned in advance: all ranks share a counter": (*NO_WAIT, ""),
        "Each text is worked on exactly once, by one rank": (*DONE_ONCE, ""),
        "A rank takes the next text only when it has finished the previous one": (*NO_WAIT, ""),
        "no text waits for a rank that is busy": (*NO_WAIT, ""),
        "There may be fewer texts than ranks": (*FEW, "few"),
        "every rank returns the gradient of the mean loss over all tokens of all texts": (
            *MEAN,
            "",
        ),
        "at most one element more than the gradient has": (*ONE_SUM, ""),
        "Send nothing else, except through the store": (*ONE_SUM, ""),
        "The gradient (P,) of the mean loss over all tokens of all texts": (*MEAN, ""),
        "shared by all ranks, and new in each call": None,  # of what is handed in
        "of text i, a list of ints, the same on all ranks": None,
        "(P,) of the same dtype": None,
    },
    "04.stop_together": {
        "One rank's bad evaluation must not end the run of all ranks": (*MAJORITY, "majority"),
        "more than half of the ranks wish to stop after the same step": (*ODD_WISHES, "odd"),
        "Then all stop after this step": (*MAJORITY, "majority"),
        "all stop after step `most`": (*ODD_WISHES, "odd"),
        "call `wants_to_stop()` once after each step": (*ASKED, "majority"),
        "at most one collective per step, of one number per rank": (*ONE_NUMBER, "odd"),
        "on every rank the same number": (*MAJORITY, "majority"),
        "all ranks must take equally many": None,  # of what is handed in
        "it holds only for the step after which you asked": (*ODD_WISHES, "odd"),
        "the largest number of steps, at least 1": (*ODD_WISHES, "odd"),
    },
}

# ---- mutants of the solution that are right, and why ----

ROTATED = "the same assignment with steps or ranks in another order, and no order is asked for"
OFFSET = "all sums begin at another number, and only their differences count"

EQUIVALENT = {
    "04.token_buckets": {
        "`seed + epoch` -> `seed - epoch`": "another seed for each epoch anyway",
        "`0` -> `1`": "the first sample is cut off one token later",
        "`0` -> `-1`": "the first sample goes to the last step, which has room for it",
        "`groups[before * steps // sum(lengths)]` -> "
        "`groups[before * steps // sum(lengths) - 1]`": ROTATED,
        "`before += lengths[i]` -> `before -= lengths[i]`": ROTATED,
        "`range(world)` -> `range(world + 1)`": "a part more, to which nothing is ever given",
        "`0` -> `1` (#2)": OFFSET,
        "`0` -> `-1` (#2)": OFFSET,
        "`0` -> `-1` (#3)": "every step has tokens, so the fullest is above both",
        "`parts[fewest]` -> `parts[fewest - 1]`": ROTATED,
        "`parts[rank]` -> `parts[rank - 1]`": ROTATED,
    },
    "04.stop_together": {
        "`world = dist.get_world_size()` -> the first one, kept": "a job has one world",
    },
}

# -- what an answer may not assume -----------------------------------------------------------------

WRONG["04.token_buckets"] += [
    Wrong(
        "assigned once for each number of samples, epoch and seed",
        wrapped(
            "04.token_buckets",
            "token_buckets",
            "ASSIGNED = {}\n\n\ndef token_buckets(lengths, budget, epoch, seed):\n"
            "    key = len(lengths), epoch, seed\n    if key not in ASSIGNED:\n"
            "        ASSIGNED[key] = solution(lengths, budget, epoch, seed)\n"
            "    return ASSIGNED[key]\n",
        ),
        says="All tokens would fill",
        loses=("equally many batches on each rank, and few", "no batch above the budget"),
    ),
    Wrong(
        "every world-th batch of one list, of unequal numbers",
        altered(
            "04.token_buckets",
            ("return [parts[rank] for parts in assigned]",
             "flat = [part for parts in assigned for part in parts]\n"
             "    return flat[rank::world] if rank else [p for p in flat[::world] for p in "
             "([p[:1], "
             "p[1:]] if len(p) > 1 else [p])]"),
        ),
        says="only if all ranks have the same number of batches",
        loses=("about equal tokens on each rank in a step",),
    ),
]  # fmt: skip
WRONG["04.work_queue"] += [
    Wrong(
        "from its second text on a rank has one in reserve",
        "def work_queue(store, tokens, gradient, zeros):\n"
        "    def take():\n        return store.add('next', 1) - 1\n\n"
        "    total, reserve, text = zeros, None, take()\n"
        "    while text < len(tokens):\n"
        "        total += tokens[text] * gradient(text)\n"
        "        text, reserve = take() if reserve is None else reserve, take()\n"
        "    dist.all_reduce(total)\n    return total / sum(tokens)\n",
        says="were assigned in advance",
        loses=("no text waits for a rank that is busy",),
    )
]
WRONG["04.stop_together"] += [
    Wrong(
        "the first call's `most`",
        wrapped(
            "04.stop_together",
            "stop_together",
            "MOST = []\n\n\ndef stop_together(step, wants_to_stop, most):\n"
            "    MOST.append(most)\n    return solution(step, wants_to_stop, MOST[0])\n",
        ),
        says="Right is 7, the largest number allowed",
        loses=("ties, wishes of other steps, and none",),
    )
]
ASSUMED = {
    "04.work_queue": {
        "frozen store": "every call's store reaches the same clerk, who begins again",
        "frozen zeros": "zeros are zeros",
    }
}


# -- what authors who had not read the judge got away with -----------------------------------------

WRONG["04.token_buckets"] += [
    Wrong(
        "the same batches on other ranks",
        altered(
            "04.token_buckets",
            ("manual_seed(seed + epoch)", "manual_seed(0)"),
            ("return [parts[rank]", "return [parts[(rank + epoch + seed) % world]"),
        ),
        says="have the same batches, in another order or on other ranks",
        loses=MIXED,
    ),
]
WRONG["04.work_queue"] += [
    Wrong(
        "the first texts are assigned by rank",
        altered(
            "04.work_queue",
            (
                'while (i := store.add("next", 1) - 1) < len(tokens):',
                "i = dist.get_rank()\n    while i < len(tokens):",
            ),
            (
                "# the sum over the text's tokens",
                '\n        i = dist.get_world_size() + store.add("next", 1) - 1',
            ),
        ),
        says="without asking the store",
        loses=NO_WAIT,
    ),
]
# -- 04.attention_buckets --------------------------------------------------------------------------

FEW_STEPS = ("equally many batches on each rank, and few",)
TOKENS = ("room for the tokens of each batch",)
PAIRS = ("no batch above the budget of pairs",)
EQUAL_PAIRS = ("about equal pairs on each rank in a step",)
SILENT = ("nothing sent, nothing changed",)
FITS = "sum(lengths[i] for i in batch) <= room and sum(pairs[i] for i in batch) <= most"


def attention(*changes):
    return altered("04.attention_buckets", *changes)


WRONG["04.attention_buckets"] = [
    Wrong(
        "balanced by tokens",
        attention(("-pairs[i]", "-lengths[i]"), ("work[least] += pairs[i]",
                                                 "work[least] += lengths[i]")),
        says="a token of a long sample takes longer",
        loses=EQUAL_PAIRS,
    ),
    Wrong(
        "task 1's answer, with the first budget",
        altered("04.token_buckets", ("def token_buckets(lengths, budget, epoch, seed):",
                "def attention_buckets(lengths, budgets, epoch, seed):\n    budget = budgets[0]")),
        says="pairs, but",
        loses=PAIRS,
    ),
    Wrong(
        "task 1's answer, with squares and the second budget",
        altered("04.token_buckets", ("def token_buckets(lengths, budget, epoch, seed):",
                "def attention_buckets(lengths, budgets, epoch, seed):\n    budget = budgets[1]\n"
                "    lengths = [n * n for n in lengths]")),
        says="tokens, but",
        loses=TOKENS,
    ),
    Wrong(
        "no limit for pairs",
        attention((FITS, "sum(lengths[i] for i in batch) <= room")),
        says="pairs, but",
        loses=PAIRS,
    ),
    Wrong(
        "the steps that the mean rank needs",
        attention(("while not all(fits(batch) for parts in assigned for batch in parts):",
                   "while False:")),
        says="the fullest rank does not. Check the fullest one, and take one more step",
        loses=TOKENS,
    ),
    Wrong(
        "every rank looks at its own batches",
        attention(("for parts in assigned for batch in parts)",
                   "for batch in [parts[rank] for parts in assigned])")),
        says="so that all choose the same number",
        loses=ONCE,
    ),
    Wrong(
        "the sum squared",
        attention(("sum(pairs[i] for i in batch) <= most",
                   "sum(lengths[i] for i in batch) ** 2 <= most")),
        says="so square first, then add",
        loses=FEW_STEPS,
    ),
    Wrong(
        "as if it were padded",
        attention(("sum(pairs[i] for i in batch) <= most",
                   "len(batch) * max((pairs[i] for i in batch), default=0) <= most")),
        says="There is no padding here",
        loses=FEW_STEPS,
    ),
    Wrong(
        "the budgets of all ranks",
        attention(("(room * world)", "room"), ("(most * world)", "most")),
        says="for one rank, not for all together",
        loses=FEW_STEPS,
    ),
    Wrong(
        "as many samples for each rank",
        attention(("least = work.index(min(work))", "least = min(range(world), "
                   "key=lambda r: len(parts[r]))")),
        says="All ranks have the same number of samples",
        loses=EQUAL_PAIRS,
    ),
    Wrong(
        "ones share a batch in every epoch. Shuffle first, then sort within a step",
        attention(("order = torch.randperm(len(lengths), generator=generator).tolist()",
                   "order = sorted(range(len(lengths)), key=lengths.__getitem__)")),
        says="exactly the same batches",
        loses=MIXED,
    ),
    Wrong(
        "another order on each rank",
        attention(("manual_seed(seed + epoch)", "manual_seed(seed + epoch + rank)")),
        says="did not start from the same order",
        loses=ONCE,
    ),
    Wrong(
        "the global generator",
        attention(("generator = torch.Generator().manual_seed(seed + epoch)",
                   "generator = torch.manual_seed(seed + epoch)")),
        says="global generator of torch",
        loses=SILENT,
    ),
    Wrong(
        "the last step's remainder is left out",
        attention(("return [parts[rank] for parts in assigned]",
                   "return [parts[rank] for parts in assigned[:-1]]")),
        says="Leave none out",
        loses=ONCE,
    ),
    Wrong(
        "asks the others whether it fits",
        attention(("    return [parts[rank] for parts in assigned]",
                   "    dist.all_reduce(torch.tensor(steps), op=dist.ReduceOp.MAX)\n"
                   "    return [parts[rank] for parts in assigned]")),
        says="nothing has to be sent",
        loses=SILENT,
    ),
]  # fmt: skip
RIGHT["04.attention_buckets"] = [
    (
        "a heap, and steps of equally many samples",
        """
import heapq
import random
from itertools import count


def attention_buckets(lengths, budgets, epoch, seed):
    rank, world = dist.get_rank(), dist.get_world_size()
    shuffled = list(range(len(lengths)))
    random.Random(f"{seed} {epoch}").shuffle(shuffled)
    totals = sum(lengths), sum(n**2 for n in lengths)
    for steps in count(max(-(-t // (b * world)) for t, b in zip(totals, budgets))):
        every = []
        for step in range(steps):
            heap = [(0, r, []) for r in range(world)]
            for i in sorted(shuffled[step::steps], key=lengths.__getitem__, reverse=True):
                work, r, batch = heap[0]
                batch.append(i)
                heapq.heapreplace(heap, (work + lengths[i] ** 2, r, batch))
            every.append({r: (work, batch) for work, r, batch in heap})
        batches = [one for step in every for one in step.values()]
        if all(w <= budgets[1] and sum(lengths[i] for i in b) <= budgets[0] for w, b in batches):
            return [step[rank][1] for step in every]
""",
    ),
]
PROMISES["04.attention_buckets"] = {
    "without padding": (*FEW_STEPS, ""),
    "no batch is above either budget": (*PAIRS, ""),
    "Over all ranks and steps each sample comes exactly once": (*ONCE, ""),
    "All ranks get the same number of batches, none of them empty": (*FEW_STEPS, ""),
    "1.05 times the mean number of pairs over the ranks": (*EQUAL_PAIRS, ""),
    "Every rank computes its own batches, and nothing is sent": (*SILENT, ""),
    "The same epoch and seed give the same batches again": (*MIXED, ""),
    "at most a third share one again": (*MIXED, ""),
    "The global random generators stay as they are": (*SILENT, ""),
    "all have one length": (*FEW_STEPS, "equal"),
    "the same on all ranks": (*ONCE, ""),
    "the most that a batch may have of each": (*TOKENS, ""),
    "Each sample fits both": (*PAIRS, "equal"),
    "a list of lists of indices": (*ONCE, ""),
    "the tokens and the pairs of a batch": (*TOKENS, ""),
    "the minimum that the scarcer budget allows, or at most three more": (*FEW_STEPS, "equal"),
}
FEWER = "the search begins with fewer steps, and takes more until all batches fit"
RING = "the ranks, or the steps, change places"
FIRST = "one pair more or less, of a million"
LINE = "`-sum(lengths) // (room * world)`"
EQUIVALENT["04.attention_buckets"] = {
    "`seed + epoch` -> `seed - epoch`": "another order, which is as good",
    "`0` -> `1`": FIRST,
    "`0` -> `-1`": FIRST,
    "`groups[before * steps // total]` -> `groups[before * steps // total - 1]`": RING,
    "`before += pairs[i]` -> `before -= pairs[i]`": RING,
    "`range(world)` -> `range(world + 1)`": "a part that no rank takes, and that stays empty",
    "`0` -> `1` (#2)": "loads are only compared with each other",
    "`0` -> `-1` (#2)": "loads are only compared with each other",
    "`parts[least]` -> `parts[least - 1]`": RING,
    "`parts[rank]` -> `parts[rank - 1]`": RING,
    "`max` -> `min`": FEWER,
    "`-(-sum(lengths) // (room * world))` -> `-sum(lengths) // (room * world)`": FEWER,
    "`-(-total // (most * world))` -> `-total // (most * world)`": FEWER,
    f"{LINE} -> `room * world`": FEWER,
    f"{LINE} -> `-sum(lengths) % (room * world)`": FEWER,
    "`-total // (most * world)` -> `most * world`": FEWER,
    "`-total // (most * world)` -> `-total % (most * world)`": FEWER,
    "`-sum(lengths)` -> `sum(lengths)`": FEWER,
    "`-total` -> `total`": FEWER,
}
