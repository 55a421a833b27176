"""Wrong answers to lesson 19 that people give, and the sentence that each must hear."""

from answers import Wrong
from answers.altered import altered

SAME = ("the arguments stay as they are",)
WRONG, RIGHT = {}, {}

# ---- 19.route ----

TOP = ("the k largest, and their probabilities",)
ARRIVAL = ("capacity in order of arrival",)
WEIGHT = ("capacity by weight",)
TIES = ("equal logits and weights",)
SIZES = ("float16, any size, no token",)


def route(*changes):
    return altered("19.route", *changes)


SOFTMAX = "logits.float().softmax(-1).gather(-1, order).flatten()"
SORTED = "order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]"
QUEUE = "queue = weights.argsort(descending=True, stable=True).tolist()"

WRONG["19.route"] = [
    Wrong(
        "weights add up to 1",
        route(
            (
                SOFTMAX,
                "logits.float().softmax(-1).gather(-1, order)\n"
                "    weights = (weights / weights.sum(-1, keepdim=True)).flatten()",
            )
        ),
        says="a softmax over all experts was asked for",
        loses=TOP,
    ),
    Wrong(
        "a softmax over the chosen",
        route(
            (SOFTMAX, "logits.float().gather(-1, order).softmax(-1).flatten()"),
            ('if by == "weight"', 'if by == "x"'),
        ),
        says="adds up to 1 for each token",
        loses=TOP,
    ),
    Wrong(
        "logits for weights",
        route((SOFTMAX, "logits.float().gather(-1, order).flatten()")),
        says="holds logits, not probabilities",
        loses=TOP,
    ),
    Wrong(
        "the smallest first",
        route((SORTED, SORTED + ".flip(-1)")),
        says="the one with the largest logit comes first",
        loses=TOP,
    ),
    Wrong(
        "no capacity",
        route(("if free[expert]:", "if True:")),
        says="an expert takes at most `capacity`",
        loses=ARRIVAL,
    ),
    Wrong(
        "all first choices first",
        route(
            (
                "queue = range(len(experts))",
                "queue = sorted(range(len(experts)), key=lambda c: c % k)",
            )
        ),
        says="They arrive token by token",
        loses=ARRIVAL,
    ),
    Wrong(
        "always by weight",
        route(('if by == "weight":', "if True:")),
        says="are those by weight",
        loses=ARRIVAL,
    ),
    Wrong(
        "always by arrival",
        route(('if by == "weight":', "if False:")),
        says="are those by arrival",
        loses=WEIGHT,
    ),
    Wrong(
        "one too few",
        route(("[capacity] *", "[capacity - 1] *")),
        says="one choice less",
        loses=ARRIVAL,
    ),
    Wrong(
        "one too many",
        route(("[capacity] *", "[capacity + 1] *")),
        says="one choice more",
        loses=ARRIVAL,
    ),
    Wrong(
        "weights of dropped choices stay",
        route(("experts[choice], weights[choice] = -1, 0.0", "experts[choice] = -1")),
        says="is not 0 where a choice was dropped",
        loses=ARRIVAL,
    ),
    Wrong(
        "the last number first among equals",
        route(
            (
                SORTED,
                "order = logits.shape[1] - 1 - logits.flip(-1).sort(dim=-1, descending=True, "
                "stable=True).indices[:, :k]",
            )
        ),
        says="the expert with the lower number comes first",
        loses=TIES,
    ),
    Wrong(
        "sorts probabilities",
        route((SORTED, SORTED.replace("logits.sort", "logits.float().softmax(-1).sort"))),
        says="experts is wrong",
        loses=SIZES,
    ),
    Wrong(
        "a softmax in float16",
        route(
            (SOFTMAX, SOFTMAX.replace("logits.float().softmax(-1)", "logits.softmax(-1).float()"))
        ),
        says="comes from a softmax in float16",
        loses=SIZES,
    ),
    Wrong(
        "e^logits as they are",
        route(
            (
                SOFTMAX,
                "(logits.float().exp() / logits.float().exp().sum(-1, keepdim=True))"
                ".gather(-1, order).flatten()",
            )
        ),
        says="(float16, large logits",
        loses=SIZES,
    ),
    Wrong(
        "logits written over",
        route((SOFTMAX, SOFTMAX + "\n    logits.zero_()")),
        says="which was handed in to be read",
        loses=SAME,
    ),
]
RIGHT["19.route"] = [
    (
        "cumulative sums of a one-hot matrix",
        """
def route(logits, k, capacity, by):
    tokens, number = logits.shape
    probabilities = torch.softmax(logits.to(torch.float32), 1)
    experts = torch.argsort(-logits.double(), dim=1, stable=True)[:, :k].contiguous()
    weights = torch.take_along_dim(probabilities, experts, 1)
    flat = experts.reshape(-1)
    queue = torch.arange(tokens * k)
    if by == "weight":
        queue = torch.argsort(-weights.reshape(-1), stable=True)
    taken = torch.nn.functional.one_hot(flat[queue], number).cumsum(0)
    place = torch.empty_like(flat)
    place[queue] = taken[torch.arange(tokens * k), flat[queue]]
    good = (place <= capacity).view(tokens, k)
    return torch.where(good, experts, -1), torch.where(good, weights, 0.0)
""",
    ),
]

