"""Tasks of lesson 01: one device."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from ...grade.compare import close, differs, number
from ...grade.task import Aspect, Case, Observed, Task
from ...meter import memory
from .job import trained

# -- 01.state_bytes --------------------------------------------------------------------------------

KINDS = ("parameters", "gradients", "optimizer")


def _state_cases(rng: torch.Generator) -> list[Case]:
    def case(says: str, kind: str = "", **changed: Any) -> Case:
        first, second, third = (int(n) for n in torch.randint(3, 40, (3,), generator=rng))
        state = {
            "sizes": [first, second, third],
            "optimizer": "AdamW",
            "dtype": "float32",
            "tied": False,
            "frozen": False,
            "stepped": True,
        }
        return Case(says, [state | changed], kind)

    return [
        case("SGD", optimizer="SGD"),
        case("AdamW"),
        case("SGD with momentum", optimizer="SGD with momentum"),
        case("AMSGrad", optimizer="AMSGrad"),
        case("AdamW before its first step", stepped=False),
        case("bfloat16", "dtype", dtype="bfloat16"),
        case("a tied weight", "shared", tied=True),
        case("a frozen layer", "shared", frozen=True),
    ]


def _state_values(seen: Observed) -> str | None:
    state = seen.case.inputs[0]
    model, optimizer = trained(**state)
    held = memory(model, optimizer)
    got = seen.data[0]["bytes"]
    if type(got) is not dict or set(got) != set(KINDS):
        return f"The result must be a dict with the keys {', '.join(KINDS)}."
    for kind in KINDS:
        value = number(got[kind])
        if value != held[kind]:
            return _state_diagnosis(kind, value, model, optimizer, held[kind])
    return None


def _state_diagnosis(kind: str, value: float | None, model, optimizer, right: int) -> str:
    if value is None:
        return f"{kind}: the result must be a number of bytes."
    listed = [p for m in model.modules() for p in m._parameters.values() if p is not None]
    counters = sum(s["step"].nbytes for s in optimizer.state.values() if "step" in s)
    states = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    numbers = {"parameters": sum(p.numel() for p in model.parameters())}
    numbers["gradients"] = sum(p.grad.numel() for p in model.parameters() if p.grad is not None)
    numbers["optimizer"] = sum(t.numel() for t in states)
    if right and value == numbers[kind]:
        return f"{kind}: that is the number of elements. How many bytes does one take?"
    if value == 4 * numbers[kind]:
        return f"{kind}: you took 4 bytes for each element; this model's have another dtype."
    if kind == "parameters" and value == sum(p.nbytes for p in listed):
        return (
            "parameters: a weight that two layers share lies in memory once; you counted it twice."
        )
    if kind == "gradients" and value == sum(p.nbytes for p in model.parameters()):
        return "gradients: you counted one for each parameter, and a frozen one has none."
    if kind == "optimizer" and counters and value == right - counters:
        return "optimizer: you left out AdamW's step counters, a number for each tensor."
    if kind == "optimizer" and value == 2 * sum(p.nbytes for p in model.parameters()):
        return (
            "optimizer: you took two numbers for each parameter. Ask this optimizer what it keeps."
        )
    if kind == "optimizer" and not optimizer.state and value:
        return "optimizer: it has taken no step yet, and holds nothing before its first."
    more = "too many" if value > right else "too few"
    return f"{kind}: {value:,.0f} bytes are {more}. Look at the tensors that are there."


STATE_BYTES = Task(
    id="01.state_bytes",
    title="What a training state weighs",
    answer="state_bytes",
    job="lesson01.state_bytes",
    minutes=10,
    cases=_state_cases,
    aspects=(
        Aspect("float32, several optimizers, before and after a step", 2, _state_values, on=("",)),
        Aspect("another dtype", 1, _state_values, on=("dtype",)),
        Aspect("tied weights and frozen layers", 1, _state_values, on=("shared",)),
    ),
    hints=(
        "Which tensors exist after `optimizer.step()` that did not exist before?",
        "`tensor.nbytes` knows the dtype. `optimizer.state` maps a parameter to a dict of tensors.",
        "Three sums: over model.parameters() (each shared one comes once), over their .grad where "
        "it is not None, and over all tensors in optimizer.state.values().",
    ),
    debrief="These three numbers are what ZeRO divides by the number of ranks. A profiler shows "
    "more: activations, temporary buffers, and what the allocator keeps for later.",
)

# -- 01.accumulate ---------------------------------------------------------------------------------


def _accumulate_cases(rng: torch.Generator) -> list[Case]:
    def case(batch: int, micro: int, kind: str = "", stale: bool = False) -> Case:
        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=rng)

        inputs = {
            "weights": [draw(6, 5), draw(3, 6)],
            "x": draw(batch, 5),
            "y": draw(batch, 3),
            "micro_batch": micro,
            "stale": stale,
        }
        before = ", gradients of the last step still there" if stale else ""
        return Case(f"a batch of {batch} in parts of {micro}{before}", [inputs], kind)

    return [case(8, 2), case(6, 6), case(7, 3, "short"), case(5, 4, "short"), case(8, 4, "", True)]


def _big_batch(x, y, weights, parts: list[slice], share=lambda n: 1.0) -> list[torch.Tensor]:
    """The gradients of sum over parts of share(rows) * mean loss of the part."""
    leaves = [w.clone().requires_grad_() for w in weights]
    loss = torch.zeros(())
    for part in parts:
        out = torch.tanh(x[part] @ leaves[0].T) @ leaves[1].T
        loss = loss + share(len(out)) * torch.nn.functional.mse_loss(out, y[part])
    return list(torch.autograd.grad(loss, leaves))


def _accumulate_values(seen: Observed) -> str | None:
    case, got = seen.case.inputs[0], seen.data[0]
    x, y, weights, micro = case["x"], case["y"], case["weights"], case["micro_batch"]
    parts = [slice(start, start + micro) for start in range(0, len(x), micro)]
    right = _big_batch(x, y, weights, [slice(0, len(x))])

    def is_(*arguments: Any, plus: float = 0.0) -> bool:
        like = _big_batch(x, y, weights, *arguments)
        return all(close(g, w + plus) for g, w in zip(got["gradients"], like, strict=True))

    if not all(close(g, w) for g, w in zip(got["weights"], weights, strict=True)):
        return "The weights have changed. Only gradients are asked for; the step comes later."
    if any(g is None for g in got["gradients"]):
        return "A parameter has no gradient at the end."
    if all(close(g, w) for g, w in zip(got["gradients"], right, strict=True)):
        return None
    if case["stale"] and is_([slice(0, len(x))], plus=1.0):
        return "The gradients of the step before are still in the sum: begin with none."
    if len(parts) > 1 and is_(parts):
        return "The parts' gradients are added up, and each is of a mean: the sum is too large."
    if is_(parts, lambda n: 1 / len(parts)):
        return "Every part got the same weight, and the last part has fewer samples."
    if is_(parts, lambda n: 1 / micro) or is_(parts, lambda n: micro / len(x)):
        return "Each part was weighted as if it were full, and the last part has fewer samples."
    if is_(parts[-1:]) or is_(parts[-1:], lambda n: n / len(x)):
        return "Only the last part is left: something cleared the gradients between the parts."
    whole = [part for part in parts if part.stop <= len(x)]
    if len(whole) < len(parts) and (
        is_(whole, lambda n: 1 / len(whole)) or is_(whole, lambda n: n / len(x))
    ):
        return "The samples that do not fill a part were left out."
    return differs(got["gradients"][0], right[0], "The first layer's gradient") or differs(
        got["gradients"][1], right[1], "The last layer's gradient"
    )


def _accumulate_memory(seen: Observed) -> str | None:
    micro = seen.case.inputs[0]["micro_batch"]
    events = seen.data[0]["events"]
    sizes = [size for name, size in events if name == "forward"]
    if not sizes or max(sizes) > micro:
        return (
            f"A forward saw {max(sizes, default=0)} samples at once; only {micro} fit the memory."
        )
    if any(a == b == "forward" for (a, _), (b, _) in pairwise(events)):
        return (
            "A second forward began before the backward of the first: the activations of both "
            "were in memory. Call backward for each part."
        )
    return None


ACCUMULATE = Task(
    id="01.accumulate",
    title="A big batch in small parts",
    answer="accumulate",
    job="lesson01.accumulate",
    minutes=10,
    cases=_accumulate_cases,
    aspects=(
        Aspect("equal parts: the gradients of the whole batch", 2, _accumulate_values, on=("",)),
        Aspect(
            "a short last part: still those of the whole batch", 1, _accumulate_values, ("short",)
        ),
        Aspect("never more than one part in memory", 1, _accumulate_memory),
    ),
    hints=(
        "`backward()` adds to `.grad`. What must each part's loss be, so that the sum is the mean?",
        "A mean over n of N samples counts n/N in the mean over all.",
        "Clear the gradients; for each part: loss_fn(model(part), ...) times len(part) / len(x), "
        "backward.",
    ),
    debrief="With several ranks, every backward but the last would send gradients for nothing. "
    "`no_sync` in lesson 05 holds them back. With ZeRO-2 the same choice costs memory (lesson 10).",
)

# -- 01.scaled_step --------------------------------------------------------------------------------

INF, NAN = float("inf"), float("nan")


def _scaled_cases(rng: torch.Generator) -> list[Case]:
    def case(says: str, bad: dict[int, tuple[int, float]], interval: int, kind: str = "") -> Case:
        """bad: at which step which of the gradients holds which value."""
        steps = [[torch.randn(s, generator=rng) for s in ((3, 2), (4,))] for _ in range(6)]
        for step, (which, value) in bad.items():
            steps[step][which].view(-1)[1] = value
        weights = [torch.randn(s, generator=rng) for s in ((3, 2), (4,))]
        inputs = {"weights": weights, "steps": steps, "scale": 1024.0, "interval": interval}
        return Case(says, [inputs], kind)

    return [
        case("six good steps", {}, 100),
        case("an inf in the first tensor", {2: (0, INF)}, 100, "overflow"),
        case("a nan in the second tensor", {1: (1, NAN)}, 100, "overflow"),
        case("a -inf in the second tensor", {3: (1, -INF)}, 100, "overflow"),
        case("the scale may grow after 2 good steps", {}, 2, "growth"),
        case("good, overflow, then good steps", {1: (0, INF)}, 2, "growth"),
    ]


def _replay(case: dict[str, Any]) -> list[dict[str, Any]]:
    """What a right answer leaves after each step."""
    parameters = [w.clone() for w in case["weights"]]
    momenta: list[torch.Tensor | None] = [None, None]
    scale, good, log = case["scale"], 0, []
    for gradients in case["steps"]:
        stepped = all(g.isfinite().all() for g in gradients)
        if stepped:
            for i, g in enumerate(gradients):
                momenta[i] = g.clone() if momenta[i] is None else 0.5 * momenta[i] + g
                parameters[i] = parameters[i] - 0.5 * momenta[i]
            good += 1
            if good == case["interval"]:
                scale, good = scale * 2, 0
        else:
            scale, good = scale / 2, 0
        now = {"stepped": bool(stepped), "scale": scale, "good_steps": good}
        log.append(now | {"weights": list(parameters)})
    return log


def _yes_or_no(got: Any) -> Any:
    """A bool tensor of one element, which `isfinite().all()` is, says as much as a bool."""
    if type(got) is torch.Tensor and got.dtype is torch.bool and got.numel() == 1:
        return bool(got.item())
    return got


def _scaled_values(seen: Observed) -> str | None:
    case = seen.case.inputs[0]
    before = case["weights"]
    for step, (got, right) in enumerate(zip(seen.data[0]["log"], _replay(case), strict=True)):
        finite = all(w.isfinite().all() for w in got["weights"])
        moved = [not close(a, b) for a, b in zip(got["weights"], before, strict=True)]
        if not right["stepped"] and any(moved):
            if not finite:
                return f"Step {step} wrote inf or nan into the weights: a gradient was not finite."
            return (
                f"Step {step} moved some weights. One bad gradient means no step for any of them."
            )
        for got_w, right_w in zip(got["weights"], right["weights"], strict=True):
            if not close(got_w, right_w):
                if right["stepped"] and not any(moved):
                    return f"Step {step} was left out, and all its gradients were finite."
                return (
                    f"After step {step} the weights are off. Was the gradient divided by the scale "
                    "that the loss was multiplied with, once?"
                )
        if _yes_or_no(got["stepped"]) is not right["stepped"]:
            word = "a step was made" if right["stepped"] else "the step was skipped"
            return (
                f"Step {step} returned {got['stepped']!r}: return {right['stepped']}, for {word}."
            )
        before = right["weights"]
    return None


def _scaled_scale(seen: Observed) -> str | None:
    case = seen.case.inputs[0]
    previous = {"scale": case["scale"], "good_steps": 0}
    for step, (got, right) in enumerate(zip(seen.data[0]["log"], _replay(case), strict=True)):
        scale = number(got["scale"])
        if scale != right["scale"]:
            if not right["stepped"]:
                return f"After the overflow in step {step} the scale must be half of what it was."
            if right["scale"] == previous["scale"]:
                return (
                    f"The scale changed in step {step}, before {case['interval']} good steps in a "
                    "row. Does an overflow start the count anew?"
                )
            return f"After step {step}, {case['interval']} good steps in a row, it must be doubled."
        if number(got["good_steps"]) != right["good_steps"]:
            return f"After step {step} good_steps is {got['good_steps']}: count steps in a row."
        previous = right
    return None


SCALED_STEP = Task(
    id="01.scaled_step",
    title="Loss scaling that survives an overflow",
    answer="scaled_step",
    job="lesson01.scaled_step",
    minutes=15,
    cases=_scaled_cases,
    aspects=(
        Aspect("finite gradients: unscaled, then stepped", 2, _scaled_values, on=("",)),
        Aspect(
            "an overflow anywhere: no step at all", 2, _scaled_values, on=("overflow", "growth")
        ),
        Aspect("the scale is halved after an overflow", 1, _scaled_scale, on=("overflow",)),
        Aspect("the scale grows after good steps in a row", 1, _scaled_scale, on=("growth",)),
    ),
    hints=(
        "Which gradients do you have to look at before you may touch the first weight?",
        "Unscale all, test all with `isfinite`, and only then decide. The decision is one for all.",
        "divide each .grad by scale; ok = all finite; if ok: optimizer.step(), good_steps += 1 and "
        "at the interval double and reset; else halve and reset. Clear the gradients, return ok.",
    ),
    debrief="torch.amp.GradScaler does this, with factors 2 and 0.5 and an interval of 2,000 "
    "steps. On several ranks the decision must be one for all: one small all-reduce (lesson 12).",
)

TASKS = [STATE_BYTES, ACCUMULATE, SCALED_STEP]
