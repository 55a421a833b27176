"""Two hosts on one machine: network namespaces with a cable between them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


def missing() -> str:
    """Why there cannot be two hosts here, or nothing."""
    if not sys.platform.startswith("linux") or not shutil.which("ip"):
        return "needs Linux and `ip`, of the package iproute2"
    name = f"ddpz-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"may not make a network namespace: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


@dataclass(frozen=True)
class Host:
    """A network namespace, and the end of the cable in it."""

    name: str
    address: str
    cable: str

    def start(self, words: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
        """Start a program there, in the checkout."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *words],
            cwd=ROOT,
            env=os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )

    def end(self) -> None:
        """All its processes at once, without a word, as when the power fails."""
        pids = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        for pid in pids.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def bytes_sent(self) -> int:
        """What has left by the cable, with all headers."""
        count = f"/sys/class/net/{self.cable}/statistics/tx_bytes"
        done = subprocess.run(
            ["ip", "netns", "exec", self.name, "cat", count],
            check=True,
            capture_output=True,
            text=True,
        )
        return int(done.stdout)


@contextlib.contextmanager
def two_hosts(*names: str) -> Iterator[tuple[Host, Host]]:
    """They are gone afterwards, and whatever still runs in them is ended.

    names: of the first and the second, by which programs on both find them.
    """
    own = os.getpid()
    hosts = [Host(f"ddpz-{own}-{n}", f"10.77.0.{n + 1}", f"cable{n}") for n in range(2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    known = "".join(f"{h.address} {name}\n" for h, name in zip(hosts, names, strict=False))
    files = [Path("/etc/netns", host.name) for host in hosts if names]
    try:
        for folder in files:  # `ip netns exec` lays what is in it over /etc
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        for host in hosts:
            ip("netns", "add", host.name)
        (a, b) = hosts
        ends = ["name", a.cable, "netns", a.name], ["name", b.cable, "netns", b.name]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host in hosts:
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.cable)
            for link in ("lo", host.cable):
                ip("-n", host.name, "link", "set", link, "up")
        yield a, b
    finally:
        for host in hosts:
            host.end()
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)
        for folder in files:
            shutil.rmtree(folder)
