"""The pipeline: schedules as data, gradients of one process, and only activations on the wire."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import ddpz_lite as dz
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.pipeline.gpt_stages import gpt_stages
from ddpz_lite.strategies.pipeline.schedules import gpipe, interleaved, one_f_one_b, read

SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}
ROWS, T, WIDTH = 5, 4, 8
NOTE = 61 * 8  # bytes, once for each cut


def gpt(layers: int, tied: bool = True) -> dz.GPT:
    torch.manual_seed(0)
    config = dz.GPTConfig(vocab_size=7, context=T, layers=layers, heads=2, width=WIDTH, tied=tied)
    return dz.GPT(config)


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(7, (rows, T + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad for name, param in model.named_parameters()}


def reference(model: nn.Module, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], float]:
    loss = dz.next_token_loss(model(x), y)
    loss.backward()
    return gradients(model), loss.item()


# ---- stages ----


def test_blocks_are_dealt_to_stages_and_keep_their_names():
    model = gpt(5)
    assert [list(s.blocks) for s in gpt_stages(model, 2)] == [["0", "1", "2"], ["3", "4"]]
    uneven = gpt_stages(model, [1, 3, 1])
    assert [len(stage.blocks) for stage in uneven] == [1, 3, 1]
    names = {name for stage in uneven for name, _ in stage.named_parameters()}
    assert names == {name for name, _ in model.named_parameters()}
    for wrong in (6, 0, [5, 0], [2, 2]):
        with pytest.raises(ValueError, match="at least one block for each stage, 5 together"):
            gpt_stages(model, wrong)


# ---- gradients ----


def stages_of(world: int) -> list[int]:
    return [2] + [1] * (world - 1)  # uneven


def against_one_process(world: int) -> dict[Any, Any]:
    """Whether this rank's gradients are those of one process, for schedules and micro-batches."""
    out: dict[Any, Any] = {}
    x, y = batch()
    for tied in (True, False):
        right, loss = reference(gpt(world + 1, tied), x, y)
        for name, make in SCHEDULES.items():
            for m in (1, 2, 4, 5):  # of 5 rows: 3 + 2; 2 + 1 + 1 + 1
                stages = gpt_stages(gpt(world + 1, tied), stages_of(world))
                pipe = dz.Pipeline(stages, make(world, m))
                got = pipe.step(x, y, dz.next_token_loss)
                for param, grad in gradients(pipe.stage).items():
                    torch.testing.assert_close(grad, right[param], rtol=1e-4, atol=1e-7)
                assert (got is None) == (dist.get_rank() < world - 1)
                assert got is None or abs(got.item() - loss) < 1e-5
                out[tied, name, m] = pipe.most_live
    return out


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gradients_are_those_of_one_process_for_any_number_of_micro_batches(world):
    for rank, found in enumerate(dz.launch(against_one_process, world, args=(world,))):
        for (_, name, m), live in found.items():
            assert live == (m if name == "gpipe" else min(world - rank, m))


def against_torch(world: int) -> None:
    """torch's schedules and ours: the same gradients, bit for bit."""
    x, y = batch(4)
    for ours, theirs in ((gpipe, ScheduleGPipe), (one_f_one_b, Schedule1F1B)):
        pipe = dz.Pipeline(gpt_stages(gpt(world, tied=False), world), ours(world, 4))
        loss = pipe.step(x, y, dz.next_token_loss)
        own = gpt_stages(gpt(world, tied=False), world)[dist.get_rank()]
        stage = PipelineStage(own, dist.get_rank(), world, torch.device("cpu"))
        schedule, losses = theirs(stage, 4, loss_fn=dz.next_token_loss), []
        first, last = dist.get_rank() == 0, dist.get_rank() == world - 1
        schedule.step(*([x] if first else []), target=y if last else None, losses=losses)
        if last:
            torch.testing.assert_close(loss, torch.stack(losses).mean())
        local, other = gradients(pipe.stage), gradients(own)
        assert local.keys() == other.keys()
        assert all(torch.equal(local[name], other[name]) for name in local)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_same_gradients_as_torch_pipelining(world):
    dz.launch(against_torch, world, args=(world,))


