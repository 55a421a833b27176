"""Wrong answers to lesson 11 that people give, and the sentence that each must hear."""

from answers import Wrong
from answers.altered import wrapped

FILLED = ("gather fills the parameters from all shards",)
AGAIN = ("backward works after free and gather",)
NOTHING_ELSE = ("freed, a rank holds its shard and nothing else",)
ONE_GATHER = ("one all_gather for each gather",)
SGD = ("three steps of SGD on the shards, as on one device",)
WHOLE = ("never more than two blocks whole, none after backward",)
CALLS = ("one gather forward, one backward, one reduction",)
TWO_UNITS = ("another dtype, any layout, two units at a time",)
TWO_MODELS = ("another dtype, any layout, two models",)
OUTPUT = ("the output of all units, in order",)
TWO = ("at most two units at a time, none at the end",)
HIDDEN = ("gathers run while units compute",)
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
    "refill": "p.untyped_storage().resize_(p.numel() * p.element_size())\n"
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
            mean = {reduce}
            shard.grad = {keep}
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
    "keep": "mean if shard.grad is None else shard.grad + mean",
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
            says="after free, its shards take at most",
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
            says="after free, its shards take at most",
            loses=NOTHING_ELSE,
        ),
        Wrong(
            "autograd sees the refill",
            unit(
                refill="p.untyped_storage().resize_(p.numel() * p.element_size())\n"
                "            with torch.no_grad():\n"
                "                p.copy_(flat[offset : offset + p.numel()].view_as(p))"
            ),
            says="autograd's version counter has seen",
            loses=AGAIN,
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
            says="One all_gather is enough for a unit",
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
            "the shard is a view of what free gives back",
            """
class Unit:
    def __init__(self, parameters):
        world = dist.get_world_size()
        flat = torch.cat([p.detach().flatten() for p in parameters])
        self.flat = torch.nn.functional.pad(flat, (0, -len(flat) % world))
        offset, self.bytes = 0, self.flat.nbytes
        for p in parameters:
            p.data = self.flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        self.shard = self.flat.chunk(world)[dist.get_rank()]
        self.free()

    def gather(self):
        self.flat.untyped_storage().resize_(self.bytes)
        self.flat.copy_(all_gather(self.shard))

    def free(self):
        self.flat.untyped_storage().resize_(0)
""",
            says="the shard has lost its memory",
            loses=FILLED,
        ),
        Wrong(
            "whole at first, and taken for gathered",
            unit(more="self.whole = True\n        return")
            .replace(
                "def gather(self):",
                "def gather(self):\n        whole, self.whole = self.whole, True",
            )
            .replace(
                "            p.untyped",
                "            if whole:\n                continue\n            p.untyped",
                1,
            )
            .replace("def free(self):", "def free(self):\n        self.whole = False"),
            says="A unit begins freed",
            loses=FILLED,
        ),
        Wrong(
            "the flat buffer stays while the unit is gathered",
            unit(refill="self.flat = flat\n            " + RIGHT_UNIT["refill"]).replace(
                "def free(self):", "def free(self):\n        self.flat = None"
            ),
            says="while gathered, its shards and the parameters take at most",
            loses=NOTHING_ELSE,
        ),
        Wrong(
            "units share what belongs to one",
            unit(more="Unit.every = parameters").replace("self.parameters:", "Unit.every:"),
            says="raised",
            loses=TWO_UNITS,
        ),
        Wrong(
            "the gathered values pass through float32",
            unit(shard="flat.chunk(self.world)[self.rank].float().clone()"),
            says="has dtype float32",
            loses=TWO_UNITS,
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
            mean = reduce_scatter(padded) / world
            shard.grad = mean if shard.grad is None else shard.grad + mean
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
            says="each after its forward and after its backward; two at once are allowed",
            loses=WHOLE,
        ),
        Wrong(
            "not freed after backward",
            zero3(after_backward="pass"),
            "each after its forward and after its backward; two at once are allowed",
            WHOLE,
        ),
        Wrong(
            "not freed after backward, and gathered only where it is free",
            zero3(after_backward="pass").replace(
                "            whole, offset = all_gather(shard), 0",
                "            if parameters[0].untyped_storage().size():\n                return\n"
                "            whole, offset = all_gather(shard), 0",
            ),
            says="Block 0 was still unsharded after the backward of step 0",
            loses=SGD,
        ),
        Wrong(
            "a hook returns another gradient",
            zero3(before_backward="gather()\n            return 2 * gradient"),
            says="times the mean gradient. Check how you divide, and that no hook",
            loses=SGD,
        ),
        Wrong(
            "freed at the first gradient of a block",
            zero3().replace(
                "waiting.discard(parameter)", "free()\n            waiting.discard(parameter)"
            ),
            says="it needs them until its last gradient has come",
            loses=SGD,
        ),
        Wrong(
            "reduced at the first gradient of a block",
            zero3()
            .replace("            if waiting:\n                return\n", "")
            .replace(
                "p.grad.flatten() for",
                "(torch.zeros(p.shape) if p.grad is None else p.grad).flatten() for",
            ),
            says="it needs them until its last gradient has come",
            loses=SGD,
        ),
        Wrong(
            "the sum of the gradients",
            zero3(reduce="reduce_scatter(padded)"),
            says="is the sum over the ranks",
            loses=SGD,
        ),
        Wrong(
            "the rank's own gradient",
            zero3(reduce="padded.chunk(world)[rank].clone()"),
            says="is cut from the rank's own gradient",
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
            says="begins its backward, and not all of its parameters are there: gather them before",
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
            says="because the next gather began afterwards. Start it before you compute",
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
            says="was waited for before unit 0 computed",
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
            says="still holds 1 of the units",
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
        Wrong("a letter left out", order("CFADEG"), "each once", WORKS),
    ],
}

