"""Print the output of ranks: line by line when it arrives, or rank by rank at the end."""

from __future__ import annotations

import re
import sys

from tqdm import tqdm

# A rank that prints in a loop must not freeze the browser.
MAX_LINES = 10_000  # per rank; a long line counts as one for every LINE bytes
LINE = 1000
LONGEST = 1 << 16  # bytes: output without a newline is printed in parts of this size
# What gloo prints: a greeting, and a lost connection, which the report explains better.
NOISE = re.compile(rb"^\[Gloo\] Rank \d+ is connected|^\[E\d+ .*Gloo connectFullMesh failed")


class Printer:
    """Collects bytes by rank, cuts them into lines, and prints each with its rank."""

    def __init__(self, world_size: int, mode: str):
        self.lines: list[list[str]] = [[] for _ in range(world_size)]
        self._pending = [b""] * world_size
        self._lines_left = [MAX_LINES] * world_size
        self._stream = mode == "stream"

    def feed(self, rank: int, data: bytes) -> None:
        *lines, rest = (self._pending[rank] + data).split(b"\n")
        for line in lines:
            self._line(rank, line)
        rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]  # the last state of a progress bar
        if len(rest) > LONGEST:
            self._line(rank, rest)
            rest = b""
        self._pending[rank] = rest

    def finish(self) -> None:
        """Print unfinished last lines; in the rank-by-rank mode print everything."""
        for rank, rest in enumerate(self._pending):
            if rest:
                self._line(rank, rest)
        self._pending = [b""] * len(self.lines)
        if not self._stream:
            for rank, lines in enumerate(self.lines):
                for line in lines:
                    print(f"[rank {rank}] {line}")

    def _line(self, rank: int, raw: bytes) -> None:
        if NOISE.match(raw) or self._lines_left[rank] < 0:
            return
        shown = raw.rstrip(b"\r").rpartition(b"\r")[2]
        self._lines_left[rank] -= 1 + len(shown) // LINE
        line = shown.decode(errors="replace")
        if self._lines_left[rank] < 0:
            line = f"... more than {MAX_LINES:,} lines: the rest of this rank's output is not shown"
        self.lines[rank].append(line)
        if self._stream:
            tqdm.write(f"[rank {rank}] {line}")  # above the job's bar, where there is one
            sys.stdout.flush()
