"""Ownership by whole parameters: Muon and Adafactor at ZeRO-1 and ZeRO-2 against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from core_jobs import CASES, Recipe, build, distance, raised, rank_losses, reference, train
from third_party import GlobalNorm, Prodigy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer

import ddpz_lite as dz
from ddpz_lite.strategies.ownership import WholeLayout, balanced
from ddpz_lite.strategies.parallelize import parallelize
from ddpz_lite.strategies.pipeline.gpt_stages import gpt_stages
from ddpz_lite.strategies.pipeline.schedules import one_f_one_b
from ddpz_lite.strategies.zero1 import ZeRO1
from ddpz_lite.strategies.zero2 import ZeRO2

# Newton-Schulz starts with bfloat16(gradient): where a sum's order differs, an element may round to
# its other neighbour, and the update differs by a few thousandths of itself.
BF16 = 5e-3


def matrices_and_rest(model: nn.Module) -> list[dict[str, Any]]:
    blocks = getattr(model, "blocks", model)
    matrices = [p for p in blocks.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
    return [{"params": matrices, "lr": 0.02}, {"params": rest, "lr": 0.01}]


def muon_adamw() -> type[torch.optim.Optimizer]:
    return dz.per_group(torch.optim.Muon, torch.optim.AdamW)


@pytest.mark.parametrize("world", range(1, 7))
def test_every_tensor_lies_in_one_slice(world):
    shapes = tuple(map(torch.Size, [(3, 5), (7,), (4, 4), (2, 9), (), (1, 3), (6, 2)]))
    layouts = [WholeLayout(shapes, world, rank) for rank in range(world)]
    full = torch.arange(layouts[0].padded)
    slices = full.view(world, -1)
    for index, view in enumerate(layouts[0].views(full)):
        parts = [layout.split(s)[index] for layout, s in zip(layouts, slices, strict=True)]
        (whole,) = [part for part in parts if part.numel()]
        assert torch.equal(whole, view)
        assert [p.shape == view.shape for p in parts].count(True) == 1
        owned = [layout.owned(index) for layout in layouts]
        assert sorted(stop - start for start, stop in owned)[-1] == view.numel()
    loads = [sum(part.numel() for part in layouts[r].split(slices[r])) for r in range(world)]
    assert max(loads) == layouts[0].shard_numel  # no slice is longer than what its rank owns
    assert sum(loads) == layouts[0].numel
    assert max(loads) <= layouts[0].numel / world + max(s.numel() for s in shapes)


def test_buckets_are_joined_until_padding_is_small():
    blocks = [[nn.Parameter(torch.empty(k, 8)) for k in (32, 32, 24, 8)] for _ in range(9)]
    joined = balanced(blocks, 4)
    for bucket in joined:
        layout = WholeLayout(tuple(p.shape for p in bucket), 4, 0)
        assert layout.padded <= layout.numel * 8 / 7
    assert len(joined) > 1
    assert [p for b in joined for p in b] == [p for b in blocks for p in b]


RECIPES = {
    "plain": {},
    "clipped": {"clip": 0.05},
    "no_sync": {"micro_batches": 2, "no_sync": True},
    "accumulated": {"micro_batches": 2},
}


def distances() -> dict[Any, float]:
    """Distances to one process, by what is done, by optimizer and by stage."""
    torch.set_num_threads(1)
    found, world, case = {}, dist.get_world_size(), CASES["gpt"]
    for name, more in RECIPES.items():
        for recipe in (
            Recipe(muon_adamw(), (), grouped=matrices_and_rest, **more),
            Recipe(torch.optim.Adafactor, (("lr", 0.1),), **more),
        ):
            alone = reference(case, recipe, world)
            for stage in (1, 2):
                key = name, recipe.optimizer.__name__, stage
                found[key] = distance(train(case, recipe, stage)[0], alone)
    return found


@pytest.mark.parametrize(
    "world", [1, 3, *(pytest.param(w, marks=pytest.mark.rest) for w in (2, 4))]
)
def test_muon_and_adafactor_equal_one_process(world):
    for found in dz.launch(distances, world, record=False):
        assert len(found) == 4 * len(RECIPES)
        assert {key: d for key, d in found.items() if not d < BF16} == {}


def three_ways() -> dict[str, Any]:
    """Muon on matrices: owned whole, by ZeroRedundancyOptimizer, and on this rank's rows."""
    torch.set_num_threads(1)
    rank, world, out = dist.get_rank(), dist.get_world_size(), {}
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in ((8, 24), (24, 12), (12, 4))))
    x = torch.randn(3, 4 * world, 8, generator=torch.Generator().manual_seed(1))

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            model(x[step, rank::world]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    peer = copy.deepcopy(plain)
    options = {"lr": 0.1, "momentum": 0.9}
    ddp = nn.parallel.DistributedDataParallel(peer)
    steps(ddp, ZeroRedundancyOptimizer(peer.parameters(), torch.optim.Muon, **options))
    for kind in (ZeRO1, ZeRO2):
        model = copy.deepcopy(plain)
        optimizer = kind(model.parameters(), torch.optim.Muon, bucket_mb=1e-4, **options)
        steps(model, optimizer)
        out[kind.__name__] = distance(model.state_dict(), peer.state_dict())
        held = sum(t.numel() for s in optimizer.state.values() for t in s.values())
        out["state", kind.__name__] = held, sum(p.numel() for p in plain.parameters())
    # what a rank would do with rows of a matrix, as FSDP lays them: it runs, and is another update
    model = copy.deepcopy(plain)
    rows = [nn.Parameter(p.detach().chunk(world)[rank].clone()) for p in model.parameters()]
    on_rows = torch.optim.Muon(rows, **options)
    for step in range(3):
        model(x[step, rank::world]).square().sum().backward()
        for row, param in zip(rows, model.parameters(), strict=True):
            dist.all_reduce(param.grad)
            row.grad = (param.grad / world).chunk(world)[rank].clone()
        on_rows.step()
        model.zero_grad()
        for row, param in zip(rows, model.parameters(), strict=True):
            gathered = [torch.empty_like(row) for _ in range(world)]
            dist.all_gather(gathered, row.detach())
            param.data.copy_(torch.cat(gathered))
    moved = {n: p - plain.state_dict()[n] for n, p in peer.state_dict().items()}
    gaps = [
        (p - peer.state_dict()[n]).norm() / moved[n].norm() for n, p in model.named_parameters()
    ]
    out["on rows"] = max(gaps).item()
    return out


@pytest.mark.parametrize("world", [2, 4])
def test_muon_is_that_of_zero_redundancy_optimizer(world):
    found = list(dz.launch(three_ways, world, record=False))
    for out in found:
        for kind in ("ZeRO1", "ZeRO2"):
            assert out[kind] == 0 if world == 2 else out[kind] < BF16  # sums of 2 have one order
        assert out["on rows"] > 0.2  # silent, and another optimizer
    for kind in ("ZeRO1", "ZeRO2"):  # the momentum of each matrix is on one rank
        held, total = zip(*(out["state", kind] for out in found), strict=True)
        assert sum(held) == total[0]
        assert max(held) < 0.6 * total[0]


def sent(stage: int, kind: Any, options: dict[str, Any]) -> tuple[int, int, int]:
    """Elements of Psi, and with padding and flags; and what a second step sends."""
    torch.manual_seed(0)
    blocks = [m for _ in range(8) for m in (nn.Linear(16, 48, False), nn.Linear(48, 16, False))]
    model, optimizer = parallelize(nn.Sequential(*blocks), kind, stage, bucket_mb=0.01, **options)
    for step in range(2):
        with dz.span(f"step {step}"):
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
    flats = optimizer.flats
    padded = sum(flat.layout.padded for flat in flats)
    flags = sum(len(flat.params) for flat in flats)
    return sum(p.numel() for p in model.parameters()), padded, flags


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_it_sends_what_zero1_sends(stage, world):
    runs = {
        kind: dz.launch(sent, world, args=(stage, kind, {"lr": 0.1}))
        for kind in (torch.optim.Muon, torch.optim.AdamW)
    }
    for kind, run in runs.items():
        psi, padded, flags = run[0]
        inside = [r for r in dz.meter.records_in(run, "step 1") if r.rank == 0]
        measured = sum(r.bytes_sent for r in inside)
        # reduce-scatter with flags, then all-gather
        assert measured == 4 * (2 * padded * (world - 1) / world + flags * (world - 1)), kind
        assert psi <= padded <= psi * 8 / 7
    if world == 2:  # equal matrices in pairs: no padding at all
        assert runs[torch.optim.Muon][0][1] == psi


def other_options() -> dict[str, Any]:
    """The same in other ways to train, by name: distance to one process."""
    torch.set_num_threads(1)
    world, case, found = dist.get_world_size(), CASES["gpt"], {}
    recipe = Recipe(muon_adamw(), (), grouped=matrices_and_rest)
    alone = reference(case, recipe, world)
    for stage in (1, 2):
        for name, options in {
            "bf16": {"mixed_precision": torch.bfloat16},
            "fp16": {"mixed_precision": torch.float16},
            "offload": {"offload": True},
        }.items():
            state, _, optimizer = train(case, recipe, stage, **options)
            found[name, stage] = distance(state, alone)
    # two optimizers over one model
    model = build(case)
    first, second = matrices_and_rest(model)
    pair = [
        ZeRO1(first["params"], torch.optim.Muon, lr=0.02),
        ZeRO2(second["params"], torch.optim.AdamW, lr=0.01),
    ]
    losses = rank_losses(model, case, recipe)
    for step in range(recipe.steps):
        for loss in losses(step):
            loss.backward()
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.5
    found["two optimizers"] = distance(model.state_dict(), alone)
    return found


def test_precision_offload_and_two_optimizers():
    for found in dz.launch(other_options, 2, record=False):
        for key, d in found.items():
            assert d < (0.03 if key[0] in ("bf16", "fp16") else BF16), (key, d)


class Whitened(torch.optim.Optimizer):
    """As Shampoo: each gradient times the inverse root of its own rows' products."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                rows = p.grad.reshape(len(p), -1) if p.ndim else p.grad.reshape(1, 1)
                state = self.state[p]
                state["products"] = state.get("products", 1e-2 * torch.eye(len(rows)))
                state["products"] += rows @ rows.T
                values, vectors = torch.linalg.eigh(state["products"])
                root = vectors @ torch.diag(values.rsqrt()) @ vectors.T
                p.sub_((root @ rows).view_as(p), alpha=group["lr"])


def whitened() -> float:
    torch.set_num_threads(1)
    recipe = Recipe(Whitened, (("lr", 0.1),))
    alone = reference(CASES["mlp"], recipe, dist.get_world_size())
    return max(
        distance(train(CASES["mlp"], recipe, stage, ownership="parameter")[0], alone)
        for stage in (1, 2)
    )


def test_others_ask_for_it_by_a_keyword():
    with pytest.raises(TypeError, match='ownership="parameter"'):
        parallelize(nn.Linear(3, 2), Whitened, 1)
    assert max(dz.launch(whitened, 3, record=False)) < 1e-4


@pytest.mark.parametrize("kind", [Prodigy, GlobalNorm])
def test_what_mixes_parameters_is_refused_in_any_case(kind):
    with pytest.raises(TypeError, match=r"depends on (other|all) parameters.*take stage 0"):
        parallelize(nn.Linear(2, 2), kind, 1, lr=0.1, ownership="parameter")


def test_refusals_name_the_fix():
    model = dz.ZeRO3(nn.Linear(4, 4))
    on_shards = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="shards of ZeRO-3"):
        on_shards.step()
    linear = nn.Linear(4, 4)
    assert "stage=2" in raised(parallelize, linear, torch.optim.Adafactor, 3, lr=0.1)
    assert "per_group(torch.optim.Muon" in raised(parallelize, linear, torch.optim.Muon, 1)
    assert "expected None" in raised(parallelize, linear, torch.optim.AdamW, 1, ownership="row")
    two = dz.per_group(torch.optim.AdamW, torch.optim.SGD)
    with pytest.raises(ValueError, match=r"AdamW\+SGD steps 2 groups, .* got 1"):
        parallelize(nn.Linear(4, 4), two, 0)
    linear = nn.Linear(4, 4)
    _, optimizer = parallelize(linear, muon_adamw(), 0, param_groups=matrices_and_rest)
    with pytest.raises(ValueError, match="pass all groups when it is built"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def saved(path: str, stage: int) -> list[dict[str, Tensor]]:
    model, optimizer = resumable(stage)
    two_steps(model, optimizer)
    dz.save_checkpoint(path, model, optimizer)
    two_steps(model, optimizer)
    return [dz.full_state_dict(model)]


def loaded(path: str, stage: int) -> list[dict[str, Tensor]]:
    model, optimizer = resumable(stage)
    dz.load_checkpoint(path, model, optimizer)
    two_steps(model, optimizer)
    return [dz.full_state_dict(model)]


class Both(nn.Module):
    """Matrices for Muon, a stack of matrices and a vector for Adafactor."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
        self.stack, self.vector = nn.Parameter(torch.randn(2, 6, 6)), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = torch.tanh(matrix(x))
        return (x @ self.stack.sum(0) * self.vector).square().mean()


def resumable(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return parallelize(
        Both(),
        dz.per_group(torch.optim.Muon, torch.optim.Adafactor),
        stage,
        param_groups=lambda m: [
            {"params": list(m.matrices.parameters())},
            {"params": [m.stack, m.vector], "lr": 0.05},
        ],
    )


def two_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(2))  # the same on every rank
    for part in x:
        model(part).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("before", "after"), [((1, 3), (2, 2)), ((2, 2), (0, 1)), ((0, 2), (1, 4))]
)
def test_checkpoints_fit_any_world(tmp_path, before, after):
    """(stage, world) before and after; every rank has the same batch."""
    (uninterrupted,) = dz.launch(saved, before[1], args=(str(tmp_path), before[0]))[0]
    for (resumed,) in dz.launch(loaded, after[1], args=(str(tmp_path), after[0]), record=False):
        for name, value in uninterrupted.items():
            torch.testing.assert_close(resumed[name], value, rtol=BF16, atol=BF16)


