"""Submissions, rosters and marks in the file formats of Canvas, Moodle, Gradescope and GitHub."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from datetime import datetime
from pathlib import Path

import pytest
import small_course
from small_course import SOLVED

from ddpz_lite.course.cli import main
from ddpz_lite.course.grader import exercise, formats, intake, people, platforms, roster
from ddpz_lite.course.grader.batch import Grade, Terms
from ddpz_lite.course.grader.platforms import canvas, moodle
from ddpz_lite.course.grader.report import Report
from ddpz_lite.course.grader.submission import NotGraded, Submission

FILE = f"{small_course.NAME}.ipynb"
STUB = small_course.handed_in()
TERMS = Terms("0.1.0+test", 7, "yes")

CANVAS = """\
Student,ID,SIS User ID,SIS Login ID,Section,03 Mean (8123),Week 1 (8124),Final Score
    Points Possible,,,,,5.0,10.0,(read only)
"Lovelace, Ada",4711,s1815,ada@uni.edu,Group A,,7.0,70
"Hopper, Grace",4712,s1906,grace@uni.edu,Group A,,,
"Lee, Ada",4713,s1990,ada.lee@uni.edu,Group B,,,
"O'Brien, Seán",4714,s1991,sean@uni.edu,Group B,,,
"Student, Test",4799,,8f1e,Group A,,,
"""
PARTICIPANTS = """\
\ufeff"First name","Last name","ID number","Email address",Groups
Ada,Lovelace,s1815,ada@uni.edu,"Group A"
Grace,Hopper,s1906,grace@uni.edu,"Group A"
Seán,O'Brien,s1991,sean@uni.edu,
李,小龙,s1940,li@uni.edu,
"""
WORKSHEET = """\
Identifier,Full name,Email address,Status,Grade,Maximum Grade,Grade can be changed,\
Last modified (submission),Last modified (grade),Feedback comments
Participant 4711,Ada Lovelace,ada@uni.edu,Submitted for grading,,5.00,Yes,\
"Tuesday, 13 October 2026, 8:00 AM",-,
Participant 4712,Ada Lovelace,ada2@uni.edu,Submitted for grading,,5.00,Yes,\
"Monday, 12 October 2026, 9:14 PM",-,
Participant 4713,Grace Hopper,grace@uni.edu,No submission,,5.00,Yes,-,-,
"""
GRADESCOPE = """\
First Name,Last Name,SID,Email,Role,Section
Ada,Lovelace,s1815,ada@uni.edu,Student,A
Grace,Hopper,s1906,grace@uni.edu,Student,A
Alan,Turing,,alan@uni.edu,Instructor,
"""
CLASSROOM = """\
"identifier","github_username","github_id","name"
"ada@uni.edu","ada-l","1815","Ada Lovelace"
"grace@uni.edu","ghopper","1906",""
"bob@uni.edu","","",""
"""


@pytest.fixture
def known(course):
    return {"03": exercise.pristine(course / "solutions" / FILE)}


@pytest.fixture
def write(tmp_path):
    def put(name: str, content: str | dict[str, str]) -> Path:
        """A file, or a zip with members."""
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
            return path
        with zipfile.ZipFile(path, "w") as archive:
            for member, text in content.items():
                archive.writestr(member, text)
        return path

    return put


def answers(number: int) -> str:
    return small_course.handed_in(f"x = {number}")


def taken(found):
    """student -> (its answer, its warnings)"""
    return {
        one.student: (one.answers[0][1], one.warnings)
        for one in found
        if isinstance(one, Submission)
    }


def lines(found):
    return [(one.student, one.reason) for one in found if isinstance(one, NotGraded)]


def rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


# ---- Canvas in ----


CANVAS_ZIP = {
    "lovelaceada_LATE_4711_90007_03_mean-2.ipynb": answers(2),
    "lovelaceada_4711_90001_03_mean.ipynb": small_course.handed_in(SOLVED),  # an earlier attempt
    "lovelaceada_4711_90009_notes.txt": "see my notebook",
    "leeada_4713_90003_solution.ipynb": answers(3),
    "obrienseán_4714_90004_report.pdf": "%PDF",
}


def test_a_flat_canvas_zip_is_joined_by_the_gradebook_s_ids(write, known):
    found = intake.take(
        [write("submissions.zip", CANVAS_ZIP)], known, roster.load(write("grades.csv", CANVAS))
    )
    students = taken(found)
    assert {name: answer for name, (answer, _) in students.items()} == {
        "Ada Lovelace": "x = 2",
        "Ada Lee": "x = 3",
    }
    assert students["Ada Lovelace"][1] == (
        "submissions.zip/lovelaceada_LATE_4711_90007_03_mean-2.ipynb counts (the last attempt); "
        "submissions.zip/lovelaceada_4711_90001_03_mean.ipynb was handed in too",
        "the platform marks it as late",
    )
    ((name, reason),) = lines(found)
    assert name == "Seán O'Brien" and "ask for the notebook itself" in reason
    assert [one.late for one in found if isinstance(one, Submission)] == [False, True]


def test_canvas_files_without_a_roster_are_one_student_per_id(write, known):
    names = {
        "leeada_4713_90003_03_mean.ipynb": answers(1),
        "leeada_4720_90004_03_mean.ipynb": answers(2),
        "leeada_4713_90005_03_mean-1.ipynb": answers(3),
    }
    for place in (write("a.zip", names), write(f"b/{next(iter(names))}", answers(1)).parent):
        for name, text in names.items():
            write(f"b/{name}", text)
        found = taken(intake.take([place], known))
        assert {name: answer for name, (answer, _) in found.items()} == {
            "leeada": "x = 3",
            "leeada-2": "x = 2",
        }


def test_the_canvas_gradebook_is_a_roster_without_its_extra_rows(write):
    found = roster.load(write("grades.csv", CANVAS))
    assert found.platform == "canvas" and found.columns[:2] == ("Student", "ID")
    assert [student.name for student in found.students] == [
        "Ada Lovelace",
        "Grace Hopper",
        "Ada Lee",
        "Seán O'Brien",
    ]
    sender = canvas.sender("hoppergrace_LATE_4712_1_x.ipynb")
    assert found.find(sender.name, sender).name == "Grace Hopper"
    unknown = canvas.sender("hoppergrace_9999_1_x.ipynb")
    assert found.find(unknown.name, unknown).name == "Grace Hopper", "by name, if the id is not"
    for name in ("s1906", "grace@uni.edu", "Hopper, Grace", "grace hopper_12_file"):
        assert found.find(name).name == "Grace Hopper", name
    assert found.find("Ada") is None and found.find("4712") is None


@pytest.mark.parametrize("name", ["ada.ipynb", "03_mean", "ada_1_mean", "ada_LATE_1_mean", "1_2_x"])
def test_other_names_are_not_canvas_files(name):
    assert platforms.sender(name) is None


# ---- Moodle in ----


MOODLE_ZIP = {
    f"Ada Lovelace_4711_assignsubmission_file/{FILE}": answers(1),
    "Ada Lovelace_4711_assignsubmission_onlinetext/onlinetext.html": "<p>done</p>",
    f"Hopper, Grace_4712_assignsubmission_file_/{FILE}": answers(2),
    f"Seán OBrien_4713_assignsubmission_file/{FILE}": answers(3),  # Moodle drops the apostrophe
    "小龙 李_4714_assignsubmission_file/homework.py": "x = 1",
}


def test_a_moodle_zip_is_joined_by_full_names(write, known):
    class_list = roster.load(write("participants.csv", PARTICIPANTS))
    assert class_list.platform == "moodle" and len(class_list.students) == 4
    found = intake.take([write("Week 1-123.zip", MOODLE_ZIP)], known, class_list)
    assert {name: answer for name, (answer, _) in taken(found).items()} == {
        "Ada Lovelace": "x = 1",
        "Grace Hopper": "x = 2",
        "Seán O'Brien": "x = 3",
    }
    ((name, reason),) = lines(found)
    assert name == "李 小龙" and "homework.py" in reason


def test_flat_moodle_files_and_a_single_folder_name_their_students(write, known):
    flat = {f"Ada Lovelace_4711_assignsubmission_file_{FILE}": answers(1)}
    one = {f"Ada Lovelace_4711_assignsubmission_file_/{FILE}": answers(1)}
    for name, members in (("flat.zip", flat), ("one.zip", one)):
        assert list(taken(intake.take([write(name, members)], known))) == ["Ada Lovelace"]


def test_two_students_of_one_name_are_joined_by_the_worksheet_s_numbers(write, known):
    class_list = roster.load(write("worksheet.csv", WORKSHEET))
    members = {
        f"Ada Lovelace_{number}_assignsubmission_file_/{FILE}": answers(number)
        for number in (4712, 4711)
    }
    found = intake.take([write("class.zip", members)], known, class_list)
    names = {answer: name for name, (answer, _) in taken(found).items()}
    assert names == {"x = 4711": "Ada Lovelace 4711", "x = 4712": "Ada Lovelace 4712"}
    missing, unlisted = class_list.compare(names.values())
    assert (missing, unlisted) == (["Grace Hopper"], [])
    assert class_list.find("Ada Lovelace") is None, "by name it could be either"


def test_two_weeks_of_moodle_are_one_student_s(write, known):
    """The number is the submission's and changes from week to week."""
    class_list = roster.load(write("participants.csv", PARTICIPANTS))
    zips = [
        write(f"{n}.zip", {f"Ada Lovelace_{n}_assignsubmission_file_/{FILE}": answers(n)})
        for n in (1, 2)
    ]
    ((name, (answer, warnings)),) = taken(intake.take(zips, known, class_list)).items()
    assert (name, answer, len(warnings)) == ("Ada Lovelace", "x = 2", 1)


