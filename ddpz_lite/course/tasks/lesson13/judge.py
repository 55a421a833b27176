"""Tasks of lesson 13: checkpoints and failures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ddpz_lite.course.check.compare import close, differs
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vocabulary import (
    all_in_spans,
    explain,
    silent,
    unchanged,
    world_name,
)

# -- 13.atomic_save --------------------------------------------------------------------------------

OLDEST, GOOD, KILLED, AGAIN, LATER = range(5)  # the saves of the job


def _save_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, other: bool = False, first: int = 0) -> Case:
        first = first or int(torch.randint(1, 90, (), generator=rng))
        steps = [first, first + 3, first + 17, first + 400, first + 1000]
        dtype = torch.float16 if other else torch.float32

        def shard(rank: int) -> torch.Tensor:
            shape = ((), (2, 3))[rank % 2] if other else (5,)
            return torch.randn(shape, generator=rng).to(dtype)

        inputs = [{"shards": [shard(rank) for _ in steps], "steps": steps} for rank in range(world)]
        says = ", shards of another shape on each rank, in float16" if other else ""
        return Case(world_name(world) + says, inputs, "other" if other else "", timeout=30.0)

    return [case(3), case(1), case(2, first=9_990), case(4), case(2, True, 99_999_990)]


def _loaded(seen: Observed, rank: int, got: Any, wanted: int | None) -> str | None:
    """None if this rank loaded save number `wanted` (None: that there is none)."""
    inputs = seen.case.inputs[rank]
    steps, shards = inputs["steps"], inputs["shards"]
    if wanted is None:
        nothing = f"rank {rank}'s load() returned something, but nothing was saved"
        return None if got is None else nothing
    if got is None:
        return f"rank {rank}'s load() found nothing, although step {steps[wanted]} was complete"
    if isinstance(got, str):
        return f"rank {rank}'s load() raised {got}"
    if not (isinstance(got, list) and len(got) == 2 and got[0] in steps):
        return f"rank {rank}'s load() did not return a pair of step and shard"
    if got[0] != steps[wanted]:
        return f"rank {rank} loaded step {got[0]}, although step {steps[wanted]} was complete"
    wrong = differs(got[1], shards[wanted], f"the shard that rank {rank} loaded", bitwise=True)
    return wrong and wrong.rstrip(".")


def _save_values(seen: Observed) -> str | None:
    for rank, data in enumerate(seen.data):
        for got, wanted in zip(data["first"], (None, OLDEST, GOOD), strict=True):
            if wrong := _loaded(seen, rank, got, wanted):
                return f"After saves without a kill: {wrong}."
        if wrong := _loaded(seen, rank, data["again"], GOOD):
            return f"A new Checkpoints(disk) must find what is on its disk, and only that: {wrong}."
        for found in data["rounds"]:
            if not found["killed"] and (wrong := _loaded(seen, rank, found["crash"], KILLED)):
                return f"A third save, without a kill: {wrong}."
    return unchanged(seen)


def _rounds(seen: Observed) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each kill in words, and what the ranks found."""
    for found in zip(*(data["rounds"] for data in seen.data), strict=True):
        if found[0]["killed"]:
            k = found[0]["k"] + 1
            yield f"Rank {found[0]['victim']} was killed in operation {k} of its save", list(found)


TORN = "half a file"


def _unseen(seen: Observed) -> str | None:
    """Where a rank was to be killed in each of its operations, and was not."""
    for rank, data in enumerate(seen.data):
        for victim in {found["victim"] for found in data["rounds"]}:
            rounds = [found for found in data["rounds"] if found["victim"] == victim]
            killed, last = [found for found in rounds if found["killed"]], rounds[-1]
            if last["killed"] or not 0 < len(killed) == last["operations"]:
                return (
                    f"Rank {rank} saw {len(killed)} kills of rank {victim}, whose save has "
                    f"{last['operations']} operations on this disk: nothing shows that a save "
                    "survives one."
                )
    return None


