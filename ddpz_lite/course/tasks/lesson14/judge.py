"""Tasks of lesson 14: pipeline, tensor parallelism, and a plan for a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, combinations, pairwise, permutations
from typing import Any

import torch

from ddpz_lite.course.check.compare import whole
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vocabulary import (
    all_in_spans,
    explain,
    explain_number,
    holds_at_most,
    unchanged,
    waited_for,
    world_name,
)
from ddpz_lite.course.tasks.lesson14.job import NAMES, TIMES

# -- 14.one_f_one_b --------------------------------------------------------------------------------

WIDTHS = (3, 5, 2, 4, 3)  # what enters each stage, and what leaves the last
HIDDEN = 6


def _pipe_cases(rng: torch.Generator) -> list[Case]:
    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(dtype)

    def case(
        world: int,
        *rows: Sequence[int],
        dtype: torch.dtype = torch.float32,
        kind: str = "",
        says: str = "",
        stages: Sequence[int] = (0, 0, 0, 0, 0),
    ) -> Case:
        widths = WIDTHS[: world + 1]
        inputs = []
        for rank in range(world):
            shapes = [[[n, widths[rank]] for n in step] for step in rows]
            weights = [drawn(widths[rank], HIDDEN, dtype=dtype)]
            weights += [drawn(HIDDEN, widths[rank + 1], dtype=dtype)]
            steps = [
                {"shapes": s, "inputs": None, "targets": None, "stage": stages[number_]}
                for number_, s in enumerate(shapes)
            ]
            inputs.append({"weights": weights, "steps": steps})
        for number_, step in enumerate(rows):
            into = [drawn(n, widths[0], dtype=dtype) for n in step]
            onto = [drawn(n, widths[-1], dtype=dtype) for n in step]
            inputs[0]["steps"][number_]["inputs"] = into
            inputs[-1]["steps"][number_]["targets"] = onto
        message = ", then ".join(f"{len(step)} micro-batches" for step in rows)
        return Case(f"{world_name(world)}, {message}{says}", inputs, kind, timeout=20.0)

    return [
        case(3, (2, 5, 3, 1, 4, 2)),
        case(4, (2, 3, 1, 4, 2, 5, 3)),
        case(1, (4, 1, 2)),
        case(4, (3, 5), kind="few"),
        case(2, (3, 1, 4, 2, 6), dtype=torch.float64, kind="other", says=" of float64"),
        case(3, (2,), (4, 1, 2, 2), kind="again"),
        case(
            3,
            (3, 1),
            (3, 1),
            (1, 3),
            (3, 1),
            kind="again",
            says=", in two pipelines",
            stages=(0, 0, 0, 1),
        ),
    ]


Parts = Callable[[list[torch.Tensor]], torch.Tensor]  # squared errors of each micro-batch


def _mean_of_all(squares: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([s.flatten() for s in squares]).mean()


def _outputs(case: Case, step: int) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """The parameters of all stages, and the squared errors of each micro-batch, in one process."""
    times = TIMES[case.inputs[0]["steps"][step]["stage"]]
    weights = [[(times * w).requires_grad_() for w in rank["weights"]] for rank in case.inputs]
    into, onto = case.inputs[0]["steps"][step], case.inputs[-1]["steps"][step]
    squares = []
    for x, target in zip(into["inputs"], onto["targets"], strict=True):
        for first, second in weights:
            x = torch.tanh(x @ first) @ second
        squares.append((x - target).square())
    return weights, squares


def _reference(case: Case, rank: int, index: int, steps: Sequence[int], loss: Parts) -> Any:
    """The gradient of one weight, added up over these steps."""
    total = torch.zeros_like(case.inputs[rank]["weights"][index])
    for step in steps:
        weights, squares = _outputs(case, step)
        loss(squares).backward()
        total += weights[rank][index].grad
    return total


LOSSES: dict[str, Parts] = {
    "is the gradient of the sum of the micro-batches' mean losses. The loss is the mean over all "
    "elements of the batch.": lambda s: torch.stack([one.mean() for one in s]).sum(),
    "is the gradient of the mean of the micro-batches' means: a small micro-batch counts as much "
    "as a large one.": lambda s: torch.stack([one.mean() for one in s]).mean(),
    "is the gradient of the sum of all squared errors; it was never divided by their number.": (
        lambda s: torch.cat([one.flatten() for one in s]).sum()
    ),
    "contains the last micro-batch alone. Those before it are lost.": (
        lambda s: s[-1].sum() / sum(one.numel() for one in s)
    ),
    "contains the first micro-batch alone.": (lambda s: s[0].sum() / sum(one.numel() for one in s)),
}


def _pipe_values(seen: Observed) -> str | None:
    case = seen.case
    for step in range(len(case.inputs[0]["steps"])):
        for rank, got in enumerate(seen.data):
            for index, gradient in enumerate(got["calls"][step]["grads"]):
                if wrong := _pipe_gradient(case, rank, index, step, gradient):
                    return wrong
        for rank, got in enumerate(seen.data[:-1]):
            if got["calls"][step]["said"] is not None:
                return f"Rank {rank} returned a loss, which only the last rank can know."
        _, squares = _outputs(case, step)
        wanted = _mean_of_all(squares).item()
        last = seen.data[-1]["calls"][step]["said"]
        others = {"is a sum over the micro-batches; it must be the mean over all elements.": sum(
            s.mean().item() for s in squares)}  # fmt: skip
        if wrong := explain_number(last, wanted, "The loss that the last rank returns", others,
                                   rtol=1e-4):  # fmt: skip
            return wrong
    return None


def _pipe_gradient(case: Case, rank: int, index: int, step: int, gradient: Any) -> str | None:
    if gradient is None or not bool(gradient.any()):
        return (
            f"Stage {rank} has no gradient after step {step}. Call requires_grad_ on what a stage "
            "receives, and send its gradient back to the left."
        )

    def reference(steps: Sequence[int], loss: Parts) -> Callable[[], Any]:
        return lambda: _reference(case, rank, index, steps, loss)

    asked = case.inputs[0]["steps"]
    so_far = [n for n in range(step + 1) if asked[n]["stage"] == asked[step]["stage"]]
    mistakes = {words: reference(so_far, loss) for words, loss in LOSSES.items()}
    if step:
        mistakes["is that of this step alone: add to what .grad held before."] = reference(
            [step], _mean_of_all
        )
    what = f"Stage {rank}'s gradient of its weight {index}"
    return explain(gradient, reference(so_far, _mean_of_all)(), what, mistakes)


def _times(seen: Observed, step: int) -> float | str:
    """The units of time that the noted order takes, a forward 1 and a backward 2; or a sentence."""
    world = seen.case.world
    micros = len(seen.case.inputs[0]["steps"][step]["shapes"])
    orders = [[(k, i) for k, i in got["calls"][step]["events"]] for got in seen.data]
    every = {(kind, i) for kind in "FB" for i in range(micros)}
    for rank, order in enumerate(orders):
        if set(order) != every or len(order) != len(every):
            forwards = sum(kind == "F" for kind, _ in order)
            return (
                f"Stage {rank} ran {forwards} times forward and {len(order) - forwards} times "
                f"backward for {micros} micro-batches."
            )
    done: dict[tuple[str, int, int], float] = {}
    free, waiting = [0.0] * world, [list(order) for order in orders]
    while any(waiting):
        before = len(done)
        for rank in range(world):
            while waiting[rank]:
                kind, i = waiting[rank][0]
                needed = [(kind, i, rank - 1 if kind == "F" else rank + 1)]
                needed = [key for key in needed if 0 <= key[2] < world]
                if any(key not in done for key in needed):
                    break
                waiting[rank].pop(0)
                start = max([free[rank], *(done[key] for key in needed)])
                free[rank] = done[kind, i, rank] = start + (1 if kind == "F" else 2)
        if len(done) == before:
            return "The stages ran the micro-batches in orders that do not fit together."
    return max(free)


def _pipe_time(seen: Observed) -> str | None:
    world = seen.case.world
    for step, inputs in enumerate(seen.case.inputs[0]["steps"]):
        micros = len(inputs["shapes"])
        took, least = _times(seen, step), 3 * (micros + world - 1)
        if isinstance(took, str):
            return took
        if took > least:
            slow = 3 * micros * world
            why = " One micro-batch at a time: the other stages wait." if took == slow else ""
            return (
                f"In your order the step takes {took:.0f} units of time, if a forward takes 1 and "
                f"a backward 2; 3(m + p - 1) = {least} are enough.{why}"
            )
    return None


def _pipe_live(seen: Observed) -> str | None:
    world = seen.case.world
    for step, inputs in enumerate(seen.case.inputs[0]["steps"]):
        micros = len(inputs["shapes"])
        for rank, got in enumerate(seen.data):
            call, most = got["calls"][step], min(world - rank, micros)
            if call["alive"] <= most:
                continue
            kinds = "".join(kind for kind, _ in call["events"])
            if kinds.startswith("F" * micros):
                return (
                    f"Stage {rank} keeps {call['alive']} micro-batches at once: all forwards come "
                    f"before the first backward, which is GPipe. 1F1B keeps {most}."
                )
            return (
                f"Stage {rank} keeps the activations of {call['alive']} micro-batches at once; "
                f"min(p - stage, m) = {most} are enough."
            )
    return None


def _pipe_traffic(seen: Observed) -> str | None:
    if wrong := all_in_spans(seen) or waited_for(seen):
        return wrong
    case = seen.case
    dtype = str(case.inputs[0]["weights"][0].dtype).removeprefix("torch.")
    for rank in range(case.world):
        for step, inputs in enumerate(case.inputs[rank]["steps"]):
            calls = seen.calls(rank, f"step {step}")
            if other := [c.op for c in calls if c.op not in ("send", "recv")]:
                return (
                    f"Rank {rank} called {other[0]}. Stages only send to their neighbours and "
                    "receive from them."
                )
            here = [n * width for n, width in inputs["shapes"]]
            there = [n * WIDTHS[rank + 1] for n, _ in inputs["shapes"]]
            wanted = {rank - 1: here, rank + 1: there}
            wanted = {peer: sizes for peer, sizes in wanted.items() if 0 <= peer < case.world}
            if wrong := _sends(rank, calls, wanted, dtype):
                return wrong
    return None


def _sends(rank: int, calls: Any, wanted: dict[int, list[int]], dtype: str) -> str | None:
    sends = [c for c in calls if c.op == "send"]
    for peer in {c.peer for c in sends} - wanted.keys():
        return f"Rank {rank} sent something to rank {peer}, which is not its neighbour."
    for peer, sizes in wanted.items():
        local = [c for c in sends if c.peer == peer]
        what = "gradients of activations" if peer < rank else "activations"
        if len(local) != len(sizes):
            return (
                f"Rank {rank} sent {len(local)} messages to rank {peer}; {len(sizes)} are needed, "
                f"the {what} of each micro-batch."
            )
        dtypes = {c.dtype for c in local}
        if sorted(c.elements for c in local) != sorted(sizes) or dtypes != {dtype}:
            return (
                f"Rank {rank} sent {[c.elements for c in local]} elements of "
                f"{', '.join(sorted({c.dtype for c in local}))} to rank {peer}; the {what} are "
                f"{sizes} of {dtype}."
            )
    return None


ONE_F_ONE_B = Task(
    id="14.one_f_one_b",
    title="A step of 1F1B",
    answer="one_f_one_b",
    job="lesson14.one_f_one_b",
    minutes=30,
    cases=_pipe_cases,
    criteria=(
        Criterion("gradients and loss of the batch", 2, _pipe_values, on=("",)),
        Criterion("fewer micro-batches than stages", 1, _pipe_values, on=("few",)),
        Criterion("another dtype", 1, _pipe_values, on=("other",)),
        Criterion("a second step adds to the gradients", 1, _pipe_values, on=("again",)),
        Criterion("a stage keeps at most p - stage micro-batches", 2, _pipe_live),
        Criterion("no stage waits longer than it must", 2, _pipe_time),
        Criterion("only activations and their gradients are sent", 1, _pipe_traffic),
        Criterion("inputs and weights are unchanged", 1, unchanged),
    ),
    hints=(
        "How many forwards must a stage have done when the first gradient can come back to it?",
        "Stage s goes p - s - 1 forwards ahead (or m, if there are fewer), then does one forward, "
        "one backward in turn, then the backwards that are left. If two neighbours send at the "
        "same time, who receives?",
        "kept = deque(). Forward: x = received or given; y = stage(x); the last stage makes "
        "((y - target)**2).sum() / all elements of y; the others isend(y.detach()). Backward: "
        "x, y = kept.popleft(); y.backward(received or None); isend(x.grad). Keep each isend's "
        "handle and wait at the end.",
    ),
    debrief="torch's Schedule1F1B fuses the send of one direction with the receive of the other "
    "into one batch_isend_irecv, which NCCL needs; dz.Pipeline does so too.",
)

# -- 14.column_row ---------------------------------------------------------------------------------

C, H = 5, 9  # no world from 2 to 4 but 3 divides H, and none divides H in its second size
OTHER_H = 7


def _mlp_cases(rng: torch.Generator) -> list[Case]:
    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    def case(
        world: int,
        hidden: int = H,
        kind: str = "",
        says: str = "",
        dtype: torch.dtype = torch.float32,
        shapes: Sequence[tuple[int, ...]] = ((7,),),
        needs: Sequence[bool] = (True,),
    ) -> Case:
        weights = [drawn(hidden, C), drawn(hidden, C), drawn(C, hidden), drawn(C)]
        values = {
            "weights": [w.to(dtype) for w in weights],
            "inputs": [drawn(*shape, C).to(dtype) for shape in shapes],
            "upstream": [drawn(*shape, C).to(dtype) for shape in shapes],
            "needs": list(needs),
        }
        return Case(f"{world_name(world)}, {hidden} hidden{says}", [values] * world, kind)

    return [
        case(3),
        case(4, OTHER_H),
        case(1),
        case(2, OTHER_H, "other", " of float64", torch.float64),
        case(
            3,
            OTHER_H,
            "again",
            ", called four times",
            shapes=((7,), (2, 3), (4,), (7,)),
            needs=(True, True, False, True),
        ),
    ]


def _gated(x: torch.Tensor, gate: Any, up: Any, down: Any, bias: Any) -> torch.Tensor:
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T + bias


def _units(case: Case, rank: int) -> slice:
    """The hidden units of a rank."""
    parts = torch.arange(case.inputs[0]["weights"][0].shape[0]).tensor_split(case.world)
    return slice(int(parts[rank][0]), int(parts[rank][-1]) + 1)


def _shards(case: Case, rank: int, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    gate, up, down, bias = values
    own = _units(case, rank)
    return {"gate": gate[own], "up": up[own], "down": down[:, own], "bias": bias}


def _mlp_call(case: Case, call: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """In one process: the result, the gradient of x, those of the weights."""
    given = case.inputs[0]
    weights = [w.clone().requires_grad_() for w in given["weights"]]
    x = given["inputs"][call].clone().requires_grad_()
    y = _gated(x, *weights)
    y.backward(given["upstream"][call])
    return y.detach(), x.grad, [w.grad for w in weights]


def _mlp_values(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        if wrong := _mlp_own(seen.case, rank, got["own"]):
            return wrong
    for call in range(len(seen.case.inputs[0]["inputs"])):
        for rank, got in enumerate(seen.data):
            if wrong := _mlp_forward(seen.case, rank, call, got["calls"][call]["y"]):
                return wrong
        for rank, got in enumerate(seen.data):
            if wrong := _mlp_backward(seen.case, rank, call, got["calls"][call]):
                return wrong
    return None


def _mlp_own(case: Case, rank: int, own: Any) -> str | None:
    wanted = _shards(case, rank, case.inputs[0]["weights"])
    if set(own) != set(NAMES):
        return f"Rank {rank}'s parameters are called {sorted(own)}, not {', '.join(NAMES)}."
    for name in NAMES:
        if own[name].shape != wanted[name].shape:
            full = case.inputs[0]["weights"][NAMES.index(name)]
            if own[name].shape == full.shape:
                return f"Rank {rank} keeps all of {name}: it is not divided."
            if name in ("gate", "up") and own[name].shape[:1] == full.shape[:1]:
                return (
                    f"Rank {rank}'s {name} is cut along the width: silu would see parts of sums. "
                    "Cut it by hidden units."
                )
            return (
                f"Rank {rank}'s {name} has shape {list(own[name].shape)}; its hidden units are "
                f"{list(wanted[name].shape)}."
            )
        if wrong := explain(own[name], wanted[name], f"Rank {rank}'s {name}", {}):
            return wrong
    return None


def _mlp_forward(case: Case, rank: int, call: int, got: Any) -> str | None:
    x = case.inputs[0]["inputs"][call]
    gate, up, down, bias = case.inputs[0]["weights"]
    parts = [_shards(case, r, (gate, up, down, bias)) for r in range(case.world)]
    y, _, _ = _mlp_call(case, call)
    mistakes = {
        "has the bias once for each rank: add it after the sum.": y + (case.world - 1) * bias,
        "is this rank's partial sum: the ranks' must be added up.": _gated(x, **parts[rank]),
        "lacks the bias.": y - bias,
        "is the mean of the ranks' parts, not their sum.": (y - bias) / case.world + bias,
    }
    return explain(got, y, f"The result on rank {rank}", mistakes)


def _mlp_backward(case: Case, rank: int, call: int, got: Any) -> str | None:
    _, x, weights = _mlp_call(case, call)
    if case.inputs[0]["needs"][call]:
        given = case.inputs[0]["inputs"][call].clone().requires_grad_()
        own = _shards(case, rank, case.inputs[0]["weights"])
        _gated(given, **own).backward(case.inputs[0]["upstream"][call])
        mistakes = {
            "is this rank's part of it: in backward the parts of all ranks must be added up.": (
                given.grad
            ),
            "is larger by the number of ranks: a gradient was added up that all ranks have.": (
                x * case.world
            ),
        }
        if wrong := explain(got["x"], x, f"The gradient of x on rank {rank}", mistakes):
            return wrong
    for name, wanted in _shards(case, rank, weights).items():
        mistakes = {
            "is larger by the number of ranks. The result's gradient is the same on all of them, "
            "so the exit passes it on unmodified in backward.": wanted * case.world,
            "is smaller by the number of ranks.": wanted / case.world,
        }
        what = f"The gradient of {name} on rank {rank}"
        if wrong := explain(got["grads"][name], wanted, what, mistakes):
            return wrong
    return None


def _mlp_traffic(seen: Observed) -> str | None:
    given = seen.case.inputs[0]
    sizes = [x.numel() for x in given["inputs"]]
    back = [size for size, needed in zip(sizes, given["needs"], strict=True) if needed]
    for rank in range(seen.case.world):
        for during, wanted in (("forward", sizes), ("backward", back)):
            calls = seen.calls(rank, during)
            if seen.case.world == 1 and not calls:
                continue
            if other := [c.op for c in calls if c.op != "all_reduce"]:
                return f"Rank {rank} called {other[0]} in {during}. One all-reduce is enough."
            if during == "backward" and len(calls) == len(sizes) > len(wanted):
                return (
                    f"Rank {rank} called all_reduce in the backward of every call. One of them has "
                    "an x that needs no gradient: there is nothing to sum up."
                )
            if len(calls) > len(wanted) and during == "backward":
                return (
                    f"Rank {rank} called all_reduce {len(calls)} times in backward, expected is "
                    f"{len(wanted)}. Gate and up read the same x: their parts of its gradient "
                    "can be added before they are sent."
                )
            if [c.elements for c in calls] != wanted:
                return (
                    f"In {during} rank {rank} reduced {[c.elements for c in calls]} elements; "
                    f"expected is {wanted}, as many as x has."
                )
    return None


def _mlp_held(seen: Observed) -> str | None:
    given = seen.case.inputs[0]["weights"]
    item = given[0].element_size()
    for rank, got in enumerate(seen.data):
        share = sum(t.numel() for t in _shards(seen.case, rank, given).values()) * item
        if wrong := holds_at_most(
            Observed(seen.case, "ok", data=[got]), lambda g: g["held"], share, "its own weights"
        ):
            return wrong.replace("Rank 0", f"Rank {rank}", 1)
    return None


COLUMN_ROW = Task(
    id="14.column_row",
    title="A gated MLP over all ranks",
    answer="GatedMLP",
    job="lesson14.column_row",
    minutes=25,
    cases=_mlp_cases,
    criteria=(
        Criterion("result and gradients of the full layer", 2, _mlp_values, on=("",)),
        Criterion("another dtype", 1, _mlp_values, on=("other",)),
        Criterion(
            "called again, with other shapes, and an x that needs no gradient",
            1,
            _mlp_values,
            on=("again",),
        ),
        Criterion("one all-reduce forward, one backward", 2, _mlp_traffic),
        Criterion("a rank keeps its own hidden units alone", 2, _mlp_held),
    ),
    hints=(
        "Which of the three matrices can be cut so that silu sees complete sums? Where does the "
        "first partial sum appear, in forward and in backward?",
        "Two autograd functions: one that does nothing in forward and adds up over the ranks in "
        "backward (at the entry), one that adds up in forward and does nothing in backward (at the "
        "exit). The bias comes after the exit.",
        "h = copy(x) once; a = silu(h @ gate.T) * (h @ up.T) with this rank's rows; y = "
        "reduce(a @ down.T) + bias with its columns. clone() each part: a view keeps the full "
        "matrix alive. Do not change the gradient that autograd passes you in place.",
    ),
    debrief="Megatron calls the two functions f and g. With sequence parallelism the all-reduces "
    "become reduce-scatters and all-gathers, and a rank keeps 1/t of the activations.",
)

# -- 14.place --------------------------------------------------------------------------------------

AXES = ("data", "pipeline", "tensor")
WITHIN = 1.05
GB = 10**9
Plan = list[tuple[str, int]]  # innermost first

BASE = {
    "layers": 32, "heads": 32, "params": 7 * 10**9, "width": 4096, "tokens": 2048, "batch": 128,
    "nodes": 4, "per_node": 8, "memory": 80 * GB, "flops": 4 * 10**14, "near": 300 * GB,
    "far": 25 * GB,
}  # fmt: skip


def _job(**other: Any) -> dict[str, Any]:
    return {**BASE, **other}


def _place_cases(rng: torch.Generator) -> list[Case]:
    def about(value: float) -> int:
        return int(value * (0.97 + 0.06 * torch.rand((), generator=rng).item()))

    def case(says: str, jobs: list[dict[str, Any]], kind: str = "") -> Case:
        jobs = [{**job, "flops": about(job["flops"]), "far": about(job["far"])} for job in jobs]
        return Case(says, [{"jobs": jobs}], kind)

    large = _job(layers=80, heads=64, params=70 * 10**9, width=8192, nodes=8, batch=256)
    exact = _job(nodes=1, per_node=1, params=10**9)
    exact["memory"] = int(_needs(exact, [(axis, 1) for axis in AXES]))
    return [
        case("models of 1, 7 and 70 billion parameters",
             [_job(), large, _job(layers=24, heads=16, params=10**9, width=2048)]),
        case("a slow and a fast network between nodes",
             [_job(far=GB), _job(far=200 * GB), {**large, "far": 2 * GB}]),
        case("small devices, few of them", [_job(memory=24 * GB), _job(memory=20 * GB, nodes=2),
             _job(layers=6, heads=4, params=5 * 10**9, memory=12 * GB, nodes=6, per_node=4)]),
        case("batches of few samples, a node of six",
             [_job(batch=8), _job(batch=16, near=100 * GB),
              _job(layers=12, heads=12, per_node=6, nodes=2, batch=24, memory=30 * GB),
              _job(layers=3, heads=4, per_node=6, nodes=2, batch=1, params=10**9)]),
        case("few layers, few heads",
             [_job(layers=4, heads=8, batch=2, nodes=8, per_node=4, params=5 * 10**9, far=8 * GB),
              _job(layers=6, heads=2, nodes=2, per_node=4, memory=40 * GB, near=10 * GB)]),
        case("three nodes of three", [_job(layers=27, heads=9, nodes=3, per_node=3, batch=27),
             _job(layers=9, heads=27, nodes=3, per_node=9, batch=54, params=5 * 10**9)]),
        case("one device, a tight fit, and a model that fits nowhere",
             [_job(nodes=1, per_node=1, params=10**9), exact, _job(params=10**12)], "edge"),
    ]  # fmt: skip


def _plans(job: dict[str, Any]) -> Iterator[Plan]:
    """All plans that divide what they must, whether or not they fit the memory."""
    ranks = job["nodes"] * job["per_node"]
    for tensor in range(1, ranks + 1):
        for pipeline in range(1, ranks // tensor + 1):
            sizes = {"tensor": tensor, "pipeline": pipeline, "data": ranks // (tensor * pipeline)}
            if _divides(job, sizes) is None:
                for order in permutations(AXES):
                    yield [(axis, sizes[axis]) for axis in order]


def _divides(job: dict[str, Any], sizes: dict[str, int]) -> str | None:
    product = sizes["data"] * sizes["pipeline"] * sizes["tensor"]
    ranks = job["nodes"] * job["per_node"]
    if product != ranks:
        return f"The sizes multiply to {product}, and there are {ranks} ranks."
    if sizes["pipeline"] > job["layers"]:
        return f"{sizes['pipeline']} stages for {job['layers']} layers: some would have none."
    if job["layers"] % sizes["pipeline"]:
        return f"{sizes['pipeline']} stages do not divide {job['layers']} layers."
    if job["heads"] % sizes["tensor"]:
        return f"{sizes['tensor']} ranks do not divide {job['heads']} heads."
    if job["batch"] % sizes["data"]:
        return f"{sizes['data']} replicas do not divide a batch of {job['batch']}."
    return None


def _needs(job: dict[str, Any], plan: Plan) -> float:
    """Bytes on a device."""
    size = dict(plan)
    p, t, m = size["pipeline"], size["tensor"], job["batch"] // size["data"]
    activations = 34 * job["tokens"] * job["width"] * (job["layers"] / p) / t
    return 16 * job["params"] / (p * t) + min(p, m) * activations


def _seconds(job: dict[str, Any], plan: Plan) -> float:
    """Of a step."""
    d, p, _ = (dict(plan)[axis] for axis in AXES)
    m = job["batch"] // d
    return (m + p - 1) * sum(_micro_batch(job, plan)) + _gradients(job, plan)


def _micro_batch(job: dict[str, Any], plan: Plan) -> tuple[float, float, float]:
    """Seconds of a micro-batch on a stage: compute, tensor's all-reduces, pipeline's messages."""
    link, (_, p, t) = _links(job, plan), (dict(plan)[axis] for axis in AXES)
    message = 2 * job["tokens"] * job["width"]
    compute = 6 * job["params"] * job["tokens"] / (p * t * job["flops"])
    reduce = 4 * (job["layers"] / p) * 2 * (t - 1) / t * message / link["tensor"]
    hop = 2 * message / link["pipeline"] if p > 1 else 0.0
    return compute, reduce, hop


def _gradients(job: dict[str, Any], plan: Plan) -> float:
    """Seconds in which the replicas average their gradients."""
    d, p, t = (dict(plan)[axis] for axis in AXES)
    link = _links(job, plan)["data"]
    return 2 * (d - 1) / d * 2 * job["params"] / (p * t) / link


def _links(job: dict[str, Any], plan: Plan) -> dict[str, float]:
    """The speed of each axis's links."""
    links, inside = {}, 1
    for axis, n in plan:
        inside *= n
        links[axis] = job["near"] if job["per_node"] % inside == 0 else job["far"]
    return links


