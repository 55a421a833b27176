"""Wrong answers to lesson 18 that people give, and the sentence that each must hear."""

from answers import Wrong
from answers.altered import altered

SAME = ("the arguments stay as they are",)

# ---- 18.merge ----

BOTH = ("attention to both sets of keys",)
LARGE = ("scores of any size",)
HIDDEN = ("queries that see no key",)
SHAPES = ("other shapes, layouts and dtypes",)

MERGE = """
def merge(out, lse, other_out, other_lse):
    {top}
    first, second = {weights}
    result = {out}
    return result.to({dtype}), {lse}
"""
SOLVED_MERGE = {
    "top": "top = torch.maximum(lse, other_lse).nan_to_num(neginf=0.0)",
    "weights": "torch.exp(lse - top), torch.exp(other_lse - top)",
    "out": "(first[..., None] * out + second[..., None] * other_out)"
    " / (first + second).clamp(min=1e-30)[..., None]",
    "dtype": "out.dtype",
    "lse": "top + torch.log(first + second)",
}


def merged(**wrong):
    return MERGE.format(**(SOLVED_MERGE | wrong))


WRONG = {}
WRONG["18.merge"] = [
    Wrong(
        "e^lse as it is",
        merged(top="top = 0.0"),
        says="subtract the larger lse before e^",
        loses=LARGE,
    ),
    Wrong(
        "the mean of both", merged(out="(out + other_out) / 2"), says="as if both sets", loses=BOTH
    ),
    Wrong("the sum of both", merged(out="out + other_out"), says="is the sum of both", loses=BOTH),
    Wrong(
        "weights exchanged",
        merged(weights="torch.exp(other_lse - top), torch.exp(lse - top)"),
        says="has the two weights exchanged",
        loses=BOTH,
    ),
    Wrong(
        "not divided",
        merged(out="first[..., None] * out + second[..., None] * other_out"),
        says="is not divided by the sum of the weights",
        loses=BOTH,
    ),
    Wrong(
        "the larger lse",
        merged(lse="torch.maximum(lse, other_lse)"),
        says="is the larger of the two",
        loses=BOTH,
    ),
    Wrong(
        "the lse added",
        merged(lse="lse + other_lse"),
        says="which is the log of a product",
        loses=BOTH,
    ),
    Wrong(
        "the sum without its logarithm",
        merged(lse="torch.exp(lse) + torch.exp(other_lse)"),
        says="and not its logarithm",
        loses=BOTH,
    ),
    Wrong(
        "the better set alone",
        merged(out="torch.where((lse > other_lse)[..., None], out, other_out)"),
        says="The other has a weight, too",
        loses=BOTH,
    ),
    Wrong(
        "weighted by lse",
        merged(
            weights="lse, other_lse",
            out="(first[..., None] * out + second[..., None] * other_out)"
            " / (first + second)[..., None]",
        ),
        says="The weight of a set is e^lse",
        loses=BOTH,
    ),
    Wrong(
        "nan where both are masked",
        merged(top="top = torch.maximum(lse, other_lse)"),
        says="-inf - (-inf) is nan",
        loses=HIDDEN,
    ),
    Wrong(
        "a very small number in place of -inf",
        merged(
            top="lse, other_lse = lse.clamp(min=-1e9), other_lse.clamp(min=-1e9)\n"
            "    top = torch.maximum(lse, other_lse)"
        ),
        says="it must stay -inf",
        loses=HIDDEN,
    ),
    Wrong(
        "lse changed in place",
        altered(
            "18.merge",
            ("torch.logaddexp(lse, other_lse)", "torch.logaddexp(lse, other_lse, out=lse)"),
            ("for one in (lse, other_lse)", "for one in (before, other_lse)"),
            ("    both =", "    before = lse.clone()\n    both ="),
        ),
        says="which was handed in to be read",
        loses=SAME,
    ),
    Wrong(
        "the dtype of the weights",
        merged(dtype="torch.float32"),
        says="has dtype float32",
        loses=SHAPES,
    ),
    Wrong(
        "three dimensions assumed",
        merged(
            out="torch.einsum('hq,hqd->hqd', first / (first + second).clamp(min=1e-30), out)"
            " + torch.einsum('hq,hqd->hqd', second / (first + second).clamp(min=1e-30), other_out)"
        ),
        says="RuntimeError",
        loses=SHAPES,
    ),
]
RIGHT = {}
RIGHT["18.merge"] = [
    (
        "a sigmoid of the difference",
        """
def merge(out, lse, other_out, other_lse):
    none = lse.isneginf() & other_lse.isneginf()
    share = torch.sigmoid(other_lse - lse).masked_fill(none, 0.0).unsqueeze(-1)
    both = torch.where(none, lse, torch.maximum(lse, other_lse)
                       + torch.log1p(torch.exp(-(lse - other_lse).abs())))
    return (out.to(share.dtype) + share * (other_out.to(share.dtype) - out.to(share.dtype))
            ).to(out.dtype), both
""",
    ),
    (
        "a softmax of two",
        """
def merge(out, lse, other_out, other_lse):
    pair = torch.stack([lse, other_lse], -1)
    shares = torch.softmax(pair, -1).nan_to_num()
    means = torch.stack([out, other_out], -1)
    mixed = (means.to(shares.dtype) * shares[..., None, :]).sum(-1)
    return mixed.to(out.dtype), pair.logsumexp(-1)
""",
    ),
    ("the largest taken out by hand", merged()),
]

# ---- 18.ring_attention ----

WHOLE = ("attention to the whole sequence",)
SHARED = ("shared heads, another dtype",)
ROUNDS = ("N - 1 rounds, a block each, to one neighbour",)
FLIGHT = ("the next block travels while one is attended to",)
TWO = ("at most two blocks at once",)

RING = """
def ring_attention(attend, q, k, v, lengths, causal):
    rank, world = dist.get_rank(), dist.get_world_size()
    starts = {starts}
    so_far = None
    {before}
    for turn in range({rounds}):
        owner = {owner}
        {early}
        mask = None
        if {causal}:
            mask = {mask}
        {attend}
        {late}
    return so_far[0]
"""
START = """transfers, coming = [], None
        if turn < {last}:
            length = lengths[(owner - 1) % world]
            coming = [{buffer} for x in (k, v)]
            for have, want in zip((k, v), coming):
                transfers.append(dist.isend(have, {to}))
                transfers.append(dist.irecv(want, {source}))"""
WAIT = """for transfer in transfers:
            transfer.wait()
        k, v = coming or (k, v)"""
