"""Answers to lesson 06: wrong ones that people give, right ones in another style, promises."""

from answers import Wrong
from answers.altered import altered, solution, wrapped

KEPT = ("a rank keeps what it does not send",)
SENT = ("the mean of what the ranks sent",)
PAIRS = ("k values and k places travel, no more",)
SAME_K = ("the same bits on all ranks; the inputs stay",)
HOPS = ("off by half a step at each hop, at most",)
ODD = ("zeros, an outlier, tiny ones, very few",)
SAME_8 = ("the same bits on all ranks; the input stays",)
BYTES = ("at most 0.30 of the bytes of float32",)
WEIGHTS = ("the weights of local SGD, step by step",)
MOMENTA = ("momenta are averaged with the weights",)
ONE_CALL = ("one call at each meeting",)
ENDS = ("all ranks end with the same bits",)

TOP_K = """
def gather(piece):
    pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, piece)
    return pieces


def top_k(gradient, residual, k):
    world = dist.get_world_size()
    total = (gradient + residual).flatten()
    places = {choose}.topk(k).indices
    {collect}
    {left}
    return mean.view(gradient.shape), left.view(gradient.shape)
"""
COLLECT = """mean = torch.zeros_like(total)
    for where, values in zip(gather(places.int()), gather(total[places])):
        mean.index_add_(0, where, values)
    mean /= world"""


def top_k(choose="total.abs()", collect=COLLECT, left="left = total.index_fill(0, places, 0)"):
    return TOP_K.format(choose=choose, collect=collect, left=left)


INT8 = """
def gather(piece):
    pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, piece)
    return torch.stack(pieces)


def quantise(values):
    {scale}
    {steps}
    return steps, scale


def int8_mean(gradient):
    world, numel = dist.get_world_size(), gradient.numel()
    part = -(-numel // world)
    padded = torch.nn.functional.pad(gradient.flatten(), (0, part * world - numel))
    steps, scale = quantise(padded.view(world, part))
    parts = torch.empty_like(steps)
    dist.all_to_all_single(parts, steps)
    {add}
    steps, scale = quantise(mean)
    {bring}
    return whole.flatten()[:numel].view(gradient.shape)
"""
SCALE = """scale = values.abs().max() / 127
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))"""


def int8_mean(
    scale=SCALE,
    steps="steps = (values / scale).round().to(torch.int8)",
    add="mean = (parts * gather(scale.view(1))).sum(0) / world",
    bring="whole = gather(steps) * gather(scale.view(1))",
):
    return INT8.format(scale=scale, steps=steps, add=add, bring=bring)


LOCAL = """
def local_sgd(parameters, optimizer, steps, every):
    world = dist.get_world_size()

    def average(tensors):
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        {divide}
        for t, mean in zip(tensors, flat.split([t.numel() for t in tensors])):
            t.copy_(mean.view_as(t))

    def meet():
        momenta = [optimizer.state[p].get("momentum_buffer") for p in parameters]
        momenta = [m for m in momenta if m is not None]
        {meet}

    {before}
    for number, micro_batches in enumerate(steps, start=1):
        for backward in micro_batches:
            {backward}
        {between}
        optimizer.step()
        optimizer.zero_grad()
        if {when}:
            meet()
"""


def local_sgd(
    divide="flat /= world",
    meet="average([p.data for p in parameters] + momenta)",
    before="",
    backward="backward()",
    between="",
    when="number % every == 0 or number == len(steps)",
):
    return LOCAL.format(
        divide=divide, meet=meet, before=before, backward=backward, between=between, when=when
    )


