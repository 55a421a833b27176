"""Wrong answers to lesson 10 that people give, and the sentence that each must hear."""

from answers import Wrong
from answers.altered import altered

MEAN = ("each rank's shard of the mean gradient",)
ADDS = ("a second backward adds to the shards",)
LEFT = ("no full gradient is left after backward",)
OTHER = ("another dtype, any layout, two models",)
ALIVE = ("at most one full gradient lives at a time",)
BYTES = ("the bytes of a reduce-scatter",)
NORM = ("the norm of all ranks' shards, and all scaled by it",)
SHORT = ("gradients that are short enough stay",)
ONCE = ("replicated parameters count once",)
NUMBER = ("one all-reduce of one number",)

SHARD = """
def shard_gradients(model):
    rank, world = dist.get_rank(), dist.get_world_size()
    parameters = list(model.parameters())
    shards = [None] * len(parameters)

    def reduce(index, parameter):
        flat = parameter.grad.flatten()
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % world))
        shard = {reduce}
        shards[index] = {keep}
        {free}

    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda p, index=index: reduce(index, p))
    return shards
"""
SOLVED = {
    "reduce": "reduce_scatter(flat) / world",
    "keep": "shard if shards[index] is None else shards[index] + shard",
    "free": "parameter.grad = None",
}


def shard(**wrong):
    return SHARD.format(**(SOLVED | wrong))


CLIP = """
def clip_shards(shards, replicated, max_norm):
    world = dist.get_world_size()
    square = torch.zeros(()) + sum(s.square().sum() for s in {local})
    {reduce}
    square = square + sum((r.square().sum() for r in {after}), torch.zeros(()))
    norm = {norm}
    factor = {factor}
    for tensor in {scaled}:
        tensor *= factor
    return {result}
"""
RIGHT_CLIP = {
    "local": "shards",
    "reduce": "dist.all_reduce(square)",
    "after": "replicated",
    "norm": "square.sqrt()",
    "factor": "(max_norm / norm).clamp(max=1.0)",
    "scaled": "(*shards, *replicated)",
    "result": "norm",
}


def clip(**wrong):
    return CLIP.format(**(RIGHT_CLIP | wrong))


