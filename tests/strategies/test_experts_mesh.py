"""A GPT with experts under each strategy: as one process, in exact bytes, saved and continued."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import ddpz_lite as dz
from ddpz_lite.strategies.costs import elements_moved
from ddpz_lite.strategies.hooks import TopK
from ddpz_lite.strategies.mesh import experts

CONFIG = dz.GPTConfig(vocab_size=11, context=8, layers=2, width=8, heads=2, tied=True)
E, TOP_K, BATCH, STEPS, CLIP = 8, 2, 8, 3, 0.3  # CLIP is below every norm of these steps
ADAM = {"lr": 0.01, "eps": 1e-3}  # the gradient of the keys' bias is all rounding: keep it small
NEAR = {"rtol": 1e-5, "atol": 1e-6}
HALF = torch.float16


def rest(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.rest)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(11, (BATCH, 9), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def gpt() -> dz.GPT:
    torch.manual_seed(0)
    return dz.with_experts(dz.GPT(CONFIG), E, TOP_K)


def alone(first: int = 0, model: Any = None, optimizer: Any = None) -> tuple[Any, Any, list]:
    """One process: the states of model and optimizer after the steps, and norms before clipping."""
    model = model or gpt()
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), **ADAM)
    norms = []
    for step in range(first, STEPS):
        x, y = batch_of(step)
        dz.next_token_loss(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    names = {p: name for name, p in model.named_parameters()}
    return model.state_dict(), {names[p]: s for p, s in optimizer.state.items()}, norms


def build(
    shape: tuple[int, int], stage: int, change: Callable[[nn.Module], None] | None = None, **options
) -> tuple[Any, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "expert"))
    model = dz.expert_parallel(gpt(), mesh)
    if change is not None:
        change(model)
    return dz.parallelize(model, torch.optim.AdamW, stage, mesh=mesh, **ADAM, **options)


def trained(model: Any, optimizer: Any, first: int = 0, last: int = STEPS) -> list[float]:
    """Norms: of our clipping, in the last step of torch's."""
    norms, rank, world = [], dist.get_rank(), dist.get_world_size()
    for step in range(first, last):
        x, y = (t.chunk(world)[rank] for t in batch_of(step))
        dz.next_token_loss(model(x), y).backward()
        if step == STEPS - 1:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        else:
            norms.append(optimizer.clip_grad_norm_(CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def on_mesh(shape: tuple[int, int], stages: tuple[int, ...], folder: str = "") -> dict[int, Any]:
    """{stage: (state, optimizer's state, norms)}; with a folder, saved and loaded on the way."""
    found = {}
    for stage in stages:
        model, optimizer = build(shape, stage)
        norms = trained(model, optimizer, last=2)
        if folder:
            dz.save_checkpoint(f"{folder}/{stage}", model, optimizer)
            again = build(shape, stage)
            dz.load_checkpoint(f"{folder}/{stage}", *again)
            resumed = trained(*again, first=2), dz.full_state_dict(again[0])
        norms += trained(model, optimizer, first=2)
        state = dz.full_state_dict(model)
        if folder:
            assert resumed[0] == norms[2:]
            assert all(torch.equal(value, state[name]) for name, value in resumed[1].items())
        of_optimizer = dz.full_optimizer_state_dict(model, optimizer)
        names = [n for group in of_optimizer["param_groups"] for n in group["params"]]
        assert len(names) == len(set(names)) and set(names) == of_optimizer["state"].keys()
        found[stage] = state, of_optimizer["state"], norms
    return found


def check(run: Any) -> None:
    wanted = alone()
    for found in (result for results in run for result in results.values()):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, **NEAR)


@pytest.mark.parametrize(
    ("shape", "stages"),
    [
        ((2, 2), (0, 1, 2, 3)),
        ((1, 2), (0, 3)),
        rest((1, 1), (0, 3)),
        rest((1, 4), (0, 1, 2, 3)),
        rest((4, 1), (0, 3)),
    ],
)
def test_every_stage_trains_as_one_process(shape, stages):
    check(dz.launch(on_mesh, prod(shape), args=(shape, stages), record=False))


def continued(folder: str, shape: tuple[int, int], stage: int) -> tuple[Any, Any, list[float]]:
    """Load a checkpoint on this mesh and take the last step."""
    model, optimizer = build(shape, stage)
    dz.load_checkpoint(folder, model, optimizer)
    norms = trained(model, optimizer, first=2)
    states = dz.full_state_dict(model), dz.full_optimizer_state_dict(model, optimizer)["state"]
    return *states, norms


def test_a_checkpoint_continues_with_other_numbers_of_expert_ranks(tmp_path):
    """Bit for bit on the same mesh; and in one process, or with the experts on 2 or 4 ranks."""
    check(dz.launch(on_mesh, 4, args=((2, 2), (0, 3), str(tmp_path)), record=False))
    state, of_optimizer, norms = alone()
    wanted = state, of_optimizer, norms[2:]
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    dz.load_checkpoint(tmp_path / "3", model, optimizer)
    torch.testing.assert_close(alone(2, model, optimizer), wanted, **NEAR)
    for stage, shape in ((1, (1, 2)), (2, (1, 4))):
        args = (str(tmp_path / "0"), shape, stage)
        for found in dz.launch(continued, prod(shape), args=args, record=False):
            torch.testing.assert_close(found, wanted, **NEAR)


def full_states(state: dict, of_optimizer: dict) -> tuple[Any, Any]:
    """Load full states of a whole model, and read them back."""
    model, optimizer = build((1, 2), 3)
    trained(model, optimizer, last=1)
    dz.load_full_state_dict(model, state)
    dz.load_full_optimizer_state_dict(model, optimizer, of_optimizer)
    return dz.full_state_dict(model), dz.full_optimizer_state_dict(model, optimizer)["state"]


def test_full_states_have_all_experts():
    state, of_optimizer, _ = alone()
    group = dict(torch.optim.AdamW(gpt().parameters(), **ADAM).param_groups[0])
    whole = {"state": of_optimizer, "param_groups": [group | {"params": list(of_optimizer)}]}
    for found in dz.launch(full_states, 2, args=(state, whole), record=False):
        torch.testing.assert_close(found, (state, of_optimizer), rtol=0, atol=0)


# -- bytes


def one_step(shape: tuple[int, int], stages: tuple[int, ...]) -> list[tuple[dict, Any]]:
    """For each stage a step between two marks in the ledger; (memory, parts of the gradient)."""
    mark, found = torch.zeros(1, dtype=torch.float64), []
    for stage in stages:
        model, optimizer = build(shape, stage, broadcast_buffers=False)
        for step in range(2):
            dist.all_reduce(mark)
            x, y = (t.chunk(prod(shape))[dist.get_rank()] for t in batch_of(0))
            dz.next_token_loss(model(x), y).backward()
            optimizer.step()
            memory = dz.memory(model, optimizer)  # before gradients are cleared
            optimizer.zero_grad(set_to_none=bool(step))
        parts = [(flat.layout.padded, len(flat.params)) for flat in model.flats]
        which = [experts(flat.shards[0]) is not None for flat in model.flats]
        found.append((memory, list(zip(which, parts, strict=True))))
        dist.all_reduce(mark)
    return found


def test_experts_cost_the_bytes_of_a_stage_over_their_replicas():
    """Elements sent and held by rank 0, at each stage."""
    (data, ranks), stages = (2, 2), (1, 2, 3)
    run = dz.launch(one_step, 4, args=((data, ranks), stages))
    local = [record for record in run.ledger if record.rank == 0]
    marks = [i for i, record in enumerate(local) if record.dtype == "float64"]
    assert len(marks) == 3 * len(stages)
    rows = None  # what the experts' tokens cost, in a step of stage 1
    params = dict(gpt().named_parameters())
    of_experts = sum(p.numel() for n, p in params.items() if ".experts." in n) // ranks
    dense = sum(p.numel() for n, p in params.items() if ".experts." not in n)
    for number, stage in enumerate(stages):
        first, last = marks[3 * number + 1 : 3 * number + 3]
        calls = [r for r in local[first + 1 : last] if r.dtype == "float32"]
        memory, parts = run[0][number]
        sent, held = 0, 0
        for of_expert, (padded, flags) in parts:
            world = data if of_expert else data * ranks
            sent += elements_moved(padded, world, stage) + flags * (world - 1)
            held += padded // world
        assert sum(n for is_one, (n, _) in parts if is_one) == pytest.approx(of_experts, abs=8)
        assert sum(n for is_one, (n, _) in parts if not is_one) == pytest.approx(dense, abs=16)
        spent = sum(r.bytes_sent for r in calls) / 4 - sent
        rows = spent if rows is None else rows
        assert spent == pytest.approx(rows, abs=2)  # tokens go the same ways at each stage
        assert memory["optimizer"] == pytest.approx(2 * 4 * held, abs=4 * len(params))  # and steps
        whole, own = 4 * (dense + of_experts), 4 * held
        assert memory["parameters"] == pytest.approx(own if stage == 3 else whole, abs=99)
    assert 0 < rows < 2 * 4 * TOP_K * BATCH * 8 * 8  # of 2 layers 4 exchanges, at most


# -- fp16


class Overflow(torch.autograd.Function):
    """The identity; on the last rank its gradient is inf, as long as `on`."""

    on = True

    @staticmethod
    def forward(ctx: Any, bias: Tensor) -> Tensor:
        return bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + torch.inf if Overflow.on and dist.get_rank() == 3 else grad


def overflow(model: nn.Module) -> None:
    """The bias of the last expert gets an inf for a gradient, and no other parameter does."""
    last = list(model.blocks[-1].moe.experts.children())[-1].down
    last.forward = lambda x: F.linear(x, last.weight, Overflow.apply(last.bias))


def with_an_inf(stages: tuple[int, ...]) -> list[Any]:
    """A step with an inf in an expert of the last rank alone, then a good one."""
    found = []
    for stage in stages:
        model, optimizer = build((2, 2), stage, overflow, mixed_precision=HALF)
        before = dz.full_state_dict(model)
        for bad in (True, False):
            Overflow.on = bad
            x, y = (t.chunk(4)[dist.get_rank()] for t in batch_of(0))
            dz.next_token_loss(model(x), y).backward()
            norm = optimizer.clip_grad_norm_(1e9).item() if not bad else None
            optimizer.step()
            optimizer.zero_grad()
            if bad:
                after = dz.full_state_dict(model)
                same = all(torch.equal(value, after[name]) for name, value in before.items())
        scale = optimizer.loss_scale
        found.append((same, scale.skipped, scale.scale, norm))
    return found


def test_fp16_skips_a_step_on_all_ranks_for_an_inf_in_one_expert():
    for found in dz.launch(with_an_inf, 4, args=((0, 1, 3),), record=False):
        for same, skipped, scale, norm in found:
            assert (same, skipped, scale) == (True, 1, 2.0**15)
            assert norm == pytest.approx(alone()[2][0], rel=0.01)  # without the scale, once each


# -- refused


def hybrid() -> None:
    model = dz.expert_parallel(gpt())
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    dz.parallelize(model, torch.optim.AdamW, 3, mesh=mesh)


def with_a_hook() -> None:
    mesh = init_device_mesh("cpu", (2, 1))
    dz.DDP(dz.expert_parallel(gpt(), mesh))  # all experts on each rank: nothing to refuse
    dz.DDP(dz.expert_parallel(gpt()), comm_hook=TopK(0.1))


def over_tensor() -> None:
    dz.expert_parallel(gpt(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("expert", "tensor")))


def on_meta() -> None:
    with torch.device("meta"):
        model = dz.with_experts(dz.GPT(CONFIG), E)
    dz.expert_parallel(model)


def local_steps() -> None:
    dz.LocalSGD(torch.optim.SGD(dz.expert_parallel(gpt()).parameters(), lr=0.1), 2)


REFUSED = {
    hybrid: "experts need all ranks in one group. Fix: ",
    with_a_hook: "TopK works inside one group, and here replicas, or ranks with other ",
    over_tensor: 'cannot be cut over "tensor". Fix: ',
    on_meta: "on a module with values",
    local_steps: "LocalSGD averages parameters over ranks, and these hold other experts each",
}


def refused() -> dict[str, str]:
    found = {}
    for job in REFUSED:
        with pytest.raises(ValueError) as error:
            job()
        found[job.__name__] = str(error.value)
    return found


def test_what_cannot_be_combined_is_refused_on_every_rank():
    for found in dz.launch(refused, 2, record=False):
        for job, words in REFUSED.items():
            assert words in found[job.__name__]
            assert "Fix:" in found[job.__name__]
