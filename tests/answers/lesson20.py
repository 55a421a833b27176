"""Wrong answers to lesson 20 that people give, and the sentence that each must hear."""

from answers import Wrong
from answers.altered import altered

SAME = ("the arguments stay as they are",)
WRONG, RIGHT = {}, {}

# ---- 20.goodput ----

PARTS = ("kept, lost, write and down",)
OUTAGE = ("failures while the job writes or is down",)
EXACT = ("failures at the end of something",)
ZERO = ("no failure, no checkpoint, zero seconds",)


def goodput(*changes):
    return altered("20.goodput", *changes)


LOST = "        lost += min(time - start, interval)\n"
AGAIN = "                start = time + detect + restart\n            continue"
DOWN = "        start = time + detect + restart\n    return"
CYCLES = "cycles = (time - start) // (interval + write)"

# In steps of a quarter of a second.
TICKS = """
def where_time_goes(failures, length, interval, write, detect, restart):
    times = [round(4 * t) for t in failures]
    n, every, pause, hear, back = (
        x if x == math.inf else round(4 * x) for x in (length, interval, write, detect, restart)
    )
    found = dict.fromkeys(("kept", "lost", "write", "down"), 0)
    state, inside, unsaved = "compute", 0, 0
    for tick in range(n):
        failed = tick in times
        while True:  # what ends here ends first
            if state == "compute" and inside == every:
                state, inside = "write", 0
            elif state == "write" and inside == pause:
                state, inside = "compute", 0
                found["kept"] += unsaved
                unsaved = 0
            elif state == "detect" and inside == hear:
                state, inside = "restart", 0
            elif state == "restart" and inside == back:
                state, inside = "compute", 0
            elif failed:
                failed = False
                if state != "detect":
                    found["lost"] += unsaved
                    unsaved = 0
                    state, inside = "detect", 0
            else:
                break
        if state == "compute":
            unsaved += 1
        else:
            found["write" if state == "write" else "down"] += 1
        inside += 1
    if state == "write" and inside == pause or state == "compute" and inside == every and not pause:
        found["kept"] += unsaved
        unsaved = 0
    found["lost"] += unsaved
    return {name: count / 4 for name, count in found.items()}
"""


TICK_LOST = '                    found["lost"] += unsaved\n'
TICK_BACK = """
            elif state == "restart" and inside == back:
                state, inside = "compute", 0
"""


def ticks(*changes):
    source = TICKS
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