def test_a_worksheet_says_when_a_submission_came(write):
    times = [
        moodle.submitted(student.row)
        for student in roster.load(write("worksheet.csv", WORKSHEET)).students
    ]
    assert times == [datetime(2026, 10, 13, 8), datetime(2026, 10, 12, 21, 14), None]


# ---- the others in ----


def test_a_classroom_s_repositories_are_joined_by_user_names(write, known):
    class_list = roster.load(write("classroom.csv", CLASSROOM))
    for name in ("03-mean-ada-l", "03-mean-GHopper", "03-mean-bob@uni.edu"):
        write(f"class/{name}/my/exercises/{FILE}", answers(1))
    found = intake.take([write("class/x", "").parent], known, class_list)
    assert set(taken(found)) == {"Ada Lovelace", "grace@uni.edu", "03-mean-bob@uni.edu"}


def test_gradescope_s_roster_is_one_without_its_staff(write):
    found = roster.load(write("roster.csv", GRADESCOPE))
    assert found.platform == "gradescope"
    assert [student.name for student in found.students] == ["Ada Lovelace", "Grace Hopper"]
    assert found.find("s1906") is found.students[1]


# ---- marks out ----


@pytest.fixture
def report(known):
    def of(text: str, write) -> Report:
        verdicts = ()
        grades = [Grade("Ada Lovelace", "03", "a", "ab" * 32, TERMS, verdicts, late=4.5)]
        return Report(grades, [], known, TERMS, roster=roster.load(write("roster.csv", text)))

    return of