SOLVED_START = {
    "last": "world - 1",
    "buffer": "x.new_empty(len(x), length, x.shape[2])",
    "to": "(rank + 1) % world",
    "source": "(rank - 1) % world",
}
SOLVED_RING = {
    "starts": "[sum(lengths[:r]) for r in range(world)]",
    "before": "pass",
    "rounds": "world",
    "owner": "(rank - turn) % world",
    "early": START.format(**SOLVED_START),
    "causal": "causal",
    "mask": "starts[owner] + torch.arange(k.shape[1]) <= "
    "(starts[rank] + torch.arange(q.shape[1]))[:, None]",
    "attend": "so_far = attend(q, k, v, mask, so_far)",
    "late": WAIT,
}


def ring(**wrong):
    return RING.format(**(SOLVED_RING | wrong))


def started(**wrong):
    return START.format(**(SOLVED_START | wrong))


PADDED = """
def ring_attention(attend, q, k, v, lengths, causal):
    rank, world = dist.get_rank(), dist.get_world_size()
    starts = [sum(lengths[:r]) for r in range(world)]
    pairs = []
    for x in (k, v):
        padded = x.new_zeros(x.shape[0], max(lengths), x.shape[2])
        padded[:, :x.shape[1]] = x
        every = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(every, padded)
        pairs.append([one[:, :n] for one, n in zip(every, lengths)])
    so_far = None
    for owner, (k, v) in enumerate(zip(*pairs)):
        mask = None
        if causal:
            queries = (starts[rank] + torch.arange(q.shape[1]))[:, None]
            mask = starts[owner] + torch.arange(k.shape[1]) <= queries
        so_far = attend(q, k, v, mask, so_far)
    return so_far[0]
"""
TO_ALL = """
def ring_attention(attend, q, k, v, lengths, causal):
    rank, world = dist.get_rank(), dist.get_world_size()
    starts = [sum(lengths[:r]) for r in range(world)]
    transfers, blocks = [], {}
    for step in range(1, world):
        source = (rank - step) % world
        blocks[source] = [x.new_empty(len(x), lengths[source], x.shape[2]) for x in (k, v)]
        for have, want in zip((k, v), blocks[source]):
            transfers += [dist.isend(have, (rank + step) % world), dist.irecv(want, source)]
    blocks[rank], so_far = (k, v), None
    for step in range(world):
        owner = (rank - step) % world
        mask = None
        if causal:
            queries = (starts[rank] + torch.arange(q.shape[1]))[:, None]
            mask = starts[owner] + torch.arange(lengths[owner]) <= queries
        so_far = attend(q, *blocks[owner], mask, so_far)
        if step == 0:
            for transfer in transfers:
                transfer.wait()
    return so_far[0]
"""
BLOCKING = """coming = None
        if turn < world - 1:
            length = lengths[(owner - 1) % world]
            coming = [x.new_empty(len(x), length, x.shape[2]) for x in (k, v)]
            for have, want in zip((k, v), coming):
                sending = dist.isend(have, (rank + 1) % world)
                dist.recv(want, (rank - 1) % world)
                sending.wait()"""

