"""The files of a new lesson with one task, for its author to fill.

The lesson has its ten parts, each with a word on what belongs there; every such word begins with
TODO, so that `ddpz author` finds what is left. The task works as it stands, a mean over all ranks:
with a job, a judge, wrong answers and right ones, to be changed piece by piece into the real one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from string import Template

import nbformat

from ddpz_lite.course.authoring import catalogue, rules
from ddpz_lite.course.check.notebooks import write_text

TEMPLATES = Path(__file__).resolve().parent / "templates"
TODO = "TODO"
PARTS = {
    "recall": ("Before you begin", "three questions on the lessons that this one needs"),
    "problem": (
        "The problem",
        "something too slow, too big or wrong, measured before it is solved",
    ),
    "idea": (
        "The idea",
        "small steps: prose, 10 to 20 lines of code, a cell that shows the claim to be true; "
        "the mechanism is built here, and only then the library's is imported",
    ),
    "predict": (
        "Predict, then run",
        "four places or more where a learner would be wrong, each a number committed beforehand",
    ),
    "picture": ("A picture of your run", "the learner's own run, drawn; a slider that teaches"),
    "break": ("Break it", "one bug that people really have, its message, and how to read it"),
    "production": (
        "In production",
        "the same in torch and DeepSpeed, run where a CPU can; what they do that ours does not",
    ),
    "myths": ("Myths", "8 to 12 claims, each tested in a cell whose metadata says which"),
    "summary": ("Summary", "at most six lines; further reading: papers, with section numbers"),
}
RECALL = """\
from ddpz_lite import show
from ddpz_lite.course.show import ask, right, wrong

show.quiz(
    [
        ask(
            "TODO: a question on an earlier lesson?",
            wrong("TODO: no", "TODO: why not."),
            right("TODO: yes", "TODO: why."),
        ),
    ]
)"""
RUN = """\
import torch
import torch.distributed as dist

import ddpz_lite as dz


def add_up():
    x = torch.full((4,), dist.get_rank() + 1.0)  # (4,)
    dist.all_reduce(x)
    return x[0].item()


run = dz.launch(add_up, world_size=4)
print(list(run))"""
PREDICTIONS = """\
total = show.predict("TODO: what every rank holds after the all-reduce", default=10)
sent = show.predict("TODO: bytes that rank 0 sends", default=24, unit="bytes")
calls = show.predict("TODO: collectives that rank 0 calls", default=1)
records = show.predict("TODO: records in the ledger of all ranks", default=4)"""
REVEAL = """\
total.reveal(run[0])
sent.reveal(sum(run.bytes_sent()[0].values()))
calls.reveal(sum(record.rank == 0 for record in run.ledger))
records.reveal(len(run.ledger))"""


@dataclass(frozen=True)
class Names:
    """What the files are named after: `number` "12", `title`, `task` the name of its function."""

    number: str
    title: str
    task: str

    @property
    def stem(self) -> str:
        """The name of the notebooks: "12_zero_in_practice"."""
        words = re.sub(r"[^a-z0-9]+", "_", self.title.partition(":")[0].lower()).strip("_")
        return f"{self.number}_{words}"


def files(names: Names, plan: dict) -> dict[str, str]:
    """The text of each file of the lesson, by its path in the course.

    plan: what lessons/plan.json says of the lesson, as `learn` and `makes`; may be empty.
    """
    package = f"ddpz_lite/course/tasks/lesson{names.number}"
    return {
        f"lessons/{names.stem}.ipynb": write_text(_lesson(names, plan)),
        f"solutions/{names.stem}.ipynb": write_text(_solution(names)),
        f"{package}/__init__.py": "",
        f"{package}/job.py": _filled("job.txt", names),
        f"{package}/judge.py": _filled("judge.txt", names),
        f"tests/answers/lesson{names.number}.py": _filled("answers.txt", names),
    }


def without_plan(text: str, number: str) -> tuple[str, dict]:
    """lessons/plan.json without its entry for that number, and that entry."""
    plan = json.loads(text)
    planned = plan["planned"].pop(number, {})
    return json.dumps(plan, indent=2, ensure_ascii=False) + "\n", planned


def _lesson(names: Names, plan: dict) -> nbformat.NotebookNode:
    facts = {
        "title": names.title,
        "can_do": [f"TODO: do the {which} thing" for which in ("first", "second", "third")],
        "minutes": 60,
        "difficulty": "medium",
        "needs": ["00"],
        "learn": plan.get("learn", "TODO: what one learns, in a line"),
        "makes": plan.get("makes", "TODO: a few words"),
    }
    if catalogue.is_further(names.number):
        facts["second"] = "can wait"
    abilities = "\n".join(f"- {can}" for can in facts["can_do"])
    second = f" · {facts['second']}" if "second" in facts else ""
    header = (
        f"# {names.title}\n\nTODO: what this lesson is about, in three sentences.\n\n"
        f"When you have finished, you will be able to\n\n{abilities}\n\n"
        f"60 minutes · medium{second} · needs: [00 Start here](00_start_here.ipynb)"
    )
    code = {"recall": [RECALL], "problem": [RUN], "predict": [PREDICTIONS, REVEAL]}
    cells = [_words(header, "header", ddpz={"part": "header"})]
    for part in rules.PARTS[1:]:
        heading, belongs = PARTS[part]
        cells.append(_words(f"## {heading}\n\n{TODO}: {belongs}.", part, ddpz={"part": part}))
        cells += [_code(source, f"{part}-{i}") for i, source in enumerate(code.get(part, []), 1)]
    return _notebook(cells, facts)


def _solution(names: Names) -> nbformat.NotebookNode:
    task = f"{names.number}.{names.task}"
    cells = [_words(_filled("exercise.txt", names).rstrip(), "words")]
    cells.append(_code(_filled("given.txt", names).rstrip(), "given", ddpz={"role": "given"}))
    sources = {"text": "text.txt", "answer": "answer.txt", "check": "check.txt"}
    for role, template in sources.items():
        make = _words if role == "text" else _code
        about = {"role": role, "task": task}
        cells.append(make(_filled(template, names).rstrip(), f"{names.task}-{role}", ddpz=about))
    return _notebook(cells, {"exercise": names.number, "title": names.title, "minutes": 10})


def _notebook(cells: list, facts: dict) -> nbformat.NotebookNode:
    metadata = {
        "ddpz": facts,
        "kernelspec": catalogue.KERNELSPEC,
        "language_info": {"name": "python"},
    }
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata)


def _words(source: str, ident: str, **metadata) -> nbformat.NotebookNode:
    return nbformat.v4.new_markdown_cell(source, id=ident, metadata=metadata)


def _code(source: str, ident: str, **metadata) -> nbformat.NotebookNode:
    return nbformat.v4.new_code_cell(source, id=ident, metadata=metadata)


def _filled(template: str, names: Names) -> str:
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    return Template(text).substitute(number=names.number, title=names.title, task=names.task)
