"""Wrong answers to lesson 15 that people give, and the sentence that each must hear."""

from __future__ import annotations

from answers import Wrong
from answers.altered import altered

TIME = ("rank 0's time, to half a round trip",)
BOUND = ("a bound that holds and is not wider than need be",)
DRIFT = ("the drift of the clock",)
MESSAGES = ("by messages alone, and each rank rests once",)
ABSENT = ("the rank that left out a call",)
DIFFERS = ("the rank that called something else",)
CHAIN = ("the rank, where ranks wait for ranks that wait",)
NUMBER = ("the number of the call in its group",)
LINE = ("the line",)
SUM = ("four parts that add up to the step",)
STEP = ("the step, on one clock and after the warm-up",)
COMPUTE = ("compute, of the slowest rank",)
EXPOSED = ("communication that nothing hides, and the rest",)
EFFICIENCY = ("efficiency under strong scaling",)
ONCE = ("every sample counts once",)
CLIP = ("clipped by the norm of the mean gradient",)
EMPTY = ("a rank without samples",)
SENT = ("each gradient is sent once a step",)
TOLD = ("the loss of all samples, on all ranks",)
ALIKE = ("as one process with all samples of a step",)
UNEVEN = ("ranks with more and with fewer batches",)
SKIP = ("a bad sample: all ranks skip the step",)
STOP = ("all ranks stop together",)
HELD = ("the validation loss of all samples",)

ALIGN = """
def align(clock, send, recv, rest):
    rank, world = dist.get_rank(), dist.get_world_size()

    def burst():
        found = []
        for peer in range(1, world):
            for _ in range(8):
                if rank == peer:
                    t0 = clock()
                    send(t0, 0)
                    t1, t2 = recv(0), recv(0)
                    t3 = clock()
                    found.append(((t3 - t0) - (t2 - t1), t3, {offset}))
                elif rank == 0:
                    recv(peer)
                    send(clock(), peer)
                    send(clock(), peer)
        return {best}

    _, before, first = burst()
    rest()
    under_way, after, second = burst()
    if rank == 0:
        return 0.0, 0.0, 0.0
    return {result}
"""
RIGHT_ALIGN = {
    "offset": "((t1 - t0) + (t2 - t3)) / 2",
    "best": "min(found, default=(0.0, 0.0, 0.0))",
    "result": "second, (second - first) / (after - before), under_way / 2",
}


def align(**wrong):
    return ALIGN.format(**(RIGHT_ALIGN | wrong))


ALL_CLOCKS = """
def align(clock, send, recv, rest):
    rest()
    own = torch.tensor([clock()], dtype=torch.float64)
    total = own.clone()
    dist.all_reduce(total)
    return (total / dist.get_world_size() - own).item(), 0.0, 0.002
"""

CULPRIT = """
def culprit(records):
    lists = {{}}
    for record in records:
        for call in record["calls"]:
            lists.setdefault((tuple(call["group"]), record["rank"]), []).append(call)
    waiting = {{r["rank"] for r in records if r["calls"] and not r["calls"][-1]["done"]}}
    for group in sorted({{group for group, _ in lists}}, key={order}):
        own = {{rank: lists.get((group, rank), []) for rank in group}}
        for number in range(max(map(len, own.values()))):
            there = {{rank: calls[number] for rank, calls in own.items() if number < len(calls)}}
            kinds = {{r: {kind} for r, c in there.items()}}
            usual = {usual}
            for rank, kind in kinds.items():
                if kind != usual:
                    return rank, {number}, {differs}
            missing = [rank for rank in group if rank not in there]
            if {blamed}:
                return missing[0], {number}, {missing}
    return {otherwise}
"""
RIGHT_CULPRIT = {
    "order": "len",
    "kind": '(c["op"], c["dtype"], c["elements"])',
    "usual": "max(kinds.values(), key=list(kinds.values()).count)",
    "number": "number",
    "differs": 'there[rank]["line"]',
    "blamed": "len(missing) == 1 and missing[0] not in waiting",
    "missing": 'records[missing[0]]["at"]',
    "otherwise": '0, 0, "nowhere"',
}


def culprit(**wrong):
    return CULPRIT.format(**(RIGHT_CULPRIT | wrong))


def pick(rank):
    """An answer that looks at one rank alone."""
    return f"""
def culprit(records):
    found = {rank}
    return found["rank"], sum(call["done"] for call in found["calls"]), found["at"]
"""


BREAKDOWN = """
def breakdown(events, offsets, warm_up, alone):
    world = len(offsets)
    spans = {{}}
    for rank, kind, start, stop in events:
        span = ({start}, {stop})
        spans.setdefault((rank, kind), []).append(span)

    def length(rank, kinds, begin, end):
        total, reached = 0.0, begin
        for start, stop in sorted(s for kind in kinds for s in spans.get((rank, kind), [])):
            stop = min(stop, end)
            {add}
            reached = max(reached, stop)
        return total

    def parts(rank, begin, end):
        compute = length(rank, ["compute"], begin, end)
        busy = length(rank, ["compute", "data"], begin, end)
        every = length(rank, ["compute", "data", "comm"], begin, end)
        own = {{"compute": compute, "data": busy - compute, "exposed": {exposed}}}
        own["step"] = end - begin
        return own | {{"rest": {rest}}}

    steps = list(zip(*(sorted(spans[rank, "step"]) for rank in range(world)))){steps}
    total = dict.fromkeys(("step", "compute", "data", "exposed", "rest"), 0.0)
    for step in steps:
        begin, end = min(start for start, _ in step), max(stop for _, stop in step)
        ranks = [parts(rank, begin, end) for rank in range(world)]
        for part in total:
            total[part] += {chosen}
    {keep}
    return total | {{"efficiency": {efficiency}}}
"""
RIGHT_BREAKDOWN = {
    "start": "start + offsets[rank]",
    "stop": "stop + offsets[rank]",
    "add": "total += max(0.0, stop - max(start, reached))",
    "exposed": "every - busy",
    "rest": 'own["step"] - own["compute"] - own["data"] - own["exposed"]',
    "steps": "[warm_up:]",
    "chosen": 'min(ranks, key=lambda r: r["exposed"])[part]',
    "keep": "",
    "efficiency": 'alone * len(steps) / (world * total["step"])',
}