WRONG["18.ring_attention"] = [
    Wrong(
        "waits and then attends",
        ring(early=BLOCKING, late="k, v = coming or (k, v)"),
        says="waited for the next block before it attended",
        loses=FLIGHT,
    ),
    Wrong(
        "attends and then sends",
        ring(early="pass", late=started() + "\n        " + WAIT),
        says="only after it had attended",
        loses=FLIGHT,
    ),
    Wrong(
        "receives early, sends late",
        ring(
            early="""transfers, coming = [], None
        if turn < world - 1:
            length = lengths[(owner - 1) % world]
            coming = [x.new_empty(len(x), length, x.shape[2]) for x in (k, v)]
            transfers = [dist.irecv(want, (rank - 1) % world) for want in coming]""",
            late="""if turn < world - 1:
            transfers += [dist.isend(have, (rank + 1) % world) for have in (k, v)]
        """
            + WAIT,
        ),
        says="began to send the next block only after",
        loses=FLIGHT,
    ),
    Wrong("all-gather", PADDED, says="A ring sends and receives, no more", loses=ROUNDS),
    Wrong("each to all", TO_ALL, says="All blocks go the same way", loses=ROUNDS),
    Wrong(
        "N rounds",
        ring(early=started(last="(world if world > 1 else 0)")),
        says="each block came home",
        loses=ROUNDS,
    ),
    Wrong(
        "all send before any receives",
        ring(
            early="""coming = None
        if turn < world - 1:
            length = lengths[(owner - 1) % world]
            coming = [x.new_empty(len(x), length, x.shape[2]) for x in (k, v)]
            for have in (k, v):
                dist.send(have, (rank + 1) % world)
            for want in coming:
                dist.recv(want, (rank - 1) % world)""",
            late="k, v = coming or (k, v)",
        ),
        says="waits in",
        loses=WHOLE,
    ),
    Wrong(
        "a mask of local places",
        ring(mask="torch.arange(k.shape[1]) <= torch.arange(q.shape[1])[:, None]"),
        says="has a mask of local places",
        loses=WHOLE,
    ),
    Wrong(
        "a token does not see itself",
        ring(mask=SOLVED_RING["mask"].replace("<=", "<")),
        says="it sees its own place, too",
        loses=WHOLE,
    ),
    Wrong("no mask", ring(causal="False"), says="is without the causal mask", loses=WHOLE),
    Wrong("a mask always", ring(causal="True"), says="and here every token sees all", loses=WHOLE),
    Wrong(
        "causal in the own block alone",
        ring(causal="causal and owner == rank"),
        says="in the rank's own block alone",
        loses=WHOLE,
    ),
    Wrong(
        "the block of the rank ahead",
        ring(mask=SOLVED_RING["mask"].replace("starts[owner]", "starts[(rank + turn) % world]")),
        says="has the mask of another rank's block",
        loses=WHOLE,
    ),
    Wrong(
        "parts of equal length",
        ring(starts="[r * q.shape[1] for r in range(world)]"),
        says="takes all parts to be as long as its own",
        loses=WHOLE,
    ),
    Wrong(
        "buffers as long as the own block",
        ring(early=started(buffer="torch.empty_like(x)")),
        says="killed by SIGABRT",
        loses=WHOLE,
    ),
    Wrong(
        "the own block alone",
        ring(rounds="1", early="pass", late="pass"),
        says="to the rank's own keys alone: what came was not used",
        loses=WHOLE,
    ),
    Wrong(
        "one round too few",
        ring(rounds="max(world - 1, 1)", early=started(last="world - 2")),
        says="lacks the keys of the next rank",
        loses=WHOLE,
    ),
    Wrong(
        "what came is not used",
        ring(
            before="mine = k, v",
            mask="torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()",
            attend="so_far = attend(q, *mine, mask, so_far)",
        ),
        says="what came was not used",
        loses=WHOLE,
    ),
    Wrong(
        "two ranks assumed",
        ring(early=started(to="1 - rank", source="1 - rank")),
        says="killed by SIGABRT",
        loses=WHOLE,
    ),
    Wrong(
        "received blocks are kept",
        ring(before="kept = []", late=WAIT + "\n        kept.append((k, v))"),
        says="it holds",
        loses=TWO,
    ),
    Wrong(
        "sends are never waited for",
        ring(late=WAIT.replace("in transfers:", "in transfers[1::2]:")),
        says="until a send is complete its tensor must not be written to",
        loses=ROUNDS,
    ),
    Wrong(
        "float32 buffers",
        ring(early=started(buffer="torch.empty(len(x), length, x.shape[2])")),
        says="killed by SIGABRT",
        loses=SHARED,
    ),
    Wrong(
        "as many heads of keys as of queries",
        ring(early=started(buffer="x.new_zeros(len(q), length, x.shape[2])")),
        says="is wrong: it is off",
        loses=SHARED,
    ),
    Wrong(
        "its own softmax",
        ring(
            before="blocks = []",
            attend="blocks.append((k, v, mask))\n        so_far = (q,)",
        ).replace(
            "    return so_far[0]",
            """    keys, values = (torch.cat([b[i] for b in blocks], 1) for i in (0, 1))
    mask = torch.cat([b[2] for b in blocks], 1) if causal else None
    return torch.nn.functional.scaled_dot_product_attention(q, keys, values, mask)""",
        ),
        says="is wrong: it is off",
        loses=WHOLE,
    ),
    Wrong(
        "lengths turned into starts in place",
        ring(before="lengths.append(0)").replace(
            "lengths[(owner - 1) % world]", "lengths[:-1][(owner - 1) % world]"
        ),
        says="which was handed in to be read",
        loses=SAME,
    ),
    Wrong(
        "keys and values in both directions",
        ring(
            early="""transfers, coming = [], None
        if turn < world - 1:
            up, down = lengths[(rank - turn - 1) % world], lengths[(rank + turn + 1) % world]
            coming = [k.new_empty(len(k), n, k.shape[2]) for n in (up, up, down, down)]
            if turn == 0:
                both = [k, v, k, v]
            for have, want, step in zip(both, coming, (1, 1, -1, -1)):
                transfers.append(dist.isend(have, (rank + step) % world))
                transfers.append(dist.irecv(want, (rank - step) % world))""",
            late="""for transfer in transfers:
            transfer.wait()
        if coming:
            both = coming
            k, v = coming[:2]""",
        ),
        says="sent to both neighbours",
        loses=ROUNDS,
    ),
]
GATHERED = """
def ring_attention(attend, q, k, v, lengths, causal):
    rank, world = dist.get_rank(), dist.get_world_size()
    starts = [sum(lengths[:r]) for r in range(world)]
    blocks = {{rank: (k, v)}}
    for turn in range(world - 1):
        owner = (rank - turn - 1) % world
        coming = [x.new_empty(len(x), lengths[owner], x.shape[2]) for x in (k, v)]
        transfers = []
        for have, want in zip(blocks[(owner + 1) % world], coming):
            transfers.append(dist.isend(have, (rank + 1) % world))
            transfers.append(dist.irecv(want, (rank - 1) % world))
        for transfer in transfers:
            transfer.wait()
        blocks[owner] = coming
    {attend}
"""
WRONG["18.ring_attention"] += [
    Wrong(
        "all blocks first, then one attend",
        GATHERED.format(
            attend="""mask = None
    if causal:
        places = starts[rank] + torch.arange(q.shape[1])
        mask = torch.arange(sum(lengths)) <= places[:, None]
    k, v = (torch.cat([blocks[r][i] for r in range(world)], 1) for i in (0, 1))
    return attend(q, k, v, mask, None)[0]"""
        ),
        says="with keys that are not one rank's block",
        loses=FLIGHT,
    ),
    Wrong(
        "all blocks first, then one after the other",
        GATHERED.format(
            attend="""so_far, places = None, starts[rank] + torch.arange(q.shape[1])
    for owner, (k, v) in blocks.items():
        mask = None
        if causal:
            mask = starts[owner] + torch.arange(lengths[owner]) <= places[:, None]
        so_far = attend(q, k, v, mask, so_far)
    return so_far[0]"""
        ),
        says="waited for the next block before it attended",
        loses=FLIGHT + TWO,
    ),
    Wrong(
        "padded to the longest part",
        ring(
            early=started(buffer="x.new_empty(len(x), max(lengths), x.shape[2])"),
            before="pad = torch.nn.functional.pad\n"
            "    k, v = (pad(x, (0, 0, 0, max(lengths) - x.shape[1])) for x in (k, v))",
            attend="now = [x[:, :lengths[owner]] for x in (k, v)]\n"
            "        so_far = attend(q, *now, mask, so_far)",
            mask=SOLVED_RING["mask"].replace("k.shape[1]", "lengths[owner]"),
        ),
        says="It has to pass on every block but that",
        loses=ROUNDS,
    ),
    Wrong(
        "forgets what it attended to",
        ring(attend="so_far = attend(q, k, v, mask)"),
        says="is attention to the last block alone",
        loses=WHOLE,
    ),
    Wrong(
        "a mean of the blocks' results",
        ring(
            before="outs = []",
            attend="outs.append(attend(q, k, v, mask)[0])\n"
            "        so_far = [sum(outs) / len(outs)]",
        ),
        says="is the mean of the blocks' results",
        loses=WHOLE,
    ),
    Wrong(
        "a shift by all_to_all",
        ring(
            early="""coming = None
        if turn < world - 1:
            counts = [x.numel() for x in (k, v)]
            length = lengths[(owner - 1) % world]
            there = [sum(counts) if r == (rank + 1) % world else 0 for r in range(world)]
            size = 2 * len(k) * length * k.shape[2]
            here = [size if r == (rank - 1) % world else 0 for r in range(world)]
            flat = k.new_empty(size)
            dist.all_to_all_single(flat, torch.cat([k.flatten(), v.flatten()]), here, there)
            coming = [x.view(len(k), length, k.shape[2]) for x in flat.chunk(2)]""",
            late="k, v = coming or (k, v)",
        ),
        says="Rank 0 called all_to_all. A ring sends and receives",
        loses=ROUNDS,
    ),
]
RIGHT["18.ring_attention"] = [
    (
        "keys and values in one tensor, down the ring, hidden blocks skipped",
        """
def ring_attention(attend, q, k, v, lengths, causal):
    me, n = dist.get_rank(), dist.get_world_size()
    ends = torch.tensor(lengths).cumsum(0)
    begins = ends - torch.tensor(lengths)
    block, result = torch.stack([k, v]), None
    for step in range(n):
        owner = (me + step) % n
        works = []
        if step + 1 < n:
            following = block.new_empty(2, k.shape[0], lengths[(owner + 1) % n], k.shape[2])
            works = dist.batch_isend_irecv([
                dist.P2POp(dist.isend, block, (me - 1) % n),
                dist.P2POp(dist.irecv, following, (me + 1) % n),
            ])
        if not causal or owner <= me:
            mask = None
            if causal and owner == me:
                mask = torch.ones(lengths[me], lengths[me], dtype=torch.bool).tril()
            result = attend(q, block[0], block[1], mask, result)
        [work.wait() for work in works]
        if step + 1 < n:
            block = following
    return result[0]
""",
    ),
    (
        "hidden blocks do not travel on",
        """
def ring_attention(attend, q, k, v, lengths, causal):
    rank, world = dist.get_rank(), dist.get_world_size()
    start, result = [sum(lengths[:r]) for r in range(world + 1)], None
    for turn in range(world):
        owner = (rank - turn) % world
        coming, transfers = None, []
        if turn < world - 1:
            after = (owner - 1) % world
            if not causal or rank < world - 1:
                if not causal or owner <= rank:
                    transfers += [dist.isend(x, (rank + 1) % world) for x in (k, v)]
            if not causal or (rank > 0 and after <= rank):
                coming = [x.new_empty(x.size(0), lengths[after], x.size(2)) for x in (k, v)]
                transfers += [dist.irecv(x, (rank - 1) % world) for x in coming]
        mask = None
        if causal:
            i, j = torch.arange(*start[rank:rank + 2]), torch.arange(*start[owner:owner + 2])
            mask = i[:, None] >= j[None, :]
        if not causal or owner <= rank:
            result = attend(q, k, v, mask, result)
        for transfer in transfers:
            transfer.wait()
        if coming is not None:
            k, v = coming
    return result[0]
""",
    ),
]