# ---- 19.dispatch_combine ----

RESULT = ("each token's experts, weighted and added",)
GRADS = ("gradients of tokens, weights and experts",)
ROWS = ("counts first, then exactly the rows",)
EMPTY = ("ranks and experts without tokens",)
OTHER = ("another dtype",)


def dispatch(*changes):
    return altered("19.dispatch_combine", *changes)


ADDED = "return torch.zeros_like(tokens).index_add(0, order // k, weighted)"
BACKWARD = """        send, receive = ctx.splits
        back = gradient.new_empty(sum(send), gradient.shape[1])
        dist.all_to_all_single(back, gradient.contiguous(), send, receive)
        return back, None, None
"""
GATHERED = """
def dispatch_combine(tokens, experts, weights, number, compute):
    from torch.distributed.nn.functional import all_gather, reduce_scatter
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(tokens)]))
    longest = max(int(n) for n in sizes)
    pad = lambda x, v: torch.nn.functional.pad(x, (0, 0, 0, longest - len(x)), value=v)
    everyone = torch.cat(all_gather(pad(tokens, 0.0)))
    chosen = torch.cat(all_gather(pad(experts, -1)))
    scale = torch.cat(all_gather(pad(weights, 0.0)))
    out = torch.zeros_like(everyone)
    own = number // world
    for e in range(rank * own, rank * own + own):
        share = ((chosen == e) * scale).sum(1, keepdim=True)
        out = out + share * compute(e, everyone)
    parts = [p.contiguous() for p in out.split(longest)]
    return reduce_scatter(torch.empty_like(parts[0]), parts)[:len(tokens)]
"""
WRONG["19.dispatch_combine"] = [
    Wrong(
        "not weighted",
        dispatch(
            ("back * weights.flatten()[order, None]", "back + 0 * weights.flatten()[order, None]")
        ),
        says="is not multiplied by the weights",
        loses=RESULT,
    ),
    Wrong(
        "a mean",
        dispatch(
            (
                "back * weights.flatten()[order, None]",
                "back / k + 0 * weights.flatten()[order, None]",
            )
        ),
        says="is the mean over the choices",
        loses=RESULT,
    ),
    Wrong(
        "the own experts alone",
        dispatch(
            (
                "order = chosen.argsort(stable=True)[(chosen < 0).sum() :]",
                "order = (chosen // own == rank).nonzero()[:, 0]\n"
                "    order = order[chosen[order].argsort(stable=True)]",
            )
        ),
        says="lacks what experts on other ranks make",
        loses=RESULT,
    ),
    Wrong(
        "the first choice alone",
        dispatch(
            (
                "order = chosen.argsort(stable=True)[(chosen < 0).sum() :]",
                "order = chosen.argsort(stable=True)[(chosen < 0).sum() :]\n"
                "    order = order[order % k == 0]",
            )
        ),
        says="has the first choice alone",
        loses=RESULT,
    ),
    Wrong(
        "weighted before",
        dispatch(
            (
                "Exchange.apply(tokens[order // k], send, receive)",
                "Exchange.apply(tokens[order // k] * weights.flatten()[order, None], "
                "send, receive)",
            ),
            ("back * weights.flatten()[order, None]", "back"),
        ),
        says="weighs the tokens before the experts see them",
        loses=RESULT,
    ),
    Wrong(
        "left in the order of experts",
        dispatch(
            (
                ADDED,
                "every = torch.zeros_like(tokens).index_add(0, order // k, weighted)\n"
                "    return every.roll(1, 0)",
            )
        ),
        says="has the right rows in another order",
        loses=RESULT,
    ),
    Wrong(
        "overwritten, not added",
        dispatch((ADDED, "return torch.zeros_like(tokens).index_copy(0, order // k, weighted)")),
        says="is wrong: it is off",
        loses=RESULT,
    ),
    Wrong(
        "what comes is taken for sorted by expert",
        dispatch(
            (
                "parts = list(rows.split(coming.tolist()))",
                "parts = list(rows.split(coming.view(world, own).T.flatten().tolist()))",
            ),
            ("parts[expert::own]]", "parts[expert * world:(expert + 1) * world]]"),
            (
                "torch.cat(parts[expert::own]))",
                "torch.cat(parts[expert * world:(expert + 1) * world]))",
            ),
            (
                "parts[expert::own] = made.split(sizes)",
                "parts[expert * world:(expert + 1) * world] = made.split(sizes)",
            ),
        ),
        says="is wrong: it is off",
        loses=RESULT,
    ),
    Wrong(
        "no gradient through the exchange",
        dispatch((BACKWARD, "        return None, None, None\n")),
        says="the graph ends where rows travel",
        loses=GRADS,
    ),
    Wrong(
        "the gradient stays",
        dispatch(
            (
                BACKWARD,
                "        send, receive = ctx.splits\n"
                "        return gradient.new_zeros(sum(send), gradient.shape[1]),"
                " None, None\n",
            )
        ),
        says="is zero",
        loses=GRADS,
    ),
    Wrong(
        "averaged over the ranks",
        dispatch(("return back, None, None", "return back / dist.get_world_size(), None, None")),
        says="smaller by the number of ranks",
        loses=GRADS,
    ),
    Wrong("all tokens to all ranks", GATHERED, says="all-to-alls are enough", loses=ROWS),
    Wrong(
        "counts twice",
        dispatch(
            (
                "    send = counts.view",
                "    dist.all_to_all_single(coming, counts)\n    send = counts.view",
            )
        ),
        says="all-to-alls in forward; 3 are enough",
        loses=ROWS,
    ),
    Wrong(
        "all choices travel, dropped ones too",
        dispatch(
            (
                "order = chosen.argsort(stable=True)[(chosen < 0).sum() :]",
                "gone, chosen = chosen < 0, chosen.clamp(min=0)\n"
                "    order = chosen.argsort(stable=True)",
            ),
            (
                "back * weights.flatten()[order, None]",
                "back * (weights.flatten() * ~gone)[order, None]",
            ),
        ),
        says="The rows for other ranks",
        loses=ROWS,
    ),
    Wrong(
        "a call of compute for each rank",
        dispatch(
            (
                "made = compute(rank * own + expert, torch.cat(parts[expert::own]))\n"
                "        parts[expert::own] = made.split(sizes)",
                "parts[expert::own] = [\n"
                "            compute(rank * own + expert, p) for p in parts[expert::own]]",
            )
        ),
        says="collect the rows of an expert",
        loses=ROWS,
    ),
    Wrong(
        "empty experts left out",
        dispatch(
            (
                "    parts = list",
                "    if not len(rows):\n        rows = rows.detach()\n    parts = list",
            ),
            (
                "made = compute(rank * own + expert, torch.cat(parts[expert::own]))",
                "made = torch.cat(parts[expert::own])\n"
                "        made = compute(rank * own + expert, made) if len(made) else made",
            ),
        ),
        says="ranks without tokens and experts without",
        loses=EMPTY,
    ),
    Wrong(
        "a rank without tokens returns at once",
        dispatch(
            (
                "    chosen = experts.flatten()",
                "    if not len(tokens):\n"
                "        return tokens * 1\n    chosen = experts.flatten()",
            )
        ),
        says="ranks without tokens and experts without tokens",
        loses=EMPTY,
    ),
    Wrong(
        "float32 on the way",
        dispatch(
            (
                "Exchange.apply(tokens[order // k], send, receive)",
                "Exchange.apply(tokens[order // k].float(), send, receive)",
            )
        ),
        says="to have the same dtype",
        loses=OTHER,
    ),
    Wrong(
        "weights changed in place",
        dispatch(("    weighted = back", "    experts.clamp_(min=0)\n    weighted = back")),
        says="which was handed in to be read",
        loses=SAME,
    ),
]
RIGHT["19.dispatch_combine"] = [
    (
        "masks for the order, torch's exchange",
        """
def dispatch_combine(tokens, experts, weights, number, compute):
    from torch.distributed.nn.functional import all_to_all_single
    n, me = dist.get_world_size(), dist.get_rank()
    each = number // n
    where = [(experts == e).nonzero() for e in range(number)]
    token, slot = torch.cat(where).unbind(1)
    mine = torch.tensor([len(w) for w in where])
    theirs = torch.zeros_like(mine)
    dist.all_to_all_single(theirs, mine)
    out_sizes, in_sizes = mine.view(n, each).sum(1).tolist(), theirs.view(n, each).sum(1).tolist()
    came = all_to_all_single(tokens.new_empty(sum(in_sizes), tokens.shape[1]), tokens[token],
                             in_sizes, out_sizes)
    label = torch.arange(number).remainder(each).repeat_interleave(theirs)
    order = label.argsort(stable=True)
    pieces = came[order].split(torch.bincount(label, minlength=each).tolist())
    results = torch.cat([compute(me * each + e, piece) for e, piece in enumerate(pieces)])
    undone = torch.empty_like(order)
    undone[order] = torch.arange(len(order))
    home = all_to_all_single(tokens.new_empty(len(token), tokens.shape[1]), results[undone],
                             out_sizes, in_sizes)
    return torch.zeros_like(tokens).index_add(0, token, home * weights[token, slot].unsqueeze(1))
""",
    ),
]