def _best(job: dict[str, Any]) -> float | None:
    fitting = [_seconds(job, plan) for plan in _plans(job) if _needs(job, plan) <= job["memory"]]
    return min(fitting, default=None)


def _read_plan(plan: Any) -> Plan | str:
    """The plan, or what is wrong with its form."""
    form = "must be a list of three pairs, an axis and its size"
    if not isinstance(plan, list) or len(plan) != 3:
        return f"A plan {form}."
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in plan):
        return f"A plan {form}."
    if {axis for axis, _ in plan if isinstance(axis, str)} != set(AXES):
        return f"A plan names {', '.join(AXES)}, each once."
    sizes = [whole(size) for _, size in plan]
    if any(size is None or size < 1 for size in sizes):
        return "A size must be a whole number of at least 1."
    return [(axis, size) for (axis, _), size in zip(plan, sizes, strict=True)]


Judge = Callable[[dict[str, Any], Plan, Any, Any], str | None]


def _each_plan(seen: Observed, judge: Judge) -> str | None:
    """The first complaint about the answer to a job that some plan fits."""
    jobs = seen.case.inputs[0]["jobs"]
    for job, got in zip(jobs, seen.data[0]["plans"], strict=True):
        if _best(job) is None:
            if got is not None:
                return "No plan fits this model: the answer is None."
            continue
        if got is None:
            return "None is for a model that no plan fits, and here some plan fits: try them all."
        if not isinstance(got, list) or len(got) != 3:
            return "The answer must be three things: a plan, its seconds and its bytes."
        plan = _read_plan(got[0])
        if isinstance(plan, str):
            return plan
        if wrong := judge(job, plan, got[1], got[2]):
            return f"{plan} for {job['params'] / GB:.3g} billion parameters: {wrong}"
    return None