def more_uses() -> None:
    last = dist.get_rank() == 1
    x, y = batch(6)
    right, _ = reference(gpt(2), x, y)
    pipe = dz.Pipeline(gpt_stages(gpt(2), 2), one_f_one_b(2, 3))
    with torch.no_grad():
        loss = pipe.step(x, y, dz.next_token_loss)  # forwards alone
    assert all(param.grad is None for param in pipe.module.parameters())
    assert pipe.most_live == 0

    for half in (slice(0, 3), slice(3, 6)):  # two steps before an update, tied weights included
        pipe.step(x[half], y[half], lambda out, y: dz.next_token_loss(out, y) / 2)
    for name, grad in gradients(pipe.stage).items():
        torch.testing.assert_close(grad, right[name], rtol=1e-4, atol=1e-7)

    # rows with unequal numbers of tokens: weights are their share
    ignored = y.clone()
    ignored[0, :3] = ignored[1] = -100
    pipe.zero_grad()
    counts = [(part != -100).sum().item() for part in ignored.tensor_split(3)]
    share = [count / sum(counts) for count in counts]
    got = pipe.step(x, ignored, lambda out, y: nn.functional.cross_entropy(out.mT, y), share)
    model = gpt(2)
    want = nn.functional.cross_entropy(model(x).mT, ignored)
    want.backward()
    for name, grad in gradients(pipe.stage).items():
        torch.testing.assert_close(grad, gradients(model)[name], rtol=1e-4, atol=1e-7)
    if last:
        torch.testing.assert_close(loss, dz.next_token_loss(gpt(2)(x), y))
        torch.testing.assert_close(got, want.detach())

    # tied weights start with the first stage's values, and stay the same bit for bit
    torch.manual_seed(dist.get_rank())
    pipe = dz.Pipeline(gpt_stages(dz.GPT(gpt(2).config), 2), gpipe(2, 2))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    for _ in range(3):
        pipe.step(x, y, dz.next_token_loss)
        optimizer.step()
        optimizer.zero_grad()
    both = [torch.empty_like(pipe.stage.tokens.weight) for _ in range(2)]
    dist.all_gather(both, pipe.stage.tokens.weight.detach())
    assert torch.equal(*both)


def test_forwards_alone_accumulation_weights_and_tied_weights():
    dz.launch(more_uses, 2)


# ---- what is sent ----


def two_steps(world: int, make: Any, m: int) -> None:
    pipe = dz.Pipeline(gpt_stages(gpt(world, tied=False), world), make(world, m))
    for _ in range(2):
        pipe.step(*batch(2 * m), dz.next_token_loss)


@pytest.mark.parametrize("name", SCHEDULES)
def test_only_activations_are_sent(name):
    world, m = 3, 4
    run = dz.launch(two_steps, world, args=(world, SCHEDULES[name], m))
    activation = 2 * T * WIDTH * 4  # bytes
    for rank in range(world):
        sent = Counter(r.bytes_sent for r in run.ledger if r.rank == rank and r.op == "send")
        cuts = 2 if rank == 1 else 1
        assert sent.pop(NOTE, 0) == (1 if rank < 2 else 0)
        assert sent == {activation: 2 * m * cuts}
        others = Counter(
            r.op for r in run.ledger if r.rank == rank and r.op not in ("send", "recv")
        )
        assert others == {"all_gather": 2, "all_reduce": 1}  # at the start, to compare schedules


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def large_messages() -> float:
    pipe = dz.Pipeline([Large(), Large()], one_f_one_b(2, 4))
    x = torch.ones(4, 1 << 20)  # 4 MiB a message: none leaves before it is asked for
    pipe.step(x, x, lambda out, target: (out + target).mean())
    return pipe.stage.gain.grad.item()


def test_stages_that_send_to_each_other_at_once_do_not_wait_for_each_other():
    assert list(dz.launch(large_messages, 2)) == [1.0, 1.0]


class Waits(Comm):
    def exchange(self, sends: Any, receives: Any) -> tuple[list[Any], list[Any]]:
        works = super().exchange(sends, receives)
        for work in (*works[0], *works[1]):
            work.wait()
        return works


def one_exchange_after_the_other(world: int) -> None:
    x = torch.ones(8, 1 << 18)  # 1 MiB a row: nothing is delivered before it is asked for
    for make in SCHEDULES.values():
        pipe = dz.Pipeline([Large() for _ in range(world)], make(world, 8), Waits())
        pipe.step(x, x, lambda out, target: (out + target).mean())
        assert pipe.stage.gain.grad.item() == 1.0


