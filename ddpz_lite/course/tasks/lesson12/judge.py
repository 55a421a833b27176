"""Tasks of lesson 12: ZeRO in practice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ddpz_lite.course.check.compare import close, differs
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vocabulary import (
    all_in_spans,
    explain,
    holds_at_most,
    padded_shards,
    same_on_all_ranks,
    unchanged,
    world_name,
)
from ddpz_lite.course.tasks.lesson12.job import OPTIMIZERS
from ddpz_lite.wire import Record

# -- 12.agree_on_overflow --------------------------------------------------------------------------

LARGE = "The square of 1e25 is not finite in float32: in which dtype are squares added up?"
INF, NAN = float("inf"), float("nan")
STEPS = 5


def _agree_cases(rng: torch.Generator) -> list[Case]:
    def case(
        world: int,
        says: str,
        bad: dict[int, list[tuple[int, float]]],
        *,
        kind: str = "",
        sizes: Sequence[Sequence[int]] = ((5, 3),),
        interval: int = 100,
        optimizer: str = "momentum",
        max_norm: float = 1.0,
        times: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> Case:
        """bad: at which step which ranks' gradients hold which value. sizes: of the ranks' shards,
        again and again. times: the size of a gradient's values.
        """

        def drawn(rank: int, times: float = 1.0) -> list[torch.Tensor]:
            own = sizes[rank % len(sizes)]
            return [times * torch.randn(n, generator=rng, dtype=dtype) for n in own]

        inputs = []
        for rank in range(world):
            steps = [drawn(rank, times) for _ in range(STEPS)]
            for step, found in bad.items():
                for where, value in found:
                    if where == rank:
                        steps[step][-1][1] = value
            run = {"weights": drawn(rank), "optimizer": optimizer, "steps": steps,
                   "scaler": {"scale": 1024.0, "good_steps": 0, "interval": interval},
                   "max_norm": max_norm}  # fmt: skip
            inputs.append({"runs": [run]})
        return Case(f"{world_name(world)}, {says}", inputs, kind)

    uneven = ((4,), (), (2, 6))
    cases = [
        case(4, "short gradients, an inf on rank 2", {1: [(2, INF)]}, max_norm=1e3),
        case(4, "an inf on rank 2, one on rank 0", {1: [(2, INF)], 3: [(0, -INF)]}),
        case(2, "a nan on rank 1", {2: [(1, NAN)]}, optimizer="Adam"),
        case(3, "shards of unequal size, one rank has none", {1: [(2, INF)]}, sizes=uneven),
        case(1, "an inf", {1: [(0, INF)]}),
        case(2, "float64", {1: [(0, INF)]}, dtype=torch.float64, optimizer="Adam"),
        case(3, "infs on two of them, growth after 2", {0: [(0, INF), (1, INF)], 3: [(2, NAN)]},
             kind="scale", interval=2),
        case(4, "no overflow, growth after 3", {}, kind="scale", interval=3),
        case(2, "gradients around 1e25", {}, kind="size", times=1e25),
        case(4, "gradients that are a little too short", {2: [(3, INF)]}, kind="size", max_norm=20),
        case(2, "gradients of zero", {}, kind="size", times=0.0),
        _squared(case(2, "a limit between the norm and its square", {}, kind="size")),
    ]  # fmt: skip
    both = [
        case(2, "two runs in turn", bad, kind="scale", max_norm=limit)
        for bad, limit in (({1: [(0, INF)]}, 1.0), ({}, 0.25))
    ]
    for first, second in zip(both[0].inputs, both[1].inputs, strict=True):
        first["runs"] += second["runs"]
    return [*cases, both[0]]


def _squared(case: Case) -> Case:
    """With a limit that the norms of all steps stay below, and none of their squares."""
    norms = [sum(n**2 for n in _norms(case, 0, step)) ** 0.5 for step in range(STEPS)]
    for rank in case.inputs:
        rank["runs"][0]["max_norm"] = 1.1 * max(norms)
    return case


def _finite(case: Case, run: int, step: int) -> list[bool]:
    """For each rank whether its gradients of this step are finite."""
    every = [rank["runs"][run]["steps"][step] for rank in case.inputs]
    return [all(bool(g.isfinite().all()) for g in own) for own in every]


def _norms(case: Case, run: int, step: int) -> list[float]:
    """Of each rank's gradients."""
    every = [rank["runs"][run]["steps"][step] for rank in case.inputs]
    return [float(torch.cat([torch.zeros(1), *own]).double().norm()) for own in every]


