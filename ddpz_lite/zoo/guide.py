"""What is said about each bug of the zoo: what was seen, what finds it, its cure, its thread."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddpz_lite.launcher import Run
from ddpz_lite.show.quizzes import Answer, right, wrong

Look = Callable[[Run, Run | None], str]


@dataclass(frozen=True)
class Bug:
    """One bug.

    thread   the public issue or pull request in which somebody met it: "pytorch/pytorch#33148"
    looks    what tools say of a run that came to its end, with the run of one process beside it
    compare  whether one process of the same program is run too
    mend     what the cure replaces in the program, and by what
    """

    title: str
    symptom: str
    thread: str
    found_by: str
    answers: tuple[Answer, ...]
    lesson: str
    mend: tuple[tuple[str, str], ...]
    world: int = 2
    timeout: float = 30.0  # seconds; where nothing tells a hang before
    looks: tuple[tuple[str, Look], ...] = ()
    compare: bool = False

    @property
    def url(self) -> str:
        """The thread's address; the host leads a pull request's number to its page."""
        repository, _, number = self.thread.partition("#")
        return f"https://github.com/{repository}/issues/{number}"


# ---- tools: each takes the run, and one process's run, and says what it sees ----


def calls(found: Run, _: Run | None) -> str:
    """How often each rank called what."""
    by_rank = {rank: Counter() for rank in range(found.world_size)}
    for record in found.ledger:
        by_rank[record.rank][f"{record.op} of {record.elements} {record.dtype}"] += 1
    return "\n".join(f"rank {rank}: {dict(counts)}" for rank, counts in by_rank.items())


def losses(found: Run, _: Run | None) -> str:
    """The losses that each rank would have logged."""
    rows = ((rank, result["losses"]) for rank, result in enumerate(found))
    return "\n".join(f"rank {r}: " + " ".join(f"{x:.3f}" for x in row) for r, row in rows)


def checksums(found: Run, _: Run | None) -> str:
    """A checksum of each rank's weights."""
    sums = [hashlib.sha256(r["weights"].numpy().tobytes()).hexdigest()[:12] for r in found]
    return "\n".join(f"rank {rank}: {value}" for rank, value in enumerate(sums))


def one_process(found: Run, alone: Run | None) -> str:
    """How far the weights are from those of one process that saw the whole batch."""
    off = (found[0]["weights"] - alone[0]["weights"]).abs().max().item()
    return f"weights, largest difference from one process: {off:.2g}"


def value_of(key: str) -> Look:
    """What each rank, and one process, returned under a key."""

    def look(found: Run, alone: Run | None) -> str:
        rows = [f"rank {rank}: {_short(result[key])}" for rank, result in enumerate(found)]
        return "\n".join([*rows, *([f"one process: {_short(alone[0][key])}"] if alone else [])])

    return look


def twice(found: Run, alone: Run | None) -> str:
    """How many samples more than one rank has seen."""
    seen = [sample for result in found for sample in result["seen"]]
    return f"samples: {len(seen)} seen, {len(set(seen))} different"


def _short(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], float):
        return " ".join(f"{x:.4g}" for x in value)
    return str(value.tolist() if hasattr(value, "tolist") else value)


