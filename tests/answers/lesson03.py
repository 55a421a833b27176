"""Wrong answers to lesson 03 that people give, and the sentence that each must hear."""

from __future__ import annotations

from answers import Wrong
from answers.altered import altered, wrapped

EQUAL = "equal batches: the mean over all ranks"
UNEQUAL = "unequal batches: the mean over all samples"
ONE_CALL = "one collective, no larger than it must be"

START = "parameters as on rank 0"
BUFFERS = "buffers as on rank 0"
TIED = "in place: shared weights stay shared"
EACH_ONCE = "rank 0's values are sent, each once"
MEAN = "every rank has the mean over the ranks"
FROZEN = "a parameter without gradient keeps none"
REDUCE = "one all-reduce of all gradients"
TRAIN = "training: all samples, equally many on each rank"
ORDER = "a new order in each epoch, the same on all ranks"
EVALUATE = "evaluation: each sample exactly once"
TRACE = "no collective, no trace in the global generators"
ALL_ROWS = "equal batches: statistics of all rows"
FAR = "values far from zero"
FEW = "one collective of a few numbers per channel"
ALL_SAMPLES = "the F1 of all samples"
EDGE = "a rank without samples, a class without positives"
COUNTS = "one collective, a few counts"

AVERAGE = """
def average_gradients(model):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    buffer = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(buffer)
    {divide}
    for g, mean in zip(gradients, buffer.split([g.numel() for g in gradients])):
        g.copy_(mean.view_as(g))
"""

WEIGHTED = """
def weighted_mean(gradients, samples):
    buffer = torch.cat([*[g.flatten() * samples for g in gradients], torch.tensor([1.0 * samples])])
    dist.all_reduce(buffer)
    means = ({divide}).split([g.numel() for g in gradients])
    for gradient, mean in zip(gradients, means):
        gradient.copy_(mean.view_as(gradient))
"""

INDICES = """
def rank_indices(length, epoch, seed, evaluate):
    rank, world = dist.get_rank(), dist.get_world_size()
    dice = torch.Generator().manual_seed({seed})
    order = {order}
    if {padded}:
        {pad}
    return {deal}
"""
RIGHT_INDICES = {
    "seed": "seed + epoch",
    "order": "torch.randperm(length, generator=dice).tolist()",
    "padded": "not evaluate",
    "pad": "order += order[: -length % world]",
    "deal": "order[rank::world]",
}

NORM = """
def batch_norm(x, weight, bias, eps):
    wide = x.to({dtype})
    rows = torch.tensor([float(len(x))], dtype={dtype})
    sums = torch.cat([rows, wide.sum(0), (wide * wide).sum(0)])
    {send}
    mean, square = (sums[1:] / sums[0]).chunk(2)
    variance = {variance}
    return ((wide - mean) / {scale} * weight + bias).float()
"""
RIGHT_NORM = {
    "dtype": "torch.float64",
    "send": "dist.all_reduce(sums)",
    "variance": "square - mean * mean",
    "scale": "(variance + eps).sqrt()",
}

SCORE = """
def f1(predicted, labels):
    hits = (predicted & labels).sum()
    counts = torch.stack([hits, predicted.sum(), labels.sum(), (predicted == labels).sum()])
    {send}
    hits, said, true, same = counts.tolist()
    return {value}
"""
RIGHT_SCORE = {
    "send": "dist.all_reduce(counts)",
    "value": "2 * hits / (said + true) if said + true else 0.0",
}


def indices(**wrong):
    return INDICES.format(**(RIGHT_INDICES | wrong))


def norm(**wrong):
    return NORM.format(**(RIGHT_NORM | wrong))


def f1(**wrong):
    return SCORE.format(**(RIGHT_SCORE | wrong))