def _stepped(
    begun: dict[str, Any], steps: list[tuple[list[torch.Tensor], float] | None]
) -> list[torch.Tensor]:
    """Weights after these steps. Each is (gradients, factor), or None if it is skipped."""
    parameters = [nn.Parameter(w.clone()) for w in begun["weights"]]
    if not parameters:
        return []
    optimizer = OPTIMIZERS[begun["optimizer"]](parameters)
    for step in steps:
        if step is None:
            continue
        gradients, factor = step
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = (gradient.double() * factor).to(gradient.dtype)
        optimizer.step()
    return [p.detach() for p in parameters]


def _agree_weights(seen: Observed) -> str | None:
    for run in range(len(seen.case.inputs[0]["runs"])):
        for step in range(STEPS):
            finite = _finite(seen.case, run, step)
            for rank, got in enumerate(seen.data):
                if got["logs"][run][step]["stepped"] is True and not finite[rank]:
                    return (
                        f"In step {step}, rank {rank} stepped, although its own gradients held an "
                        "inf or a nan. One such rank must stop all of them. Does your collective "
                        "tell them?"
                    )
            for rank, got in enumerate(seen.data):
                if wrong := _agree_step(seen.case, run, step, rank, got["logs"][run][step]):
                    return wrong
    return None


def _agree_step(case: Case, run: int, step: int, rank: int, now: dict[str, Any]) -> str | None:
    finite = _finite(case, run, step)
    what, stepped = f"In step {step}, rank {rank}", now["stepped"]
    if type(stepped) is not bool:
        return f"{what} returned {type(stepped).__name__}; True or False says whether it stepped."
    if stepped and not all(finite):
        return (
            f"{what} stepped: its own gradients were finite, but those of rank "
            f"{finite.index(False)} were not. All ranks step, or none does."
        )
    if not stepped and all(finite):
        text = f"{what} did not step, although all gradients of all ranks were finite."
        return f"{text} {LARGE}" if _is_large(case, run, step, rank) else text
    if not now["cleared"]:
        return f"{what} left gradients behind; the next backward would add to them."
    return _agree_values(case, run, step, rank, now["weights"])


def _is_large(case: Case, run: int, step: int, rank: int) -> bool:
    """Whether float32 does not hold the square of the norm."""
    return _norms(case, run, step)[rank] > 1e19


def _agree_values(case: Case, run: int, step: int, rank: int, weights: Any) -> str | None:
    begun = case.inputs[rank]["runs"][run]
    limit = begun["max_norm"]

    def after(factor_of: Any, skips: bool = True) -> list[torch.Tensor]:
        steps: list[Any] = []
        for number in range(step + 1):
            gradients = begun["steps"][number]
            if all(_finite(case, run, number)):
                steps.append((gradients, factor_of(number)))
            else:
                steps.append(None if skips else ([torch.zeros_like(g) for g in gradients], 1.0))
        return _stepped(begun, steps)

    def factor(norm: float, scale: float = 1.0) -> float:
        return min(1.0, limit / (norm * scale)) if norm else 1.0

    def whole(number: int) -> float:
        return sum(norm**2 for norm in _norms(case, run, number)) ** 0.5

    wanted = after(lambda number: factor(whole(number)))
    if len(weights) == len(wanted) and all(map(_near, weights, wanted)):
        return None
    candidates = {
        "were moved by a step that must be skipped: momentum moves them even if gradients are "
        "0.": after(lambda n: factor(whole(n)), skips=False),
        "were clipped by the norm of the rank's own gradients; the limit is for all ranks "
        "together.": after(lambda n: factor(_norms(case, run, n)[rank])),
        "were clipped by the sum of the ranks' norms: add up squares.": after(
            lambda n: factor(sum(_norms(case, run, n)))
        ),
        "were updated with gradients that were clipped while they still had the scale: unscale "
        "first.": after(lambda n: factor(whole(n), 1024.0)),
        "were updated with gradients of norm max_norm, although their norm was smaller: they still "
        "had the scale, or were lengthened.": after(lambda n: limit / whole(n)),
        "were updated with gradients that were not clipped.": after(lambda n: 1.0),
        "were updated with gradients that were unscaled twice.": after(
            lambda n: factor(whole(n)) / 1024.0
        ),
    }
    if summed := _summed(case, run, step, rank):
        candidates["were updated with the sum of all ranks' gradients. These are shards: each rank "
                   "has other parameters."] = summed  # fmt: skip
    for words, other in candidates.items():
        if len(weights) == len(other) and all(map(_near, weights, other)):
            return f"After step {step}, rank {rank}'s weights {words}"
    for index, (got, right) in enumerate(zip(weights, wanted, strict=False)):
        if wrong := differs(got, right, f"After step {step}, rank {rank}'s parameter {index}"):
            return wrong
    return f"After step {step}, rank {rank} has {len(weights)} parameters of {len(wanted)}."