# ---- what the texts promise, as words of theirs -> (the criterion, the kind of case), or None

PROMISES = {
    "11.unit": {
        "Between uses a rank holds only its **shard** of them": (*NOTHING_ELSE, ""),
        "pad with zeros to a multiple of N, and keep the r-th part": (*FILLED, ""),
        "The freed parameters keep their shapes but hold no bytes": (*NOTHING_ELSE, ""),
        "these views must hold no bytes either": (*NOTHING_ELSE, ""),
        "they must show the values again": (*AGAIN, ""),
        "One all-gather gathers a unit": (*ONE_GATHER, ""),
        "a rank holds the unit once, in addition to its shard": (*NOTHING_ELSE, ""),
        "It begins freed": (*NOTHING_ELSE, ""),
        "of one dtype, contiguous or not, perhaps frozen": (*TWO_UNITS, "other"),
        "each has its own storage": None,
        "an optimizer may change it between gathers": (*FILLED, ""),
        "Several units may be gathered at a time": (*TWO_UNITS, "other"),
        "Fill the parameters with the values of all ranks' shards": (*FILLED, ""),
        "their shapes stay": (*NOTHING_ELSE, ""),
    },
    "11.zero3": {
        "Gather it before its forward and free it afterwards": (*WHOLE, ""),
        "Shard each block:": (*SGD, ""),
        "reduce-scatter its gradients at once and free it": (*CALLS, ""),
        "each block takes one all-gather in forward": (*CALLS, ""),
        "At most two blocks may be unsharded at a time": (*WHOLE, ""),
        "You need only one, and the second is there for those who prefetch": None,
        "`shard.grad` is this rank's part of the mean gradient": (*SGD, ""),
        "no parameter holds a byte or a gradient": (*WHOLE, ""),
        "A second backward before that adds to `shard.grad`": (*SGD, ""),
        "leaves no block unsharded either": (*WHOLE, ""),
        "Flatten a block in the order of `block.parameters()`": (*SGD, ""),
        "The first block's input needs no gradient": (*SGD, ""),
        "Shard each block of the model": (*SGD, ""),
        "of one dtype, contiguous or not": (*TWO_MODELS, "other"),
        "each gets a gradient in every backward": None,
    },
    "11.prefetch": {
        "Run all units in order": (*OUTPUT, ""),
        "gathers travel while units compute": (*HIDDEN, ""),
        "At most two units may be gathered or in flight at a time": (*TWO, ""),
        "Gather each unit once, and free all": (*TWO, ""),
        "The output of the last unit": (*OUTPUT, ""),
        "list, at least one": (*OUTPUT, ""),
    },
    "11.backward_order": {
        "in which the network is busy while unit i computes": (*WORKS, ""),
        "only the letters are graded": None,
    },
}

