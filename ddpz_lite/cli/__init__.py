"""The `ddpz` command. One module per subcommand, imported when it is asked for.

So `ddpz --help` answers at once: nothing here imports torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ddpz_lite import __version__


class UserError(Exception):
    """What the user can put right: shown as one line, without a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ddpz` with `argv` (this process's arguments by default) and return the exit status."""
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except UserError as error:
        print(f"ddpz {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"ddpz {options.command}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ddpz", description="The ddpz-lite course.")
    parser.add_argument("--version", action="version", version=f"ddpz-lite {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = _command(
        commands,
        "doctor",
        "say what this machine is, what will run how, and prove it with an all-reduce",
        "ddpz doctor",
        _doctor,
    )
    doctor.add_argument("--ranks", type=int, default=4, help="ranks of the all-reduce (default 4)")

    lessons = _command(
        commands,
        "lessons",
        "execute lessons from top to bottom, without a browser, and show the time of each",
        "ddpz lessons 00 01",
        _lessons,
    )
    lessons.add_argument("names", nargs="*", metavar="LESSON", help="as 00 or start (default: all)")
    lessons.add_argument("--dir", default=None, help="the folder of the notebooks")
    lessons.add_argument(
        "--timeout", type=float, default=120, help="seconds per cell (default 120)"
    )
    lessons.add_argument("--write", action="store_true", help="store the outputs in the notebooks")

    bench = _command(
        commands,
        "bench",
        "measure the time of a step, beside PyTorch's own strategies, and how it grows",
        "ddpz bench --peers --ranks 2",
        _bench,
    )
    bench.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default: 2 4")
    bench.add_argument("--millions", type=float, default=11, help="millions of parameters (11)")
    bench.add_argument("--batch", type=int, default=4, help="sequences per rank and step (4)")
    bench.add_argument("--context", type=int, default=64, help="tokens per sequence (64)")
    bench.add_argument("--rounds", type=int, default=20, help="rounds that count (20)")
    bench.add_argument("--peers", action="store_true", help="with PyTorch's own, and DeepSpeed")
    bench.add_argument("--growth", action="store_true", help="1 to 100 M parameters, 2 to 8 ranks")
    bench.add_argument("--figure", default=None, help="with --growth: write the figure, a PNG")

    from ddpz_lite.cli import train  # light: its options are those of Recipe, which needs no torch

    purpose = "train a GPT on a text with DDP or ZeRO; resume after a crash"
    train.add_options(_command(commands, "train", purpose, train.EXAMPLE, train.run))
    return parser


def _command(commands, name: str, purpose: str, example: str, run) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=f"example:  {example}",
    )
    command.set_defaults(run=run)
    return command


def _doctor(options: argparse.Namespace) -> int:
    from ddpz_lite.cli import doctor

    return doctor.run(options.ranks)


def _lessons(options: argparse.Namespace) -> int:
    from ddpz_lite.cli import lessons

    return lessons.run(options.names, options.dir, options.timeout, options.write)


def _bench(options: argparse.Namespace) -> int:
    from ddpz_lite.cli import bench

    return bench.run(options)
