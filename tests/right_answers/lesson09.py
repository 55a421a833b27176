"""Right answers to lesson 09 that look different from the solution."""

RIGHT = {
    "09.shard_owners": [
        (
            "a heap",
            """
import heapq


def shard_owners(sizes):
    heap = [(0, rank) for rank in range(dist.get_world_size())]
    owners = {}
    for size, index in sorted(((s, i) for i, s in enumerate(sizes)), reverse=True):
        load, rank = heapq.heappop(heap)
        owners[index] = rank
        heapq.heappush(heap, (load + size, rank))
    return [owners[index] for index in range(len(sizes))]
""",
        ),
        (
            "argsort and argmin of tensors",
            """
def shard_owners(sizes):
    loads = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    owners = [-1] * len(sizes)
    for i in torch.tensor(sizes).argsort(descending=True, stable=True).tolist():
        emptiest = int(loads.argmin())
        owners[i] = emptiest
        loads[emptiest] += sizes[i]
    return owners
""",
        ),
    ],
    "09.zero1": [
        (
            "whole parameters: reduced to their owner, broadcast from it",
            """
class ZeRO1:
    def __init__(self, parameters, optimizer_class, **options):
        self.parameters = list(parameters)
        world, rank = dist.get_world_size(), dist.get_rank()
        loads, self.owner = [0] * world, {}
        for p in sorted(self.parameters, key=lambda p: p.numel(), reverse=True):
            self.owner[p] = loads.index(min(loads))
            loads[self.owner[p]] += p.numel()
        mine = [p for p in self.parameters if self.owner[p] == rank]
        self.inner = optimizer_class(mine, **options) if mine else None

    @torch.no_grad()
    def step(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        for p in self.parameters:
            dist.reduce(p.grad, dst=self.owner[p])
            if self.owner[p] == rank:
                p.grad /= world
            else:
                p.grad = None
        if self.inner is not None:
            self.inner.step()
        for p in self.parameters:
            dist.broadcast(p, src=self.owner[p])
""",
        ),
        (
            "each parameter cut in N, a group of options for each",
            """
class ZeRO1:
    def __init__(self, parameters, optimizer_class, **options):
        self.parameters = parameters
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.shards = []
        for p in parameters:
            self.shards.append(self.cut(p.data)[self.rank].clone().requires_grad_())
        groups = [{"params": [shard]} for shard in self.shards]
        self.optimizer = optimizer_class(groups, **options)

    def cut(self, tensor):
        flat = tensor.reshape(-1)
        size = (flat.numel() + self.world - 1) // self.world
        padded = torch.zeros(size * self.world, dtype=flat.dtype)
        padded[: flat.numel()] = flat
        return padded.view(self.world, size)

    def step(self):
        for p, shard in zip(self.parameters, self.shards):
            shard.grad = reduce_scatter(self.cut(p.grad).view(-1)).div_(self.world)
        self.optimizer.step()
        for p, shard in zip(self.parameters, self.shards):
            p.data.copy_(all_gather(shard.data)[: p.numel()].view_as(p))
""",
        ),
        (
            "the parameters are views of one flat buffer",
            """
class ZeRO1:
    def __init__(self, parameters, optimizer_class, **options):
        self.parameters, self.world = parameters, dist.get_world_size()
        numel = sum(p.numel() for p in parameters)
        self.shard_size = -(-numel // self.world)
        self.flat = torch.zeros(self.shard_size * self.world)
        offset = 0
        for p in parameters:
            view = self.flat[offset : offset + p.numel()].view(p.shape)
            view.copy_(p.data)
            p.data = view
            offset += p.numel()
        self.own = torch.nn.Parameter(self.flat.chunk(self.world)[dist.get_rank()])
        self.inner = optimizer_class([self.own], **options)

    def step(self):
        gradient = torch.zeros_like(self.flat)
        flat = torch.cat([p.grad.view(-1) for p in self.parameters])
        gradient[: len(flat)] = flat
        parts = torch.empty_like(gradient)
        dist.all_to_all_single(parts, gradient)
        self.own.grad = parts.view(self.world, -1).mean(0)
        self.inner.step()
        self.inner.zero_grad()
        dist.all_gather_into_tensor(self.flat, self.own.detach().clone())
""",
        ),
    ],
}