def _summed(case: Case, run: int, step: int, rank: int) -> list[torch.Tensor]:
    """Weights after steps by the sums over ranks, clipped; empty if shards differ in size."""
    every = [inputs["runs"][run] for inputs in case.inputs]
    if len({tuple(w.shape for w in one["weights"]) for one in every}) > 1:
        return []
    steps: list[Any] = []
    for number in range(step + 1):
        sums = [sum(g) for g in zip(*(one["steps"][number] for one in every), strict=True)]
        norm = float(torch.cat(sums).double().norm())
        good = all(_finite(case, run, number))
        steps.append((sums, min(1.0, every[0]["max_norm"] / norm)) if good else None)
    return _stepped(every[rank], steps)


def _near(got: Any, wanted: torch.Tensor) -> bool:
    return close(got, wanted, rtol=1e-4)


def _agree_scale(seen: Observed) -> str | None:
    for run in range(len(seen.case.inputs[0]["runs"])):
        scaler = dict(seen.case.inputs[0]["runs"][run]["scaler"])
        for step in range(STEPS):
            finite = all(_finite(seen.case, run, step))
            scaler["good_steps"] = scaler["good_steps"] + 1 if finite else 0
            if not finite:
                scaler["scale"] /= 2
            elif scaler["good_steps"] == scaler["interval"]:
                scaler |= {"scale": scaler["scale"] * 2, "good_steps": 0}
            if wrong := _agree_scaler(seen, run, step, scaler):
                return wrong
    return None


def _agree_scaler(seen: Observed, run: int, step: int, wanted: dict[str, Any]) -> str | None:
    now = [got["logs"][run][step]["scaler"] for got in seen.data]
    scales = [one.get("scale") for one in now]
    if any(scale != scales[0] for scale in scales):
        other = next(rank for rank, scale in enumerate(scales) if scale != scales[0])
        return (
            f"After step {step}, rank 0's scale is {scales[0]:g} and rank {other}'s "
            f"{scales[other]:g}. From now on their gradients have different factors."
        )
    for rank, one in enumerate(now):
        if one != wanted:
            what = {key: one.get(key) for key in wanted}
            text = f"After step {step}, rank {rank}'s scaler is {what}, and {wanted} was expected."
            halved = one.get("scale", 0) < wanted["scale"]
            return f"{text} {LARGE}" if halved and _is_large(seen.case, run, step, rank) else text
    return None


def _agree_calls(seen: Observed) -> str | None:
    world = seen.case.world
    steps = STEPS * len(seen.case.inputs[0]["runs"])
    for rank in range(world):
        calls = seen.calls(rank)
        if len(calls) != steps and (calls or world > 1):
            return (
                f"Rank {rank} made {len(calls)} calls in {steps} steps. One in each is enough, if "
                "it brings the norm and the overflow at once: what is a sum of squares with an inf "
                "in it?"
            )
        for call in calls:
            if call.elements > 2 * (world if call.op == "all_gather" else 1):
                return (
                    f"Rank {rank} sent {call.elements} elements with {call.op}, but one or two "
                    "are enough: no rank needs the gradients of the others, or which of them had "
                    "the "
                    "overflow."
                )
    return None


