"""Tasks of lesson 17: the interview gym."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ddpz_lite.course.check.compare import close, differs, number
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vocabulary import (
    ops_of_all,
    padded_shards,
    same_on_all_ranks,
    sent_by_all,
    unchanged,
    world_name,
)
from ddpz_lite.course.tasks.lesson17.job import OPTIMIZERS
from ddpz_lite.course.tasks.lesson17.route import FASTEST_ROUTE

# -- 17.repair_the_article -------------------------------------------------------------------------

SHAPES = ((7, 5), (11,), (6, 3), (2,))  # 66 elements: worlds 2 and 3 divide them, 4 does not
OTHER = ((5,), (3, 4))  # of a second model: 17
STEPS = 4


def _repair_cases(rng: torch.Generator) -> list[Case]:
    def case(
        world: int, optimizer: str = "AdamW", kind: str = "", dtype: torch.dtype = torch.float32
    ) -> Case:
        calls = (SHAPES, OTHER, OTHER, OTHER) if kind == "again" else (SHAPES,)
        lengths = (STEPS, STEPS, STEPS - 2, STEPS)  # two calls have the same shapes
        kinds = [optimizer, optimizer, optimizer, "Adam"]

        def drawn(shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
            return [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]

        inputs = [
            {
                "weights": [drawn(shapes) for shapes in calls],
                "noise": [
                    [drawn(shapes) for _ in range(length)]
                    for shapes, length in zip(calls, lengths, strict=False)
                ],
                "optimizers": kinds[: len(calls)],
            }
            for _ in range(world)
        ]
        more = {"again": ", four calls in turn", "double": " in float64"}.get(kind, "")
        return Case(f"{world_name(world)}, {optimizer}{more}", inputs, kind)

    return [
        case(2),
        case(4),
        case(3),
        case(1),
        case(3, "SGD with momentum", "other"),  # AdamW hardly tells a sum from a mean
        case(4, kind="again"),
        case(3, kind="double", dtype=torch.float64),
    ]


def _trained(
    case: Case,
    call: int,
    *,
    start: Callable[[int], int] = lambda rank: 0,
    reduce: Callable[[Sequence[torch.Tensor], int], torch.Tensor] | None = None,
) -> list[list[torch.Tensor]]:
    """For each rank, the parameters after all steps of plain training.

    start: whose weights a rank begins with. reduce: the ranks' gradients of a parameter, and the
    rank -> what it steps on; by default their mean.
    """
    kind, options = OPTIMIZERS[case.inputs[0]["optimizers"][call]]
    world = case.world
    models = [
        [torch.nn.Parameter(w.clone()) for w in case.inputs[start(rank)]["weights"][call]]
        for rank in range(world)
    ]
    plain = [kind(model, **options) for model in models]
    for step in range(len(case.inputs[0]["noise"][call])):
        gradients = [
            [
                drawn + 0.5 * p.detach()
                for drawn, p in zip(
                    case.inputs[rank]["noise"][call][step], models[rank], strict=True
                )
            ]
            for rank in range(world)
        ]
        for rank, model in enumerate(models):
            for index, p in enumerate(model):
                all_ranks = [own[index] for own in gradients]
                p.grad = reduce(all_ranks, rank) if reduce else sum(all_ranks) / world
        for optimizer in plain:
            optimizer.step()
    return [[p.detach() for p in model] for model in models]


def _averaged_weights(case: Case, call: int) -> list[list[torch.Tensor]]:
    """The parameters if ranks step alone and average weights after each step."""
    kind, options = OPTIMIZERS[case.inputs[0]["optimizers"][call]]
    models = [
        [torch.nn.Parameter(w.clone()) for w in case.inputs[0]["weights"][call]]
        for _ in range(case.world)
    ]
    plain = [kind(model, **options) for model in models]
    for step in range(len(case.inputs[0]["noise"][call])):
        for rank, (model, optimizer) in enumerate(zip(models, plain, strict=True)):
            noise = case.inputs[rank]["noise"][call][step]
            for p, drawn in zip(model, noise, strict=True):
                p.grad = drawn + 0.5 * p.detach()
            optimizer.step()
        with torch.no_grad():
            for same in zip(*models, strict=True):
                mean = sum(p.detach() for p in same) / case.world
                for p in same:
                    p.copy_(mean)
    return [[p.detach() for p in model] for model in models]


def _mixed_start(case: Case, call: int) -> list[list[torch.Tensor]]:
    """The parameters if each rank's shard is cut from weights of its own, with no broadcast."""
    kind, options = OPTIMIZERS[case.inputs[0]["optimizers"][call]]
    own = [rank["weights"][call] for rank in case.inputs]
    shards = [padded_shards(own[rank], case.world)[rank] for rank in range(case.world)]
    sizes = [w.numel() for w in own[0]]
    mixed = torch.cat(shards)[: sum(sizes)].split(sizes)
    model = [torch.nn.Parameter(m.view_as(w).clone()) for m, w in zip(mixed, own[0], strict=True)]
    plain = kind(model, **options)
    for step in range(len(case.inputs[0]["noise"][call])):
        for index, p in enumerate(model):
            parts = [
                case.inputs[rank]["noise"][call][step][index]
                + 0.5 * (p.detach() if step else own[rank][index])
                for rank in range(case.world)
            ]
            p.grad = sum(parts) / case.world
        plain.step()
    return [[p.detach() for p in model]] * case.world


