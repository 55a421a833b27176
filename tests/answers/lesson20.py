"""Wrong answers to lesson 20 that people give, and the sentence that each must hear."""

from answers import Wrong
from answers.altered import altered, wrapped

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


def ticks(old, new):
    assert TICKS.count(old) == 1
    return TICKS.replace(old, new)


WRONG["20.goodput"] = [
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
        says="Sort a copy",
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
        says="is lost when the time is over",
        loses=PARTS,
    ),
    Wrong(
        "no work is lost",
        ticks('found["lost"] += unsaved\n                    ', 'found["kept"] += unsaved\n' + 20 * " "),
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
            'if state == "compute" and inside == every:',
            'if state == "compute" and inside and tick % every == 0:',
        ),
        says="the checkpoints follow the clock",
        loses=PARTS,
    ),
    Wrong(
        "the interval continues after a restart",
        ticks("state, inside = \"detect\", 0\n            else", "state, inside = \"detect\", 0\n            else")
        .replace('elif state == "restart" and inside == back:\n                state, inside = "compute", 0',
                 'elif state == "restart" and inside == back:\n                state, inside = "compute", was')
        .replace("                if state != \"detect\":", "                if state == \"compute\":\n"
                 "                    was = inside\n                if state == \"write\":\n"
                 "                    was = 0\n                if state != \"detect\":"),
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
        says="what ends at the moment of a failure has ended",
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
            ("            continue\n", "                down += detect + restart\n            continue\n"),
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
        '''
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
''',
        says="is done at",
        loses=FEWEST,
    ),
    Wrong(
        "a failure hits a place",
        spares(
            ("left, resumes = work, 0.0", "place = {m: m for m in job}\n    left, resumes = work, 0.0"),
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
                "                    place[next(p for p, m in place.items() if m is None)] = back\n",
            ),
        ),
        says="Follow the machines",
        loses=FEWEST,
    ),
    Wrong(
        "each failure stops the job",
        spares(
            (SKIP, "        elif machine in ready:\n" + STOP + RESUME + "        else:\n            continue\n")
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
        says="repair ends at the moment of a failure",
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
        says="may be done at `by` itself",
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
        says="more spares are never slower",
        loses=TIME,
    ),
    Wrong(
        "down from the largest number",
        spares(
            (LOOP, "    found = None\n    for spares in reversed(range(most + 1)):\n"),
            (ENOUGH, "        if end > by:\n            break\n        found = spares, end\n    return found\n"),
        ),
        says="Try each number from 0",
        loses=TIME,
    ),
    Wrong(
        "a spare for each machine that is away",
        """
def fewest_spares(failures, nodes, most, work, repair, swap, by):
    times = sorted(time for time, machine in failures if machine < nodes)
    spares = max((sum(0 <= t - u < repair for u in times) for t in times), default=0)
    end = work + swap * len(times)
    return (spares, end) if spares <= most and end <= by else None
""",
        says="is done at",
        loses=FEWEST,
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
