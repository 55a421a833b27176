"""Tasks of lesson 08: the memory wall."""

from __future__ import annotations

from typing import Any

import torch

from ...grade.compare import number
from ...grade.task import Aspect, Case, Observed, Task

STATES = {"sgd": 0, "momentum": 1, "adamw": 2}  # numbers that the optimizer keeps per parameter


def _kinds(precision: str, optimizer: str) -> tuple[int, int, int]:
    """Bytes per parameter: (parameters, gradients, optimizer)."""
    if precision == "fp32":
        return 4, 4, 4 * STATES[optimizer]
    return 2, 2, 4 + 4 * STATES[optimizer]  # with the fp32 copy


def state_bytes(num_params: int, world: int, stage: int, precision: str, optimizer: str) -> int:
    shard = -(-num_params // world)
    whole = _kinds(precision, optimizer)
    sharded = (stage >= 3, stage >= 2, stage >= 1)
    return sum(b * (shard if s else num_params) for b, s in zip(whole, sharded, strict=True))


# -- 08.state_bytes --------------------------------------------------------------------------------


def _question(rng: torch.Generator, **fixed: Any) -> dict[str, Any]:
    def one_of(values: list) -> Any:
        return values[int(torch.randint(len(values), (), generator=rng))]

    drawn = {
        "num_params": int(torch.randint(10_000, 10_000_000, (), generator=rng)) * 64,
        "world": one_of([2, 4, 8, 16, 64]),
        "stage": one_of([0, 1, 2, 3]),
        "precision": "fp32",
        "optimizer": "adamw",
    }
    return drawn | fixed


def _bytes_cases(rng: torch.Generator) -> list[Case]:
    fp32 = [_question(rng, stage=stage) for stage in (0, 1, 2, 3)]
    mixed = [_question(rng, stage=stage, precision="mixed") for stage in (0, 1, 2, 3)]
    others = [
        _question(rng, precision=precision, optimizer=optimizer)
        for precision in ("fp32", "mixed")
        for optimizer in ("sgd", "momentum", "adamw")
    ]
    uneven = [_question(rng, stage=stage, num_params=1_000_003, world=8) for stage in (1, 2, 3)]
    uneven.append(_question(rng, stage=3, num_params=1, world=4, precision="mixed"))
    return [
        Case("AdamW in fp32", [{"questions": fp32}]),
        Case("AdamW, mixed precision", [{"questions": mixed}], "mixed"),
        Case("other optimizers", [{"questions": others}], "other"),
        Case("parameters that N does not divide", [{"questions": uneven}], "uneven"),
    ]


def _asked(question: dict[str, Any]) -> str:
    q = question
    return (
        f"{q['num_params']:,} parameters, {q['world']} ranks, stage {q['stage']}, "
        f"{q['precision']}, {q['optimizer']}"
    )


def _bytes_values(seen: Observed) -> str | None:
    questions = seen.case.inputs[0]["questions"]
    for q, given in zip(questions, seen.data[0]["answers"], strict=True):
        value, right = number(given), state_bytes(**q)
        if value is None:
            return f"{_asked(q)}: the answer must be a number of bytes."
        if value != right:
            return f"{_asked(q)}: {value:,.0f} bytes are not it. {_bytes_cure(value, right, q)}"
    return None


def _bytes_cure(value: float, right: int, q: dict[str, Any]) -> str:
    psi, world, stage = q["num_params"], q["world"], q["stage"]
    p, g, o = _kinds(q["precision"], q["optimizer"])
    shard = -(-psi // world)
    if abs(value - right) < p + g + o:
        return "A rank holds whole elements: its share is rounded up."
    if value == 8 * right:
        return "These are bits."
    if value == (p + g + o) * psi:
        return "That is what a rank holds without sharding."
    if value == (p + g + o) * shard:
        return "At this stage not everything is sharded."
    if stage == 1 and value == p * psi + (g + o) * shard:
        return "Stage 1 shards the optimizer's states alone; every rank keeps all gradients."
    if stage == 2 and value == p * shard + (g + o) * psi:
        return "Stage 2 shards the gradients and the optimizer's states."
    if q["precision"] == "mixed":
        if value == right - 4 * (shard if stage else psi):
            return "In mixed precision the optimizer holds an fp32 copy of the parameters, too."
        if value == right + 2 * (shard if stage == 3 else psi):
            return "In mixed precision the parameters that compute take 2 bytes."
    if value == state_bytes(**(q | {"optimizer": "adamw"})):
        return f"{q['optimizer']} does not keep what AdamW keeps."
    return "Take each kind by itself: bytes for one element, and how many elements lie on a rank."


STATE_BYTES = Task(
    id="08.state_bytes",
    title="The paper's table, as a function",
    answer="state_bytes",
    job="lesson08.each",
    minutes=15,
    cases=_bytes_cases,
    aspects=(
        Aspect("AdamW in fp32, all stages", 2, _bytes_values, on=("",)),
        Aspect("mixed precision", 1, _bytes_values, on=("mixed",)),
        Aspect("SGD and momentum", 1, _bytes_values, on=("other",)),
        Aspect("parameters that N does not divide", 1, _bytes_values, on=("uneven",)),
    ),
    hints=(
        "How many bytes does one parameter need, kind by kind, and which kinds does a stage shard?",
        "fp32: 4 + 4 + 4 for each state. Mixed: 2 + 2 + 4 for the fp32 copy + 4 for each state; "
        "the "
        "copy belongs to the optimizer.",
        "shard = ceil(num_params / world); stage >= 1 shards the optimizer, >= 2 the gradients, "
        ">= 3 "
        "the parameters: three products, one sum.",
    ),
    debrief="Real runs add padding, step counters, buckets and the unit that is gathered just now. "
    "DeepSpeed's estimators count gradients in fp32 as well.",
)

# -- 08.smallest_world -----------------------------------------------------------------------------

MOST = 1024


def smallest_world(memory: int, activations: int, **state: Any) -> int | None:
    for world in range(1, MOST + 1):
        if state_bytes(world=world, **state) + activations <= memory:
            return world
    return None


def _world_question(rng: torch.Generator, stage: int, world: int, spare: int) -> dict[str, Any]:
    """A question whose answer is about `world`. spare: bytes more than it takes; may be "
    "negative."""
    q = _question(rng, stage=stage)
    del q["world"]
    activations = int(torch.randint(10**8, 10**9, (), generator=rng))
    need = state_bytes(world=world, **q) + activations
    return q | {"memory": need + spare, "activations": activations}


def _world_cases(rng: torch.Generator) -> list[Case]:
    plain = [
        _world_question(rng, stage, world, 10**5)
        for stage, world in ((3, 4), (2, 5), (1, 3), (3, 1))
    ]
    exact = [_world_question(rng, stage, world, spare) for stage, world in ((3, 6), (1, 7))
             for spare in (0, -1)]  # fmt: skip
    never = [_world_question(rng, 0, 1, -1), _world_question(rng, 1, MOST, -(10**5))]
    never.append(_question(rng, stage=3) | {"memory": 10**6, "activations": 10**7})
    never[-1].pop("world")
    return [
        Case("it fits well", [{"questions": plain}]),
        Case("it fits to the byte, or misses by one", [{"questions": exact}], "exact"),
        Case("it never fits", [{"questions": never}], "never"),
    ]


def _world_values(seen: Observed) -> str | None:
    for q, given in zip(seen.case.inputs[0]["questions"], seen.data[0]["answers"], strict=True):
        right = smallest_world(**q)
        if type(given) is type(right) and given == right:
            continue
        asked = (
            f"{q['num_params']:,} parameters at stage {q['stage']}, {q['activations']:,} bytes of "
            f"activations, {q['memory']:,} bytes of memory"
        )
        return f"{asked}: {given!r} is not it. {_world_cure(given, right, q)}"
    return None


def _world_cure(given: Any, right: int | None, q: dict[str, Any]) -> str:
    if right is None:
        return f"No world up to {MOST} is large enough: return None."
    if given is None:
        return f"It does fit, in {MOST} ranks or fewer."
    if type(given) is not int:
        return "The answer is a whole number of ranks, or None."
    state = {name: q[name] for name in ("num_params", "stage", "precision", "optimizer")}
    if given == smallest_world(q["memory"], 0, **state):
        return "The activations take memory, too, and no stage shards them."
    total = state_bytes(world=1, **state)
    if q["stage"] < 3 and given == -(-total // (q["memory"] - q["activations"])):
        return "Not everything is divided by N at this stage; some of it stays on each rank."
    if given < right:
        return f"With {given} ranks a rank needs more than it has."
    if given == right + 1:
        return "One rank fewer fits as well: to the last byte is enough."
    return "A smaller world fits as well."


SMALLEST_WORLD = Task(
    id="08.smallest_world",
    title="How many ranks does it take?",
    answer="smallest_world",
    job="lesson08.each",
    minutes=10,
    cases=_world_cases,
    aspects=(
        Aspect("the smallest world that fits", 2, _world_values, on=("",)),
        Aspect("to the byte", 1, _world_values, on=("exact",)),
        Aspect("None where no world fits", 1, _world_values, on=("never",)),
    ),
    hints=(
        "What stays on every rank, however many there are?",
        "Try worlds one after another: bytes per rank never grow with N. Where do you stop?",
        f"for world in range(1, {MOST + 1}): if state + activations <= memory: return world; "
        "return None.",
    ),
    debrief="Fitting is not the end: fewer samples per rank, or activation checkpointing, often "
    "buys "
    "more than another rank. And a GPU's allocator wants some percent for itself.",
)

TASKS = [STATE_BYTES, SMALLEST_WORLD]
