"""Tasks of lesson 09: ZeRO-1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ddpz_lite.course.check.compare import close, differs, whole
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vocabulary import (
    holds_at_most,
    ops_of_all,
    same_on_all_ranks,
    sent_by_all,
    silent,
    unchanged,
    world_name,
)
from ddpz_lite.course.tasks.lesson09.job import OPTIMIZERS

# -- 09.shard_owners -------------------------------------------------------------------------------


LARGE = [900, 10, 20, 30, 10, 20, 5, 5]


def _owner_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, models: list[list[int]], says: str, kind: str = "") -> Case:
        return Case(f"{world_name(world)}, {says}", [{"models": models}] * world, kind)

    def drawn(count: int, high: int) -> list[int]:
        return torch.randint(1, high, (count,), generator=rng).tolist()

    return [
        case(
            3,
            [LARGE, sorted(drawn(14, 500)), drawn(6, 90), LARGE[::-1]],
            "one large parameter, the largest last, another model",
        ),
        case(1, [drawn(5, 100)], "5 parameters"),
        case(2, [drawn(9, 1000), [8, 7, 6, 5, 4]], "9 parameters, then 5"),
        case(4, [[*drawn(10, 300), 700, 650, 720, 640]], "4 large parameters at the end"),
        case(8, [drawn(30, 400)], "30 parameters"),
        case(4, [[7, 3], [4]], "fewer parameters than ranks", "few"),
        case(2, [[5] * 10, [5] * 7], "equal parameters", "few"),
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
    models = seen.case.inputs[0]["models"]
    for call, sizes in enumerate(models):
        first = seen.data[0]["owners"][call]
        for rank, got in enumerate(seen.data):
            owners = got["owners"][call]
            if wrong := _owner_form(owners, sizes, rank, seen.case.world):
                return wrong
            if list(map(whole, owners)) != list(map(whole, first)):
                return (
                    f"Ranks 0 and {rank} disagree on the owners. The result must not depend on "
                    "the rank."
                )
    return None


def _owner_form(owners: Any, sizes: list[int], rank: int, world: int) -> str | None:
    if type(owners) is not list or any(whole(owner) is None for owner in owners):
        return f"Rank {rank} must return a list of ranks, one for each parameter."
    if len(owners) != len(sizes):
        return f"Rank {rank} returned {len(owners)} owners for {len(sizes)} parameters."
    if bad := [owner for owner in owners if not 0 <= whole(owner) < world]:
        return f"{whole(bad[0])} is not a rank: no rank would update that parameter."
    return None


def _owner_balance(seen: Observed) -> str | None:
    calls = zip(seen.case.inputs[0]["models"], seen.data[0]["owners"], strict=True)
    message = (
        _unbalanced(sizes, list(map(whole, owners)), seen.case.world) for sizes, owners in calls
    )
    return next(filter(None, message), None)


def _unbalanced(sizes: list[int], owners: list[int], world: int) -> str | None:
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == r) for r in range(world)]
    best = _greedy_load(sizes, world)
    if max(loads) <= best:
        return None
    counts = [owners.count(rank) for rank in range(world)]
    largest_first = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    placed = dict(zip(largest_first, owners, strict=True))  # if they were meant in that order
    if max(sum(sizes[i] for i, o in placed.items() if o == r) for r in range(world)) <= best:
        return (
            "These are the owners in the order of the parameters from the largest to the "
            "smallest. Owner i must own the parameter of sizes[i]."
        )
    if max(loads) == sum(sizes):
        return f"Rank {loads.index(max(loads))} owns everything: nothing is sharded."
    if max(loads) != _in_turn(sizes, world) and max(counts) - min(counts) <= 1:
        return (
            f"The ranks own equally many parameters ({counts}), but not equally many elements: "
            f"{loads}. The fullest one could own {best}. Balance elements."
        )
    return (
        f"The fullest rank owns {max(loads)} elements, but {best} are possible: {loads}. Which "
        "parameter do you place first?"
    )


def _owner_quiet(seen: Observed) -> str | None:
    return silent(seen, "All ranks know all sizes, so do not send anything.") or unchanged(seen)


OWNERS = Task(
    id="09.shard_owners",
    title="Who owns which parameter?",
    answer="shard_owners",
    job="lesson09.shard_owners",
    minutes=10,
    cases=_owner_cases,
    criteria=(
        Criterion("every parameter has one owner, the same on all ranks", 1, _owner_values),
        Criterion("balanced by elements", 1, _owner_balance, on=("",)),
        Criterion("few parameters, equal parameters", 1, _owner_balance, on=("few",)),
        Criterion("nothing is sent, and sizes stay as they are", 1, _owner_quiet),
    ),
    hints=(
        "If a large parameter comes last, on which rank can you still place it without losing the "
        "balance?",
        "Place the largest first, each on the rank that has the fewest elements so far.",
        "order = sorted(range(len(sizes)), key=lambda i: -sizes[i]); for i in order: the rank with "
        "the smallest load gets it; ties go to the lowest rank, so that all agree.",
    ),
    debrief="ZeroRedundancyOptimizer does this, so one embedding can unbalance it. DeepSpeed and "
    "Megatron, like ddpz_lite, cut one flat range into equal parts instead.",
)

# -- 09.zero1 --------------------------------------------------------------------------------------

# 90, 91, 83, 59, 47 and 3 elements: no world from 2 to 5 divides their sum, and a sum that leaves
# one out, or takes one alone, is padded to another length in some world.
SHAPES = ((9, 10), (13, 7), (83,), (59,), (47,), (3,))
OTHER = ((5, 3), (41,), (6, 2))  # of a second model, and of a third
FEW = ((2,),)  # fewer parameters than ranks, and fewer elements
STEPS = 3
RTOL = 1e-4
COUNTERS = 64  # bytes: torch's optimizers count steps in a tensor for each parameter


def _numel(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


PSI = _numel(SHAPES)


def _zero1_cases(rng: torch.Generator) -> list[Case]:
    def drawn(shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        return [torch.randn(shape, generator=rng) for shape in shapes]

    def case(world: int, optimizer: str = "AdamW", kind: str = "", says: str = "") -> Case:
        shapes = (SHAPES, OTHER, OTHER, FEW) if kind == "again" else (SHAPES,)
        kinds = [optimizer, optimizer, "Adam", optimizer]  # each with options of its own
        models = [drawn(s) for s in shapes]
        inputs = [
            {
                "models": models,
                "gradients": [[drawn(s) for s in shapes] for _ in range(STEPS)],
                "optimizers": kinds[: len(shapes)],
                "turned": kind == "again",
            }
            for _ in range(world)
        ]
        if kind == "changed":
            for rank in inputs:  # more than any tensor of states holds
                rank["factors"] = [torch.randn(2 * PSI, generator=rng) for _ in range(STEPS)]
        return Case(f"{world_name(world)}, {optimizer}{says}", inputs, kind)

    return [
        case(3),
        case(4),
        case(2),
        case(1),
        case(5, "SGD with momentum", "other"),  # AdamW does not tell a sum from a mean
        case(3, kind="again", says=", four models in turn, transposed weights"),
        case(3, kind="changed", says=" whose states are changed"),
    ]


Gradients = Callable[[int, int, int], torch.Tensor]  # (step, rank, parameter)


def _weights(case: Case) -> list[torch.Tensor]:
    """Of all models, one after the other."""
    return [weight for model in case.inputs[0]["models"] for weight in model]


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
    parameters: list[torch.nn.Parameter] = []
    plain: list[torch.optim.Optimizer] = []
    for name, model in zip(case.inputs[0]["optimizers"], case.inputs[0]["models"], strict=True):
        own = [torch.nn.Parameter(w.clone()) for w in model]
        kind, options = OPTIMIZERS[name]
        plain.append(kind(own, **options))
        parameters += own
    for step in range(steps):
        for index, parameter in enumerate(parameters):
            parameter.grad = gradient(step, rank, index)
        for optimizer in plain:
            optimizer.step()
        if factors is not None:
            parts = factors[step].split([p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                plain[0].state[parameter]["exp_avg"] *= part.view_as(parameter)
    return [p.detach() for p in parameters]


def _stacked(case: Case) -> Callable[[int, int], torch.Tensor]:
    """(step, parameter) -> its gradients on all ranks, (N, *shape)."""
    by_rank = [
        [[gradient for model in step for gradient in model] for step in rank["gradients"]]
        for rank in case.inputs
    ]
    return lambda step, index: torch.stack([rank[step][index] for rank in by_rank])


def _on_the_mean(case: Case, steps: int, factors: Any = None) -> list[torch.Tensor]:
    stack = _stacked(case)
    return _trained(case, 0, lambda step, _, index: stack(step, index).mean(0), steps, factors)


def _zero1_values(seen: Observed) -> str | None:
    for step in range(STEPS):
        right = _on_the_mean(seen.case, step + 1)
        for rank, got in enumerate(seen.data):
            now = got["after"][step]
            for index, (local, wanted) in enumerate(zip(now, right, strict=True)):
                if (local.dtype, local.shape) != (wanted.dtype, wanted.shape):
                    return differs(local, wanted, f"Rank {rank}'s parameter {index}")
            if not all(close(a, b, rtol=RTOL) for a, b in zip(now, right, strict=True)):
                return f"After step {step} on rank {rank}: {_explain_zero1(seen.case, now, step)}"
    return same_on_all_ranks(seen, lambda got: got["after"][-1])


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.flatten() for t in tensors])


def _explain_zero1(case: Case, now: list[torch.Tensor], step: int) -> str:
    stack = _stacked(case)
    flat, start, good = map(_flat, (now, _weights(case), _on_the_mean(case, step + 1)))
    near = partial(torch.isclose, rtol=RTOL, atol=1e-5)
    moved, fine = ~torch.isclose(flat, start), near(flat, good)
    if not moved.any():
        return "the parameters have not changed. Do you copy the updated shares back into them?"
    if fine.any() and torch.equal(fine | ~moved, torch.ones_like(fine)):
        return (
            f"{int((~fine).sum())} of {len(flat)} elements have not changed. Which rank owns "
            "them, and do you gather the owners' updates afterwards?"
        )
    known: dict[str, Gradients] = {
        "the gradients were added up over the ranks, not averaged.": (
            lambda s, _, i: stack(s, i).sum(0)
        ),
        "the rank's own gradient was used: reduce before the step.": lambda s, r, i: stack(s, i)[r],
    }
    for words, gradient in known.items():  # any part may come from any rank
        pieces = [_flat(_trained(case, r, gradient, step + 1)) for r in range(case.world)]
        if torch.stack([near(flat, piece) for piece in pieces]).any(0).all():
            return words
    off = (flat - good).abs().max().item()
    return (
        f"the parameters are off by up to {off:.2g} from plain {case.inputs[0]['optimizers'][0]}."
    )


def _nothing_sharded(seen: Observed) -> bool:
    """Whether rank 0 of several keeps the states of all parameters."""
    kinds = 2 if seen.case.inputs[0]["optimizers"][0] == "AdamW" else 1
    held = sum(state.numel() for state in seen.data[0]["states"])
    return seen.case.world > 1 and held >= kinds * sum(w.numel() for w in _weights(seen.case))


def _zero1_states(seen: Observed) -> str | None:
    kinds = 2 if seen.case.inputs[0]["optimizers"][0] == "AdamW" else 1
    shares = [_most_elements(model, seen.case.world) for model in seen.case.inputs[0]["models"]]
    psi, most = sum(w.numel() for w in _weights(seen.case)), kinds * sum(shares)
    if _nothing_sharded(seen):
        return f"Rank 0 keeps states of all {psi} parameters: nothing is sharded."
    total = 0
    for rank, got in enumerate(seen.data):
        held = sum(state.numel() for state in got["states"])
        total += held
        if held > most and seen.case.world > 1:
            return f"Rank {rank} keeps {held} state elements; its share is at most {most}."
    if total < kinds * psi:
        return f"All ranks together keep {total} state elements; {kinds * psi} are needed."
    bytes_ = 4 * (kinds + 2) * sum(shares) + COUNTERS * len(shares)
    why = "between steps, its share of the states and a copy of its parameters and gradients"
    return holds_at_most(seen, lambda got: got["held"], bytes_, why) or (
        _zero1_used(seen) if seen.case.kind == "changed" else None
    )


def _zero1_used(seen: Observed) -> str | None:
    """Whether the states that were found make the step: they were changed, each element by a factor
    that its rank alone knows, and the parameters must follow.

    Any cut is allowed. Which element a rank holds is seen from its value after the first step.
    """
    case, stack = seen.case, _stacked(seen.case)
    for rank, got in enumerate(seen.data):
        if sum(state.numel() for state in got["first"]) > _most_elements(
            _weights(case), case.world
        ):
            return f"Rank {rank} keeps states of more than its share."
    begun = 0.1 * _flat([stack(0, index).mean(0) for index in range(len(SHAPES))])  # 1 - beta1
    factors = _factors(seen, begun)
    if factors.isnan().any():  # a sum in place of the mean is another criterion's business
        factors = _factors(seen, begun * case.world)
    if left := int(factors[0].isnan().sum()):
        return f"After the first step, {left} elements have no exp_avg on any rank."
    right = _on_the_mean(case, STEPS, list(factors))
    for rank, got in enumerate(seen.data):
        if not all(close(a, b, rtol=RTOL) for a, b in zip(got["after"][-1], right, strict=True)):
            return (
                "The check changed each rank's exp_avg between steps, but this had no effect on "
                f"rank {rank}'s parameters. Make the step with the states that you keep."
            )
    return None


def _factors(seen: Observed, begun: torch.Tensor) -> torch.Tensor:
    """(STEPS, PSI): by what each element's exp_avg was multiplied after each step, NaN where no
    rank has it. begun: what it is after the first step, as one process has it.
    """
    factors = torch.full((STEPS, PSI), torch.nan)
    for inputs, got in zip(seen.case.inputs, seen.data, strict=True):
        given = torch.stack(inputs["factors"])
        for state in got["first"]:
            off, element = (begun - state.flatten()[:, None]).abs().min(1)
            held = (state.flatten() != 0) & (off <= 1e-6)  # else padding
            factors[:, element[held]] = given[:, : len(held)][:, held]
    return factors


def _most_elements(weights: Sequence[torch.Tensor], world: int) -> int:
    """A rank's share: a flat range rounded up, whole parameters assigned greedily, or each
    parameter cut in N and rounded up.
    """
    sizes = [weight.numel() for weight in weights]
    cut = sum(-(-size // world) for size in sizes)
    return max(-(-sum(sizes) // world), _greedy_load(sizes, world), cut)


def _zero1_traffic(seen: Observed) -> str | None:
    if _nothing_sharded(seen):
        return "Traffic is counted when the states are sharded."
    world = seen.case.world
    padded = world * sum(_most_elements(m, world) for m in seen.case.inputs[0]["models"])
    most = STEPS * 2 * (world - 1) * padded * 4  # bytes of all ranks
    start = (world - 1) * padded * 4  # an answer may broadcast the parameters at first
    sent = sent_by_all(seen)
    if sent <= most + start:
        return None
    return (
        f"All ranks sent {sent:,} bytes in three steps with {ops_of_all(seen)}. Sending gradients "
        f"to their owners and parameters back to all ranks takes {most:,}, as much as one "
        "all-reduce."
    )


ZERO1 = Task(
    id="09.zero1",
    title="A ZeRO-1 optimizer",
    answer="ZeRO1",
    job="lesson09.zero1",
    minutes=30,
    cases=_zero1_cases,
    criteria=(
        Criterion(
            "the parameters of plain SGD on the mean gradient", 1, _zero1_values, on=("other",)
        ),
        Criterion("the same with AdamW", 1, _zero1_values, on=("",)),
        Criterion("several models, few parameters, any layout", 1, _zero1_values, on=("again",)),
        Criterion("a rank keeps the states of its share alone", 3, _zero1_states),
        Criterion("sends no more than an all-reduce", 2, _zero1_traffic),
    ),
    hints=(
        "Which elements does rank r update? Which gradients does it need, and which ranks need "
        "its result?",
        "Lay parameters and gradients end to end and pad: a flat buffer of N equal shares. The "
        "inner optimizer has one parameter, this rank's share.",
        "step: flat gradient -> reduce_scatter (given) / world -> share.grad; optimizer.step() on "
        "the share; all_gather (given) of the shares; copy back into the parameters. With whole "
        "parameters: dist.reduce to the owner; the owner steps; dist.broadcast.",
    ),
    debrief="ZeroRedundancyOptimizer behind DDP pays 3Ψ: an all-reduce, then broadcasts. "
    "ddpz_lite's "
    "zero1.py keeps the flat buffer all the time, so nothing is copied.",
)

# -- 09.muon ---------------------------------------------------------------------------------------

MATRICES = ((12, 7), (5, 5), (3, 4), (9, 11), (6, 2), (7, 8))
TWO = ((6, 9), (8, 3))
RATES = (0.1, 0.03, 0.2)
BETA = 0.95
PRODUCTS = 15  # of matrices, in one orthogonalisation
MUON_RTOL = 1e-3  # small singular values grow by 3.4 in each of five iterations


def _newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Jordan et al. 2024: a nearly orthogonal matrix of the same singular vectors."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _muon_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, shapes: Sequence[tuple[int, ...]], kind: str = "") -> Case:
        def drawn() -> list[torch.Tensor]:
            return [torch.randn(shape, generator=rng) for shape in shapes]

        weights = drawn()
        factors = (0.2 + 3 * torch.rand(len(RATES), len(shapes), generator=rng)).tolist()
        inputs = [
            {
                "weights": weights,
                "gradients": [drawn() for _ in RATES],
                "rates": list(RATES),
                "factors": factors,
            }
            for _ in range(world)
        ]
        return Case(f"{world_name(world)}, {len(shapes)} matrices", inputs, kind, timeout=20.0)

    return [case(3, MATRICES), case(2, MATRICES), case(4, MATRICES), case(1, MATRICES),
            case(4, TWO, "few")]  # fmt: skip


Direction = Callable[[list[torch.Tensor], int], torch.Tensor]


def _muon(case: Case, steps: int, mean: bool = True, rank: int = 0, **changed: Any) -> list:
    """The matrices after some steps, or what a mistake makes of them.

    mean: of the gradients before anything else. changed: "beta", "rate", "direction".
    """
    one = case.inputs[0]
    weights, momenta = [w.clone() for w in one["weights"]], [0.0] * len(one["weights"])
    direction = changed.get("direction", _newton_schulz)
    for step in range(steps):
        for i, weight in enumerate(weights):
            own = torch.stack([r["gradients"][step][i] for r in case.inputs])
            gradient = own.mean(0) if mean else own[rank]
            momenta[i] = changed.get("beta", BETA) * momenta[i] + gradient
            weight -= changed.get("rate", one["rates"][step]) * direction(momenta[i])
            momenta[i] = momenta[i] * one["factors"][step][i]
    return weights


def _in_rows(world: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda m: torch.cat([_newton_schulz(p) if len(p) else p for p in m.tensor_split(world)])


def _muon_values(seen: Observed) -> str | None:
    case = seen.case
    for step in range(len(RATES)):
        right = _muon(case, step + 1)
        for rank, got in enumerate(seen.data):
            now = got["steps"][step]["weights"]
            for index, (local, wanted) in enumerate(zip(now, right, strict=True)):
                what = f"After step {step}, rank {rank}'s matrix {index}"
                if wrong := differs(local, wanted, what, rtol=MUON_RTOL):
                    return _explain_muon(case, local, step, rank, index, what) or wrong
    return same_on_all_ranks(seen, lambda got: got["steps"][-1]["weights"])


def _explain_muon(
    case: Case, local: torch.Tensor, step: int, rank: int, index: int, what: str
) -> str | None:
    def near(other: torch.Tensor) -> bool:
        return close(local, other, rtol=MUON_RTOL)

    before = _muon(case, step)[index]
    if near(before):
        return f"{what} has not moved. Does its owner send the new one to all ranks?"
    moved = (local - before) / -case.inputs[0]["rates"][step]
    own = [r["gradients"][step][index] for r in case.inputs]
    mean = torch.stack(own).mean(0)
    if step == 0 and close(
        moved, torch.stack([_newton_schulz(g) for g in own]).mean(0), rtol=2 * MUON_RTOL
    ):
        return (
            f"{what} moved by the mean of matrices that each rank orthogonalised alone. Average "
            "the gradients first, then orthogonalise."
        )
    if step and close(moved, _newton_schulz(mean), rtol=2 * MUON_RTOL):
        return f"{what} moved by the last gradient alone. Keep the momentum in momenta[i]."
    alone = [_muon(case, step + 1, mean=False, rank=r)[index] for r in range(case.world)]
    if any(map(near, alone)):
        return f"{what} is that of one rank's gradient: average over the ranks first."
    mistakes: dict[str, Any] = {
        "was orthogonalised in slices of its rows. Each row depends on the other slices, so one "
        "rank needs the whole matrix.": {"direction": _in_rows(case.world)},
        "moved by the momentum as it is: it was not orthogonalised.": {"direction": torch.clone},
        "moved with an earlier learning rate. Use the `lr` of this call.": {"rate": RATES[0]},
    }  # fmt: skip
    for words, mistake in mistakes.items():
        if near(_muon(case, step + 1, **mistake)[index]):
            return f"{what} {words}"
    if step:
        return (
            f"{what} is wrong, but was right after step 0. Add to the momentum that is in "
            "momenta[i], and orthogonalise only the result."
        )
    return None


def _muon_owned(seen: Observed, step: int) -> list[list[int]]:
    """For each rank the matrices whose momentum it has."""
    return [
        [i for i, there in enumerate(got["steps"][step]["momenta"]) if there] for got in seen.data
    ]


def _muon_owners(seen: Observed) -> str | None:
    sizes = [w.numel() for w in seen.case.inputs[0]["weights"]]
    for step in range(len(RATES)):
        owned = _muon_owned(seen, step)
        for index in range(len(sizes)):
            ranks = [rank for rank, own in enumerate(owned) if index in own]
            if len(ranks) != 1:
                return (
                    f"After step {step} the momentum of matrix {index} is on "
                    f"{world_name(len(ranks))}; it belongs on one."
                )
        if owned != _muon_owned(seen, 0):
            return f"In step {step} the matrices have other owners than in step 0."
        for rank, (got, own) in enumerate(zip(seen.data, owned, strict=True)):
            if got["steps"][step]["products"] > PRODUCTS * len(own):
                return (
                    f"Rank {rank} owns {len(own)} matrices and orthogonalised "
                    f"{got['steps'][step]['products'] // PRODUCTS}. Leave the others to their "
                    "owners."
                )
    for got, own in zip(seen.data, _muon_owned(seen, 0), strict=True):
        most = 4 * sum(sizes[i] for i in own)
        if got["held"] > most + COUNTERS:
            return f"A rank holds {got['held']:,} bytes; the momenta of its matrices are {most:,}."
    return None


def _muon_balance(seen: Observed) -> str | None:
    sizes = [w.numel() for w in seen.case.inputs[0]["weights"]]
    loads = [sum(sizes[i] for i in own) for own in _muon_owned(seen, 0)]
    best = _greedy_load(sizes, seen.case.world)
    if max(loads) <= best:
        return None
    return f"The ranks own {loads} elements; {best} are possible for the fullest. See task 1."


def _muon_traffic(seen: Observed) -> str | None:
    numbers = sum(w.numel() for w in seen.case.inputs[0]["weights"])
    numbers = len(RATES) * numbers + seen.case.inputs[0]["weights"][0].numel()  # another model's
    most = 3 * numbers * (seen.case.world - 1) * 4
    sent = sent_by_all(seen)
    if sent <= most:
        return None
    return (
        f"All ranks sent {sent:,} bytes in all steps with {ops_of_all(seen)}; 3Ψ(N-1) numbers a "
        f"step are {most:,}."
    )


MUON = Task(
    id="09.muon",
    title="Muon under ZeRO-1",
    answer="muon_step",
    job="lesson09.muon",
    minutes=15,
    cases=_muon_cases,
    criteria=(
        Criterion("the matrices of Muon on the mean gradient", 2, _muon_values, on=("",)),
        Criterion("fewer matrices than ranks", 1, _muon_values, on=("few",)),
        Criterion("each matrix and its momentum on one rank", 2, _muon_owners),
        Criterion("balanced by elements", 1, _muon_balance),
        Criterion("each rank sends at most 3Ψ(N-1)/N on average", 1, _muon_traffic),
    ),
    hints=(
        "AdamW's update of an element needs that element alone. What does an element of Muon's "
        "update need?",
        "A flat cut is useless here. Give whole matrices to owners, the largest first; an owner "
        "needs the gradients of all ranks for its matrices.",
        "for each matrix: dist.reduce(gradient, dst=owner); the owner updates momenta[i] and the "
        "matrix; dist.broadcast(matrix, src=owner).",
    ),
    debrief="Moonlight's distributed Muon keeps ZeRO-1's flat cut and gathers each matrix before "
    "the iteration (Liu et al. 2025). AdamW takes what is not a matrix: embeddings, norms, biases.",
)

TASKS = [OWNERS, ZERO1, MUON]
