"""The meter, in exact bytes: by hand, by torch's MemTracker, and with every kind of sharing."""

import gc
import pickle
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

import ddpz_lite as dz
from ddpz_lite.meter import (
    KINDS,
    TIMELINE_KINDS,
    MemoryTimeline,
    best_seconds,
    home,
    matmul_peak,
    memory,
    moments,
    ping_pong,
    records_in,
    utilization,
)
from ddpz_lite.model import CNN, GPT, MLP, GPTConfig, next_token_loss

NOTHING = dict.fromkeys(KINDS, 0)
CONFIG = GPTConfig(vocab_size=32, context=16, layers=3, heads=2, width=24)


def one_step(model, optimizer, x, y=None):
    loss = next_token_loss(model(x), x) if y is None else (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()


# ---- memory


def test_each_kind_by_hand():
    model = MLP([7, 13, 3])
    psi = 8 * 13 + 14 * 3
    optimizer = torch.optim.AdamW(model.parameters())
    assert memory(model, optimizer) == NOTHING | {"parameters": 4 * psi}
    one_step(model, optimizer, torch.randn(2, 7), torch.zeros(2, 3))
    states = 8 * psi + 4 * 4  # two moments; one fp32 step counter for each of four parameters
    assert memory(model, optimizer) == NOTHING | {
        "parameters": 4 * psi,
        "gradients": 4 * psi,
        "optimizer": states,
    }
    optimizer.zero_grad()
    assert memory(model, optimizer)["gradients"] == 0
    assert memory(model) == NOTHING | {"parameters": 4 * psi}


@pytest.mark.parametrize(
    ("make", "per_parameter", "counters"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0, 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4, 0),
        (lambda p: torch.optim.Adagrad(p), 4, 1),
        (lambda p: torch.optim.RMSprop(p), 4, 1),
        (lambda p: torch.optim.AdamW(p), 8, 1),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 12, 1),
    ],
)
def test_states_of_optimizers(make, per_parameter, counters):
    model = MLP([5, 6, 7])
    optimizer = make(model.parameters())
    one_step(model, optimizer, torch.randn(2, 5), torch.zeros(2, 7))
    psi, tensors = model.num_params(), len(list(model.parameters()))
    assert memory(model, optimizer)["optimizer"] == per_parameter * psi + 4 * counters * tensors


def test_buffers_and_a_learning_rate_on_the_device():
    model = CNN(width=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    held = memory(model, optimizer)
    assert held["buffers"] == 4 * (4 + 4 + 8 + 8) + 2 * 8  # means, variances, two int64 counters
    assert held["optimizer"] == 4


def test_tied_weights_count_once():
    tied = GPT(GPTConfig(vocab_size=32, context=16, layers=1, heads=2, width=24, tied=True))
    untied = GPT(GPTConfig(vocab_size=32, context=16, layers=1, heads=2, width=24))
    assert memory(untied)["parameters"] - memory(tied)["parameters"] == 4 * 32 * 24
    x = torch.randint(32, (2, 16))
    next_token_loss(tied(x), x).backward()
    assert memory(tied)["gradients"] == memory(tied)["parameters"] == 4 * tied.num_params()


def test_views_into_flat_buffers_count_the_buffer_once():
    model = MLP([4, 5, 2])
    psi, padded = model.num_params(), model.num_params() + 9
    flat, flat_grad, offset = torch.zeros(padded), torch.zeros(padded), 0
    for p in model.parameters():
        p.data = flat[offset : offset + p.numel()].view_as(p)
        p.grad = flat_grad[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    assert offset == psi
    assert memory(model) == NOTHING | {"parameters": 4 * padded, "gradients": 4 * padded}
    flat.untyped_storage().resize_(0)
    assert memory(model)["parameters"] == 0


def test_frozen_dtypes_and_sparse():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2, bias=False).bfloat16())
    model[1].weight.requires_grad_(False)
    model[0](torch.tensor([1, 3, 3])).sum().backward()
    indices = model[0].weight.grad._indices().numel()
    assert memory(model) == NOTHING | {
        "parameters": 4 * 40 + 2 * 8,
        "gradients": 8 * indices + 4 * 4 * indices,
    }


def test_meta_model_says_what_it_would_take():
    with torch.device("meta"):
        model = GPT(CONFIG)
    assert memory(model)["parameters"] == 4 * model.num_params()