@pytest.mark.parametrize("world", [2, 3, 4])
def test_messages_may_go_one_after_the_other_as_on_a_stream_of_nccl(world):
    dz.launch(one_exchange_after_the_other, world, args=(world,))


def too_far_ahead() -> None:
    lines = "F0 F1 F2 F3 B0 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"
    pipe = dz.Pipeline([Large(), Large()], [read(line) for line in lines], Waits())
    x = torch.ones(4, 1 << 20)
    pipe.step(x, x, lambda out, target: (out + target).mean())


def test_a_stage_that_runs_further_ahead_may_wait_for_ever_there():
    with pytest.raises(dz.RankFailed, match="Each rank waits for another"):
        dz.launch(too_far_ahead, 2)


class Turned(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mT.contiguous().mT  # (B, T, C), with C not the innermost


def turned() -> Tensor:
    torch.manual_seed(0)
    stages, x = [Turned(3, 3), Turned(3, 3)], torch.arange(24.0).view(4, 2, 3)
    nn.functional.mse_loss(nn.Sequential(*stages)(x), x).backward()
    right = stages[dist.get_rank()].weight.grad.clone()
    pipe = dz.Pipeline(stages, one_f_one_b(2, 2))
    pipe.zero_grad()
    pipe.step(x, x, nn.functional.mse_loss)
    torch.testing.assert_close(pipe.stage.weight.grad, right)


def test_an_output_may_lie_in_any_order():
    dz.launch(turned, 2)


def last_rows_first() -> None:
    """The second micro-batch is the first to go, and it has a row less."""
    torch.manual_seed(0)
    stages, x = [nn.Linear(3, 3), nn.Linear(3, 3)], torch.arange(15.0).view(5, 3)
    nn.functional.mse_loss(nn.Sequential(*stages)(x), x).backward()
    right = stages[dist.get_rank()].weight.grad.clone()
    pipe = dz.Pipeline(stages, [read("F1 F0 B1 B0")] * 2)
    pipe.zero_grad()
    pipe.step(x, x, nn.functional.mse_loss)
    torch.testing.assert_close(pipe.stage.weight.grad, right)


def test_any_micro_batch_may_go_first():
    dz.launch(last_rows_first, 2)


# ---- what is refused ----


class Deaf(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


class Short(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:1]


def refused(what: str) -> None:
    x = torch.ones(4, 3)
    stages: list[nn.Module] = [nn.Linear(3, 3), nn.Linear(3, 3)]
    schedule, options = one_f_one_b(2, 2), {}
    if what == "meta":
        shared = nn.Linear(3, 3, device="meta")
        stages = [shared, nn.Sequential(nn.ReLU(), shared)]
    elif what == "deaf":
        stages[1] = Deaf(3, 3)
    elif what == "short":
        stages[0] = Short(3, 3)
    elif what == "weights":
        options = {"weights": [1.0]}
    elif what == "rows":
        x = x[:1]
    elif what == "stages":
        stages.append(nn.Linear(3, 3))
    elif what == "schedules":
        schedule = (one_f_one_b, gpipe)[dist.get_rank()](2, 2)
    elif what == "interleaved":
        schedule = interleaved(2, 2, 2)
    pipe = dz.Pipeline(stages, schedule)
    if what == "mesh":
        dz.parallelize(pipe, torch.optim.SGD, lr=0.1)
    if what == "names":
        mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "pipe"))
        dz.parallelize(pipe, torch.optim.SGD, mesh=mesh, lr=0.1)
    pipe.step(x, x, nn.functional.mse_loss, **options)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("deaf", "stage 1 gave its input no gradient"),
        ("short", "stage 0 returned torch.float32 of shape (1, 3) for 2 rows"),
        ("weights", "1 weights for 2 micro-batches"),
        ("rows", "inputs must be a tensor of at least 2 rows"),
        ("stages", "3 stages and a schedule for 2, on a group of 2 ranks"),
        ("schedules", "the schedules differ between ranks"),
        ("meta", "is on the meta device and in several stages"),
        ("interleaved", "2 stages and a schedule for 4, on a group of 2 ranks"),
        ("mesh", "no mesh with an axis 'pipe'"),
        ("names", "two stages have a parameter named weight"),
    ],
)
def test_wrong_use_is_refused_in_words(what, words):
    with pytest.raises(dz.RankFailed, match=re.escape(words)):
        dz.launch(refused, 2, args=(what,))
