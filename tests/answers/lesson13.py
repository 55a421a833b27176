"""Wrong answers to lesson 13 that people give, and the sentence that each must hear."""

from __future__ import annotations

from answers import Wrong
from answers.altered import altered, wrapped

LOADED = ("what was saved is loaded",)
KILLS = ("killed at any operation: complete, and the same on all ranks",)
RETURNS = ("save() returns when the checkpoint counts",)
GOES_ON = ("later saves work after a kill",)
TWO = ("two complete checkpoints at any moment",)
CLEAN = ("nothing else is left",)
PARAMETERS = ("parameters bit for bit",)
STATES = ("the optimizer's states too",)
ORDER = ("tensors in another order",)
READS = ("a rank reads no more than its shard",)
SAMPLES = ("every sample once: the place in the epoch",)
RANDOM = ("every rank's own random numbers",)
RATES = ("the learning rates of the schedule",)
LOSSES = ("the same losses, bit for bit",)
QUIET = ("saving changes nothing",)

SAVE = """
class Checkpoints:
    def __init__(self, disk):
        self.disk = disk

    def kept(self):
        return self.disk.read("kept") if "kept" in self.disk.names() else []

    def part(self, step):
        return f"{step}-{dist.get_rank()}"

    def point(self, kept):
        if dist.get_rank() == 0:
            self.disk.write("kept.new", kept)
            self.disk.rename("kept.new", "kept")

    def clean(self, kept):
        if dist.get_rank() == 0:
            for name in self.disk.names():
                if "-" in name and int(name.split("-")[0]) not in kept:
                    self.disk.remove(name)

    def save(self, step, shard):
        kept = [*self.kept(), step][-2:]
%s

    def load(self):
        kept = self.kept()
        return (kept[-1], self.disk.read(self.part(kept[-1]))) if kept else None
"""
STEPS = (
    "self.disk.write(self.part(step), shard)",
    "self.disk.barrier()",
    "self.point(kept)",
    "self.disk.barrier()",
    "self.clean(kept)",
)


def save(*lines, **replaced):
    source = SAVE % "\n".join(f"        {line}" for line in lines or STEPS)
    for old, new in replaced.values():
        assert old in source, old
        source = source.replace(old, new)
    return source


RESHARD = """
def reshard(read, keys, saved, world, names):
    starts, total = {{}}, 0
    for name, numel in saved.items():
        starts[name], total = total, total + numel
    old, new = {old}, {new}
    left, result = dist.get_rank() * new, {{}}
    for key in {keys}:
        parts, at = [read(0, key, 0, 0)], 0
        for name in {names}:
            start = starts[name] + max(left - at, 0)
            stop = starts[name] + min(left + new - at, saved[name])
            while start < stop:
                rank, offset = divmod(start, old)
                length = min(stop - start, old - offset)
                parts.append({read})
                start += length
            at += saved[name]
        flat = torch.cat(parts)
        result[key] = {pad}
    return result
"""
RIGHT_RESHARD = {
    "old": "-(-total // world)",
    "new": "-(-total // dist.get_world_size())",
    "keys": "keys",
    "names": "names",
    "read": "read(rank, key, offset, offset + length)",
    "pad": "torch.nn.functional.pad(flat, (0, new - len(flat)))",
}


def reshard(**wrong):
    return RESHARD.format(**(RIGHT_RESHARD | wrong))


WHOLE = """
def reshard(read, keys, saved, world, names):
    M, me = dist.get_world_size(), dist.get_rank()
    total = sum(saved.values())
    old, new = -(-total // world), -(-total // M)
    result = {{}}
    for key in keys:
        flat = torch.cat([read(rank, key, 0, old) for rank in range(world)]){cut}
        parts = dict(zip(saved, flat.split([*saved.values()]{more})))
        {flat}
        flat = torch.nn.functional.pad(flat, (0, new * M - len(flat)))
        result[key] = flat[me * new : me * new + new]
    return result
"""