MISTAKES: dict[str, Callable[[Case, int], list[list[torch.Tensor]]]] = {
    "each rank trained alone, from weights of its own: nothing was sent that mattered.": (
        lambda case, call: _trained(case, call, start=lambda r: r, reduce=lambda g, r: g[r])
    ),
    "each rank stepped on its own gradient. Reduce before the step.": (
        lambda case, call: _trained(case, call, reduce=lambda g, r: g[r])
    ),
    "the ranks began with weights of their own. Rank 0's must come to all before the first step.": (
        lambda case, call: _trained(case, call, start=lambda r: r)
    ),
    "each rank cut its shard out of weights of its own: bring rank 0's to all ranks first.": (
        _mixed_start
    ),
    "the gradients were added up, not averaged.": (
        lambda case, call: _trained(case, call, reduce=lambda g, r: sum(g))
    ),
    "weights were averaged after each step, not gradients before it: that is local SGD.": (
        _averaged_weights
    ),
}


def _repair_values(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        for steps, noise in zip(got["asked"], seen.case.inputs[0]["noise"], strict=True):
            if steps != list(range(len(noise))):
                return (
                    f"Rank {rank} called backward for the steps {steps}, and "
                    f"{list(range(len(noise)))} were expected: each step once, in order."
                )
    for call in range(len(seen.case.inputs[0]["weights"])):
        right = _trained(seen.case, call)
        for rank, got in enumerate(seen.data):
            local = got["after"][call]
            for index, (p, wanted) in enumerate(zip(local, right[rank], strict=True)):
                if (p.dtype, p.shape) != (wanted.dtype, wanted.shape):
                    return differs(p, wanted, f"Rank {rank}'s parameter {index}")
            if not _alike(local, right[rank]):
                return f"On rank {rank}: {_explain_repair(seen, call, rank, right[rank])}"
    return same_on_all_ranks(seen, lambda got: [p for call in got["after"] for p in call])


def _alike(
    local: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], rtol: float | None = None
) -> bool:
    rtol = rtol or (1e-9 if wanted[0].dtype == torch.float64 else 1e-4)
    return all(close(a, b, rtol=rtol) for a, b in zip(local, wanted, strict=True))


def _explain_repair(seen: Observed, call: int, rank: int, right: list[torch.Tensor]) -> str:
    local = seen.data[rank]["after"][call]
    if seen.case.world == 1:
        return "alone, it must be plain training. Does your flat buffer come back whole?"
    everywhere = [got["after"][call] for got in seen.data]
    for words, mistake in MISTAKES.items():
        if all(map(_alike, everywhere, mistake(seen.case, call))):
            return words
    first = [w for rank_ in (0, rank) for w in seen.case.inputs[rank_]["weights"][call]]
    still = [
        bool(torch.isclose(p.flatten(), w.flatten()).all())
        for p, w in zip([*local, *local], first, strict=True)
    ]
    if any(still):
        return "a parameter never moved. Do the updated shards come back into all parameters?"
    off = max((a - b).abs().max().item() for a, b in zip(local, right, strict=True))
    if right[0].dtype == torch.float64 and _alike(local, right, 1e-4):
        return f"the parameters are off by up to {off:.2g}: float64 was rounded on the way."
    return (
        f"the parameters are off by up to {off:.2g} from plain "
        f"{seen.case.inputs[0]['optimizers'][call]} "
        "on the mean gradient. Are all shards updated, and gathered before the next backward?"
    )


