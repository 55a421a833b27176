"""Proofs that can fail: a cell is run under a change that makes its claim false, and must fail.

A cell's metadata names the change, under `ddpz`:

    "counterfactuals": [{"of": ["M020"],               what the cell proves by failing under it
                         "replace": "world_size=4",    once in the cell's source
                         "by": "world_size=1",
                         "in": "launch-cell",          id of an earlier cell to change instead
                         "raises": "ValueError"}]      if not AssertionError

Here they are read; `ddpz author NN --proofs` and a test run them (cli/proofs.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import nbformat

DEFAULT = "AssertionError"


@dataclass(frozen=True)
class Counterfactual:
    """One change, with the cell that must fail under it.

    of        ids that the cell proves
    cell      position of that cell
    changed   position of the cell whose source is changed, `cell` or an earlier one
    replace, by   the words there, and what they become
    raises    name of the error with which the cell must fail
    """

    of: tuple[str, ...]
    cell: int
    changed: int
    replace: str
    by: str
    raises: str


def counterfactuals(notebook: nbformat.NotebookNode) -> list[Counterfactual]:
    """Those that the cells of a notebook name. Raises ValueError for one that cannot be applied."""
    found = []
    at = {cell.get("id"): i for i, cell in enumerate(notebook.cells)}
    for i, cell in enumerate(notebook.cells):
        for entry in cell.metadata.get("ddpz", {}).get("counterfactuals", []):
            changed = at.get(entry.get("in", cell.get("id")), len(notebook.cells))
            if wrong := _malformed(notebook, i, changed, entry):
                raise ValueError(f"cell {i}: counterfactual of {entry.get('of')}: {wrong}")
            raises = entry.get("raises", DEFAULT)
            words = entry["replace"], entry["by"]
            found.append(Counterfactual(tuple(entry["of"]), i, changed, *words, raises))
    return found


def _malformed(notebook: nbformat.NotebookNode, i: int, changed: int, entry: dict) -> str | None:
    unknown = entry.keys() - {"of", "replace", "by", "in", "raises"}
    if unknown or not {"of", "replace", "by"} <= entry.keys() or not entry["of"]:
        return f"it has {sorted(entry)}; `of`, `replace` and `by` are needed"
    facts = notebook.cells[i].metadata["ddpz"]
    settled = {id_ for key in ("answers", "busts", "teaches") for id_ in facts.get(key, [])}
    if others := set(entry["of"]) - settled:
        return f"the cell does not say that it settles {sorted(others)}"
    if changed > i or notebook.cells[changed].cell_type != "code":
        return f"{entry.get('in')!r} is not a code cell before it"
    times = notebook.cells[changed].source.count(entry["replace"])
    if times != 1 or entry["replace"] == entry["by"]:
        return f"{entry['replace']!r} is in the source {times} times, and must be there once"
    return None