WRONG = {
    "03.weighted_mean": [
        Wrong(
            "the sum of the ranks' means",
            """
def weighted_mean(gradients, samples):
    for gradient in gradients:
        dist.all_reduce(gradient)
""",
            says="is the sum over the ranks: divide",
            loses=(EQUAL,),
        ),
        Wrong(
            "the mean of the ranks' means",
            """
def weighted_mean(gradients, samples):
    buffer = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(buffer)
    buffer /= dist.get_world_size()
    for gradient, mean in zip(gradients, buffer.split([g.numel() for g in gradients])):
        gradient.copy_(mean.view_as(gradient))
""",
            says="mean of the ranks' means. Rank 0 had 2 of 9 samples and got 1/2 of the weight",
            loses=(UNEQUAL,),
        ),
        Wrong(
            "the right means, under new names: nothing is written in place",
            """
def weighted_mean(gradients, samples):
    buffer = torch.cat([*[g.flatten() * samples for g in gradients], torch.tensor([1.0 * samples])])
    dist.all_reduce(buffer)
    means = (buffer[:-1] / buffer[-1]).split([g.numel() for g in gradients])
    for gradient, mean in zip(gradients, means):
        gradient = mean.view_as(gradient)
""",
            says="has not changed: write the result in place",
            loses=(EQUAL,),
        ),
        Wrong(
            "one collective per tensor",
            """
def weighted_mean(gradients, samples):
    total = torch.tensor(float(samples))
    dist.all_reduce(total)
    for gradient in gradients:
        gradient *= samples
        dist.all_reduce(gradient)
        gradient /= total
""",
            says="made 24 calls (24 x all_reduce) while your function ran 5 times. One call each",
            loses=(ONE_CALL,),
        ),
        Wrong(
            "all ranks' gradients gathered, and averaged on each",
            """
def weighted_mean(gradients, samples):
    flat = torch.cat([*[g.flatten() * samples for g in gradients], torch.tensor([1.0 * samples])])
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, flat)
    buffer = torch.stack(parts).sum(0)
    means = (buffer[:-1] / buffer[-1]).split([g.numel() for g in gradients])
    for gradient, mean in zip(gradients, means):
        gradient.copy_(mean.view_as(gradient))
""",
            says="called all_gather. An all_reduce adds up",
            loses=(ONE_CALL,),
        ),
        Wrong(
            "a world of two, assumed",
            """
def weighted_mean(gradients, samples):
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= 2
""",
            says="is half of the sum of the means, on 3 ranks",
            loses=(EQUAL,),
        ),
        Wrong(
            "a rank without samples stays away from the collective",
            """
def weighted_mean(gradients, samples):
    if samples == 0:
        return
    buffer = torch.cat([*[g.flatten() * samples for g in gradients], torch.tensor([1.0 * samples])])
    dist.all_reduce(buffer)
    means = (buffer[:-1] / buffer[-1]).split([g.numel() for g in gradients])
    for gradient, mean in zip(gradients, means):
        gradient.copy_(mean.view_as(gradient))
""",
            says="rank 0 returned without calling it",
            loses=(UNEQUAL,),
        ),
        Wrong(
            "no division",
            WEIGHTED.format(divide="buffer[:-1]"),
            says="is the sum over all samples: divide by their number",
            loses=(EQUAL,),
        ),
        Wrong(
            "divided by the number of ranks",
            WEIGHTED.format(divide="buffer[:-1] / dist.get_world_size()"),
            says="is the sum over all samples, divided by the number of ranks",
            loses=(EQUAL,),
        ),
        Wrong(
            "new tensors in the list",
            WEIGHTED.format(divide="buffer[:-1] / buffer[-1]").replace(
                "    for gradient, mean in zip(gradients, means):\n"
                "        gradient.copy_(mean.view_as(gradient))",
                "    gradients[:] = [m.view_as(g) for g, m in zip(gradients, means)]",
            ),
            says="new tensors: write into the given ones, because the model holds them, too",
            loses=(EQUAL,),
        ),
        Wrong(
            "who has no samples is left as it is",
            WEIGHTED.format(divide="buffer[:-1] / buffer[-1]")
            .replace("    for gradient", "    for gradient", 1)
            .replace("        gradient.copy_", "        if samples: gradient.copy_"),
            says="has not changed: write the result in place",
            loses=(UNEQUAL,),
        ),
    ],
    "03.same_start": [
        Wrong(
            "buffers forgotten",
            """
def same_start(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
""",
            says="buffers must come from rank 0, too",
            loses=(BUFFERS,),
        ),
        Wrong(
            "the mean of all ranks",
            """
def same_start(model):
    for t in (*model.parameters(), *model.buffers()):
        mean = t.data.double()
        dist.all_reduce(mean)
        t.data.copy_(mean / dist.get_world_size())
""",
            says="is a mix of all ranks' values",
            loses=(START,),
        ),
        Wrong(
            "a seed after the model was made",
            """
def same_start(model):
    torch.manual_seed(0)
""",
            says="although all ranks have set the same seed: a seed does not change existing",
            loses=(START,),
        ),
        Wrong(
            "new tensors in the place of the old",
            """
def same_start(model):
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            copy = p.detach().clone()
            dist.broadcast(copy, src=0)
            setattr(module, name, torch.nn.Parameter(copy))
    for b in model.buffers():
        dist.broadcast(b, src=0)
""",
            says="now each has its own",
            loses=(TIED,),
        ),
        Wrong(
            "the shared weight twice",
            """
def same_start(model):
    tensors = [*dict(model.named_parameters(remove_duplicate=False)).values(), *model.buffers()]
    for tensor in tensors:
        dist.broadcast(tensor.data, src=0)
""",
            says="Send each tensor once, also the shared weight",
            loses=(EACH_ONCE,),
        ),
        Wrong(
            "the shared weight twice, in messages",
            """
def same_start(model):
    tensors = [*dict(model.named_parameters(remove_duplicate=False)).values(), *model.buffers()]
    for value in (tensor.data for tensor in tensors):
        if dist.get_rank() == 0:
            for rank in range(1, dist.get_world_size()):
                dist.send(value, rank)
        else:
            dist.recv(value, 0)
""",
            says="Send each tensor once, also the shared weight",
            loses=(EACH_ONCE,),
        ),
        Wrong(
            "everything to everybody",
            """
def same_start(model):
    for t in (*model.parameters(), *model.buffers()):
        every = [torch.empty_like(t.data) for _ in range(dist.get_world_size())]
        dist.all_gather(every, t.data)
        t.data.copy_(every[0])
""",
            says="A broadcast copies rank 0's",
            loses=(EACH_ONCE,),
        ),
        Wrong(
            "a pickled state_dict",
            """
def same_start(model):
    tensors = [t.data for t in (*model.parameters(), *model.buffers())]
    box = [tensors]
    dist.broadcast_object_list(box, src=0)
    for tensor, new in zip(tensors, box[0]):
        tensor.copy_(new)
""",
            says="sent pickled objects",
            loses=(EACH_ONCE,),
        ),
        Wrong(
            "rank 0 stays away: it has the values",
            """
def same_start(model):
    if dist.get_rank() != 0:
        for t in (*model.parameters(), *model.buffers()):
            dist.broadcast(t.data, src=0)
""",
            says="waits in broadcast",
            loses=(START,),
        ),
        Wrong(
            "rank 0 alone calls",
            """
def same_start(model):
    if dist.get_rank() == 0:
        for t in (*model.parameters(), *model.buffers()):
            dist.broadcast(t.data, src=0)
""",
            says="rank 0 waits in broadcast #0",
            loses=(START,),
        ),
        Wrong(
            "frozen parameters forgotten",
            """
def same_start(model):
    for t in (*(p for p in model.parameters() if p.requires_grad), *model.buffers()):
        dist.broadcast(t.data, src=0)
""",
            says="0.bias is its own: parameters must come from rank 0, too",
            loses=(START,),
        ),
        Wrong(
            "the last rank's values",
            """
def same_start(model):
    for t in (*model.parameters(), *model.buffers()):
        dist.broadcast(t.data, src=dist.get_world_size() - 1)
""",
            says="All ranks hold the same 0.weight, but it is not rank 0",
            loses=(START,),
        ),
        Wrong(
            "once is enough",
            """
DONE = []


def same_start(model):
    if not DONE:
        for t in (*model.parameters(), *model.buffers()):
            dist.broadcast(t.data, src=0)
    DONE.append(model)
""",
            says="parameters must come from rank 0, too",
            loses=(START,),
        ),
        Wrong(
            "what a state_dict has",
            """
def same_start(model):
    for t in {t.data_ptr(): t for t in model.state_dict().values()}.values():
        dist.broadcast(t, src=0)
""",
            says="mask is its own: buffers must come from rank 0",
            loses=(BUFFERS,),
        ),
        Wrong(
            "all in one float32 buffer",
            """
@torch.no_grad()
def same_start(model):
    tensors = [*model.parameters(), *model.buffers()]
    flat = torch.cat([t.reshape(-1).float() for t in tensors])
    dist.broadcast(flat, src=0)
    for t, new in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(new.view_as(t))
""",
            says="lost digits in float32",
            loses=(BUFFERS,),
        ),
        Wrong(
            "new buffers in the place of the old",
            """
def same_start(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    for module in model.modules():
        for name, b in list(module.named_buffers(recurse=False)):
            module._buffers[name] = b.clone()
            dist.broadcast(module._buffers[name], src=0)
""",
            says="is a new tensor",
            loses=(TIED,),
        ),
        Wrong(
            "all parameters ask for a gradient afterwards",
            """
def same_start(model):
    model.requires_grad_(False)
    for t in (*model.parameters(), *model.buffers()):
        dist.broadcast(t, src=0)
    model.requires_grad_(True)
""",
            says="frozen parameters stay frozen",
            loses=(TIED,),
        ),
    ],
    "03.average_gradients": [
        Wrong(
            "the sum",
            AVERAGE.format(divide="pass"),
            says="is the sum over the ranks",
            loses=(MEAN,),
        ),
        Wrong(
            "two ranks assumed",
            AVERAGE.format(divide="buffer /= 2 if dist.get_world_size() > 1 else 1"),
            says="is half of the sum",
            loses=(MEAN,),
        ),
        Wrong(
            "the parameters are averaged",
            """
def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()
""",
            says="has changed: average its .grad",
            loses=(MEAN,),
        ),
        Wrong(
            "one collective for each parameter",
            """
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
""",
            says="all gradients can travel as one tensor",
            loses=(REDUCE,),
        ),
        Wrong(
            "gathered and added up by everyone",
            """
def average_gradients(model):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    buffer = torch.cat([g.flatten() for g in gradients])
    every = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
    dist.all_gather(every, buffer)
    buffer = torch.stack(every).mean(0)
    for g, mean in zip(gradients, buffer.split([g.numel() for g in gradients])):
        g.copy_(mean.view_as(g))
""",
            says="An all_reduce adds up and sends less",
            loses=(REDUCE,),
        ),
        Wrong(
            "not in place",
            AVERAGE.format(divide="buffer /= dist.get_world_size()").replace(
                "g.copy_(mean.view_as(g))", "g = mean.view_as(g)"
            ),
            says="is the rank's own: nothing was averaged, or the mean was not written back",
            loses=(MEAN,),
        ),
        Wrong(
            "zeros for the frozen",
            """
def average_gradients(model):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    gradients = [p.grad for p in model.parameters()]
    buffer = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(buffer)
    buffer /= dist.get_world_size()
    for g, mean in zip(gradients, buffer.split([g.numel() for g in gradients])):
        g.copy_(mean.view_as(g))
""",
            says="must stay None, because the parameter is frozen or unused",
            loses=(FROZEN,),
        ),
        Wrong(
            "divided before and after",
            AVERAGE.format(divide="buffer /= dist.get_world_size() ** 2"),
            says="was divided twice by the number of ranks",
            loses=(MEAN,),
        ),
        Wrong(
            "a shared parameter twice in the buffer",
            AVERAGE.format(divide="buffer /= dist.get_world_size()").replace(
                "[p.grad for p in model.parameters() if p.grad is not None]",
                "[p.grad for _, p in model.named_parameters(remove_duplicate=False)\n"
                "                 if p.grad is not None]",
            ),
            says="all gradients can travel as one tensor",
            loses=(REDUCE,),
        ),
        Wrong(
            "gradients that are no view of one row",
            AVERAGE.format(divide="buffer /= dist.get_world_size()").replace(
                "g.flatten()", "g.view(-1)"
            ),
            says="view size is not compatible",
            loses=(MEAN,),
        ),
        Wrong(
            "the outermost layer alone",
            AVERAGE.format(divide="buffer /= dist.get_world_size()").replace(
                "model.parameters()", "model.parameters(recurse=False)"
            ),
            says="is the rank's own",
            loses=(MEAN,),
        ),
        Wrong(
            "the mean of all steps so far",
            "SEEN = []\n"
            + AVERAGE.format(divide="buffer /= dist.get_world_size()").replace(
                "    dist.all_reduce(buffer)",
                "    SEEN.append(buffer)\n    if len({len(b) for b in SEEN}) == 1:\n"
                "        buffer = torch.stack(SEEN).mean(0)\n    dist.all_reduce(buffer)",
            ),
            says="in call 1 is wrong",
            loses=(MEAN,),
        ),
    ],
    "03.rank_indices": [
        Wrong(
            "every rank its own seed",
            indices(seed="seed + epoch + 1000 * rank"),
            says="the ranks shuffled in different orders",
            loses=(TRAIN,),
        ),
        Wrong(
            "set_epoch forgotten",
            indices(seed="seed"),
            says="in the same order in epochs 0 and 1",
            loses=(ORDER,),
        ),
        Wrong(
            "after the first epoch drawn with replacement",
            indices(
                order="torch.randperm(length, generator=dice).tolist()\n"
                "    if epoch: order = torch.randint(length, (length,), generator=dice).tolist()"
            ),
            says="samples to train on in epoch 1, rank 0 got one twice",
            loses=(TRAIN,),
        ),
        Wrong(
            "the seed forgotten",
            indices(seed="epoch"),
            says="gets the same order from two seeds",
            loses=(ORDER,),
        ),
        Wrong(
            "begun elsewhere in each epoch, not shuffled",
            indices(order="[(i + seed + epoch) % length for i in range(length, 0, -1)]"),
            says="follows from 0, 1, 2, ... by a simple rule: it is not shuffled",
            loses=(ORDER,),
        ),
        Wrong(
            "not shuffled",
            indices(order="list(range(length))"),
            says="in ascending order",
            loses=(ORDER,),
        ),
        Wrong(
            "padding leaks into the evaluation",
            indices(padded="True"),
            says="padding is counted twice",
            loses=(EVALUATE,),
        ),
        Wrong(
            "rank 0 evaluates alone",
            indices(deal="order[rank::world] if not evaluate else order if rank == 0 else []"),
            says="while others wait",
            loses=(EVALUATE,),
        ),
        Wrong(
            "the tail dropped",
            indices(pad="order = order[: length // world * world]"),
            says="None may be left out",
            loses=(TRAIN,),
        ),
        Wrong(
            "unequal numbers to train with",
            indices(padded="False"),
            says="a rank with more waits forever",
            loses=(TRAIN,),
        ),
        Wrong(
            "everybody sees everything",
            indices(deal="order"),
            says="every rank got all: N times the work",
            loses=(TRAIN,),
        ),
        Wrong(
            "the global generator seeded",
            indices(order="torch.manual_seed(seed + epoch) and torch.randperm(length).tolist()"),
            says="drew from torch's global generator",
            loses=(TRACE,),
        ),
        Wrong(
            "the order is broadcast",
            indices(
                order="torch.randperm(length, generator=dice)",
                padded="dist.broadcast(order, 0) or True",
                pad="""order = order.tolist()
        order += [] if evaluate else order[: -length % world]""",
            ),
            says="Every rank can compute the order from the seed",
            loses=(TRACE,),
        ),
        Wrong(
            "a tensor",
            indices(deal="torch.tensor(order[rank::world])"),
            says="returned a Tensor, not a list of ints",
            loses=(TRAIN,),
        ),
        Wrong(
            "one sample fills all gaps",
            indices(pad="order += order[:1] * (-length % world)"),
            says="times. No sample may come more than twice",
            loses=(TRAIN,),
        ),
        Wrong(
            "one sample more than is needed for each rank",
            indices(pad="order += order[: world - length % world]"),
            says="more were repeated than needed to give every rank equally many",
            loses=(TRAIN,),
        ),
        Wrong(
            "each rank shuffles its own part",
            indices(
                order="list(range(length))",
                pad="order += order[: -length % world]",
                deal="[order[rank::world][i] for i in\n"
                "            torch.randperm(len(order[rank::world]), generator=dice).tolist()]",
            ),
            says="it never sees the others'",
            loses=(ORDER,),
        ),
        Wrong(
            "every eleventh",
            indices(order="[(11 * i + seed + epoch) % length for i in range(length)]"),
            says="by a simple rule",
            loses=(ORDER,),
        ),
        Wrong(
            "one order, turned by the epoch",
            indices(
                seed="seed",
                order="torch.randperm(length, generator=dice).roll(epoch).tolist()",
            ),
            says="follows from epoch 0 by a simple rule",
            loses=(ORDER,),
        ),
        Wrong(
            "another order whenever it is asked for",
            "CALLS = []\n"
            + indices(
                seed="seed + epoch + len(CALLS)", deal="CALLS.append(1) or order[rank::world]"
            ),
            says="Epoch 0 was requested twice and gave two orders",
            loses=(ORDER,),
        ),
        Wrong(
            "NumPy's global generator seeded",
            "import numpy as np\n"
            + indices(
                order="np.random.seed(seed + epoch) or np.random.permutation(length).tolist()"
            ),
            says="drew from NumPy's global generator",
            loses=(TRACE,),
        ),
    ],
    "03.batch_norm": [
        Wrong(
            "own statistics", norm(send="pass"), says="used its own statistics", loses=(ALL_ROWS,)
        ),
        Wrong(
            "the mean of the means",
            norm(
                send="sums[1:] /= sums[0].clone(); dist.all_reduce(sums); "
                "sums[0] = dist.get_world_size()"
            ),
            says="ranks with more rows must weigh more",
            loses=("unequal batches",),
        ),
        Wrong(
            "the mean of the variances",
            norm(
                send="own = x.double().var(0, unbiased=False) * len(x); "
                "sums[1 + len(own) :] = own; dist.all_reduce(sums)",
                variance="square",
            ),
            says="leaves out that their means differ",
            loses=(ALL_ROWS,),
        ),
        Wrong(
            "the unbiased variance",
            norm(variance="(square - mean * mean) * sums[0] / (sums[0] - 1)"),
            says="divided the variance by the rows minus one; BatchNorm divides by the rows",
            loses=(ALL_ROWS,),
        ),
        Wrong(
            "eps outside the root",
            norm(scale="(variance.sqrt() + eps)"),
            says="it belongs to the variance",
            loses=(ALL_ROWS,),
        ),
        Wrong(
            "sums in float32",
            norm(dtype="torch.float32"),
            says="loses its digits where the mean is large",
            loses=(FAR,),
        ),
        Wrong(
            "two collectives",
            """
def batch_norm(x, weight, bias, eps):
    wide = x.double()
    sums = torch.cat([torch.tensor([float(len(x))], dtype=torch.float64), wide.sum(0)])
    dist.all_reduce(sums)
    mean = sums[1:] / sums[0]
    squares = ((wide - mean) ** 2).sum(0)
    dist.all_reduce(squares)
    return ((wide - mean) / (squares / sums[0] + eps).sqrt() * weight + bias).float()
""",
            says="lay count, sums and sums of squares end to end",
            loses=(FEW,),
        ),
        Wrong(
            "an epsilon of one's own",
            norm(scale="(variance + 0.1).sqrt()"),
            says="output is wrong",
            loses=(ALL_ROWS,),
        ),
        Wrong(
            "x is normalised in place",
            norm().replace("return (", "return x.copy_("),
            says="changed x, which was handed in to be read",
            loses=(ALL_ROWS,),
        ),
        Wrong(
            "a rank without rows sends the mean of nothing",
            norm(
                send="sums = torch.cat([rows, wide.mean(0) * rows, (wide * wide).mean(0) * rows]); "
                "dist.all_reduce(sums)"
            ),
            says="values that are not finite",
            loses=("unequal batches",),
        ),
        Wrong(
            "a rank without rows stays away",
            norm(send="if len(x) == 0: return x.float()\n    dist.all_reduce(sums)"),
            says="rank 1 returned without calling it",
            loses=("unequal batches",),
        ),
    ],
    "03.f1": [
        Wrong(
            "the mean of the ranks' F1",
            """
def f1(predicted, labels):
    both = int(predicted.sum() + labels.sum())
    own = torch.tensor(2 * int((predicted & labels).sum()) / both if both else 0.0)
    dist.all_reduce(own)
    return own.item() / dist.get_world_size()
""",
            says="is the mean of the ranks' F1 values",
            loses=(ALL_SAMPLES,),
        ),
        Wrong(
            "a weighted mean of the ranks' F1",
            """
def f1(predicted, labels):
    both = int(predicted.sum() + labels.sum())
    own = 2 * int((predicted & labels).sum()) / both if both else 0.0
    sums = torch.tensor([own * len(labels), float(len(labels))])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()
""",
            says="is a weighted mean of the ranks' F1 values",
            loses=(ALL_SAMPLES,),
        ),
        Wrong(
            "own samples",
            f1(send="pass"),
            says="is the F1 of its own samples",
            loses=(ALL_SAMPLES,),
        ),
        Wrong(
            "precision",
            f1(value="hits / said"),
            says="is the precision",
            loses=(ALL_SAMPLES,),
        ),
        Wrong("recall", f1(value="hits / true"), says="is the recall", loses=(ALL_SAMPLES,)),
        Wrong(
            "accuracy",
            """
def f1(predicted, labels):
    counts = torch.tensor([int((predicted == labels).sum()), len(labels)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()
""",
            says="is the accuracy",
            loses=(ALL_SAMPLES,),
        ),
        Wrong(
            "nan without positives",
            f1(value="2 * hits / (said + true) if said + true else float('nan')"),
            says="returned nan. If F1 would divide by 0, return 0",
            loses=(EDGE,),
        ),
        Wrong(
            "all samples gathered",
            """
def f1(predicted, labels):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, (predicted, labels))
    predicted, labels = (torch.cat(part) for part in zip(*every))
    both = int(predicted.sum() + labels.sum())
    return 2 * int((predicted & labels).sum()) / both if both else 0.0
""",
            says="counts can be added",
            loses=(COUNTS,),
        ),
        Wrong(
            "the right answers without a hit counted as missed",
            f1(value="2 * hits / (hits + said + same - hits)"),
            says="uses TN in place of FN",
            loses=(ALL_SAMPLES,),
        ),
        Wrong(
            "hits count once",
            f1(value="hits / (said + true - hits)"),
            says="TP counts twice in F1",
            loses=(ALL_SAMPLES,),
        ),
        Wrong(
            "counts of one byte",
            f1(send="counts = counts.to(torch.uint8); dist.all_reduce(counts)"),
            says="uses counts of one byte, which start again at 0 after 255",
            loses=(ALL_SAMPLES,),
        ),
        Wrong(
            "undefined without a hit",
            f1(value="2 / ((said + true) / hits)"),
            says="division by zero",
            loses=(EDGE,),
        ),
        Wrong(
            "the samples are changed",
            f1(value=RIGHT_SCORE["value"])
            .replace("(predicted & labels).sum()", "predicted.logical_and_(labels).sum()")
            .replace("    hits =", "    said = predicted.sum()\n    hits =")
            .replace("[hits, predicted.sum(),", "[hits, said,"),
            says="changed predicted, which was handed in to be read",
            loses=(ALL_SAMPLES,),
        ),
    ],
}

