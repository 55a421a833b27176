"""From submissions to grades: what is merged, what is kept, what never stops the batch."""

from __future__ import annotations

import json
import os
import random
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import nbformat
import pytest
import small_course
import torch

from ddpz_lite.course.check import data, notebooks
from ddpz_lite.course.check.chance import apart, generator
from ddpz_lite.course.check.run import draw
from ddpz_lite.course.check.task import Case, Criterion, Observed, find
from ddpz_lite.course.grader import batch, hidden, merge, similarity
from ddpz_lite.course.grader.batch import Grade, Terms
from ddpz_lite.course.grader.exercise import Pristine, pristine
from ddpz_lite.course.grader.submission import NotGraded, Submission
from ddpz_lite.wire import Record

pytestmark = pytest.mark.usefixtures("one_task")
TASK = find("03.weighted_mean")
TERMS = Terms("0.1.0+test", 7, "yes")
RIGHT = notebooks.stubbed(small_course.ANSWER).replace(notebooks.STUB, "right = True")
WRONG = RIGHT.replace("right", "wrong")


@pytest.fixture
def exercise(tmp_path):
    path = tmp_path / f"{small_course.NAME}.ipynb"
    nbformat.write(small_course.master(), path)
    return pristine(path)


def handed_in(source: str | None, student: str = "ada", **changed) -> Submission:
    answers = () if source is None else ((small_course.CELL, source),)
    about = {"where": f"{student}.ipynb", "sha256": f"{hash((student, source)):064x}"[-64:]}
    return Submission(
        **{"student": student, "lesson": "03", "answers": answers, **about, **changed}
    )


class Ranks:
    """Stands for the sandbox: answers with "right" in them are right, the others return zeros."""

    def __init__(self) -> None:
        self.ran: list[tuple[Sequence[tuple[str, str]], Case, bool]] = []
        self.lock = threading.Lock()

    def __call__(self, task, cells, cases, *, sandboxed):
        with self.lock:
            self.ran += [(cells, case, sandboxed) for case in cases]
        source = cells[-1][1]
        if "explodes" in source:
            raise OSError("no ranks")
        return [self.observe(case, source) for case in cases]

    def observe(self, case: Case, source: str) -> Observed:
        if "stuck" in source:
            return Observed(case, "stuck", "rank 0 waits")
        if "nonsense" in source:
            return Observed(case, "ok", "", [None] * case.world)
        turns = zip(*([rank, *rank.get("later", ())] for rank in case.inputs), strict=True)
        first, *later = [self.turn(ranks, "right" in source) for ranks in turns]
        calls = [
            Record(rank, seq, "all_reduce", "float32", 9, 0, 1.0, 2.0, "?", (), None, seq)
            for rank in range(case.world)
            for seq in range(1 + len(later))
        ]
        return Observed(case, "ok", "", [{**first, "later": later}] * case.world, calls)

    def turn(self, ranks, right: bool) -> dict:
        """What each of these ranks returns of one call."""
        total = sum(rank["samples"] for rank in ranks)
        parts = [[g * r["samples"] / total for g in r["gradients"]] for r in ranks]
        mean = [sum(same) for same in zip(*parts, strict=True)]
        got = mean if right else [torch.zeros_like(part) for part in mean]
        return {"gradients": got, "in_place": True}


@pytest.fixture
def ranks():
    return Ranks()


@pytest.fixture
def grade(exercise, ranks):
    def run(submission, terms=TERMS, more=None):
        return batch.grade(submission, exercise, terms, more or {}, ranks)

    return run


@pytest.fixture
def grade_all(exercise, ranks, tmp_path):
    def run(*submissions, terms=TERMS, jobs=2):
        about = {"jobs": jobs, "more": {}, "observe": ranks}
        return batch.grade_all(submissions, {"03": exercise}, terms, tmp_path / "out", **about)

    return run


# ---- the merge ----


def attempt(exercise, source, **changed):
    (one,) = merge.merge(exercise, handed_in(source, **changed))
    return one


def test_an_answer_runs_between_the_course_s_own_cells(exercise):
    one = attempt(exercise, RIGHT)
    assert one.cells == (("given", small_course.GIVEN), (small_course.CELL, RIGHT))
    assert one.status == ""


@pytest.mark.parametrize(
    "source", [None, "", "  \n", notebooks.stubbed(small_course.ANSWER), "\n\n# nothing but this"]
)
def test_what_was_not_attempted(exercise, source):
    one = attempt(exercise, source)
    if source and "nothing" in source:
        assert one.status == ""  # it runs, and defines no answer
    else:
        assert one.status == "not attempted" and one.cells == ()