def test_master_weights_and_inner_optimizers_are_optimizer_bytes():
    model = MLP([4, 4]).bfloat16()
    master = [p.detach().float().requires_grad_() for p in model.parameters()]
    inner = torch.optim.AdamW(master)
    for p in master:
        p.grad = torch.ones_like(p)
    inner.step()

    class Outer(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})
            self.inner = inner

        def step(self):
            self.inner.step()

    expected = NOTHING | {
        "parameters": 2 * 20,
        "gradients": 4 * 20,
        "optimizer": (4 + 8) * 20 + 2 * 4,
    }
    assert memory(model, inner) == expected
    assert memory(model, Outer(model.parameters())) == expected


def test_transient_is_what_a_model_keeps_besides():
    @dataclass
    class Bucket:
        flat: torch.Tensor
        name: str = "first"

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = MLP([4, 4])
            self.buckets = [Bucket(torch.zeros(10)), {"a": (torch.zeros(3),)}]
            self.same = self.module.blocks[0][0].weight
            self.buckets.append(self.buckets)  # a circle is no trouble

        def memory_extra(self):
            return {"transient": [hidden], "gradients": [shard]}

    hidden, shard = torch.zeros(7), torch.zeros(2)
    assert memory(Wrapped()) == NOTHING | {
        "parameters": 80,
        "gradients": 8,
        "transient": 4 * (10 + 3 + 7),
    }
    Wrapped.memory_extra = lambda self: {"scratch": []}
    with pytest.raises(ValueError, match="no kind 'scratch'; the kinds are"):
        memory(Wrapped())


