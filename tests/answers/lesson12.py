"""Wrong answers to lesson 12 that people give, and the sentence that each must receive."""

from answers import Wrong
from answers.altered import altered, wrapped

STEP = ("all ranks step or none; unscaled, clipped",)
SCALE = ("the same scale on all ranks, always",)
SIZE = ("huge gradients, and nearly long ones",)
TURN = ("growth, and two runs in turn",)
ONE = ("one collective of one or two numbers",)
NODES = ("2 nodes of 2: as one process with all gradients",)
OTHER = ("float64, three models",)
EDGE = ("one node; nodes of one rank; three nodes",)
BITS = ("replicas agree bit for bit; inputs stay",)
HELD = ("holds Ψ/G and nothing more",)
LINKS = ("2(Ψ/G)(M-1)/M inter-node elements, gathers stay intra-node",)
HALF = ("off by half a step of its block, 20 rounds long",)
ODD = ("zeros, outliers, tiny ones, few, float64",)
SAME = ("the same bits everywhere; the shard stays; nothing is kept",)
BYTES = ("at most 0.30 of the bytes of float32",)
MESSAGE = ("steps and scales in one message",)

AGREE = """
def shared_step(parameters, optimizer, scaler, max_norm):
    gradients = [p.grad for p in parameters]
    {unscale}
    square = torch.zeros((), dtype={wide})
    for gradient in gradients:
        square += gradient.to({wide}).square().sum()
    {ask}
    if finite:
        factor = (max_norm / {norm}).clamp(max=1.0)
        for gradient in gradients:
            gradient *= factor
        optimizer.step()
        scaler["good_steps"] += 1
        if scaler["good_steps"] == scaler["interval"]:
            scaler["scale"], scaler["good_steps"] = scaler["scale"] * 2, {restart}
    else:
        {overflow}
    for p in parameters:
        {clear}
    return finite
"""
RIGHT_AGREE = {
    "unscale": "[g.div_(scaler['scale']) for g in gradients]",
    "wide": "torch.float64",
    "ask": "dist.all_reduce(square)\n    finite = bool(square.isfinite())",
    "norm": "square.sqrt()",
    "restart": "0",
    "overflow": 'scaler["scale"], scaler["good_steps"] = scaler["scale"] / 2, 0',
    "clear": "p.grad = None",
}


def agree(**wrong):
    return AGREE.format(**(RIGHT_AGREE | wrong))


HYBRID = """
class Hybrid:
    def __init__(self, weights, node):
        self.numel, self.node = len(weights), node
        self.world = dist.get_world_size()
        mesh = init_device_mesh("cpu", (self.world // node, node))
        self.across, self.inside = mesh.get_group(0), mesh.get_group(1)
        {build}

    def padded(self, flat):
        return torch.nn.functional.pad(flat, (0, -len(flat) % self.node))

    def gather(self):
        {gather}

    def step(self, gradient, lr):
        {reduce}
        self.shard -= lr * total
"""
RIGHT_HYBRID = {
    "build": "self.shard = self.padded(weights).chunk(node)[dist.get_rank() % node].clone()",
    "gather": "return all_gather(self.shard, self.inside)[: self.numel]",
    "reduce": "total = reduce_scatter(self.padded(gradient), self.inside)\n"
    "        dist.all_reduce(total, group=self.across)\n"
    "        total /= self.world",
}


def hybrid(**wrong):
    return HYBRID.format(**(RIGHT_HYBRID | wrong))