WRONG = {
    "06.top_k": [
        Wrong(
            "no residual",
            top_k(left="left = torch.zeros_like(total)"),
            says="what was not sent is lost",
            loses=KEPT,
        ),
        Wrong(
            "the residual keeps what was sent",
            top_k(left="left = total.clone()"),
            says="still holds what was sent",
            loses=KEPT,
        ),
        Wrong(
            "what the mean lacks is kept",
            top_k(left="left = total - mean"),
            says="this rank's total minus the mean. Subtract what this rank itself has sent",
            loses=KEPT,
        ),
        Wrong(
            "what was sent is kept",
            top_k(left="left = total - total.index_fill(0, places, 0)"),
            says="is what was sent, and not what was left",
            loses=KEPT,
        ),
        Wrong(
            "chosen from the gradient",
            top_k(choose="gradient.flatten().abs()"),
            says="lacks the largest entries of the gradient. Choose among gradient + residual",
            loses=KEPT,
        ),
        Wrong(
            "the largest, and not in absolute value",
            top_k(choose="total"),
            says="Choose by absolute value",
            loses=KEPT,
        ),
        Wrong(
            "the old residual is dropped",
            top_k(left="left = gradient.flatten().index_fill(0, places, 0)"),
            says="leaves out the residual that came in",
            loses=KEPT,
        ),
        Wrong(
            "the residual is not added",
            top_k().replace("(gradient + residual)", "(gradient + 0)"),
            says="forgets the residual of the step before",
            loses=KEPT,
        ),
        Wrong(
            "values without places",
            top_k(
                collect="values = total[places]\n    dist.all_reduce(values)\n"
                "    mean = torch.zeros_like(total)\n    mean[places] = values / world"
            ),
            says="send the places with the values",
            loses=SENT,
        ),
        Wrong(
            "the sum",
            top_k(COLLECT and "total.abs()", COLLECT[: -len("    mean /= world")].rstrip()),
            "is the sum over the ranks",
            SENT,
        ),
        Wrong(
            "a world of 2",
            top_k(collect=COLLECT.replace("mean /= world", "mean /= min(world, 2)")),
            says="is half of the sum. Use dist.get_world_size()",
            loses=SENT,
        ),
        Wrong(
            "everything is averaged",
            top_k(collect="mean = total.clone()\n    dist.all_reduce(mean)\n    mean /= world"),
            says="each rank sends only k",
            loses=SENT,
        ),
        Wrong(
            "divided by those who sent",
            top_k(
                collect=COLLECT.replace(
                    "mean /= world",
                    "times = torch.zeros_like(total)\n"
                    "    for where in gather(places.int()):\n"
                    "        times.index_add_(0, where, torch.ones_like(total[:k]))\n"
                    "    mean /= times.clamp(min=1)",
                )
            ),
            says="divides each place by the number of ranks that sent it. Divide by all ranks",
            loses=SENT,
        ),
        Wrong(
            "written over where two ranks share a place",
            top_k(
                collect="mean = torch.zeros_like(total)\n"
                "    where = torch.cat(gather(places.int())).long()\n"
                "    mean[where] += torch.cat(gather(total[places]))\n    mean /= world"
            ),
            says="has one rank's value alone where several sent the same place",
            loses=SENT,
        ),
        Wrong(
            "a dense mask: zeros travel, too",
            top_k(
                collect="mean = torch.zeros_like(total)\n    mean[places] = total[places]\n"
                "    dist.all_reduce(mean)\n    mean /= world"
            ),
            says="bytes with all_reduce; k values and k places",
            loses=PAIRS,
        ),
        Wrong(
            "places as int64",
            top_k(collect=COLLECT.replace("places.int()", "places")),
            says="Places as int64 take twice as many bytes",
            loses=PAIRS,
        ),
        Wrong(
            "added in place to the residual",
            top_k().replace("(gradient + residual)", "residual.add_(gradient)"),
            says="changed residual",
            loses=SAME_K,
        ),
        Wrong(
            "each rank begins with its own",
            top_k(
                collect="mean = torch.zeros_like(total)\n    rank = dist.get_rank()\n"
                "    pairs = list(zip(gather(places.int()), gather(total[places])))\n"
                "    for where, values in pairs[rank:] + pairs[:rank]:\n"
                "        mean.index_add_(0, where, values / world * (1 + 1e-6 * rank))"
            ),
            says="do not hold the same bits",
            loses=SAME_K,
        ),
    ],
    "06.int8_mean": [
        Wrong(
            "sums of int8",
            int8_mean(
                add="scale = gather(scale.view(1)).mean()\n"
                "    mean = parts.sum(0, dtype=torch.int8) * scale / world"
            ),
            says="adds up int8 of several scales",
            loses=HOPS,
        ),
        Wrong(
            "an all-reduce of int8",
            """
def int8_mean(gradient):
    top = gradient.abs().max()
    dist.all_reduce(top, dist.ReduceOp.MAX)
    scale = top.clamp(min=1e-30) / 127
    steps = (gradient / scale).round().to(torch.int8)
    dist.all_reduce(steps)
    return steps * scale / dist.get_world_size()
""",
            says="adds up int8 of one scale",
            loses=HOPS,
        ),
        Wrong(
            "no scale for zeros",
            int8_mean(scale="scale = values.abs().max() / 127"),
            says="0 / 0 is not a number",
            loses=ODD,
        ),
        Wrong(
            "own scale for the others' parts",
            int8_mean(add="mean = (parts * scale).sum(0) / world"),
            says="multiplied by its own scale",
            loses=HOPS,
        ),
        Wrong(
            "cut off, not rounded",
            int8_mean(steps="steps = (values / scale).to(torch.int8)"),
            says="rounded to the nearest step, or cut off",
            loses=HOPS,
        ),
        Wrong(
            "the sum",
            int8_mean(add="mean = (parts * gather(scale.view(1))).sum(0)"),
            "is the sum over the ranks",
            HOPS,
        ),
        Wrong(
            "a world of 2",
            int8_mean(add="mean = (parts * gather(scale.view(1))).sum(0) / min(world, 2)"),
            says="is half of the sum. Use dist.get_world_size()",
            loses=HOPS,
        ),
        Wrong(
            "the largest becomes -128",
            int8_mean(scale=SCALE.replace("127", "128")),
            says="Is every step within -127 to 127",
            loses=HOPS,
        ),
        Wrong(
            "one over the largest",
            int8_mean(
                scale="per_step = 127 / values.abs().max().item()\n"
                "    scale = values.new_tensor(1 / per_step)"
            ),
            says="raised ZeroDivisionError",
            loses=ODD,
        ),
        Wrong(
            "a small number in the scale",
            int8_mean(scale="scale = values.abs().max() / 127 + 1e-8"),
            says="the steps are too large for it",
            loses=ODD,
        ),
        Wrong(
            "whole tensors for all",
            int8_mean(
                add="every = gather(steps.flatten()) * gather(scale.view(1))\n"
                "    mean = every.sum(0).view(world, part)[dist.get_rank()] / world"
            ).replace(
                "    parts = torch.empty_like(steps)\n    dist.all_to_all_single(parts, steps)\n",
                "",
            ),
            says="Full tensors to all ranks",
            loses=BYTES,
        ),
        Wrong(
            "float32 back",
            int8_mean(bring="whole = gather(mean)"),
            says="0.30 are allowed",
            loses=BYTES,
        ),
        Wrong(
            "an all-reduce of float32",
            "def int8_mean(gradient):\n    mean = gradient.clone()\n    dist.all_reduce(mean)\n"
            "    return mean / dist.get_world_size()\n",
            says="bytes with all_reduce",
            loses=BYTES,
        ),
        Wrong(
            "the own part is kept exact",
            int8_mean(
                bring="whole = gather(steps) * gather(scale.view(1))\n"
                "    whole[dist.get_rank()] = mean"
            ),
            says="do not hold the same bits",
            loses=SAME_8,
        ),
        Wrong(
            "the gradient is scaled in place",
            int8_mean()
            .replace(
                "part = -(-numel // world)", "part = -(-numel // world)\n    gradient *= 1.0000001"
            )
            .replace("return whole", "gradient += 1e-30\n    return whole"),
            says="which was handed in to be read",
            loses=SAME_8,
        ),
        Wrong(
            "always float32",
            int8_mean().replace("gradient.flatten()", "gradient.float().flatten()"),
            says="has dtype float32, and float64 was expected",
            loses=HOPS,
        ),
    ],
    "06.local_sgd": [
        Wrong("the sum of weights", local_sgd(divide="pass"), "N times as long", WEIGHTS),
        Wrong("a world of 2", local_sgd(divide="flat /= min(world, 2)"), "divided by 2", WEIGHTS),
        Wrong(
            "gradients in each step",
            local_sgd(between="average([p.grad for p in parameters])"),
            says="weights are those of DDP",
            loses=WEIGHTS,
        ),
        Wrong("DDP", local_sgd(when="True"), "weights are those of DDP", WEIGHTS),
        Wrong(
            "the tail is never averaged",
            local_sgd(when="number % every == 0"),
            says="the steps after the last meeting",
            loses=WEIGHTS,
        ),
        Wrong(
            "only at the end", local_sgd(when="number == len(steps)"), "only at the end", WEIGHTS
        ),
        Wrong("never", local_sgd(when="False"), "weights were never averaged", WEIGHTS),
        Wrong(
            "gradients are kept",
            local_sgd().replace("optimizer.zero_grad()", "pass"),
            says="gradients of earlier steps",
            loses=WEIGHTS,
        ),
        Wrong(
            "a step for each micro-batch",
            local_sgd(backward="backward(), optimizer.step(), optimizer.zero_grad()"),
            says="each micro-batch had its own",
            loses=WEIGHTS,
        ),
        Wrong(
            "the mean over micro-batches",
            local_sgd(between="for p in parameters: p.grad /= len(micro_batches)"),
            says="the sum over micro-batches was divided",
            loses=WEIGHTS,
        ),
        Wrong(
            "micro-batches are counted",
            local_sgd(
                before="count = 0",
                backward="backward()\n            count += 1",
                when="count % every == 0 or number == len(steps)",
            ),
            says="Count steps of the optimizer",
            loses=WEIGHTS,
        ),
        Wrong(
            "a step too early",
            local_sgd(when="(number - 1) % every == 0 or number == len(steps)"),
            says="a step too early",
            loses=WEIGHTS,
        ),
        Wrong(
            "weights without momenta",
            local_sgd(meet="average([p.data for p in parameters])"),
            says="the momenta are not",
            loses=MOMENTA,
        ),
        Wrong(
            "momenta are dropped",
            local_sgd(
                meet="average([p.data for p in parameters])\n        optimizer.state.clear()"
            ),
            says="momenta start from zero",
            loses=MOMENTA,
        ),
        Wrong(
            "a call for each parameter",
            local_sgd(
                meet="for t in [p.data for p in parameters] + momenta:\n            average([t])"
            ),
            says="a meeting is one call",
            loses=ONE_CALL,
        ),
        Wrong(
            "a second meeting after the last",
            local_sgd() + "    meet()\n",
            says="a meeting is one call",
            loses=ONE_CALL,
        ),
        Wrong(
            "gathered whole",
            local_sgd().replace(
                "dist.all_reduce(flat)",
                "every_flat = [torch.empty_like(flat) for _ in range(world)]\n"
                "        dist.all_gather(every_flat, torch.cat([flat, flat])[: len(flat)])\n"
                "        flat = torch.stack(every_flat).sum(0)",
            ),
            says="an all-reduce of weights (and momenta) at each meeting",
            loses=ONE_CALL,
        ),
        Wrong(
            "a little of its own stays",
            local_sgd(divide="flat = flat / world * (1 + 2e-7 * dist.get_rank())"),
            says="do not hold the same bits",
            loses=ENDS,
        ),
    ],
}

