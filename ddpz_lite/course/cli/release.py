"""`ddpz release`: collect what students may see of a graded class.

`ddpz grade` writes everything into one folder, the teacher's files too. This copies each student's
feedback into a folder that can be given away, and says what changed since the last time.
"""

from __future__ import annotations

import json
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ddpz_lite.course.check.progress import write_whole
from ddpz_lite.course.cli.shared import UserError
from ddpz_lite.course.grader import platforms

FEEDBACK = ("feedback.html", "feedback.md")


def run(options: Namespace) -> int:
    """Copy the feedback, and write the platform's zip if one is asked for."""
    grades, out = Path(options.grades), Path(options.to)
    students = sorted(path for path in (grades / "students").glob("*") if path.is_dir())
    if not students:
        raise UserError(f"there is no feedback in {grades}/students/. Fix: run ddpz grade first")
    seed = _seed(grades)
    try:
        changed = [path.name for path in students if _copy(path, out / path.name, seed)]
        text = f"{len(students)} students in {out}/, {len(changed)} new or changed"
        if options.platform:
            members = dict(_members(grades, options.platform))
            name = out / f"{options.platform}-feedback.zip"
            _pack(name, members)
            text += f"; {len(members)} files in {name.name}"
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written ({error.strerror})") from None
    print(text)
    return 0


def _seed(grades: Path) -> str:
    """The seed of the batch, which must not be given away."""
    try:
        return str(json.loads((grades / "grades/batch.json").read_text(encoding="utf-8"))["seed"])
    except (OSError, ValueError, KeyError):
        raise UserError(f"{grades}/ is not a folder that ddpz grade wrote") from None


def _copy(source: Path, target: Path, seed: str) -> bool:
    """Copy a student's feedback; whether it differs from what is there. Raises UserError."""
    changed = False
    for name in FEEDBACK:
        text = (source / name).read_text(encoding="utf-8")
        if f"seed {seed}" in text:
            raise UserError(f"{source / name} contains the seed; nothing more was released")
        old = target / name
        if not old.exists() or old.read_text(encoding="utf-8") != text:
            write_whole(old, text)
            changed = True
    return changed


def _members(grades: Path, platform: str) -> Iterator[tuple[str, Path]]:
    """(name in the zip, feedback) by the names that the platform gave the submissions."""
    handed_in = []
    for path in sorted((grades / "grades").glob("*.*.json")):
        grade = json.loads(path.read_text(encoding="utf-8"))
        handed_in.append((grade["student"], grade["where"]))
    graded = {student for student, _ in handed_in}
    lost = json.loads((grades / "grades/batch.json").read_text(encoding="utf-8"))["not_graded"]
    handed_in += [(student, where) for student, where in lost if student not in graded]
    for student, where in handed_in:
        source = grades / "students" / student / "feedback.html"
        for part in PurePosixPath(where).parts:
            sender = platforms.sender(part)
            if sender and sender.platform == platform and source.exists():
                yield platforms.MARKS[platform].feedback(part), source


def _pack(path: Path, members: dict[str, Path]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, source in members.items():
            archive.write(source, name)