INT8 = """
def gather_int8(shard, block):
    world, n = dist.get_world_size(), len(shard)
    rows = torch.nn.functional.pad(shard, (0, -n % block)).view(-1, block)
    scales = {scales}
    steps = {steps}
    message = torch.cat([scales.view(torch.int8).flatten(), steps.flatten()])
    messages = all_gather(message).view(world, -1)
    scales, steps = messages.split([4 * len(scales), steps.numel()], dim=1)
    scales = scales.reshape(-1).view(torch.float32).view(world, -1, 1)
    {meet}
    whole = steps.reshape(world, -1, block).to(shard.dtype) * scales.to(shard.dtype)
    whole = whole.view(world, -1)[:, :n].flatten()
    {after}
    return whole
"""
RIGHT_INT8 = {
    "scales": "(rows.abs().amax(1, keepdim=True) / 127).float()",
    "steps": "(rows / scales.clamp(min=1e-30)).round().clamp(-127, 127).to(torch.int8)",
    "meet": "pass",
    "after": "pass",
}


def int8(**wrong):
    return INT8.format(**(RIGHT_INT8 | wrong))


WRONG = {
    "12.agree_on_overflow": [
        Wrong(
            "each rank looks at its own gradients",
            agree(
                ask="finite = bool(square.isfinite())\n    dist.all_reduce(square)",
                norm="square.nan_to_num(1.0, 1.0).sqrt()",
            ),
            says="All ranks step, or none does",
        ),
        Wrong(
            "the minimum of the flags",
            agree(
                ask="flag = (~square.isfinite()).float()\n    dist.all_reduce(square)\n"
                "    dist.all_reduce(flag, op=dist.ReduceOp.MIN)\n    finite = not flag"
            ),
            says="nan. One such rank must stop all of them. Does your collective tell them?",
        ),
        Wrong(
            "only the rank that saw it halves its scale",
            agree(
                ask="seen = not square.isfinite()\n    dist.all_reduce(square)\n"
                "    finite = bool(square.isfinite())",
                overflow='scaler["good_steps"] = 0\n        scaler["scale"] /= 2 if seen else 1',
            ),
            says="From now on their gradients have different factors",
            loses=SCALE,
        ),
        Wrong(
            "clipped while the scale is on",
            agree(
                unscale="pass",
                norm='square.sqrt()).clamp(max=1.0) / scaler["scale"] * (torch.ones(())',
            ),
            says="clipped while they still had the scale",
        ),
        Wrong(
            "never unscaled",
            agree(unscale="pass"),
            says="their norm was smaller: they still had the scale, or were lengthened",
        ),
        Wrong(
            "unscaled twice",
            agree(norm='square.sqrt()).clamp(max=1.0) / scaler["scale"] * (torch.ones(())'),
            says="unscaled twice",
        ),
        Wrong(
            "the norm of the own shards",
            agree(
                ask="own = square.clone()\n    dist.all_reduce(square)\n"
                "    finite = bool(square.isfinite())",
                norm="own.sqrt().clamp(min=1e-30)",
            ),
            says="the norm of the rank's own gradients",
        ),
        Wrong(
            "norms added up",
            agree(
                ask="square = square.sqrt()\n    dist.all_reduce(square)\n"
                "    finite = bool(square.isfinite())",
                norm="square",
            ),
            says="add up squares",
        ),
        Wrong("not clipped", agree(norm="(square.sqrt() * 0)"), "were not clipped"),
        Wrong(
            "a step with zeros in place of none",
            agree(
                overflow="[g.zero_() for g in gradients]\n        optimizer.step()\n"
                '        scaler["scale"], scaler["good_steps"] = scaler["scale"] / 2, 0'
            ),
            says="a step that must be skipped: momentum moves them even if gradients are 0",
        ),
        Wrong(
            "gradients all-reduced to see whether they are finite",
            agree(
                ask="for g in gradients:\n        dist.all_reduce(g)\n"
                "    finite = all(g.isfinite().all() for g in gradients)\n"
                "    square = sum(g.double().square().sum() for g in gradients)\n"
                "    finite = bool(finite)"
            ),
            says="each rank has other parameters",
        ),
        Wrong(
            "squares in float32",
            agree(wide="torch.float32"),
            says="did not step, although all gradients of all ranks were finite",
            loses=SIZE,
        ),
        Wrong(
            "one collective for the flag and one for the norm",
            agree(
                ask="flag = (~square.isfinite()).float()\n"
                "    dist.all_reduce(flag, op=dist.ReduceOp.MAX)\n    dist.all_reduce(square)\n"
                "    finite = not flag"
            ),
            says="brings the norm and the overflow at once",
            loses=ONE,
        ),
        Wrong(
            "good steps are not counted from 0 after growth",
            agree(restart='scaler["good_steps"]'),
            says="was expected",
            loses=SCALE,
        ),
        Wrong(
            "an overflow does not end the row of good steps",
            agree(overflow='scaler["scale"] /= 2'),
            says="was expected",
            loses=SCALE,
        ),
        Wrong("gradients stay", agree(clear="pass"), "left gradients behind"),
        Wrong(
            "always made as long as the limit",
            agree(norm="square.sqrt()).clamp(max=1e30) * (torch.ones(())"),
            says="their norm was smaller: they still had the scale, or were lengthened",
        ),
        Wrong(
            "a flag for each rank",
            agree(
                ask="flags = torch.zeros(dist.get_world_size() + 1, dtype=torch.float64)\n"
                "    flags[dist.get_rank()] = not square.isfinite()\n"
                "    flags[-1] = square if square.isfinite() else 0\n"
                "    dist.all_reduce(flags)\n"
                "    finite, square = not flags[:-1].any(), flags[-1]"
            ),
            says="rank needs the gradients of the others, or which of them had the overflow",
            loses=ONE,
        ),
        Wrong(
            "the scaler of the first run, for all",
            agree().replace(
                "    gradients = [",
                "    scaler = SEEN.setdefault('scaler', scaler)\n    gradients = [",
            )
            + "\n\nSEEN = {}\n",
            says="was expected",
            loses=SCALE,
        ),
    ],
    "12.hybrid_step": [
        Wrong(
            "replicas never meet",
            hybrid(reduce="total = reduce_scatter(self.padded(gradient), self.inside) / self.node"),
            says="replicas drift apart",
            loses=NODES,
        ),
        Wrong(
            "divided by the ranks of a node",
            hybrid(
                reduce=RIGHT_HYBRID["reduce"].replace("total /= self.world", "total /= self.node")
            ),
            says="divided by the 2 of a node",
            loses=NODES,
        ),
        Wrong(
            "the sum",
            hybrid(reduce=RIGHT_HYBRID["reduce"].replace("total /= self.world", "pass")),
            says="with the sum over the ranks",
            loses=NODES,
        ),
        Wrong(
            "the own gradient",
            hybrid(
                reduce="total = self.padded(gradient).chunk(self.node)[dist.get_rank() % self.node]"
            ),
            says="with the rank's own gradient",
            loses=NODES,
        ),
        Wrong(
            "the mesh the other way round",
            """
class Hybrid:
    def __init__(self, weights, node):
        self.numel, self.node = len(weights), node
        replicas = dist.get_world_size() // node
        mesh = init_device_mesh("cpu", (node, replicas))
        self.inside, self.across = mesh.get_group(0), mesh.get_group(1)
        self.shard = self.padded(weights).chunk(node)[dist.get_rank() // replicas].clone()

    def padded(self, flat):
        return torch.nn.functional.pad(flat, (0, -len(flat) % self.node))

    def gather(self):
        return all_gather(self.shard, self.inside)[: self.numel]

    def step(self, gradient, lr):
        total = reduce_scatter(self.padded(gradient), self.inside)
        dist.all_reduce(total, group=self.across)
        self.shard -= lr * (total / dist.get_world_size())
""",
            says="ranks of one node must hold different shards",
            loses=NODES,
        ),
        Wrong(
            "sharded over the world",
            """
class Hybrid:
    def __init__(self, weights, node):
        self.numel, self.world = len(weights), dist.get_world_size()
        self.shard = self.padded(weights).chunk(self.world)[dist.get_rank()].clone()

    def padded(self, flat):
        return torch.nn.functional.pad(flat, (0, -len(flat) % self.world))

    def gather(self):
        return all_gather(self.shard)[: self.numel]

    def step(self, gradient, lr):
        total = reduce_scatter(self.padded(gradient), dist.group.WORLD)
        self.shard -= lr * (total / self.world)
""",
            says="Cut into G parts: the ranks of one node together hold the full model",
            loses=NODES,
        ),
        Wrong(
            "all-reduce first, then a slice",
            hybrid(
                reduce="total = self.padded(gradient)\n"
                "        total = total.clone() if total is gradient else total\n"
                "        dist.all_reduce(total, group=self.across)\n"
                "        total = reduce_scatter(total, self.inside) / self.world"
            ),
            says="Make a gradient G times smaller inside the node before it travels",
            loses=LINKS,
        ),
        Wrong(
            "one all-reduce over the world, then a slice",
            hybrid(
                reduce="total = self.padded(gradient) + 0\n"
                "        dist.all_reduce(total)\n"
                "        total = total.chunk(self.node)[dist.get_rank() % self.node] / self.world"
            ),
            says="Make a gradient G times smaller inside the node before it travels",
            loses=LINKS,
        ),
        Wrong(
            "weights gathered over the world",
            hybrid(
                gather="every = all_gather(self.shard)\n"
                "        return every[: self.node * len(self.shard)][: self.numel]"
            ),
            says="gather inside it",
            loses=LINKS,
        ),
        Wrong(
            "an all-reduce inside the node",
            hybrid(
                reduce="total = self.padded(gradient) + 0\n"
                "        dist.all_reduce(total, group=self.inside)\n"
                "        total = total.chunk(self.node)[dist.get_rank() % self.node].clone()\n"
                "        dist.all_reduce(total, group=self.across)\n"
                "        total /= self.world"
            ),
            says="a gather and a reduce-scatter are",
            loses=LINKS,
        ),
        Wrong(
            "the whole is kept",
            hybrid(
                gather="self.whole = all_gather(self.shard, self.inside)\n"
                "        return self.whole[: self.numel].clone()"
            ),
            says="its shards take at most",
            loses=HELD,
        ),
        Wrong(
            "the shard is a view of the whole",
            hybrid(
                build="self.shard = self.padded(weights + 0).chunk(node)[dist.get_rank() % node]"
            ),
            says="its shards take at most",
            loses=HELD,
        ),
        Wrong(
            "the weights that were handed in are stepped on",
            hybrid(
                build="size = -(-len(weights) // node)\n"
                "        part = weights.split(size)[dist.get_rank() % node]\n"
                "        missing = size - len(part)\n"
                "        zeros = part.new_zeros(missing)\n"
                "        self.shard = torch.cat([part, zeros]) if missing else part"
            ),
            says="changed models",
            loses=BITS,
        ),
        Wrong(
            "no padding",
            hybrid().replace("(0, -len(flat) % self.node)", "(0, 0)"),
            says="must make the same calls",
            loses=NODES,
        ),
        Wrong(
            "two ranks in a node, always",
            hybrid().replace(
                "    def __init__(self, weights, node):",
                "    def __init__(self, weights, node):\n        node = min(2, node)",
            ),
            says="has shape",
            loses=EDGE,
        ),
        Wrong(
            "padding in what is gathered",
            hybrid(gather="return all_gather(self.shard, self.inside)"),
            says="has shape",
            loses=NODES,
        ),
    ],
    "12.int8_gather": [
        Wrong(
            "one scale for the whole shard",
            int8(scales="(rows.abs().amax() / 127).float().expand(len(rows), 1).contiguous()"),
            says="its scale is that of more than one block",
            loses=HALF,
        ),
        Wrong(
            "rank 0's scales for all",
            int8(meet="scales = scales[:1]"),
            says="its steps were multiplied by the scales of rank 0",
            loses=HALF,
        ),
        Wrong(
            "the own scales for all",
            int8(meet="scales = scales[dist.get_rank()].unsqueeze(0)"),
            says="its steps were multiplied by the scales of rank 3",
            loses=HALF,
        ),
        Wrong(
            "the scales of the first call",
            int8().replace(
                "    steps = (rows",
                "    scales = FIRST.setdefault(rows.shape, scales)\n    steps = (rows",
            )
            + "\n\nFIRST = {}\n",
            says="those of an earlier gather",
            loses=HALF,
        ),
        Wrong(
            "cut off, not rounded",
            int8(steps=RIGHT_INT8["steps"].replace(".round()", "")),
            says="rounded to the nearest step, or cut off",
            loses=HALF,
        ),
        Wrong(
            "rounded to 16 bits",
            """
def gather_int8(shard, block):
    return all_gather(shard.bfloat16()).to(shard.dtype)
""",
            says="0.50 of what a gather in float32 sends",
            loses=BYTES,
        ),
        Wrong(
            "a step of max / 128, which 127 cannot reach",
            int8(
                scales="(rows.abs().amax(1, keepdim=True) / 128).float()",
                steps="(rows / scales.clamp(min=1e-30)).round().to(torch.int8)",
            ),
            says="half a step is allowed",
            loses=HALF,
        ),
        Wrong(
            "the master is rounded",
            int8(after="shard.copy_(whole.view(world, n)[dist.get_rank()])"),
            says="changed the shard",
            loses=HALF,
        ),
        Wrong(
            "the own part exact",
            int8(after="whole.view(world, n)[dist.get_rank()] = shard"),
            says="Round your own part too",
            loses=SAME,
        ),
        Wrong(
            "dequantised before sending",
            """
def gather_int8(shard, block):
    n = len(shard)
    rows = torch.nn.functional.pad(shard, (0, -n % block)).view(-1, block)
    scales = rows.abs().amax(1, keepdim=True) / 127
    steps = (rows / scales.clamp(min=1e-30)).round().to(torch.int8)
    return all_gather((steps * scales).to(shard.dtype).flatten()[:n])
""",
            says="Send int8, and a scale for each block",
            loses=BYTES,
        ),
        Wrong(
            "a scale for each value",
            int8().replace(
                "    world, n =",
                "    numel, block = block, 4\n    world, n =",
            ),
            says="Send int8, and a scale for each block",
            loses=BYTES,
        ),
        Wrong(
            "two messages",
            """
def gather_int8(shard, block):
    world, n = dist.get_world_size(), len(shard)
    rows = torch.nn.functional.pad(shard, (0, -n % block)).view(-1, block)
    scales = (rows.abs().amax(1, keepdim=True) / 127).float()
    steps = (rows / scales.clamp(min=1e-30)).round().clamp(-127, 127).to(torch.int8)
    steps = all_gather(steps.flatten()).view(world, -1, block)
    scales = all_gather(scales.flatten()).view(world, -1, 1)
    return (steps * scales).to(shard.dtype).view(world, -1)[:, :n].flatten()
""",
            says="can steps and scales travel in one message",
            loses=MESSAGE,
        ),
        Wrong(
            "zeros divided by zero",
            int8(
                steps="(rows / scales).round().clamp(-127, 127).to(torch.int8)",
                meet="scales = scales / (scales > 0)",
            ),
            says="What is the scale of zeros?",
            loses=ODD,
        ),
        Wrong(
            "float32, whatever comes in",
            int8(after="whole = whole.float()"),
            says="has dtype float32",
            loses=ODD,
        ),
        Wrong(
            "scales of at least 1e-6",
            int8(scales="(rows.abs().amax(1, keepdim=True) / 127).float().clamp(min=1e-6)"),
            says="half a step is allowed",
            loses=ODD,
        ),
    ],
}

