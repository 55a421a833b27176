"""torch's own strategies run on the wire unchanged, with the very same numbers as on plain gloo."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import ddpz_lite as dz
from ddpz_lite.wire import ledger

FAST = dz.Network(latency=2e-4, bandwidth=1e9)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 16), nn.GELU(), nn.Linear(16, 5)
    )


class Branching(nn.Module):
    """Uses one of two layers, another one on every other rank; has buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.even, self.odd, self.norm = nn.Linear(16, 5), nn.Linear(16, 5), nn.BatchNorm1d(5)
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        layer = self.even if (self.steps + dist.get_rank()) % 2 else self.odd
        return self.norm(layer(x))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list:
    losses = []
    for step in range(steps):
        source = torch.Generator().manual_seed(100 * dist.get_rank() + step)
        x = torch.randn(8, 16, generator=source)  # (batch, features)
        y = torch.randint(0, 5, (8,), generator=source)  # (batch,)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def state(model: nn.Module) -> list:
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


DDP_KINDS = ("plain", "views", "unused", "static", "fp16 hook", "PowerSGD", "ZeRO-1")


def ddp(kind: str) -> list:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = Branching() if kind == "unused" else make_model()
    options = {
        "views": {"gradient_as_bucket_view": True},
        "unused": {"find_unused_parameters": True},
        "static": {"static_graph": True},
        "PowerSGD": {"bucket_cap_mb": 25},  # its hook makes several buckets race each other
    }
    model = nn.parallel.DistributedDataParallel(
        module, **{"bucket_cap_mb": 0.001, **options.get(kind, {})}
    )
    if kind == "fp16 hook":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if kind == "PowerSGD":
        options = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model.register_comm_hook(options, powerSGD_hook.powerSGD_hook)
    if kind == "ZeRO-1":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return train(model, optimizer) + state(model)


FSDP_KINDS = ("reshard", "keep", "mixed", "hybrid", "checkpoint")


