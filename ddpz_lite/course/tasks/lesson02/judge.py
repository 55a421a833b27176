"""Tasks of lesson 02: ranks and collectives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil, log2
from typing import Any

import torch

from ddpz_lite.course.check.chance import apart
from ddpz_lite.course.check.compare import close, differs
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vary import drawn_again, lengthened
from ddpz_lite.course.check.vocabulary import (
    all_in_spans,
    explain,
    padded_shards,
    waited_for,
    world_name,
)

MESSAGES = ("send", "recv")


def _each_call(judge: Callable[[Observed, int], str | None]) -> Callable[[Observed], str | None]:
    """A judge of one call of the answer, made a judge of all calls of a case."""

    def judge_all(seen: Observed) -> str | None:
        told = (judge(seen, number) for number in range(len(seen.data[0]["tensors"])))
        return next(filter(None, told), None)

    return judge_all


def _begun(case: Case, number: int) -> list[torch.Tensor]:
    """The tensors that the ranks began a call with."""
    return [rank["tensors"][number] for rank in case.inputs]


def _only_messages(seen: Observed, what: str) -> str | None:
    if wrong := all_in_spans(seen):
        return wrong
    for rank in range(seen.case.world):
        for op in seen.ops(rank):
            if op not in MESSAGES:
                return f"Rank {rank} called {op}. Build {what} from send and recv alone."
    return None


# -- 02.tree_broadcast -----------------------------------------------------------------------------


def _tree_cases(rng: torch.Generator) -> list[Case]:
    forms = [((5, 3), torch.float32), ((2, 3, 2), torch.float64), ((), torch.int64)]

    def case(world: int, *roots: int, kind: str = "") -> Case:
        def call(number: int, root: int) -> dict[str, Any]:
            shape, dtype = forms[number % len(forms)]
            drawn = 1000 * torch.randn(shape, generator=apart(rng))
            return {"tensor": drawn.to(dtype), "root": root}

        inputs = [{"calls": [call(*pair) for pair in enumerate(roots)]} for _ in range(world)]
        each = "root" if len(set(roots)) == 1 else "roots"
        says = f"{world_name(world)}, {each} {', '.join(map(str, dict.fromkeys(roots)))}"
        return Case(says, inputs, kind)

    def again(rank: int, first: dict[str, Any]) -> dict[str, Any]:
        return {"root": 0} | drawn_again(first, apart(rng), "tensor")

    cases = [case(4, 0, 0, 0), case(1, 0), case(2, 0, 0), case(3, 0, 0), case(7, 0),
             case(3, 1, 2, 0, kind="root"), case(4, 2, 3, kind="root"),
             case(5, 4, kind="root")]  # fmt: skip
    lengthened(cases[6].inputs, "calls", again)
    return cases


def _tree_values(seen: Observed) -> str | None:
    return _each_call(_tree_value)(seen)


def _tree_value(seen: Observed, number: int) -> str | None:
    calls = [rank["calls"][number] for rank in seen.case.inputs]
    root, begun = calls[0]["root"], [call["tensor"] for call in calls]
    wrong = [
        (rank, got["tensors"][number])
        for rank, got in enumerate(seen.data)
        if not close(got["tensors"][number], begun[root], bitwise=True)
    ]
    for rank, tensor in wrong:
        for other in range(seen.case.world):
            if other != rank and close(tensor, begun[other], bitwise=True):
                return f"Rank {rank} has rank {other}'s tensor, but the root is rank {root}."
    for rank, tensor in wrong:
        if close(tensor, begun[rank], bitwise=True):
            if "recv" in seen.ops(rank, f"call {number}"):
                return (
                    f"Rank {rank} received, but the tensor that it was given has not changed. "
                    "Receive into that tensor; `tensor = ...` only gives its name to another one."
                )
            return f"Rank {rank} still has its own tensor: no rank sent it the root's."
        return differs(tensor, begun[root], f"Rank {rank}'s tensor", bitwise=True)
    return None


def rounds(seen: Observed, during: str | None = None) -> int:
    """Rounds that the messages take when a rank sends or receives one message at a time.

    A message begins when both ends are free. Sends and receives between two ranks pair up in order.
    """
    queues = [deque(seen.calls(rank, during)) for rank in range(seen.case.world)]
    free = [0] * seen.case.world
    while any(queues):
        for rank, queue in enumerate(queues):
            if queue and queue[0].op == "send":
                peer = queue[0].peer
                other = queues[peer]
                if other and other[0].op == "recv" and other[0].peer in (rank, None):
                    queue.popleft(), other.popleft()
                    free[rank] = free[peer] = max(free[rank], free[peer]) + 1
                    break
        else:
            raise ValueError("sends and receives do not pair up")
    return max(free)


def _tree_messages(seen: Observed) -> str | None:
    """Of a broadcast that works: what comes from another root proves nothing."""
    wrong = _only_messages(seen, "the broadcast") or _tree_values(seen)
    return wrong or _each_call(_tree_count)(seen) or waited_for(seen)


def _tree_count(seen: Observed, number: int) -> str | None:
    world = seen.case.world
    sends = sum(seen.ops(rank, f"call {number}").count("send") for rank in range(world))
    if sends == world - 1:
        return None
    return (
        f"There were {sends} messages. {world - 1} are enough: every rank but the root receives "
        "once."
    )


def _tree_rounds(seen: Observed) -> str | None:
    if _tree_messages(seen):
        return "Rounds are counted when there are N - 1 messages."
    return _each_call(_tree_round)(seen)


def _tree_round(seen: Observed, number: int) -> str | None:
    world, during = seen.case.world, f"call {number}"
    least, needed = ceil(log2(world)), rounds(seen, during)
    if needed <= least:
        return None
    root = seen.case.inputs[0]["calls"][number]["root"]
    sends = [seen.ops(rank, during).count("send") for rank in range(world)]
    if sends[root] == world - 1:
        return (
            f"The root sends to all others, one after another: {needed} rounds. Every rank that "
            f"has the tensor can help: {least} rounds are enough."
        )
    if max(sends) == 1:
        return (
            f"The tensor goes from one rank to the next: {needed} rounds. In every round, all "
            f"ranks that have it can send: {least} rounds are enough."
        )
    return f"The broadcast takes {needed} rounds, and a tree needs {least}."


TREE = Task(
    id="02.tree_broadcast",
    title="A broadcast in log2 N rounds",
    answer="tree_broadcast",
    job="lesson02.tree_broadcast",
    minutes=15,
    cases=_tree_cases,
    criteria=(
        Criterion("every rank has the root's tensor, root 0", 1, _tree_values, on=("",)),
        Criterion("any root", 1, _tree_values, on=("root",)),
        Criterion("N - 1 messages, by send and recv alone", 1, _tree_messages),
        Criterion("log2 N rounds, rounded up", 2, _tree_rounds),
    ),
    hints=(
        "After one round two ranks have the tensor. How many can have it after the next?",
        "Number the ranks from the root: (rank - root) % N. In round k, which rank sends to which?",
        "For step = 1, 2, 4, ...: ranks below `step` send to rank + step if that is below N; ranks "
        "from `step` to 2 step - 1 receive from rank - step. Numbers as seen from the root.",
    ),
    debrief="gloo broadcasts by this tree. NCCL broadcasts along a ring (its trees are for "
    "all-reduce) and cuts a large tensor into pieces that follow one another, so that all links "
    "are busy.",
)

# -- 02.ring_all_reduce ----------------------------------------------------------------------------


def _ring_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, *lengths: int, kind: str = "", dtype=torch.float32) -> Case:
        def drawn() -> list[torch.Tensor]:
            return [torch.randn(length, generator=apart(rng)).to(dtype) for length in lengths]

        inputs = [{"tensors": drawn()} for _ in range(world)]
        name = "" if dtype is torch.float32 else ", float64"
        says = f"{world_name(world)}, {' and '.join(map(str, lengths))} elements{name}"
        return Case(says, inputs, kind)

    return [case(3, 12, 600), case(1, 6), case(2, 8, 8), case(4, 8000),
            case(3, 10, 11, 2, kind="uneven"), case(4, 1003, 2, kind="uneven"),
            case(2, 7, kind="uneven", dtype=torch.float64)]  # fmt: skip


def _ring_values(seen: Observed) -> str | None:
    return _each_call(_ring_value)(seen)


def _ring_value(seen: Observed, number: int) -> str | None:
    parts, world = _begun(seen.case, number), seen.case.world
    right = torch.stack(parts).sum(0)
    for rank, got in enumerate(seen.data):
        tensor = got["tensors"][number]
        mistakes = {
            "is the mean. An all-reduce with SUM gives the sum.": right / world,
            "has not changed: put the sum into the tensor that was given.": parts[rank],
        }
        if world > 1 and len(right) % world == 0:
            mistakes |= {words: _ring_gone_wrong(parts, slip)[rank] for words, slip in SLIPS}
        told = explain(tensor, right, f"Rank {rank}'s tensor", mistakes)
        if told is None:
            continue
        told = told.strip()
        if "is what you get by" in told:
            return told
        if type(tensor) is torch.Tensor and tensor.shape == right.shape:
            good = (tensor - right).abs() < 1e-3
            if good.any() and not good.all():
                first = int((~good).nonzero()[0])
                return (
                    f"Rank {rank} has the sum in {int(good.sum())} of {len(right)} elements; from "
                    f"element {first} on it is not. Does every chunk go all the way round, also a "
                    "shorter one? Do you wait for each message before you use it?"
                )
            divided = told.endswith("An all-reduce with SUM gives the sum.")
            if not divided and _ring_traffic(seen, number):
                return (
                    f"{told} The messages are those of a ring. Is each received chunk added? Do "
                    "you wait for each message before you use it?"
                )
        return told
    return None


SLIPS = (
    (
        "is what you get by adding in the second half, too: those rounds only copy.",
        "adds",
    ),
    (
        "is what you get by sending one chunk in every round: pass on the one that came last.",
        "fixed",
    ),
    (
        "is what you get by sending one chunk in every round: pass on the one that came last. ",
        "fixed twice",
    ),
)


def _ring_gone_wrong(parts: list[torch.Tensor], slip: str) -> list[torch.Tensor]:
    """What the ranks hold after a ring with one mistake; N divides the length."""
    world = len(parts)
    held = [list(part.clone().chunk(world)) for part in parts]
    for k in range(world - 1):
        out = [held[r][r if "fixed" in slip else (r - k) % world].clone() for r in range(world)]
        for r in range(world):
            held[r][(r - k - 1) % world] = held[r][(r - k - 1) % world] + out[r - 1]
    for k in range(world - 1):
        own = slip == "fixed twice"
        out = [held[r][r if own else (r + 1 - k) % world].clone() for r in range(world)]
        for r in range(world):
            before = held[r][(r - k) % world]
            held[r][(r - k) % world] = before + out[r - 1] if slip == "adds" else out[r - 1]
    return [torch.cat(chunks) for chunks in held]


def _ring_traffic(seen: Observed, number: int) -> bool:
    """Whether the messages of a call are as many and as large as a ring's, between neighbours."""
    world = seen.case.world
    sends = [seen.ops(rank, f"call {number}").count("send") for rank in range(world)]
    others = _ring_messages(seen) or _ring_byte(seen, number)
    return not others and sends == [2 * (world - 1)] * world


