"""Wrong answers to lesson 16 that people give, and the sentence that each must hear."""

from answers import Wrong
from answers.altered import altered

BLOCKS = ("the sum on every rank, nodes of neighbours",)
DEALT = ("ranks placed on nodes in any order",)
ANY = ("any length and dtype",)
BETWEEN = ("2(n/L)(M-1)/M between nodes, by every rank",)
INSIDE = ("2n(L-1)/L inside the node",)
READ = ("groups are made once, and `nodes` is left as it is",)

GROUPS = """rank = dist.get_rank()
    names = sorted(set(nodes))
    on_node = {name: [r for r, n in enumerate(nodes) if n == name] for name in names}
    local = len(on_node[nodes[rank]])
    intra = inter = None
    for ranks in [*on_node.values(), *zip(*on_node.values())]:
        group = dist.new_group(list(ranks))
        if rank in ranks:
            intra, inter = (intra or group, group)
"""
HIERARCHY = """
def hierarchical(nodes):
    {groups}
    def all_reduce(tensor):
        size = -(-len(tensor) // local)
        padded = torch.nn.functional.pad(tensor, (0, local * size - len(tensor)))
        {scatter}
        {cross}
        {gather}
        tensor.copy_(padded[: len(tensor)])

    return all_reduce
"""
RIGHT_HIERARCHY = {
    "groups": GROUPS,
    "scatter": "parts = torch.empty_like(padded)\n"
    "        dist.all_to_all_single(parts, padded, group=intra)\n"
    "        own = parts.view(local, size).sum(0)",
    "cross": "dist.all_reduce(own, group=inter)",
    "gather": "dist.all_gather(list(padded.view(local, size)), own, group=intra)",
}


def hierarchy(**wrong):
    return HIERARCHY.format(**(RIGHT_HIERARCHY | wrong))


def reduces(*lines):
    """A hierarchical() with the right groups, whose all_reduce has these lines."""
    body = "\n        ".join(lines)
    head = f"def hierarchical(nodes):\n    {GROUPS}\n    def all_reduce(tensor):\n"
    return f"{head}        {body}\n\n    return all_reduce\n"


# ---- halving and doubling ----

SUM = ("the sum on 1, 2, 4 and 8 ranks",)
ANY_WORLD = ("the sum on any number of ranks",)
MESSAGES = ("2 log2 N messages, by send and recv alone",)
BYTES = ("2(N-1)/N of the tensor",)

HALVING = """
def halving_doubling(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    power = {power}

    def exchange(partner, outgoing=None, incoming=None):
        messages = []
        if outgoing is not None and len(outgoing):
            messages.append(dist.P2POp(dist.isend, outgoing, partner))
        if incoming is not None and len(incoming):
            messages.append(dist.P2POp(dist.irecv, incoming, partner))
        for request in dist.batch_isend_irecv(messages) if messages else []:
            request.wait()

    if rank >= power:
        exchange(rank - power, outgoing=tensor)
        {back}
        return
    received = torch.empty_like(tensor)
    if rank + power < world:
        exchange(rank + power, incoming=received)
        {fold}
    held, cuts, distance = tensor, [], 1
    while distance < power:
        partner = rank ^ distance
        {cut}
        if {upper}:
            mine, other = other, mine
        exchange(partner, other, received[: len(mine)])
        {add}
        cuts.append((partner, mine, other))
        held, distance = mine, 2 * distance
    for partner, mine, other in {order}:
        exchange(partner, mine, other)
    if rank + power < world:
        {home}
    {end}
"""
RIGHT_HALVING = {
    "power": "1 << (world.bit_length() - 1)",
    "back": "exchange(rank - power, incoming=tensor)",
    "fold": "tensor += received",
    "cut": "mine, other = held.tensor_split(2)",
    "upper": "rank & distance",
    "add": "mine += received[: len(mine)]",
    "order": "reversed(cuts)",
    "home": "exchange(rank + power, outgoing=tensor)",
    "end": "",
}


def halving(**wrong):
    return HALVING.format(**(RIGHT_HALVING | wrong))


# ---- the page ----

EVIDENCE = ("evidence: the check's training with your seed has these losses and weights",)
DIED = ("a node died, and the resumed run has the same losses and weights",)
FORMULA = ("bytes predicted by the formula of the stage, and found in the ledger",)
GOODPUT = ("steps done twice predicted, and the goodput that follows",)
REFUTE = ("what would refute the prediction, and whether it happened",)


# The losses of the capstone's run by (seed, steps), as it prints them; seed 0 is the lesson's.
LOSSES = {
    (4711, 20): "5.556 5.539 5.53 5.524 5.492 5.461 5.433 5.37 5.343 5.282 5.245 5.197 5.177 5.131 "
    "5.091 5.058 5.022 5.013 5.025 4.984",
    (0, 30): "5.547 5.547 5.523 5.499 5.466 5.433 5.389 5.329 5.304 5.236 5.194 5.149 5.102 5.09 "
    "4.996 4.995 4.97 4.895 4.896 4.827 4.828 4.775 4.734 4.72 4.698 4.716 4.716 4.689 "
    "4.66 4.658",
}
LOSSES = {run: [float(loss) for loss in text.split()] for run, text in LOSSES.items()}
PAGE = """
def page():
    quiet = {quiet}
    plan = {{
        "seed": 4711, "nodes": 2, "ranks": 2, "stage": 2, "steps": 20, "save_every": 4, "kill": 10
    }}
    sent = 4 * 2 * 42_880 * (2 - 1) / 2
    prediction = {{"sent": sent, "steps_twice": 2, "goodput": 20 / 22}}
    refuted_outside = {{"sent": [0.99 * sent, 1.2 * sent], "steps_twice": [2, 3]}}
    measurement = {{
        "seed": 4711,
        "parameters": 42_880,
        "stage": 2,
        "steps": 20,
        "save_every": 4,
        "sent": [200_165, 178_541],
        "uninterrupted": quiet,
        "killed": quiet[:10],
        "resumed_at": 8,
        "resumed": quiet[8:],
        "weights": [164.8103, 13.29334],
        "weights_resumed": [164.8103, 13.29334],
    }}
    holds = {{"sent": True, "steps_twice": True}}
    explanation = "The last save before the kill was step 8, so steps 9 and 10 were done twice."
    {change}
    return {{
        "plan": plan,
        "prediction": prediction,
        "refuted_outside": refuted_outside,
        "measurement": measurement,
        "holds": holds,
        "explanation": explanation,
    }}
"""


