"""Tasks of lesson 18: attention and loss of a sequence that is divided over ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch

from ddpz_lite.course.check.compare import close, whole
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vary import drawn_again, lengthened
from ddpz_lite.course.check.vocabulary import (
    all_in_spans,
    each_call,
    explain,
    explain_number,
    unchanged,
    waited_for,
    world_name,
)
from ddpz_lite.course.tasks.lesson18.job import _attention
from ddpz_lite.wire import Network, Record

Call = dict[str, Any]


def _spread(lengths: Sequence[int]) -> list[int]:
    """Where each part begins."""
    return [0, *accumulate(lengths)][:-1]


# -- 18.merge --------------------------------------------------------------------------------------

ARGUMENTS = ("out", "lse", "other_out", "other_lse")
BIG = {torch.float32: 200.0, torch.float64: 2000.0}  # e^BIG is inf


def _merge_cases(rng: torch.Generator) -> list[Case]:
    def drawn(
        shape: Sequence[int],
        out: torch.dtype = torch.float32,
        lse: torch.dtype = torch.float32,
        around: tuple[float, float] = (0.0, 0.0),
        turned: bool = False,
    ) -> Call:
        """around: what the two lse are close to."""
        outs = [torch.randn(*shape, generator=rng).to(out) for _ in range(2)]
        sums = [
            center + 1.5 * torch.randn(*shape[:-1], generator=rng, dtype=torch.float64)
            for center in around
        ]
        values = (outs[0], sums[0].to(lse), outs[1], sums[1].to(lse))
        return dict(zip(ARGUMENTS, values, strict=True)) | {"turned": turned}

    def masked(call: Call, first: Sequence[int], second: Sequence[int]) -> Call:
        """The same where these queries see no key of the first set, and those none of the other."""
        for out, lse, rows in (("out", "lse", first), ("other_out", "other_lse", second)):
            call[out][..., list(rows), :] = 0
            call[lse][..., list(rows)] = -torch.inf
        return call

    def case(says: str, kind: str, *calls: Call) -> Case:
        return Case(says, [{"calls": list(calls)}], kind)

    plain = case("scores around 0", "", drawn((3, 5, 4)))
    lengthened(plain.inputs, "calls", lambda _, first: drawn_again(first, rng, *ARGUMENTS))
    f64 = torch.float64
    large = []
    for dtype in (torch.float32, f64):
        top = BIG[dtype]
        for around in ((top, top), (-top, -top), (top, -top), (-top, top), (0.0, top)):
            large.append(drawn((2, 4, 3), torch.float32, dtype, around))
    return [
        plain,
        case("scores whose e^ is 0 or inf", "large", *large),
        case(
            "masked rows",
            "masked",
            masked(drawn((2, 6, 3)), (0, 1, 2), (2, 3)),
            masked(drawn((1, 5, 2)), (0, 1, 2, 3, 4), ()),
            masked(drawn((1, 5, 2)), (), (0, 1, 2, 3, 4)),
            masked(drawn((1, 3, 2), f64, f64), (0, 1, 2), (0, 1, 2)),
        ),
        case(
            "other shapes and dtypes",
            "other",
            drawn((4, 3), f64, f64),
            drawn((2, 3, 5, 4), torch.bfloat16),
            drawn((4, 4), torch.bfloat16),
            drawn((3, 3, 3)),
            drawn((1, 1)),
            drawn((2, 0, 3)),
            drawn((2, 5, 3), turned=True),
            drawn((3, 4), torch.float32, f64),
        ),
    ]


def _weights(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the weight of the first, of the second, the log-sum-exp of both), in float64."""
    first, second = call["lse"].double(), call["other_lse"].double()
    both = torch.logaddexp(first, second)
    safe = both.nan_to_num(neginf=0.0)
    return (first - safe).exp()[..., None], (second - safe).exp()[..., None], both


def _merge_call(seen: Observed, number: int) -> str | None:
    call, got = seen.case.inputs[0]["calls"][number], seen.data[0]["results"][number]
    if type(got) is not list or len(got) != 2:
        return "Return two tensors, (out, lse)."
    a, b, both = _weights(call)
    first, second = call["out"].double(), call["other_out"].double()
    out, lse = got
    if wrong := _rows_without_keys(both, out, lse):
        return wrong
    top = torch.maximum(call["lse"], call["other_lse"]).double().nan_to_num(neginf=0.0)
    shares = [(call[name].double() - top).exp()[..., None] for name in ("lse", "other_lse")]
    mistakes = {
        "is the sum of both. Each is a mean over its keys: weigh it by its share of e^score.": (
            first + second
        ),
        "is the mean of both, as if both sets of keys had the same weight.": (first + second) / 2,
        "has the two weights exchanged.": b * first + a * second,
        "is not divided by the sum of the weights.": shares[0] * first + shares[1] * second,
        "is the out of the set with the larger lse. The other has a weight, too.": torch.where(
            call["lse"][..., None] >= call["other_lse"][..., None], first, second
        ),
        "weighs by the lse themselves. The weight of a set is e^lse.": (
            call["lse"].double()[..., None] * first + call["other_lse"].double()[..., None] * second
        )
        / (call["lse"] + call["other_lse"]).double()[..., None],
    }
    dtype = call["out"].dtype
    mistakes = {words: value.to(dtype) for words, value in mistakes.items()}
    if wrong := explain(out, (a * first + b * second).to(dtype), "out", mistakes):
        return _overflown(out, wrong)
    one, two = call["lse"].double(), call["other_lse"].double()
    wrongs = {
        "is the larger of the two. The sum of e^score has both: log(e^a + e^b).": (
            torch.maximum(one, two)
        ),
        "is the sum of the two logarithms, which is the log of a product.": one + two,
        "is the sum of e^score, and not its logarithm.": both.exp(),
        "is the mean of the two.": (one + two) / 2,
    }
    there = ~both.isneginf()
    form = call["lse"].dtype
    message = explain(
        lse[there], both[there].to(form), "lse", {w: v[there].to(form) for w, v in wrongs.items()}
    )
    return message and _overflown(lse[there], message)


def _rows_without_keys(both: torch.Tensor, out: Any, lse: Any) -> str | None:
    """What is wrong with the form, or with rows that see no key of either set."""
    for what, got, form in (("out", out, None), ("lse", lse, both.shape)):
        if type(got) is not torch.Tensor or (form is not None and got.shape != form):
            shown = "no tensor" if type(got) is not torch.Tensor else f"of shape {list(got.shape)}"
            return f"{what} is {shown}; it has the shape and dtype of what came."
    none = both.isneginf()
    if not none.any() or out.shape[:-1] != both.shape:
        return None
    if out[none].isnan().any() or lse[none].isnan().any():
        return (
            "A query that sees no key of either set gets nan: -inf - (-inf) is nan. Its out is 0, "
            "its lse -inf."
        )
    if not lse[none].isneginf().all():
        return (
            f"A query that sees no key has lse {lse[none].max().item():.3g}; it must stay -inf, "
            "or a later merge gives it a weight."
        )
    return None