RESUME = """
class Resume:
    @staticmethod
    def save(run):
        random = [None] * dist.get_world_size()
        dist.all_gather_object(random, torch.get_rng_state())
        {before}
        return {{
            "model": {model},
            "optimizer": run.optimizer.state_dict(),
            "schedule": run.schedule.state_dict(),
            "generator": run.generator.get_state(),
            "order": run.order,
            "at": run.at,
            "step": run.step,
            "random": random,
        }}

    @staticmethod
    def load(run, state):
        {load}
        {optimizer}
        {schedule}
        {generator}
        {order}
        {at}
        {step}
        {random}
"""
RIGHT_RESUME = {
    "before": "",
    "model": "run.model.state_dict()",
    "load": 'run.model.load_state_dict(state["model"])',
    "optimizer": 'run.optimizer.load_state_dict(state["optimizer"])',
    "schedule": 'run.schedule.load_state_dict(state["schedule"])',
    "generator": 'run.generator.set_state(state["generator"])',
    "order": 'run.order = state["order"]',
    "at": 'run.at = state["at"]',
    "step": 'run.step = state["step"] + 1',
    "random": 'torch.set_rng_state(state["random"][dist.get_rank()])',
}


def resume(**wrong):
    return RESUME.format(**(RIGHT_RESUME | wrong))


WRITE, MEET, POINT, _, CLEAN_UP = STEPS