def page(*changes):
    """A right page, with changes."""
    return PAGE.format(quiet=LOSSES[4711, 20], change="\n    ".join(changes) or "pass")


# ---- lines ----

MEET = ("all nodes meet, and are one job",)
GPUS = ("a process for each GPU",)
SAME = ("the same script on every node",)
AGAIN = ("after a death the job can start again",)
CABLE = ("the interface is named",)
MIX = ("two jobs do not mix",)

PLAN = """
def launch_plan(nodes, script, job, port):
    head, total = nodes[0]["address"], sum(node["gpus"] for node in nodes)
    lines = []
    for number, node in enumerate(nodes):
        cable = node["interface"]
        lines.append(f"{names} torchrun {nnodes} {local} {restarts} {meet} {script}")
    return lines{end}
"""
RIGHT_PLAN = {
    "names": "NCCL_SOCKET_IFNAME={cable} GLOO_SOCKET_IFNAME={cable}",
    "nnodes": "--nnodes {len(nodes)}",
    "local": "--nproc-per-node {node['gpus']}",
    "restarts": "--max-restarts 3",
    "meet": "--rdzv-backend c10d --rdzv-id {job} --rdzv-endpoint {head}:{port}",
    "script": "{script}",
    "end": "",
}


def plan(**wrong):
    text = PLAN
    for name, words in (RIGHT_PLAN | wrong).items():
        text = text.replace(f"{{{name}}}", words, 1)
    return text