def _ring_messages(seen: Observed) -> str | None:
    if wrong := _only_messages(seen, "the ring"):
        return wrong
    world = seen.case.world
    for rank in range(world):
        peers = {c.peer for c in seen.calls(rank) if c.op == "send"}
        if len(peers) > 1:
            return f"Rank {rank} sends to ranks {sorted(peers)}. In a ring it has one neighbour."
        if world > 1 and peers - {(rank + 1) % world, (rank - 1) % world}:
            return f"Rank {rank} sends to rank {peers.pop()}, which is not its neighbour."
    return waited_for(seen)


def _ring_bytes(seen: Observed) -> str | None:
    return _each_call(_ring_byte)(seen)


def _ring_byte(seen: Observed, number: int) -> str | None:
    world, tensor = seen.case.world, _begun(seen.case, number)[0]
    length, size = tensor.numel(), tensor.element_size()
    most = 2 * (world - 1) * ceil(length / world) * size
    for rank in range(world):
        sent = seen.sent(rank, f"call {number}")
        if sent <= most:
            continue
        if sent >= 2 * (world - 1) * length * size:
            how = "It passes the full tensor on, twice around the ring."
        elif sent >= (world - 1) * length * size:
            how = "It passes the full tensor on; pass on one chunk of N."
        else:
            how = "Cut the tensor into N chunks of nearly equal length."
        return f"Rank {rank} sent {sent:,} bytes; 2(N-1)/N of the tensor is {most:,}. {how}"
    return None