WRONG = {
    "13.atomic_save": [
        Wrong(
            "written in place",
            save(part=('f"{step}-{dist.get_rank()}"', 'f"{0}-{dist.get_rank()}"')),
            says="After saves without a kill",
            loses=LOADED,
        ),
        Wrong(
            "one file of a rank, written over",
            """
class Checkpoints:
    def __init__(self, disk):
        self.disk = disk

    def save(self, step, shard):
        self.disk.write(f"part-{dist.get_rank()}", [step, shard])
        self.disk.barrier()

    def load(self):
        name = f"part-{dist.get_rank()}"
        return self.disk.read(name) if name in self.disk.names() else None
""",
            says="which was good, was written over in place",
            loses=KILLS,
        ),
        Wrong(
            "every rank writes the pointer",
            save(
                point=(
                    "if dist.get_rank() == 0:\n            self.disk.write",
                    "if True:\n            self.disk.write",
                )
            ),
            says="both changed the file kept.new",
            loses=LOADED,
        ),
        Wrong(
            "every rank cleans up",
            save(clean=("if dist.get_rank() == 0:\n            for", "if True:\n            for")),
            says="-0 between two barriers",
            loses=LOADED,
        ),
        Wrong(
            "the pointer before the data",
            save(POINT, WRITE, MEET, MEET, CLEAN_UP),
            says="Write the pointer after a barrier",
            loses=KILLS,
        ),
        Wrong(
            "the pointer after the own part",
            save(WRITE, POINT, MEET, CLEAN_UP),
            says="Write the pointer after a barrier",
            loses=KILLS,
        ),
        Wrong(
            "the pointer written in place",
            save(
                point=(
                    'self.disk.write("kept.new", kept)\n'
                    '            self.disk.rename("kept.new", "kept")',
                    'self.disk.write("kept", kept)',
                )
            ),
            says="kept is half a file: its writer",
            loses=LOADED,
        ),
        Wrong(
            "rank 0 alone saves",
            save("if dist.get_rank() == 0:", *(f"    {line}" for line in STEPS)),
            says="has returned without it: all ranks must enter a save",
            loses=LOADED,
        ),
        Wrong(
            "all that is old goes first",
            save("self.clean([])", "self.disk.barrier()", *STEPS),
            says="is gone: a file of it is missing",
            loses=KILLS,
        ),
        Wrong(
            "the older one goes first",
            save("self.clean(kept)", *STEPS),
            says="is older when the new one counts, and not before",
            loses=TWO,
        ),
        Wrong(
            "one is kept",
            save(keep=("[*self.kept(), step][-2:]", "[step]")),
            says="fewer than two complete checkpoints",
            loses=TWO,
        ),
        Wrong("nothing is removed", save(*STEPS[:-1]), "remove what is older", CLEAN),
        Wrong(
            "what a killed save left stays",
            save(
                "before = self.kept()",
                *STEPS[:-1],
                "if dist.get_rank() == 0 and len(before) > 1:",
                "    for rank in range(dist.get_world_size()):",
                '        self.disk.remove(f"{before[0]}-{rank}")',
            ),
            says="what killed saves left",
            loses=CLEAN,
        ),
        Wrong(
            "save returns before the checkpoint counts",
            save(WRITE, MEET, POINT, CLEAN_UP),
            says="all ranks wait until it does",
            loses=RETURNS,
        ),
        Wrong(
            "kept in memory",
            save(
                "Checkpoints.last = step, shard",
                *STEPS,
                load=("return (kept", 'return getattr(Checkpoints, "last", None) or (kept'),
            ),
            says="must find what is on its disk",
            loses=LOADED,
        ),
        Wrong(
            "rank 0's shard for all",
            save(load=("self.disk.read(self.part(kept[-1]))", 'self.disk.read(f"{kept[-1]}-0")')),
            says="the shard that rank 1 loaded",
            loses=LOADED,
        ),
        Wrong(
            "a half-written file of an earlier save is read",
            save(
                newest=(
                    "return (kept[-1], self.disk.read(self.part(kept[-1]))) if kept else None",
                    'steps = [int(n.split("-")[0]) for n in self.disk.names() if "-" in n]\n'
                    "        return (max(steps), self.disk.read(self.part(max(steps)))) if steps "
                    "else None",
                )
            ),
            says="Then load() raised",
            loses=KILLS,
        ),
    ],
    "13.reshard": [
        Wrong(
            "N must divide into M",
            reshard(old="total // world", new="total // dist.get_world_size()"),
            says="raised",
            loses=PARAMETERS,
        ),
        Wrong(
            "padding is kept",
            WHOLE.format(cut="", more=" + [len(flat) - total]", flat="flat = flat[: new * M]"),
            says="contains padding of the old shards: only the elements of the names are data",
            loses=PARAMETERS,
        ),
        Wrong(
            "rank 0 reads everything and deals it out",
            """
def reshard(read, keys, saved, world, names):
    M, me = dist.get_world_size(), dist.get_rank()
    total = sum(saved.values())
    old, new = -(-total // world), -(-total // M)
    result = {}
    for key in keys:
        own = torch.empty(new, dtype=read(0, key, 0, 0).dtype)
        parts = None
        if me == 0:
            flat = torch.cat([read(rank, key, 0, old) for rank in range(world)])[:total]
            by_name = dict(zip(saved, flat.split([*saved.values()])))
            flat = torch.cat([by_name[name] for name in names])
            parts = list(torch.nn.functional.pad(flat, (0, new * M - total)).split(new))
        dist.scatter(own, parts, src=0)
        result[key] = own
    return result
""",
            says="Rank 0 read",
            loses=READS,
        ),
        Wrong(
            "every rank reads every file",
            WHOLE.format(
                cut="[:total]", more="", flat="flat = torch.cat([parts[name] for name in names])"
            ),
            says=": read only the ranges that lie in it, from the ranks that have them",
            loses=READS,
        ),
        Wrong(
            "the optimizer's states forgotten",
            reshard(keys='["parameter"]'),
            says="exp_avg is missing: each key that was saved has a shard",
            loses=STATES,
        ),
        Wrong(
            "the order of the names lost",
            reshard(names="saved"),
            says="is in the order of the save: put each name at its new place",
            loses=ORDER,
        ),
        Wrong(
            "the same rank's old shard",
            """
def reshard(read, keys, saved, world, names):
    old = -(-sum(saved.values()) // world)
    me = min(dist.get_rank(), world - 1)
    return {key: read(me, key, 0, old) for key in keys}
""",
            says="is the shard of the old rank with this number",
            loses=PARAMETERS,
        ),
        Wrong(
            "no padding at the end",
            reshard(pad="flat"),
            says="lacks the zeros",
            loses=PARAMETERS,
        ),
        Wrong(
            "everything in float32",
            reshard(read="read(rank, key, offset, offset + length).float()").replace(
                "[read(0, key, 0, 0)]", "[torch.zeros(0)]"
            ),
            says="has dtype float32",
            loses=STATES,
        ),
    ],
    "13.resume": [
        Wrong(
            "the epoch from the start",
            resume(at="run.at = 0"),
            says="begins the epoch from the start",
            loses=SAMPLES,
        ),
        Wrong(
            "the permutation drawn again",
            resume(
                order='n = len(state["order"]); '
                "run.order = torch.randperm(n, generator=run.generator).tolist()"
            ),
            says="continues in another order: drawn again",
            loses=SAMPLES,
        ),
        Wrong(
            "a new epoch",
            resume(order="", at=""),
            says="has lost its place",
            loses=SAMPLES,
        ),
        Wrong(
            "the generator of the order forgotten",
            resume(generator=""),
            says="will draw the next epoch in another order",
            loses=SAMPLES,
        ),
        Wrong(
            "one step twice",
            resume(step='run.step = state["step"]'),
            says="A step would count twice",
            loses=SAMPLES,
        ),
        Wrong(
            "two steps on",
            resume(step='run.step = state["step"] + 2'),
            says="the next step is",
            loses=SAMPLES,
        ),
        Wrong(
            "the same random numbers everywhere",
            resume(random='torch.set_rng_state(state["random"][0])'),
            says="continues with rank 0's random numbers",
            loses=RANDOM,
        ),
        Wrong(
            "random numbers forgotten",
            resume(random=""),
            says="dropout draws other numbers",
            loses=RANDOM,
        ),
        Wrong(
            "a seed in place of a state",
            resume(random="torch.manual_seed(dist.get_rank())"),
            says="dropout draws other numbers",
            loses=RANDOM,
        ),
        Wrong(
            "the schedule forgotten",
            resume(
                schedule="for g in run.optimizer.param_groups: g['lr'] = run.schedule.base_lrs[0]"
            ),
            says="the schedule has a state",
            loses=RATES,
        ),
        Wrong(
            "the schedule's count forgotten",
            resume(schedule=""),
            says="the schedule has a state",
            loses=RATES,
        ),
        Wrong(
            "the optimizer forgotten",
            resume(
                optimizer="",
                schedule=RIGHT_RESUME["schedule"]
                + "; run.optimizer.param_groups[0]['lr'] = state['schedule']['_last_lr'][0]",
            ),
            says="has lost its momentum",
            loses=LOSSES,
        ),
        Wrong(
            "parameters without buffers",
            resume(
                model="dict(run.model.named_parameters())",
                load='run.model.load_state_dict(state["model"], strict=False)',
            ),
            says="a buffer, is not what was saved",
            loses=LOSSES,
        ),
        Wrong(
            "saving draws a number",
            resume(before="torch.rand(1)"),
            says="changed the random generator: save() must only read",
            loses=QUIET,
        ),
        Wrong(
            "an object is saved",
            resume(model="run.model"),
            says="Weights only load failed",
            loses=SAMPLES,
        ),
    ],
}

