"""Wrong answers to lesson 08 that people give, and the sentence that each must hear."""

from answers import Wrong

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
    mixed = precision == "mixed"
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
            says="A smaller world fits as well",
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

# ---- right answers that look different from the solution ----

RIGHT = {
    "08.state_bytes": [
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
