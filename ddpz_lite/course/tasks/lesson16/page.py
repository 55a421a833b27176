"""The capstone's page: plan, prediction, what would refute it, measurement, explanation.

The evidence is a training that the judge repeats: each learner has a seed, and text and model are
known. So the judge trains the same steps in one process. Losses and weights on the page must agree
with that training. Bits differ between machines, so they are compared with a tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddpz_lite.course.check.progress import own_seed
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.strategies.costs import elements_moved

PLAN = {"seed": int, "nodes": int, "ranks": int, "stage": int, "steps": int, "save_every": int,
        "kill": int}  # fmt: skip
PREDICTION = {"sent": float, "steps_twice": int, "goodput": float}
REFUTED = {"sent": list, "steps_twice": list}
MEASUREMENT = {"seed": int, "parameters": int, "stage": int, "steps": int, "save_every": int,
               "sent": list, "uninterrupted": list, "killed": list, "resumed_at": int,
               "resumed": list, "weights": list, "weights_resumed": list}  # fmt: skip
HOLDS = {"sent": bool, "steps_twice": bool}
PARTS = {"plan": PLAN, "prediction": PREDICTION, "refuted_outside": REFUTED,
         "measurement": MEASUREMENT, "holds": HOLDS}  # fmt: skip
LISTS = {"sent": float, "steps_twice": int, "uninterrupted": float, "killed": float,
         "resumed": float, "weights": float, "weights_resumed": float}  # fmt: skip
LESSON = 0  # the seed of the run that the lesson prints
TEXT = Path(__file__).resolve().parents[3] / "data" / "alice.txt"
MODEL = {"context": 32, "layers": 2, "heads": 2, "width": 32, "batch": 4}
STEPS = 60  # at most, for the judge trains all of them again
FOLLOWED = 16  # ranks at most, for the judge trains the windows of all of them
ROUNDING = 4e-4  # of a loss: four digits are printed, and another machine adds in another order
DRIFT = 2e-4  # of the weights' norm: how far sum and norm may be from those of the judge's training
NOTICED = 3  # steps at most that node 0 makes before it misses its peer
Page = dict[str, Any]


class Replay(NamedTuple):
    """The judge's own training."""

    parameters: int
    losses: list[float]
    weights: list[float]  # the sum of all weights at the end, and their norm


