"""The author's test: solutions pass, stubs fail kindly, every wrong answer gets its own sentence.

It is general: a new task, notebook or wrong answer needs no line here.
"""

from __future__ import annotations

import copy
import importlib
import os
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

import nbformat
import pytest
import small_course
from answers import trying

import ddpz_lite
from ddpz_lite.course import interactive
from ddpz_lite.course.authoring import missing as authoring
from ddpz_lite.course.authoring import rules
from ddpz_lite.course.check import notebooks
from ddpz_lite.course.check.cell import CheckFailed, NotAttempted, check, keep
from ddpz_lite.course.check.notebooks import of, role
from ddpz_lite.course.check.progress import Progress
from ddpz_lite.course.check.score import Finding, Verdict
from ddpz_lite.course.check.task import find, tasks
from ddpz_lite.course.cli import check as command_check
from ddpz_lite.course.cli import main, shared

command = importlib.import_module("ddpz_lite.course.check.cell")  # `check` is the function, too
# `make test` tries all answers to the tasks of these lessons: collectives, the lesson whose answers
# end a job in every way (raised, stuck, mismatched, left early), and a strategy. Of the others it
# tries the solutions and a tenth of the wrong answers.
COMPLETE = ("02", "03", "10")
TASKS = [task for lesson in trying.lessons() for task in tasks(lesson)]


