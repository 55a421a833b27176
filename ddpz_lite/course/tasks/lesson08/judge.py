"""Tasks of lesson 08: the memory wall."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import product
from typing import Any

import torch

from ddpz_lite.course.check.compare import whole
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vocabulary import world_name

STATES = {"sgd": 0, "momentum": 1, "adamw": 2}  # numbers that the optimizer keeps per parameter
STAGES = (0, 1, 2, 3)


def _kinds(precision: str, optimizer: str) -> tuple[int, int, int]:
    """Bytes per parameter: (parameters, gradients, optimizer)."""
    if precision == "fp32":
        return 4, 4, 4 * STATES[optimizer]
    return 2, 2, 4 + 4 * STATES[optimizer]  # with the fp32 copy


def state_bytes(
    num_params: int,
    world: int,
    stage: int,
    precision: str,
    optimizer: str,
    *,
    begins: tuple[int, int, int] = (3, 2, 1),
    more: tuple[int, int, int] = (0, 0, 0),
    everywhere: int = 0,
    shard: Callable[[int, int], float] = lambda psi, world: -(-psi // world),
) -> float:
    """Bytes on a rank, or those that a mistake gives.

    begins: the stage from which (parameters, gradients, optimizer) are sharded. more: bytes per
    parameter that are added to each. everywhere: bytes per parameter that are added, never sharded.
    shard: the elements of a part.
    """
    part = shard(num_params, world)
    kinds = zip(_kinds(precision, optimizer), more, begins, strict=True)
    sums = ((size + extra) * (part if stage >= first else num_params)
            for size, extra, first in kinds)  # fmt: skip
    return sum(sums) + everywhere * num_params


# -- 08.state_bytes --------------------------------------------------------------------------------


def _parameters(rng: torch.Generator) -> int:
    """A number of parameters that all worlds below divide."""
    return int(torch.randint(100_000, 10_000_000, (), generator=rng)) * 192


EVEN = 192 * 1009  # parameters that all worlds below divide
UNEVEN = (1_000_003, 1)
# Kind of a case -> what makes its questions plainer. They are asked both ways, and judged where the
# plainer one is answered right: so one mistake is told once.
PLAINER = {"mixed": {"precision": "fp32"}, "uneven": {"num_params": EVEN}}


def _bytes_cases(rng: torch.Generator) -> list[Case]:
    def case(
        says: str, kind: str, forms: Iterable[tuple[str, str]], worlds: tuple[int, ...], *psi: int
    ) -> Case:
        asked = [
            {
                "num_params": one or 128 * _parameters(rng),
                "world": world,
                "stage": stage,
                "precision": precision,
                "optimizer": optimizer,
            }
            for one in psi or [0]
            for precision, optimizer in forms
            for world in worlds
            for stage in STAGES
        ]
        plainer = [q | PLAINER.get(kind, {}) for q in asked]
        return Case(says, [{"questions": [*plainer, *asked]}], kind)

    adamw = [("fp32", "adamw")]
    mixed, fp32 = ([(precision, o) for o in STATES] for precision in ("mixed", "fp32"))
    return [
        case("AdamW in fp32", "", adamw, (4, 1, 2, 3, 8, 8192)),
        case("mixed precision", "mixed", mixed, (1, 2, 3, 4, 64)),
        case("other optimizers", "other", fp32, (1, 2, 3, 4, 64)),
        case("parameters that N does not divide", "uneven", mixed + fp32, (2, 3, 64), *UNEVEN),
    ]


def _asked(question: dict[str, Any]) -> str:
    q = question
    return (
        f"{q['num_params']:,} parameters, {world_name(q['world'])}, stage {q['stage']}, "
        f"{q['precision']}, {q['optimizer']}"
    )


def _bytes_values(seen: Observed) -> str | None:
    questions, answers = seen.case.inputs[0]["questions"], seen.data[0]["answers"]
    given, plainer = list(map(whole, answers)), PLAINER.get(seen.case.kind, {})
    for q, answer, value in zip(questions, answers, given, strict=True):
        if value is None:
            return f"{_asked(q)}: the answer must be a number of bytes, an int, not {answer!r}."
        if value == state_bytes(**q):
            continue
        plain = q | plainer
        if plainer and (plain == q or given[questions.index(plain)] != state_bytes(**plain)):
            continue  # another criterion's
        cure = named(questions, given, state_bytes, BYTES_MISTAKES) or BY_KIND
        return f"{_asked(q)}: {value:,} bytes is wrong. {cure}"
    return None


BY_KIND = "Take each kind by itself: bytes for one element, and how many elements lie on a rank."


def named(
    questions: list[dict[str, Any]],
    given: list[Any],
    right: Callable[..., Any],
    mistakes: dict[str, Callable[..., Any]],
) -> str | None:
    """The mistake that gives all of these answers; else one that gives the first wrong one."""
    first = next(i for i, q in enumerate(questions) if given[i] != right(**q))
    for which in (range(len(questions)), [first]):
        for words, mistake in mistakes.items():
            if all(given[i] == mistake(**questions[i]) for i in which):
                return words
    return None


def _always(**changed: Any) -> Callable[..., float]:
    """state_bytes, but some of what is asked or of how it is counted is another."""
    return lambda **asked: state_bytes(**(asked | changed))


def _mixed(**changed: Any) -> Callable[..., float]:
    """The same for mixed precision alone."""
    return lambda **q: state_bytes(**(q | (changed if q["precision"] == "mixed" else {})))


BYTES_MISTAKES: dict[str, Callable[..., float]] = {
    "These are bits.": lambda **q: 8 * state_bytes(**q),
    "That is what a rank holds without sharding.": _always(stage=0),
    "At this stage not everything is sharded.": _always(stage=3),
    "Stage 1 shards the optimizer's states alone; every rank keeps all gradients.": _always(
        begins=(3, 1, 1)
    ),
    "Stage 2 shards the gradients and the optimizer's states.": _always(begins=(3, 3, 1)),
    "Stage 3 shards the parameters as well.": _always(begins=(9, 2, 1)),
    "In mixed precision the optimizer holds an fp32 copy of the parameters, too.": _mixed(
        more=(0, 0, -4)
    ),
    "The fp32 copy belongs to the optimizer, and is sharded with its states.": _mixed(
        more=(0, 0, -4), everywhere=4
    ),
    "In mixed precision the parameters that compute take 2 bytes.": _mixed(more=(2, 0, 0)),
    "In mixed precision gradients take 2 bytes.": _mixed(more=(0, 2, 0)),
    "This optimizer does not keep what AdamW keeps.": _always(optimizer="adamw"),
    "A rank holds whole elements: also of fewer parameters than ranks somebody holds one.": _always(
        shard=lambda psi, world: 0 if psi < world else -(-psi // world)
    ),
    "A rank holds whole elements: its share is rounded up.": _always(
        shard=lambda psi, world: psi // world
    ),
    "A rank holds whole elements, and its share is rounded up before it is multiplied.": (
        lambda **q: math.ceil(state_bytes(**q, shard=Fraction))
    ),
    "A rank holds whole elements; round its share up, not the sum down.": (
        lambda **q: math.floor(state_bytes(**q, shard=Fraction))
    ),
}


STATE_BYTES = Task(
    id="08.state_bytes",
    title="The paper's table, as a function",
    answer="state_bytes",
    job="lesson08.each",
    minutes=15,
    cases=_bytes_cases,
    criteria=(
        Criterion("AdamW in fp32, all stages", 2, _bytes_values, on=("",)),
        Criterion("mixed precision", 1, _bytes_values, on=("mixed",)),
        Criterion("SGD and momentum", 1, _bytes_values, on=("other",)),
        Criterion("parameters that N does not divide", 1, _bytes_values, on=("uneven",)),
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


def smallest_world(
    memory: int,
    activations: int,
    *,
    fits: Callable[[float, int], bool] = operator.le,
    worlds: Iterable[int] = range(1, MOST + 1),
    divided: bool = False,
    **state: Any,
) -> int | None:
    """The first of these worlds in which it fits, or what a mistake gives. state: what
    `state_bytes` takes, without the world. divided: the activations are sharded, too.
    """
    for world in worlds:
        beside = activations / world if divided else activations
        if fits(state_bytes(world=world, **state) + beside, memory):
            return world
    return None


def _world_cases(rng: torch.Generator) -> list[Case]:
    def question(
        stage: int, world: int, spare: int, precision: str = "fp32", optimizer: str = "adamw"
    ) -> dict[str, Any]:
        """What fits in `world` ranks with `spare` bytes left; they may be negative."""
        state = {"num_params": _parameters(rng) + 1, "stage": stage, "precision": precision,
                 "optimizer": optimizer}  # fmt: skip
        activations = int(torch.randint(10**8, 10**9, (), generator=rng))
        memory = state_bytes(world=world, **state) + activations + spare
        return state | {"memory": int(memory), "activations": activations}

    def case(says: str, kind: str, *questions: dict[str, Any]) -> Case:
        # a search that never ends is waited for twice: among others, and alone to say so
        return Case(says, [{"questions": [*questions, questions[0]]}], kind, timeout=4.0)

    forms = list(product((1, 2, 3), ("fp32", "mixed"), ("momentum", "adamw")))
    plain = [question(stage, 3 + i % 9, 40, *form) for i, (stage, *form) in enumerate(forms)]
    plain += [question(3, 4, 40, "fp32", "sgd"), question(2, 5, 40, "mixed", "sgd")]
    return [
        case("it fits", "", *plain, question(3, 1, 10**5), question(0, 1, 10**5)),
        case(
            "it fits to the byte, or misses by one",
            "exact",
            *(question(*at, spare) for at in ((3, 6), (1, 7), (2, 2)) for spare in (0, -1)),
            question(3, MOST, 0),
            question(1, MOST, 0, "mixed"),
            question(0, 1, 0),
        ),
        case(
            "it never fits",
            "never",
            question(0, 1, -1),
            question(3, MOST + 1, 0),
            question(1, MOST, -(10**5)),
            question(1, 1, -1, "fp32", "sgd"),
            question(3, 5, 0, "mixed") | {"memory": 10**6},
        ),
    ]


def _world_values(seen: Observed) -> str | None:
    questions, answers = seen.case.inputs[0]["questions"], seen.data[0]["answers"]
    given = [whole(answer) for answer in answers]
    for q, answer, value in zip(questions, answers, given, strict=True):
        right = smallest_world(**q)
        if value == right and (value is None) == (answer is None):
            continue
        asked = (
            f"{q['num_params']:,} parameters at stage {q['stage']}, {q['precision']}, "
            f"{q['optimizer']}, {q['activations']:,} bytes of activations, {q['memory']:,} bytes "
            "of memory"
        )
        if value is None and answer is not None:
            cure = "The answer is a whole number of ranks, or None."
        elif right is None:
            cure = f"No world up to {MOST} is large enough: return None."
        else:
            cure = named(questions, given, smallest_world, WORLD_MISTAKES)
        if cure is None and value is None:
            cure = f"It does fit, in {MOST} ranks or fewer."
        elif cure is None and value < right:
            cure = f"With {value} ranks a rank needs more than it has."
        return f"{asked}: {answer!r} is wrong. {cure or 'A smaller world fits as well.'}"
    return None


def _by_division(memory: int, activations: int, **state: Any) -> int | None:
    room = memory - activations
    world = math.ceil(state_bytes(world=1, **state) / room) if room > 0 else 0
    return world if 1 <= world <= MOST else None


def _search(**changed: Any) -> Callable[..., int | None]:
    return lambda **asked: smallest_world(**(asked | changed))


WORLD_MISTAKES: dict[str, Callable[..., int | None]] = {
    "The activations take memory, too, and no stage shards them.": _search(activations=0),
    "Each rank needs all its activations: no stage shards them.": _search(divided=True),
    "Not everything is divided by N at this stage; some of it stays on each rank.": _by_division,
    "One rank fewer fits as well: to the last byte is enough.": _search(fits=operator.lt),
    "A smaller world fits as well: any number of ranks is a world.": _search(
        worlds=[1 << k for k in range(11)]
    ),
    f"The largest world to try is {MOST}.": _search(worlds=range(1, MOST)),
    **{
        words: _search(**changed)
        for words, changed in {
            "With that many ranks a rank needs more than it has: its share is rounded up.": {
                "shard": lambda psi, world: psi // world
            },
            "The optimizer decides how much is kept.": {"optimizer": "adamw"},
            "The precision decides how much is kept.": {"precision": "fp32"},
        }.items()
    },
}


SMALLEST_WORLD = Task(
    id="08.smallest_world",
    title="How many ranks does it take?",
    answer="smallest_world",
    job="lesson08.each",
    minutes=10,
    cases=_world_cases,
    criteria=(
        Criterion("the smallest world that fits", 2, _world_values, on=("",)),
        Criterion("to the byte", 1, _world_values, on=("exact",)),
        Criterion("None where no world fits", 1, _world_values, on=("never",)),
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