WRONG = {
    "16.hierarchical": [
        Wrong(
            "a flat ring",
            reduces("dist.all_reduce(tensor)"),
            "which takes no account of nodes",
            BETWEEN,
        ),
        Wrong(
            "leaders only",
            reduces(
                "first = on_node[nodes[rank]][0]",
                "dist.reduce(tensor, first, group=intra)",
                "if rank == first:",
                "    dist.all_reduce(tensor, group=inter)",
                "dist.broadcast(tensor, first, group=intra)",
            ),
            says="A leader sends the full tensor for its node",
            loses=BETWEEN,
        ),
        Wrong(
            "the whole tensor across",
            reduces("dist.all_reduce(tensor, group=intra)", "dist.all_reduce(tensor, group=inter)"),
            says="First cut the tensor inside the node",
            loses=BETWEEN,
        ),
        Wrong(
            "means in place of sums",
            hierarchy(cross="own /= local\n        dist.all_reduce(own, group=inter)"),
            says="a mean was taken inside the node",
            loses=BLOCKS,
        ),
        Wrong(
            "the mean",
            hierarchy(cross="dist.all_reduce(own, group=inter)\n        own /= len(nodes)"),
            says="not divided by the number of ranks",
            loses=BLOCKS,
        ),
        Wrong(
            "nodes hold blocks of ranks",
            hierarchy(
                groups=GROUPS.replace("enumerate(nodes)", "enumerate(sorted(nodes))").replace(
                    "on_node[nodes[rank]]", "on_node[sorted(nodes)[rank]]"
                )
            ),
            says="bytes between nodes",
            loses=BETWEEN,
        ),
        Wrong(
            "its own node alone",
            hierarchy(cross=""),
            says="is the sum over its own node alone",
            loses=BLOCKS,
        ),
        Wrong(
            "L divides the length",
            reduces(
                "parts = torch.empty_like(tensor)",
                "dist.all_to_all_single(parts, tensor, group=intra)",
                "own = parts.view(local, -1).sum(0)",
                "dist.all_reduce(own, group=inter)",
                "dist.all_gather(list(tensor.view(local, -1)), own, group=intra)",
            ),
            says="raised",
            loses=ANY,
        ),
        Wrong(
            "an all-reduce inside the node",
            hierarchy(
                scatter="dist.all_reduce(padded, group=intra)\n"
                "        own = padded.view(local, size)[on_node[nodes[rank]].index(rank)].clone()"
            ),
            says="On gloo a reduce_scatter sends as much as an all_reduce",
            loses=INSIDE,
        ),
        Wrong(
            "a new tensor",
            hierarchy().replace("tensor.copy_(padded[: len(tensor)])", "tensor = padded"),
            says="Put the sum into the tensor that it was given",
            loses=BLOCKS,
        ),
        Wrong(
            "the list is emptied",
            hierarchy(groups=GROUPS + "    ranks_of = list(nodes)\n    nodes.sort(reverse=True)\n"),
            says="changed nodes",
            loses=READ,
        ),
    ],
    "16.halving_doubling": [
        Wrong(
            "a list of partners for powers of two",
            halving().replace(
                "def halving_doubling(tensor):\n",
                "def halving_doubling(tensor):\n"
                "    {1: 0, 2: 1, 4: 2, 8: 3}[dist.get_world_size()]  # rounds\n",
            ),
            says="3 is not a power of two",
            loses=("the sum on any number of ranks",),
        ),
        Wrong(
            "recursive doubling",
            halving(
                cut="mine, other = held, held.clone()",
                upper="False",
                order="[]",
            ),
            says="that is recursive doubling",
            loses=BYTES,
        ),
        Wrong(
            "torch's own",
            "def halving_doubling(tensor):\n    dist.all_reduce(tensor)\n",
            says="called all_reduce",
            loses=MESSAGES,
        ),
        Wrong(
            "a ring",
            """
def halving_doubling(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)

    def swap(outgoing, incoming):
        ops = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world)] if len(outgoing) else []
        ops += [dist.P2POp(dist.irecv, incoming, (rank - 1) % world)] if len(incoming) else []
        for request in dist.batch_isend_irecv(ops) if ops else []:
            request.wait()

    for k in range(world - 1):
        other = chunks[(rank - k - 1) % world]
        received = torch.empty_like(other)
        swap(chunks[(rank - k) % world], received)
        other += received
    for k in range(world - 1):
        swap(chunks[(rank + 1 - k) % world], chunks[(rank - k) % world])
""",
            says="Yours is a ring",
            loses=MESSAGES,
        ),
        Wrong(
            "a power of two assumed",
            halving(power="world"),
            says="raised",
            loses=ANY_WORLD,
        ),
        Wrong(
            "its own half twice",
            halving(add="mine += received[: len(mine)]; mine += mine"),
            says="each round doubles what it should add",
            loses=SUM,
        ),
        Wrong(
            "what came replaces what was held",
            halving(add="mine.copy_(received[: len(mine)])"),
            says="Add what it receives",
            loses=SUM,
        ),
        Wrong(
            "the extra ranks are left out",
            halving(fold="pass"),
            says="is the sum over the first 2 ranks alone",
            loses=ANY_WORLD,
        ),
        Wrong(
            "the extra ranks get nothing back",
            halving(back="pass", home="pass"),
            says="Put the sum into the tensor that it was given",
            loses=ANY_WORLD,
        ),
        Wrong(
            "doubling in the same order",
            halving(order="cuts"),
            says="Which part does each rank hold",
            loses=SUM,
        ),
        Wrong(
            "the mean",
            halving(end="tensor /= world"),
            says="not divided by the number of ranks",
            loses=SUM,
        ),
        Wrong(
            "the odd element is left out",
            halving(cut="half = len(held) // 2; mine, other = held[:half], held[half : 2 * half]"),
            says="the shorter ones too",
            loses=ANY,
        ),
    ],
    "16.launch_plan": [
        Wrong("standalone", plan(meet="--standalone"), "runs with --standalone", MEET),
        Wrong(
            "every node is rank 0",
            plan(meet="--node-rank 0 --master-addr {head} --master-port {port}"),
            says="of two nodes with rank 0, the second cannot bind",
            loses=MEET,
        ),
        Wrong(
            "localhost",
            plan(meet=RIGHT_PLAN["meet"].replace("{head}", "localhost")),
            says="on each node that is the node itself",
            loses=MEET,
        ),
        Wrong(
            "its own address",
            plan(meet=RIGHT_PLAN["meet"].replace("{head}", "{node['address']}")),
            says="The nodes meet at different places",
            loses=MEET,
        ),
        Wrong(
            "other ids",
            plan(meet=RIGHT_PLAN["meet"].replace("{job}", "{job}-{number}")),
            says="two jobs wait at one address",
            loses=MEET,
        ),
        Wrong(
            "on the first node alone",
            plan(end="[:1]"),
            says="Start it on every node",
            loses=MEET,
        ),
        Wrong(
            "a line for each process",
            plan(end=" * nodes[0]['gpus']"),
            says="torchrun starts the processes of a node itself",
            loses=MEET,
        ),
        Wrong("GPUs counted as nodes", plan(nnodes="--nnodes {total}"), "the number of GPUs", GPUS),
        Wrong(
            "all GPUs on each node",
            plan(local="--nproc-per-node {total}"),
            says="Start one process for each",
            loses=GPUS,
        ),
        Wrong(
            "the first node's GPUs on all",
            plan(local="--nproc-per-node {nodes[0]['gpus']}"),
            says="Start one process for each",
            loses=GPUS,
        ),
        Wrong(
            "node ranks forever",
            plan(meet="--node-rank {number} --master-addr {head} --master-port {port}"),
            says="static rendezvous",
            loses=AGAIN,
        ),
        Wrong("no restart", plan(restarts=""), "when a rank dies, the job ends", AGAIN),
        Wrong("no interface", plan(names=""), "does not say NCCL_SOCKET_IFNAME", CABLE),
        Wrong(
            "the interface of another cluster",
            plan(names="NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0"),
            says="leads to the other nodes",
            loses=CABLE,
        ),
        Wrong(
            "for one of the libraries",
            plan(names="NCCL_SOCKET_IFNAME={cable}"),
            says="does not say GLOO_SOCKET_IFNAME",
            loses=CABLE,
        ),
        Wrong(
            "one id for all jobs",
            plan(meet=RIGHT_PLAN["meet"].replace("{job}", "ddpz")),
            says="comes to the wrong port joins the wrong job",
            loses=MIX,
        ),
        Wrong(
            "one port for all jobs",
            plan(meet=RIGHT_PLAN["meet"].replace("{port}", "29500")),
            says="uses the store of the first, and dies with it",
            loses=MIX,
        ),
        Wrong(
            "the words of the script lost",
            plan(script="{script.split()[0]}"),
            says="All nodes must run the same",
            loses=SAME,
        ),
        Wrong(
            "an option that is none",
            plan(nnodes="--nodes {len(nodes)}"),
            says="torchrun refuses it",
            loses=MEET,
        ),
        Wrong("python", plan().replace(" torchrun ", " python "), "must call torchrun", MEET),
    ],
}

