"""What is said about each bug of the zoo: what was seen, what finds it, its cure, its thread."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ddpz_lite.course.show.quizzes import Answer, right, wrong
from ddpz_lite.launcher import Run


@dataclass(frozen=True)
class Bug:
    """One bug.

    thread   the public issue or pull request in which somebody met it: "pytorch/pytorch#33148"
    met      what that thread tells
    mend     what the cure replaces in the program, and by what
    looks    of a program that ends: the tools to look with, by their names in TOOLS; any other name
             is a key of what the program returns
    same     of a program that ends: the key under which all ranks, and one process, should return
             the same
    """

    title: str
    symptom: str
    answers: tuple[Answer, ...]
    found_by: str
    lesson: str
    thread: str
    met: str
    mend: tuple[tuple[str, str], ...]
    world: int = 2
    looks: tuple[str, ...] = ()
    same: str | None = None

    @property
    def line(self) -> int:
        """The program's line that the right answer names."""
        text = next(answer.text for answer in self.answers if answer.right)
        return int(re.match(r"line (\d+):", text)[1])

    @property
    def url(self) -> str:
        """The thread's address; the host leads a pull request's number to its page."""
        repository, _, number = self.thread.partition("#")
        return f"https://github.com/{repository}/issues/{number}"


# ---- tools: each takes what several ranks did, and one process, and says what it sees ----


def calls(found: Run, _: Run, __: str) -> str:
    """How often each rank called what."""
    by_rank = defaultdict(Counter)
    for record in found.ledger:
        by_rank[record.rank][f"{record.op} of {record.elements} {record.dtype}"] += 1
    rows = (
        (rank, ", ".join(f"{times} x {what}" for what, times in counts.most_common()))
        for rank, counts in sorted(by_rank.items())
    )
    return "\n".join(f"rank {rank}: {row}" for rank, row in rows)


def checksums(found: Run, _: Run, same: str) -> str:
    """A checksum of what each rank has."""
    sums = [hashlib.sha256(result[same].numpy().tobytes()).hexdigest()[:12] for result in found]
    return "\n".join(f"rank {rank}: {value}" for rank, value in enumerate(sums))


def one_process(found: Run, alone: Run, same: str) -> str:
    """How far the weights are from those of one process that saw the whole batch."""
    off = (found[0][same] - alone[0][same]).abs().max().item()
    return f"{same}, largest difference from one process: {off:.2g}"


def twice(found: Run, _: Run, __: str) -> str:
    """How many samples more than one rank has seen."""
    seen = [sample for result in found for sample in result["seen"]]
    return f"{len(seen)} seen, {len(set(seen))} different"


def returned(key: str) -> Callable[[Run, Run, str], str]:
    """A tool: what each rank, and one process, returned under a key."""

    def look(found: Run, alone: Run, _: str) -> str:
        rows = [f"rank {rank}: {_short(result[key])}" for rank, result in enumerate(found)]
        return "\n".join([*rows, f"one process: {_short(alone[0][key])}"])

    return look


TOOLS = {"calls": calls, "checksums": checksums, "one process": one_process, "samples": twice}


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and value and isinstance(value[0], float):
        return " ".join(f"{x:.4g}" for x in value)
    return str(value)


TRAINS = ("losses", "one process")