# ---- 19.expert_gradients ----

VALUES = ("the gradient of the mean over all ranks",)
NORM = ("the norm of the whole model, once each",)
CLIP = ("all are clipped alike",)
ZEROS = ("experts without a gradient, zeros",)
GROUPS = ("each gradient to its own group, one number more",)


def gradients(*changes):
    return altered("19.expert_gradients", *changes)


PAIRS = "((dense, None), (experts, replicas))"
FLAT = "flat = torch.cat([p.grad.flatten() for p in parameters]) / world"
TOTAL = "norm = (square + sum(p.grad.square().sum() for p in dense)).sqrt()"
ADDED_UP = "dist.all_reduce(square, group=expert_group)"

WRONG["19.expert_gradients"] = [
    Wrong(
        "experts over all ranks",
        gradients((PAIRS, "((dense, None), (experts, None))")),
        says="is the mean over all ranks: those are different experts",
        loses=VALUES,
    ),
    Wrong(
        "divided by the replicas",
        gradients((FLAT, FLAT.replace("world", "dist.get_world_size(group)"))),
        says="is divided by the number of replicas",
        loses=VALUES,
    ),
    Wrong(
        "divided by the expert group",
        gradients(
            (
                FLAT,
                FLAT.replace(
                    "world", "(world if group is None else dist.get_world_size(expert_group))"
                ),
            )
        ),
        says="is divided by the size of the expert group",
        loses=VALUES,
    ),
    Wrong(
        "experts never divided",
        gradients((FLAT, FLAT.replace("world", "(world if group is None else 1)"))),
        says="is the sum over the replicas",
        loses=VALUES,
    ),
    Wrong(
        "experts left alone",
        gradients((PAIRS, "((dense, None),)")),
        says="is this rank's own: its replicas have shares, too",
        loses=VALUES,
    ),
    Wrong(
        "divided twice",
        gradients(
            (
                "p.grad.copy_(parts[i].view_as(p))",
                "p.grad.copy_(parts[i].view_as(p) / (1 if group is None else world))",
            )
        ),
        says="is divided by the number of ranks twice",
        loses=VALUES,
    ),
    Wrong(
        "dense over the replicas",
        gradients((PAIRS, "((dense, replicas), (experts, replicas))")),
        says="dense parameters are on every rank",
        loses=VALUES,
    ),
    Wrong(
        "dense summed",
        gradients((FLAT, FLAT.replace("world", "(1 if group is None else world)"))),
        says="is the sum over the ranks",
        loses=VALUES,
    ),
    Wrong(
        "dense squares added up, too",
        gradients(
            (
                "square = sum(p.grad.square().sum() for p in experts)",
                "square = sum(p.grad.square().sum() for p in [*experts, *dense])",
            ),
            (TOTAL, "norm = square.sqrt()"),
        ),
        says="once for each rank of the expert group",
        loses=NORM,
    ),
    Wrong(
        "the norm of this rank",
        gradients((ADDED_UP, "pass")),
        says="has this rank's experts alone",
        loses=NORM,
    ),
    Wrong(
        "squares added up over all ranks",
        gradients((ADDED_UP, "dist.all_reduce(square)")),
        says="counts each expert once for each replica",
        loses=NORM,
    ),
    Wrong(
        "everything over all ranks",
        gradients(
            (
                "square = sum(p.grad.square().sum() for p in experts)",
                "square = sum(p.grad.square().sum() for p in [*experts, *dense])",
            ),
            (ADDED_UP, "dist.all_reduce(square)"),
            (TOTAL, "norm = square.sqrt()"),
        ),
        says="counts everything once for each rank that has it",
        loses=NORM,
    ),
    Wrong(
        "no root",
        gradients((TOTAL, TOTAL.replace(".sqrt()", ""))),
        says="is the square of the norm",
        loses=NORM,
    ),
    Wrong(
        "the norm after clipping",
        gradients(("return norm", "return norm.clamp(max=max_norm)")),
        says="is that after clipping",
        loses=NORM,
    ),
    Wrong(
        "never clipped",
        gradients(("if norm > max_norm:", "if False:")),
        says="is not clipped",
        loses=CLIP,
    ),
    Wrong(
        "experts not clipped",
        gradients(("for p in [*dense, *experts]:", "for p in dense:")),
        says="is not clipped",
        loses=CLIP,
    ),
    Wrong(
        "always scaled",
        gradients(("if norm > max_norm:", "if norm > 0:")),
        says="is wrong",
        loses=VALUES,
    ),
    Wrong(
        "the square compared with max_norm",
        gradients(("if norm > max_norm:", "if norm**2 > max_norm:")),
        says="is not clipped",
        loses=CLIP,
    ),
    Wrong(
        "experts without a gradient left out",
        gradients(
            ("p.grad = torch.zeros_like(p)", "pass"),
            (
                PAIRS,
                "((dense, None), ([p for p in experts if p.grad is not None] or "
                "[torch.nn.Parameter(torch.zeros(0))], replicas))",
            ),
            (
                FLAT,
                "for p in parameters:\n            if p.grad is None:\n"
                "                p.grad = torch.zeros_like(p)\n        " + FLAT,
            ),
            (
                "square = sum(p.grad.square().sum() for p in experts)",
                "square = sum((p.grad.square().sum() for p in experts if p.grad is not None),"
                " torch.zeros(()))",
            ),
            (
                "for p in [*dense, *experts]:",
                "for p in [*dense, *(p for p in experts if p.grad is not None)]:",
            ),
        ),
        says="must make the same calls",
        loses=ZEROS,
    ),
    Wrong(
        "all squares from everywhere",
        gradients(
            (
                ADDED_UP,
                "size = dist.get_world_size(expert_group)\n"
                "    every = [torch.zeros_like(square) for _ in range(size)]\n"
                "    dist.all_gather(every, square, group=expert_group)\n    square = sum(every)",
            )
        ),
        says="All-reduces are enough",
        loses=GROUPS,
    ),
    Wrong(
        "zeros of the dense sent to the replicas",
        gradients(
            (
                "    square = sum",
                "    dist.all_reduce(torch.zeros(3), group=replicas)\n    square = sum",
            )
        ),
        says="are enough there",
        loses=GROUPS,
    ),
]
RIGHT["19.expert_gradients"] = [
    (
        "a call for each parameter, torch's norm",
        """
def reduce_and_clip(dense, experts, expert_group, replicas, max_norm):
    for p in experts:
        p.grad = torch.zeros_like(p.data) if p.grad is None else p.grad
        dist.all_reduce(p.grad, group=replicas)
    for p in dense:
        dist.all_reduce(p.grad)
    grads = [p.grad.div_(dist.get_world_size()) for p in [*dense, *experts]]
    squares = [g.norm() ** 2 for g in grads]
    lying = torch.stack(squares[len(dense):]).sum()
    dist.all_reduce(lying, group=expert_group)
    norm = float(lying + torch.stack(squares[:len(dense)]).sum()) ** 0.5
    factor = min(1.0, max_norm / (norm or 1.0)) if norm > max_norm else 1.0
    for g in grads:
        g.mul_(factor)
    return norm
""",
    ),
]

