"""Right answers to lesson 08 that look different from the solution."""

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