def _overflown(got: Any, message: str) -> str:
    if type(got) is torch.Tensor and got.is_floating_point() and not got.isfinite().all():
        return (
            f"{message} e^lse is inf above 88 in float32, and 0 below -104: subtract the larger "
            "lse before e^."
        )
    return message


MERGE = Task(
    id="18.merge",
    title="Two partial attentions into one",
    answer="merge",
    job="lesson18.merge",
    minutes=10,
    cases=_merge_cases,
    criteria=(
        Criterion("attention to both sets of keys", 2, each_call(_merge_call), on=("",)),
        Criterion("scores of any size", 1, each_call(_merge_call), on=("large",)),
        Criterion("queries that see no key", 1, each_call(_merge_call), on=("masked",)),
        Criterion("other shapes, layouts and dtypes", 1, each_call(_merge_call), on=("other",)),
        Criterion("the arguments stay as they are", 1, unchanged),
    ),
    hints=(
        "out is a mean of values. Of which number, for each of the two, is lse the logarithm, and "
        "so what is the weight of each mean?",
        "The weights are e^lse / (e^lse + e^other_lse). Multiply both by e^-m with m the larger "
        "lse: the quotient stays, and nothing overflows. What if m is -inf?",
        "both = torch.logaddexp(lse, other_lse); weight = exp(lse - both) for each, with both "
        "replaced by 0 where it is -inf; weight[..., None] * out for each, added, in out's dtype.",
    ),
    debrief="FlashAttention keeps lse in float32 whatever the dtype of out, for the same reason. "
    "torch's context_parallel merges so, and splits e^a / (e^a + e^b) as a sigmoid of a - b.",
)

# -- 18.ring_attention -----------------------------------------------------------------------------

LATENCY, NAP = 0.03, 0.04


def _ring_cases(rng: torch.Generator) -> list[Case]:
    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(dtype)

    def calls(
        lengths: Sequence[int],
        causal: bool,
        heads: tuple[int, int] = (2, 2),
        dim: int = 3,
        dtype: torch.dtype = torch.float32,
        scale: float = 0.7,
        nap: float = 0.0,
    ) -> list[Call]:
        """One call, for each rank."""
        return [
            {
                "q": drawn(heads[0], n, dim, dtype=dtype),
                "k": drawn(heads[1], n, dim, dtype=dtype),
                "v": drawn(heads[1], n, dim, dtype=dtype),
                "lengths": list(lengths),
                "causal": causal,
                "scale": scale,
                "nap": nap,
            }
            for n in lengths
        ]

    def case(says: str, kind: str, *every: list[Call], **more: Any) -> Case:
        world = len(every[0])
        inputs = [{"calls": [one[rank] for one in every]} for rank in range(world)]
        return Case(f"{world_name(world)}{says}", inputs, kind, timeout=20.0, **more)

    def again(_: int, first: Call) -> Call:
        other = drawn_again(first, rng, "q", "k", "v")
        return other | {"causal": not first["causal"], "scale": 1.3}

    varied = case(", parts of 3, 5 and 2 tokens, causal or not", "", calls((3, 5, 2), True))
    lengthened(varied.inputs, "calls", again)
    network = Network(latency=LATENCY, bandwidth=1e9)
    return [
        varied,
        case(
            ", parts of 2, 4, 3 and 5",
            "",
            calls((2, 4, 3, 5), False),
            calls((5, 1, 1, 4), True),
            calls((2, 3, 4, 5), True),
        ),
        case(", parts of 4 and 3", "", calls((4, 3), True), calls((3, 4), True)),
        case("", "", calls((5,), True), calls((4,), False)),
        case(
            ", float64, several heads of queries to one of keys",
            "other",
            calls((2, 3, 4), True, (4, 2), 5, torch.float64),
            calls((1, 1, 1), True, (3, 1), 2),
            calls((4, 4, 4), False, (6, 3), 2, torch.float64),
        ),
        case(
            " on a slow network",
            "slow",
            calls((7, 6, 8, 5), False, (4, 2), 32, nap=NAP),
            calls((6, 6, 6, 6), True, (2, 2), 32, nap=NAP),
            network=network,
        ),
    ]


Mask = Callable[[int, int, int], "torch.Tensor | None"]  # (rank, owner, keys) -> mask


def _ring_reference(case: Case, number: int, rank: int, owners: Sequence[int], mask: Mask) -> Any:
    """Attention of a rank's queries to the blocks of these owners."""
    calls = [given["calls"][number] for given in case.inputs]
    q, scale = calls[rank]["q"].double(), calls[rank]["scale"]
    k = torch.cat([calls[o]["k"].double() for o in owners], 1)
    v = torch.cat([calls[o]["v"].double() for o in owners], 1)
    masks = [mask(rank, o, calls[o]["k"].shape[1]) for o in owners]
    seen = None if masks[0] is None else torch.cat(masks, 1)
    out, _ = _attention(q, k, v, seen, scale)
    return out.to(calls[rank]["q"].dtype)


def _by_places(
    starts: Sequence[int],
    lengths: Sequence[int],
    *,
    owner: Callable[[int, int], int] = lambda rank, o: o,
    strictly: bool = False,
) -> Mask:
    """A causal mask, if the parts begin there. owner: whom a rank takes for the block's."""

    def mask(rank: int, o: int, keys: int) -> torch.Tensor:
        queries = starts[rank] + torch.arange(lengths[rank])
        places = starts[owner(rank, o)] + torch.arange(keys)
        return places < queries[:, None] if strictly else places <= queries[:, None]

    return mask