def _ring_rounds(seen: Observed) -> str | None:
    return _each_call(_ring_round)(seen)


def _ring_round(seen: Observed, number: int) -> str | None:
    most = 2 * (seen.case.world - 1)
    for rank in range(seen.case.world):
        sends = seen.ops(rank, f"call {number}").count("send")
        if sends > most:
            return f"Rank {rank} sent {sends} messages; a ring takes 2(N-1) = {most}."
    return None


RING = Task(
    id="02.ring_all_reduce",
    title="The ring all-reduce",
    answer="ring_all_reduce",
    job="lesson02.ring_all_reduce",
    minutes=25,
    cases=_ring_cases,
    criteria=(
        Criterion("the sum on every rank", 2, _ring_values, on=("",)),
        Criterion("lengths that do not divide by N", 1, _ring_values, on=("uneven",)),
        Criterion("send and recv between neighbours alone", 1, _ring_messages),
        Criterion("at most 2(N-1)/N of the tensor from each rank", 2, _ring_bytes),
        Criterion("2(N-1) messages from each rank", 1, _ring_rounds),
    ),
    hints=(
        "If every rank passes on one chunk in every round, after how many rounds is a chunk "
        "complete?",
        "First N - 1 rounds that add, so that each rank owns one finished chunk; then N - 1 rounds "
        "that copy. Which chunk does rank r send in round k?",
        "Reduce: send chunk (r - k) % N, add what comes to chunk (r - k - 1) % N. Gather: send "
        "chunk (r + 1 - k) % N, copy what comes into chunk (r - k) % N. torch.tensor_split cuts "
        "unevenly; batch_isend_irecv sends and receives at once. An empty chunk needs no message.",
    ),
    debrief="gloo and NCCL cut each chunk again into segments, so that sending one overlaps adding "
    "the last. Up to latency, the time is that of 2(N-1)/N bytes, whatever N is.",
)

