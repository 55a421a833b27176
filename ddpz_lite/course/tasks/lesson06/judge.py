"""Tasks of lesson 06: sending less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddpz_lite.course.check.compare import close, differs
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vocabulary import (
    explain,
    ops_of_all,
    same_on_all_ranks,
    sent_by_all,
    unchanged,
    world_name,
)
from ddpz_lite.course.tasks.lesson06 import job

# -- 06.top_k --------------------------------------------------------------------------------------

STEPS = 10
PLACE = 4  # bytes
FLOATS = ("float32", "float16", "bfloat16")  # none of them is the dtype of float64 values


def _top_k_cases(rng: torch.Generator) -> list[Case]:
    def stream(
        shape: tuple[int, ...], k: int, dtype: torch.dtype, steps: int, ties: bool = False
    ) -> dict[str, Any]:
        """ties: many values are equal."""
        drawn = torch.randn((steps, *shape), generator=rng).to(dtype)
        return {"gradients": list((2 * drawn).round() / 2 if ties else drawn), "k": k}

    def case(world: int, says: str, *streams: tuple, kind: str = "") -> Case:
        inputs = [{"streams": [stream(*s) for s in streams]} for _ in range(world)]
        return Case(f"{world_name(world)}, {says}", inputs, kind)

    f32, f64 = torch.float32, torch.float64
    return [
        case(3, "5 of 47", ((47,), 5, f32, STEPS)),
        case(2, "two tensors in turn", ((31,), 4, f32, 4), ((3, 7), 2, f64, 4)),
        case(4, "3 of 26 in float64", ((26,), 3, f64, 3)),
        case(1, "4 of 22, many of them equal", ((22,), 4, f32, 3, True)),
        case(3, "all of 7, then 1 of 9", ((7,), 7, f32, 2), ((9,), 1, f32, 2)),
        case(2, "3 of 9 and 5 of 9, in turn", ((9,), 3, f32, 3), ((9,), 5, f32, 3)),
        case(2, "3 of 70,001", ((70_001,), 3, f32, 2)),
    ]


def _totals(seen: Observed, number: int) -> list[torch.Tensor]:
    """By rank: gradient + residual of the number-th call, the residual as the rank returned it."""
    index, step = _call(seen, number)
    totals = []
    for inputs, got in zip(seen.case.inputs, seen.data, strict=True):
        gradient = inputs["streams"][index]["gradients"][step]
        before = [r for i, s, _, r in got["steps"] if (i, s) == (index, step - 1)]
        totals.append(gradient + before[0] if before else gradient.clone())
    return totals


def _call(seen: Observed, number: int) -> tuple[int, int]:
    """(stream, step) of the number-th call: the job takes the streams in turn."""
    return tuple(seen.data[0]["steps"][number][:2])


def _largest(total: torch.Tensor, k: int, of: Callable = torch.abs) -> torch.Tensor:
    """`total` with all but its k largest set to zero."""
    places = of(total).flatten().topk(k).indices
    kept = torch.zeros_like(total).flatten()
    kept[places] = total.flatten()[places]
    return kept.view(total.shape)


def _chosen(total: torch.Tensor, k: int, residual: Any) -> torch.Tensor:
    """The same, where of equal entries those come first that the residual lacks."""
    if not _like(residual, total):
        return _largest(total, k)
    gone = (residual.flatten() == 0).to(torch.int8).argsort(descending=True, stable=True)
    order = gone[total.flatten()[gone].abs().argsort(descending=True, stable=True)]
    kept = torch.zeros_like(total).flatten()
    kept[order[:k]] = total.flatten()[order[:k]]
    return kept.view(total.shape)


def _kept(seen: Observed) -> str | None:
    """The residual of each call, given that of the one before."""
    for number in range(len(seen.data[0]["steps"])):
        index, step = _call(seen, number)
        totals = _totals(seen, number)
        for rank, (total, got) in enumerate(zip(totals, seen.data, strict=True)):
            stream = seen.case.inputs[rank]["streams"][index]
            gradient, k = stream["gradients"][step], stream["k"]
            residual, mean = got["steps"][number][3], got["steps"][number][2]
            what = f"Rank {rank}'s residual after step {step + 1}"
            wanted = total - _chosen(total, k, residual)
            own = gradient - _largest(gradient, k)
            mistakes = {
                "is all zeros: what was not sent is lost.": torch.zeros_like(total),
                "lacks more than k entries. Others are as large as the smallest one that was "
                "sent, but were not sent.": (
                    total * (total.abs() < total.abs().flatten().topk(k).values[-1])
                ),
                "still holds what was sent, so it will be sent again.": total,
                "is this rank's total minus the mean. Subtract what this rank itself has sent.": (
                    total - mean if _like(mean, total) else wanted
                ),
                "forgets the residual of the step before.": own,
                "leaves out the residual that came in.": gradient * (_largest(total, k) == 0),
                "lacks the largest values. Choose by absolute value.": (
                    total - _largest(total, k, of=lambda t: t)
                ),
                "is what was sent, and not what was left.": total - wanted,
                "lacks the largest entries of the gradient. Choose among gradient + residual.": (
                    total - total * (_largest(gradient, k) != 0)
                ),
            }
            if wrong := explain(residual, wanted, what, mistakes):
                return wrong
    return None


def _like(got: Any, wanted: torch.Tensor) -> bool:
    return type(got) is torch.Tensor and (got.dtype, got.shape) == (wanted.dtype, wanted.shape)


def _top_k_mean(seen: Observed) -> str | None:
    world = seen.case.world
    for number in range(len(seen.data[0]["steps"])):
        index, step = _call(seen, number)
        k = seen.case.inputs[0]["streams"][index]["k"]
        left = [got["steps"][number][3] for got in seen.data]
        totals = zip(_totals(seen, number), left, strict=True)
        sent = torch.stack([_chosen(total, k, residual) for total, residual in totals])
        for rank, got in enumerate(seen.data):
            mean = got["steps"][number][2]
            what = f"Rank {rank}'s mean in step {step + 1}"
            mistakes = {
                "is the sum over the ranks. Divide by their number.": sent.sum(0),
                "is half of the sum. Use dist.get_world_size().": sent.sum(0) / 2,
                "is what the rank sent itself: nothing of the others arrived.": sent[rank],
                "is the mean of all entries, but each rank sends only k.": torch.stack(
                    _totals(seen, number)
                ).mean(0),
                "divides each place by the number of ranks that sent it. Divide by all ranks.": (
                    sent.sum(0) / (sent != 0).sum(0).clamp(min=1)
                ),
                "has one rank's value alone where several sent the same place: add them up.": (
                    _overwritten(sent) / world
                ),
            }
            wrong = explain(mean, sent.mean(0), what, mistakes if world > 1 else {})
            if wrong and _like(mean, sent[rank]) and torch.equal(mean != 0, sent[rank] != 0):
                return (
                    f"{what} has values only at this rank's own places. The others sent other "
                    "places, so send the places with the values."
                )
            if wrong:
                return wrong
    return None


def _overwritten(sent: torch.Tensor) -> torch.Tensor:
    """What is left of sent (N, *) if each rank writes over those before it."""
    left = torch.zeros_like(sent[0])
    for one in sent:
        left = torch.where(one != 0, one, left)
    return left


def _top_k_bytes(seen: Observed) -> str | None:
    world = seen.case.world
    streams = [
        (s["k"], s["gradients"][0].itemsize, len(s["gradients"]))
        for s in seen.case.inputs[0]["streams"]
    ]
    most = sum(world * (world - 1) * k * (size + PLACE) * steps for k, size, steps in streams)
    sent = sent_by_all(seen)
    calls = [call for rank in range(world) for call in seen.calls(rank)]
    if {size for _, size, _ in streams} == {8} and any(c.dtype in FLOATS for c in calls):
        if not any(c.dtype == "float64" for c in calls):
            return "Gradients are float64, but no float64 is sent: values lose half of their bits."
        return (
            "Places are sent as floats, but float32 holds whole numbers only up to 16,777,216. In "
            "a larger tensor they would point to other entries."
        )
    if sent <= most:
        return None
    with_int64 = sum(world * (world - 1) * k * (size + 8) * steps for k, size, steps in streams)
    why = " Places as int64 take twice as many bytes as they need." if sent == with_int64 else ""
    return (
        f"All ranks sent {sent:,} bytes with {ops_of_all(seen)}; k values and k places of four "
        f"bytes, to each other rank, are {most:,}.{why}"
    )


def _means(got: Any) -> list[Any]:
    return [mean for _, _, mean, _ in got["steps"]]


def _top_k_same(seen: Observed) -> str | None:
    return same_on_all_ranks(seen, _means) or unchanged(seen)


TOP_K = Task(
    id="06.top_k",
    title="The largest k, and what is left",
    answer="top_k",
    job="lesson06.top_k",
    minutes=15,
    cases=_top_k_cases,
    criteria=(
        Criterion("a rank keeps what it does not send", 2, _kept),
        Criterion("the mean of what the ranks sent", 2, _top_k_mean),
        Criterion("k values and k places travel, no more", 1, _top_k_bytes),
        Criterion("the same bits on all ranks; the inputs stay", 1, _top_k_same),
    ),
    hints=(
        "What must another rank know about an entry besides its value? What must this rank keep "
        "of an entry that it does not send? What if two ranks send the same place?",
        "Add the residual first, then choose. The new residual is the total with zeros at the "
        "chosen places. The rest follows from gathering values and places.",
        "total = gradient + residual; places = total.abs().flatten().topk(k).indices; all_gather "
        "values, and places as int32; for each rank: mean.index_add_(0, places, values); divide.",
    ),
    debrief="ddpz_lite's TopK packs values and places into one message and does this in every "
    "bucket. Above a share of 1/N it sends more than float32 would: all pairs go to all ranks.",
)

# -- 06.int8_mean ----------------------------------------------------------------------------------

SHARE = 0.30  # of what an all-reduce of float32 sends


def _int8_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, says: str, *made: Callable[[], torch.Tensor], kind: str = "") -> Case:
        inputs = [{"gradients": [make() for make in made]} for _ in range(world)]
        return Case(f"{world_name(world)}, {says}", inputs, kind)

    def normal(*shape: int, dtype: torch.dtype = torch.float32, times: float = 1.0):
        # a rank's largest value is its own: scales differ
        def make() -> torch.Tensor:
            spread = times * 3 ** torch.rand(1, generator=rng).item()
            return (spread * torch.randn(shape, generator=rng)).to(dtype)

        return make

    def outlier() -> torch.Tensor:
        values = normal(1501)()
        values[7] = 1e6
        return values

    def same(case: Case) -> Case:
        """All ranks with rank 0's gradients: here errors of one sign do not average out."""
        for rank in case.inputs[1:]:
            rank["gradients"] = list(case.inputs[0]["gradients"])
        return case

    return [
        case(3, "1,000 gradients", normal(1000)),
        same(case(2, "the same 999 gradients on both", normal(999), normal(999))),
        case(4, "1,403 gradients, then 59 x 23", normal(1403), normal(59, 23)),
        case(2, "1,201 gradients in float64", normal(1201, dtype=torch.float64)),
        case(1, "905 gradients", normal(905)),
        case(3, "zeros, then others", lambda: torch.zeros(1100), normal(1100), kind="odd"),
        case(2, "an outlier", outlier, kind="odd"),
        case(3, "tiny ones", normal(1300, times=1e-12), kind="odd"),
        case(4, "three gradients, then one", normal(3), normal(1), kind="few"),
    ]