def _ring_mistakes(case: Case, number: int, rank: int) -> dict[str, Callable[[], torch.Tensor]]:
    call, world = case.inputs[rank]["calls"][number], case.world
    lengths, every = call["lengths"], list(range(world))
    starts = _spread(lengths)

    def none(*_: int) -> None:
        return None

    right = _by_places(starts, lengths) if call["causal"] else none

    def value(owners: Sequence[int], mask: Mask) -> Callable[[], torch.Tensor]:
        return lambda: _ring_reference(case, number, rank, owners, mask)

    found = {}
    if world > 1:
        found |= {
            "is attention to the rank's own keys alone: what came was not used.": value(
                [rank], right
            ),
            "lacks the keys of the next rank: there are N - 1 rounds.": value(
                [o for o in every if o != (rank + 1) % world], right
            ),
            "lacks the keys of the rank before: there are N - 1 rounds.": value(
                [o for o in every if o != (rank - 1) % world], right
            ),
            "lacks the rank's own keys.": value([o for o in every if o != rank], right),
            "is attention to the last block alone: hand attend what it returned before.": value(
                [(rank + 1) % world], right
            ),
            "is the mean of the blocks' results: hand attend what it returned before.": lambda: (
                torch.stack([value([o], right)() for o in every]).mean(0)
            ),
        }
    if not call["causal"]:
        found["is that of a causal mask, and here every token sees all."] = value(
            every, _by_places(starts, lengths)
        )
        return found
    firsts = [r * n for r, n in enumerate(lengths)]
    return found | {
        "is without the causal mask.": value(every, none),
        "has the causal mask in the rank's own block alone.": lambda: _own_alone(
            case, number, rank
        ),
        "hides a token from itself: it sees its own place, too.": value(
            every, _by_places(starts, lengths, strictly=True)
        ),
        "has a mask of local places, as if each part began at 0. Count from the start of the "
        "sequence.": value(every, _by_places([0] * world, lengths)),
        "has the mask of another rank's block: after t rounds up the ring, rank r has the block of "
        "rank r - t.": value(
            every, _by_places(starts, lengths, owner=lambda r, o: (2 * r - o) % world)
        ),
        "takes all parts to be as long as its own.": value(
            every, _by_places([r * lengths[rank] for r in every], lengths)
        ),
        "has parts begin at rank times their own length. They begin where the parts before end.": (
            value(every, _by_places(firsts, lengths))
        ),
    }


def _own_alone(case: Case, number: int, rank: int) -> torch.Tensor:
    lengths = case.inputs[rank]["calls"][number]["lengths"]
    right = _by_places(_spread(lengths), lengths)

    def mask(r: int, o: int, keys: int) -> torch.Tensor:
        return right(r, o, keys) if o == r else torch.ones(lengths[r], keys, dtype=torch.bool)

    return _ring_reference(case, number, rank, range(case.world), mask)


def _ring_call(seen: Observed, number: int) -> str | None:
    case = seen.case
    for rank, got in reversed(list(enumerate(seen.data))):  # the last rank's queries see most
        call = case.inputs[rank]["calls"][number]
        lengths = call["lengths"]
        right: Mask = _by_places(_spread(lengths), lengths) if call["causal"] else lambda *_: None
        wanted = _ring_reference(case, number, rank, range(case.world), right)
        result = got["results"][number]["out"]
        if type(result) is list:
            return f"Rank {rank} returned {len(result)} things. Return out alone."
        mistakes = _ring_mistakes(case, number, rank)
        if wrong := explain(result, wanted, f"Rank {rank}'s result", mistakes):
            return wrong
    return None


def _block(case: Case, number: int, owner: int) -> int:
    """Elements of the keys and values of a rank."""
    return 2 * case.inputs[owner]["calls"][number]["k"].numel()


def _ring_traffic(seen: Observed) -> str | None:
    if wrong := all_in_spans(seen):
        return wrong
    return each_call(_ring_messages)(seen) or waited_for(seen)


def _ring_messages(seen: Observed, number: int) -> str | None:
    case, world = seen.case, seen.case.world
    for rank in range(world):
        calls = seen.calls(rank, f"call {number}")
        if other := [c.op for c in calls if c.op not in ("send", "recv")]:
            return f"Rank {rank} called {other[0]}. A ring sends and receives, no more."
        sends = [c for c in calls if c.op == "send"]
        peers = {c.peer for c in sends}
        if far := peers - {(rank + 1) % world, (rank - 1) % world}:
            return f"Rank {rank} sent to rank {min(far)}, which is not its neighbour."
        if len(peers) > 1:
            return f"Rank {rank} sent to both neighbours. All blocks go the same way."
        sent = sum(c.elements for c in sends)
        blocks = [_block(case, number, o) for o in range(world)]
        most = sum(blocks) - blocks[min(peers)] if peers else 0
        if sent > most:
            why = ""
            if sent == sum(blocks):
                why = " In the last round each block came home: N - 1 rounds are enough."
            return (
                f"Rank {rank} sent {sent} elements. It has to pass on every block but that of the "
                f"rank it sends to: {most}.{why}"
            )
        if len(sends) > 2 * (world - 1):
            return (
                f"Rank {rank} sent {len(sends)} messages. {world - 1} rounds of keys and values "
                f"are {2 * (world - 1)}, or half as many if they travel together."
            )
        if wide := {c.dtype for c in sends} - {_name(case.inputs[rank]["calls"][number]["k"])}:
            return f"Rank {rank} sent {min(wide)}, and keys and values have another dtype."
    return None


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _ring_overlap(seen: Observed, number: int) -> str | None:
    case, world = seen.case, seen.case.world
    message = any(c.waited is not None for rank in range(world) for c in seen.calls(rank))
    for rank, got in enumerate(seen.data):
        calls = seen.calls(rank, f"call {number}")
        sends, receives = ([c for c in calls if c.op == op] for op in ("send", "recv"))
        if not calls:
            return f"Rank {rank} neither sent nor received: nothing travels while it attends."
        up = sends[0].peer == (rank + 1) % world if sends else receives[0].peer == rank - 1
        for attend, owner in _attended(seen, rank, number, got):
            if owner is None:
                return (
                    f"Rank {rank} called attend with keys that are not one rank's block. Attend to "
                    "one block while the next one travels."
                )
            turn = (rank - owner if up else owner - rank) % world
            if turn == world - 1:
                continue
            for what, messages in (("receive", receives), ("send", sends)):
                parts = 1 if messages and messages[0].elements in _blocks(case, number) else 2
                due = min((turn + 1) * parts, len(messages))
                if sum(c.started < attend.started for c in messages) < due:
                    return (
                        f"Rank {rank} began to {what} the next block only after it had attended "
                        f"to that of rank {owner}. Start isend and irecv first, then attend."
                    )
            coming = receives[turn * parts : (turn + 1) * parts]
            if any(_before(c, attend, message) for c in coming):
                return (
                    f"Rank {rank} waited for the next block before it attended to that of rank "
                    f"{owner}. Start isend and irecv, attend, and then wait."
                )
    return None


def _blocks(case: Case, number: int) -> set[int]:
    return {_block(case, number, o) for o in range(case.world)}


def _before(call: Record, attend: Any, recorded: bool) -> bool:
    """Whether a message was waited for before attend was over. recorded: whether waits are."""
    if recorded:
        return call.waited is not None and call.waited[0] < attend.finished
    return call.finished is not None and call.finished <= attend.started


def _attended(seen: Observed, rank: int, number: int, got: Any) -> Iterator[tuple[Any, int | None]]:
    """(span, the rank whose block it was, or None) of each attend of a call."""
    whole_call = seen.span(rank, f"call {number}")
    spans = [s for s in seen.spans if (s.rank, s.name) == (rank, "attend")]
    spans = [s for s in spans if whole_call.started <= s.started <= whole_call.finished]
    spans.sort(key=lambda s: s.started)
    blocks = [given["calls"][number]["k"] for given in seen.case.inputs]
    for attend, entry in zip(spans, got["results"][number]["log"], strict=True):
        owners = [o for o, k in enumerate(blocks) if close(entry["k"], k, bitwise=True)]
        yield attend, owners[0] if owners else None


