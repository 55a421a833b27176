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
    mixed, fp32 = ([(precision, o) for o in reversed(STATES)] for precision in ("mixed", "fp32"))
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
    for i, (q, answer, value) in enumerate(zip(questions, answers, given, strict=True)):
        if value is None:
            return f"{_asked(q)}: the answer must be a number of bytes, an int, not {answer!r}."
        if value == state_bytes(**q):
            continue
        plain = q | plainer
        if plainer and (plain == q or given[questions.index(plain)] != state_bytes(**plain)):
            continue  # another criterion's
        cure = named(questions, given, i, BYTES_MISTAKES) or BY_KIND
        return f"{_asked(q)}: {value:,} bytes is wrong. {cure}"
    return None


BY_KIND = "Count each kind separately: the bytes of one element, and the elements on a rank."


def named(
    questions: list[dict[str, Any]],
    given: list[Any],
    shown: int,
    mistakes: dict[str, Callable[..., Any]],
) -> str | None:
    """The mistake that gives all of these answers; else one that gives the wrong one shown."""
    for which in (range(len(questions)), [shown]):
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
    "The fp32 copy belongs to the optimizer: it is sharded from stage 1 on, not from stage 3 as "
    "the parameters are.": _mixed(more=(4, 0, -4)),
    "In mixed precision the parameters used in forward take 2 bytes.": _mixed(more=(2, 0, 0)),
    "In mixed precision gradients take 2 bytes.": _mixed(more=(0, 2, 0)),
    "This optimizer does not keep what AdamW keeps.": _always(optimizer="adamw"),
    "A rank holds whole elements: of fewer parameters than ranks, some rank still holds "
    "one.": _always(shard=lambda psi, world: 0 if psi < world else -(-psi // world)),
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
    debrief="Real runs add padding, step counters, buckets and the unit that is gathered at the "
    "moment. "
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
    for i, (q, answer, value) in enumerate(zip(questions, answers, given, strict=True)):
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
            cure = named(questions, given, i, WORLD_MISTAKES)
        if cure is None and value is None:
            cure = f"It fits on {MOST} ranks or fewer."
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
    "One rank fewer fits as well: memory may be used to the last byte.": _search(fits=operator.lt),
    "A smaller world fits as well: N need not be a power of two.": _search(
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
    "buys more than another rank. On a real GPU leave about a tenth of the memory free, for the "
    "runtime and the allocator.",
)

# -- 08.which_program ------------------------------------------------------------------------------

KINDS = {"parameters": 3, "gradients": 2, "optimizer": 1}  # the stage from which each is sharded
CUTS = ("flat", "each", "rows")
DTYPES = {"float32": 4, "bfloat16": 2}
OPTIMIZER = (4, 8, 12)
WORLDS = ((2, 3, 8), (6, 4, 2), (4, 16, 2), (3, 2, 64), (8, 5, 4))
Program = tuple[int, str, str | None]  # (stage, dtype of the gradients, cut)
PROGRAMS: list[Program] = [
    (stage, dtype, cut)
    for stage in STAGES
    for dtype in DTYPES
    for cut in (CUTS if stage else (None,))
]


def _elements(shapes: list[list[int]], world: int, cut: str | None) -> int:
    """Elements on the fullest rank."""
    sizes = [math.prod(shape) for shape in shapes]
    if cut is None:
        return sum(sizes)
    if cut == "flat":
        return -(-sum(sizes) // world)
    if cut == "each":
        return sum(-(-size // world) for size in sizes)
    return sum(-(-shape[0] // world) * math.prod(shape[1:]) for shape in shapes)


def _measured(
    shapes: list[list[int]], program: Program, worlds: Iterable[int], parameter: int, kept: int
) -> dict[int, dict[str, int]]:
    """What a program shows. parameter, kept: bytes of a parameter, and of its optimizer states."""
    stage, dtype, cut = program
    sizes = {"parameters": parameter, "gradients": DTYPES[dtype], "optimizer": kept}
    return {
        world: {
            kind: size * _elements(shapes, world, cut if stage >= KINDS[kind] else None)
            for kind, size in sizes.items()
        }
        for world in worlds
    }


def _contradicted(
    shapes: list[list[int]], measured: dict[int, dict[str, int]], program: Program
) -> tuple[str, list[int]] | None:
    """The first kind that this program cannot show; the world sizes that alone would allow it."""
    stage, dtype, cut = program
    allowed = {"parameters": (2, 4), "gradients": (DTYPES[dtype],), "optimizer": OPTIMIZER}
    for kind, first in reversed(KINDS.items()):
        each = {
            world: Fraction(held[kind], _elements(shapes, world, cut if stage >= first else None))
            for world, held in measured.items()
        }
        alone = [world for world, size in each.items() if size in allowed[kind]]
        if len(set(each.values())) > 1 or not alone:
            return kind, alone
    return None


def _possible(shapes: list[list[int]], measured: dict[int, dict[str, int]]) -> list[Program]:
    return [one for one in PROGRAMS if _contradicted(shapes, measured, one) is None]


def _program_cases(rng: torch.Generator) -> list[Case]:
    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    def one_of(values: Iterable[Any]) -> Any:
        values = list(values)
        return values[number(0, len(values))]

    def drawn(
        program: Program, shapes: list[list[int]], worlds: Iterable[int]
    ) -> dict[str, Any] | None:
        """A question that this program alone answers, if it is one."""
        held = _measured(shapes, program, worlds, one_of(DTYPES.values()), one_of(OPTIMIZER))
        return (
            {"shapes": shapes, "measured": held} if _possible(shapes, held) == [program] else None
        )

    def until(make: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
        while (made := make()) is None:
            pass
        return made

    def shapes(low: int, high: int) -> list[list[int]]:
        return [[number(low, high), number(low, high)], [number(low, high)], [number(low, high), 7]]

    def plain(program: Program, worlds: tuple[int, ...]) -> dict[str, Any]:
        """Of shapes for which the first world size would do."""

        def make() -> dict[str, Any] | None:
            question = drawn(program, shapes(101, 4000), worlds)
            if question is None:
                return None
            first = {worlds[0]: question["measured"][worlds[0]]}
            return question if _possible(question["shapes"], first) == [program] else None

        return until(make)

    def even() -> list[list[int]]:
        return [[96 * number(1, 9), 12], [96 * number(1, 9)], [96 * number(1, 9), 5]]

    def like_another_size(program: Program, place: int) -> dict[str, Any] | None:
        """At two ranks alone, half the elements could be elements of half the size."""
        worlds = list(one_of(((3, 7), (5, 4), (7, 16))))
        worlds.insert(place, 2)
        question = drawn(program, even(), worlds)
        if question is None:
            return None
        stages = {one[0] for one in _possible(question["shapes"], {2: question["measured"][2]})}
        return question if len(stages) > 1 else None

    def like_another_cut(program: Program, place: int) -> dict[str, Any] | None:
        """Without the world size in this place, another cut would fit as well."""
        worlds = [4, 2]
        worlds.insert(place, one_of((5, 7, 9)))
        question = drawn(program, even(), worlds)
        if question is None:
            return None
        rest = {w: question["measured"][w] for w in (4, 2)}
        return question if len(_possible(question["shapes"], rest)) > 1 else None

    every = [plain(program, WORLDS[i % 2]) for i, program in enumerate(PROGRAMS)]
    alike = [
        until(lambda make=make, p=program, at=at: make(p, at))
        for make in (like_another_size, like_another_cut)
        for program in PROGRAMS
        if program[0]
        for at in range(3)
    ]
    tiny = [
        until(lambda p=program: drawn(p, [*shapes(1, 9), [1, 100 + number(0, 9)]], one_of(WORLDS)))
        for program in PROGRAMS
    ]

    def large() -> list[list[int]]:  # more elements than a float32 can count
        return [[number(10**8, 10**9), 3], [number(10**6, 10**7)]]

    far = until(lambda: drawn(PROGRAMS[2], large(), WORLDS[0]))
    return [
        Case("programs that differ plainly", [{"questions": every}]),
        Case("programs that look alike at some sizes", [{"questions": alike}], "twins"),
        Case(
            "tensors with fewer rows than ranks, and very large ones",
            [{"questions": [*tiny, far]}],
            "small",
        ),
    ]


def _read_program(answer: Any) -> Program | None:
    if type(answer) is not list or len(answer) != 3 or whole(answer[0]) is None:
        return None
    program = whole(answer[0]), answer[1], answer[2]
    return program if program[0] in STAGES and answer[1] in DTYPES else None


def _programs(part: slice) -> Callable[[Observed], str | None]:
    """Judge this part of each triple."""

    def judge(seen: Observed) -> str | None:
        answers = seen.data[0]["answers"]
        for question, answer in zip(seen.case.inputs[0]["questions"], answers, strict=True):
            shapes, measured = question["shapes"], question["measured"]
            program = _read_program(answer)
            if answer is None:
                return _none_found(shapes, measured)
            if program is None:
                return (
                    f"{answer!r} is not a program: return (stage, dtype of the gradients, cut), as "
                    "(1, 'float32', 'flat')."
                )
            (right,) = _possible(shapes, measured)
            if program[part] != right[part]:
                return _program_cure(shapes, measured, program, right)
        return None

    return judge


def _none_found(shapes: list[list[int]], measured: dict[int, dict[str, int]]) -> str:
    """What was measured, and the program to try by hand."""
    (right,) = _possible(shapes, measured)
    shown = "; ".join(
        f"{kind} {', '.join(f'{held[kind]:,}' for held in measured.values())}" for kind in KINDS
    )
    worlds = ", ".join(map(str, measured))
    return (
        f"None was returned. The shapes are {shapes}, and the bytes at {worlds} ranks: {shown}. "
        f"This is {right}. Compute what this program holds by your own rule for its cut, and "
        "compare."
    )


def _program_cure(
    shapes: list[list[int]], measured: dict[int, dict[str, int]], program: Program, right: Program
) -> str:
    """What was measured, and why it is not this program."""
    stage, _, cut = program
    if not stage and cut is not None:
        return f"{program} cannot be: at stage 0 nothing is cut, so cut is None."
    if stage and cut not in CUTS:
        return f"{program} is not a program: from stage 1 on cut is 'flat', 'each' or 'rows'."
    kind, alone = _contradicted(shapes, measured, program)
    shown = ", ".join(f"{held[kind]:,} at {world} ranks" for world, held in measured.items())
    told = f"{program} cannot be: the bytes of the {kind} are {shown}. "
    sharded, truly = (s >= KINDS[kind] for s in (stage, right[0]))
    if alone:
        return (
            f"{told}At {world_name(alone[0])} alone it would be possible, because half the "
            "elements take as many bytes as elements of half the size. The other world sizes tell "
            "them apart."
            if sharded != truly
            else f"{told}At {world_name(alone[0])} this cut leaves as many elements as another "
            "one. The other world sizes tell them apart."
        )
    if sharded and not truly:
        return f"{told}They do not shrink with the number of ranks: they are not sharded."
    if truly and not sharded:
        return f"{told}They shrink with the number of ranks: they are sharded."
    if cut != right[2]:
        held = ", ".join(f"{_elements(shapes, world, cut):,}" for world in measured)
        return (
            f"{told}With your cut the fullest rank has {held} elements, which does not fit these "
            "bytes."
        )
    return (
        f"{told}Divide by the elements of the fullest rank: how many bytes does one of them take?"
    )


WHICH_PROGRAM = Task(
    id="08.which_program",
    title="Which program is this?",
    answer="which_program",
    job="lesson08.each",
    minutes=15,
    cases=_program_cases,
    criteria=(
        Criterion("the stage", 1, _programs(slice(0, 1)), on=("",)),
        Criterion("the gradients' dtype", 1, _programs(slice(1, 2)), on=("",)),
        Criterion("the cut", 2, _programs(slice(2, 3)), on=("",)),
        Criterion("programs that look alike at some sizes", 2, _programs(slice(3)), on=("twins",)),
        Criterion(
            "fewer rows than ranks, very large tensors", 1, _programs(slice(3)), on=("small",)
        ),
    ),
    hints=(
        "Half the bytes: are these half the elements, or elements of half the size? What would "
        "each of the two show with three ranks?",
        "There are not many programs. For each, count the elements of each kind on the fullest "
        "rank at each world size.",
        "A program is right if for each kind bytes / elements is the same number at all world "
        "sizes, and a number that the docstring allows. Try them all.",
    ),
    debrief="This is how a memory snapshot is read: guess the cut, predict the bytes, compare. "
    "FSDP2 cuts rows, ZeRO in DeepSpeed a flat range; buffers and fragments come on top.",
)

TASKS = [STATE_BYTES, SMALLEST_WORLD, WHICH_PROGRAM]
