"""What a finished job must not leave behind: processes, files, descriptors."""

import gc
import time

import psutil

WITHIN = 60.0  # seconds that the system may take


def processes(root: int | None = None) -> list[psutil.Process]:
    """Descendants of process `root` (this one by default) that are still there after a while, other
    than the fork server and the resource tracker that multiprocessing keeps for `root` itself.
    """
    deadline = time.monotonic() + WITHIN
    while True:
        found = [p for p in psutil.Process(root).children(recursive=True) if _is_ours(p)]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def _is_ours(process: psutil.Process) -> bool:
    """Whether it counts: not a zombie, not the fork server (whose forks, the ranks, have its
    command line).
    """
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if "resource_tracker" in " ".join(process.cmdline()):
            return _is_server(process.parent())
        return not (_is_server(process) and not _is_server(process.parent()))
    except psutil.NoSuchProcess:
        return False


def _is_server(process: psutil.Process | None) -> bool:
    return process is not None and "ddpz_lite.launcher.server" in process.cmdline()


def gone(pids: list[int], within: float = WITHIN) -> bool:
    """Whether all these processes have ended."""
    deadline = time.monotonic() + within
    while any(_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descriptors() -> int:
    """Open descriptors of this process, without those that wait to be collected as garbage."""
    gc.collect()
    return psutil.Process().num_fds()


def family() -> set[int]:
    """The descendants of this process."""
    return {process.pid for process in psutil.Process().children(recursive=True)}