def fsdp(kind: str) -> list:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    size = dist.get_world_size()
    shape, names = ((2, size // 2), ("replica", "shard")) if kind == "hybrid" else ((size,), None)
    if kind == "hybrid" and size % 2:
        return []
    options = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
    if kind == "keep":
        options["reshard_after_forward"] = False
    if kind == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results = train(model, optimizer)
    if kind == "checkpoint":
        results += there_and_back(model, optimizer)
    return results + [p.full_tensor().detach() for p in model.parameters()]


def there_and_back(model: nn.Module, optimizer: torch.optim.Optimizer) -> list:
    """Save, take a step, load, take the step again: both must be the same step."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    with tempfile.TemporaryDirectory() as local:
        shared = [local]
        dist.broadcast_object_list(shared, 0)
        dcp.save(
            dict(zip("mo", get_state_dict(model, optimizer), strict=True)), checkpoint_id=shared[0]
        )
        first = train(model, optimizer, 1)
        saved = dict(zip("mo", get_state_dict(model, optimizer), strict=True))
        dcp.load(saved, checkpoint_id=shared[0])
        set_state_dict(model, optimizer, model_state_dict=saved["m"], optim_state_dict=saved["o"])
        second = train(model, optimizer, 1)
        dist.barrier()
    assert torch.equal(first[0], second[0])
    return first + second


def run_all(strategy: str) -> dict[str, list]:
    import warnings

    warnings.simplefilter("ignore")  # torch's advice about tiny models
    ledger.GRACE = 60.0  # the end of a call without wait is noted, too
    fn, kinds = {"ddp": (ddp, DDP_KINDS), "fsdp": (fsdp, FSDP_KINDS)}[strategy]
    return {kind: fn(kind) for kind in kinds}


EXTRA = [pytest.param(size, marks=pytest.mark.extra) for size in (3, 4)]


@pytest.mark.parametrize("size", [2, *EXTRA])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_torchs_strategies_give_the_same_numbers_as_on_plain_gloo(strategy, size):
    plain = dz.launch(run_all, size, args=(strategy,), record=False)
    wired = dz.launch(run_all, size, args=(strategy,))
    shaped = dz.launch(run_all, size, args=(strategy,), network=FAST)
    for run in (wired, shaped):
        for rank in range(size):
            for kind, expected in plain[rank].items():
                got = run[rank][kind]
                assert len(got) == len(expected)
                equal = [torch.equal(a, b) for a, b in zip(got, expected, strict=True)]
                assert all(equal), (kind, rank, size)
    assert wired.bytes_sent() == shaped.bytes_sent()
    ops = {r.op for r in wired.ledger}
    expected = (
        {"all_reduce", "broadcast"} if strategy == "ddp" else {"all_gather", "reduce_scatter"}
    )
    assert expected <= ops
    assert all(r.finished is not None for run in (wired, shaped) for r in run.ledger)


def ddp_traffic() -> int:
    model = nn.parallel.DistributedDataParallel(nn.Linear(400, 100, bias=False))
    dist.barrier()
    model(torch.ones(2, 400)).sum().backward()
    return sum(p.numel() for p in model.parameters())


def test_ddp_moves_two_psi_a_step():
    size = 4
    run = dz.launch(ddp_traffic, size)
    steps = [r for r in run.ledger if r.op == "all_reduce"]
    assert sum(r.elements for r in steps) == size * run[0]
    assert {r.bytes_sent for r in steps} == {2 * (size - 1) * run[0] * 4 // size}


def joined(divide_by_initial: bool) -> list[torch.Tensor]:
    """Uneven inputs: rank r has r + 1 batches; the reducer asks how many ranks take part."""
    from torch.distributed.algorithms.join import Join

    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model], divide_by_initial_world_size=divide_by_initial):
        losses = train(model, optimizer, dist.get_rank() + 1)
    return losses + state(model)


@pytest.mark.parametrize("size", [2, 3])
def test_a_handle_that_only_torch_has_kept_is_waited_for(size):
    """[Note: a handle that only C++ has], in the wire's group."""
    for divide_by_initial in (False, True):
        runs = [
            dz.launch(joined, size, args=(divide_by_initial,), **how)
            for how in ({"record": False}, {}, {"network": FAST})
        ]
        for plain, *others in zip(*runs, strict=True):
            for other in others:
                assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def dtensor() -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    rows = distribute_tensor(torch.arange(4.0 * size).reshape(size, 4), mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)]) if size == 4 else rows
    full = columns.redistribute(mesh, [Replicate()])
    product = (rows @ rows.T).sum().full_tensor()
    return [*full.to_local().flatten().tolist(), product.item()]


@pytest.mark.parametrize("size", [2, 4])
def test_dtensor_redistributes_over_the_wire(size):
    plain, wired = dz.launch(dtensor, size, record=False), dz.launch(dtensor, size)
    assert list(plain) == list(wired)
    assert "all_gather" in {r.op for r in wired.ledger}


def compiled(what: str) -> list[torch.Tensor]:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)))
    if what == "blocks":
        for block in module:
            block.compile(backend="eager")
    model, optimizer = dz.parallelize(module, torch.optim.SGD, stage=3, lr=0.1)
    step = torch.compile(model, backend="eager") if what == "model" else model
    return train(step, optimizer, 2)


@pytest.mark.parametrize("what", ["blocks", pytest.param("model", marks=pytest.mark.extra)])
def test_torch_compile_leaves_the_wires_calls_alone(what):
    wired = dz.launch(compiled_as_at_home, 2, args=(what,))
    for compiled_losses, plain_losses in wired:
        assert torch.equal(torch.stack(compiled_losses), torch.stack(plain_losses))
    assert {"all_gather", "all_to_all"} <= {record.op for record in wired.ledger}


def compiled_as_at_home(what: str) -> tuple[list, list]:
    """Losses with torch.compile and without."""
    found = []
    for kind in (what, "nothing"):
        torch.manual_seed(0)
        found.append(compiled(kind))
    return tuple(found)