@pytest.mark.parametrize(
    "line",
    ["%time f()", "%%bash\nls", "!ls", "!!ls", "x = !ls", "a, b = %time f()", "f?", "?f", "f??"],
)
def test_magics_and_shell_lines_are_refused(exercise, line):
    one = attempt(exercise, f"{line}\n{RIGHT}")
    assert one.status == "refused" and one.sentence.startswith("Line 1 is a magic or a shell line")
    assert one.cells == ()


@pytest.mark.parametrize("source", ["x = (5\n     % 2)", "s = '''\n!ls\n%time\n'''", "y = 7 % 2"])
def test_python_that_looks_like_a_magic_is_not_one(exercise, source):
    assert attempt(exercise, source).status == ""


@pytest.mark.parametrize(
    ("source", "status", "sentence"),
    [
        ("def f(:\n  pass", "wrong", "Python cannot read the answer, in line 1: invalid syntax."),
        ("x = 1\0", "wrong", "Python cannot read the answer: source code string cannot contain"),
        ("x = '\ud800'", "refused", "characters that are not text"),
        ("-" * 40_000 + "1", "refused", "nested too deeply"),
    ],
)
def test_what_python_cannot_read_does_not_run(exercise, source, status, sentence):
    one = attempt(exercise, source)
    assert one.status == status and sentence in one.sentence and one.cells == ()


@pytest.mark.parametrize(
    "shape",
    [
        "def (\n{}(",
        "def (\n\t{}x",
        "def (\n=\t{}(",
        "def (\na{}(",
        "def (\na{}?x",
        "def (\na ={}(",
        "def (\na?{}(",
        "def (\n%{}(",
    ],
)
@pytest.mark.parametrize("filler", [" ", ".", ",", "a", "\n", " \n"])
def test_the_time_to_look_for_magics_grows_as_the_answer_does(shape, filler):
    """One `match` holds the lock of the whole process, so that other students' tasks run late."""

    def seconds(length):
        lines = shape.format(filler * length).splitlines()
        started = time.process_time()
        for line in lines:
            merge.is_magic(line)
        return time.process_time() - started

    seconds(100)
    assert min(seconds(40_000) for _ in range(3)) < 0.2, "a quadratic one takes seconds"


def test_a_magic_is_found_behind_an_indent(exercise):
    one = attempt(exercise, "def f():\n    x = 1\n \t !ls")
    assert one.status == "refused" and one.sentence.startswith("Line 3 is a magic")


def test_a_bad_answer_leaves_the_other_tasks_alone(exercise):
    cells = (*exercise.cells, ("other-answer", "raise NotImplementedError", "03.other"))
    two = Pristine("03", "03_mean", "Mean", cells)
    answers = ((small_course.CELL, "!ls"), ("other-answer", "right = 1"))
    first, second = merge.merge(two, handed_in("", answers=answers))
    assert first.status == "refused"
    stub = notebooks.stubbed(small_course.ANSWER)
    assert [source for _, source in second.cells] == [small_course.GIVEN, stub, "right = 1"]


# ---- names that were lost with a cell ----


def test_a_name_that_was_lost_with_a_cell_is_explained(exercise, monkeypatch):
    cells = (*exercise.cells, ("other-answer", "raise NotImplementedError", "03.other"))
    two = Pristine("03", "03_mean", "Mean", cells)
    lost = "%autoreload 2\nimport numpy as np\ndef helper(x): pass\nclass Best:\n    inner = 1\n"
    lost += "n: int = 3"
    answers = ((small_course.CELL, lost), ("other-answer", "right = 1"))
    one = handed_in("", answers=answers, elsewhere=frozenset({"mine"}))
    why = merge.left_out(two, one, merge.merge(two, one))
    assert set(why) == {"mine", "np", "numpy", "as", "helper", "Best", "n"}

    def explained_of(name):
        return merge.explained(f"rank 0 raised NameError: name '{name}' is not defined at x", why)

    assert explained_of("helper").endswith(
        " The name helper is defined in the answer to 03.weighted_mean, which could not be taken."
    )
    assert explained_of("mine").endswith(", for only answer cells are. Define it in the answer.")
    for name in ("inner", "x", "nobody"):
        assert explained_of(name) == f"rank 0 raised NameError: name '{name}' is not defined at x"
    assert merge.explained("rank 0 raised KeyError: 'helper'", why).endswith("'helper'")


