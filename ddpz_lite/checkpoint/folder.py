"""The folder of a checkpoint: who may write to it, which part of it counts, and what is removed.

path/CURRENT               the name of the folder that counts; replaced last, in one rename
path/LOCK                  held by the job that saves
path/save-<id>/            one save; BEGUN in it says that it is ours
path/save-<id>/manifest.json   shapes, the SHA-256 of every other file, and of this list itself

[Note: who removes what] A save removes the one that counted before it, and what a killed one left:
folders with our name and our file BEGUN inside. The path may hold files of its user too, so nothing
else is ever removed. A reader holds its folder by a lock on the manifest; a save that would remove
it leaves that to a later one.

Locks are the kernel's (flock), so they end with the process that holds them. Where a file system
has none, two jobs that save to one folder at the same moment are not told apart.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddpz_lite.checkpoint.all_ranks import on_all_ranks
from ddpz_lite.checkpoint.files import sha256, sync, write
from ddpz_lite.strategies.comm import Comm

if sys.platform != "win32":
    import fcntl

NAME = re.compile(r"(save-)?[0-9a-f]{32}")  # without "save-" before locks came
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
_last: dict[str, str] = {}  # {folder: the save in it that this process wrote or read last}


# -- writing


@contextmanager
def saving(root: Path, shapes: dict[str, list[int]], comm: Comm) -> Iterator[Path]:
    """A new folder to write to; once the block has ended well on all ranks, it is what counts.

    If the block fails, what was written is removed and the checkpoint before it still counts.
    Raises OSError if the files cannot be written, RuntimeError if another job or group saves here.
    """
    lock: list[int] = []
    try:
        ranks = comm.gather_objects(dist.get_rank() if dist.is_initialized() else 0)
        begin = (lambda: _begin(root, ranks, lock)) if index(comm) == 0 else (lambda: ("", None))
        name, before = comm.gather_objects(on_all_ranks(comm, begin))[0]
        folder = root / name
        try:
            yield folder
            _complete(folder, shapes, comm)
        except BaseException:
            if index(comm) == 0:
                _give_up(folder)
            raise
        if index(comm) == 0:
            _last[_key(root)] = name
            _remove_old(root, before)
        comm.gather_objects(None)
    except OSError as error:
        raise OSError(
            f"{root}: the checkpoint was not saved: {error}. The one before it is as it was. Fix: "
            "make room, or save to a folder that every rank can write to."
        ) from error
    finally:
        for descriptor in lock:
            os.close(descriptor)


def _begin(root: Path, ranks: list[int], lock: list[int]) -> tuple[str, str | None]:
    """Take the path for this save and make its folder. Returns its name, and what counts now."""
    root.mkdir(parents=True, exist_ok=True)
    claim(root, ranks)
    lock.append(os.open(root / "LOCK", os.O_RDWR | os.O_CREAT, 0o666))
    if not held_lock(lock[0], exclusive=True):
        raise RuntimeError(
            f"{root}: another job is saving here at this moment. Fix: a folder for each job."
        )
    before, last = _named(root), _last.get(_key(root))
    if None not in (before, last) and before != last:
        raise RuntimeError(
            f"{root}: another job has saved here since this one did, and would lose its "
            "checkpoint. Fix: a folder for each job; or load what is there first."
        )
    _remove_old(root, None)
    name = f"save-{uuid.uuid4().hex}"
    try:
        (root / name).mkdir()
        write(root / name / "BEGUN", b"by ddpz_lite\n")
    except OSError:
        shutil.rmtree(root / name, ignore_errors=True)
        raise
    return name, before


def _complete(folder: Path, shapes: dict[str, list[int]], comm: Comm) -> None:
    """Write the manifest of a folder that all ranks have filled, and let it count."""
    comm.gather_objects(None)  # all files are there
    files = sorted(path.name for path in folder.iterdir())
    local = files[index(comm) :: comm.size]
    sums = comm.gather_objects(on_all_ranks(comm, lambda: {n: sha256(folder / n) for n in local}))

    def publish() -> None:
        manifest = {"world": comm.size, "shapes": shapes}
        manifest["sha256"] = {name: value for some in sums for name, value in some.items()}
        manifest["itself"] = _sum_of(manifest)
        write(folder / "manifest.json", json.dumps(manifest, indent=1).encode())
        sync(folder)
        root = folder.parent
        sync(root)
        write(root / "CURRENT.new", folder.name.encode())
        os.replace(root / "CURRENT.new", root / "CURRENT")
        sync(root)

    on_all_ranks(comm, publish if index(comm) == 0 else lambda: None)


def _give_up(folder: Path) -> None:
    """Remove a save that failed, unless it counts already: then only its last sync has failed."""
    (folder.parent / "CURRENT.new").unlink(missing_ok=True)
    if _named(folder.parent) != folder.name:
        shutil.rmtree(folder, ignore_errors=True)  # the next save tries again


def claim(path: Path, ranks: list[int]) -> None:
    """Raise RuntimeError if other ranks of this job have saved to this path, another model's.

    Nothing sees both groups of ranks but the store through which they met.
    """
    if not dist.is_initialized():
        return
    local = ", ".join(map(str, sorted(ranks)))
    store = dist.distributed_c10d._get_default_store()
    first = store.compare_set(f"ddpz saves to {_key(path)}", "", local).decode()
    if first != local:
        raise RuntimeError(
            f"{path}: ranks {first} of this job save here, and ranks {local} hold another model. "
            "Fix: a path for each group of ranks."
        )


def _named(root: Path) -> str | None:
    """What CURRENT names, if it names anything: its damage must not stop a new save."""
    try:
        name = (root / "CURRENT").read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    return name if NAME.fullmatch(name) else None


def _remove_old(root: Path, before: str | None) -> None:
    """Remove the save that counted before, and others of ours that count no more.

    What is being read, or cannot be removed now, is left to the next save.
    """
    current = _named(root)
    ours = {mark.parent.name for mark in root.glob("save-*/BEGUN")} | {before}
    for name in filter(NAME.fullmatch, ours - {current, None} if current else ()):
        manifest = root / name / "manifest.json"
        lock = os.open(manifest, os.O_RDWR) if os.access(manifest, os.W_OK) else None
        if lock is None or held_lock(lock, exclusive=True):
            shutil.rmtree(root / name, ignore_errors=True)
        if lock is not None:
            os.close(lock)


# -- reading


@contextmanager
def reading(root: Path, comm: Comm) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The folder that counts, checked, and its manifest; no save removes it meanwhile.

    Raises FileNotFoundError if there is none, ValueError if one of its files is damaged.
    """
    lock: list[int] = []
    try:
        find = (lambda: _find(root, lock)) if index(comm) == 0 else (lambda: None)
        name, manifest = comm.gather_objects(on_all_ranks(comm, find))[0]
        folder = root / name
        local = sorted(manifest["sha256"])[index(comm) :: comm.size]
        on_all_ranks(comm, lambda: verify(folder, {n: manifest["sha256"][n] for n in local}))
        yield folder, manifest
        if index(comm) == 0:
            _last[_key(root)] = name
    finally:
        for descriptor in lock:
            os.close(descriptor)