def _ring_held(seen: Observed, number: int) -> str | None:
    case = seen.case
    item = case.inputs[0]["calls"][number]["k"].element_size()
    sizes = sorted(_block(case, number, o) * item for o in range(case.world))
    for rank, got in enumerate(seen.data):
        held = max(entry["held"] for entry in got["results"][number]["log"])
        if held > sizes[-1] + sizes[-2] + sizes[0] // 2:
            return (
                f"While rank {rank} attends, it holds {held:,} bytes besides its own keys and "
                f"values; two blocks are {sizes[-1] + sizes[-2]:,}: the one that it attends to "
                "and the one that comes."
            )
    return None


RING = Task(
    id="18.ring_attention",
    title="Ring attention",
    answer="ring_attention",
    job="lesson18.ring_attention",
    minutes=30,
    cases=_ring_cases,
    criteria=(
        Criterion("attention to the whole sequence", 2, each_call(_ring_call), on=("",)),
        Criterion("shared heads, another dtype", 1, each_call(_ring_call), on=("other",)),
        Criterion("N - 1 rounds, a block each, to one neighbour", 2, _ring_traffic),
        Criterion(
            "the next block travels while one is attended to",
            2,
            each_call(_ring_overlap),
            on=("slow",),
        ),
        Criterion("at most two blocks at once", 2, each_call(_ring_held), on=("slow",)),
        Criterion("the arguments stay as they are", 1, unchanged),
    ),
    hints=(
        "After t rounds in which every rank sends to the next one, whose block does rank r have? "
        "At which place of the sequence does that block begin?",
        "A round: start isend and irecv of the next block, attend to the one you have, wait. The "
        "next block may be shorter or longer than this one.",
        "for t in range(N): owner = (rank - t) % N; if t < N - 1: make empty tensors for the keys "
        "and values of rank owner - 1, isend, irecv; mask = key places <= query places[:, None]; "
        "so_far = attend(q, k, v, mask, so_far); wait for all; k, v = what came.",
    ),
    debrief="Here every rank computes in every round, and under a causal mask half of it is hidden "
    "by the mask. Kernels skip those blocks, which leaves the last rank with most of the work: "
    "hence zigzag. In backward the gradients of keys and values travel with their block.",
)

# -- 18.ulysses ------------------------------------------------------------------------------------


def _ulysses_cases(rng: torch.Generator) -> list[Case]:
    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(dtype)

    def calls(
        lengths: Sequence[int],
        heads: tuple[int, int],
        dim: int = 3,
        dtype: torch.dtype = torch.float32,
        causal: bool = True,
        turned: bool = False,
        refused: bool = False,
    ) -> list[Call]:
        """One call, for each rank."""
        return [
            {
                "q": drawn(heads[0], n, dim, dtype=dtype),
                "k": drawn(heads[1], n, dim, dtype=dtype),
                "v": drawn(heads[1], n, dim, dtype=dtype),
                "lengths": list(lengths),
                "causal": causal,
                "scale": 0.7,
                "turned": turned,
                "refused": refused,
            }
            for n in lengths
        ]

    def case(says: str, kind: str, *every: list[Call]) -> Case:
        world = len(every[0])
        inputs = [{"calls": [one[rank] for one in every]} for rank in range(world)]
        return Case(f"{world_name(world)}{says}", inputs, kind)

    def again(_: int, first: Call) -> Call:
        other = drawn_again(first, rng, "q", "k", "v")
        return other | {"causal": not first["causal"], "scale": 1.3}

    varied = case(", 6 heads, parts of 2, 4 and 3", "", calls((2, 4, 3), (6, 6)))
    lengthened(varied.inputs, "calls", again)
    f64 = torch.float64
    return [
        varied,
        case(
            ", 4 or 8 heads",
            "",
            calls((3, 3, 3, 3), (4, 4), 5),
            calls((1, 5, 2, 3), (8, 8), causal=False),
            calls((1, 2, 5, 3), (8, 8), causal=False),
        ),
        case(", 2 heads", "", calls((3, 4), (2, 2))),
        case(", 3 heads", "", calls((5,), (3, 3)), calls((4,), (6, 2), causal=False)),
        case(
            ", several heads of queries to one of keys, float64, views",
            "other",
            calls((2, 3, 4), (6, 3), 4, f64),
            calls((3, 2, 2), (12, 6), 2, turned=True),
            calls((1, 1, 1), (3, 3), 3, f64, causal=False, turned=True),
        ),
        case(
            ", heads that do not divide",
            "refuse",
            calls((2, 3, 2, 2), (6, 6), refused=True),
            calls((2, 3, 2, 2), (8, 2), refused=True),
            calls((2, 3, 2, 2), (8, 8)),
            calls((2, 2, 2, 2), (3, 3), refused=True),
            calls((2, 2, 2, 2), (12, 6), refused=True),
        ),
        case(", heads that do not divide", "refuse", calls((2, 3), (5, 5), refused=True)),
    ]


def _ulysses_call(seen: Observed, number: int) -> str | None:
    case, world = seen.case, seen.case.world
    calls = [given["calls"][number] for given in case.inputs]
    if calls[0]["refused"]:
        return None
    lengths, causal = calls[0]["lengths"], calls[0]["causal"]
    mask: Mask = _by_places(_spread(lengths), lengths) if causal else lambda *_: None
    heads, kv = len(calls[0]["q"]) // world, len(calls[0]["k"]) // world
    for rank, got in enumerate(seen.data):
        result = got["results"][number]
        wanted = _ring_reference(case, number, rank, range(world), mask)
        what = f"Rank {rank}'s result"
        mistakes = {
            "is attention to the rank's own tokens: the others' never came.": (
                lambda rank=rank: _ring_reference(case, number, rank, [rank], mask)
            ),
        }
        if (wrong := explain(result["out"], wanted, what, mistakes if world > 1 else {})) is None:
            continue
        if _same_rows(result["out"], wanted):
            return (
                f"{what} has the right numbers at wrong places: heads or tokens changed their "
                "order on the way back."
            )
        form = [[heads, sum(lengths), wanted.shape[2]], [kv, sum(lengths), wanted.shape[2]]]
        shown = result["log"][0] if result["log"] else None
        if shown != form:
            seen_forms = (
                "never called" if shown is None else f"handed q {shown[0]} and k {shown[1]}"
            )
            return (
                f"{wrong} On rank {rank} attend was {seen_forms}; with 1/{world} of the heads and "
                f"all tokens these are {form[0]} and {form[1]}."
            )
        return wrong
    return None