WRONG = {
    "10.shard_gradients": [
        Wrong("the sum", shard(reduce="reduce_scatter(flat)"), "is the sum over the ranks", MEAN),
        Wrong(
            "the own gradient, cut",
            shard(reduce="flat.chunk(world)[rank].clone()"),
            says="is cut from the rank's own gradient",
            loses=MEAN,
        ),
        Wrong(
            "is the full gradient; the shard has",
            shard(reduce="(dist.all_reduce(flat), flat / world)[1][: parameter.numel()]"),
            says="is the full gradient; the shard has",
            loses=MEAN,
        ),
        Wrong(
            "the part of the next rank",
            shard(reduce="reduce_scatter(flat.view(world, -1).roll(1, 0).flatten()) / world"),
            says="is the part of another rank",
            loses=MEAN,
        ),
        Wrong(
            "the second backward replaces the first",
            shard(keep="shard"),
            says="holds only the second backward's gradient: add to the existing shard",
            loses=ADDS,
        ),
        Wrong(
            "full gradients kept",
            shard(free="parameter.grad.zero_()"),
            says="full gradients are left",
            loses=LEFT,
        ),
        Wrong(
            "everything at the end of backward",
            """
def shard_gradients(model):
    world = dist.get_world_size()
    parameters = list(model.parameters())
    shards = [None] * len(parameters)

    def last(_):
        for index, p in enumerate(parameters):
            flat = torch.nn.functional.pad(p.grad.flatten(), (0, -p.numel() % world))
            shard = reduce_scatter(flat) / world
            shards[index] = shard if shards[index] is None else shards[index] + shard
            p.grad = None

    for p in parameters[1:]:
        p.register_post_accumulate_grad_hook(lambda p: None)
    parameters[0].register_post_accumulate_grad_hook(last)
    return shards
""",
            says="full gradients lived",
            loses=ALIVE,
        ),
        Wrong(
            "collected under another name, reduced at the end",
            """
def shard_gradients(model):
    world, parameters = dist.get_world_size(), list(model.parameters())
    shards, collected = [None] * len(parameters), {}

    def collect(index, p):
        collected[index], p.grad = p.grad, None
        if len(collected) < len(parameters):
            return
        for i, g in collected.items():
            flat = torch.nn.functional.pad(g.flatten(), (0, -g.numel() % world))
            shard = reduce_scatter(flat) / world
            shards[i] = shard if shards[i] is None else shards[i] + shard
        collected.clear()

    for i, p in enumerate(parameters):
        p.register_post_accumulate_grad_hook(lambda p, i=i: collect(i, p))
    return shards
""",
            says="Reduce each when it is ready, and keep none for later",
            loses=ALIVE,
        ),
        Wrong(
            "an all-reduce, then a slice",
            shard(reduce="(dist.all_reduce(flat), flat.chunk(world)[rank] / world)[1]"),
            says="bytes with all_reduce",
            loses=BYTES,
        ),
        Wrong(
            "torch's reduce_scatter, which gloo makes of an all-reduce",
            shard(
                reduce="flat.new_empty(len(flat) // world)\n"
                "        dist.reduce_scatter_tensor(shard, flat)\n        shard = shard / world"
            ),
            says="gloo's own reduce_scatter sends as much as an all-reduce",
            loses=BYTES,
        ),
        Wrong(
            "reduced in float32",
            shard(reduce="reduce_scatter(flat.float()) / world"),
            says="has dtype float32",
            loses=OTHER,
        ),
        Wrong(
            "the last gradient of each parameter is kept",
            shard(free="parameter.kept, parameter.grad = parameter.grad, None"),
            says="after backward, its shards take at most",
            loses=LEFT,
        ),
        Wrong(
            "one list of shards for all models",
            shard(keep="shard if shards[index] is None else shards[index] + shard").replace(
                "shards = [None] * len(parameters)",
                "shards = SHARDS\n    shards += [None] * len(parameters)",
            )
            + "\n\nSHARDS = []\n",
            says="must match the size of tensor b",
            loses=OTHER,
        ),
    ],
    "10.clip_shards": [
        Wrong("the local norm", clip(reduce="pass"), "is the norm of its own", NORM),
        Wrong(
            "norms added up",
            clip(reduce="square = square.sqrt(); dist.all_reduce(square); square = square**2"),
            says="add up squares",
            loses=NORM,
        ),
        Wrong("without the root", clip(norm="square"), "without the root", NORM),
        Wrong(
            "replicated parameters N times",
            clip(local="(*shards, *replicated)", after="[]"),
            says="counts replicated parameters once for each rank",
            loses=ONCE,
        ),
        Wrong(
            "replicated parameters left out of the norm",
            clip(after="[]"),
            says="without the replicated parameters",
            loses=ONCE,
        ),
        Wrong(
            "replicated parameters not scaled",
            clip(scaled="shards"),
            says="`replicated` were not scaled",
            loses=ONCE,
        ),
        Wrong(
            "always scaled",
            clip(factor="max_norm / norm"),
            says="gradients were scaled, although their norm is at most max_norm",
            loses=SHORT,
        ),
        Wrong(
            "the norm afterwards",
            clip(result="norm.clamp(max=max_norm)"),
            says="is the norm after clipping; return the one before",
            loses=NORM,
        ),
        Wrong(
            "new tensors in the lists",
            clip().replace(
                "    for tensor in (*shards, *replicated):\n        tensor *= factor\n",
                "    for tensors in (shards, replicated):\n"
                "        tensors[:] = [tensor * factor for tensor in tensors]\n",
            ),
            says="`shards` were not scaled",
            loses=NORM,
        ),
        Wrong(
            "a call for each tensor",
            clip(
                local="[torch.zeros(1)]",
                reduce="for s in shards:\n        part = s.square().sum()\n"
                "        dist.all_reduce(part)\n        square = square + part",
            ),
            says="one all_reduce of one number is enough",
            loses=NUMBER,
        ),
        Wrong(
            "all shards gathered",
            clip(
                reduce="own = torch.cat([s.flatten() for s in shards])\n"
                "    every = [torch.empty_like(own) for _ in range(world)]\n"
                "    dist.all_gather(every, own)\n    square = torch.cat(every).square().sum()"
            ),
            says="the sum of squares is one number",
            loses=NUMBER,
        ),
    ],
}
KEEP = """
from itertools import product


def keep_whole(sizes, world, micros, budget):
    best = None
    for plan in {plans}:
        held = [{whole} if kept else {part} for n, kept in zip(sizes, plan)]
        sharded = [n for n, kept in zip(sizes, plan) if not kept]
        sent = sum({sent} for n, kept in zip(sizes, plan))
        if {fits} and (best is None or sent < best[0]):
            best = sent, list(plan)
    return {result}
"""
KEEP_SOLVED = {
    "plans": "product([False, True], repeat=len(sizes))",
    "whole": "n",
    "part": "-(-n // world)",
    "sent": "-(-n // world) * (1 if kept else micros)",
    "fits": "4 * (sum(held) + max(sharded, default=0)) <= budget",
    "result": "best and best[1]",
}
FITS = ("plans that fit the budget",)
FEWEST = ("the fewest bytes",)
TIGHT = ("to the byte, and None where nothing fits",)
ENDS = ("one micro-batch, one rank, many ranks",)
SAME = ("the arguments stay as they are",)