def breakdown(**wrong):
    return BREAKDOWN.format(**(RIGHT_BREAKDOWN | wrong))


TRAINS = """
def repaired_step(weights, batches, rate, max_norm):
    world = dist.get_world_size()
    count = torch.tensor([0.0, float(sum(len(y) for _, y in batches))], dtype=weights[0].dtype)
    own = max(1.0, count[1].item())
    for w in weights:
        w.grad = torch.zeros_like(w)
    for x, y in batches:
        errors = ((x @ weights[0]).tanh() @ weights[1] - y).square()
        ({loss}).backward()
        count[0] += errors.detach().sum()
        {each}
    {before}
    {counted}
    for w in weights:
        {reduce}
        w.grad {divide}
    {after}
    with torch.no_grad():
        for w in weights:
            w -= rate * w.grad
            w.grad = None
    return {told}
"""
CLIPPING = "torch.nn.utils.clip_grad_norm_(weights, max_norm)"
RIGHT_TRAINS = {
    "loss": "errors.sum()",
    "each": "",
    "before": "",
    "counted": "dist.all_reduce(count)",
    "reduce": "dist.all_reduce(w.grad)",
    "divide": "/= count[1]",
    "after": CLIPPING,
    "told": "(count[0] / count[1]).item()",
}


def trains(**wrong):
    return TRAINS.format(**(RIGHT_TRAINS | wrong))


STOPS = """
def repaired_fit(weight, batches, held_out, rate, epochs):
    most, history = torch.tensor(len(batches)), []
    {agree}
    for _ in range(epochs):
        for step in range(int(most)):
            total = torch.zeros(len(weight) + 1, dtype=weight.dtype)
            if step < len(batches):
                x, y = batches[step]
                total[:-1] = x.t() @ (x @ weight - y)
                total[-1] = len(y)
            {own}
            dist.all_reduce(total)
            if {finite}:
                weight -= rate * {mean}
        x, y = held_out
        sums = torch.stack([{error}, torch.tensor({samples}, dtype=weight.dtype)])
        {held}
        history.append((sums[0] / sums[1]).item())
        if {stop}:
            break
    return history
"""
RIGHT_STOPS = {
    "agree": "dist.all_reduce(most, op=dist.ReduceOp.MAX)",
    "own": "",
    "finite": "total.isfinite().all()",
    "mean": "total[:-1] / total[-1]",
    "error": "(x @ weight - y).square().sum()",
    "samples": "float(len(y))",
    "held": "dist.all_reduce(sums)",
    "stop": "len(history) > 1 and not history[-1] < history[-2]",
}


def stops(**wrong):
    return STOPS.format(**(RIGHT_STOPS | wrong))