GUIDE: dict[int, Bug] = {
    1: Bug(
        title="It stops before the first epoch is over",
        symptom="Each rank reads a file of its own. On one rank alone all is well; on two it stands"
        " still, and says nothing. The GPUs show 100%.",
        thread="pytorch/pytorch#33148",
        found_by="the launcher's report: who has returned",
        answers=(
            wrong("line 11: all ranks have one seed", "They must begin alike: that is right."),
            right(
                "line 15: the ranks go round a different number of times",
                "12 samples are three batches, 8 are two. Rank 0's third has no partner.",
            ),
            wrong("line 17: gradients are cleared too late", "Before backward() is early enough."),
        ),
        lesson="Every rank must make the same number of steps. Cut to the shortest, go on with"
        " weight 0, or use `model.join()`.",
        mend=(
            (
                "    for x in mine.split(4):\n",
                "    steps = min(len(file) for file in FILES) // 4\n"
                "    for x in mine.split(4)[:steps]:\n",
            ),
        ),
    ),
    2: Bug(
        title="It stops some time after step 5, never at the same step",
        symptom="Early stopping was added last week. Since then jobs stand still near their end.",
        thread="Lightning-AI/pytorch-lightning#379",
        found_by="the launcher's report: who has returned",
        answers=(
            right(
                "line 21: each rank decides for itself",
                "Rank 1's part of the validation set is fitted sooner. It leaves the loop, and the"
                " others wait in the next backward().",
            ),
            wrong("line 11: the weights are set after DDP", "They are set alike on all ranks."),
            wrong("line 20: `model.module` skips the hooks", "Nothing is to be averaged there."),
        ),
        lesson="Whatever decides how many collectives follow must be the same number on all ranks:"
        " reduce it first.",
        mend=(
            (
                "        if held_out > best:\n",
                "        dist.all_reduce(held_out)\n        if held_out > best:\n",
            ),
        ),
    ),
    3: Bug(
        title="It stops when it saves",
        symptom="The script saved well under DDP. Under ZeRO-3 the first save never ends.",
        thread="pytorch/pytorch#73383",
        found_by="the launcher's report: two ranks in different calls",
        answers=(
            wrong("line 19: the barrier hangs", "It waits for rank 0, which is elsewhere."),
            wrong("line 14: zero_grad() comes last", "Any place outside of backward is right."),
            right(
                "line 16: rank 0 alone asks for the state",
                "The state lies on all ranks, so to collect it is a collective: all must call it.",
            ),
        ),
        lesson="Under sharding `state_dict` is a collective. All ranks call it, one writes.",
        mend=(
            (
                "    if dist.get_rank() == 0:\n"
                "        state = dz.full_state_dict(model)\n"
                "        saved",
                "    state = dz.full_state_dict(model)\n"
                "    if dist.get_rank() == 0:\n"
                "        saved",
            ),
        ),
    ),
    4: Bug(
        title="It stops in the first step, but only with some data",
        symptom="A model that calls its head once a round of a conversation. Under DDP it trains;"
        " under ZeRO-3 it stops as soon as two conversations differ in length.",
        thread="deepspeedai/DeepSpeed#7998",
        found_by="the message: ranks compare what the first forward gathers",
        answers=(
            wrong("line 11: two layers of one class", "Each is a unit of its own; that is right."),
            right(
                "line 23: a unit runs more often on one rank",
                "To run a unit is to gather it, all ranks together. Rank 1 gathers once more.",
            ),
            wrong("line 24: the loss has another scale", "True, and no reason to wait."),
        ),
        lesson="Under ZeRO-3 a branch in the data is a branch in the collectives. All ranks run"
        " the unit as often as the one that needs it most, and throw the rest away.",
        mend=(
            (
                "    rounds = 1 + dist.get_rank()  # this rank's conversation has so many\n",
                "    rounds = torch.tensor(1 + dist.get_rank())\n"
                "    dist.all_reduce(rounds, op=dist.ReduceOp.MAX)\n",
            ),
        ),
    ),
    5: Bug(
        title="It stops when a gradient overflows, or in the step after",
        symptom="fp16 and a sharded optimizer, with a check that skips a step whose gradients"
        " overflowed. Most nights it runs through.",
        thread="facebookresearch/fairscale#180",
        found_by="the launcher's report: two calls that do not belong together",
        answers=(
            wrong("line 11: an element is infinite", "That happens. One step is to be skipped."),
            right(
                "line 14: each rank looks at its own part",
                "The infinity lies in rank 1's part. Rank 1 skips the gather, rank 0 does not.",
            ),
            wrong("line 13: the cut comes before the division", "Either order gives the mean."),
        ),
        lesson="What one rank finds, all must know before any of them acts. torch has a"
        " `ShardedGradScaler` for this.",
        mend=(
            (
                "        if not mine.isfinite().all():\n",
                "        finite = mine.isfinite().all().float()\n"
                "        dist.all_reduce(finite, op=dist.ReduceOp.MIN)\n"
                "        if not finite:\n",
            ),
        ),
    ),
    6: Bug(
        title="A message about sizes, from a line that is right",
        symptom="On some machines it hangs when an epoch ends; here it says that two calls do not"
        " match. Both calls look right.",
        thread="lifeiteng/vall-e#93",
        found_by="the two places that the mismatch names",
        answers=(
            wrong("line 9: the total is a number, not a vector", "All ranks would agree on it."),
            right(
                "line 17: one rank is through its file, and validates",
                "Rank 1 has two batches, rank 0 three: the third gradient meets a total.",
            ),
            wrong("line 20: the gradient is summed before it is divided", "That is the mean."),
        ),
        lesson="Collectives are paired by order, not by line. Gloo and NCCL may even add the wrong"
        " pair and go on.",
        mend=(
            (
                "    for x in FILES[dist.get_rank()].split(4):\n",
                "    steps = min(len(file) for file in FILES) // 4\n"
                "    for x in FILES[dist.get_rank()].split(4)[:steps]:\n",
            ),
        ),
    ),
    7: Bug(
        title="`Expected to have finished reduction in the prior iteration`",
        symptom="One model, two tasks in turn. It fails in the second step on every rank, and not"
        " with one process.",
        thread="pytorch/pytorch#43259",
        found_by="DDP's own message; TORCH_DISTRIBUTED_DEBUG=INFO adds the names",
        answers=(
            wrong("line 10: a ModuleList hides its parameters", "It registers them; a list would."),
            wrong("line 21: zero_grad() sets gradients to None", "DDP is at ease with that."),
            right(
                "line 13: a head is left out of each step",
                "DDP waits for a gradient of every parameter, and half of the heads have none.",
            ),
        ),
        lesson="`find_unused_parameters=True` walks the graph in each step and marks them ready."
        " Better: use all in each step.",
        mend=(
            (
                "DistributedDataParallel(TwoHeads())",
                "DistributedDataParallel(TwoHeads(), find_unused_parameters=True)",
            ),
        ),
    ),
    8: Bug(
        title="`Expected to mark a variable ready only once`",
        symptom="Checkpointing was switched on to save memory. DDP fails in the first backward.",
        thread="modelscope/ms-swift#3171",
        found_by="DDP's own message",
        answers=(
            right(
                "line 15: reentrant checkpoints run a backward each",
                "The shared block is in two of them. Its hooks fire twice, and DDP counts once.",
            ),
            wrong(
                "line 14: weights are used twice", "Autograd adds both and fires once, if alone."
            ),
            wrong("line 23: backward() needs a scalar", "A mean is one."),
        ),
        lesson="Use `use_reentrant=False`: it recomputes inside of one backward.",
        mend=(("use_reentrant=True", "use_reentrant=False"),),
    ),
    9: Bug(
        title="Two pairs of four ranks never find each other",
        symptom="Each rank makes the group that it is in. Sometimes it stops, sometimes a rank"
        " talks to a stranger.",
        thread="pytorch/pytorch#25390",
        found_by="the launcher's report: who never came",
        world=4,
        timeout=6.0,
        answers=(
            wrong("line 10: `group=` wants a list", "It wants what new_group returned."),
            right(
                "line 8: ranks make different groups",
                "new_group is collective over *all* ranks, in the same order, members or not.",
            ),
            wrong("line 9: each rank has another value", "An all-reduce is for that."),
        ),
        lesson="Make every group on every rank, then pick your own. `dist.new_subgroups` and"
        " `init_device_mesh` do that for you.",
        mend=(
            (
                "    mine = [0, 1] if rank < 2 else [2, 3]\n    pair = dist.new_group(mine)\n",
                "    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]\n",
            ),
        ),
    ),
    10: Bug(
        title="Half of the ranks are not in their own group",
        symptom="The first of each pair is to send its weights to the second. The first pair does;"
        " the second fails.",
        thread="meta-pytorch/torchrec#4601",
        found_by="the message, and who raised it",
        world=4,
        answers=(
            wrong("line 6: groups are made on all ranks", "They must be."),
            wrong(
                "line 7: rank // 2 is the wrong pair", "0 and 1 have the first, 2 and 3 the other."
            ),
            right(
                "line 9: src counts in the world, not in the group",
                "src=0 is the world's rank 0, who is not in the second pair.",
            ),
        ),
        lesson="`src` and `dst` are global ranks; `group_src` counts inside the group.",
        mend=(("src=0, group=pair", "group_src=0, group=pair"),),
    ),
    11: Bug(
        title="More epochs do not help",
        symptom="`shuffle=True`, and yet the loss of epoch 2 has the bumps of epoch 1.",
        thread="pytorch/pytorch#31771",
        found_by="the samples of each epoch",
        looks=(("the samples", value_of("orders")),),
        answers=(
            wrong("line 8: all ranks have one seed", "They must, to deal from one order."),
            right(
                "line 11: nobody tells the sampler which epoch it is",
                "Its order comes from seed + epoch, and the epoch stays 0.",
            ),
            wrong(
                "line 9: the loader should shuffle too", "A sampler and shuffle exclude each other."
            ),
        ),
        lesson="`sampler.set_epoch(epoch)` before each epoch.",
        mend=(
            (
                "        orders.append([])\n",
                "        sampler.set_epoch(epoch)\n        orders.append([])\n",
            ),
        ),
    ),
    12: Bug(
        title="The accuracy depends on the number of ranks",
        symptom="0.600 on one GPU, 0.667 on two, with the same weights.",
        thread="pytorch/pytorch#25162",
        found_by="one process, and the number of samples counted",
        looks=(("accuracy, against one process", value_of("accuracy")),),
        compare=True,
        answers=(
            wrong(
                "line 13: counts are summed, not averaged", "Sums, then one ratio: that is right."
            ),
            wrong("line 12: a tensor in a list", "torch.tensor reads it as a number."),
            right(
                "line 9: the sampler deals a sample twice",
                "5 samples on 2 ranks: it repeats the first, which is right, so that both have 3.",
            ),
        ),
        lesson="Padding is for training. For an evaluation deal every sample once; ranks may have"
        " unequal numbers, since nothing is collective inside the loop.",
        mend=(
            (
                "    mine = DistributedSampler(RIGHT, shuffle=False)\n",
                "    mine = range(dist.get_rank(), len(RIGHT), dist.get_world_size())\n",
            ),
        ),
    ),
    13: Bug(
        title="no_sync() saves nothing",
        symptom="Four micro-batches a step, with no_sync() for three of them. A step takes as long"
        " as without it.",
        thread="huggingface/accelerate#1726",
        found_by="the ledger: calls of a step",
        looks=(("the ledger", calls),),
        answers=(
            right(
                "line 15: forward runs outside of no_sync()",
                "DDP decides in forward whether the next backward is to be averaged.",
            ),
            wrong("line 14: every fourth is the last", "3 and 7 of 0 to 7: right."),
            wrong(
                "line 15: the loss is divided too early", "Before or after backward is the same."
            ),
        ),
        lesson="Forward and backward both go inside. Values were right all the time: only the"
        " ledger tells.",
        mend=(
            (
                "        loss = model(x).square().mean() / 4\n"
                "        with contextlib.nullcontext() if last else model.no_sync():\n",
                "        with contextlib.nullcontext() if last else model.no_sync():\n"
                "            loss = model(x).square().mean() / 4\n",
            ),
        ),
    ),
    14: Bug(
        title="A sum that is never there",
        symptom="A layer whose inner dimension is split over the ranks. Each rank's output is only"
        " its own part; the ledger shows the all-reduce.",
        thread="NVIDIA/Megatron-LM#5337",
        found_by="one process; and the ranks' outputs, which differ after an all-reduce",
        looks=(("outputs, against one process", value_of("x")),),
        compare=True,
        answers=(
            wrong(
                "line 14: the rows are dealt in turn", "Any deal of the inner dimension will do."
            ),
            right(
                "line 6: a copy is reduced, and dropped",
                "contiguous() copies what is transposed. The sum is in the copy.",
            ),
            wrong(
                "line 15: the product is transposed twice", "It gives (2, 4), as the comment says."
            ),
        ),
        lesson="Reduce a name that you keep: `part = part.contiguous()`.",
        mend=(
            (
                "    dist.all_reduce(part.contiguous())\n",
                "    part = part.contiguous()\n    dist.all_reduce(part)\n",
            ),
        ),
    ),
    15: Bug(
        title="One rank skips a step, the other does not",
        symptom="The overflow flag is reduced, so that all ranks skip together. Now and then the"
        " replicas differ all the same.",
        thread="pytorch/pytorch#115710",
        found_by="checksums of the weights",
        looks=(("checksums", checksums), ("weights", value_of("weights"))),
        answers=(
            wrong("line 16: a sum instead of a maximum", "Above zero is above zero."),
            right(
                "line 17: the flag is read before it has arrived",
                "async_op=True returns at once; rank 0 reads its own flag, as rank 1 is late.",
            ),
            wrong(
                "line 13: rank 1 sleeps", "That only makes the race come out the same each time."
            ),
        ),
        lesson="`work.wait()` first, then read. On a GPU the race is won by whoever is faster.",
        mend=(
            (
                "        skip = overflow.item() > 0\n        work.wait()\n",
                "        work.wait()\n        skip = overflow.item() > 0\n",
            ),
        ),
    ),
    16: Bug(
        title="Two ranks, and no epoch is shorter",
        symptom="The loss goes down as it should. An epoch has as many steps as alone.",
        thread="huggingface/datasets#5360",
        found_by="the samples of all ranks; the losses, which are equal on both",
        looks=(("losses", losses), ("the samples", twice), ("one process", one_process)),
        compare=True,
        answers=(
            wrong("line 10: all ranks have one seed in the data", "One order for all: needed."),
            right(
                "line 11: every rank reads the whole stream",
                "A sampler deals indices; a stream has none. Both ranks train on the same samples.",
            ),
            wrong("line 21: half a batch on each rank", "Together it is one batch: right."),
        ),
        lesson="A stream must be cut by rank (and by worker of the loader) by whoever writes it.",
        mend=(
            (
                "        for _ in range(64):\n            x = torch.randn(4, generator=dice)\n",
                "        for i in range(64):\n            x = torch.randn(4, generator=dice)\n"
                "            if i % dist.get_world_size() != dist.get_rank():\n"
                "                continue\n",
            ),
        ),
    ),
    17: Bug(
        title="Short texts count more",
        symptom="The loss goes down on both ranks. A model trained on one GPU comes out slightly"
        " better, whatever the seed.",
        thread="huggingface/transformers#34373",
        found_by="one process on the same batch",
        looks=(("losses", losses), ("one process", one_process)),
        compare=True,
        answers=(
            right(
                "line 17: a mean of each rank's tokens",
                "DDP averages the two means: 2 tokens weigh as much as 12.",
            ),
            wrong("line 14: the texts are dealt unevenly", "They are. The loss has to know."),
            wrong("line 13: DDP divides by the ranks", "It does, and the loss must allow for it."),
        ),
        lesson="Divide by the tokens of all ranks (and of all micro-batches), and multiply by the"
        " world size that DDP divides by.",
        mend=(
            (
                "    losses = []\n",
                "    total = torch.tensor(float(len(tokens)))\n"
                "    dist.all_reduce(total)\n    losses = []\n",
            ),
            (
                "cross_entropy(model(tokens), tokens)\n",
                'cross_entropy(model(tokens), tokens, reduction="sum")\n'
                "        loss = loss * world / total\n",
            ),
        ),
    ),
    18: Bug(
        title="Clipping that depends on the number of ranks",
        symptom="A sharded optimizer, clipping at 1.0 as before. It trains, a little faster than"
        " before, and nobody minds.",
        thread="pytorch/pytorch#72548",
        found_by="the norms, which differ by rank; one process",
        looks=(("losses", losses), ("norms", value_of("norms")), ("one process", one_process)),
        compare=True,
        answers=(
            wrong("line 20: the division comes after the cut", "Before or after is the same."),
            right(
                "line 21: the norm of a shard",
                "Each rank clips its rows by their own, smaller norm.",
            ),
            wrong("line 23: the shards are gathered too late", "The next forward needs them."),
        ),
        lesson="The norm is global: square, sum over the ranks, root. Ours is"
        " `optimizer.clip_grad_norm_`; FSDP2's DTensors sum by themselves.",
        mend=(
            (
                "        norms.append(nn.utils.clip_grad_norm_([shard], 1.0).item())\n",
                "        norm = shard.grad.square().sum()\n"
                "        dist.all_reduce(norm)\n"
                "        norm = norm.sqrt()\n"
                "        nn.utils.clip_grads_with_norm_([shard], 1.0, norm)\n"
                "        norms.append(norm.item())\n",
            ),
        ),
    ),
    19: Bug(
        title="More GPUs, and it stops learning early",
        symptom="The loss falls, then lies flat. With one GPU it went on falling.",
        thread="huggingface/accelerate#2926",
        found_by="the learning rates, against one process",
        looks=(("losses", losses), ("rates", value_of("rates")), ("one process", one_process)),
        compare=True,
        answers=(
            wrong("line 15: the rate should grow with the ranks", "One may; that is no bug."),
            right(
                "line 8: the schedule goes on once for each rank",
                "It was made for steps, and the loop makes 8. On two ranks it drops after 2.",
            ),
            wrong(
                "line 22: rates are noted before the step", "It is the rate that the step takes."
            ),
        ),
        lesson="A schedule counts steps, or samples, and whoever makes it must say which.",
        mend=(
            (
                "    for _ in range(dist.get_world_size()):  # so many batches were taken\n"
                "        schedule.step()\n",
                "    schedule.step()\n",
            ),
        ),
    ),
    20: Bug(
        title="A contrastive loss that learns worse on more GPUs",
        symptom="Each image is compared with all images of all ranks. The loss goes down.",
        thread="HobbitLong/SupContrast#26",
        found_by="one process on the same batch",
        looks=(("losses", losses), ("one process", one_process)),
        compare=True,
        answers=(
            wrong("line 23: targets begin at rank · 4", "So they do among the gathered rows."),
            wrong("line 22: the views share a batch", "chunk cuts both alike: right."),
            right(
                "line 12: a gradient flows back to this rank's rows alone",
                "What the other ranks' losses say of them is lost: the gathered rows are new"
                " tensors.",
            ),
        ),
        lesson="A gather with a backward sums what the losses of all ranks say of each row.",
        mend=(
            (
                "    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]\n"
                "    dist.all_gather(parts, part)\n"
                "    parts[dist.get_rank()] = part  # this one has a gradient\n"
                "    return torch.cat(parts)\n",
                "    import torch.distributed._functional_collectives as collectives\n\n"
                "    return collectives.all_gather_single_autograd(part, 0, dist.group.WORLD)\n",
            ),
        ),
    ),
}
