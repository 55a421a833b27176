"""Tasks of lesson 19: experts that lie on different ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddpz_lite.course.check.compare import close, differs, number, whole
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vary import drawn_again, lengthened
from ddpz_lite.course.check.vocabulary import (
    all_in_spans,
    each_call,
    explain,
    explain_number,
    unchanged,
    world_name,
)

Call = dict[str, Any]


# -- 19.route --------------------------------------------------------------------------------------


def _route_cases(rng: torch.Generator) -> list[Case]:
    def call(
        tokens: int,
        experts: int,
        k: int,
        capacity: int,
        by: str = "arrival",
        dtype: torch.dtype = torch.float32,
        times: float = 1.0,
        steps: float = 0.0,
    ) -> Call:
        """steps: the logits are multiples of it, so that many are equal; 0: none are."""
        logits = times * torch.randn(tokens, experts, generator=rng)
        if steps:
            logits = (logits / steps).round() * steps
        return {"logits": logits.to(dtype), "k": k, "capacity": capacity, "by": by}

    def case(says: str, kind: str, *calls: Call) -> Case:
        return Case(says, [{"calls": list(calls)}], kind)

    def again(_: int, first: Call) -> Call:
        return drawn_again(first, rng, "logits") | {"k": 3, "capacity": 2, "by": "weight"}

    plain = case("no choice dropped", "", call(7, 5, 2, 20))
    lengthened(plain.inputs, "calls", lambda _, first: drawn_again(first, rng, "logits") | {"k": 1})
    arrival = case("in order of arrival", "arrival", call(9, 4, 2, 3), call(8, 3, 1, 2))
    weight = case("by weight", "weight", call(9, 4, 2, 3, "weight"), call(8, 3, 1, 2, "weight"))
    lengthened(arrival.inputs, "calls", again)
    half = torch.float16
    return [
        plain,
        arrival,
        weight,
        case(
            "equal logits",
            "ties",
            call(12, 20, 3, 40, steps=1.0),
            call(12, 4, 2, 4, steps=1.0),
            call(12, 4, 2, 4, "weight", steps=2.0),
            call(40, 4, 1, 5, "weight", steps=2.0),
        ),
        case(
            "float16, large logits, one expert, no token",
            "other",
            call(9, 5, 2, 3, dtype=half),
            call(9, 5, 3, 20, dtype=half, times=9000.0),
            call(6, 5, 4, 3, times=300.0),
            call(6, 5, 4, 3, "weight", times=300.0),
            call(5, 1, 1, 2),
            call(0, 4, 2, 1),
            call(0, 4, 2, 1, "weight"),
            call(4, 3, 3, 1, "weight"),
        ),
    ]


def _routed(
    call: Call,
    *,
    by: str | None = None,
    capacity: int | None = None,
    rounds: bool = False,
    divided: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What to return; or what comes of a mistake. rounds: all first choices before all second ones.
    divided: weights of a token add up to 1.
    """
    logits, k = call["logits"], call["k"]
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = logits.float().softmax(-1).gather(-1, order)
    if divided:
        weights = weights / weights.sum(-1, keepdim=True)
    experts, flat = order.flatten(), weights.flatten()
    queue = list(range(len(experts)))
    if rounds:
        queue.sort(key=lambda choice: choice % k)
    if (by or call["by"]) == "weight":
        queue = flat.argsort(descending=True, stable=True).tolist()
    free = [call["capacity"] if capacity is None else capacity] * logits.shape[1]
    for choice in queue:
        expert = int(experts[choice])
        if free[expert] > 0:
            free[expert] -= 1
        else:
            experts[choice], flat[choice] = -1, 0.0
    return experts.view(-1, k), flat.view(-1, k)


def _route_call(seen: Observed, index: int) -> str | None:
    call, got = seen.case.inputs[0]["calls"][index], seen.data[0]["results"][index]
    if type(got) is not list or len(got) != 2:
        return "Return two tensors, (experts, weights)."
    experts, weights = _routed(call)
    if wrong := differs(got[0], experts, "experts"):
        return _wrong_experts(call, got[0]) or wrong
    kept = experts >= 0
    _, all_weights = _routed(call, capacity=10**9)
    _, divided = _routed(call, divided=True)
    narrow = torch.where(
        kept,
        call["logits"].softmax(-1).float().gather(-1, experts.clamp(min=0)),
        torch.zeros(()),
    )
    top = call["logits"].float().gather(-1, experts.clamp(min=0))
    mistakes = {
        "is not 0 where a choice was dropped.": all_weights,
        "adds up to 1 for each token: a softmax over all experts was asked for.": divided,
        "is a softmax over the k chosen alone.": torch.where(
            kept, top.softmax(-1), torch.zeros(())
        ),
        "comes from a softmax in float16: compute it in float32.": narrow,
        "holds logits, not probabilities.": torch.where(kept, top, torch.zeros(())),
    }
    return explain(got[1], weights, "weights", mistakes)


def _wrong_experts(call: Call, got: Any) -> str | None:
    other = {"weight": "arrival", "arrival": "weight"}[call["by"]]
    full = 10**9
    mistakes = {
        "No choice was dropped, and an expert takes at most `capacity`.": {"capacity": full},
        f"The choices that remain are those by {other}, not by {call['by']}.": {"by": other},
        "All first choices come before all second ones. They arrive token by token.": {
            "rounds": True
        },
        "An expert takes one choice less than its capacity.": {"capacity": call["capacity"] - 1},
        "An expert takes one choice more than its capacity.": {"capacity": call["capacity"] + 1},
    }
    for words, slip in mistakes.items():
        if close(got, _routed(call, **slip)[0]):
            return words
    chosen, _ = _routed(call, capacity=full)
    if type(got) is torch.Tensor and got.shape == chosen.shape and got.dtype == chosen.dtype:
        ranked = call["logits"].gather(-1, got.clamp(min=0))
        if close(ranked, call["logits"].gather(-1, chosen), bitwise=True) and not close(
            got, chosen
        ):
            return "Of equal logits, the expert with the lower number comes first."
        if close(got.sort(-1).values, chosen.sort(-1).values):
            return "The experts are right, and the one with the largest logit comes first."
    return None