WRONG = {
    "15.offsets": [
        Wrong("the mean of all clocks", ALL_CLOCKS, "leads to the mean of all clocks", TIME),
        Wrong("one way", align(offset="t1 - t0"), "One way does not tell them apart", TIME),
        Wrong(
            "the mean of all exchanges",
            align(best="tuple(sum(x) / 8 for x in zip(*found)) or (0.0, 0.0, 0.0)"),
            "Late messages must not count",
            TIME,
        ),
        Wrong("the wrong sign", align(offset="((t0 - t1) + (t3 - t2)) / 2"), "wrong sign", TIME),
        Wrong(
            "the first exchange",
            align(best="(found or [(0.0, 0.0, 0.0)])[0]"),
            "Late messages must not count",
            TIME,
        ),
        Wrong(
            "before the rest",
            align(result="first, (second - first) / (after - before), under_way / 2"),
            "that of before the rest",
            TIME,
        ),
        Wrong(
            "ignores the drift",
            align(result="second, 0.0, under_way / 2"),
            "says that its clock does not drift",
            DRIFT,
        ),
        Wrong(
            "the drift in all",
            align(result="second, second - first, under_way / 2"),
            "is seconds in all",
            DRIFT,
        ),
        Wrong(
            "the drift upside down",
            align(result="second, (first - second) / (after - before), under_way / 2"),
            "drift has the wrong sign",
            DRIFT,
        ),
        Wrong(
            "the whole round trip",
            align(result="second, (second - first) / (after - before), under_way"),
            "is the whole round trip",
            BOUND,
        ),
        Wrong(
            "no bound at all",
            align(result="second, (second - first) / (after - before), 0.0"),
            "large as half of a round trip",
            BOUND,
        ),
        Wrong(
            "with a collective",
            align().replace("    rest()\n", "    dist.all_reduce(torch.zeros(1))\n    rest()\n"),
            "messages alone were allowed",
            MESSAGES,
        ),
    ],
    "15.culprit": [
        Wrong(
            "names who waits",
            pick('next(r for r in records if r["calls"] and not r["calls"][-1]["done"])'),
            "Look at the rank that it waits for",
            ABSENT,
        ),
        Wrong(
            "the last by its own clock",
            pick('max(records, key=lambda r: r["calls"][-1]["started"])'),
            "came last, but by its own clock alone",
            ABSENT,
        ),
        Wrong(
            "the first error",
            pick('max(records, key=lambda r: r["error"])'),
            "was the first to report an error",
            ABSENT,
        ),
        Wrong(
            "blames those who wait",
            culprit(order="lambda g: -len(g)", blamed="missing"),
            "Look at the rank that it waits for. Rank",
            CHAIN,
        ),
        Wrong(
            "one count for all groups",
            culprit(number='sum(call["done"] for call in records[rank]["calls"])').replace(
                'missing[0], sum(call["done"] for call in records[rank]["calls"])',
                'missing[0], sum(call["done"] for call in records[missing[0]]["calls"])',
            ),
            "each group counts its own calls",
            NUMBER,
        ),
        Wrong("counts from 1", culprit(number="number + 1"), "calls count from 0", NUMBER),
        Wrong("the last complete call", culprit(number="number - 1"), "was complete", NUMBER),
        Wrong(
            "rank 0 is right",
            culprit(usual="next(iter(kinds.values()))"),
            "called what most others called",
            DIFFERS,
        ),
        Wrong(
            "looks at sizes alone",
            culprit(kind='c["elements"]'),
            "is alone with another",
            DIFFERS,
        ),
        Wrong(
            "the line of the others",
            culprit(
                differs='next(c["line"] for r, c in there.items() if r != rank)',
                missing='next(iter(there.values()))["line"]',
            ),
            "is where another rank waits",
            LINE,
        ),
    ],
    "15.breakdown": [
        Wrong(
            "counts hidden communication",
            breakdown(exposed='length(rank, ["comm"], begin, end)'),
            "counts communication that compute hides",
            EXPOSED,
        ),
        Wrong(
            "a mean over ranks",
            breakdown(chosen="sum(r[part] for r in ranks) / world"),
            "is a mean over ranks",
            COMPUTE,
        ),
        Wrong("rank 0's", breakdown(chosen="ranks[0][part]"), "is rank 0's", COMPUTE),
        Wrong("with the warm-up", breakdown(steps=""), "counts the warm-up", STEP),
        Wrong(
            "clocks of each rank",
            breakdown(start="start", stop="stop"),
            "clocks that were not aligned",
            STEP,
        ),
        Wrong(
            "overlaps count twice",
            breakdown(add="total += max(0.0, stop - max(start, begin))"),
            "counts twice where two events overlap",
            COMPUTE,
        ),
        Wrong(
            "data that compute hides",
            breakdown().replace("busy - compute", 'length(rank, ["data"], begin, end)'),
            "is what the parts leave of the step: correct `data`",
            EXPOSED,
        ),
        Wrong(
            "no rest",
            breakdown(rest="0.0"),
            "what is in none is the rest",
            SUM,
        ),
        Wrong(
            "weak scaling",
            breakdown(efficiency='alone * len(steps) / total["step"]'),
            "is that of weak scaling",
            EFFICIENCY,
        ),
        Wrong("a part is missing", breakdown(keep='del total["rest"]'), "`rest` is missing", SUM),
    ],
    "15.trains": [
        Wrong(
            "as it was",
            """
def repaired_step(weights, batches, rate, max_norm):
    for x, y in batches:
        loss = ((x @ weights[0]).tanh() @ weights[1] - y).square().mean() / len(batches)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, max_norm)
        for w in weights:
            dist.all_reduce(w.grad)
            w.grad /= dist.get_world_size()
    with torch.no_grad():
        for w in weights:
            w -= rate * w.grad
            w.grad = None
    return loss.item()
""",
            "returned without calling it",
            ONCE,
        ),
        Wrong(
            "a mean of the ranks' means",
            trains(loss="errors.sum() / own", divide="/= world"),
            "comes of a mean of the ranks' means",
            ONCE,
        ),
        Wrong(
            "a mean of the micro-batches' means",
            trains(loss="errors.mean() / len(batches)", divide="/= world"),
            "comes of a mean of the micro-batches' means",
            ONCE,
        ),
        Wrong(
            "clipped before the sum",
            trains(
                before="dist.all_reduce(count)\n    for w in weights:\n        w.grad /= count[1]\n"
                f"    {CLIPPING}",
                counted="",
                divide="/= 1",
                after="",
            ),
            "was clipped on each rank before the sum",
            CLIP,
        ),
        Wrong(
            "gradients are left behind",
            trains(
                told='[setattr(w, "grad", torch.zeros_like(w)) for w in weights] and '
                "(count[0] / count[1]).item()"
            ),
            "left a gradient behind",
            ("the samples stay as they are, and no gradient is left",),
        ),
        Wrong("not clipped", trains(after=""), "was not clipped", CLIP),
        Wrong(
            "who has nothing leaves",
            trains().replace("    world =", "    if not batches:\n        return 0.0\n    world ="),
            "returned without calling it",
            EMPTY,
        ),
        Wrong(
            "each micro-batch is sent",
            trains(
                each="part = [w.grad.clone() for w in weights]\n"
                "        for w, p in zip(weights, part):\n"
                "            w.grad = torch.zeros_like(w)\n"
                "            dist.all_reduce(p)\n"
                "            totals[id(w)] = totals.get(id(w), 0) + p",
                reduce="w.grad = totals[id(w)] + 0 * w.detach()",
            )
            .replace("for x, y in batches:", "for x, y in padded:")
            .replace(
                "    for x, y in padded",
                "    totals, most = {}, torch.tensor(len(batches))\n"
                "    dist.all_reduce(most, op=dist.ReduceOp.MAX)\n"
                "    none = weights[0].new_zeros(0, len(weights[0])), weights[0].new_zeros(0)\n"
                "    padded = [*batches, *[none] * (int(most) - len(batches))]\n"
                "    for x, y in padded",
            ),
            "add up the micro-batches first",
            SENT,
        ),
        Wrong(
            "the loss of this rank",
            trains(
                counted="total = count.clone()\n    dist.all_reduce(total)", divide="/= total[1]"
            ),
            "the mean over all samples of all ranks",
            TOLD,
        ),
    ],
    "15.stops": [
        Wrong(
            "as it was",
            """
def repaired_fit(weight, batches, held_out, rate, epochs):
    history = []
    for _ in range(epochs):
        for x, y in batches:
            gradient = x.t() @ (x @ weight - y) / len(y)
            if not gradient.isfinite().all():
                continue
            dist.all_reduce(gradient)
            weight -= rate * gradient / dist.get_world_size()
        x, y = held_out
        loss = (x @ weight - y).square().mean()
        history.append(loss.item())
        if len(history) > 1 and not history[-1] < history[-2]:
            break
    return history
""",
            "comes of a mean of the ranks' means",
            ALIKE,
        ),
        Wrong(
            "the shortest rules",
            stops(agree="dist.all_reduce(most, op=dist.ReduceOp.MIN)"),
            "as many steps as the shortest rank has",
            UNEVEN,
        ),
        Wrong("each rank its own number", stops(agree=""), "of group (0, 1, 2) differs", UNEVEN),
        Wrong(
            "the bad rank brings nothing",
            stops(own="if not total.isfinite().all():\n                total.zero_()"),
            "a step without the bad rank",
            SKIP,
        ),
        Wrong(
            "the bad rank alone skips",
            stops(own="if not total.isfinite().all():\n                continue"),
            "of group (0, 1) differs",
            SKIP,
        ),
        Wrong("nobody skips", stops(finite="True"), "not finite", SKIP),
        Wrong(
            "a mean of ranks",
            stops(
                own="total = total / total[-1].clamp(min=1)",
                mean="total[:-1] / dist.get_world_size()",
            ),
            "comes of a mean of the ranks' means",
            ALIKE,
        ),
        Wrong("each rank's own loss", stops(held=""), "must make the same calls", STOP),
        Wrong("nobody stops", stops(stop="False"), "comes of epochs after", STOP),
        Wrong(
            "a mean of the ranks' losses",
            stops(error="(x @ weight - y).square().sum() / max(1, len(y))", samples="1.0"),
            "over the samples of all ranks it is",
            HELD,
        ),
    ],
}

