"""What may happen to a checkpoint: full disks, kills, damage, other groups of ranks."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import ddpz_lite as dz
from ddpz_lite.checkpoint import folder as checkpoint_folder
from ddpz_lite.checkpoint.full_state import full_state_dict, save_safetensors
from ddpz_lite.checkpoint.parts import check_shapes
from ddpz_lite.checkpoint.save_load import load_checkpoint, save_checkpoint
from ddpz_lite.strategies.parallelize import parallelize

NOBODY = 65534


@torch.enable_grad()
def trained(value: float, stage: int = 1, mesh=None, dtype=torch.float32):
    """A model whose weights are `value`, after a step of AdamW that does not move them."""
    module = nn.Linear(5, 3).to(dtype)
    nn.init.constant_(module.weight, value)
    model, optimizer = parallelize(
        module, torch.optim.AdamW, stage, mesh=mesh, lr=0.0, weight_decay=0.0
    )
    model(torch.ones(2, 5, dtype=dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def weight(model: nn.Module) -> float:
    found = full_state_dict(model)["weight"].unique()
    return found.item() if len(found) == 1 else float("nan")


def error_of(call: Callable, *args, **kwargs) -> str:
    """The error of a call: its kind and words."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def saves(folder: Path) -> list[str]:
    return [path.name for path in Path(folder).iterdir() if path.is_dir()]


# -- groups of ranks


def halves(path: str) -> list:
    """Two halves of the world, and then a mesh of them, train models of their own."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([r]) for r in range(4)]
    out = []
    for stage, meshes in ((0, pairs), (3, pairs), (1, alone)):
        group = rank * len(meshes) // 4
        model, optimizer = trained(1.0 + group, stage, meshes[group])
        local = f"{path}/{stage}-{group}"
        save_checkpoint(local, model, optimizer, group=group)
        save_safetensors(f"{local}.safetensors", model)
        other, second = trained(9.0, 3 - stage, meshes[group])
        extra = load_checkpoint(local, other, second)
        ours = weight(other) == load_file(f"{local}.safetensors")["weight"].mean() == 1.0 + group
        out.append(ours and extra == {"group": group})
    model, optimizer = trained(rank // 2, 2, pairs[rank // 2])
    if rank < 2:
        save_checkpoint(f"{path}/both", model, optimizer)
        save_safetensors(f"{path}/both.safetensors", model)
    dist.barrier()
    if rank >= 2:
        out.append(error_of(save_checkpoint, f"{path}/both", model, optimizer))
        out.append(error_of(save_safetensors, f"{path}/both.safetensors", model))
    return out


@pytest.mark.rest
def test_groups_of_ranks_save_each_their_own(tmp_path):
    run = dz.launch(halves, 4, args=(str(tmp_path),), record=False)
    for rank, found in enumerate(run):
        assert found[:3] == [True] * 3
        for words in found[3:]:
            assert words.endswith(
                "ranks 0, 1 of this job save here, and ranks 2, 3 hold another model. Fix: use "
                "one path for each group of ranks."
            )
        assert len(found) == (5 if rank > 1 else 3)
    assert load_file(tmp_path / "both.safetensors")["weight"].mean() == 0
    assert len(list(tmp_path.glob("*.safetensors"))) == len(list(tmp_path.glob("*.safe*"))) == 9


def hybrid(path: str) -> list[float]:
    mesh = dist.init_device_mesh("cpu", (2, 2))
    model, optimizer = trained(3.0, 3, mesh)
    torch.manual_seed(dist.get_rank())
    save_checkpoint(path, model, optimizer)
    numbers = torch.rand(2)
    other, second = trained(9.0, 2, mesh)
    load_checkpoint(path, other, second)
    same = torch.equal(torch.rand(2), numbers)
    return [weight(other), float(same), float(len(list(Path(path).glob("save-*/*.distcp"))))]


def test_replicas_write_their_tensors_once_and_each_its_random_generators(tmp_path):
    assert list(dz.launch(hybrid, 4, args=(str(tmp_path),), record=False)) == [[3.0, 1.0, 2.0]] * 4


# -- a disk that fills on one rank


def full_disks(path: str) -> list:
    """Save with a disk that is full from the k-th file on, for each rank and each k."""
    sync, calls, fails_at = os.fsync, 0, None

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if fails_at is not None and calls > fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    os.fsync = fsync
    me, out = dist.get_rank(), []
    model, optimizer = trained(0.0)
    save_checkpoint(path, model, optimizer, value=0.0)
    for victim in range(3):
        for k in range(100):
            calls, fails_at = 0, k if me == victim else None
            model, optimizer = trained(1.0 + k)
            words = error_of(save_checkpoint, path, model, optimizer, value=1.0 + k)
            fails_at = None
            dist.barrier()
            value = load_checkpoint(path, model, optimizer)["value"]
            inside = saves(path)
            out.append((victim, k, words, value, weight(model), inside))
            dist.barrier()
            if words == "nothing":
                break
    return out


def test_a_disk_that_fills_on_one_rank_stops_all_and_leaves_nothing(tmp_path):
    run = dz.launch(full_disks, 3, args=(str(tmp_path),), record=False)
    by_rank = [[(victim, k, value, w, inside) for victim, k, _, value, w, inside in r] for r in run]
    assert by_rank[0] == by_rank[1] == by_rank[2]
    before, failures = 0.0, {0: 0, 1: 0, 2: 0}
    for rank in range(3):
        for victim, _, words, *_ in run[rank]:
            if words != "nothing":
                assert words.startswith(f"OSError: {tmp_path}: the checkpoint was not saved: ")
                assert "No space left on device" in words and "Fix: free disk space" in words
                failures[victim] += rank == victim
    for victim, k, words, value, found, inside in run[0]:
        late = words != "nothing" and value != before  # the last sync of all: the new one counts
        assert value == found and len(inside) == 1 + late, (victim, k)
        assert value in (before, 1.0 + k)
        if words == "nothing":
            before = value
        elif value != before:
            assert (victim, k) == (0, failures[0] - 1)
            before = value
    assert failures[0] > 8 and failures[1] == failures[2] == 2


# -- a folder that may be read and not written


@contextmanager
def without_rights(folder: Path) -> Iterator[None]:
    """No user may write to the folder. Root still could, so it takes another user id meanwhile."""
    folder.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)


def read_only(path: str, victims: list[int]) -> list:
    """A save that some ranks may not make, and what can be loaded then and after the next."""
    out = []
    checkpoint_folder.claim = lambda *_: None  # the ranks' store, too, is a file that is root's
    for value in (0.0, 1.0):
        model, optimizer = trained(value)
        denied = dist.get_rank() in victims if os.geteuid() == 0 else True
        rights = without_rights(Path(path)) if value and denied else nullcontext()
        with rights:
            dist.barrier()
            words = error_of(save_checkpoint, path, model, optimizer, value=value)
            dist.barrier()
        dist.barrier()
        out.append((words, load_checkpoint(path, *trained(7.0))["value"], len(saves(path))))
    model, optimizer = trained(2.0)
    out.append(error_of(save_checkpoint, path, model, optimizer, value=2.0))
    return out


@pytest.mark.parametrize("victims", [[0], [1], [0, 1]])
def test_a_read_only_folder_is_one_error_and_keeps_its_checkpoint(victims):
    with tempfile.TemporaryDirectory(prefix="ddpz-") as folder:
        os.chmod(folder, 0o755)  # others may look into it
        for first, denied, then in dz.launch(read_only, 2, args=(folder, victims), record=False):
            assert first == ("nothing", 0.0, 1) and then == "nothing"
            words, value, inside = denied
            assert words.startswith(f"OSError: {folder}: the checkpoint was not saved: ")
            assert "Permission denied" in words and words.endswith(
                "save to a folder that every rank can write to."
            )
            assert (value, inside) == (0.0, 1)


class Odd(torch.optim.SGD):
    """Keeps a word in its state."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["word"] = "a" if dist.get_rank() else torch.zeros(())