def _steps(seen: Observed, call: int) -> float:
    """A step of int8 for the largest value of any rank."""
    return max(rank["gradients"][call].abs().max().item() for rank in seen.case.inputs) / 127


def _int8_values(seen: Observed) -> str | None:
    for call in range(len(seen.case.inputs[0]["gradients"])):
        stack = torch.stack([rank["gradients"][call] for rank in seen.case.inputs])
        for rank, got in enumerate(seen.data):
            if call in got["undefined"]:
                return (
                    f"Rank {rank} made an int8 of something that is not finite. The scale of zeros "
                    "is 0, and 0 / 0 is not a number, so its int8 is arbitrary. Divide zeros by "
                    "another scale."
                )
            if wrong := _off(got["means"][call], stack, rank, call, _steps(seen, call)):
                return wrong
    return None


def _off(got: Any, stack: torch.Tensor, rank: int, call: int, step: float) -> str | None:
    """Half a step at each of two hops: one step in all, and a little for rounding."""
    mean = stack.mean(0)
    what = f"Rank {rank}'s mean" + (f" of tensor {call + 1}" if call else "")
    if not _like(got, mean):
        return differs(got, mean, what) or f"{what} is not what was expected."
    if not got.isfinite().all():
        return f"{what} holds values that are not finite."
    off = (got - mean).abs().max().item()
    if off <= 1.01 * step:
        return None
    near = {
        "is the sum over the ranks. Divide by their number.": stack.sum(0),
        "is half of the sum. Use dist.get_world_size().": stack.sum(0) / 2,
        "is the rank's own gradient.": stack[rank],
        "is zero everywhere: the steps are too large for it.": torch.zeros_like(mean),
        **{f"adds up int8 {where}": sums for where, sums in _wrapped_sums(stack).items()},
    }
    for words, other in near.items():
        if len(stack) > 1 and (got - other).abs().max().item() <= len(stack) * 1.5 * step:
            return f"{what} {words}"
    if off <= 2.05 * step:
        return (
            f"{what} is off by {off / step:.2f} steps of the scale; half a step at each of two "
            "hops is 1. Are values rounded to the nearest step, or cut off?"
        )
    return (
        f"{what} is off by {off / step:.1f} steps of the scale; half a step at each of two hops "
        "is 1. Is every step within -127 to 127? Is each part multiplied by its own scale?"
    )