def test_a_student_reads_where_the_name_was_lost(grade, ranks, monkeypatch):
    def observe(task, cells, cases, *, sandboxed):
        return [Observed(cases[0], "raised", "rank 0 raised NameError: name 'np' is not defined")]

    monkeypatch.setattr(Ranks, "__call__", lambda self, *a, **k: observe(*a, **k))
    (verdict,) = grade(handed_in(RIGHT, elsewhere=frozenset({"np"}))).verdicts
    assert "The name np is defined in a cell that was not taken" in verdict.findings[0].sentence
    (verdict,) = grade(handed_in(RIGHT)).verdicts
    assert "defined in" not in verdict.findings[0].sentence


# ---- one grade ----


def test_points_come_from_the_judges(grade, ranks):
    assert (grade(handed_in(RIGHT)).points, grade(handed_in(WRONG)).points) == (5, 0)
    assert all(sandboxed for _, _, sandboxed in ranks.ran)


def test_inputs_are_fresh_for_each_submission_and_the_same_for_the_same_seed(grade, ranks):
    def inputs(student, seed):
        ranks.ran.clear()
        grade(handed_in(RIGHT, student), Terms("v", seed, "none"))
        return [rank["gradients"][0].tolist() for _, case, _ in ranks.ran for rank in case.inputs]

    first = inputs("ada", 7)
    assert first == inputs("ada", 7)
    assert first != inputs("bob", 7) and first != inputs("ada", 8)
    learner = [rank["gradients"][0].tolist() for case in draw(TASK) for rank in case.inputs]
    assert first != learner


def test_inputs_follow_from_all_of_the_key_and_not_from_a_seed_of_32_bits():
    def drawn(key):
        rng = generator(key)
        return [
            torch.randn(40, generator=rng),
            torch.randn(3, generator=rng),
            torch.randint(1000, (20,), generator=rng),
            torch.randperm(20, generator=rng),
        ]

    first = drawn("7:ab:03.x")
    assert all(map(torch.equal, first, drawn("7:ab:03.x")))
    for other in ("8:ab:03.x", "7:ac:03.x", "7:ab:03.y", ""):
        assert not any(map(torch.equal, first, drawn(other)))
    assert abs(torch.randn(100_000, generator=generator("a")).mean()) < 0.02
    assert sorted(first[3].tolist()) == list(range(20))
    words = struct.unpack_from("<624Q", generator("a").get_state().numpy().tobytes(), 24)
    assert max(words) < 2**32 and len(set(words)) > 620
    # What manual_seed makes of the first word is the second, and so on; here none follows.
    follows = [
        (1812433253 * (a ^ a >> 30) + n) % 2**32 == b for n, (a, b) in enumerate(pairwise(words), 1)
    ]
    assert not any(follows)


def test_unpacking_refuses_a_tensor_named_twice():
    """Else a few bytes stand for gigabytes in the process that judges."""
    ones = torch.ones(3)
    twice = data.unpack(data.pack([ones, ones]))
    assert torch.equal(twice[0], twice[1]) and twice[0] is not twice[1]
    raw, tree = data.pack([ones]), json.dumps([{data.TENSOR: "0"}] * 2).encode()
    old = struct.unpack_from("<Q", raw)[0]
    with pytest.raises(data.NotData, match="or one twice"):
        data.unpack(struct.pack("<Q", len(tree)) + tree + raw[8 + old :])


def test_a_hang_in_the_first_criterion_is_waited_for_once(grade, ranks):
    graded = grade(handed_in("stuck = True"))
    assert len(ranks.ran) == 1
    assert graded.points == 0 and graded.verdicts[0].status == "timeout"


def test_data_of_no_form_is_wrong(grade):
    (verdict,) = grade(handed_in("nonsense = True")).verdicts
    assert (verdict.points, verdict.out_of, verdict.status) == (0, 5, "wrong")
    assert "does not have the form" in verdict.findings[0].sentence


# ---- many ----


def test_grades_come_in_order_and_one_failure_stops_no_other(grade_all, tmp_path):
    sources = [RIGHT, "explodes", WRONG, None, RIGHT]
    results = grade_all(*(handed_in(s, f"s{i}") for i, s in enumerate(sources)))
    assert [one.student for one in results] == ["s0", "s1", "s2", "s3", "s4"]
    assert isinstance(results[1], NotGraded) and "OSError: no ranks" in results[1].reason
    assert [one.points for one in results if isinstance(one, Grade)] == [5, 0, 0, 5]
    assert len(list((tmp_path / "out" / "grades").iterdir())) == 4


