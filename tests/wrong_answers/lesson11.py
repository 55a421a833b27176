"""Wrong answers to lesson 11 that people give, and the sentence that each must hear."""

from wrong_answers import Wrong

FILLED = ("gather fills the parameters from all shards",)
AGAIN = ("backward works after free and gather",)
NOTHING_ELSE = ("freed, a rank holds its shard and nothing else",)
ONE_GATHER = ("one all_gather for each gather",)
SGD = ("two steps of SGD on the shards, as on one device",)
WHOLE = ("never more than two blocks whole, none after backward",)
CALLS = ("one gather forward, one backward, one reduction each",)
OUTPUT = ("the output of all units, in order",)
TWO = ("at most two units at a time, none at the end",)
HIDDEN = ("gathers run while units compute",)
LETTERS = ("all seven steps, each once",)
WORKS = ("an order that works and hides the gather",)

UNIT = """
class Unit:
    def __init__(self, parameters):
        self.parameters = parameters
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        flat = torch.cat([p.detach().flatten() for p in parameters])
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % self.world))
        self.shard = {shard}
        {more}
        self.free()

    def gather(self):
        flat, offset = {gather}, 0
        for p in self.parameters:
            {refill}
            offset += p.numel()

    def free(self):
        for p in self.parameters:
            {free}
"""
RIGHT_UNIT = {
    "shard": "flat.chunk(self.world)[self.rank].clone()",
    "more": "pass",
    "gather": "all_gather(self.shard)",
    "refill": "p.untyped_storage().resize_(p.numel() * 4)\n"
    "            p.data.copy_(flat[offset : offset + p.numel()].view_as(p))",
    "free": "p.untyped_storage().resize_(0)",
}


def unit(**wrong):
    return UNIT.format(**(RIGHT_UNIT | wrong))


ZERO3 = """
def shard_blocks(model):
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = []

    def shard_block(block):
        parameters = list(block.parameters())
        flat = torch.cat([p.detach().flatten() for p in parameters])
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % world))
        shard = flat.chunk(world)[rank].clone()
        waiting = set()

        def free():
            for p in parameters:
                p.untyped_storage().resize_(0)

        def gather():
            whole, offset = all_gather(shard), 0
            for p in parameters:
                p.untyped_storage().resize_(p.numel() * p.element_size())
                p.data.copy_(whole[offset : offset + p.numel()].view_as(p))
                offset += p.numel()

        def before_backward(gradient):
            waiting.update(parameters)
            {before_backward}

        def after_forward(block, inputs, output):
            {after_forward}
            if output.requires_grad:
                output.register_hook(before_backward)

        def ready(parameter):
            waiting.discard(parameter)
            if waiting:
                return
            gradient = torch.cat([p.grad.flatten() for p in parameters])
            padded = torch.nn.functional.pad(gradient, (0, -len(gradient) % world))
            shard.grad = {reduce}
            {drop}
            {after_backward}

        block.register_forward_pre_hook(lambda *_: gather())
        block.register_forward_hook(after_forward)
        for p in parameters:
            p.register_post_accumulate_grad_hook(ready)
        {begin}
        shards.append(shard)

    for block in model:
        shard_block(block)
    return shards
"""
RIGHT_ZERO3 = {
    "before_backward": "gather()",
    "after_forward": "free()",
    "reduce": "reduce_scatter(padded) / world",
    "drop": "for p in parameters:\n                p.grad = None",
    "after_backward": "free()",
    "begin": "free()",
}


def zero3(**wrong):
    return ZERO3.format(**(RIGHT_ZERO3 | wrong))


def order(letters):
    return f"def backward_order():\n    return {list(letters)!r}"


def prefetch(body):
    return f"def prefetching_forward(units, x):\n    {body}\n    return x"


