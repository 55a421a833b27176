"""The table of wrong answers: `cd tests && python -m answers 03 [part of a task's name]`.

For each task the points of its solution, and for each wrong variant its points and its sentence.
Exits with 1 if a solution is not solved or a variant did not hear its own sentence.
"""

from __future__ import annotations

import sys

from answers import trying
from ddpz_lite.grade.task import tasks


def main(words: list[str]) -> int:
    bad = 0
    for lesson in [word for word in words if word.isdigit()] or trying.lessons():
        notebook = trying.master(lesson)
        parts = [word for word in words if not word.isdigit()] or [""]
        for task in tasks(lesson):
            if any(part in task.id for part in parts):
                bad += table(task, notebook)
    print(f"{bad} bad")
    return 1 if bad else 0


def table(task, notebook) -> int:
    """Print the rows of one task; how many are bad."""
    verdict = trying.judge(task, notebook)
    print(f"{task.id}   solution: {verdict.points} of {verdict.out_of}", flush=True)
    bad = 0 if verdict.solved else 1
    if bad:
        print(f"    BAD  {trying.sentences(verdict)}")
    for wrong in trying.variants(task.id):
        verdict = trying.judge(task, notebook, wrong.source)
        complaint = trying.missed(task, wrong, verdict)
        bad += bool(complaint)
        points = f"{verdict.points} of {verdict.out_of}"
        print(f"    {'BAD' if complaint else 'ok '}  {points:<8}  {wrong.name}", flush=True)
        print(f"         {complaint or trying.sentences(verdict)}", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