def test_a_batch_resumes_where_it_stopped(grade_all, ranks):
    ada, bob = handed_in(RIGHT, "ada"), handed_in(WRONG, "bob")
    (first,) = grade_all(ada)
    ranks.ran.clear()
    again, _ = grade_all(ada, bob)
    assert again == first
    assert all(cells[-1][1] == WRONG for cells, _, _ in ranks.ran), "only the new one was run"


@pytest.mark.parametrize(
    "change",
    [
        {"terms": Terms("0.1.0+other", 7, "yes")},
        {"terms": Terms("0.1.0+test", 8, "yes")},
        {"terms": Terms("0.1.0+test", 7, "none")},
        {"sha256": "0" * 64},
    ],
)
def test_a_grade_is_bound_to_submission_version_seed_and_sandbox(grade_all, ranks, change):
    grade_all(handed_in(RIGHT))
    ranks.ran.clear()
    sha = {key: value for key, value in change.items() if key == "sha256"}
    grade_all(handed_in(RIGHT, **sha), terms=change.get("terms", TERMS))
    assert ranks.ran


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"terms": 1}'])
def test_a_damaged_grade_is_made_again(grade_all, tmp_path, text):
    one = handed_in(RIGHT)
    grade_all(one)
    batch.path_of(tmp_path / "out", one).write_text(text)
    assert grade_all(one)[0].points == 5
    assert json.loads(batch.path_of(tmp_path / "out", one).read_text())["student"] == "ada"


def test_an_interrupted_batch_keeps_what_is_graded(grade_all, ranks, tmp_path, monkeypatch):
    kept = batch._keep

    def interrupt(done, submission, out):
        kept(done, submission, out)
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "_keep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        grade_all(*(handed_in(RIGHT, f"s{i}") for i in range(500)), jobs=1)
    assert len(list((tmp_path / "out" / "grades").iterdir())) == 1
    assert len({id(cells) for cells, _, _ in ranks.ran}) < 500


def test_no_half_file_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        batch.write(tmp_path / "a.json", "text")
    assert list(tmp_path.iterdir()) == []


def test_the_version_changes_with_what_decides_points(exercise, tmp_path):
    first = batch.version([exercise])
    assert first == batch.version([exercise]) and first.startswith("0.")
    (tmp_path / "mine.py").write_text("MORE = {}")
    assert len({first, batch.version([]), batch.version([exercise], tmp_path)}) == 3


# ---- hidden judges ----


HIDDEN = """
from ddpz_lite.course.grader.hidden import More
from ddpz_lite.course.check.task import Criterion, Case
import torch

def cases(rng):
    shapes = [[3, 5], [7], [2, 1, 2]]
    inputs = [{"gradients": [torch.randn(s, generator=rng) for s in shapes], "samples": 3}] * 2
    return [Case("two ranks of three", inputs, "three")]

def judge(seen):
    return None if seen.data[0]["gradients"][0].abs().sum() else "Nothing but zeros."

MORE = {"03.weighted_mean": More(cases, (Criterion("three samples", 2, judge, on=("three",)),))}
"""


def test_hidden_judges_add_cases_and_points(grade, ranks, tmp_path):
    (tmp_path / "mine.py").write_text(HIDDEN)
    more = hidden.load(tmp_path)
    graded = grade(handed_in(RIGHT), more=more)
    assert (graded.points, graded.out_of) == (7, 7)
    assert ranks.ran[-1][1].kind == "three"
    assert TASK.points == 5


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, "there is no .py file"),
        ({"a.py": "1 / 0"}, "a.py: ZeroDivisionError"),
        ({"a.py": "x = 1"}, "a.py: AttributeError"),
        ({"a.py": HIDDEN, "b.py": HIDDEN}, "b.py: 03.weighted_mean is in another file too"),
    ],
)
def test_a_bad_hidden_judge_is_named(files, complaint, tmp_path):
    folder = tmp_path / "hidden"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(hidden.BadHidden, match=complaint):
        hidden.load(folder)


def test_without_a_folder_nothing_is_hidden():
    assert hidden.load(None) == {} and hidden.extend(TASK, {}) is TASK
    extended = hidden.extend(
        TASK, {TASK.id: hidden.More(criteria=(Criterion("x", 1, lambda _: None),))}
    )
    assert extended.points == 6
    rng = torch.Generator().manual_seed(1)
    assert len(extended.cases(rng)) == len(draw(TASK))


# ---- answers that resemble each other ----