def one_rank_alone(path: str) -> list[str]:
    """Mistakes that one rank makes and the others do not."""
    me = dist.get_rank()
    model, optimizer = trained(1.0)
    save_checkpoint(path, model, optimizer)
    bad = {0: {"f": lambda: 0, "n": 1}, 1: {"n": 2}, 2: {"n": 2}}[me]
    out = [error_of(save_checkpoint, path, model, optimizer, **bad)]
    module = nn.Linear(2, 2)
    odd = Odd(module.parameters(), lr=0.1)
    module(torch.ones(1, 2)).sum().backward()
    odd.step()
    out.append(error_of(save_checkpoint, path, module, odd))
    out.append(error_of(load_checkpoint, path, nn.Linear(5, 3 + (me == 1))))
    load = torch.load
    if me == 2:
        torch.load = lambda *_, **__: 1 / 0
    out.append(error_of(load_checkpoint, path, model, optimizer))
    torch.load = load
    elsewhere = Path(path, "CURRENT", "x")
    out.append(error_of(save_checkpoint, elsewhere, model, optimizer))
    out.append(error_of(save_safetensors, elsewhere, model))
    dist.barrier()
    load_checkpoint(path, model, optimizer)
    return [*out, str(len(saves(path)))]


def test_what_stops_one_rank_stops_all(tmp_path):
    run = dz.launch(one_rank_alone, 3, args=(str(tmp_path),), record=False)
    patterns = [
        "TypeError: f= is or holds what cannot be saved: .* Fix: for an object, pass its state_di",
        "TypeError: (rank 1: )?the optimizer keeps word='a' for weight; only tensors",
        r"ValueError: (rank 1: )?.* is of another model: weight has shape \[3, 5\] there and \[4",
        "RuntimeError: (rank 2: )?ZeroDivisionError: division by zero",
        "OSError: .*CURRENT/x: the checkpoint was not saved: .*Not a directory.* Fix: free disk",
        "OSError: .*CURRENT/x was not saved: .* Fix: free disk space, or use a writable folder",
        "1",
    ]
    for found in run:
        assert len(found) == len(patterns)
        for words, pattern in zip(found, patterns, strict=True):
            assert re.match(pattern, words), (words, pattern)


