"""Wrong answers to lesson 08 that people give, and the sentence that each must hear."""

from answers import Wrong
from answers.altered import altered

FP32 = ("AdamW in fp32, all stages",)
MIXED = ("mixed precision",)
OTHER = ("SGD and momentum",)
UNEVEN = ("parameters that N does not divide",)
SMALLEST = ("the smallest world that fits",)
EXACT = ("to the byte",)
NEVER = ("None where no world fits",)
STAGE, DTYPE, CUT = ("the stage",), ("the gradients' dtype",), ("the cut",)
TWINS = ("programs that look alike at some sizes",)
SMALL = ("fewer rows than ranks, very large tensors",)

STATE = """
def state_bytes(num_params, world, stage, precision, optimizer):
    states = {states}
    mixed = {mixed}
    number = {number}
    kept = {kept}
    shard = {shard}
    parameters = number * (shard if stage >= {p} else num_params)
    gradients = number * (shard if stage >= {g} else num_params)
    total = parameters + gradients + kept * (shard if stage >= {o} else num_params)
    return {total}
"""
SOLVED = {
    "states": '{"sgd": 0, "momentum": 1, "adamw": 2}[optimizer]',
    "mixed": 'precision == "mixed"',
    "number": "2 if mixed else 4",
    "kept": "4 * states + (4 if mixed else 0)",
    "shard": "-(-num_params // world)",
    "p": 3,
    "g": 2,
    "o": 1,
    "total": "total",
}


def state(**wrong):
    return STATE.format(**(SOLVED | wrong))


def world(body, **wrong):
    """body: the lines that search, with `rank_bytes(world)` at hand."""
    helper = state(**wrong).replace("def state_bytes", "def _state_bytes")
    return f"""{helper}

def smallest_world(num_params, stage, precision, optimizer, memory, activations):
    def rank_bytes(world):
        return _state_bytes(num_params, world, stage, precision, optimizer)

    {body}
"""


SEARCH = """for world in range(1, 1025):
        if rank_bytes(world) + activations <= memory:
            return world"""

PROGRAM = """
from itertools import product
from math import prod


def which_program(shapes, measured):
    def elements(world, cut):
        if cut == "flat":
            return -(-sum(prod(shape) for shape in shapes) // world)
        if cut == "each":
            return sum(-(-prod(shape) // world) for shape in shapes)
        return sum({rows} for shape in shapes)

    for stage, dtype, cut in product({stages}, {dtypes}, {cuts}):
        kinds = {{
            "parameters": (3, {parameter}),
            "gradients": (2, (4,) if dtype == "float32" else (2,)),
            "optimizer": (1, (4, 8, 12)),
        }}
        fits = True
        for kind, (first, sizes) in kinds.items():
            seen = [
                (held[kind], {elements}) for world, held in {measured}
            ]
            fits = fits and any(all({same} for held, n in seen) for size in sizes)
        if fits:
            return {program}
"""
EVERY = {
    "stages": "range(4)",
    "dtypes": '("float32", "bfloat16")',
    "cuts": '("flat", "each", "rows")',
    "parameter": "(2, 4)",
    "rows": "-(-shape[0] // world) * prod(shape[1:])",
    "elements": "elements(world if stage >= first else 1, cut)",
    "measured": "measured.items()",
    "same": "held == size * n",
    "program": "stage, dtype, cut if stage else None",
}


def program(**wrong):
    return PROGRAM.format(**(EVERY | wrong))