def test_a_buffer_that_the_model_names_is_not_the_optimizers_though_it_knows_it():
    class Lending(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.whole = MLP([4, 4]), {}

        def memory_extra(self):
            return {"transient": list(self.whole.values())}

    model = Lending()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.whole["unit"] = torch.zeros(50)
    optimizer.flats = [model.whole["unit"]]  # as ZeRO-3's optimizer leads to its flat buffers
    optimizer.own = torch.zeros(6)
    assert memory(model, optimizer) == NOTHING | {
        "parameters": 80,
        "optimizer": 24,
        "transient": 200,
    }


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
        memory([])
    with pytest.raises(TypeError, match="optimizer must be"):
        memory(MLP([1, 1]), MLP([1, 1]))
    with pytest.raises(TypeError, match="optimizer must be"):
        MemoryTimeline(MLP([1, 1]), 3)


@pytest.fixture
def fake_world():
    """Four ranks in one process: no byte moves, but the shards have their real sizes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_dtensors_count_what_lies_here(fake_world):
    from torch.distributed.fsdp import fully_shard

    model = MLP([16, 32, 8])
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    quarter = 4 * model.num_params() // 4
    assert memory(model)["parameters"] == quarter
    with MemoryTimeline(model, optimizer) as timeline:
        one_step(model, optimizer, torch.randn(2, 16), torch.zeros(2, 8))
    held = memory(model, optimizer)
    assert held["gradients"] == quarter and 2 * quarter <= held["optimizer"] <= 2 * quarter + 16
    after = timeline.samples[-1][1]
    assert {kind: after[kind] for kind in KINDS} == held


# ---- the formula


# ---- the timeline


def test_timeline_by_hand():
    model = MLP([4, 8, 2], bias=False)
    psi, x = 48, torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with MemoryTimeline(model, optimizer) as timeline:
        out = model(x)
        after_forward = timeline.samples[-1][1]
        out.sum().backward()
        after_backward = timeline.samples[-1][1]
        optimizer.step()
        optimizer.zero_grad()
        del out
    empty = dict.fromkeys(TIMELINE_KINDS, 0)
    assert timeline.samples[1][1] == empty | {"parameters": 4 * psi}
    # Linear keeps its input; ReLU keeps its output: that is (3, 8). The result is (3, 2). The first
    # product is gone.
    assert after_forward == empty | {"parameters": 4 * psi, "activations": 4 * 3 * (8 + 2)}
    # Backward frees what it used; the result is ours, and the weights have gradients.
    assert after_backward == empty | {
        "parameters": 4 * psi,
        "gradients": 4 * psi,
        "activations": 4 * 3 * 2,
    }
    assert timeline.samples[-1][1] == empty | {"parameters": 4 * psi, "optimizer": 4 * psi}
    assert [name for _, name in timeline.marks] == ["forward", "backward", "step", "end"]
    times = [seconds for seconds, _ in timeline.samples]
    assert times == sorted(times)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_peak_equals_mem_tracker(steps_before):
    torch.manual_seed(0)
    x = torch.randint(32, (4, 16))
    peaks = []
    for use_ours in (True, False):
        model = GPT(CONFIG)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(steps_before):
            one_step(model, optimizer, x)
            optimizer.zero_grad()
        if use_ours:
            with MemoryTimeline(model, optimizer) as timeline:
                one_step(model, optimizer, x)
            peaks.append(timeline.peak)
            assert sum(timeline.at_peak.values()) == timeline.peak
        else:
            tracker = MemTracker()
            tracker.track_external(model, optimizer)
            with tracker:
                one_step(model, optimizer, x)
            peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
            # The tracker takes the flattened targets, a view of a batch made outside, for new
            # memory.
            peaks[-1] -= x.untyped_storage().nbytes()
    assert peaks[0] == peaks[1]


def test_end_of_step_equals_memory_for_a_model_with_buffers():
    model = CNN()
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryTimeline(model, optimizer) as timeline:
        model(torch.randn(4, 1, 8, 8)).sum().backward()
        optimizer.step()
        gc.collect()
    last = timeline.samples[-1][1]
    assert {kind: last[kind] for kind in KINDS} == memory(model, optimizer)
    assert last["activations"] == last["temporary"] == 0


def test_gradients_stay_gradients_under_accumulation():
    model, x, y = MLP([6, 6]), torch.randn(2, 6), torch.zeros(2, 6)
    with MemoryTimeline(model) as timeline:
        for _ in range(3):
            (model(x) - y).square().mean().backward()
    assert timeline.samples[-1][1]["gradients"] == 4 * model.num_params()
    assert max(kinds["gradients"] for _, kinds in timeline.samples) == 4 * model.num_params()
    assert [name for _, name in timeline.marks] == ["forward", "backward"] * 3 + ["end"]


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_checkpointing_lowers_activations_and_recomputes_them_in_backward():
    x = torch.randint(32, (8, 16))
    runs = {}
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = GPT(CONFIG)
        if wrapped:
            model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
        with MemoryTimeline(model) as timeline:
            loss = next_token_loss(model(x), x)
            held = timeline.samples[-1][1]["activations"]
            loss.backward()
        backward = next(seconds for seconds, name in timeline.marks if name == "backward")
        rises = [k["activations"] for seconds, k in timeline.samples if seconds > backward]
        runs[wrapped] = held, max(rises), timeline.peak
    stream = 8 * 16 * 24 * 4
    assert runs[True][0] <= runs[False][0] - 3 * 8 * stream
    assert runs[True][1] > runs[True][0] + 8 * stream, "one block comes back to life at a time"
    assert runs[True][2] < runs[False][2]


def test_no_grad_work_is_temporary_and_views_of_outside_tensors_are_free():
    model, x = MLP([4, 4], bias=False), torch.randn(8, 4)
    with MemoryTimeline(model) as timeline, torch.no_grad():
        y = model(x.view(2, 4, 4)[0])
    assert timeline.at_peak == dict.fromkeys(TIMELINE_KINDS, 0) | {
        "parameters": 64,
        "temporary": 64,
    }
    assert y.shape == (4, 4)


def test_resized_storages_are_followed():
    model = MLP([2, 2], bias=False)
    original = torch.UntypedStorage.resize_
    with MemoryTimeline(model) as timeline:
        flat = torch.empty(100)
        flat.untyped_storage().resize_(0)
        flat.untyped_storage().resize_(800)
        del flat
    assert [sum(kinds.values()) - 16 for _, kinds in timeline.samples[1:]] == [400, 0, 800, 0]
    assert torch.UntypedStorage.resize_ is original


def test_a_storage_that_was_empty_counts_once_it_is_filled():
    """FSDP2 keeps such storages between steps, and `memory` does not find them."""
    emptied, kept = torch.empty(100), torch.empty(100)
    emptied.untyped_storage().resize_(0)
    with MemoryTimeline(MLP([2, 2], bias=False)) as timeline:
        emptied.untyped_storage().resize_(400)
        kept.untyped_storage().resize_(800)  # from before the `with`, and it was not empty
        emptied.untyped_storage().resize_(0)
    assert [kinds["transient"] for _, kinds in timeline.samples] == [0, 400, 0]


def test_an_error_inside_leaves_torch_as_it_was():
    model, original = MLP([2, 2]), torch.UntypedStorage.resize_
    timeline = MemoryTimeline(model)
    with pytest.raises(ZeroDivisionError), timeline:
        raise ZeroDivisionError
    assert torch.UntypedStorage.resize_ is original
    assert (
        not model._forward_pre_hooks and not model.blocks[0][0].weight._post_accumulate_grad_hooks
    )
    with timeline:
        model(torch.ones(1, 2))
        with pytest.raises(RuntimeError, match="open already"):
            timeline.__enter__()
    assert timeline.peak == 4 * (6 + 2 + 2), "weights, input and output"


def test_a_storage_may_die_while_a_timeline_is_left():
    """As when the garbage collector runs just then."""
    model = MLP([4, 4])
    with MemoryTimeline(model) as timeline:
        other = torch.ones(1000)
        live = timeline._live
        first, last = next(iter(live)), other.untyped_storage()._cdata
        assert last in live and first != last

        class Dying(type(live[first])):
            def __setattr__(self, name, value):
                if name == "watch":
                    live.pop(last, None)
                super().__setattr__(name, value)

        live[first].__class__ = Dying
    assert timeline.peak >= 4000


def test_a_timeline_can_be_returned_from_a_rank():
    model = MLP([2, 2])
    with MemoryTimeline(model) as timeline:
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
    sent = pickle.loads(pickle.dumps(timeline))
    assert (sent.samples, sent.marks) == (timeline.samples, timeline.marks)
    assert (sent.peak, sent.at_peak) == (timeline.peak, timeline.at_peak)


# ---- speed


def test_peak_and_utilization():
    peak = matmul_peak(size=256, repeats=3)
    assert 1e8 < peak < 1e15
    ticks = iter(range(100))  # a clock by which every matmul takes a second
    assert matmul_peak(size=8, repeats=3, clock=lambda: next(ticks)) == 2 * 8**3
    assert utilization(flops=50, seconds=2, peak=100) == 0.25
    with pytest.raises(ValueError, match="seconds 0"):
        utilization(1, 0, 1)
    with pytest.raises(ValueError, match="at least 1"):
        matmul_peak(size=0)


def test_the_best_repeat_lasts_from_the_first_begin_to_the_last_end():
    key = ("ring", 4000)
    by_rank = [{key: [(0.0, 3.0), (10.0, 11.0)]}, {key: [(1.0, 5.0), (10.5, 12.0)]}]
    assert best_seconds(by_rank) == {key: 2.0}


def both_clocks():
    times = moments({"sum": dist.all_reduce}, [1000, 10], repeats=2)
    return times, ping_pong([40_000], repeats=2), home()


def test_collectives_and_messages_by_the_clock_take_what_the_network_takes():
    network = dz.Network(latency=5e-3, bandwidth=4e6)
    run = dz.launch(both_clocks, world_size=2, network=network, backend="gloo")
    seconds = best_seconds([times for times, _, _ in run])
    assert seconds["sum", 4000] >= 0.95 * (2 * 5e-3 + 4000 / 4e6) and ("sum", 40) in seconds
    assert run[0][1][0] >= 0.95 * (5e-3 + 40_000 / 4e6)
    assert run[1][2].type in ("cpu", "cuda")


# ---- inside a span, at a mark


def test_what_a_rank_called_inside_a_span():
    def steps():
        for number in range(2):
            dist.barrier()
            with dz.span("step"):
                for _ in range(number + 1):
                    dist.all_reduce(torch.ones(4))
        with dz.span("end"):
            dist.broadcast(torch.ones(2), src=0)

    run = dz.launch(steps, 2)
    for rank in (0, 1):
        assert [r.op for r in records_in(run, "step", rank)] == ["all_reduce"] * 2  # the last one
        assert {r.rank for r in records_in(run, "step", rank)} == {rank}
    assert [r.op for r in records_in(run)] == ["broadcast"]  # the last span of any name
    with pytest.raises(ValueError, match="no span 'stp'; it has 'step', 'end'"):
        records_in(run, "stp")


def test_what_was_held_when_a_mark_was_set():
    model = nn.Linear(10, 10, bias=False)
    with MemoryTimeline(model) as timeline:
        timeline.mark("before")
        kept = torch.ones(100)
        timeline.mark("with it")
        del kept
    assert timeline.at("before") == dict.fromkeys(TIMELINE_KINDS, 0) | {"parameters": 400}
    assert sum(timeline.at("with it").values()) == 800
    assert sum(timeline.at("end").values()) == 400
    with pytest.raises(ValueError, match="no mark 'after'; there are before, with it, end"):
        timeline.at("after")