def _place_numbers(seen: Observed) -> str | None:
    """Whether seconds and bytes are those of the plan that was returned."""

    def judge(job: dict[str, Any], plan: Plan, seconds: Any, held: Any) -> str | None:
        if wrong := _divides(job, dict(plan)):
            return wrong
        size = dict(plan)
        m, p = job["batch"] // size["data"], size["pipeline"]
        right = _seconds(job, plan)
        gradients = _gradients(job, plan)
        fast = _seconds({**job, "far": job["near"]}, plan)
        (_, reduce, hop), t = _micro_batch(job, plan), size["tensor"]
        more = {
            "is without the messages between stages.": -hop,
            "counts one message between stages for a micro-batch: an activation goes one way, and "
            "its gradient the other.": -hop / 2,
            "counts two all-reduces for each layer; forward and backward together have four.": (
                -reduce / 2
            ),
            "takes an all-reduce as one tensor; on a ring a rank sends 2(t - 1)/t of it.": (
                reduce * (t / (2 * (t - 1)) - 1) if t > 1 else 0.0
            ),
        }
        mistakes = {words: right + (m + p - 1) * change for words, change in more.items()}
        mistakes |= {
            "is without the bubble: the pipeline fills and drains.": (
                (right - gradients) * m / (m + p - 1) + gradients
            ),
            "is without the gradients, which the replicas average.": right - gradients,
            "takes all links as near.": fast,
        }
        wrong = explain_number(seconds, right, "the time of a step", mistakes)
        activations = _needs(job, plan) - 16 * job["params"] / (p * size["tensor"])
        mistakes = {
            "is without the activations.": _needs(job, plan) - activations,
            "counts the activations of all m micro-batches; min(p, m) are live.": (
                _needs(job, plan) - activations + activations * m / min(p, m)
            ),
            "counts the activations of one micro-batch; min(p, m) are live.": (
                _needs(job, plan) - activations * (1 - 1 / min(p, m))
            ),
        }
        return wrong or explain_number(held, _needs(job, plan), "the number of bytes", mistakes)

    return _each_plan(seen, judge)