# ---- what the texts promise, as words of theirs -> (the criterion, the kind of case), or None

PROMISES = {
    "12.agree_on_overflow": {
        "may hold an inf or a nan": (*STEP, ""),
        "every rank unscales its own": (*STEP, ""),
        "norm of the full gradient, over all ranks": (*STEP, ""),
        "no weight and no optimizer state changes": (*STEP, ""),
        "The scale halves after an overflow and doubles after `interval` good steps in a row": (
            *SCALE,
            "scale",
        ),
        "the same on all ranks": (*SCALE, ""),
        "Values around 1e25 are large, but not an overflow": (*SIZE, "size"),
        "In the end the gradients are cleared": (*STEP, ""),
        "of one or two numbers": (*ONE, ""),
        "their sizes may differ between ranks, and a rank may have none": (*STEP, ""),
        "Make one step on all ranks, or on none": (*STEP, ""),
        "return True if it was made": (*STEP, ""),
    },
    "12.hybrid_step": {
        "padded with zeros to a multiple of G and cut into G parts": (*NODES, ""),
        "returns all Ψ weights without any traffic between nodes": (*LINKS, ""),
        "the mean over all N ranks": (*NODES, ""),
        "Between two calls a rank holds only its shard": (*HELD, ""),
        "2(Ψ/G)(M - 1)/M elements per rank across nodes": (*LINKS, ""),
        "inside the node as many as a reduce-scatter": (*LINKS, ""),
        "Replicas stay equal bit for bit": (*BITS, ""),
        "(Ψ,) of any floating dtype": (*OTHER, "other"),
        "they stay as they are": (*BITS, ""),
        "Write hybrid sharding, without hooks": (*NODES, ""),
        "So each node has the full model": (*LINKS, ""),
    },
    "12.int8_gather": {
        "but rounded values are enough": (*HALF, ""),
        "may be off by half a step": (*HALF, ""),
        "the last one may be shorter": (*HALF, ""),
        "All ranks get the same bits": (*SAME, ""),
        "the optimizer steps on it": (*SAME, ""),
        "at most 0.30 of what float32 takes": (*BYTES, ""),
        "**one** collective": (*MESSAGE, ""),
        "Zeros stay zeros": (*ODD, "odd"),
        "Nothing is kept from one call to the next": (*HALF, ""),
        "float32 or float64": (*ODD, "odd"),
        "of the shard's dtype": (*ODD, "odd"),
    },
}