# ---- right answers that look different from the solution ----

RIGHT = {
    "06.top_k": [
        (
            "one message of both, values as int32",
            """
def top_k(gradient, residual, k):
    world = dist.get_world_size()
    total = gradient.add(residual).reshape(-1)
    places = torch.argsort(total.abs(), descending=True)[:k]
    mine = torch.cat([places.int().view(torch.uint8), total[places].view(torch.uint8)])
    every = torch.empty(world * mine.numel(), dtype=torch.uint8)
    dist.all_gather_into_tensor(every, mine)
    mean, left = torch.zeros_like(total), total.clone()
    for packed in every.view(world, -1):
        where = packed[: 4 * k].clone().view(torch.int32).long()
        mean[where] += packed[4 * k :].clone().view(total.dtype) / world
    left[places] = 0.0
    return mean.reshape(gradient.shape), left.reshape(gradient.shape)
""",
        ),
        (
            "each rank broadcasts its own",
            """
def top_k(gradient, residual, k):
    total = gradient + residual
    values, places = total.abs().flatten().topk(k)
    sent = torch.zeros_like(total).flatten()
    for rank in range(dist.get_world_size()):
        where, what = places.int(), total.flatten()[places]
        dist.broadcast(where, rank)
        dist.broadcast(what, rank)
        sent.scatter_add_(0, where.long(), what)
    mask = torch.ones_like(sent)
    mask[places] = 0
    return sent.view(total.shape) / dist.get_world_size(), total * mask.view(total.shape)
""",
        ),
    ],
    "06.int8_mean": [
        (
            "a scale for each part, and lists of tensors",
            """
def int8_mean(gradient):
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = list(gradient.reshape(-1).tensor_split(world))
    sizes = [len(p) for p in parts]

    def packed(x):
        top = x.abs().max() if len(x) else x.new_zeros(())
        scale = top.double().view(1) / 127
        steps = torch.round(x / scale) if top > 0 else torch.zeros_like(x)
        return torch.cat([steps.char(), scale.view(torch.int8)])

    def unpacked(p):
        return p[:-8] * p[-8:].clone().view(torch.float64)

    out = [torch.empty(sizes[rank] + 8, dtype=torch.int8) for _ in range(world)]
    both = [torch.empty(0)] * world
    mine = [packed(p) for p in parts]
    for other in range(1, world):
        to, source = (rank + other) % world, (rank - other) % world
        work = dist.isend(mine[to], to)
        dist.recv(out[source], source)
        work.wait()
    out[rank] = mine[rank]
    mean = packed(torch.stack([unpacked(p) for p in out]).mean(0))
    for r in range(world):
        both[r] = mean if r == rank else torch.empty(sizes[r] + 8, dtype=torch.int8)
        dist.broadcast(both[r], r)
    return torch.cat([unpacked(p) for p in both]).to(gradient.dtype).view(gradient.shape)
""",
        ),
        (
            "one scale that all ranks share",
            """
def int8_mean(gradient):
    world = dist.get_world_size()
    top = gradient.abs().max()
    dist.all_reduce(top, dist.ReduceOp.MAX)
    if top == 0:
        return torch.zeros_like(gradient)
    flat = gradient.flatten() / top * 127
    flat = torch.cat([flat, flat.new_zeros(-len(flat) % world)])
    mine = torch.empty(len(flat), dtype=torch.int8)
    dist.all_to_all_single(mine, flat.round().to(torch.int8))
    mean = mine.view(world, -1).to(gradient.dtype).mean(0).round().to(torch.int8)
    whole = torch.empty(len(flat), dtype=torch.int8)
    dist.all_gather_into_tensor(whole, mean)
    return (whole[: gradient.numel()] * (top / 127)).view_as(gradient)
""",
        ),
    ],
    "06.local_sgd": [
        (
            "a counter that starts anew, and all_gather for one rank's worth",
            """
def local_sgd(parameters, optimizer, steps, every):
    alone, left = 0, len(steps)
    for step in steps:
        optimizer.zero_grad()
        for backward in step:
            backward()
        optimizer.step()
        alone, left = alone + 1, left - 1
        if alone < every and left:
            continue
        alone = 0
        with torch.no_grad():
            kept = [t for p in parameters for t in (p, optimizer.state[p].get("momentum_buffer"))]
            kept = [t for t in kept if t is not None]
            flat = torch.cat([t.reshape(-1) for t in kept]) / dist.get_world_size()
            if dist.get_world_size() > 1:
                dist.all_reduce(flat)
            for t in kept:
                t.copy_(flat[: t.numel()].view_as(t))
                flat = flat[t.numel() :]
""",
        ),
        (
            "one meeting every so many steps, cut beforehand",
            """
def local_sgd(parameters, optimizer, steps, every):
    for block in (steps[i : i + every] for i in range(0, len(steps), every)):
        for step in block:
            for backward in step:
                backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        state = [optimizer.state[p] for p in parameters]
        momenta = [s["momentum_buffer"] for s in state if s.get("momentum_buffer") is not None]
        tensors = [p.detach() for p in parameters] + momenta
        flat = torch._utils._flatten_dense_tensors(tensors)
        dist.all_reduce(flat)
        means = torch._utils._unflatten_dense_tensors(flat / dist.get_world_size(), tensors)
        for tensor, mean in zip(tensors, means):
            tensor.copy_(mean)
""",
        ),
    ],
}