AGREE = Task(
    id="12.agree_on_overflow",
    title="All ranks step, or none",
    answer="shared_step",
    job="lesson12.agree_on_overflow",
    minutes=25,
    cases=_agree_cases,
    criteria=(
        Criterion("all ranks step or none; unscaled, clipped", 3, _agree_weights, on=("",)),
        Criterion("the same scale on all ranks, always", 2, _agree_scale),
        Criterion("huge gradients, and nearly long ones", 1, _agree_weights, on=("size",)),
        Criterion("growth, and two runs in turn", 1, _agree_weights, on=("scale",)),
        Criterion("one collective of one or two numbers", 1, _agree_calls),
    ),
    hints=(
        "Which two things must a rank know that it cannot know alone? Can one number contain both?",
        "A sum of squares is inf or nan as soon as one of its terms is. But the square of 1e25 is "
        "inf in float32, too.",
        "unscale own gradients; total = own sum of squares in float64; all_reduce(total); ok = "
        "isfinite(total); if ok: multiply by min(1, max_norm / root), step, count; else halve. "
        "Clear, return ok.",
    ),
    debrief="torch's GradScaler looks at its own rank's gradients, except where these are DTensors "
    "(FSDP2): then found_inf is reduced with MAX over the mesh. DeepSpeed and Megatron do it with "
    "one all-reduce of a flag, and a second one for the norm (read in the sources of DeepSpeed "
    "0.19.6 and Megatron-LM).",
)

# -- 12.hybrid_step --------------------------------------------------------------------------------

RATES = (0.5, 0.2, 0.8)  # of the steps
HYBRID_STEPS = len(RATES)


def _hybrid_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, node: int, *sizes: int, kind: str = "", says: str = "") -> Case:
        dtype = torch.float64 if kind == "other" else torch.float32
        models = [torch.randn(n, generator=rng, dtype=dtype) for n in sizes]

        def gradients() -> list[torch.Tensor]:
            return [torch.randn(n, generator=rng, dtype=dtype) for n in sizes]

        inputs = [
            {
                "models": models,
                "node": node,
                "steps": [gradients() for _ in range(HYBRID_STEPS)],
                "rates": list(RATES),
                "again": 1 if node > 1 else world,
            }
            for _ in range(world)
        ]
        nodes = world // node
        where = f"{nodes} node{'s' * (nodes > 1)} of {world_name(node)}"
        return Case(f"{where}, {' and '.join(f'{n} weights' for n in sizes)}{says}", inputs, kind)

    return [
        case(4, 2, 1001),
        case(4, 2, 777, 4, 3, kind="other", says=" in float64"),
        case(4, 4, 1001, kind="edge"),
        case(4, 1, 1000, kind="edge"),
        case(6, 2, 101, kind="edge"),
        case(3, 3, 1000, kind="edge"),
        case(2, 2, 333, kind="edge"),
        case(1, 1, 55, kind="edge"),
    ]