def _place_fits(seen: Observed) -> str | None:
    def judge(job: dict[str, Any], plan: Plan, _: Any, __: Any) -> str | None:
        if wrong := _divides(job, dict(plan)):
            return wrong
        needed = _needs(job, plan)
        if needed > job["memory"]:
            return f"{needed / GB:.1f} GB are needed, a device has {job['memory'] / GB:.0f}."
        return None

    return _each_plan(seen, judge)


def _place_fast(seen: Observed) -> str | None:
    def judge(job: dict[str, Any], plan: Plan, _: Any, __: Any) -> str | None:
        took, best = _seconds(job, plan), _best(job)
        if took <= WITHIN * best:
            return None
        orders = [list(order) for order in permutations(plan)]
        if min(_seconds(job, order) for order in orders) <= WITHIN * best:
            return (
                f"these sizes are right, and in this order the step takes {took / best:.2f} times "
                "as long as it could. Which axis should stay inside a node?"
            )
        inside = 1
        for axis, size in plan:
            inside *= size
            if axis == "tensor":
                break
        if dict(plan)["tensor"] > 1 and job["per_node"] % inside:
            return (
                f"the step takes {took / best:.2f} times as long as it could. The tensor axis "
                "crosses nodes."
            )
        return f"the step takes {took / best:.2f} times as long as it could."

    return _each_plan(seen, judge)