# ---- what the texts promise, and who judges it: (criterion, kind of case) ----

PROMISES = {
    "06.top_k": {
        "with the largest absolute value": (*KEPT, ""),
        "No rank sends anything else": (*PAIRS, ""),
        "the mean over all ranks of what was sent": (*SENT, ""),
        "which is what this rank has not sent": (*KEPT, ""),
        "To each other rank a rank sends at most k values and k places": (*PAIRS, ""),
        "same bits on all ranks, and the inputs stay as they are": (*SAME_K, ""),
        "any shape, float32 or float64, contiguous or not, the same on all ranks": (*KEPT, ""),
        "of the same shape and dtype": (*KEPT, ""),
        "The mean of every rank's k largest entries": (*SENT, ""),
        "both of the gradient's shape and dtype": (*SENT, ""),
    },
    "06.int8_mean": {
        "each of the two hops may change the mean by at most half a step": (*HOPS, ""),
        "no more than 0.30 of the bytes": (*BYTES, ""),
        "same bits on all ranks, and the input stays as it is": (*SAME_8, ""),
        "must also handle zeros, an outlier of a million, values around 1e-12": (*ODD, "odd"),
        "all values are finite": None,
    },
    "06.local_sgd": {
        "Each rank trains alone": (*WEIGHTS, ""),
        "weights become their mean over the ranks": (*WEIGHTS, ""),
        "the momenta, if there are any": (*MOMENTA, "momentum"),
        "A meeting is one call that sends everything": (*ONE_CALL, ""),
        "nothing is sent between meetings": (*ONE_CALL, ""),
        "all take the same number of steps": (*WEIGHTS, ""),
        "At the end all ranks hold the same bits": (*ENDS, ""),
        "One rank may have more micro-batches than another": (*WEIGHTS, ""),
        "with the same values on all ranks, all of one dtype": None,
        "with or without momentum": (*MOMENTA, "momentum"),
        "each step is a list of functions, one for each micro-batch": (*WEIGHTS, ""),
        "After every `every` steps of its optimizer": (*WEIGHTS, ""),
    },
}

