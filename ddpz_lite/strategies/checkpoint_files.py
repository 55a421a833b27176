"""The files of a checkpoint: written so that they survive a kill, and checked before they are read.

path/CURRENT               the name of the folder that counts; replaced last, in one rename
path/<name>/               tensors (torch.distributed.checkpoint)
path/<name>/extra.pt       options of the groups, loss scale, what the caller passed
path/<name>/rng-<r>.pt     random generators of rank r: restored where the world is the same
path/<name>/manifest.json  shapes, and the SHA-256 of every file
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from .comm import Comm


def pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise TypeError(
            "extra may hold numbers, strings, tensors, and lists, tuples and dicts of them; for "
            f"an object, pass its state_dict(). ({error})"
        ) from error
    return buffer.getvalue()


def write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Make the names in a folder durable; Windows has no such call."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish(folder: Path, shapes: dict[str, list[int]], comm: Comm) -> None:
    """Make a folder that is complete the one that counts, and remove older ones; on every rank."""
    comm.gather_objects(None)  # all files are there
    files = sorted(path.name for path in folder.iterdir())
    sums = {name: sha256(folder / name) for name in files[comm.rank :: comm.world]}
    sums = {name: value for some in comm.gather_objects(sums) for name, value in some.items()}
    if comm.rank == 0:
        manifest = {"world": comm.world, "shapes": shapes, "sha256": sums}
        write(folder / "manifest.json", json.dumps(manifest, indent=1).encode())
        sync(folder)
        root = folder.parent
        write(root / "CURRENT.new", folder.name.encode())
        os.replace(root / "CURRENT.new", root / "CURRENT")
        sync(root)
        for old in root.glob("[0-9a-f]" * 32 + "/"):  # no other folder that may be there
            if old.name != folder.name:
                shutil.rmtree(old)
    comm.gather_objects(None)


def current(root: Path, comm: Comm) -> tuple[Path, dict[str, Any]]:
    """The folder that counts, and its manifest; on every rank.

    Raises FileNotFoundError if there is none, ValueError if one of its files is damaged.
    """
    if not (root / "CURRENT").is_file():
        raise FileNotFoundError(
            f"{root} holds no complete checkpoint. Cure: save one there with save_checkpoint(), "
            "or check the path."
        )
    folder = root / (root / "CURRENT").read_text().strip()
    manifest = json.loads((folder / "manifest.json").read_text())
    verify(folder, manifest["sha256"], comm)
    return folder, manifest


def verify(folder: Path, sums: dict[str, str], comm: Comm) -> None:
    """Each rank reads its share of the files; all ranks raise if one is damaged."""
    mine = sorted(sums)[comm.rank :: comm.world]
    bad = [n for n in mine if not (folder / n).is_file() or sha256(folder / n) != sums[n]]
    bad = [name for some in comm.gather_objects(bad) for name in some]
    if bad:
        raise ValueError(
            f"{folder / bad[0]} is damaged: its SHA-256 is not the one in manifest.json. Cure: "
            "copy the checkpoint again, or load an older one."
        )


def rng_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))