def _same_rows(got: Any, wanted: torch.Tensor) -> bool:
    """Whether both have the same vectors, in any order."""
    if type(got) is not torch.Tensor or got.numel() != wanted.numel() or got.dtype != wanted.dtype:
        return False
    rows = [t.reshape(-1, wanted.shape[-1]) for t in (got, wanted)]
    return close(*(r[r[:, 0].argsort()] for r in rows))


def _ulysses_traffic(seen: Observed) -> str | None:
    return all_in_spans(seen) or each_call(_ulysses_messages)(seen)


def _ulysses_messages(seen: Observed, number: int) -> str | None:
    world = seen.case.world
    for rank in range(world):
        call = seen.case.inputs[rank]["calls"][number]
        if call["refused"]:
            continue
        calls = seen.calls(rank, f"call {number}")
        if other := [c.op for c in calls if c.op != "all_to_all"]:
            return f"Rank {rank} called {other[0]}. Ulysses is all-to-alls, no more."
        if len(calls) > 4:
            return (
                f"Rank {rank} made {len(calls)} all-to-alls. Four are enough: queries, keys and "
                "values to their heads, the result back to its tokens."
            )
        q, k = call["q"], call["k"]
        away = (q.numel() + 2 * k.numel()) * (world - 1) // world
        others = sum(call["lengths"]) - q.shape[1]
        back = len(q) // world * others * q.shape[2]
        most = (away + back) * q.element_size()
        sent = sum(c.bytes_sent for c in calls)
        if sent > most:
            return (
                f"Rank {rank} sent {sent:,} bytes. Each element has one rank to go to, and 1/N of "
                f"them stay: {most:,}."
            )
    return None


def _ulysses_refuses(seen: Observed) -> str | None:
    for number, call in enumerate(seen.case.inputs[0]["calls"]):
        world, heads = seen.case.world, [len(call["q"]), len(call["k"])]
        named = f"With {heads[0]} heads of queries, {heads[1]} of keys and {world_name(world)}"
        if not call["refused"]:
            if wrong := _ulysses_call(seen, number):
                return f"{named}: {wrong}"
            continue
        odd = [n for n in heads if n % world]
        for rank, got in enumerate(seen.data):
            raised = got["results"][number]["raised"]
            if raised is None:
                return f"{named} a head would be cut: raise a ValueError. Nothing was raised."
            numbers = set(map(int, re.findall(r"\d+", raised)))
            if world not in numbers or not numbers & set(odd):
                return (
                    f"{named}, your error says {raised!r}. Name the number of heads that does not "
                    "divide, and the number of ranks."
                )
            if ops := seen.ops(rank, f"call {number}"):
                return f"{named} rank {rank} called {ops[0]} before it raised. Look first."
    return None


ULYSSES = Task(
    id="18.ulysses",
    title="Ulysses",
    answer="ulysses",
    job="lesson18.ulysses",
    minutes=20,
    cases=_ulysses_cases,
    criteria=(
        Criterion("attention to the whole sequence", 2, each_call(_ulysses_call), on=("",)),
        Criterion("shared heads, another dtype, views", 1, each_call(_ulysses_call), on=("other",)),
        Criterion(
            "four all-to-alls, each element to one rank", 2, _ulysses_traffic, on=("", "other")
        ),
        Criterion("heads that do not divide are refused", 2, _ulysses_refuses, on=("refuse",)),
        Criterion("the arguments stay as they are", 1, unchanged),
    ),
    hints=(
        "Before: some tokens, all heads. After: all tokens, some heads. Which elements does rank r "
        "send to rank s?",
        "Split the heads for the way there, and concatenate what comes along the tokens; on the "
        "way back split the tokens by lengths and concatenate along the heads. With parts of "
        "different lengths gloo needs dist.all_to_all_single, on flat tensors with split sizes.",
        "There: send x.flatten() in N equal parts; from rank s come heads / N * lengths[s] * dim "
        "numbers: view each part as (heads / N, lengths[s], dim) and cat along the tokens. Back: "
        "the same with the roles of sending and receiving exchanged, and cat along the heads.",
    ),
    debrief="DeepSpeed's UlyssesSPAttentionHF takes equal parts. Where there are fewer heads of "
    "keys than ranks, it repeats keys and values before it sends them, so these bytes no longer "
    "fall with N.",
)

# -- 18.shifted_loss -------------------------------------------------------------------------------

NOT_COUNTED = -100


def _loss_cases(rng: torch.Generator) -> list[Case]:
    def calls(
        lengths: Sequence[int],
        rows: int = 2,
        vocabulary: int = 7,
        dtype: torch.dtype = torch.float32,
        skipped: float = 0.2,
        grad: bool = True,
        times: float = 1.0,
        hidden: Sequence[int] = (),
    ) -> list[Call]:
        """One call, for each rank. skipped: share of labels that do not count; hidden: ranks none
        of whose labels counts.
        """
        made = []
        for rank, n in enumerate(lengths):
            labels = torch.randint(vocabulary, (rows, n), generator=rng)
            left_out = torch.rand(rows, n, generator=rng) < skipped
            if rank == len(lengths) - 1 and rank not in hidden:
                left_out[:, -1] = False
            labels[left_out] = NOT_COUNTED
            if rank in hidden:
                labels[:] = NOT_COUNTED
            logits = (2 * torch.randn(rows, n, vocabulary, generator=rng)).to(dtype)
            made.append({"logits": logits, "labels": labels, "grad": grad, "times": times})
        return made

    def one_label(lengths: Sequence[int], rank: int, place: int) -> list[Call]:
        """A call in which one label alone counts, of this rank at this place."""
        made = calls(lengths, hidden=range(len(lengths)))
        made[rank]["labels"][0, place] = 4
        return made

    def case(says: str, kind: str, *every: list[Call]) -> Case:
        world = len(every[0])
        inputs = [{"calls": [one[rank] for one in every]} for rank in range(world)]
        return Case(f"{world_name(world)}{says}", inputs, kind)

    def again(_: int, first: Call) -> Call:
        other = drawn_again(first, rng, "logits")
        labels = torch.randint(7, first["labels"].shape, generator=rng)
        labels[torch.rand(labels.shape, generator=rng) < 0.4] = NOT_COUNTED
        labels[:, -1] = 3
        return other | {"labels": labels, "times": 2.5}

    varied = case(", parts of 3, 5 and 2 tokens", "", calls((3, 5, 2)))
    lengthened(varied.inputs, "calls", again)
    f64, b16 = torch.float64, torch.bfloat16
    return [
        varied,
        case(", parts of 4, 2, 3 and 6", "", calls((4, 2, 3, 6), rows=1), calls((2, 2, 2, 2), 3)),
        case(", parts of 3 and 4", "", calls((3, 4), 3, times=0.5), calls((3, 4), grad=False)),
        case("", "", calls((5,)), calls((6,), 1, times=3.0)),
        case(
            ", parts of one token, parts without a label, and no label at all",
            "edge",
            calls((1, 1, 1), 2, skipped=0.0),
            calls((3, 2, 4), 2, hidden=(1,)),
            calls((3, 2, 4), 2, hidden=(0, 2)),
            calls((2, 3, 1), 2, hidden=(0, 1, 2)),
            calls((1, 4, 2), 2, skipped=0.0),
            one_label((3, 2, 2), 1, 0),
            one_label((3, 2, 2), 1, 1),
        ),
        case(", without any label", "edge", calls((3,), hidden=(0,)), calls((1,), skipped=0.0)),
        case(
            ", bfloat16 and many labels; float64",
            "other",
            calls((150, 171), 2, 5, b16, skipped=0.1),
            calls((3, 4), 2, 5, f64),
            calls((2049, 3), 1, 3, skipped=0.0),  # float16 has no 2049
        ),
    ]