RIGHT = {
    "15.offsets": [
        ("four times of an exchange", align()),
        (
            "rank 0 asks, and tells what it found",
            """
def align(clock, send, recv, rest):
    me, world = dist.get_rank(), dist.get_world_size()

    def ask(peer):
        best = None
        for _ in range(8):
            left = clock()
            send(0.0, peer)
            theirs = recv(peer)
            back = clock()
            if best is None or back - left < best[0]:
                best = (back - left, theirs, (left + back) / 2 - theirs)
        for value in best:
            send(value, peer)

    def answer():
        for _ in range(8):
            recv(0)
            send(clock(), 0)
        return [recv(0) for _ in range(3)]

    found = []
    for turn in range(2):
        if turn:
            rest()
        if me:
            found.append(answer())
        else:
            for peer in range(1, world):
                ask(peer)
    if me == 0:
        return [0.0, 0.0, 0.0]
    (_, t, first), (trip, later, second) = found
    drift = (second - first) / (later - t)
    return [second + drift * (clock() - later), drift, trip / 2]
""",
        ),
    ],
    "15.culprit": [
        ("small groups first", culprit()),
        (
            "walks through the waiting ranks",
            """
def culprit(records):
    def mine(rank, group):
        return [c for c in records[rank]["calls"] if c["group"] == group]

    def stuck(rank):
        calls = records[rank]["calls"]
        return calls[-1] if calls and not calls[-1]["done"] else None

    for record in records:
        call = stuck(record["rank"])
        if call is None:
            continue
        group = call["group"]
        number = len(mine(record["rank"], group)) - 1
        absent = [r for r in group if len(mine(r, group)) <= number]
        if absent:
            if len(absent) == 1 and stuck(absent[0]) is None:
                return absent[0], number, records[absent[0]]["at"]
            continue
        looks = {r: tuple(mine(r, group)[number][k] for k in ("op", "dtype", "elements"))
                 for r in group}
        for r, look in looks.items():
            if list(looks.values()).count(look) == 1 and len(group) > 2:
                return r, number, mine(r, group)[number]["line"]
""",
        ),
    ],
    "15.breakdown": [
        ("one function for what is covered", breakdown()),
        (
            "between all the moments at which something changes",
            """
def breakdown(events, offsets, warm_up, alone):
    world = len(offsets)
    moved = [(r, k, a + offsets[r], b + offsets[r]) for r, k, a, b in events]
    own = [sorted((a, b) for r, k, a, b in moved if r == rank and k == "step")
           for rank in range(world)]
    sums = {"step": 0, "compute": 0, "data": 0, "exposed": 0, "rest": 0}
    count = 0
    for spans in list(zip(*own))[warm_up:]:
        count += 1
        lo, hi = min(a for a, _ in spans), max(b for _, b in spans)
        ranks = []
        for rank in range(world):
            here = [(k, a, b) for r, k, a, b in moved if r == rank and k != "step"
                    and b > lo and a < hi]
            cuts = sorted({lo, hi, *(min(max(t, lo), hi) for _, a, b in here for t in (a, b))})
            parts = {"compute": 0, "data": 0, "exposed": 0, "rest": 0}
            for a, b in zip(cuts, cuts[1:]):
                kinds = {k for k, start, stop in here if start <= a and b <= stop}
                for kind, part in (("compute", "compute"), ("data", "data"), ("comm", "exposed")):
                    if kind in kinds:
                        parts[part] += b - a
                        break
                else:
                    parts["rest"] += b - a
            ranks.append(parts)
        rules = min(ranks, key=lambda parts: parts["exposed"])
        sums["step"] += hi - lo
        for part, value in rules.items():
            sums[part] += value
    sums["efficiency"] = alone * count / sums["step"] / world
    return sums
""",
        ),
    ],
    "15.trains": [
        ("gradients one by one", trains()),
        (
            "all samples of the rank at once",
            """
def repaired_step(weights, batches, rate, max_norm):
    a, b = weights
    x = torch.cat([x for x, _ in batches]) if batches else a.new_zeros(0, len(a))
    y = torch.cat([y for _, y in batches]) if batches else a.new_zeros(0)
    count = torch.tensor(float(len(y)), dtype=a.dtype)
    dist.all_reduce(count)
    loss = ((x @ a).tanh() @ b - y).square().sum() / count
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    for w in weights:
        dist.all_reduce(w.grad)
    torch.nn.utils.clip_grad_norm_(weights, max_norm)
    for w in weights:
        w.data -= rate * w.grad
        w.grad = None
    return float(total)
""",
        ),
    ],
    "15.stops": [
        ("gradient and count in one", stops()),
        (
            "asks before each step who has a batch",
            """
def repaired_fit(weight, batches, held_out, rate, epochs):
    history = []
    while len(history) < epochs:
        step = 0
        while True:
            here = torch.tensor(int(step < len(batches)))
            dist.all_reduce(here)
            if not here:
                break
            x, y = batches[step] if step < len(batches) else (weight.new_zeros(0, len(weight)),
                                                               weight.new_zeros(0))
            gradient, count = x.t() @ (x @ weight - y), weight.new_tensor(float(len(y)))
            bad = torch.tensor(int(not gradient.isfinite().all()))
            for tensor in (gradient, count, bad):
                dist.all_reduce(tensor)
            if not bad:
                weight.sub_(rate * gradient / count)
            step += 1
        errors = (held_out[0] @ weight - held_out[1]).square()
        pair = torch.tensor([errors.sum().item(), len(errors)], dtype=torch.float64)
        dist.all_reduce(pair)
        history.append(float(pair[0] / pair[1]))
        if history[-2:-1] and not history[-1] < history[-2]:
            return history
    return history
""",
        ),
    ],
}