@lru_cache
def replay(ranks: int, steps: int, seed: int) -> Replay:
    """The run that a plan describes. One process takes the windows of all ranks.

    The stage changes neither losses nor weights.
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
            for done in range(steps):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(recipe, done)
                update(recipe, model, optimizer, stream, 1, lambda loss: losses.append(loss.item()))
    finally:
        torch.set_num_threads(threads)
    weights = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    return Replay(gpt.num_params(), losses, [weights.sum().item(), weights.norm().item()])


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isfinite(value)
    return type(value) is kind


def _lacks(page: Any) -> str | None:
    """What a page must have before anything can be compared with anything."""
    if not isinstance(page, dict):
        return f"page() must return a dict, not {type(page).__name__}."
    for name, fields in PARTS.items():
        part = page.get(name)
        if not isinstance(part, dict):
            return f"The page has no {name!r}: a dict of {', '.join(fields)}."
        for field, kind in fields.items():
            value = part.get(field)
            if value is None or value is ...:
                return f"{name}: {field!r} is missing."
            if not _is(value, kind) and not (kind is list and type(value) is tuple):
                kind_ = "a finite number" if kind is float else f"of type {kind.__name__}"
                return f"{name}: {field!r} is {value!r}, and must be {kind_}."
            if kind is list and not (value and all(_is(one, LISTS[field]) for one in value)):
                what = "finite numbers" if LISTS[field] is float else LISTS[field].__name__
                return f"{name}: {field!r} must be a list of {what}."
    if not isinstance(page.get("explanation"), str):
        return "The page has no 'explanation': a string."
    return _sizes(page["plan"], page["measurement"])


def _sizes(plan: Page, got: Page) -> str | None:
    if plan["nodes"] < 2 or plan["ranks"] < plan["nodes"] or plan["stage"] not in range(4):
        return "plan: two nodes or more, a rank or more on each, and a stage from 0 to 3."
    if not 0 <= plan["seed"] < 2**31:
        return f"plan: 'seed' is {plan['seed']!r}; check.seed() prints yours."
    if plan["ranks"] > FOLLOWED:
        return f"plan: {plan['ranks']} ranks, and this check can follow {FOLLOWED} at most."
    if plan["steps"] > STEPS:
        return f"plan: {plan['steps']} steps, and this check trains {STEPS} again at most."
    if not 0 < plan["save_every"] < plan["kill"] < plan["steps"]:
        return (
            f"plan: a save every {plan['save_every']}, a kill after {plan['kill']} and "
            f"{plan['steps']} steps. Save first, then kill, before the end."
        )
    for field in ("seed", "stage", "steps", "save_every"):
        if plan[field] != got[field]:
            return (
                f"The measured run had {field} {got[field]}, and the plan says {plan[field]}: it "
                "is another run."
            )
    if len(got["sent"]) != plan["ranks"]:
        return f"The ledger is of {len(got['sent'])} ranks, and the plan says {plan['ranks']}."
    return None


def _on_page(judge: Callable[[Page], str | None]) -> Callable[[Observed], str | None]:
    return lambda seen: judge(seen.data[0]["page"])


def _evidence(seen: Observed) -> str | None:
    """Whether the page has the losses and weights of a run with the learner's seed."""
    page = seen.data[0]["page"]
    if wrong := _lacks(page):
        return wrong
    plan, got = page["plan"], page["measurement"]
    own = seen.case.inputs[0].get("seed")
    if plan["seed"] == LESSON:
        return (
            f"Seed {LESSON} is the lesson's, and its losses are printed there. Run the capstone "
            "with the seed that check.seed() prints."
        )
    if own is not None and plan["seed"] != own:
        return (
            f"This is a page for seed {plan['seed']}, another learner's. Yours is {own}: run the "
            "capstone with it."
        )
    if len(got["uninterrupted"]) != plan["steps"]:
        losses = len(got["uninterrupted"])
        return f"The uninterrupted run has {losses} losses for {plan['steps']} steps."
    again = replay(plan["ranks"], plan["steps"], plan["seed"])
    if got["parameters"] != again.parameters:
        return (
            f"The capstone's model has {again.parameters:,} parameters, not {got['parameters']:,}."
        )
    for step, (loss, wanted) in enumerate(zip(got["uninterrupted"], again.losses, strict=True), 1):
        if abs(loss - wanted) > ROUNDING * wanted:
            return (
                f"Step {step} has the loss {loss:g} on the page. This check trained the same "
                f"steps with seed {plan['seed']} and got {wanted:.4g}. Copy what the last cell of "
                "the capstone prints."
            )
    return _fingerprint("weights", got["weights"], again.weights)


def _fingerprint(name: str, got: list[float], wanted: list[float]) -> str | None:
    if len(got) != len(wanted):
        return f"measurement: {name!r} must be two numbers, the sum of all weights and their norm."
    if any(abs(a - b) > DRIFT * wanted[1] for a, b in zip(got, wanted, strict=True)):
        said, right = (", ".join(f"{one:.6g}" for one in pair) for pair in (got, wanted))
        return (
            f"measurement: {name!r} is {said}. This check's training with the same seed ends with "
            f"{right}, the sum of all weights and their norm."
        )
    return None