WRONG = {
    "08.state_bytes": [
        Wrong("nothing is sharded", state(p=9, g=9, o=9), "holds without sharding", FP32),
        Wrong(
            "everything is sharded at every stage",
            state(p=1, g=1, o=1),
            says="At this stage not everything is sharded",
            loses=FP32,
        ),
        Wrong(
            "stage 1 shards the gradients",
            state(g=1),
            says="Stage 1 shards the optimizer's states alone",
            loses=FP32,
        ),
        Wrong("bits", state(total="8 * total"), says="These are bits", loses=FP32),
        Wrong(
            "no fp32 copy in mixed precision",
            state(kept="4 * states"),
            says="holds an fp32 copy of the parameters",
            loses=MIXED,
        ),
        Wrong(
            "parameters of 4 bytes in mixed precision",
            state().replace("parameters = number", "parameters = 4"),
            says="In mixed precision the parameters used in forward take 2 bytes",
            loses=MIXED,
        ),
        Wrong(
            "AdamW, whatever is asked",
            state(states="2"),
            says="does not keep what AdamW keeps",
            loses=OTHER,
        ),
        Wrong(
            "the share rounded down",
            state(shard="num_params // world"),
            says="its share is rounded up",
            loses=UNEVEN,
        ),
        Wrong(
            "the fp32 copy on every rank",
            state(kept="4 * states", total="total + 4 * mixed * num_params"),
            says="is sharded with its states",
            loses=MIXED,
        ),
        Wrong(
            "the fp32 copy from stage 3 on",
            state(kept="4 * states").replace("number *", "(number + 4 * mixed) *", 1),
            says="not from stage 3 as the parameters are",
            loses=MIXED,
        ),
        Wrong(
            "a share that is no whole number",
            state(shard="num_params / world", total="int(total)"),
            says="round its share up, not the sum down",
            loses=UNEVEN,
        ),
        Wrong(
            "no fp32 copy, and a share that is no whole number",
            state(kept="4 * states", shard="num_params / world", total="math.ceil(total)").replace(
                "def", "import math\n\n\ndef", 1
            ),
            says="its share is rounded up before it is multiplied",
            loses=(*MIXED, *UNEVEN),
        ),
        Wrong(
            "stage 3 leaves the parameters whole",
            state(p=9),
            says="Stage 3 shards the parameters as well",
            loses=FP32,
        ),
        Wrong("a float", state(total="float(total)"), "an int, not", FP32),
        Wrong("words", state(total="f'{total} bytes'"), "must be a number of bytes", FP32),
    ],
    "08.smallest_world": [
        Wrong(
            "activations forgotten",
            world(SEARCH.replace(" + activations", "")),
            says="The activations take memory, too",
            loses=SMALLEST,
        ),
        Wrong(
            "activations shared out",
            world(SEARCH.replace("activations", "activations / world")),
            says="Each rank needs all its activations",
            loses=SMALLEST,
        ),
        Wrong(
            "the last world left out",
            world(SEARCH.replace("1025", "1024")),
            says="The largest world to try is 1024",
            loses=EXACT,
        ),
        Wrong(
            "fp32, whatever is asked",
            world(SEARCH, mixed="False"),
            says="The precision decides",
            loses=SMALLEST,
        ),
        Wrong(
            "the total divided by the memory",
            world(
                "from math import ceil\n    world = ceil(rank_bytes(1) / (memory - activations))\n"
                "    return world if 0 < world <= 1024 else None"
            ),
            says="Not everything is divided by N",
            loses=SMALLEST,
        ),
        Wrong(
            "strictly less",
            world(SEARCH.replace("<=", "<")),
            says="One rank fewer fits as well: memory may be used to the last byte",
            loses=EXACT,
        ),
        Wrong(
            "powers of two alone",
            world(
                SEARCH.replace("range(1, 1025)", "[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]")
            ),
            says="A smaller world fits as well: N need not be a power of two",
            loses=SMALLEST,
        ),
        Wrong(
            "the largest world where none fits",
            world(SEARCH + "\n    return 1024"),
            says="return None",
            loses=NEVER,
        ),
        Wrong(
            "the search without an end",
            world(
                "world = 1\n    while rank_bytes(world) + activations > memory:\n"
                "        world += 1\n    return world"
            ),
            says="did not end within",
            loses=NEVER,
        ),
        Wrong(
            "the share rounded down",
            world(SEARCH, shard="num_params // world"),
            says="a rank needs more than it has",
            loses=EXACT,
        ),
    ],
}
WRONG["08.which_program"] = [
    Wrong(
        "the first world size alone",
        program(measured="list(measured.items())[:1]"),
        says="bytes as elements of half the size. The other world sizes tell them apart",
        loses=TWINS,
    ),
    Wrong(
        "the first and the last world size",
        program(measured="[list(measured.items())[0], list(measured.items())[-1]]"),
        says="as many elements as another one. The other world sizes tell them apart",
        loses=TWINS,
    ),
    Wrong(
        "gradients of the parameters' dtype",
        program(parameter='((4,) if dtype == "float32" else (2,))')
        + "    return 0, 'float32', None\n",
        says="They shrink with the number of ranks: they are sharded",
        loses=STAGE,
    ),
    Wrong(
        "the dtype is never looked at",
        program(program='stage, "float32", cut if stage else None'),
        says="by the elements of the fullest rank: how many bytes does one of them take?",
        loses=DTYPE,
    ),
    Wrong(
        "a flat range, whatever is measured",
        program(program='stage, dtype, "flat" if stage else None'),
        says="elements, which does not fit these bytes",
        loses=CUT,
    ),
    Wrong(
        "within a percent",
        program(same="abs(held - size * n) <= 0.01 * held"),
        says="as many elements as another one. The other world sizes tell them apart",
        loses=CUT,
    ),
    Wrong(
        "a cut at stage 0",
        program(program="stage, dtype, cut"),
        says="at stage 0 nothing is cut, so cut is None",
        loses=CUT,
    ),
    Wrong(
        "rows of the last dimension",
        program(rows="-(-shape[-1] // world) * prod(shape[:-1])"),
        says="Compute what this program holds by your own rule for its cut",
        loses=STAGE,
    ),
    Wrong(
        "no cut is named",
        program(program="stage, dtype, None"),
        says="from stage 1 on cut is",
        loses=CUT,
    ),
    Wrong(
        "what shrinks is everything",
        program(stages="(0, 3)") + "    return 3, 'float32', 'flat'\n",
        says="They do not shrink with the number of ranks: they are not sharded",
        loses=STAGE,
    ),
    Wrong(
        "a sentence",
        program(program="f'stage {stage}, {dtype}, {cut}'"),
        says="is not a program: return",
        loses=STAGE,
    ),
    Wrong(
        "elements counted in float32",
        program(
            elements="float(__import__('torch').tensor("
            "float(elements(world if stage >= first else 1, cut))))"
        ),
        says="None was returned. The shapes are",
        loses=SMALL,
    ),
]