ALIKE_IN_LENGTH = "both have as many"
LARGER_BOTH = "sums and counts are twice as large, and only their ratios matter"
EQUIVALENT = {
    "15.offsets": {
        "`for _ in range(8): if rank == peer: left = clock() send(l...` -> [:-1]": "seven will do",
        "`for _ in range(8): if rank == peer: left = clock() send(l...` -> [1:]": "seven will do",
        "`8` -> `9`": "nine will do",
        "`8` -> `7`": "seven will do",
        "`0.0` -> `1.0` (#4)": "rank 0 measures nothing",
        "`0.0` -> `1.0` (#5)": "rank 0 measures nothing",
        "`0.0` -> `1.0` (#6)": "rank 0 measures nothing",
    },
    "15.culprit": {
        "`for number in range(max(map(len, own.values()))): there =...` -> [-1:]": "only the last "
        "call of a group can be incomplete",
        "`0` -> `-1`": "a list of one",
        "`0` -> `-1` (#2)": "a list of one",
        "`0` -> `-1` (#3)": "a list of one",
    },
    "15.breakdown": {
        "`zip(*(sorted(spans[rank, 'step']) for rank in range(world...` -> "
        "`zip(*(sorted(spans[rank, 'step']) for rank in range(world)))`": ALIKE_IN_LENGTH,
        "`True` -> `False`": ALIKE_IN_LENGTH,
    },
    "15.trains": {
        "`0` -> `1`": "both weights have one dtype",
        "`0` -> `-1`": "both weights have one dtype",
        "`zip(gradients, torch.autograd.grad(loss, weights), strict...` -> "
        "`zip(gradients, torch.autograd.grad(loss, weights))`": ALIKE_IN_LENGTH,
        "`True` -> `False`": ALIKE_IN_LENGTH,
        "`loss.detach()` -> `loss`": "nothing is derived from it",
        "`flat.norm().item() + 1e-06` -> `flat.norm().item() - 1e-06`": "torch adds it against 0",
        "`zip(weights, flat.split([w.numel() for w in weights]), st...` -> "
        "`zip(weights, flat.split([w.numel() for w in weights]))`": ALIKE_IN_LENGTH,
        "`True` -> `False` (#2)": ALIKE_IN_LENGTH,
    },
    "15.stops": {
        "`dist.all_reduce(most, op=dist.ReduceOp.MAX)` -> twice": "a maximum of maxima",
        "`dist.all_reduce(total)` -> twice": LARGER_BOTH,
        "`dist.all_reduce(sums)` -> twice": LARGER_BOTH,
    },
}