# ---- mutants of the solution that are right ----

EQUIVALENT = {
    "11.shared_blocks": {
        "`len(later)` -> `len(later) + 1`": "a block that never comes again is farthest anyway",
    },
    "11.unit": {
        "`world = dist.get_world_size()` -> the first one, kept": "a job has one world",
    },
    "11.zero3": {
        "`waiting = set()` -> the first one, kept": "one block's backward is over when the next "
        "one's begins, so that blocks can share a set",
        "`p.numel()` -> `p.numel() + 1` (#2)": "one element more while a block is whole: the text "
        "counts blocks",
    },
    "11.backward_order": {
        '`def backward_order(): """The letters A to G as a list, in...` -> its first result, '
        "kept": "it returns the same every time",
    },
}

# ---- right answers that look different from the solution ----

RIGHT = {
    "11.unit": [
        (
            "one flat storage, whose views the parameters are",
            """
class Unit:
    def __init__(self, parameters):
        world = dist.get_world_size()
        numel = sum(p.numel() for p in parameters)
        self.flat = parameters[0].new_zeros(-(-numel // world) * world, requires_grad=False)
        self.bytes = self.flat.untyped_storage().nbytes()
        offset = 0
        for p in parameters:
            view = self.flat[offset : offset + p.numel()].view(p.shape)
            view.copy_(p.data)
            p.data = view
            offset += p.numel()
        self.shard = self.flat.chunk(world)[dist.get_rank()].clone()
        self.free()

    def gather(self):
        self.flat.untyped_storage().resize_(self.bytes)
        dist.all_gather_into_tensor(self.flat, self.shard.detach())

    def free(self):
        self.flat.untyped_storage().resize_(0)
""",
        ),
        (
            "the shard is a Parameter, the version counter is held",
            """
class Unit:
    def __init__(self, parameters):
        self.parameters = parameters
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        with torch.no_grad():
            flat = torch.cat([p.reshape(-1) for p in parameters])
        size = (flat.numel() + self.world - 1) // self.world
        shard = flat.new_zeros(size)
        own = flat[self.rank * size : (self.rank + 1) * size]
        shard[: own.numel()] = own
        self.shard = torch.nn.Parameter(shard)
        self.free()

    def gather(self):
        parts = [torch.empty_like(self.shard) for _ in range(self.world)]
        dist.all_gather(parts, self.shard.data)
        numels = [p.numel() for p in self.parameters]
        flat = torch.cat(parts)[: sum(numels)]
        for p, piece in zip(self.parameters, flat.split(numels)):
            p.untyped_storage().resize_(piece.numel() * piece.element_size())
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(p):
                p.copy_(piece.view_as(p))

    def free(self):
        for p in self.parameters:
            p.untyped_storage().resize_(0)
""",
        ),
        (
            "functional collectives, and alone nothing is sent",
            """
import torch.distributed._functional_collectives as funcol


class Unit:
    def __init__(self, parameters):
        self.parameters, self.world = list(parameters), dist.get_world_size()
        self.numels = [p.numel() for p in parameters]
        self.bytes = [p.numel() * p.element_size() for p in parameters]
        size = -(-sum(self.numels) // self.world)
        rows = parameters[0].detach().new_zeros(self.world, size)
        rows.view(-1)[: sum(self.numels)] = torch.cat([p.detach().reshape(-1) for p in parameters])
        self.shard = rows[dist.get_rank()].clone()
        self.free()

    def gather(self):
        whole = self.shard
        if self.world > 1:
            whole = funcol.all_gather_tensor(whole, 0, dist.group.WORLD).wait()
        pieces = whole[: sum(self.numels)].split(self.numels)
        for p, piece, bytes in zip(self.parameters, pieces, self.bytes):
            p.untyped_storage().resize_(bytes)
            p.data.view_as(p).copy_(piece.view(p.shape))

    def free(self):
        for p in self.parameters:
            p.untyped_storage().resize_(0)
""",
        ),
        (
            "a DTensor is gathered",
            """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard


class Unit:
    def __init__(self, parameters):
        self.parameters = parameters
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        flat = torch.cat([p.detach().flatten() for p in parameters])
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % dist.get_world_size()))
        self.shard = flat.chunk(dist.get_world_size())[dist.get_rank()].clone()
        self.free()

    def gather(self):
        cut = DTensor.from_local(self.shard, self.mesh, [Shard(0)], run_check=False)
        flat = cut.redistribute(self.mesh, [Replicate()]).to_local()
        for p in self.parameters:
            p.untyped_storage().resize_(p.nbytes)
            p.data.copy_(flat[: p.numel()].view_as(p))
            flat = flat[p.numel() :]

    def free(self):
        for p in self.parameters:
            p.untyped_storage().resize_(0)
""",
        ),
    ],
    "11.zero3": [
        (
            "full backward hooks, but for the block without an input gradient",
            """
class Sharded:
    def __init__(self, block, first):
        self.parameters = list(block.parameters())
        self.world = dist.get_world_size()
        self.numel = sum(p.numel() for p in self.parameters)
        self.pad = -self.numel % self.world
        own = self.flatten(p.data for p in self.parameters).chunk(self.world)
        self.shard = torch.nn.Parameter(own[dist.get_rank()].clone())
        self.missing = len(self.parameters)
        block.register_forward_pre_hook(lambda module, inputs: self.gather())
        block.register_forward_hook(lambda module, inputs, output: self.free())
        block.register_full_backward_pre_hook(lambda module, gradients: self.gather())
        if first:
            for p in self.parameters:
                p.register_post_accumulate_grad_hook(lambda p: self.count())
        else:
            block.register_full_backward_hook(lambda module, ins, outs: self.reduce())
        self.free()

    def flatten(self, tensors):
        return torch.nn.functional.pad(torch.cat([t.flatten() for t in tensors]), (0, self.pad))

    def gather(self):
        whole = all_gather(self.shard.data)
        for p in self.parameters:
            p.untyped_storage().resize_(p.element_size() * p.numel())
            piece, whole = whole[: p.numel()], whole[p.numel() :]
            p.data.copy_(piece.view(p.shape))

    def free(self):
        for p in self.parameters:
            p.untyped_storage().resize_(0)

    def count(self):
        self.missing -= 1
        if self.missing == 0:
            self.missing = len(self.parameters)
            self.reduce()

    def reduce(self):
        mean = reduce_scatter(self.flatten(p.grad for p in self.parameters)) / self.world
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
        for p in self.parameters:
            p.grad = None
        self.free()


def shard_blocks(model):
    return [Sharded(block, first=index == 0).shard for index, block in enumerate(model)]
""",
        ),
        (
            "the next block is fetched ahead, reductions end in a final callback",
            """
class Block:
    def __init__(self, module):
        world = dist.get_world_size()
        self.parameters = list(module.parameters())
        self.numels = [p.numel() for p in self.parameters]
        size = -(-sum(self.numels) // world)
        self.flat = torch.zeros(size * world, dtype=self.parameters[0].dtype)
        for p, view in zip(self.parameters, self.flat[: sum(self.numels)].split(self.numels)):
            view.copy_(p.data.flatten())
            p.data = view.view_as(p)
        self.bytes = self.flat.nbytes
        self.shard = self.flat.view(world, size)[dist.get_rank()].clone()
        self.work, self.here, self.missing = None, True, 0
        self.free()

    def fetch(self):
        if self.here or self.work is not None:
            return
        self.flat.untyped_storage().resize_(self.bytes)
        parts = list(self.flat.chunk(dist.get_world_size()))
        self.work = dist.all_gather(parts, self.shard, async_op=True)

    def wait(self):
        self.fetch()
        if self.work is not None:
            self.work.wait()
        self.work, self.here = None, True

    def free(self):
        self.flat.untyped_storage().resize_(0)
        self.here = False


def shard_blocks(model):
    world = dist.get_world_size()
    blocks = [Block(module) for module in model]
    reducing = []

    def finish():
        for block, parts, work in reducing:
            work.wait()
            mean = parts.view(world, -1).mean(0)
            block.shard.grad = mean if block.shard.grad is None else block.shard.grad + mean
        reducing.clear()

    def begin(index, following):
        blocks[index].wait()
        if 0 <= following < len(blocks):
            blocks[following].fetch()

    def before_backward(index, gradient):
        begin(index, index - 1)
        blocks[index].missing = len(blocks[index].parameters)

    def after_forward(index, output):
        # backward begins with the last one: it stays
        if index < len(blocks) - 1 or not output.requires_grad:
            blocks[index].free()
        if output.requires_grad:
            output.register_hook(lambda gradient: before_backward(index, gradient))

    def ready(index, parameter):
        block = blocks[index]
        block.missing -= 1
        if block.missing:
            return
        flat = torch.zeros_like(block.flat)
        flat[: sum(block.numels)] = torch.cat([p.grad.flatten() for p in block.parameters])
        parts = torch.empty_like(flat)
        if not reducing:
            torch.autograd.Variable._execution_engine.queue_callback(finish)
        reducing.append((block, parts, dist.all_to_all_single(parts, flat, async_op=True)))
        for p in block.parameters:
            p.grad = None
        block.free()

    for i, module in enumerate(model):
        module.register_forward_pre_hook(lambda m, x, i=i: begin(i, i + 1))
        module.register_forward_hook(lambda m, x, y, i=i: after_forward(i, y))
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(lambda p, i=i: ready(i, p))
    return [block.shard for block in blocks]
""",
        ),
        (
            "an identity whose backward gathers",
            """
class GatherInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, gather):
        ctx.gather = gather
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):
        ctx.gather()
        return gradient, None


def shard_blocks(model):
    return [shard_block(block) for block in model]


def shard_block(block):
    rank, world = dist.get_rank(), dist.get_world_size()
    weights = list(block.parameters())
    numel = sum(w.numel() for w in weights)
    size = (numel + world - 1) // world
    begun = weights[0].detach().new_zeros(size * world)
    begun[:numel] = torch.cat([w.detach().reshape(-1) for w in weights])
    shard = begun[rank * size : (rank + 1) * size].clone().requires_grad_()
    gradients = {}

    def gather():
        whole = shard.detach().new_empty(size * world)
        dist.all_gather_into_tensor(whole, shard.detach())
        for w, piece in zip(weights, whole[:numel].split([w.numel() for w in weights])):
            w.untyped_storage().resize_(piece.nbytes)
            w.data.copy_(piece.view(w.shape))

    def free():
        for w in weights:
            w.untyped_storage().resize_(0)

    def collect(w):
        gradients[w], w.grad = w.grad.reshape(-1), None
        if len(gradients) == len(weights):
            flat = shard.new_zeros(size * world)
            flat[:numel] = torch.cat([gradients[w] for w in weights])
            gradients.clear()
            free()
            mean = reduce_scatter(flat).div(world)
            shard.grad = mean if shard.grad is None else shard.grad.add(mean)

    def after(module, inputs, output):
        free()
        return GatherInBackward.apply(output, gather)

    block.register_forward_pre_hook(lambda *_: gather())
    block.register_forward_hook(after)
    for w in weights:
        w.register_post_accumulate_grad_hook(collect)
    free()
    return shard
""",
        ),
    ],
    "11.prefetch": [
        (
            "pairs of units, the next one asked for before this one is there",
            """
def prefetching_forward(units, x):
    work = units[0].gather()
    for unit, following in zip(units, [*units[1:], None]):
        ahead = following.gather() if following is not None else None
        work.wait()
        x = unit.compute(x)
        unit.free()
        work = ahead
    return x
""",
        ),
        (
            "recursion",
            """
def prefetching_forward(units, x):
    def go(index, work, x):
        work.wait()
        if index == len(units) - 1:
            y = units[index].compute(x)
            units[index].free()
            return y
        next_work = units[index + 1].gather()
        y = units[index].compute(x)
        units[index].free()
        return go(index + 1, next_work, y)

    return go(0, units[0].gather(), x)
""",
        ),
    ],
    "11.backward_order": [
        ("freed before the reduction", 'def backward_order():\n    return list("CFAEDGB")'),
        ("freed at the end", 'def backward_order():\n    return list("CFADGEB")'),
        ("asks ahead before it waits", 'def backward_order():\n    return list("FCADEGB")'),
    ],
}


