"""What ranks print, shown in the notebook: line by line as it comes, or rank by rank at the end."""

from __future__ import annotations

import re

MAX_LINES = 10_000  # per rank: a rank that prints in a loop must not take the browser with it
# What gloo says by itself: its greeting, and that a connection broke, which the report says better.
NOISE = re.compile(rb"^\[Gloo\] Rank \d+ is connected|^\[E\d+ .*Gloo connectFullMesh failed")


class Printer:
    """Collects bytes by rank, cuts them into lines, and prints each with its rank."""

    def __init__(self, world_size: int, mode: str):
        self.lines: list[list[str]] = [[] for _ in range(world_size)]
        self._pending = [b""] * world_size
        self._stream = mode == "stream"

    def feed(self, rank: int, data: bytes) -> None:
        *lines, self._pending[rank] = (self._pending[rank] + data).split(b"\n")
        for line in lines:
            self._line(rank, line)

    def finish(self) -> None:
        """Print unfinished last lines, and in the rank-by-rank mode everything."""
        for rank, rest in enumerate(self._pending):
            if rest:
                self._line(rank, rest)
        self._pending = [b""] * len(self.lines)
        if not self._stream:
            for rank, lines in enumerate(self.lines):
                for line in lines:
                    print(f"[rank {rank}] {line}")

    def _line(self, rank: int, raw: bytes) -> None:
        if NOISE.match(raw) or len(self.lines[rank]) > MAX_LINES:
            return
        line = raw.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        if len(self.lines[rank]) == MAX_LINES:
            line = f"... more than {MAX_LINES:,} lines: the rest of this rank's output is not shown"
        self.lines[rank].append(line)
        if self._stream:
            print(f"[rank {rank}] {line}", flush=True)
