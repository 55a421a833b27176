"""`ddpz train`: train a GPT on a text, on ranks that it starts, or on those that torchrun started.

Whatever can be checked is checked before the first rank is started, so that a wrong option is one
line and not a rank's traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any

from ddpz_lite.course.cli.shared import UserError
from ddpz_lite.trainer.recipe import Recipe, flag_of

RANKS = 2  # where torchrun has not decided
LONGEST = 30 * 24 * 3600.0  # seconds that the launcher lets a job run
APART = 60.0  # seconds that ranks may be from each other when one has died
RESUME = "Continue with --resume: the same command then starts from the last save."
EXAMPLE = "ddpz train --ranks 2 --stage 2 --steps 100"
MORE = """
another:  ddpz train --text book.txt --precision bf16 --width 256 --layers 6 --accumulate 4
          ddpz train --mesh 2x2x2 --stage 1 --accumulate 4 --batch 2
          ddpz train --mesh data=2,context=2 --stage 3 --context 512
          ddpz train --mesh data=2,expert=2 --experts 8 --top-k 2 --stage 1
          ddpz train --ranks 3 --survive
          ddpz train --stage 3 --checkpoint runs/a --save-every 50 --resume
          torchrun --nproc-per-node 4 --max-restarts 3 -m ddpz_lite train \\
              --stage 3 --checkpoint runs/a --save-every auto --resume

With --survive the remaining ranks continue when one dies: an update that no rank had done is
repeated by fewer ranks. The last two commands continue from the newest good checkpoint, bit for
bit, after any kind of death.
"""


def add_options(command: argparse.ArgumentParser) -> None:
    """The recipe's options, by section, and --ranks."""
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog += MORE
    sections: dict[str, Any] = {}
    for option in fields(Recipe):
        about, name = option.metadata, option.metadata["section"]
        if name not in sections:
            sections[name] = command.add_argument_group(name)
        how: dict[str, Any] = {"action": "store_true"}
        words = about["help"]
        if about["kind"] is not bool:
            how = {"type": about["kind"], "choices": about["choices"], "default": option.default}
            if not about["choices"]:
                how["metavar"] = about["metavar"]
            words += " (default %(default)s)" * (option.default is not None)
        sections[name].add_argument(flag_of(option.name), help=words, **how)
    sections["ranks"].add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help=f"processes on this machine (default {RANKS}); under torchrun, those it started",
    )


def run(options: argparse.Namespace) -> int:
    """Train, and return 0; 1 if a rank failed. Raises UserError for what its user can put right."""
    joins = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()  # torchrun's, or the like
    try:
        try:
            recipe = Recipe(**{o.name: getattr(options, o.name) for o in fields(Recipe)})
            check(recipe)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            raise UserError(str(error)) from error
        if joins and recipe.survive:
            raise UserError(
                "--survive is for ranks that this command starts; torchrun ends all with the "
                "first. Fix: without torchrun, or --checkpoint DIR --resume and its --max-restarts"
            )
        return join(recipe) if joins else start(recipe, options.ranks)
    except UserError:
        if joins and os.environ.get("LOCAL_RANK", "0") != "0":
            return 2  # all ranks find the same: one of them says it
        raise


def check(recipe: Recipe) -> None:
    """Find what would stop the run before a rank is started.

    Raises ValueError or OSError for a text that is not there or too short, and for a folder that
    holds another run; ModuleNotFoundError if TensorBoard is asked for and not installed.
    """
    from ddpz_lite.data import corpus
    from ddpz_lite.trainer.log import summary_writer
    from ddpz_lite.trainer.saving import complete

    text = corpus(recipe.text)
    for split in ("train", "validation") if recipe.validate else ("train",):
        text.windows(recipe.context, split)
    if recipe.tensorboard:
        summary_writer()
    if recipe.profile:
        Path(recipe.profile).mkdir(parents=True, exist_ok=True)
    if recipe.checkpoint:
        Path(recipe.checkpoint).mkdir(parents=True, exist_ok=True)
        try:
            tempfile.TemporaryFile(dir=recipe.checkpoint).close()
        except OSError as error:
            raise OSError(
                f"{recipe.checkpoint} cannot be written to: {error.strerror}. Fix: another "
                "--checkpoint folder, or room and rights in this one."
            ) from error
        found = complete(recipe.checkpoint)
        if found and not recipe.resume:
            raise ValueError(
                f"{recipe.checkpoint} holds checkpoints already, the newest {found[0].name}. "
                "Fix: --resume continues from there; another --checkpoint starts from scratch."
            )


