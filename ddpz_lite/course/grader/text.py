"""Text of others, made safe for a page, a table or a file name.

Letters of every script stay as they are. What hides or reorders its neighbours does not.
"""

from __future__ import annotations

import html
import re
import unicodedata

FORMULA = (
    "=",
    "+",
    "-",
    "@",
    "\t",
    "\r",
    "\n",
    "＝",
    "＋",
    "－",
    "＠",
)  # what a cell may not begin with
MARKDOWN = "\\`*_{}[]()#+-.!|~$:@"
SENTENCE = 2000  # characters
WHERE = 200  # characters of a path
NAME = 64  # characters of a student's name
NAME_BYTES = 120  # of it in UTF-8: a file's name of 255 has room for "-2" and ".03.json"
IN_NAMES = "-_.@+ '’·・׳״"  # besides letters, marks and digits
JOINERS = "\u200c\u200d"  # invisible, and part of a letter behind a virama (RFC 5892, A.1 and A.2)
VIRAMA = 9  # its combining class


def plain(text: str) -> str:
    """Text without control characters and without marks that reorder it; not endless."""
    shown = "".join(
        char if char == "\n" or visible(char, before) else "\N{REPLACEMENT CHARACTER}"
        for before, char in zip(" " + text, text, strict=False)
    )
    return shown if len(shown) <= SENTENCE else shown[: SENTENCE - 3] + "..."


def visible(char: str, before: str) -> bool:
    """Whether a character shows as itself behind another one."""
    if char in JOINERS:
        return unicodedata.combining(before) == VIRAMA
    return unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def in_html(text: str) -> str:
    """`plain` text for a page."""
    return html.escape(plain(text)).replace("\n", "<br>")


def in_markdown(text: str) -> str:
    """`plain` text for a line of Markdown, where none of it is markup."""
    line = html.escape(plain(text).replace("\n", " "), quote=False)
    return "".join(f"\\{char}" if char in MARKDOWN else char for char in line)


def in_table(text: str) -> str:
    """`plain` text for a cell of a spreadsheet: never a formula, whatever ends a cell there.

    A spreadsheet that is told to split at semicolons does so within quoted cells too.
    """
    line = plain(text).replace("\n", " ").replace(";", ",").strip()
    return f"'{line}" if line.startswith(FORMULA) else line


def in_line(*texts: str) -> str:
    """`plain` texts for one line of print."""
    return ": ".join(plain(text).replace("\n", " ") for text in texts)


def in_path(text: str) -> str:
    """A path of others, in one line of print."""
    line = plain(text).replace("\n", "\N{REPLACEMENT CHARACTER}")
    return line if len(line) <= WHERE else line[: WHERE - 3] + "..."


def clean(name: str) -> str:
    """A name for files, tables and pages, in Unicode's form C.

    It has letters of every script with their marks, digits and a few signs; at most NAME
    characters, and NAME_BYTES bytes of UTF-8.
    """
    plain = unicodedata.normalize("NFC", name)
    kept = "".join(_in_name(char, before) for before, char in zip(" " + plain, plain, strict=False))
    short = _trimmed(re.sub(r"[_ ]{2,}", "_", unicodedata.normalize("NFC", kept)))[:NAME]
    return _trimmed(short.encode()[:NAME_BYTES].decode(errors="ignore")) or "unnamed"


def _in_name(char: str, before: str) -> str:
    if char.isalnum() or char in IN_NAMES or unicodedata.category(char).startswith("M"):
        return char
    if unicodedata.category(char) == "Cf":
        return char if visible(char, before) and char in JOINERS else ""
    return "_"


def _trimmed(name: str) -> str:
    """A name that begins with a letter or digit, for a mark would join what stands before it."""
    name = name.strip(" .-_+@'")
    while name and not name[0].isalnum():
        name = name[1:]
    return name