def _joined(case: Case, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, labels) of the whole sequence; logits in float32 or wider."""
    calls = [given["calls"][number] for given in case.inputs]
    logits = torch.cat([call["logits"] for call in calls], 1)
    wide = logits.double() if logits.dtype is torch.float64 else logits.float()
    return wide, torch.cat([call["labels"] for call in calls], 1)


def _sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Losses of these positions, summed: (rows, n, vocabulary) and (rows, n)."""
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=NOT_COUNTED, reduction="sum"
    )


def _count(labels: torch.Tensor) -> int:
    return int((labels != NOT_COUNTED).sum())


def _loss_call(seen: Observed, number: int) -> str | None:
    logits, labels = _joined(seen.case, number)
    total, count = _sum(logits[:, :-1], labels[:, 1:]), _count(labels[:, 1:])
    wanted = total / max(count, 1)
    form = torch.float64 if logits.dtype is torch.float64 else torch.float32
    close = 1e-10 if form is torch.float64 else 2e-5
    for rank, got in enumerate(seen.data):
        loss = got["results"][number]["loss"]
        what = f"Rank {rank}'s loss"
        if type(loss) is not torch.Tensor or loss.shape != ():
            return f"{what} must be a tensor without dimensions."
        if loss.dtype is not form:
            return f"{what} has dtype {_name(loss)}; it must be {str(form).removeprefix('torch.')}."
        if not count:
            if loss.item() != 0:
                return f"{what} is {loss.item():.3g} where no label counts: 0 / 0. It must be 0."
            continue
        mistakes = _loss_mistakes(seen.case, number, rank, total, count)
        if wrong := explain_number(loss, wanted.item(), what, mistakes, rtol=close):
            return wrong
    return None


def _loss_mistakes(
    case: Case, number: int, rank: int, total: torch.Tensor, count: int
) -> dict[str, float]:
    calls = [given["calls"][number] for given in case.inputs]
    logits, labels = _joined(case, number)
    parts = [call["logits"].to(logits.dtype) for call in calls]
    own = [call["labels"] for call in calls]
    after = [torch.cat([own[(r + 1) % case.world][:, :1]], 1) for r in range(case.world)]
    nexts = [torch.cat([local[:, 1:], first], 1) for local, first in zip(own, after, strict=True)]
    last = nexts[-1].clone()
    last[:, -1] = NOT_COUNTED
    right = [*nexts[:-1], last]
    sums = [float(_sum(*pair)) for pair in zip(parts, right, strict=True)]
    counts = [_count(one) for one in right]

    def mean(labels: Sequence[torch.Tensor]) -> float:
        pairs = zip(parts, labels, strict=True)
        return sum(float(_sum(*pair)) for pair in pairs) / max(sum(map(_count, labels)), 1)

    cut = [torch.cat([one[:, 1:], torch.full_like(one[:, :1], NOT_COUNTED)], 1) for one in own]
    rolled = [one.roll(-1, 1) for one in own]
    flat = [torch.cat([one.flatten()[1:], one.flatten()[:1]]).view_as(one) for one in own]
    back = list(labels.roll(1, 1).split([one.shape[1] for one in own], 1))
    back[0] = back[0].clone()
    back[0][:, 0] = NOT_COUNTED
    each = [s / max(c, 1) for s, c in zip(sums, counts, strict=True)]
    found = {
        "does not have the labels over the borders: that of a part's last token is the first of "
        "the next part.": mean(cut),
        "takes a part's first token for the label of its last one.": mean(rolled),
        "has the sequence's last token predict its first one.": mean(nexts),
        "has labels that are not shifted: a token is to predict the next one.": mean(own),
        "has labels shifted across rows: shift along the tokens.": mean(flat),
        "has labels shifted the other way: a token is to predict the next one.": mean(back),
        "is the mean of the ranks' means. Ranks have different numbers of labels.": (
            sum(each) / case.world
        ),
        "is the rank's own mean.": each[rank],
        "is the rank's own share: its sum over the number of all labels.": sums[rank] / count,
        "is a sum: divide by the number of labels.": float(total),
        "is divided by the number of positions. Those with -100 do not count.": (
            float(total) / (labels.numel() - len(labels))
        ),
        "is divided by the number of tokens. The last one has no label, and -100 does not count.": (
            float(total) / labels.numel()
        ),
        "is divided by the number of labels that count, the first token's too, which nothing "
        "predicts.": float(total) / max(_count(labels), 1),
        "is the sum over all ranks of their means.": sum(each),
    }
    if case.world == 1:
        return {words: value for words, value in found.items() if "rank" not in words}
    return found


def _loss_gradient(seen: Observed, number: int) -> str | None:
    case = seen.case
    if not case.inputs[0]["calls"][number]["grad"]:
        return None
    logits, labels = _joined(case, number)
    logits = logits.requires_grad_()
    count = _count(labels[:, 1:])
    (_sum(logits[:, :-1], labels[:, 1:]) / max(count, 1)).backward()
    lengths = [given["calls"][number]["labels"].shape[1] for given in case.inputs]
    for rank, (got, mean) in enumerate(zip(seen.data, logits.grad.split(lengths, 1), strict=True)):
        call, result = case.inputs[rank]["calls"][number], got["results"][number]
        what = f"The gradient of rank {rank}'s logits"
        if result["early"]:
            return f"{what} was there before backward was called. Return a loss that has a graph."
        dtype, times = call["logits"].dtype, call["times"]
        own = [_count(g["calls"][number]["labels"]) for g in case.inputs]
        mistakes = {
            "is larger by the number of ranks: a sum over ranks stands in the graph.": (
                mean * times * case.world
            ),
            "is smaller by the number of ranks.": mean * times / case.world,
            "is that of the sum: it is not divided by the number of labels.": mean * times * count,
            "does not carry the factor that backward brings: return a loss with a graph.": mean,
            "is zero: the loss is not connected to the logits.": mean * 0,
        }
        if own[rank]:
            mistakes["is that of the rank's own mean: divide by the number of all labels."] = (
                mean * times * count / own[rank]
            )
        if result["grad"] is None:
            return f"{what} is None: the loss is not connected to the logits."
        given = {words: value.to(dtype) for words, value in mistakes.items()}
        if wrong := explain(result["grad"], (mean * times).to(dtype), what, given):
            return wrong
    return None