def _wrapped_sums(stack: torch.Tensor) -> dict[str, torch.Tensor]:
    """Means from sums of int8, of steps with one scale for all ranks and with one for each."""
    tops = stack.abs().flatten(1).amax(1)
    means = {}
    for where, scales in {
        "of one scale, and sums above 127 wrap around: 100 + 100 is -56. Add floats.": (
            tops.amax().expand_as(tops)
        ),
        "of several scales, and sums above 127 wrap around: 100 + 100 is -56. Add floats.": tops,
    }.items():
        scales = scales.clamp(min=torch.finfo(stack.dtype).tiny) / 127
        steps = (stack / scales.view(-1, *[1] * (stack.dim() - 1))).round().to(torch.int8)
        means[where] = steps.sum(0, dtype=torch.int8) * scales.mean() / len(stack)
    return means


def _int8_bytes(seen: Observed) -> str | None:
    world = seen.case.world
    whole = [4 * g.numel() for g in seen.case.inputs[0]["gradients"]]
    float32 = 2 * (world - 1) * sum(whole)
    sent = sent_by_all(seen)
    if sent <= SHARE * float32:
        return None
    return (
        f"All ranks sent {sent:,} bytes with {ops_of_all(seen)}: {sent / float32:.2f} of what an "
        f"all-reduce of float32 sends, and {SHARE:.2f} are allowed. Full tensors to all ranks are "
        "(N-1) n bytes a rank. A part to its owner and its mean to all ranks are 2(N-1)/N n."
    )


