"""Tasks of lesson 01: one device."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from ddpz_lite.course.check.compare import close, differs, number, whole
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vary import drawn_again, one_at_a_time
from ddpz_lite.course.tasks.lesson01.job import LOSSES, OPTIMIZERS, trained
from ddpz_lite.meter import memory

# -- 01.state_bytes --------------------------------------------------------------------------------

KINDS = ("parameters", "gradients", "optimizer")
OTHER_STATE = {"optimizer": "SGD", "stepped": False}


def _state_cases(rng: torch.Generator) -> list[Case]:
    def state(optimizer: str = "AdamW", *dtypes: str, **others: Any) -> dict[str, Any]:
        sizes = torch.randint(5, 40, (3,), generator=rng).tolist()
        return {"sizes": sizes, "optimizer": optimizer, "dtypes": dtypes or ["float32"], **others}

    def case(says: str, kind: str, *states: dict[str, Any]) -> Case:
        return Case(says, [{"states": [*states, states[0]]}], kind)

    (varied,) = one_at_a_time([state("SGD with momentum")], [OTHER_STATE])
    return [
        case(
            "several optimizers",
            "",
            state(stepped=False),
            *map(state, ("SGD", "AdamW", "SGD with momentum", "AMSGrad", "Adafactor")),
            *map(state, ("an optimizer of your colleague's", "SGD with two parameter groups")),
            *varied,
        ),
        case(
            "several dtypes",
            "dtype",
            state("AdamW", "bfloat16"),
            state("SGD with momentum", "float64"),
            state("AdamW", "bfloat16", "float32"),
            state("SGD", "float32", int8=True),
            state("SGD with momentum", "float32", evaluates=True),
        ),
        case(
            "tied, frozen and without a gradient",
            "shared",
            state(tied=True),
            state(frozen=True),
            state(frozen=True, cleared=True),
            state("SGD with momentum", tied=True, stepped=False),
        ),
    ]


def _state_says(state: dict[str, Any]) -> str:
    extra = {
        "tied": "a tied weight",
        "frozen": "a frozen layer",
        "cleared": "a layer without gradients",
        "int8": "a frozen parameter of int8",
        "evaluates": "in eval mode",
    }
    words = [state["optimizer"] + ("" if state.get("stepped", True) else " before its first step")]
    words += [f"{'and'.join(f' {d} ' for d in state['dtypes']).strip()}"]
    return ", ".join(words + [says for name, says in extra.items() if state.get(name)])


def _state_values(seen: Observed) -> str | None:
    states, got = seen.case.inputs[0]["states"], seen.data[0]
    for state, reported in zip(states, got["bytes"], strict=True):
        if type(reported) is not dict or set(reported) != set(KINDS):
            return f"The result must be a dict with the keys {', '.join(KINDS)}."
        model, optimizer = trained(**state)
        held = memory(model, optimizer)
        for kind in KINDS:
            if (value := number(reported[kind])) != held[kind]:
                why = _explain_state(kind, value, model, optimizer, held[kind])
                return f"{_state_says(state)}: {kind}: {why}"
    if got["changed"]:
        return "The model or the optimizer has changed. Only read them."
    return None


def _explain_state(kind: str, value: float | None, model: Any, optimizer: Any, right: int) -> str:
    if value is None:
        return "the result must be a number of bytes."
    listed = [p for m in model.modules() for p in m._parameters.values() if p is not None]
    unique, states = list(model.parameters()), list(optimizer.state.values())
    tensors = {
        "parameters": unique,
        "gradients": [p.grad for p in unique if p.grad is not None],
        "optimizer": [t for state in states for t in state.values() if torch.is_tensor(t)],
    }
    elements = sum(t.numel() for t in tensors[kind])
    twice = sum(p.nbytes for p in listed) - sum(p.nbytes for p in unique)
    counters = sum(state["step"].nbytes for state in states if "step" in state)
    table = [  # (kind, the value that the mistake gives, what it is)
        (kind, elements, "that is the number of elements. How many bytes does one take?"),
        (kind, 4 * elements, "you took 4 bytes for each element; this model's differ in dtype."),
        ("parameters", right + twice,
         "a weight that two layers share is in memory once; you counted it twice."),
        ("parameters", right + sum(b.nbytes for b in model.buffers()),
         "you counted the buffers too."),
        ("parameters", sum(p.nbytes for p in unique if p.requires_grad), "a frozen parameter "
         "takes memory, too."),
        ("gradients", sum(p.nbytes for p in unique),
         "you counted one for each parameter, but some parameters have none now."),
        ("optimizer", right - counters, "you left out AdamW's step counters, a number for each "
         "tensor."),
        ("optimizer", 2 * sum(p.nbytes for p in unique),
         "you counted two numbers for each parameter. Look into this optimizer's state."),
    ]  # fmt: skip
    for about, candidate, words in table:
        if kind == about and value == candidate != right:
            return words
    if kind == "optimizer" and not states and value:
        return "this optimizer has not taken a step yet, so it keeps nothing."
    more = "too many" if value > right else "too few"
    return f"{value:,.0f} bytes are {more}. Count the tensors that exist."


STATE_BYTES = Task(
    id="01.state_bytes",
    title="What a training state weighs",
    answer="state_bytes",
    job="lesson01.state_bytes",
    minutes=10,
    cases=_state_cases,
    criteria=(
        Criterion(
            "float32, several optimizers, before and after a step", 2, _state_values, on=("",)
        ),
        Criterion("another dtype", 1, _state_values, on=("dtype",)),
        Criterion("tied weights and frozen layers", 1, _state_values, on=("shared",)),
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


HIDDEN = 16
PARTS, COPIES = 8, 6  # what a part and the gradients may take: activations, weights


def _accumulate_cases(rng: torch.Generator) -> list[Case]:
    def model(
        batches: list[tuple[int, int]], loss: str = "mse", dtype: Any = torch.float32, *more: int
    ) -> dict[str, Any]:
        """batches: (samples, micro batch) of each. more: dimensions of a sample besides the "
        "last."""

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=rng).to(dtype)

        def target(samples: int) -> torch.Tensor:
            if loss == "mse":
                return draw(samples, *more, 3)
            return torch.randint(3, (samples, *more), generator=rng)

        return {
            "weights": [draw(HIDDEN, 5), draw(3, HIDDEN)],
            "loss": loss,
            "batches": [
                {"x": draw(samples, *more, 5), "y": target(samples), "micro_batch": micro}
                for samples, micro in batches
            ],
        }

    def again(one: dict[str, Any]) -> list[dict[str, Any]]:
        """The first batch with each argument in turn changed: model, x, y, loss and part."""
        samples, micro = 8, 4
        weights = drawn_again(one, rng, "weights")
        first = {name: one["batches"][0][name] for name in "xy"} | {"micro_batch": micro}
        first |= {name: first[name][:samples] for name in "xy"}
        batches = [first, *(first | drawn_again(first, rng, name) for name in "xy")]
        batches += [first | {"micro_batch": 2}, first]
        other = [first, first | {"micro_batch": 1}]
        both = [one | {"batches": batches}, one | weights | {"batches": other}]
        return [*both, one | {"loss": "smooth l1", "batches": other}]

    wide = model([(8, 4), (6, 1)], "mse", torch.float64, 2)
    classes = model([(5, 4), (101, 2)], "cross entropy")
    equal = [model([(96, 2), (6, 6), (8, 4)]), wide]
    short = [model([(7, 3), (3, 8), (95, 3)]), classes]
    return [
        Case("equal parts", [{"models": equal}]),
        Case("equal parts of one size", [{"models": again(equal[0])}]),
        Case("a short last part", [{"models": short}], "short"),
    ]


