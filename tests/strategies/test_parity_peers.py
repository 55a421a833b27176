"""The stages against torch's own: DDP, ZeroRedundancyOptimizer and FSDP2, bitwise at two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from core_jobs import CASES, Recipe, build, distance, loop, rank_losses, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import ddpz_lite as dz

ADAMW = Recipe(torch.optim.AdamW, (("lr", 0.01),), steps=3)
PAIRS = {0: "DDP", 1: "ZeroRedundancyOptimizer", 2: "FSDP2 kept", 3: "FSDP2"}


def train_peer(case_name: str, peer: str) -> dict[str, torch.Tensor]:
    case, module = CASES[case_name], build(CASES[case_name])
    options = dict(ADAMW.options)
    if peer.startswith("FSDP2"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in [*module.blocks, module]:
            fully_shard(block, mesh=mesh, reshard_after_forward=peer == "FSDP2")
        model, optimizer = module, torch.optim.AdamW(module.parameters(), **options)
    else:
        model = nn.parallel.DistributedDataParallel(module)
        if peer == "DDP":
            optimizer = torch.optim.AdamW(model.parameters(), **options)
        else:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    loop(model, optimizer, lambda: None, ADAMW, rank_losses(model, case, ADAMW))
    state = module.state_dict()
    return {
        n: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for n, v in state.items()
    }


def compare() -> dict[tuple[str, int], float]:
    return {
        (case, stage): distance(
            train(CASES[case], ADAMW, stage, reshard_after_forward=stage == 3)[0],
            train_peer(case, peer),
        )
        for case in ("mlp", "gpt", "cnn", "dropout")
        for stage, peer in PAIRS.items()
        if not (case == "cnn" and stage >= 2)  # FSDP2 leaves batch statistics to each rank
    }


@pytest.mark.parametrize("world", [2, 3])
def test_every_stage_equals_its_peer(world):
    for found in dz.launch(compare, world, record=False, timeout=110):
        limit = 0.0 if world == 2 else 1e-5
        far = {key: d for key, d in found.items() if not d <= limit}
        assert not far
