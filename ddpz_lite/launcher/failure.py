"""From what was seen when a job went wrong to the one sentence that says why.

When one rank fails, the others soon fail too: their peer is gone. So failures are ranked. A rank's
own exception or death comes first, the earliest of them if there are several; "connection closed by
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
    """A job of `launch` that did not end well. `str(error)` is the whole story.

    rank: the rank where it began. kind: "raised", "mismatch", "exited", "killed", "stalled" or
    "timeout". where: the learner's line ("cell 12:3"), or None where nothing could be known.
    ledger: what was recorded until then.
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
        """What IPython shows: the message, for the frames of the launcher would say nothing."""
        return [f"RankFailed: {self}"]


@dataclass
class Failure:
    """One rank's trouble, as the kernel learned of it."""

    rank: int
    kind: str
    at: float  # time.monotonic()
    sentence: str
    where: str | None = None
    traceback: str = ""
    consequence: bool = False  # caused by another rank's failure
    also: tuple[int, ...] = ()  # ranks that failed in the same words

    @property
    def alike(self) -> tuple:
        """What the failures of several ranks share when they are one mistake."""
        return (self.kind,) if self.kind == "mismatch" else (self.sentence, self.where)

    @property
    def short(self) -> str:
        """The failure in a few words, for the list of where the ranks were."""
        if self.consequence:
            place = f"at {self.where}" if self.where else "while it started"
            return f"was cut off {place}: its peer was gone"
        if self.kind == "mismatch":
            return f"found its call at {self.where} to differ too"
        return self.sentence + (f" at {self.where}" if self.where else "")


@dataclass
class Folder:
    """The traces that ranks leave in the job's folder."""

    path: str

    def stack(self, rank: int) -> list[tuple[str, int, str]]:
        """The last stack that faulthandler wrote, innermost first: (file name, line, function)."""
        text = self._read(f"stack.{rank}")
        if CRASH in text:  # of all threads; the one with the learner's lines is the main thread
            threads = THREAD.split(text[text.rindex(CRASH) :])
        else:
            threads = [text[max(text.rfind(STACK), 0) :]]
        stacks = [
            [(m["file"], int(m["line"]), m["name"]) for m in STACK_LINE.finditer(part)]
            for part in threads
        ]
        return next(
            (s for s in stacks if any(not callsite.is_library(file) for file, _, _ in s)), []
        )

    def stack_bytes(self, rank: int) -> int:
        """How much it has written; -1 for a rank that is too young to write."""
        try:
            return os.path.getsize(os.path.join(self.path, f"stack.{rank}"))
        except FileNotFoundError:
            return -1

    def stack_place(self, rank: int) -> str | None:
        """The learner's innermost line of that stack."""
        lines = [
            callsite.label(file, line)
            for file, line, _ in self.stack(rank)
            if not callsite.is_library(file)
        ]
        return lines[0] if lines else None

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
        """Where the rank's heartbeat last saw its main thread."""
        return self._read(f"place.{rank}").rstrip("\0") or None

    def _read(self, name: str) -> str:
        try:
            with open(os.path.join(self.path, name), errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""  # the rank ended before it could write


def from_exception(rank: int, at: float, told: dict[str, Any]) -> Failure:
    """The failure behind a rank's "raised" frame."""
    lost = told["type"] != "CannotSend" and any(map(PEER_LOST.search, told["messages"]))
    if told["type"] == "CollectiveMismatch":  # its message is the whole story
        return Failure(rank, "mismatch", at, told["messages"][0], told["where"])
    if told["type"] == "SystemExit":
        sentence = f"called sys.exit({told['messages'][0]})"
    elif told["type"] == "CannotSend":
        sentence = f"ended well, but {told['summary']}"
    else:
        sentence = f"raised {_first_line(told['summary'])}"
    return Failure(rank, "raised", at, sentence, told["where"], told["traceback"], lost)


def _first_line(summary: str) -> str:
    """The first line of an exception, up to its last full stop if the text goes on below it."""
    first, _, rest = summary.partition("\n")
    stop = first.rfind(". ")
    return first[: stop + 1] if rest and stop > 0 else first


def from_status(rank: int, at: float, status: int, folder: Folder) -> Failure:
    """The failure of a rank that ended without a word."""
    where = folder.stack_place(rank)
    seen = folder.last_place(rank)
    last_seen = ""
    if seen and not where:  # the stack knows better
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
        sentence += " (segmentation fault: native code touched memory that is not its own)"
    if -status == signal.SIGBUS:
        sentence += " (a mapped file had no room: often a full disk, where the temporary files are)"
    if -status == signal.SIGKILL:
        sentence += " (often the system's answer to a lack of memory: use less, or fewer ranks)"
    return Failure(rank, "killed", at, sentence + last_seen, where or seen)


def root_cause(failures: list[Failure]) -> Failure:
    """The failure that explains the others.

    Ranks that failed in the same way count as one, told of the lowest, so that the same mistake
    gives the same message however the ranks were scheduled.
    """
    first = min(failures, key=lambda failure: (failure.consequence, failure.at))
    alike = [f for f in failures if f.alike == first.alike]
    lowest, *also = sorted(alike, key=lambda failure: failure.rank)
    return replace(lowest, at=first.at, also=tuple(failure.rank for failure in also))


def explain(root: Failure, positions: dict[int, str]) -> str:
    """The message for the learner: the cause, its traceback, and where the others were."""
    whole_story = root.rank < 0 or root.kind == "mismatch"  # the sentence names ranks and places
    if whole_story:
        lines = [root.sentence]
    else:
        place = f" at {root.where}" if root.where and root.where not in root.sentence else ""
        sentence = (
            root.sentence.replace("was killed", "were killed") if root.also else root.sentence
        )
        lines = [f"{_ranks(root.rank, *root.also)} {sentence}{place}"]
    if root.traceback:
        lines += ["", *(f"  {line}" for line in root.traceback.splitlines())]
    elif root.where and not whole_story:
        lines += [f"    {source}" for source in _source(root.where)]
    told = (root.rank,) if root.kind == "mismatch" else (root.rank, *root.also)
    others = {rank: text for rank, text in positions.items() if rank not in told}
    if others:
        lines += ["", "where the ranks were:" if root.rank < 0 else "where the others were:"]
        lines += [f"  rank {rank} {text}" for rank, text in sorted(others.items())]
    return "\n".join(lines)


def _ranks(*ranks: int) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _source(where: str) -> list[str]:
    """The line of code behind "cell 12:3", if it can be shown."""
    label, _, number = where.rpartition(":")
    text = (
        linecache.getline(callsite.filename(label), int(number)).strip() if number.isdigit() else ""
    )
    return [text] if text else []


def running_place(folder: Folder, rank: int, fresh: bool) -> tuple[bool, str]:
    """(waits in torch.distributed?, where), by a fresh stack or else by its heartbeat."""
    place = (folder.stack_place(rank) if fresh else None) or folder.last_place(rank)
    if place is None or place == SETUP:
        return False, "was still starting"
    if fresh and (name := folder.collective(rank)):
        return True, f"waits in {name} ({place})"
    return False, "   ".join([f"was running {place}", *_source(place)])