def _accumulated(seen: Observed):
    """(words, the model, its batch, what the answer did, the gradients before) for each call."""
    models, before = seen.case.inputs[0]["models"], {}
    for got in seen.data[0]["log"]:
        which, number = got["of"]
        local, batch = models[which], models[which]["batches"][number]
        says = f"A batch of {len(batch['x'])} in parts of {batch['micro_batch']}"
        ones = [torch.ones_like(w) for w in local["weights"]]
        yield says, local, batch, got, before.get(which, ones)
        before[which] = got["gradients"]


def _gradients(local: dict, batch: dict, weighted: list[tuple[slice, float]]) -> list[torch.Tensor]:
    """The gradients of the sum of weight * mean loss over some parts of a batch."""
    leaves = [w.clone().requires_grad_() for w in local["weights"]]
    total = torch.zeros((), dtype=leaves[0].dtype)
    for part, weight in weighted:
        out = torch.tanh(batch["x"][part] @ leaves[0].T) @ leaves[1].T
        total = total + weight * LOSSES[local["loss"]](out, batch["y"][part])
    return list(torch.autograd.grad(total, leaves))


def _accumulate_values(seen: Observed) -> str | None:
    for says, local, batch, got, before in _accumulated(seen):
        if any(name.startswith("weights") for name in got["changed"]):
            return "The weights have changed. Only gradients are asked for; the step comes later."
        if got["changed"]:
            return f"{says}: {got['changed'][0]} has changed."
        if not got["modes"]:
            return (
                "The model is in another mode than before. Leave train() and eval() to the caller."
            )
        if any(gradient is None for gradient in got["gradients"]):
            return f"{says}: a parameter has no gradient at the end."
        right = _gradients(local, batch, [(slice(None), 1.0)])
        if not _alike(got["gradients"], right):
            return f"{says}: {_explain_accumulate(local, batch, got['gradients'], right, before)}"
    return None