def _int8_same(seen: Observed) -> str | None:
    return same_on_all_ranks(seen, lambda got: got["means"]) or unchanged(seen)


INT8 = Task(
    id="06.int8_mean",
    title="A mean in eight bits",
    answer="int8_mean",
    job="lesson06.int8_mean",
    minutes=25,
    cases=_int8_cases,
    criteria=(
        Criterion("off by half a step at each hop, at most", 2, _int8_values, on=("",)),
        Criterion("zeros, an outlier, tiny ones, very few", 1, _int8_values, on=("odd", "few")),
        Criterion("the same bits on all ranks; the input stays", 1, _int8_same),
        Criterion("at most 0.30 of the bytes of float32", 2, _int8_bytes, on=("", "odd")),
    ),
    hints=(
        "100 + 100 does not fit an int8. Where can the sum be taken, and in which type?",
        "Each rank owns a part. The others send it theirs, with their scales; it adds them in "
        "float32 and sends the mean back as int8, with its own scale.",
        "pad to N equal parts; scale = max / 127, or 1 if that is 0; all_to_all_single of int8; "
        "all_gather of scales; mean = sum of parts * scales / N; the same again: quantise, "
        "all_gather, dequantise, also the own part.",
    ),
    debrief="ddpz_lite's Int8 has a scale for each block of 256, so that an outlier coarsens its "
    "block alone, and packs scales and steps into one message. ZeRO++'s qgZ takes INT4 and two "
    "all-to-alls, inside the node and across, and gathers nothing: each rank keeps its part.",
)

# -- 06.local_sgd ----------------------------------------------------------------------------------

LR = 0.25
RTOL = None  # that of the dtype: an average of rounded weights is off by more