WRONG["20.goodput"] = [
    Wrong(
        "an outage has two restarts at most",
        goodput(
            ("    for time in [*sorted", "    again = 0\n    for time in [*sorted"),
            (
                "if start - restart <= time < length:",
                "if start - restart <= time < length and again < 2:\n                again += 1",
            ),
            ("        cycles = (time", "        again = 0\n        cycles = (time"),
        ),
        says="is right",
        loses=OUTAGE,
    ),
    Wrong(
        "an interrupted checkpoint counts",
        goodput(
            (
                LOST,
                "        if interval < time - start and time < length:\n"
                "            kept += interval\n"
                "        else:\n"
                "            lost += min(time - start, interval)\n",
            )
        ),
        says="a failure came while it was written",
        loses=OUTAGE,
    ),
    Wrong(
        "failures as they come",
        goodput(("*sorted(failures)", "*failures")),
        says="sort a copy",
        loses=PARTS,
    ),
    Wrong(
        "failures sorted in place",
        goodput(("    kept = lost", "    failures.sort()\n    kept = lost")),
        says="which was handed in to be read",
        loses=SAME,
    ),
    Wrong(
        "detection forgotten",
        goodput((AGAIN, AGAIN.replace("detect + ", "")), (DOWN, DOWN.replace("detect + ", ""))),
        says="detection takes no time",
        loses=PARTS,
    ),
    Wrong(
        "restart forgotten",
        goodput((AGAIN, AGAIN.replace(" + restart", "")), (DOWN, DOWN.replace(" + restart", ""))),
        says="the restart takes no time",
        loses=PARTS,
    ),
    Wrong(
        "failures while the job is down do nothing",
        goodput(("if start - restart <= time < length:", "if False:")),
        says="a failure during the restart has no effect",
        loses=OUTAGE,
    ),
    Wrong(
        "each failure begins the outage again",
        goodput(("if start - restart <= time < length:", "if time < length:")),
        says="begins the detection again",
        loses=OUTAGE,
    ),
    Wrong(
        "the restart alone begins again",
        goodput((AGAIN, AGAIN.replace("detect + ", ""))),
        says="It must be detected first",
        loses=OUTAGE,
    ),
    Wrong(
        "an outage after each failure",
        goodput(
            ("if start - restart <= time < length:", "if time < length:"),
            (AGAIN, "                start += detect + restart\n            continue"),
        ),
        says="is right",
        loses=OUTAGE,
    ),
    Wrong(
        "the last interval is kept",
        goodput(
            (
                LOST,
                "        if time < length:\n"
                "            lost += min(time - start, interval)\n"
                "        else:\n"
                "            kept += min(time - start, interval)\n",
            )
        ),
        says="is kept when the time is over",
        loses=PARTS,
    ),
    Wrong(
        "no work is lost",
        ticks((TICK_LOST, TICK_LOST.replace("lost", "kept"))),
        says="survives a failure",
        loses=PARTS,
    ),
    Wrong(
        "all work is lost",
        goodput(
            (LOST, LOST + "        if time < length:\n            lost, kept = lost + kept, 0.0\n")
        ),
        says="Complete checkpoints keep theirs",
        loses=PARTS,
    ),
    Wrong(
        "checkpoints by the clock",
        ticks(
            (
                'if state == "compute" and inside == every:',
                'if state == "compute" and inside and tick % every == 0:',
            )
        ),
        says="the checkpoints follow the clock",
        loses=PARTS,
    ),
    Wrong(
        "the interval continues after a restart",
        ticks(
            (
                TICK_LOST,
                '                    was = inside if state == "compute" else 0\n' + TICK_LOST,
            ),
            (TICK_BACK, TICK_BACK.replace('"compute", 0', '"compute", was')),
        ),
        says="the old interval continues",
        loses=PARTS,
    ),
    Wrong(
        "the job computes while it writes",
        goodput(("    kept = lost", "    write = 0.0\n    kept = lost")),
        says="the job computes while it writes",
        loses=PARTS,
    ),
    Wrong(
        "half an interval per failure",
        """
def where_time_goes(failures, length, interval, write, detect, restart):
    n = len(failures)
    lost, down = n * interval / 2, n * (detect + restart)
    rest = length - lost - down
    kept = rest * interval / (interval + write)
    return {"kept": kept, "lost": lost, "write": rest - kept, "down": down}
""",
        says="an expectation",
        loses=PARTS,
    ),
    Wrong(
        "a write that ends with the failure is interrupted",
        goodput(
            (CYCLES, "cycles = max(math.ceil((time - start) / (interval + write)) - 1, 0)"),
        ),
        says="what ends at the moment of a failure is interrupted",
        loses=EXACT,
    ),
    Wrong(
        "a failure at the end of the detection does nothing",
        goodput(("if start - restart <= time <", "if start - restart < time <")),
        says="hits the restart",
        loses=EXACT,
    ),
    Wrong(
        "no cycle times an infinite interval",
        goodput(("        if cycles:\n", "        if True:\n")),
        says="add up to nan",
        loses=ZERO,
    ),
    Wrong(
        "outages that last beyond the end",
        goodput(
            ("writing = start", "writing = down = start"),
            (
                "            continue\n",
                "                down += detect + restart\n            continue\n",
            ),
            (DOWN, "        down += (detect + restart) * (time < length)\n" + DOWN),
            ('"down": length - kept - lost - writing', '"down": down'),
        ),
        says="Each second belongs to one of them",
        loses=ZERO,
    ),
    Wrong(
        "the goodput alone",
        goodput(('return {"kept": kept,', 'return kept / length\n    return {"kept": kept,')),
        says="return a dict of kept, lost, write, down",
        loses=PARTS,
    ),
]
RIGHT["20.goodput"] = [
    ("in steps of a quarter of a second", TICKS),
    (
        "outages first, then the intervals between them",
        """
def where_time_goes(failures, length, interval, write, detect, restart):
    outages = []
    for t in sorted(failures):
        if t >= length:
            break
        if not outages or t >= outages[-1][1]:
            outages.append([t, t + detect + restart])
        elif t >= outages[-1][1] - restart:
            outages[-1][1] = t + detect + restart
    begins = [0.0] + [end for _, end in outages]
    ends = [begin for begin, _ in outages] + [length]
    kept = lost = writing = 0.0
    for begin, end in zip(begins, ends):
        while end - begin >= interval + write:
            kept, writing, begin = kept + interval, writing + write, begin + interval + write
        if end > begin:
            computed = min(interval, end - begin)
            lost += computed
            writing += end - begin - computed
    down = sum(min(end, length) - begin for begin, end in outages)
    return {"down": down, "kept": kept, "lost": lost, "write": writing}
""",
    ),
    (
        "the runs first, in fractions",
        """
from fractions import Fraction


def where_time_goes(failures, length, interval, write, detect, restart):
    write, detect, restart = map(Fraction, (write, detect, restart))
    end = Fraction(length)
    times = sorted({Fraction(t) for t in failures if t < length}) + [end]
    totals, now = [Fraction(0)] * 4, Fraction(0)
    while times:
        failure = times.pop(0)
        run = failure - now
        if interval == math.inf:
            count, rest, computed = 0, run, run
        else:
            step = Fraction(interval)
            count, rest = divmod(run, step + write)
            computed = min(rest, step)
            totals[0] += count * step
        totals[1] += computed
        totals[2] += count * write + rest - computed
        down = failure
        while times:
            heard = down + detect
            now = heard + restart
            times = [t for t in times if t >= heard or t == end]
            if times[0] >= now or times[0] == end:
                break
            down = times.pop(0)
        totals[3] += (min(now, end) - failure) if failure < end else 0
        if now >= end:
            break
    return dict(zip(("kept", "lost", "write", "down"), map(float, totals)))
""",
    ),
]

# ---- 20.spares ----

FEWEST = ("the smallest number that is enough, and its end",)
BROKEN = ("failures of other machines",)
SWAP = ("failures during a swap or a wait",)
TIME = ("just in time, or not at all",)


def spares(*changes):
    return altered("20.spares", *changes)


BACK = "                else:\n                    ready.add(back)\n"
STOP = "            left -= max(time - resumes, 0.0)\n"
TAKE = "                job.add(min(ready))\n                ready.remove(min(ready))\n"
RESUME = "            resumes = time + swap if len(job) == nodes else math.inf\n"
SKIP = "        elif machine not in ready:\n            continue\n"
ENOUGH = "        if end <= by:\n            return spares, end\n    return None\n"
LOOP = "    for spares in range(most + 1):\n"

# Each machine has a state, and each event its moment.
STATES = """
def fewest_spares(failures, nodes, most, work, repair, swap, by):
    for spares in range(most + 1):
        state = {m: "job" if m < nodes else "spare" for m in range(nodes + spares)}
        back, ready_at, done, now = {}, 0.0, 0.0, 0.0
        todo = sorted(failures)

        def members():
            return sum(s == "job" for s in state.values())

        while True:
            moments = [*back.values()] + [time for time, _ in todo[:1]]
            if members() == nodes:
                moments.append(max(ready_at, now) + work - done)
            after = min(moments)
            if members() == nodes:
                done += max(0.0, after - max(ready_at, now))
            now = after
            returned = sorted(m for m, t in back.items() if t == now)
            for machine in returned:
                state[machine] = "spare"
                del back[machine]
            if done >= work:
                break
            if not returned:
                machine = todo.pop(0)[1]
                if state.get(machine, "away") == "away":
                    continue
                was, state[machine] = state[machine], "away"
                back[machine] = now + repair
                if was == "spare":
                    continue
            if members() < nodes:
                for machine in sorted(state):
                    if state[machine] == "spare" and members() < nodes:
                        state[machine] = "job"
                ready_at = now + swap
        if now <= by:
            return spares, now
"""