def keep(**wrong):
    return KEEP.format(**(KEEP_SOLVED | wrong))


def greedy(order):
    return f"""
def keep_whole(sizes, world, micros, budget):
    def peak(plan):
        held = sum(n if whole else -(-n // world) for n, whole in zip(sizes, plan))
        return 4 * (held + max([n for n, whole in zip(sizes, plan) if not whole], default=0))

    plan = [False] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: {order}):
        plan[i] = True
        if peak(plan) > budget:
            plan[i] = False
    return plan if peak(plan) <= budget else None
"""


WRONG["10.keep_whole"] = [
    Wrong(
        "everything sharded",
        "def keep_whole(sizes, world, micros, budget):\n    return [False] * len(sizes)\n",
        says="Nothing is kept whole, so each micro-batch reduces everything",
        loses=FEWEST,
    ),
    Wrong(
        "everything whole",
        "def keep_whole(sizes, world, micros, budget):\n    return [True] * len(sizes)\n",
        says="Whole buckets take 4n bytes each",
        loses=FITS,
    ),
    Wrong(
        "the bucket in flight forgotten",
        keep(fits="4 * sum(held) <= budget"),
        says="until it is reduced, in addition to the shards of earlier micro-batches",
        loses=FITS,
    ),
    Wrong(
        "the largest bucket always in flight",
        keep(fits="4 * (sum(held) + max(sizes)) <= budget"),
        says="it needs no second buffer. For which buckets does this lower the peak?",
        loses=FEWEST,
    ),
    Wrong(
        "all sharded buckets in flight at once",
        keep(fits="4 * (sum(held) + sum(sharded)) <= budget"),
        says="is wrong,",
        loses=FITS,
    ),
    Wrong(
        "the smallest first",
        greedy("sizes[i]"),
        says="Taking the smallest bucket first is not always best",
        loses=FEWEST,
    ),
    Wrong(
        "the largest first",
        greedy("-sizes[i]"),
        says="Taking the largest bucket first is not always best",
        loses=FEWEST,
    ),
    Wrong(
        "less than the budget",
        keep(fits="4 * (sum(held) + max(sharded, default=0)) < budget"),
        says="None is wrong,",
        loses=TIGHT,
    ),
    Wrong(
        "a plan where nothing fits",
        keep(result="best[1] if best else [False] * len(sizes)"),
        says="Nothing fits here: return None",
        loses=TIGHT,
    ),
    Wrong(
        "numbers instead of bytes",
        keep(fits="sum(held) + max(sharded, default=0) <= budget"),
        says="Whole buckets take 4n bytes each",
        loses=FITS,
    ),
    Wrong(
        "a list of names",
        keep(result="best and ['whole' if kept else 'shard' for kept in best[1]]"),
        says="bools, or None, not",
        loses=FITS,
    ),
    Wrong(
        "as few whole buckets as possible",
        keep(sent="kept"),
        says="Nothing is kept whole",
        loses=FEWEST,
    ),
]

# ---- what the texts promise, as words of theirs -> (the criterion, the kind of case), or None