# -- 02.reduce_scatter -----------------------------------------------------------------------------


def _scatter_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, *lengths: int, kind: str = "", dtype=torch.float32) -> Case:
        def drawn() -> list[torch.Tensor]:
            return [torch.randn(length, generator=apart(rng)).to(dtype) for length in lengths]

        name = "" if dtype is torch.float32 else ", bfloat16"
        says = f"{world_name(world)}, {' and '.join(map(str, lengths))} elements{name}"
        return Case(says, [{"tensors": drawn()} for _ in range(world)], kind)

    bf16 = torch.bfloat16
    return [case(3, 600, 12), case(1, 5), case(2, 8, 8), case(4, 16),
            case(3, 10, 11, 1, kind="uneven"), case(4, 1001, 2, kind="uneven"),
            case(3, 900, 100, kind="bf16", dtype=bf16)]  # fmt: skip


def _shards(case: Case, number: int) -> list[torch.Tensor]:
    """What each rank should return: summed in float32, rounded once."""
    parts = _begun(case, number)
    total = torch.stack([part.float() for part in parts]).sum(0)
    return padded_shards([total.to(parts[0].dtype)], case.world)


def _scatter_values(seen: Observed) -> str | None:
    return _each_call(_scatter_value)(seen)


def _scatter_value(seen: Observed, number: int) -> str | None:
    right, world = _shards(seen.case, number), seen.case.world
    exact, size = right[0].dtype is torch.bfloat16, len(right[0])
    for rank, got in enumerate(seen.data):
        shard, mine = got["shards"][number], _begun(seen.case, number)[rank]
        if not close(got["tensors"][number], mine, bitwise=True):
            return f"Rank {rank}'s input has changed; it must stay as it is."
        if close(shard, right[rank], bitwise=exact):
            continue
        if exact and close(shard, right[rank]):
            return (
                f"Rank {rank}'s sum was rounded to bfloat16 several times. Add up in float32, "
                "round once."
            )
        for other in range(world):
            if other != rank and close(shard, right[other]):
                return f"Rank {rank} has the shard of rank {other}."
        if close(shard, right[rank] / world):
            return f"Rank {rank} has the mean of its shard, but the task asks for the sum."
        if close(shard, padded_shards([mine], world)[rank]):
            return f"Rank {rank} has its own part of its own tensor: nothing was added up."
        if type(shard) is torch.Tensor and shard.numel() >= len(mine) > size:
            return f"Rank {rank} has the whole sum. It should keep its shard of {size} elements."
        return differs(shard, right[rank], f"Rank {rank}'s shard")
    return None