PROMISES = {
    "13.atomic_save": {
        "then loads a complete checkpoint, the last good one or the new one": (*KILLS, ""),
        "a rank may be killed at any operation of a save": (*KILLS, ""),
        "When `save` returns on a rank, the new checkpoint counts": (*RETURNS, ""),
        "The save after a kill works as if there had been no kill": (*GOES_ON, ""),
        "Keep the two newest checkpoints": (*TWO, ""),
        "two complete ones are on the disk at any moment": (*TWO, ""),
        "no other tensors are left on the disk": (*CLEAN, ""),
        "afterwards each rank sees what all wrote before": None,
        "all ranks see one disk": None,
        "a disk that all ranks see": None,
        "done completely or not at all": None,
        "the names of all files": None,
        "which raises an error where a rank has died": None,
        "rename or remove the same file between two barriers would race": (*LOADED, ""),
        "Every rank has a shard": None,
        "every rank calls it": (*LOADED, ""),
        "None if there is none": (*LOADED, ""),
        "a tensor, of any shape and dtype": (*LOADED, "other"),
        "Everything that counts must be on it": (*LOADED, ""),
        "larger than those before": None,
    },
    "13.reshard": {
        "Lay the tensors end to end in the new order, pad them with zeros": (*PARAMETERS, ""),
        "bit for bit in the key's own dtype": (*STATES, ""),
        "the names may come in another order": (*ORDER, "order"),
        "the states of the optimizer, cut in the same way": (*STATES, ""),
        "No rank reads more elements of a key than its new shard has": (*READS, ""),
        "as they lie now": (*ORDER, "order"),
        "for each key": (*STATES, ""),
    },
    "13.resume": {
        "the samples that are left, each once": (*SAMPLES, ""),
        "Saving changes nothing in the run": (*QUIET, ""),
        "its next step is the one after the save": (*SAMPLES, ""),
        "All ranks call it": None,
        "the loop of a run, on each rank": None,
        "while run.step < steps": None,
        "each rank's own random numbers": (*RANDOM, ""),
        "the same learning rates and losses, bit for bit": (*LOSSES, ""),
        "how a new run continues from it": None,
        "must bring it back to the state of the saved run": (*SAMPLES, ""),
        "what rank 0 returns is what load() gets": (*RANDOM, ""),
        "The state of the run as data": (*SAMPLES, ""),
    },
}

# ---- mutants of the solution that are right ----