# ---- 18.ulysses ----

VIEWS = ("shared heads, another dtype, views",)
FOUR = ("four all-to-alls, each element to one rank",)
REFUSED = ("heads that do not divide are refused",)

LOOK = """    for heads in (len(q), len(k)):
        if heads % world:
            raise ValueError(f"{heads} heads cannot be divided among {world} ranks")
"""


def ulysses(*changes):
    return altered("18.ulysses", *changes)


WRONG["18.ulysses"] = [
    Wrong(
        "attends to its own tokens",
        "def ulysses(attend, q, k, v, lengths):\n    return attend(q, k, v)\n",
        says="the others' never came",
        loses=WHOLE,
    ),
    Wrong(
        "keys and values gathered",
        """
def ulysses(attend, q, k, v, lengths):
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = []
    for x in (q, k, v):
        padded = x.new_zeros(len(x), max(lengths), x.shape[2])
        padded[:, :x.shape[1]] = x
        every = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(every, padded)
        whole.append(torch.cat([one[:, :n] for one, n in zip(every, lengths)], 1))
    start = sum(lengths[:rank])
    return attend(*whole)[:, start:start + lengths[rank]]
""",
        says="Ulysses is all-to-alls, no more",
        loses=FOUR,
    ),
    Wrong(
        "parts of equal length",
        ulysses(("for n in lengths]", "for n in [q.shape[1]] * world]")),
        says="the split sizes of all_to_all",
        loses=WHOLE,
    ),
    Wrong(
        "no refusal", ulysses((LOOK, "")), says="4 ranks, heads that do not divide", loses=REFUSED
    ),
    Wrong(
        "an assertion",
        ulysses(
            (LOOK, "    assert len(q) % world == 0 and len(k) % world == 0, (len(q), world)\n")
        ),
        says="raised AssertionError",
        loses=REFUSED,
    ),
    Wrong(
        "looks at the queries alone",
        ulysses(("(len(q), len(k))", "(len(q),)")),
        says="4 ranks, heads that do not divide",
        loses=REFUSED,
    ),
    Wrong(
        "too few heads alone",
        ulysses(("if heads % world", "if heads < world")),
        says="4 ranks, heads that do not divide",
        loses=REFUSED,
    ),
    Wrong(
        "a message without numbers",
        ulysses(
            (
                'f"{heads} heads cannot be divided among {world} ranks"',
                '"the heads must be divisible by the number of ranks"',
            )
        ),
        says="Name the number of heads that does not divide",
        loses=REFUSED,
    ),
    Wrong(
        "names the other number of heads",
        ulysses(('f"{heads} heads', 'f"{len(q)} heads')),
        says="Name the number of heads that does not divide",
        loses=REFUSED,
    ),
    Wrong(
        "looks after it has sent",
        ulysses(
            (
                LOOK,
                "    sizes = torch.tensor([len(q), len(k)])\n"
                "    sizes = sizes.repeat(world)\n"
                "    dist.all_to_all_single(torch.empty_like(sizes), sizes)\n" + LOOK,
            ),
        ),
        says="all-to-alls. Four are enough",
        loses=FOUR,
    ),
    Wrong(
        "refuses on rank 0",
        ulysses(("if heads % world:", "if heads % world and rank == 0:")),
        says="4 ranks, heads that do not divide",
        loses=REFUSED,
    ),
    Wrong(
        "heads in strides",
        ulysses(("x.chunk(world, 0)", "[x[r::world] for r in range(world)]")),
        says="has the right numbers at wrong places",
        loses=WHOLE,
    ),
    Wrong(
        "heads concatenated in the reverse order",
        ulysses(("[shape] * world), 0)", "[shape] * world)[::-1], 0)")),
        says="has the right numbers at wrong places",
        loses=WHOLE,
    ),
    Wrong(
        "tokens in the order of another rank",
        ulysses(("shapes), 1)", "shapes)[::-1], 1)")),
        says="is wrong",
        loses=WHOLE,
    ),
    Wrong(
        "the result stays with its heads",
        ulysses(
            (
                "return to_tokens(attend(to_heads(q), to_heads(k), to_heads(v)))",
                "return attend(to_heads(q), to_heads(k), to_heads(v))",
            )
        ),
        says="has shape",
        loses=WHOLE,
    ),
    Wrong(
        "heads of keys repeated before they travel",
        ulysses(
            (
                "    return to_tokens",
                "    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))\n"
                "    return to_tokens",
            )
        ),
        says="Each element has one rank to go to",
        loses=FOUR,
    ),
    Wrong(
        "lengths exchanged once more",
        ulysses(
            (
                "    def exchanged",
                "    mine = torch.full((world,), q.shape[1])\n"
                "    theirs = torch.empty_like(mine)\n"
                "    dist.all_to_all_single(theirs, mine)\n"
                "    lengths = theirs.tolist()\n\n    def exchanged",
            )
        ),
        says="Four are enough",
        loses=FOUR,
    ),
    Wrong(
        "all tokens of all heads to every rank",
        """
def ulysses(attend, q, k, v, lengths):
    rank, world = dist.get_rank(), dist.get_world_size()
    for heads in (len(q), len(k)):
        if heads % world:
            raise ValueError(f"{heads} heads cannot be divided among {world} ranks")
    def every(x):
        numbers = [len(x) * n * x.shape[2] for n in lengths]
        came = x.new_empty(sum(numbers))
        dist.all_to_all_single(came, x.flatten().repeat(world), numbers, [x.numel()] * world)
        return torch.cat([p.view(len(x), -1, x.shape[2]) for p in came.split(numbers)], 1)
    start = sum(lengths[:rank])
    return attend(every(q), every(k), every(v))[:, start:start + lengths[rank]]
""",
        says="Each element has one rank to go to",
        loses=FOUR,
    ),
    Wrong(
        "float32 buffers",
        ulysses(("parts[0].new_empty(sum(numbers))", "torch.empty(sum(numbers))")),
        says="tensors with different dtypes",
        loses=VIEWS,
    ),
    Wrong(
        "views are not copied",
        ulysses(
            (
                "torch.cat([part.flatten() for part in parts])",
                "torch.cat([part.reshape(-1) for part in parts])",
            ),
            ("x.chunk(world, 0)", "x.contiguous().chunk(world, 0)"),
        ).replace("part.reshape(-1)", "part.view(-1)"),
        says="RuntimeError",
        loses=WHOLE,
    ),
    Wrong(
        "q scaled in place",
        ulysses(("    return to_tokens", "    q.mul_(1.0 + 1e-6)\n    return to_tokens")),
        says="which was handed in to be read",
        loses=SAME,
    ),
]
WRONG["18.ulysses"] += [
    Wrong(
        "parts padded to the longest",
        """
def ulysses(attend, q, k, v, lengths):
    rank, world, longest = dist.get_rank(), dist.get_world_size(), max(lengths)
    for heads in (len(q), len(k)):
        if heads % world:
            raise ValueError(f"{heads} heads cannot be divided among {world} ranks")

    def padded(x):
        return torch.nn.functional.pad(x, (0, 0, 0, longest - x.shape[1]))

    def to_heads(x):
        sent = padded(x).contiguous()
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent)
        parts = came.view(world, len(x) // world, longest, x.shape[2])
        return torch.cat([part[:, :n] for part, n in zip(parts, lengths)], 1)

    def to_tokens(x):
        sent = torch.cat([padded(part) for part in x.split(lengths, 1)])
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent)
        return came[:, :lengths[rank]].contiguous()

    return to_tokens(attend(to_heads(q), to_heads(k), to_heads(v)))
""",
        says="Each element has one rank to go to",
        loses=FOUR,
    ),
    Wrong(
        "refuses unequal parts, too",
        ulysses(
            (
                LOOK,
                LOOK + "    if len(set(lengths)) > 1:\n"
                "        raise ValueError(f'{lengths} are not equal')\n",
            )
        ),
        says="raised ValueError",
        loses=WHOLE,
    ),
]
RIGHT["18.ulysses"] = [
    (
        "queries, keys and values together",
        """
def ulysses(attend, q, k, v, lengths):
    n, me = dist.get_world_size(), dist.get_rank()
    odd = [h for h in {q.shape[0], k.shape[0]} if h % n != 0]
    if odd:
        raise ValueError(f"cannot divide {odd[0]} heads among {n} ranks")
    dim, mine = q.shape[-1], lengths[me]
    a, b = q.shape[0] // n, k.shape[0] // n
    packed = torch.cat([
        torch.cat([q[r * a:(r + 1) * a], k[r * b:(r + 1) * b], v[r * b:(r + 1) * b]])
        .transpose(0, 1) for r in range(n)
    ])
    came = q.new_empty(sum(lengths), a + 2 * b, dim)
    dist.all_to_all_single(came, packed.contiguous(), lengths, [mine] * n)
    heads = came.transpose(0, 1)
    out = attend(heads[:a], heads[a:a + b], heads[a + b:])
    back = q.new_empty(n * mine, a, dim)
    dist.all_to_all_single(back, out.transpose(0, 1).contiguous(), [mine] * n, lengths)
    return back.view(n, mine, a, dim).permute(0, 2, 1, 3).reshape(n * a, mine, dim)
""",
    ),
]