def on_meshes() -> dict[Any, float]:
    torch.set_num_threads(1)
    recipe = Recipe(muon_adamw(), (), grouped=matrices_and_rest, clip=0.05)
    alone = reference(CASES["gpt"], recipe, 4)
    mesh = init_device_mesh("cpu", (2, 2))
    return {
        stage: distance(train(CASES["gpt"], recipe, stage, mesh=mesh)[0], alone)
        for stage in (1, (1, 1), (1, 2))
    }


@pytest.mark.rest
def test_meshes_of_replicas_and_owners():
    for found in dz.launch(on_meshes, 4, record=False):
        assert {stage: d for stage, d in found.items() if not d < BF16} == {}


def on_stages() -> dict[Any, float]:
    """Distances to one process on data x pipe, by stage."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    config = dz.GPTConfig(vocab_size=12, context=5, layers=4, heads=2, width=8)
    tokens = torch.randint(12, (8, 6), generator=torch.Generator().manual_seed(1))
    x, y = tokens[:, :-1], tokens[:, 1:]

    def gpt() -> dz.GPT:
        torch.manual_seed(0)
        return dz.GPT(config)

    plain, found = gpt(), {}
    alone = muon_adamw()(by_dimension(plain))
    for _ in range(2):
        dz.next_token_loss(plain(x), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        alone.step()
        alone.zero_grad()
    for stage in (0, 1, 2):
        pipe = dz.Pipeline(gpt_stages(gpt(), 2), one_f_one_b(2, 2), mesh["pipe"])
        pipe, optimizer = parallelize(
            pipe, muon_adamw(), stage, mesh=mesh, bucket_mb=0.001, param_groups=by_dimension
        )
        part = [t.chunk(2)[mesh.get_local_rank("data")] for t in (x, y)]
        for _ in range(2):
            pipe.step(*part, dz.next_token_loss)
            optimizer.clip_grad_norm_(0.05)
            optimizer.step()
            optimizer.zero_grad()
        found[stage] = distance(dz.full_state_dict(pipe), plain.state_dict())
        if stage:
            held = {n: v for s in optimizer.state.values() for n, v in s.items()}
            assert "momentum_buffer" in held and held["momentum_buffer"].ndim == 2
    return found


def by_dimension(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim == 2], "lr": 0.02},
        {"params": [p for p in params if p.ndim != 2], "lr": 0.01},
    ]


def test_owners_inside_the_stages_of_a_pipeline():
    for found in dz.launch(on_stages, 4, record=False):
        assert {stage: d for stage, d in found.items() if not d < BF16} == {}
