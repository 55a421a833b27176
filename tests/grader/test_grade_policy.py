"""Deadlines, grace days, comments and overrides: the teacher's files, applied again at each run."""

from __future__ import annotations

import csv
import json
from datetime import datetime, timedelta

import pytest
from small_course import SOLVED

from ddpz_lite.course.check.score import Finding, Verdict
from ddpz_lite.course.cli import main
from ddpz_lite.course.grader import policy
from ddpz_lite.course.grader.batch import Grade, Terms
from ddpz_lite.course.grader.policy import Note, Policy

TERMS = Terms("0.1.0+test", 7, "yes")
DUE = datetime.fromisoformat("2026-10-12T23:59:00+02:00")
TASKS = ["03.weighted_mean", "05.bucket"]


def graded(lesson: str = "03", student: str = "Ada") -> Grade:
    task = next(task for task in TASKS if task.startswith(lesson))
    verdict = Verdict(task, "ok", (Finding("right", 10, 10, "pass"),))
    return Grade(student, lesson, "a.ipynb", "ab" * 32, TERMS, (verdict,))


def applied(grades, rules=None, notes=(), times=None, late=frozenset()):
    return policy.apply(grades, rules or Policy(), notes, times or {}, set(late))


# ---- lateness ----


@pytest.mark.parametrize(
    ("hours", "grace", "penalty", "points", "sentence"),
    [
        (-1, 0, 10, 10, ""),
        (0, 0, 10, 10, ""),
        (1, 0, 10, 9, "Handed in 1 day late: 0 grace days used, 0 left. 10% of the points"),
        (25, 3, 10, 10, "Handed in 2 days late: 2 grace days used, 1 left."),
        (80, 3, 25, 7.5, "Handed in 4 days late: 3 grace days used, 0 left. 25% of the points"),
        (24 * 30, 0, 10, 0, "100% of the points are taken off."),
        (1, 0, 100, 0, "100% of the points are taken off."),
    ],
)
def test_lateness_takes_points_once_the_grace_days_are_used(
    hours, grace, penalty, points, sentence
):
    rules = Policy({"03": DUE}, grace, penalty)
    times = {("Ada", "03"): DUE + timedelta(hours=hours)}
    (one,) = applied([graded()], rules, times=times)
    assert one.points == points and one.out_of == 10
    assert sentence in " ".join(one.notes) and len(one.notes) == bool(sentence)


def test_grace_days_are_one_student_s_for_all_exercises_in_the_order_of_deadlines():
    rules = Policy({"05": DUE + timedelta(days=7), "03": DUE}, 3, 50)
    at = {
        (name, lesson): rules.deadlines[lesson] + timedelta(days=2, hours=-1)
        for name in ("Ada", "Bob")
        for lesson in ("03", "05")
    }
    grades = [graded("05"), graded("03"), graded("03", "Bob")]
    five, three, other = applied(grades, rules, times=at)
    assert (three.points, five.points, other.points) == (10, 5, 10)
    assert "1 grace day used, 0 left. 50%" in five.notes[0]


def test_an_extension_moves_one_student_s_deadline():
    rules = Policy({"03": DUE}, 0, 100, {"ada": {"03": 2}})
    times = {(name, "03"): DUE + timedelta(hours=47) for name in ("Ada", "Bob")}
    ada, bob = applied([graded(), graded(student="Bob")], rules, times=times)
    assert (ada.points, bob.points) == (10, 0)


def test_a_platform_s_word_without_a_time_is_one_day_and_a_note_s_time_counts_more():
    rules = Policy({"03": DUE}, 1, 10)
    (one,) = applied([graded()], rules, late={("Ada", "03")})
    assert one.notes == ("Your platform marks this as late: 1 grace day used, 0 left.",)
    note = Note("ada", "03", submitted=DUE - timedelta(days=1))
    (one,) = applied([graded()], rules, [note], late={("Ada", "03")})
    assert one.notes == () and one.points == 10
    (one,) = applied([graded()], late={("Ada", "03")})
    assert one.notes == (), "without a deadline nothing is late"


def test_a_time_without_a_zone_is_in_the_deadline_s():
    times = {("Ada", "03"): datetime(2026, 10, 12, 23, 58)}
    assert applied([graded()], Policy({"03": DUE}), times=times)[0].points == 10
    times = {("Ada", "03"): datetime(2026, 10, 13, 0, 1)}
    assert applied([graded()], Policy({"03": DUE}), times=times)[0].points == 0


