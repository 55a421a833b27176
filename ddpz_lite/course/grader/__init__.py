"""Grading what others hand in: their code is run, and never believed.

Three rooms. The class (the files beside this one) takes in what was handed in, grades it and
reports. For each task it asks the arena, which runs an answer's cases on ranks that reach each
other through a broker alone, and says what it saw. Each rank stands in a sandbox. Imports go that
way only: class, arena, sandbox.

The class:

    submission trusted    what becomes of what was handed in: answers, or a line that says why not
    exercise   trusted    what a submission is held against: the exercise as it was handed out
    places     trusted    folders as they were handed in; zips: the same of zips, within limits
    owners     trusted    whose a notebook is; roster: who should have handed in
    answers    trusted    from a notebook's bytes to its answers, and which exercise it is
    intake     trusted    all of it: what is taken, and a line for all that is not
    merge      trusted    the sources of answers, put into the pristine exercise
    batch      trusted    submissions, as many at a time as there are cores, resumable
    hidden     trusted    more cases and criteria, which students do not have
    report     trusted    what a class is told
    pages      trusted    it in HTML and Markdown; formats: in CSV, JUnit, for Gradescope
    text       trusted    what somebody else wrote, fit for a page, a table, a file's name
    similarity trusted    answers that resemble each other: an aid, never a verdict
    nbval      trusted    what nbval says about the whole notebook: to read, never a point

arena/, where answers run:

    observe    trusted    a task's cases on sandboxed ranks; what was seen of them
    broker     trusted    one case: hears every rank, says how it ended
    exchange   trusted    the only way from rank to rank: every call, and the ledger of them
    client     trusted    what is known of a rank, a group, a call under way
    perform    trusted    what each collective does with the bytes
    watch      trusted    who waits where, and for whom
    inside     hostile    a rank: runs the cells, and the job beside them
    group      hostile    torch.distributed's process group on the line to the broker

sandbox/, what a process is shut into:

    grounds    trusted    starts the fork server, and asks it for sandboxes
    server     trusted    a process with torch imported, from which they are forked; their keepers
    leash      trusted    the hold on a sandbox: what its keeper says, and its end
    usage      trusted    how much memory a sandbox holds
    limits                how much of everything
    walls      both       namespaces, the folders that are seen, limits, rights
    syscalls   both       Linux's own calls, and a filter of what may be called
    frames     both       what travels: a JSON head and raw bytes
    absent     hostile    stands there in the stead of each ready-made strategy
    notebook   trusted    nbval on a whole notebook, in a sandbox of its own
    notebook_inside hostile  starts pytest there, and sends its report

"Hostile" means that an answer shares this process and can change all of it. Nothing that such a
process says about itself is believed; it is data.

What is defended, with the sandbox

* Points. A verdict is made in a process that never runs an answer and never reads a pickle. What is
  judged is the data that a rank returned and the ledger that the broker wrote, with its own clock.
  A rank that sends no data, or what no honest rank sends, has no points.
* Expected values, the seed, judges, solutions, hidden checks, other submissions. They are in no
  memory that a rank's process shares: the fork server is a program of its own that was never told
  of them. And they are in no file that a rank sees: its root folder holds Python, the installed
  packages, and of this package what a list names (`sandbox.walls.SHOWN`; and nothing of the
  strategies, where a task asks to build one). A rank is sent its own inputs and no other rank's.
* Each rank from the others. Ranks are alone in their namespaces: data for another rank passes the
  broker, so that "rank 0 does it all" shows in the ledger. They read the same installed files, so
  the calls are refused by which one sees what another does with a file: locks, watches, which pages
  are in memory. Some ways to give a sign stay open, see below.
* The machine. No network, no files to write but two small folders in memory, no devices, no
  programs, no capabilities, a filter of system calls, limits on memory, processes, files, time and
  output. When a case ends all its processes are dead: the pid namespace sees to that, also if the
  grader itself is killed.
* The same for a whole notebook under nbval (`--nbval`), in a sandbox of its own. It can start
  Python, has IPv4 to itself, and sees this whole package, judges too, as the learner does. Its
  report is a claim: capped, read as data, shown as text. Points are made before it, without it.
* The grader's time and memory. Frames, messages, calls, spans and what is under way are bounded,
  and so is all that a judge looks at; memory that could be held and not be counted is refused.
* What is judged by time. A case on a slower network runs when nothing else of this grader does,
  and its times are the broker's. A second grader on the same machine can still disturb it.
* Reports. Words from a rank are cut to printable ones, without the paths of this machine; a rank
  has no /proc, where they stand.

What is not defended, and what follows

* An answer can lie about its own process: what it holds in memory, where a span begins and ends,
  which line called. A span that it asks for by `dz.span` has not the name of a job's; but it can
  send a span's frame by hand, change a job's module or, by `sys._getframe(1)`, what the job has in
  its hands. (A job is imported before the cells, so that patching `time.sleep` changes nothing in
  one that has taken it by name.) So a judge should count calls over the whole case where the job
  makes none itself, and should not give a point for a claim alone.
* An answer can undo `grade.guard` in its own process and use torch's strategies. Their bytes, calls
  and data are then what is judged; those of this library are not there.
* A kernel with a hole. The sandbox is Linux's own, not a virtual machine.
* Ranks that signal each other by the pages of a file that they all map: a futex in one, which
  threads cannot do without, and how many processes share one, which /proc/self tells. Or by what
  the system numbers for all of its processes, as new pipes, and by which page of a file had to be
  read from the disk. All of it takes code that no honest answer has.
* Side channels: what another process costs in time. A rank cannot read data by them in its seconds.
* Processor time is shared: other submissions may be slowed while one computes until its limit.
* Without the sandbox (`sandboxed=False`) hold the verdict, the frames, the ledger, limits per
  process, the filter of system calls (so no network either) and the end of all processes. Files,
  and signals to other processes of the same user, are open to an answer. As root it becomes another
  user, where that one can read Python. Grade so only what you would run yourself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ddpz_lite.course.grader.sandbox.limits import Limits, Probe

if TYPE_CHECKING:
    from ddpz_lite.course.grader.arena.observe import observe_in_sandbox
    from ddpz_lite.course.grader.sandbox.grounds import Grounds, probe
    from ddpz_lite.course.grader.sandbox.leash import NoRanks

__all__ = ["Grounds", "Limits", "NoRanks", "Probe", "observe_in_sandbox", "probe"]

_HOMES = {
    "Grounds": "sandbox.grounds",
    "observe_in_sandbox": "arena.observe",
    "probe": "sandbox.grounds",
    "NoRanks": "sandbox.leash",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:  # the sandbox and the fork server need nothing of the trusted side
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