def start(recipe: Recipe, ranks: int | None) -> int:
    """Train on ranks of this machine."""
    import ddpz_lite as dz

    on_mesh = prod(recipe.axes.values()) if recipe.axes else None
    if None not in (ranks, on_mesh) and ranks != on_mesh:
        raise UserError(f"--mesh {recipe.mesh} has {on_mesh} ranks, and --ranks says {ranks}.")
    ranks = next(given for given in (ranks, on_mesh, RANKS) if given is not None)
    if not 1 <= ranks <= 64:
        raise UserError(f"--ranks takes 1 to 64, not {ranks}; for more machines, torchrun.")
    try:
        if recipe.survive:
            with tempfile.TemporaryDirectory(prefix="ddpz-") as folder:
                args, how = (recipe, f"{folder}/store"), {"record": False, "survivors": True}
                job = dz.launch(survive, ranks, args=args, timeout=LONGEST, **how)
        else:
            job = dz.launch(train_or_problem, ranks, args=(recipe,), timeout=LONGEST, record=False)
    except dz.RankFailed as error:
        print(f"ddpz train: {error}", file=sys.stderr)
        if recipe.checkpoint:
            print(RESUME, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if recipe.checkpoint:
            print(RESUME, file=sys.stderr)
        raise
    if problem := next(filter(None, job), None):
        raise UserError(problem)
    return 0


def join(recipe: Recipe) -> int:
    """Train as one of the ranks that another program started."""
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    import ddpz_lite as dz
    from ddpz_lite.launcher.devices import plan

    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if torch.cuda.is_available():
        torch.cuda.set_device(dz.device())
    store, rank, world_size = next(rendezvous("env://"))
    if local_ranks == world_size:
        # [Note: restarts] torchrun keeps one store for all its restarts. A rank that starts early
        # would find the addresses of the dead, so each restart has its own keys. With several
        # machines the count differs between them; there, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    backend = plan(local_ranks).backend
    meet(store, rank, world_size)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    except RuntimeError as error:
        raise UserError(unconnected(error)) from error
    problem = train_or_problem(recipe)
    dist.destroy_process_group()
    if problem is not None:
        raise UserError(problem)
    return 0


def meet(store: Any, rank: int, world_size: int, wait: float = 300.0) -> None:
    """Wait until all ranks have come to the store, at most `wait` seconds.

    Raises UserError that names who has come, from which machine, and who has not.
    """
    import socket
    from datetime import timedelta

    import torch.distributed as dist

    store.set(f"come-{rank}", socket.gethostname())
    names = [f"come-{other}" for other in range(world_size)]
    try:
        store.wait(names, timedelta(seconds=wait))
    except dist.DistStoreError as error:
        come = {other: store.get(name).decode() for other, name in enumerate(names)
                if store.check([name])}  # fmt: skip
        missing = ", ".join(str(other) for other in range(world_size) if other not in come)
        there = ", ".join(f"{other} ({host})" for other, host in come.items())
        raise UserError(
            f"rank {rank} has waited {wait:g} s. Come have ranks {there}; missing: {missing}. "
            "Fix: the same torchrun line on every node, with one --rdzv-id and one --rdzv-endpoint"
            " that is the address of a node, not localhost; its port open in the firewall."
        ) from error


def unconnected(error: RuntimeError) -> str:
    """The words for ranks that have met in the store, and cannot reach each other."""
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    given = f"GLOO_SOCKET_IFNAME is {named}" if named else "GLOO_SOCKET_IFNAME is not set"
    return (
        f"the ranks have met, and cannot reach each other: {str(error).splitlines()[0]} ({given}). "
        "Fix: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, on each node, to the interface that "
        "leads to the others (`ip route get ADDRESS` names it)."
    )


def survive(recipe: Recipe, store: str) -> str | None:
    """What each rank runs that may outlive another; `store` is a file by which they meet."""
    import torch.distributed as dist

    from ddpz_lite.trainer.survivors import Survivors

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    team = Survivors(dist.FileStore(store, world_size), rank, world_size, wait=APART)
    return train_or_problem(recipe, team)


def train_or_problem(recipe: Recipe, team: Any = None) -> str | None:
    """What each rank runs. A problem that all ranks found alike comes back as its sentence."""
    from ddpz_lite.trainer.loop import train
    from ddpz_lite.trainer.saving import TrainingError

    try:
        train(recipe, team)
    except TrainingError as error:
        return str(error)
    return None