# ---- what the texts promise, as words of theirs -> (the criterion, the kind of case), or None

PROMISES = {
    "03.same_start": {
        "Copy rank 0's tensors to all ranks": (START, ""),
        "all parameters, also frozen ones": (START, ""),
        "all buffers, also those that are not in the `state_dict`": (BUFFERS, ""),
        "They may have any dtype": (BUFFERS, ""),
        "Shared weights stay shared": (TIED, ""),
        "frozen parameters stay frozen": (TIED, ""),
        "Send each tensor once, also a shared one": (EACH_ONCE, ""),
        "Send tensors, not pickled objects": (EACH_ONCE, ""),
        "on all ranks what they are on rank 0, in place": (START, ""),
        "with the same structure on every rank": None,
    },
    "03.average_gradients": {
        "Backward has run on every rank": None,
        "Replace each `.grad` by its mean over the ranks": (MEAN, ""),
        "Send all gradients in **one** all-reduce": (REDUCE, "frozen"),
        "must have none afterwards": (FROZEN, "frozen"),
        "Change nothing else in the model": (MEAN, ""),
        "the gradients by their mean over all ranks": (MEAN, ""),
        "contiguous or not": (MEAN, ""),
        "at least one has a gradient": None,
        "which gradients are None, are the same on every rank": None,  # of what is handed in
        "another tensor afterwards": None,
    },
    "03.weighted_mean": {
        "one may have seen none": (UNEQUAL, "unequal"),
        "Each rank's gradients are the mean over its own samples": None,
        "each is the mean over this rank's `samples` samples": None,
        "on every rank by the mean over **all** samples": (EQUAL, ""),
        "in one all-reduce of as few elements as possible": (ONE_CALL, ""),
        "by the mean over all samples of all ranks": (UNEQUAL, "unequal"),
        "of any shapes, contiguous or not": (EQUAL, ""),
        "write into them": (EQUAL, ""),
        "over all ranks at least 1": None,
        "finite numbers that mean nothing": (UNEQUAL, "unequal"),
    },
    "03.rank_indices": {
        "All ranks know the same seed": None,
        "nothing has to be sent": (TRACE, "training"),
        "all samples are shuffled and distributed to the ranks": (ORDER, "training"),
        "Another epoch or another seed gives another order": (ORDER, "training"),
        "the same epoch and seed give the same order again": (ORDER, "training"),
        "If both differ, the order may be the same": None,
        "Every rank gets equally many": (TRAIN, "training"),
        "repeat as few samples as possible": (TRAIN, "training"),
        "leave none out": (TRAIN, "training"),
        "each sample comes exactly once over all ranks": (EVALUATE, "evaluation"),
        "some ranks may get one sample fewer": (EVALUATE, "evaluation"),
        "a list of ints": (TRAIN, "training"),
        "at least as many as ranks": (TRAIN, "training"),
        "the same on every rank": None,
        "are left alone": (TRACE, "training"),
    },
    "03.batch_norm": {
        "the variance of **all** rows on all ranks": (ALL_ROWS, ""),
        "Use one collective of any kind": (FEW, ""),
        "In it each rank sends at most four numbers per channel": (FEW, ""),
        "one may have none": ("unequal batches", "unequal"),
        "values may be far from zero": (FAR, "far"),
        "with the statistics of all ranks' rows": (ALL_ROWS, ""),
        "together have at least one": ("unequal batches", "unequal"),
        "All stay as they are": (ALL_ROWS, ""),
        "Returns (rows, channels), float32": (ALL_ROWS, ""),
    },
    "03.f1": {
        "some ranks none": (EDGE, "edge"),
        "every rank the F1 of all samples": (ALL_SAMPLES, ""),
        "0 if the divisor is 0": (EDGE, "edge"),
        "Use one collective of a few counts": (COUNTS, ""),
        "The F1 of all ranks' samples, a number": (ALL_SAMPLES, ""),
        "Both stay as they are": (ALL_SAMPLES, ""),
    },
}

