"""Wrong answers to lesson 09 that people give, and the sentence that each must hear."""

from wrong_answers import Wrong

OWNED = ("every parameter has one owner, the same on all ranks",)
BALANCED = ("balanced by elements",)
PLAIN = ("the parameters of plain AdamW on the mean gradient",)
SHARE = ("a rank keeps the states of its share alone",)
TRAFFIC = ("sends no more than an all-reduce",)


def owners(body):
    return f"def shard_owners(sizes):\n    world = dist.get_world_size()\n    {body}"


ZERO1 = """
class ZeRO1:
    def __init__(self, parameters, optimizer_class, **options):
        self.parameters = parameters
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.padding = -sum(p.numel() for p in parameters) % self.world
        own = self.flat(p.detach() for p in parameters).chunk(self.world)[self.rank]
        self.shard = torch.nn.Parameter(own.clone())
        self.optimizer = optimizer_class([self.shard], **options)

    def flat(self, tensors):
        flat = torch.cat([t.flatten() for t in tensors])
        return torch.nn.functional.pad(flat, (0, self.padding))

    def step(self):
        gradient = self.flat(p.grad for p in self.parameters)
        self.shard.grad = {reduce}
        {update}
        flat = {gather}
        sizes = [p.numel() for p in self.parameters]
        with torch.no_grad():
            for p, new in zip(self.parameters, flat.split([*sizes, self.padding])):
                {copy}
"""
RIGHT = {
    "reduce": "reduce_scatter(gradient) / self.world",
    "update": "self.optimizer.step()",
    "gather": "all_gather(self.shard.detach())",
    "copy": "p.copy_(new.view_as(p))",
}


def zero1(**wrong):
    return ZERO1.format(**(RIGHT | wrong))


WRONG = {
    "09.shard_owners": [
        Wrong(
            "dealt in turn",
            owners("return [i % world for i in range(len(sizes))]"),
            says="but not as many elements",
            loses=BALANCED,
        ),
        Wrong(
            "as many parameters to each, in a row",
            owners("return [i * world // len(sizes) for i in range(len(sizes))]"),
            says="but not as many elements",
            loses=BALANCED,
        ),
        Wrong(
            "the emptiest rank, in the order of the model",
            owners(
                "loads, owners = [0] * world, []\n    for size in sizes:\n"
                "        owners.append(loads.index(min(loads)))\n"
                "        loads[owners[-1]] += size\n    return owners"
            ),
            says="Which parameter do you place first",
            loses=BALANCED,
        ),
        Wrong(
            "rank 0 owns everything",
            owners("return [0] * len(sizes)"),
            says="owns everything: nothing is sharded",
            loses=BALANCED,
        ),
        Wrong(
            "every rank for itself",
            owners("return [dist.get_rank()] * len(sizes)"),
            says="disagree on who owns what",
            loses=OWNED,
        ),
        Wrong(
            "parameters without an owner",
            owners("return [i if i < world else -1 for i in range(len(sizes))]"),
            says="nobody would update that parameter",
            loses=OWNED,
        ),
        Wrong(
            "a list for each rank",
            owners("return [list(range(len(sizes)))[r::world] for r in range(world)]"),
            says="must return a list of ranks",
            loses=OWNED,
        ),
    ],
    "09.zero1": [
        Wrong(
            "a plain optimizer after an all-reduce",
            """
class ZeRO1:
    def __init__(self, parameters, optimizer_class, **options):
        self.parameters = parameters
        self.optimizer = optimizer_class(parameters, **options)

    def step(self):
        for p in self.parameters:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        self.optimizer.step()
""",
            says="nothing is sharded",
            loses=SHARE,
        ),
        Wrong(
            "the sum",
            zero1(reduce="reduce_scatter(gradient)"),
            "not averaged",
            ("another optimizer",),
        ),
        Wrong(
            "each rank steps on its own gradient",
            zero1(reduce="gradient.chunk(self.world)[self.rank].clone()"),
            says="the rank's own gradient was used",
            loses=PLAIN,
        ),
        Wrong(
            "gathered before the step",
            zero1(
                update="gathered = all_gather(self.shard.detach())\n        self.optimizer.step()",
                gather="gathered",
            ),
            says="nothing has moved",
            loses=PLAIN,
        ),
        Wrong(
            "a rank keeps its result to itself",
            zero1(
                gather="self.flat(p.detach() for p in self.parameters)",
                copy="pass",
            )
            .replace(
                "        sizes =",
                "        flat.chunk(self.world)[self.rank].copy_(self.shard.detach())\n"
                "        sizes =",
            )
            .replace("pass", "p.copy_(new.view_as(p))"),
            says="is what the owners updated gathered afterwards",
            loses=PLAIN,
        ),
        Wrong(
            "the last elements belong to nobody",
            """
class ZeRO1:
    def __init__(self, parameters, optimizer_class, **options):
        self.parameters = parameters
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.size = sum(p.numel() for p in parameters) // self.world
        own = self.flat(parameters)[self.rank * self.size :][: self.size]
        self.shard = torch.nn.Parameter(own.detach().clone())
        self.optimizer = optimizer_class([self.shard], **options)

    def flat(self, tensors):
        return torch.cat([t.flatten() for t in tensors])

    def step(self):
        gradient = self.flat([p.grad for p in self.parameters])
        whole = self.flat([p.detach() for p in self.parameters])
        kept = self.size * self.world
        self.shard.grad = reduce_scatter(gradient[:kept]) / self.world
        self.optimizer.step()
        whole[:kept] = all_gather(self.shard.detach())
        with torch.no_grad():
            for p, new in zip(self.parameters, whole.split([p.numel() for p in self.parameters])):
                p.copy_(new.view_as(p))
""",
            says="Who owns them",
            loses=PLAIN,
        ),
        Wrong(
            "an all-reduce, then the gather",
            zero1(
                reduce="(dist.all_reduce(gradient), gradient)[1].chunk(self.world)[self.rank] "
                "/ self.world"
            ),
            says="what an all-reduce alone costs",
            loses=TRAFFIC,
        ),
        Wrong(
            "two optimizers, one of them full",
            zero1().replace(
                "self.optimizer = optimizer_class([self.shard], **options)",
                "self.optimizer = optimizer_class([self.shard], **options)\n"
                "        self.full = optimizer_class([p.detach().clone() for p in parameters])\n"
                "        for group in self.full.param_groups:\n"
                "            for p in group['params']:\n                p.grad = p * 0\n"
                "        self.full.step()",
            ),
            says="nothing is sharded",
            loses=SHARE,
        ),
    ],
}