PROMISES = {
    "15.offsets": {
        "The hosts' clocks started at different times": (*TIME, ""),
        "Return what must be added to this rank's clock": (*TIME, ""),
        "which are the only way to talk": (*MESSAGES, ""),
        "each calls `rest()` once": (*DRIFT, ""),
        "use only the exchange that was shortest in flight": (*TIME, ""),
    },
    "15.culprit": {
        "`records` has a dictionary for each rank": None,
        "each group counts its own, from 0": (*NUMBER, "group"),
        "has either called something else than the others there": (*DIFFERS, "differs"),
        "Groups in which ranks may disagree": None,
    },
    "15.breakdown": {
        "the spans of all ranks in any order": (*COMPUTE, ""),
        "Split each step into four parts": (*COMPUTE, ""),
        "it lasts from the first rank's start to the last rank's stop": (*STEP, ""),
        "**data** that no compute hides": ("data that compute does not hide", ""),
        "Add up each part over the steps that count": (*STEP, ""),
        "One process needs `alone` for a step": (*EFFICIENCY, ""),
        "offsets: a number for each rank": None,
        "all arguments are left as they are": ("events stay as they are", ""),
        "How long at least one event": None,
    },
    "15.trains": {
        "The loss goes down on every rank": None,
        "In some steps a rank has none": (*EMPTY, "empty"),
        "Compare it with one process": (*ONCE, ""),
        "each gradient is sent once": (*SENT, ""),
        "leaves no gradient behind": ("the samples stay as they are, and no gradient is left", ""),
        "which require gradients, equal on all ranks": None,
        "Returns the mean loss over all samples of all ranks": (*TOLD, ""),
    },
    "15.stops": {
        "This program runs well alone": None,
        "def fit(weight, batches, held_out, rate, epochs)": None,
        "Fix it, so that it does what one process would do": (*ALIKE, ""),
        "A rank without a k-th batch brings nothing": (*UNEVEN, "uneven"),
        "no batch is left out": (*UNEVEN, "uneven"),
        "all ranks skip that step": (*SKIP, "nan"),
        "over all ranks' held-out samples, every sample once": (*HELD, ""),
        "All ranks stop unless it is smaller than the one before": (*STOP, "stop"),
        "Train at most so many epochs": (*ALIKE, ""),
        "updates weight (in,) in place": (*ALIKE, ""),
        "of another length on each rank": (*UNEVEN, "uneven"),
        "which may have no sample on some ranks": (*HELD, "uneven"),
        "Returns the validation loss after each epoch": (*HELD, ""),
    },
}


# -- what authors who had not read the judge got away with -----------------------------------------

WRONG["15.offsets"] += [
    Wrong(
        "rank 0 does not rest",
        altered("15.offsets", ("    rest()\n", "    if rank:\n        rest()\n")),
        says="called rest() 0 times",
        loses=MESSAGES,
    ),
]
WRONG["15.culprit"] += [
    Wrong(
        "always the line where it stands",
        altered("15.culprit", ('there[rank]["line"]', 'records[rank]["at"]')),
        says="and that call is at",
        loses=LINE,
    ),
]
WRONG["15.breakdown"] += [
    Wrong(
        "data hides no communication",
        altered(
            "15.breakdown",
            (
                '"exposed": every - busy}',
                '"exposed": length(rank, ["compute", "comm"], begin, end) - compute}',
            ),
        ),
        says="The parts add up to",
        loses=SUM,
    ),
]


# -- 15.critical_path ------------------------------------------------------------------------------

REDUCES = ("the critical path through all-reduces",)
TRAVELS = ("the critical path through messages",)
LASTS = ("how long the step then lasts",)
PATH_ALONE = ("one rank alone",)
NEXT = "place = max(needs[place], key=lambda p: stops.get(p, 0))"
RESULT = "return path, max(new.values())"
BEFORE = "max(stops.values()) - trace[0][0]['start']"


def path(*changes):
    return altered("15.critical_path", *changes)


def other_path(*lines):
    """The solution with another path: lines that follow its own."""
    halved = "works[rank, index] /= 2"
    return path((halved, "\n    ".join([*lines, halved])))


