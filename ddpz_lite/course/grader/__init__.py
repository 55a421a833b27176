"""Grade notebooks of others: their code is run, and nothing that it reports is believed.

There are three layers, and imports go only downwards. The class layer (the files next to this one)
takes submissions in, grades them and writes reports. It asks the arena to run the cases of a task;
there, ranks reach each other only through a broker. Each rank runs in a sandbox.

The class layer, all of it trusted:

    submission    what intake returns: a submission, or the reason why there is none
    exercise      the exercise as it was handed out, against which a submission is compared
    places, zips  folders and zips of submissions, within limits
    owners        which student a notebook belongs to
    people        students, senders as platforms name them, and the join between the two
    roster        a roster from a platform's file or a plain list
    platforms/    one file per platform: how Canvas and Moodle name files and columns
    answers       from a notebook's bytes to its answer cells, and which exercise it is
    intake        all of the above: every file becomes a submission or a line with a reason
    merge         the answers' sources, put into the pristine exercise
    batch         grades submissions in parallel; resumable
    policy        deadlines, grace days, a teacher's comments and overrides
    hidden        a teacher's own cases and criteria
    report        what a report says
    pages         reports as HTML and Markdown
    formats       reports as CSV, JUnit and for Gradescope
    text          makes text of others safe for a page, a table or a file name
    similarity    answers that resemble each other: an aid, not a verdict
    nbval         nbval on the whole notebook: for reading, worth no points

arena/, where answers run:

    observe    trusted    runs the cases of a task on sandboxed ranks
    broker     trusted    one case: receives from all ranks, decides how it ended
    exchange   trusted    the only channel between ranks; writes the ledger of all calls
    client     trusted    what is known of a rank, a group, a call in flight
    perform    trusted    what each collective does with the bytes
    watch      trusted    which rank waits where, and for which other rank
    inside     hostile    a rank: runs the cells, and the job next to them
    group      hostile    torch.distributed's process group on the socket to the broker

sandbox/, in which processes run:

    pool       trusted    starts the fork server and requests sandboxes from it
    server     trusted    a process with torch imported, which forks sandboxes and supervisors
    handle     trusted    the grader's connection to one sandbox, and how it ends
    usage      trusted    how much memory a sandbox holds
    limits                the limits on every resource
    isolation  both       namespaces, visible folders, limits, rights
    syscalls   both       Linux system calls, and a filter of them
    frames     both       the messages: a JSON head and raw bytes
    absent     hostile    replaces each ready-made strategy
    notebook   trusted    nbval on a whole notebook, in a separate sandbox
    notebook_inside hostile  starts pytest there, and sends its report

"Hostile" means that an answer shares this process and can change everything in it. Whatever such a
process says about itself is treated as data.

What is defended, with the sandbox

* Points. Verdicts are made in a process that never runs an answer and never reads a pickle. It
  judges the data that a rank returned and the ledger that the broker wrote, with the broker's
  clock. A rank that sends no data, or data that no honest rank sends, gets no points.
* Expected values, the seed, judges, solutions, hidden checks, other submissions. They are in no
  memory that a rank's process shares, because the fork server is a separate program that never
  received them. They are in no file that a rank sees: its root folder holds Python, the installed
  packages, and the part of this package that `sandbox.isolation.SHOWN` lists (without the
  strategies, where a task asks to build one). A rank receives its own inputs and no other rank's.
* Each rank from the others. Ranks are alone in their namespaces, and data for another rank passes
  the broker, so "rank 0 does everything" shows in the ledger. Ranks read the same installed files,
  so calls that reveal what another process does with a file are refused: locks, watches, which
  pages are in memory. Some signals remain possible, see below.
* The machine. No network, no writable files except two small folders in memory, no devices, no
  programs, no capabilities, a filter of system calls, limits on memory, processes, files, time and
  output. When a case ends, all its processes are dead: the pid namespace guarantees it, also if the
  grader itself is killed.
* The same for a whole notebook under nbval (`--nbval`), in a separate sandbox. It can start Python,
  has a private IPv4 loopback, and sees this whole package including the judges, as the learner
  does. Its report is a claim: capped, read as data, shown as text. Points are made before it and
  without it.
* The grader's time and memory. Frames, messages, calls, spans and data in flight are bounded, and
  so is everything that a judge looks at; memory that could not be counted is refused.
* Criteria about time. A case on a slower network runs alone within this grader, and its times are
  the broker's. A second grader on the same machine can still disturb it.
* Reports. Text from a rank is reduced to printable characters without paths of this machine; a rank
  has no /proc, where such paths are listed.

What is not defended, and what follows

* An answer can lie about its own process: which memory it holds, where a span begins and ends,
  which line made a call. A span that it requests through `dz.span` does not get a job's name, but
  it can send a span's frame by hand, change a job's module or, through `sys._getframe(1)`, change
  the job's objects. (A job is imported before the cells, so patching `time.sleep` does not affect a
  job that imported it by name.) Therefore a judge should count calls over the whole case where the
  job itself makes none, and should not give a point for a claim alone.
* An answer can undo `check.guard` in its own process and use torch's strategies. Their bytes, calls
  and data are then what is judged; this library's strategies are absent.
* A kernel bug. The sandbox uses Linux's own mechanisms and is not a virtual machine.
* Ranks that signal each other through pages of a file that they all map: a futex there, which
  threads need, or the number of processes that share a page, which /proc/self shows. Or through
  numbers that the system shares between all processes, such as new pipes, and through which page of
  a file had to be read from disk. All of this takes code that no honest answer contains.
* Side channels: the time that another process takes. A rank cannot read data this way within its
  few seconds.
* Processor time is shared: other submissions may be slowed down while one computes to its limit.
* Without the sandbox (`sandboxed=False`), these still hold: the verdict, the frames, the ledger,
  limits per process, the filter of system calls (so no network either) and the end of all
  processes. Files, and signals to other processes of the same user, are open to an answer. As root
  the answer becomes another user, where that one can read Python. Grade this way only what you
  would run yourself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ddpz_lite.course.grader.sandbox.limits import Limits, Probe

if TYPE_CHECKING:
    from ddpz_lite.course.grader.arena.observe import observe_in_sandbox
    from ddpz_lite.course.grader.sandbox.handle import NoRanks
    from ddpz_lite.course.grader.sandbox.pool import SandboxPool, probe

__all__ = ["Limits", "NoRanks", "Probe", "SandboxPool", "observe_in_sandbox", "probe"]

_HOMES = {
    "SandboxPool": "sandbox.pool",
    "observe_in_sandbox": "arena.observe",
    "probe": "sandbox.pool",
    "NoRanks": "sandbox.handle",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:  # the sandbox and the fork server need nothing of the trusted side
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