# ---- mutants of the solution that are right ----

NOT_STRICT = "not strict is the default, and the lengths agree"
EQUIVALENT = {
    "03.average_gradients": {
        "`zip(gradients, buffer.split(sizes), strict=True)` -> "
        "`zip(gradients, buffer.split(sizes))`": NOT_STRICT,
        "`True` -> `False`": NOT_STRICT,
    },
    "03.weighted_mean": {
        "`zip(gradients, means.split(sizes), strict=True)` -> "
        "`zip(gradients, means.split(sizes))`": NOT_STRICT,
        "`True` -> `False`": NOT_STRICT,
    },
    "03.rank_indices": {
        "`seed + epoch` -> `seed - epoch`": "a generator takes negative seeds, too",
    },
    "03.batch_norm": {
        "`torch.tensor([float(len(x))], dtype=torch.float64)` -> "
        "`torch.tensor([float(len(x))])`": "torch.cat takes the widest dtype",
    },
}

# ---- right answers that look different from the solution ----

RIGHT = {
    "03.same_start": [
        (
            "one flat buffer for each dtype",
            """
def same_start(model):
    by_dtype = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    for tensors in by_dtype.values():
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.broadcast(flat, 0)
        offset = 0
        for t in tensors:
            t.copy_(flat[offset : offset + t.numel()].view(t.shape))
            offset += t.numel()
""",
        ),
        (
            "each module its own, each address once",
            """
def same_start(model):
    sent = set()
    for module in model.modules():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor.data_ptr() not in sent:
                sent.add(tensor.data_ptr())
                dist.broadcast(tensor.data, src=0)
""",
        ),
        (
            "all as bytes, in one broadcast",
            """
@torch.no_grad()
def same_start(model):
    tensors = [*model.parameters(), *model.buffers()]
    flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors])
    dist.broadcast(flat, 0)
    for t, new in zip(tensors, flat.split([t.nbytes for t in tensors])):
        t.copy_(new.clone().view(t.dtype).view(t.shape))
""",
        ),
        (
            "functional collectives; alone nothing is sent",
            """
import torch.distributed._functional_collectives as funcol


def same_start(model):
    if dist.get_world_size() == 1:
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.copy_(funcol.broadcast(tensor.detach(), 0, dist.group.WORLD))
""",
        ),
        (
            "messages from rank to rank",
            """
@torch.no_grad()
def same_start(model):
    rank, world = dist.get_rank(), dist.get_world_size()
    for tensor in list(model.parameters()) + list(model.buffers()):
        if rank > 0:
            dist.recv(tensor, src=rank - 1)
        if rank + 1 < world:
            dist.send(tensor, dst=rank + 1)
""",
        ),
    ],
    "03.average_gradients": [
        (
            "torch's own flattening, divided before it is sent",
            """
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def average_gradients(model):
    ready = [p for p in model.parameters() if p.grad is not None]
    flat = _flatten_dense_tensors([p.grad for p in ready]).div_(dist.get_world_size())
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    for p, mean in zip(ready, _unflatten_dense_tensors(flat, [p.grad for p in ready])):
        p.grad = mean.clone()
""",
        ),
        (
            "DTensor: partial sums become replicas",
            """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate


def average_gradients(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ready = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.reshape(-1) for p in ready])
    mean = DTensor.from_local(flat, mesh, [Partial("avg")]).redistribute(placements=[Replicate()])
    for p, part in zip(ready, mean.to_local().split([p.numel() for p in ready])):
        p.grad = part.view(p.shape)
""",
        ),
        (
            "functional, into views of a buffer that stays; alone nothing is sent",
            """
import torch.distributed._functional_collectives as funcol

BUFFER = torch.zeros(1000)


def average_gradients(model):
    world = dist.get_world_size()
    if world == 1:
        return
    ready = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.reshape(-1) for p in ready])
    BUFFER[: len(flat)] = funcol.all_reduce(flat, "sum", dist.group.WORLD) / world
    offset = 0
    for p in ready:
        p.grad = BUFFER[offset : offset + p.numel()].view(p.shape)
        offset += p.numel()
""",
        ),
        (
            "a buffer filled by offsets, asynchronous",
            """
def average_gradients(model):
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    buffer = torch.empty(sum(g.numel() for g in grads.values()))
    views, offset = {}, 0
    for name, grad in grads.items():
        views[name] = buffer[offset : offset + grad.numel()].view(grad.shape)
        views[name].copy_(grad)
        offset += grad.numel()
    work = dist.all_reduce(buffer, async_op=True)
    work.wait()
    for name, grad in grads.items():
        grad.copy_(views[name]).div_(dist.get_world_size())
""",
        ),
    ],
    "03.weighted_mean": [
        (
            "the count comes first, float64",
            """
def weighted_mean(gradients, samples):
    flat = torch.cat([g.reshape(-1) for g in gradients]).double()
    message = torch.empty(1 + len(flat), dtype=torch.float64)
    message[0] = samples
    message[1:] = flat * samples
    dist.all_reduce(message)
    total = message[0].item()
    at = 1
    for g in gradients:
        g[...] = (message[at : at + g.numel()] / total).reshape(g.shape).float()
        at += g.numel()
""",
        ),
        (
            "scaled in place, copied back by vector_to_parameters",
            """
from torch.nn.utils import vector_to_parameters


def weighted_mean(gradients, samples):
    count = torch.full((1,), samples, dtype=torch.float32)
    for g in gradients:
        g.mul_(samples)
    vector = torch.cat((*(g.reshape(-1) for g in gradients), count))
    dist.all_reduce(vector)
    vector_to_parameters(vector[:-1] / vector[-1], gradients)
""",
        ),
        (
            "alone nothing is sent; a weight of its own for each rank",
            """
def weighted_mean(gradients, samples):
    if dist.get_world_size() == 1:
        return
    flat = torch.cat([torch.ones(1), *(g.reshape(-1) for g in gradients)]).mul(samples)
    dist.all_reduce(flat)
    flat = flat[1:] * (1.0 / flat[0])
    for g in gradients:
        g.set_(flat[: g.numel()].view(g.shape))
        flat = flat[g.numel() :]
""",
        ),
    ],
    "03.rank_indices": [
        (
            "Python's own dice, each rank a stretch",
            """
import random


def rank_indices(length, epoch, seed, evaluate):
    rank, world = dist.get_rank(), dist.get_world_size()
    indices = list(range(length))
    random.Random(1000003 * seed + epoch).shuffle(indices)
    if evaluate:
        return indices[rank * length // world : (rank + 1) * length // world]
    each = (length + world - 1) // world
    indices.extend(indices[: each * world - length])
    return indices[rank * each : (rank + 1) * each]
""",
        ),
        (
            "NumPy, evaluation in order",
            """
import math

import numpy as np


def rank_indices(length, epoch, seed, evaluate):
    rank, world = dist.get_rank(), dist.get_world_size()
    if evaluate:
        return list(range(rank, length, world))
    order = np.random.default_rng([seed, epoch]).permutation(length)
    order = np.resize(order, math.ceil(length / world) * world)
    return order[rank::world].tolist()
""",
        ),
        (
            "the global generator, put back afterwards",
            """
def rank_indices(length, epoch, seed, evaluate):
    with torch.random.fork_rng():
        torch.manual_seed(seed * 100 + epoch)
        order = torch.randperm(length)
    if not evaluate:
        missing = -length % dist.get_world_size()
        order = torch.cat([order, order[:missing]])
    return [int(i) for i in order.tensor_split(dist.get_world_size())[dist.get_rank()]]
""",
        ),
    ],
    "03.batch_norm": [
        (
            "an all_gather of counts, means and squared distances",
            """
def batch_norm(x, weight, bias, eps):
    world, channels = dist.get_world_size(), x.shape[1]
    mean = x.mean(0) if len(x) else torch.zeros(channels)
    squares = (x - mean).square().sum(0)
    mine = torch.cat([torch.tensor([float(len(x))]), mean, squares])
    all_of_them = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(all_of_them, mine)
    n, m, s = 0.0, torch.zeros(channels), torch.zeros(channels)
    for other in all_of_them:  # Chan, Golub and LeVeque
        count, other_mean, other_squares = other[0].item(), *other[1:].chunk(2)
        if count == 0:
            continue
        delta = other_mean - m
        m = m + delta * (count / (n + count))
        s = s + other_squares + delta**2 * (n * count / (n + count))
        n += count
    return (x - m) * torch.rsqrt(s / n + eps) * weight + bias
""",
        ),
        (
            "three numbers per channel, stacked",
            """
def batch_norm(x, weight, bias, eps):
    x64 = x.to(torch.float64)
    var, mean = torch.var_mean(x64, dim=0, correction=0)
    mine = torch.stack([torch.full_like(mean, len(x)), mean, var]).nan_to_num()
    every = torch.empty(dist.get_world_size(), *mine.shape, dtype=torch.float64)
    dist.all_gather(list(every.unbind()), mine)
    share = every[:, 0] / every[:, 0].sum(0)
    mean = (share * every[:, 1]).sum(0)
    var = (share * (every[:, 2] + (every[:, 1] - mean) ** 2)).sum(0)
    if not len(x):
        return x
    y = torch.nn.functional.batch_norm(
        x64, mean, var, weight.double(), bias.double(), training=False, eps=eps
    )
    return y.to(x.dtype)
""",
        ),
    ],
    "03.f1": [
        (
            "an all_gather of TP, FP and FN",
            """
def f1(predicted, labels):
    mine = torch.tensor(
        [
            int((predicted & labels).sum()),
            int((predicted & ~labels).sum()),
            int((~predicted & labels).sum()),
        ]
    )
    every = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    tp, fp, fn = (sum(counts[i].item() for counts in every) for i in range(3))
    if tp == 0:
        return 0.0
    precision, recall = tp / (tp + fp), tp / (tp + fn)
    return 2 * precision * recall / (precision + recall)
""",
        ),
        (
            "a float tensor of all four counts",
            """
def f1(predicted, labels):
    table = torch.zeros(2, 2)
    for p, y in zip(predicted.tolist(), labels.tolist()):
        table[int(p), int(y)] += 1
    dist.all_reduce(table)
    wrong = table[0, 1] + table[1, 0]
    return 2 * table[1, 1] / (2 * table[1, 1] + wrong).clamp(min=1)
""",
        ),
    ],
}

