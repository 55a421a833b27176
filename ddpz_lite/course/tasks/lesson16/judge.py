"""Tasks of lesson 16: beyond one machine."""

from __future__ import annotations

import contextlib
import io
import shlex
from collections.abc import Callable
from typing import Any

import torch

from ddpz_lite.course.check.chance import apart
from ddpz_lite.course.check.compare import close
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vary import one_at_a_time
from ddpz_lite.course.check.vocabulary import (
    all_in_spans,
    explain,
    unchanged,
    waited_for,
    world_name,
)
from ddpz_lite.course.tasks.lesson16.page import CAPSTONE
from ddpz_lite.course.tasks.lesson16.spread import BROADCAST
from ddpz_lite.wire import Record
from ddpz_lite.wire.cost import collective

FORMS = {"": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def _tensors(
    rng: torch.Generator, lengths: tuple[int, ...], dtype: torch.dtype
) -> list[torch.Tensor]:
    return [torch.randn(length, generator=apart(rng)).to(dtype) for length in lengths]


def _each_call(judge: Callable[[Observed, int], str | None]) -> Callable[[Observed], str | None]:
    """A judge of one call of the answer, made a judge of all calls of a case."""

    def judge_all(seen: Observed) -> str | None:
        message = (judge(seen, number) for number in range(len(seen.case.inputs[0]["tensors"])))
        return next(filter(None, message), None)

    return judge_all


def _sums(seen: Observed, number: int) -> str | None:
    begun, world = [rank["tensors"][number] for rank in seen.case.inputs], seen.case.world
    right = torch.stack(begun).double().sum(0).to(begun[0].dtype)
    nodes = seen.case.inputs[0].get("nodes")
    for rank, got in enumerate(seen.data):
        tensor = got["tensors"][number]
        mistakes = {
            "is what it began with. Put the sum into the tensor that it was given.": begun[rank],
            "is the mean. The task asks for the sum, not divided by the number of ranks.": right
            / world,
        }
        if nodes is not None and world > 1:
            own = [t for t, node in zip(begun, nodes, strict=True) if node == nodes[rank]]
            mistakes["is the sum over its own node alone."] = torch.stack(own).sum(0)
            same = len(set(nodes))
            mistakes[
                "is the sum divided by the ranks of a node: a mean was taken inside the node."
            ] = right / (world // same)
            mistakes["is the sum divided by the number of nodes."] = right / same
        elif world > 1:
            power = _power(world)
            part = torch.stack(begun[:power]).sum(0)
            mistakes[f"is the sum over the first {power} ranks alone."] = part
            mistakes[f"is {power} times the sum: each round doubles what it should add."] = (
                power * right
            )
        rtol = 0.05 if tensor_is(tensor, torch.bfloat16) else None
        mistakes = {words: value for words, value in mistakes.items() if value.shape == right.shape}
        message = explain(tensor, right, f"Rank {rank}'s tensor", mistakes, rtol=rtol)
        if message is None:
            continue
        alone = begun[rank]
        if close(tensor, 2 * right, rtol=rtol) and world > 1:
            return f"Rank {rank} holds twice the sum: something was added up twice."
        if isinstance(tensor, torch.Tensor) and tensor.shape == alone.shape:
            if torch.stack(begun).eq(tensor).any(0).all() and not torch.equal(tensor, alone):
                return (
                    f"Rank {rank} holds numbers that single ranks began with. Add what it receives "
                    "to what it holds."
                )
            good = (tensor.double() - right.double()).abs() < 1e-3 * (1 + right.double().abs())
            if 8 * good.sum() > len(good) > good.sum():
                return (
                    f"Rank {rank} has the sum in {int(good.sum())} of {len(right)} elements. "
                    "Which part does each rank hold after the halving? All parts must come back, "
                    "the shorter ones too."
                )
        return message
    return None


def tensor_is(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == dtype


# -- 16.hierarchical -------------------------------------------------------------------------------

DEALT = "dealt"


def _hierarchical_cases(rng: torch.Generator) -> list[Case]:
    def case(nodes: list[int], *lengths: int, kind: str = "", form: str = "") -> Case:
        """form: of all tensors, or of all but the first if it is float64."""
        inputs = [{"nodes": nodes, "tensors": _tensors(rng, lengths, FORMS[form])} for _ in nodes]
        for rank in inputs if form == "float64" else []:
            rank["tensors"][0] = rank["tensors"][0].float()
        many = len(set(nodes))
        says = f"{world_name(len(nodes))} on nodes {', '.join(map(str, nodes))}"
        says += f", {' and '.join(map(str, lengths))} elements" + f", {form}" * bool(form)
        return Case(says if many > 1 else f"{says}, one node", inputs, kind)

    return [
        case([0, 0, 1, 1], 240, 240),
        case([0, 0, 0], 12),
        case([0], 6),
        case([0, 1], 8),
        case([0, 0, 0, 1, 1, 1], 600),
        case([0, 1, 0, 1], 480, kind=DEALT),
        case([2, 0, 1, 1, 0, 2], 60, 6, kind=DEALT),
        case([0, 0, 1, 1], 7, 1, kind="uneven"),
        case([4, 2, 2, 4, 2, 4], 100, 100, kind="uneven", form="float64"),
        case([0, 0, 1, 1], 64, kind="uneven", form="bfloat16"),
    ]


def inter_bytes(seen: Observed, rank: int, during: str) -> int:
    """Bytes of calls that reach another node: of a message, or of a group that is on several."""
    nodes = seen.case.inputs[0]["nodes"]

    def between(call: Record) -> bool:
        if call.op == "send":
            return nodes[call.peer] != nodes[rank]
        return len({nodes[other] for other in call.group}) > 1

    return sum(call.bytes_sent for call in seen.calls(rank, during) if between(call))


def _shape(seen: Observed) -> tuple[int, int]:
    """(nodes, ranks on each)."""
    nodes = seen.case.inputs[0]["nodes"]
    return len(set(nodes)), len(nodes) // len(set(nodes))


def _part(seen: Observed, number: int) -> tuple[int, int, int, int]:
    """(bytes of the tensor, bytes of a node's rank's part, nodes, ranks on each)."""
    tensor, (many, local) = seen.case.inputs[0]["tensors"][number], _shape(seen)
    size = tensor.element_size()
    return tensor.numel() * size, -(-tensor.numel() // local) * size, many, local


def _groups(seen: Observed) -> str | None:
    """Groups are made once, and `nodes` stays."""
    for rank, got in enumerate(seen.data):
        first, *later = got["groups"]
        if any(count > first for count in later):
            return (
                f"Rank {rank} made groups in all_reduce. Make them once, in hierarchical(), "
                "because each new group opens connections."
            )
    return unchanged(seen)


def _between(seen: Observed, number: int) -> str | None:
    if wrong := all_in_spans(seen):
        return wrong
    _, part, many, local = _part(seen, number)
    size = seen.case.inputs[0]["tensors"][number].element_size()
    # gloo's ring: unequal shares of a part that 2M does not divide
    ring = [collective("all_reduce", "gloo", r, many, part, size).sent for r in range(many)]
    most = max(ring)
    ranks = range(seen.case.world)
    sent = [inter_bytes(seen, rank, f"call {number}") for rank in ranks]
    if max(sent) <= most:
        return None
    rank = sent.index(max(sent))
    message = f"Rank {rank} sent {sent[rank]:,} bytes between nodes"
    calls = [call for r in ranks for call in seen.calls(r, f"call {number}")]
    wanted = seen.case.inputs[0]["tensors"][number].dtype
    if other := [c.dtype for c in calls if getattr(torch, c.dtype).itemsize > wanted.itemsize]:
        return f"{message}: it sent {other[0]}, and the tensor is {str(wanted).split('.')[-1]}."
    if local > 1 and any(len(call.group) == seen.case.world for call in calls if call.op != "send"):
        return f"{message}. It called a collective of all ranks, which takes no account of nodes."
    if local > 1 and min(sent) == 0:
        return (
            f"{message}, and rank {sent.index(0)} none. A leader sends the full tensor for its "
            f"node, and the links of the others idle. If each carries 1/L, each sends {most:,} "
            "bytes."
        )
    first = next((call for call in seen.calls(rank, f"call {number}") if call.op != "send"), None)
    if seen.case.kind == DEALT and first and len({nodes_of(seen)[r] for r in first.group}) > 1:
        ranks_ = " and ".join(map(str, sorted(first.group)))
        return (
            f"{message}: the group of its first call, ranks {ranks_}, lies on several nodes. The "
            "groups follow the order of the ranks. Make them from `nodes`."
        )
    return (
        f"{message}, and 2(n/L)(M-1)/M is {most:,}. First cut the tensor inside the node, so that "
        "each rank of a node carries another part of it."
    )


def nodes_of(seen: Observed) -> list[int]:
    """Of each rank its node."""
    return seen.case.inputs[0]["nodes"]


def _inside(seen: Observed, number: int) -> str | None:
    _, part, _, local = _part(seen, number)
    most = 2 * (local - 1) * part
    for rank in range(seen.case.world):
        during = f"call {number}"
        sent = seen.sent(rank, during) - inter_bytes(seen, rank, during)
        if sent > most:
            ops = ", ".join(dict.fromkeys(seen.ops(rank, during)))
            return (
                f"Rank {rank} sent {sent:,} bytes inside its node with {ops}, and 2n(L-1)/L is "
                f"{most:,}. On gloo a reduce_scatter sends as much as an all_reduce. Lesson 02's "
                "sends half."
            )
    return None


HIERARCHICAL = Task(
    id="16.hierarchical",
    title="A sum that crosses once",
    answer="hierarchical",
    job="lesson16.hierarchical",
    minutes=25,
    cases=_hierarchical_cases,
    criteria=(
        Criterion("the sum on every rank, nodes of neighbours", 2, _each_call(_sums), on=("",)),
        Criterion("ranks placed on nodes in any order", 2, _each_call(_sums), on=(DEALT,)),
        Criterion("any length and dtype", 1, _each_call(_sums), on=("uneven",)),
        Criterion("2(n/L)(M-1)/M between nodes, by every rank", 3, _each_call(_between)),
        Criterion("2n(L-1)/L inside the node", 1, _each_call(_inside)),
        Criterion("groups are made once, and `nodes` is left as it is", 1, _groups),
    ),
    hints=(
        "A rank needs two groups. Which ranks are on its node? And which ranks of the other nodes "
        "carry the same part as it does?",
        "All ranks must call dist.new_group for every group and in the same order, also those that "
        "are not in it. Number the ranks of each node. The ranks with the same number are a group "
        "between nodes.",
        "Pad to L equal parts; all_to_all_single in the node's group and a sum gives a part; "
        "all_reduce it in the group between nodes; all_gather_into_tensor (all_gather_single) in "
        "the node's group; copy into the tensor without the padding.",
    ),
    debrief="NCCL finds out which ranks share a host, and chooses among rings, trees and, with "
    "NVLink switches, sums in the network. torch's hybrid sharding (lesson 12b) has the same two "
    "groups, as the axes of a mesh.",
)

# -- 16.halving_doubling ---------------------------------------------------------------------------


def _halving_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, *lengths: int, kind: str = "", form: str = "") -> Case:
        inputs = [{"tensors": _tensors(rng, lengths, FORMS[form])} for _ in range(world)]
        says = f"{world_name(world)}, {' and '.join(map(str, lengths))} elements"
        if kind == "any":  # an answer may raise here: say what is new
            says = f"{says}; {world} is not a power of two"
        return Case(says + f", {form}" * bool(form), inputs, kind)

    return [
        case(4, 64, 64),
        case(2, 6),
        case(1, 5),
        case(8, 4000),
        case(3, 12, kind="any"),
        case(6, 40, 40, kind="any"),
        case(7, 24, kind="any"),
        case(4, 11, 30, 1, kind="uneven"),
        case(8, 13, kind="uneven", form="float64"),
        case(5, 2, kind="uneven"),
    ]


def _power(world: int) -> int:
    return 1 << (world.bit_length() - 1)


def _only_messages(seen: Observed) -> str | None:
    if wrong := all_in_spans(seen) or waited_for(seen):
        return wrong
    for rank in range(seen.case.world):
        for op in seen.ops(rank):
            if op not in ("send", "recv"):
                return f"Rank {rank} called {op}. Build it from send and recv alone."
    return None


def _halving_messages(seen: Observed) -> str | None:
    return _only_messages(seen) or _each_call(_halving_round)(seen)


def _halving_round(seen: Observed, number: int) -> str | None:
    world, power = seen.case.world, _power(seen.case.world)
    most = 2 * (power.bit_length() - 1) + (world > power)
    for rank in range(world):
        sends = seen.ops(rank, f"call {number}").count("send")
        if sends <= most:
            continue
        if sends == 2 * most:
            how = "One message in each round is enough."
        elif sends >= 2 * (world - 1):
            how = "Yours is a ring, or sends a message to each of the others."
        else:
            how = "Halve the distance, or double it, in every round."
        return (
            f"Rank {rank} of {world} sent {sends} messages. 2 log2 P, and one more if N is not P, "
            f"are {most}. {how}"
        )
    return None


def _halving_bytes(seen: Observed, number: int) -> str | None:
    world, power = seen.case.world, _power(seen.case.world)
    tensor = seen.case.inputs[0]["tensors"][number]
    n, size = tensor.numel(), tensor.element_size()
    for rank in range(world):
        sent = seen.sent(rank, f"call {number}")
        most = 0 if rank >= power else 2 * (power - 1) * -(-n // power) * size
        # A rank from P on, and its partner below P, send the full tensor once more.
        most += n * size * (world > power)
        if sent <= most:
            continue
        if sent >= (power.bit_length() - 1) * n * size:
            how = "It sends the full tensor in every round: that is recursive doubling."
        else:
            how = "In every round a rank keeps half of what it held, and sends the other half."
        return f"Rank {rank} of {world} sent {sent:,} bytes, and {most:,} are enough. {how}"
    return None


HALVING = Task(
    id="16.halving_doubling",
    title="Halving and doubling, on any number of ranks",
    answer="halving_doubling",
    job="lesson16.halving_doubling",
    minutes=30,
    cases=_halving_cases,
    criteria=(
        Criterion("the sum on 1, 2, 4 and 8 ranks", 2, _each_call(_sums), on=("",)),
        Criterion("the sum on any number of ranks", 2, _each_call(_sums), on=("any",)),
        Criterion("any length and dtype", 1, _each_call(_sums), on=("uneven",)),
        Criterion("2 log2 N messages, by send and recv alone", 2, _halving_messages),
        Criterion("2(N-1)/N of the tensor", 2, _each_call(_halving_bytes)),
    ),
    hints=(
        "Two ranks hold a tensor each. Which half does each send, so that each can compute one "
        "half of the sum? What must they send after that?",
        "In round k, rank r exchanges with rank r ^ 2**k. Both cut what they hold in two, and the "
        "bit decides which half each keeps. Then the rounds run in reverse, and each sends the "
        "part that it holds.",
        "Ranks from P on send their tensor to rank - P, which adds it, and receive the sum at the "
        "end. Keep the list of cuts: (partner,"
        " mine, other) from tensor_split(2), and go through it in reverse.",
    ),
    debrief="gloo has this algorithm, too, besides its ring. MPI libraries choose by size: "
    "recursive doubling for short tensors, this one for long tensors on powers of two, otherwise "
    "the ring.",
)

# -- 16.launch_plan --------------------------------------------------------------------------------


NETS, PORTS = (2, 250), (20_000, 30_000)


def _plan_cases(rng: torch.Generator) -> list[Case]:
    def plan(
        job: str, *processes: int, interface: str = "eth1", each: bool = False
    ) -> dict[str, Any]:
        """each: every node has another name for its interface."""
        net, port = (int(torch.randint(*ends, (), generator=rng)) for ends in (NETS, PORTS))
        nodes = [
            {
                "address": f"10.{net}.0.{10 + 3 * k}",
                "interface": f"{interface}{k}" if each else interface,
                "gpus": gpus,
            }
            for k, gpus in enumerate(processes)
        ]
        script = f"train.py --stage {port % 4} --text 'my book {port}.txt'"
        return {"nodes": nodes, "script": script, "job": job, "port": port}

    (varied,) = one_at_a_time([plan("first", 4, 4)], [plan("other", 2, 2, interface="ens3")])
    first = plan("a7", 4, 4)
    second = first | {"job": "b-2", "port": first["port"] + 1}
    return [
        Case("two nodes of 4 GPUs", [{"plans": [plan("llama", 4, 4)]}]),
        Case("three nodes of 2 GPUs, ib0", [{"plans": [plan("gpt", 2, 2, 2, interface="ib0")]}]),
        Case("one node of 8 GPUs", [{"plans": [plan("one", 8)]}]),
        Case(
            "two clusters, one after the other",
            [{"plans": [plan("x", 4, 4), plan("y", 2, 2, 2, interface="ib0")]}],
        ),
        Case("the same plan with other words", [{"plans": varied}]),
        Case("interfaces that differ", [{"plans": [plan("cables", 2, 2, each=True)]}]),
        Case("nodes of 8 and 4 GPUs", [{"plans": [plan("mixed", 8, 4)]}], "unequal"),
        Case("two jobs on the same nodes", [{"plans": [first, second]}], "two"),
    ]


class Line:
    """A command line, read as torchrun reads it. `wrong`: why it cannot be."""

    def __init__(self, line: Any) -> None:
        self.wrong, self.options, self.environ = "", None, {}
        if not isinstance(line, str):
            self.wrong = f"must be a string, as one types it, not {type(line).__name__}"
            return
        try:
            words = shlex.split(line)
        except ValueError as error:
            self.wrong = f"cannot be read by a shell: {error}"
            return
        while words and "=" in words[0] and words[0].partition("=")[0].isidentifier():
            name, _, value = words.pop(0).partition("=")
            self.environ[name] = value
        if words[:3] == ["python", "-m", "torch.distributed.run"]:
            words = ["torchrun", *words[3:]]
        if not words or words[0] != "torchrun":
            self.wrong = "must call torchrun, after NAME=value words if there are any"
            return
        self._read(words[1:])

    def _read(self, words: list[str]) -> None:
        from torch.distributed.run import get_args_parser

        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                self.options = get_args_parser().parse_args(words)
        except SystemExit:
            last = (said.getvalue().strip().splitlines() or ["it wants no script"])[-1]
            self.wrong = f"torchrun refuses it: {last}"

    @property
    def nodes(self) -> tuple[int, int]:
        least, _, most = self.options.nnodes.partition(":")
        return int(least), int(most or least)

    @property
    def local(self) -> str:
        return str(self.options.nproc_per_node)

    @property
    def static(self) -> bool:
        return self.options.rdzv_backend == "static"

    @property
    def meeting(self) -> tuple[str, str]:
        """(host, port) where this node looks for the others."""
        if self.static and not self.options.rdzv_endpoint:
            return self.options.master_addr, str(self.options.master_port)
        host, _, port = self.options.rdzv_endpoint.rpartition(":")
        return (host, port) if host else (port, "29400")


def _lines(seen: Observed, plan: int) -> list[Line] | str:
    """The lines of a plan; or what is wrong with one."""
    nodes, lines = seen.case.inputs[0]["plans"][plan]["nodes"], seen.data[0]["lines"][plan]
    if not isinstance(lines, list | tuple):
        return f"Return a list, a line for each node, not {type(lines).__name__}."
    if len(lines) != len(nodes):
        total = sum(node["gpus"] for node in nodes)
        why = " torchrun starts the processes of a node itself." if len(lines) == total else ""
        why = why or " Start it on every node, because no node starts another one."
        return f"There are {len(nodes)} nodes and {len(lines)} lines.{why}"
    read = [Line(line) for line in lines]
    for number, line in enumerate(read):
        if line.wrong:
            return f"The line of node {number} {line.wrong}."
        try:
            _ = line.nodes
        except ValueError:
            return f"The line of node {number}: --nnodes {line.options.nnodes} is no number."
    return read


def _each_plan(judge: Callable[[Observed, dict, list[Line]], str | None]):
    def judge_all(seen: Observed) -> str | None:
        for number, plan in enumerate(seen.case.inputs[0]["plans"]):
            lines = _lines(seen, number)
            message = lines if isinstance(lines, str) else judge(seen, plan, lines)
            if message:
                return message
        return None

    return judge_all


def _one_job(seen: Observed, plan: dict[str, Any], lines: list[Line]) -> str | None:
    nodes = plan["nodes"]
    for number, line in enumerate(lines):
        if line.options.standalone:
            return (
                f"Node {number} runs with --standalone, so it has its own rendezvous and meets no "
                "other node. You would get as many jobs as nodes, each with its own rank 0."
            )
    places = [line.meeting for line in lines]
    for number, (host, _) in enumerate(places):
        if host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", ""):
            return (
                f"Node {number} looks for the others at {host or 'no address'}: on each node that "
                "is the node itself. Name the address of one of the nodes, the same on all."
            )
    if len(set(places)) > 1:
        (a, b) = dict.fromkeys(places).keys() if len(set(places)) == 2 else places[:2]
        return (
            f"The nodes meet at different places, {a[0]}:{a[1]} and {b[0]}:{b[1]}, so each waits "
            "for the others at another place."
        )
    if places[0][0] not in [node["address"] for node in nodes]:
        return f"They meet at {places[0][0]}, which is the address of none of the nodes."
    if not places[0][1].isdigit() or places[0][1] == "0":
        return f"They meet at port {places[0][1]!r}, and every node must know the same port."
    if len({line.options.rdzv_id for line in lines}) > 1 and not lines[0].static:
        return (
            "The nodes have different --rdzv-id, so two jobs wait at one address and neither is "
            "complete."
        )
    if len({line.options.rdzv_backend for line in lines}) > 1:
        return "The nodes have different --rdzv-backend, and do not meet."
    return _node_ranks(lines) if lines[0].static else None


def _node_ranks(lines: list[Line]) -> str | None:
    ranks = [line.options.node_rank for line in lines]
    if sorted(ranks) == list(range(len(lines))):
        return None
    return (
        f"The nodes have --node-rank {', '.join(map(str, ranks))}. Each number must stand there "
        "once: of two nodes with rank 0, the second cannot bind the port."
    )


def _world(seen: Observed, plan: dict[str, Any], lines: list[Line]) -> str | None:
    nodes = plan["nodes"]
    total = sum(node["gpus"] for node in nodes)
    for number, (node, line) in enumerate(zip(nodes, lines, strict=True)):
        if line.nodes[1] != len(nodes):
            why = f" {total} is the number of GPUs." if line.nodes[1] == total != len(nodes) else ""
            return (
                f"Node {number} says --nnodes {line.options.nnodes}, and there are {len(nodes)} "
                f"nodes.{why}"
            )
        if line.local not in (str(node["gpus"]), "gpu", "auto"):
            return (
                f"Node {number} starts {line.local} processes and has {node['gpus']} GPUs. Start "
                "one process for each."
            )
    return None


def _restarts(seen: Observed, plan: dict[str, Any], lines: list[Line]) -> str | None:
    for number, line in enumerate(lines):
        if line.static:
            return (
                f"Node {number} uses the static rendezvous, in which each node keeps its number "
                "forever. So after a restart no other node can take part. With --rdzv-backend c10d "
                "the nodes are numbered again."
            )
        if line.options.max_restarts < 1:
            return (
                f"Node {number} has --max-restarts {line.options.max_restarts}: when a rank dies, "
                "the job ends."
            )
    return None


def _interfaces(seen: Observed, plan: dict[str, Any], lines: list[Line]) -> str | None:
    for number, (node, line) in enumerate(zip(plan["nodes"], lines, strict=True)):
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            value = line.environ.get(name)
            if value is None:
                return (
                    f"Node {number} does not say {name}. The library then chooses an interface, "
                    f"and only {node['interface']} leads to the other nodes."
                )
            if value != node["interface"]:
                return (
                    f"Node {number} has {name}={value}, and {node['interface']} leads to the other "
                    "nodes."
                )
    return None


def _script(seen: Observed, plan: dict[str, Any], lines: list[Line]) -> str | None:
    wanted = shlex.split(plan["script"])
    for number, line in enumerate(lines):
        got = [line.options.training_script, *line.options.training_script_args]
        if got != wanted:
            return (
                f"Node {number} runs {shlex.join(got)}. All nodes must run the same: "
                f"{shlex.join(wanted)}."
            )
    return None


def _two_jobs(seen: Observed) -> str | None:
    plans = seen.case.inputs[0]["plans"]
    both = [_lines(seen, number) for number in range(len(plans))]
    for read in both:
        if isinstance(read, str):
            return read
    (host, port), other = (read[0].meeting for read in both)
    if (host, port) == other:
        return (
            f"Both jobs meet at {host}:{port}, so the second uses the store of the first, and dies "
            "with it. Take the port from `port`."
        )
    for plan, read in zip(plans, both, strict=True):
        if read[0].meeting[1] != str(plan["port"]):
            return (
                f"The job {plan['job']} meets at port {read[0].meeting[1]}, and its own is "
                f"{plan['port']}. Another port may be taken."
            )
    ids = [read[0].options.rdzv_id for read in both]
    if ids[0] == ids[1]:
        return (
            f"Both jobs have --rdzv-id {ids[0]}, so a node that comes to the wrong port joins the "
            "wrong job. Take the id from `job`."
        )
    for plan, name in zip(plans, ids, strict=True):
        if plan["job"] not in str(name):
            return f"The job {plan['job']} has --rdzv-id {name}: the id must contain its name."
    return None


LAUNCH_PLAN = Task(
    id="16.launch_plan",
    title="One line for each node",
    answer="launch_plan",
    job="lesson16.launch_plan",
    minutes=20,
    cases=_plan_cases,
    criteria=(
        Criterion("all nodes meet, and are one job", 2, _each_plan(_one_job)),
        Criterion("a process for each GPU", 2, _each_plan(_world)),
        Criterion("the same script on every node", 1, _each_plan(_script)),
        Criterion("after a death the job can start again", 1, _each_plan(_restarts)),
        Criterion("the interface is named", 1, _each_plan(_interfaces)),
        Criterion("two jobs do not mix", 1, _two_jobs, on=("two",)),
    ),
    hints=(
        "What must be the same on all nodes, so that they meet? What may differ between them?",
        "--nnodes is the number of nodes, --nproc-per-node that of the processes of this node. "
        "--rdzv-backend c10d, --rdzv-endpoint HOST:PORT and --rdzv-id make one job of them.",
        "For each node: NCCL_SOCKET_IFNAME=... GLOO_SOCKET_IFNAME=... torchrun --nnodes M "
        "--nproc-per-node GPUS --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint FIRST:PORT "
        "--rdzv-id JOB SCRIPT.",
    ),
    debrief="deploy/node.sh is this line. deploy/train.sbatch and deploy/train-job.yaml fill it in "
    "for SLURM and for Kubernetes, which start it on all nodes at once.",
)

TASKS = [HIERARCHICAL, HALVING, BROADCAST, LAUNCH_PLAN, CAPSTONE]