# ---- mutants that are right ----

WORLD = "`world = dist.get_world_size()` -> the first one, kept"
EQUIVALENT = {
    "06.top_k": {
        WORLD: "a job has one world",
        "`zip(gather(places.int()), gather(total[places]), strict=T...` -> "
        "`zip(gather(places.int()), gather(total[places]))`": "not strict is the default",
        "`True` -> `False`": "the same, said",
        "`0` -> `-1` (#3)": "the only dimension there is",
        "`0` -> `-1`": "the only dimension there is",
    },
    "06.int8_mean": {
        "`127` -> `126`": "what is judged is the error, and one step in 127 hardly adds to it",
        "`torch.ones_like(scale)` -> `torch.ones_like(scale, dtype=torch.float32)`": (
            "where takes the wider dtype"
        ),
        "`mean = (parts * gather(scale.view(1))).sum(0) / world` -> twice": (
            "a few scales travel again, far below the bytes that are allowed"
        ),
    },
    "06.local_sgd": {
        WORLD: "a job has one world",
        "`zip(tensors, flat.split([t.numel() for t in tensors]), st...` -> "
        "`zip(tensors, flat.split([t.numel() for t in tensors]))`": "not strict is the default",
        "`True` -> `False`": "the same, said",
    },
}


# -- what an answer may not assume -----------------------------------------------------------------

