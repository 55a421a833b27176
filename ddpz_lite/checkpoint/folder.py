"""The folder of a checkpoint: a save is written to a new folder, and one rename makes it count.

path/CURRENT                   the name of the folder that counts; replaced last, in one rename
path/save-<id>/                one save
path/save-<id>/manifest.json   world size, shapes, and the SHA-256 of every other file

A save removes all other folders called save-<32 hex digits>: the one that counted before, and what
a killed save left. Nothing else in the path is removed. One job saves to a path at a time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddpz_lite.checkpoint.all_ranks import on_all_ranks
from ddpz_lite.checkpoint.files import sha256, sync, write
from ddpz_lite.strategies.comm import Comm

NAME = re.compile(r"save-[0-9a-f]{32}")


# -- writing


@contextmanager
def saving(root: Path, shapes: dict[str, list[int]], comm: Comm) -> Iterator[Path]:
    """A new folder to write to; it counts once the block has ended without error on all ranks.

    If the block fails, what was written is removed and the checkpoint before it still counts.
    Raises OSError if the files cannot be written, RuntimeError if another group saves here.
    """
    try:
        ranks = comm.gather_objects(dist.get_rank() if dist.is_initialized() else 0)
        begin = (lambda: _begin(root, ranks)) if index(comm) == 0 else (lambda: "")
        folder = root / comm.gather_objects(on_all_ranks(comm, begin))[0]
        try:
            yield folder
            _publish(folder, shapes, comm)
        except BaseException:
            if index(comm) == 0:
                _discard(folder)
            raise
        if index(comm) == 0:
            _remove_others(root)
        comm.gather_objects(None)
    except OSError as error:
        raise OSError(
            f"{root}: the checkpoint was not saved: {error}. The previous one is unchanged. Fix: "
            "free disk space, or save to a folder that every rank can write to."
        ) from error


def _begin(root: Path, ranks: list[int]) -> str:
    """Make the folder of this save and return its name."""
    root.mkdir(parents=True, exist_ok=True)
    claim(root, ranks)
    _remove_others(root)
    name = f"save-{uuid.uuid4().hex}"
    (root / name).mkdir()
    return name


def _publish(folder: Path, shapes: dict[str, list[int]], comm: Comm) -> None:
    """Write the manifest of a folder that all ranks have filled, and let it count."""
    comm.gather_objects(None)  # all files are there
    files = sorted(path.name for path in folder.iterdir())
    local = files[index(comm) :: comm.size]
    sums = comm.gather_objects(on_all_ranks(comm, lambda: {n: sha256(folder / n) for n in local}))

    def publish() -> None:
        manifest = {"world": comm.size, "shapes": shapes}
        manifest["sha256"] = {name: value for some in sums for name, value in some.items()}
        write(folder / "manifest.json", json.dumps(manifest, indent=1).encode())
        sync(folder)
        root = folder.parent
        sync(root)
        write(root / "CURRENT.new", folder.name.encode())
        os.replace(root / "CURRENT.new", root / "CURRENT")
        sync(root)

    on_all_ranks(comm, publish if index(comm) == 0 else lambda: None)


def _discard(folder: Path) -> None:
    """Remove a save that failed, unless it counts already: then only its last sync has failed."""
    (folder.parent / "CURRENT.new").unlink(missing_ok=True)
    if _named(folder.parent) != folder.name:
        shutil.rmtree(folder, ignore_errors=True)  # the next save tries again


def claim(path: Path, ranks: list[int]) -> None:
    """Raise RuntimeError if other ranks of this job have saved another model to this path.

    Only the store through which the groups met is visible to both of them.
    """
    if not dist.is_initialized():
        return
    local = ", ".join(map(str, sorted(ranks)))
    store = dist.distributed_c10d._get_default_store()
    first = store.compare_set(f"ddpz saves to {path.resolve()}", "", local).decode()
    if first != local:
        raise RuntimeError(
            f"{path}: ranks {first} of this job save here, and ranks {local} hold another model. "
            "Fix: use one path for each group of ranks."
        )


def _named(root: Path) -> str | None:
    """The folder that CURRENT names; None if CURRENT is missing or damaged."""
    try:
        name = (root / "CURRENT").read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    return name if NAME.fullmatch(name) else None


def _remove_others(root: Path) -> None:
    """Remove all saves but the one that counts; what cannot be removed stays for the next save."""
    current = _named(root)
    for folder in root.iterdir() if current else ():
        if NAME.fullmatch(folder.name) and folder.name != current:
            shutil.rmtree(folder, ignore_errors=True)


# -- reading


def checked(root: Path, comm: Comm) -> tuple[Path, dict[str, Any]]:
    """The folder that counts, checked, and its manifest.

    Raises FileNotFoundError if there is none, ValueError if one of its files is damaged.
    """
    find = (lambda: _find(root)) if index(comm) == 0 else (lambda: None)
    name, manifest = comm.gather_objects(on_all_ranks(comm, find))[0]
    folder = root / name
    local = sorted(manifest["sha256"])[index(comm) :: comm.size]
    on_all_ranks(comm, lambda: verify(folder, {n: manifest["sha256"][n] for n in local}))
    return folder, manifest


def _find(root: Path) -> tuple[str, dict[str, Any]]:
    """The name of the folder that counts, and its manifest."""
    try:
        name = (root / "CURRENT").read_bytes().decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{root} contains no complete checkpoint. Fix: save one there with save_checkpoint(), "
            "or check the path."
        ) from None
    if not NAME.fullmatch(name):
        raise ValueError(_damaged(root / "CURRENT", f"it contains {name[:50]!r}"))
    path = root / name / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        _ = manifest["world"], manifest["shapes"], manifest["sha256"]["extra.pt"]
    except FileNotFoundError:
        raise ValueError(_damaged(root / "CURRENT", f"{path} is missing")) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(_damaged(path, f"it is not a manifest ({error})")) from error
    return name, manifest


def verify(folder: Path, sums: dict[str, str]) -> None:
    """Raise ValueError for the first of these files that is damaged or missing."""
    for name, expected in sums.items():
        if not (folder / name).is_file():
            raise ValueError(_damaged(folder / name, "it is missing"))
        if sha256(folder / name) != expected:
            raise ValueError(_damaged(folder / name, "its SHA-256 is not the one in manifest.json"))


def _damaged(path: Path, problem: str) -> str:
    return f"{path} is damaged: {problem}. Fix: copy the checkpoint again, or load an older one."


def index(comm: Comm) -> int:
    """This rank's index in what `gather_objects` returns: replicas of a mesh count too."""
    replica = dist.get_rank(comm.replicas) if comm.replicas is not None else 0
    return replica * comm.world + comm.rank