WRONG = {
    "11.unit": [
        Wrong(
            "a new .data instead of an empty storage",
            unit(
                free="p.data = torch.empty(0)",
                refill="p.data = flat[offset : offset + sizes.pop(0).numel()]",
            )
            .replace(
                "        for p in self.parameters:\n            p.data = flat[offset : offset + "
                "sizes.pop(0).numel()]\n            offset += p.numel()",
                "        for p, shape in zip(self.parameters, self.shapes):\n"
                "            p.data = flat[offset : offset + shape.numel()].view(shape)\n"
                "            offset += shape.numel()",
            )
            .replace("        pass\n", "        self.shapes = [p.shape for p in parameters]\n"),
            says="have lost their shapes",
            loses=NOTHING_ELSE,
        ),
        Wrong("free does nothing", unit(free="pass"), "parameters still hold", NOTHING_ELSE),
        Wrong(
            "a full copy is kept",
            unit(more="self.full = flat", gather="(all_gather(self.shard), self.full)[0]"),
            says="its shard is",
            loses=NOTHING_ELSE,
        ),
        Wrong(
            "the first values are kept, nothing is gathered",
            unit(more="self.full = flat.clone()", gather="self.full"),
            says="Gather the shards, not a copy",
            loses=FILLED,
        ),
        Wrong(
            "the shard is a view of everything",
            unit(shard="flat.chunk(self.world)[self.rank]"),
            says="its shard is",
            loses=NOTHING_ELSE,
        ),
        Wrong(
            "autograd sees the refill",
            unit(
                refill="p.untyped_storage().resize_(p.numel() * 4)\n"
                "            with torch.no_grad():\n"
                "                p.copy_(flat[offset : offset + p.numel()].view_as(p))"
            ),
            says="modified by an inplace operation",
            loses=FILLED,
        ),
        Wrong(
            "every rank broadcasts its shard",
            unit(gather="torch.cat([self.broadcast(r) for r in range(self.world)])")
            + """
    def broadcast(self, source):
        shard = self.shard.clone()
        dist.broadcast(shard, source)
        return shard
""",
            says="one all_gather each does it",
            loses=ONE_GATHER,
        ),
        Wrong(
            "every rank sends a whole unit, zeros but for its shard",
            unit(
                gather="sum(all_gather(torch.nn.functional.pad(self.shard, (\n"
                "            self.rank * len(self.shard),\n"
                "            (self.world - 1 - self.rank) * len(self.shard),\n"
                "        ))).chunk(self.world))"
            ),
            says="all shards together are",
            loses=ONE_GATHER,
        ),
        Wrong(
            "every rank the first shard",
            unit(shard="flat.chunk(self.world)[0].clone()"),
            says="After gather, rank 0's parameter",
            loses=FILLED,
        ),
    ],
    "11.zero3": [
        Wrong(
            "whole parameters everywhere, gradients averaged",
            """
def shard_blocks(model):
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = []

    def shard_block(block):
        parameters = list(block.parameters())
        flat = torch.cat([p.detach().flatten() for p in parameters])
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % world))
        shard = flat.chunk(world)[rank].clone()
        waiting = set(parameters)

        def gather(*_):
            whole, offset = all_gather(shard), 0
            for p in parameters:
                p.data.copy_(whole[offset : offset + p.numel()].view_as(p))
                offset += p.numel()

        def ready(p):
            waiting.discard(p)
            if waiting:
                return
            waiting.update(parameters)
            gradient = torch.cat([p.grad.flatten() for p in parameters])
            padded = torch.nn.functional.pad(gradient, (0, -len(gradient) % world))
            shard.grad = reduce_scatter(padded) / world
            for p in parameters:
                p.grad = None

        block.register_forward_pre_hook(gather)
        for p in parameters:
            p.register_post_accumulate_grad_hook(ready)
        shards.append(shard)

    for block in model:
        shard_block(block)
    return shards
""",
            says="Before the first step",
            loses=WHOLE,
        ),
        Wrong(
            "kept whole after forward",
            zero3(after_forward="pass", before_backward="pass"),
            says="blocks were whole",
            loses=WHOLE,
        ),
        Wrong("not freed after backward", zero3(after_backward="pass"), "blocks were whole", WHOLE),
        Wrong(
            "the sum of the gradients",
            zero3(reduce="reduce_scatter(padded)"),
            says="divide by the number of ranks",
            loses=SGD,
        ),
        Wrong(
            "the rank's own gradient",
            zero3(reduce="padded.chunk(world)[rank].clone()"),
            says="used the rank's own gradient",
            loses=SGD,
        ),
        Wrong(
            "full gradients stay",
            zero3(drop="for p in parameters:\n                p.grad.zero_()"),
            says="full gradients are left",
            loses=WHOLE,
        ),
        Wrong(
            "an all-reduce, then a slice",
            zero3(reduce="(dist.all_reduce(padded), padded.chunk(world)[rank] / world)[1]"),
            says="called all_reduce in backward",
            loses=CALLS,
        ),
        Wrong(
            "gathered twice before backward",
            zero3(before_backward="gather(); gather()"),
            says="is gathered and reduced once",
            loses=CALLS,
        ),
        Wrong(
            "gathered once, and kept",
            zero3()
            .replace("whole, offset = all_gather(shard), 0", "offset, whole = 0, kept[0]")
            .replace("        def gather():", "        kept = []\n\n        def gather():")
            .replace(
                "offset, whole =", "kept.append(all_gather(shard))\n            offset, whole ="
            ),
            says="The shards have changed since",
            loses=SGD,
        ),
        Wrong(
            "everybody gets all gradients",
            zero3(
                reduce="reduce_scatter(padded.repeat(world)).chunk(world)[rank] / world",
            ),
            says="called all_to_all on",
            loses=CALLS,
        ),
        Wrong(
            "not gathered for backward",
            zero3(before_backward="pass"),
            says="raised",
            loses=SGD,
        ),
    ],
    "11.prefetch": [
        Wrong(
            "one after the other",
            prefetch(
                "for unit in units:\n        unit.gather().wait()\n"
                "        x = unit.compute(x)\n        unit.free()"
            ),
            says="start the next one before you compute",
            loses=HIDDEN,
        ),
        Wrong(
            "everything at the start",
            prefetch(
                "works = [unit.gather() for unit in units]\n"
                "    for unit, work in zip(units, works):\n        work.wait()\n"
                "        x = unit.compute(x)\n        unit.free()"
            ),
            says="Free a unit before you ask for the third",
            loses=TWO,
        ),
        Wrong(
            "started early, and waited for at once",
            prefetch(
                "units[0].gather().wait()\n    for unit, next in zip(units, [*units[1:], None]):\n"
                "        if next:\n            next.gather().wait()\n"
                "        x = unit.compute(x)\n        unit.free()"
            ),
            says="start the next one before you compute",
            loses=HIDDEN,
        ),
        Wrong(
            "nobody waits",
            prefetch(
                "units[0].gather()\n    for unit, next in zip(units, [*units[1:], None]):\n"
                "        if next:\n            next.gather()\n"
                "        x = unit.compute(x)\n        unit.free()"
            ),
            says="before its gather was waited for",
            loses=OUTPUT,
        ),
        Wrong(
            "the last unit stays",
            prefetch(
                "work = units[0].gather()\n    for unit, next in zip(units, [*units[1:], None]):\n"
                "        work.wait()\n        if next:\n            work = next.gather()\n"
                "        x = unit.compute(x)\n        if next:\n            unit.free()"
            ),
            says="still holds 1 units",
            loses=TWO,
        ),
        Wrong(
            "freed one unit late",
            prefetch(
                "work, last = units[0].gather(), None\n"
                "    for unit, next in zip(units, [*units[1:], None]):\n"
                "        work.wait()\n        if next:\n            work = next.gather()\n"
                "        x = unit.compute(x)\n        if last:\n            last.free()\n"
                "        last = unit\n    last.free()"
            ),
            says="Free a unit before you ask for the third",
            loses=TWO,
        ),
        Wrong(
            "the last unit first",
            prefetch(
                "for unit in reversed(units):\n        unit.gather().wait()\n"
                "        x = unit.compute(x)\n        unit.free()"
            ),
            says="all units, in order",
            loses=OUTPUT,
        ),
    ],
    "11.backward_order": [
        Wrong("a gather too late", order("CAFDEGB"), "hides behind nothing", WORKS),
        Wrong("whole during the update", order("CFADGBE"), "stale after it", WORKS),
        Wrong("freed before computing", order("CFEADGB"), "would be gone", WORKS),
        Wrong("reduced before computing", order("CFDAEGB"), "no gradient to reduce yet", WORKS),
        Wrong("the optimizer before the mean", order("CFADEBG"), "the mean over all ranks", WORKS),
        Wrong("waited for what was not started", order("CFAGDEB"), "nothing was started", WORKS),
        Wrong("a letter left out", order("CFADEG"), "each once", LETTERS),
    ],
}