def _loss_both(seen: Observed) -> str | None:
    return each_call(_loss_call)(seen) or each_call(_loss_gradient)(seen)


def _loss_traffic(seen: Observed) -> str | None:
    return all_in_spans(seen) or each_call(_loss_messages)(seen) or waited_for(seen)


def _loss_messages(seen: Observed, number: int) -> str | None:
    world = seen.case.world
    for rank in range(world):
        if ops := seen.ops(rank, f"backward {number}"):
            return f"Rank {rank} called {ops[0]} in backward, where nothing needs to travel."
        calls = seen.calls(rank, f"call {number}")
        rows = len(seen.case.inputs[rank]["calls"][number]["labels"])
        for call in calls:
            if call.op == "send":
                if call.peer != rank - 1:
                    return (
                        f"Rank {rank} sent something to rank {call.peer}. The labels over a border "
                        "go to the rank before, and rank 0 has none."
                    )
                if call.elements > rows:
                    return (
                        f"Rank {rank} sent {call.elements} numbers to rank {call.peer}, which "
                        f"lacks {rows}: a label for each row."
                    )
            elif call.op not in ("recv", "all_reduce"):
                return (
                    f"Rank {rank} called {call.op}. A label for each row goes to the rank before, "
                    "and one all-reduce adds two numbers."
                )
        sends = [c for c in calls if c.op == "send"]
        if len(sends) > 1:
            return f"Rank {rank} sent {len(sends)} messages to the rank before. One is enough."
        reduced = [c.elements for c in calls if c.op == "all_reduce"]
        if world > 1 and reduced != [2]:
            return (
                f"Rank {rank} reduced {reduced or 'nothing'}: one all-reduce of two numbers is "
                "enough, the sum of the losses and their number."
            )
        if sum(reduced) > 2:
            return f"Rank {rank} reduced {reduced}: two numbers in one all-reduce are enough."
    return None


