"""The page "Options" of the site: each option of ours in FSDP2, DeepSpeed and Megatron-LM.

The rows are those of ddpz_lite/course/show/settings.json. What a row says of torch was run: a test
in tests/site/test_options.py asserts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpz_lite.course.show import settings

HEAD = """\
# Options

Which option of FSDP2, DeepSpeed and Megatron-LM is which of ours.

{run} rows are **run**: for each a test starts ranks and asserts the sentence on the installed
torch. The names of DeepSpeed and Megatron-LM were **read in their sources** on {read}, and are not
run here. An empty field says that we found none.

"""


def page() -> str:
    """The page as Markdown."""
    stored = settings.stored()
    frameworks, rows = stored["frameworks"], stored["options"]
    run = sum("run" in row for row in rows)
    text = HEAD.format(run=run, read=stored["read"])
    text += "| | " + " | ".join(_heading(name, frameworks) for name in frameworks) + " |\n"
    text += "|---" * (len(frameworks) + 1) + "|\n"
    for name, facts in [("version", "version"), ("source", "source")]:
        cells = [_fact(one[facts]) for one in frameworks.values()]
        text += f"| {name} | {' | '.join(cells)} |\n"
    return text + "".join(_section(row, frameworks) for row in rows)


def _heading(name: str, frameworks: dict[str, Any]) -> str:
    return f"{name}, run" if name == next(iter(frameworks)) else f"{name}, read"


def _fact(text: str) -> str:
    return f"[source]({text})" if text.startswith("https:") else text


def _section(row: dict[str, Any], frameworks: dict[str, Any]) -> str:
    what = row["what"]
    text = f"\n## {what[0].upper()}{what[1:]}\n\n| here | {' | '.join(frameworks)} |\n"
    text += "|---" * (len(frameworks) + 1) + "|\n"
    notes = row.get("notes", {})
    cells = [_names(row["ours"])]
    for name in frameworks:
        note = f": {notes[name]}" if name in notes else ""
        cells.append(_names([settings.short(one) for one in row[name]]) + note)
    text += f"| {' | '.join(cells)} |\n"
    return text + (f"\n**Run:** {row['run']}\n" if "run" in row else "")


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