def _local_cases(rng: torch.Generator) -> list[Case]:
    def weights(shape: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
        a, b = shape
        drawn = [torch.randn(s, generator=rng) for s in ((a, b), (b,), (b, 2))]
        return [w.to(dtype) for w in drawn]

    def case(world: int, says: str, *runs: dict[str, Any], kind: str = "") -> Case:
        inputs: list[dict[str, Any]] = [{"runs": []} for _ in range(world)]
        for run in runs:
            dtype = run.get("dtype", torch.float32)
            begun = weights(run["shape"], dtype)
            for rank, local in enumerate(inputs):
                micro = [run["micro"] + (rank % 2 if run.get("uneven") else 0)] * run["steps"]
                batches = [
                    [torch.randn(3, run["shape"][0], generator=rng).to(dtype) for _ in range(m)]
                    for m in micro
                ]
                local["runs"].append(
                    {
                        "weights": begun,
                        "batches": batches,
                        "every": run["every"],
                        "options": {"lr": LR, "momentum": run.get("momentum", 0.0)},
                    }
                )
        return Case(f"{world_name(world)}, {says}", inputs, kind)

    def run(every: int, steps: int, micro: int = 1, **more: Any) -> dict[str, Any]:
        return {"shape": (4, 3), "every": every, "steps": steps, "micro": micro, **more}

    other = {"shape": (2, 5), "dtype": torch.float64}
    return [
        case(3, "7 steps, every 4, two micro-batches", run(4, 7, 2)),
        case(
            2,
            "every step, then 3 steps and every 2, then 5 and every 3",
            *(run(1, 3), run(2, 3), run(3, 5, **other)),
        ),
        case(4, "3 steps, every 5, unequal numbers of micro-batches", run(5, 3, 1, uneven=True)),
        case(1, "6 steps, every 2", run(2, 6)),
        case(3, "momentum, 8 steps, every 3", run(3, 8, momentum=0.9), kind="momentum"),
        case(2, "momentum, 4 steps, every 2", run(2, 4, momentum=0.5, **other), kind="momentum"),
    ]


Meet = Callable[[int, int], bool]  # (steps taken, micro-batches seen) -> whether ranks meet


def _simulated(
    seen: Observed,
    number: int,
    *,
    meet: Meet | None = None,
    scale: float | None = None,
    momenta: str = "averaged",
    tail: bool = True,
    slip: str = "",
) -> list[dict[str, Any]]:
    """By rank, what the job returns of a run that goes by the book, or wrong in one way.

    meet: when ranks meet. scale: what the sum is multiplied with. momenta: "averaged" as well, or
    "own", or "dropped". tail: ranks meet after the last step. slip: gradients are "kept" for the
    next step, their "mean" over micro-batches is taken, "each" micro-batch has a step, or the
    "gradients" are averaged at a meeting in place of the weights.
    """
    runs = [rank["runs"][number] for rank in seen.case.inputs]
    every, world = runs[0]["every"], len(runs)
    meet = meet or (lambda steps, _: steps % every == 0)
    params = [[nn.Parameter(w.clone()) for w in run["weights"]] for run in runs]
    inner = [torch.optim.SGD(p, **run["options"]) for p, run in zip(params, runs, strict=True)]
    during: list[list[torch.Tensor]] = [[] for _ in runs]

    def average(tensors: list[list[torch.Tensor]], times: float) -> None:
        for same in zip(*tensors, strict=True):
            total = torch.stack([t.detach() for t in same]).sum(0) * times
            for tensor in same:
                tensor.data.copy_(total)

    micro, steps = 0, len(runs[0]["batches"])
    for step in range(1, steps + 1):
        for local, run, notes, optimizer in zip(params, runs, during, inner, strict=True):
            notes.append(job._flat(local))
            for x in run["batches"][step - 1]:
                job.backward(local, x)
                if slip == "each":
                    optimizer.step()
                    optimizer.zero_grad()
            if slip == "mean":
                for p in local:
                    p.grad /= len(run["batches"][step - 1])
        meets = meet(step, micro + len(runs[0]["batches"][step - 1])) or (tail and step == steps)
        if slip == "gradients" and meets:
            average([[p.grad for p in local] for local in params], 1 / world)
        for optimizer in inner:
            optimizer.step()
            if slip != "kept":
                optimizer.zero_grad()
        micro += len(runs[0]["batches"][step - 1])
        if meets and slip != "gradients":
            average(params, 1 / world if scale is None else scale)
            if momenta != "own" and runs[0]["options"]["momentum"]:
                average(_momenta(inner, params), 1 / world if momenta == "averaged" else 0.0)
    kept = _momenta(inner, params) if runs[0]["options"]["momentum"] else [None] * world
    return [
        {
            "during": during[r],
            "after": job._flat(params[r]),
            "momenta": None if kept[r] is None else job._flat(kept[r]),
        }
        for r in range(world)
    ]


def _momenta(inner: list[torch.optim.SGD], params: list[list[nn.Parameter]]) -> list[list[Any]]:
    return [
        [optimizer.state[p]["momentum_buffer"] for p in local]
        for optimizer, local in zip(inner, params, strict=True)
    ]


def _path(one: dict[str, Any]) -> list[torch.Tensor]:
    return [*one["during"], one["after"]]


def _follows(got: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a rank went this way, step by step."""
    local, right = _path(got), _path(wanted)
    return len(local) == len(right) and all(
        close(a, b, rtol=RTOL) for a, b in zip(local, right, strict=True)
    )


def _local_values(seen: Observed) -> str | None:
    for number in range(len(seen.case.inputs[0]["runs"])):
        right = _simulated(seen, number)
        for rank, got in enumerate(seen.data):
            local = got["runs"][number]
            if not _follows(local, right[rank]):
                return _explain_local(seen, number, rank, local, right[rank])
    return None


def _explain_local(
    seen: Observed, number: int, rank: int, local: dict[str, Any], right: dict[str, Any]
) -> str:
    run = seen.case.inputs[rank]["runs"][number]
    every, steps, world = run["every"], len(run["batches"]), seen.case.world
    if len(local["during"]) != steps:
        return f"Rank {rank} went through {len(local['during'])} steps, and there are {steps}."
    ways: dict[str, dict[str, Any]] = {
        "training continued with the sum of all weights, which is N times as long.": {"scale": 1.0},
        "the sum was divided by 2. Use dist.get_world_size().": {"scale": 0.5},
        "weights were never averaged.": {"meet": lambda s, m: False, "tail": False},
        "the steps after the last meeting were never averaged.": {"tail": False},
        "weights are those of DDP: ranks average in every step instead of stepping alone.": {
            "meet": lambda s, m: True
        },
        "meetings are counted in micro-batches. Count steps of the optimizer.": {
            "meet": lambda s, m: m % every == 0
        },
        "ranks meet a step too early.": {"meet": lambda s, m: (s - 1) % every == 0},
        "ranks meet a step too late.": {"meet": lambda s, m: s > 1 and (s - 1) % every == 0},
        "weights are averaged, but the momenta are not.": {"momenta": "own"},
        "momenta start from zero after a meeting. Average them.": {"momenta": "dropped"},
        "ranks meet only at the end.": {"meet": lambda s, m: False},
        "gradients of earlier steps are still there: a step starts with zeros.": {"slip": "kept"},
        "each micro-batch had its own optimizer step. Add up their gradients first.": {
            "slip": "each"
        },
        "gradients are averaged, but weights are not. Each rank steps alone, so the weights "
        "differ by now.": {"slip": "gradients"},
        "the sum over micro-batches was divided; the text asks for their sum.": {"slip": "mean"},
    }
    for words, way in ways.items():
        if world > 1 and _follows(local, _simulated(seen, number, **way)[rank]):
            return f"Rank {rank}: {words}"
    for step, (a, b) in enumerate(zip(_path(local), _path(right), strict=True)):
        if wrong := differs(a, b, f"What rank {rank} holds after step {step}", rtol=RTOL):
            return wrong
    return f"Rank {rank}'s weights are not those of local SGD."


def _local_momenta(seen: Observed) -> str | None:
    if wrong := _local_values(seen):
        return wrong
    for number in range(len(seen.case.inputs[0]["runs"])):
        right = _simulated(seen, number)
        for rank, got in enumerate(seen.data):
            local = got["runs"][number]["momenta"]
            if wrong := differs(local, right[rank]["momenta"], "The momentum", rtol=RTOL):
                return f"{wrong} After the last meeting it is the mean over the ranks."
    return None


def _local_calls(seen: Observed) -> str | None:
    world = seen.case.world
    if world == 1:
        return None
    runs = seen.case.inputs[0]["runs"]
    meetings = sum(-(-len(run["batches"]) // run["every"]) for run in runs)
    for rank in range(world):
        ops = seen.ops(rank)
        if len(ops) > meetings:
            return (
                f"Rank {rank} made {len(ops)} calls ({', '.join(sorted(set(ops)))}) for {meetings} "
                "meetings. Lay everything end to end in one tensor: a meeting is one call."
            )
    most = 0
    for run in runs:
        held = sum(w.nbytes for w in run["weights"]) * (2 if run["options"]["momentum"] else 1)
        padded = held + world * run["weights"][0].itemsize
        most += 2 * (world - 1) * padded * -(-len(run["batches"]) // run["every"])
    if (sent := sent_by_all(seen)) > most:
        return (
            f"All ranks sent {sent:,} bytes with {ops_of_all(seen)}; an all-reduce of weights (and "
            f"momenta) at each meeting is at most {most:,}."
        )
    return None


def _local_same(seen: Observed) -> str | None:
    return same_on_all_ranks(seen, lambda got: [run["after"] for run in got["runs"]])


LOCAL_SGD = Task(
    id="06.local_sgd",
    title="Step alone, meet every H steps",
    answer="local_sgd",
    job="lesson06.local_sgd",
    minutes=15,
    cases=_local_cases,
    criteria=(
        Criterion("the weights of local SGD, step by step", 2, _local_values, on=("",)),
        Criterion("momenta are averaged with the weights", 1, _local_momenta, on=("momentum",)),
        Criterion("one call at each meeting", 2, _local_calls),
        Criterion("all ranks end with the same bits", 1, _local_same),
    ),
    hints=(
        "What do you count? After which of 7 steps do the ranks meet, if `every` is 3? What do "
        "the gradients hold when a step starts, and how often does the optimizer step in it?",
        "Inside: backwards, optimizer.step(), optimizer.zero_grad(). After it: is this the "
        "every-th step since the last meeting, or the last of all?",
        "flat = torch.cat([p.data.flatten() for p in parameters] + [momentum buffers, if any]); "
        "all_reduce; divide; copy the parts back, each with view_as.",
    ),
    debrief="PeriodicModelAverager of torch averages the weights alone, and so does ddpz_lite's "
    "LocalSGD. DiLoCo hands the mean displacement of the ranks to Nesterov as a gradient.",
)

# -- 06.top_k_momentum -----------------------------------------------------------------------------


def _momentum_cases(rng: torch.Generator) -> list[Case]:
    def stream(
        shape: tuple[int, ...], k: int, momentum: float, steps: int = 4, dtype=torch.float32
    ) -> dict[str, Any]:
        drawn = torch.randn((steps, *shape), generator=rng).to(dtype)
        return {"gradients": list(drawn), "k": k, "momentum": momentum}

    def case(world: int, says: str, *streams: tuple) -> Case:
        inputs = [{"streams": [stream(*s) for s in streams]} for _ in range(world)]
        return Case(f"{world_name(world)}, {says}", inputs)

    return [
        case(3, "5 of 47, momentum 0.9", ((47,), 5, 0.9, 8)),
        case(2, "tensors of one shape in turn", ((3, 7), 3, 0.9), ((3, 7), 3, 0.5),
             ((3, 7), 5, 0.9)),
        case(4, "3 of 26 in float64", ((26,), 3, 0.7, 3, torch.float64)),
        case(1, "4 of 22, momentum 0.8", ((22,), 4, 0.8)),
        case(3, "all of 7, then 1 of 9 without momentum", ((7,), 7, 0.9, 3), ((9,), 1, 0.0, 3)),
    ]  # fmt: skip


def _velocities(stream: dict[str, Any]) -> list[torch.Tensor]:
    """After each step; before the first, zeros."""
    velocities = [torch.zeros_like(stream["gradients"][0])]
    for gradient in stream["gradients"]:
        velocities.append(stream["momentum"] * velocities[-1] + gradient)
    return velocities


def _velocity(seen: Observed) -> str | None:
    for inputs, (rank, got) in zip(seen.case.inputs, enumerate(seen.data), strict=True):
        for index, step, mean, velocity, _ in got["steps"]:
            stream = inputs["streams"][index]
            gradient, momentum = stream["gradients"][step], stream["momentum"]
            before, wanted = _velocities(stream)[step : step + 2]
            mistakes = {
                "is the gradient alone: the velocity of the step before is missing.": gradient,
                "has 1 - momentum of the gradient. SGD's velocity adds all of it.": (
                    momentum * before + (1 - momentum) * gradient
                ),
                "adds the gradient to all of the old velocity: momentum shortens it.": (
                    before + gradient
                ),
            }
            if _like(mean, wanted):
                words = "is made of what arrived, and not of this rank's own gradients."
                mistakes[words] = momentum * before + mean
            what = f"Rank {rank}'s velocity after step {step + 1}"
            wrong = explain(velocity, wanted, what, mistakes)
            if wrong and _like(velocity, wanted) and _some(velocity, wanted):
                return (
                    f"{what} is right only in some entries. Entries that were sent keep their "
                    "velocity, and so do all others."
                )
            if wrong:
                return wrong
    return None


def _some(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(((got - wanted).abs() < 1e-5).any())


def _left_over(
    seen: Observed, rank: int, of: Callable[[dict[str, Any]], list[torch.Tensor]] = _velocities
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each call, (what this rank held before it sent, what was left of it).

    of: what a rank adds to its residual after each step.
    """
    held = []
    left: dict[int, torch.Tensor] = {}
    for index, step, *_ in seen.data[rank]["steps"]:
        stream = seen.case.inputs[rank]["streams"][index]
        velocity = of(stream)[step + 1]
        total = left.get(index, torch.zeros_like(velocity)) + velocity
        left[index] = total - _largest(total, stream["k"])
        held.append((total, left[index]))
    return held


def _momentum_left(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        plain = _left_over(seen, rank, lambda stream: [torch.empty(0), *stream["gradients"]])
        calls = zip(_left_over(seen, rank), plain, got["steps"], strict=True)
        for (total, left), (_, of_gradients), (index, step, _, _, residual) in calls:
            stream = seen.case.inputs[rank]["streams"][index]
            k = stream["k"]
            velocity = _velocities(stream)[step + 1]
            mistakes = {
                "still holds what was sent, so it will be sent again.": total,
                "is all zeros: what was not sent is lost.": torch.zeros_like(total),
                "forgets the residual of the step before.": velocity - _largest(velocity, k),
                "lacks the largest entries of the velocity. Choose among all that the rank "
                "holds.": (total - total * (_largest(velocity, k) != 0)),
                "is made of gradients, but what a rank did not send are velocities.": of_gradients,
            }
            what = f"Rank {rank}'s residual after step {step + 1}"
            if wrong := explain(residual, left, what, mistakes):
                return f"{wrong} What was sent and what is left add up to all velocities."
    return None


def _momentum_mean(seen: Observed) -> str | None:
    world = seen.case.world
    held = [_left_over(seen, rank) for rank in range(world)]
    for rank, got in enumerate(seen.data):
        for number, (_, step, mean, _, _) in enumerate(got["steps"]):
            sent = torch.stack([total - left for total, left in (one[number] for one in held)])
            mistakes = {
                "is the sum over the ranks. Divide by their number.": sent.sum(0),
                "is what the rank sent itself: nothing of the others arrived.": sent[rank],
            }
            what = f"Rank {rank}'s mean in step {step + 1}"
            if wrong := explain(mean, sent.mean(0), what, mistakes if world > 1 else {}):
                return wrong
    return None


def _momentum_same(seen: Observed) -> str | None:
    wrong = same_on_all_ranks(seen, lambda got: [call[2] for call in got["steps"]])
    return wrong or unchanged(seen)


TOP_K_MOMENTUM = Task(
    id="06.top_k_momentum",
    title="The largest k, with momentum",
    answer="top_k_momentum",
    job="lesson06.top_k_momentum",
    minutes=15,
    cases=_momentum_cases,
    criteria=(
        Criterion("the velocity of SGD on this rank's gradients", 1, _velocity),
        Criterion("sent and left add up to all velocities", 2, _momentum_left),
        Criterion("the mean of what the ranks sent", 1, _momentum_mean),
        Criterion("k values and k places travel, no more", 1, _top_k_bytes),
        Criterion("the same bits on all ranks; the inputs stay", 1, _momentum_same),
    ),
    hints=(
        "An entry waits ten steps in the residual. What would SGD with momentum have moved in "
        "these ten steps?",
        "What a rank adds to its residual in each step is what SGD would have moved. What is that?",
        "velocity = momentum * velocity + gradient; total = residual + velocity; then as in task 1 "
        "with total. The velocity is returned unchanged.",
    ),
    debrief="This is the momentum correction of Deep Gradient Compression (Lin et al. 2018). The "
    "paper also sets the velocity of sent entries to zero, so that old gradients stop pushing. In "
    "the lesson's runs this masking brings the loss back.",
)  # fmt: skip

TASKS = [TOP_K, INT8, LOCAL_SGD, TOP_K_MOMENTUM]