WRONG["20.spares"] = [
    Wrong(
        "at most 16 spares",
        spares(("range(most + 1)", "range(min(most, 16) + 1)")),
        says="the job with 18 spares is done at 105, in time",
        loses=("failures during a swap or a wait",),
    ),
    Wrong(
        "the last of two that are repaired at once",
        spares(("sorted(away, key=away.get)", "sorted(away, key=lambda m: (away[m], -m))")),
        says="repaired at one moment the higher number takes the place",
        loses=("failures during a swap or a wait",),
    ),
    Wrong(
        "all work is done again",
        spares(("left -= max(time - resumes, 0.0)", "left = work")),
        says="a failure undoes the work",
        loses=FEWEST,
    ),
    Wrong(
        "repaired machines never come back",
        spares(("away[machine] = time + repair", "away[machine] = math.inf")),
        says="a repaired machine never comes back",
        loses=FEWEST,
    ),
    Wrong(
        "the swap is free",
        spares(("left, resumes = work, 0.0", "left, resumes, swap = work, 0.0, 0.0")),
        says="the swap takes no time",
        loses=FEWEST,
    ),
    Wrong(
        "there is always a spare",
        spares((TAKE, TAKE + "            else:\n                job.add(-1 - time)\n")),
        says="a place is filled although there is no spare",
        loses=FEWEST,
    ),
    Wrong(
        "no machine is followed",
        """
def fewest_spares(failures, nodes, most, work, repair, swap, by):
    for spares in range(most + 1):
        free, away, left, resumes, end = spares, [], work, 0.0, None
        holes = 0
        for time, machine in [*sorted(failures), (math.inf, nodes)]:
            while away and away[0] <= time:
                back = away.pop(0)
                if holes:
                    holes -= 1
                    if not holes:
                        resumes = back + swap
                else:
                    free += 1
            if resumes + left <= time:
                end = resumes + left
                break
            if machine >= nodes:
                continue
            left -= max(time - resumes, 0.0)
            away.append(time + repair)
            if free:
                free -= 1
            else:
                holes += 1
            resumes = math.inf if holes else time + swap
        if end <= by:
            return spares, end
""",
        says="Follow the machines",
        loses=FEWEST,
    ),
    Wrong(
        "a failure hits a place",
        spares(
            (
                "left, resumes = work, 0.0",
                "place = {m: m for m in job}\n    left, resumes = work, 0.0",
            ),
            (
                "        if machine in job:\n",
                "        machine = place.get(machine, machine)\n"
                "        if machine in job:\n"
                "            where = next(p for p, m in place.items() if m == machine)\n"
                "            place[where] = None\n",
            ),
            (TAKE, "                place[where] = min(ready)\n" + TAKE),
            (
                "                    job.add(back)\n",
                "                    job.add(back)\n"
                "                    place[next(p for p, m in place.items() if m is None)] = "
                "back\n",
            ),
        ),
        says="Follow the machines",
        loses=FEWEST,
    ),
    Wrong(
        "each failure stops the job",
        spares(
            (
                SKIP,
                "        elif machine in ready:\n"
                + STOP
                + RESUME
                + "        else:\n            continue\n",
            )
        ),
        says="Only machines of the job stop it",
        loses=BROKEN,
    ),
    Wrong(
        "spares do not fail",
        spares((SKIP, "        else:\n            continue\n")),
        says="It is away for `repair` seconds",
        loses=BROKEN,
    ),
    Wrong(
        "a second failure begins the repair again",
        spares((SKIP, SKIP.replace("not in ready", "not in ready and machine not in away"))),
        says="its repair begins again",
        loses=BROKEN,
    ),
    Wrong(
        "machines that do not exist become spares",
        spares((SKIP, SKIP.replace("machine not in ready", "machine in away or machine is None"))),
        says="that the cluster does not have",
        loses=BROKEN,
    ),
    Wrong(
        "a swap that a failure does not interrupt",
        spares(
            (
                RESUME,
                "            if len(job) < nodes:\n"
                "                resumes = math.inf\n"
                "            elif not time < resumes < math.inf:\n"
                "                resumes = time + swap\n",
            )
        ),
        says="It begins again",
        loses=SWAP,
    ),
    Wrong(
        "a failure during a swap adds a swap",
        spares(
            (
                RESUME,
                "            if len(job) < nodes:\n"
                "                resumes = math.inf\n"
                "            elif resumes < math.inf:\n"
                "                resumes = max(time, resumes) + swap\n"
                "            else:\n"
                "                resumes = time + swap\n",
            )
        ),
        says="The first one is given up",
        loses=SWAP,
    ),
    Wrong(
        "the spare with the highest number",
        spares((TAKE, TAKE.replace("min", "max"))),
        says="The lowest number does",
        loses=SWAP,
    ),
    Wrong(
        "a failure at the end of a repair comes first",
        spares(("if away[back] <= time:", "if away[back] < time or time == math.inf:")),
        says="after the failure of the same moment",
        loses=TIME,
    ),
    Wrong(
        "a failure when the job is done",
        spares(("if resumes + left <= time:", "if resumes + left < time or time == math.inf:")),
        says="comes too late",
        loses=TIME,
    ),
    Wrong(
        "done before the time",
        spares((ENOUGH, ENOUGH.replace("<=", "<"))),
        says="is too late. It is in time",
        loses=TIME,
    ),
    Wrong(
        "a binary search",
        spares(
            (
                LOOP,
                "    low, high = 0, most + 1\n"
                "    while low < high:\n"
                "        spares = (low + high) // 2\n",
            ),
            (
                ENOUGH,
                "        if end <= by:\n"
                "            high, found = spares, (spares, end)\n"
                "        else:\n"
                "            low = spares + 1\n"
                "    return None if low > most else found\n",
            ),
        ),
        says="more spares can be slower",
        loses=TIME,
    ),
    Wrong(
        "down from the largest number",
        spares(
            (LOOP, "    found = None\n    for spares in reversed(range(most + 1)):\n"),
            (
                ENOUGH,
                "        if end > by:\n            break\n        found = spares, end\n"
                "    return found\n",
            ),
        ),
        says="more spares can be slower",
        loses=TIME,
    ),
    Wrong(
        "the best number where none is enough",
        spares((ENOUGH, ENOUGH.replace("return None", "return spares, end"))),
        says="no number of spares",
        loses=FEWEST,
    ),
    Wrong(
        "the number alone",
        spares((ENOUGH, ENOUGH.replace("spares, end", "spares"))),
        says="return (spares, seconds), or None",
        loses=FEWEST,
    ),
    Wrong(
        "failures sorted in place",
        spares((LOOP, "    failures.sort(reverse=True)\n" + LOOP)),
        says="which was handed in to be read",
        loses=SAME,
    ),
]
RIGHT["20.spares"] = [
    ("each machine has a state", STATES),
    (
        "in steps of a quarter of a second",
        """
def fewest_spares(failures, nodes, most, work, repair, swap, by):
    fails = {}
    for time, machine in failures:
        fails.setdefault(round(4 * time), []).append(machine)
    ends = (run(fails, nodes, n, work, repair, swap) for n in range(most + 1))
    return next(((n, end) for n, end in enumerate(ends) if end <= by), None)


def run(fails, nodes, spares, work, repair, swap):
    work, repair, swap = round(4 * work), round(4 * repair), round(4 * swap)
    broken = [0] * (nodes + spares)  # ticks until repaired
    member = [m < nodes for m in range(nodes + spares)]
    tick = done = loading = 0
    while True:
        changed = False
        if done == work:
            return tick / 4
        for machine in sorted(fails.get(tick, [])):
            if machine < len(broken) and not broken[machine]:
                broken[machine] = repair
                changed |= member[machine]
                member[machine] = False
        while sum(member) < nodes:
            free = [m for m, left in enumerate(broken) if not left and not member[m]]
            if not free:
                break
            member[free[0]] = changed = True
        if changed:
            loading = swap
        if sum(member) == nodes:
            if loading:
                loading -= 1
            else:
                done += 1
        broken = [max(0, left - 1) for left in broken]
        tick += 1
""",
    ),
    (
        "a heap of events",
        """
import heapq


class Job:
    def __init__(self, nodes, spares, work, repair, swap):
        self.seats, self.pool = set(range(nodes)), list(range(nodes, nodes + spares))
        self.nodes, self.left, self.repair, self.swap = nodes, work, repair, swap
        self.away, self.begin = set(), 0.0

    def advance(self, now):
        if self.begin is not None and now > self.begin:
            self.left -= now - self.begin
            self.begin = now

    def seat(self, now):
        while self.pool and len(self.seats) < self.nodes:
            self.seats.add(heapq.heappop(self.pool))
        self.begin = now + self.swap if len(self.seats) == self.nodes else None


def fewest_spares(failures, nodes, most, work, repair, swap, by):
    for spares in range(most + 1):
        job = Job(nodes, spares, work, repair, swap)
        events = [(time, 1, machine) for time, machine in failures] + [(math.inf, 1, -1)]
        heapq.heapify(events)
        while True:
            now, kind, machine = heapq.heappop(events)
            if job.begin is not None and job.begin + job.left <= now:
                end = job.begin + job.left
                break
            if kind == 0:
                job.away.remove(machine)
                heapq.heappush(job.pool, machine)
                if len(job.seats) < nodes:
                    job.seat(now)
            elif machine in job.seats or machine in job.pool:
                job.away.add(machine)
                heapq.heappush(events, (now + repair, 0, machine))
                if machine in job.pool:
                    job.pool.remove(machine)
                    heapq.heapify(job.pool)
                else:
                    job.advance(now)
                    job.seats.remove(machine)
                    job.seat(now)
        if end <= by:
            return [spares, end]
    return None
""",
    ),
]


