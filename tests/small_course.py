"""A course of one exercise with one task, 03.weighted_mean, and what students make of it."""

from __future__ import annotations

import copy
import json

import nbformat

from ddpz_lite.course.check import notebooks

GIVEN = "import torch\nimport torch.distributed as dist\n\nfrom ddpz_lite import check"
TEXT = "## 1. A mean\n\n5 points, 10 minutes. Words."
ANSWER = '''def weighted_mean(gradients, samples):
    """The mean over all samples, in place."""
    ### BEGIN SOLUTION
    parts = [gradient.flatten() * samples for gradient in gradients]
    buffer = torch.cat([*parts, torch.tensor([float(samples)])])
    dist.all_reduce(buffer)
    means = buffer[:-1] / buffer[-1]
    for gradient, mean in zip(gradients, means.split([g.numel() for g in gradients])):
        gradient.copy_(mean.view_as(gradient))
    ### END SOLUTION'''
SOLVED = "\n".join(line for line in ANSWER.splitlines() if "SOLUTION" not in line)
CHECK = 'check("03.weighted_mean", weighted_mean)'
NAME = "03_mean"
CELL = "weighted_mean-answer"


def master() -> nbformat.NotebookNode:
    """The exercise with its solution."""
    cell, words = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell
    cells = [words("# Mean\n\nAbout 10 minutes.", id="words"), cell(GIVEN, id="given")]
    cells[1].metadata["ddpz"] = {"role": "given"}
    for part, made in (("text", words(TEXT)), ("answer", cell(ANSWER)), ("check", cell(CHECK))):
        made.id = f"weighted_mean-{part}"
        made.metadata["ddpz"] = {"role": part, "task": "03.weighted_mean"}
        cells.append(made)
    about = {"exercise": "03", "title": "Mean", "minutes": 10}
    return nbformat.v4.new_notebook(cells=cells, metadata={"ddpz": about})


def handed_in(answer: str | None = None, **changed) -> str:
    """A student's notebook as the text of a file: the stub, or with `answer` in its place.

    changed: keys of the notebook that are different.
    """
    notebook = copy.deepcopy(notebooks.blank(master()))
    if answer is not None:
        notebook.cells[3].source = answer
    return json.dumps({**json.loads(nbformat.v4.writes(notebook)), **changed})