def test_marks_for_canvas_go_into_the_assignment_s_own_column(report, write):
    made = report(CANVAS, write)
    table = rows(formats.table(canvas.marks(made, made.roster)))
    identity = ["Student", "ID", "SIS User ID", "SIS Login ID", "Section"]
    assert table[0] == [*identity, "03 Mean (8123)"], "and no other assignment's"
    assert table[1] == ["    Points Possible", "", "", "", "", "0"]
    assert table[2] == ["Lovelace, Ada", "4711", "s1815", "ada@uni.edu", "Group A", "4.5"]
    assert [row[0] for row in table[3:]] == ["Hopper, Grace", "Lee, Ada", "O'Brien, Seán"]
    assert {row[-1] for row in table[3:]} == {""}, "nothing handed in: Canvas keeps what it has"


def test_marks_for_canvas_without_such_a_column_make_a_new_assignment(report, write):
    made = report(CANVAS.replace("03 Mean (8123)", "Something"), write)
    assert canvas.marks(made, made.roster)[0][-1] == "03 Mean"


def test_marks_for_moodle_are_columns_to_map(report, write):
    made = report(PARTICIPANTS, write)
    table = rows(formats.table(moodle.marks(made, made.roster)))
    assert table[0] == [*made.roster.columns, "03 Mean"]
    assert table[1] == ["Ada", "Lovelace", "s1815", "ada@uni.edu", "Group A", "4.5"]
    assert [row[-1] for row in table[2:]] == [""] * 3


def test_marks_for_a_moodle_worksheet_fill_it_in(report, write):
    made = report(WORKSHEET.replace("Ada Lovelace,ada2", "Ada King,ada2"), write)
    table = rows(formats.table(moodle.marks(made, made.roster)))
    before = rows(WORKSHEET)
    assert table[0] == before[0] and len(table) == len(before)
    at = before[0].index("Grade")
    assert [row[at] for row in table[1:]] == ["4.5", "", ""]
    assert [c for i, c in enumerate(table[1]) if i != at] == [
        c for i, c in enumerate(before[1]) if i != at
    ]


def test_marks_for_gradescope_have_the_most_points_beside(report, write):
    made = report(GRADESCOPE, write)
    table = rows(formats.table(platforms.MARKS["gradescope"].marks(made, made.roster)))
    assert table[0][-2:] == ["03 Mean", "03 Mean - Max Points"]
    assert table[1] == ["Ada", "Lovelace", "s1815", "ada@uni.edu", "A", "4.5", "0"]