EQUIVALENT = {
    "13.atomic_save": {
        "`self.disk.barrier()` -> twice": "to meet once more changes nothing",
        "`self.disk.barrier()` -> twice (#2)": "the same",
        "`for name in self.disk.names(): if '-' in name and int(nam...` -> [:-1]": "names come in "
        "order, and the last one is always 'kept'",
    },
    "13.resume": {
        "`dist.all_gather_object(random, torch.get_rng_state())` -> twice": "the same list again",
    },
}

# ---- right answers that look different from the solution ----

RIGHT = {
    "13.atomic_save": [
        (
            "a rank's two last steps in its own file names, and a marker for each step",
            """
class Checkpoints:
    def __init__(self, disk):
        self.disk = disk

    def complete(self):
        marked = [n for n in self.disk.names() if n.startswith("complete-")]
        return sorted(int(n.split("-")[1]) for n in marked)

    def save(self, step, shard):
        rank = dist.get_rank()
        self.disk.write(f"part-{step}-{rank}", {"step": step, "data": [shard]})
        self.disk.barrier()
        if rank == 0:
            self.disk.write("new", dist.get_world_size())
            self.disk.rename("new", f"complete-{step}")
        self.disk.barrier()
        keep = self.complete()[-2:]
        if rank == 0:
            for name in self.disk.names():
                if name.startswith("complete-") and int(name.split("-")[1]) not in keep:
                    self.disk.remove(name)
            for name in self.disk.names():
                if name.startswith("part-") and int(name.split("-")[1]) not in keep:
                    self.disk.remove(name)

    def load(self):
        complete = self.complete()
        if not complete:
            return None
        part = self.disk.read(f"part-{complete[-1]}-{dist.get_rank()}")
        return part["step"], part["data"][0]
""",
        ),
        (
            "each rank removes its own old parts, and writes them under another name first",
            """
class Checkpoints:
    def __init__(self, disk):
        self.disk = disk

    def save(self, step, shard):
        disk, rank = self.disk, dist.get_rank()
        steps = [*(disk.read("latest") if "latest" in disk.names() else []), step][-2:]
        disk.write(f"tmp-{rank}", shard)
        disk.rename(f"tmp-{rank}", f"{rank}.{step}")
        disk.barrier()
        if rank == 0:
            disk.write("latest.tmp", steps)
            disk.rename("latest.tmp", "latest")
        disk.barrier()
        for name in disk.names():
            if name.startswith(f"{rank}.") and int(name.split(".")[1]) not in steps:
                disk.remove(name)

    def load(self):
        if "latest" not in self.disk.names():
            return None
        step = self.disk.read("latest")[-1]
        return step, self.disk.read(f"{dist.get_rank()}.{step}")
""",
        ),
    ],
    "13.reshard": [
        (
            "element by element, as a list of places",
            """
def reshard(read, keys, saved, world, names):
    M, me = dist.get_world_size(), dist.get_rank()
    begins, total = {}, 0
    for name, n in saved.items():
        begins[name] = total
        total += n
    old, new = -(-total // world), -(-total // M)
    places = [begins[name] + i for name in names for i in range(saved[name])]
    mine = places[me * new : (me + 1) * new]
    out = {}
    for key in keys:
        shard = torch.zeros(new, dtype=read(0, key, 0, 0).dtype)
        for i, place in enumerate(mine):
            shard[i] = read(place // old, key, place % old, place % old + 1)[0]
        out[key] = shard
    return out
""",
        ),
    ],
    "13.resume": [
        (
            "functions of a class, random states in one tensor, the schedule's step alone",
            """
class Resume:
    def save(run):
        state = torch.get_rng_state()
        every = [torch.empty_like(state) for _ in range(dist.get_world_size())]
        dist.all_gather(every, state)
        return {
            "random": torch.stack(every),
            "place": [run.step + 1, run.at, list(run.order)],
            "generator": run.generator.get_state(),
            "states": [o.state_dict() for o in (run.model, run.optimizer, run.schedule)],
        }

    def load(run, state):
        for o, saved in zip((run.model, run.optimizer, run.schedule), state["states"]):
            o.load_state_dict(saved)
        run.step, run.at, run.order = state["place"]
        run.generator.set_state(state["generator"])
        torch.set_rng_state(state["random"][dist.get_rank()].clone())
""",
        ),
    ],
}


# -- what an answer may not assume -----------------------------------------------------------------