# -- what an answer may not assume -----------------------------------------------------------------

WRONG["03.weighted_mean"] += [
    Wrong(
        "samples, remembered by the shapes of the gradients",
        wrapped(
            "03.weighted_mean",
            "weighted_mean",
            "SAMPLES = {}\n\n\ndef weighted_mean(gradients, samples):\n"
            "    shapes = tuple(g.shape for g in gradients)\n"
            "    solution(gradients, SAMPLES.setdefault(shapes, samples))\n",
        ),
        says="is wrong: it is off by",
        loses=("unequal batches: the mean over all samples",),
    ),
    Wrong(
        "samples counted in float16",
        altered(
            "03.weighted_mean",
            (
                "torch.tensor([float(samples)])",
                "torch.tensor([samples], dtype=torch.float16).float()",
            ),
        ),
        says="is wrong: it is off by",
    ),
    Wrong(
        "divided by the samples, and then by the ranks",
        altered(
            "03.weighted_mean",
            ("buffer[:-1] / buffer[-1]", "buffer[:-1] / buffer[-1] / dist.get_world_size()"),
        ),
        says="and then by the number of ranks, too",
    ),
]
WRONG["03.batch_norm"] += [
    Wrong(
        f"{name}, remembered by shape",
        wrapped(
            "03.batch_norm",
            "batch_norm",
            f"KEPT = {{}}\n\n\ndef batch_norm(x, weight, bias, eps):\n"
            f"    {name} = KEPT.setdefault(x.shape, {name})\n"
            "    return solution(x, weight, bias, eps)\n",
        ),
        says="output is wrong",
    )
    for name in ("weight", "bias", "eps")
]
WRONG["03.same_start"] += [
    Wrong(
        "one model of each shape",
        wrapped(
            "03.same_start",
            "same_start",
            "SEEN = {}\n\n\ndef same_start(model):\n"
            "    solution(SEEN.setdefault(tuple(p.shape for p in model.parameters()), model))\n",
        ),
        says="is its own",
    )
]
WRONG["03.rank_indices"] += [
    Wrong(
        "the first call decides whether to evaluate",
        wrapped(
            "03.rank_indices",
            "rank_indices",
            "FIRST = []\n\n\ndef rank_indices(length, epoch, seed, evaluate):\n"
            "    FIRST.append(evaluate)\n    return solution(length, epoch, seed, FIRST[0])\n",
        ),
        says="came twice: padding is counted twice",
        loses=("evaluation: each sample exactly once",),
    )
]