def _save_kills(seen: Observed) -> str | None:
    if wrong := _unseen(seen):
        return wrong
    steps = seen.case.inputs[0]["steps"]
    for words, found in _rounds(seen):
        crashes = [one["crash"] for one in found]
        for got in crashes:
            if isinstance(got, str):
                return f"{words}. Then load() raised {got}. {_why(seen, found, got)}"
            if got is None:
                return (
                    f"{words}. Then load() found nothing, although step {steps[GOOD]} had been "
                    "complete: it must count until the new one does."
                )
        whose = [got[0] if isinstance(got, list) and got else None for got in crashes]
        if len({*whose}) > 1:
            return f"{words}. Then the ranks loaded different steps: {whose}."
        newest = KILLED if whose[0] == steps[KILLED] else GOOD
        for rank, got in enumerate(crashes):
            if wrong := _loaded(seen, rank, got, newest):
                return f"{words}. Then {wrong}."
        if wrong := _second(seen, found, newest):
            return f"{words}. In the next save rank 0 was killed, too. Then {wrong}."
    return None


def _second(seen: Observed, found: list[dict[str, Any]], before: int) -> str | None:
    """What was loaded after the next save, in which rank 0 may have been killed."""
    seconds = [one["second"] for one in found]
    if error := next((got for got in seconds if isinstance(got, str)), None):
        return f"load() raised {error}"
    steps = seen.case.inputs[0]["steps"]
    first = seconds[0][0] if isinstance(seconds[0], list) and seconds[0] else None
    newest = AGAIN if first == steps[AGAIN] or not found[0]["again"] else before
    message = (_loaded(seen, rank, got, newest) for rank, got in enumerate(seconds))
    return next(filter(None, message), None)


def _why(seen: Observed, found: list[dict[str, Any]], got: str) -> str:
    """What made a load meet half a file, or none."""
    steps = seen.case.inputs[0]["steps"]
    if GOOD not in _complete(seen, found[0]["there"]):
        how = "was written over in place" if TORN in got else "is gone: a file of it is missing"
        return (
            f"Step {steps[GOOD]}, which was good, {how}. Do not touch the checkpoint that counts "
            "until the new one counts."
        )
    if any(isinstance(one["crash"], list) and one["crash"][:1] == [steps[KILLED]] for one in found):
        return (
            "Other ranks loaded the new one: it counted before all ranks had written their parts. "
            "Write the pointer after a barrier."
        )
    return (
        f"Step {steps[GOOD]} was complete and still there. An incomplete checkpoint must not count."
    )


def _save_returns(seen: Observed) -> str | None:
    steps = seen.case.inputs[0]["steps"]
    for words, found in _rounds(seen):
        for rank, one in enumerate(found):
            newest = one["crash"][:1] if isinstance(one["crash"], list) else None
            if one["back"] and newest != steps[KILLED : KILLED + 1]:
                return (
                    f"{words}. Rank {rank}'s save() had returned by then, but the checkpoint does "
                    "not count: let all ranks wait until it does."
                )
    return None


def _save_goes_on(seen: Observed) -> str | None:
    for words, found in _rounds(seen):
        for rank, one in enumerate(found):
            if wrong := _loaded(seen, rank, one["later"], LATER):
                return f"{words}. The next save went well, and then {wrong}."
    return None


def _complete(seen: Observed, there: Sequence[Any]) -> list[int]:
    """Which of the four saves are on the disk, every rank's part of them."""

    def is_there(shard: torch.Tensor) -> bool:
        return any(close(tensor, shard, bitwise=True) for tensor in there)

    saves = range(len(seen.case.inputs[0]["steps"]))
    return [s for s in saves if all(is_there(i["shards"][s]) for i in seen.case.inputs)]


def _save_two(seen: Observed) -> str | None:
    for words, found in _rounds(seen):
        if len(_complete(seen, found[0]["there"])) < 2:
            return (
                f"{words}. Then fewer than two complete checkpoints are on the disk: remove what "
                "is older when the new one counts, and not before."
            )
    return None


def _save_cleans(seen: Observed) -> str | None:
    every = zip(*(data["rounds"] for data in seen.data), strict=True)
    for found in every:
        end = found[0]["end"]
        complete = _complete(seen, end)
        if len(complete) < 2:
            return "After a save that went well, fewer than two complete checkpoints are there."
        if len(end) > 2 * seen.case.world:
            return (
                f"After a save that went well there are {len(end)} tensors on the disk, but two "
                f"checkpoints have {2 * seen.case.world}: remove what is older, and what killed "
                "saves left."
            )
    return None


