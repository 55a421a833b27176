"""Interleaved and zero-bubble pipelines that run: gradients, live activations, messages."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_pipeline import WIDTH, Large, T, Waits, batch, gpt, gradients, reference
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.utils.checkpoint import checkpoint

import ddpz_lite as dz
from ddpz_lite.strategies.pipeline.gpt_stages import gpt_stages
from ddpz_lite.strategies.pipeline.schedules import (
    gpipe,
    interleaved,
    live,
    one_f_one_b,
    play,
    zero_bubble,
)


def schedules(world: int, m: int) -> dict[str, Any]:
    return {
        "gpipe": gpipe(world, m),
        "1f1b": one_f_one_b(world, m),
        "interleaved, 2": interleaved(world, m, 2),
        "interleaved, 3": interleaved(world, m, 3),
        "zero bubble": zero_bubble(world, m),
    }


def chunks(name: str) -> int:
    return int(name[-1]) if name.startswith("interleaved") else 1


class Counts(nn.Module):
    """A layer in the middle of a stage that counts which of its activations are still alive."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.linear, self.counts = nn.Linear(WIDTH, WIDTH), counts

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        saved = y.sigmoid()  # autograd alone keeps it, for backward
        self.counts["now"] += 1
        self.counts["most"] = max(self.counts["now"], self.counts["most"])
        weakref.finalize(saved.untyped_storage(), self.counts.subtract, ["now"])
        return y * saved


def linears(stages: int, counts: Counter[str]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(Counts(counts), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        for _ in range(stages)
    ]


def alive(world: int, m: int) -> dict[str, tuple[int, int]]:
    """Of each schedule: what the pipeline counts, and what was alive of the graphs."""
    out, x = {}, torch.randn(2 * m, WIDTH, generator=torch.Generator().manual_seed(0))
    for name, schedule in schedules(world, m).items():
        counts: Counter[str] = Counter()
        stages = linears(world * chunks(name), counts)
        alone = nn.Sequential(*linears(len(stages), Counter()))
        nn.functional.mse_loss(alone(x), x).backward()
        pipe = dz.Pipeline(stages, schedule)
        pipe.step(x, x, nn.functional.mse_loss)
        for stage, right in zip(stages, alone, strict=True):
            for got, want in zip(stage.parameters(), right.parameters(), strict=True):
                if got.grad is not None:  # this rank's
                    torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-7)
        assert all(p.grad is not None for p in pipe.module.parameters())
        out[name] = pipe.most_live, counts["most"]
    return out


@pytest.mark.parametrize("world", [2, 3, 4])
def test_each_stage_keeps_what_its_schedule_promises(world):
    m = 2 * world
    for rank, found in enumerate(dz.launch(alive, world, args=(world, m))):
        for name, schedule in schedules(world, m).items():
            kept, graphs = found[name]
            assert kept == live(play(schedule))[rank] * chunks(name), name
            if name == "zero bubble":  # B frees the graph; what W needs is counted as kept
                before = live(play(one_f_one_b(world, m)))[rank]
                assert graphs == before, name
            else:
                assert graphs == kept, name


def against_one_process(world: int) -> None:
    x, y = batch(2 * world + 1)
    for tied in (True, False):
        for name, schedule in schedules(world, 2 * world).items():
            count = world * chunks(name)
            right, loss = reference(gpt(count, tied), x, y)
            pipe = dz.Pipeline(gpt_stages(gpt(count, tied), count), schedule)
            got = pipe.step(x, y, dz.next_token_loss)
            assert {n for n, _ in pipe.stage.named_parameters()} <= right.keys()
            for param, grad in gradients(pipe.stage).items():
                torch.testing.assert_close(grad, right[param], rtol=1e-4, atol=1e-7)
            assert (got is None) == (dist.get_rank() < world - 1)
            assert got is None or abs(got.item() - loss) < 1e-5
            logits = pipe(x)
            if got is not None:
                torch.testing.assert_close(logits, gpt(count, tied)(x))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gradients_and_outputs_of_one_process(world):
    dz.launch(against_one_process, world, args=(world,))