PROMISES = {
    "10.shard_gradients": {
        "backward leaves on each rank only its shard of every mean gradient": (
            *LEFT,
            "",
        ),
        "padded with zeros to a multiple of N and cut": (*MEAN, ""),
        "Reduce each gradient when it is ready and free it at once": (*ALIVE, ""),
        "at most one `.grad` exists at a time": (*ALIVE, ""),
        "The buffer that you send does not count as a gradient": None,
        "adds to the shards, as it would add to `.grad`": (*ADDS, ""),
        "The training loop clears them by": (*ADDS, ""),
        "send no more than a reduce-scatter of each gradient": (*BYTES, ""),
        "every parameter gets a gradient in every backward": None,
        "of any dtype, contiguous or not": (*OTHER, "other"),
        "the mean gradient of parameter i in model.parameters()": (*MEAN, ""),
    },
    "10.clip_shards": {
        "the same on every rank": (*ONCE, "replicated"),
        "multiply everything in place by `max_norm / norm`": (*NORM, ""),
        "is more than `max_norm`": (*SHORT, "short"),
        "Return the norm before clipping, on every rank": (*NORM, ""),
        "Use one all-reduce of one number": (*NUMBER, ""),
        "so that their common norm is at most max_norm": (*NORM, ""),
        "equal on all ranks, perhaps empty": (*ONCE, "replicated"),
        "at least one, this rank's parts": None,
    },
}
PROMISES["10.keep_whole"] = {
    "the peak of all gradients is at most `budget`": (*FITS, ""),
    "the rank sends as few bytes as possible": (*FEWEST, ""),
    "None if no plan fits": (*TIGHT, "exact"),
    "only the shard stays": (*FITS, ""),
    "only after the last one": (*FEWEST, ""),
    "One bucket at a time is being reduced": (*FITS, ""),
    "sizes stays as it is": (*SAME, ""),
    "For each bucket there is a choice": None,
    "A whole one needs no second buffer": (*FEWEST, ""),
    "buckets of 100 and 60 numbers on 2 ranks, both sharded": (*FITS, ""),
    "For each bucket True to keep it whole, False to shard it": (*FITS, ""),
    "the numbers in each bucket, 1 to 10 buckets": (*TIGHT, "exact"),
    "at least 1": (*ENDS, "plain"),
}

# ---- mutants of the solution that are right ----

ASSUMED = {
    "10.keep_whole": {
        "frozen micros": "with more micro-batches the best plan stays the best",
        "hard-coded micros = 4": "the same",
    },
}

EQUIVALENT = {
    "10.keep_whole": {
        "`zip(sizes, shards, plan, strict=True)` -> `zip(sizes, shards, plan)`": "equal lengths",
        "`True` -> `False` (#2)": "the same",
        "`zip(sizes, plan, strict=True)` -> `zip(sizes, plan)`": "the same",
        "`True` -> `False` (#3)": "the same",
        "`zip(shards, plan, strict=True)` -> `zip(shards, plan)`": "the same",
        "`True` -> `False` (#4)": "the same",
        "`sent < best[0]` -> `sent <= best[0]`": "of two plans that send as much either is right",
    },
    "10.shard_gradients": {
        "`world = dist.get_world_size()` -> the first one, kept": "a job has one world",
    },
}

# ---- right answers that look different from the solution ----

