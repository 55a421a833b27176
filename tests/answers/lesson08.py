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
            says="the parameters that compute take 2 bytes",
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
            "a share that is no whole number",
            state(shard="num_params / world", total="int(total)"),
            says="round its share up, not the sum down",
            loses=UNEVEN,
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
            says="to the last byte is enough",
            loses=EXACT,
        ),
        Wrong(
            "powers of two alone",
            world(
                SEARCH.replace("range(1, 1025)", "[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]")
            ),
            says="any number of ranks is a world",
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

# ---- what the texts promise, as words of theirs -> (the criterion, the kind of case), or None

PROMISES = {
    "08.state_bytes": {
        "lie on each rank": (*FP32, ""),
        "The optimizers keep 0": (*OTHER, "other"),
        "has parameters and gradients in fp32": (*FP32, ""),
        "computes with parameters and gradients of 2 bytes": (*MIXED, "mixed"),
        "holds an fp32 copy of the parameters beside its states": (*MIXED, "mixed"),
        "cut into N equal parts of whole elements": (*UNEVEN, "uneven"),
        "states on each rank, an int": (*FP32, ""),
        "num_params, world: ints, at least 1": None,
    },
    "08.smallest_world": {
        "and two traps: no world is too small to try, and some models never fit": (*NEVER, "never"),
        "Each rank has `memory` bytes": (*EXACT, "exact"),
        "which every rank needs whatever the stage": (*SMALLEST, ""),
        "the smallest world from 1 to 1024 in which it does, or None": (*EXACT, "exact"),
        "so that it stands alone": None,
        "None if there is none": (*NEVER, "never"),
        "bytes that each rank needs beside the state": (*SMALLEST, ""),
    },
}

# ---- mutants of the solution that are right ----

EQUIVALENT = {
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
}


# -- what authors who had not read the judge got away with -----------------------------------------

CEIL = "shard = -(-num_params // world)"
WRONG["08.state_bytes"] += [
    Wrong(
        "nothing where parameters are fewer than ranks",
        altered("08.state_bytes", (CEIL, f"{CEIL} if num_params >= world else 0")),
        says="also of fewer parameters than ranks somebody holds one",
        loses=UNEVEN,
    ),
    Wrong(
        "no world above 4096",
        altered("08.state_bytes", (CEIL, f"world = min(world, 4096)\n    {CEIL}")),
        says="is wrong",
        loses=FP32,
    ),
]