ATOMIC_SAVE = Task(
    id="13.atomic_save",
    title="A save that may be killed",
    answer="Checkpoints",
    job="lesson13.atomic_save",
    minutes=25,
    cases=_save_cases,
    criteria=(
        Criterion("what was saved is loaded", 2, _save_values),
        Criterion("killed at any operation: complete, and the same on all ranks", 3, _save_kills),
        Criterion("save() returns when the checkpoint counts", 1, _save_returns),
        Criterion("later saves work after a kill", 1, _save_goes_on),
        Criterion("two complete checkpoints at any moment", 1, _save_two),
        Criterion("nothing else is left", 1, _save_cleans),
    ),
    hints=(
        "At which moment does the new checkpoint begin to count, and what must be on the disk by "
        "then, and from which ranks?",
        "Every rank writes its part under a name that has the step in it. One small file says "
        "which steps count. It is never overwritten: write a new file and rename it.",
        "save: write '<step>-<rank>'; barrier; rank 0 writes 'kept.new' with the last two steps "
        "and renames it to 'kept'; barrier; rank 0 removes all files of other steps.",
    ),
    debrief="torch.distributed.checkpoint renames its .metadata last; ddpz_lite renames CURRENT, "
    "after a sync of every file and its folder.",
)

# -- 13.reshard ------------------------------------------------------------------------------------

SIZES = {"head": 7, "norm": 1, "body": 23, "bias": 4}
OTHER_SIZES = {"head": 5, "norm": 3, "body": 9, "bias": 11}
TINY = {"scale": 2}
KEYS = {"parameter": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.float64}
OTHER_KEYS = {"parameter": torch.float32, "momentum": torch.bfloat16, "drift": torch.float64}
NEXT = ["body", "bias", "head", "norm"]


