"""How learning platforms name files and columns: one module per platform.

Each module has NAME and

    fits(titles)      whether a roster with these column titles (folded) is the platform's
    carries(title)    whether reports repeat a column of such a roster
    student(row)      a row of the roster as a Student; None for a row that is no student
    sender(name)      who handed in a file or folder of this name, if the platform wrote it
    marks(report, roster)   the rows of a CSV file that the platform imports
    feedback(name)    Canvas and Moodle: the name of feedback in the zip that goes back

Rosters come with the column titles of the platform's English interface.
"""

from __future__ import annotations

from types import ModuleType

from ddpz_lite.course.grader.people import Sender
from ddpz_lite.course.grader.platforms import canvas, github, gradescope, moodle

EVERY = (canvas, moodle, gradescope, github)
MARKS = {module.NAME: module for module in (canvas, moodle, gradescope)}  # --for


def of_roster(titles: set[str]) -> ModuleType | None:
    """The platform whose roster has these columns."""
    return next((module for module in EVERY if module.fits(titles)), None)


def sender(name: str) -> Sender | None:
    """Who handed in a file or folder of this name; None if no platform wrote the name."""
    return canvas.sender(name) or moodle.sender(name)