def test_the_gradebook_carries_the_roster_s_columns(report, write):
    made = report("student,section,points,late\nAda Lovelace,A,9,=1+1\n", write)
    head, row = rows(formats.gradebook(made))
    assert head[:4] == ["student", "section", "roster points", "roster late"]
    assert row[:4] == ["Ada Lovelace", "A", "9", "'=1+1"]


# ---- the command, from a platform's files to a platform's files ----


def test_canvas_in_and_out(course, write, no_ranks, capsys):
    write("submissions.zip", CANVAS_ZIP)
    write("grades.csv", CANVAS)
    words = ["grade", "submissions.zip", "--roster", "grades.csv", "--for", "canvas"]
    assert main([*words, "--out", "out"]) == 1, "one handed in a PDF"
    out = capsys.readouterr().out
    assert "Grace Hopper  handed in nothing" in out and "not in the roster" not in out
    book = {row["student"]: row for row in csv.DictReader((course / "out/gradebook.csv").open())}
    assert book["Ada Lovelace"]["SIS User ID"] == "s1815"
    assert "was handed in too" in book["Ada Lovelace"]["remarks"]
    assert rows((course / "out/canvas.csv").read_text())[2][1] == "4711"
    assert main(["release", "out", "--to", "back", "--for", "canvas"]) == 0
    with zipfile.ZipFile(course / "back/canvas-feedback.zip") as archive:
        assert sorted(archive.namelist()) == [
            "leeada_4713_90003_feedback.html",
            "lovelaceada_LATE_4711_90007_feedback.html",
            "obrienseán_4714_90004_feedback.html",
        ]
        assert b"Not graded" in archive.read("obrienseán_4714_90004_feedback.html")


def test_moodle_in_and_out(course, write, no_ranks, capsys):
    write("download.zip", MOODLE_ZIP)
    write("participants.csv", PARTICIPANTS)
    words = ["grade", "download.zip", "--roster", "participants.csv", "--for", "moodle"]
    assert main([*words, "--out", "out"]) == 1
    assert len(rows((course / "out/moodle.csv").read_text())) == 5
    assert main(["release", "out", "--to", "back", "--for", "moodle"]) == 0
    assert "4 students in back/, 4 new or changed; 4 files in moodle-fe" in capsys.readouterr().out
    with zipfile.ZipFile(course / "back/moodle-feedback.zip") as archive:
        name = "Hopper, Grace_4712_assignsubmission_file_/feedback.html"
        assert name in archive.namelist() and b"Grace Hopper" in archive.read(name)


def test_what_is_released_is_the_students_and_never_the_seed(course, class_of, no_ranks, capsys):
    place = class_of(ada=SOLVED, bob=None)
    assert main(["release", "out", "--to", "back"]) == 2, "nothing is graded yet"
    assert main(["grade", place, "--out", "out"]) == 0
    seed = json.loads((course / "out/grades/batch.json").read_text())["seed"]
    assert main(["release", "out", "--to", "back"]) == 0
    files = sorted(
        str(path.relative_to(course / "back")) for path in (course / "back").rglob("*.*")
    )
    assert files == [
        f"{name}/feedback.{kind}" for name in ("ada", "bob") for kind in ("html", "md")
    ]
    assert not [name for name in files if str(seed) in (course / "back" / name).read_text()]
    capsys.readouterr()
    (course / "out/notes.csv").write_text("student,task,comment\nada,03,Well done\n")
    assert main(["grade", place, "--out", "out"]) == 0
    assert main(["release", "out", "--to", "back"]) == 0
    assert "2 students in back/, 1 new or changed" in capsys.readouterr().out
    leak = course / "out/students/bob/feedback.md"
    leak.write_text(f"seed {seed}")
    assert main(["release", "out", "--to", "back"]) == 2
    assert "contains the seed" in capsys.readouterr().err


@pytest.mark.parametrize("platform", ["canvas", "moodle", "gradescope"])
def test_marks_for_a_platform_need_its_list(course, class_of, no_ranks, write, capsys, platform):
    write("names.csv", "ada\nbob\n")
    words = ["grade", class_of(ada=SOLVED), "--out", "out", "--for", platform]
    for more in ([], ["--roster", "names.csv"]):
        assert main([*words, *more]) == 2
        assert f"needs the list of students that {platform} exports" in capsys.readouterr().err


def test_people_load_only_what_is_a_roster(write):
    with pytest.raises(people.BadRoster, match="has no names"):
        roster.load(write("grades.csv", CANVAS.partition('"Lovelace')[0]))