# -- 03.diagnose -----------------------------------------------------------------------------------

SIZES = ("a right step, and mistakes in the size",)
MEANS = ("a mean of means",)
BETWEEN = ("mistakes between micro-batches",)
LEFT = ("what the step before left",)

PLAN = (
    "batches = [[torch.tensor([10.0 + r]), torch.full((r + 2,), 3.0 * r * r)] "
    "for r in range(ranks)]"
)


def planned(samples):
    """The solution with other samples."""
    return altered("03.diagnose", (PLAN, f"batches = {samples}"))


WRONG["03.diagnose"] = [
    Wrong(
        "always right",
        "def diagnose(step, rank, ranks):\n    return 'right'",
        says="without calling `step`",
    ),
    Wrong(
        "equal ranks",
        planned("[[torch.tensor([9.0 + r * r]), torch.tensor([3.0 * r])] for r in range(ranks)]"),
        says="Give the ranks different numbers of samples",
        loses=MEANS,
    ),
    Wrong(
        "one micro-batch",
        altered(
            "03.diagnose",
            (PLAN, "batches = [[torch.full((r + 2,), 3.0 * r * r + 1)] for r in range(ranks)]"),
            (
                "    firsts = sum(first.sum().item() for first, _ in batches)\n"
                "    lasts = torch.cat([last for _, last in batches])\n"
                "    samples = len(lasts) + ranks\n"
                "    right = (firsts + lasts.sum().item()) / samples",
                "    right = torch.cat([mine[0] for mine in batches]).mean().item()",
            ),
            (
                '        "last": lasts.mean().item(),\n'
                '        "again": (firsts * ranks + lasts.sum().item()) / samples,\n',
                "",
            ),
        ),
        says="Pass several micro-batches",
        loses=BETWEEN,
    ),
    Wrong(
        "one call",
        altered("03.diagnose", ("abs(step(batches[rank]) - gradient) > 1e-6", "False")),
        says="Only a second step shows",
        loses=LEFT,
    ),
    Wrong(
        "the same values on every rank",
        planned("[[torch.tensor([2.0]), torch.full((3,), 5.0)] for r in range(ranks)]"),
        says="Your samples cannot tell",
    ),
    Wrong(
        "values that add up to 0",
        planned(
            "[[torch.tensor([1.0 + r]), torch.full((1 + r,), -1.0)] for r in range(ranks)]"
        ),
        says="Your samples cannot tell",
    ),
    Wrong(
        "the worlds of the lesson: N is 4",
        altered("03.diagnose", ("right * ranks", "right * 4"), ("right / ranks", "right / 4")),
        says="With this mistake, call",
    ),
    Wrong(
        "one call for each suspicion",
        altered(
            "03.diagnose",
            (
                "    gradient = step(batches[rank])",
                "    gradient = step(batches[rank])\n    for part in batches[rank]:\n"
                "        step([part])\n    step(batches[rank])",
            ),
        ),
        says="calls for one diagnosis; 3 are allowed".replace("calls ", "times "),
        loses=("at most three calls",),
    ),
    Wrong(
        "only rank 0 experiments",
        altered(
            "03.diagnose",
            (
                "    gradient = step(batches[rank])",
                "    if rank:\n        return 'right'\n    gradient = step(batches[rank])",
            ),
        ),
        says="a rank called `step` and another one did not",
    ),
    Wrong(
        "clearing is taken for counting again",
        altered(
            "03.diagnose",
            ('"last": lasts', '"again": lasts'),
            ('"again": (firsts', '"last": (firsts'),
        ),
        says="With this mistake, call",
        loses=BETWEEN,
    ),
    Wrong(
        "a sentence for a name",
        altered("03.diagnose", ('return "stale"', 'return "zero_grad is missing"')),
        says="Return one of the names in the table",
        loses=LEFT,
    ),
]  # fmt: skip
RIGHT["03.diagnose"] = [
    (
        "random samples in three micro-batches, and one question after the other",
        """
def diagnose(step, rank, ranks):
    dice = torch.Generator().manual_seed(5)
    data = [
        [1 + torch.rand(1 + 2 * r + m, generator=dice).double() for m in range(3)]
        for r in range(ranks)
    ]
    sums = [sum(data[r][m].sum().item() for r in range(ranks)) for m in range(3)]
    count = sum(len(part) for mine in data for part in mine)
    mean = sum(sums) / count
    mine = torch.cat(data[rank]).mean().item()
    first = step(data[rank])
    second = step(tuple(data[rank]))

    def seen(value):
        return abs(first - value) < 1e-9

    if abs(second - 2 * first) < 1e-9:
        return "stale"
    if seen(mean):
        return "right"
    if seen(mean * ranks):
        return "sum"
    if seen(mean / ranks):
        return "twice"
    if seen(mine):
        return "local"
    if seen(((sums[0] * ranks + sums[1]) * ranks + sums[2]) / count):
        return "again"
    last = sum(len(data[r][2]) for r in range(ranks))
    return "last" if seen(sums[2] / last) else "equal"
""",
    ),
    (
        "in float64",
        altered(
            "03.diagnose",
            ("torch.full((r + 2,), 3.0 * r * r)]", "torch.full((r + 2,), 3.0 * r * r).double()]"),
        ),
    ),
]
PROMISES["03.diagnose"] = {
    "the mean over all samples of all ranks": (*SIZES, ""),
    "no mistake: all samples of all ranks and micro-batches count the same": (*SIZES, ""),
    "nothing is sent: each rank has the mean over its own samples": (*SIZES, ""),
    "nothing is sent": (*SIZES, ""),
    "divided by the number of all samples": (*BETWEEN, ""),
    "every rank can compute what each mistake would give": None,
    "Choose samples for which no two mistakes give the same gradients": (*SIZES, ""),
    "the same on every rank": (*SIZES, ""),
    "Call `step` **at most three times**": ("at most three calls", ""),
    "All ranks call it together and equally often": (*SIZES, ""),
    "the same number of micro-batches on every rank": None,
}
ASSUMED = {
    "03.diagnose": {
        "frozen rank": "a rank has one number",
        "frozen ranks": "a job has one world",
    }
}
OTHER_SAMPLES = "with these samples, too, each name has its own gradient"
ONE_WORLD = "all ranks' samples are the same in a job, which has one world"
EQUIVALENT["03.diagnose"] = {
    "`3.0 * r * r` -> `3.0 * r`": OTHER_SAMPLES,
    "`10.0 + r` -> `10.0`": OTHER_SAMPLES,
    "`10.0 + r` -> `r`": OTHER_SAMPLES,
    "`10.0 + r` -> `10.0 - r`": OTHER_SAMPLES,
    "`10.0` -> `21.0`": OTHER_SAMPLES,
    "`2` -> `3`": OTHER_SAMPLES,
    "`2` -> `1`": OTHER_SAMPLES,
    "`3.0` -> `7.0`": OTHER_SAMPLES,
    "`firsts = sum((first.sum().item() for first, _ in batches))` -> the first one, kept": (
        ONE_WORLD
    ),
    "`first.sum` -> `first.mean`": "the first micro-batch has one sample",
    "`lasts = torch.cat([last for _, last in batches])` -> the first one, kept": ONE_WORLD,
    "`len(lasts)` -> `_kept.setdefault(15, len(lasts))`": ONE_WORLD,
    "`abs(step(batches[rank]) - gradient) > 1e-06` -> "
    "`abs(step(batches[rank]) - gradient) >= 1e-06`": "no difference is that small",
    "`1e-06` -> `1.000002`": "a stale step differs by more than that with these samples",
}

# -- what authors who had not read the judge got away with -----------------------------------------

WRONG["03.f1"] += [
    Wrong(
        "1 where nothing is there",
        altered("03.f1", ("if both else 0.0", "if both else 1.0")),
        says="is 1, but nothing is positive: if F1 would divide by 0, return 0",
        loses=("a rank without samples, a class without positives",),
    ),
]