ROUTE = Task(
    id="19.route",
    title="Choose experts",
    answer="route",
    job="lesson19.route",
    minutes=15,
    cases=_route_cases,
    criteria=(
        Criterion("the k largest, and their probabilities", 2, each_call(_route_call), on=("",)),
        Criterion("capacity in order of arrival", 2, each_call(_route_call), on=("arrival",)),
        Criterion("capacity by weight", 1, each_call(_route_call), on=("weight",)),
        Criterion("equal logits and weights", 1, each_call(_route_call), on=("ties",)),
        Criterion("float16, any size, no token", 1, each_call(_route_call), on=("other",)),
        Criterion("the arguments stay as they are", 1, unchanged),
    ),
    hints=(
        "In which order do the choices arrive, as one list? Which view of (tokens, k) is that?",
        "sort(descending=True, stable=True) keeps equal values in order, topk promises nothing. "
        "Probabilities may be equal where logits are not: sort the logits.",
        "experts.flatten() is the order of arrival; by weight, the queue is the stable argsort of "
        "the flat weights. Walk the queue with a count of free places for each expert.",
    ),
    debrief="Switch drops by arrival, so the last tokens of a batch lose most; V-MoE drops by "
    "weight. Both loops are cumulative sums of a one-hot matrix on a GPU. Models without a "
    "capacity drop nothing, and their fullest expert sets the time.",
)

# -- 19.dispatch_combine ---------------------------------------------------------------------------


def _dispatch_cases(rng: torch.Generator) -> list[Case]:
    def chosen(tokens: int, k: int, allowed: Sequence[int], dropped: float) -> torch.Tensor:
        rows = [
            torch.tensor(allowed)[torch.randperm(len(allowed), generator=rng)[:k]]
            for _ in range(tokens)
        ]
        experts = torch.stack(rows) if rows else torch.empty(0, k, dtype=torch.int64)
        experts[torch.rand(experts.shape, generator=rng) < dropped] = -1
        return experts

    def calls(
        tokens: Sequence[int],
        each: int,
        k: int = 2,
        h: int = 4,
        dtype: torch.dtype = torch.float32,
        dropped: float = 0.2,
        allowed: Sequence[int] = (),
    ) -> list[Call]:
        """One call, for each rank. each: experts of a rank; allowed: the only ones chosen."""
        world = len(tokens)
        made = []
        for n in tokens:
            experts = chosen(n, k, allowed or range(world * each), dropped)
            weights = torch.rand(n, k, generator=rng) + 0.1
            made.append(
                {
                    "tokens": torch.randn(n, h, generator=rng).to(dtype),
                    "experts": experts,
                    "weights": torch.where(experts < 0, torch.zeros(()), weights).to(dtype),
                    "number": world * each,
                    "matrices": torch.randn(each, h, h, generator=rng).to(dtype),
                    "upstream": torch.randn(n, h, generator=rng).to(dtype),
                }
            )
        return made

    def case(says: str, kind: str, *every: list[Call]) -> Case:
        world = len(every[0])
        inputs = [{"calls": [one[rank] for one in every]} for rank in range(world)]
        return Case(f"{world_name(world)}{says}", inputs, kind)

    def again(_: int, first: Call) -> Call:
        names = ("tokens", "matrices", "upstream")
        experts = (first["experts"] + 1) % first["number"]
        experts[first["experts"] < 0] = -1
        weights = first["weights"] * 0.5
        return drawn_again(first, rng, *names) | {"experts": experts, "weights": weights}

    varied = case(", 2 experts each, 5, 3 and 4 tokens", "", calls((5, 3, 4), 2))
    lengthened(varied.inputs, "calls", again)
    return [
        varied,
        case(", one expert each", "", calls((3, 6, 2, 4), 1), calls((4, 4, 4, 4), 1, k=1)),
        case(", 3 experts each", "", calls((4, 5), 3, k=3, h=5)),
        case(", 4 experts", "", calls((6,), 4, dropped=0.0)),
        case(
            ", ranks without tokens and experts without tokens",
            "edge",
            calls((5, 0, 4), 2),
            calls((4, 3, 5), 2, allowed=(0, 1)),
            calls((4, 3, 5), 2, allowed=(3, 4)),
            calls((4, 3, 5), 2, dropped=1.0),
            calls((0, 0, 0), 2),
            calls((0, 6, 0), 1, k=1, allowed=(2,)),
        ),
        case(", float64", "other", calls((3, 4), 2, k=3, dtype=torch.float64)),
    ]


Mixed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _whole(case: Case, index: int) -> dict[str, list[torch.Tensor]]:
    """In one process: for each rank the result and the gradients."""
    calls = [given["calls"][index] for given in case.inputs]
    leaves = {
        name: [call[name].double().clone().requires_grad_() for call in calls]
        for name in ("tokens", "weights", "matrices")
    }
    every = torch.cat(leaves["matrices"])
    outs = []
    for rank, call in enumerate(calls):
        out = _mixed(leaves["tokens"][rank], call["experts"], leaves["weights"][rank], every)
        outs.append(out)
        out.backward(call["upstream"].double(), retain_graph=True)
    dtype = calls[0]["tokens"].dtype
    grads = {
        name: [(torch.zeros_like(x) if x.grad is None else x.grad).to(dtype) for x in xs]
        for name, xs in leaves.items()
    }
    return {"out": [out.detach().to(dtype) for out in outs], **grads}


def _mixed(
    tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, every: torch.Tensor
) -> torch.Tensor:
    made = torch.tanh(torch.einsum("nh,nkhj->nkj", tokens, every[experts.clamp(min=0)]))
    return (made * (weights * (experts >= 0))[..., None]).sum(1)