PLACE = Task(
    id="14.place",
    title="Place a model on nodes",
    answer="place",
    job="lesson14.place",
    minutes=25,
    cases=_place_cases,
    criteria=(
        Criterion("seconds and bytes are those of the plan", 2, _place_numbers),
        Criterion("the plan fits the memory", 1, _place_fits, on=("",)),
        Criterion("one device, a tight fit, and nothing fits", 1, _place_fits, on=("edge",)),
        Criterion("within 5% of the best", 2, _place_fast, on=("",)),
        Criterion("the job is unchanged", 1, unchanged),
    ),
    hints=(
        "What does a rank send along each axis, for a micro-batch or for a step? And how many "
        "plans are there in all: too many to try?",
        "Loops over sizes that divide, and the six orders of the axes. For each: does it fit, and "
        "how long does a step take?",
        "for t, for p that divide; d = ranks // (t * p); for order in permutations: walk the axes "
        "from the inside with a running product; the axis is near if that product divides "
        "per_node. Keep the fastest that fits.",
    ),
    debrief="Real planners (Alpa, Megatron's and DeepSpeed's guides) do this with measured times. "
    "ZeRO, sequence parallelism and interleaving would be further choices.",
)

# -- 14.cut_layers ---------------------------------------------------------------------------------

Cut = list[int]
Keeps = Callable[[int, int, int], int]  # (stages, stage, micros) -> micro-batches kept


