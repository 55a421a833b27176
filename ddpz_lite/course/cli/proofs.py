"""Run a lesson's proofs under their counterfactuals: each must fail.

A changed cell runs before the cell itself, in the notebook's kernel, so that the cell then puts
right what the change left behind. An earlier cell that was changed runs again unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from ddpz_lite.course.authoring.counterfactuals import Counterfactual, counterfactuals
from ddpz_lite.course.cli.lessons import client_of


def unproved(path: Path, timeout: float = 240) -> Iterator[str]:
    """Run a notebook, and say for each counterfactual under which its cell did not fail: a line."""
    notebook = nbformat.read(path, as_version=4)
    changes: dict[int, list[Counterfactual]] = {}
    for change in counterfactuals(notebook):
        changes.setdefault(change.cell, []).append(change)
    if not changes:
        return
    client = client_of(copy.deepcopy(notebook), path, timeout)  # it stores what it has executed
    with client.setup_kernel():
        for i, cell in enumerate(notebook.cells[: max(changes) + 1]):
            if cell.cell_type != "code":
                continue
            for change in changes.get(i, []):
                if wrong := _fails(client, notebook, change):
                    yield f"{path.name}: cell {i} ({cell.id}), {', '.join(change.of)}: {wrong}"
            client.execute_cell(copy.deepcopy(cell), i)


def _fails(
    client: NotebookClient, notebook: nbformat.NotebookNode, change: Counterfactual
) -> str | None:
    """None if the cell fails under the change as it must; otherwise what it did.

    A busy machine can hide what the change does to a measured time, so there are three tries.
    """
    for _ in range(3):
        if (wrong := _passes(client, notebook, change)) is None:
            return None
    return wrong


def _passes(
    client: NotebookClient, notebook: nbformat.NotebookNode, change: Counterfactual
) -> str | None:
    """One try. Meanwhile `check.times` asserts; unchanged cells may run on a busy machine."""
    changed = copy.deepcopy(notebook.cells[change.changed])
    changed.source = changed.source.replace(change.replace, change.by)
    what = f"with {change.by!r} for {change.replace!r}"
    _times(client, change.changed, "assert")
    error = _error_of(client, changed, change.changed)
    if change.changed != change.cell:
        error = _error_of(client, copy.deepcopy(notebook.cells[change.cell]), change.cell)
    _times(client, change.changed, "")
    if change.changed != change.cell:
        client.execute_cell(copy.deepcopy(notebook.cells[change.changed]), change.changed)
    if error is None:
        return f"{what} it still passes"
    if error.ename != change.raises:
        return f"{what} it raises {error.ename}, not {change.raises}: {error.evalue}"
    return None


def _times(client: NotebookClient, position: int, value: str) -> None:
    """Set DDPZ_TIMES in the kernel."""
    source = f'__import__("os").environ["DDPZ_TIMES"] = "{value}"'
    client.execute_cell(nbformat.v4.new_code_cell(source), position)


def _error_of(
    client: NotebookClient, cell: nbformat.NotebookNode, position: int
) -> nbformat.NotebookNode | None:
    """The error with which a cell ends, None without one.

    The tag keeps the kernel from dropping the next request, as it does for a moment after an error.
    """
    cell.metadata["tags"] = ["raises-exception"]
    client.execute_cell(cell, position)
    return next((output for output in cell.outputs if output.output_type == "error"), None)