def _scatter_bytes(seen: Observed) -> str | None:
    return all_in_spans(seen) or _each_call(_scatter_byte)(seen)


def _scatter_byte(seen: Observed, number: int) -> str | None:
    world, tensor, during = seen.case.world, _begun(seen.case, number)[0], f"call {number}"
    length, size = tensor.numel(), tensor.element_size()
    part = ceil(length / world)
    most = (world - 1) * part * size
    for rank in range(world):
        calls, sent = seen.calls(rank, during), seen.sent(rank, during)
        own = min(part, max(0, length - rank * part))
        least = (length - own) * size  # padding need not travel
        if sent > most:
            with_ = " and ".join(sorted({call.op for call in calls}))
            wide = {call.dtype for call in calls} == {"float32"} and size == 2
            how = "Send every other rank its part, and nothing else."
            if wide and sent <= 2 * most:
                how = "It is sent in float32. Send bfloat16, and convert after receiving."
            return (
                f"Rank {rank} sent {sent:,} bytes with {with_}; (N-1)/N of the tensor is {most:,}. "
                f"{how}"
            )
        if sent < least:
            return f"Rank {rank} sent {sent:,} bytes, but the other ranks' parts are {least:,}."
    return None


REDUCE_SCATTER = Task(
    id="02.reduce_scatter",
    title="Reduce-scatter, at half the price",
    answer="reduce_scatter",
    job="lesson02.reduce_scatter",
    minutes=15,
    cases=_scatter_cases,
    criteria=(
        Criterion("each rank's shard of the sum", 2, _scatter_values, on=("",)),
        Criterion("lengths that do not divide by N", 1, _scatter_values, on=("uneven",)),
        Criterion("(N-1)/N of the tensor from each rank", 2, _scatter_bytes),
        Criterion("bfloat16 is added up in float32", 1, _scatter_values, on=("bf16",)),
    ),
    hints=(
        "Which part of your tensor does rank 2 need? Which parts do you need, and from whom?",
        "all_to_all_single sends the r-th part of the input to rank r. What is left to do locally?",
        "Pad to a multiple of N, all_to_all_single, view as (N, shard), sum over dim 0 in float32, "
        "convert back.",
    ),
    debrief="torch's `sum` adds bfloat16 in float32 by itself; `+=` rounds in each step. PyTorch's "
    "gloo backend runs an all-reduce inside reduce_scatter and pays its bytes. "
    "ddpz_lite.strategies.comm does on gloo what you did, and uses NCCL's reduce-scatter on GPUs.",
)

# -- 02.hangs --------------------------------------------------------------------------------------

CULPRITS = {"A": (2, "barrier"), "B": (0, "broadcast"), "C": (1, "recv")}
ASK = {  # what a wrong answer is told, and never the right one
    "A": "Run it: which ranks return, and which still wait? The cause is the rank that left the "
    "others. The call is the one that it never made.",
    "B": "Run it: `launch` names two calls that meet. Which rank is the only one to make its call?",
    "C": "Write down, rank by rank, which rank sends to which. Which message has no sender or no "
    "receiver?",
}
CALLS = ("all_reduce", "barrier", "broadcast", "send", "recv")
FORM = 'Return a dict: {"A": (rank, "call"), "B": (rank, "call"), "C": (rank, "call")}.'


def _hangs_cases(_: torch.Generator) -> list[Case]:
    return [Case("the three programs", [{}])]


def _form(seen: Observed) -> str | None:
    named: Any = seen.data[0]["named"]
    if type(named) is not dict or set(named) != set(CULPRITS):
        return FORM
    for program, given in named.items():
        if type(given) is not list or [type(part) for part in given] != [int, str]:
            return f'Program {program}: give a pair, a rank and the name of a call: (0, "send").'
        if given[0] not in range(3) or given[1].removeprefix("dist.") not in CALLS:
            return f"Program {program}: the ranks are 0 to 2, and the calls are {', '.join(CALLS)}."
    return None