# ---- mutants of the solution that are right ----

EQUIVALENT: dict[str, dict[str, str]] = {}

# ---- right answers that look different from the solution ----

RIGHT = {
    "12.agree_on_overflow": [
        (
            "a flag beside the norm, two numbers in one message",
            """
def shared_step(parameters, optimizer, scaler, max_norm):
    scale = scaler["scale"]
    norms = [torch.linalg.vector_norm(p.grad.double() / scale) for p in parameters]
    norm = torch.stack(norms).norm() if norms else torch.zeros((), dtype=torch.float64)
    bad = not norm.isfinite()
    message = torch.stack([torch.tensor(float(bad)).double(), norm.nan_to_num(0, 0, 0) ** 2])
    dist.all_reduce(message)
    if message[0] > 0:
        scaler.update(scale=scale / 2, good_steps=0)
        optimizer.zero_grad()
        return False
    factor = min(1.0, max_norm / (message[1].sqrt().item() + 1e-12)) / scale
    for p in parameters:
        p.grad = (p.grad.double() * factor).to(p.dtype)
    optimizer.step()
    optimizer.zero_grad()
    scaler["good_steps"] += 1
    if scaler["good_steps"] >= scaler["interval"]:
        scaler.update(scale=scale * 2, good_steps=0)
    return True
""",
        ),
        (
            "all_gather of one number, as torch clips",
            """
def shared_step(parameters, optimizer, scaler, max_norm):
    for p in parameters:
        p.grad.mul_(1 / scaler["scale"])
    mine = [p.grad.double().pow(2).sum() for p in parameters]
    mine = torch.stack(mine).sum() if mine else torch.tensor(0.0, dtype=torch.float64)
    every = all_gather(mine.reshape(1))
    good = bool(torch.isfinite(every).all())
    if good:
        norm = every.sum().sqrt()
        if norm > max_norm:
            for p in parameters:
                p.grad.mul_(max_norm / (norm + 1e-6))
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    for p in parameters:
        p.grad.zero_()
    scaler["good_steps"] = scaler["good_steps"] + 1 if good else 0
    if not good:
        scaler["scale"] *= 0.5
    elif scaler["good_steps"] % scaler["interval"] == 0:
        scaler["scale"] *= 2.0
        scaler["good_steps"] = 0
    return good
""",
        ),
    ],
    "12.hybrid_step": [
        (
            "groups by new_group, a mean in two parts",
            """
class Hybrid:
    def __init__(self, weights, node):
        rank, world = dist.get_rank(), dist.get_world_size()
        self.place, self.node, self.size = rank % node, node, -(-len(weights) // node)
        self.numel, self.replicas = len(weights), world // node
        for first in range(0, world, node):
            group = dist.new_group(list(range(first, first + node)))
            if first <= rank < first + node:
                self.row = group
        for place in range(node):
            group = dist.new_group(list(range(place, world, node)))
            if place == self.place:
                self.column = group
        self.shard = self.cut(weights)[self.place].clone()

    def cut(self, flat):
        whole = flat.new_zeros(self.node * self.size)
        whole[: self.numel] = flat
        return list(whole.split(self.size))

    def gather(self):
        parts = [torch.empty_like(self.shard) for _ in range(self.node)]
        dist.all_gather(parts, self.shard, group=self.row)
        return torch.cat(parts)[: self.numel].clone()

    def step(self, gradient, lr):
        received = list(torch.zeros(self.node, self.size, dtype=gradient.dtype))
        dist.all_to_all(received, self.cut(gradient), group=self.row)
        mean = torch.stack(received).mean(0)
        if self.replicas > 1:
            dist.all_reduce(mean, group=self.column)
        self.shard.add_(mean, alpha=-lr / self.replicas)
""",
        ),
    ],
    "12.int8_gather": [
        (
            "a row of bytes per block, its scale in front",
            """
def gather_int8(shard, block):
    world, n = dist.get_world_size(), shard.numel()
    count = -(-n // block)
    padded = torch.zeros(count * block, dtype=torch.float64)
    padded[:n] = shard
    padded = padded.view(count, block)
    scale = (padded.abs().max(1).values / 127).to(torch.float32)
    divide_by = torch.where(scale > 0, scale, torch.ones_like(scale)).double()
    table = torch.empty(count, 4 + block, dtype=torch.uint8)
    table[:, :4] = scale.unsqueeze(1).view(torch.uint8)
    table[:, 4:] = (padded / divide_by.unsqueeze(1)).round().to(torch.int8).view(torch.uint8)
    tables = [torch.empty_like(table) for _ in range(world)]
    dist.all_gather(tables, table)
    wholes = []
    for one in tables:
        its = one[:, :4].contiguous().view(torch.float32).double()
        steps = one[:, 4:].contiguous().view(torch.int8).double()
        wholes.append((steps * its).flatten()[:n])
    return torch.cat(wholes).to(shard.dtype)
""",
        ),
    ],
}