# ---- 19.balance ----

LOSS = ("the loss of all tokens together",)
SLOPE = ("its gradient for this rank's logits",)
NONE = ("ranks without tokens, one or all experts",)
MANY = ("bfloat16 and many tokens",)
ONCE = ("one all-reduce of 2E numbers",)


def balance(*changes):
    return altered("19.balance", *changes)


REDUCED = "dist.all_reduce(total)"
RETURN = "return share + ((factor * total[:number]).sum() - share).detach()"

WRONG["19.balance"] = [
    Wrong(
        "a mean of the ranks' losses",
        balance(
            (REDUCED, "pass"),
            (
                RETURN,
                "value = share.detach().clone()\n    dist.all_reduce(value)\n"
                "    world = dist.get_world_size()\n"
                "    return share / world + (value - share.detach()) / world",
            ),
        ),
        says="is the mean of the ranks' losses. A mean of products",
        loses=LOSS,
    ),
    Wrong(
        "the own loss",
        balance((REDUCED, "pass")),
        says="is that of the rank's own tokens",
        loses=LOSS,
    ),
    Wrong(
        "no factor E",
        balance(("factor = number * total", "factor = total")),
        says="lacks the factor E",
        loses=LOSS,
    ),
    Wrong(
        "shares that add up to k",
        balance(("/ choices / (choices / k)", "/ (choices / k) / (choices / k)")),
        says="add up to k",
        loses=LOSS,
    ),
    Wrong(
        "a sum for P",
        balance(("/ choices / (choices / k)", "/ choices")),
        says="P is a mean",
        loses=LOSS,
    ),
    Wrong(
        "counts twice",
        balance(
            (RETURN, "f = total[number:] / choices\n    return number * (f * f).sum() + 0 * share")
        ),
        says="P is a mean of probabilities",
        loses=LOSS,
    ),
    Wrong(
        "the first choice alone",
        balance(
            (
                "torch.bincount(experts.flatten(), minlength=number)",
                "torch.bincount(experts[:, 0], minlength=number)",
            ),
            ("number, k = logits.shape[1], experts.shape[1]", "number, k = logits.shape[1], 1"),
        ),
        says="counts the first choices alone",
        loses=LOSS,
    ),
    Wrong(
        "probabilities squared",
        balance(
            (
                RETURN,
                "p = total[:number] / (choices / k)\n    return number * (p * p).sum() + 0 * share",
            )
        ),
        says="f counts choices",
        loses=LOSS,
    ),
    Wrong(
        "no graph",
        balance((RETURN, "return (factor * total[:number]).sum()")),
        says="is not connected to the logits",
        loses=SLOPE,
    ),
    Wrong(
        "times the world",
        balance((RETURN, "share = share * dist.get_world_size()\n    " + RETURN)),
        says="larger by the number of ranks",
        loses=SLOPE,
    ),
    Wrong(
        "divided by the world",
        balance((RETURN, "share = share / dist.get_world_size()\n    " + RETURN)),
        says="smaller by the number of ranks",
        loses=SLOPE,
    ),
    Wrong(
        "the gradient of the own loss",
        balance(
            (
                RETURN,
                "mine = counts / counts.sum()\n"
                "    share = number * (mine * own / len(logits)).sum()\n    " + RETURN,
            )
        ),
        says="is that of the rank's own loss",
        loses=SLOPE,
    ),
    Wrong(
        "the sum in the graph",
        balance(
            (
                REDUCED,
                "import torch.distributed.nn.functional as graph\n"
                "    total = graph.all_reduce(total)",
            ),
            ("own.detach()", "own"),
            (RETURN, "return (factor * total[:number]).sum()"),
        ),
        says="larger by the number of ranks",
        loses=SLOPE,
    ),
    Wrong(
        "two all-reduces",
        balance((REDUCED, "dist.all_reduce(total[:number])\n    dist.all_reduce(total[number:])")),
        says="Both sums fit into one",
        loses=ONCE,
    ),
    Wrong(
        "tokens counted, too",
        balance(
            (
                "total = torch.cat([own.detach(), counts.to(own.dtype)])",
                "total = torch.cat([own.detach(), counts.to(own.dtype), own.new_ones(1)])",
            ),
            (
                "choices = total[number:].sum()",
                "total = total[:-1]\n    choices = total[number:].sum()",
            ),
        ),
        says="A count and a probability for each expert",
        loses=ONCE,
    ),
    Wrong(
        "all logits gathered",
        balance(
            (
                REDUCED,
                "sizes = [torch.zeros_like(total) for _ in range(dist.get_world_size())]\n"
                "    dist.all_gather(sizes, total)\n    total = sum(sizes)",
            )
        ),
        says="One all-reduce is enough",
        loses=ONCE,
    ),
    Wrong(
        "a softmax in bfloat16",
        balance(("logits.float().softmax(-1).sum(0)", "logits.softmax(-1).sum(0).float()")),
        says=", which is wrong",
        loses=MANY,
    ),
    Wrong(
        "a mean over no token",
        balance(
            (
                "own = logits.float().softmax(-1).sum(0)",
                "own = logits.float().softmax(-1).mean(0) * len(logits)",
            )
        ),
        says="is nan",
        loses=NONE,
    ),
    Wrong(
        "no graph where no token is",
        balance(
            (
                "    share = (factor",
                "    if len(logits) == 0:\n        return (factor * total[:number]).sum()\n"
                "    share = (factor",
            )
        ),
        says="it has no token: backward() has to work there",
        loses=NONE,
    ),
    Wrong(
        "counted in bfloat16",
        balance(("counts.to(own.dtype)", "counts.bfloat16().to(own.dtype)")),
        says=", which is wrong",
        loses=MANY,
    ),
    Wrong(
        "probabilities over tokens",
        balance(("softmax(-1)", "softmax(0)")),
        says=", which is wrong",
        loses=LOSS,
    ),
    Wrong(
        "experts sorted in place",
        balance((REDUCED, REDUCED + "\n    experts.copy_(experts.flip(-1))")),
        says="which was handed in to be read",
        loses=SAME,
    ),
]
RIGHT["19.balance"] = [
    (
        "one-hot, a function with its own backward",
        """
class Balanced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, experts):
        n, e = logits.shape
        p = torch.softmax(logits.to(torch.float32), 1)
        hot = torch.nn.functional.one_hot(experts, e).sum((0, 1)).float()
        both = torch.stack([hot, p.sum(0)])
        dist.all_reduce(both)
        tokens = both[0].sum() / experts.shape[1]
        slope = e * both[0] / both[0].sum() / tokens
        ctx.save_for_backward(p, slope)
        ctx.dtype = logits.dtype
        return slope @ both[1]

    @staticmethod
    def backward(ctx, gradient):
        p, slope = ctx.saved_tensors
        inner = p * (slope - (p * slope).sum(1, keepdim=True))
        return (gradient * inner).to(ctx.dtype), None


def balance_loss(logits, experts):
    return Balanced.apply(logits, experts)
""",
    ),
]

