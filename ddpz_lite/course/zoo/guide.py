"""What is known about each bug of the zoo, read from the TOML file next to its program."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

from ddpz_lite.course.show.quizzes import Answer
from ddpz_lite.launcher import Run

BUGS = resources.files(__package__) / "bugs"
COUNT = 20


@dataclass(frozen=True)
class Bug:
    """One bug.

    thread   the public issue or pull request in which a user reported it: "pytorch/pytorch#33148"
    met      what that thread reports
    fix      the parts of the program that the fix replaces, each with its replacement
    looks    for a program that ends: the tools to inspect it with, by their names in TOOLS; any
             other name is a key of what the program returns
    same     for a program that ends: the key under which all ranks, and one process, should return
             the same
    """

    title: str
    symptom: str
    answers: tuple[Answer, ...]
    found_by: str
    lesson: str
    thread: str
    met: str
    fix: tuple[tuple[str, str], ...]
    world: int = 2
    looks: tuple[str, ...] = ()
    same: str | None = None

    @property
    def line(self) -> int:
        """The program's line that the right answer names."""
        text = next(answer.text for answer in self.answers if answer.right)
        return int(re.match(r"line (\d+):", text)[1])

    @property
    def url(self) -> str:
        """The thread's address; the host redirects a pull request's number to its page."""
        repository, _, number = self.thread.partition("#")
        return f"https://github.com/{repository}/issues/{number}"


def _read(number: int) -> Bug:
    facts = tomllib.loads((BUGS / f"bug_{number:02}.toml").read_text(encoding="utf-8"))
    facts["answers"] = tuple(Answer(**{"right": False, **one}) for one in facts["answers"])
    facts["fix"] = tuple((one["old"], one["new"]) for one in facts["fix"])
    facts["looks"] = tuple(facts.get("looks", ()))
    return Bug(**facts)


# ---- tools: each takes a run on several ranks and one of one process, and returns a text ----


def calls(found: Run, _: Run, __: str) -> str:
    """How often each rank called what."""
    by_rank = defaultdict(Counter)
    for record in found.ledger:
        by_rank[record.rank][f"{record.op} of {record.elements} {record.dtype}"] += 1
    rows = (
        (rank, ", ".join(f"{times} x {what}" for what, times in counts.most_common()))
        for rank, counts in sorted(by_rank.items())
    )
    return "\n".join(f"rank {rank}: {row}" for rank, row in rows)


def checksums(found: Run, _: Run, same: str) -> str:
    """A checksum of each rank's value."""
    sums = [hashlib.sha256(result[same].numpy().tobytes()).hexdigest()[:12] for result in found]
    return "\n".join(f"rank {rank}: {value}" for rank, value in enumerate(sums))


def one_process(found: Run, alone: Run, same: str) -> str:
    """How far the weights are from those of one process that saw the whole batch."""
    off = (found[0][same] - alone[0][same]).abs().max().item()
    return f"{same}, largest difference from one process: {off:.2g}"


def twice(found: Run, _: Run, __: str) -> str:
    """How many samples more than one rank has seen."""
    seen = [sample for result in found for sample in result["seen"]]
    return f"{len(seen)} seen, {len(set(seen))} different"


def returned(key: str) -> Callable[[Run, Run, str], str]:
    """A tool: what each rank, and one process, returned under a key."""

    def look(found: Run, alone: Run, _: str) -> str:
        rows = [f"rank {rank}: {_short(result[key])}" for rank, result in enumerate(found)]
        return "\n".join([*rows, f"one process: {_short(alone[0][key])}"])

    return look


TOOLS = {"calls": calls, "checksums": checksums, "one process": one_process, "samples": twice}


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and value and isinstance(value[0], float):
        return " ".join(f"{x:.4g}" for x in value)
    return str(value)


GUIDE: dict[int, Bug] = {number: _read(number) for number in range(1, COUNT + 1)}
