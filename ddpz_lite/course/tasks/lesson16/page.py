"""The capstone's page: a plan, a prediction, a measurement and an explanation, held together.

What was measured is held against a run, too: text, model and seed are known, so the judge trains
the same steps again, in one process, and the losses on the page must be those.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ddpz_lite.course.check.compare import whole
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.strategies.costs import elements_moved

PLAN = {"nodes": int, "ranks": int, "stage": int, "steps": int, "save_every": int, "kill": int}
PREDICTION = {"sent": float, "steps_twice": int, "goodput": float}
MEASUREMENT = {"parameters": int, "stage": int, "steps": int, "save_every": int, "sent": list,
               "undisturbed": list, "killed": list, "resumed_at": int, "went_on": list,
               "weights": list}  # fmt: skip
PARTS = {"plan": PLAN, "prediction": PREDICTION, "measurement": MEASUREMENT}
LISTS = {"sent": int, "undisturbed": float, "killed": float, "went_on": float, "weights": str}
LESSON = {"steps": 30}
DIGEST = re.compile(r"[0-9a-f]{16}")
TEXT = Path(__file__).resolve().parents[3] / "data" / "alice.txt"
MODEL = {"context": 32, "layers": 2, "heads": 2, "width": 32, "batch": 4}
REPLAYED = 40  # steps at most that are trained again
FOLLOWED = 16  # ranks at most, for the judge trains the windows of all of them
ROUNDING = 1e-3  # of a loss: four digits are printed, and another machine adds in another order
Page = dict[str, Any]


@lru_cache
def replay(ranks: int, steps: int, seed: int = 0) -> tuple[int, list[float]]:
    """(parameters, the losses of the first steps) of the run that a plan describes.

    One process takes the windows of all ranks; the stage does not change a loss.
    """
    from ddpz_lite.data import corpus
    from ddpz_lite.trainer.batches import Batches
    from ddpz_lite.trainer.loop import build, learning_rate, shard, update
    from ddpz_lite.trainer.recipe import Recipe

    sizes = MODEL | {"batch": ranks * MODEL["batch"]}
    recipe = Recipe(text=str(TEXT), steps=steps, seed=seed, **sizes)
    text, losses = corpus(TEXT), []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank has; so small a model gains nothing by more
    try:
        with torch.random.fork_rng(devices=[]):  # the notebook's own random numbers stay
            torch.manual_seed(recipe.seed)
            gpt = build(recipe, text)
            model, optimizer = shard(recipe, gpt)
            stream = iter(Batches(text, "train", recipe, torch.device("cpu")))
            for done in range(min(steps, REPLAYED)):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(recipe, done)
                update(recipe, model, optimizer, stream, 1, lambda loss: losses.append(loss.item()))
    finally:
        torch.set_num_threads(threads)
    return gpt.num_params(), losses


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        whole_or_not = isinstance(value, int | float) and not isinstance(value, bool)
        return whole_or_not and math.isfinite(value)
    return type(value) is kind


def _lacks(page: Any) -> str | None:
    """What a page must have before anything can be held against anything."""
    if not isinstance(page, dict):
        return f"page() must return a dict of four parts, not {type(page).__name__}."
    for name, fields in PARTS.items():
        part = page.get(name)
        if not isinstance(part, dict):
            return f"The page has no {name!r}: a dict of {', '.join(fields)}."
        for field, kind in fields.items():
            value = part.get(field)
            if value is None or value is ...:
                return f"{name}: {field!r} is missing."
            if not _is(value, kind):
                kind_ = "a finite number" if kind is float else f"of type {kind.__name__}"
                return f"{name}: {field!r} is {value!r}, and must be {kind_}."
            if kind is list and not (value and all(_is(one, LISTS[field]) for one in value)):
                return f"{name}: {field!r} must be a list of {LISTS[field].__name__}, as printed."
    if not isinstance(page.get("explanation"), str):
        return "The page has no 'explanation': a string."
    return _sizes(page["plan"], page["measurement"])


def _sizes(plan: Page, got: Page) -> str | None:
    if plan["nodes"] < 2 or plan["ranks"] < plan["nodes"] or plan["stage"] not in range(4):
        return "plan: two nodes or more, a rank or more on each, and a stage from 0 to 3."
    if whole(plan.get("seed", 0)) is None or not 0 <= plan.get("seed", 0) < 2**31:
        return f"plan: 'seed' is {plan['seed']!r}, and must be an int from 0 on."
    if plan["ranks"] > FOLLOWED:
        return f"plan: {plan['ranks']} ranks, and this check can follow {FOLLOWED} at most."
    if not 0 < plan["save_every"] < plan["kill"] < plan["steps"]:
        return (
            f"plan: a save every {plan['save_every']}, a kill after {plan['kill']} and "
            f"{plan['steps']} steps: save first, then kill, before the end."
        )
    for field in ("stage", "steps", "save_every"):
        if plan[field] != got[field]:
            return (
                f"The run that was measured had {field} {got[field]}, and the plan says "
                f"{plan[field]}: it is another run."
            )
    if len(got["sent"]) != plan["ranks"]:
        return f"The ledger is of {len(got['sent'])} ranks, and the plan says {plan['ranks']}."
    return None


def _held_together(judge: Callable[[Page], str | None]) -> Callable[[Observed], str | None]:
    """A judge of a page that has all its parts."""

    def judge_all(seen: Observed) -> str | None:
        page = seen.data[0]["page"]
        return _lacks(page) or judge(page)

    return judge_all


def _died(page: Page) -> str | None:
    plan, got = page["plan"], page["measurement"]
    steps, last, resumed = plan["steps"], len(got["killed"]), got["resumed_at"]
    if last >= steps:
        return f"The run that was killed reached step {last} of {steps}: nobody died in it."
    if last < plan["kill"]:
        return f"The run ended after step {last}, and the kill was planned after {plan['kill']}."
    if resumed % plan["save_every"] or not last - plan["save_every"] <= resumed <= last:
        return (
            f"It went on from step {resumed}; with a save every {plan['save_every']} steps and "
            f"{last} steps done that is not the last one saved."
        )
    if resumed + len(got["went_on"]) != steps:
        return (
            f"From step {resumed} it made {len(got['went_on'])} steps, and {steps - resumed} were "
            "left: it did not come to the end."
        )
    return None


def _undisturbed(page: Page) -> str | None:
    got, steps = page["measurement"], page["plan"]["steps"]
    quiet, resumed = got["undisturbed"], got["resumed_at"]
    if len(quiet) != steps:
        return f"The undisturbed run has {len(quiet)} losses for {steps} steps."
    if not all(map(math.isfinite, quiet)) or not quiet[-1] < quiet[0]:
        return "The undisturbed run has learned nothing: its last loss is not below its first."
    parameters, losses = replay(page["plan"]["ranks"], steps, page["plan"].get("seed", 0))
    if got["parameters"] != parameters:
        return f"The capstone's model has {parameters:,} parameters, not {got['parameters']:,}."
    for step, (loss, again) in enumerate(zip(quiet, losses, strict=False), 1):
        if abs(loss - again) > ROUNDING * again:
            return (
                f"Step {step} has the loss {loss} on the page. This check has trained the same "
                f"steps, from seed {page['plan'].get('seed', 0)} and the same text, and "
                f"there it was {again:.4g}: copy what the "
                "last cell of the capstone prints."
            )
    for name, begin in (("killed", 0), ("went_on", resumed)):
        for step, (loss, wanted) in enumerate(
            zip(got[name], quiet[begin:], strict=False), begin + 1
        ):
            if loss != wanted:
                return (
                    f"Step {step} had the loss {wanted} undisturbed, and {loss} in {name!r}: on as "
                    "many ranks, from a whole checkpoint, they are equal to the last digit."
                )
    for digest in got["weights"]:
        if not DIGEST.fullmatch(digest) or len(set(digest)) < 4:
            return f"measurement: {digest!r} is no fingerprint; the capstone prints 16 hex digits."
    if len(set(got["weights"])) != 1 or len(got["weights"]) != 2:
        return (
            "The two runs end with other weights. Equal losses to four digits are not yet the same "
            "training: was the optimizer's state saved, too?"
        )
    return None


def _formula(page: Page) -> float:
    plan = page["plan"]
    return 4 * elements_moved(page["measurement"]["parameters"], plan["ranks"], plan["stage"])


def _bytes(page: Page) -> str | None:
    plan, said = page["plan"], page["prediction"]["sent"]
    psi, ranks, stage = page["measurement"]["parameters"], plan["ranks"], plan["stage"]
    right = _formula(page)

    def near(other: float) -> bool:
        return abs(said - other) <= 0.01 * other

    if near(right):
        return None
    told = f"prediction: each rank sends {said:,.0f} bytes in a step"
    if near(right / 4):
        return f"{told}: those are elements, and one has 4 bytes."
    if near(right * ranks):
        return f"{told}: that is what all {ranks} ranks send together."
    if near(right * ranks / (ranks - 1)):
        return f"{told}: without the factor (N - 1)/N, for what a rank need not send to itself."
    for other in {0: (3,), 1: (3,), 2: (3,), 3: (0,)}[stage]:
        if near(4 * elements_moved(psi, ranks, other)):
            return f"{told}: so much is sent at stage {other}, and the plan has stage {stage}."
    return f"{told}; by the formula of stage {stage} it is {right:,.0f}."


def _ledger(page: Page) -> str | None:
    right, got = _formula(page), page["measurement"]
    once = 4 * got["parameters"] / got["steps"]  # rank 0's weights, to all before the first step
    for rank, sent in enumerate(got["sent"]):
        if not 0.99 * right <= sent <= 1.15 * right + once:  # padding, losses that are added up
            return (
                f"measurement: rank {rank} sent {sent:,} bytes in a step, and the formula says "
                f"{right:,.0f}. Is it the ledger of this stage, divided by the steps?"
            )
    return None


def _commits(page: Page) -> str | None:
    plan, said = page["plan"], page["prediction"]
    twice = said["steps_twice"]
    if not 0 <= twice <= plan["save_every"]:
        return (
            f"prediction: {twice} steps done twice, with a save every {plan['save_every']}. Those "
            "since the last save are lost, no more."
        )
    goodput = plan["steps"] / (plan["steps"] + twice)
    if abs(said["goodput"] - goodput) > 0.005:
        return (
            f"prediction: a goodput of {said['goodput']:g}, and {twice} steps twice. Useful steps "
            f"over all steps would be {goodput:.3f}."
        )
    return None


def _own(page: Page) -> str | None:
    plan = page["plan"]
    if (plan["steps"], plan.get("seed", 0)) == (LESSON["steps"], 0):
        return (
            f"A run of {LESSON['steps']} steps from seed 0 has the losses that the lesson prints, "
            "whatever else changes. Take another number of steps, or a seed of your own."
        )
    return None


def _cases(rng: torch.Generator) -> list[Case]:
    return [Case("the page", [{}])]


CAPSTONE = Task(
    id="16.capstone",
    title="Your page",
    answer="page",
    job="lesson16.capstone",
    minutes=25,
    cases=_cases,
    criteria=(
        Criterion("all four parts, of one run that lost a node and came to its end", 2,
               _held_together(_died)),
        Criterion("the losses and the weights of the undisturbed run", 2,
               _held_together(_undisturbed)),
        Criterion("bytes predicted by the formula of its stage", 2, _held_together(_bytes)),
        Criterion("the ledger bears the formula out", 1, _held_together(_ledger)),
        Criterion("a prediction that could have been wrong", 1, _held_together(_commits)),
        Criterion("another run than the lesson's", 2, _held_together(_own)),
    ),
    hints=(
        "What changes if only the kill does? And what if you go from stage 3 to stage 2?",
        "Which saves come before the kill? What was done after the last of them is done again. "
        "Stages 0 to 2 send 2Ψ(N-1)/N elements in a step, stage 3 sends 3Ψ(N-1)/N.",
        "goodput = steps / (steps + steps_twice); sent = 4 * 2 * Ψ * (N-1) / N bytes at stage 2. "
        "The explanation is for a reader: no point depends on its words.",
    ),
    debrief="Pages like this one are how a cluster's time is asked for. Who predicts bytes and "
    "says what would prove it wrong is believed the next time.",
)  # fmt: skip