# ---- the teacher's points and words ----


def test_points_of_a_note_replace_the_task_s_and_are_shown_as_the_teacher_s():
    notes = [
        Note("ADA", "03.weighted_mean", 7.5, "The last line is not yours."),
        Note("Ada", "03", None, "Come and see me."),
        Note("Bob", "03.weighted_mean", 0.0),
        Note("Cem", "03", None, "nobody of this name"),
    ]
    ada, bob = applied([graded(), graded(student="Bob")], notes=notes)
    assert (ada.points, bob.points) == (7.5, 0) and ada.notes == ("Your teacher: Come and see me.",)
    last = ada.verdicts[0].findings[-1]
    assert (last.says, last.points, last.sentence) == (
        "set by your teacher",
        -2.5,
        "The last line is not yours.",
    )
    assert ada.out_of == 10
    assert policy.unused(notes, [ada, bob]) == [notes[-1]]


# ---- the files ----


def test_no_files_are_no_policy(tmp_path):
    assert policy.load_policy(tmp_path / "none") == Policy()
    assert policy.load_notes(tmp_path / "none", TASKS) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("grace = 3", "unknown key grace. Fix: use deadlines, extensions, grace_days, penalty"),
        ("[deadlines]\n03 = 2026-10-12T23:59:00", "03 has no time zone. Fix: write it as"),
        ("[deadlines", "cannot be read"),
    ],
)
def test_a_policy_that_cannot_be_used_says_why(tmp_path, text, complaint):
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(policy.BadPolicy) as error:
        policy.load_policy(tmp_path / "policy.toml")
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("student,mark\nAda,3\n", "unknown column mark. Fix: use student, task, points"),
        ("student,task\nAda,3\n", "line 2: there is no task '3'"),
        ("student,task,points\nAda,03,3\n", "points are set per task. Fix: name one"),
        ("student,task,points\nAda,03.weighted_mean,many\n", "line 2: could not convert"),
        ("student,task,submitted\nAda,03,2026-10-13T08:00\n", "has no time zone"),
    ],
)
def test_notes_that_cannot_be_used_say_where_and_why(tmp_path, text, complaint):
    (tmp_path / "notes.csv").write_text(text)
    with pytest.raises(policy.BadPolicy) as error:
        policy.load_notes(tmp_path / "notes.csv", TASKS)
    assert complaint in str(error.value)


def test_policy_and_notes_apply_again_at_each_run_and_the_grades_stay_measured(
    course, class_of, no_ranks, capsys
):
    place, out = class_of(ada=SOLVED, bob=None), course / "out"
    assert main(["grade", place, "--out", "out"]) == 0
    record = (out / "grades/ada.03.json").read_bytes()
    (out / "policy.toml").write_text(
        "grace_days = 1\npenalty = 25\n[deadlines]\n03 = 2026-10-12T23:59:00+02:00\n"
    )
    (out / "notes.csv").write_text(
        "student,task,points,comment,submitted\n"
        "ada,03.weighted_mean,4,Right but for a typo,\n"
        "ada,03,,,2026-10-14T12:00:00+02:00\n"
        "zoe,03,,Where are you?,\n"
    )
    for _ in range(2):
        assert main(["grade", place, "--out", "out"]) == 0
        with (out / "gradebook.csv").open() as file:
            row = next(row for row in csv.DictReader(file) if row["student"] == "ada")
        assert (row["03.weighted_mean"], row["late"], row["points"]) == ("4", "-1", "3")
        assert "Handed in 2 days late" in row["remarks"]
        page = (out / "students/ada/feedback.html").read_text()
        assert "Right but for a typo" in page and "set by your teacher: +4" in page
        assert "3 of 5 points" in page and "25% of the points are taken off." in page
        scores = json.loads((out / "students/ada/results.json").read_text())
        assert scores["score"] == 3
        assert "notes.csv speaks of 03" in (out / "summary.md").read_text().replace("\\", "")
    assert (out / "grades/ada.03.json").read_bytes() == record
    (out / "notes.csv").write_text("student,task\nada,77\n")
    capsys.readouterr()
    assert main(["grade", place, "--out", "out"]) == 2
    assert "line 2: there is no task '77'" in capsys.readouterr().err