# ---- what the texts promise, as words of theirs -> (the criterion, the kind of case), or None

PROMISES = {
    "08.state_bytes": {
        "lie on each rank": (*FP32, ""),
        "The optimizers keep 0": (*OTHER, "other"),
        "has parameters and gradients in fp32": (*FP32, ""),
        "computes with parameters and gradients of 2 bytes": (*MIXED, "mixed"),
        "holds an fp32 copy of the parameters in addition to its states": (*MIXED, "mixed"),
        "cut into N equal parts of whole elements": (*UNEVEN, "uneven"),
        "states on each rank, an int": (*FP32, ""),
        "num_params, world: ints, at least 1": None,
    },
    "08.smallest_world": {
        "and two traps: one rank may be enough, and some models never fit": (*NEVER, "never"),
        "Each rank has `memory` bytes": (*EXACT, "exact"),
        "Every rank needs `activations` bytes at every stage": (*SMALLEST, ""),
        "the smallest world from 1 to 1024 in which it does, or None": (*EXACT, "exact"),
        "does not run your first function": None,
        "None if there is none": (*NEVER, "never"),
        "bytes that each rank needs besides the state": (*SMALLEST, ""),
    },
    "08.which_program": {
        "how many bytes of each kind its fullest rank held": (*STAGE, ""),
        "or 2 bytes each, whatever the gradients take": (*DTYPE, ""),
        "all tensors laid end to end, the last part padded": (*CUT, ""),
        "different programs may show the same numbers there": (*TWINS, "twins"),
        "In a tensor with one dimension each number is a row": (*CUT, ""),
        "All three together fit exactly one program": (*TWINS, "twins"),
        "each a list of one or two ints, at least 1": (*SMALL, "small"),
    },
}

# ---- mutants of the solution that are right ----

EQUIVALENT = {
    "08.which_program": {
        "`for stage, dtype, cut in product(range(4), ('float32', 'b...` -> [1:]": (
            "stage 0 has three entries, one for each cut"
        ),
        "`4` -> `5`": "stage 4 fits where stage 3 has fitted before",
    },
    "08.smallest_world": {"`return None` -> dropped": "a function without return returns None"},
}

# ---- right answers that look different from the solution ----