class Pair(nn.Module):
    """Takes and returns two activations and a mask; the mask is not floating-point."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.a, self.b, self.is_last = nn.Linear(3, 3), nn.Linear(5, 5), is_last

    def forward(self, a: Tensor, b: Tensor, mask: Tensor) -> Any:
        a = self.a(a) * mask
        return a if self.is_last else (a + b[:, :3], self.b(b), mask)


def pairs(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Pair(i == count - 1) for i in range(count)]


def with_tuples(world: int) -> None:
    a, b = torch.arange(24.0).view(8, 3) / 24, torch.arange(40.0).view(8, 5) / 40
    inputs = a, b, torch.arange(8).remainder(3)[:, None]
    for name, schedule in schedules(world, world).items():
        alone, values = pairs(world * chunks(name)), inputs
        for stage in alone:
            values = stage(*values)
        nn.functional.mse_loss(values, a).backward()
        stages = pairs(len(alone))
        pipe = dz.Pipeline(stages, schedule)
        pipe.step(inputs, a, nn.functional.mse_loss)
        for index in range(dist.get_rank(), len(alone), world):
            for got, want in zip(
                stages[index].parameters(), alone[index].parameters(), strict=True
            ):
                if want.grad is None:  # nothing that follows uses it
                    assert got.grad is None or not got.grad.any()
                else:
                    torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-7)
        out = pipe(inputs)
        assert out is None or torch.allclose(out, values, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_activations_may_be_tuples(world):
    dz.launch(with_tuples, world, args=(world,))


def against_torch(world: int) -> None:
    """torch's schedules, with as many stages on a rank, and ours: the same gradients."""
    m, rank = 2 * world, dist.get_rank()
    x, y = batch(m)
    pairs = [
        (ScheduleInterleaved1F1B, interleaved(world, m, 2), 2),
        (ScheduleInterleavedZeroBubble, zero_bubble(world, m), 1),
    ]
    for theirs, ours, v in pairs:
        count = world * v
        pipe = dz.Pipeline(gpt_stages(gpt(count, tied=False), count), ours)
        loss = pipe.step(x, y, dz.next_token_loss)
        own = gpt_stages(gpt(count, tied=False), count)
        stages = [
            PipelineStage(own[s], s, count, torch.device("cpu")) for s in range(rank, count, world)
        ]
        losses: list[Tensor] = []
        schedule = theirs(stages, m, loss_fn=dz.next_token_loss)
        is_last = rank == world - 1
        schedule.step(*([x] if rank == 0 else []), target=y if is_last else None, losses=losses)
        if is_last:
            torch.testing.assert_close(loss, torch.stack(losses).mean())
        other = {n: g for s in range(rank, count, world) for n, g in gradients(own[s]).items()}
        local = gradients(pipe.stage)
        assert local.keys() == other.keys()
        for name, grad in local.items():
            torch.testing.assert_close(grad, other[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_same_gradients_as_torch_pipelining(world):
    dz.launch(against_torch, world, args=(world,))


def one_step(world: int, name: str, m: int) -> None:
    count = world * chunks(name)
    pipe = dz.Pipeline(gpt_stages(gpt(count, tied=False), count), schedules(world, m)[name])
    pipe.step(*batch(2 * m), dz.next_token_loss)


@pytest.mark.parametrize("world", [2, 4])
def test_a_micro_batch_crosses_each_cut_once_each_way(world):
    m, activation = 4, 2 * T * WIDTH * 4  # bytes
    for name in schedules(world, m):
        run = dz.launch(one_step, world, args=(world, name, m))
        sent = Counter(r.bytes_sent for r in run.ledger if r.op == "send")
        assert sent[activation] == 2 * m * (world * chunks(name) - 1), name


def large_messages(world: int) -> None:
    """1 MiB a row: nothing is delivered before it is asked for. As on one stream of NCCL."""
    x = torch.ones(2 * world, 1 << 18)
    for name in ("zero bubble", "interleaved, 2"):
        for comm in (None, Waits()) if name == "zero bubble" else (None,):
            stages = [Large() for _ in range(world * chunks(name))]
            pipe = dz.Pipeline(stages, schedules(world, 2 * world)[name], comm)
            pipe.step(x, x, lambda out, target: (out + target).mean())
            assert all(abs(p.grad.item() - 1) < 1e-6 for p in pipe.module.parameters())


@pytest.mark.parametrize("world", [2, 3, 4])
def test_large_messages_do_not_wait_for_each_other(world):
    dz.launch(large_messages, world, args=(world,))


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def twice_and_checkpointed() -> None:
    """A layer that a stage calls twice, one that no micro-batch uses, and recomputation."""
    for wrap in (nn.Sequential, Checkpointed):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4) for _ in range(3)]
        layers[2].requires_grad_(False)
        stages = [wrap(layers[0], nn.ReLU(), layers[0]), wrap(layers[1], layers[2])]
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
        nn.functional.mse_loss(stages[1](stages[0](x)), x).backward()
        right = [p.grad for p in stages[dist.get_rank()].parameters()]
        for param in (*stages[0].parameters(), *stages[1].parameters()):
            param.grad = None
        pipe = dz.Pipeline(stages, zero_bubble(2, 3))
        pipe.step(x, x, nn.functional.mse_loss)
        for param, want in zip(pipe.module.parameters(), right, strict=True):
            assert (param.grad is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(param.grad, want, rtol=1e-4, atol=1e-7)


def test_split_backward_of_shared_frozen_and_checkpointed_layers():
    dz.launch(twice_and_checkpointed, 2)


def interleaved_in_order(world: int) -> None:
    x = torch.ones(2 * world, 1 << 18)
    stages = [Large() for _ in range(2 * world)]
    pipe = dz.Pipeline(stages, interleaved(world, 2 * world, 2), Waits())
    pipe.step(x, x, lambda out, target: (out + target).mean())


def test_interleaving_waits_forever_where_messages_go_one_after_the_other():
    """Why it is refused on NCCL."""
    with pytest.raises(dz.RankFailed, match="Each rank waits for another one"):
        dz.launch(interleaved_in_order, 2, args=(2,))
