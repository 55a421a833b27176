"""No attack gains a point, reads a secret, leaves anything behind, or stops the batch."""

from __future__ import annotations

import csv
import glob
import os
import sys
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
import small_course
import torch
from attacks.cells import ATTACKS, HONEST, RIGHT, Attack
from attacks.files import FILES, notebook, put
from leftovers import descriptors, family, gone
from small_course import SOLVED

from ddpz_lite.course.check import notebooks
from ddpz_lite.course.check.score import score
from ddpz_lite.course.check.task import Observed, find
from ddpz_lite.course.cli import grade as command
from ddpz_lite.course.cli import main
from ddpz_lite.course.grader import Limits, SandboxPool, observe_in_sandbox, probe

CAN = probe()
sandboxed = pytest.mark.skipif(not CAN.ok, reason=f"no sandbox here: {CAN.why}")
TASK = find("03.weighted_mean")
CANARY = "CANARY-5e0c1d"
ROOT = Path(__file__).resolve().parents[2]
SECRETS = (
    ROOT / "solutions",
    ROOT / "tests",
    ROOT / ".git" / "config",
    ROOT / "ddpz_lite/course/check",
)
HOST = (str(ROOT), sys.prefix, sys.base_prefix, str(Path(torch.__file__).parents[1]))
# little of everything, so that bombs go off at once
HASTY, PATIENT = 2.0, 60.0  # seconds for a case that may hang, and for one that must not
LIMITS = Limits(memory=512 << 20, calls=500, waiting=64 << 20, cell=30.0)


@pytest.fixture(scope="module")
def pool():
    with SandboxPool():
        observe("weighted_mean = right", [], False, PATIENT)  # the fork server is there
        yield


@pytest.fixture(autouse=True)
def canaries(tmp_path, monkeypatch):
    """A secret in a file, in the environment, and in this process's memory."""
    (tmp_path / "hidden_checks.py").write_text(CANARY)
    monkeypatch.setenv("GITHUB_TOKEN", CANARY)
    return [str(tmp_path / "hidden_checks.py"), *map(str, SECRETS)]


def observe(source: str, secrets: list[str], isolated: bool, timeout: float) -> list[Observed]:
    """Two ranks with equal batches, then two with unequal ones, of fresh inputs."""
    drawn = TASK.cases(torch.Generator().manual_seed(int.from_bytes(os.urandom(4))))
    given = f"{RIGHT}\nSECRETS = {secrets!r}\n"
    cells = [("given", given), ("weighted_mean-answer", source)]
    seen = []
    for case in (replace(drawn[i], timeout=timeout) for i in (1, 3)):
        seen += observe_in_sandbox(TASK, cells, [case], LIMITS, isolated)
        if seen[-1].outcome != "ok":
            break
    return seen


def judged(seen: list[Observed]) -> tuple[str, int]:
    """(status, points), as the grader gives them."""
    try:
        verdict = score(TASK, seen)
    except Exception:  # a judge that met data no honest answer returns: see `batch`
        return "wrong", 0
    return verdict.status, verdict.points


# Those of `make test`: on the wire, memory, the judge, the machine, and the protocol.
FIVE = {
    "05 an all_reduce that does nothing",
    "07 the memory of the parent, by system call",
    "08 the judge, imported",
    "13 memory",
    "16 a pickle for a result",
}
# Without the sandbox an attack meets the same verdict, frames and ledger: weekly is enough.
RUNS = [
    *(
        pytest.param(
            attack,
            True,
            id=f"{attack.id}, sandbox",
            marks=[sandboxed, *([] if attack.id in FIVE else [pytest.mark.rest])],
        )
        for attack in ATTACKS
    ),
    *(
        pytest.param(attack, False, id=f"{attack.id}, limits alone", marks=pytest.mark.extra)
        for attack in ATTACKS
        if attack.alone
    ),
]


@pytest.mark.parametrize(("attack", "isolated"), RUNS)
def test_an_attack_gains_nothing(attack: Attack, isolated: bool, pool, canaries):
    before, fds, files = family(), descriptors(), written()
    timeout = HASTY if "timeout" in attack.statuses else PATIENT
    seen = observe(attack.source, canaries, isolated, timeout)
    status, points = judged(seen)
    assert points <= attack.points, seen
    assert status in attack.statuses or points == attack.points > 0, (status, seen)
    shown = repr([(s.sentence, s.data, s.ledger, s.spans) for s in seen])
    assert CANARY not in shown
    assert not isolated or ("CANARY-" not in shown and "BEGIN SOLUTION" not in shown)
    assert all(c.isprintable() or c == "\n" for s in seen for c in s.sentence)
    assert max(len(s.sentence) for s in seen) < 1000
    assert not any(path in s.sentence for s in seen for path in HOST)
    assert gone(list(family() - before))
    assert descriptors() == fds
    assert written() == files