RENAMED = (
    small_course.ANSWER.replace("parts", "sums").replace("buffer", "b").replace("samples", "n")
).replace('"""The mean over all samples, in place."""', "# mine alone")


def test_a_renamed_copy_is_alike_and_another_way_is_not(exercise):
    other = "def weighted_mean(gradients, samples):\n" + "".join(
        f"    gradients[{i}].mul_(samples + {i}).add_(torch.ones({i}))\n" for i in range(8)
    )
    found = similarity.find(
        [
            handed_in(small_course.ANSWER.replace("parts", "many"), "ada"),
            handed_in(RENAMED, "bob"),
            handed_in(other, "cem"),
            handed_in("x = 1", "dan"),
            handed_in("def f(:", "eve"),
        ],
        {"03": exercise},
    )
    (pair,) = found.pairs
    assert (pair.first, pair.second) == ("ada", "bob")
    assert pair.alike > 0.95 > pair.usual
    assert found.common == {} and (found.short, found.answers) == (1, 4)
    text = similarity.report(found, TERMS)
    assert "not a verdict" in text and "| ada | bob |" in text and "0\\.1\\.0\\+test" in text
    assert "1 of 4 answers were too short to compare" in text
    assert "No pair stands out" in similarity.report(similarity.Similarity(), TERMS)


def test_equal_answers_are_listed_however_short_and_the_official_one_apart(exercise):
    shorter = "def weighted_mean(gradients, samples):\n    return  None # mine"
    same = "def weighted_mean( gradients,samples ):\n\n    return None"
    stub = exercise.cells[1][1]
    official = small_course.SOLVED.replace("samples = ", "samples  =  ") + "  # my own"
    handed = {"ada": shorter, "bob": same, "cem": official, "dan": stub, "eve": stub, "fay": "x="}
    submissions = [replace(handed_in(text, name), sha256=name) for name, text in handed.items()]
    submissions += [replace(submissions[0], student="ida")]
    found = similarity.find(submissions, {"03": exercise})
    assert [(g.about, g.students) for g in found.sources] == [(TASK.id, ("ada", "bob", "ida"))]
    assert [(g.about, g.students) for g in found.official] == [(TASK.id, ("cem",))]
    assert [(g.about, g.students) for g in found.files] == [("03", ("ada", "ida"))], "not the stubs"
    text = similarity.report(found, TERMS)
    head = text.index("Copies of the official solution")
    assert text.index("ada, bob, ida") < head < text.index("cem")


def test_how_alike_two_are_is_what_they_share_of_all_they_have(monkeypatch):
    monkeypatch.setattr(similarity, "BLOCK", 7)  # the last block is not full
    rng = random.Random(0)
    cuts = [frozenset(rng.sample(range(60), rng.randint(1, 40))) for _ in range(9)]
    expected = [[len(a & b) / len(a | b) for b in cuts] for a in cuts]
    assert similarity.alike(cuts).tolist() == expected


def test_a_task_whose_answers_are_all_alike_lists_no_student(exercise):
    same = [
        handed_in(small_course.ANSWER.replace("buffer", f"buffer_{name}"), name)
        for name in ("ada", "bob", "cem")
    ]
    found = similarity.find(same, {"03": exercise})
    assert found.pairs == [] and found.common == {TASK.id: 1.0}
    text = similarity.report(found, TERMS).replace("\\", "")
    assert "03.weighted_mean: most answers are alike (usually 100%)" in text
    two = similarity.find(same[:2], {"03": exercise})
    assert len(two.pairs) == 1, "two students alone are a pair"


def test_a_rank_s_long_inputs_come_from_a_generator_of_their_own():
    """624 of its numbers are the state of torch's generator: none of them may be the cases'."""

    def words(rng):
        return set(struct.unpack_from("<624Q", rng.get_state().numpy().tobytes(), 24))

    def three():
        rng = generator("a")
        return [rng, apart(rng), apart(rng)]

    drawn = [torch.randn(1000, generator=rng) for rng in three()]
    assert not torch.equal(drawn[1], drawn[2])
    again = [torch.randn(1000, generator=rng) for rng in three()]
    assert all(map(torch.equal, drawn, again))
    first_rng, *ranks = three()
    assert all(len(words(first_rng) & words(rng)) < 3 for rng in ranks)
    for task_id in ("02.ring_all_reduce", "02.reduce_scatter"):
        for case in draw(find(task_id), "key"):
            for first, *others in zip(*(given["tensors"] for given in case.inputs), strict=True):
                assert not any(torch.equal(first, other) for other in others if other.numel())
