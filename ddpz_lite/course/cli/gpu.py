"""`ddpz gpu`: everything that needs an NVIDIA GPU, and one report of it, as JSON and as Markdown.

It installs nothing and asks nothing of the network. What this Python lacks is named before anything
runs, or, where only one part needs it, in the report.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from ddpz_lite import __version__
from ddpz_lite.course.cli.shared import CHECKOUT, UserError, folder, shown

if TYPE_CHECKING:
    from ddpz_lite.course.bench.gpu import Figure, Sizes

KINDS = ("tests", "plain", "peers", "memory", "bf16", "lessons", "solutions")
# What these parts need beside the library's own packages.
FOR_TESTS = ("pytest", "pytest-timeout", "jupyter-client", "nbformat")
FOR_NOTEBOOKS = ("fsrs", "ipykernel", "ipywidgets", "jupyter-client", "matplotlib", "nbclient",
                 "nbformat", "pillow")  # fmt: skip
PYTEST = ("pytest", "-p", "pytest_timeout", "-p", "no:cacheprovider", "-o", "addopts=", "-v", "-rs",
          "--no-header", "--color=no", "-m", "gpu", "tests/gpu")  # fmt: skip
NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # those that happen to be installed here
NOT_MEASURED = "not measured without a GPU"


@dataclass(frozen=True)
class Part:
    """One thing that was to be run. outcome: passed, failed, not run (it could not), left out."""

    kind: str  # one of KINDS
    name: str
    outcome: str
    summary: str = ""
    seconds: float = 0.0
    output: str = ""  # what its command printed
    figures: list[Figure] = field(default_factory=list)


@dataclass
class Report:
    """What is written. dry: sizes were tiny, so no figure says anything about this machine."""

    dry: bool
    machine: dict[str, str]
    parts: list[Part] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether all that was to be run ran, and passed. A missed target is no failure."""
        return all(part.outcome in ("passed", "left out") for part in self.parts)


