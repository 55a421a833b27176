"""`ddpz lessons`: execute notebooks without a browser, and say how long each one took.

Authors use `--write`, which stores the new outputs without what differs from run to run or from
machine to machine, so that a change in a notebook's file is a change of the lesson.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from tqdm import tqdm

from ddpz_lite.course.authoring.catalogue import KERNELSPEC, number_of
from ddpz_lite.course.authoring.rules import code_hash
from ddpz_lite.course.cli.kernel import AsyncManager
from ddpz_lite.course.cli.shared import CHECKOUT, UserError, lesson_number

ANSI = re.compile(r"\x1b\[[0-9;]*m")
WIDGET = "application/vnd.jupyter.widget-view+json"


@dataclass
class Outcome:
    """One executed notebook."""

    name: str
    cells: int
    seconds: float
    error: str | None = None  # one line that says what happened, and where


def run(options: Namespace) -> int:
    """Execute the notebooks that the names choose; print a table; 1 if one of them failed."""
    paths = choose(find(options.dir), options.names)
    cells = sum(len(_code_cells(nbformat.read(path, as_version=4))) for path in paths)
    outcomes = []
    with tqdm(total=cells, unit="cell", leave=False, disable=None) as bar:  # in a terminal
        for path in paths:
            bar.set_description(path.stem)
            outcomes.append(execute(path, options.timeout, options.write, bar.update))
    print(table(outcomes))
    return 1 if any(outcome.error for outcome in outcomes) else 0


def find(folder: str | None) -> list[Path]:
    """The notebooks of `folder`; by default of ./lessons, or of the course around this package."""
    candidates = [Path(folder)] if folder else [Path("lessons"), CHECKOUT / "lessons"]
    for candidate in candidates:
        if notebooks := sorted(candidate.glob("*.ipynb")):
            return notebooks
    raise UserError(
        f"no notebook in {candidates[0]}/. Run it in the folder of the course, or use --dir."
    )


def choose(notebooks: Sequence[Path], names: Sequence[str]) -> list[Path]:
    """The notebooks that `names` mean, each by its number or by a part of its name; or all."""
    if not names:
        return list(notebooks)
    chosen = []
    for name in names:
        number = lesson_number(name)
        found = [path for path in notebooks if number_of(path) == number]
        found = found or [path for path in notebooks if name in path.stem]
        if not found:
            there = ", ".join(path.stem for path in notebooks)
            raise UserError(f"no lesson is called {name!r}. There are: {there}.")
        chosen += [path for path in found if path not in chosen]
    return chosen


def execute(
    path: Path, timeout: float, write: bool = False, after_cell: Callable[[], object] | None = None
) -> Outcome:
    """Run one notebook in a fresh kernel of this Python, in the notebook's own folder."""
    notebook = nbformat.read(path, as_version=4)
    client = client_of(notebook, path, timeout)
    if after_cell:
        client.on_cell_executed = lambda **_: after_cell()
    started = time.monotonic()
    error = None
    # torchrun leaves a folder for the logs of its ranks, so the kernel's temporary files get their
    # own folder, which is removed.
    with tempfile.TemporaryDirectory(prefix="ddpz-", ignore_cleanup_errors=True) as folder:
        try:
            client.execute(env=os.environ | {"DDPZ_TIMES": "assert", "TMPDIR": folder})
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as failure:
            error = _describe(failure, notebook)
    seconds = time.monotonic() - started
    if write and error is None:
        error = _stray(notebook)
    if write and error is None:
        nbformat.write(scrub(notebook), path)
    return Outcome(path.stem, len(_code_cells(notebook)), seconds, error)


def client_of(
    notebook: nbformat.NotebookNode, path: Path, timeout: float, **more: Any
) -> NotebookClient:
    """What executes a notebook read from `path`; `timeout` is seconds for each cell."""
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # our kernel, not one of the same name elsewhere
    return NotebookClient(
        notebook,
        timeout=timeout,
        iopub_timeout=60,  # what arrives later is dropped, without a word
        kernel_name="python3",
        kernel_manager_class=AsyncManager,
        record_timing=False,
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # it warns of its own local port
        resources={"metadata": {"path": str(path.parent)}},
        **more,
    )


def scrub(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Keep what belongs to the lesson: no timing, no kernel of this machine, no session's state.

    A widget lives in a session, so what is stored of it is its still form, the output before it.
    """
    notebook.metadata.pop("widgets", None)
    notebook.metadata["kernelspec"] = dict(KERNELSPEC)
    notebook.metadata["language_info"] = {"name": "python"}
    if "ddpz" in notebook.metadata:
        notebook.metadata["ddpz"]["ran"] = code_hash(notebook)
    for cell in notebook.cells:
        for key in ("execution", "collapsed", "scrolled", "ExecuteTime", "lines_to_next_cell"):
            cell.metadata.pop(key, None)
        if "outputs" in cell:
            cell.outputs = [o for o in cell.outputs if WIDGET not in o.get("data", {})]
    return notebook


def table(outcomes: Sequence[Outcome]) -> str:
    """One line per lesson, a line under each that failed, and the sum."""
    width = max(len(outcome.name) for outcome in outcomes)
    lines = [f"{'lesson':<{width}}  cells  seconds"]
    for outcome in outcomes:
        word = "" if outcome.error is None else "  FAILED"
        lines.append(f"{outcome.name:<{width}}  {outcome.cells:>5}  {outcome.seconds:>7.1f}{word}")
        if outcome.error:
            lines += [f"    {line}" for line in outcome.error.splitlines()]
    failed = sum(outcome.error is not None for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    lines.append(f"{len(outcomes) - failed} of {len(outcomes)} ran to the end in {seconds:.1f} s")
    return "\n".join(lines)


def _code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _stray(notebook: nbformat.NotebookNode) -> str | None:
    """What must not be stored: the first words on stderr, and their cell."""
    for i, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                return f"cell {i} wrote to stderr, nothing was stored: {output.text.strip()[:200]}"
    return None


def _describe(failure: Exception, notebook: nbformat.NotebookNode) -> str:
    """Which cell stopped, on what: its first line, and the last lines of the message."""
    position, cell = _stopped_at(notebook)
    first = cell.source.strip().splitlines()[0] if cell.source.strip() else "(empty)"
    if isinstance(failure, CellExecutionError):
        reason = f"{failure.ename}: {failure.evalue}"
    elif isinstance(failure, CellTimeoutError):
        reason = "the cell did not end in time"
    else:
        reason = "the kernel died"
    reason = "\n".join(ANSI.sub("", reason).strip().splitlines()[:12])
    return f"cell {position}: {first}\n{reason}"


def _stopped_at(notebook: nbformat.NotebookNode) -> tuple[int, nbformat.NotebookNode]:
    """The failing cell and its position in the notebook: with an error, or the last begun."""
    cells = [(i, cell) for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    for i, cell in cells:
        if any(output.output_type == "error" for output in cell.outputs):
            return i, cell
    begun = [(i, cell) for i, cell in cells if cell.execution_count]
    return begun[-1] if begun else cells[0]