WRONG["16.capstone"] = [
    Wrong(
        "no prediction",
        page("prediction = {}"),
        says="prediction: 'sent' is missing",
        loses=EVIDENCE,
    ),
    Wrong(
        "another run than the one planned",
        page('measurement["steps"] = 30'),
        says="it is another run",
        loses=EVIDENCE,
    ),
    Wrong(
        "the lesson's printed run, stated as it is",
        page(
            'plan |= {"seed": 0, "stage": 3, "steps": 30, "save_every": 5, "kill": 12}',
            f"quiet = {LOSSES[0, 30]}",
            'measurement |= {"seed": 0, "stage": 3, "steps": 30, "save_every": 5}',
            'measurement |= {"uninterrupted": quiet, "killed": quiet[:12], "resumed_at": 10}',
            'measurement |= {"resumed": quiet[10:], "sent": [271_871, 262_093]}',
            'measurement["weights"] = measurement["weights_resumed"] = [164.9819, 13.38013]',
            'prediction |= {"sent": 257_280, "goodput": 30 / 32}',
            'refuted_outside["sent"] = [255_000, 290_000]',
        ),
        says="Seed 0 is the lesson's",
        loses=EVIDENCE,
    ),
    Wrong(
        "the lesson's printed losses under another seed",
        page(
            f"quiet = {LOSSES[0, 30][:20]}",
            'measurement |= {"uninterrupted": quiet, "killed": quiet[:10], "resumed": quiet[8:]}',
        ),
        says="trained the same steps with seed 4711",
        loses=EVIDENCE,
    ),
    Wrong(
        "another learner's run under one's own seed",
        page('plan["seed"] = measurement["seed"] = 4712'),
        says="trained the same steps with seed 4712",
        loses=EVIDENCE,
    ),
    Wrong(
        "invented losses",
        page(
            "quiet = [round(5.54 - 0.03 * step, 3) for step in range(20)]",
            'measurement |= {"uninterrupted": quiet, "killed": quiet[:10], "resumed": quiet[8:]}',
        ),
        says="This check trained the same steps",
        loses=EVIDENCE,
    ),
    Wrong(
        "one loss changed",
        page("quiet[16] = 5.026"),
        says="Step 17 has the loss 5.026 on the page",
        loses=EVIDENCE,
    ),
    Wrong(
        "losses that are no numbers",
        page('measurement["uninterrupted"] = [float("nan")] * 20'),
        says="'uninterrupted' must be a list of finite numbers",
        loses=EVIDENCE,
    ),
    Wrong(
        "a goodput that is no number",
        page('prediction["goodput"] = float("nan")'),
        says="must be a finite number",
        loses=EVIDENCE,
    ),
    Wrong(
        "a digest as a fingerprint",
        page('measurement["weights"] = measurement["weights_resumed"] = ["00", "00"]'),
        says="'weights' must be a list of finite numbers",
        loses=EVIDENCE,
    ),
    Wrong(
        "an invented fingerprint",
        page('measurement["weights"] = measurement["weights_resumed"] = [160.4920, 13.29632]'),
        says="the sum of all weights and their norm",
        loses=EVIDENCE,
    ),
    Wrong(
        "a fingerprint of one number",
        page('measurement["weights"] = measurement["weights_resumed"] = [164.8103]'),
        says="must be two numbers",
        loses=EVIDENCE,
    ),
    Wrong(
        "gibberish in words and numbers",
        page(
            'explanation = "apple pear plum"',
            "quiet = [5.0 - 0.001 * step for step in range(20)]",
            'measurement |= {"uninterrupted": quiet, "killed": quiet[:10], "resumed": quiet[8:]}',
            'measurement["weights"] = measurement["weights_resumed"] = [1.0, 1.0]',
        ),
        says="Step 1 has the loss 5 on the page",
        loses=EVIDENCE,
    ),
    Wrong(
        "another model",
        page('measurement |= {"parameters": 50_000}'),
        says="has 42,880 parameters, not 50,000",
        loses=EVIDENCE,
    ),
    Wrong(
        "no node died",
        page('measurement["killed"] = quiet', 'measurement["resumed_at"] = 20'),
        says="no node died in it",
        loses=DIED + REFUTE,
    ),
    Wrong(
        "the kill moved to later steps",
        page('measurement |= {"killed": quiet[:15], "resumed_at": 12, "resumed": quiet[12:]}'),
        says="the kill was planned after 10",
        loses=DIED,
    ),
    Wrong(
        "the kill moved to an earlier step",
        page('measurement["killed"] = quiet[:9]'),
        says="the kill was planned after 10",
        loses=DIED + REFUTE,
    ),
    Wrong(
        "the line that begins again is left out",
        page('measurement["resumed"] = quiet[10:]'),
        says="it did not reach the end",
        loses=DIED,
    ),
    Wrong(
        "resumed from no save",
        page('measurement["resumed_at"] = 9', 'measurement["resumed"] = quiet[9:]'),
        says="is not the last one saved",
        loses=DIED + REFUTE,
    ),
    Wrong(
        "the resumed run has other losses",
        page('measurement["resumed"] = [loss + 0.01 for loss in quiet[8:]]'),
        says="are equal to the last digit",
        loses=DIED,
    ),
    Wrong(
        "the optimizer's state was not saved",
        page('measurement["weights_resumed"] = [164.7921, 13.29402]'),
        says="Was the optimizer's state saved too?",
        loses=DIED,
    ),
    Wrong(
        "elements for bytes",
        page('prediction["sent"] /= 4', 'refuted_outside["sent"] = [42_000, 51_000]'),
        says="Those are elements",
        loses=FORMULA + REFUTE,
    ),
    Wrong(
        "all ranks together",
        page(
            'prediction["sent"] *= 2',
            'refuted_outside["sent"] = [171_000, 250_000]',
            'prediction["sent"] = 2 * 171_520',
            'refuted_outside["sent"] = [340_000, 400_000]',
            'holds["sent"] = False',
        ),
        says="ranks send this much together",
        loses=FORMULA,
    ),
    Wrong(
        "stage 3's bytes",
        page(
            'prediction["sent"] *= 1.5',
            'refuted_outside["sent"] = [255_000, 300_000]',
            'holds["sent"] = False',
        ),
        says="Stage 3 sends this much",
        loses=FORMULA,
    ),
    Wrong(
        "the ledger of all steps",
        page(
            'measurement["sent"] = [20 * n for n in measurement["sent"]]', 'holds["sent"] = False'
        ),
        says="divided by the steps",
        loses=FORMULA,
    ),
    Wrong(
        "goodput as the share of steps before the kill",
        page('prediction["goodput"] = 10 / 20'),
        says="Useful steps over all steps would be 0.909",
        loses=GOODPUT,
    ),
    Wrong(
        "all steps since the beginning are lost",
        page(
            'prediction |= {"steps_twice": 10, "goodput": 20 / 30}',
            'refuted_outside["steps_twice"] = [9, 11]',
            'holds["steps_twice"] = False',
        ),
        says="Only steps since the last save are lost",
        loses=GOODPUT,
    ),
    Wrong(
        "a range that nothing can leave",
        page('refuted_outside["steps_twice"] = [0, 4]'),
        says="accepts almost anything",
        loses=REFUTE,
    ),
    Wrong(
        "a range without the prediction",
        page('refuted_outside["sent"] = [180_000, 210_000]'),
        says="must lie between them",
        loses=REFUTE,
    ),
    Wrong(
        "a refuted prediction that is said to hold",
        page(
            'prediction |= {"steps_twice": 3, "goodput": 20 / 23}',
            'refuted_outside["steps_twice"] = [3, 4]',
        ),
        says="holds: 'steps_twice' is True, but 2 was measured",
        loses=REFUTE,
    ),
]

