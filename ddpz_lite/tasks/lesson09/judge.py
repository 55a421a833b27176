"""Tasks of lesson 09: ZeRO-1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...grade.compare import close, differs
from ...grade.task import Aspect, Case, Observed, Task
from ...grade.vocabulary import nbytes, world_name
from ...wire import Record
from .job import OPTIMIZERS

# -- 09.shard_owners -------------------------------------------------------------------------------


def _owner_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, sizes: list[int], says: str, kind: str = "") -> Case:
        return Case(f"{world_name(world)}, {says}", [{"sizes": sizes} for _ in range(world)], kind)

    def drawn(count: int, high: int) -> list[int]:
        return torch.randint(1, high, (count,), generator=rng).tolist()

    return [
        case(1, drawn(5, 100), "5 parameters"),
        case(2, drawn(9, 1000), "9 parameters"),
        case(3, [900, 10, 20, 30, 10, 20, 5, 5], "one large parameter"),
        case(3, sorted(drawn(14, 500)), "14 parameters, the largest last"),
        case(4, [*drawn(10, 300), 700, 650, 720, 640], "4 large parameters at the end"),
        case(4, [7, 3], "fewer parameters than ranks", "few"),
        case(2, [5] * 10, "equal parameters", "few"),
    ]


def _in_turn(sizes: list[int], world: int) -> int:
    """The largest load when each parameter in turn goes to the rank that has the least."""
    loads = [0] * world
    for size in sizes:
        loads[loads.index(min(loads))] += size
    return max(loads)


def _greedy_load(sizes: list[int], world: int) -> int:
    """The same, the largest parameter first."""
    return _in_turn(sorted(sizes, reverse=True), world)


def _owner_values(seen: Observed) -> str | None:
    sizes, world = seen.case.inputs[0]["sizes"], seen.case.world
    first = seen.data[0]["owners"]
    for rank, got in enumerate(seen.data):
        owners = got["owners"]
        if type(owners) is not list or any(type(owner) is not int for owner in owners):
            return f"Rank {rank} must return a list of ranks, one for each parameter."
        if len(owners) != len(sizes):
            return f"Rank {rank} returned {len(owners)} owners for {len(sizes)} parameters."
        if bad := [owner for owner in owners if not 0 <= owner < world]:
            return f"{bad[0]} is not a rank: nobody would update that parameter."
        if owners != first:
            return f"Ranks 0 and {rank} disagree on who owns what. It must not depend on the rank."
    return None


def _owner_balance(seen: Observed) -> str | None:
    sizes, world = seen.case.inputs[0]["sizes"], seen.case.world
    owners = seen.data[0]["owners"]
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == r) for r in range(world)]
    best = _greedy_load(sizes, world)
    if max(loads) <= best:
        return None
    counts = [owners.count(rank) for rank in range(world)]
    if max(loads) == sum(sizes):
        return f"Rank {loads.index(max(loads))} owns everything: nothing is sharded."
    if max(loads) != _in_turn(sizes, world) and max(counts) - min(counts) <= 1:
        return (
            f"Each rank owns as many parameters ({counts}), but not as many elements: {loads}; "
            f"{best} are possible for the fullest. Balance elements."
        )
    return (
        f"The fullest rank owns {max(loads)} elements, and {best} are possible: {loads}. Which "
        "parameter do you place first?"
    )


def _silent(seen: Observed) -> str | None:
    for rank in range(seen.case.world):
        if calls := seen.ops(rank):
            return f"Rank {rank} called {calls[0]}. All ranks know all sizes; nothing must be sent."
    return None


OWNERS = Task(
    id="09.shard_owners",
    title="Who owns which parameter?",
    answer="shard_owners",
    job="lesson09.shard_owners",
    minutes=10,
    cases=_owner_cases,
    aspects=(
        Aspect("every parameter has one owner, the same on all ranks", 1, _owner_values),
        Aspect("balanced by elements", 2, _owner_balance, on=("",)),
        Aspect("few parameters, equal parameters", 1, _owner_balance, on=("few",)),
        Aspect("nothing is sent", 0, _silent),
    ),
    hints=(
        "If a large parameter comes last, where can it still go without tipping the balance?",
        "Place the largest first, each on the rank that has the fewest elements so far.",
        "order = sorted(range(len(sizes)), key=lambda i: -sizes[i]); for i in order: the rank with "
        "the smallest load gets it; ties go to the lowest rank, so that all agree.",
    ),
    debrief="ZeroRedundancyOptimizer does this, so one embedding can unbalance it. DeepSpeed and "
    "Megatron, like ddpz_lite, cut one flat range into equal parts instead.",
)

# -- 09.zero1 --------------------------------------------------------------------------------------

SHAPES = ((5, 4), (7,), (3, 3), (1,))
PSI = sum(torch.Size(s).numel() for s in SHAPES)  # 37: no world from 2 to 4 divides it


def _zero1_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, optimizer: str = "AdamW", kind: str = "") -> Case:
        weights = [torch.randn(s, generator=rng) for s in SHAPES]
        inputs = [
            {
                "weights": weights,
                "gradients": [[torch.randn(s, generator=rng) for s in SHAPES] for _ in range(3)],
                "optimizer": optimizer,
            }
            for _ in range(world)
        ]
        says = f"{world_name(world)}, {optimizer}"
        if kind == "changed":
            says += " whose states are changed"
            for rank in inputs:  # more than any tensor of states holds
                rank["factors"] = [torch.randn(2 * PSI, generator=rng) for _ in range(3)]
        return Case(says, inputs, kind)

    return [
        case(1),
        case(2),
        case(3),
        case(4),
        case(2, "SGD with momentum", "other"),
        case(3, kind="changed"),
    ]


Gradients = Callable[[int, int, int], torch.Tensor]  # (step, rank, parameter)


def _trained(
    case: Case,
    rank: int,
    gradient: Gradients,
    steps: int,
    factors: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """The parameters after `steps` steps of a plain optimizer on these gradients.

    factors: for each step, of all elements; after it, exp_avg is multiplied by them.
    """
    kind, options = OPTIMIZERS[case.inputs[0]["optimizer"]]
    parameters = [torch.nn.Parameter(w.clone()) for w in case.inputs[0]["weights"]]
    plain = kind(parameters, **options)
    for step in range(steps):
        for index, parameter in enumerate(parameters):
            parameter.grad = gradient(step, rank, index)
        plain.step()
        if factors is not None:
            parts = factors[step].split([p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                plain.state[parameter]["exp_avg"] *= part.view_as(parameter)
    return [p.detach() for p in parameters]


def _stacked(case: Case) -> Callable[[int, int], torch.Tensor]:
    """(step, parameter) -> its gradients on all ranks, (N, *shape)."""
    return lambda step, index: torch.stack([rank["gradients"][step][index] for rank in case.inputs])


def _zero1_values(seen: Observed) -> str | None:
    case, stack = seen.case, _stacked(seen.case)

    def mean(step: int, _: int, index: int) -> torch.Tensor:
        return stack(step, index).mean(0)

    for step in range(3):
        right = _trained(case, 0, mean, step + 1)
        for rank, got in enumerate(seen.data):
            now = got["after"][step]
            for index, (mine, wanted) in enumerate(zip(now, right, strict=True)):
                if (mine.dtype, mine.shape) != (wanted.dtype, wanted.shape):
                    return differs(mine, wanted, f"Rank {rank}'s parameter {index}")
            if all(close(a, b, rtol=1e-4) for a, b in zip(now, right, strict=True)):
                continue
            return f"After step {step} on rank {rank}: {_zero1_cure(case, rank, now, step, stack)}"
    for rank, got in enumerate(seen.data):
        if not all(
            close(a, b, bitwise=True)
            for a, b in zip(got["after"][-1], seen.data[0]["after"][-1], strict=True)
        ):
            return f"Ranks 0 and {rank} do not hold the same bits."
    return None


def _zero1_cure(
    case: Case, rank: int, now: Any, step: int, stack: Callable[[int, int], torch.Tensor]
) -> str:
    begun = case.inputs[0]["weights"]
    right = _trained(case, 0, lambda s, _, i: stack(s, i).mean(0), step + 1)
    flat = torch.cat([t.flatten() for t in now])
    start = torch.cat([t.flatten() for t in begun])
    good = torch.cat([t.flatten() for t in right])
    moved, fine = ~torch.isclose(flat, start), torch.isclose(flat, good, rtol=1e-4, atol=1e-5)
    if not moved.any():
        return "nothing has moved. Do the updated shards come back into the parameters?"
    if fine.any() and torch.equal(fine | ~moved, torch.ones_like(fine)):
        return (
            f"{int((~fine).sum())} of {len(flat)} elements are still what they were. Who owns "
            f"them, "
            "and is what the owners updated gathered afterwards?"
        )
    known: dict[str, Gradients] = {
        "the gradients were added up over the ranks, not averaged.": (
            lambda s, _, i: stack(s, i).sum(0)
        ),
        "the rank's own gradient was used: reduce before the step.": lambda s, r, i: stack(s, i)[r],
    }
    for words, gradient in known.items():
        pieces = [
            torch.cat([t.flatten() for t in _trained(case, r, gradient, step + 1)])
            for r in range(case.world)
        ]
        if torch.stack([torch.isclose(flat, p, rtol=1e-4, atol=1e-5) for p in pieces]).any(0).all():
            return words
    off = (flat - good).abs().max().item()
    return f"the parameters are off by up to {off:.2g} from plain {case.inputs[0]['optimizer']}."


def _zero1_states(seen: Observed) -> str | None:
    world, kinds = seen.case.world, 2 if seen.case.inputs[0]["optimizer"] == "AdamW" else 1
    most = kinds * _most_elements(world)
    total = 0
    for rank, got in enumerate(seen.data):
        held = sum(state.numel() for state in got["states"])
        total += held
        if held > most and world > 1:
            if held >= kinds * PSI:
                return f"Rank {rank} keeps states of all {PSI} parameters: nothing is sharded."
            return f"Rank {rank} keeps {held} state elements; its share is at most {most}."
    if total < kinds * PSI:
        return f"All ranks together keep {total} state elements; {kinds * PSI} are needed."
    return _zero1_used(seen) if seen.case.kind == "changed" else None


def _zero1_used(seen: Observed) -> str | None:
    """Whether the states that were found make the step: they were changed, each element by a factor
    that its rank alone knows, and the parameters must follow.

    Any cut is allowed. Which element a rank holds is seen from its value after the first step.
    """
    case, stack = seen.case, _stacked(seen.case)
    for rank, got in enumerate(seen.data):
        if sum(state.numel() for state in got["first"]) > _most_elements(case.world):
            return f"Rank {rank} keeps states of more than its share."
    mean = torch.cat([stack(0, index).mean(0).flatten() for index in range(len(SHAPES))])
    begun = 0.1 * mean  # 1 - beta1
    factors = _factors(seen, begun)
    if factors.isnan().any():  # a sum in place of the mean is another aspect's business
        factors = _factors(seen, begun * case.world)
    if left := int(factors[0].isnan().sum()):
        return f"After the first step, no rank's exp_avg holds that of {left} elements."
    right = _trained(case, 0, lambda s, _, i: stack(s, i).mean(0), 3, list(factors))
    for rank, got in enumerate(seen.data):
        if not all(close(a, b, rtol=1e-4) for a, b in zip(got["after"][-1], right, strict=True)):
            return (
                f"Each rank's exp_avg was changed between steps, and rank {rank}'s parameters do "
                "not show it. The states that are kept must be those that make the step."
            )
    return None


def _factors(seen: Observed, begun: torch.Tensor) -> torch.Tensor:
    """(3, PSI): by what each element's exp_avg was multiplied after each step, NaN where no rank
    has it. begun: what it is after the first step, as one process has it.
    """
    factors = torch.full((3, PSI), torch.nan)
    for inputs, got in zip(seen.case.inputs, seen.data, strict=True):
        given = torch.stack(inputs["factors"])
        for state in got["first"]:
            for place, value in enumerate(state.flatten()):
                off, element = (begun - value).abs().min(0)
                if value != 0 and off <= 1e-6:  # else padding
                    factors[:, element] = given[:, place]
    return factors


def _most_elements(world: int) -> int:
    """A rank's share: a flat range rounded up, or whole parameters dealt greedily."""
    sizes = [torch.Size(s).numel() for s in SHAPES]
    return max(-(-PSI // world), _greedy_load(sizes, world))


def _moved(call: Record) -> int:
    """Bytes that this rank sent. A reduce counts its tensor once: gloo's ring sends up to half as
    much again, which whoever asks for a sum on one rank cannot help.
    """
    if call.op != "reduce":
        return call.bytes_sent
    return 0 if call.rank == call.peer else nbytes(call)


def _zero1_traffic(seen: Observed) -> str | None:
    world = seen.case.world
    padded = world * _most_elements(world)
    most = 3 * 2 * (world - 1) * padded * 4  # bytes of all ranks, in 3 steps
    start = (world - 1) * padded * 4  # whoever wants to may broadcast the parameters at first
    sent = sum(_moved(call) for rank in range(world) for call in seen.calls(rank))
    if sent <= most + start:
        return None
    ops = sorted({op for rank in range(world) for op in seen.ops(rank)})
    return (
        f"All ranks sent {sent:,} bytes in three steps with {' and '.join(ops)}. Gradients to "
        f"their owners and parameters back to all is {most:,}, what an all-reduce alone costs."
    )


ZERO1 = Task(
    id="09.zero1",
    title="A ZeRO-1 optimizer",
    answer="ZeRO1",
    job="lesson09.zero1",
    minutes=30,
    cases=_zero1_cases,
    aspects=(
        Aspect("the parameters of plain AdamW on the mean gradient", 3, _zero1_values, on=("",)),
        Aspect("another optimizer", 1, _zero1_values, on=("other",)),
        Aspect("a rank keeps the states of its share alone", 2, _zero1_states),
        Aspect("sends no more than an all-reduce", 2, _zero1_traffic),
    ),
    hints=(
        "Which elements does rank r update? Which gradients does it need, and who needs its "
        "result?",
        "Lay parameters and gradients end to end and pad: a flat buffer of N equal shards. The "
        "inner "
        "optimizer knows one parameter, the own shard.",
        "step: flat gradient -> reduce_scatter (given) / world -> shard.grad; optimizer.step() on "
        "the shard; all_gather (given) of the shards; copy back into the parameters.",
    ),
    debrief="ZeroRedundancyOptimizer behind DDP pays 3Ψ: an all-reduce, then broadcasts. "
    "ddpz_lite's "
    "zero1.py keeps the flat buffer all the time, so nothing is copied.",
)

TASKS = [OWNERS, ZERO1]
