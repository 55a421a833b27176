"""A save in the background: the state of one moment, while training goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_checkpoint_faults import error_of, trained, weight

import ddpz_lite as dz
from ddpz_lite.checkpoint import save_load as checkpoint
from ddpz_lite.checkpoint.background import save_in_background
from ddpz_lite.checkpoint.full_state import full_state_dict, load_full_state_dict
from ddpz_lite.checkpoint.save_load import load_checkpoint


def in_background(path: str, mesh_shape: tuple[int, ...]) -> list:
    """Nothing is written before training has gone on, by a gate that holds the thread."""
    gate, write, out = threading.Event(), checkpoint._write, []

    def held_back(*args) -> None:
        gate.wait()
        write(*args)

    checkpoint._write = held_back
    mesh = dist.init_device_mesh("cpu", mesh_shape) if len(mesh_shape) == 2 else None
    for stage in (0, 2, 3):
        model, optimizer = trained(1.0, stage, mesh)
        torch.manual_seed(dist.get_rank())
        gate.clear()
        saving = save_in_background(f"{path}/{stage}", model, optimizer, stage=stage)
        numbers, begun = torch.rand(2), saving.done()
        load_full_state_dict(model, {n: t + 1 for n, t in full_state_dict(model).items()})
        model(torch.ones(2, 5)).sum().backward()  # collectives of training, meanwhile
        optimizer.step()
        gate.set()
        saving.wait()
        other, second = trained(9.0, 3 - stage, mesh)
        extra = load_checkpoint(f"{path}/{stage}", other, second)
        out.append((begun, weight(model), weight(other), extra["stage"] == stage))
        out[-1] += (torch.equal(torch.rand(2), numbers),)
    checkpoint._write = write
    elsewhere = Path(path, "0", "CURRENT", "x")
    failed = save_in_background(elsewhere, model, optimizer)
    out += [
        error_of(failed.wait),
        error_of(save_in_background, path, model, optimizer, f=lambda: 0),
    ]
    return out


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_the_state_of_one_moment_is_saved_while_training_continues(tmp_path, shape):
    world = 2 if len(shape) == 1 else 4
    for found in dz.launch(in_background, world, args=(str(tmp_path), shape), record=False):
        assert found[:3] == [(False, 2.0, 1.0, True, True)] * 3
        assert "the checkpoint was not saved" in found[3] and found[4].startswith("TypeError: f=")


def test_one_process_alone(tmp_path):
    model, optimizer = trained(1.0, 0)
    saving = save_in_background(tmp_path, model, optimizer)
    saving.wait()
    saving.wait()  # again: the same
    load_checkpoint(tmp_path, *trained(2.0))