# ---- 19.place ----

FITS = ("every expert lies somewhere, and fits",)
EVEN = ("no rank over 1.2 times the mean",)
TIGHT = ("as many slots as experts",)
EDGE = ("one rank, one expert, no tokens",)


def place(*changes):
    return altered("19.place", *changes)


NEXT = "copies[max(more, key=lambda e: counts[e] / copies[e])] += 1"
LEAST = "rank = min(free, key=lambda r: loads[r])"

WRONG["19.place"] = [
    Wrong(
        "in order",
        "def place(counts, ranks, slots):\n"
        "    return [p.tolist() for p in torch.arange(len(counts)).tensor_split(ranks)]\n",
        says="Give it another slot",
        loses=EVEN,
    ),
    Wrong(
        "in strides",
        "def place(counts, ranks, slots):\n"
        "    return [list(range(r, len(counts), ranks)) for r in range(ranks)]\n",
        says="Give it another slot",
        loses=EVEN,
    ),
    Wrong(
        "no second slot", place(("if more:", "if False:")), says="Give it another slot", loses=EVEN
    ),
    Wrong(
        "two slots at most",
        place(("if copies[e] < ranks]", "if copies[e] < min(ranks, 2)]")),
        says="where it lies does not help",
        loses=EVEN,
    ),
    Wrong(
        "copies of the expert with most tokens alone",
        place((NEXT, "copies[max(more, key=lambda e: counts[e])] += 1")),
        says="times the mean",
        loses=EVEN,
    ),
    Wrong(
        "copies in turn",
        place((NEXT, "copies[min(more, key=lambda e: copies[e])] += 1")),
        says="times the mean",
        loses=EVEN,
    ),
    Wrong(
        "the first free rank", place((LEAST, "rank = free[0]")), says="times the mean", loses=EVEN
    ),
    Wrong(
        "the rank with most free slots",
        place((LEAST, "rank = min(free, key=lambda r: len(placed[r]))")),
        says="times the mean",
        loses=TIGHT,
    ),
    Wrong(
        "copies count as whole experts",
        place(("loads[rank] += counts[e] / copies[e]", "loads[rank] += counts[e]")),
        says="times the mean",
        loses=EVEN,
    ),
    Wrong(
        "copies on one rank",
        place((" and e not in placed[r]]", "]")),
        says="twice, which halves nothing",
        loses=FITS,
    ),
    Wrong(
        "slots forgotten",
        place(("if len(placed[r]) < slots and", "if")),
        says="experts, and 3 slots",
        loses=FITS,
    ),
    Wrong(
        "experts without tokens left out",
        place(
            (
                "in sorted(range(len(counts)), key",
                "in sorted([e for e in range(len(counts)) if counts[e]], key",
            )
        ),
        says="lies nowhere",
        loses=FITS,
    ),
    Wrong(
        "the ranks of each expert",
        place(
            (
                "return placed",
                "return [[r for r in range(ranks) if e in placed[r]] for e in range(len(counts))]",
            )
        ),
        says="lists, for",
        loses=FITS,
    ),
    Wrong(
        "smallest first",
        place(("(-copies[e], -counts[e] / copies[e])", "(copies[e], counts[e] / copies[e])")),
        says="rank 0",
        loses=FITS,
    ),
    Wrong(
        "counts sorted in place",
        place(("    copies =", "    counts.sort(reverse=True)\n    copies =")),
        says="times the mean",
        loses=EVEN,
    ),
    Wrong(
        "a count added",
        place(("    return placed", "    counts.append(0)\n    return placed")),
        says="which was handed in to be read",
        loses=SAME,
    ),
]
RIGHT["19.place"] = [
    (
        "a heap for the copies, heaviest parts first",
        """
import heapq


def place(counts, ranks, slots):
    number = len(counts)
    heap = [(-c, e) for e, c in enumerate(counts)]
    heapq.heapify(heap)
    copies, left = [1] * number, ranks * slots - number
    while left and heap:
        _, e = heapq.heappop(heap)
        if copies[e] < ranks:
            copies[e] += 1
            left -= 1
            heapq.heappush(heap, (-counts[e] / copies[e], e))
    load, lists = [0.0] * ranks, [set() for _ in range(ranks)]
    many = sorted(range(number), key=lambda e: (copies[e], counts[e] / copies[e]), reverse=True)
    for e in many:
        order = sorted((r for r in range(ranks) if len(lists[r]) < slots), key=lambda r: load[r])
        for r in order[:copies[e]]:
            lists[r].add(e)
            load[r] += counts[e] / min(copies[e], len(order))
    return [sorted(own) for own in lists]
""",
    ),
]