# ---- 18.shifted_loss ----

MEAN = ("the mean over all labels of the sequence",)
GRADIENT = ("its gradient for this rank's logits",)
FEW = ("one token, no label, none at all",)
MANY = ("bfloat16 and many labels, float64",)
MESSAGES = ("a label per row to the rank before, two numbers to all",)


def loss(*changes):
    return altered("18.shifted_loss", *changes)


SEND = """    sending = dist.isend(labels[:, :1].contiguous(), rank - 1) if rank > 0 else None
    if rank < world - 1:
        dist.recv(after, rank + 1)
    if sending is not None:
        sending.wait()
"""
SHIFTED = "shifted = torch.cat([labels[:, 1:], after], 1)"
RETURNED = "return share + (total[0] / count - share).detach()"

WRONG["18.shifted_loss"] = [
    Wrong(
        "no labels over borders",
        loss((SEND, "")),
        says="does not have the labels over the borders",
        loses=MEAN,
    ),
    Wrong(
        "rolled on each rank",
        loss((SEND, ""), (SHIFTED, "shifted = labels.roll(-1, 1)")),
        says="takes a part's first token for the label of its last one",
        loses=MEAN,
    ),
    Wrong(
        "not shifted",
        loss((SEND, ""), (SHIFTED, "shifted = labels")),
        says="has labels that are not shifted",
        loses=MEAN,
    ),
    Wrong(
        "the last token predicts the first",
        loss(
            (
                SEND,
                """    sending = dist.isend(labels[:, :1].contiguous(), (rank - 1) % world)
    dist.recv(after, (rank + 1) % world)
    sending.wait()
""",
            )
        ),
        says="has the sequence's last token predict its first one",
        loses=MEAN,
    ),
    Wrong(
        "a mean of means",
        loss(
            (
                "dist.all_reduce(total)",
                "total[0] /= total[1].clamp(min=1.0)\n    total[1] = 1\n    dist.all_reduce(total)",
            )
        ),
        says="is the mean of the ranks' means",
        loses=MEAN,
    ),
    Wrong(
        "the own mean",
        loss(("dist.all_reduce(total)", "pass")),
        says="is the rank's own mean",
        loses=MEAN,
    ),
    Wrong(
        "the own share",
        loss((RETURNED, "return share")),
        says="is the rank's own share",
        loses=MEAN,
    ),
    Wrong(
        "the sum",
        loss(("count = total[1].clamp(min=1.0)", "count = torch.ones_like(total[1])")),
        says="is a sum: divide by the number of labels",
        loses=MEAN,
    ),
    Wrong(
        "counts every position",
        loss(
            (
                "(shifted != -100).sum().to(own.dtype)",
                "own.new_tensor(shifted.numel() - (rank == world - 1) * len(labels))",
            )
        ),
        says="Those with -100 do not count",
        loses=MEAN,
    ),
    Wrong(
        "counts the labels before they are shifted",
        loss(("(shifted != -100).sum()", "(labels != -100).sum()")),
        says="the first token's too, which nothing predicts",
        loses=MEAN,
    ),
    Wrong(
        "the sum over ranks in the graph",
        loss(
            (
                "total = torch.stack([own.detach(), (shifted != -100).sum().to(own.dtype)])\n"
                "    dist.all_reduce(total)",
                "import torch.distributed.nn.functional as graph\n"
                "    counted = (shifted != -100).sum().to(own.dtype)\n"
                "    total = graph.all_reduce(torch.stack([own, counted]))",
            ),
            (RETURNED, "return total[0] / count"),
            ("    share = own / count\n", ""),
        ),
        says="larger by the number of ranks",
        loses=GRADIENT,
    ),
    Wrong(
        "the gradient of the own mean",
        loss(("share = own / count", "share = own / (shifted != -100).sum().clamp(min=1)")),
        says="is that of the rank's own mean",
        loses=GRADIENT,
    ),
    Wrong(
        "the gradient of the sum",
        loss(("share = own / count", "share = own")),
        says="is that of the sum",
        loses=GRADIENT,
    ),
    Wrong(
        "the gradient times the world, as for DDP",
        loss(("share = own / count", "share = own * world / count")),
        says="larger by the number of ranks",
        loses=GRADIENT,
    ),
    Wrong(
        "no graph",
        loss((RETURNED, "return (total[0] / count).requires_grad_()")),
        says="is not connected to the logits",
        loses=GRADIENT,
    ),
    Wrong(
        "backward inside",
        loss(
            (
                RETURNED,
                "if logits.requires_grad:\n        share.backward()\n"
                "    return (total[0] / count).requires_grad_()",
            )
        ),
        says="was there before backward was called",
        loses=GRADIENT,
    ),
    Wrong("0 / 0", loss((".clamp(min=1.0)", "")), says="0 / 0. It must be 0", loses=FEW),
    Wrong(
        "a border taken for granted",
        loss((SEND, SEND.replace("labels[:, :1]", "labels[:, -1:]"))),
        says=", which is wrong",
        loses=MEAN,
    ),
    Wrong(
        "added up in bfloat16",
        loss(
            ("wide = logits if logits.dtype == torch.float64 else logits.float()", "wide = logits")
        ),
        says="has dtype bfloat16",
        loses=MANY,
    ),
    Wrong(
        "counted in bfloat16",
        loss(
            ("wide = logits if logits.dtype == torch.float64 else logits.float()", "wide = logits"),
            (
                RETURNED,
                "result = share + (total[0] / count - share).detach()\n"
                "    return result if result.dtype == torch.float64 else result.float()",
            ),
        ),
        says=", which is wrong",
        loses=MANY,
    ),
    Wrong(
        "counted in float16",
        loss(
            (
                "(shifted != -100).sum().to(own.dtype)",
                "(shifted != -100).sum().half().to(own.dtype)",
            )
        ),
        says=", which is wrong",
        loses=MANY,
    ),
    Wrong(
        "added up in float32",
        loss(
            (
                "torch.stack([own.detach(), (shifted != -100).sum().to(own.dtype)])",
                "torch.stack([own.detach().float(), (shifted != -100).sum().float()])",
            )
        ),
        says=", which is wrong",
        loses=MANY,
    ),
    Wrong(
        "a gradient where none was asked for",
        loss((SHIFTED, SHIFTED + "\n    logits.requires_grad_()")),
        says="changed the logits",
        loses=SAME,
    ),
    Wrong(
        "always float32",
        loss(
            (
                "wide = logits if logits.dtype == torch.float64 else logits.float()",
                "wide = logits.float()",
            )
        ),
        says="has dtype float32",
        loses=MANY,
    ),
    Wrong(
        "first labels gathered",
        loss(
            (
                SEND,
                """    every = [torch.empty_like(labels[:, :1]).contiguous() for _ in range(world)]
    dist.all_gather(every, labels[:, :1].contiguous())
    if rank < world - 1:
        after = every[rank + 1]
""",
            )
        ),
        says="A label for each row goes to the rank before",
        loses=MESSAGES,
    ),
    Wrong(
        "two all-reduces",
        loss(
            ("dist.all_reduce(total)", "dist.all_reduce(total[0])\n    dist.all_reduce(total[1])")
        ),
        says="the sum of the losses and their number",
        loses=MESSAGES,
    ),
    Wrong(
        "flags travel, too",
        loss(
            (
                SEND,
                """    flags = torch.cat([labels[:, :1], labels[:, :1] != -100], 1)
    both = torch.empty_like(flags)
    sending = dist.isend(flags, rank - 1) if rank > 0 else None
    if rank < world - 1:
        dist.recv(both, rank + 1)
        after = both[:, :1]
    if sending is not None:
        sending.wait()
""",
            )
        ),
        says="a label for each row",
        loses=MESSAGES,
    ),
    Wrong(
        "labels shifted in place",
        loss(
            (
                SHIFTED,
                "labels[:, :-1] = labels[:, 1:].clone()\n    labels[:, -1:] = after\n"
                "    shifted = labels",
            )
        ),
        says="which was handed in to be read",
        loses=SAME,
    ),
]
WRONG["18.shifted_loss"] += [
    Wrong(
        "shifted the other way",
        loss(
            (
                SEND,
                """    if rank < world - 1:
        sending = dist.isend(labels[:, -1:].contiguous(), rank + 1)
    if rank > 0:
        dist.recv(after, rank - 1)
    if rank < world - 1:
        sending.wait()
""",
            ),
            (SHIFTED, "shifted = torch.cat([after, labels[:, :-1]], 1)"),
        ),
        says="has labels shifted the other way",
        loses=MEAN,
    ),
    Wrong(
        "shifted across rows",
        loss((SEND, ""), (SHIFTED, "shifted = labels.flatten().roll(-1).view_as(labels)")),
        says="has labels shifted across rows",
        loses=MEAN,
    ),
    Wrong(
        "a number, not a tensor",
        loss((RETURNED, "return (total[0] / count).item()")),
        says="must be a tensor without dimensions",
        loses=MEAN,
    ),
    Wrong(
        "weighted by tokens",
        loss(
            (
                "total = torch.stack([own.detach(), (shifted != -100).sum().to(own.dtype)])",
                "n = (shifted != -100).sum().clamp(min=1)\n    total = torch.stack("
                "[own.detach() / n * labels.numel(), own.new_tensor(labels.numel())])",
            )
        ),
        says=", which is wrong",
        loses=MEAN,
    ),
    Wrong(
        "a barrier before",
        loss((SEND, "    dist.barrier()\n" + SEND)),
        says="Rank 0 called barrier",
        loses=MESSAGES,
    ),
]
RIGHT["18.shifted_loss"] = [
    (
        "log-probabilities picked by hand, the gradient by a hook-free trick",
        """
def shifted_loss(logits, labels):
    r, n = dist.get_rank(), dist.get_world_size()
    ops, after = [], labels.new_full((labels.shape[0],), -100)
    first = labels[:, 0].clone()
    if r > 0:
        ops.append(dist.P2POp(dist.isend, first, r - 1))
    if r + 1 < n:
        ops.append(dist.P2POp(dist.irecv, after, r + 1))
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
    target = torch.empty_like(labels)
    target[:, :-1], target[:, -1] = labels[:, 1:], after
    good = target.ne(-100)
    logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    picked = logp.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    mine = -(picked * good).sum()
    both = torch.tensor([mine.item(), good.sum().item()], dtype=torch.float64)
    dist.all_reduce(both)
    labels_there = max(both[1].item(), 1.0)
    value = mine.new_tensor(both[0].item() / labels_there)
    return value + (mine - mine.detach()) / labels_there
""",
    ),
]