WRONG["13.atomic_save"] += [
    Wrong(
        "a disk that is told not to kill",
        altered("13.atomic_save", ("        self.disk = disk", "        self.disk = disk\n"
                                   "        disk._left = None")),
        says="'Disk' object has no attribute '_left'",
    ),
    Wrong(
        "step numbers of eight digits, sorted as words",
        altered(
            "13.atomic_save",
            ('step = self.disk.read("kept")[-1]',
             'step = int(sorted(f"{s:08}" for s in self.disk.read("kept"))[-1])'),
        ),
        says="was complete",
    ),
]  # fmt: skip
WRONG["13.reshard"] += [
    Wrong(
        "a plan remembered by names",
        wrapped(
            "13.reshard",
            "reshard",
            "KEPT = {}\n\n\ndef reshard(read, keys, saved, world, names):\n"
            "    saved = KEPT.setdefault((tuple(names), world), saved)\n"
            "    return solution(read, keys, saved, world, names)\n",
        ),
        says="were asked for at",
    )
]
WRONG["13.resume"] += [
    Wrong(
        "of the schedule the last epoch alone",
        altered(
            "13.resume",
            ('run.schedule.load_state_dict(state["schedule"])',
             'run.schedule.last_epoch = state["schedule"]["last_epoch"]'),
        ),
        says="the schedule has a state",
        loses=("the learning rates of the schedule",),
    ),
    Wrong(
        "of the optimizer the momenta alone",
        altered(
            "13.resume",
            ('run.optimizer.load_state_dict(state["optimizer"])',
             'groups = run.optimizer.state_dict()["param_groups"]\n'
             '        for new, old in zip(groups, state["optimizer"]["param_groups"]):\n'
             '            new["lr"] = old["lr"]\n'
             '        run.optimizer.load_state_dict(state["optimizer"] | {"param_groups": '
             'groups})'),
        ),
        says="are not those of the uninterrupted run",
        loses=("the same losses, bit for bit",),
    ),
]  # fmt: skip
ASSUMED = {"13.resume": {"shared": "its methods are static, and it has no instances"}}

# ---- 13.newest_complete ----

NEWEST = ("the newest complete save, on every rank",)
FEW = ("no save, step 0, few saves, large steps",)
CALLS = ("at most one collective",)
MANIFESTS = ("each manifest read once, and evenly shared",)

SEARCH = """
import re


def newest_complete(folders, read):
    rank, world = dist.get_rank(), dist.get_world_size()

    def complete(folder):
        try:
            manifest = read(folder)
        except {errors}:
            return False
        return {complete}

    names = [name for name in folders if re.fullmatch({pattern}, name)]
    names.sort(key={key})
    newest = max([{step} for name in names[{share}] if complete(name)], default={none})
    {before}
    result = torch.tensor({value}, dtype={dtype})
    {call}
    newest = result.item()
    return {result}
"""
SEARCHED = {
    "errors": "(FileNotFoundError, ValueError)",
    "complete": "all(folders[folder].get(f) == n for f, n in manifest['files'].items())",
    "pattern": "r'step-\\d+'",
    "key": "lambda name: int(name.split('-')[1])",
    "step": "int(name.split('-')[1])",
    "share": "rank::world",
    "none": "-1",
    "before": "",
    "value": "newest",
    "dtype": "torch.int64",
    "call": "dist.all_reduce(result, op=dist.ReduceOp.MAX)",
    "result": "None if newest < 0 else newest",
}


def search(**wrong):
    return SEARCH.format(**(SEARCHED | wrong))


ALONE = {"share": ":", "call": ""}