WRONG["06.top_k"] += [
    Wrong(
        "the residual, remembered by shape",
        wrapped(
            "06.top_k",
            "top_k",
            "KEPT = {}\n\n\ndef top_k(gradient, residual, k):\n"
            "    residual = KEPT.get(gradient.shape, residual)\n"
            "    mean, KEPT[gradient.shape] = solution(gradient, residual, k)\n"
            "    return mean, KEPT[gradient.shape]\n",
        ),
        says="residual after step 1",
    ),
    Wrong(
        "the first k of each shape",
        wrapped(
            "06.top_k",
            "top_k",
            "KEPT = {}\n\n\ndef top_k(gradient, residual, k):\n"
            "    return solution(gradient, residual, KEPT.setdefault(gradient.shape, k))\n",
        ),
        says="residual after step 1",
    ),
    Wrong(
        "places of one byte",
        altered(
            "06.top_k",
            ("gather(places.int())", "[w.int() for w in gather(places.to(torch.uint8))]"),
        ),
        says="mean in step 1",
        loses=("the mean of what the ranks sent",),
    ),
    Wrong(
        "places as float32",
        altered(
            "06.top_k",
            ("for where, values in zip(gather(places.int()),", "for where, values in "
            "zip([w.int() for w in gather(places.float())],"),
        ),
        says="whole numbers only up to 16,777,216",
        loses=("k values and k places travel, no more",),
    ),
]  # fmt: skip
WRONG["06.int8_mean"] += [
    Wrong(
        "cut off, where ranks are alike",
        altered("06.int8_mean", ("(values / scale).round()", "(values / scale).floor()")),
        says="rounded to the nearest step, or cut off",
    )
]
WRONG["06.local_sgd"] += [
    Wrong(
        "gradients are averaged at a meeting, and weights are not",
        altered(
            "06.local_sgd",
            ("        optimizer.step()\n        optimizer.zero_grad()\n"
             "        if number % every == 0 or number == len(steps):\n            meet()",
             "        if number % every == 0 or number == len(steps):\n"
             "            for p in parameters:\n                dist.all_reduce(p.grad)\n"
             "                p.grad /= world\n"
             "        optimizer.step()\n        optimizer.zero_grad()"),
        ),
        says="but weights are not. Each rank steps alone, so the weights differ by now",
    ),
    Wrong(
        "gradients are averaged in place of weights, after the last step too",
        local_sgd(
            between="if number % every == 0 or number == len(steps):\n"
            "            average([p.grad for p in parameters])",
            when="False",
        ),
        says="but weights are not. Each rank steps alone, so the weights differ by now",
        loses=WEIGHTS,
    ),
    Wrong(
        "the mean is rounded to bfloat16",
        altered(
            "06.local_sgd",
            ("        flat /= world", "        flat = (flat / world).bfloat16().to(flat.dtype)"),
        ),
        says="is wrong: it is off by",
    ),
    Wrong(
        "the mean of float64 in float32",
        altered(
            "06.local_sgd", ("torch.cat([t.flatten() for t in tensors])",
                             "torch.cat([t.float().flatten() for t in tensors])"),
        ),
        says="is wrong: it is off by",
    ),
]  # fmt: skip

