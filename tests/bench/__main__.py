"""Run `python -m bench targets [GROUP ...]` or `python -m bench growth [MEASURE ...]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench import growth, targets


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what `argv` names (this process's arguments by default), and print it."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    commands = parser.add_subparsers(required=True)
    of_targets = commands.add_parser("targets", help="what users wait for, next to its target")
    of_targets.add_argument("groups", nargs="*", help=f"of {', '.join(targets.GROUPS)} (all)")
    of_targets.set_defaults(run=lambda options: print_targets(options.groups))
    of_growth = commands.add_parser("growth", help="how time and memory grow")
    of_growth.add_argument("measures", nargs="*", help=f"of {', '.join(growth.MEASURES)} (all)")
    of_growth.add_argument("--figures", type=Path, help="a folder that gets a figure of each")
    of_growth.set_defaults(run=lambda options: print_growth(options.measures, options.figures))
    options = parser.parse_args(argv)
    options.run(options)


def print_targets(groups: Sequence[str]) -> None:
    """Print a line for each measurement next to its target, then how many are above it."""
    missed = 0
    for row in targets.rows(groups or list(targets.GROUPS)):
        mark = "" if row.met else "  above"
        missed += not row.met
        line = f"{row.what:<52} {row.measured:>8.2f} {row.unit:<5}  target {row.target:g}{mark}"
        print(line, flush=True)
    print(f"{missed} above their targets" if missed else "all within their targets")


def print_growth(measures: Sequence[str], figures: Path | None) -> None:
    """Print a table for each measure; with `figures` also draw it, in that folder."""
    for name in measures or growth.MEASURES:
        make, head = growth.MEASURES[name]
        print("  ".join(head))
        rows = []
        for row in make():
            cells = (f"{cell:>{len(title)}.4g}" for cell, title in zip(row, head, strict=True))
            print("  ".join(cells), flush=True)
            rows.append(row)
        if figures:
            path = figures / f"growth-{name}.png"
            path.write_bytes(growth.figure(name, rows))
            print(f"figure: {path}")
        print()


if __name__ == "__main__":
    main()
