"""Jobs of lesson 13: checkpoints and failures."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpz_lite.course.check.watch import Kept
from ddpz_lite.wire import span

# ---- 13.atomic_save ----

BARRIER, DONE, DEAD, STOPPED = "barrier", "done", "dead", "stopped"
ROUNDS = 200  # operations of one save, at most


class _Killed(BaseException):
    """The end of a rank: no `except Exception` of an answer outlives it."""


class _Gone(RuntimeError):
    """What a rank meets that waits for a dead one."""


class _Torn:
    """What is left of a file whose writer was killed while it wrote."""


class Disk:
    """A folder that all ranks see; what others have written is there after a barrier.

    Its methods are closures: how long this rank has to live is in none of its attributes.
    """

    __slots__ = ("barrier", "names", "read", "remove", "rename", "write")


def _disk(
    files: dict[str, Any], kill_at: int | None = None
) -> tuple[Disk, Callable[[str], list[str]], dict[str, Any]]:
    """(the disk, the job's way to meet the others, what is seen).

    kill_at: this rank is killed in its operation of that number, from 0; None: never. A write that
    is killed leaves a torn file; a rename or removal is done whole or not at all. Two ranks that
    change one file between two barriers get a RuntimeError: which of them comes first is chance.

    seen: "files", as they were at the last meeting; "operations", of every rank so far; "dead", the
    ranks that have died, as all others saw it.
    """
    seen: dict[str, Any] = {"files": files, "operations": [0] * dist.get_world_size(), "dead": []}
    local, log = dict(files), []
    left, dead = kill_at, False

    def there(name: str) -> None:
        if dead:
            raise _Killed
        if name not in local:
            raise FileNotFoundError(f"there is no file {name}")

    def do(*operation: Any) -> None:
        nonlocal left, dead
        if left == 0 and not dead:
            dead = True
            if operation[0] == "write":
                log.append(("write", operation[1], _Torn()))
        if dead:
            raise _Killed
        left = None if left is None else left - 1
        log.append(operation)
        _apply(local, operation)

    def meet(state: str) -> list[str]:
        """Tell the others how this rank is; returns how all are, and learns what they have done."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (state, log))
        _one_rank_each([log for _, log in every])
        now = dict(seen["files"])
        for rank, (_, operations) in enumerate(every):
            seen["operations"][rank] += len(operations)
            for operation in operations:
                _apply(now, operation)
        log.clear()
        local.clear()
        local.update(now)
        seen["files"] = now
        seen["dead"] = [rank for rank, (state, _) in enumerate(every) if state == DEAD]
        return [state for state, _ in every]

    def barrier() -> None:
        """Wait for all ranks; from here on each sees what all have done before."""
        if dead:
            raise _Killed
        states = meet(BARRIER)
        others = [rank for rank, state in enumerate(states) if state != BARRIER]
        if any(states[rank] in (DEAD, STOPPED) for rank in others):
            raise _Gone("a rank has died, and this one waits for it in barrier()")
        if others:
            raise RuntimeError(
                f"rank {dist.get_rank()} waits in barrier(), and rank {others[0]} has returned "
                "without it: all ranks must enter a save and a load"
            )

    def write(name: str, value: Any) -> None:
        """Write a tensor or plain data to a file; what was there is lost with the first byte."""
        do("write", name, deepcopy(value))

    def rename(old: str, new: str) -> None:
        """Give a file another name, at once; a file that had this name is replaced."""
        there(old)
        do("rename", old, new)

    def remove(name: str) -> None:
        """Remove a file."""
        there(name)
        do("remove", name)

    def read(name: str) -> Any:
        """What is in a file. Raises ValueError if it was only half written."""
        there(name)
        if isinstance(local[name], _Torn):
            raise ValueError(f"{name} is half a file: its writer was killed")
        return deepcopy(local[name])

    def names() -> list[str]:
        """The names of all files."""
        return sorted(local)

    disk = Disk()
    for method in (barrier, names, read, remove, rename, write):
        setattr(disk, method.__name__, method)
    return disk, meet, seen


def _one_rank_each(logs: list[list[tuple[Any, ...]]]) -> None:
    """Raise RuntimeError where two ranks' operations change the same file."""
    changed_by: dict[str, int] = {}
    for rank, log in enumerate(logs):
        for kind, name, *rest in log:
            for file in (name, *rest) if kind == "rename" else (name,):
                if (other := changed_by.setdefault(file, rank)) != rank:
                    raise RuntimeError(
                        f"ranks {other} and {rank} both changed the file {file} between two "
                        "barriers: on a disk they would write over each other. Fix: let one rank "
                        "do it"
                    )


def _apply(files: dict[str, Any], operation: tuple[Any, ...]) -> None:
    kind, name, *rest = operation
    if kind == "write":
        files[name] = rest[0]
    elif kind == "rename":
        files[rest[0]] = files.pop(name)
    else:
        del files[name]


def _run(meet: Callable[[str], list[str]], call: Callable[[], Any]) -> tuple[Any, bool]:
    """call() on every rank, until all have come back or died.

    Returns what it gave, and whether it came back on this rank.
    """
    state, result = DONE, None
    try:
        result = call()
    except _Killed:
        state = DEAD
    except _Gone:
        state = STOPPED
    while BARRIER in meet(state):
        pass
    return result, state == DONE


def atomic_save(
    answer: Callable[..., Any],
    *,
    shards: list[torch.Tensor],
    steps: list[int],
) -> dict[str, Any]:
    """shards: what this rank saves at each of `steps`, five of them.

    Two saves go well, the third is killed: on the first rank, a middle one and the last, at each
    operation in turn. What remains is loaded; the fourth is killed, too, where another rank is to
    die; then the fifth is saved and loaded.
    """
    kept = Kept(shards=shards)
    begun: dict[str, Any] = {}
    first: list[Any] = [_load(answer, begun)]
    for step, shard in zip(steps[:2], shards, strict=False):
        begun = _save(answer, begun, step, shard)[0]
        first.append(_load(answer, begun))
    rounds = []
    world, rank = dist.get_world_size(), dist.get_rank()
    for victim in sorted({0, world // 2, world - 1}):
        for k in range(ROUNDS):
            kill_at = k if rank == victim else None
            files, back, seen = _save(answer, begun, steps[2], shards[2], kill_at)
            killed = victim in seen["dead"]
            found = {"victim": victim, "k": k, "killed": killed, "back": back}
            found["operations"] = seen["operations"][victim]
            found["crash"] = _load(answer, files)
            found["there"] = _tensors(files)
            kill_at = k // 2 if rank == 0 else None  # rank 0 has the most operations
            files, _, seen = _save(answer, files, steps[3], shards[3], kill_at)
            found |= {"again": 0 in seen["dead"], "second": _load(answer, files)}
            files = _save(answer, files, steps[4], shards[4])[0]
            found |= {"later": _load(answer, files), "end": _tensors(files)}
            rounds.append(found)
            if not killed:
                break
    # not from memory: another disk was used last
    return {
        "first": first,
        "rounds": rounds,
        "again": _load(answer, begun),
        "changed": kept.changed(),
    }


def _save(
    answer: Callable[..., Any],
    files: dict[str, Any],
    step: int,
    shard: torch.Tensor,
    kill_at: int | None = None,
) -> tuple[dict[str, Any], bool, dict[str, Any]]:
    disk, meet, seen = _disk(files, kill_at)

    def save() -> None:
        checkpoints = answer(disk)
        answer(_disk({})[0])  # of another run, which keeps nothing that belongs to this one
        checkpoints.save(step, shard)

    _, back = _run(meet, save)
    return seen["files"], back, seen


def _load(answer: Callable[..., Any], files: dict[str, Any]) -> Any:
    """What load() gives: [step, shard], None, or the words of the error that it met on the disk."""
    disk, meet, _ = _disk(files)

    def load() -> Any:
        try:
            return answer(disk).load()
        except (FileNotFoundError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    return _run(meet, load)[0]


def _tensors(files: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors on the disk, inside of lists and dicts too."""

    def inside(value: Any) -> Iterable[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict | list | tuple):
            for part in value.values() if isinstance(value, dict) else value:
                yield from inside(part)

    return [tensor for _, value in sorted(files.items()) for tensor in inside(value)]


# ---- 13.reshard ----


def _reader(files: list[dict[str, torch.Tensor]]) -> tuple[Callable[..., Any], list[list[Any]]]:
    """(read(rank, key, start, stop), what has been read: a key and a number of elements)."""
    taken: list[list[Any]] = []

    def read(rank: int, key: str, start: int, stop: int) -> torch.Tensor:
        if not 0 <= rank < len(files):
            raise ValueError(f"{len(files)} ranks saved, and rank {rank} was asked for")
        shard = files[rank][key]
        if not 0 <= start <= stop <= len(shard):
            raise ValueError(
                f"rank {rank} saved {len(shard)} elements of {key}, and {start}:{stop} were "
                "asked for"
            )
        taken.append([key, stop - start])
        return shard[start:stop].clone()

    return read, taken


def reshard(answer: Callable[..., Any], *, checkpoints: list[dict[str, Any]]) -> dict[str, Any]:
    """checkpoints: "files", by the rank that wrote it, {key: (shard,)}; "saved", [name, numel] in
    the order in which they lie end to end; "names", in the order in which they are to lie now.
    """
    results, reads, changed = [], [], []
    for checkpoint in checkpoints:
        files = checkpoint["files"]
        read, taken = _reader(files)
        keys = list(files[0])
        kept = Kept(saved=checkpoint["saved"], names=checkpoint["names"], keys=keys)
        saved = dict(checkpoint["saved"])
        got = answer(read, keys, saved, len(files), checkpoint["names"])
        results.append(dict(got))
        reads.append(taken)
        changed += kept.changed()
    return {"results": results, "reads": reads, "changed": changed}


# ---- 13.resume ----

SIZES = 6, 5  # of an input, of what is hidden
BATCH = 2  # samples of a rank in a step


class _Counting(nn.Module):
    """Passes on what it gets, less the mean of what has come so far: a buffer that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(SIZES[1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x):
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


def _rate(step: int) -> float:
    """The schedule's factor of the first learning rate."""
    return 0.5 ** (step // 3)


def _new_run(
    start: dict[str, torch.Tensor], seed: int, lr: float, momentum: float
) -> SimpleNamespace:
    """A training run at its beginning; seed: of this rank's global generator."""
    model = nn.Sequential(
        nn.Linear(SIZES[0], SIZES[1]), _Counting(), nn.Dropout(0.4), nn.Linear(SIZES[1], 1)
    )
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    torch.manual_seed(seed)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, _rate),  # from the first rate
        generator=torch.Generator(),
        order=[],
        at=0,
        step=0,
    )


def _go_on(
    run: SimpleNamespace, data: torch.Tensor, steps: int, save: Callable[[], None]
) -> dict[str, list[Any]]:
    """Train until `steps` steps are done; save() stands where a run would save."""
    rank, world = dist.get_rank(), dist.get_world_size()
    seen: dict[str, list[Any]] = {"losses": [], "rates": [], "taken": [], "steps": []}
    while run.step < steps:
        if run.at >= len(run.order):
            run.order = torch.randperm(len(data), generator=run.generator).tolist()
            run.at = 0
        global_batch = run.order[run.at : run.at + BATCH * world]
        local = global_batch[rank::world]
        run.at += len(global_batch)
        x = data[local]  # (up to BATCH, SIZES[0] + 1), the target last
        loss = (run.model(x[:, :-1])[:, 0] - x[:, -1]).square().sum() / len(global_batch)
        run.optimizer.zero_grad()
        loss.backward()
        for parameter in run.model.parameters():
            dist.all_reduce(parameter.grad)
        for buffer in run.model.buffers():
            dist.broadcast(buffer, src=0)
        seen["rates"].append(run.optimizer.param_groups[0]["lr"])
        run.optimizer.step()
        run.schedule.step()
        seen["losses"].append(loss.detach())
        seen["taken"].append(local)
        seen["steps"].append(run.step)
        save()
        run.step += 1
        if len(seen["steps"]) > 2 * steps:
            raise RuntimeError(f"the run does not end: run.step is {run.step} of {steps}")
    return seen


def resume(
    answer: Callable[..., Any],
    *,
    start: dict[str, torch.Tensor],
    other: dict[str, torch.Tensor],
    data: torch.Tensor,
    seeds: Sequence[int],
    steps: int,
    lr: float,
) -> dict[str, Any]:
    """start: the weights; data: the samples. seeds: of this rank's generator and of the order's,
    and what both are after a kill, with `other` weights. The run is saved in each step, goes on,
    and is then resumed from each save.
    """
    run = _new_run(start, seeds[0], lr, 0.9)
    run.generator.manual_seed(seeds[1])
    files, after, changed = [], [], []

    def save() -> None:
        kept = Kept(order=list(run.order), at=run.at, step=run.step)
        before = torch.get_rng_state()
        file = io.BytesIO()
        torch.save(answer.save(run), file)
        files.append(_from_rank_0(file.getvalue()))
        same = torch.equal(before, torch.get_rng_state())
        changed.extend([*kept.changed(), *(["the random generator"] * (not same))])
        after.append(_look(run))

    whole = _go_on(run, data, steps, save)
    resumed = []
    for file in files:
        run = _new_run(other, seeds[2], 7.0, 0.2)
        run.generator.manual_seed(seeds[3])
        answer.load(run, torch.load(io.BytesIO(file), weights_only=True))
        look = _look(run)
        resumed.append({"look": look, **_go_on(run, data, steps, lambda: None)})
    return {"whole": whole, "after": after, "resumed": resumed, "changed": changed}


def _from_rank_0(data: bytes) -> bytes:
    box = [data]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _look(run: SimpleNamespace) -> dict[str, Any]:
    """What a run is at this moment, and its next random numbers."""
    states = [torch.get_rng_state(), run.generator.get_state()]
    chance = [torch.Generator() for _ in states]
    for generator, state in zip(chance, states, strict=True):
        generator.set_state(state)
    momenta = [run.optimizer.state[p].get("momentum_buffer") for p in run.model.parameters()]
    return {
        "model": {name: t.clone() for name, t in run.model.state_dict().items()},
        "momenta": [None if m is None else m.clone() for m in momenta],
        "chance": [torch.rand(4, generator=generator) for generator in chance],
        "order": list(run.order),
        "at": int(run.at),
        "step": int(run.step),
    }


# ---- 13.newest_complete ----


def _manifests(manifests: dict[str, Any]) -> tuple[Callable[[str], Any], list[str]]:
    """(read(folder), the folders whose manifest it was asked for)."""
    taken: list[str] = []

    def read(folder: str) -> Any:
        taken.append(folder)
        if folder not in manifests:
            raise FileNotFoundError(f"there is no {folder}/manifest.json")
        if manifests[folder] is None:
            raise ValueError(f"{folder}/manifest.json is half written")
        return deepcopy(manifests[folder])

    return read, taken


def newest_complete(
    answer: Callable[..., Any], *, questions: list[dict[str, Any]]
) -> dict[str, Any]:
    """questions: the "folders" of each call, and the "manifests" in them, None if half written."""
    kept = Kept(folders=[question["folders"] for question in questions])
    steps, reads = [], []
    for number, question in enumerate(questions):
        read, taken = _manifests(question["manifests"])
        with span(f"call {number}"):
            steps.append(answer(question["folders"], read))
        reads.append(taken)
    return {"steps": steps, "reads": reads, "changed": kept.changed()}
