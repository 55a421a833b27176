"""`ddpz new`: the skeleton of a lesson with one task."""

from __future__ import annotations

import keyword
import re
from argparse import Namespace
from pathlib import Path

from ddpz_lite.course.authoring import catalogue, skeleton
from ddpz_lite.course.cli.shared import UserError, folder


def run(options: Namespace) -> int:
    """Write the files and name them, with what to do next; writes nothing over what is there."""
    root = folder("lessons").parent
    names = skeleton.Names(options.lesson, options.title.strip(), options.task)
    _check(names)
    plan_file = root / "lessons/plan.json"
    plan, planned = skeleton.without_plan(plan_file.read_text(encoding="utf-8"), names.number)
    texts = skeleton.files(names, planned)
    _refuse(root, names.number, texts)
    texts["lessons/plan.json"] = plan
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
        print(f"wrote {name}")
    print(f"Then: ddpz author {names.number} says what is to be filled, and what is still wrong.")
    return 0


def _check(names: skeleton.Names) -> None:
    if not re.fullmatch(catalogue.NUMBER, names.number):
        raise UserError(
            f"a lesson's number is NN, or NNb or NNc for a further notebook: {names.number!r}."
        )
    if not re.search("[A-Za-z]", names.title):
        raise UserError(f"the title needs words: {names.title!r}.")
    if not names.task.isidentifier() or keyword.iskeyword(names.task):
        raise UserError(f"--task names a function, as global_norm: {names.task!r}.")


def _refuse(root: Path, number: str, texts: dict[str, str]) -> None:
    notebooks = [*root.glob("lessons/*.ipynb"), *root.glob("solutions/*.ipynb")]
    there = [path for path in notebooks if catalogue.number_of(path) == number]
    there += [root / name for name in texts if (root / name).exists()]
    if there:
        raise UserError(
            f"lesson {number} is there already, as {there[0].relative_to(root)}. "
            "Nothing was written."
        )
