"""The table of wrong answers: `cd tests && python -m answers 03 [part of a task's name]`.

It has, for each task, the points of its solution, and of each wrong and right answer its points and
its feedback. Exits with 1 if a right answer is not solved or a wrong one did not get its sentence.
With --mutants it mutates the solutions instead, which takes minutes, and lists those that survive.
"""

from __future__ import annotations

import sys

from answers import mutants, trying
from ddpz_lite.course.check.task import tasks


def main(words: list[str]) -> int:
    """Print the table of the lessons and tasks that `words` name; 1 if a row is bad."""
    if "--mutants" in words:
        words = [word for word in words if word != "--mutants"]
        return print_mutants([word for word in words if word.isdigit()] or trying.lessons())
    bad = 0
    for lesson in [word for word in words if word.isdigit()] or trying.lessons():
        parts = [word for word in words if not word.isdigit()] or [""]
        for task in tasks(lesson):
            if any(part in task.id for part in parts):
                bad += table(task)
    print(f"{bad} bad")
    return 1 if bad else 0


def print_mutants(lessons: list[str]) -> int:
    """Print a line per task, and one for each mutant that survives; 1 if one does."""
    results = [result for lesson in lessons for result in mutants.mutation_report(lesson)]
    print(*results, sep="\n")
    return 1 if any(result.surviving for result in results) else 0


def table(task) -> int:
    """Print the rows of one task; how many are bad."""
    tried, bad = trying.tried(task, frozenset(trying.every(task))), 0
    wrong_ones = {wrong.name: wrong for wrong in trying.variants(task.id)}
    for kind, name in [trying.SOLUTION, *(key for key in tried if key != trying.SOLUTION)]:
        verdict = tried[kind, name]
        if kind == "wrong":
            bad += row(task, name, verdict, trying.missed(task, wrong_ones[name], verdict))
        else:
            words = "is not solved" if kind == "solution" else "was refused"
            label = kind if kind == "solution" else f"right: {name}"
            bad += row(task, label, verdict, "" if verdict.solved else words)
    return bad


def row(task, name: str, verdict, complaint: str) -> bool:
    """Print what became of one answer; whether it is not what it should be."""
    points = f"{verdict.points} of {verdict.out_of}"
    print(f"{task.id}  {'BAD' if complaint else 'ok '}  {points:<8}  {name}", flush=True)
    if said := " ".join([complaint, trying.sentences(verdict)]).strip():
        print(f"         {said}", flush=True)
    return bool(complaint)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