RIGHT = {
    "10.shard_gradients": [
        (
            "sent while backward goes on, added up at its end",
            """
def shard_gradients(model):
    world = dist.get_world_size()
    parameters = list(model.parameters())
    shards = [None for _ in parameters]
    under_way = []

    def finish():
        for index, parts, work in under_way:
            work.wait()
            mean = parts.view(world, -1).mean(0)
            if shards[index] is None:
                shards[index] = mean
            else:
                shards[index] += mean
        under_way.clear()

    def send(parameter):
        index = next(i for i, p in enumerate(parameters) if p is parameter)
        flat = parameter.new_zeros(-(-parameter.numel() // world) * world, requires_grad=False)
        flat[: parameter.numel()] = parameter.grad.reshape(-1)
        parameter.grad = None
        parts = torch.empty_like(flat)
        if not under_way:
            torch.autograd.Variable._execution_engine.queue_callback(finish)
        work = dist.all_to_all_single(parts, flat, async_op=True)
        under_way.append((index, parts, work))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(send)
    return shards
""",
        ),
        (
            "a tensor hook reduces, a second hook frees",
            """
def shard_gradients(model):
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = []

    def free(parameter):
        parameter.grad = None

    for index, parameter in enumerate(model.parameters()):
        shards.append(None)

        def keep(gradient, index=index):
            size = (gradient.numel() + world - 1) // world
            padding = gradient.new_zeros(size * world - gradient.numel())
            parts = torch.cat([gradient.flatten(), padding]).split(size)
            mine, inbox = parts[rank].clone(), parts[rank].clone()
            for distance in range(1, world):
                request = dist.isend(parts[(rank + distance) % world], (rank + distance) % world)
                dist.recv(inbox, (rank - distance) % world)
                request.wait()
                mine += inbox
            before = 0 if shards[index] is None else shards[index]
            shards[index] = before + mine / world

        parameter.register_hook(keep)
        parameter.register_post_accumulate_grad_hook(free)
    return shards
""",
        ),
        (
            "functional collectives, a mean by one product of matrices",
            """
import torch.distributed._functional_collectives as funcol


def shard_gradients(model):
    world, shards = dist.get_world_size(), []

    def hook(index):
        def reduce(p):
            size = -(-p.numel() // world)
            rows = p.grad.new_zeros(world * size)
            rows[: p.numel()] = p.grad.reshape(-1)
            p.grad = None
            if world > 1:
                rows = funcol.all_to_all_single(rows, None, None, dist.group.WORLD).wait()
            weights = torch.full((1, world), 1 / world, dtype=rows.dtype)
            mean = (weights @ rows.view(world, size)).view(-1)
            shards[index] = mean if shards[index] is None else mean.add_(shards[index])

        return reduce

    for index, parameter in enumerate(model.parameters()):
        shards.append(None)
        parameter.register_post_accumulate_grad_hook(hook(index))
    return shards
""",
        ),
    ],
    "10.clip_shards": [
        (
            "replicated ones shared out before the sum, clipped as torch does",
            """
def clip_shards(shards, replicated, max_norm):
    total = 0.0
    for s in shards:
        total += torch.linalg.vector_norm(s).item() ** 2
    for r in replicated:
        total += torch.linalg.vector_norm(r).item() ** 2 / dist.get_world_size()
    total = torch.tensor([total])
    dist.all_reduce(total)
    norm = total.item() ** 0.5
    if norm > max_norm:
        torch._foreach_mul_(shards + replicated, max_norm / (norm + 1e-6))
    return norm
""",
        ),
        (
            "an all_gather, and the replicated ones on rank 0 alone",
            """
def clip_shards(shards, replicated, max_norm):
    counted = shards + (replicated if dist.get_rank() == 0 else [])
    mine = torch.cat([t.flatten() for t in counted]).norm()
    norms = torch.empty(dist.get_world_size())
    dist.all_gather_into_tensor(norms, mine.reshape(1))
    norm = torch.linalg.vector_norm(norms)
    scale = torch.minimum(torch.ones(()), max_norm / norm)
    for tensor in shards + replicated:
        tensor.mul_(scale)
    return norm
""",
        ),
        (
            "a numpy scalar, alone nothing is sent",
            """
import numpy as np
import torch.distributed._functional_collectives as funcol


def clip_shards(shards, replicated, max_norm):
    square = sum((s.double() ** 2).sum() for s in shards)
    if dist.get_world_size() > 1:
        square = funcol.all_reduce(square, "sum", dist.group.WORLD).wait()
    norm = np.sqrt(float(square) + sum(float((r.double() ** 2).sum()) for r in replicated))
    if norm > max_norm:
        for tensor in shards + replicated:
            tensor.copy_(tensor * (max_norm / norm))
    return np.float64(norm)
""",
        ),
        (
            "DTensor: a partial sum becomes whole",
            """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial


def clip_shards(shards, replicated, max_norm):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mine = sum((s.flatten().square().sum() for s in shards), torch.zeros(()))
    square = DTensor.from_local(mine, mesh, [Partial()]).full_tensor()
    square = square + sum(r.square().sum() for r in replicated)
    norm = square.sqrt()
    for tensor in (*shards, *replicated):
        tensor *= (max_norm / norm).clamp(max=1)
    return norm
""",
        ),
    ],
    "10.keep_whole": [
        (
            "subsets as bits, the most elements whole",
            """
def keep_whole(sizes, world, micros, budget):
    found, most = None, -1
    for bits in range(2 ** len(sizes)):
        plan = [bool(bits >> i & 1) for i in range(len(sizes))]
        held, flying, saved = 0, 0, 0
        for n, whole in zip(sizes, plan):
            shard = (n + world - 1) // world
            held += n if whole else shard
            flying = flying if whole else max(flying, n)
            saved += shard if whole else 0
        if (held + flying) * 4 <= budget and saved > most:
            found, most = plan, saved
    return found
""",
        ),
    ],
}


# -- what an answer may not assume -----------------------------------------------------------------

WRONG["10.clip_shards"] += [
    Wrong(
        "the square is compared with the limit",
        altered("10.clip_shards", ("factor = (max_norm / norm).clamp(max=1.0)",
                                   "factor = max_norm / norm if square > max_norm else 1.0")),
        says="were not scaled; scale all of them in place",
    )
]  # fmt: skip


# -- what authors who had not read the judge got away with -----------------------------------------

WRONG["10.clip_shards"] += [
    Wrong(
        "a little too long is let through",
        altered(
            "10.clip_shards",
            (
                "factor = (max_norm / norm).clamp(max=1.0)",
                "factor = max_norm / norm if norm > 1.01 * max_norm else 1.0",
            ),
        ),
        says="were not scaled; scale all of them in place",
        loses=NORM,
    ),
]