def _named(program: str):
    def judge(seen: Observed) -> str | None:
        rank, call = seen.data[0]["named"][program]
        culprit, missing = CULPRITS[program]
        if (rank, call.removeprefix("dist.")) == (culprit, missing):
            return None
        if rank == culprit:
            return f"The rank is right, but not the call. {ASK[program]}"
        return f"Rank {rank} does not cause the hang. {ASK[program]}"

    return judge


HANGS = Task(
    id="02.hangs",
    title="Three programs that hang",
    answer="hangs",
    job="lesson02.hangs",
    minutes=10,
    cases=_hangs_cases,
    criteria=(
        Criterion("a rank and a call for each program", 1, _form),
        *(Criterion(f"program {name}", 1, _named(name)) for name in CULPRITS),
    ),
    hints=(
        "For each rank, write down the calls it makes, in order. Where do two lists differ?",
        "Run a program and read which ranks wait, and where. The ranks that wait are the victims.",
        "A: count the calls of each rank. B: compare the names of the first calls. C: draw an "
        "arrow for each send and look for one that no rank receives.",
    ),
    debrief="With NCCL there is no message for ten minutes; then a watchdog ends the job. Its "
    "flight "
    "recorder (TORCH_FR_BUFFER_SIZE) holds the lists that you wrote by hand.",
)

# -- 02.node_all_reduce ----------------------------------------------------------------------------

IN_ORDER = [0, 0, 1, 1]


def _node_cases(rng: torch.Generator) -> list[Case]:
    def case(*calls: tuple[int, list[int]], kind: str = "", dtype=torch.float32) -> Case:
        def call(length: int, nodes: list[int]) -> dict[str, Any]:
            drawn = torch.randn(length, generator=apart(rng)).to(dtype)
            return {"tensor": drawn, "nodes": nodes}

        inputs = [{"calls": [call(*one) for one in calls]} for _ in IN_ORDER]
        name = "" if dtype is torch.float32 else ", float64"
        lengths = " and ".join(f"of {length}" for length in dict.fromkeys(n for n, _ in calls))
        placed = ", then ".join(str(list(p)) for p in dict.fromkeys(tuple(p) for _, p in calls))
        return Case(f"tensors {lengths} elements{name}, nodes {placed}", inputs, kind)

    return [case((600, IN_ORDER), (12, IN_ORDER), (12, IN_ORDER)),
            case((8, [0, 1, 0, 1]), kind="placed"),
            case((8, [7, 3, 3, 7]), (8, [1, 1, 0, 0]), kind="placed"),
            case((1003, IN_ORDER), (1, IN_ORDER), (3, IN_ORDER), kind="odd"),
            case((9, [2, 0, 2, 0]), kind="placed", dtype=torch.float64)]  # fmt: skip


def _node_values(seen: Observed) -> str | None:
    return _each_call(_node_value)(seen)


def _node_value(seen: Observed, number: int) -> str | None:
    calls = [rank["calls"][number] for rank in seen.case.inputs]
    nodes, parts = calls[0]["nodes"], [call["tensor"] for call in calls]
    right = torch.stack(parts).sum(0)
    for rank, got in enumerate(seen.data):
        tensor = got["tensors"][number]
        near = sum(part for part, node in zip(parts, nodes, strict=True) if node == nodes[rank])
        told = explain(
            tensor,
            right,
            f"Rank {rank}'s tensor",
            {
                "is the mean. An all-reduce with SUM gives the sum.": right / 4,
                "has not changed: put the sum into the tensor that was given.": parts[rank],
                "is the sum over its own node only: the other node's sum never arrived.": near,
            },
        )
        if told is None:
            if close(tensor, seen.data[0]["tensors"][number], bitwise=True):
                continue
            return f"Ranks 0 and {rank} do not hold the same bits: add up once, and copy the sum."
        if close(tensor, right, rtol=2e-2):
            return f"Rank {rank}'s sum was rounded during transfer: send the tensor's own dtype."
        if type(tensor) is torch.Tensor and tensor.shape == right.shape:
            good = (tensor - right).abs() < 1e-4
            if good.any() and not good.all():
                first = int((~good).nonzero()[0])
                return (
                    f"Rank {rank} has the sum in {int(good.sum())} of {len(right)} elements; "
                    f"element {first} is the first where it has not. Does each rank send back the "
                    "half that it added up? Is an odd element in one of the halves? Do you wait "
                    "for each message before you use it?"
                )
        return told
    return None


