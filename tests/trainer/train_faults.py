"""Run by test_train_faults.py: `torchrun`, and ranks that train until one of them kills itself.

    python train_faults.py torchrun KILLS LIMIT FOLDER word...     torchrun itself, which starts
    train_faults.py KILLS LIMIT FOLDER word...                     this as each rank

Where a kill falls is drawn before its attempt, from the attempt's number: at the n-th call of a
Python function in `ddpz train`, n below LIMIT, in the library, in torch or below. So it hits
anything, a save or a load too, and does not depend on how fast the machine is.

Ranks come from a fork server that has torch imported (torchrun's own options --run-path and
--start-method), so that a restart costs a tenth of a second. All calls of `ddpz train` on rank 0,
and those before its first update, are counted where no kill is due: LIMIT comes from there.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

WORLD = 2
PRELOADED = ["ddpz_lite.trainer.loop", "torch.distributed.run", "torch._dynamo"]
OPTIONS = ["--standalone", "--run-path", "--start-method=forkserver", "--monitor-interval=0.02"]


def torchrun(kills: str, *words: str) -> None:
    from torch.distributed.run import main

    multiprocessing.set_forkserver_preload(PRELOADED)
    many = [f"--nproc-per-node={WORLD}", f"--max-restarts={kills}"]
    main([*OPTIONS, *many, os.path.abspath(__file__), kills, *words])


def rank(kills: str, limit: str, folder: str, *words: str) -> None:
    from ddpz_lite.course.cli import main
    from ddpz_lite.trainer import loop

    attempt, me = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    draw = random.Random(attempt)
    victim, point = draw.randrange(WORLD), draw.randrange(1, int(limit))
    kills_now = attempt < int(kills) and me == victim
    calls, before_update = 0, 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls, before_update
        calls += event == "call"
        if frame.f_code is loop.update.__code__ and not before_update:
            before_update = calls
        if kills_now and calls == point:
            at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            with open(Path(folder, "kills"), "a") as file:
                file.write(f"{attempt} {me} {point} {at}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    if kills_now or (attempt == int(kills) and me == 0):
        sys.setprofile(count)
    status = main(list(words))
    sys.setprofile(None)
    if status:
        sys.exit(status)
    if me == 0:
        Path(folder, "calls").write_text(f"{before_update} {calls}")


if __name__ == "__main__":
    torchrun(*sys.argv[2:]) if sys.argv[1] == "torchrun" else rank(*sys.argv[1:])