# ---- what the texts promise -> (the criterion, the kind of case), or None

PROMISES = {
    "16.hierarchical": {
        "may have placed the ranks in any order": (*DEALT, "dealt"),
        "In the lesson a mesh gave each rank its two groups": None,
        "There are M nodes with L ranks each": None,
        "All ranks call it once": None,
        "replaces the tensor by the sum over all ranks": (*BLOCKS, ""),
        "In each call every rank sends at most": (*BETWEEN, "dealt"),
        "counts as sent between nodes": None,
        "the same list on every rank": None,
        "L need not divide the length": (*ANY, "uneven"),
        "A function that adds a tensor up": (*BLOCKS, ""),
        "of each rank the number of its node": (*DEALT, "dealt"),
        "any float dtype": (*ANY, "uneven"),
    },
    "16.halving_doubling": {
        "Yours takes any number of ranks N": (*ANY_WORLD, "any"),
        "Each rank from P on sends its tensor": (*ANY_WORLD, "any"),
        "In each round a rank sends one message": (*MESSAGES, ""),
        "Each rank from P on is sent the sum": (*ANY_WORLD, "any"),
        "So these are the limits for every rank": (*BYTES, "any"),
        "and no collective": (*MESSAGES, ""),
        "may be smaller than N": (*ANY, "uneven"),
        "Let P be the largest power of two": None,
        "An empty part needs no message": None,
        "any float dtype": (*ANY, "uneven"),
        "Replace the tensor on every rank by the sum over all ranks": (*SUM, ""),
    },
    "16.launch_plan": {
        "one line for each node, in their order": (*MEET, ""),
        "an empty terminal on each": None,
        "Its ranks are the processes of all nodes": (*GPUS, ""),
        "Nodes may have different numbers of GPUs": (*GPUS, "unequal"),
        "Every node runs the same script with the same words": (*SAME, ""),
        "the ranks can start again": (*AGAIN, ""),
        "for NCCL and for gloo": (*CABLE, ""),
        "must not mix": (*MIX, "two"),
        "each job uses the name and the port that it was given": (*MIX, "two"),
        "given to no other job": (*MIX, "two"),
        "The check starts nothing": None,
        "`--nnodes` may be a range": None,
        "Then the job may begin without some of them": None,
        "To see them live": None,
        "The line to type on each node": (*MEET, ""),
        "nodes: of each": (*GPUS, ""),
        "a name that no other job has": (*MIX, "two"),
    },
    "16.capstone": {
        "has your seed and no other": (*EVIDENCE, ""),
        "trains all steps of your plan again": (*EVIDENCE, ""),
        "by the formula of your stage": (*FORMULA, ""),
        "steps that will be done twice": (*GOODPUT, ""),
        "the ledger of the same run": (*FORMULA, ""),
        "with a death, and with an end": (*DIED, ""),
        "a measurement outside refutes it": (*REFUTE, ""),
        "whether the measurement lies inside": (*REFUTE, ""),
        "A prediction may be wrong": None,
        "No point depends on its words": None,
        "so each learner has another run": None,
        "at most 60 steps": (*EVIDENCE, ""),
        "the step after which a node dies": (*DIED, ""),
    },
}

# ---- mutants of the solution that are right ----

ALIKE = "all nodes have as many ranks"
ONCE = "it is called once in a process"
OWN_RANGE = "the range is the learner's choice: it holds the prediction, and is not too wide"
A_BYTE = "a byte in a hundred thousand: what is rounded up is more"
EQUIVALENT = {
    "16.hierarchical": {
        '`def hierarchical(nodes): """A function that adds a tensor...` -> '
        "its first result, kept": ONCE,
        "`rank = dist.get_rank()` -> the first one, kept": ONCE,
        "`local = len(on_node[nodes[rank]])` -> the first one, kept": ONCE,
        "`sorted(set(nodes))` -> `list(set(nodes))`": "any order will do, the same on all ranks",
        "`zip(*on_node.values(), strict=True)` -> `zip(*on_node.values())`": ALIKE,
        "`True` -> `False`": ALIKE,
        "`nodes[rank]` -> `nodes[rank - 1]`": ALIKE,
        "`nodes[rank]` -> `nodes[0]`": ALIKE,
        "`nodes[rank]` -> `nodes[-1]`": ALIKE,
    },
    "16.halving_doubling": {
        "`if rank & distance: mine, other = (other, mine)` -> if not rank & distance": (
            "the partners keep the other half each"
        ),
    },
    "16.capstone": {
        '`def page(): """The page, in a dict of six parts. plan: {"...` -> '
        "its first result, kept": ONCE,
        "`15` -> `14`": "a step may end after the kill, before the peer is missed",
        "`4 * 2 * 42880 * (2 - 1)` -> `4 * 2 * 42880`": "times one",
        "`4 * 2 * 42880 * (2 - 1)` -> `4 * 2 * 42880 / (2 - 1)`": "times one",
        "`2 - 1` -> `1`": "the same number",
        "`42880` -> `42881` (#2)": A_BYTE,
        "`42880` -> `42879` (#2)": A_BYTE,
        "`197899` -> `197900`": A_BYTE,
        "`197899` -> `197898`": A_BYTE,
        "`177170` -> `177171`": A_BYTE,
        "`177170` -> `177169`": A_BYTE,
        "`170000` -> `170001`": OWN_RANGE,
        "`170000` -> `169999`": OWN_RANGE,
        "`205000` -> `205001`": OWN_RANGE,
        "`205000` -> `204999`": OWN_RANGE,
        "`3` -> `2` (#2)": OWN_RANGE,
        "`4` -> `5`": OWN_RANGE,
        "`4` -> `3`": OWN_RANGE,
    },
    "16.launch_plan": {"`0` -> `-1`": "any node's address will do, the same on all"},
}