def _crossing(seen: Observed, number: int) -> list[list[int]]:
    """For each rank the bytes of its messages to the other node."""
    nodes = seen.case.inputs[0]["calls"][number]["nodes"]
    return [
        [
            call.bytes_sent
            for call in seen.calls(rank, f"call {number}")
            if call.op == "send" and nodes[call.peer] != nodes[rank]
        ]
        for rank in range(4)
    ]


def _node_far(seen: Observed) -> str | None:
    wrong = _only_messages(seen, "the all-reduce")
    return wrong or _each_call(_node_far_call)(seen) or waited_for(seen)


def _node_far_call(seen: Observed, number: int) -> str | None:
    call = seen.case.inputs[0]["calls"][number]
    nodes, tensor = call["nodes"], call["tensor"]
    most = ceil(tensor.numel() / 2) * tensor.element_size()
    crossing = _crossing(seen, number)
    for rank, sizes in enumerate(crossing):
        if sum(sizes) <= most:
            continue
        (mate,) = [r for r in range(4) if nodes[r] == nodes[rank] and r != rank]
        if sum(sizes) <= tensor.nbytes and not sum(crossing[mate]):
            how = f"Rank {mate} on the same node sends none: let each take one half across."
        elif max(sizes) > most or sum(sizes) > tensor.nbytes:
            how = "Only the sum of the node has to cross, and each of its ranks can take one half."
        else:
            how = "Which of its messages could stay in the node if the node added up first?"
        return (
            f"With nodes {nodes}, rank {rank} sent {sum(sizes):,} bytes to the other node; half of "
            f"the tensor is {most:,}. {how}"
        )
    return None


def _node_near(seen: Observed) -> str | None:
    return _each_call(_node_near_call)(seen)


def _node_near_call(seen: Observed, number: int) -> str | None:
    tensor = seen.case.inputs[0]["calls"][number]["tensor"]
    for rank, sizes in enumerate(_crossing(seen, number)):
        sent = seen.sent(rank, f"call {number}") - sum(sizes)
        if sent > 2 * ceil(tensor.numel() / 2) * tensor.element_size():
            return (
                f"Rank {rank} sent {sent:,} bytes to the rank on its node; the tensor has "
                f"{tensor.nbytes:,}. Before the crossing it needs to send only the half that it "
                "does not add up."
            )
    return None


def _node_placed(seen: Observed) -> str | None:
    bytes_wrong = _node_far(seen) or _node_near(seen)
    same = f"{bytes_wrong} If a line above fails too, fix that first: it may be the same bug."
    return _node_values(seen) or (same if bytes_wrong else None)


NODES = Task(
    id="02.node_all_reduce",
    title="An all-reduce for two nodes",
    answer="node_all_reduce",
    job="lesson02.node_all_reduce",
    minutes=15,
    cases=_node_cases,
    criteria=(
        Criterion("the sum on every rank, the same bits", 2, _node_values, on=("",)),
        Criterion("odd lengths", 1, _node_values, on=("odd",)),
        Criterion("at most half of the tensor from each rank to the other node", 2, _node_far,
                  on=("", "odd")),
        Criterion("at most the tensor from each rank within its node", 1, _node_near,
                  on=("", "odd")),
        Criterion("any two ranks on a node", 1, _node_placed, on=("placed",)),
    ),
    hints=(
        "What does the other node need from yours: two tensors, or one? Which rank could send it?",
        "Within the node, each of the two ranks adds up one half. What does it send across, to "
        "which rank, and what does it do with the half that it receives?",
        "Three exchanges: with the neighbour, the half that you do not add up; with one rank of "
        "the other node, the half that you did; with the neighbour again, the finished halves.",
    ),
    debrief="This is reduce-scatter, all-reduce, all-gather. With eight ranks per node, as in "
    "lesson 16, each rank carries an eighth of the tensor to the other node.",
)  # fmt: skip

TASKS = [TREE, RING, REDUCE_SCATTER, HANGS, NODES]