GUIDE: dict[int, Bug] = {
    1: Bug(
        title="It stops before the first epoch is over",
        symptom="Each rank reads a file of its own. On one rank alone all is well; on two it stands"
        " still, and says nothing. The GPUs show 100%.",
        answers=(
            wrong("line 11: all ranks have one seed", "They must begin alike: that is right."),
            right(
                "line 15: the ranks go round a different number of times",
                "12 samples are three batches, 8 are two. Rank 0's third has no partner.",
            ),
            wrong("line 17: gradients are cleared too late", "Before backward() is early enough."),
        ),
        found_by="the launcher's report: who has returned",
        lesson="Every rank must make the same number of steps. Cut to the shortest, go on with"
        " weight 0, or use `model.join()`.",
        thread="pytorch/pytorch#33148",
        met="Many users had ranks with unequal numbers of batches. `join()` came of it.",
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
        answers=(
            right(
                "line 21: each rank decides for itself",
                "Rank 1's part of the validation set is fitted sooner. It leaves the loop, and the"
                " others wait in the next backward().",
            ),
            wrong("line 11: the weights are set after DDP", "They are set alike on all ranks."),
            wrong("line 20: `model.module` skips the hooks", "Nothing is to be averaged there."),
        ),
        found_by="the launcher's report: who has returned",
        lesson="Whatever decides how many collectives follow must be the same number on all ranks:"
        " reduce it first.",
        thread="Lightning-AI/pytorch-lightning#379",
        met="The condition was met in one process and not in the others; they went on, and hung.",
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
        answers=(
            wrong("line 19: the barrier hangs", "It waits for rank 0, which is elsewhere."),
            wrong("line 14: zero_grad() comes last", "Any place outside of backward is right."),
            right(
                "line 16: rank 0 alone asks for the state",
                "The state lies on all ranks, so to collect it is a collective: all must call it.",
            ),
        ),
        found_by="the launcher's report: two ranks in different calls",
        lesson="Under sharding `state_dict` is a collective. All ranks call it, one writes.",
        thread="deepspeedai/DeepSpeed#801",
        met="Its author had called `save_checkpoint` on rank 0 alone, and it hung. The documents"
        " now say that all must call it.",
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
        " under ZeRO-3 some batches stop it.",
        answers=(
            right(
                "line 23: a unit runs more often on one rank",
                "To run a unit is to gather it, all ranks together. Rank 1 gathers once more.",
            ),
            wrong("line 11: two layers of one class", "Each is a unit of its own; that is right."),
            wrong("line 24: the loss has another scale", "True, and no reason to wait."),
        ),
        found_by="the message: ranks compare what the first forward gathers",
        lesson="Under ZeRO-3 a branch in the data is a branch in the collectives. All ranks run"
        " the unit as often as the one that needs it most.",
        thread="deepspeedai/DeepSpeed#7998",
        met="A head ran once on rank 0 and three times on rank 1, which then waited for ever.",
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
        answers=(
            wrong("line 11: an element is infinite", "That happens. One step is to be skipped."),
            right(
                "line 14: each rank looks at its own part",
                "The infinity lies in rank 1's part. Rank 1 skips the gather, rank 0 does not.",
            ),
            wrong("line 13: the cut comes before the division", "Either order gives the mean."),
        ),
        found_by="the launcher's report: two calls that do not belong together",
        lesson="What one rank finds, all must know before any of them acts. torch has a"
        " `ShardedGradScaler` for this.",
        thread="facebookresearch/fairscale#180",
        met="Some ranks skipped the sharded optimizer's step, others made it: a deadlock.",
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
        answers=(
            wrong("line 9: the total is a number, not a vector", "All ranks would agree on it."),
            wrong("line 20: the gradient is summed before it is divided", "That is the mean."),
            right(
                "line 17: one rank is through its file, and validates",
                "Rank 1 has two batches, rank 0 three: the third gradient meets a total.",
            ),
        ),
        found_by="the two places that the mismatch names",
        lesson="Collectives are paired by order, not by line. Gloo and NCCL may even add the wrong"
        " pair and go on.",
        thread="mosaicml/composer#3415",
        met="With loaders of unequal lengths, various all-reduces of training and evaluation ran"
        " into time-outs.",
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
        answers=(
            wrong("line 10: a ModuleList hides its parameters", "It registers them; a list would."),
            wrong("line 21: zero_grad() sets gradients to None", "DDP is at ease with that."),
            right(
                "line 13: a head is left out of each step",
                "DDP waits for a gradient of every parameter, and half of the heads have none.",
            ),
        ),
        found_by="DDP's own message; TORCH_DISTRIBUTED_DEBUG=INFO adds the names",
        lesson="`find_unused_parameters=True` walks the graph in each step and marks them ready."
        " Better: use all in each step.",
        thread="pytorch/pytorch#55582",
        met="Many output layers, of which a batch used some; DataParallel had not minded.",
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
        found_by="DDP's own message",
        lesson="Use `use_reentrant=False`: it recomputes inside of one backward.",
        thread="modelscope/ms-swift#3171",
        met="A new version failed on eight GPUs and not on one; `use_reentrant` was the answer.",
        mend=(("use_reentrant=True", "use_reentrant=False"),),
    ),
    9: Bug(
        title="Two pairs of four ranks never find each other",
        symptom="Each rank makes the group that it is in. torch alone says nothing of it: it"
        " stops, or dies of a refused connection.",
        world=4,
        answers=(
            wrong("line 10: `group=` wants a list", "It wants what new_group returned."),
            right(
                "line 8: ranks make different groups",
                "new_group is collective over the whole world, in the same order, members or not.",
            ),
            wrong("line 9: each rank has another value", "An all-reduce is for that."),
        ),
        found_by="the launcher's report: one group with two lists of members",
        lesson="Make every group on every rank, then pick your own. `dist.new_subgroups` and"
        " `init_device_mesh` do that for you.",
        thread="pytorch/pytorch#25390",
        met="Four processes each made their own half: a refused connection, or no end.",
        mend=(
            (
                "    mine = [0, 1] if rank < 2 else [2, 3]\n    pair = dist.new_group(mine)\n",
                "    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]\n",
            ),
        ),
    ),
    10: Bug(
        title="The first pair works, the second fails",
        symptom="The first rank of each pair is to send its weights to the second. Ranks 0 and 1"
        " end well, 2 and 3 with an error.",
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
        found_by="the message, and who raised it",
        lesson="`src` and `dst` are global ranks; `group_src` counts inside the group.",
        thread="OpenPipe/ART#920",
        met="Places in a group were given as `src`; with groups (0, 2) and (1, 3) it raised.",
        mend=(("src=0, group=pair", "group_src=0, group=pair"),),
    ),
    11: Bug(
        title="More epochs do not help",
        symptom="`shuffle=True`, and yet the loss of epoch 2 has the bumps of epoch 1.",
        answers=(
            right(
                "line 17: nobody tells the sampler which epoch it is",
                "Its order comes from seed + epoch, and the epoch stays 0.",
            ),
            wrong("line 14: all ranks have one seed", "They must, to deal from one order."),
            wrong(
                "line 15: the loader should shuffle too",
                "A sampler and shuffle exclude each other.",
            ),
        ),
        found_by="the samples of each epoch",
        lesson="`sampler.set_epoch(epoch)` before each epoch.",
        thread="pytorch/pytorch#31771",
        met="Three epochs, printed: the same order three times.",
        looks=("orders", "one process"),
        same="weights",
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
        found_by="one process, and the number of samples counted",
        lesson="Padding is for training. For an evaluation deal every sample once; ranks may have"
        " unequal numbers, since nothing is collective inside the loop.",
        thread="pytorch/pytorch#25162",
        met="The sampler repeats samples to fill up, and the validation accuracy counts them.",
        looks=("accuracy",),
        same="accuracy",
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
        answers=(
            right(
                "line 15: forward runs outside of no_sync()",
                "DDP decides in forward whether the next backward is to be averaged.",
            ),
            wrong("line 14: `last` comes one micro-batch early", "It is 3 and 7 of 0 to 7: right."),
            wrong(
                "line 15: the loss is divided too early", "Before or after backward is the same."
            ),
        ),
        found_by="the ledger: calls of a step",
        lesson="Forward and backward both go inside. The values were right all the time: only the"
        " ledger tells.",
        thread="KellerJordan/modded-nanogpt#31",
        met="Forward was moved into no_sync(), too; without that, gradients went out all the same.",
        looks=("calls", "one process"),
        same="weights",
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
        title="A layer that is right on one GPU",
        symptom="A layer whose inner dimension is split over the ranks. On two of them its output"
        " is too small, though the ledger shows the all-reduce.",
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
        found_by="one process; and the ranks' outputs, which differ after an all-reduce",
        lesson="Reduce a name that you keep: `part = part.contiguous()`.",
        thread="NVIDIA/Megatron-LM#5337",
        met="Found by reading, in `_reduce`, before a caller had met it.",
        looks=("x",),
        same="x",
        mend=(
            (
                "    dist.all_reduce(part.contiguous())\n",
                "    part = part.contiguous()\n    dist.all_reduce(part)\n",
            ),
        ),
    ),
    15: Bug(
        title="On some nights the replicas differ",
        symptom="fp16 again. The overflow flag is reduced, so that all ranks skip a step together."
        " And yet weights drift apart, now and then.",
        answers=(
            wrong("line 16: a sum instead of a maximum", "Above zero is above zero."),
            wrong(
                "line 13: one rank sleeps", "That only makes the race come out the same each time."
            ),
            right(
                "line 17: the flag is read before it has arrived",
                "async_op=True returns at once; rank 0 reads its own flag, as the other is late.",
            ),
        ),
        found_by="checksums of the weights",
        lesson="`work.wait()` first, then read. On a GPU the race is won by whoever is faster.",
        thread="pytorch/pytorch#115710",
        met="FSDP's grad scaler had copied the flag before it waited for the reduction.",
        looks=("checksums", "weights"),
        same="weights",
        mend=(
            (
                "        skip = overflow.item() > 0\n        work.wait()\n",
                "        work.wait()\n        skip = overflow.item() > 0\n",
            ),
        ),
    ),
    16: Bug(
        title="Two ranks, and no epoch is shorter",
        symptom="The loss goes down as it should. On each rank an epoch has as many samples as on "
        "one alone.",
        answers=(
            wrong("line 10: all ranks have one seed in the data", "One order for all: needed."),
            right(
                "line 11: every rank reads the whole stream",
                "A sampler deals indices; a stream has none. Both ranks train on the same samples.",
            ),
            wrong("line 21: half a batch on each rank", "Together it is one batch: right."),
        ),
        found_by="the samples of all ranks; the losses, which are equal on both",
        lesson="A stream must be cut by rank (and by worker of the loader) by whoever writes it.",
        thread="huggingface/datasets#5360",
        met="The library split a stream over a loader's workers, and not over the ranks.",
        looks=("losses", "samples", "one process"),
        same="weights",
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
        title="Two GPUs give another model than one",
        symptom="DDP, a part of the texts on each rank. The loss goes down on both ranks, and with"
        " other seeds, too. Averaging gradients, they were told, changes nothing.",
        answers=(
            right(
                "line 17: a mean of each rank's tokens",
                "DDP averages the two means: 2 tokens weigh as much as 12.",
            ),
            wrong("line 14: the texts are dealt unevenly", "They are. The loss has to know."),
            wrong(
                "line 12: the rate should grow with the ranks",
                "The batch of both together is that of one: so is the rate.",
            ),
        ),
        found_by="one process on the same batch",
        lesson="Divide by the tokens of all ranks (and of all micro-batches), and multiply by the"
        " world size that DDP divides by.",
        thread="huggingface/transformers#34242",
        met="Tokens were counted over micro-batches, and not over GPUs: not what one would do.",
        looks=TRAINS,
        same="weights",
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
        title="It learns a little faster than before",
        symptom="The optimizer was sharded to save memory; clipping at 1.0 has stayed. It trains,"
        " even faster, and nobody minds.",
        answers=(
            wrong("line 20: the division comes after the cut", "Before or after is the same."),
            right(
                "line 21: the norm of a shard",
                "Each rank clips its rows by their own, smaller norm.",
            ),
            wrong("line 23: the shards are gathered too late", "The next forward needs them."),
        ),
        found_by="the norms, which differ by rank; one process",
        lesson="The norm is global: square, sum over the ranks, root. Ours is"
        " `optimizer.clip_grad_norm_`; FSDP2's DTensors sum by themselves.",
        thread="pytorch/pytorch#72548",
        met="With FSDP1 `torch.nn.utils.clip_grad_norm_` sees shards; it was given one of its own.",
        looks=("losses", "norms", "one process"),
        same="weights",
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
        answers=(
            right(
                "line 8: the schedule goes on once for each rank",
                "It was made for steps, and the loop makes 8. On two ranks it drops after 2.",
            ),
            wrong("line 15: the rate should grow with the ranks", "One may; that is no bug."),
            wrong(
                "line 22: rates are noted before the step", "It is the rate that the step takes."
            ),
        ),
        found_by="the learning rates, against one process",
        lesson="A schedule counts steps, or samples, and whoever makes it must say which.",
        thread="jzhang38/EasyContext#21",
        met="The model stopped changing after 300 to 400 of 2,500 steps: the library moved the"
        " schedule on once for each process.",
        looks=("losses", "rates", "one process"),
        same="weights",
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
        answers=(
            wrong("line 23: targets begin at rank · 4", "So they do among the gathered rows."),
            right(
                "line 12: a gradient flows back to this rank's rows alone",
                "What the other ranks' losses say of them is lost: the gathered rows are new"
                " tensors.",
            ),
            wrong("line 22: the views share a batch", "chunk cuts both alike: right."),
        ),
        found_by="one process on the same batch",
        lesson="A gather with a backward sums what the losses of all ranks say of each row.",
        thread="HobbitLong/SupContrast#26",
        met="One asked for DDP; the author warned that `all_gather` passes no gradient by itself.",
        looks=TRAINS,
        same="weights",
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