WRONG["15.critical_path"] = [
    Wrong(
        "whole microseconds",
        path(("works[rank, index] /= 2", "works[rank, index] //= 2")),
        says="Yours is rounded",
        loses=LASTS,
    ),
    Wrong(
        "sends to all ranks counted together",
        path(
            (
                'find(peer, "send", r)[find(r, kind, peer).index((r, i))]',
                '[(peer, j) for j, e in enumerate(trace[peer]) if e["kind"] == "send"]'
                "[find(r, kind, peer).index((r, i))]",
            )
        ),
        says="yours counts the sends to all ranks together",
        loses=TRAVELS,
    ),
    Wrong(
        "half of the event, whatever waits for it",
        path((RESULT, f"return path, {BEFORE} - works[rank, index]")),
        says="Yours is shorter by half of every event, whatever the step waits for",
        loses=LASTS,
    ),
    Wrong(
        "half of the event on the path, and nothing off it",
        path((RESULT, f"return path, {BEFORE} - works[rank, index] * ((rank, index) in path)")),
        says="Yours is shorter by half of every event on the path",
        loses=LASTS,
    ),
    Wrong(
        "the rank that computes longest",
        other_path(
            "own = [find(r, 'compute') for r in range(len(trace))]",
            "path = max(own, key=lambda places: sum(works[p] for p in places))",
        ),
        says="yours holds all compute of the rank that computes longest",
        loses=REDUCES,
    ),
    Wrong(
        "the sum of the slowest between all-reduces",
        other_path(
            "path, cuts = [], [[-1, *(i for _, i in find(r, 'all_reduce')), len(trace[r])]",
            "                  for r in range(len(trace))]",
            "for k in range(len(cuts[0]) - 1):",
            "    own = [[p for p in find(r, 'compute') if cut[k] < p[1] < cut[k + 1]]",
            "           for r, cut in enumerate(cuts)]",
            "    path += max(own, key=lambda places: sum(works[p] for p in places))",
        ),
        says="between two all-reduces yours holds the rank that computes longest there",
        loses=TRAVELS,
    ),
    Wrong(
        "the rank that was longest in the all-reduce",
        path(
            (
                NEXT,
                'kind = trace[place[0]][place[1]]["kind"]\n'
                '        pick = min if kind == "all_reduce" else max\n'
                "        place = pick(needs[place], key=lambda p: stops.get(p, 0))",
            )
        ),
        says="yours follows the rank that was longest in the call",
        loses=REDUCES,
    ),
    Wrong(
        "from a recv always to the sender",
        path(
            (
                NEXT,
                'kind = trace[place[0]][place[1]]["kind"]\n'
                f"        {NEXT} if kind != 'recv' else needs[place][1]",
            )
        ),
        says="at a recv yours always follows the sender",
        loses=TRAVELS,
    ),
    Wrong(
        "messages are no reason to change the rank",
        path(
            (
                NEXT,
                'kind = trace[place[0]][place[1]]["kind"]\n'
                f"        {NEXT} if kind != 'recv' else needs[place][0]",
            )
        ),
        says="at a recv yours stays on its rank",
        loses=TRAVELS,
    ),
    Wrong(
        "to the end of rank 0",
        path(("max(stops, key=stops.get)", "(0, len(trace[0]) - 1)")),
        says="yours leads to the end of rank 0",
        loses=REDUCES,
    ),
    Wrong(
        "all events of the chain",
        path(('if trace[place[0]][place[1]]["kind"] == "compute":', "if True:")),
        says="list the compute events alone",
        loses=REDUCES,
    ),
    Wrong(
        "from the end to the beginning",
        path(("path.insert(0, place)", "path.append(place)")),
        says="it runs from its end to its beginning",
        loses=REDUCES,
    ),
    Wrong(
        "the path as indices, without ranks",
        other_path("path = [i for _, i in path]"),
        says="is not the (rank, index) of an event",
        loses=REDUCES,
    ),
    Wrong(
        "the path alone",
        path((RESULT, "return path")),
        says="Return a list of places, and a number of microseconds",
        loses=REDUCES,
    ),
    Wrong(
        "waiting counts as work",
        path(
            ("                works[r, i] = 0\n", ""),
            (
                'works[r, i] = min(trace[q][j]["stop"] - trace[q][j]["start"] for q, j in calls)',
                "pass",
            ),
        ),
        says="Yours takes waiting for work",
        loses=LASTS,
    ),
    Wrong(
        "each rank for itself",
        path(
            (
                RESULT,
                "half = (trace[rank][index]['stop'] - trace[rank][index]['start']) / 2\n"
                "    ends = [events[-1]['stop'] for events in trace]\n"
                "    new = [e - half * (r == rank) for r, e in enumerate(ends)]\n"
                "    return path, max(new) - trace[0][0]['start']",
            )
        ),
        says="Yours shortens one rank alone",
        loses=LASTS,
    ),
    Wrong(
        "no rank ever waits in the replay",
        path(
            (
                "max(new.get(before, 0) for before in needs[p])",
                "new.get((p[0], p[1] - 1), 0)",
            )
        ),
        says="Yours is right if no rank ever waits",
        loses=LASTS,
    ),
    Wrong(
        "the all-reduce keeps its length on each rank",
        path(
            (
                'works[r, i] = min(trace[q][j]["stop"] - trace[q][j]["start"] for q, j in calls)',
                "pass",
            )
        ),
        says="Yours takes waiting for work",
        loses=LASTS,
    ),
    Wrong(
        "what it saves",
        path((RESULT, f"return path, {BEFORE} - max(new.values())")),
        says="Yours is what the step saves",
        loses=LASTS,
    ),
    Wrong(
        "the end by the clock",
        path((RESULT, "return path, max(new.values()) + trace[0][0]['start']")),
        says="Yours is the end by the clock",
        loses=LASTS,
    ),
    Wrong(
        "a share of the step",
        path((RESULT, f"return path, max(new.values()) / ({BEFORE})")),
        says="Yours is a share of the step",
        loses=LASTS,
    ),
    Wrong(
        "the k-th message that comes, whoever sent it",
        path(
            (
                'find(peer, "send", r)[find(r, kind, peer).index((r, i))]',
                "sorted((e['stop'], q, j) for q, own in enumerate(trace) for j, e in enumerate(own)"
                " if (e['kind'], e['peer']) == ('send', r))"
                "[sum(e['kind'] == 'recv' for e in events[:i])][1:]",
            )
        ),
        says="Go back from the end: what did each event wait for last?",
        loses=TRAVELS,
    ),
    Wrong(
        "the half is written into the trace",
        path(
            (
                RESULT,
                "for own in trace:\n"
                "        for event in own:\n"
                "            event.setdefault('work', event['stop'] - event['start'])\n"
                f"    {RESULT}",
            )
        ),
        says="which was handed in to be read",
        loses=("the trace stays as it is",),
    ),
]