def _one_f_one_b_keeps(stages: int, stage: int, micros: int) -> int:
    return min(stages - stage, micros)


ONE = "a stage kept one micro-batch"
NO_LIMIT = "memory had no limit"
OTHER_KEEPS: dict[str, Keeps] = {
    "every stage kept all micro-batches, as in GPipe": lambda p, s, m: m,
    "every stage kept as many micro-batches as the first": lambda p, s, m: min(p, m),
    "a stage kept one micro-batch more": lambda p, s, m: min(p - s + 1, m),
    "the last stage kept most": lambda p, s, m: min(s + 1, m),
    ONE: lambda p, s, m: 1,
    NO_LIMIT: lambda p, s, m: -(10**18),
    "a stage kept one micro-batch less": lambda p, s, m: min(p - s - 1, m),
    "a stage could keep more micro-batches than there are": lambda p, s, m: p - s,
}


def _stages_of(numbers: Sequence[int], cut: Cut) -> list[int]:
    """The sum over each stage."""
    ends = list(accumulate(cut))
    return [sum(numbers[end - n : end]) for n, end in zip(cut, ends, strict=True)]


def _stage_bytes(asked: dict[str, Any], cut: Cut, keeps: Keeps = _one_f_one_b_keeps) -> list[int]:
    held, kept = (_stages_of(asked[name], cut) for name in ("held", "kept"))
    stages, micros = asked["stages"], asked["micros"]
    pairs = zip(held, kept, strict=True)
    return [h + keeps(stages, s, micros) * k for s, (h, k) in enumerate(pairs)]