def _loss_kept(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        if not all(result["same"] for result in got["results"]):
            return f"Rank {rank} changed the logits, which were handed in to be read."
    return unchanged(seen)


LOSS = Task(
    id="18.shifted_loss",
    title="The loss of a sequence in parts",
    answer="shifted_loss",
    job="lesson18.shifted_loss",
    minutes=20,
    cases=_loss_cases,
    criteria=(
        Criterion("the mean over all labels of the sequence", 2, each_call(_loss_call), on=("",)),
        Criterion("its gradient for this rank's logits", 2, each_call(_loss_gradient), on=("",)),
        Criterion("one token, no label, none at all", 1, _loss_both, on=("edge",)),
        Criterion("bfloat16 and many labels, float64", 1, _loss_both, on=("other",)),
        Criterion("a label per row to the rank before, two numbers to all", 2, _loss_traffic),
        Criterion("the arguments stay as they are", 1, _loss_kept),
    ),
    hints=(
        "Which rank has the label of a part's last token? And by which number must each rank "
        "divide its own sum?",
        "Send labels[:, 0] to the rank before. Then one all_reduce of a tensor with two numbers, "
        "the sum and the count, outside of the graph. The graph needs the rank's own sum alone.",
        "total = stack((own.detach(), count)); all_reduce(total); share = own / count of all; "
        "return share + (total[0] / total[1] - share).detach(): the value is everyone's, and the "
        "gradient that of the own share.",
    ),
    debrief="Frameworks shift before they cut, so that no label has to travel: DeepSpeed's "
    "UlyssesSPDataLoaderAdapter puts shift_labels into each batch. Under DDP or FSDP, which divide "
    "by the number of ranks, the share is multiplied by it first.",
)

# -- 18.zigzag -------------------------------------------------------------------------------------

MOST = 1.1  # times the mean
FOLDS = (1, 2, 3)  # tokens divide by 2 N times each of these; the last is always enough


def _zigzag_cases(rng: torch.Generator) -> list[Case]:
    def drawn(ranks: int, folds: int, unit: int) -> Call:
        """A window for which so many folds are needed, and whose limit no rank meets exactly."""
        tokens = 12 * ranks * unit
        fit = [
            window
            for window in range(1, tokens + 1)
            if _needed(tokens, window, ranks) == folds and not _close(tokens, window, ranks)
        ]
        return _question(tokens, _one_of(fit), ranks)

    def _question(tokens: int, window: int, ranks: int) -> Call:
        return {"tokens": tokens, "window": window, "ranks": ranks}

    def _one_of(values: list[Any]) -> Any:
        return values[int(torch.randint(len(values), (), generator=rng))]

    def telling(slip: Works) -> list[Call]:
        """Questions for which work counted so leads to too many chunks, and to too few."""
        more, fewer = [], []
        for ranks in (2, 3, 4, 5):
            tokens = 12 * ranks
            for window in range(1, tokens + 1):
                right, other = _needed(tokens, window, ranks), _needed(tokens, window, ranks, slip)
                if right != other and not _close(tokens, window, ranks):
                    (more if other > right else fewer).append(_question(tokens, window, ranks))
        return [_one_of(found) for found in (more, fewer) if found]

    base = drawn(4, 2, 3)
    other = [q["window"] for q in (drawn(4, 2, 3) for _ in range(20))]
    varied = [
        base,
        base | {"window": next((w for w in other if w != base["window"]), base["window"] + 1)},
        base | {"window": base["tokens"]},
        base | {"ranks": 2},
        drawn(4, 3, 3),
        drawn(3, 2, 1),
        drawn(2, 2, 4),
        drawn(6, 3, 1),
        drawn(5, 1, 2),
        *(question for slip in SLIPS for question in telling(slip)),
        base,
    ]
    edges = [
        _question(12, 10, 1),
        _question(96, 1, 4),
        _question(96, 96, 4),
        _question(96, 1000, 4),
        _question(48, 48, 2),
        _question(12 * 8, 12 * 8, 8),
        drawn(8, 3, 1),
        drawn(7, 2, 1),
    ]
    return [
        Case("windows shorter than the sequence", [{"questions": varied}]),
        Case("one rank, a window of one token, of all", [{"questions": edges}], "edge"),
    ]


Works = Callable[[int, int, int], list[int]]  # (tokens, window, chunks) -> of each chunk


def _works(tokens: int, window: int, chunks: int) -> list[int]:
    """Pairs of tokens that see each other, by chunk of the queries."""
    return _counted(tokens, window, chunks)


def _counted(
    tokens: int, window: int, chunks: int, own: int = 1, first: int = 0, last: int = 0
) -> list[int]:
    """own: how many a token sees besides those before it. first, last: tokens by which a chunk
    begins and ends later than it does.
    """
    size = tokens // chunks
    return [
        sum(min(place + own, window) for place in range(c * size + first, (c + 1) * size + last))
        for c in range(chunks)
    ]


SLIPS: tuple[Works, ...] = tuple(
    partial(_counted, **slip)
    for slip in (
        {"own": 0},
        {"own": 2},
        {"own": -1},
        {"first": 1},
        {"first": -1},
        {"last": 1},
        {"last": -1},
    )
)


def _folded(chunks: int, ranks: int) -> list[list[int]]:
    """Zigzag over and over: 0 1 2 2 1 0 0 1 2 ..."""
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    for chunk in range(chunks):
        place = chunk % (2 * ranks)
        assigned[min(place, 2 * ranks - 1 - place)].append(chunk)
    return assigned


def _busiest(works: Sequence[int], assigned: Sequence[Sequence[int]]) -> float:
    """The work of the busiest rank over the mean."""
    loads = [sum(works[c] for c in own) for own in assigned]
    return max(loads) * len(assigned) / sum(works)


def _ratio(tokens: int, window: int, ranks: int, folds: int, works: Works = _works) -> float:
    chunks = 2 * ranks * folds
    return _busiest(works(tokens, window, chunks), _folded(chunks, ranks))


@cache
def _needed(tokens: int, window: int, ranks: int, works: Works = _works) -> int:
    enough = (m for m in FOLDS if _ratio(tokens, window, ranks, m, works) <= MOST)
    return next(enough, FOLDS[-1])


def _close(tokens: int, window: int, ranks: int) -> bool:
    return any(abs(_ratio(tokens, window, ranks, m) - MOST) < 1e-6 for m in FOLDS)


def _each_deal(
    judge: Callable[[Call, list[list[int]], int], str | None],
) -> Callable[[Observed], str | None]:
    def judge_all(seen: Observed) -> str | None:
        for asked, assigned in zip(
            seen.case.inputs[0]["questions"], seen.data[0]["assigned"], strict=True
        ):
            message = f"With {', '.join(f'{name} = {value}' for name, value in asked.items())}:"
            if wrong := _malformed(asked, assigned):
                return f"{message} {wrong}"
            if wrong := judge(asked, assigned, sum(map(len, assigned))):
                return f"{message} {wrong}"
        return None

    return judge_all


def _malformed(asked: Call, assigned: Any) -> str | None:
    ranks = asked["ranks"]
    if type(assigned) is not list or any(type(own) is not list for own in assigned):
        return "return a list for each rank, of numbers of chunks."
    if len(assigned) != ranks:
        return f"there are {len(assigned)} lists, for {world_name(ranks)}."
    numbers = [whole(c) for own in assigned for c in own]
    if None in numbers or not numbers:
        return "chunks are whole numbers, from 0 on."
    if sorted(numbers) != list(range(len(numbers))):
        twice = sorted({c for c in numbers if numbers.count(c) > 1})
        shown = f"chunk {twice[0]} is there twice" if twice else "a number is left out"
        return f"each chunk has one rank; here {shown}."
    if len({len(own) for own in assigned}) > 1:
        return f"the ranks have {[len(own) for own in assigned]} chunks, and so unequal memory."
    if len(numbers) % (2 * ranks) or asked["tokens"] % len(numbers):
        return (
            f"{len(numbers)} chunks are no multiple of 2 x {ranks} that divides the tokens equally."
        )
    return None


def _deal_even(asked: Call, assigned: list[list[int]], chunks: int) -> str | None:
    tokens, window, ranks = asked["tokens"], asked["window"], asked["ranks"]
    ratio = _busiest(_works(tokens, window, chunks), assigned)
    if ratio <= MOST:
        return None
    loads = [sum(_works(tokens, window, chunks)[c] for c in own) for own in assigned]
    message = f"rank {loads.index(max(loads))} has {ratio:.3f} times the mean work."
    per = chunks // ranks
    own = [sorted(part) for part in assigned]
    if own == [list(range(r * per, (r + 1) * per)) for r in range(ranks)]:
        return f"{message} Its chunks lie next to each other: early ones have less work."
    if chunks == 2 * ranks and own == _folded(chunks, ranks):
        return (
            f"{message} That is zigzag, which evens out a triangle. A window makes it flat after "
            "the first tokens: what do smaller chunks do?"
        )
    half = per // 2
    blocks = [
        [*range(r * half, (r + 1) * half), *range(chunks - (r + 1) * half, chunks - r * half)]
        for r in range(ranks)
    ]
    if own == blocks:
        return f"{message} Smaller chunks help only if those of a rank lie apart."
    if own == [list(range(r, chunks, ranks)) for r in range(ranks)]:
        return (
            f"{message} In every stride of {ranks} chunks the last rank has the most work. Turn "
            "every second stride round."
        )
    return f"{message} A token sees at most {window}: itself and those before it."


def _deal_few(asked: Call, assigned: list[list[int]], chunks: int) -> str | None:
    enough = 2 * asked["ranks"] * _needed(**asked)
    if chunks <= enough:
        return None
    return f"{chunks} chunks; {enough} are enough for {MOST} times the mean."


def _deal_both(asked: Call, assigned: list[list[int]], chunks: int) -> str | None:
    return _deal_even(asked, assigned, chunks) or _deal_few(asked, assigned, chunks)


ZIGZAG = Task(
    id="18.zigzag",
    title="Zigzag under a window",
    answer="zigzag",
    job="lesson18.zigzag",
    minutes=20,
    cases=_zigzag_cases,
    criteria=(
        Criterion(
            "each chunk on one rank, equally many on each",
            1,
            _each_deal(lambda *_: None),
            on=("",),
        ),
        Criterion("no rank over 1.1 times the mean work", 2, _each_deal(_deal_even), on=("",)),
        Criterion("no more chunks than that takes", 2, _each_deal(_deal_few), on=("",)),
        Criterion(
            "one rank, windows of one token and of all", 1, _each_deal(_deal_both), on=("edge",)
        ),
    ),
    hints=(
        "How much work has a token at place i? Draw it over i: which part of zigzag's picture is "
        "still there under a window?",
        "Zigzag pairs an early chunk with a late one. Under a short window nearly all chunks cost "
        "the same, and the few cheap ones must be shared by all ranks: cut smaller, and zigzag "
        "over and over.",
        "for m in 1, 2, 3, ...: C = 2 N m chunks; work of chunk c: sum of min(i + 1, window); "
        "chunk c goes to rank min(p, 2N - 1 - p) with p = c % 2N; stop when the largest sum is at "
        "most 1.1 times the mean.",
    ),
    debrief="torch's context parallelism has both: a head-tail load balancer, which is zigzag with "
    "m = 1, and for flex_attention one that reads the work of each block from its mask.",
)

TASKS = [MERGE, RING, ULYSSES, LOSS, ZIGZAG]