def _dispatch_out(seen: Observed, index: int) -> str | None:
    case, world = seen.case, seen.case.world
    right = _whole(case, index)["out"]
    calls = [given["calls"][index] for given in case.inputs]
    every = torch.cat([call["matrices"] for call in calls]).double()
    for rank, got in enumerate(seen.data):
        call, result = calls[rank], got["results"][index]["out"]
        tokens, experts, weights = (
            call["tokens"].double(),
            call["experts"],
            call["weights"].double(),
        )
        each = len(call["matrices"])
        here = torch.where(experts // each == rank, weights, torch.zeros((), dtype=torch.float64))
        ones = torch.ones_like(weights)
        mistakes = {
            "is not multiplied by the weights.": _mixed(tokens, experts, ones, every),
            "is the mean over the choices, and not weighted.": (
                _mixed(tokens, experts, ones, every) / experts.shape[1]
            ),
            "lacks what experts on other ranks make of the tokens.": _mixed(
                tokens, experts, here, every
            ),
            "has the first choice alone.": _mixed(tokens, experts[:, :1], weights[:, :1], every),
            "is that of the wrong experts: every rank used its own in place of those chosen.": (
                _mixed(
                    tokens,
                    torch.where(experts < 0, experts, experts % each + rank * each),
                    weights,
                    every,
                )
            ),
            "weighs the tokens before the experts see them.": torch.stack(
                [
                    _mixed(
                        tokens * weights[:, i : i + 1], experts[:, i : i + 1], ones[:, :1], every
                    )
                    for i in range(experts.shape[1])
                ]
            ).sum(0),
            "treats -1 as the last expert: a dropped choice adds nothing.": _mixed(
                tokens, experts % call["number"], ones, every
            ),
        }
        if world == 1:
            mistakes = {w: v for w, v in mistakes.items() if "rank" not in w}
        given = {words: value.to(right[rank].dtype) for words, value in mistakes.items()}
        what = f"Rank {rank}'s result"
        if wrong := explain(result, right[rank], what, given):
            if type(result) is torch.Tensor and _other_order(result, right[rank]):
                return f"{what} has the right rows in another order: bring each back to its token."
            return wrong
    return None


def _other_order(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    return close(*(t[t[:, 0].argsort()] for t in (got, wanted)))


def _dispatch_grads(seen: Observed, index: int) -> str | None:
    case, world = seen.case, seen.case.world
    right = _whole(case, index)
    names = {"matrices": "experts", "weights": "weights", "tokens": "tokens"}
    for rank, got in enumerate(seen.data):
        for name, shown in names.items():
            wanted, had = right[name][rank], got["results"][index][name]
            what = f"The gradient of rank {rank}'s {shown}"
            if had is None:
                if not wanted.any():
                    continue
                return f"{what} is None: the graph ends where rows travel."
            mistakes = {
                "is larger by the number of ranks.": wanted * world,
                "is smaller by the number of ranks: the rows were exchanged, not averaged.": (
                    wanted / world
                ),
                "is zero.": torch.zeros_like(wanted),
            }
            if wrong := explain(had, wanted, what, mistakes if world > 1 else {}):
                return wrong
    return None


def _dispatch_both(seen: Observed) -> str | None:
    return each_call(_dispatch_out)(seen) or each_call(_dispatch_grads)(seen)


def _dispatch_traffic(seen: Observed) -> str | None:
    return all_in_spans(seen) or each_call(_dispatch_messages)(seen)


def _dispatch_messages(seen: Observed, index: int) -> str | None:
    case, world = seen.case, seen.case.world
    calls = [given["calls"][index] for given in case.inputs]
    each = len(calls[0]["matrices"])
    row = calls[0]["tokens"].shape[1] * calls[0]["tokens"].element_size()
    to = [[int((call["experts"] // each == r).sum()) for r in range(world)] for call in calls]
    for rank in range(world):
        out = sum(to[rank]) - to[rank][rank]
        back = sum(to[r][rank] for r in range(world)) - to[rank][rank]
        counts = 8 * each * (world - 1)
        for during, most, rounds in (
            (f"call {index}", (out + back) * row + counts, 3),
            (f"backward {index}", (out + back) * row, 2),
        ):
            made = seen.calls(rank, during)
            place = during.partition(" ")[0].replace("call", "forward")
            if other := [c.op for c in made if c.op != "all_to_all"]:
                return f"Rank {rank} called {other[0]} in {place}: all-to-alls are enough."
            if len(made) > rounds:
                return f"Rank {rank} made {len(made)} all-to-alls in {place}; {rounds} are enough."
            if (sent := sum(c.bytes_sent for c in made)) > most:
                return (
                    f"Rank {rank} sent {sent:,} bytes in {place}. The rows for other ranks, those "
                    f"that go back and the counts are {most:,}."
                )
    for rank, got in enumerate(seen.data):
        used = [expert for expert, _ in got["results"][index]["log"]]
        if len(used) > len(set(used)):
            return (
                f"Rank {rank} called compute {len(used)} times for {len(set(used))} of its "
                "experts: collect the rows of an expert, and call it once."
            )
    return None


DISPATCH = Task(
    id="19.dispatch_combine",
    title="To the experts and back",
    answer="dispatch_combine",
    job="lesson19.dispatch_combine",
    minutes=30,
    cases=_dispatch_cases,
    criteria=(
        Criterion(
            "each token's experts, weighted and added", 2, each_call(_dispatch_out), on=("",)
        ),
        Criterion(
            "gradients of tokens, weights and experts", 2, each_call(_dispatch_grads), on=("",)
        ),
        Criterion("counts first, then exactly the rows", 2, _dispatch_traffic, on=("",)),
        Criterion("ranks and experts without tokens", 2, _dispatch_both, on=("edge",)),
        Criterion("another dtype", 1, _dispatch_both, on=("other",)),
        Criterion("the arguments stay as they are", 1, unchanged),
    ),
    hints=(
        "If the choices are sorted by expert, for which rank are the first ones? What must a rank "
        "know before it can make room for what comes?",
        "Sort, count, exchange the counts, then rows with split sizes. What comes is sorted by rank"
        " and, for each rank, by expert; undo both orders on the way back. In backward the sizes "
        "change roles. A rank that gets no row must still be in the graph.",
        "order = experts.flatten().argsort(stable=True) without the -1; counts = bincount; rows = "
        "Exchange.apply(tokens[order // k], send, receive); rows.split(counts that came); compute "
        "on cat(parts[e::own]); Exchange back; zeros.index_add(0, order // k, weight * row).",
    ),
    debrief="The counts have to reach the CPU before the rows can be sent, and that stops a GPU's "
    "queue. A fixed capacity avoids it; DeepEP's kernels let the GPU itself write each row to its "
    "place on the other rank.",
)

# -- 19.expert_gradients ---------------------------------------------------------------------------


def _gradient_cases(rng: torch.Generator) -> list[Case]:
    def calls(
        world: int,
        group: int,
        dense: Sequence[Sequence[int]] = ((3, 2), (4,)),
        shapes: Sequence[Sequence[int]] = ((2, 3), (5,)),
        max_norm: float = 1e9,
        missing: Sequence[tuple[int, int]] = (),
        times: float = 1.0,
    ) -> list[Call]:
        """One call, for each rank. missing: (rank, expert) pairs without a gradient."""
        made = []
        for rank in range(world):
            own = [times * torch.randn(*s, generator=rng) for s in shapes]
            made.append(
                {
                    "dense": [times * torch.randn(*s, generator=rng) for s in dense],
                    "dense_shapes": [list(s) for s in dense],
                    "experts": [None if (rank, i) in missing else g for i, g in enumerate(own)],
                    "shapes": [list(s) for s in shapes],
                    "group": group,
                    "max_norm": max_norm,
                }
            )
        return made

    def case(says: str, kind: str, *every: list[Call]) -> Case:
        world = len(every[0])
        inputs = [{"calls": [one[rank] for one in every]} for rank in range(world)]
        return Case(f"{world_name(world)}{says}", inputs, kind)

    def limited(made: Case, shares: Sequence[float]) -> Case:
        """max_norm of each call is this share of its norm: one between a norm and its square."""
        for index, share in enumerate(shares):
            norm, _ = _norms(made, index, 0)
            for given in made.inputs:
                given["calls"][index]["max_norm"] = share * norm
        return made

    return [
        case(", groups of 2 and of 3", "", calls(6, 2), calls(6, 2), calls(6, 3)),
        case(", groups of 2, 4 and 1", "", calls(4, 2), calls(4, 4), calls(4, 1)),
        case(", one group", "", calls(3, 3), calls(3, 1)),
        case(", groups of 2 and of 1", "", calls(2, 2), calls(2, 1)),
        case("", "", calls(1, 1)),
        case(
            ", clipped",
            "clip",
            calls(4, 2, max_norm=0.5),
            calls(4, 2, max_norm=0.9),
            calls(4, 2, max_norm=100.0),
            calls(4, 4, max_norm=0.5),
            calls(4, 1, max_norm=0.5),
        ),
        case(", clipped", "clip", calls(1, 1, max_norm=0.25)),
        limited(
            case(
                ", norms below and above 1",
                "clip",
                calls(2, 2, times=0.1),
                calls(2, 2, times=5.0),
            ),
            (0.7, 1.5),
        ),
        case(
            ", experts without a token, and no gradient at all",
            "edge",
            calls(4, 2, missing=((0, 0), (1, 1), (3, 1)), max_norm=0.7),
            calls(4, 2, missing=((0, 0), (2, 0)), max_norm=0.7),
            calls(4, 2, missing=[(r, i) for r in range(4) for i in range(2)]),
            calls(4, 2, times=0.0, max_norm=1.0),
            calls(4, 2, dense=((1,),), shapes=((1,),), max_norm=0.1),
        ),
    ]


def _reduced(case: Case, index: int, rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(dense, experts) of a rank before clipping."""
    calls = [given["calls"][index] for given in case.inputs]
    world, group = case.world, calls[0]["group"]
    dense = [
        torch.stack(gs).sum(0) / world for gs in zip(*(c["dense"] for c in calls), strict=True)
    ]
    own = [_filled(c) for c in calls[rank % group :: group]]
    return dense, [torch.stack(gs).sum(0) / world for gs in zip(*own, strict=True)]


def _filled(call: Call) -> list[torch.Tensor]:
    pairs = zip(call["experts"], call["shapes"], strict=True)
    return [torch.zeros(*shape) if g is None else g for g, shape in pairs]


def _square(tensors: Sequence[torch.Tensor]) -> float:
    return sum(float(t.double().square().sum()) for t in tensors)


def _norms(case: Case, index: int, rank: int) -> tuple[float, dict[str, float]]:
    """The norm, and what mistakes make of it."""
    call = case.inputs[0]["calls"][index]
    group = call["group"]
    first = rank // group * group
    experts = [_square(_reduced(case, index, r)[1]) for r in range(first, first + group)]
    dense, own = (_square(part) for part in _reduced(case, index, rank))
    replicas = case.world // group
    slips = {
        "counts the dense parameters once for each rank of the expert group.": (
            group * dense + sum(experts)
        ),
        "counts the dense parameters once for each rank.": case.world * dense + sum(experts),
        "has this rank's experts alone: the others lie in its expert group.": dense + own,
        "counts each expert once for each replica.": dense + replicas * sum(experts),
        "counts everything once for each rank that has it.": (
            case.world * dense + replicas * sum(experts)
        ),
        "is without the experts.": dense,
        "is without the dense parameters.": sum(experts),
    }
    right = dense + sum(experts)
    mistakes = {words: square**0.5 for words, square in slips.items()}
    return right**0.5, mistakes | {"is the square of the norm.": right}


def _gradient_values(seen: Observed, index: int) -> str | None:
    case, world = seen.case, seen.case.world
    calls = [given["calls"][index] for given in case.inputs]
    group = calls[0]["group"]
    replicas = world // group
    for rank, got in enumerate(seen.data):
        result = got["results"][index]
        if not result["same"]:
            return f"Rank {rank} changed a parameter. Only .grad changes."
        norm, _ = _norms(case, index, rank)
        scale = min(1.0, calls[0]["max_norm"] / norm) if norm else 1.0
        dense, experts = _reduced(case, index, rank)
        alone = [_filled(c) for c in calls]
        for i, wanted in enumerate(experts):
            every = torch.stack([own[i] for own in alone])
            mistakes = {
                "is the mean over all ranks: those are different experts.": every.mean(0),
                "is the sum over all ranks: those are different experts.": every.sum(0),
                "is divided by the number of replicas, and each replica's loss share came from "
                "all ranks of its group: divide by the number of ranks.": wanted * world / replicas,
                "is divided by the size of the expert group.": wanted * world / group,
                "is the sum over the replicas: divide by the number of ranks.": wanted * world,
                "is this rank's own: its replicas have shares, too.": alone[rank][i],
                "is this rank's own share, divided by the number of ranks.": alone[rank][i] / world,
                "is divided by the number of ranks twice.": wanted / world,
            }
            what = f"Rank {rank}'s gradient of expert parameter {i}"
            if result["experts"][i] is None:
                return f"{what} is None. Zeros stand for a gradient that no token gave."
            given = {w: v * scale for w, v in mistakes.items()} if world > 1 else {}
            if scale < 1.0:
                given["is not clipped."] = wanted
            if wrong := explain(result["experts"][i], wanted * scale, what, given):
                return wrong
        for i, wanted in enumerate(dense):
            mistakes = {
                "is the sum over the ranks.": wanted * world,
                "is this rank's own.": calls[rank]["dense"][i],
                "is the mean over its replicas alone: dense parameters are on every rank.": (
                    torch.stack([c["dense"][i] for c in calls[rank % group :: group]]).mean(0)
                ),
                "has the shares of its replicas alone: dense parameters are on every rank.": (
                    torch.stack([c["dense"][i] for c in calls[rank % group :: group]]).sum(0)
                    / world
                ),
            }
            what = f"Rank {rank}'s gradient of dense parameter {i}"
            given = {w: v * scale for w, v in mistakes.items()} if world > 1 else {}
            if scale < 1.0:
                given["is not clipped."] = wanted
            if wrong := explain(result["dense"][i], wanted * scale, what, given):
                return wrong
    return None


def _gradient_norm(seen: Observed, index: int) -> str | None:
    clip = seen.case.inputs[0]["calls"][index]["max_norm"]
    for rank, got in enumerate(seen.data):
        result = got["results"][index]
        norm, mistakes = _norms(seen.case, index, rank)
        if norm > clip:
            mistakes |= {"is that after clipping.": clip}
        what = f"The norm that rank {rank} returned"
        had = result["norm"]
        if number(had) is not None and not norm:
            if number(had) != 0:
                return f"{what} is {number(had):.3g}, and all gradients are zero."
            continue
        if wrong := explain_number(had, norm, what, mistakes, rtol=1e-4):
            return wrong
    return None


def _gradient_all(seen: Observed) -> str | None:
    return each_call(_gradient_norm)(seen) or each_call(_gradient_values)(seen)


def _gradient_traffic(seen: Observed) -> str | None:
    return all_in_spans(seen) or each_call(_gradient_messages)(seen)


def _gradient_messages(seen: Observed, index: int) -> str | None:
    world = seen.case.world
    for rank in range(world):
        call = seen.case.inputs[rank]["calls"][index]
        size = call["group"]
        first = rank // size * size
        dense = sum(g.numel() for g in call["dense"])
        own = sum(g.numel() for g in _filled(call))
        allowed: dict[tuple[int, ...], int] = {}
        for ranks, elements in (
            (tuple(range(world)), dense),
            (tuple(range(rank % size, world, size)), own),
            (tuple(range(first, first + size)), 1),
        ):
            allowed[ranks] = allowed.get(ranks, 0) + elements
        reduced: dict[tuple[int, ...], int] = {}
        for made in seen.calls(rank, f"call {index}"):
            if made.op != "all_reduce":
                return f"Rank {rank} called {made.op}. All-reduces are enough."
            reduced[made.group] = reduced.get(made.group, 0) + made.elements
        for ranks, elements in reduced.items():
            if len(ranks) > 1 and elements > allowed.get(ranks, 0):
                return (
                    f"Rank {rank} reduced {elements} elements among ranks {list(ranks)}; "
                    f"{allowed.get(ranks, 0)} are enough there: dense gradients go to all ranks, "
                    "experts' to their replicas, one number to the expert group."
                )
    return None


GRADIENTS = Task(
    id="19.expert_gradients",
    title="Gradients of experts",
    answer="reduce_and_clip",
    job="lesson19.expert_gradients",
    minutes=20,
    cases=_gradient_cases,
    criteria=(
        Criterion(
            "the gradient of the mean over all ranks", 2, each_call(_gradient_values), on=("",)
        ),
        Criterion(
            "the norm of the whole model, once each", 2, each_call(_gradient_norm), on=("", "clip")
        ),
        Criterion("all are clipped alike", 1, _gradient_all, on=("clip",)),
        Criterion("experts without a gradient, zeros", 2, _gradient_all, on=("edge",)),
        Criterion(
            "each gradient to its own group, one number more", 2, _gradient_traffic, on=("", "clip")
        ),
    ),
    hints=(
        "How many ranks' losses does an expert's gradient hold already? Over which ranks is the "
        "rest, and by what did every rank divide its loss?",
        "Divide both kinds by the number of all ranks. For the norm, which squares are the same on "
        "all ranks, and which differ inside an expert group?",
        "flat = cat(grads) / world; all_reduce it over all ranks (dense) or over replicas "
        "(experts). square = experts' squares, all_reduce over expert_group; plus the dense "
        "squares, which every rank has; sqrt.",
    ),
    debrief="Megatron keeps two sets of gradient buffers, one for each group, and scales that of "
    "the experts so that both mean the same. A clip norm that counts dense parameters once per "
    "rank clips too hard, and differently after every change of the mesh.",
)

# -- 19.balance ------------------------------------------------------------------------------------


def _balance_cases(rng: torch.Generator) -> list[Case]:
    def calls(
        tokens: Sequence[int],
        number: int = 4,
        k: int = 2,
        dtype: torch.dtype = torch.float32,
        times: float = 1.0,
        apart: float = 1.0,
    ) -> list[Call]:
        """One call, for each rank. apart: how far the ranks' favourite experts differ."""
        made = []
        for rank, n in enumerate(tokens):
            logits = torch.randn(n, number, generator=rng)
            logits[:, rank % number] += apart
            experts = logits.topk(k, -1).indices
            swapped = torch.rand(n, generator=rng) < 0.3  # noise in the choice, as routers have
            experts[swapped] = torch.arange(k)
            made.append({"logits": logits.to(dtype), "experts": experts, "times": times})
        return made

    def case(says: str, kind: str, *every: list[Call]) -> Case:
        world = len(every[0])
        inputs = [{"calls": [one[rank] for one in every]} for rank in range(world)]
        return Case(f"{world_name(world)}{says}", inputs, kind)

    def again(_: int, first: Call) -> Call:
        experts = (first["experts"] ** 2 + 1) % 4
        return drawn_again(first, rng, "logits") | {"experts": experts, "times": 2.5}

    varied = case(", 5, 3 and 7 tokens", "", calls((5, 3, 7)))
    lengthened(varied.inputs, "calls", again)
    return [
        varied,
        case(", 3 to 6 tokens", "", calls((3, 6, 4, 5), 6, 3), calls((4, 4, 4, 4), 8, 1)),
        case(", 4 and 6 tokens", "", calls((4, 6), 3, 1, times=0.5, apart=3.0)),
        case("", "", calls((6,), 5, 2)),
        case(
            ", ranks without tokens, one expert, all experts",
            "edge",
            calls((5, 0, 4)),
            calls((0, 0, 1)),
            calls((3, 2, 4), 1, 1),
            calls((3, 2, 4), 3, 3),
        ),
        case(
            ", bfloat16 and many tokens",
            "other",
            calls((901, 890), 4, 2, torch.bfloat16),  # more choices than bfloat16 can count
            calls((5, 4), 4, 2, torch.bfloat16, times=3.0),
        ),
    ]


def _balance_of(
    logits: torch.Tensor, experts: torch.Tensor, share: torch.Tensor | None = None
) -> torch.Tensor:
    """The loss of these tokens; share: the f to take instead of their own."""
    count = logits.shape[1]
    if share is None:
        share = torch.bincount(experts.flatten(), minlength=count) / experts.numel()
    return count * (share * logits.softmax(-1).mean(0)).sum()


def _balance_call(seen: Observed, index: int) -> str | None:
    calls = [given["calls"][index] for given in seen.case.inputs]
    logits = torch.cat([call["logits"].float() for call in calls])
    experts = torch.cat([call["experts"] for call in calls])
    wanted = _balance_of(logits, experts)
    own = [
        float(_balance_of(call["logits"].float(), call["experts"])) if len(call["logits"]) else 0.0
        for call in calls
    ]
    sizes = [len(call["logits"]) for call in calls]
    count, k = logits.shape[1], experts.shape[1]
    each = torch.bincount(experts.flatten(), minlength=count)
    first = torch.bincount(experts[:, 0], minlength=count) / len(experts)
    for rank, got in enumerate(seen.data):
        loss, what = got["results"][index]["loss"], f"Rank {rank}'s loss"
        if type(loss) is not torch.Tensor or loss.shape != () or loss.dtype != torch.float32:
            return f"{what} must be a float32 tensor without dimensions."
        mistakes = {
            "is the mean of the ranks' losses. A mean of products is another number: add up counts "
            "and probabilities first.": sum(own) / len(own),
            "is the mean of the ranks' losses, weighted by tokens. A mean of products is another "
            "number.": sum(o * n for o, n in zip(own, sizes, strict=True)) / sum(sizes),
            "is that of the rank's own tokens.": own[rank],
            "lacks the factor E.": float(wanted) / count,
            "has shares f that add up to k: divide by the number of choices.": float(wanted) * k,
            "is a sum over the tokens: P is a mean.": float(wanted) * len(logits),
            "is E Σ f²: P is a mean of probabilities.": float(
                count * (each / each.sum()).square().sum()
            ),
            "is E Σ P²: f counts choices.": float(
                count * logits.softmax(-1).mean(0).square().sum()
            ),
            "counts the first choices alone.": float(_balance_of(logits, experts, first)),
        }
        if seen.case.world == 1:
            mistakes = {words: v for words, v in mistakes.items() if "rank" not in words}
        if wrong := explain_number(loss, float(wanted), what, mistakes, rtol=3e-5):
            return wrong
    return None


def _balance_gradient(seen: Observed, index: int) -> str | None:
    calls = [given["calls"][index] for given in seen.case.inputs]
    logits = torch.cat([call["logits"].float() for call in calls]).requires_grad_()
    experts = torch.cat([call["experts"] for call in calls])
    _balance_of(logits, experts).backward()
    parts = logits.grad.split([len(call["logits"]) for call in calls])
    for rank, (got, mean) in enumerate(zip(seen.data, parts, strict=True)):
        call, result = calls[rank], got["results"][index]
        what = f"The gradient of rank {rank}'s logits"
        if result["early"]:
            return f"{what} was there before backward was called."
        if result["grad"] is None:
            if len(mean):
                return f"{what} is None: the loss is not connected to the logits."
            return f"{what} is None, and it has no token: backward() has to work there, too."
        own = call["logits"].float().clone().requires_grad_()
        if len(own):
            _balance_of(own, call["experts"]).backward()
        alone = own.grad if len(own) else torch.zeros_like(own)
        times, dtype = call["times"], call["logits"].dtype
        mistakes = {
            "is larger by the number of ranks.": mean * times * seen.case.world,
            "is smaller by the number of ranks.": mean * times / seen.case.world,
            "is that of the rank's own loss.": alone * times,
            "does not carry the factor that backward brings: return a loss with a graph.": mean,
        }
        given = {words: value.to(dtype) for words, value in mistakes.items()}
        if seen.case.world == 1:
            given = {words: v for words, v in given.items() if "rank" not in words}
        if wrong := explain(result["grad"], (mean * times).to(dtype), what, given):
            return wrong
    return None


def _balance_both(seen: Observed) -> str | None:
    return each_call(_balance_call)(seen) or each_call(_balance_gradient)(seen)


def _balance_traffic(seen: Observed) -> str | None:
    return all_in_spans(seen) or each_call(_balance_messages)(seen)


def _balance_messages(seen: Observed, index: int) -> str | None:
    world = seen.case.world
    most = 2 * seen.case.inputs[0]["calls"][index]["logits"].shape[1]
    for rank in range(world):
        if ops := seen.ops(rank, f"backward {index}"):
            return f"Rank {rank} called {ops[0]} in backward, where nothing needs to travel."
        calls = seen.calls(rank, f"call {index}")
        if other := [c.op for c in calls if c.op != "all_reduce"]:
            return f"Rank {rank} called {other[0]}. One all-reduce is enough."
        if len(calls) > 1:
            return f"Rank {rank} made {len(calls)} all-reduces. Both sums fit into one."
        if sum(c.elements for c in calls) > most:
            return (
                f"Rank {rank} reduced {calls[0].elements} numbers. A count and a probability for "
                f"each expert are {most}."
            )
    return None


BALANCE = Task(
    id="19.balance",
    title="The balance of the whole batch",
    answer="balance_loss",
    job="lesson19.balance",
    minutes=15,
    cases=_balance_cases,
    criteria=(
        Criterion("the loss of all tokens together", 2, each_call(_balance_call), on=("",)),
        Criterion("its gradient for this rank's logits", 2, each_call(_balance_gradient), on=("",)),
        Criterion("ranks without tokens, one or all experts", 1, _balance_both, on=("edge",)),
        Criterion("bfloat16 and many tokens", 1, _balance_both, on=("other",)),
        Criterion("one all-reduce of 2E numbers", 1, _balance_traffic),
        Criterion("the arguments stay as they are", 1, unchanged),
    ),
    hints=(
        "Which sums over tokens do f and P need? Which of them does the gradient pass through?",
        "Reduce the counts and the summed probabilities, 2E numbers, outside of the graph. The "
        "number of tokens follows from the counts. The gradient needs the rank's own sum alone.",
        "total = cat((own.detach(), counts)); all_reduce(total); factor = E * f / tokens; share = "
        "(factor * own).sum(); return share + ((factor * total[:E]).sum() - share).detach().",
    ),
    debrief="Many frameworks balance each micro-batch of each rank alone, which is stricter: every "
    "small batch has to use all experts, and experts specialise less. Others reduce f over the "
    "ranks, as here, or drop the loss for a bias.",
)

# -- 19.place --------------------------------------------------------------------------------------

MOST = 1.2  # times the mean
SLACK = 1.1  # what a simple placement reaches in each case


def _place_cases(rng: torch.Generator) -> list[Case]:
    def drawn(experts: int, ranks: int, slots: int, skew: float, *hard: str) -> Call:
        """hard: simple ways that must fail here."""
        while True:
            values = (skew * torch.randn(experts, generator=rng)).exp() * 1000
            asked = {"counts": [int(v) for v in values], "ranks": ranks, "slots": slots}
            if _over(asked, _greedy(asked)) > SLACK:
                continue
            if all(_over(asked, SIMPLE[name](asked)) > MOST for name in hard):
                return asked

    def once(asked: Call, **other: Any) -> Call:
        return asked | other

    base = drawn(8, 4, 3, 1.5, "in order", "largest first", "strides")
    plenty = drawn(6, 3, 4, 1.2, "in order", "strides")
    return [
        Case(
            "more slots than experts",
            [
                {
                    "questions": [
                        base,
                        once(base, counts=base["counts"][::-1]),
                        once(base, slots=4),
                        drawn(16, 4, 6, 1.5, "largest first"),
                        drawn(10, 5, 3, 1.5, "largest first", "copies for all"),
                        drawn(9, 3, 4, 1.3, "largest first"),
                        drawn(8, 4, 3, 1.5, "copies of the largest"),
                        drawn(7, 4, 2, 1.2, "a slot less"),
                        plenty,
                        base,
                    ]
                }
            ],
        ),
        Case(
            "as many slots as experts",
            [
                {
                    "questions": [
                        drawn(12, 3, 4, 0.6, "in order"),
                        drawn(12, 4, 3, 0.5, "in order", "strides"),
                        drawn(16, 4, 4, 0.7, "in order"),
                    ]
                }
            ],
            "tight",
        ),
        Case(
            "one rank, one expert, no tokens",
            [
                {
                    "questions": [
                        {"counts": [5, 0, 7], "ranks": 1, "slots": 3},
                        {"counts": [9], "ranks": 4, "slots": 1},
                        {"counts": [0, 0, 0, 0], "ranks": 2, "slots": 2},
                        {"counts": [0, 900, 0, 0], "ranks": 4, "slots": 2},
                        {"counts": [100] * 8, "ranks": 8, "slots": 1},
                        {"counts": [7, 3], "ranks": 1, "slots": 9},
                    ]
                }
            ],
            "edge",
        ),
    ]


Placed = list[list[int]]


def _copied(asked: Call, fairly: bool = True, less: int = 0) -> list[int]:
    """How many copies of each expert, if the one with the most tokens a copy gets each slot.

    Not fairly: the one with the most tokens, whatever copies it has. less: slots left empty.
    """
    counts, ranks = asked["counts"], asked["ranks"]
    copies = [1] * len(counts)
    for _ in range(ranks * asked["slots"] - len(counts) - less):
        more = [e for e in range(len(counts)) if copies[e] < ranks]
        if more:
            copies[max(more, key=lambda e: counts[e] / (copies[e] if fairly else 1))] += 1
    return copies


def _filled_by(asked: Call, copies: Sequence[int]) -> Placed:
    """The copies, most of one expert first, each to the rank with the least to do."""
    counts, ranks, slots = asked["counts"], asked["ranks"], asked["slots"]
    placed: Placed = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for e in sorted(range(len(counts)), key=lambda e: (-copies[e], -counts[e] / copies[e])):
        for _ in range(copies[e]):
            free = [r for r in range(ranks) if len(placed[r]) < slots and e not in placed[r]]
            if not free:
                continue
            rank = min(free, key=lambda r: loads[r])
            placed[rank].append(e)
            loads[rank] += counts[e] / copies[e]
    return placed


def _greedy(asked: Call) -> Placed:
    return _filled_by(asked, _copied(asked))


def _in_order(asked: Call) -> Placed:
    experts, ranks = len(asked["counts"]), asked["ranks"]
    return [part.tolist() for part in torch.arange(experts).tensor_split(ranks)]


def _strides(asked: Call) -> Placed:
    experts, ranks = range(len(asked["counts"])), asked["ranks"]
    return [list(experts[r::ranks]) for r in range(ranks)]


def _copies_for_all(asked: Call) -> Placed:
    experts = len(asked["counts"])
    each = min(asked["ranks"], asked["ranks"] * asked["slots"] // experts)
    return _filled_by(asked, [each] * experts)


SIMPLE: dict[str, Callable[[Call], Placed]] = {
    "in order": _in_order,
    "strides": _strides,
    "largest first": lambda asked: _filled_by(asked, [1] * len(asked["counts"])),
    "copies for all": _copies_for_all,
    "a slot less": lambda asked: _filled_by(asked, _copied(asked, less=1)),
    "copies of the largest": lambda asked: _filled_by(asked, _copied(asked, fairly=False)),
}


def _loads(asked: Call, placed: Placed) -> list[float]:
    copies = [sum(own.count(e) for own in placed) for e in range(len(asked["counts"]))]
    return [sum(asked["counts"][e] / copies[e] for e in own) for own in placed]


def _over(asked: Call, placed: Placed) -> float:
    """The fullest rank over the mean."""
    mean = sum(asked["counts"]) / asked["ranks"]
    return max(_loads(asked, placed)) / mean if mean else 0.0


def _each_plan(
    judge: Callable[[Call, Placed], str | None],
) -> Callable[[Observed], str | None]:
    def judge_all(seen: Observed) -> str | None:
        questions = seen.case.inputs[0]["questions"]
        for asked, placed in zip(questions, seen.data[0]["plans"], strict=True):
            message = f"With {', '.join(f'{name} = {value}' for name, value in asked.items())}:"
            if wrong := _unfit(asked, placed) or judge(asked, placed):
                return f"{message} {wrong}"
        return None

    return judge_all


def _unfit(asked: Call, placed: Any) -> str | None:
    experts, ranks, slots = len(asked["counts"]), asked["ranks"], asked["slots"]
    if type(placed) is not list or any(type(own) is not list for own in placed):
        return "return a list for each rank, of numbers of experts."
    if len(placed) != ranks:
        return f"there are {len(placed)} lists, for {world_name(ranks)}."
    numbers = [whole(e) for own in placed for e in own]
    if any(e is None or not 0 <= e < experts for e in numbers):
        return f"experts are whole numbers from 0 to {experts - 1}."
    for rank, own in enumerate(placed):
        if len(own) > slots:
            return f"rank {rank} has {len(own)} experts, and {slots} slots."
        if len(set(own)) < len(own):
            return f"rank {rank} has expert {max(own, key=own.count)} twice, which halves nothing."
    if missing := sorted(set(range(experts)) - set(numbers)):
        return f"expert {missing[0]} lies nowhere, and the next batch may want it."
    return None


def _plan_even(asked: Call, placed: Placed) -> str | None:
    over = _over(asked, placed)
    if over <= MOST + 1e-9:
        return None
    loads = _loads(asked, placed)
    fullest = loads.index(max(loads))
    message = f"rank {fullest} has {over:.2f} times the mean."
    mean = sum(asked["counts"]) / asked["ranks"]
    hot = max(placed[fullest], key=lambda e: asked["counts"][e])
    copies = sum(own.count(hot) for own in placed)
    if asked["counts"][hot] / copies > MOST * mean:
        return (
            f"{message} Expert {hot} alone gives it {asked['counts'][hot] / copies / mean:.2f} "
            "times the mean: where it lies does not help. Give it another slot."
        )
    if sum(map(len, placed)) == len(asked["counts"]) < asked["ranks"] * asked["slots"]:
        return f"{message} No expert has a second slot, and there are free ones."
    if placed == _in_order(asked):
        return f"{message} The experts lie in order, whatever their counts."
    if placed == _strides(asked):
        return f"{message} The experts lie in strides, whatever their counts."
    return message


PLACE = Task(
    id="19.place",
    title="The expert that everybody wants",
    answer="place",
    job="lesson19.place",
    minutes=20,
    cases=_place_cases,
    criteria=(
        Criterion("every expert lies somewhere, and fits", 1, _each_plan(lambda *_: None)),
        Criterion("no rank over 1.2 times the mean", 3, _each_plan(_plan_even), on=("",)),
        Criterion("as many slots as experts", 1, _each_plan(_plan_even), on=("tight",)),
        Criterion("one rank, one expert, no tokens", 1, _each_plan(_plan_even), on=("edge",)),
        Criterion("the arguments stay as they are", 1, unchanged),
    ),
    hints=(
        "One expert gets half of all tokens, and there are 4 ranks. Is there a place for it?",
        "First decide how many slots each expert gets: the next free slot goes to the expert with "
        "the most tokens per slot. Then place the largest parts first, each on the rank with the "
        "least to do.",
        "copies = [1] * E; while slots are left: copies[argmax(counts / copies)] += 1, up to ranks."
        " For experts with many copies first, then by counts / copies: the rank that has a free "
        "slot, does not have this expert, and has the smallest load.",
    ),
    debrief="DeepSeek-V3 serves with redundant experts, chosen again every few minutes from "
    "counts like these. In training a copy costs an all-reduce of its gradient, so there the "
    "router is balanced instead.",
)

TASKS = [ROUTE, DISPATCH, GRADIENTS, BALANCE, PLACE]