# -- kills


def killed(path: str) -> list[tuple[int, float, float, list[str]]]:
    """Children that save are killed before their k-th write, rename or removal; then we load."""
    out, reached = [], True
    model, optimizer = trained(0.0)
    save_checkpoint(path, model, optimizer, value=0.0)
    k = 0
    while reached:
        k += 1
        child = os.fork()
        if child == 0:
            for module, name in ((os, "fsync"), (os, "replace"), (os, "mkdir"), (shutil, "rmtree")):
                setattr(module, name, kill_at(k, getattr(module, name)))
            save_checkpoint(path, *trained(float(k)), value=float(k))
            os._exit(0)
        reached = os.waitpid(child, 0)[1] == signal.SIGKILL
        value = load_checkpoint(path, model, optimizer)["value"]
        out.append((k, value, weight(model), saves(path)))
    return out


calls_left: list[int] = []


def kill_at(k: int, call: Callable) -> Callable:
    calls_left[:] = [k]

    def counted(*args, **kwargs):
        calls_left[0] -= 1
        if not calls_left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    return counted


def test_a_kill_at_each_write_leaves_a_complete_checkpoint(tmp_path):
    found = dz.launch(killed, 1, args=(str(tmp_path),), record=False)[0]
    before, kept = 0.0, 0
    for k, value, weights, inside in found:
        assert value == weights and value in (before, k), (k, value)
        kept += value != before
        before = value
        assert len(inside) <= 3  # what counts, what was killed, and what was to be removed
    assert len(found) > 12 and kept >= 2  # some kills came after the new one counted
    assert len(found[-1][-1]) == 1  # the save that was not killed has cleaned up


# -- other files


@pytest.fixture
def alone(tmp_path) -> tuple[Path, nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained(1.0)
    save_checkpoint(tmp_path / "c", model, optimizer)
    return tmp_path / "c", model, optimizer


def test_only_saves_are_removed(alone):
    path, model, optimizer = alone
    kept = [path / "0123456789abcdef0123456789abcdef", path / "save-me", path / "notes"]
    for folder in (*kept, path / f"save-{'a' * 32}"):
        folder.mkdir()
        (folder / "thesis.tex").write_text("\\end{document}")
    for _ in range(2):
        save_checkpoint(path, model, optimizer)
    assert all((folder / "thesis.tex").exists() for folder in kept)
    assert len(saves(path)) == 1 + len(kept)


# -- damage


def test_a_damaged_file_is_named(alone):
    path, model, optimizer = alone
    manifest = path / (path / "CURRENT").read_text() / "manifest.json"
    text = manifest.read_text()
    for file, damaged in [
        (path / "CURRENT", b""),
        (path / "CURRENT", b"\xff\xfe\x00"),
        (path / "CURRENT", b"../../home"),
        (path / "CURRENT", f"save-{'0' * 32}".encode()),
        (manifest, b""),
        (manifest, b"[]"),
        (manifest, b"\xff\xfe"),
        (manifest, text[: len(text) // 2].encode()),
        (manifest, b'{"world": 1, "shapes": {}}'),
    ]:
        whole = file.read_bytes()
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{file.name} is damaged: .*Fix: ") as found:
            load_checkpoint(path, model, optimizer)
        assert str(file) in str(found.value)
        file.write_bytes(whole)
    load_checkpoint(path, model, optimizer)
    (path / "CURRENT").write_bytes(b"damaged")
    save_checkpoint(path, model, optimizer)  # a new save does not need the old list
    load_checkpoint(path, model, optimizer)


def test_a_single_number_has_a_shape():
    with pytest.raises(ValueError, match=r"x has shape \[\] there and \[2\] in the model"):
        check_shapes({"x": [2]}, {"x": []}, "the state dict")
    with pytest.raises(ValueError, match=r"x has shape none there and \[\] in the model"):
        check_shapes({"x": []}, {}, "the state dict")


# -- dtypes


def to_half(path: str) -> list[set[torch.dtype]]:
    out = []
    for source, target in ((3, 0), (1, 3)):
        save_checkpoint(path, *trained(1.0, source))
        model, optimizer = trained(2.0, target, dtype=torch.bfloat16)
        load_checkpoint(path, model, optimizer)
        model(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()  # fails if a state has another dtype than its parameter
        states = [s for s in optimizer.state.values() if s]
        out += [{s[key].dtype for s in states} for key in ("exp_avg", "exp_avg_sq", "step")]
        out[-3:] = [list(kinds) for kinds in out[-3:]]
    return out


def test_the_optimizers_state_takes_its_parameters_dtype(tmp_path):
    half, single = [torch.bfloat16], [torch.float32]
    for found in dz.launch(to_half, 2, args=(str(tmp_path),), record=False):
        assert found == [half, half, single] * 2
