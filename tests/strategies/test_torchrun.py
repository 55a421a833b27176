"""The same script under torchrun and as one process: nothing in the library needs the launcher."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.rest, pytest.mark.usefixtures("own_temporary")]

SCRIPT = """
import os, sys, torch
import torch.distributed as dist
import ddpz_lite as dz
from ddpz_lite.checkpoint.save_load import load_checkpoint, save_checkpoint
from ddpz_lite.checkpoint.full_state import full_state_dict
from ddpz_lite.model import MLP
from ddpz_lite.strategies.parallelize import parallelize

folder = sys.argv[1]
if "RANK" in os.environ:
    dist.init_process_group("gloo")
rank = dist.get_rank() if dist.is_initialized() else 0
world = dist.get_world_size() if dist.is_initialized() else 1
torch.manual_seed(0)
model, optimizer = parallelize(MLP([3, 5, 2]), torch.optim.SGD, 3, lr=0.1, momentum=0.9)
saved = os.path.exists(folder + "/c")
done = load_checkpoint(folder + "/c", model, optimizer)["step"] if saved else 0
steps = int(sys.argv[2])
for step in range(done, done + steps):
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
    model(x[rank::world]).square().mean().backward()
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()
save_checkpoint(folder + "/c", model, optimizer, step=done + steps)
state = full_state_dict(model)
if rank == 0:
    torch.save(state, folder + "/state.pt")
if dist.is_initialized():
    dist.destroy_process_group()
"""


# Each process imports torch for itself. Between 2 and 3 ranks: test_checkpoint.py, and weekly here.
@pytest.mark.parametrize("changing", [(2, 1), pytest.param((2, 3), marks=pytest.mark.extra)])
def test_torchrun_goes_on_where_another_world_stopped(changing, tmp_path, root):
    (tmp_path / "train.py").write_text(SCRIPT)
    results = {}
    for name, worlds in {"alone": (1,), "changing": changing}.items():
        folder, steps = tmp_path / name, 4 // len(worlds)
        folder.mkdir()
        for world in worlds:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
            torchrun.append(f"--log-dir={tmp_path}")  # otherwise it leaves a folder
            command = [sys.executable, *(torchrun if world > 1 else []), str(tmp_path / "train.py")]
            done = subprocess.run(
                [*command, str(folder), str(steps)],
                cwd=root,
                env=_environment(root),
                timeout=400,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
        results[name] = torch.load(folder / "state.pt", weights_only=True)
    for name, value in results["alone"].items():
        assert torch.allclose(value, results["changing"][name], atol=1e-6), name


def _environment(root) -> dict[str, str]:
    path = os.pathsep.join(p for p in (str(root), os.environ.get("PYTHONPATH")) if p)
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
