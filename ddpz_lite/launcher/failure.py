"""Find the root cause of a failed job and explain it in one sentence.

When one rank fails, the others soon fail too, because their peer is gone. So failures are ranked: a
rank's own exception or death comes first, the earliest if there are several. "Connection closed by
peer" is a consequence and comes last.
"""

from __future__ import annotations

import linecache
import os
import re
import signal
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from ddpz_lite.launcher.rank import SETUP
from ddpz_lite.wire import callsite
from ddpz_lite.wire.stall import name_ranks

PEER_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|gloo/transport"
    r"|NCCL.*(remote|system|internal) error|ncclRemoteError",
    re.IGNORECASE,
)
STACK = "Stack (most recent call first)"
CRASH = "Fatal Python error"
THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
STACK_LINE = re.compile(
    r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>\S+)', re.MULTILINE
)


class RankFailed(RuntimeError):
    """A job of `launch` failed. `str(error)` is the full report.

    rank: the rank where it began. kind: "raised", "mismatch", "exited", "killed", "stalled" or
    "timeout". where: the line of user code ("cell 12:3"), or None if unknown. ledger: what was
    recorded until then.
    """

    def __init__(
        self,
        message: str,
        rank: int,
        kind: str,
        where: str | None = None,
        ledger: list | None = None,
    ):
        super().__init__(message)
        self.rank, self.kind, self.where, self.ledger = rank, kind, where, ledger or []

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.rank, self.kind, self.where, self.ledger)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message without the launcher's frames."""
        return [f"RankFailed: {self}"]


@dataclass
class Failure:
    """The failure of one rank, as the launcher received it."""

    rank: int
    kind: str
    at: float  # time.monotonic()
    sentence: str
    where: str | None = None
    traceback: str = ""
    consequence: bool = False  # caused by another rank's failure
    also: tuple[int, ...] = ()  # other ranks with the same failure

    @property
    def key(self) -> tuple:
        """Equal for failures of several ranks that are one mistake."""
        return (self.kind,) if self.kind == "mismatch" else (self.sentence, self.where)

    @property
    def short(self) -> str:
        """The failure in a few words, for the list of ranks."""
        if self.consequence:
            place = f"at {self.where}" if self.where else "while it started"
            return f"lost its connection {place}: its peer was gone"
        if self.kind == "mismatch":
            return f"found its call at {self.where} to differ too"
        return self.sentence + (f" at {self.where}" if self.where else "")


