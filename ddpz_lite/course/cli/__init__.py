"""The `ddpz` command. One module per subcommand, imported when it is asked for.

So `ddpz --help` answers at once: nothing here imports torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import date
from typing import Literal

from ddpz_lite import __version__
from ddpz_lite.course.cli.shared import UserError, lesson_number, missing


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ddpz` with `argv` (this process's arguments by default) and return the exit status."""
    options = _parser().parse_args(argv)
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 128 + signal.SIGPIPE
    except UserError as error:
        print(f"ddpz {options.command}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (problem := missing(error)) is None:
            raise
        print(f"ddpz {options.command}: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"ddpz {options.command}: interrupted", file=sys.stderr)
        return 130


def _reader_has_gone() -> bool:
    """Whether standard output is a pipe that its reader has closed, as `head` does."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ddpz", description="The ddpz-lite course.")
    parser.add_argument("--version", action="version", version=f"ddpz-lite {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = _command(
        commands,
        "doctor",
        "say what this machine is, what will run how, and prove it with an all-reduce",
        "ddpz doctor",
    )
    doctor.add_argument("--ranks", type=int, default=4, help="ranks of the all-reduce (default 4)")
    _lesson_command(commands)
    _bench_command(commands)
    _exercise_commands(commands)
    _author_commands(commands)
    _explain_command(commands)
    _gym_command(commands)

    from ddpz_lite.course.cli import (
        train,  # light: its options are those of Recipe, which needs no torch
    )

    purpose = "train a GPT on a text with DDP or ZeRO; resume after a crash"
    train.add_options(_command(commands, "train", purpose, train.EXAMPLE))
    return parser


def _lesson_command(commands) -> None:
    lessons = _command(
        commands,
        "lessons",
        "execute lessons from top to bottom, without a browser, and show the time of each",
        "ddpz lessons 00 01",
    )
    lessons.add_argument("names", nargs="*", metavar="LESSON", help="as 00 or start (default: all)")
    lessons.add_argument("--dir", default=None, help="the folder of the notebooks")
    lessons.add_argument(
        "--timeout", type=float, default=120, help="seconds per cell (default 120)"
    )
    lessons.add_argument("--write", action="store_true", help="store the outputs in the notebooks")


def _bench_command(commands) -> None:
    bench = _command(
        commands,
        "bench",
        "measure the time of a training step, next to PyTorch's own strategies",
        "ddpz bench --peers --ranks 2",
    )
    bench.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default: 2 4")
    bench.add_argument("--millions", type=float, default=11, help="millions of parameters (11)")
    bench.add_argument("--batch", type=int, default=4, help="sequences per rank and step (4)")
    bench.add_argument("--context", type=int, default=64, help="tokens per sequence (64)")
    bench.add_argument("--rounds", type=int, default=20, help="rounds that count (20)")
    bench.add_argument("--peers", action="store_true", help="with PyTorch's own, and DeepSpeed")


def _explain_command(commands) -> None:
    explain = _command(
        commands,
        "explain",
        "say of a trace or of flight records which call differed, who was late, what was exposed",
        "ddpz explain trace.json, or ddpz explain /tmp/flight_record_*",
    )
    explain.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="a trace of run.trace(); or a flight record of torch's for each rank; or their folder",
    )
    explain.add_argument("--step", default="step", metavar="SPAN", help="a step's name (step)")
    explain.add_argument(
        "--data", nargs="+", default=["data"], metavar="SPAN", help="spans that load data (data)"
    )


def _author_commands(commands) -> None:
    course = _command(
        commands,
        "course",
        "write what follows from the notebooks' metadata: map, tables, sums, links",
        "ddpz course --check",
    )
    course.add_argument("--check", action="store_true", help="write nothing; 1 if they differ")

    new = _command(
        commands,
        "new",
        "make the skeleton of a lesson with one task; never over what is there",
        'ddpz new 12 "ZeRO in practice"',
    )
    new.add_argument("lesson", type=lesson_number, help="its number, as 12 or 05b")
    new.add_argument("title")
    new.add_argument("--task", default="example", help="the name of its task (default: example)")

    author = _command(
        commands,
        "author",
        "say what a lesson still lacks, or has wrong, in one list",
        "ddpz author 12",
    )
    author.add_argument("lesson", type=lesson_number, help="its number, as 12 or 05b")
    author.add_argument(
        "--proofs",
        action="store_true",
        help="run it: each proof must fail under the counterfactual that its metadata name",
    )


def _exercise_commands(commands) -> None:
    exercises = _command(
        commands,
        "exercises",
        "make exercises/ from solutions/; never over a copy in which a learner has worked",
        "ddpz exercises --check",
    )
    exercises.add_argument("--check", action="store_true", help="write nothing; 1 if they differ")

    check = _command(
        commands,
        "check",
        "run an exercise from top to bottom and print what its checks say",
        "ddpz check 03",
    )
    check.add_argument("lesson", type=lesson_number, help="its number, as 03, or its notebook")
    check.add_argument(
        "--dir",
        default=None,
        help="the folder of the notebook (default: my/exercises, else exercises)",
    )
    check.add_argument("--timeout", type=float, default=90, help="seconds per cell (default 90)")

    _grade_command(commands)

    release = _command(
        commands,
        "release",
        "collect what students may see of their grades: feedback, and nothing of the teacher's",
        "ddpz release grades --to released --for moodle",
    )
    release.add_argument("grades", metavar="GRADES", help="the folder that ddpz grade wrote")
    release.add_argument("--to", default="released", metavar="DIR", help="default: released")
    release.add_argument(
        "--for",
        dest="platform",
        choices=["canvas", "moodle"],
        help="also write a zip that the platform takes as feedback files",
    )

    export = _command(
        commands,
        "export",
        "write the student's copy of the course: chosen lessons, no solutions, no tests",
        "ddpz export ../our-course --lessons 00 01 02",
    )
    export.add_argument("dir", metavar="DIR", help="a folder that is new or empty")
    export.add_argument("--lessons", nargs="+", metavar="NN", help="as 00 01 02 (default: all)")
    export.add_argument(
        "--ci",
        metavar="OWNER/COURSE",
        help="add a workflow that grades each push; the repository that this copy will become",
    )

    _command(
        commands,
        "copies",
        "bring your own copies in my/ up to date; what you wrote in them is kept",
        "ddpz copies",
    )

    progress = _command(
        commands,
        "progress",
        "show what of the exercises is solved, and with how many hints",
        "ddpz progress",
    )
    progress.add_argument(
        "--reset",
        nargs="*",
        type=lesson_number,
        metavar="NN",
        help="forget it all, or these lessons; what was kept goes to a file next to it",
    )


def _gym_command(commands) -> None:
    gym = _command(
        commands,
        "gym",
        "ask the questions and myths of interviews that are due, and some new ones",
        "ddpz gym --by 2026-12-03",
    )
    gym.add_argument("--new", type=_count(0), default=None, help="new cards (5, or by the plan)")
    gym.add_argument(
        "--by",
        type=_day,
        default=None,
        metavar="DAY",
        help="the day of your interview, kept for later calls; --by never forgets it",
    )
    gym.add_argument("--topic", default=None, metavar="WORD", help="of the topic's name, as zero")
    gym.add_argument("--only", choices=["questions", "myths"], default=None)
    gym.add_argument("--language", choices=["en", "zh"], default="en", help="en or zh (Chinese)")
    gym.add_argument("--mock", action="store_true", help="an interview: twelve cards, a report")
    gym.add_argument("--seed", type=int, default=None, help="with --mock: the same cards again")


def _day(text: str) -> date | Literal[""]:
    """A day as 2026-12-03, or "" for `never`."""
    if text == "never":
        return ""
    try:
        return date.fromisoformat(text)
    except ValueError:
        wanted = "takes a day, as 2026-12-03, or never"
        raise argparse.ArgumentTypeError(f"{wanted}, not {text!r}") from None


def _grade_command(commands) -> None:
    grade = _command(
        commands,
        "grade",
        "grade notebooks, folders or zips of them, in a sandbox; write feedback and a gradebook",
        "ddpz grade handed-in/ --out grades --secure",
    )
    grade.add_argument("submissions", nargs="+", metavar="SUBMISSION", help=".ipynb, folder or zip")
    grade.add_argument("--out", default="grades", metavar="DIR", help="default: grades")
    grade.add_argument("--hidden", default=None, metavar="DIR", help="your own judges, *.py")
    grade.add_argument("--secure", action="store_true", help="refuse where there is no sandbox")
    grade.add_argument(
        "--nbval",
        action="store_true",
        help="show students what nbval says about their whole notebook: no points, a second run",
    )
    grade.add_argument(
        "--seed", type=int, default=None, help="of the inputs: same seed, same points"
    )
    grade.add_argument(
        "--jobs", type=_count(1), default=None, help="notebooks at a time (all cores)"
    )
    grade.add_argument(
        "--roster", metavar="CSV", help="the class: names students, says who is missing"
    )
    grade.add_argument(
        "--for",
        dest="platform",
        choices=["canvas", "moodle", "gradescope"],
        help="also write a CSV that the platform imports",
    )
    grade.add_argument("--policy", metavar="TOML", help="deadlines (default: OUT/policy.toml)")
    grade.add_argument("--notes", metavar="CSV", help="your points, comments (OUT/notes.csv)")
    grade.add_argument("--only", nargs="+", metavar="TASK", help="as 03.weighted_mean, or as 03")
    grade.add_argument(
        "--fail-under",
        type=_threshold,
        metavar="POINTS",
        help="exit with 1 if a student has fewer; also as 60%%",
    )


def _threshold(text: str) -> str:
    if not text.removesuffix("%").replace(".", "", 1).isdecimal():
        words = f"takes a number of points or a percentage, as 12 or 60%, not {text!r}"
        raise argparse.ArgumentTypeError(words)
    return text


def _count(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            words = f"takes a whole number, {least} or more, not {text!r}"
            raise argparse.ArgumentTypeError(words)
        return int(text)

    return read


def _command(commands, name: str, purpose: str, example: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=f"example:  {example}",
    )
    command.set_defaults(run=_runner(name))
    return command


def _runner(name: str) -> Callable[[argparse.Namespace], int]:
    """`run` of the subcommand's own module, which is imported when it is called."""

    def run(options: argparse.Namespace) -> int:
        return importlib.import_module(f"ddpz_lite.course.cli.{name}").run(options)

    return run