@pytest.fixture(autouse=True)
def own_progress(monkeypatch, tmp_path):
    monkeypatch.setenv("DDPZ_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def exercise():
    """The exercise of a lesson, made from its master: exercise("03")."""
    made = {}

    def make(lesson: str) -> nbformat.NotebookNode:
        if lesson not in made:
            (path,) = trying.SOLUTIONS.glob(f"{lesson}_*.ipynb")
            made[lesson] = nbformat.v4.reads(notebooks.make(path)[1])
        return copy.deepcopy(made[lesson])

    return make


def by_id(values):
    return [pytest.param(value, id=value.id) for value in values]


def by_lesson():
    return pytest.mark.parametrize("lesson", trying.lessons())


# ---- what every task has ----


@pytest.mark.parametrize("task", by_id(TASKS))
def test_a_task_has_what_every_task_has(task):
    assert list(authoring.task_faults(task)) == []


@pytest.mark.parametrize("task", by_id(TASKS))
def test_a_task_has_wrong_and_right_answers_and_each_promise_has_its_judge(task):
    answers = trying.answers(task.lesson)
    assert list(authoring.answer_faults(task, answers)) == []
    master = trying.master(task.lesson)
    assert list(authoring.promise_faults(task, master, answers.PROMISES[task.id])) == []


@by_lesson()
def test_exercises_are_what_their_masters_make_of_them(lesson, root):
    """Fails too where you solved an exercise in place: your own work is then all that differs."""
    (path,) = trying.SOLUTIONS.glob(f"{lesson}_*.ipynb")
    master, copy_ = notebooks.make(path)
    assert path.read_text(encoding="utf-8") == master, "run: make exercises"
    there = (root / "exercises" / path.name).read_text(encoding="utf-8")
    assert there == copy_, "run: make exercises"


@by_lesson()
def test_the_stored_output_of_a_check_in_the_master_is_the_passing_one(lesson):
    for cell in trying.master(lesson).cells:
        if role(cell) == "check":
            (output,) = cell.outputs
            assert output.text == notebooks.praise(find(of(cell))), "run: ddpz lessons --write"


@by_lesson()
def test_an_exercise_holds_no_solution_and_no_other_output(lesson, exercise):
    notebook = exercise(lesson)
    text = nbformat.v4.writes(notebook)
    assert notebooks.BEGIN not in text and notebooks.END not in text
    ids = [cell.id for cell in trying.master(lesson).cells]
    assert [cell.id for cell in notebook.cells] == ids
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.execution_count == (0 if role(cell) == "check" else None)
            assert len(cell.outputs) == (role(cell) == "check")
        if role(cell) == "check":
            data = cell.outputs[0].data
            assert data["text/html"].startswith("<details><summary>When solved:</summary>")
            assert data["text/plain"] == f"When solved:\n\n{notebooks.praise(find(of(cell)))}"
    for rule in (rules.headings, rules.alt_text, rules.plain_file):
        assert list(rule(notebook)) == []


# ---- what becomes of answers ----


def define(notebook, task):
    return trying.run(notebooks.program(notebook, task.id))[task.answer]


# The message of every task is read where a notebook shows it: see the test with nbval.
@pytest.mark.parametrize("task", by_id(tasks("03")))
def test_an_untouched_exercise_fails_with_a_kind_message(task, exercise, capsys):
    with pytest.raises(NotAttempted) as failed:
        check(task.id, define(exercise(task.lesson), task))
    assert f"{task.points} points" in str(failed.value) and "check.hint(" in str(failed.value)
    assert len(failed.value._render_traceback_()) == 1
    assert capsys.readouterr().out == ""
    mark = Progress.load().of(task.id)
    assert (mark.points, mark.tries) == (0, 0)


@pytest.mark.parametrize(
    ("terminal", "person", "no_colour", "wanted"),
    [
        (False, False, "", False),  # nbval, a pipe, a file
        (True, False, "", True),
        (False, True, "", True),
        (True, True, "1", False),
    ],
)
def test_a_verdict_has_colour_in_a_terminal_and_for_a_person(
    monkeypatch, capsys, terminal, person, no_colour, wanted
):
    findings = (Finding("right", 4, 4, "pass"), Finding("calls", 0, 1, "fail", "Two."))
    verdict = Verdict("03.weighted_mean", "wrong", findings)
    monkeypatch.setattr("ddpz_lite.course.check.run.observe", lambda *words: [])
    monkeypatch.setattr(command, "score", lambda *words: verdict)
    monkeypatch.setattr(interactive, "notebook", lambda: person)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("NO_COLOR", no_colour)
    with pytest.raises(CheckFailed):
        check("03.weighted_mean", None)
    out = capsys.readouterr().out
    assert ("\x1b" in out) == wanted
    plain = command_check.ANSI.sub("", out)
    assert plain == f"{command.verdict_text(find('03.weighted_mean'), verdict)}\n"
    if wanted:
        assert "  \x1b[1;32mpass\x1b[0m  right\n  \x1b[1;31mFAIL\x1b[0m  calls:" in out


class OfLesson:
    """One class per lesson, so that pytest-xdist may run lessons side by side.

    All answers to a task that this run of pytest tests have run by the time the first is looked
    at: see `trying.tried`.
    """

    lesson = ""

    def test_solution_gets_full_points(self, task, tried):
        verdict = tried(task)[trying.SOLUTION]
        assert verdict.solved and verdict.points == task.points, trying.sentences(verdict)

    def test_wrong_answer_gets_its_own_sentence(self, task, wrong, tried):
        assert not trying.missed(task, wrong, tried(task)["wrong", wrong.name])

    def test_right_answer_in_another_style_gets_full_points(self, task, right, tried):
        """A right answer is never called wrong."""
        verdict = tried(task)["right", right]
        assert verdict.solved and verdict.points == task.points, trying.sentences(verdict)


@pytest.fixture(scope="session")
def tried(request):
    """The verdicts on a task's answers, of those that this run of pytest tests."""
    chosen = defaultdict(set)
    for item in request.session.items:
        if isinstance(item, pytest.Function) and hasattr(item.cls, "lesson"):
            given = item.callspec.params
            chosen[given["task"].id].add(answer_in(given))
    return lambda task: trying.tried(task, frozenset(chosen[task.id]))


def answer_in(given) -> tuple[str, str]:
    """The answer that a test's parameters name, as `trying` does."""
    if "wrong" in given:
        return "wrong", given["wrong"].name
    return ("right", given["right"]) if "right" in given else trying.SOLUTION


for _lesson in trying.lessons():
    globals()[f"TestLesson{_lesson}"] = type(
        f"TestLesson{_lesson}", (OfLesson,), {"lesson": _lesson}
    )


def pytest_generate_tests(metafunc):
    lesson = getattr(metafunc.cls, "lesson", None)
    if lesson is None:
        return
    own = [task for task in TASKS if task.lesson == lesson]
    if "wrong" in metafunc.fixturenames:
        cases = [(t, w, w.name) for t in own for w in trying.variants(t.id)]
        named, tenth = "wrong", drawn(metafunc.config.getoption("--answers-seed"))
    elif "right" in metafunc.fixturenames:
        cases = [(t, name, name) for t in own for name, _ in trying.right(t.id)]
        named, tenth = "right", set()
    else:
        metafunc.parametrize("task", by_id(own))
        return
    values = [
        pytest.param(
            task,
            value,
            id=f"{task.id}-{name}",
            marks=() if lesson in COMPLETE or (task.id, name) in tenth else pytest.mark.rest,
        )
        for task, value, name in cases
    ]
    metafunc.parametrize(("task", named), values)


def drawn(seed: str) -> set[tuple[str, str]]:
    """A tenth of the wrong answers to the tasks of the other lessons, by task and name."""
    others = [
        (task.id, wrong.name)
        for task in TASKS
        if task.lesson not in COMPLETE
        for wrong in trying.variants(task.id)
    ]
    return set(random.Random(seed).sample(others, len(others) // 10))


def test_nbval_is_red_at_exactly_the_checks_of_untouched_exercises(exercise, tmp_path):
    """All of them in one kernel. `make test` runs nbval on solutions/, which is the green half."""
    together = nbformat.v4.new_notebook(metadata=exercise("03").metadata)
    for lesson in trying.lessons():
        for cell in exercise(lesson).cells:
            cell.id = f"{lesson}-{cell.id}"
            together.cells.append(cell)
    nbformat.write(together, tmp_path / "untouched.ipynb")
    (ran,) = nbval(tmp_path).values()
    code = [cell for cell in together.cells if cell.cell_type == "code"]
    checks = {f"Cell {i}": find(of(c)) for i, c in enumerate(code) if role(c) == "check"}
    assert {name for name, text in ran.items() if text} == checks.keys() and len(ran) == len(code)
    assert sorted(task.id for task in checks.values()) == sorted(task.id for task in TASKS)
    for name, task in checks.items():
        shown_text = (
            f"{task.id} is not solved yet: {task.points} points, about {task.minutes} minutes. "
        )
        assert f'{shown_text}Where to begin: check.hint("{task.id}")' in ran[name]
        assert "Traceback (most recent" not in ran[name]


@pytest.mark.rest
def test_nbval_is_green_at_a_solved_exercise_that_never_ran(exercise, tmp_path):
    """As a grader merges it: answers in the learner's copy, with the outputs that are there."""
    solved, answers = exercise("08"), {cell.id: cell for cell in trying.master("08").cells}
    for cell in solved.cells:
        if role(cell) == "answer":
            cell.source = answers[cell.id].source
    nbformat.write(solved, tmp_path / "solved.ipynb")
    (ran,) = nbval(tmp_path).values()
    assert ran and not any(ran.values()), ran


def nbval(folder: Path) -> dict[str, dict[str, str]]:
    """{notebook: {"Cell 0": the message of its failure, or ""}} of all notebooks in `folder`."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q"]
    command += ["--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=90", "--color=no"]
    command += ["-c", os.devnull, "--rootdir", ".", "--junitxml=report.xml", "."]
    command += ["-p", "ddpz_lite.course.cli.kernel"]  # beside other tests: kernels draw no ports
    subprocess.run(command, cwd=folder, capture_output=True, timeout=800)
    report: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        failures = [element.text or "" for element in case if element.tag in ("failure", "error")]
        report.setdefault(case.get("classname"), {})[case.get("name")] = "\n".join(failures)
    return report


# ---- the form of a master: a fault is one line ----


@pytest.fixture
def one_task(monkeypatch):
    monkeypatch.setattr(notebooks, "tasks", lambda lesson: [find("03.weighted_mean")])


def source(position, old, new):
    def change(notebook):
        cell = notebook.cells[position]
        assert old in cell.source
        cell.source = cell.source.replace(old, new)

    return change


IN_A_CLASS = """class weighted_mean:
    ### BEGIN SOLUTION
    x = 1
    ### END SOLUTION"""


def as_words(notebook):
    cell = notebook.cells[3]
    words = nbformat.v4.new_markdown_cell(cell.source, id=cell.id, metadata=cell.metadata)
    notebook.cells[3] = words


SPOILS = [
    ("line 3 begins has no '### END SOLUTION'", source(3, "    ### END SOLUTION", "")),
    ("line 3 ends a solution that no line began", source(3, "BEGIN", "END")),
    (
        "begins a solution inside that of line 3",
        source(3, "    parts = [", "    ### BEGIN SOLUTION\n    parts = ["),
    ),
    (
        "is in no function: its stub stops the cell",
        lambda n: n.cells[3].update(source=IN_A_CLASS),
    ),
    (
        "there is no solution between",
        lambda n: n.cells[3].update(source="def weighted_mean():\n    pass"),
    ),
    ("it is not Python any more", source(3, "(gradients", "((gradients")),
    ("it does not define weighted_mean", source(3, "weighted_mean", "mean")),
    ("marks of a solution, and it is not an answer", source(1, "import", "### BEGIN SOLUTION\n#")),
    ("cell 'given' has no role", lambda n: n.cells[1].metadata.clear()),
    ("cell 'weighted_mean-answer' has no role", lambda n: n.cells[3].metadata.clear()),
    ("of a task '03.mean'", lambda n: n.cells[3].metadata.ddpz.update(task="03.mean")),
    ("no essay of a task", lambda n: n.cells[2].metadata.ddpz.update(role="essay")),
    ("its id must be 'weighted_mean-answer'", lambda n: n.cells[3].update(id="mine")),
    ("a markdown cell cannot be the answer", as_words),
    ("must be exactly check(", source(4, "weighted_mean)", "weighted_mean )")),
    ("missing: 03.weighted_mean check", lambda n: n.cells.pop(4)),
    ("not in the order of the tasks", lambda n: n.cells.insert(2, n.cells.pop(3))),
    ("it says 4 points; the task has '5 points'", source(2, "5 points", "4 points")),
    ("it says no minutes; the task has '10 minutes'", source(2, "10 minutes", "soon")),
    ("begin with a heading", source(2, "## 1", "1")),
    ("the first code cell must be given", source(1, "from ddpz_lite import check", "")),
    ("metadata says 11 minutes", lambda n: n.metadata.ddpz.update(minutes=11)),
    ("does not say '10 minutes'", source(0, "10 minutes", "a while")),
    ("does not say the title of the metadata", source(0, "# Mean", "# Median")),
    ("says exercise '04'", lambda n: n.metadata.ddpz.update(exercise="04")),
    ("says exercise None", lambda n: n.metadata.clear()),
]


def test_a_small_master_has_the_form(one_task):
    assert list(notebooks.complaints(small_course.master(), "03_mean")) == []


@pytest.mark.parametrize(("complaint", "spoil"), SPOILS)
def test_a_spoilt_master_is_refused_in_one_line(one_task, complaint, spoil, tmp_path):
    notebook = small_course.master()
    spoil(notebook)
    path = tmp_path / "solutions" / "03_mean.ipynb"
    path.parent.mkdir()
    nbformat.write(notebook, path)
    with pytest.raises(notebooks.Malformed) as refused:
        notebooks.make(path)
    assert complaint in str(refused.value), str(refused.value)
    assert str(refused.value).startswith("solutions/03_mean.ipynb: ")
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_a_notebook_is_refused(tmp_path):
    for text in ("", "{}", "[1]", "not json", '{"nbformat": 3, "worksheets": []}'):
        path = tmp_path / "03_mean.ipynb"
        path.write_text(text)
        with pytest.raises(notebooks.Malformed, match=r"03_mean\.ipynb is not a notebook"):
            notebooks.read(path)


def test_two_solutions_in_one_cell_become_two_stubs():
    mark = f"        {notebooks.BEGIN}\n        {notebooks.END}"
    text = f"class A:\n    def a(self):\n{mark}\n\n    def b(self):\n        y = 1\n{mark}"
    assert notebooks.stubbed(text) == (
        "class A:\n    def a(self):\n        raise NotImplementedError\n\n"
        "    def b(self):\n        y = 1\n        raise NotImplementedError"
    )


# ---- the two folders ----


@pytest.fixture
def course(one_task, tmp_path, monkeypatch):
    """A course with one master, and the command at work in it."""
    (tmp_path / "solutions").mkdir()
    nbformat.write(small_course.master(), tmp_path / "solutions" / "03_mean.ipynb")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_writes_once_and_then_has_nothing_to_do(course, capsys):
    assert main(["exercises", "--check"]) == 1
    assert "exercises/03_mean.ipynb differs" in capsys.readouterr().out
    assert not (course / "exercises").exists()
    assert main(["exercises"]) == 0
    assert "wrote exercises/03_mean.ipynb" in capsys.readouterr().out
    assert main(["exercises", "--check"]) == 0 and main(["exercises"]) == 0
    assert capsys.readouterr().out == "all are up to date\n" * 2


def test_nbgrader_knows_the_cells(course):
    main(["exercises"])
    for folder in ("solutions", "exercises"):
        notebook = notebooks.read(course / folder / "03_mean.ipynb")
        known = {cell.id: cell.metadata.get("nbgrader") for cell in notebook.cells}
        assert known["words"] is None
        answer, judged = known["weighted_mean-answer"], known["weighted_mean-check"]
        assert (answer["solution"], answer["locked"], answer["grade"]) == (True, False, False)
        assert (judged["solution"], judged["locked"], judged["grade"]) == (False, True, True)
        assert judged["points"] == 5 and judged["schema_version"] == 3
        assert known["given"]["locked"] and not known["given"]["grade"]


def test_work_in_an_exercise_is_not_overwritten(course, capsys):
    main(["exercises"])
    path = course / "exercises" / "03_mean.ipynb"
    worked = path.read_text().replace(notebooks.STUB, "pass")
    path.write_text(worked)
    assert main(["exercises"]) == 2
    assert "holds answers (03.weighted_mean), which would be lost" in capsys.readouterr().err
    assert path.read_text() == worked


def test_a_bad_master_does_not_keep_the_others_from_being_written(course, capsys):
    bad = small_course.master()
    bad.cells.pop()
    nbformat.write(bad, course / "solutions" / "03_bad.ipynb")
    (course / "exercises").mkdir()
    (course / "exercises" / "03_old.ipynb").write_text("{}")
    assert main(["exercises"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert "wrote exercises/03_mean.ipynb" in out
    assert "solutions/03_bad.ipynb: missing: 03.weighted_mean check" in out
    assert "exercises/03_old.ipynb has no master in solutions/" in out


def test_a_folder_without_masters_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ddpz_lite.course.cli.shared.CHECKOUT", tmp_path)
    assert main(["exercises"]) == 2
    assert "no notebook in solutions/" in capsys.readouterr().err


# ---- ddpz check ----


FRAME = (
    "----> 1 x\nFile ~/a.py:9\n\x1b[36mCell\x1b[39m\x1b[36m \x1b[39m\x1b[32mIn[7]\x1b[39m, line 1"
)
OUTSIDE = (
    "03.weighted_mean   3 of 5 points\n  FAIL  calls:\n        two\n        hint: check.hint()"
)
RAN = (  # (what the check cell printed, the error in it, the error in the answer cell), the text
    (("03.weighted_mean   5 of 5 points\n  pass  x\n", None, None), None),
    ((f"{OUTSIDE}\n", "CheckFailed: 3 of 5", None), OUTSIDE),
    (("", "NotAttempted: not solved", None), "not solved"),
    (
        ("", "NameError: no x", "SyntaxError: bad (123.py, line 1)\nline 3"),
        "cell 7, line 1: SyntaxError: bad",
    ),
    (("", "KeyboardInterrupt: ", None), "cell 7 was stopped: it did not end in time"),
    (("", None, None), "the kernel died"),
    (("03.forged   5 of 5 points\n", None, None), "the kernel died"),
)


@pytest.mark.parametrize(("ran", "text"), RAN)
def test_a_task_s_result_is_what_its_check_printed_or_what_stopped_it(ran, text):
    printed, failed, spoilt = ran
    notebook = small_course.master()
    answer, judged = notebook.cells[3:]
    if printed:
        judged.outputs.append(nbformat.v4.new_output("stream", name="stdout", text=printed))
    for cell, error in ((judged, failed), (answer, spoilt)):
        cell.execution_count = 7
        if error:
            name, value = error.split(": ", 1)
            about = {"ename": name, "evalue": value, "traceback": FRAME.splitlines()}
            cell.outputs.append(nbformat.v4.new_output("error", **about))
    one = command_check._result(find("03.weighted_mean"), notebook, "the kernel died")
    if text is None or text == OUTSIDE:
        assert one.text == printed.strip() and one.points == int(printed.split()[1])
    else:
        assert (one.text, one.points) == (f"03.weighted_mean   0 of 5 points\n  {text}", 0)
    report = command_check.report([one])
    assert report.startswith(one.text) and f"{one.points} of 5 points; " in report


def test_a_notebook_without_its_check_cell_is_reported():
    notebook = small_course.master()
    notebook.cells.pop()
    one = command_check._result(find("03.weighted_mean"), notebook, "")
    assert one.points == 0 and "Its check cell is missing. Fix: " in one.text


@pytest.mark.parametrize(
    ("files", "words", "complaint"),
    [
        ([], ["47"], "lesson '47' has no exercises; these have: 01, 02, 03"),
        ([], ["03"], "no notebook 03_*.ipynb in"),
        (["03_a.ipynb", "03_b.ipynb"], ["03"], "more than one notebook for 03"),
        (["03_a.ipynb"], ["03"], "03_a.ipynb is not a notebook of version 4"),
    ],
)
def test_check_says_what_it_cannot_run(files, words, complaint, tmp_path, capsys):
    for name in files:
        (tmp_path / name).write_text("{}")
    assert main(["check", *words, "--dir", str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err


# The limit of a cell leaves a check its time on a busy machine, so a cell without end takes long.
@pytest.mark.rest
@pytest.mark.parametrize(
    "first", ["x = 1", pytest.param("while True:\n    pass", marks=pytest.mark.extra, id="no end")]
)
def test_check_runs_the_notebook_and_continues_after_a_cell(first, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command_check, "tasks", lambda lesson: [find("03.weighted_mean")])
    path = tmp_path / "03_mine.ipynb"
    solved = small_course.master()
    solved.cells[3].source = small_course.SOLVED
    solved.cells.insert(1, nbformat.v4.new_code_cell(first))
    nbformat.write(solved, path)
    before = path.read_bytes()
    limit = "30" if "while" in first else "300"
    words = ["check", "03", "--dir", str(tmp_path), "--timeout", limit]
    assert main(words) == 0
    praise = notebooks.praise(find("03.weighted_mean"))
    assert capsys.readouterr().out == f"{praise}\n5 of 5 points; 1 of 1 tasks solved\n"
    assert path.read_bytes() == before
    assert Progress.load().of("03.weighted_mean").points == 5


@pytest.mark.rest
def test_a_copy_of_the_solution_is_not_progress(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command_check, "tasks", lambda lesson: [find("03.weighted_mean")])
    nbformat.write(small_course.master(), tmp_path / "03_mine.ipynb")
    assert main(["check", "03", "--dir", str(tmp_path)]) == 0
    assert "5 of 5 points" in capsys.readouterr().out
    assert Progress.load().marks == {}


# ---- ddpz progress ----


def test_progress_says_where_it_is_kept_and_for_which_course(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DDPZ_HOME", str(tmp_path / "kept"))
    assert main(["progress"]) == 0
    course, kept = capsys.readouterr().out.splitlines()[-2:]
    assert course == f"course: ddpz-lite {ddpz_lite.__version__} in {shared.CHECKOUT}"
    assert kept.startswith("kept in ~/kept/progress.json, ")


def test_progress_shows_bar_points_hints_and_the_sum(capsys):
    progress = Progress.load()
    mark = progress.of("03.weighted_mean")
    mark.points, mark.out_of, mark.tries, mark.hints = 3, 5, 2, 1
    progress.save()
    assert main(["progress"]) == 0
    rows = {row.split()[0]: row for row in capsys.readouterr().out.splitlines() if row}
    assert "██████░░░░    3 of 5    1 of 3" in rows["03.weighted_mean"]
    assert rows["sum"].split()[2:4] == ["3", "of"]
    assert rows["0"].startswith("0 of ")


def test_after_the_last_hint_all_of_them_are_printed_again(capsys):
    firsts = []
    for _ in range(4):
        check.hint("03.weighted_mean")
        firsts.append(re.findall(r"hint (\d) of 3", capsys.readouterr().out))
    assert firsts == [["1"], ["2"], ["3"], ["1", "2", "3"]]
    assert Progress.load().of("03.weighted_mean").hints == 3


def test_progress_can_be_reset_in_full_or_by_lesson(capsys):
    progress = Progress.load()
    for task in ("02.ring", "03.weighted_mean", "03.same_start"):
        progress.of(task).points = 5
    progress.save()
    assert main(["progress", "--reset", "3"]) == 0
    shown_text = capsys.readouterr().out
    assert shown_text.startswith("Forgot 2 tasks. As it was before: ")
    before = Progress.load(Path(shown_text.partition("before: ")[2].strip()))
    assert set(before.marks) == {"02.ring", "03.weighted_mean", "03.same_start"}
    assert set(Progress.load().marks) == {"02.ring"}
    assert main(["progress", "--reset", "47"]) == 2
    assert "lesson '47' has no exercises" in capsys.readouterr().err
    assert main(["progress", "--reset"]) == 0 and not Progress.load().marks
    assert main(["progress", "--reset"]) == 0
    assert capsys.readouterr().out.endswith("There is nothing to forget.\n")


def test_a_solution_that_runs_in_its_own_folder_is_not_progress(monkeypatch, tmp_path):
    verdict = Verdict("03.weighted_mean", "ok", (Finding("right", 5, 5, "pass"),))
    for folder, points in (("solutions", 0), ("my/exercises", 5)):
        (tmp_path / folder).mkdir(parents=True)
        monkeypatch.chdir(tmp_path / folder)
        keep(verdict)
        assert Progress.load().of("03.weighted_mean").points == points


def test_progress_that_is_not_ours_is_left_alone(tmp_path, capsys):
    file = tmp_path / "home" / "progress.json"
    file.parent.mkdir()
    file.write_text("[]")
    assert main(["progress"]) == 2
    assert "Move it away" in capsys.readouterr().err and file.read_text() == "[]"