@dataclass
class JobFolder:
    """What ranks write to the job's folder: their stacks and their last known lines."""

    path: str

    def stack(self, rank: int) -> list[tuple[str, int, str]]:
        """The last stack that faulthandler wrote, innermost first: (file name, line, function)."""
        text = self._read(f"stack.{rank}")
        if CRASH in text:  # of all threads; the main thread is the one with lines of user code
            threads = THREAD.split(text[text.rindex(CRASH) :])
        else:
            threads = [text[max(text.rfind(STACK), 0) :]]
        stacks = [
            [(m["file"], int(m["line"]), m["name"]) for m in STACK_LINE.finditer(part)]
            for part in threads
        ]
        return next((stack for stack in stacks if callsite.of_stack(stack)), [])

    def stack_bytes(self, rank: int) -> int:
        """How much it has written; -1 if the rank has not opened the file yet."""
        try:
            return os.path.getsize(os.path.join(self.path, f"stack.{rank}"))
        except FileNotFoundError:
            return -1

    def stack_place(self, rank: int) -> str | None:
        """The innermost line of user code in that stack."""
        return callsite.of_stack(self.stack(rank))

    def collective(self, rank: int) -> str | None:
        """The function of torch.distributed that the stack is in, if it is in one."""
        library = list(takewhile(lambda frame: callsite.is_library(frame[0]), self.stack(rank)))
        names = [
            name
            for file, _, name in library
            if file.endswith("distributed_c10d.py") and name != "wrapper"
        ]
        return names[-1] if names else None

    def last_place(self, rank: int) -> str | None:
        """The line where the rank's heartbeat last saw its main thread."""
        return self._read(f"place.{rank}").rstrip("\0") or None

    def _read(self, name: str) -> str:
        try:
            with open(os.path.join(self.path, name), errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""  # the rank ended before it could write


def from_exception(rank: int, at: float, message: dict[str, Any]) -> Failure:
    """The failure in a rank's message "raised"."""
    lost = message["type"] != "CannotSend" and any(map(PEER_LOST.search, message["messages"]))
    if message["type"] == "CollectiveMismatch":  # its message names ranks and lines
        return Failure(rank, "mismatch", at, message["messages"][0], message["where"])
    if message["type"] == "SystemExit":
        sentence = f"called sys.exit({message['messages'][0]})"
    elif message["type"] == "CannotSend":
        sentence = f"finished, but {message['summary']}"
    else:
        sentence = f"raised {_first_line(message['summary'])}"
    return Failure(rank, "raised", at, sentence, message["where"], message["traceback"], lost)


def _first_line(summary: str) -> str:
    """The first line of an exception, cut at its last full stop if more lines follow."""
    first, _, rest = summary.partition("\n")
    stop = first.rfind(". ")
    return first[: stop + 1] if rest and stop > 0 else first


def from_status(rank: int, at: float, status: int, folder: JobFolder) -> Failure:
    """The failure of a rank whose process ended without a report."""
    where = folder.stack_place(rank)
    seen = folder.last_place(rank)
    last_seen = ""
    if seen and not where:  # the stack is more exact
        last_seen = f"; last seen {SETUP if seen == SETUP else f'at {seen}'}"
    if seen == SETUP:
        seen = None
    if status >= 0:
        call = f"os._exit({status})" if where else f"exit status {status}"
        return Failure(
            rank, "exited", at, f"left with {call}, without returning{last_seen}", where or seen
        )
    name = (
        signal.Signals(-status).name if -status in signal.valid_signals() else f"signal {-status}"
    )
    sentence = f"was killed by {name}"
    if -status == signal.SIGSEGV:
        sentence += " (segmentation fault: native code accessed memory outside its own)"
    if -status == signal.SIGBUS:
        sentence += " (no space for a mapped file: often the disk with the temporary files is full)"
    if -status == signal.SIGKILL:
        sentence += " (often the system's answer to a lack of memory: use less, or fewer ranks)"
    return Failure(rank, "killed", at, sentence + last_seen, where or seen)


def root_cause(failures: list[Failure]) -> Failure:
    """The failure that explains the others.

    Ranks that failed in the same way count as one failure of the lowest rank, so the same mistake
    gives the same message under any scheduling.
    """
    first = min(failures, key=lambda failure: (failure.consequence, failure.at))
    alike = [f for f in failures if f.key == first.key]
    lowest, *also = sorted(alike, key=lambda failure: failure.rank)
    return replace(lowest, at=first.at, also=tuple(failure.rank for failure in also))


def explain(root: Failure, positions: dict[int, str]) -> str:
    """The report: the cause, its traceback, and where the other ranks were."""
    complete = root.rank < 0 or root.kind == "mismatch"  # the sentence names ranks and lines
    if complete:
        lines = [root.sentence]
    else:
        place = f" at {root.where}" if root.where and root.where not in root.sentence else ""
        sentence = (
            root.sentence.replace("was killed", "were killed") if root.also else root.sentence
        )
        lines = [f"{name_ranks([root.rank, *root.also])} {sentence}{place}"]
    if root.traceback:
        lines += ["", *(f"  {line}" for line in root.traceback.splitlines())]
    elif root.where and not complete:
        lines += [f"    {source}" for source in _source(root.where)]
    named = (root.rank,) if root.kind == "mismatch" else (root.rank, *root.also)
    others = {rank: text for rank, text in positions.items() if rank not in named}
    if others:
        lines += ["", "where the ranks were:" if root.rank < 0 else "where the others were:"]
        lines += [f"  rank {rank} {text}" for rank, text in sorted(others.items())]
    return "\n".join(lines)


def _source(where: str) -> list[str]:
    """The source of "cell 12:3", if it is available."""
    label, _, number = where.rpartition(":")
    text = (
        linecache.getline(callsite.filename(label), int(number)).strip() if number.isdigit() else ""
    )
    return [text] if text else []


def running_place(folder: JobFolder, rank: int, fresh: bool) -> tuple[bool, str]:
    """(whether it waits in torch.distributed, where), from a fresh stack or its heartbeat."""
    place = (folder.stack_place(rank) if fresh else None) or folder.last_place(rank)
    if place is None or place == SETUP:
        return False, "was still starting"
    if fresh and (name := folder.collective(rank)):
        return True, f"waits in {name} ({place})"
    return False, "   ".join([f"was running {place}", *_source(place)])