def _died(page: Page) -> str | None:
    plan, got = page["plan"], page["measurement"]
    steps, last, resumed = plan["steps"], len(got["killed"]), got["resumed_at"]
    if last >= steps:
        return f"The run that was killed reached step {last} of {steps}, so no node died in it."
    if not plan["kill"] <= last <= plan["kill"] + NOTICED:
        return (
            f"The run ended after step {last}, and the kill was planned after {plan['kill']}. Node "
            f"0 notices it within {NOTICED} steps."
        )
    if resumed % plan["save_every"] or not last - plan["save_every"] <= resumed <= last:
        return (
            f"The run resumed from step {resumed}. With a save every {plan['save_every']} steps "
            f"and {last} steps done, that is not the last one saved."
        )
    if resumed + len(got["resumed"]) != steps:
        return (
            f"From step {resumed} it made {len(got['resumed'])} steps, and {steps - resumed} were "
            "left: it did not reach the end."
        )
    quiet = got["uninterrupted"]
    for name, begin in (("killed", 0), ("resumed", resumed)):
        for step, (loss, wanted) in enumerate(
            zip(got[name], quiet[begin:], strict=False), begin + 1
        ):
            if loss != wanted:
                return (
                    f"Step {step} had the loss {wanted} uninterrupted, and {loss} in {name!r}. On "
                    "the same number of ranks, from a complete checkpoint, both are equal to the "
                    "last digit."
                )
    if got["weights"] != got["weights_resumed"]:
        return (
            "The two runs end with different weights. Losses that agree to four digits are not yet "
            "the same training. Was the optimizer's state saved too?"
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
        return _ledger(page)
    message = f"prediction: each rank sends {said:,.0f} bytes in a step"
    if near(right / 4):
        return f"{message}. Those are elements, and one has 4 bytes."
    if near(right * ranks):
        return f"{message}. All {ranks} ranks send this much together."
    if near(right * ranks / (ranks - 1)):
        return f"{message}. The factor (N - 1)/N is missing: a rank sends nothing to itself."
    for other in {0: (3,), 1: (3,), 2: (3,), 3: (0,)}[stage]:
        if near(4 * elements_moved(psi, ranks, other)):
            return f"{message}. Stage {other} sends this much, and the plan has stage {stage}."
    return f"{message}. By the formula of stage {stage} it is {right:,.0f}."


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


def _goodput(page: Page) -> str | None:
    plan, said = page["plan"], page["prediction"]
    twice = said["steps_twice"]
    if not 0 <= twice <= plan["save_every"] + NOTICED:
        return (
            f"prediction: {twice} steps done twice, with a save every {plan['save_every']}. Only "
            "steps since the last save are lost."
        )
    goodput = plan["steps"] / (plan["steps"] + twice)
    if abs(said["goodput"] - goodput) > 0.005:
        return (
            f"prediction: a goodput of {said['goodput']:g}, and {twice} steps twice. Useful steps "
            f"over all steps would be {goodput:.3f}."
        )
    return None


def _refutable(page: Page) -> str | None:
    plan, said, got = page["plan"], page["prediction"], page["measurement"]
    twice = len(got["killed"]) - got["resumed_at"]
    for field, seen in (("sent", got["sent"]), ("steps_twice", [twice])):
        ends = page["refuted_outside"][field]
        if len(ends) != 2 or not ends[0] <= said[field] <= ends[1]:
            return (
                f"refuted_outside: {field!r} must be [lowest, highest], and the prediction "
                f"{said[field]:g} must lie between them."
            )
        most = 0.5 * _formula(page) if field == "sent" else plan["save_every"] - 1
        if ends[1] - ends[0] > most:
            return (
                f"refuted_outside: {field!r} from {ends[0]:g} to {ends[1]:g} accepts almost "
                "anything. Which measurement would show that the prediction is wrong?"
            )
        holds = all(ends[0] <= one <= ends[1] for one in seen)
        if page["holds"][field] != holds:
            return (
                f"holds: {field!r} is {not holds}, but {', '.join(f'{one:,}' for one in seen)} was "
                f"measured and the page accepts {ends[0]:,.0f} to {ends[1]:,.0f}."
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
        Criterion("evidence: the check's training with your seed has these losses and weights", 3,
               _evidence),
        Criterion("a node died, and the resumed run has the same losses and weights", 2,
               _on_page(_died)),
        Criterion("bytes predicted by the formula of the stage, and found in the ledger", 2,
               _on_page(_bytes)),
        Criterion("steps done twice predicted, and the goodput that follows", 1,
               _on_page(_goodput)),
        Criterion("what would refute the prediction, and whether it happened", 2,
               _on_page(_refutable)),
    ),
    hints=(
        "Which two numbers follow from the plan before anything runs? By how much may the "
        "measurement differ until you would call each of them wrong?",
        "Which saves come before the kill? The steps after the last save are done again. Stages 0 "
        "to 2 send 2Ψ(N-1)/N elements in a step, stage 3 sends 3Ψ(N-1)/N. Rank 0 also sends its "
        "weights once.",
        "goodput = steps / (steps + steps_twice); sent = 4 * 2 * Ψ * (N-1) / N bytes at stage 2. "
        "refuted_outside = {'sent': [0.99 * sent, 1.2 * sent], 'steps_twice': [2, 3]}. No point "
        "depends on the words of the explanation.",
    ),
    debrief="A request for time on a cluster has these parts. A prediction that says what would "
    "refute it is believed the next time.",
    own=lambda: {"seed": own_seed()},
)  # fmt: skip