# -- what an answer may not assume -----------------------------------------------------------------

WRONG["12.agree_on_overflow"] += [
    Wrong(
        "a gradient of zero has no norm to divide by",
        altered(
            "12.agree_on_overflow",
            ("factor = (max_norm / square.sqrt()).clamp(max=1.0)",
             "factor = min(1.0, max_norm * (1 / square.sqrt().item()))"),
        ),
        says="raised ZeroDivisionError",
        loses=("the same scale on all ranks, always",),
    ),
    Wrong(
        "the square is compared with the limit",
        altered(
            "12.agree_on_overflow",
            ("factor = (max_norm / square.sqrt()).clamp(max=1.0)",
             "factor = max_norm / square.sqrt() if square > max_norm else 1.0"),
        ),
        says="their norm was smaller: they still had the scale, or were lengthened",
        loses=("huge gradients, and nearly long ones",),
    ),
    Wrong(
        "squares in float32",
        altered("12.agree_on_overflow", ("gradient.double().square().sum()",
                                         "gradient.square().sum().double()")),
        says="not finite in float32",
        loses=("huge gradients, and nearly long ones",),
    ),
    Wrong(
        "the first limit",
        wrapped(
            "12.agree_on_overflow",
            "shared_step",
            "FIRST = []\n\n\ndef shared_step(parameters, optimizer, scaler, max_norm):\n"
            "    FIRST.append(max_norm)\n"
            "    return solution(parameters, optimizer, scaler, FIRST[0])\n",
        ),
        says="parameter 0 is wrong: it is off by",
        loses=("growth, and two runs in turn",),
    ),
]  # fmt: skip
WRONG["12.hybrid_step"] += [
    Wrong(
        "lr = 0.5",
        altered("12.hybrid_step", ("self.shard -= lr *", "self.shard -= 0.5 *")),
        says="After step 1",
    ),
    Wrong(
        "two nodes: the partner is half the world away",
        altered(
            "12.hybrid_step",
            ("dist.all_reduce(total, group=self.across)",
             "world = dist.get_world_size()\n"
             "        if world > self.node:\n"
             "            other = torch.empty_like(total)\n"
             "            peer = (dist.get_rank() + self.node) % world\n"
             "            for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, "
             "total, peer),"
             " dist.P2POp(dist.irecv, other, (dist.get_rank() - self.node) % world)]):\n"
             "                request.wait()\n"
             "            total = total + other"),
        ),
        says="hold the same shard with different bits",
        loses=("one node; nodes of one rank; three nodes",),
    ),
]  # fmt: skip
WRONG["12.int8_gather"] += [
    Wrong(
        "scales of at least 1e-12",
        altered("12.int8_gather", ("(rows.abs().amax(1, keepdim=True) / 127).float()",
                                   "(rows.abs().amax(1, keepdim=True) / "
                                   "127).float().clamp(min=1e-12)")),
        says="steps of its block",
        loses=("zeros, outliers, tiny ones, few, float64",),
    ),
    Wrong(
        "all messages are kept",
        altered("12.int8_gather", ("    scales, steps = messages.split(",
                                   "    KEPT.append(messages)\n    scales, steps = "
                                   "messages.split("))
        + "\n\nKEPT = []\n",
        says="after the last call",
        loses=("the same bits everywhere; the shard stays; nothing is kept",),
    ),
    Wrong(
        "the first block",
        wrapped(
            "12.int8_gather",
            "gather_int8",
            "FIRST = {}\n\n\ndef gather_int8(shard, block):\n"
            "    return solution(shard, FIRST.setdefault(shard.shape, block))\n",
        ),
        says="half a step",
    ),
]  # fmt: skip


# -- what authors who had not read the judge got away with -----------------------------------------

WRONG["12.hybrid_step"] += [
    Wrong(
        "keeps what it has gathered",
        altered(
            "12.hybrid_step",
            (
                "return all_gather(self.shard, self.inside)[: self.numel]",
                "self.whole = all_gather(self.shard, self.inside)\n"
                "        return self.whole[: self.numel]",
            ),
        ),
        says="its shards take at most",
        loses=HELD,
    ),
]
WRONG["12.int8_gather"] += [
    Wrong(
        "scales of at least 1e-8",
        altered("12.int8_gather", ("/ 127).float()", "/ 127).float().clamp(min=1e-8)")),
        says="the full block arrived as zeros",
        loses=ODD,
    ),
    Wrong(
        "scales travel as bfloat16",
        altered("12.int8_gather", ("cat([scales.view", "cat([scales.bfloat16().float().view")),
        says="by exactly the scales that you divided by",
    ),
]