# ---- 18.zigzag ----

DEALT = ("each chunk on one rank, equally many on each",)
EVEN = ("no rank over 1.1 times the mean work",)
NEEDED = ("no more chunks than that takes",)
EDGE = ("one rank, windows of one token and of all",)


def zigzag(*changes):
    return altered("18.zigzag", *changes)


PLACED = """            place = c % (2 * ranks)
            dealt[min(place, 2 * ranks - 1 - place)].append(c)
"""
STOP = "if max(sum(work[c] for c in own) for own in dealt) * ranks <= 1.1 * sum(work):"
RANGE = "for m in range(1, 4):"
WORK = "sum(min(i + 1, window) for i in range(c * size, (c + 1) * size))"

WRONG["18.zigzag"] = [
    Wrong(
        "the lesson's zigzag",
        "def zigzag(tokens, window, ranks):\n"
        "    return [[r, 2 * ranks - 1 - r] for r in range(ranks)]\n",
        says="That is zigzag, which evens out a triangle",
        loses=EVEN,
    ),
    Wrong(
        "parts in a row",
        "def zigzag(tokens, window, ranks):\n"
        "    return [[2 * r, 2 * r + 1] for r in range(ranks)]\n",
        says="Its chunks lie next to each other",
        loses=EVEN,
    ),
    Wrong(
        "always the smallest chunks",
        zigzag((RANGE, "for m in range(3, 4):")),
        says="are enough for 1.1 times the mean",
        loses=NEEDED,
    ),
    Wrong(
        "always two strides",
        zigzag((RANGE, "for m in range(2, 3):")),
        says="times the mean",
        loses=EVEN,
    ),
    Wrong(
        "strides",
        zigzag(
            (PLACED, "            dealt[c % ranks].append(c)\n"), (RANGE, "for m in range(1, 2):")
        ),
        says="In every stride",
        loses=EVEN,
    ),
    Wrong(
        "strides, made smaller",
        zigzag(
            (PLACED, "            dealt[c % ranks].append(c)\n"), (RANGE, "for m in (1, 2, 3, 6):")
        ),
        says="are enough",
        loses=NEEDED,
    ),
    Wrong(
        "smaller chunks in two blocks",
        "def zigzag(tokens, window, ranks):\n    m = 3\n    return [[*range(r * m, (r + 1) * m), "
        "*range((2 * ranks - 1 - r) * m, (2 * ranks - r) * m)] for r in range(ranks)]\n",
        says="Smaller chunks help only if those of a rank lie apart",
        loses=EVEN,
    ),
    Wrong(
        "the work of a causal mask",
        zigzag((WORK, "sum(range(c * size + 1, (c + 1) * size + 1))")),
        says="That is zigzag",
        loses=EVEN,
    ),
    Wrong(
        "a window in chunks",
        zigzag((WORK, "min(c + 1, window // size)")),
        says="times the mean",
        loses=EVEN,
    ),
    Wrong(
        "the largest against the smallest",
        zigzag(
            (
                STOP,
                "loads = [sum(work[c] for c in own) for own in dealt]\n"
                "        if max(loads) <= 1.1 * min(loads):",
            )
        ),
        says="are enough",
        loses=NEEDED,
    ),
    Wrong(
        "at most a tenth of a chunk over",
        zigzag(("1.1 * sum(work)", "1.01 * sum(work)")),
        says="are enough",
        loses=NEEDED,
    ),
    Wrong(
        "the owner of each chunk",
        zigzag(
            (
                "return dealt",
                "return [next(r for r in range(ranks) if c in dealt[r]) for c in range(chunks)]",
            )
        ),
        says="return a list for each rank",
        loses=DEALT,
    ),
    Wrong(
        "chunks counted from 1",
        zigzag(("return dealt", "return [[c + 1 for c in own] for own in dealt]")),
        says="a number is left out",
        loses=DEALT,
    ),
    Wrong(
        "parts of equal work in a row",
        zigzag(
            (PLACED, "            dealt[sum(work[:c]) * ranks // sum(work)].append(c)\n"),
            (RANGE, "for m in range(3, 4):"),
        ),
        says="and so unequal memory",
        loses=DEALT,
    ),
    Wrong(
        "the least loaded rank takes the next",
        zigzag(
            (
                PLACED,
                "            loads = [sum(work[i] for i in own) for own in dealt]\n"
                "            dealt[loads.index(min(loads))].append(c)\n",
            )
        ),
        says="are enough",
        loses=NEEDED,
    ),
    Wrong(
        "one chunk for each rank first",
        zigzag(("chunks = 2 * ranks * m", "chunks = ranks * m"), (RANGE, "for m in range(1, 9):")),
        says="are no multiple of 2 x",
        loses=DEALT,
    ),
    Wrong(
        "the first and the last of what is left",
        zigzag((PLACED, "            dealt[min(c, chunks - 1 - c) % ranks].append(c)\n")),
        says="are enough",
        loses=NEEDED,
    ),
]
RIGHT["18.zigzag"] = [
    (
        "the most work first, to the rank with the least",
        """
def zigzag(tokens, window, ranks):
    m = 0
    while True:
        m += 1
        chunks = 2 * ranks * m
        if tokens % chunks:
            continue
        seen = torch.arange(1, tokens + 1).clamp(max=window).view(chunks, -1).sum(1)
        lists, loads = [[] for _ in range(ranks)], [0] * ranks
        for c in seen.argsort(descending=True).tolist():
            free = [r for r in range(ranks) if len(lists[r]) < 2 * m]
            r = min(free, key=loads.__getitem__)
            lists[r].append(c)
            loads[r] += int(seen[c])
        if max(loads) <= 1.1 * sum(loads) / ranks:
            return lists
""",
    ),
]