def _cuts(layers: int, stages: int) -> Iterator[Cut]:
    for ends in combinations(range(1, layers), stages - 1):
        yield [b - a for a, b in pairwise((0, *ends, layers))]


def _slowest(asked: dict[str, Any], cut: Cut) -> int:
    return max(_stages_of(asked["times"], cut))


@lru_cache(maxsize=64)
def _by_pace(*lists: tuple[int, ...], stages: int) -> list[tuple[Cut, list[int], list[int]]]:
    """Every cut, the fastest first, with what each stage holds and keeps of a micro-batch."""
    times, held, kept = lists
    cuts = sorted(_cuts(len(times), stages), key=lambda cut: max(_stages_of(times, cut)))
    return [(cut, _stages_of(held, cut), _stages_of(kept, cut)) for cut in cuts]


def _best_cut(asked: dict[str, Any], keeps: Keeps = _one_f_one_b_keeps) -> Cut | None:
    stages, memory = asked["stages"], asked["memory"]
    counts = [keeps(stages, s, asked["micros"]) for s in range(stages)]
    lists = (tuple(asked[name]) for name in ("times", "held", "kept"))
    for cut, held, kept in _by_pace(*lists, stages=stages):
        if all(h + n * k <= memory for h, n, k in zip(held, counts, kept, strict=True)):
            return list(cut)
    return None


def _right_cut(asked: dict[str, Any], cut: Cut | None, keeps: Keeps = _one_f_one_b_keeps) -> bool:
    """Whether the cut is a best one, with stages that keep so many micro-batches."""
    best = _best_cut(asked, keeps)
    if cut is None or best is None or len(cut) != asked["stages"]:
        return cut == best
    fits = max(_stage_bytes(asked, cut, keeps)) <= asked["memory"]
    return fits and _slowest(asked, cut) == _slowest(asked, best)


TOO_CAREFUL = list(OTHER_KEEPS.values())[:3]
# rules that often give the same cuts
ALIKE = [*combinations(TOO_CAREFUL, 2), (OTHER_KEEPS[ONE], OTHER_KEEPS[NO_LIMIT])]


def _most_even(asked: dict[str, Any]) -> Cut:
    """The cut that fits and whose slowest stage is least behind the fastest."""

    def difference(cut: Cut) -> int:
        return _slowest(asked, cut) - min(_stages_of(asked["times"], cut))

    cuts = _cuts(len(asked["times"]), asked["stages"])
    fit = (cut for cut in cuts if max(_stage_bytes(asked, cut)) <= asked["memory"])
    return min(fit, key=difference)


