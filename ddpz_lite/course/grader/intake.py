"""Take submissions in: untrusted files, folders and zips.

`owners` says which student a notebook belongs to, `answers` what is taken from it. Other files next
to it (a `torch.py`, a `conftest.py`) are not opened. Everything that was handed in comes out again:
as a submission, or as a line that says why not and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ddpz_lite.course.grader.answers import Answers, read
from ddpz_lite.course.grader.exercise import Pristine
from ddpz_lite.course.grader.owners import LISTED, HandIn, hand_ins, nothing
from ddpz_lite.course.grader.people import Roster
from ddpz_lite.course.grader.places import MAX_NOTEBOOKS, NotebookFile, gathered
from ddpz_lite.course.grader.submission import NotGraded, NotTaken, Submission
from ddpz_lite.course.grader.text import clean
from ddpz_lite.course.grader.zips import NESTED, unzipped

TOO_MANY = f"it holds more than {MAX_NOTEBOOKS} notebooks, and the rest was not looked at"

Taken = list[tuple[NotebookFile, Answers]]
Problems = list[tuple[str, str]]  # (where, reason)


def take(
    paths: Iterable[Path], known: dict[str, Pristine], roster: Roster | None = None
) -> list[Submission | NotGraded]:
    """All that the paths hold, in the order of names.

    Of two notebooks of a student for one exercise the better counts, and what several of the paths
    hold counts once. known: the exercises by lesson. A student of the roster gets its name. Nothing
    here raises because of what a student handed in.
    """
    names = [exercise.name for exercise in known.values()]
    read_in = []
    seen: set[str] = set()
    for path in dict.fromkeys(paths):
        with ExitStack() as stack:
            for hand_in in hand_ins(path, names, stack):
                hand_in = _joined(hand_in, roster)
                taken, problems = _read(hand_in, known)
                taken = [one for one in taken if one[0].path not in seen]
                seen.update(file.path for file, _ in taken)
                read_in.append((hand_in, taken, problems))
    students = _told_apart([hand_in for hand_in, *_ in read_in])
    best = _best(read_in, students)
    result: list[Submission | NotGraded] = []
    for (_, taken, problems), (student, renamed) in zip(read_in, students, strict=True):
        counts = [best.get((student, file.path)) for file, _ in taken]
        local = [one for one in counts if one is not None]
        result += [replace(one, warnings=(*one.warnings, *renamed)) for one in local]
        result += _lines(student, problems, renamed)
    return result


def _joined(hand_in: HandIn, roster: Roster | None) -> HandIn:
    """A hand-in under the name that the roster has for its student."""
    student = roster.find(hand_in.name, hand_in.sender) if roster and hand_in.name else None
    if student is None:
        return hand_in
    # A platform's word joins several places of a student; a name that a student chose does not.
    place = f"roster {student.name}" if hand_in.sender else hand_in.place
    return replace(hand_in, name=student.name, place=place)


# ---- from places to answers ----


def _read(hand_in: HandIn, known: dict[str, Pristine]) -> tuple[Taken, Problems]:
    """(the notebooks that were taken, what was not and why)."""
    taken: Taken = []
    problems = list(hand_in.problems)
    with ExitStack() as stack:
        for number, file in enumerate(_papers(hand_in.files, problems, stack)):
            if number == MAX_NOTEBOOKS:
                problems.append((hand_in.where, TOO_MANY))
                break
            try:
                taken.append((file, read(file.load(), file.stem, known)))
            except NotTaken as reason:
                problems.append((file.where, str(reason)))
    if not taken and not problems:
        problems.append((hand_in.where, nothing(hand_in)))
    return taken, problems


def _papers(
    files: Sequence[NotebookFile], problems: Problems, stack: ExitStack
) -> Iterator[NotebookFile]:
    """The notebooks, those in zips too; what is wrong with a zip goes to `problems`."""
    for file in files:
        if not file.zipped:
            yield file
            continue
        try:
            found = gathered(unzipped(file, stack))
        except NotTaken as reason:
            problems.append((file.where, str(reason)))
            continue
        problems += found.problems
        if not found.files and not found.problems:
            empty = HandIn(file.stem, file.path, file.where, others=found.others)
            problems.append((file.where, nothing(empty)))
        for one in found.files:
            if one.zipped:
                problems.append((one.where, NESTED))
            else:
                yield replace(one, late=file.late, order=file.order)


def _lines(student: str, problems: Problems, renamed: Sequence[str]) -> Iterator[NotGraded]:
    """A line for each reason, however often it holds."""
    by_reason: dict[str, list[str]] = {}
    for where, reason in problems:
        by_reason.setdefault(reason, []).append(where)
    for reason, places in by_reason.items():
        text = f" ({renamed[0]})" if renamed else ""
        yield NotGraded(student, _some(places), f"{reason}{text}")


def _some(places: Sequence[str]) -> str:
    if len(places) <= LISTED:
        return ", ".join(places)
    return f"{', '.join(places[:LISTED])} and {len(places) - LISTED} more"


# ---- which of several ----


def _best(
    read_in: Sequence[tuple[HandIn, Taken, Problems]],
    students: Sequence[tuple[str, Sequence[str]]],
) -> dict[tuple[str, str], Submission]:
    """(student, place) -> the notebook that counts, of several for one exercise.

    It is the platform's last attempt; otherwise the one with the most answers, of equals the last.
    """
    groups: dict[tuple[str, str], Taken] = {}
    for (_, taken, _), (student, _) in zip(read_in, students, strict=True):
        for file, answers in taken:
            groups.setdefault((student, answers.lesson), []).append((file, answers))
    best = {}
    for (student, _), group in groups.items():
        number = max(range(len(group)), key=lambda n: (group[n][0].order, group[n][1].attempted, n))
        file, answers = group.pop(number)
        warnings = list(answers.warnings)
        if group:
            warnings.append(_which_counts(file, group))
        if file.late:
            warnings.append("the platform marks it as late")
        best[student, file.path] = Submission(
            student=student,
            lesson=answers.lesson,
            where=file.where,
            sha256=answers.sha256,
            answers=answers.cells,
            warnings=tuple(warnings),
            elsewhere=answers.elsewhere,
            late=file.late,
        )
    return best


def _which_counts(chosen: NotebookFile, others: Taken) -> str:
    """Which of several notebooks of a student for one exercise counts, and why."""
    if any(other.order != chosen.order for other, _ in others):
        why = "the last attempt"
    elif any(other.path > chosen.path for other, _ in others):
        why = "it has the most answers"
    else:
        why = "the last by name"
    were = "was" if len(others) == 1 else "were"
    places = _some([other.where for other, _ in others])
    return f"{chosen.where} counts ({why}); {places} {were} handed in too"


def _told_apart(hand_ins: Sequence[HandIn]) -> list[tuple[str, list[str]]]:
    """(name, what to say of it) for each.

    If two places have the same name, or differ by case alone, one gets a number. A folder's or
    zip's name comes before a notebook's own. "" names no student.
    """
    owner: dict[str, str] = {}
    for one in sorted(hand_ins, key=lambda one: one.own):
        if one.name:
            owner.setdefault(clean(one.name).casefold(), one.place)
    result = []
    for one in hand_ins:
        first = name = clean(one.name) if one.name else ""
        number = 2
        while name and owner.setdefault(name.casefold(), one.place) != one.place:
            name, number = f"{first}-{number}", number + 1
        text = f"{one.where}: another hand-in is called {first} too, so this one is called {name}"
        result.append((name, [text] if name != first else []))
    return result