# ---- 20.plan ----

MESH = ("as many GPUs as there are, all divided",)
FITS = ("it fits the memory",)
FAST = ("within 10% of the fastest mesh",)
ANY = ("any number of GPUs and any node",)
SECONDS = ("the seconds of its step",)
REFUSE = ("a refusal that says what is needed",)


def plan(*changes):
    return altered("20.plan", *changes)


PRODUCT = "            if data * tensor * pipeline != gpus:\n                continue\n"
DIVIDE = "heads % tensor or layers % pipeline or batch % data"
ALIVE = " + min(count, pipeline) * layers / pipeline * layer"
BUBBLE = "compute * (1 + (pipeline - 1) / count) + reduce"
LINK = 'cluster["slow" if cluster["per_node"] % block else "fast"]'
CHOICE = "best = min(fits, key=fits.get)"
WORDS = 'f"no mesh fits: the smallest needs {math.ceil(least)} bytes on a GPU"'

WRONG["20.plan"] = [
    Wrong(
        "activations of as many micro-batches as stages",
        plan((ALIVE, ALIVE.replace("min(count, pipeline)", "pipeline"))),
        says="a replica has only batch / data micro-batches",
        loses=FAST,
    ),
    Wrong(
        "a mesh for each size, whatever the sequence",
        plan(
            ("def choose_mesh", "MESHES = {}\n\n\ndef choose_mesh"),
            (
                "    return best, fits[best]",
                "    key = (gpus, layers, hidden, heads, batch, cluster['memory'])\n"
                "    return MESHES.setdefault(key, (best, fits[best]))",
            ),
        ),
        says="its step takes",
        loses=SECONDS,
    ),
    Wrong(
        "GPUs left over",
        plan((PRODUCT, PRODUCT.replace("data * tensor * pipeline != gpus", "data < 1"))),
        says="is not 16 GPUs",
        loses=MESH,
    ),
    Wrong(
        "heads ignored",
        plan((DIVIDE, "layers % pipeline or batch % data")),
        says="heads.",
        loses=MESH,
    ),
    Wrong(
        "layers ignored",
        plan((DIVIDE, "heads % tensor or batch % data")),
        says="layers.",
        loses=MESH,
    ),
    Wrong(
        "the batch ignored",
        plan((DIVIDE, "heads % tensor or layers % pipeline"), ("batch // data", "batch / data")),
        says="batch.",
        loses=MESH,
    ),
    Wrong(
        "another order",
        plan(("return best, fits[best]", "return best[::-1], fits[best]")),
        says="does not divide",
        loses=MESH,
    ),
    Wrong(
        "memory without activations",
        plan((ALIVE, "")),
        says="Without the activations it would fit",
        loses=FITS,
    ),
    Wrong(
        "activations of one micro-batch",
        plan((ALIVE, " + layers / pipeline * layer")),
        says="The first stage keeps those of several",
        loses=FITS,
    ),
    Wrong(
        "activations of all layers on a stage forgotten",
        plan((ALIVE, " + min(count, pipeline) * layer")),
        says="a GPU needs",
        loses=FITS,
    ),
    Wrong(
        "memory ignored",
        plan(('needed > cluster["memory"]', "False")),
        says="a GPU needs",
        loses=FITS,
    ),
    Wrong(
        "the bubble forgotten",
        plan((BUBBLE, "compute + reduce")),
        says="count the bubble",
        loses=FAST,
    ),
    Wrong(
        "tensor parallelism over nodes",
        plan((LINK, 'cluster["fast"]')),
        says="see which groups cross nodes",
        loses=FAST,
    ),
    Wrong(
        "the largest group of tensor parallelism",
        plan((CHOICE, "best = max(fits, key=lambda mesh: mesh[1])")),
        says="Tensor parallelism crosses nodes",
        loses=FAST,
    ),
    Wrong(
        "half of the collectives",
        plan(("sent = 16 *", "sent = 8 *")),
        says="its step takes",
        loses=SECONDS,
    ),
    Wrong(
        "the mesh alone",
        plan(("return best, fits[best]", "return best")),
        says="three whole numbers, and a number",
        loses=MESH,
    ),
    Wrong(
        "groups no larger than a node",
        plan((LINK, 'cluster["slow" if block > cluster["per_node"] else "fast"]')),
        says="Its block must divide the node",
        loses=ANY,
    ),
    Wrong(
        "messages of tensor parallelism forgotten",
        plan(("            compute += count * layers / pipeline * sent / links[0]\n", "")),
        says="if tensor parallelism sent nothing",
        loses=FAST,
    ),
    Wrong(
        "an optimizer on each replica",
        plan(("(4 + 12 / data) * shard", "16 * shard")),
        says="sharded over data",
        loses=FAST,
    ),
    Wrong(
        "activations of all micro-batches",
        plan((ALIVE, " + count * layers / pipeline * layer")),
        says="at most `pipeline` micro-batches",
        loses=MESH,
    ),
    Wrong(
        "as few parts as possible",
        plan((CHOICE, "best = min(fits, key=lambda mesh: (mesh[1] * mesh[2], mesh[2]))")),
        says="into the fewest parts",
        loses=FAST,
    ),
    Wrong(
        "the first mesh that fits",
        plan((CHOICE, "best = list(fits)[0]")),
        says="is possible",
        loses=FAST,
    ),
    Wrong(
        "the first mesh where nothing fits",
        plan(("raise ValueError", "return (1, 1, gpus), 1.0\n        raise ValueError")),
        says="Raise ValueError",
        loses=REFUSE,
    ),
    Wrong(
        "the error of min",
        plan(("    if not fits:\n", "    if False:\n")),
        says="lacks the bytes",
        loses=REFUSE,
    ),
    Wrong(
        "the memory that there is",
        plan(("math.ceil(least)", "cluster['memory']")),
        says="lacks the bytes",
        loses=REFUSE,
    ),
    Wrong(
        "always a ValueError",
        plan(("    if not fits:\n", "    if True:\n")),
        says="a mesh fits, and ValueError was raised",
        loses=MESH,
    ),
    Wrong(
        "the bandwidth halved in place",
        plan(("    fits, least", "    cluster['slow'] /= 2\n    fits, least")),
        says="which was handed in to be read",
        loses=SAME,
    ),
]
COST = """
def cost(model, cluster, d, t, p):
    parameters = 12 * model["layers"] * model["hidden"] ** 2
    tokens, m = model["sequence"] * model["hidden"], model["batch"] // d
    per_stage = model["layers"] // p
    states = parameters // model["layers"] * per_stage / t * (4 + 12 / d)
    memory = states + per_stage * 34 * tokens / t * min(m, p)

    def bandwidth(size):
        return cluster["fast" if cluster["per_node"] in range(size, 10**6, size) else "slow"]

    forward_backward = 6 * parameters * model["sequence"] / (t * p) / cluster["flops"]
    forward_backward += per_stage * 16 * tokens * (1 - 1 / t) / bandwidth(t)
    seconds = forward_backward * (m + p - 1)
    return memory, seconds + 4 * parameters / (t * p) * (1 - 1 / d) / bandwidth(t * d)
"""
RIGHT["20.plan"] = [
    (
        "all divisors, a cost per micro-batch",
        COST
        + """

def choose_mesh(model, cluster):
    def divisors(n):
        return [i for i in range(1, n + 1) if n % i == 0]

    n = cluster["gpus"]
    meshes = [
        (d, n // d // p, p)
        for d in divisors(n)
        for p in divisors(n // d)
        if model["batch"] % d == 0
        and model["layers"] % p == 0
        and model["heads"] % (n // d // p) == 0
    ]
    costs = {mesh: cost(model, cluster, *mesh) for mesh in meshes}
    best = min(
        (c[1], mesh) for mesh, c in costs.items() if c[0] <= cluster["memory"]
    ) if any(c[0] <= cluster["memory"] for c in costs.values()) else None
    if best is None:
        smallest = min(c[0] for c in costs.values())
        raise ValueError(f"{smallest:,.0f} bytes are needed on each of {n} GPUs")
    return [list(best[1]), best[0]]
""",
    ),
    (
        "the first that is within 10% of a bound",
        COST
        + """

def choose_mesh(model, cluster):
    n, found, least = cluster["gpus"], [], []
    for t in filter(lambda t: model["heads"] % t == 0 and n % t == 0, range(1, n + 1)):
        for p in range(1, model["layers"] + 1):
            if model["layers"] % p or n % (t * p):
                continue
            d = n // (t * p)
            if model["batch"] % d:
                continue
            memory, seconds = cost(model, cluster, d, t, p)
            least.append(memory)
            if memory <= cluster["memory"]:
                found.append((seconds, d, t, p))
    if not found:
        raise ValueError("a GPU would need %d bytes" % math.ceil(min(least)))
    found.sort()
    near = [mesh for mesh in found if mesh[0] <= 1.05 * found[0][0]]
    seconds, *mesh = min(near, key=lambda mesh: mesh[2])
    return tuple(mesh), seconds
""",
    ),
    (
        "by data and tensor, a class",
        """
class Plan:
    def __init__(self, model, cluster, data, tensor):
        self.model, self.cluster, self.data, self.tensor = model, cluster, data, tensor
        self.pipeline, rest = divmod(cluster["gpus"], data * tensor)
        self.valid = rest == 0 and self.pipeline > 0 and not (
            model["heads"] % tensor or model["batch"] % data or model["layers"] % self.pipeline
        )
        self.count = model["batch"] // data
        self.layers = model["layers"] / self.pipeline if self.valid else None
        self.share = self.layers and 12 * model["hidden"] ** 2 * self.layers / tensor

    def bytes(self):
        one = 34 * self.model["sequence"] * self.model["hidden"] * self.layers / self.tensor
        return self.share * 4 + self.share * 12 / self.data + one * min(self.count, self.pipeline)

    def seconds(self):
        def speed(block):
            whole = self.cluster["per_node"] // block * block == self.cluster["per_node"]
            return self.cluster["fast" if whole else "slow"]

        tokens = self.count * self.model["sequence"]
        work = 6 * self.share * tokens / self.cluster["flops"]
        talk = 16 * tokens * self.model["hidden"] * (self.tensor - 1) / self.tensor * self.layers
        busy = work + talk / speed(self.tensor)
        idle = busy / self.count * (self.pipeline - 1)
        reduce = 4 * self.share * (self.data - 1) / self.data
        return busy + idle + reduce / speed(self.tensor * self.data)


def choose_mesh(model, cluster):
    plans = [
        Plan(model, cluster, d, t)
        for d in range(1, min(cluster["gpus"], model["batch"]) + 1)
        if cluster["gpus"] % d == 0
        for t in range(1, model["heads"] + 1)
    ]
    plans = [plan for plan in plans if plan.valid]
    fitting = [plan for plan in plans if plan.bytes() <= cluster["memory"]]
    if len(fitting) == 0:
        small = min(plan.bytes() for plan in plans)
        raise ValueError("too large: " + str(int(small) + (small > int(small))) + " bytes")
    best = min(fitting, key=Plan.seconds)
    return (best.data, best.tensor, best.pipeline), best.seconds()
""",
    ),
]