# -- what an answer may not assume -----------------------------------------------------------------

WRONG["11.prefetch"] += [
    Wrong(
        "the first input of each shape",
        wrapped(
            "11.prefetch",
            "prefetching_forward",
            "KEPT = {}\n\n\ndef prefetching_forward(units, x):\n"
            "    return solution(units, KEPT.setdefault(x.shape, x))\n",
        ),
        says="output is wrong",
    )
]


# -- what authors who had not read the judge got away with -----------------------------------------

WRONG["11.prefetch"] += [
    Wrong(
        "waited for at once, and again in its turn",
        prefetch(
            "work = units[0].gather()\n    for unit, next in zip(units, [*units[1:], None]):\n"
            "        work.wait()\n        if next:\n            work = next.gather()\n"
            "            work.wait()\n        x = unit.compute(x)\n        unit.free()"
        ),
        says="was waited for before unit 0 computed",
        loses=HIDDEN,
    ),
]
# ---- 11.shared_blocks ----

IN_ORDER = ("each use in order, on an unsharded block",)
ROOM = ("never more blocks than there is room for",)
ONCE = ("one reduction, of the whole gradient, at once",)
FEWEST = ("the fewest gathers",)
ENDS = ("one block, no repeats, room for one or for all",)
STAYS = ("uses stays as it is",)