# ---- right answers that look different from the solution ----

RIGHT = {
    "16.hierarchical": [
        (
            "messages inside the node, new_subgroups_by_enumeration for the groups",
            """
def hierarchical(nodes):
    rank = dist.get_rank()
    rows = [[r for r, n in enumerate(nodes) if n == name] for name in dict.fromkeys(nodes)]
    intra, _ = dist.new_subgroups_by_enumeration(rows)
    inter, _ = dist.new_subgroups_by_enumeration([list(column) for column in zip(*rows)])
    mine = next(row for row in rows if rank in row)
    place, L = mine.index(rank), len(mine)

    def all_reduce(tensor):
        size = (len(tensor) + L - 1) // L
        whole = tensor.new_zeros(size * L)
        whole[: len(tensor)] = tensor
        parts = list(whole.split(size))
        inbox = [torch.empty_like(part) for part in parts]
        inbox[place] = parts[place].clone()
        ops = []
        for k, other in enumerate(mine):
            if other != rank:
                ops += [dist.P2POp(dist.isend, parts[k], other)]
                ops += [dist.P2POp(dist.irecv, inbox[k], other)]
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        own = torch.stack(inbox).sum(0)
        dist.all_reduce(own, group=inter)
        dist.all_gather(parts, own, group=intra)
        tensor.copy_(torch.cat(parts)[: len(tensor)])

    return all_reduce
""",
        ),
    ],
    "16.halving_doubling": [
        (
            "recursive, distant partners first, first and last as numbers",
            """
def halving_doubling(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    P = 1
    while 2 * P <= world:
        P *= 2
    if rank >= P:
        dist.send(tensor, rank - P)
        dist.recv(tensor, rank - P)
        return
    buffer = torch.empty_like(tensor)
    if rank + P < world:
        dist.recv(buffer, rank + P)
        tensor.add_(buffer)

    def swap(partner, out, into):
        works = []
        if len(out):
            works.append(dist.isend(out, partner))
        if len(into):
            works.append(dist.irecv(into, partner))
        for work in works:
            work.wait()

    def solve(first, last, distance):
        if distance == 0:
            return
        partner, middle = rank ^ distance, (first + last + 1) // 2
        low, high = tensor[first:middle], tensor[middle:last]
        keep, give = (high, low) if rank & distance else (low, high)
        swap(partner, give, buffer[: len(keep)])
        keep.add_(buffer[: len(keep)])
        if rank & distance:
            solve(middle, last, distance // 2)
        else:
            solve(first, middle, distance // 2)
        swap(partner, keep, give)

    solve(0, len(tensor), P // 2)
    if rank + P < world:
        dist.send(tensor, rank + P)
""",
        ),
    ],
    "16.capstone": [
        ("another interval and kill, two steps lost", page()),
        (
            "a prediction that was refuted, and says so",
            page(
                'prediction |= {"steps_twice": 3, "goodput": 20 / 23}',
                'refuted_outside["steps_twice"] = [3, 4]',
                'holds["steps_twice"] = False',
            ),
        ),
    ],
    "16.launch_plan": [
        (
            "= in place of spaces, python -m, gpu, an elastic range, and its own head",
            """
def launch_plan(nodes, script, job, port):
    def line(node):
        cable = node["interface"]
        return (
            f"GLOO_SOCKET_IFNAME={cable} NCCL_SOCKET_IFNAME={cable} "
            "python -m torch.distributed.run "
            f"--nnodes=1:{len(nodes)} --nproc_per_node=gpu --max_restarts=1 --rdzv_id={job} "
            f"--rdzv_backend=c10d --rdzv_endpoint={nodes[-1]['address']}:{port} {script}"
        )

    return [line(node) for node in nodes]
""",
        ),
    ],
}

ASSUMED = {
    "16.hierarchical": {
        "frozen nodes": "the text says that it is called once",
        "kept": "the text says that it is called once",
    }
}


# -- what authors who had not read the judge got away with -----------------------------------------

WRONG["16.hierarchical"] += [
    Wrong(
        "groups by the order of the ranks, whatever `nodes` says",
        "def hierarchical(nodes):\n    nodes = sorted(nodes)\n"
        + hierarchy().split("def hierarchical(nodes):\n")[1],
        says="The groups follow the order of the ranks. Make them from `nodes`.",
        loses=BETWEEN,
    ),
    Wrong(
        "one padded buffer for all tensors",
        altered(
            "16.hierarchical",
            (
                "padded = torch.nn.functional.pad(tensor, (0, local * size - len(tensor)))",
                "padded = kept.setdefault(size, tensor.new_zeros(local * size))\n"
                "        padded[: len(tensor)] = tensor",
            ),
            ("    def all_reduce(tensor):", "    kept = {}\n\n    def all_reduce(tensor):"),
        ),
        says="is wrong",
        loses=ANY,
    ),
    Wrong(
        "it travels as float32",
        altered(
            "16.hierarchical",
            ("functional.pad(tensor,", "functional.pad(tensor.float(),"),
        ),
        says="it sent float32, and the tensor is bfloat16",
        loses=BETWEEN,
    ),
]
WRONG["16.halving_doubling"] += [
    Wrong(
        "two messages in each round",
        altered(
            "16.halving_doubling",
            (
                "messages.append(dist.P2POp(dist.isend, outgoing, partner))",
                "messages += [dist.P2POp(dist.isend, t, partner)\n"
                "                         for t in outgoing.tensor_split(2)]",
            ),
            (
                "messages.append(dist.P2POp(dist.irecv, incoming, partner))",
                "messages += [dist.P2POp(dist.irecv, t, partner)\n"
                "                         for t in incoming.tensor_split(2)]",
            ),
        ),
        says="One message in each round is enough",
        loses=MESSAGES,
    ),
]
WRONG["16.launch_plan"] += [
    Wrong(
        "the port after the given one",
        plan(meet=RIGHT_PLAN["meet"].replace("{port}", "{port + 1}")),
        says="Another port may be taken",
        loses=MIX,
    ),
]