# -- 06.top_k_momentum -----------------------------------------------------------------------------

VELOCITY = ("the velocity of SGD on this rank's gradients",)
ADD_UP = ("sent and left add up to all velocities",)


def momentum(*changes):
    return altered("06.top_k_momentum", *changes)


STEP = "velocity = momentum * velocity + gradient"
HELD = "total = (residual + velocity).flatten()  # (n,)"
WRONG["06.top_k_momentum"] = [
    Wrong(
        "momentum after the exchange",
        momentum(
            (f"    {STEP}\n", ""),
            (HELD, "total = (residual + gradient).flatten()  # (n,)"),
            ("    mean /= world\n",
             "    mean /= world\n    velocity = momentum * velocity + mean.view(velocity.shape)\n"
             "    mean = velocity.flatten()\n"),
        ),
        says="is made of what arrived",
        loses=VELOCITY,
    ),
    Wrong(
        "the residual of task 1, a velocity beside it",
        momentum((HELD, "total = (residual + gradient).flatten()  # (n,)")),
        says="is made of gradients, but what a rank did not send",
        loses=ADD_UP,
    ),
    Wrong(
        "the residual goes through the momentum",
        momentum((STEP, "velocity = momentum * velocity + gradient + residual"),
                 (HELD, "total = velocity.flatten()")),
        says="velocity after step 2",
        loses=VELOCITY,
    ),
    Wrong(
        "sent entries lose their velocity",
        momentum(("    left = total", "    velocity = velocity.flatten().index_fill(0, places, 0)"
                  ".view(gradient.shape)\n    left = total")),
        says="Entries that were sent keep their velocity",
        loses=VELOCITY,
    ),
    Wrong(
        "a running mean of gradients",
        momentum((STEP, "velocity = momentum * velocity + (1 - momentum) * gradient")),
        says="SGD's velocity adds all of it",
        loses=VELOCITY,
    ),
    Wrong(
        "momentum of 0.9, always",
        momentum((STEP, "velocity = 0.9 * velocity + gradient")),
        says="velocity after step 2",
        loses=VELOCITY,
    ),
    Wrong(
        "only the velocity is sent, nothing is kept",
        momentum((HELD, "total = velocity.flatten()")),
        says="forgets the residual of the step before",
        loses=ADD_UP,
    ),
    Wrong(
        "the largest of the velocity",
        momentum(("places = total.abs()", "places = velocity.flatten().abs()")),
        says="the largest entries of the velocity. Choose among all that the rank holds",
        loses=ADD_UP,
    ),
    Wrong(
        "the velocity in place",
        momentum((STEP, "velocity.mul_(momentum).add_(gradient)")),
        says="changed velocity",
        loses=SAME_K,
    ),
    Wrong(
        "everything travels",
        momentum(
            ("    mean = torch.zeros_like(total)\n",
             "    mean = total - total.index_fill(0, places, 0)\n    dist.all_reduce(mean)\n"),
            ("        mean.index_add_(0, where, values)  # in the order of ranks, on every rank\n",
             "        pass\n"),
        ),
        says="k values and k places of four bytes",
        loses=PAIRS,
    ),
]  # fmt: skip
RIGHT["06.top_k_momentum"] = [
    (
        "task 1's function, given the velocity for a gradient",
        solution("06.top_k")
        + """

def top_k_momentum(gradient, velocity, residual, k, momentum):
    velocity = velocity.mul(momentum).add(gradient)
    mean, residual = top_k(velocity, residual, k)
    return mean, velocity, residual
""",
    ),
    (
        "a mask, and scatter_add",
        """
def top_k_momentum(gradient, velocity, residual, k, momentum):
    new = gradient + velocity * momentum
    held = (new + residual).reshape(-1)
    order = held.abs().argsort(descending=True)[:k]
    mask = torch.zeros(held.shape, dtype=torch.bool)
    mask[order] = True
    values, places = held[order], order.to(torch.int32)
    all_values = [torch.zeros_like(values) for _ in range(dist.get_world_size())]
    all_places = [torch.zeros_like(places) for _ in range(dist.get_world_size())]
    dist.all_gather(all_values, values)
    dist.all_gather(all_places, places)
    out = torch.zeros_like(held)
    for v, p in zip(all_values, all_places):
        out.scatter_add_(0, p.long(), v)
    out = out / len(all_values)
    kept = torch.where(mask, torch.zeros_like(held), held)
    return out.reshape(gradient.shape), new, kept.reshape(gradient.shape)
""",
    ),
]
PROMISES["06.top_k_momentum"] = {
    "so that nothing is lost": (*ADD_UP, ""),
    "an entry that waited ten steps arrives": None,
    "Task 1 leaves this out": None,
    "Each rank's velocity is that of SGD on its own gradients": (*VELOCITY, ""),
    "add up to **all its velocities so far**": (*ADD_UP, ""),
    "It sends the k entries with the largest absolute value of all that it holds": (*ADD_UP, ""),
    "k and the bytes are as in task 1": (*PAIRS, ""),
    "Then with k = all entries each mean is exactly": ("the mean of what the ranks sent", ""),
    "the same on all ranks": None,
    "all of the gradient's shape and dtype": ("the mean of what the ranks sent", ""),
    "the mean has the same bits on all ranks": (*SAME_K, ""),
}
EQUIVALENT["06.top_k_momentum"] = {
    WORLD: "a job has one world",
    "`zip(gather(places.int()), gather(total[places]), strict=T...` -> "
    "`zip(gather(places.int()), gather(total[places]))`": "both lists have one entry for each rank",
    "`True` -> `False`": "the same, said",
    "`0` -> `-1` (#3)": "a flat tensor has one dimension",
    "`0` -> `-1`": "the same",
}