SHARED = """
def shared_blocks(uses, room):
    order = {order}
    actions, unsharded, used = [], [], {{}}
    for index, block in enumerate(order):
        later = order[index + 1 :]
        if block not in unsharded:
            if {full}:
                out = {out}
                unsharded.remove(out)
                actions.append(("free", out))
            actions.append(("gather", block))
            unsharded.append(block)
        used[block] = index
        actions.append(("forward" if index < len(uses) else "backward", block))
        if {complete}:
            actions.append(("reduce", block))
        {after}
    return actions + [("free", block) for block in unsharded]
"""
SOLVED_SHARED = {
    "order": "uses + uses[::-1]",
    "full": "len(unsharded) == room",
    "out": "max(unsharded, key=lambda b: later.index(b) if b in later else 99)",
    "complete": "block not in later",
    "after": "pass",
}


def shared(**wrong):
    return SHARED.format(**(SOLVED_SHARED | wrong))


WRONG["11.shared_blocks"] = [
    Wrong(
        "freed after each use, as FSDP does",
        shared(after='unsharded.remove(block); actions.append(("free", block))'),
        says="Every use gathers",
        loses=FEWEST,
    ),
    Wrong(
        "the oldest use is freed",
        shared(out="min(unsharded, key=used.get)"),
        says="which is used again before",
        loses=FEWEST,
    ),
    Wrong(
        "the oldest gather is freed",
        shared(out="unsharded[0]"),
        says="which is used again before",
        loses=FEWEST,
    ),
    Wrong(
        "the nearest use is freed",
        shared(out="min(unsharded, key=lambda b: later.index(b) if b in later else 99)"),
        says="which is used again before",
        loses=FEWEST,
    ),
    Wrong(
        "everything freed between forward and backward",
        shared(
            after="if index == len(uses) - 1:\n"
            '            actions += [("free", b) for b in unsharded]\n'
            "            unsharded.clear()"
        ),
        says="Backward begins with what forward used last",
        loses=FEWEST,
    ),
    Wrong(
        "one block less than there is room for",
        shared(full="len(unsharded) == max(1, room - 1)"),
        says="gathers, but",
        loses=FEWEST,
    ),
    Wrong(
        "room is ignored",
        shared(full="False"),
        says="Free one before",
        loses=ROOM,
    ),
    Wrong(
        "gathered before something is freed",
        shared(full="len(unsharded) > room"),
        says="Free one before",
        loses=ROOM,
    ),
    Wrong(
        "a reduction for each backward",
        shared(complete="index >= len(uses)"),
        says="They add to one gradient, which travels once",
        loses=ONCE,
    ),
    Wrong(
        "reduced after the first backward",
        shared(complete="index >= len(uses) and block not in order[len(uses) : index]"),
        says="the gradient lacks what that use adds",
        loses=ONCE,
    ),
    Wrong(
        "all reduced at the end",
        shared(
            complete="False",
            after='if not later: actions += [("reduce", b) for b in dict.fromkeys(uses)]',
        ),
        says="another block's backward comes first",
        loses=ONCE,
    ),
    Wrong(
        "never reduced",
        shared(complete="False"),
        says="is reduced 0 times",
        loses=ONCE,
    ),
    Wrong(
        "backward from first to last",
        shared(order="uses + uses"),
        says="backward comes to the last use first",
        loses=IN_ORDER,
    ),
    Wrong(
        "one use of each block",
        shared(order="list(dict.fromkeys(uses)) + list(dict.fromkeys(uses))[::-1]"),
        says="computes",
        loses=IN_ORDER,
    ),
    Wrong(
        "nothing is freed at the end",
        shared().replace(
            '    return actions + [("free", block) for block in unsharded]', "    return actions"
        ),
        says="still unsharded at the end",
        loses=IN_ORDER,
    ),
    Wrong(
        "gathered for each use",
        shared().replace(
            "        used[block] = index",
            "        else:\n"
            '            actions.append(("gather", block))\n'
            "        used[block] = index",
        ),
        says="which is unsharded already",
        loses=IN_ORDER,
    ),
    Wrong(
        "freed by the reduction",
        shared(after='if block not in later: actions.append(("free", block))'),
        says="which is not gathered then",
        loses=IN_ORDER,
    ),
    Wrong(
        "names alone",
        shared().replace("    return actions + [", "    return [b for _, b in actions] + ["),
        says="return a list of pairs",
        loses=IN_ORDER,
    ),
    Wrong(
        "uses turned round in place",
        shared().replace(
            "    order = uses + uses[::-1]",
            "    order = list(uses)\n    uses.reverse()\n    order += uses",
        ),
        says="which was handed in to be read",
        loses=STAYS,
    ),
]
RIGHT["11.shared_blocks"] = [
    (
        "lists, next uses by position, blocks freed as soon as they are done",
        """
def shared_blocks(uses, room):
    steps = [["forward", b] for b in uses] + [["backward", b] for b in reversed(uses)]
    out, there = [], set()

    def next_use(block, now):
        return min((i for i in range(now, len(steps)) if steps[i][1] == block), default=10**6)

    for now, (what, block) in enumerate(steps):
        if block not in there:
            while len(there) >= room:
                victim = sorted(there, key=lambda b: -next_use(b, now))[0]
                there.discard(victim)
                out.append(["free", victim])
            there.add(block)
            out.append(["gather", block])
        out.append([what, block])
        if next_use(block, now + 1) == 10**6:
            out.append(["free", block])
            there.discard(block)
            out.append(["reduce", block])
    return out
""",
    ),
    (
        "the best of all choices, by search",
        """
def shared_blocks(uses, room):
    order = uses + uses[::-1]
    states = {frozenset(): (0, [])}
    for i, b in enumerate(order):
        then = {}
        for there, (n, done) in states.items():
            ways = [(there, n, done)]
            if b not in there:
                outs = [None] if len(there) < room else there
                ways = [
                    (
                        (there - {o}) | {b},
                        n + 1,
                        done + ([("free", o)] if o else []) + [("gather", b)],
                    )
                    for o in outs
                ]
            for now, m, did in ways:
                did = did + [("backward" if i >= len(uses) else "forward", b)]
                if b not in order[i + 1 :]:
                    did = did + [("reduce", b)]
                if now not in then or m < then[now][0]:
                    then[now] = m, did
        states = then
    there, (_, done) = min(states.items(), key=lambda s: s[1][0])
    return done + [("free", b) for b in there]
""",
    ),
]
PROMISES["11.shared_blocks"] = {
    "forward computes them from first to": (*IN_ORDER, ""),
    "`room` blocks are unsharded at a time, and none at the end": (*ROOM, ""),
    "Reduce it once": (*ONCE, ""),
    "when it is complete and before the next backward": (*ONCE, ""),
    "return one with the fewest gathers": (*FEWEST, ""),
    "also from forward to backward": (*FEWEST, ""),
    "A free costs nothing": None,
    "an action and a block": (*IN_ORDER, ""),
    "it stays as it is": (*STAYS, ""),
    "list of 1 to 12 names": (*ENDS, "edge"),
    "at least 1, perhaps more than there are blocks": (*ENDS, "edge"),
}