# -- 16.broadcast ----------------------------------------------------------------------------------

EVERYWHERE = ("the root's numbers on every rank",)
UNEQUAL = ("nodes of unequal sizes, any order, any root",)
LENGTHS = ("any length and dtype",)
CROSSES = ("every byte once into each node, and at most once out of it",)
PIECES = ("in pieces, which are passed on at once",)

TREE = """
def broadcast(tensor, root, nodes, piece):
    rank, world = dist.get_rank(), dist.get_world_size()
    heads = {nodes[root]: root}  # the first rank of each node, which gets the tensor for it
    for r, node in enumerate(nodes):
        heads.setdefault(node, r)
    row = list(heads.values())
    source = {r: heads[nodes[r]] for r in range(world)}
    for before, after in zip(row, row[1:]):
        source[after] = %s
    targets = [r for r in range(world) if source[r] == rank and r != rank]
    sends = []
    %s
    for send in sends:
        send.wait()
"""
ON = (
    "before",
    (
        "for part in tensor.split(piece):\n"
        "        if rank != root:\n"
        "            dist.recv(part, source[rank])\n"
        "        sends += [dist.isend(part, r) for r in targets]"
    ),
)


def tree(source=ON[0], loop=ON[1]):
    return TREE % (source, loop)


def row(*changes):
    return altered("16.broadcast", *changes)


SORTED = "key=lambda r: (nodes[r] != nodes[root], nodes[r], r != root)"
WRONG["16.broadcast"] = [
    Wrong(
        "another memory",
        altered(
            "16.broadcast",
            ("    sends = []\n", "    sends, given, tensor = [], tensor, tensor.clone()\n"),
            ("        send.wait()\n", "        send.wait()\n    given.data = tensor\n"),
        ),
        says="receive into the tensor that was given",
        loses=("the root's numbers on every rank",),
    ),
    Wrong(
        "the last piece reaches back",
        altered(
            "16.broadcast",
            (
                "tensor.split(piece)",
                "[tensor[max(0, min(i, len(tensor) - piece)) :][:piece]"
                " for i in range(0, len(tensor), piece)]",
            ),
        ),
        says="it is sent some of them twice",
        loses=CROSSES,
    ),
    Wrong(
        "torch's own",
        "def broadcast(tensor, root, nodes, piece):\n    dist.broadcast(tensor, root)\n",
        says="called broadcast. Build it from messages between two ranks",
        loses=CROSSES,
    ),
    Wrong(
        "from the root to all",
        """
def broadcast(tensor, root, nodes, piece):
    rank, world = dist.get_rank(), dist.get_world_size()
    for part in tensor.split(piece):
        if rank == root:
            for other in range(world):
                if other != root:
                    dist.send(part, other)
        else:
            dist.recv(part, root)
""",
        says="and a rank that has it can pass it on inside its node",
        loses=CROSSES,
    ),
    Wrong(
        "from the root to a rank of each node",
        tree(source="root"),
        says="The next node can send it on",
        loses=CROSSES,
    ),
    Wrong(
        "in the order of the ranks",
        row((SORTED, "key=lambda r: (r - root) % len(nodes)")),
        says="were sent to the root's node, which has them",
        loses=CROSSES,
    ),
    Wrong(
        "the root is rank 0",
        row((SORTED, "key=lambda r: (nodes[r] != nodes[0], nodes[r], r)")),
        says="Rank 2 is the root, and its tensor must stay",
        loses=EVERYWHERE,
    ),
    Wrong(
        "the first rank of the root's node begins",
        row((SORTED, "key=lambda r: (nodes[r] != nodes[root], nodes[r], r)")),
        says="Rank 1 is the root, and its tensor must stay",
        loses=EVERYWHERE,
    ),
    Wrong(
        "nodes in the order of their numbers, root's or not",
        row((SORTED, "key=lambda r: (r != root, nodes[r], r)")),
        says="were sent to the root's node, which has them",
        loses=CROSSES,
    ),
    Wrong(
        "nodes of equal sizes",
        tree().replace(
            "    row = list(heads.values())",
            "    L = world // len(heads)\n"
            "    heads = {r // L: r // L * L for r in range(world)} | {root // L: root}\n"
            "    nodes = [r // L for r in range(world)]\n"
            "    row = [root, *(h for h in heads.values() if h != root)]",
        ),
        says="With root 0 and nodes [0, 1, 0, 1]",
        loses=CROSSES,
    ),
    Wrong(
        "nodes are numbered from 0",
        row(
            (
                f"row = sorted(ranks, {SORTED})",
                "M = len(set(nodes))\n"
                "    row = [r for k in range(M) for r in ranks\n"
                "           if nodes[r] == (nodes[root] + k) % M]\n"
                "    row.remove(root)\n"
                "    row.insert(0, root)",
            )
        ),
        says="raised ValueError",
        loses=UNEQUAL,
    ),
    Wrong(
        "the full tensor in one message",
        row(("tensor.split(piece)", "[tensor]")),
        says="in one message, and `piece` is",
        loses=PIECES,
    ),
    Wrong(
        "`piece` messages",
        row(("tensor.split(piece)", "tensor.chunk(piece)")),
        says="messages. 6 of at most 40 elements hold all 240 of them",
        loses=PIECES,
    ),
    Wrong(
        "everything received before anything is sent",
        tree(
            loop="for part in tensor.split(piece) if rank != root else []:\n"
            "        dist.recv(part, source[rank])\n"
            "    for part in tensor.split(piece):\n"
            "        sends += [dist.isend(part, r) for r in targets]"
        ),
        says="before it sends the first one to rank",
        loses=PIECES,
    ),
    Wrong(
        "its node first, and the next node when all is there",
        tree(
            loop="near = [r for r in targets if nodes[r] == nodes[rank]]\n"
            "    for part in tensor.split(piece):\n"
            "        if rank != root:\n"
            "            dist.recv(part, source[rank])\n"
            "        sends += [dist.isend(part, r) for r in near]\n"
            "    for part in tensor.split(piece):\n"
            "        sends += [dist.isend(part, r) for r in targets if r not in near]"
        ),
        says="Then each further node adds the time of the full tensor",
        loses=PIECES,
    ),
    Wrong(
        "the last piece, which is shorter, is left out",
        row(
            (
                "tensor.split(piece)",
                "[tensor[i * piece : (i + 1) * piece] for i in range(len(tensor) // piece)]",
            )
        ),
        says="elements are the root's, and the rest never came",
        loses=LENGTHS,
    ),
    Wrong(
        "round to the root again",
        row(
            ("if place > 0:", "if place > 0 and len(row) > 1:"),
            (
                "    for send in sends:\n        send.wait()",
                "    if len(row) > 1 and place == len(row) - 1:\n"
                "        dist.send(tensor, root)\n"
                "    if len(row) > 1 and place == 0:\n"
                "        dist.recv(torch.empty_like(tensor), row[-1])\n"
                "    for send in sends:\n        send.wait()",
            ),
        ),
        says="were sent to the root's node, which has them",
        loses=CROSSES,
    ),
    Wrong(
        "sends that nobody waits for",
        row(("        send.wait()", "        pass")),
        says="never waited for",
        loses=CROSSES,
    ),
    Wrong(
        "into a buffer",
        row(
            ("dist.recv(part, row[place - 1])", "dist.recv(part := part.clone(), row[place - 1])"),
        ),
        says="receive into the tensor that was given",
        loses=EVERYWHERE,
    ),
    Wrong(
        "as float32",
        row(
            ("tensor.split(piece)", "(new := tensor.float()).split(piece)"),
            (
                "    for send in sends:\n        send.wait()",
                "    for send in sends:\n        send.wait()\n    tensor.copy_(new)",
            ),
        ),
        says="sent float32, and the tensor is bfloat16",
        loses=CROSSES,
    ),
    Wrong(
        "all parts to all, and each passes on its part",
        """
def broadcast(tensor, root, nodes, piece):
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = list(tensor.tensor_split(world))
    sends = []
    for r, part in enumerate(parts):
        if len(part) == 0 or r == root:
            continue
        if rank == root:
            sends.append(dist.isend(part, r))
        elif rank == r:
            dist.recv(part, root)
    for r, part in enumerate(parts):
        for other in range(world):
            if len(part) and other not in (r, root):
                if rank == r:
                    sends.append(dist.isend(part, other))
                elif rank == other:
                    dist.recv(part, r)
    for send in sends:
        send.wait()
""",
        says="were sent to the root's node, which has them",
        loses=CROSSES,
    ),
]