RIGHT = {
    "08.state_bytes": [
        (
            "numpy adds up",
            """
import numpy as np


def state_bytes(num_params, world, stage, precision, optimizer):
    sizes = np.array([4, 4, 0] if precision == "fp32" else [2, 2, 4], dtype=np.int64)
    sizes[2] += 4 * {"sgd": 0, "momentum": 1, "adamw": 2}[optimizer]
    shard = np.ceil(num_params / world).astype(np.int64)
    counts = np.where(np.array([3, 2, 1]) <= stage, shard, num_params)
    return sizes @ counts
""",
        ),
        (
            "a table of tuples",
            """
import math


def state_bytes(num_params, world, stage, precision, optimizer):
    kinds = [  # (bytes per element, sharded from this stage on)
        (4 if precision == "fp32" else 2, 3),
        (4 if precision == "fp32" else 2, 2),
        (0 if precision == "fp32" else 4, 1),
    ]
    kinds += [(4, 1)] * ["sgd", "momentum", "adamw"].index(optimizer)
    total = 0
    for size, sharded_from in kinds:
        count = math.ceil(num_params / world) if stage >= sharded_from else num_params
        total += size * count
    return total
""",
        ),
    ],
    "08.smallest_world": [
        (
            "bisection",
            """
def smallest_world(num_params, stage, precision, optimizer, memory, activations):
    mixed = precision == "mixed"
    per = [2 if mixed else 4, 2 if mixed else 4]
    per.append({"sgd": 0, "momentum": 4, "adamw": 8}[optimizer] + (4 if mixed else 0))

    def fits(world):
        shard = (num_params + world - 1) // world
        total = activations
        for size, first in zip(per, (3, 2, 1)):
            total += size * (shard if stage >= first else num_params)
        return total <= memory

    low, high = 1, 1024
    if not fits(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low
""",
        ),
        (
            "a formula",
            """
def smallest_world(num_params, stage, precision, optimizer, memory, activations):
    number, copy = (4, 0) if precision == "fp32" else (2, 4)
    states = copy + 4 * ("sgd", "momentum", "adamw").index(optimizer)
    whole = number * (stage < 3) + number * (stage < 2) + states * (stage < 1)
    sharded = 2 * number + states - whole
    room = memory - activations - whole * num_params
    if room < 0:
        return None
    if sharded == 0:
        return 1
    most = room // sharded  # elements of the largest shard
    if most == 0:
        return None
    world = -(-num_params // most)
    return world if world <= 1024 else None
""",
        ),
    ],
    "08.which_program": [
        (
            "one number of bytes for an element",
            """
from fractions import Fraction
from math import ceil, prod


def which_program(shapes, measured):
    cuts = {
        "flat": lambda n: ceil(Fraction(sum(prod(s) for s in shapes), n)),
        "each": lambda n: sum(ceil(Fraction(prod(s), n)) for s in shapes),
        "rows": lambda n: sum(ceil(Fraction(s[0], n)) * (s + [1])[1] for s in shapes),
    }

    def sizes(kind, elements):
        return {Fraction(held[kind], elements(world)) for world, held in measured.items()}

    names = {4: "float32", 2: "bfloat16"}
    everything = sizes("gradients", lambda n: cuts["flat"](1))
    if len(sizes("optimizer", lambda n: 1)) == 1:
        return 0, names[everything.pop()], None
    for cut, elements in cuts.items():
        if len(sizes("optimizer", elements)) > 1:
            continue
        stage = sum(len(sizes(kind, lambda n: 1)) > 1 for kind in list(measured.values())[0])
        own = sizes("gradients", elements) if stage >= 2 else everything
        return stage, names[own.pop()], cut
""",
        ),
    ],
}


# -- what authors who had not read the judge got away with -----------------------------------------

CEIL = "shard = -(-num_params // world)"
WRONG["08.state_bytes"] += [
    Wrong(
        "nothing where parameters are fewer than ranks",
        altered("08.state_bytes", (CEIL, f"{CEIL} if num_params >= world else 0")),
        says="whole elements: of fewer parameters than ranks, some rank still holds one",
        loses=UNEVEN,
    ),
    Wrong(
        "no world above 4096",
        altered("08.state_bytes", (CEIL, f"world = min(world, 4096)\n    {CEIL}")),
        says="is wrong",
        loses=FP32,
    ),
]