def _alike(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(close(g, w) for g, w in zip(got, wanted, strict=True))


def _explain_accumulate(local: dict, batch: dict, got: list, right: list, before: list) -> str:
    total, micro = len(batch["x"]), batch["micro_batch"]
    parts = [slice(start, min(start + micro, total)) for start in range(0, total, micro)]
    lengths = [part.stop - part.start for part in parts]
    full, last = parts[: total // micro], parts[-1]
    table: list[tuple[str, list[tuple[slice, float]]]] = [
        ("backward adds up the parts' gradients. Each is the gradient of a mean, so the sum is "
        "too large.",
         [(part, 1.0) for part in parts]),
        ("every part got the same weight, but the last part has fewer samples.",
         [(part, 1 / len(parts)) for part in parts]),
        ("each part was weighted as if it were full, but the last part has fewer samples.",
         [(part, micro / total) for part in parts]),
        ("each part was weighted as if it were full, but the last part has fewer samples.",
         [(part, 1 / micro) for part in parts]),
        ("only the last part is left: something cleared the gradients between the parts.",
         [(last, lengths[-1] / total)]),
        ("only the last part is left: something cleared the gradients between the parts.",
         [(last, 1.0)]),
        ("the samples that do not fill a part were left out.",
         [(part, micro / total) for part in full]),
        ("the samples that do not fill a part were left out.",
         [(part, 1 / max(1, len(full))) for part in full]),
    ]  # fmt: skip
    if _alike(got, [a + b for a, b in zip(right, before, strict=True)]):
        return "the gradients of the previous step are still in the sum: clear them first."
    for words, weighted in table:
        if weighted and _alike(got, _gradients(local, batch, weighted)):
            return words
    names = ("the first layer's gradient", "the last layer's gradient")
    messages = (differs(*pair) for pair in zip(got, right, names, strict=True))
    return next(filter(None, messages))


def _accumulate_memory(seen: Observed) -> str | None:
    for says, local, batch, got, _ in _accumulated(seen):
        micro, events = batch["micro_batch"], got["events"]
        samples = max((size for name, size in events if name == "forward"), default=0)
        if not samples:
            return f"{says}: nothing went through the model. Call model(part)."
        if samples > micro:
            return f"{says}: a forward saw {samples} samples at once; only {micro} fit into memory."
        if any(a == b == "forward" for (a, _), (b, _) in pairwise(events)):
            return (
                f"{says}: a second forward began before the backward of the first: the activations "
                "of both were in memory. Call backward for each part."
            )
        weights, size = sum(w.nbytes for w in local["weights"]), local["weights"][0].itemsize
        rows = micro * batch["x"][0].numel() // batch["x"].shape[-1]
        most = PARTS * rows * (HIDDEN + 3) * size + COPIES * weights
        if got["peak"] > most:
            return (
                f"{says}: {got['peak']:,} bytes were held at once besides the weights, but one "
                f"part takes less than {most:,}. What keeps the activations of the previous parts?"
            )
    return None


ACCUMULATE = Task(
    id="01.accumulate",
    title="A big batch in small parts",
    answer="accumulate",
    job="lesson01.accumulate",
    minutes=10,
    cases=_accumulate_cases,
    criteria=(
        Criterion("equal parts: the gradients of the whole batch", 2, _accumulate_values, on=("",)),
        Criterion(
            "a short last part: still those of the whole batch", 1, _accumulate_values, ("short",)
        ),
        Criterion("never more than one part in memory", 1, _accumulate_memory),
    ),
    hints=(
        "`backward()` adds to `.grad`. What must each part's loss be, so that the sum is the mean?",
        "A mean over n of N samples counts n/N in the mean over all.",
        "Clear the gradients; for each part: loss_fn(model(part), ...) times len(part) / len(x), "
        "backward.",
    ),
    debrief="With several ranks, every backward but the last would send gradients in vain. "
    "`no_sync` in lesson 05 holds them back. With ZeRO-2 the same choice costs memory (lesson 10).",
)

# -- 01.scaled_step --------------------------------------------------------------------------------

INF, NAN = float("inf"), float("nan")
NEARLY = 1.2e308  # finite in float64, and the sum of two is not


def _scaled_cases(rng: torch.Generator) -> list[Case]:
    def run(
        says: str,
        bad: dict[int, tuple[int, float]],
        interval: int = 100,
        optimizer: str = "SGD with momentum",
        scale: float = 1024.0,
        good_steps: int = 0,
    ) -> dict[str, Any]:
        """bad: at which step which of the gradients holds which value."""
        forms = [((3, 2), torch.float32), ((4,), torch.float64), ((5,), torch.float32)]

        def drawn() -> list[torch.Tensor]:
            return [torch.randn(shape, generator=rng).to(dtype) for shape, dtype in forms]

        steps = [drawn() for _ in range(6)]
        for step, (which, value) in bad.items():
            steps[step][which].view(-1)[1 : 3 if value == NEARLY else 2] = value
        scaler = {"scale": scale, "good_steps": good_steps, "interval": interval}
        return {"says": says, "weights": drawn(), "steps": steps, "optimizer": optimizer,
                "scaler": scaler}  # fmt: skip

    def case(says: str, kind: str, *runs: dict[str, Any]) -> Case:
        return Case(says, [{"runs": list(runs)}], kind)

    bad = {1: (0, INF)}
    return [
        case(
            "good steps",
            "",
            run("six good steps", {}),
            run("six good steps of AdamW", {}, optimizer="AdamW", scale=24.0),
            run("two parameter groups", {}, optimizer="SGD with two parameter groups"),
            run("two gradients of 1e308, finite in float64", {2: (1, NEARLY)}, scale=1.0),
        ),
        case(
            "overflows",
            "overflow",
            run("an inf in the first tensor", {2: (0, INF)}),
            run("a nan in the second tensor", {1: (1, NAN)}, scale=24.0),
            run("a -inf in the last tensor", {3: (2, -INF)}, optimizer="AdamW"),
            run(
                "three overflows, two in a row, from a scale of 1",
                {0: (1, INF), 3: (0, NAN), 4: (2, NAN)},
                scale=1.0,
            ),
        ),
        case(
            "the scale may grow",
            "growth",
            run("to grow after 2 good steps", {}, 2),
            run("good, overflow, then good steps, to grow after 2", bad, 2),
            run("one good step done before, to grow after 4", {}, 4, good_steps=1),
            run("to grow after each good step, one overflow", bad, 1, scale=3.0),
        ),
    ]


def _replay(run: dict[str, Any]) -> list[dict[str, Any]]:
    """What a right answer leaves after each step."""
    parameters = [torch.nn.Parameter(w.clone()) for w in run["weights"]]
    optimizer = OPTIMIZERS[run["optimizer"]](parameters)
    scale, good, log = run["scaler"]["scale"], run["scaler"]["good_steps"], []
    for gradients in run["steps"]:
        stepped = all(g.isfinite().all() for g in gradients)
        if stepped:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            good += 1
            if good == run["scaler"]["interval"]:
                scale, good = scale * 2, 0
        else:
            scale, good = scale / 2, 0
        weights = [p.detach().clone() for p in parameters]
        log.append({"stepped": stepped, "scale": scale, "good_steps": good, "weights": weights})
    return log


def _yes_or_no(got: Any) -> Any:
    """A bool tensor of one element, which `isfinite().all()` is, says as much as a bool."""
    if type(got) is torch.Tensor and got.dtype is torch.bool and got.numel() == 1:
        return bool(got.item())
    return got


def _replayed(seen: Observed):
    """(run, [(what the answer left, what is right) after each step]) for each run."""
    runs = seen.case.inputs[0]["runs"]
    for run, log in zip(runs, seen.data[0]["logs"], strict=True):
        yield run, list(zip(log, _replay(run), strict=True))


def _scaled_values(seen: Observed) -> str | None:
    for run, steps in _replayed(seen):
        before = run["weights"]
        for step, (got, right) in enumerate(steps):
            if wrong := _explain_scaled(step, got, right, before):
                return f"{wrong} The run: {run['says']}."
            before = right["weights"]
    return None


def _explain_scaled(step: int, got: dict, right: dict, before: list[torch.Tensor]) -> str | None:
    moved = [not close(a, b) for a, b in zip(got["weights"], before, strict=True)]
    if not right["stepped"] and any(moved):
        if not all(w.isfinite().all() for w in got["weights"]):
            return f"Step {step} wrote inf or nan into the weights: a gradient was not finite."
        return f"Step {step} changed some weights. If one gradient is bad, no weight may change."
    if not _alike(got["weights"], right["weights"]):
        if not any(moved):
            return f"Step {step} was skipped, although all its gradients were finite."
        return (
            f"After step {step} the weights are off. Was the gradient divided by the scale that "
            "the loss was multiplied with, once?"
        )
    if _yes_or_no(got["stepped"]) is not right["stepped"]:
        word = "a step was made" if right["stepped"] else "the step was skipped"
        return f"Step {step} returned {got['stepped']!r}: return {right['stepped']}, for {word}."
    if not got["cleared"]:
        return f"After step {step} gradients are still there: the next backward would add to them."
    return None


def _scaled_scale(seen: Observed) -> str | None:
    for run, steps in _replayed(seen):
        scale, interval = run["scaler"]["scale"], run["scaler"]["interval"]
        for step, (got, right) in enumerate(steps):
            if wrong := _explain_scale(step, got["scaler"], right, scale, interval):
                return f"{wrong} The run: {run['says']}."
            scale = right["scale"]
    return None


def _explain_scale(step: int, got: dict, right: dict, before: float, interval: int) -> str | None:
    if number(got["scale"]) != right["scale"]:
        if not right["stepped"]:
            return f"After the overflow in step {step} the scale must be half of what it was."
        if right["scale"] == before:
            return (
                f"The scale changed in step {step}, before {interval} good steps in a row. Does "
                "an overflow set the count to 0?"
            )
        return (
            f"After step {step} the scale must be doubled: {interval} good steps in a row were "
            "made."
        )
    if number(got["good_steps"]) != right["good_steps"]:
        why = "count good steps in a row"
        if not right["stepped"]:
            why = "an overflow ends the row"
        elif right["scale"] > before:
            why = "the scale was just doubled, so the count starts again"
        return (
            f"After step {step} good_steps is {got['good_steps']}, but {right['good_steps']} was "
            f"expected: {why}."
        )
    if number(got["interval"]) != interval:
        return f"After step {step} the interval is {got['interval']}: do not change it."
    return None


SCALED_STEP = Task(
    id="01.scaled_step",
    title="Loss scaling that survives an overflow",
    answer="scaled_step",
    job="lesson01.scaled_step",
    minutes=15,
    cases=_scaled_cases,
    criteria=(
        Criterion("finite gradients: unscaled, then stepped", 2, _scaled_values, on=("",)),
        Criterion(
            "an overflow anywhere: no step at all", 2, _scaled_values, on=("overflow", "growth")
        ),
        Criterion(
            "an overflow halves the scale and ends the row", 1, _scaled_scale, on=("overflow",)
        ),
        Criterion("the scale grows after good steps in a row", 1, _scaled_scale, on=("growth",)),
    ),
    hints=(
        "Which gradients must you check before you may change the first weight?",
        "Unscale all, test all with `isfinite`, and only then decide. The decision is one for all.",
        "divide each .grad by scale; ok = all finite; if ok: optimizer.step(), good_steps += 1 and "
        "at the interval double and reset; else halve and reset. Clear the gradients, return ok.",
    ),
    debrief="torch.amp.GradScaler does this, with factors 2 and 0.5 and an interval of 2,000 "
    "steps. On several ranks the decision must be one for all: one small all-reduce (lesson 12).",
)

# -- 01.largest_batch ------------------------------------------------------------------------------

STATES = {"SGD": 0, "SGD with momentum": 4, "AdamW": 8}  # bytes for each parameter


def _batch_cases(rng: torch.Generator) -> list[Case]:
    def drawn(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    def question(optimizer: str, sizes: tuple[int, int] = (2, 4), **more: int) -> dict[str, Any]:
        """more: the batch that fits, "fits", and the bytes that are "left" over then."""
        parameters, sample = drawn(10**6, 10**7), drawn(10**5, 10**6)
        fixed = 4 * parameters + drawn(10**3, 10**6)
        fits = more.get("fits", drawn(300, 600) | 1)
        left = more.get("left", drawn(1, sample))
        return {
            "peaks": {size: fixed + size * sample for size in sizes},
            "parameters": parameters,
            "optimizer": optimizer,
            "budget": fixed + STATES[optimizer] * parameters + fits * sample + left,
        }

    def case(says: str, kind: str, *questions: dict[str, Any]) -> Case:
        return Case(says, [{"questions": list(questions)}], kind)

    first = question("SGD")
    others = question("AdamW", (2, 4))
    (varied,) = one_at_a_time([first], [others])
    varied = [q for q in varied if _fitting(q) > 0]
    return [
        case("plain SGD", "", first, question("SGD")),
        case("other batch sizes", "sizes", question("SGD", (16, 1)), question("SGD", (3, 7))),
        case("optimizers with states", "states", *varied, question("AdamW"),
             question("SGD with momentum"), question("AdamW", (5, 8))),
        case("a budget that is just enough, and one that is not", "edge",
             question("AdamW", fits=64, left=0), question("SGD", fits=64, left=-1),
             question("AdamW", fits=0, left=0), question("SGD with momentum", fits=-3),
             question("SGD", fits=1, left=0)),
    ]  # fmt: skip


def _peak(question: dict[str, Any], batch: int) -> int:
    """The peak of the second step, in bytes."""
    (small, low), (large, high) = sorted(question["peaks"].items())
    sample = (high - low) // (large - small)
    states = STATES[question["optimizer"]] * question["parameters"]
    return low + (batch - small) * sample + states


def _fitting(question: dict[str, Any]) -> int:
    sample = _peak(question, 1) - _peak(question, 0)
    return max(0, (question["budget"] - _peak(question, 0)) // sample)


def _batches(seen: Observed) -> str | None:
    questions = seen.case.inputs[0]["questions"]
    for question, got in zip(questions, seen.data[0]["batches"], strict=True):
        if wrong := _wrong_batch(question, got):
            return wrong
    return None


def _wrong_batch(question: dict[str, Any], got: Any) -> str | None:
    batch, right = whole(got), _fitting(question)
    if batch is None:
        return f"The batch size must be an int, not {type(got).__name__}."
    if batch == right:
        return None
    if batch < 0:
        return f"It returned {batch}. If not even one sample fits, the answer is 0."
    name, budget = question["optimizer"], question["budget"]
    message = f"With {name} and {budget:,} bytes it returned {batch}"
    size = max(question["peaks"])
    forgot = {other: _fitting({**question, "optimizer": other}) for other in STATES}
    if batch == budget * size // question["peaks"][size]:
        return (
            f"{message}, as if all of the peak grew with the batch. Weights and gradients do not: "
            "two measurements tell them apart."
        )
    if name == "SGD" and batch == forgot["AdamW"]:
        return f"{message}: weights and gradients are in the measured peak already."
    if batch == forgot["SGD"]:
        return (
            f"{message}: the first step fits, but the second one also holds the optimizer's states."
        )
    if batch in forgot.values():
        other = next(other for other, fits in forgot.items() if fits == batch)
        return f"{message}, which is right for the states of {other}."
    if batch > right:
        peak = _peak(question, batch)
        return f"{message}. Its second step has a peak of {peak:,}, which is too much."
    if batch == 1 << max(right.bit_length() - 1, 0):
        return f"{message}, a power of two. {batch + 1} samples fit as well."
    return f"{message}, and {batch + 1} samples fit as well: {_peak(question, batch + 1):,} bytes."


LARGEST_BATCH = Task(
    id="01.largest_batch",
    title="The largest batch",
    answer="largest_batch",
    job="lesson01.largest_batch",
    minutes=10,
    cases=_batch_cases,
    criteria=(
        Criterion("measured at 2 and 4, plain SGD", 1, _batches, on=("",)),
        Criterion("measured at other batch sizes", 1, _batches, on=("sizes",)),
        Criterion("optimizers that keep states", 2, _batches, on=("states",)),
        Criterion("just enough, and not enough", 1, _batches, on=("edge",)),
    ),
    hints=(
        "Which tensors exist in the second step but not in the first? And which part of the peak "
        "does not depend on the batch?",
        "A line through two points: its slope is what a sample takes. What does the second step "
        "hold from the first on?",
        "fixed = peak - batch * slope, plus 4 bytes per parameter with momentum or 8 with AdamW. "
        "Then whole samples in what is left of the budget, and not below 0.",
    ),
    debrief="A job that dies of memory in its second step is this mistake. Real allocators also "
    "round and fragment, so people leave some 10% free.",
)  # fmt: skip

TASKS = [STATE_BYTES, ACCUMULATE, SCALED_STEP, LARGEST_BATCH]