def run(options: argparse.Namespace) -> int:
    """Run the parts that were chosen; write the report after each; 1 if one failed or could not."""
    if unknown := sorted({*(options.only or ())} - {*KINDS}):
        raise UserError(f"--only has no part {', '.join(unknown)}. There are: {', '.join(KINDS)}.")
    refuse_what_cannot_run(options.dry)
    from ddpz_lite.course.bench import gpu

    sizes, stem = (gpu.TINY, "dry") if options.dry else (gpu.REAL, "report")
    out = Path(options.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    report = Report(options.dry, machine())
    for part in parts(options, sizes):
        report.parts.append(part)
        print(f"{part.outcome:<8}  {part.name}: {part.summary}", flush=True)
        (out / f"{stem}.json").write_text(json.dumps(asdict(report), indent=1) + "\n")
        (out / f"{stem}.md").write_text(markdown(report))
    print(f"report: {shown(out / stem)}.md and .json")
    return 0 if report.right else 1


# ---- what is missing ----


def refuse_what_cannot_run(dry: bool) -> None:
    """Raises UserError where nothing could be measured: no checkout, a package, no GPU."""
    if not (CHECKOUT / "pyproject.toml").is_file():
        raise UserError("it needs the course's folder. Fix: run `make gpu` in a checkout.")
    if missing := lacking():
        raise UserError(cure(missing))
    import torch

    if not dry and not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
        raise UserError(
            f"torch {torch.__version__} ({build} build) sees no NVIDIA GPU here. Fix: a machine "
            "with one, its driver, and torch's CUDA build; or rehearse on the CPU: make gpu DRY=1."
        )


def lacking(names: tuple[str, ...] = ()) -> list[str]:
    """The packages, the library's own or `names`, that this Python has not or has too old."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    optional = chain.from_iterable(project["optional-dependencies"].values())
    named = [one for one in optional if one.partition(">=")[0] in names]
    wanted = named if names else project["dependencies"]
    return [requirement for requirement in wanted if not _has(*requirement.split(">="))]


def _has(package: str, oldest: str) -> bool:
    try:
        there = metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return _release(there) >= _release(oldest)


def _release(version: str) -> list[int]:
    """[2, 11] of "2.11.0a0+cu130": enough to tell an older release."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def cure(missing: list[str]) -> str:
    """The sentence that names what is missing."""
    wanted = " ".join(f"'{each}'" for each in missing)
    return f"missing: {', '.join(missing)}. Fix: python -m pip install {wanted}"


# ---- the parts ----


def parts(options: argparse.Namespace, sizes: Sizes) -> Iterator[Part]:
    """Each part as it ends: what is tested, what is measured, what is only run."""
    import torch

    from ddpz_lite.course.bench import gpu

    chosen = options.only or KINDS
    if "tests" in chosen:
        yield command("tests", "tests marked gpu", PYTEST, FOR_TESTS)
    for kind, name, measure in gpu.measurements(sizes, torch.cuda.device_count()):
        if kind in chosen:
            yield measured(kind, name, measure, options.dry)
    for kind in ("lessons", "solutions"):
        if kind in chosen:
            yield notebooks(kind, options.notebooks, options.dry)
    for kind in KINDS:
        if kind not in chosen:
            yield Part(kind, kind, "left out", "not among --only")


def command(kind: str, name: str, words: tuple[str, ...], needs: tuple[str, ...]) -> Part:
    """Run a module of this Python in the course's folder; its last line is the summary."""
    if missing := lacking(needs):
        return Part(kind, name, "not run", cure(missing))
    path = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ddpz-gpu-") as home:  # running solves no exercise
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=CHECKOUT,
            env={**os.environ, "PYTHONPATH": path, "DDPZ_HOME": home, **NO_PLUGINS},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    output = done.stdout.strip()
    summary = output.rpartition("\n")[2].strip("= ") or f"exit status {done.returncode}"
    outcome = "failed" if done.returncode else "passed"
    if re.fullmatch(r"\d+ skipped.*", summary):  # pytest's, of nothing but skips
        outcome = "left out"
    return Part(kind, name, outcome, summary, time.monotonic() - began, output)


def notebooks(kind: str, numbers: list[str] | None, dry: bool) -> Part:
    """A folder's notebooks, or those with these numbers; a dry run executes none but the latter."""
    place = folder(kind)
    there = sorted(path.stem for path in place.glob("*.ipynb"))
    chosen = [stem for stem in there if not numbers or stem.partition("_")[0] in numbers]
    if not chosen or (dry and not numbers):
        why = "--notebooks chooses none of them" if numbers else "a dry run executes none"
        return Part(kind, kind, "left out", f"{len(there)} here; {why}", output="\n".join(there))
    words = ("ddpz_lite", "lessons", "--dir", str(place), *chosen)
    return command(kind, kind, words, FOR_NOTEBOOKS)


def measured(kind: str, name: str, measure: Callable[[], list[Figure]], dry: bool) -> Part:
    """One measurement. A rank that fails ends this part and no other."""
    from ddpz_lite import RankFailed

    began = time.monotonic()
    try:
        figures = measure()
    except RankFailed as error:
        output = str(error)
        summary = output.partition("\n")[0]
        return Part(kind, name, "failed", summary, time.monotonic() - began, output)
    missed = [figure.what for figure in figures if figure.met is False and not dry]
    summary = f"above its target: {', '.join(missed)}" if missed else ""
    return Part(kind, name, "passed", summary, time.monotonic() - began, figures=figures)


def machine() -> dict[str, str]:
    """Where and on what the report was made, without the paths of the machine."""
    import torch

    from ddpz_lite.course.cli import doctor

    driver = Path("/proc/driver/nvidia/version")
    commit = ("git", "-C", str(CHECKOUT), "rev-parse", "--short", "HEAD")
    try:
        found = subprocess.run(commit, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        found = ""
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "ddpz-lite": f"{__version__}, commit {found or 'unknown'}",
        **dict(doctor.machine_rows()),
        "driver": driver.read_text().splitlines()[0] if driver.is_file() else "none of NVIDIA",
    }
    if torch.cuda.is_available():
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


# ---- the report ----


def markdown(report: Report) -> str:
    """The report as a page: what ran, the figures beside their targets, the output of commands."""
    lines = ["# Dry run of the GPU report" if report.dry else "# GPU report", ""]
    if report.dry:
        lines += ["Tiny sizes: it shows that every part runs. No figure is judged.", ""]
    lines += _table(["", ""], [list(row) for row in report.machine.items()])
    rows = [[p.name, p.outcome, f"{p.seconds:.1f}", p.summary] for p in report.parts]
    lines += ["## What ran", "", *_table(["part", "outcome", "seconds", ""], rows)]
    figures = [figure for part in report.parts for figure in part.figures]
    for title, group in groupby(figures, lambda figure: figure.table):
        tabled = list(group)
        rows = [[f.what, *map(_value, f.values.values()), _verdict(f, report.dry)] for f in tabled]
        lines += [f"## {title}", "", *_table(["", *tabled[0].values, "target"], rows)]
    for part in report.parts:
        if part.output:
            lines += [f"## Output: {part.name}", "", "```", part.output, "```", ""]
    return "\n".join(lines)


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    rows = [[cell.replace("|", "\\|") for cell in row] for row in [head, *rows]]
    rows.insert(1, ["---"] * len(head))
    return [f"| {' | '.join(row)} |" for row in rows] + [""]


def _value(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.4g}"


def _verdict(figure: Figure, dry: bool) -> str:
    if figure.target is None:
        return ""
    judged = "" if dry or figure.met is None else ": met" if figure.met else ": missed"
    return f"at most {figure.target:g}{judged}"
