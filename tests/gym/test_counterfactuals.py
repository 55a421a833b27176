"""Proofs that can fail: each fails under the counterfactual that its cell's metadata name."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from ddpz_lite.course.authoring.counterfactuals import counterfactuals
from ddpz_lite.course.cli.proofs import unproved

LESSONS = sorted((Path(__file__).resolve().parents[2] / "lessons").glob("*.ipynb"))


class OfALesson:
    """A class for each lesson, so that the workers of a test run share them."""

    path: Path

    @pytest.mark.rest
    @pytest.mark.usefixtures("own_temporary")
    def test_each_proof_fails_under_its_counterfactual(self):
        assert not list(unproved(self.path))


for path in LESSONS:
    name = f"TestLesson{path.stem.partition('_')[0]}"
    globals()[name] = type(name, (OfALesson,), {"path": path})


def lesson(folder: Path, *cells: tuple[str, str, list[dict]]) -> Path:
    """A notebook of cells (id, source, counterfactuals), each of which answers Q01."""
    notebook = nbformat.v4.new_notebook()
    for id_, source, changes in cells:
        metadata = {"ddpz": {"answers": ["Q01"], "counterfactuals": changes}}
        notebook.cells.append(nbformat.v4.new_code_cell(source, id=id_, metadata=metadata))
    path = folder / "04_naps.ipynb"
    nbformat.write(notebook, path)
    return path


def change(replace: str, by: str, **more: str) -> dict:
    return {"of": ["Q01"], "replace": replace, "by": by, **more}


def test_a_proof_that_cannot_fail_is_named(tmp_path):
    path = lesson(
        tmp_path,
        ("start", "x = 2", []),
        (
            "good",
            "y = x + 1\nassert y == 3",
            [change("+", "-"), change("2", "5", **{"in": "start"})],
        ),
        ("weak", "z = y + 1\nassert z > 0", [change("+ 1", "+ 5")]),
        (
            "error",
            "assert len([y]) == 1",
            [change("[y]", "y"), change("[y]", "y", raises="TypeError")],
        ),
    )
    weak, wrong_error = unproved(path, timeout=60)
    assert "cell 2 (weak), Q01: with '+ 5' for '+ 1' it still passes" in weak
    assert "cell 3 (error), Q01: with 'y' for '[y]' it raises TypeError" in wrong_error


def test_measured_times_are_asserted_in_the_changed_run_alone(tmp_path):
    times = "import ddpz_lite as dz\nbusy = True\nt = 1\ndz.check.times({claim})"
    path = lesson(
        tmp_path,
        ("good", times.format(claim="t < 2"), [change("t = 1", "t = 3")]),
        ("spoiled", times.format(claim="not busy"), [change("t = 1", "t = 3")]),
        ("weak", times.format(claim="t < 9"), [change("t = 1", "t = 3")]),
    )
    assert [line.partition(":")[2] for line in unproved(path)] == [
        " cell 2 (weak), Q01: with 't = 3' for 't = 1' it still passes"
    ]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (change("2", "2"), "once"),
        (change("7", "8"), "is in the source 0 times"),
        (change("a", "b"), "is in the source 2 times"),
        (change("2", "3") | {"of": ["M020"]}, "does not say that it settles ['M020']"),
        (change("2", "3", **{"in": "later"}), "'later' is not a code cell before it"),
        ({"of": ["Q01"], "replace": "2"}, "`by` are needed"),
    ],
)
def test_a_counterfactual_that_cannot_be_applied_is_refused(tmp_path, wrong, says):
    path = lesson(tmp_path, ("first", "a = a_ = 2", [wrong]), ("later", "b = 2", []))
    with pytest.raises(ValueError, match="cell 0") as error:
        counterfactuals(nbformat.read(path, as_version=4))
    assert says in str(error.value)