@pytest.mark.parametrize("isolated", [pytest.param(True, marks=sandboxed), False])
@pytest.mark.parametrize(
    ("name", "source"),
    [
        pytest.param(*honest, id=honest[0], marks=pytest.mark.rest if number else ())
        for number, honest in enumerate(HONEST)
    ],
)
def test_an_honest_answer_keeps_its_points(name, source, isolated, pool, canaries):
    seen = observe(source, canaries, isolated, PATIENT)
    assert judged(seen) == ("ok", 5), seen


def test_the_five_of_make_test_are_there():
    assert {attack.id for attack in ATTACKS} >= FIVE


# One of each class that acts while it runs, next to everything that acts while it is read.
IN_CLASS = {attack.number: attack for attack in ATTACKS if attack.number not in (12, 13)}


@pytest.fixture
def hostile_class(tmp_path, monkeypatch):
    """A class of attackers with an honest student at each end and one in the middle."""
    monkeypatch.setattr(notebooks, "tasks", lambda lesson: [TASK])
    monkeypatch.setattr(command, "Limits", lambda timeout_factor: LIMITS)
    (tmp_path / "solutions").mkdir()
    nbformat.write(small_course.master(), tmp_path / "solutions" / f"{small_course.NAME}.ipynb")
    place = tmp_path / "class"
    for name in ("a-honest", "honest-1", "z-honest"):
        put(place, name, notebook(SOLVED))
    for attack in IN_CLASS.values():
        source = f"{RIGHT}\nSECRETS = {[str(tmp_path / 'hidden_checks.py')]!r}\n{attack.source}"
        put(place, f"cell-{attack.number:02d}", notebook(source))
    for attack in FILES:
        attack.write(place)
    monkeypatch.chdir(place)
    monkeypatch.setattr(command, "folder", lambda name: tmp_path / name)
    return place


@pytest.mark.extra  # all of the attacks once more, in one class
@sandboxed
def test_a_hostile_class_is_graded_to_its_end(hostile_class, tmp_path, canaries, capsys):
    files, before, fds = written(), family(), descriptors()
    handed_in = contents(hostile_class)
    assert main(["grade", str(hostile_class), "--out", str(tmp_path / "out"), "--jobs", "2"]) == 1
    out = tmp_path / "out"
    with open(out / "gradebook.csv", encoding="utf-8") as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    for name in ("a-honest", "honest-1", "z-honest"):
        assert rows[name]["03.weighted_mean"] == "5", rows[name]
    for attack in IN_CLASS.values():
        assert float(rows[f"cell-{attack.number:02d}"]["03.weighted_mean"]) <= attack.points
    for attack in FILES:
        feedback = (out / "students" / attack.student / "feedback.md").read_text(encoding="utf-8")
        if attack.points is None:
            assert attack.reason in feedback, attack
        else:
            assert rows[attack.student]["03.weighted_mean"] == str(attack.points), attack
    for path in (p for p in out.rglob("*") if p.is_file()):
        text = path.read_text(encoding="utf-8")
        assert CANARY not in text, path
        if path.suffix in (".html", ".md"):  # elsewhere it is text, and shown as text
            assert "<script>alert" not in text and "<img src=x" not in text, path
        assert not {"\x1b", "\u202e"} & set(text), path
        assert not [line for line in text.splitlines() if line.startswith("::")], path
    assert contents(hostile_class) == handed_in
    assert (written(), descriptors()) == (files, fds) and gone(list(family() - before))
    assert "::set-output" not in capsys.readouterr().out


def contents(folder: Path) -> dict[str, int]:
    """Every file below a folder and its size."""
    return {str(path): path.lstat().st_size for path in folder.rglob("*")}


def written() -> list[str]:
    """What an attack would leave."""
    names = ("/tmp/ddpz-bomb-*", "/tmp/ddpz-pwned*", "/dev/shm/ddpz-bomb-*")
    return sorted(path for name in names for path in glob.glob(name))