# -- what authors who had not read the judge got away with -----------------------------------------

WRONG["06.top_k"] += [
    Wrong(
        "what is as large as the smallest that was sent is lost",
        altered(
            "06.top_k",
            (
                "left = total.index_fill(0, places, 0)",
                "left = total * (total.abs() < total[places].abs().min())",
            ),
        ),
        says="lacks more than k entries",
        loses=KEPT,
    ),
    Wrong(
        "values travel as float32",
        altered(
            "06.top_k",
            ("gather(total[places])", "gather(total[places].float())"),
            (
                "mean.index_add_(0, where, values)",
                "mean.index_add_(0, where, values.to(mean.dtype))",
            ),
        ),
        says="values lose half of their bits",
        loses=PAIRS,
    ),
]
WRONG["06.int8_mean"] += [
    Wrong(
        "scales in float16, which a million overflows",
        altered(
            "06.int8_mean",
            (
                "return (values / scale).round().to(torch.int8), scale",
                "return (values / scale).round().to(torch.int8), scale.half().to(scale.dtype)",
            ),
        ),
        says="is zero everywhere",
        loses=ODD,
    ),
]
WRONG["06.local_sgd"] += [
    Wrong(
        "the momenta of the first group alone",
        altered(
            "06.local_sgd",
            (
                '.get("momentum_buffer") for p in parameters]',
                '.get("momentum_buffer") for p in optimizer.param_groups[0]["params"]]',
            ),
        ),
        says="What rank 0 holds after step",
        loses=MOMENTA,
    ),
]