def _hybrid_values(seen: Observed) -> str | None:
    case = seen.case
    world, node = case.world, case.inputs[0]["node"]
    for rank, got in enumerate(seen.data):
        for model, weights in enumerate(case.inputs[0]["models"]):
            what = f"Rank {rank}'s shard of model {model} in the beginning"
            parts = padded_shards([weights], node)
            mistakes = {}
            if world > node > 1:
                mistakes = {
                    "is that of another rank: ranks of one node must hold different shards, so "
                    "that weights are gathered inside the node.": parts[rank // (world // node)],
                    "is one of N parts. Cut into G parts: the ranks of one node together hold the "
                    "full model.": padded_shards([weights], world)[rank],
                }
            if wrong := explain(got["begun"][model], parts[rank % node], what, mistakes):
                return wrong
    for step in range(HYBRID_STEPS):
        for rank, got in enumerate(seen.data):
            for model in range(len(case.inputs[0]["models"])):
                now = _hybrid_history(case, model, step)
                index = step * len(case.inputs[0]["models"]) + model
                what = f"In step {step}, what rank {rank} gathered of model {model}"
                if wrong := explain(got["whole"][index], now, what, {}):
                    return wrong
                if wrong := _hybrid_shard(case, model, step, rank, got["shards"][step][model]):
                    return wrong
    return _hybrid_again(seen)


def _hybrid_again(seen: Observed) -> str | None:
    """A second object with another `node`."""
    given = seen.case.inputs[0]
    node, weights = given["again"], given["models"][0]
    for rank, got in enumerate(seen.data):
        what = f"With nodes of {world_name(node)} in the same run, rank {rank}'s shard"
        shard, whole = got["again"]
        if wrong := explain(shard, padded_shards([weights], node)[rank % node], what, {}):
            return wrong
        if wrong := differs(whole, weights, f"{what}s are right, and what it gathered"):
            return wrong
    return None


def _hybrid_history(case: Case, model: int, steps: int, how: Any = None) -> torch.Tensor:
    """A model's weights after so many steps. how: (gradients (N, Ψ)) -> the one to step by."""
    weights = case.inputs[0]["models"][model].clone()
    for step in range(steps):
        gradients = torch.stack([rank["steps"][step][model] for rank in case.inputs])
        weights = weights - RATES[step] * (gradients.mean(0) if how is None else how(gradients))
    return weights


def _hybrid_shard(case: Case, model: int, step: int, rank: int, got: Any) -> str | None:
    """After a step; the first one that goes wrong tells how."""
    world, node = case.world, case.inputs[0]["node"]
    first = rank // node * node

    def cut(how: Any = None) -> torch.Tensor:
        begun = _hybrid_history(case, model, step)
        gradients = torch.stack([r["steps"][step][model] for r in case.inputs])
        moved = begun - RATES[step] * (gradients.mean(0) if how is None else how(gradients))
        return padded_shards([moved], node)[rank % node]

    mistakes = {}
    if world > 1:
        mistakes |= {
            "was updated with the sum over the ranks; divide by their number.": lambda g: g.sum(0),
            "was updated with the rank's own gradient.": lambda g: g[rank],
        }
    if world > node:
        nodes = world // node
        mistakes |= {
            "was updated with the mean over its own node, so replicas drift apart. Add up the "
            "nodes' sums, too.": lambda g: g[first : first + node].mean(0),
            f"was updated with {nodes} times the mean: the sum is over all {world} ranks, but was "
            f"divided by the {node} of a node.": lambda g: g.sum(0) / node,
            f"was updated with {node} times the mean: the sum was divided by the {nodes} nodes.": (
                lambda g: g.sum(0) / nodes
            ),
        }
    what = f"After step {step}, rank {rank}'s shard of model {model}"
    return explain(got, cut(), what, {words: cut(how) for words, how in mistakes.items()})


def _replicas(seen: Observed) -> str | None:
    node = seen.case.inputs[0]["node"]
    for rank in range(node, seen.case.world):
        for step, local in enumerate(seen.data[rank]["shards"]):
            for a, b in zip(local, seen.data[rank % node]["shards"][step], strict=True):
                if not close(a, b, bitwise=True):
                    return (
                        f"After step {step}, ranks {rank % node} and {rank} hold the same shard "
                        "with different bits."
                    )
    return unchanged(seen)


def _shares(case: Case) -> list[int]:
    """Bytes of a rank's shard of each model."""
    node, models = case.inputs[0]["node"], case.inputs[0]["models"]
    return [-(-len(w) // node) * w.element_size() for w in models]


def _hybrid_memory(seen: Observed) -> str | None:
    small = 64  # a few numbers
    return holds_at_most(
        seen, lambda got: got["held"], sum(_shares(seen.case)) + small, "its shards"
    )


def _is_inter_node(case: Case, call: Record) -> bool:
    """Whether the call goes over the link between nodes."""
    node = case.inputs[0]["node"]
    ends = (call.rank, call.peer) if call.op in ("send", "recv") else call.group
    return len({rank // node for rank in ends}) > 1


def _hybrid_traffic(seen: Observed) -> str | None:
    case, world, node = seen.case, seen.case.world, seen.case.inputs[0]["node"]
    nodes, whole = world // node, sum(_shares(case)) * node
    inter_most = HYBRID_STEPS * 2 * sum(_shares(case)) * (nodes - 1) / nodes
    intra_most = HYBRID_STEPS * 2 * whole * (node - 1) / node
    if wrong := all_in_spans(seen):
        return wrong
    slack = 32 * HYBRID_STEPS  # for lengths that do not divide
    for rank in range(world):
        calls = [*seen.calls(rank, "gather"), *seen.calls(rank, "step")]
        crossed = next((c for c in seen.calls(rank, "gather") if _is_inter_node(case, c)), None)
        if crossed is not None:
            return (
                f"Rank {rank} gathered weights among ranks {list(crossed.group)}, across nodes. "
                "Each node holds the whole model: gather inside it."
            )
        inter = sum(call.bytes_sent for call in calls if _is_inter_node(case, call))
        intra = sum(call.bytes_sent for call in calls if not _is_inter_node(case, call))
        if inter > inter_most + slack:
            return (
                f"Rank {rank} sent {inter:,} bytes across nodes in {HYBRID_STEPS} steps, and "
                f"2(Ψ/G)(M-1)/M is {inter_most:,.0f}. Make a gradient G times smaller inside the "
                "node before it travels."
            )
        if intra > intra_most + slack:
            return (
                f"Rank {rank} sent {intra:,} bytes inside its node in {HYBRID_STEPS} steps; a "
                f"gather and a reduce-scatter are {intra_most:,.0f}."
            )
    return None


HYBRID = Task(
    id="12.hybrid_step",
    title="Shards in a node, replicas across",
    answer="Hybrid",
    job="lesson12.hybrid_step",
    minutes=30,
    cases=_hybrid_cases,
    criteria=(
        Criterion("2 nodes of 2: as one process with all gradients", 2, _hybrid_values, on=("",)),
        Criterion("float64, three models", 1, _hybrid_values, on=("other",)),
        Criterion("one node; nodes of one rank; three nodes", 1, _hybrid_values, on=("edge",)),
        Criterion("replicas agree bit for bit; inputs stay", 1, _replicas),
        Criterion("holds Ψ/G and nothing more", 1, _hybrid_memory, on=("", "edge")),
        Criterion(
            "2(Ψ/G)(M-1)/M inter-node elements, gathers stay intra-node",
            3,
            _hybrid_traffic,
            on=("", "edge"),
        ),
    ),
    hints=(
        "Draw the ranks as a table with one node per row. Which ranks exchange weights, and which "
        "hold the same shard?",
        "Two kinds of groups: rows and columns. Reduce-scatter in the row, then a message in the "
        "column that is G times smaller.",
        "mesh = init_device_mesh('cpu', (world // node, node)); row, column = mesh.get_group(1), "
        "mesh.get_group(0). step: pad; reduce_scatter(row); all_reduce(column); / world; "
        "shard -= lr * mean. gather: all_gather(row), without the padding.",
    ),
    debrief="FSDP2 does this on a 2-D mesh (HSDP), DeepSpeed as MiCS, and Megatron by "
    "--num-distributed-optimizer-instances. ZeRO++'s hpZ is less: it keeps backward's gather "
    "inside the node, and forward's gather and the reduction still cross nodes.",
)

# -- 12.int8_gather --------------------------------------------------------------------------------

SHARE = 0.30
ROUNDS = 20


def _int8_cases(rng: torch.Generator) -> list[Case]:
    def case(
        world: int, says: str, *sizes: int, kind: str = "", block: int = 64, rounds: int = 1,
        dtype: torch.dtype = torch.float32, change: Any = None,
    ) -> Case:  # fmt: skip
        inputs = []
        for rank in range(world):
            # a rank's scales are its own, and a block's
            shards = []
            for n in sizes:
                spread = 3 ** torch.randn(-(-n // block), generator=rng).repeat_interleave(block)
                values = torch.randn(n, generator=rng) * spread[:n] * (rank + 1)
                shards.append(values.to(dtype))
            if change is not None:
                change(shards, rank)
            nudges = [1e-3 * torch.randn(sizes[-1], generator=rng).to(dtype) for _ in range(rounds)]
            inputs.append({"shards": shards, "nudges": nudges, "block": block, "other": block // 2})
        return Case(f"{world_name(world)}, {says}", inputs, kind)

    def odd(shards: list[torch.Tensor], rank: int) -> None:
        shards[0][:64] = 0.0
        shards[0][100] = 1e6 if rank == 1 else -1e6
        shards[1] *= 1e-20

    return [
        case(4, f"{ROUNDS} rounds on 1,000 values", 1000, rounds=ROUNDS),
        case(3, "1,280 values, then 999", 1280, 999),
        case(2, "960 values", 960),
        case(1, "650 values", 650),
        case(3, "1,500 values in blocks of 100", 1500, block=100),
        case(2, "900 values in float64", 900, dtype=torch.float64, kind="odd"),
        case(2, "zeros and outliers; tiny ones", 700, 640, change=odd, kind="odd"),
        case(3, "5 values, then 1", 5, 1, kind="few"),
    ]


def _history(case: Case) -> list[list[torch.Tensor]]:
    """For each gather the shards of all ranks at that time."""
    every = []
    for inputs in case.inputs:
        own = list(inputs["shards"])
        for nudge in inputs["nudges"]:
            own.append(own[-1] + nudge)
        own.append(own[-1])  # in other blocks
        every.append(own)
    return [list(shards) for shards in zip(*every, strict=True)]


def _block(case: Case, number: int) -> int:
    """Values per scale of a gather."""
    inputs = case.inputs[0]
    last = len(inputs["shards"]) + len(inputs["nudges"])
    return inputs["other"] if number == last else inputs["block"]


def _blocks(shard: torch.Tensor, block: int) -> torch.Tensor:
    """(blocks, block) in float64, the last one padded with zeros."""
    return nn.functional.pad(shard.double(), (0, -len(shard) % block)).view(-1, block)


def _scales(shard: torch.Tensor, block: int) -> torch.Tensor:
    """(blocks, 1) float64."""
    return _blocks(shard, block).abs().amax(1, keepdim=True) / 127


def _int8_values(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        if got["changed"]:
            return (
                f"Rank {rank} changed the shard. The optimizer steps on it: small steps that are "
                "rounded away each time are lost."
            )
    for number, shards in enumerate(_history(seen.case)):
        for rank, got in reversed([*enumerate(seen.data)]):
            whole, now = torch.cat(shards), got["gathered"][number]
            what = f"Gather {number} on rank {rank}"
            if type(now) is not torch.Tensor or now.dtype != whole.dtype or (
                now.shape != whole.shape
            ):  # fmt: skip
                return differs(now, whole, what) or f"{what} is not what was expected."
            if not now.isfinite().all():
                return f"{what} holds values that are not finite. What is the scale of zeros?"
            parts = now.split(len(shards[0]))
            for owner, (part, shard) in enumerate(zip(parts, shards, strict=True)):
                if wrong := _int8_part(
                    seen.case, number, owner, part, shard, _block(seen.case, number)
                ):
                    return f"{what}: {wrong}"
    return None


def _int8_part(
    case: Case, number: int, owner: int, part: torch.Tensor, shard: torch.Tensor, block: int
) -> str | None:
    """One rank's shard as another one has it: half a step of its block, and a little."""
    scales = _scales(shard, block)
    off = (_blocks(part, block) - _blocks(shard, block)).abs()
    worst = (off / scales.clamp(min=1e-300)).max().item() if len(shard) else 0.0
    if worst <= 0.502:
        return None
    place = int((off / scales.clamp(min=1e-300)).amax(1).argmax())
    off_by = f"{worst:.2f} steps of its block {place}"
    what = f"rank {owner}'s shard is off by {off_by}, but only half a step"
    first = _history(case)[0][owner]
    coarse = shard.double().abs().max().item() / 127
    if number and len(first) == len(shard) and not (off > 0.51 * _scales(first, block)).any():
        return f"{what} is allowed: the scales are those of an earlier gather."
    if not _blocks(part, block)[place].any():
        return f"{what} is allowed: the full block arrived as zeros."
    if worst <= 0.8:
        return f"{what} is allowed. Do others multiply by exactly the scales that you divided by?"
    if worst <= 1.02:
        return f"{what} is allowed: are values rounded to the nearest step, or cut off?"
    if off.max().item() <= 0.51 * coarse:
        return f"{what} is allowed: its scale is that of more than one block."
    if len(case.inputs) > 1:
        for other in range(len(case.inputs)):
            theirs = _history(case)[number][other]
            steps = (_blocks(shard, block) / scales.clamp(min=1e-300)).round()
            wrong = steps * _scales(theirs, block)
            units = scales.clamp(min=1e-300)
            if other != owner and close(_blocks(part, block) / units, wrong / units, rtol=1e-4):
                return (
                    f"{what} is allowed: its steps were multiplied by the scales of rank {other}."
                )
    return f"{what} is allowed."


def _int8_same(seen: Observed) -> str | None:
    exact = [
        rank
        for rank, got in enumerate(seen.data)
        for number, shards in enumerate(_history(seen.case))
        if _exact(got["gathered"][number], rank, shards)
    ]
    if seen.case.world > 1 and exact:
        return (
            f"Rank {exact[0]} has its own shard exactly, and the others have it rounded: ranks "
            "compute with different weights. Round your own part too."
        )
    return same_on_all_ranks(seen, lambda got: got["gathered"]) or holds_at_most(
        seen, lambda got: got["held"], 64, "after the last call, a few numbers"
    )


def _exact(got: Any, rank: int, shards: list[torch.Tensor]) -> bool:
    size = len(shards[rank])
    return (
        type(got) is torch.Tensor
        and size > 8
        and close(got[rank * size : (rank + 1) * size], shards[rank], bitwise=True)
    )


def _int8_bytes(seen: Observed) -> str | None:
    world = seen.case.world
    if wrong := all_in_spans(seen):
        return wrong
    plain = sum((world - 1) * shards[0].numel() * 4 for shards in _history(seen.case))
    for rank in range(world):
        sent = seen.sent(rank, "gather")
        if sent > SHARE * plain:
            return (
                f"Rank {rank} sent {sent:,} bytes: {sent / plain:.2f} of what a gather in float32 "
                f"sends, but only {SHARE:.2f} is allowed. Send int8, and a scale for each block."
            )
    return None


def _int8_calls(seen: Observed) -> str | None:
    gathers = len(_history(seen.case))
    for rank in range(seen.case.world):
        count = len(seen.calls(rank))
        if count > gathers:
            return (
                f"Rank {rank} made {count} calls for {gathers} gathers. Each has its latency: can "
                "steps and scales travel in one message?"
            )
    return None


INT8 = Task(
    id="12.int8_gather",
    title="Gather in eight bits",
    answer="gather_int8",
    job="lesson12.int8_gather",
    minutes=25,
    cases=_int8_cases,
    criteria=(
        Criterion("off by half a step of its block, 20 rounds long", 2, _int8_values, on=("",)),
        Criterion("zeros, outliers, tiny ones, few, float64", 1, _int8_values, on=("odd", "few")),
        Criterion(
            "the same bits everywhere; the shard stays; nothing is kept",
            2,
            _int8_same,
            on=("", "odd", "few"),
        ),
        Criterion("at most 0.30 of the bytes of float32", 2, _int8_bytes, on=("",)),
        Criterion("steps and scales in one message", 1, _int8_calls),
    ),
    hints=(
        "What must never be rounded, and what may be rounded? Which rank needs which scale?",
        "Pad to whole blocks; a scale per block, max / 127. Zeros have the scale 0: divide by "
        "something else. The receiver needs the sender's scales.",
        "rows = pad(shard).view(-1, block); steps = round(rows / scale).to(int8). One message has "
        "one dtype, but bytes are bytes: see what Tensor.view(dtype) does to a float32 tensor. "
        "all_gather; cut each message in two, multiply, drop the padding, also for this rank's "
        "own part.",
    ),
    debrief="This is ZeRO++'s quantised weight gather (qwZ), with the scales in the message. Its "
    "blocks, too, belong to one shard: where a block would cross two ranks' shards, either the cut "
    "moves (veScale's RaggedShard) or a scale needs two ranks.",
)

TASKS = [AGREE, HYBRID, INT8]