RIGHT["15.critical_path"] = [
    (
        "recursion with a cache; the path from what lengthens the step",
        """
from functools import cache


def critical_path(trace, rank, index):
    ranks = range(len(trace))

    def count(r, i, kind, peer):
        return sum((e["kind"], e["peer"]) == (kind, peer) for e in trace[r][:i])

    def kth(r, k, kind, peer):
        return [i for i, e in enumerate(trace[r]) if (e["kind"], e["peer"]) == (kind, peer)][k]

    def step(changed=None, factor=1.0):
        @cache
        def stop(r, i):
            if i < 0:
                return 0.0
            e = trace[r][i]
            if e["kind"] == "recv":
                k = count(r, i, "recv", e["peer"])
                return max(stop(r, i - 1), stop(e["peer"], kth(e["peer"], k, "send", r)))
            if e["kind"] == "all_reduce":
                k = count(r, i, "all_reduce", None)
                calls = [(q, kth(q, k, "all_reduce", None)) for q in ranks]
                last = max(trace[q][j]["start"] for q, j in calls)
                return max(stop(q, j - 1) for q, j in calls) + e["stop"] - last
            work = e["stop"] - e["start"]
            return stop(r, i - 1) + work * (factor if (r, i) == changed else 1)

        return max(stop(r, len(trace[r]) - 1) for r in ranks)

    computes = [(r, i) for r in ranks for i, e in enumerate(trace[r]) if e["kind"] == "compute"]
    computes.sort(key=lambda p: trace[p[0]][p[1]]["start"])
    now = step()
    path = [p for p in computes if step(p, 1 + 1e-6) > now + 1e-6]  # times are whole numbers
    return path, step((rank, index), 0.5)
""",
    ),
    (
        "a simulation of the ranks with queues; tuples and ints",
        """
from collections import deque


def run(trace, half):
    world = len(trace)
    now, at = [0] * world, [0] * world
    boxes, why = {}, {}
    while any(at[r] < len(trace[r]) for r in range(world)):
        for r in range(world):
            if at[r] == len(trace[r]):
                continue
            e, me = trace[r][at[r]], (r, at[r])
            before = (r, at[r] - 1)
            if e["kind"] in ("compute", "send"):
                work = 2 * (e["stop"] - e["start"])
                now[r] += work // 2 if me == half else work
                if e["kind"] == "send":
                    boxes.setdefault((r, e["peer"]), deque()).append((now[r], me))
            elif e["kind"] == "recv":
                box = boxes.get((e["peer"], r))
                if not box:
                    continue
                there, sent = box.popleft()
                if there > now[r]:
                    now[r], before = there, sent
            else:
                if not all(at[q] < len(trace[q]) and trace[q][at[q]]["kind"] == "all_reduce"
                           for q in range(world)):
                    continue
                took = min(trace[q][at[q]]["stop"] - trace[q][at[q]]["start"]
                           for q in range(world))
                last = max(range(world), key=lambda q: now[q])
                before = (last, at[last] - 1)
                for q in range(world):
                    why[q, at[q]] = before
                    at[q] += 1
                now = [max(now) + 2 * took] * world
                continue
            why[me] = before
            at[r] += 1
    last = max(range(world), key=lambda r: now[r])
    return now[last], (last, len(trace[last]) - 1), why


def critical_path(trace, rank, index):
    _, place, why = run(trace, None)
    path = []
    while place[1] >= 0:
        if trace[place[0]][place[1]]["kind"] == "compute":
            path.append(place)
        place = why[place]
    return tuple(reversed(path)), run(trace, (rank, index))[0] / 2
""",
    ),
    (
        "how late each event may be: those with no slack",
        altered(
            "15.critical_path",
            (
                "    works[rank, index] /= 2",
                "    order = sorted(stops, key=lambda p: (stops[p], works[p] == 0, p))\n"
                "    latest = dict.fromkeys(stops, max(stops.values()))\n"
                "    for p in reversed(order):\n"
                "        for before in needs[p]:\n"
                "            if before in latest:\n"
                "                latest[before] = min(latest[before], latest[p] - works[p])\n"
                "    path = [list(p) for p in order if latest[p] == stops[p]\n"
                "            and trace[p[0]][p[1]]['kind'] == 'compute']\n"
                "    works[rank, index] /= 2",
            ),
        ),
    ),
]
PROMISES["15.critical_path"] = {
    "only if the step waits for this span now": (*LASTS, ""),
    "All ranks begin at the same moment": None,
    "when the one before it on its rank stops": None,
    "and takes the same time whichever rank that is": (*LASTS, ""),
    "so at once if it was there before": (*TRAVELS, "messages"),
    'belongs to the other one\'s k-th `"recv"` from it': (*TRAVELS, "messages"),
    "The step ends with the last event of all ranks": (*REDUCES, ""),
    "from each event to the one that it waited for last": (*TRAVELS, "messages"),
    "Each trace has only one": None,
    "Return its compute events": (*REDUCES, ""),
    "trace: of each rank a list": None,
    "left as it is": ("the trace stays as it is", ""),
}
EQUIVALENT["15.critical_path"] = {
    "`0` -> `1` (#3)": "before a rank's first event; no event stops so early",
    "`0` -> `-1` (#3)": "the same",
}
