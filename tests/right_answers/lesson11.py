"""Right answers to lesson 11 that look different from the solution."""

RIGHT = {
    "11.unit": [
        (
            "one flat storage, whose views the parameters are",
            """
class Unit:
    def __init__(self, parameters):
        world = dist.get_world_size()
        numel = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(-(-numel // world) * world)
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
            flat = torch.nn.utils.parameters_to_vector(parameters)
        size = (flat.numel() + self.world - 1) // self.world
        shard = torch.zeros(size)
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
            p.untyped_storage().resize_(4 * p.numel())
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
        self.flat = torch.zeros(size * world)
        for p, view in zip(self.parameters, self.flat[: sum(self.numels)].split(self.numels)):
            view.copy_(p.data.flatten())
            p.data = view.view_as(p)
        self.bytes = 4 * size * world
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
        if index < len(blocks) - 1:  # backward begins with the last one: it stays
            blocks[index].free()
        if output.requires_grad:
            output.register_hook(lambda gradient: before_backward(index, gradient))

    def ready(index, parameter):
        block = blocks[index]
        block.missing -= 1
        if block.missing:
            return
        flat = torch.zeros(block.bytes // 4)
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
    begun = torch.zeros(size * world)
    begun[:numel] = torch.cat([w.detach().reshape(-1) for w in weights])
    shard = begun[rank * size : (rank + 1) * size].clone().requires_grad_()
    gradients = {}

    def gather():
        whole = torch.empty(size * world)
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
            flat = torch.zeros(size * world)
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