PROMISES = {
    "18.merge": {
        "Attention was computed twice": None,
        "`out`, the mean of the values weighted": None,
        "Return what attention to both sets together gives": (*BOTH, ""),
        "Scores have any size": (*LARGE, "large"),
        "its `lse` is −inf and its `out` is 0": (*HIDDEN, "masked"),
        "if that holds for both sets": (*HIDDEN, "masked"),
        "The arguments stay as they are": (*SAME, "masked"),
        "of the shapes and dtypes of what came": (*SHAPES, "other"),
        "perhaps views": (*SHAPES, "other"),
        "There may be no query at all": (*SHAPES, "other"),
    },
    "18.ring_attention": {
        "parts may have different lengths": (*WHOLE, ""),
        "queries to **all** tokens or, if `causal`": (*WHOLE, ""),
        "Queries stay": (*ROUNDS, ""),
        "a rank passes the block that it has to one neighbour": (*ROUNDS, ""),
        "Use sends and receives alone": (*ROUNDS, "other"),
        "only keys and values travel": (*ROUNDS, "other"),
        "the next one must already be in flight": (*FLIGHT, "slow"),
        "holds at most two blocks": (*TWO, "slow"),
        "need no `attend`": None,
        "What was handed in stays as it is": (*SAME, ""),
        "where kv_heads divides heads": (*SHARED, "other"),
        "all of one dtype, float32 or float64": (*SHARED, "other"),
        "the tokens of each rank's part, at least 1": (*SHARED, "other"),
        "None if it sees all": None,
        "attend scales the scores": (*WHOLE, ""),
    },
    "18.ulysses": {
        "The same sequence in the same parts": (*WHOLE, ""),
        "An all-to-all turns": (*FOUR, ""),
        "sees a complete sequence in order": (*WHOLE, ""),
        "Use no other collective": (*FOUR, ""),
        "takes equal tensors alone": None,
        "must divide the number of heads, of queries and of keys": (*REFUSED, "refuse"),
        "raise a `ValueError` on every rank before anything is sent": (*REFUSED, "refuse"),
        "its message names the number of heads": (*REFUSED, "refuse"),
        "What was handed in stays as it is": (*SAME, ""),
        "where kv_heads divides heads": (*VIEWS, "other"),
        "all of one dtype, float32 or float64, perhaps views": (*VIEWS, "other"),
        "the tokens of each rank's part, at least 1": (*VIEWS, "other"),
    },
    "18.shifted_loss": {
        "The logits at a place predict the label at the **next** place": (*MEAN, ""),
        "The last place of the whole sequence predicts nothing": (*MEAN, ""),
        "Labels of −100 do not count": (*MEAN, ""),
        "Return, on every rank, the mean cross-entropy": (*MEAN, ""),
        "If no label counts, the loss is 0": (*FEW, "edge"),
        "exactly the gradient of that mean": (*GRADIENT, ""),
        "and sends nothing": (*MESSAGES, ""),
        "One message with a label per row": (*MESSAGES, ""),
        "nothing else travels": (*MESSAGES, ""),
        "What was handed in stays as it is": (*SAME, ""),
        "a scalar, float32, or float64 for float64 logits": (*MANY, "other"),
        "float32, float64 or bfloat16, at least one token": (*FEW, "edge"),
        "they may need no gradient": (*MEAN, ""),
        "All ranks have the same number of rows": None,
    },
    "18.zigzag": {
        "only the last `window` tokens": (*EVEN, ""),
        "give every rank 2m of them": (*DEALT, ""),
        "no rank has more than **1.1 times** the mean work": (*EVEN, ""),
        "use no more chunks than needed": (*NEEDED, ""),
        "For each rank the list of its chunks": (*DEALT, ""),
        "window: at least 1, perhaps more than tokens": (*EDGE, "edge"),
        "2, 4 or 6 chunks for each rank are enough": (*NEEDED, ""),
    },
}
KEYS = "kv_heads divides heads: what divides kv_heads divides both"
EQUIVALENT = {
    "18.merge": {"`0.0` -> `1.0`": "e^(-inf - 1) is 0, too"},
    "18.ring_attention": {
        "`range(world)` -> `range(world + 1)` (#2)": "one start more, which no rank has",
        "`(rank - turn) % world` -> `rank - turn`": "a list counts -1 from its end, as % does",
        "`(owner - 1) % world` -> `owner - 1`": "a list counts -1 from its end, as % does",
    },
    "18.ulysses": {
        "`0` -> `-1` (#2)": "every part has the dtype",
        "`for heads in (len(q), len(k)): if heads % world: raise Va...` -> [-1:]": KEYS,
        "`for heads in (len(q), len(k)): if heads % world: raise Va...` -> [1:]": KEYS,
        "`def to_tokens(x): shape = torch.Size((len(x), lengths[ran...` "
        "-> its first result, kept": ("it is made anew in each call, and called once"),
    },
    "18.zigzag": {
        "`4` -> `5`": "m = 3 is always enough",
        "`2` -> `3` (#2)": "places below 0 count from the end: once up, then down twice",
        "`dealt[min(place, 2 * ranks - 1 - place)]` -> "
        "`dealt[min(place, 2 * ranks - 1 - place) - 1]`": "ranks have other numbers, and are alike",
        "`max((sum((work[c] for c in own)) for own in dealt)) * ran...` -> "
        "`max((sum((work[c] for c in own)) for own in dealt)) * ran...`": (
            "< for <=: no case meets the limit exactly, where rounding would decide"
        ),
        "`for own in dealt` -> [-1:]": "the last rank has the middle chunks, and the most work",
    },
    "18.shifted_loss": {
        "`torch.nn.functional.cross_entropy(wide.flatten(0, 1), shi...` -> "
        "`torch.nn.functional.cross_entropy(wide.flatten(0, 1), shi...`": "-100 is the default",
        "`own.detach()` -> `own`": "what is returned has its gradient from the share alone",
        "`(shifted != -100).sum().to(own.dtype)` -> `(shifted != -100).sum()`": (
            "stack gives both the wider dtype"
        ),
        "`own.dtype` -> `torch.float32`": "stack gives both the wider dtype",
    },
}