RIGHT["16.broadcast"] = [
    ("one rank of each node receives for it, and sends to the others and to the next", tree()),
    (
        "all receives are posted at the beginning",
        """
def broadcast(tensor, root, nodes, piece):
    me = dist.get_rank()
    groups = {}
    for r, n in enumerate(nodes):
        groups.setdefault(n, []).append(r)
    first = groups.pop(nodes[root])
    first.remove(root)
    line = [root] + first + [r for g in groups.values() for r in g]
    i = line.index(me)
    pieces = [tensor[k : k + piece] for k in range(0, tensor.numel(), piece)]
    incoming = [dist.irecv(p, line[i - 1]) for p in pieces] if i else []
    outgoing = []
    for k, p in enumerate(pieces):
        if incoming:
            incoming[k].wait()
        if i + 1 < len(line):
            outgoing.append(dist.isend(p, line[i + 1]))
    [w.wait() for w in outgoing]
""",
    ),
    (
        "receive a piece while the one before it is sent, blocking",
        """
def broadcast(tensor, root, nodes, piece):
    world, rank = dist.get_world_size(), dist.get_rank()
    names = sorted(set(nodes), key=lambda name: (name != nodes[root], -name))
    chain = [r for name in names for r in range(world) if nodes[r] == name]
    chain.insert(0, chain.pop(chain.index(root)))
    at = chain.index(rank)
    parts = list(tensor.split(piece))
    for turn in range(len(parts) + 1):
        ops = []
        if at > 0 and turn < len(parts):
            ops.append(dist.P2POp(dist.irecv, parts[turn], chain[at - 1]))
        if at < world - 1 and turn > 0:
            ops.append(dist.P2POp(dist.isend, parts[turn - 1], chain[at + 1]))
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
""",
    ),
]
PROMISES["16.broadcast"] = {
    "a large tensor that all other ranks need": (*EVERYWHERE, ""),
    "carries it M − 1 times": None,
    "Each node has one link": None,
    "nodes: of each rank the number of its node": (*UNEQUAL, "unequal"),
    "every byte comes into a node once": (*CROSSES, ""),
    "every byte leaves a node at most once": (*CROSSES, "unequal"),
    "Every rank but the root receives each byte once": (*PIECES, ""),
    "M nodes take M − 1 times as long as two": None,
    "A message has at most `piece` elements": (*PIECES, ""),
    "and wait for each send": (*CROSSES, ""),
    "Use no collective and no group": (*CROSSES, ""),
    "into the tensor of every other rank": (*EVERYWHERE, ""),
    "All ranks call it": None,
    "any dtype, of one length on all ranks, at least 1": (*LENGTHS, "uneven"),
    "left as it is": (*EVERYWHERE, ""),
    "message may have, at least 1": (*LENGTHS, "uneven"),
}
ONE_WORLD = "a process has one world"
EQUIVALENT["16.broadcast"] = {
    "`ranks = range(dist.get_world_size())` -> the first one, kept": ONE_WORLD,
    "`len(row)` -> `_kept.setdefault(16, len(row))`": ONE_WORLD,
}