WRONG["13.newest_complete"] = [
    Wrong(
        "names compared as words",
        """
def newest_complete(folders, read):
    rank, world = dist.get_rank(), dist.get_world_size()
    names = sorted(n for n in folders if n[:5] == "step-" and n[5:].isdigit())
    good = torch.zeros(len(names), dtype=torch.int64)
    for i in range(rank, len(names), world):
        try:
            parts = read(names[i])["files"]
        except (FileNotFoundError, ValueError):
            continue
        good[i] = all(folders[names[i]].get(f) == n for f, n in parts.items())
    dist.all_reduce(good)
    whole = [name for name, flag in zip(names, good) if flag]
    return int(whole[-1][5:]) if whole else None
""",
        says="Yours would be right if folders were compared as words",
    ),
    Wrong(
        "folders that are still written",
        search(
            pattern="r'step-\\d+(\\.tmp)?'",
            step="int(name.split('-')[1].split('.')[0])",
            key="lambda name: int(name.split('-')[1].split('.')[0])",
        ),
        says="Yours would be right if a .tmp folder counted",
    ),
    Wrong(
        "the newest folder",
        search(**ALONE, complete="True", errors="Exception").replace(
            "manifest = read(folder)", "pass"
        ),
        says="Yours would be right if every save were complete",
    ),
    Wrong(
        "a manifest in the listing",
        search(**ALONE, complete="'manifest.json' in folders[folder]").replace(
            "manifest = read(folder)", "pass"
        ),
        says="Yours would be right if it were enough that a manifest is there",
    ),
    Wrong(
        "a manifest that can be read",
        search(complete="True"),
        says="Yours would be right if it were enough that the manifest can be read",
    ),
    Wrong(
        "a part for each rank of this world",
        search(complete="all(f'rank-{r}.pt' in folders[folder] for r in range(world))"),
        says="Yours would be right if a save had one part for each rank that there is now",
    ),
    Wrong(
        "a part for each rank of the world that saved",
        search(complete="all(f'rank-{r}.pt' in folders[folder] for r in range(manifest['world']))"),
        says="Yours would be right if a save had only the parts of its ranks",
    ),
    Wrong(
        "sizes not looked at",
        search(complete="set(manifest['files']) <= set(folders[folder])"),
        says="Yours would be right if the size of a part did not matter",
    ),
    Wrong(
        "at least the size",
        search(
            complete="all(folders[folder].get(f, -1) >= n for f, n in manifest['files'].items())"
        ),
        says="bytes instead of",
    ),
    Wrong(
        "the same files as in the manifest",
        search(complete="set(folders[folder]) - {'manifest.json'} == set(manifest['files'])"),
        says="Yours would be right if a file that no manifest names made a save incomplete",
    ),
    Wrong(
        "the oldest",
        search(share=":", call="").replace("newest = max(", "newest = min("),
        says="Yours would be right if the oldest complete save were wanted",
    ),
    Wrong(
        "each rank its own newest",
        search(call=""),
        says="They must agree, so each rank needs the results of the others",
    ),
    Wrong(
        "the sum over ranks",
        search(call="dist.all_reduce(result)"),
        says="there is no folder step-",
    ),
    Wrong(
        "the smallest over ranks",
        search(call="dist.all_reduce(result, op=dist.ReduceOp.MIN)"),
        says="is complete",
    ),
    Wrong(
        "a rank without saves does not take part",
        search(before="if not names[rank::world]: return None"),
        says="waits in all_reduce",
        loses=FEW,
    ),
    Wrong(
        "a half-written manifest raises",
        search(errors="FileNotFoundError"),
        says="raised ValueError: step-",
    ),
    Wrong(
        "a missing manifest raises",
        search(errors="ValueError"),
        says="raised FileNotFoundError: there is no step-",
    ),
    Wrong(
        "up to the first that is not complete",
        """
def newest_complete(folders, read):
    newest = None
    names = [n for n in folders if n.startswith("step-") and not n.endswith(".tmp")]
    for name in sorted(names, key=lambda n: int(n[5:])):
        try:
            parts = read(name)["files"]
        except (FileNotFoundError, ValueError):
            break
        if any(folders[name].get(f) != n for f, n in parts.items()):
            break
        newest = int(name[5:])
    return newest
""",
        says="Yours would be right if the search ended at the first save that is not complete",
    ),
    Wrong(
        "step 0 is none",
        search(none="0", result="newest or None"),
        says="step-0 is complete",
        loses=FEW,
    ),
    Wrong(
        "-1 for none",
        search(result="newest"),
        says="You returned -1, expected is None: no save is complete",
        loses=FEW,
    ),
    Wrong(
        "steps in float32",
        search(dtype="torch.float32", result="None if newest < 0 else int(newest)"),
        says="a float32 cannot hold",
        loses=FEW,
    ),
    Wrong(
        "a tensor",
        search().replace("newest = result.item()", "newest = result"),
        says="return an int, or None",
    ),
    Wrong(
        "every rank reads every manifest",
        search(**ALONE),
        says="one read by one of them is enough",
        loses=MANIFESTS,
    ),
    Wrong(
        "rank 0 reads, the others hear from it",
        search(share=": len(names) if rank == 0 else 0", call="dist.broadcast(result, src=0)"),
        says="Rank 0 read 6 manifests of 6 saves",
        loses=MANIFESTS,
    ),
    Wrong(
        "shared by the step",
        search(share=":").replace(
            "if complete(name)]", "if int(name[5:]) % world == rank and complete(name)]"
        ),
        says="manifests of 6 saves. Shared evenly over",
        loses=MANIFESTS,
    ),
    Wrong(
        "all that the ranks found, as objects",
        search(
            call="found = [None] * world; dist.all_gather_object(found, newest); "
            "result.fill_(max(found))"
        ),
        says="all_gather_object makes two",
        loses=CALLS,
    ),
    Wrong(
        "a barrier first",
        search(before="dist.barrier()"),
        says="Rank 0 called barrier, all_reduce for one listing",
        loses=CALLS,
    ),
    Wrong(
        "one collective per save",
        """
def newest_complete(folders, read):
    rank, world = dist.get_rank(), dist.get_world_size()
    steps = sorted(int(n[5:]) for n in folders if n[:5] == "step-" and n[5:].isdigit())
    for i, step in enumerate(reversed(steps)):
        name, good = f"step-{step}", torch.zeros(1, dtype=torch.int64)
        if i % world == rank:
            try:
                parts = read(name)["files"]
                good += all(folders[name].get(f) == n for f, n in parts.items())
            except (FileNotFoundError, ValueError):
                pass
        dist.broadcast(good, src=i % world)
        if good.item():
            return step
    return None
""",
        says="One collective of one number is enough",
        loses=CALLS,
    ),
]
RIGHT["13.newest_complete"] = [
    (
        "a flag for each save, the newest first, and a stop at the first complete one",
        """
def newest_complete(folders, read):
    world, rank = dist.get_world_size(), dist.get_rank()
    saves = {}
    for name in folders:
        head, _, tail = name.partition("-")
        if head == "step" and tail.isdigit():
            saves[int(tail)] = name
    steps = sorted(saves, reverse=True)
    flags = torch.zeros(len(steps) + 1, dtype=torch.uint8)
    for i in range(rank, len(steps), world):
        files = folders[saves[steps[i]]]
        if "manifest.json" not in files:
            continue
        try:
            wanted = read(saves[steps[i]])["files"]
        except ValueError:
            continue
        if wanted.items() <= files.items():
            flags[i] = 1
            break
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return next((step for step, flag in zip(steps, flags.tolist()) if flag), None)
""",
    ),
    (
        "blocks of the listing, gathered as numbers",
        """
def newest_complete(folders, read):
    names = [n for n in folders if n.startswith("step-") and n[5:].isdigit()]
    size = -(-len(names) // dist.get_world_size())
    best = [-1]
    for name in names[dist.get_rank() * size : (dist.get_rank() + 1) * size]:
        try:
            parts = read(name)["files"]
        except Exception:
            continue
        if not [f for f in parts if f not in folders[name] or folders[name][f] != parts[f]]:
            best.append(int(name[5:]))
    own = torch.tensor([max(best)])
    every = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    newest = int(torch.cat(every).max())
    return newest if newest != -1 else None
""",
    ),
]
PROMISES["13.newest_complete"] = {
    "has saves, but no file that names the newest one": None,
    "at last the folder was renamed to `step-12000`": (*NEWEST, ""),
    "A save is complete if its manifest can be read": (*NEWEST, ""),
    "Return the step of the newest complete save, on every rank the same": (*NEWEST, ""),
    "only one rank reads each": (*MANIFESTS, ""),
    "the ranks share them evenly": (*MANIFESTS, ""),
    "At most one collective is allowed": (*CALLS, ""),
    "it stays as it is": (*NEWEST, ""),
    "None if no save is complete": (*FEW, "few"),
    "in any order": (*NEWEST, ""),
    "from 0 to 10**12": (*FEW, "few"),
    "other folders are not saves": (*NEWEST, ""),
    "files that no manifest names": (*NEWEST, ""),
    "if it is half written": (*NEWEST, ""),
    "The number of ranks may differ between saves": (*NEWEST, ""),
}
EQUIVALENT["13.newest_complete"] = {
    "`sorted((int(name[5:]) for name in folders if re.fullmatch...` -> "
    "`list((int(name[5:]) for name in folders if re.fullmatch('...`": "the listing has the same "
    "order on all ranks, so each save still has one reader",
    "`1` -> `2`": "-2 is no step either",
}