def _find(root: Path, lock: list[int]) -> tuple[str, dict[str, Any]]:
    """The name of the folder that counts, and its manifest, whose lock is held from now on."""
    while True:
        name = _current(root)
        manifest = root / name / "manifest.json"
        try:
            descriptor = os.open(manifest, os.O_RDONLY)
        except FileNotFoundError:
            if name != _current(root):
                continue  # a save has just removed it, after it had let another count
            raise ValueError(_damaged(root / "CURRENT", f"{manifest} is not there")) from None
        lock.append(descriptor)
        held_lock(descriptor, exclusive=False)
        if manifest.exists():
            return name, _manifest(manifest)
        os.close(lock.pop())  # removed between the two lines above


def _current(root: Path) -> str:
    try:
        name = (root / "CURRENT").read_bytes().decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{root} holds no complete checkpoint. Fix: save one there with save_checkpoint(), "
            "or check the path."
        ) from None
    if not NAME.fullmatch(name):
        raise ValueError(_damaged(root / "CURRENT", f"it says {name[:50]!r}"))
    return name


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
        itself = manifest.pop("itself")
        if itself == _sum_of(manifest):
            return manifest
        problem = "it is not what was saved"
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        problem = f"it is no manifest ({error})"
    raise ValueError(_damaged(path, problem))


def verify(folder: Path, sums: dict[str, str]) -> None:
    """Raise ValueError for the first of these files that is damaged or not there."""
    for name, expected in sums.items():
        if not (folder / name).is_file():
            raise ValueError(_damaged(folder / name, "it is not there"))
        if sha256(folder / name) != expected:
            raise ValueError(_damaged(folder / name, "its SHA-256 is not the one in manifest.json"))


def _damaged(path: Path, problem: str) -> str:
    return f"{path} is damaged: {problem}. Fix: copy the checkpoint again, or load an older one."


def _sum_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# -- small things


def index(comm: Comm) -> int:
    """This rank's place in what `gather_objects` returns: replicas of a mesh count too."""
    replica = dist.get_rank(comm.replicas) if comm.replicas is not None else 0
    return replica * comm.world + comm.rank


def held_lock(descriptor: int, exclusive: bool) -> bool:
    """Take the lock of an open file, until it is closed. False if another process has it.

    A shared lock is waited for: nobody holds an exclusive one on a manifest for long.
    """
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def _key(path: Path) -> str:
    return str(path.resolve())