def _cut_cases(rng: torch.Generator) -> list[Case]:
    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    def row(layers: int, low: int, high: int) -> list[int]:
        return [number(low, high) for _ in range(layers)]

    def layers(count: int) -> dict[str, Any]:
        return {
            "times": row(count, 5, 60),
            "held": row(count, 100, 2000),
            "kept": row(count, 100, 500),
        }

    def varied(
        count: int, stages: int, micros: int, *, telling: bool = False
    ) -> list[dict[str, Any]]:
        """A question, with each argument in turn changed; the first one's cut is wrong for each.

        telling: an answer that counts otherwise what a stage keeps is wrong, too, in one of them,
        and one that counts too much finds no cut for one of them.
        """
        while True:
            asked = layers(count) | {"stages": stages, "micros": micros}
            cuts = list(_cuts(count, stages))
            sizes = sorted(max(_stage_bytes(asked, cut)) for cut in cuts)
            asked["memory"] = sizes[number(1, len(cuts) // 2)] + number(20, 60)
            best = _best_cut(asked)
            again = layers(count)
            others = [{name: again[name]} for name in again] + [
                {"stages": stages - 1},
                {"micros": 1},
                {"memory": asked["memory"] * 3},
            ]
            every = [asked, *(asked | other for other in others)]
            bests = [_best_cut(q) for q in every]
            same = any(_right_cut(other, best) for other in every[1:])
            if same or None in bests:
                continue
            if not telling:
                return every
            if not all(None in [_best_cut(q, keeps) for q in every] for keeps in TOO_CAREFUL):
                continue
            alike = any(
                all(_right_cut(q, _best_cut(q, other), named) for q in every)
                for named, other in ALIKE
            )
            mistaken = [[_best_cut(q, keeps) for q in every] for keeps in OTHER_KEEPS.values()]
            mistaken.append([_most_even(q) for q in every])
            if not alike and not any(all(map(_right_cut, every, cuts)) for cuts in mistaken):
                return every

    def limits(count: int, stages: int, micros: int) -> list[dict[str, Any]]:
        asked = layers(count) | {"stages": stages, "micros": micros}
        least = _least_bytes(asked)
        return [asked | {"memory": memory} for memory in (least, least - 1, 0, 10**15)]

    def plain(count: int, stages: int, micros: int) -> list[dict[str, Any]]:
        return [layers(count) | {"stages": stages, "micros": micros, "memory": 10**15}]

    def case(says: str, kind: str, questions: list[list[dict[str, Any]]]) -> Case:
        return Case(says, [{"questions": [q for group in questions for q in group]}], kind)

    return [
        case(
            "cuts that memory limits",
            "",
            [varied(7, 3, 8, telling=True), varied(7, 4, 3), varied(6, 3, 2)],
        ),
        case("to the byte, and too little", "exact", [limits(8, 3, 5), limits(12, 4, 2)]),
        case(
            "one layer or stage, as many stages as layers, more stages",
            "few",
            [
                plain(1, 1, 1),
                plain(12, 1, 4),
                limits(4, 4, 6),
                [q | {"stages": 5} for q in plain(4, 4, 6)],
                [q | {"stages": 2} for q in plain(1, 1, 3)],
            ],
        ),
    ]


def _asked(asked: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in asked.items())


def _cut_fits(seen: Observed) -> str | None:
    for asked, cut in zip(seen.case.inputs[0]["questions"], seen.data[0]["cuts"], strict=True):
        layers, stages, message = len(asked["times"]), asked["stages"], f"With {_asked(asked)}:"
        if cut is None:
            if (best := _best_cut(asked)) is None:
                continue
            return f"{message} None is wrong, {best} fits.{_why(seen)}"
        if type(cut) is not list or any(type(n) is not int for n in cut):
            return f"{message} return a list of ints, or None, not {cut!r}."
        if stages > layers:
            return f"{message} {layers} layers make at most {layers} stages: return None."
        if len(cut) != stages or sum(cut) != layers or min(cut) < 1:
            return (
                f"{message} return {stages} numbers of layers, each at least 1, that add up to "
                f"{layers}, not {cut}."
            )
        if wrong := _too_large(asked, cut):
            return f"{message} {wrong}{_why(seen)}"
    return None


def _too_large(asked: dict[str, Any], cut: Cut) -> str | None:
    sizes, memory = _stage_bytes(asked, cut), asked["memory"]
    if max(sizes) <= memory:
        return None
    stage = sizes.index(max(sizes))
    keeps = _one_f_one_b_keeps(asked["stages"], stage, asked["micros"])
    message = f"in {cut}, stage {stage} keeps {keeps} micro-batches and takes {max(sizes):,} bytes."
    if _best_cut(asked) is None:
        return f"{message} Nothing fits here: return None."
    return message


def _why(seen: Observed) -> str:
    """A mistake that explains all cuts of a case, as a sentence."""
    pairs = [
        (asked, cut)
        for asked, cut in zip(seen.case.inputs[0]["questions"], seen.data[0]["cuts"], strict=True)
        if cut is None or (len(cut) == asked["stages"] and sum(cut) == len(asked["times"]))
    ]
    for mistake, keeps in OTHER_KEEPS.items():
        if all(_right_cut(asked, cut, keeps) for asked, cut in pairs):
            return f" Yours are the best cuts if {mistake}."
    if any(cut is None for _, cut in pairs):
        return ""
    if all(max(cut) - min(cut) <= 1 for _, cut in pairs):
        return " As many layers are neither as fast nor as large."
    if all(max(_stage_bytes(asked, cut)) == _least_bytes(asked) for asked, cut in pairs):
        return " Yours take the least memory. It has only to fit."
    return ""


def _least_bytes(asked: dict[str, Any]) -> int:
    cuts = _cuts(len(asked["times"]), asked["stages"])
    return min(max(_stage_bytes(asked, cut)) for cut in cuts)


def _cut_fastest(seen: Observed) -> str | None:
    if wrong := _cut_fits(seen):
        return wrong
    for asked, cut in zip(seen.case.inputs[0]["questions"], seen.data[0]["cuts"], strict=True):
        if not _right_cut(asked, cut):
            best = _best_cut(asked)
            return (
                f"With {_asked(asked)}: the slowest stage of {cut} takes {_slowest(asked, cut)}, "
                f"and {_slowest(asked, best)} is possible: it sets the pace.{_why(seen)}"
            )
    return None


CUT = Task(
    id="14.cut_layers",
    title="Cut by time, fit by memory",
    answer="cut_layers",
    job="lesson14.cut_layers",
    minutes=15,
    cases=_cut_cases,
    criteria=(
        Criterion("cuts that fit the memory", 2, _cut_fits, on=("",)),
        Criterion("the slowest stage is as fast as possible", 2, _cut_fastest, on=("",)),
        Criterion("to the byte, and None where nothing fits", 1, _cut_fastest, on=("exact",)),
        Criterion("one stage, one layer each, too few layers", 1, _cut_fastest, on=("few",)),
        Criterion("the arguments stay as they are", 1, unchanged),
    ),
    hints=(
        "How many micro-batches does 1F1B keep on the first stage, and how many on the last?",
        "A layer that keeps much is cheap at the end of the pipeline. So the cut with equal times "
        "may not fit, and the next best gives early stages less.",
        "for ends in itertools.combinations(range(1, layers), stages - 1): sum each stage; it fits "
        "if held + min(stages - s, micros) * kept <= memory on each; keep the cut whose slowest "
        "stage is fastest.",
    ),
    debrief="Megatron-LM cuts by equal numbers of layers unless told otherwise. DeepSpeed's "
    "PipelineModule balances layers or parameters, and neither looks at how many micro-batches a "
    "stage keeps.",
)

TASKS = [ONE_F_ONE_B, COLUMN_ROW, PLACE, CUT]
