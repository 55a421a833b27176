"""Tasks of lesson 13: checkpoints and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ddpz_lite.course.check.compare import close, differs
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vocabulary import explain, silent, unchanged, world_name

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
        return None if got is None else f"rank {rank}'s load() gave something, and nothing is there"
    if got is None:
        return f"rank {rank}'s load() found nothing, and step {steps[wanted]} was complete"
    if isinstance(got, str):
        return f"rank {rank}'s load() met {got}"
    if not (isinstance(got, list) and len(got) == 2 and got[0] in steps):
        return f"rank {rank}'s load() gave no pair of step and shard"
    if got[0] != steps[wanted]:
        return f"rank {rank} loaded step {got[0]}, and step {steps[wanted]} was complete"
    wrong = differs(got[1], shards[wanted], f"the shard that rank {rank} loaded", bitwise=True)
    return wrong and wrong.rstrip(".")


def _save_values(seen: Observed) -> str | None:
    for rank, data in enumerate(seen.data):
        for got, wanted in zip(data["first"], (None, OLDEST, GOOD), strict=True):
            if wrong := _loaded(seen, rank, got, wanted):
                return f"After saves that nobody killed: {wrong}."
        if wrong := _loaded(seen, rank, data["again"], GOOD):
            return f"A new Checkpoints(disk) must find what is on its disk, and only that: {wrong}."
        for found in data["rounds"]:
            if not found["killed"] and (wrong := _loaded(seen, rank, found["crash"], KILLED)):
                return f"A third save, that nobody killed: {wrong}."
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
                return f"{words}. Then load() met {got}. {_why(seen, found, got)}"
            if got is None:
                return (
                    f"{words}. Then load() found nothing, and step {steps[GOOD]} had been "
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
        return f"load() met {error}"
    steps = seen.case.inputs[0]["steps"]
    first = seconds[0][0] if isinstance(seconds[0], list) and seconds[0] else None
    newest = AGAIN if first == steps[AGAIN] or not found[0]["again"] else before
    told = (_loaded(seen, rank, got, newest) for rank, got in enumerate(seconds))
    return next(filter(None, told), None)


def _why(seen: Observed, found: list[dict[str, Any]], got: str) -> str:
    """What made a load meet half a file, or none."""
    steps = seen.case.inputs[0]["steps"]
    if GOOD not in _complete(seen, found[0]["there"]):
        how = "was written over in place" if TORN in got else "is gone: a file of it is missing"
        return (
            f"Step {steps[GOOD]}, which was good, {how}. What counts must not be touched until the "
            "new one does."
        )
    if any(isinstance(one["crash"], list) and one["crash"][:1] == [steps[KILLED]] for one in found):
        return (
            "Other ranks loaded the new one: it counted before all ranks had written their parts. "
            "The pointer comes after a barrier."
        )
    return f"Step {steps[GOOD]} was there, whole, and what is not whole must not count."


def _save_returns(seen: Observed) -> str | None:
    steps = seen.case.inputs[0]["steps"]
    for words, found in _rounds(seen):
        for rank, one in enumerate(found):
            newest = one["crash"][:1] if isinstance(one["crash"], list) else None
            if one["back"] and newest != steps[KILLED : KILLED + 1]:
                return (
                    f"{words}. Rank {rank}'s save() had returned by then, and the checkpoint does "
                    "not count: all ranks wait until it does."
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
                f"{words}. Then fewer than two complete checkpoints are on the disk: what is older "
                "goes when the new one counts, and not before."
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
                f"After a save that went well there are {len(end)} tensors on the disk, and two "
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
        Criterion("saves go on after a kill", 1, _save_goes_on),
        Criterion("two complete checkpoints at any moment", 1, _save_two),
        Criterion("nothing else is left", 1, _save_cleans),
    ),
    hints=(
        "At which moment does the new checkpoint begin to count, and what must be on the disk by "
        "then? Whose part of it?",
        "Every rank writes its part under a name that has the step in it. One small file says "
        "which steps count; it is never written in place, but written beside and renamed.",
        "save: write '<step>-<rank>'; barrier; rank 0 writes 'kept.new' with the last two steps "
        "and renames it to 'kept'; barrier; rank 0 removes every file that no kept step names.",
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
        "is in the order in which it was saved: look for each name where it lies now.": _cut(
            before, world, rank
        ),
        "has padding of the old shards in it: only what the names have is data.": _cut(
            padded, world, rank
        ),
        "is the shard that the old rank of this number had.": files[min(rank, len(files) - 1)][key],
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
                        f"Rank {rank} read {read} of {numel} elements of {key}, and its shard has "
                        f"{most}: read the stretches that lie in it, from whoever has them."
                    )
    return silent(seen, "Whatever a rank needs it can read itself.")


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
        "Where does element i of the whole lie in the old shards, and where does it lie in the "
        "new ones? Which of the two needs the world that saved?",
        "Go through the names in their new order with a running start. What of a name lies in "
        "your new shard is a range; in the old flat range it is a range too, and may cross shards.",
        "For a stretch start:stop of the old flat range: rank, offset = divmod(start, old shard); "
        "read up to the end of that shard; go on from there. Pad the end with zeros.",
    ),
    debrief="torch.distributed.checkpoint does this for tensors of any dimension: each rank's "
    "planner asks for the intersections of what it needs with what was written.",
)

# -- 13.resume -------------------------------------------------------------------------------------

STEPS, SAMPLES = 7, {1: 5, 2: 9, 3: 14, 4: 19}  # two epochs and a bit, none of which comes out even


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
                f"{saved} begins the epoch from the start: samples that were seen would be seen "
                "again. run.at says how many were dealt."
            )
        if look["order"] != after["order"] and look["at"] == after["at"]:
            return (
                f"{saved} goes on in another order: drawn anew, it deals some samples twice and "
                "others never. Save the order itself."
            )
        if (look["order"], look["at"]) != (after["order"], after["at"]):
            return f"{saved} has lost its place: run.order and run.at say what was dealt."
        if not close(look["chance"][1], after["chance"][1], bitwise=True):
            return f"{saved} will draw the next epoch in another order: run.dice has a state, too."
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
                f"Rank {rank} goes on with rank 0's random numbers: all ranks drop the same units "
                "from now on. Each rank's generator has a state of its own; gather them."
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
                f"After a resume from step {step} the learning rates are {resumed['rates']}, "
                f"and they were {whole}: the schedule has a state, and the optimizer's groups "
                "hold its result."
            )
    return None


def _resume_losses(seen: Observed) -> str | None:
    for rank, step, after, resumed in _resumed(seen):
        for name, value in after["model"].items():
            if not close(resumed["look"]["model"][name], value, bitwise=True):
                kind = "a buffer" if name == "1.mean" else "a parameter"
                return f"Rank {rank}'s {name}, {kind}, is not what was saved in step {step}."
        for mine, value in zip(resumed["look"]["momenta"], after["momenta"], strict=True):
            if value is not None and not close(mine, value, bitwise=True):
                return (
                    f"Rank {rank}'s optimizer has lost its momentum after a resume from step "
                    f"{step}: its state belongs to the checkpoint."
                )
        whole = seen.data[rank]["whole"]["losses"][step + 1 :]
        pairs = zip(resumed["losses"], whole, strict=False)
        if len(resumed["losses"]) != len(whole) or not all(
            close(a, b, bitwise=True) for a, b in pairs
        ):
            return f"Rank {rank}'s losses after step {step} are not those of the run that went on."
    return None


def _resume_quiet(seen: Observed) -> str | None:
    for rank, data in enumerate(seen.data):
        if data["changed"]:
            return f"Rank {rank}'s save changed {data['changed'][0]}: saving only looks."
        inputs = seen.case.inputs[rank]
        dice, length = torch.Generator().manual_seed(inputs["seeds"][1]), len(inputs["data"])
        dealt: list[int] = []
        while len(dealt) < STEPS * 2 * seen.case.world:
            dealt += _epoch(torch.randperm(length, generator=dice).tolist(), rank, seen.case.world)
        taken = [index for batch in data["whole"]["taken"] for index in batch]
        if taken != dealt[: len(taken)]:
            return f"Rank {rank}'s save changed what the run that went on has taken."
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
        "What does the next step depend on? Go through the loop line by line: what does each line "
        "read that an earlier step has written?",
        "Six objects of the run have a state, and so has torch's global generator, another one on "
        "each rank. What rank 0 returns is all that is written: what does it have to hear from "
        "the others?",
        "save: all_gather_object(torch.get_rng_state()); state_dict() of model, optimizer, "
        "schedule; dice.get_state(); order, at, step. load: the same back; step + 1, for the "
        "step of the save is done.",
    ),
    debrief="`ddpz train` saves all of this by each rank; its learning rate follows from the "
    "number of the step, so its schedule has no state at all.",
)

TASKS = [ATOMIC_SAVE, RESHARD, RESUME]