# ---- 20.diagnose ----

GPU = ("the slow GPU",)
CABLE = ("the slow link",)
STALL = ("the stalls, and how often",)
WELL = ("a healthy job",)
LOG = ("the log stays as it is",)


def diagnose(*changes):
    return altered("20.diagnose", *changes)


SLOW = '        return "gpu", own.index(max(own))\n'
SLOWER = "if max(own) > 1.07 * min(own):"
OWN = "own = usual([[s - w - r for s, w, r in zip(*row, strict=True)] for row in rows])"
PAIR = '"link", ((receiver - 1) % world, receiver)'
EVERY = "    for every in range(2, 9):\n"
PERIOD = "if any(all(long[i::every]) for i in range(every)):"
LOW = "return sorted(values)[len(values) // 4]"
LONGER = "if max(wait) > 1.07 * low(wait):"


def largest(name):
    """The rank with the largest value of a column is the slow one."""
    return diagnose((SLOW, f'        {name} = usual(log["{name}"])\n'
                           f'        return "gpu", {name}.index(max({name}))\n'))  # fmt: skip


WRONG["20.diagnose"] = [
    Wrong(
        "the first 24 steps alone",
        diagnose(("    world =", "    log = {name: log[name][:24] for name in log}\n    world =")),
        says="do not come at regular distances to its end",
        loses=WELL,
    ),
    Wrong(
        "compared with the mean of all ranks",
        diagnose((SLOWER, "if max(own) > 1.1 * sum(own) / len(own):")),
        says="begins to send late",
        loses=GPU,
    ),
    Wrong("the largest step", largest("step"), says="all ranks end a step together", loses=GPU),
    Wrong(
        "the rank that waits longest",
        largest("wait"),
        says="is behind the slow one in the ring",
        loses=GPU,
    ),
    Wrong(
        "the mean over steps",
        diagnose(
            (OWN, "own = [sum(s[i] - w[i] - r[i] for s, w, r in rows) for i in range(world)]"),
            ("rows = zip(", "rows = list(zip("),
            ('log["ring"], strict=True)\n', 'log["ring"], strict=True))\n'),
        ),
        says="had a single long step",
        loses=GPU,
    ),
    Wrong(
        "a link, since a rank waits",
        diagnose((SLOWER, "if False:")),
        says="begins to send late",
        loses=GPU,
    ),
    Wrong(
        "slow from twice the time on",
        diagnose((SLOWER, "if max(own) > 2 * min(own):")),
        says="begins to send late",
        loses=GPU,
    ),
    Wrong(
        "slow from a second on",
        diagnose((SLOWER, "if max(own) > min(own) + 1:")),
        says="begins to send late",
        loses=GPU,
    ),
    Wrong(
        "compared with rank 0",
        diagnose((SLOWER, "if max(own) > 1.07 * own[0]:")),
        says="begins to send late",
        loses=GPU,
    ),
    Wrong(
        "the step without the wait alone",
        diagnose((OWN, OWN.replace("s - w - r", "s - w"))),
        says="begins to send late",
        loses=GPU,
    ),
    Wrong(
        "the receiver is slow",
        diagnose((PAIR, '"gpu", receiver')),
        says="all ranks compute equally long",
        loses=CABLE,
    ),
    Wrong(
        "the sender is slow",
        diagnose((PAIR, '"gpu", (receiver - 1) % world')),
        says="all ranks compute equally long",
        loses=CABLE,
    ),
    Wrong(
        "the link to the rank after",
        diagnose((PAIR, '"link", (receiver, (receiver + 1) % world)')),
        says="waits for it",
        loses=CABLE,
    ),
    Wrong(
        "the pair the other way round",
        diagnose((PAIR, '"link", (receiver, (receiver - 1) % world)')),
        says="the pair is the other way round",
        loses=CABLE,
    ),
    Wrong(
        "no link back to rank 0",
        diagnose((PAIR, '"link", (receiver - 1, receiver)')),
        says="waits for it",
        loses=CABLE,
    ),
    Wrong(
        "the receiver alone",
        diagnose((PAIR, '"link", receiver')),
        says="name both ranks",
        loses=CABLE,
    ),
    Wrong(
        "the upper middle of two ranks",
        diagnose((LONGER, "if max(wait) > 1.07 * sorted(wait)[world // 2]:")),
        says="waits longer for its first message",
        loses=CABLE,
    ),
    Wrong(
        "the median over steps",
        diagnose((LOW, "return sorted(values)[len(values) // 2]")),
        says="one step is long",
        loses=STALL,
    ),
    Wrong(
        "the first stall in the first step",
        diagnose((PERIOD, "if all(long[::every]):")),
        says="one step is long",
        loses=STALL,
    ),
    Wrong(
        "the last stall in the last of k",
        diagnose((PERIOD, "if all(long[every - 1 :: every]):")),
        says="one step is long",
        loses=STALL,
    ),
    Wrong(
        "from the largest period down",
        diagnose((EVERY, "    for every in range(8, 1, -1):\n")),
        says="Every stall counts",
        loses=STALL,
    ),
    Wrong(
        "stalls in every second step forgotten",
        diagnose((EVERY, "    for every in range(3, 9):\n")),
        says="Every stall counts",
        loses=STALL,
    ),
    Wrong(
        "no stalls at all",
        diagnose((PERIOD, "if False:")),
        says="on all ranks",
        loses=STALL,
    ),
    Wrong(
        "the distance of two long steps",
        diagnose(
            (
                EVERY,
                "    marks = [i for i, slow in enumerate(long) if slow]\n"
                "    if len(marks) > 1:\n"
                '        return "checkpoint", marks[1] - marks[0]\n' + EVERY,
            )
        ),
        says="is slow in each step",
        loses=GPU,
    ),
    Wrong(
        "never healthy",
        diagnose((LONGER, "if True:")),
        says="this job is healthy",
        loses=WELL,
    ),
    Wrong(
        "healthy, and a rank",
        diagnose(('return "healthy", None', 'return "healthy", 0')),
        says="return None there",
        loses=WELL,
    ),
    Wrong(
        "words of its own",
        diagnose((SLOW, SLOW.replace('"gpu"', '"slow GPU"'))),
        says="return a pair",
        loses=GPU,
    ),
    Wrong(
        "the first step dropped in place",
        diagnose(
            ("    steps = [", "    for rows in log.values():\n        del rows[0]\n    steps = [")
        ),
        says="which was handed in to be read",
        loses=LOG,
    ),
]
RIGHT["20.diagnose"] = [
    (
        "torch, medians of the steps that are not long, the time of each link",
        """
import torch


def diagnose(log):
    step, wait, ring = (torch.tensor(log[k]).double() for k in ("step", "wait", "ring"))
    n = step.shape[1]
    total = step.mean(1)
    long = total > 1.07 * total.quantile(0.2)
    for k in range(2, 9):
        for first in range(k):
            if bool(long[first::k].all()):
                return ["checkpoint", k]
    own = (step - wait - ring)[~long]
    wait = wait[~long]
    usual = own.median(0).values
    slow = int(usual.argmax())
    if usual[slow] > 1.07 * usual.min():
        return ["gpu", slow]
    link = (wait + own - own.roll(1, dims=1)).median(0).values  # to each rank
    worst = int(link.argmax())
    if link[worst] > 1.07 * link.min():
        return ["link", [(worst - 1) % n, worst]]
    return ["healthy", None]
""",
    ),
    (
        "the slow rank is the one that waits least",
        """
import statistics


def diagnose(log):
    steps = [max(row) for row in log["step"]]
    n, count = len(log["step"][0]), len(steps)
    base = sorted(steps)[count // 5]
    for k in range(2, 9):
        for start in range(k):
            if min(steps[start::k]) > 1.08 * base:
                return "checkpoint", k
    waits = [statistics.median(row[r] for row in log["wait"]) for r in range(n)]
    pairs = list(zip(log["step"], log["ring"]))
    rest = [statistics.median(s[r] - g[r] for s, g in pairs) for r in range(n)]
    own = [a - b for a, b in zip(rest, waits)]
    late = min(range(n), key=lambda r: waits[r])
    if own[late] > 1.08 * min(own):
        return "gpu", late
    worst = max(range(n), key=lambda r: waits[r])
    if waits[worst] > 1.08 * min(waits):
        return "link", ((worst + n - 1) % n, worst)
    return "healthy", None
""",
    ),
    (
        "a vote of the steps",
        """
from collections import Counter


def diagnose(log):
    n = len(log["step"][0])
    length = [row[0] for row in log["step"]]
    normal = sorted(length)[len(length) // 4]
    long = {i for i, s in enumerate(length) if s > 1.08 * normal}
    for k in range(2, 9):
        if any(set(range(o, len(length), k)) <= long for o in range(k)):
            return "checkpoint", k
    gpus, links = Counter(), Counter()
    for steps, waits, rings in zip(log["step"], log["wait"], log["ring"], strict=True):
        own = [s - w - r for s, w, r in zip(steps, waits, rings)]
        slow = max(range(n), key=own.__getitem__)
        gpus[slow if own[slow] > 1.08 * sorted(own)[(n - 1) // 2] else None] += 1
        message = [waits[r] + own[r] - own[r - 1] for r in range(n)]
        slow = max(range(n), key=message.__getitem__)
        links[slow if message[slow] > 1.08 * sorted(message)[(n - 1) // 2] else None] += 1
    (gpu, times), = gpus.most_common(1)
    if gpu is not None:
        return "gpu", gpu
    (to, times), = links.most_common(1)
    return ("healthy", None) if to is None else ("link", ((to - 1) % n, to))
""",
    ),
]
PROMISES = {
    "20.goodput": {
        "changes nothing, because the job is down already": (*OUTAGE, "outage"),
        "detection and restart begin again at that moment": (*OUTAGE, "outage"),
        "of all other computing": (*PARTS, ""),
        "perhaps equal, none, or after the end": (*ZERO, "edge"),
        "The arguments stay as they are": (*SAME, ""),
        "A checkpoint counts once it is complete": (*OUTAGE, "outage"),
        "with a full interval before the next one": (*PARTS, ""),
        "whose sum is length": (*PARTS, ""),
        "in any order": (*PARTS, ""),
        "interval may be longer than length or inf": (*ZERO, "edge"),
        "write, detect and restart may be 0": (*ZERO, "edge"),
        "has ended": (*EXACT, "exact"),
        "If it comes when a detection ends, it hits the restart": (*EXACT, "exact"),
    },
    "20.spares": {
        "The cluster has some more": (*FEWEST, ""),
        "the spare with the lowest number takes the place": (*SWAP, "again"),
        "which takes `swap` seconds for any number of machines": (*SWAP, "again"),
        "no work is lost": (*FEWEST, ""),
        "the swap begins again once no place is empty": (*SWAP, "again"),
        "A spare that fails does not stop the job": (*BROKEN, "broken"),
        "A failure of a machine that is away changes nothing": (*BROKEN, "broken"),
        "or None if no number is enough": (*TIME, "edge"),
        "nodes: at least 1": (*TIME, "edge"),
        "perhaps empty": (*TIME, "edge"),
        "swap may be 0": (*TIME, "edge"),
        "What ends at the moment of a failure has ended": (*TIME, "edge"),
        "A job that is done at `by` is in time": (*TIME, "edge"),
        "The arguments stay as they are": (*SAME, ""),
    },
    "20.plan": {
        "t divides the model's `heads`": (*MESH, ""),
        "Return a mesh of all GPUs that fits the memory": (*FITS, ""),
        "at most 10% longer than the fastest": (*FAST, ""),
        "with the seconds of its step": (*SECONDS, ""),
        "raise a `ValueError` whose message has the bytes": (*REFUSE, "refuse"),
        "In all cases some mesh divides": None,
        "gpus (1 to 16,384)": (*ANY, "edge"),
        "if the block's size divides `per_node`": (*ANY, "edge"),
        "of which all may be used": (*FITS, "edge"),
        "The arguments stay as they are": (*SAME, ""),
    },
    "20.diagnose": {
        "each rank sends to the next one, and the last to rank 0": (*CABLE, "link"),
        "Every rank has logged three durations": None,
        "`wait` | from calling the all-reduce": None,
        "A job has at most one fault": None,
        "computes longer than the others in each step": (*GPU, ""),
        "each message takes longer": (*CABLE, "link"),
        "in every k-th step, k from 2 to 8": (*STALL, "checkpoint"),
        "The first such step is any of the first k": (*STALL, "checkpoint"),
        "A fault is at least 15%": (*GPU, ""),
        "one rank takes longer by chance": (*WELL, "healthy"),
        "every fifth step stalls": (*STALL, "checkpoint"),
        '("healthy", None): none of these': (*WELL, "healthy"),
        "each a list of 40 steps or more": (*GPU, ""),
        "2 to 16 ranks": (*CABLE, "link"),
        "The log stays as it is": (*LOG, ""),
    },
}
NEVER = "it is left out by a condition below"
QUANTILE = "any low quantile tells"
EQUAL = "two times are never equal to the last bit"
STRICT = "they are equally long"
ALL_STEPS = "a step less tells the same"
EQUIVALENT = {
    "20.goodput": {
        "`time < start` -> `time <= start`": "at the end of the restart a failure begins it again, "
        "or finds a job that has just begun: the same"
    },
    "20.spares": {
        "`return None` -> dropped": "a function without return returns None",
        "`sorted(away, key=away.get)` -> `list(away)`": "repairs take equally long, so they end in "
        "the order in which they began",
    },
    "20.plan": {
        "`range(1, heads + 1)` -> `range(1, heads + 1 + 1)`": NEVER,
        "`range(1, layers + 1)` -> `range(1, layers + 1 + 1)`": NEVER,
        "`1` -> `2` (#2)": NEVER,
        "`1` -> `2` (#4)": NEVER,
    },
    "20.diagnose": {
        "`zip(*rows, strict=True)` -> `zip(*rows)`": STRICT,
        "`zip(*row, strict=True)` -> `zip(*row)`": STRICT,
        "`zip(log['step'], log['wait'], log['ring'], strict=True)` -> "
        "`zip(log['step'], log['wait'], log['ring'])`": STRICT,
        "`True` -> `False`": STRICT,
        "`True` -> `False` (#2)": STRICT,
        "`True` -> `False` (#3)": STRICT,
        "`0` -> `1`": "each step has all ranks",
        "`0` -> `-1`": "each step has all ranks",
        "`len(values)` -> `len(values) + 1`": QUANTILE,
        "`4` -> `5`": QUANTILE,
        "`4` -> `3`": QUANTILE,
        "`for row in log['step']` -> [:-1]": ALL_STEPS,
        "`for step in steps` -> [:-1]": ALL_STEPS,
        "`for row in rows` -> [:-1]": ALL_STEPS,
        "`step > 1.07 * low(steps)` -> `step >= 1.07 * low(steps)`": EQUAL,
        "`max(own) > 1.07 * min(own)` -> `max(own) >= 1.07 * min(own)`": EQUAL,
        "`max(wait) > 1.07 * low(wait)` -> `max(wait) >= 1.07 * low(wait)`": EQUAL,
        "`2` -> `1`": "not every step is long",
        "`9` -> `10`": "no chance makes steps long at equal distances",
        "`long[i::every]` -> `long[i + 1::every]`": "all remainders are there",
        "`range(every)` -> `range(every + 1)`": "a remainder is there twice",
    },
}