def _repair_bits(seen: Observed) -> str | None:
    (right,) = _trained(seen.case, 0)[:1]
    for rank, got in enumerate(seen.data):
        if not all(close(a, b, bitwise=True) for a, b in zip(got["after"][0], right, strict=True)):
            return (
                f"Rank {rank} is near DDP's parameters and not equal to them. With two ranks there "
                "is one order of adding: sum, then divide by N, then step."
            )
    return None


def _repair_states(seen: Observed) -> str | None:
    kinds = 1 if "SGD" in seen.case.inputs[0]["optimizers"][0] else 2
    for call, weights in enumerate(seen.case.inputs[0]["weights"]):
        psi, world = sum(w.numel() for w in weights), seen.case.world
        cut = sum(-(-w.numel() // world) for w in weights)  # who cuts each parameter pads each
        most = kinds * max(-(-psi // world), cut)
        held = [sum(got["states"][call]) for got in seen.data]
        if sum(held) < kinds * psi:
            return (
                f"All ranks together keep {sum(held)} numbers of state in optimizers of the class "
                f"that was given; {kinds * psi} are needed."
            )
        if world > 1 and min(held) >= kinds * psi:
            return f"Every rank keeps the states of all {psi} elements: nothing is sharded."
        for rank, own in enumerate(held):
            if own > most:
                return f"Rank {rank} keeps {own} numbers of state; its share is at most {most}."
    return None


def _repair_traffic(seen: Observed) -> str | None:
    if said := _repair_states(seen):
        return f"Traffic counts once the states are sharded. {said}"
    world, most = seen.case.world, 0
    for call, weights in enumerate(seen.case.inputs[0]["weights"]):
        steps = len(seen.case.inputs[0]["noise"][call])
        cut = sum(-(-w.numel() // world) for w in weights) * world  # padded
        size = weights[0].element_size()
        most += (steps * 2 + 1) * (world - 1) * cut * size  # and the broadcast at the start
    sent = sent_by_all(seen)
    if sent <= most:
        return None
    return (
        f"All ranks sent {sent:,} bytes with {ops_of_all(seen)}. A broadcast at the start, and in "
        f"each step gradients to their owners and parameters back, is {most:,}."
    )


REPAIR = Task(
    id="17.repair_the_article",
    title="The article's ZeRO, made right",
    answer="train",
    job="lesson17.repair",
    minutes=20,
    cases=_repair_cases,
    criteria=(
        Criterion("plain training on the mean gradient, from rank 0's weights", 2, _repair_values,
               on=("",)),
        Criterion("another optimizer, another dtype, called again", 1, _repair_values,
               on=("other", "again", "double")),
        Criterion("two ranks: DDP's parameters to the last bit", 1,
               lambda seen: _repair_bits(seen) if seen.case.world == 2 else None, on=("",)),
        Criterion("each rank keeps its share of the states", 2, _repair_states),
        Criterion("sends no more than an all-reduce in each step", 1, _repair_traffic),
    ),
    hints=(
        "Which lines of the article's loop send anything, and what would have to be sent where?",
        "Lay all parameters end to end in one padded buffer. An optimizer for one parameter, your "
        "own slice of it, has 1/N of the states.",
        "dist.broadcast each parameter from 0; then in each step: backward(step), flat gradient, "
        "reduce_scatter / world -> shard.grad, optimizer.step(), all_gather, copy back.",
    ),
    debrief="DeepSpeed's stage 1 and Megatron's distributed optimizer are this loop with buckets "
    "and overlap; with torch's ZeroRedundancyOptimizer behind DDP it is 3Ψ instead of 2Ψ.",
)  # fmt: skip

# -- 17.which_collective ---------------------------------------------------------------------------

Table = list[list[int]]
ROOTED = ("broadcast", "reduce", "gather", "scatter")
PIECES = ((0, 1), (1, 2), (2, 4))  # how slices cut 4 in 3
NAMES = (*ROOTED, "all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def results(name: str, before: Table) -> Iterator[Table]:
    """What the ranks may hold after a collective: one table, or for each root one."""
    world, size = len(before), len(before[0])
    total = [sum(column) for column in zip(*before, strict=True)]
    every = [value for row in before for value in row]
    part = size // world

    def own(row: list[int], rank: int) -> list[int]:
        return row[rank * part : (rank + 1) * part]

    if name in ("scatter", "reduce_scatter", "all_to_all") and size % world:
        return
    for root in range(world if name in ROOTED else 1):

        def at_root(row: list[int], root: int = root) -> Table:
            return [row if rank == root else list(before[rank]) for rank in range(world)]

        yield {
            "broadcast": lambda root=root: [list(before[root])] * world,
            "reduce": lambda at_root=at_root: at_root(total),
            "gather": lambda at_root=at_root: at_root(every),
            "scatter": lambda root=root: [own(before[root], rank) for rank in range(world)],
            "all_reduce": lambda: [total] * world,
            "all_gather": lambda: [every] * world,
            "reduce_scatter": lambda: [own(total, rank) for rank in range(world)],
            "all_to_all": lambda: [
                [value for row in before for value in own(row, rank)] for rank in range(world)
            ],
        }[name]()


def elements_sent(name: str, before: Table) -> int:
    """By all ranks together, as a ring or the least there is: in units of one element."""
    world, size = len(before), len(before[0])
    return {
        "all_reduce": 2 * (world - 1) * size,
        "all_gather": world * (world - 1) * size,
        "scatter": (world - 1) * size // world,
    }.get(name, (world - 1) * size)


def best(before: Table, after: Table) -> tuple[set[str | None], int]:
    """The cheapest collectives that make `after` of `before`, or {None}; and what they send."""
    if before == after:
        return {None}, 0
    fits = [name for name in NAMES if after in list(results(name, before))]
    least = min((elements_sent(name, before) for name in fits), default=0)
    return {name for name in fits if elements_sent(name, before) == least} or {None}, least


def _which_cases(rng: torch.Generator) -> list[Case]:
    def table(world: int, size: int) -> Table:
        return torch.randint(1, 90, (world, size), generator=rng).tolist()

    def result(name: str, before: Table) -> Table:
        there = list(results(name, before))
        return there[int(torch.randint(len(there), (), generator=rng))]

    def asked(names: Sequence[str], worlds: Sequence[int]) -> list[dict[str, Table]]:
        made = []
        for world in worlds:
            for name in names:
                before = table(world, 2 * world)
                made.append({"before": before, "after": result(name, before)})
        return made

    def zeros(world: int) -> dict[str, Table]:
        """The others have zeros: an all-reduce gives what the cheaper broadcast gives."""
        rows = [[0] * 4 for _ in range(world)]
        rows[-1] = table(1, 4)[0]
        return {"before": rows, "after": [list(rows[-1]) for _ in rows]}

    def exchanged(world: int) -> dict[str, Table]:
        """The same for pieces: a reduce_scatter gives what the cheaper scatter gives."""
        rows = [[0] * world for _ in range(world)]
        rows[-1] = table(1, world)[0]
        return {"before": rows, "after": [[value] for value in rows[-1]]}

    def nothing() -> list[dict[str, Table]]:
        one, same, other, odd = table(1, 3), table(3, 3), table(3, 3), table(3, 4)
        swapped = [same[1], same[0], same[2]]
        alike = [list(other[0]) for _ in range(3)]
        total = [sum(column) for column in zip(*odd, strict=True)]
        wrong = []  # each collective's result, but for the middle rank
        for name in NAMES:
            after = [list(row) for row in result(name, same)]
            after[1][0] += 100
            wrong.append({"before": same, "after": after})
        return [
            *wrong,
            {"before": same, "after": [list(row) for row in same]},
            {"before": alike, "after": [list(row) for row in alike]},  # a broadcast would do
            {"before": alike, "after": [[value] for value in alike[0]]},  # still a scatter
            {"before": one, "after": [list(one[0])]},
            {"before": other, "after": [[max(c) for c in zip(*other, strict=True)]] * 3},
            {"before": same, "after": swapped},
            {"before": odd, "after": [total[:1], total[1:2], total[2:]]},  # 3 does not divide 4
            {"before": odd, "after": [odd[1][:1], odd[1][1:2], odd[1][2:]]},
            {"before": odd, "after": [[value] for value in total[:3]]},  # the fourth is left
            {"before": odd, "after": [[x for r in odd for x in r[a:b]] for a, b in PIECES]},
        ]

    def roots(world: int) -> list[dict[str, Table]]:
        """Every root of what has one."""
        befores = {name: table(world, world) for name in ROOTED}
        return [
            {"before": before, "after": after}
            for name, before in befores.items()
            for after in results(name, before)
        ]

    sums = ("all_reduce", "reduce_scatter", "reduce")
    moves = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")
    return [
        Case("sums", [{"questions": asked(sums, (2, 3, 4))}]),
        Case(
            "copies and pieces",
            [{"questions": asked(moves, (2, 3, 4)) + roots(2) + roots(3) + roots(4)}],
            "moves",
        ),
        Case(
            "two ways that fit",
            [{"questions": [f(w) for w in (2, 3, 4) for f in (zeros, exchanged)]}],
            "cheap",
        ),
        Case("no single collective, or none needed", [{"questions": nothing()}], "none"),
    ]


def _which(seen: Observed) -> str | None:
    got = seen.data[0]
    for question, said in zip(seen.case.inputs[0]["questions"], got["answers"], strict=True):
        if wrong := _which_one(**question, said=said):
            return wrong
    return unchanged(seen)


def _which_one(before: Table, after: Table, said: Any) -> str | None:
    asked = f"{before} -> {after}"
    names, least = best(before, after)
    if said in names and (said is None or type(said) is str):
        return None
    if said == "barrier":
        return f"{asked}: a barrier moves no numbers; it only waits."
    if said is not None and said not in NAMES:
        return f"{asked}: {said!r} is none of {', '.join(NAMES)}, and not None."
    if names == {None}:
        if before == after:
            return f"{asked}: every rank has what it shall have. Nothing must be sent: None."
        return f"{asked}: {said} does not make this, and no other single one does: None."
    right = " or ".join(sorted(filter(None, names)))
    if said is None and all(row == before[0] for row in before):
        return (
            f"{asked}: None is for an `after` that equals `before`. Here each rank could make its "
            "row alone, and one collective makes all of them."
        )
    if said is None:
        return f"{asked}: there is one that makes this. Compare sums, copies and pieces."
    made = list(results(said, before))
    if after in made:
        return (
            f"{asked}: {said} makes this, and all ranks send "
            f"{elements_sent(said, before)} elements for it; another one makes it with {least}."
        )
    if said == "broadcast":
        return f"{asked}: broadcast copies the root's row over all others; it adds up nothing."
    if said == "all_reduce" and "reduce_scatter" in names:
        return f"{asked}: all_reduce leaves the whole sum on every rank; here each has its part."
    if said == "all_to_all":
        return f"{asked}: all_to_all sends every row in parts, so no rank gets a full row by it."
    if said in ("gather", "reduce") and right.startswith("all_"):
        return f"{asked}: {said} leaves its result on the root alone; here every rank has it."
    return (
        f"{asked}: {said} gives {made[0] if made else 'an error, for N does not divide the row'}."
    )


WHICH = Task(
    id="17.which_collective",
    title="Which collective?",
    answer="which_collective",
    job="lesson17.each",
    minutes=15,
    cases=_which_cases,
    criteria=(
        Criterion("sums: all_reduce, reduce, reduce_scatter", 2, _which, on=("",)),
        Criterion("copies and pieces", 2, _which, on=("moves",)),
        Criterion("the cheaper one where two fit", 1, _which, on=("cheap",)),
        Criterion("None where no single one does it, or none is needed", 1, _which, on=("none",)),
    ),
    hints=(
        "Could you compute, for one collective and one root, the table that it would leave?",
        "Compute that for all eight, with every root. Of those that give `after`, take the one for "
        "which all ranks together send least.",
        "n ranks, rows of k: all_reduce sends 2(n-1)k, all_gather n(n-1)k, scatter (n-1)k/n, all "
        "others (n-1)k. A scatter, reduce_scatter or all_to_all needs n to divide k.",
    ),
    debrief="Interviewers ask this as letters: Partial to Shard is a reduce_scatter, Shard to "
    "Replicate an all_gather, Partial to Replicate an all_reduce. DTensor's redistribute does so.",
)

# -- 17.estimate -----------------------------------------------------------------------------------

GB = 1e9
WITHIN = 0.05  # an estimate may be so far off, as a share
ACTIVATION = 34  # bytes per token, channel and layer: Korthikanti et al. 2022, section 4.1


def estimate(
    layers: int,
    width: int,
    vocab: int,
    context: int,
    batch: int,
    world: int,
    stage: int,
    gbit: float,
    tflops: float,
    *,
    kinds: tuple[int, int, int] = (2, 2, 12),
    activation: float = ACTIVATION,
    shared: float = 1.0,
    begins: tuple[int, int, int] = (3, 2, 1),
    unit: float = GB,
    bits: float = 8.0,
    elements: int = 2,
    factor: float | None = None,
    flops: float = 6.0,
    both: Callable[[float, float], float] = max,
) -> tuple[float, float, float]:
    """(GB on a rank, GB that it sends in a step, seconds of the step), or those of a mistake."""
    psi = 12 * layers * width**2 + 2 * vocab * width
    held = sum(
        size * psi / (world if stage >= first else 1)
        for size, first in zip(kinds, begins, strict=True)
    )
    held += activation * layers * batch * context * width * shared
    volume = (3 if stage == 3 else 2) * psi * elements
    sent = volume * ((world - 1) / world if factor is None else factor)
    network = sent * bits / (gbit * 1e9)
    compute = flops * psi * batch * context / (tflops * 1e12)
    return held / unit, sent / unit, both(compute, network)


def _jobs(rng: torch.Generator, count: int, **fixed: Any) -> list[dict[str, Any]]:
    def one_of(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=rng))]

    return [
        {
            "layers": one_of(12, 24, 32, 40),
            "width": one_of(768, 1024, 2048, 4096),
            "vocab": one_of(32_000, 50_257, 128_000),
            "context": one_of(512, 1024, 2048),
            "batch": one_of(1, 2, 4),
            "world": one_of(2, 3, 4, 8, 64),
            "stage": index % 4,
            "gbit": one_of(10.0, 100.0, 400.0),
            "tflops": one_of(60.0, 200.0, 400.0),
        }
        | fixed
        for index in range(count)
    ]


def _estimate_cases(rng: torch.Generator) -> list[Case]:
    plain = [job for stage in range(4) for job in _jobs(rng, 3, stage=stage)]
    alone = _jobs(rng, 4, world=1, gbit=100.0)
    slow = _jobs(rng, 4, gbit=1.0, tflops=400.0, batch=1, world=8)
    fast = _jobs(rng, 4, gbit=400.0, tflops=60.0, context=2048, batch=4)
    return [
        Case("twelve jobs", [{"questions": [_named(job) for job in plain]}]),
        Case("slow and fast networks", [{"questions": [_named(j) for j in slow + fast]}], "time"),
        Case("one rank", [{"questions": [_named(job) for job in alone]}], "alone"),
    ]


def _named(job: dict[str, Any]) -> dict[str, Any]:
    return {"job": job}


PARTS = ("memory", "sent", "seconds")
MEMORY: dict[str, dict[str, Any]] = {
    "These are the parameters alone: gradients, Adam's means and the fp32 copy lie there, too.": {
        "kinds": (2, 0, 0),
        "activation": 0,
        "begins": (9, 9, 9),
    },
    "Where are the activations? Backward needs those of every layer.": {"activation": 0},
    "Activations are those of this rank's own batch: no rank shares them.": {"shared": "1/N"},
    "Every stage divides more, and stage 0 nothing; this divides all by N, at every stage.": {
        "begins": (0, 0, 0)
    },
    "This divides nothing: which of 2, 2 and 12 bytes does the stage divide by N?": {
        "begins": (9, 9, 9)
    },
    "This is GiB. GB is 1e9 bytes.": {"unit": 2**30},
    "This is fp32's 4 + 4 + 8. Here it is 2 + 2 + 12, and from stage 1 the 12 are divided.": {
        "kinds": (4, 4, 8)
    },
}
SENT: dict[str, dict[str, Any]] = {
    "Numbers of 4 bytes: gradients and parameters travel in 2.": {"elements": 4},
    "This is GiB. GB is 1e9 bytes.": {"unit": 2**30},
    "All of Ψ, without the ring's (N − 1)/N.": {"factor": 1.0},
    "Stage 3 gathers parameters twice: 3Ψ. The other stages send 2Ψ.": {"stage": "other"},
    "These are bits: GB are asked.": {"unit": GB / 8},
}
SECONDS: dict[str, dict[str, Any]] = {
    "A network of 100 Gbit/s carries 12.5 GB in a second: bytes were taken for bits.": {
        "bits": 1.0
    },
    "Compute and network overlap: the step takes the longer of the two, not their sum.": {
        "both": lambda a, b: a + b
    },
    "The network alone: the step cannot be shorter than its arithmetic.": {"both": lambda a, b: b},
    "The arithmetic alone: the step cannot be shorter than its messages.": {"both": lambda a, b: a},
    "Forward alone takes 2 operations per parameter and token; with backward it is 6.": {
        "flops": 2.0
    },
}


def _estimated(index: int, mistakes: dict[str, dict[str, Any]]) -> Callable[[Observed], str | None]:
    """A judge of one of the three numbers."""

    def judge(seen: Observed) -> str | None:
        questions = [question["job"] for question in seen.case.inputs[0]["questions"]]
        given = [_number(answer, index) for answer in seen.data[0]["answers"]]
        for job, value in zip(questions, given, strict=True):
            if value is None:
                return f"{_told(job)}: the answer must be three numbers, (memory, sent, seconds)."
            right = estimate(**job)[index]
            if _near(value, right):
                continue
            said = f"{_told(job)}: {PARTS[index]} is {value:.3g}, more than 5% off."
            return f"{said} {_mistaken(questions, given, index, mistakes)}".rstrip()
        return None

    return judge


def _mistaken(
    questions: list[dict[str, Any]], given: list[Any], index: int, mistakes: dict[str, Any]
) -> str:
    """The mistake that gives all of these answers; else one that gives the first wrong one."""
    wrong = [
        (job, value)
        for job, value in zip(questions, given, strict=True)
        if value is not None and not _near(value, estimate(**job)[index])
    ]
    for pairs in (wrong, wrong[:1]):
        for words, changed in mistakes.items():
            if all(_near(value, _with(changed, job)[index], 0.02) for job, value in pairs):
                return words
    return "Take it apart: what is counted, and by what is each part divided?"


def _with(changed: dict[str, Any], job: dict[str, Any]) -> tuple[float, float, float]:
    """The estimate with one mistake, of which two depend on the job."""
    job, changed = dict(job), dict(changed)
    if changed.get("shared") == "1/N":
        changed["shared"] = 1 / job["world"]
    if changed.get("stage") == "other":
        job["stage"] = 2 if job["stage"] == 3 else 3
        del changed["stage"]
    return estimate(**job, **changed)


def _near(value: float, right: float, within: float = WITHIN) -> bool:
    return abs(value - right) <= within * abs(right)


def _number(answer: Any, index: int) -> float | None:
    if not isinstance(answer, list | tuple) or len(answer) != len(PARTS):
        return None
    return number(answer[index])


def _told(job: dict[str, Any]) -> str:
    return (
        f"{job['layers']} layers of {job['width']}, {job['vocab']:,} tokens of vocabulary, batch "
        f"{job['batch']} × {job['context']}, {world_name(job['world'])}, stage {job['stage']}, "
        f"{job['gbit']:g} Gbit/s, {job['tflops']:g} TFLOP/s"
    )


ESTIMATE = Task(
    id="17.estimate",
    title="An estimate within 5%",
    answer="estimate",
    job="lesson17.each",
    minutes=15,
    cases=_estimate_cases,
    criteria=(
        Criterion("GB on a rank, all stages", 2, _estimated(0, MEMORY), on=("",)),
        Criterion("GB that a rank sends in a step", 1, _estimated(1, SENT), on=("",)),
        Criterion("seconds of a step, slow and fast networks", 2, _estimated(2, SECONDS),
               on=("", "time")),
        Criterion("one rank sends nothing, and computes", 1,
               lambda seen: _estimated(1, SENT)(seen) or _estimated(2, SECONDS)(seen)
               or unchanged(seen), on=("alone",)),
    ),
    hints=(
        "What are the parts of each number, and which of them are divided by the world size?",
        "Ψ first. Memory is states by stage and activations; traffic is 2Ψ or 3Ψ numbers of "
        "2 bytes, times (N − 1)/N; time is the longer of arithmetic and messages.",
        "states: 2Ψ, 2Ψ and 12Ψ, divided by N from stages 3, 2 and 1. activations: 34 · layers · "
        "tokens · width. seconds: max(6Ψ · tokens / flops, 8 · bytes / bits per second).",
    ),
    debrief="Real runs are dearer by a third or so: fragmentation, kernels below their peak, "
    "messages that do not hide. A plan begins with these three numbers, and a trace corrects them.",
)  # fmt: skip

TASKS = [REPAIR, WHICH, ESTIMATE, FASTEST_ROUTE]
