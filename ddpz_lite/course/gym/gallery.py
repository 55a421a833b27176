"""Lines of code as one finds them, run in a separate process, and claims about sources.

What a line breaks stays in that process. Nothing is installed and nothing is fetched.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

from ddpz_lite.course.gym.bank import cards, sources

RUNNER = """
import io, json, sys, contextlib
errors = []
for lines in json.load(sys.stdin):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(lines, {"__name__": "__main__"})
        errors.append("")
    except BaseException as error:
        errors.append(f"{type(error).__name__}: {error}")
print(json.dumps(errors))
"""
SECONDS = 240


def raised(snippets: Sequence[str]) -> list[str]:
    """For each snippet, each run alone: "ImportError: cannot ...", or "" if it ran.

    Raises RuntimeError if the process that runs them dies.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUNNER],
        input=json.dumps(list(snippets)),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode != 0:
        raise RuntimeError(f"gallery: the process ended with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def assert_cited(claims: Mapping[str, tuple[str, str, str]]) -> None:
    """Print claims about sources, and below each our entry, which must not have the wrong word.

    claims: {a myth's id: (the wrong word in it, the key of our source, the field that corrects it)}
    """
    for number, (word, key, field) in claims.items():
        claim, ours = cards()[number].front.en, str(getattr(sources()[key], field))
        print(f"{number}  {claim}\n      ours: {ours}")
        assert word in claim and word not in ours, f"{number}: {word!r} in {ours!r}"