PROMISES = {
    "19.route": {
        "Each token goes to the k experts with the largest logits": (*TOP, ""),
        "of equal logits the expert": (*TIES, "ties"),
        "a softmax over **all** experts in float32": (*SIZES, "other"),
        "at most `capacity` choices": (*ARRIVAL, "arrival"),
        'If `by` is "arrival"': (*ARRIVAL, "arrival"),
        'If `by` is "weight"': (*WEIGHT, "weight"),
        "its expert becomes −1": (*ARRIVAL, "arrival"),
        "The arguments stay as they are": (*SAME, ""),
        "int64 and float32, both (tokens, k)": (*TOP, ""),
        "float32 or float16, of any size": (*SIZES, "other"),
        "perhaps no token": (*SIZES, "other"),
        "at least 1, perhaps more than tokens": (*TIES, "ties"),
    },
    "19.dispatch_combine": {
        "equally many on each": (*RESULT, ""),
        "each times its weight": (*RESULT, ""),
        "A choice of −1 was dropped": (*RESULT, ""),
        "call it at most once for each of them": (*ROWS, ""),
        "`compute` works on this rank's own experts alone": (*ROWS, ""),
        "in one all-to-all of one integer per expert": (*ROWS, ""),
        "then one all-to-all brings the tokens": (*ROWS, ""),
        "Nothing else travels": (*ROWS, ""),
        "In `backward()` two all-to-alls": (*GRADS, ""),
        "A rank may have no tokens": (*EMPTY, "edge"),
        "It must still take part": (*EMPTY, "edge"),
        "What was handed in stays as it is": (*SAME, ""),
        "perhaps none": (*EMPTY, "edge"),
        "there may be no row": (*EMPTY, "edge"),
        "float32 or float64, and need gradients": (*OTHER, "other"),
    },
    "19.expert_gradients": {
        "Each rank's loss was the mean over its own tokens": None,
        "The loss to step with is the mean over all ranks' losses": (*VALUES, ""),
        "the ranks of `expert_group` have different experts": (*VALUES, ""),
        "The dense parameters are on every rank": None,
        "holds the shares of all tokens": None,
        "Give every parameter the gradient of that loss": (*VALUES, ""),
        "perhaps on one replica alone": (*ZEROS, "edge"),
        "counts every dense parameter once": (*NORM, ""),
        "all gradients are multiplied by": (*CLIP, "clip"),
        "the same on every rank": (*NORM, ""),
        "one number among the expert group": (*GROUPS, ""),
        "nothing more, all by all-reduce": (*GROUPS, ""),
        "The parameters stay as they are": (*VALUES, ""),
        "at least one each, float32": (*VALUES, ""),
        "is never None": None,
        "perhaps it alone": (*VALUES, ""),
        "The gradients may all be zero": (*ZEROS, "edge"),
    },
    "19.balance": {
        "f_i is the share of all choices": (*LOSS, ""),
        "it is 1 if all experts get equally many": None,
        "Ranks may have different numbers of tokens, or none": (*NONE, "edge"),
        "Return this loss on every rank": (*LOSS, ""),
        "gives this rank's logits exactly its gradient": (*SLOPE, ""),
        "and sends nothing": (*ONCE, ""),
        "One all-reduce of at most 2E numbers": (*ONCE, ""),
        "What was handed in stays as it is": (*SAME, ""),
    },
    "19.place": {
        "Every rank has `slots` slots": (*FITS, ""),
        "at most once on each": (*FITS, ""),
        "every expert lies somewhere": (*FITS, ""),
        "no rank has more than **1.2 times** the mean": (*EVEN, ""),
        "In all cases there is such a placement": None,
        "The arguments stay as they are": (*SAME, ""),
        "For each rank the list of its experts": (*FITS, ""),
        "at least the number of experts": (*TIGHT, "tight"),
    },
}
LAST = "logits have two dimensions"
FREE = "the order of an expert's rows is its own, and undone on the way back"
WITHIN = "it only orders experts with as many copies, and each order meets the bound"
EQUIVALENT = {
    "19.route": {
        "`logits.sort(dim=-1, descending=True, stable=True)` -> "
        "`logits.sort(descending=True, stable=True)`": "sort takes the last dimension by itself",
        "`-1` -> `1` (#5)": LAST,
        "`-1` -> `1` (#3)": LAST,
        "`-1` -> `1` (#6)": LAST,
        "`weights = logits.float().softmax(-1).gather(-1, order).fl...` -> twice": "the same again",
    },
    "19.dispatch_combine": {
        "`rows.contiguous()` -> `rows`": "what an index or cat makes is contiguous",
        "`gradient.contiguous()` -> `gradient`": "here it comes from an index or from cat",
        "`chosen.argsort(stable=True)` -> `chosen.argsort()`": FREE,
        "`True` -> `False`": FREE,
    },
    "19.expert_gradients": {
        "`world = dist.get_world_size()` -> the first one, kept": "a process has one world",
        "`torch.zeros_like(p)` -> `torch.zeros_like(p, dtype=torch.float32)`": "p is float32",
        "`norm > max_norm` -> `norm >= max_norm`": "then it is multiplied by 1",
    },
    "19.balance": {
        "`-1` -> `1`": LAST,
        "`own.detach()` -> `own`": "what is returned has its gradient from the share alone",
        "`counts.to(own.dtype)` -> `counts`": "cat gives both the wider dtype",
        "`own.dtype` -> `torch.float32`": "own is float32",
    },
    "19.place": {
        "`len(counts)` -> `len(counts) + 1`": "copies of an expert that nothing asks for",
        "`0.0` -> `1.0`": "all ranks begin alike",
        "`-counts[e] / copies[e]` -> `-counts[e]`": WITHIN,
        "`copies[e]` -> `copies[0]` (#4)": WITHIN,
        "`copies[e]` -> `copies[-1]` (#4)": WITHIN,
        "`copies[e]` -> `copies[e - 1]` (#5)": WITHIN,
        "`copies[e]` -> `copies[0]` (#5)": WITHIN,
        "`copies[e]` -> `copies[-1]` (#5)": WITHIN,
    },
}