def _flats(checkpoint: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """{key: {name: elements}} of what was saved."""
    sizes = dict(checkpoint["saved"])
    flats = {}
    for key in checkpoint["files"][0]:
        flat = torch.cat([file[key] for file in checkpoint["files"]])[: sum(sizes.values())]
        flats[key] = dict(zip(sizes, flat.split(list(sizes.values())), strict=True))
    return flats


def _reshard_cases(rng: torch.Generator) -> list[Case]:
    def checkpoint(
        sizes: dict[str, int], world: int, names: list[str], keys: dict[str, Any] = KEYS
    ) -> dict[str, Any]:
        shard = -(-sum(sizes.values()) // world)
        files: list[dict[str, torch.Tensor]] = [{} for _ in range(world)]
        for key, dtype in keys.items():
            flat = torch.full((shard * world,), 77.0, dtype=dtype)
            flat[: sum(sizes.values())] = torch.randn(sum(sizes.values()), generator=rng).to(dtype)
            for file, part in zip(files, flat.split(shard), strict=True):
                file[key] = part.clone()
        return {"files": files, "saved": [*map(list, sizes.items())], "names": names}

    def case(new: int, olds: Sequence[int], kind: str = "") -> Case:
        some = [checkpoint(SIZES, old, NEXT if kind else [*SIZES]) for old in olds]
        if not kind:
            some.append(checkpoint(TINY, olds[0], [*TINY]))
            some.append(checkpoint(OTHER_SIZES, olds[0], [*SIZES]))
            some.append(checkpoint(SIZES, olds[0], [*SIZES], OTHER_KEYS))
        else:
            some.append(checkpoint(SIZES, olds[0], NEXT[::-1]))
        says = f"{' and '.join(map(str, olds))} to {world_name(new)}"
        says += ", in another order" if kind else ""
        return Case(says, [{"checkpoints": some}] * new, kind)

    return [
        case(3, (4, 2)),
        case(2, (3, 4)),
        case(4, (2, 1)),
        case(1, (3,)),
        case(3, (2, 3), "order"),
        case(4, (3, 4), "order"),
    ]


def _cut(flat: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    size = -(-len(flat) // world)
    part = flat[rank * size : (rank + 1) * size]
    return torch.nn.functional.pad(part, (0, size - len(part)))


def _reshard_values(which: Callable[[str], bool]) -> Callable[[Observed], str | None]:
    def judge(seen: Observed) -> str | None:
        for rank, data in enumerate(seen.data):
            for number, checkpoint in enumerate(seen.case.inputs[0]["checkpoints"]):
                got = data["results"][number]
                for key in checkpoint["files"][0]:
                    if which(key) and (wrong := _reshard_value(seen, rank, checkpoint, got, key)):
                        return wrong
        return unchanged(seen)

    return judge


def _reshard_value(
    seen: Observed, rank: int, checkpoint: dict[str, Any], got: Any, key: str
) -> str | None:
    world, files = seen.case.world, checkpoint["files"]
    parts = _flats(checkpoint)[key]
    whole = torch.cat([parts[name] for name in checkpoint["names"]])
    before = torch.cat([*parts.values()])
    what = f"From {len(files)} to {world_name(world)}, rank {rank}'s {key}"
    if not isinstance(got, dict) or key not in got:
        return (
            f"{what} is missing: each key that was saved has a shard, the optimizer's states too."
        )
    padded, size = torch.cat([file[key] for file in files]), -(-len(whole) // world)
    mistakes: dict[str, Any] = {
        "is in the order of the save: put each name at its new place.": _cut(before, world, rank),
        "contains padding of the old shards: only the elements of the names are data.": _cut(
            padded, world, rank
        ),
        "is the shard of the old rank with this number.": files[min(rank, len(files) - 1)][key],
        "lacks the zeros that make all shards equally long.": whole[
            rank * size : rank * size + size
        ],
    }
    return explain(got[key], _cut(whole, world, rank), what, mistakes, bitwise=True)


def _reshard_reads(seen: Observed) -> str | None:
    for rank, data in enumerate(seen.data):
        for number, checkpoint in enumerate(seen.case.inputs[0]["checkpoints"]):
            numel = sum(n for _, n in checkpoint["saved"])
            most = -(-numel // seen.case.world)
            for key in checkpoint["files"][0]:
                read = sum(n for k, n in data["reads"][number] if k == key)
                if read > most:
                    return (
                        f"Rank {rank} read {read} of {numel} elements of {key}, but its shard has "
                        f"{most}: read only the ranges that lie in it, from the ranks that have "
                        "them."
                    )
    return silent(seen, "A rank can read everything that it needs.")


RESHARD = Task(
    id="13.reshard",
    title="From N ranks to M",
    answer="reshard",
    job="lesson13.reshard",
    minutes=25,
    cases=_reshard_cases,
    criteria=(
        Criterion(
            "parameters bit for bit", 2, _reshard_values(lambda k: k == "parameter"), on=("",)
        ),
        Criterion(
            "the optimizer's states too", 2, _reshard_values(lambda k: k != "parameter"), ("",)
        ),
        Criterion("tensors in another order", 2, _reshard_values(lambda _: True), on=("order",)),
        Criterion("a rank reads no more than its shard", 2, _reshard_reads),
    ),
    hints=(
        "Where is element i of the full range in the old shards, and where is it in the new ones? "
        "Which of the two needs the number of ranks that saved?",
        "Go through the names in their new order and add up where each begins. The part of a name "
        "in your new shard is a range. In the old flat range it is a range too, and may cross "
        "shards.",
        "For a range start:stop of the old flat range: rank, offset = divmod(start, old shard); "
        "read up to the end of that shard; continue from there. Pad the end with zeros.",
    ),
    debrief="torch.distributed.checkpoint does this for tensors of any dimension: each rank's "
    "planner asks for the intersections of what it needs with what was written.",
)

# -- 13.resume -------------------------------------------------------------------------------------

STEPS, SAMPLES = 7, {1: 5, 2: 9, 3: 14, 4: 19}  # over two epochs, none of which divides evenly


def _resume_cases(rng: torch.Generator) -> list[Case]:
    def weights() -> dict[str, torch.Tensor]:
        shapes = {"0.weight": (5, 6), "0.bias": (5,), "1.mean": (5,)}
        shapes |= {"3.weight": (1, 5), "3.bias": (1,)}
        return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}

    def case(world: int) -> Case:
        start, other = weights(), weights()
        data = torch.randn(SAMPLES[world], 7, generator=rng)
        seed = int(torch.randint(10_000, (), generator=rng))
        inputs = [
            {
                "start": start,
                "other": other,
                "data": data,
                "seeds": [seed + rank, seed + 50, seed + 100 + rank, seed + 150],
                "steps": STEPS,
                "lr": 0.005,
            }
            for rank in range(world)
        ]
        return Case(world_name(world), inputs, timeout=30.0)

    return [case(3), case(2), case(4), case(1)]


def _resumed(seen: Observed) -> Iterator[tuple[int, int, dict[str, Any], dict[str, Any]]]:
    """(rank, step of the save, what was there when it was saved, what went on from it)."""
    for rank, data in enumerate(seen.data):
        for step, (after, resumed) in enumerate(zip(data["after"], data["resumed"], strict=True)):
            yield rank, step, after, resumed


def _resume_samples(seen: Observed) -> str | None:
    for rank, step, after, resumed in _resumed(seen):
        whole = seen.data[rank]["whole"]["taken"][step + 1 :]
        look, saved = resumed["look"], f"Resumed from the save in step {step}, rank {rank}"
        if look["step"] == step:
            return (
                f"{saved} has run.step {step}, and that step is done: the next one is "
                f"{step + 1}. A step would count twice."
            )
        if look["step"] != step + 1:
            return f"{saved} has run.step {look['step']}; the next step is {step + 1}."
        if look["order"] == after["order"] and look["at"] == 0 != after["at"]:
            return (
                f"{saved} begins the epoch from the start and would use samples twice. run.at says "
                "how many were taken."
            )
        if look["order"] != after["order"] and look["at"] == after["at"]:
            return (
                f"{saved} continues in another order: drawn again, it repeats some samples and "
                "skips others. Save the order itself."
            )
        if (look["order"], look["at"]) != (after["order"], after["at"]):
            return f"{saved} has lost its place: run.order and run.at say what was taken."
        if not close(look["chance"][1], after["chance"][1], bitwise=True):
            return f"{saved} will draw the next epoch in another order: run.generator has a state."
        if resumed["taken"] != whole:
            return f"{saved} takes {resumed['taken']}, and {whole} were left."
    return None


def _resume_random(seen: Observed) -> str | None:
    for rank, step, after, resumed in _resumed(seen):
        drawn = resumed["look"]["chance"][0]
        if close(drawn, after["chance"][0], bitwise=True):
            continue
        first = seen.data[0]["after"][step]["chance"][0]
        if rank and close(drawn, first, bitwise=True):
            return (
                f"Rank {rank} continues with rank 0's random numbers: all ranks drop the same "
                "units from now on. Each rank's generator has its own state. Gather them."
            )
        return (
            f"Rank {rank}'s random generator is not where it was when step {step} was saved: "
            "dropout draws other numbers."
        )
    return None


def _resume_rates(seen: Observed) -> str | None:
    for rank, step, _, resumed in _resumed(seen):
        whole = seen.data[rank]["whole"]["rates"][step + 1 :]
        if resumed["rates"] != whole:
            return (
                f"After a resume from step {step} the learning rates are {resumed['rates']}, but "
                f"they were {whole}: the schedule has a state, and the optimizer's groups "
                "hold its result."
            )
    return None


def _resume_losses(seen: Observed) -> str | None:
    for rank, step, after, resumed in _resumed(seen):
        for name, value in after["model"].items():
            if not close(resumed["look"]["model"][name], value, bitwise=True):
                kind = "a buffer" if name == "1.mean" else "a parameter"
                return f"Rank {rank}'s {name}, {kind}, is not what was saved in step {step}."
        for local, value in zip(resumed["look"]["momenta"], after["momenta"], strict=True):
            if value is not None and not close(local, value, bitwise=True):
                return (
                    f"Rank {rank}'s optimizer has lost its momentum after a resume from step "
                    f"{step}: its state belongs to the checkpoint."
                )
        whole = seen.data[rank]["whole"]["losses"][step + 1 :]
        pairs = zip(resumed["losses"], whole, strict=False)
        if len(resumed["losses"]) != len(whole) or not all(
            close(a, b, bitwise=True) for a, b in pairs
        ):
            return f"Rank {rank}'s losses after step {step} are not those of the uninterrupted run."
    return None


def _resume_quiet(seen: Observed) -> str | None:
    for rank, data in enumerate(seen.data):
        if data["changed"]:
            return f"Rank {rank}'s save changed {data['changed'][0]}: save() must only read."
        inputs = seen.case.inputs[rank]
        generator, length = torch.Generator().manual_seed(inputs["seeds"][1]), len(inputs["data"])
        expected: list[int] = []
        while len(expected) < STEPS * 2 * seen.case.world:
            order = torch.randperm(length, generator=generator).tolist()
            expected += _epoch(order, rank, seen.case.world)
        taken = [index for batch in data["whole"]["taken"] for index in batch]
        if taken != expected[: len(taken)]:
            return f"Rank {rank}'s save changed the samples that the run takes afterwards."
    return None


def _epoch(order: list[int], rank: int, world: int) -> list[int]:
    steps = range(0, len(order), 2 * world)
    return [index for at in steps for index in order[at : at + 2 * world][rank::world]]


RESUME = Task(
    id="13.resume",
    title="As if nothing had happened",
    answer="Resume",
    job="lesson13.resume",
    minutes=20,
    cases=_resume_cases,
    criteria=(
        Criterion("every sample once: the place in the epoch", 3, _resume_samples),
        Criterion("every rank's own random numbers", 2, _resume_random),
        Criterion("the learning rates of the schedule", 1, _resume_rates),
        Criterion("the same losses, bit for bit", 2, _resume_losses),
        Criterion("saving changes nothing", 1, _resume_quiet),
    ),
    hints=(
        "What does the next step depend on? Go through the loop line by line: which values does "
        "each line read that an earlier step has written?",
        "Six objects of the run have a state, and so has torch's global generator, a different one "
        "on each rank. Only what rank 0 returns is written: what must it receive from the others?",
        "save: all_gather_object(torch.get_rng_state()); state_dict() of model, optimizer, "
        "schedule; generator.get_state(); order, at, step. load: set all of it; step + 1, because "
        "the step of the save is done.",
    ),
    debrief="`ddpz train` saves all of this for each rank. Its learning rate follows from the "
    "number of the step, so its schedule has no state.",
)

# -- 13.newest_complete ----------------------------------------------------------------------------

Question = dict[str, Any]  # "folders": {folder: {file: bytes}}, "manifests": {folder: a manifest}
MANIFEST = "manifest.json"
EVERY = 12  # steps from save to save: the number of no rank follows from a step
FLAWS = ("", "no manifest", "torn", "last part", "extra part", "short", "long", "tmp", "two")


def _saves(question: Question, ending: str = "") -> dict[str, int]:
    """{folder: step} of all saves, in the order of the listing."""
    names = (re.fullmatch(rf"step-(\d+){ending}", folder) for folder in question["folders"])
    return {match.group(0): int(match.group(1)) for match in names if match}


def _flaw(question: Question, folder: str) -> str | None:
    """What a save lacks, in words; None if it is complete."""
    files, manifests = question["folders"][folder], question["manifests"]
    if folder not in manifests:
        return "the manifest is missing"
    if manifests[folder] is None:
        return "the manifest is half written"
    for name, size in manifests[folder]["files"].items():
        if name not in files:
            return f"{name} is missing"
        if files[name] != size:
            return f"{name} has {files[name]} bytes instead of {size}"
    return None


def _newest(question: Question, is_good: Callable[[str], bool], ending: str = "") -> int | None:
    saves = _saves(question, ending)
    return max((step for folder, step in saves.items() if is_good(folder)), default=None)


def _right(question: Question) -> int | None:
    return _newest(question, lambda folder: _flaw(question, folder) is None)


def _parts(question: Question, folder: str) -> dict[str, int]:
    """The parts that the manifest names; none if it is damaged."""
    return (question["manifests"].get(folder) or {"files": {}})["files"]


def _as_words(question: Question, world: int) -> int | None:
    saves = _saves(question)
    good = [folder for folder in saves if _flaw(question, folder) is None]
    return saves[max(good)] if good else None


def _oldest(question: Question, world: int) -> int | None:
    saves = _saves(question).items()
    return min((step for name, step in saves if _flaw(question, name) is None), default=None)


def _up_to_a_flaw(question: Question, world: int) -> int | None:
    newest = None
    for folder, step in sorted(_saves(question).items(), key=lambda pair: pair[1]):
        if _flaw(question, folder):
            break
        newest = step
    return newest


def _parts_there(
    wanted: Callable[[Question, str, int], set[str]],
) -> Callable[[Question, int], int | None]:
    """The newest save of which these files are there, and the manifest can be read."""

    def newest(question: Question, world: int) -> int | None:
        def is_good(folder: str) -> bool:
            there = question["folders"][folder].keys()
            manifest = question["manifests"].get(folder)
            return manifest is not None and wanted(question, folder, world) <= there

        return _newest(question, is_good)

    return newest


def _same_files(question: Question, world: int) -> int | None:
    def is_good(folder: str) -> bool:
        return question["folders"][folder].keys() - {MANIFEST} == _parts(question, folder).keys()

    return _newest(question, is_good)


def _of_ranks(world: int) -> set[str]:
    return {f"rank-{rank}.pt" for rank in range(world)}


MISTAKES: dict[str, Callable[[Question, int], int | None]] = {
    "folders were compared as words": _as_words,
    "a .tmp folder counted": lambda q, world: _newest(
        q, lambda folder: _flaw(q, folder) is None, r"(?:\.tmp)?"
    ),
    "every save were complete": lambda q, world: _newest(q, lambda folder: True),
    "it were enough that a manifest is there": lambda q, world: _newest(
        q, lambda folder: MANIFEST in q["folders"][folder]
    ),
    "it were enough that the manifest can be read": _parts_there(lambda q, folder, world: set()),
    "a save had one part for each rank that there is now": _parts_there(
        lambda q, folder, world: _of_ranks(world)
    ),
    "a save had only the parts of its ranks": _parts_there(
        lambda q, folder, world: _of_ranks(q["manifests"][folder]["world"])
    ),
    "the size of a part did not matter": _parts_there(
        lambda q, folder, world: set(_parts(q, folder))
    ),
    "a file that no manifest names made a save incomplete": _same_files,
    "the oldest complete save were wanted": _oldest,
    "the search ended at the first save that is not complete": _up_to_a_flaw,
}


def _newest_cases(rng: torch.Generator) -> list[Case]:
    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    def save(step: int, world: int, flaw: str = "") -> tuple[str, dict[str, int], Any]:
        """(folder, its files, its manifest); the flaw is that of a save that was interrupted."""
        parts = {name: number(1_000, 9_000) for name in sorted(_of_ranks(world))}
        parts["extra.pt"] = number(100, 900)
        return damaged(step, dict(parts), {"world": world, "files": parts}, flaw)

    def damaged(
        step: int, files: dict[str, int], manifest: Any, flaw: str
    ) -> tuple[str, dict[str, int], Any]:
        files, folder = files | {MANIFEST: 300}, f"step-{step}"
        last = f"rank-{manifest['world'] - 1}.pt"
        if flaw == "no manifest":
            del files[MANIFEST]
            manifest = ...
        elif flaw == "torn":
            manifest = None
        elif flaw in ("last part", "extra part"):
            del files[last if flaw == "last part" else "extra.pt"]
        elif flaw in ("short", "long"):
            files[last] += -1 if flaw == "short" else 1
        elif flaw == "tmp":
            folder += ".tmp"
        return folder, files, manifest

    def question(
        saves: Sequence[tuple[str, dict[str, int], Any]], order: Sequence[int] = ()
    ) -> Question:
        order = order or torch.randperm(len(saves), generator=rng).tolist()
        folders = {"logs": {"events.log": 40}} | {saves[i][0]: saves[i][1] for i in order}
        return {
            "folders": folders,
            "manifests": {name: manifest for name, _, manifest in saves if manifest is not ...},
        }

    def interrupted(world: int) -> list[Question]:
        """The same saves in the same order, with each flaw of the newest one, once of two."""
        order = torch.randperm(6, generator=rng).tolist()
        old = [EVERY * number(low, low + 30) for low in (700, 730, 760, 790)]
        second = EVERY * number(840, 860)
        newest = second + EVERY * number(1, 9)
        older = [save(old[0], world), save(old[1], world + 1), save(old[2], 2, "last part")]
        older.append(save(old[3], 3))
        _, _, manifest = save(newest, world + 1 + number(0, 3))
        before = save(second, max(1, world - 1))
        parts = manifest["files"] | {"events.log": 40}
        return [
            question(
                [
                    *older,
                    damaged(second, dict(before[2]["files"]), before[2], "torn")
                    if flaw == "two"
                    else before,
                    damaged(newest, dict(parts), manifest, "short" if flaw == "two" else flaw),
                ],
                order,
            )
            for flaw in FLAWS
        ]

    def telling(world: int) -> list[Question]:
        """Questions to which each mistake gives other answers than the rest."""
        while True:
            questions = interrupted(world)
            answers = [[_right(q) for q in questions]]
            answers += [[mistake(q, world) for q in questions] for mistake in MISTAKES.values()]
            alike = world == 1  # there, a part for each rank is the same as any readable manifest
            if len({tuple(one) for one in answers}) == len(answers) - alike:
                return questions

    def few(world: int) -> list[Question]:
        large = 2**24 + EVERY * number(0, 1000)  # float32 has no odd numbers here
        return [
            question([]),
            question([save(EVERY, world, "tmp")]),
            question([save(EVERY, world, "torn"), save(2 * EVERY, 2, "last part")]),
            question([save(0, world)]),
            question([save(large, world), save(large + 1, 2)]),
            question([save(large, 1), save(10**11 + EVERY, 3), save(10**11, world, "no manifest")]),
        ]

    def case(world: int, kind: str, questions: list[Question]) -> Case:
        says = f"{world_name(world)}{', few saves' if kind else ''}"
        return Case(says, [{"questions": questions}] * world, kind)

    return [case(world, "", telling(world)) for world in (3, 4, 2, 1)] + [
        case(world, "few", few(world)) for world in (4, 1)
    ]


def _asked(seen: Observed) -> Iterator[tuple[int, Question, list[Any]]]:
    """(number of the call, what was asked, what each rank returned)."""
    for number, question in enumerate(seen.case.inputs[0]["questions"]):
        yield number, question, [data["steps"][number] for data in seen.data]


def _newest_values(seen: Observed) -> str | None:
    for _, question, got in _asked(seen):
        wanted = _right(question)
        for rank, step in enumerate(got):
            if step is not None and type(step) is not int:
                return f"Rank {rank} returned {step!r}: return an int, or None."
        if len({*got}) > 1:
            return (
                f"The ranks returned {got} for one listing. They must agree, so each rank needs "
                "the results of the others."
            )
        if got[0] != wanted:
            reason = _reason(question, got[0], wanted)
            return f"You returned {got[0]}, expected is {wanted}: {reason}.{_if(seen)}"
    return unchanged(seen)


def _reason(question: Question, got: int | None, wanted: int | None) -> str:
    if got is None:
        return f"step-{wanted} is complete"
    if wanted is None:
        return "no save is complete"
    if got == int(torch.tensor(wanted, dtype=torch.float32)):
        return f"a float32 cannot hold {wanted}"
    if f"step-{got}" not in question["folders"]:
        return f"there is no folder step-{got}"
    if flaw := _flaw(question, f"step-{got}"):
        return f"in step-{got} {flaw}"
    return f"step-{wanted} is complete and newer"


def _if(seen: Observed) -> str:
    """A mistake that explains all answers of a case, as a sentence."""
    world = seen.case.world
    for words, mistake in MISTAKES.items():
        if all(got[0] == mistake(question, world) for _, question, got in _asked(seen)):
            return f" Yours would be right if {words}."
    return ""


def _newest_calls(seen: Observed) -> str | None:
    for rank in range(seen.case.world):
        for number, _, _ in _asked(seen):
            ops = seen.ops(rank, f"call {number}")
            if len(ops) > 1:
                return (
                    f"Rank {rank} called {', '.join(ops)} for one listing. One collective of one "
                    "number is enough; all_gather_object makes two."
                )
    return all_in_spans(seen)


def _newest_reads(seen: Observed) -> str | None:
    for number, question, _ in _asked(seen):
        reads = [data["reads"][number] for data in seen.data]
        times = Counter(folder for some in reads for folder in some)
        folder, most = max(times.items(), key=lambda pair: pair[1], default=("", 0))
        if most > 1:
            ranks = [rank for rank, some in enumerate(reads) if folder in some]
            return (
                f"The manifest of {folder} was read {most} times, by ranks {ranks}: one read by "
                "one of them is enough."
            )
        saves = len(_saves(question))
        share = -(-saves // seen.case.world)
        for rank, some in enumerate(reads):
            if len(some) > share:
                return (
                    f"Rank {rank} read {len(some)} manifests of {saves} saves. Shared evenly over "
                    f"{world_name(seen.case.world)} that is at most {share}."
                )
    return None


NEWEST_COMPLETE = Task(
    id="13.newest_complete",
    title="The newest save that is complete",
    answer="newest_complete",
    job="lesson13.newest_complete",
    minutes=20,
    cases=_newest_cases,
    criteria=(
        Criterion("the newest complete save, on every rank", 3, _newest_values, on=("",)),
        Criterion("no save, step 0, few saves, large steps", 1, _newest_values, on=("few",)),
        Criterion("at most one collective", 1, _newest_calls),
        Criterion("each manifest read once, and evenly shared", 2, _newest_reads, on=("",)),
    ),
    hints=(
        "Which file alone can tell whether a save is complete? What must a rank know about the "
        "saves that other ranks check: everything, or one number?",
        "Give each rank every N-th save of the sorted list. It finds the newest complete one among "
        "those. Then the newest of all is the largest of these numbers, and a rank without any "
        "takes part too.",
        "steps[rank::world]; a save is good if read() raises nothing and folders[name].get(file) "
        "== size for each file of the manifest; newest = max(good, default=-1); one all_reduce of "
        "an int64 with MAX; -1 means None.",
    ),
    debrief="ddpz_lite, DCP and Megatron-LM need no search: their last rename or last file says "
    "what counts. A search like this repairs a folder whose pointer was lost.",
)

TASKS = [ATOMIC_SAVE, RESHARD, RESUME, NEWEST_COMPLETE]
